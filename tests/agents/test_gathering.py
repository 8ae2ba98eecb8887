"""Collecting labels: a file a case, made once, the same ones whoever makes them."""

import numpy as np
import pytest

from rlplace.agents import gather as gathering
from rlplace.agents.cases import Case
from rlplace.agents.gather import gather
from rlplace.agents.labels import Labels
from rlplace.agents.problems.sources import CaseSource
from rlplace.problem.generate import random_problem


def stream(seed=0):
    """Every third case has one device and no labels."""

    def case(number):
        devices = 1 if number % 3 == 2 else 3
        return Case(f"case-{number}", "x", random_problem(seed + number, num_groups=8, num_devices=devices))

    return CaseSource("test stream", case, None)


def run(folder, *, cases=5, processes=1, report=lambda line: None, source=None, seed=7):
    source = stream() if source is None else source
    return gather(source, folder, cases=cases, states=6, moves=8, seed=seed, processes=processes, report=report)


def content(paths):
    return {path.name: Labels.load(path) for path in paths}


def assert_equal(one, two):
    assert one.keys() == two.keys()
    for name, labels in one.items():
        for field in ("features", "change", "group", "nodes", "edges", "edge_values"):
            np.testing.assert_array_equal(getattr(labels, field), getattr(two[name], field))


def test_files_are_made_once(tmp_path, monkeypatch):
    lines = []
    files = run(tmp_path, report=lines.append)
    assert [path.name for path in files] == ["00000.npz", "00001.npz", "00003.npz", "00004.npz"]
    assert "5/5" in lines[-1]
    before = {path: path.stat().st_mtime_ns for path in files}
    monkeypatch.setattr(gathering, "collect_labels", lambda *args, **options: pytest.fail("made twice"))
    assert run(tmp_path) == files and len(lines) == 2
    assert run(tmp_path, cases=2) == files[:2]
    assert {path: path.stat().st_mtime_ns for path in files} == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_cut_goes_on(tmp_path, monkeypatch, error):
    whole = run(tmp_path / "whole")
    made = gathering.collect_labels

    def cut(case, **options):
        if case.name == "case-3":
            raise error("cut")
        return made(case, **options)

    monkeypatch.setattr(gathering, "collect_labels", cut)
    with pytest.raises(error):
        run(tmp_path / "cut")
    assert len(list((tmp_path / "cut").glob("*.npz"))) == 2
    begun = []
    monkeypatch.setattr(gathering, "collect_labels", lambda case, **options: begun.append(case.name) or made(case, **options))
    files = run(tmp_path / "cut")
    assert begun == ["case-3", "case-4"]
    assert_equal(content(files), content(whole))


def test_half_a_file_is_made_again(tmp_path):
    """A process that was killed while it wrote leaves no file that looks whole."""
    (tmp_path / ".00000.npz.x.tmp").write_bytes(b"half")
    files = run(tmp_path, cases=2)
    assert content(files).keys() == {"00000.npz", "00001.npz"}


def test_two_processes_equal_one(tmp_path):
    assert_equal(content(run(tmp_path / "one")), content(run(tmp_path / "two", processes=2)))


def test_an_error_in_a_process_is_heard(tmp_path, monkeypatch):
    def broken(case, **options):
        raise ValueError("broken case")

    monkeypatch.setattr(gathering, "collect_labels", broken)
    with pytest.raises(ValueError, match="broken case"):
        run(tmp_path, processes=2)


def test_a_finite_source_gives_its_cases_several_times(tmp_path):
    cases = [Case("a", "x", random_problem(0, num_groups=8, num_devices=2)), Case("b", "x", random_problem(1, 10, 2))]
    files = run(tmp_path, cases=5, source=CaseSource("given", cases.__getitem__, 2))
    found = list(content(files).values())
    assert [len(labels.nodes) for labels in found] == [8, 10, 8, 10, 8]
    assert not np.array_equal(found[0].features, found[2].features)  # other plans of it


def test_the_seed_counts(tmp_path):
    one, two = (content(run(tmp_path / str(seed), cases=1, seed=seed))["00000.npz"] for seed in (1, 2))
    assert not np.array_equal(one.features, two.features)
