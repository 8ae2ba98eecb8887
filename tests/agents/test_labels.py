"""Priced moves: each is what the simulator says; collected in a file a case, made once, the same whoever makes them."""

from dataclasses import fields, replace

import numpy as np
import pytest

from rlplace.agents.move_ranking import PricedMoves, collect_moves
from rlplace.agents.pretraining import collect_dataset
from rlplace.agents.problems.cases import ProblemCase
from rlplace.agents.problems.sources import CaseSource
from rlplace.cluster.links import Links
from rlplace.envs.guide.features import FEATURES
from rlplace.envs.guide.guide import Guide
from rlplace.problem.build import build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
from tests.toys import memory_tight_pair


def descent_s(problem, plan):
    """Returns the step time of a plan, raised by memory overflow; from the timeline alone."""
    line = simulate(problem, plan)
    if line.step_time_s is None:
        return np.inf
    over = sum(
        max(0, int(peak) - device.memory_bytes) / device.memory_bytes
        for peak, device in zip(line.peak_memory_bytes, problem.devices, strict=True)
        if device.memory_bytes is not None
    )
    return line.step_time_s * (1.0 + 3.0 * (over + 0.02) if over else 1.0)


@pytest.mark.parametrize(
    "problem",
    [
        random_problem(0, num_groups=14, num_devices=3),
        random_problem(1, num_groups=12, num_devices=3, memory_factor=1.3),
        random_problem(2, num_groups=10, num_devices=2, unlike=True, null_fraction=0.3),
        random_problem(3, num_groups=10, num_devices=4, hosts=2, memory_factor=2.0),
    ],
)
def test_every_label_is_what_the_move_does(problem, monkeypatch):
    priced = []

    def price(self, plan, which):
        moves = [tuple(part.copy() for part in self.move(k)) for k in which]
        priced.append((plan.copy(), moves, self.table[which].copy()))
        return wanted(self, plan, which)

    wanted = Guide.price
    monkeypatch.setattr(Guide, "price", price)
    labels = collect_moves(ProblemCase("x", "x", problem), states=12, moves=16, seed=5)
    assert labels is not None and 8 <= len(labels.change) == len(priced) <= 12
    assert len({plan.tobytes() for plan, _, _ in priced}) > 5
    for row, (plan, moves, table) in enumerate(priced):
        before = descent_s(problem, plan)
        assert np.isnan(labels.change[row, len(moves) :]).all()
        assert not labels.features[row, len(moves) :].any()
        np.testing.assert_array_equal(labels.features[row, : len(moves)], table.astype(np.float16))
        for k, (groups, targets) in enumerate(moves):
            after = plan.copy()
            assert problem.group_allowed[groups, targets].all() and (plan[groups] != targets).all()
            after[groups] = targets
            assert labels.change[row, k] == pytest.approx(np.log(descent_s(problem, after) / before), abs=1e-6)


def test_equal_for_a_seed_and_different_for_another(tmp_path):
    case = ProblemCase("x", "x", random_problem(4, num_groups=12, num_devices=3))
    one, two, other = (collect_moves(case, states=6, moves=12, seed=seed) for seed in (1, 1, 2))
    one.save(tmp_path / "one.safetensors")
    loaded = PricedMoves.load(tmp_path / "one.safetensors")
    for item in fields(PricedMoves):
        np.testing.assert_array_equal(getattr(one, item.name), getattr(two, item.name))
        np.testing.assert_array_equal(getattr(one, item.name), getattr(loaded, item.name))
        assert getattr(one, item.name).dtype == getattr(loaded, item.name).dtype
    assert not np.array_equal(one.features, other.features)
    assert list(tmp_path.iterdir()) == [tmp_path / "one.safetensors"]


def without_link(problem):
    """Removes the link from device 1 to device 0."""
    bandwidth = problem.links.bandwidth_bytes_per_s.copy()
    bandwidth[1, 0] = 0.0
    return replace(problem, links=Links(bandwidth, problem.links.latency_s))


@pytest.mark.slow
def test_moves_that_need_a_missing_link_are_very_bad():
    labels = collect_moves(
        ProblemCase("x", "x", without_link(random_problem(0, num_groups=8, num_devices=2))), states=8, moves=16, seed=0
    )
    known = labels.change[np.isfinite(labels.change)]
    assert known.max() == pytest.approx(np.log(1e3), rel=1e-6)
    assert (known > 5).sum() > 3 and (known < 1).sum() > 3


def test_cases_without_labels():
    for problem in (
        random_problem(0, num_groups=6, num_devices=1),
        replace(memory_tight_pair().problem, resident_bytes=np.array([60, 60])),  # a bound rules it out
        build_problem("no link", time_s=[[1, np.nan], [np.nan, 1]], tensors=[], memory_bytes=[None, None]),  # nothing can move
    ):
        assert collect_moves(ProblemCase("x", "x", problem), states=4, moves=8, seed=0) is None


def test_a_case_that_fits_nowhere_still_teaches():
    """No plan fits, but some overflow less than others."""
    problem = random_problem(1, num_groups=10, num_devices=2, memory_factor=1.0)
    limit = int(problem.resident_bytes.sum()) // 2 + int(problem.resident_bytes.max())
    problem = replace(problem, devices=tuple(replace(device, memory_bytes=limit) for device in problem.devices))
    labels = collect_moves(ProblemCase("x", "x", problem), states=4, moves=16, seed=0)
    if labels is not None:
        assert np.isfinite(labels.change).any()
        assert (labels.features[..., FEATURES.index("plan_overflow")] > 0).any()


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
def test_steps_that_take_no_time():
    """Nothing can be gained, and nothing is divided by zero."""
    problem = build_problem("idle", time_s=[[0.0, 0.0]] * 4, tensors=[], memory_bytes=[None, None])
    assert collect_moves(ProblemCase("x", "x", problem), states=4, moves=8, seed=0) is None
    half = build_problem("half", time_s=[[0.0, 1.0]] * 4, tensors=[], memory_bytes=[None, None])
    labels = collect_moves(ProblemCase("x", "x", half), states=4, moves=8, seed=0)
    assert labels is None or not np.isnan(labels.change).all(axis=1).any()


def stream(seed=0):
    """Returns cases of which every third has one device and no labels."""

    def case(number):
        devices = 1 if number % 3 == 2 else 3
        return ProblemCase(f"case-{number}", "x", random_problem(seed + number, num_groups=8, num_devices=devices))

    return CaseSource("test stream", case, None)


def run(folder, *, cases=5, processes=1, report=lambda line: None, source=None, seed=7, collect=collect_moves):
    sizes = {"cases": cases, "states": 6, "moves": 8, "seed": seed, "processes": processes}
    return collect_dataset(stream() if source is None else source, folder, **sizes, report=report, collect=collect)


def content(paths):
    return {path.name: PricedMoves.load(path) for path in paths}


def assert_equal(one, two):
    assert one.keys() == two.keys()
    for name, labels in one.items():
        for field in ("features", "change"):
            np.testing.assert_array_equal(getattr(labels, field), getattr(two[name], field))


def test_files_are_made_once(tmp_path):
    lines = []
    files = run(tmp_path, report=lines.append)
    assert [path.name for path in files] == ["00000.safetensors", "00001.safetensors", "00003.safetensors", "00004.safetensors"]
    assert "5/5" in lines[-1]
    before = {path: path.stat().st_mtime_ns for path in files}
    never = {"collect": lambda *args, **options: pytest.fail("made twice")}
    assert run(tmp_path, **never) == files and len(lines) == 2
    assert run(tmp_path, cases=2, **never) == files[:2]
    assert {path: path.stat().st_mtime_ns for path in files} == before


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_cut_goes_on(tmp_path, error):
    whole = run(tmp_path / "whole")

    def cut(case, **options):
        if case.name == "case-3":
            raise error("cut")
        return collect_moves(case, **options)

    with pytest.raises(error):
        run(tmp_path / "cut", collect=cut)
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) == 2
    begun = []
    files = run(tmp_path / "cut", collect=lambda case, **options: begun.append(case.name) or collect_moves(case, **options))
    assert begun == ["case-3", "case-4"]
    assert_equal(content(files), content(whole))


def test_half_a_file_is_made_again(tmp_path):
    """A process that was killed while it wrote leaves no file that looks whole."""
    (tmp_path / ".00000.safetensors.x.tmp").write_bytes(b"half")
    files = run(tmp_path, cases=2)
    assert content(files).keys() == {"00000.safetensors", "00001.safetensors"}


def test_two_processes_equal_one(tmp_path):
    assert_equal(content(run(tmp_path / "one")), content(run(tmp_path / "two", processes=2)))


def test_an_error_in_a_process_is_heard(tmp_path):
    def broken(case, **options):
        raise ValueError("broken case")

    with pytest.raises(ValueError, match="broken case"):
        run(tmp_path, processes=2, collect=broken)


def test_a_finite_source_gives_its_cases_several_times(tmp_path):
    cases = [
        ProblemCase("a", "x", random_problem(0, num_groups=8, num_devices=2)),
        ProblemCase("b", "x", random_problem(1, 10, 2)),
    ]
    files = run(tmp_path, cases=5, source=CaseSource("given", cases.__getitem__, 2))
    found = list(content(files).values())
    assert len(found) == 5 and len({labels.features.tobytes() for labels in found}) == 5
