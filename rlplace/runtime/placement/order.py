"""In which order the nodes of a joint graph run over all devices: the simulator's, fixed before the step begins.

Every process computes the same order, in which producers come before consumers, and runs its own part of it blindly: nobody can
wait in a circle.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from rlplace.model.capture.flops import count_flops
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.problem import BACKWARD, FORWARD
from rlplace.runtime.placement.assign import JointPlacement
from rlplace.runtime.placement.record import results_of
from rlplace.simulator import simulate

_BANDWIDTH_BYTES_PER_S, _COMPUTE_FLOPS_PER_S, _LAUNCH_S = 1e12, 1e14, 5e-6
"""Speeds of a nominal device; only their ratios matter, and only for the order."""


def joint_order(placement: JointPlacement, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes of all devices in one list, by when they would start on nominal devices.

    Args:
        placement: Where everything runs.
        nodes: The nodes to run, closed under what they read. Items of ops with several results are no runs of their own.
    """
    chosen = set(nodes)
    tasks = [node for node in placement.device_of if node in chosen and node.target is not operator.getitem]
    if not tasks:
        return []
    index = {node: number for number, node in enumerate(tasks)}
    readers: dict[fx.Node, dict[int, None]] = {}
    for node in tasks:
        for value in placement.reads[node]:
            if value in placement.device_of:
                readers.setdefault(value, {})[index[node]] = None
    tensors = [
        TensorSpec(index[_maker(value)], _bytes(value), [r for r in reading_ops if r != index[_maker(value)]])
        for value, reading_ops in readers.items()
    ]
    used = sorted({placement.device_of[node] for node in tasks})
    problem = build_problem(
        "joint",
        time_s=[[_seconds(node)] * len(used) for node in tasks],
        tensors=tensors,
        memory_bytes=[None] * len(used),
        group=[used.index(placement.device_of[node]) for node in tasks],
        phase=[BACKWARD if node.meta["backward"] else FORWARD for node in tasks],
        bandwidth_bytes_per_s=1e11,
        latency_s=1e-5,
    )
    line = simulate(problem, list(range(len(used))))
    start = dict(enumerate(line.start_s.tolist()))
    return [tasks[op] for op in sorted(start, key=lambda op: (start[op], op))]


def _maker(value: fx.Node) -> fx.Node:
    """The task that makes a value."""
    return value.args[0] if value.target is operator.getitem else value  # type: ignore[return-value]


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _seconds(node: fx.Node) -> float:
    touched = _bytes(node) + sum(_bytes(other) for other in (*node.all_input_nodes, *node.users))
    made = [value.meta["val"] for value in results_of(node) if "val" in value.meta]
    arguments: Any = fx.map_arg(node.args, lambda value: value.meta.get("val"))
    flops = count_flops(getattr(node.target, "_opname", ""), arguments, made)
    return _LAUNCH_S + touched / _BANDWIDTH_BYTES_PER_S + flops / _COMPUTE_FLOPS_PER_S
