"""Fabrics in problem and cluster files: round trips, and one line for everything that is wrong."""

import copy
import dataclasses

import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.errors import InputError
from rlplace.problem import Problem, problem_from_dict, problem_to_dict
from rlplace.problem.collectives import collective_s
from rlplace.problem.fabric import Fabric, fabrics_from_list, joined_curve
from rlplace.problem.generate import random_problem
from rlplace.records import plain

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
        (["curves", 1, "group_size"], 2.5, "whole number"),
        (["curves", 0, "kind"], "allreduce", "did you mean 'all_reduce'"),
        (["curves", 0, "kind"], ["all_reduce"], "kind: expected one of all_gather"),
        (["curves", 0, "pieces"], [], "pieces: expected a list of 1 to 64"),
        (["curves", 0, "pieces", 0], [0, 1], "3 values: from_bytes, latency_s, bus_bytes_per_s, found"),
        (["curves", 0, "pieces", 0, 0], 5, "first piece starts at 0"),
        (["curves", 0, "pieces", 0, 1], -1e-5, "time falls"),
        (["curves", 0, "pieces", 0, 2], 0, "expected a number above 0"),
        (["curves", 0, "pieces", 0, 2], float("nan"), "found nan"),
        (["curves", 0, "pieces", 0, 2], 10**400, "too large"),
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
    with pytest.raises(InputError, match=r"links: fabrics\[0\]"):
        with_fabrics([Fabric((0, 9), (curve,))])
