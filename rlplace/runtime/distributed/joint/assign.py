"""Which device runs every node of a joint graph, and which holds every parameter.

A forward node runs where its op is planned, a backward node on the device of ``NAME.backward`` where the plan has that group,
else where its forward ran. What belongs to no op follows its inputs. Views have no device, see `views`.

In which order the nodes of a joint graph run over all micro-batches: the simulator's, fixed before the step begins.

Every process computes the same order, in which producers come before consumers, and runs its own part of it blindly.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from rlplace.plan.device_map import plan_groups
from rlplace.plan.plan import PlacementPlan
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.problem import BACKWARD, FORWARD
from rlplace.runtime.distributed.graph.acyclic import topological
from rlplace.runtime.distributed.graph.assign import assign, planned_placements
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.joint.graph import JointGraph
from rlplace.runtime.distributed.joint.views import base_of, is_view_node
from rlplace.simulator import simulate


@dataclass(frozen=True, eq=False)
class JointPlacement:
    """Devices of the plan for one joint graph.

    Attributes:
        joint: The graph.
        device_of: Device of every node that does work; items of an op with several results are where the op is.
        owners: Devices that hold a parameter, buffer or constant, by name, ascending.
    """

    joint: JointGraph
    device_of: Mapping[fx.Node, int]
    owners: Mapping[str, tuple[int, ...]]

    @cached_property
    def reads(self) -> Mapping[fx.Node, tuple[fx.Node, ...]]:
        """What every node that does work reads: placeholders and nodes with a device, in place of views their bases."""
        return {node: tuple(dict.fromkeys(base_of(n) for n in node.all_input_nodes)) for node in self.device_of}


def backward_devices(plan: PlacementPlan) -> dict[str, int]:
    """Where the plan runs the backward of every forward op, and holds the weights that it reads first, by op name."""
    groups = plan_groups(plan)
    device_of = {str(group["name"]): device for group, device in groups if "name" in group}
    devices: dict[str, int] = {}
    for group, device in groups:
        for op in group.get("ops", ()):
            devices.setdefault(op, device_of.get(f"{group.get('name')}.backward", device))
    return devices


def place_joint_graph(
    source: ForwardGraph,
    joint: JointGraph,
    plan: PlacementPlan,
    owners: Mapping[str, tuple[int, ...]] | None = None,
) -> JointPlacement:
    """Puts a joint graph on the devices of a plan.

    Args:
        source: The forward that was traced.
        joint: Its joint graph.
        plan: Names the ops of `source`; ops that it lacks, which graphs for other inputs or modes may have, go where most
            ops of their module go.
        owners: Holders of the tensors that are in place already, by name.
    """
    planned = planned_placements(plan)
    nearest = assign(source, planned).placement
    of_backward = backward_devices(plan)
    device_of: dict[fx.Node, int] = {}
    home = min(placement.device for placement in planned.values())
    for node in joint.graph.nodes:
        if node.op == "placeholder" or is_view_node(node):
            continue
        if node.target is operator.getitem:
            device_of[node] = device_of[node.args[0]]
            continue
        owner = node.meta["owner"]
        op = source.op_of_node.get(owner)
        if op is not None:
            here = planned[op].device if op in planned else nearest[owner].device
            device_of[node] = of_backward.get(op, here) if node.meta["backward"] else here
            continue
        before = [device_of[base] for base in map(base_of, node.all_input_nodes) if base in device_of]
        device_of[node] = before[-1] if before else nearest[owner].device if owner in nearest else home
    return JointPlacement(joint, device_of, _owners(source, joint, device_of, of_backward, owners or {}, home))


def _owners(
    source: ForwardGraph,
    joint: JointGraph,
    device_of: Mapping[fx.Node, int],
    of_backward: Mapping[str, int],
    known: Mapping[str, tuple[int, ...]],
    home: int,
) -> dict[str, tuple[int, ...]]:
    """A trainable parameter is where its first reader's backward runs, what the forward writes where that happens.

    Anything else is on all devices that read it.
    """
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in device_of:
        for other in node.all_input_nodes:
            if base_of(other).op == "placeholder":
                readers.setdefault(base_of(other), []).append(node)
    owners: dict[str, tuple[int, ...]] = {}
    for name, node in joint.held.items():
        reading = readers.get(node, [])
        if name in known:
            owners[name] = known[name]
        elif name in joint.writes:
            base = base_of(joint.writes[name])
            owners[name] = (device_of.get(base, home),)
        elif name in joint.gradients:
            first = next((n for n in reading if not n.meta["backward"]), None)
            op = None if first is None else source.op_of_node.get(first.meta["owner"])
            fallback = device_of[first] if first is not None else home
            owners[name] = (of_backward.get(op, fallback) if op is not None else fallback,)
        else:
            owners[name] = tuple(sorted({device_of[n] for n in reading})) or (home,)
    return owners


_aten = torch.ops.aten
_BANDWIDTH_BYTES_PER_S, _COMPUTE_FLOPS_PER_S, _LAUNCH_S = 1e12, 1e14, 5e-6
"""Speeds of a nominal device; only their ratios matter, and only for the order."""


class Task(NamedTuple):
    """One run of a node for one micro-batch of the step."""

    node: fx.Node
    microbatch: int


def forward_nodes(placement: JointPlacement) -> set[fx.Node]:
    """Working nodes that outputs, loss and new values of buffers need."""
    joint = placement.joint
    wanted = [item for item in (joint.loss, *joint.outputs, *joint.writes.values()) if isinstance(item, fx.Node)]
    needed = {base_of(node) for node in wanted}
    for node in reversed(list(placement.device_of)):
        if node in needed:
            needed.update(placement.reads[node])
    return {node for node in needed if node in placement.device_of}


def joint_order(placement: JointPlacement, nodes: Iterable[fx.Node], microbatches: int, schedule: str) -> list[Task]:
    """All runs of one step, those of all devices in one list.

    Args:
        placement: Where everything runs.
        nodes: The nodes to run, closed under what they read. Items of ops with several results are no runs of their own.
        microbatches: Number of them that this replica runs.
        schedule: One of `rlplace.schedule.FREE_SCHEDULES`.
    """
    chosen = set(nodes)
    tasks = [node for node in placement.device_of if node in chosen and node.target is not operator.getitem]
    if not tasks or not microbatches:
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
    line = simulate(problem, list(range(len(used))), microbatches=microbatches, schedule=schedule)
    start = {
        (op, number): (begin, number, op)
        for op, number, begin in zip(line.task_op.tolist(), line.task_microbatch.tolist(), line.start_s.tolist(), strict=True)
    }
    before: dict[tuple[int, int], set[tuple[int, int]]] = {run: set() for run in start}
    for value, reading_ops in readers.items():
        for number in range(microbatches):
            for op in reading_ops:
                before[op, number].add((index[_maker(value)], number))
    # A buffer's new value comes before the next micro-batch reads it.
    for name, node in placement.joint.writes.items():
        maker = base_of(node)
        if maker in placement.device_of and _maker(maker) in index:
            reading = [index[n] for n in tasks if placement.joint.held[name] in placement.reads[n]]
            for number in range(1, microbatches):
                for op in reading:
                    before[op, number].add((index[_maker(maker)], number - 1))
    return [Task(tasks[op], number) for op, number in topological(before, start)]


def _maker(value: fx.Node) -> fx.Node:
    """The task that makes a value."""
    return value.args[0] if value.target is operator.getitem else value  # type: ignore[return-value]


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _seconds(node: fx.Node) -> float:
    touched = _bytes(node) + sum(_bytes(other) for other in (*node.all_input_nodes, *node.users))
    return _LAUNCH_S + touched / _BANDWIDTH_BYTES_PER_S + _flops(node) / _COMPUTE_FLOPS_PER_S


def _flops(node: fx.Node) -> float:
    """FLOPs of products and convolutions."""
    shapes = [tuple(n.meta["val"].shape) for n in pytree.tree_leaves(node.args) if isinstance(n, fx.Node) and "val" in n.meta]
    if node.target in (_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default):
        return 2.0 * prod(shapes[-2]) * shapes[-1][-1]
    if node.target is _aten.convolution.default:
        return 2.0 * node.meta["val"].numel() * prod(shapes[1][1:])
    if node.target is _aten.convolution_backward.default:
        return 4.0 * prod(shapes[0]) * prod(shapes[2][1:])
    return 0.0
