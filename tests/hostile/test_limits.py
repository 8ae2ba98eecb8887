"""The limits on sizes: stated in one module, large enough for what is documented, and each kept by its loader."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace import limits
from rlplace.cluster import Cluster
from rlplace.cluster import file as cluster_file
from rlplace.errors import InputError
from rlplace.files import parse_json, read_json
from rlplace.model import OpGraph
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem, problem_from_dict, problem_to_dict
from tests.hostile.loaders import TARGETS


def refused(load, message):
    with pytest.raises(InputError, match=message) as caught:
        load()
    assert str(caught.value).isprintable() and len(str(caught.value)) < 300


def test_what_is_documented_fits():
    """Problems of 204,000 ops on 512 devices, op graphs of a million ops, 1,024 devices with links written out."""
    assert limits.OPS >= 1_000_000 and limits.TENSORS >= 2_000_000 and limits.EDGES >= 4_000_000
    assert 204_000 * 512 <= limits.OP_TIMES
    assert limits.PROBLEM_DEVICES >= 4096 and limits.DEVICES >= 100_000
    # A problem of 204,000 ops takes about 250 bytes and 15 values an op; an op graph of a million, 300 bytes and 30 values.
    assert 204_000 * (250 + 22 * 64) < limits.FILE_BYTES and 204_000 * (15 + 64) < limits.FILE_BYTES // limits.BYTES_PER_VALUE
    assert 1_000_000 * 300 < limits.FILE_BYTES and 1_000_000 * 30 < limits.FILE_BYTES // limits.BYTES_PER_VALUE
    # Bandwidth, latency and two channels of every pair of devices.
    assert 1024**2 * (14 + 8 + 16) < limits.CLUSTER_BYTES
    assert max(limits.FORMAT_BYTES.values()) <= limits.FILE_BYTES


@pytest.mark.parametrize("kind", sorted(limits.FORMAT_BYTES))
def test_files_by_format(tmp_path, monkeypatch, kind):
    path = tmp_path / "x.json"
    text = json.dumps({"format": kind, "version": 1, "x": "y" * 100})
    path.write_text(text)
    monkeypatch.setitem(limits.FORMAT_BYTES, kind, 16 * len(text))
    assert read_json(path, kind, 1) == {"x": "y" * 100}
    monkeypatch.setitem(limits.FORMAT_BYTES, kind, len(text) - 1)
    refused(lambda: read_json(path, kind, 1), f"the limit is {len(text) - 1}")


def test_values_of_a_json_text():
    text = json.dumps([[0] * 9, {"a": 1}])
    assert parse_json(text, "x", most=12 * limits.BYTES_PER_VALUE)
    refused(lambda: parse_json(text, "x", most=11 * limits.BYTES_PER_VALUE), "holds about 12 values, the limit is 11")


def test_cluster_files(seeds, tmp_path, monkeypatch):
    path = seeds / "saved.toml"
    size = path.stat().st_size
    monkeypatch.setattr(cluster_file, "CLUSTER_BYTES", size)
    found = Cluster.load(path)
    found.save(tmp_path / "c.toml")
    monkeypatch.setattr(cluster_file, "CLUSTER_BYTES", size - 1)
    refused(lambda: Cluster.load(path), f"the limit is {size - 1}")
    refused(lambda: found.save(tmp_path / "d.toml"), "interconnect")
    assert not (tmp_path / "d.toml").exists()


@pytest.mark.parametrize("name", ["OPS", "TENSORS", "EDGES", "OP_TIMES"])
def test_counts_of_a_problem(seeds, monkeypatch, name):
    problem = Problem.load(seeds / "toy.problem.json")
    count = {
        "OPS": problem.num_ops,
        "TENSORS": problem.num_tensors,
        "EDGES": len(problem.consumers),
        "OP_TIMES": problem.num_ops * problem.num_devices,
    }[name]
    monkeypatch.setattr(limits, name, count)
    assert Problem.load(seeds / "toy.problem.json").fingerprint == problem.fingerprint
    monkeypatch.setattr(limits, name, count - 1)
    refused(lambda: Problem.load(seeds / "toy.problem.json"), f"{count} .*, the limit is {count - 1}")
    refused(lambda: dataclasses.replace(problem), f"the limit is {count - 1}")


def test_a_short_text_that_asks_for_a_large_matrix():
    """Times that are one number are one per device: the product counts, before it is made."""
    data = problem_to_dict(problem_of(1))
    data["devices"] = [{"name": f"d{i}", "memory_bytes": None} for i in range(limits.PROBLEM_DEVICES)]
    data["ops"] = [{"name": str(i), "group": 0, "phase": "forward", "time_s": 1.0} for i in range(limits.OP_TIMES // 4096 + 1)]
    refused(lambda: problem_from_dict(data), "ops times devices, the limit is 134217728")


def problem_of(ops):
    from rlplace.problem.build import build_problem

    return build_problem("x", time_s=np.ones((ops, 1)).tolist(), tensors=[], memory_bytes=[None])


@pytest.mark.parametrize("name", ["OPS", "TENSORS", "EDGES"])
def test_counts_of_a_graph(seeds, monkeypatch, name):
    graph = OpGraph.load(seeds / "net.graph.json")
    count = {"OPS": graph.num_ops, "TENSORS": graph.num_tensors, "EDGES": len(graph.consumers)}[name]
    monkeypatch.setattr(limits, name, count)
    OpGraph.load(seeds / "net.graph.json")
    monkeypatch.setattr(limits, name, count - 1)
    refused(lambda: OpGraph.load(seeds / "net.graph.json"), f"the limit is {count - 1}")


@pytest.mark.parametrize(
    ("file", "old"), [("toy.problem.json", "gpu0"), ("net.graph.json", "0/linear"), ("joined.problem.json", "a/forward")]
)
def test_names(seeds, tmp_path, file, old):
    load = OpGraph.load if file.endswith("graph.json") else Problem.load
    text = (seeds / file).read_text()
    for length, fits in ((limits.NAME_LENGTH, True), (limits.NAME_LENGTH + 1, False)):
        path = tmp_path / file
        path.write_text(text.replace(f'"{old}"', json.dumps("n" * length)))
        assert text != path.read_text()
        if fits:
            load(path)
        else:
            refused(lambda path=path: load(path), "name has 4097 characters, the limit is 4096")


def test_micro_batches(seeds, tmp_path):
    text = (seeds / "chain.plan.json").read_text()
    for count, fits in ((limits.MICROBATCHES, True), (limits.MICROBATCHES + 1, False), (0, False)):
        path, old = tmp_path / "x.plan.json", '"batch": 8, "microbatch": [4], "microbatches": [2]'
        assert old in text
        path.write_text(text.replace(old, f'"batch": {max(4 * count, 1)}, "microbatch": [4], "microbatches": [{count}]'))
        if fits:
            assert PlacementPlan.load(path).strategy.pipelines[0].microbatches == (count,)
        else:
            refused(lambda path=path: PlacementPlan.load(path), r"microbatches\[0\]: expected a whole number in 1\.\.65536")


def test_modules_of_a_zoo_model():
    from rlplace.model.zoo import load_model

    refused(lambda: load_model("zoo:mlp,layers=4097", batch=1, seq=1), "option layers must be from 1 to 4096")
    refused(lambda: load_model("zoo:mlp,layers=" + "9" * 4000, batch=1, seq=1), "option layers must be from 1 to 4096")


NAMES = (
    "problem", "plan", "op graph", "costs", "measurement", "timings", "batch curve", "cases", "agent config", "training facts",
)  # fmt: skip
FREE = {
    "source", "environment", "details", "facts", "extra", "training", "made_by", "capture", "settings", "torch", "scheduler",
    "format", "version",
}  # fmt: skip
"""Keys under which anything may stand, and the header."""
MAPS = {"dims", "kinds", "op_dims", "parts", "predicted"}
"""Keys of objects whose own keys are names or numbers, or that take more than is known."""


def refused_file(name: str, scratch: Path, file: str, content: Any, message: str | None = None) -> None:
    """Checks that a loader refuses a file with one line that names it, where what is loaded is a file of its own."""
    path = scratch / file
    before = path.read_text()
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    try:
        with pytest.raises(InputError, match=message) as caught:
            TARGETS[name].use(path, scratch)
    finally:
        path.write_text(before)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert path.name in str(caught.value) or name == "cases"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": None}, "expected format"),
        ({"format": "rlplace.other"}, "expected format"),
        ({"format": 3}, "expected format"),
        ({"version": 99}, "upgrade rlplace"),
        ({"version": True}, "version must be a whole number from 1 up"),
        ({"version": "1"}, "version must be a whole number from 1 up"),
        ({"version": 0}, "version must be a whole number from 1 up"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_headers(name, scratch, change, message):
    file = TARGETS[name].files[0]
    data = json.loads((scratch / file).read_text()) | change
    refused_file(name, scratch, file, {key: value for key, value in data.items() if value is not None}, message)


@pytest.mark.parametrize("name", NAMES)
def test_texts_that_are_no_such_file(name, scratch):
    file = TARGETS[name].files[0]
    good = (scratch / file).read_text().strip()
    for text in ("[]", "null", '"x"'):
        refused_file(name, scratch, file, text, "expected a JSON object")
    for text in (good[: len(good) // 2], ""):
        refused_file(name, scratch, file, text, "not valid JSON")
    refused_file(name, scratch, file, '{"version": 1, ' + good[1:], "appears twice")
    refused_file(name, scratch, file, '{"x": NaN, ' + good[1:], "NaN")
    refused_file(name, scratch, file, "[" * 100_000, "nested too deeply")


def places(data: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields ways to the values whose types a format says, and the values; of a list the first."""
    yield way, data
    items = data.items() if isinstance(data, dict) else list(enumerate(data))[:1] if isinstance(data, list) else ()
    for key, value in items:
        if key not in FREE:
            yield from places(value, (*way, key))


def changed(data: Any, way: tuple[Any, ...], value: Any) -> Any:
    if not way:
        return value
    data = copy.copy(data)
    data[way[0]] = changed(data[way[0]], way[1:], value)
    return data


@pytest.mark.parametrize(("name", "file"), [(name, file) for name in NAMES for file in TARGETS[name].files])
def test_unknown_keys_and_values_of_another_type(name, file, scratch):
    data = json.loads((scratch / file).read_text())
    for way, value in places(data):
        if isinstance(value, dict) and (not way or way[-1] not in MAPS) and (len(way) < 2 or way[-2] not in MAPS - {"kinds"}):
            refused_file(name, scratch, file, changed(data, way, value | {"unheard_of": 1}), "unheard_of")
        if not way:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        for wrong in (
            ("5", True) if number else ({"x": [3]},) if value is None else (3, [[3]] if isinstance(value, dict) else {})
        ):
            refused_file(name, scratch, file, changed(data, way, wrong))
