"""What Hugging Face's accelerate would do: its own `infer_auto_device_map`, on a skeleton of the model.

Problem: fit the weights, nothing else. accelerate walks the modules in the order of their definition, fills the first
device, then the next; a module that does not fit is split into its children. On the first device it leaves room for the
largest layer.

Software: `accelerate.infer_auto_device_map` (Hugging Face), called as it is; optional, ``pip install "rlplace[accelerate]"``.

How: the skeleton is a tree of empty modules on the meta device, rebuilt from the groups' names, which are module paths: every
group is a leaf below its module, with one parameter of its weight's bytes. A parameter that other groups read is tied, as in
the model. Names without dots make a flat list in group order. Device limits are given as they are in the problem.

Departures: none in the map. It knows weights only, while a training step also holds gradients, optimizer state and activations,
so that it often does not fit: the plan's ``predicted.accelerate`` says whether the raw map did, and the shared repair then
makes it fit, as for every planner. What accelerate would leave on disk for want of room has no device here; such a group goes
where most room is left by footprint, and the raw map counts as not fitting.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from rlplace.errors import InputError, MissingError, show
from rlplace.plan import PlacementPlan
from rlplace.planners.common.evaluate import Assignment, Deadline, Evaluator, Execution
from rlplace.planners.common.floor import best_of, finish
from rlplace.planners.common.groupgraph import group_graph
from rlplace.planners.common.shortage import check_possible
from rlplace.problem import Problem

OFFLOADED = -1
"""Device of a group that accelerate leaves on disk."""


def accelerate(
    problem: Problem, *, seed: int = 0, time_limit_s: float | None = None, memory_share: float = 1.0, **execution: Any
) -> PlacementPlan:
    """The plan of accelerate's device map, repaired where it does not fit.

    Args:
        problem: The problem.
        seed: Not used.
        time_limit_s: For the repair.
        memory_share: Share of every device's memory that accelerate is told of; people lower it by hand to leave room for
            what it does not count.
        **execution: Fields of `rlplace.planners.common.evaluate.Execution`.

    Returns:
        The plan; its ``predicted.accelerate`` holds ``raw_feasible``, whether the map fitted before the repair;
        ``offloaded_groups``, how many groups it left on disk; and ``device_map`` as accelerate returned it, where ``#3`` is
        what group 3 has of its module.

    Raises:
        MissingError: accelerate is not installed.
        InputError: The library fails on this model's ties.
        InfeasibleError: No plan that fits was found.
    """
    if not 0.0 < memory_share <= 1.0:
        raise InputError(f"accelerate: memory_share must be above 0 and at most 1, found {show(memory_share)}")
    check_possible(problem)
    run = Execution(**execution)
    by_path = infer_map(problem, memory_share)
    raw = devices_of_map(problem, by_path)
    offloaded = raw == OFFLOADED
    deadline = Deadline(time_limit_s)
    evaluator = Evaluator(problem, run)
    devices = _place_offloaded(problem, raw)
    legal = problem.group_allowed[np.arange(problem.num_groups), devices].all()
    fits = bool(not offloaded.any() and legal and evaluator.score(devices).feasible)
    answer = best_of(problem, [devices], evaluator, deadline)
    plan = finish(problem, answer, run, planner="accelerate", seed=seed)
    report = {
        "raw_feasible": fits,
        "offloaded_groups": int(offloaded.sum()),
        "device_map": {path: device if isinstance(device, str) else int(device) for path, device in by_path.items()},
    }
    return plan.with_predicted(plan.predicted.told(accelerate=report))


def infer_map(problem: Problem, memory_share: float = 1.0) -> dict[str, int | str]:
    """Calls the library: device number, or ``"disk"``, by path in the skeleton; ``""`` is the whole model.

    Raises:
        MissingError: accelerate is not installed.
        InputError: The library fails on this model's ties.
    """
    try:
        from accelerate import infer_auto_device_map
    except ImportError:
        raise MissingError('planner accelerate needs accelerate; install it: pip install "rlplace[accelerate]"') from None
    logger = logging.getLogger("accelerate.utils.modeling")
    level = logger.level
    # It warns that this machine does not have the devices that it is asked about.
    logger.setLevel(logging.ERROR)
    try:
        by_path: dict[str, int | str] = infer_auto_device_map(skeleton(problem), max_memory=_max_memory(problem, memory_share))
    except IndexError:  # it looks for the partner of a tie among the modules that it has not placed yet
        raise InputError(
            "accelerate: its infer_auto_device_map cannot follow parameters that are tied in a chain, one module to a second "
            "and that one to a third by another parameter; use another planner"
        ) from None
    finally:
        logger.setLevel(level)
    return dict(by_path)


def leaf_paths(problem: Problem) -> list[str]:
    """Where each group's leaf sits in the skeleton: its module path, then ``#`` and the group's number.

    Names of later groups of a module end in ``#2`` and so on. A part that every module has as a method, as names of other
    graphs may, gets an underscore.
    """
    from torch import nn

    taken = set(dir(nn.Module()))
    paths = []
    for number, name in enumerate(problem.group_names):
        parts = [part for part in name.partition("#")[0].split(".") if part]
        paths.append(".".join([*(f"{part}_" if part in taken else part for part in parts), f"#{number}"]))
    return paths


def skeleton(problem: Problem) -> Any:
    """An `nn.Module` on the meta device with a leaf for each group; see the module docstring."""
    import torch
    from torch import nn

    def parameter(size: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(size, dtype=torch.uint8, device="meta"), requires_grad=False)

    root = nn.Module()
    modules = {"": root}
    leaves = []
    for path in leaf_paths(problem):
        above = ""
        for part in path.split("."):
            here = f"{above}.{part}" if above else part
            if here not in modules:
                modules[here] = nn.Module()
                modules[above].add_module(part, modules[here])
            above = here
        leaves.append(modules[path])
    own = np.where(problem.weight_bytes >= 0, problem.weight_bytes, problem.resident_bytes)
    for tensor in np.flatnonzero(problem.tensor_owner >= 0):
        owner, size = int(problem.tensor_owner[tensor]), int(problem.tensor_bytes[tensor])
        shared = parameter(size)
        own[owner] = max(0, own[owner] - size)
        readers = problem.op_group[problem.consumers[problem.consumer_ptr[tensor] : problem.consumer_ptr[tensor + 1]]]
        for group in {owner, *readers.tolist()}:
            leaves[group].register_parameter(f"shared{tensor}", shared)
    for leaf, size in zip(leaves, own.tolist(), strict=True):
        if size:
            leaf.register_parameter("weight", parameter(size))
    return root


def devices_of_map(problem: Problem, device_map: dict[str, int | str]) -> Assignment:
    """int32 [G], the device of the longest path of the map that holds each group's leaf, `OFFLOADED` where it is on disk."""
    devices = np.full(problem.num_groups, OFFLOADED, dtype=np.int32)
    for group, path in enumerate(leaf_paths(problem)):
        while path not in device_map and path:
            path = path.rpartition(".")[0]
        device = device_map.get(path, "disk")
        if not isinstance(device, str):
            devices[group] = device
    return devices


def _max_memory(problem: Problem, share: float) -> dict[int | str, int | str]:
    """Bytes per device; a device without a limit could hold the model twice, the largest layer's reserve included."""
    total = int(problem.resident_bytes.sum())
    return {
        device: int(share * limit) if np.isfinite(limit) else 2 * total + 1
        for device, limit in enumerate(problem.memory_limit_bytes)
    }


def _place_offloaded(problem: Problem, raw: Assignment) -> Assignment:
    """The map with groups that have no device where most room is left, large ones first."""
    size = group_graph(problem).footprint_bytes.astype(np.float64)
    room = problem.memory_limit_bytes.copy()
    devices = raw.copy()
    placed = devices >= 0
    np.subtract.at(room, devices[placed], size[placed])
    for group in sorted(np.flatnonzero(~placed).tolist(), key=lambda g: -size[g]):
        devices[group] = int(np.where(problem.group_allowed[group], room, -np.inf).argmax())
        room[devices[group]] -= size[group]
    return devices
