"""Problem files with their fabrics: read as written, refused in one line."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.cluster.collectives import collective_s
from rlplace.cluster.fabric import Fabric, fabrics_from_list, joined_curve
from rlplace.errors import InputError
from rlplace.problem import Problem, problem_from_dict, problem_to_dict
from rlplace.problem.generate import random_problem
from rlplace.records import plain

EXAMPLE = {
    "format": "rlplace.problem",
    "version": 1,
    "name": "toy",
    "samples_per_microbatch": 8,
    "devices": [
        {"name": "gpu0", "memory_bytes": 80000000000, "reserved_bytes": 600000000, "kind": "a100-80g"},
        {"name": "gpu1", "memory_bytes": None},
    ],
    "links": {
        "bandwidth_bytes_per_s": [[0, 2e11], [2e11, 0]],
        "latency_s": [[0, 1e-5], [1e-5, 0]],
        "channels": [[[], [0, 3]], [[1, 2], []]],
    },
    "groups": [
        {
            "name": "encoder.0", "resident_bytes": 4096, "weight_bytes": 1024, "gradient_bytes": 1024,
            "optimizer_bytes": 2048, "device": None,
        },
        {"name": "encoder.1", "resident_bytes": 64, "device": 1},
    ],
    "ops": [
        {"name": "encoder.0/forward", "group": 0, "phase": "forward", "time_s": [0.001, None], "temporary_bytes": 0},
        {"name": "encoder.1/forward", "group": 1, "phase": "forward", "time_s": 0.002, "kind": "linear", "dims": {"batch": 8}},
        {"name": "encoder.1/backward", "group": 1, "phase": "backward", "time_s": 0.002, "temporary_bytes": 5},
    ],
    "tensors": [
        {"producer": 0, "bytes": 1024, "consumers": [1, 2], "transfer_s": [[0, 1], [1, 0]]},
        {"owner": 0, "bytes": 2048, "consumers": [2]},
    ],
    "source": {"model": "hf:toy"},
}  # fmt: skip


def test_the_example_of_the_format_is_read_as_written() -> None:
    problem = problem_from_dict(copy.deepcopy(EXAMPLE))
    assert problem.devices[0].reserved_bytes == 600000000 and problem.devices[1].memory_bytes is None
    assert problem.links.effective_channels == (((), (0, 3)), ((1, 2), ()))
    assert problem.optimizer_bytes.tolist() == [2048, -1] and problem.group_device.tolist() == [-1, 1]
    assert np.isnan(problem.time_s[0, 1]) and problem.time_s[1].tolist() == [0.002, 0.002]
    assert problem.tensor_producer.tolist() == [0, -1] and problem.tensor_owner.tolist() == [-1, 0]
    assert problem.op_kind == ("", "linear", "") and problem.op_dims == {1: {"batch": 8}}
    assert problem.tensor_transfer_s[0].tolist() == [[0, 1], [1, 0]]
    assert problem_to_dict(problem_from_dict(problem_to_dict(problem))) == problem_to_dict(problem)


@pytest.mark.parametrize("seed", range(3))
def test_problems_survive_a_file(seed: int, tmp_path: Path) -> None:
    problem = random_problem(seed, 20, 3, unlike=True, memory_factor=1.5, hosts=2, shared_parameters=2, null_fraction=0.2)
    path = tmp_path / "x.problem.json"
    problem.save(path)
    again = Problem.load(path)
    assert again.fingerprint == problem.fingerprint and again.name == problem.name
    assert again.time_s.tobytes() == problem.time_s.tobytes()
    assert [p.name for p in tmp_path.iterdir()] == ["x.problem.json"]


def test_name_and_source_do_not_change_the_fingerprint() -> None:
    one, other = copy.deepcopy(EXAMPLE), copy.deepcopy(EXAMPLE)
    other["name"], other["source"] = "other", {}
    assert problem_from_dict(one).fingerprint == problem_from_dict(other).fingerprint
    other["ops"][0]["time_s"] = [0.0011, None]  # type: ignore[index]
    assert problem_from_dict(one).fingerprint != problem_from_dict(other).fingerprint


def _set(path: str, value: Any) -> dict[str, Any]:
    data: Any = copy.deepcopy(EXAMPLE)
    *way, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    target = data
    for part in way:
        target = target[part]
    target[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("ops", [], "the graph is empty"),
        ("devices", [], "at least one device"),
        ("devices/0/memory_bytes", 0, "memory_bytes must be positive"),
        ("devices/0/memory_bytes", 1, "exceeds memory_bytes"),
        ("devices/0/memory_bytes", 1e999, r"devices\[0\].memory_bytes: expected a whole number or null, found inf"),
        ("devices/1/name", "gpu0", "appears twice"),
        ("links/bandwidth_bytes_per_s", [[0, 1]], "expected a 2 x 2 matrix"),
        ("links/bandwidth_bytes_per_s/0/1", -1.0, "finite number from 0.001 up, found -1"),
        ("links/bandwidth_bytes_per_s/0/1", 1e-300, "finite number from 0.001 up"),
        ("links/latency_s/0/1", 1e999, "seconds, found inf"),
        ("links/latency_s/0/1", 1e30, r"up to 1e\+09 seconds, found 1e\+30"),
        ("links/channels", [[[], []]], "matrix of lists"),
        ("links/channels/0/1", [3, 3], "appears twice"),
        ("links/channels/0/1", [-1], "channels.*expected a whole number in 0"),
        ("groups/0/weight_bytes", 1, "parts add up to"),
        ("groups/1/weight_bytes", 64, "go together"),
        ("groups/0/weight_bytes", -1, r"groups\[0\].weight_bytes: expected a whole number in 0"),
        ("groups/1/device", 2, r"group_device\[1\]: 2 is outside -1..1"),
        ("groups/1/device", -1, "device: expected a whole number in 0"),
        ("groups/1/resident_bytes", -1, "resident_bytes: expected a whole number in 0"),
        (
            "groups/1/resident_bytes",
            1 << 61,
            "bytes: expected a whole number in 0..1152921504606846976, found 2305843009213693952",
        ),
        ("ops/0/time_s", -1.0, "is not in 0"),
        ("ops/0/time_s", 1e999, "is not in 0"),
        ("ops/0/time_s", [None, None], "null on every device"),
        ("ops/0/time_s", [1.0], "expected 2 values"),
        ("ops/0/phase", "forwards", "did you mean 'forward'"),
        ("ops/0/group", 2, r"op_group\[0\]: 2 is outside 0..1"),
        ("ops/0/group", 1 << 40, r"ops\[0\].group: expected a whole number in 0..2147483647"),
        ("ops/0/temporary_bytes", -1, "temporary_bytes: expected a whole number in 0"),
        ("tensors/0/consumers", [1, 1], "a consumer appears twice"),
        ("tensors/0/consumers", [3], r"consumers\[0\]: 3 is outside 0..2"),
        ("tensors/0/consumers", [0], "cyclic"),
        ("tensors/0/owner", 1, "exactly one of producer and owner"),
        ("tensors/0/producer", None, "exactly one of producer and owner"),
        ("tensors/0/producer", -1, "producer: expected a whole number in 0"),
        ("tensors/0/producer", 3, "3 is outside -1..2"),
        ("tensors/0/transfer_s", [[0, -1], [0, 0]], "seconds"),
        ("tensors/0/transfer_s", [[0]], "2 x 2 matrix"),
        ("tensors/0/bytes", 1 << 61, "bytes: expected a whole number in 0..1152921504606846976, found 2305843009213693952"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(path: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        problem_from_dict(_set(path, value))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_more_bytes_than_64_bits_can_count_are_refused() -> None:
    data = copy.deepcopy(EXAMPLE)
    data["groups"] = [{"name": f"group{i}", "resident_bytes": 1 << 60} for i in range(3)]
    with pytest.raises(InputError, match="together hold"):
        problem_from_dict(data)


def test_arrays_of_a_problem_are_read_only() -> None:
    problem = problem_from_dict(json.loads(json.dumps(EXAMPLE)))
    with pytest.raises(ValueError, match="read-only"):
        problem.time_s[0, 0] = 1.0


FABRIC = {
    "devices": [0, 1, 2],
    "basis": "fitted",
    "source": "somebody",
    "curves": [
        {"kind": "all_reduce", "group_size": 2, "algorithm": "ring", "pieces": [[0, 1e-5, 1e9], [1000000, 9e-6, 9.9e8]]},
        {"group_size": 3, "pieces": [[0, 1e-5, 2e9]]},
    ],
    "links": [[0, 1, 1e9], [1, 2, 2e9]],
}


def with_fabrics(fabrics):
    problem = random_problem(0, num_groups=6, num_devices=4)
    return dataclasses.replace(problem, links=dataclasses.replace(problem.links, fabrics=tuple(fabrics)))


def test_a_problem_carries_its_fabrics(tmp_path):
    cluster = Cluster.preset("v100:4")
    problem = with_fabrics(cluster.links.fabrics)
    problem.save(tmp_path / "x.problem.json")
    again = Problem.load(tmp_path / "x.problem.json")
    assert again.links.fabrics == problem.links.fabrics
    assert again.fingerprint == problem.fingerprint
    assert again.fingerprint != with_fabrics([]).fingerprint
    sizes = np.geomspace(1, 1e9, 20)
    for kind in ("all_reduce", "all_gather"):
        mailed, home = (collective_s(links, kind, range(4), sizes) for links in (again.links, cluster.links))
        assert mailed.tolist() == home.tolist()


def test_without_fabrics_the_file_has_no_such_key():
    assert "fabrics" not in problem_to_dict(with_fabrics([]))["links"]


def test_cluster_files_carry_fabrics(tmp_path):
    cluster = Cluster.preset("v100:8+h100:2")
    cluster.save(tmp_path / "c.toml")
    again = Cluster.load(tmp_path / "c.toml")
    assert again.links.fabrics == cluster.links.fabrics
    assert [f.basis for f in again.links.fabrics] == ["fitted", "fitted"]
    assert again.fingerprint == cluster.fingerprint


def test_fabrics_of_a_cluster_file_replace_those_of_the_rules(tmp_path):
    text = 'format = "rlplace.cluster"\nversion = 1\n' + "".join(
        f'[[device]]\nname = "g{i}"\nkind = "h100"\n' for i in range(2)
    )
    own = "[[fabric]]\ndevices = [0, 1]\n[[fabric.curves]]\ngroup_size = 2\npieces = [[0, 1e-5, 1e9]]\n"
    (tmp_path / "c.toml").write_text(text + own)
    links = Cluster.load(tmp_path / "c.toml").links
    assert collective_s(links, "all_reduce", (0, 1), 1e9) == pytest.approx(1.00001)
    (tmp_path / "c.toml").write_text(text + own.replace("[0, 1]", "[0, 2]"))
    with pytest.raises(InputError, match=r"must be in 0\.\.1"):
        Cluster.load(tmp_path / "c.toml")


def test_defaults_and_round_trip():
    (fabric,) = fabrics_from_list([FABRIC], 3)
    assert fabric.curves[1].kind == "all_reduce" and fabric.curves[1].algorithm == ""
    assert fabrics_from_list([plain(fabric)], 3) == (fabric,)


@pytest.mark.parametrize(
    "path, value, says",
    [
        (["devices"], [0], "devices: expected a list of 2 or more"),
        (["devices"], [0, 0], "devices: needs distinct"),
        (["devices"], [0, 4], "must be in 0..3"),
        (["basis"], "guess", "unknown basis"),
        (["source"], 3, "source: expected text, found 3"),
        (["curves"], [], "curves: expected a list of 1 to 256"),
        (["curves", 1, "group_size"], 2, "two curves"),
        (["curves", 1, "group_size"], 1, "group_size: expected a whole number in 2"),
        (["curves", 0, "kind"], "allreduce", "did you mean 'all_reduce'"),
        (["curves", 0, "pieces"], [], "pieces: expected a list of 1 to 64"),
        (["curves", 0, "pieces", 0], [0, 1], "3 values: from_bytes, latency_s, bus_bytes_per_s, found"),
        (["curves", 0, "pieces", 0, 0], 5, "first piece starts at 0"),
        (["curves", 0, "pieces", 0, 1], -1e-5, "time falls"),
        (["curves", 0, "pieces", 0, 2], 0, "expected a number above 0"),
        (["curves", 0, "pieces", 1, 1], -1e-3, "never takes less"),
        (["curves", 0, "pieces", 1, 0], 0, "later ones above"),
        (["links", 0], [0, 3, 1e9], "does not join"),
        (["links", 0], [0, 1, -1e9], "links.*: expected a number above 0"),
        (["links", 0], [0, 1], "links.*: expected a list of 3 values"),
    ],
)
def test_wrong_fabrics_are_refused_in_one_line(path, value, says):
    data = copy.deepcopy(FABRIC)
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InputError, match=says) as caught:
        fabrics_from_list([data], 4)
    assert "\n" not in str(caught.value)
    problem = problem_to_dict(with_fabrics([]))
    problem["links"]["fabrics"] = [data]
    with pytest.raises(InputError, match=says):
        problem_from_dict(problem)


def test_the_record_is_checked_too():
    curve = joined_curve(2, 1e-5, [(0, 1e9)])
    with pytest.raises(InputError, match=r"fabrics\[0\].devices: must be in 0..3"):
        with_fabrics([Fabric((0, 9), (curve,))])
