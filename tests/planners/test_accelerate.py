"""The planner `accelerate`: the real library's map on the skeleton, repair, offloading, names."""

import sys
import warnings

import numpy as np
import pytest

from rlplace.errors import InputError, MissingError
from rlplace.planners import get_planner
from rlplace.planners.accelerate import OFFLOADED, devices_of_map, infer_map, leaf_paths, skeleton
from rlplace.problem import Problem, problem_from_dict, problem_to_dict
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

library = pytest.importorskip("accelerate")


def renamed(problem: Problem, names: list[str]) -> Problem:
    data = problem_to_dict(problem)
    for group, name in zip(data["groups"], names, strict=True):
        group["name"] = name
    return problem_from_dict(data)


NAMES = [
    "embed",
    "layers.0.attention",
    "layers.0.mlp",
    "layers.0",
    "layers.1.attention",
    "layers.1.mlp",
    "layers.1.mlp#2",
    "head",
]


def tree() -> Problem:
    return renamed(random_problem(2, 8, 3, memory_factor=2.0), NAMES)


def test_the_map_is_that_of_a_model_of_the_same_tree_and_sizes():
    """A model written by hand, with its modules in the same order, gets the same devices from the library."""
    import torch
    from torch import nn

    problem = tree()

    def layer(size: int) -> nn.Module:
        module = nn.Module()
        if size:
            weight = torch.empty(int(size), dtype=torch.uint8, device="meta")
            module.weight = nn.Parameter(weight, requires_grad=False)
        return module

    sizes = dict(zip(NAMES, problem.weight_bytes.tolist(), strict=True))
    model = nn.Module()
    model.embed, model.layers, model.head = (
        layer(sizes["embed"]),
        nn.ModuleList([nn.Module(), nn.Module()]),
        layer(sizes["head"]),
    )
    model.layers[0].attention = layer(sizes["layers.0.attention"])
    model.layers[0].mlp = layer(sizes["layers.0.mlp"])
    model.layers[0].rest = layer(sizes["layers.0"])
    model.layers[1].attention = layer(sizes["layers.1.attention"])
    model.layers[1].mlp = nn.Sequential(layer(sizes["layers.1.mlp"]), layer(sizes["layers.1.mlp#2"]))
    paths = [
        "embed", "layers.0.attention", "layers.0.mlp", "layers.0.rest", "layers.1.attention", "layers.1.mlp.0",
        "layers.1.mlp.1", "head",
    ]  # fmt: skip
    shares = []
    for share in (0.1, 0.2, 0.3, 0.5, 1.0):
        limits = {d: int(share * limit) for d, limit in enumerate(problem.memory_limit_bytes)}
        theirs = library.infer_auto_device_map(model, max_memory=dict(limits))
        ours = devices_of_map(problem, infer_map(problem, share)).tolist()
        for path, device in zip(paths, ours, strict=True):
            found = max((key for key in theirs if not key or f"{path}.".startswith(f"{key}.")), key=len)
            assert theirs[found] == ("disk" if device == OFFLOADED else device), (share, path)
        shares.append(len(set(ours)))
    assert max(shares) >= 3  # otherwise the comparison would say little


def test_the_skeleton_holds_the_weights_once():
    problem = tree()
    sizes = {name: parameter.numel() for name, parameter in skeleton(problem).named_parameters()}
    paths = leaf_paths(problem)
    assert paths[:4] == ["embed.#0", "layers.0.attention.#1", "layers.0.mlp.#2", "layers.0.#3"]
    for path, size in zip(paths, problem.weight_bytes.tolist(), strict=True):
        assert sizes.get(f"{path}.weight", 0) == size
    assert all(parameter.device.type == "meta" for parameter in skeleton(problem).parameters())


def test_shared_parameters_are_tied():
    problem = random_problem(5, 12, 2, shared_parameters=2)
    model = skeleton(problem)
    assert sum(p.numel() for p in model.parameters()) == int(problem.weight_bytes.sum())
    twice = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len(twice) > len(list(model.named_parameters()))
    assert (devices_of_map(problem, infer_map(problem)) == 0).all()


def test_ties_that_the_library_cannot_follow():
    problem = random_problem(577, 8, 2, shape="branchy", shared_parameters=3)
    with pytest.raises(InputError, match="tied in a chain"):
        get_planner("accelerate")(problem)


def test_names_that_modules_already_have_and_names_without_dots():
    names = ["forward", "a", "a#2", "train.eval", "#", "float", "a.b", "x"]
    problem = renamed(random_problem(2, 8, 3, memory_factor=2.0), names)
    assert len(set(leaf_paths(problem))) == 8
    assert get_planner("accelerate")(problem).predicted.feasible


def test_weights_that_fit_may_not_train_and_are_repaired():
    problem = random_problem(3, 40, 3, memory_factor=1.4)
    plan = get_planner("accelerate")(problem)
    report = plan.predicted.accelerate
    assert report["offloaded_groups"] == 0 and not report["raw_feasible"]
    raw = devices_of_map(problem, report["device_map"])
    assert not simulate(problem, raw).feasible  # gradients, optimizer state and activations are not in the map
    assert simulate(problem, plan).feasible


def test_what_goes_to_disk_is_placed_all_the_same():
    problem = random_problem(3, 40, 3, memory_factor=2.0)
    plan = get_planner("accelerate")(problem, memory_share=0.02)
    report = plan.predicted.accelerate
    assert report["offloaded_groups"] == int((devices_of_map(problem, report["device_map"]) == OFFLOADED).sum()) > 0
    assert not report["raw_feasible"]
    assert simulate(problem, plan).feasible
    assert plan.to_dict()["predicted"]["accelerate"] == report  # plain data: it is saved with the plan


def test_raw_feasible_is_what_the_simulator_says():
    found = set()
    for seed in range(6):
        problem = random_problem(seed, 16, 3, memory_factor=2.5)
        for share in (0.15, 0.25):
            plan = get_planner("accelerate")(problem, memory_share=share)
            raw = devices_of_map(problem, plan.predicted.accelerate["device_map"])
            fits = bool((raw != OFFLOADED).all()) and simulate(problem, np.maximum(raw, 0)).feasible
            assert plan.predicted.accelerate["raw_feasible"] == fits
            if fits:
                assert plan.device_of_group.tolist() == raw.tolist()
            found.add(fits)
    assert found == {True, False}


def test_the_library_does_not_warn_about_devices(caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_map(tree())
    assert not caplog.records


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingError, match="pip install"):
        get_planner("accelerate")(random_problem(0, 4, 2))


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_bad_share_is_refused(share):
    with pytest.raises(InputError, match="memory_share"):
        get_planner("accelerate")(random_problem(0, 4, 2), memory_share=share)
