"""The device of every op of a plan and of every node of a joint graph, the owners of parameters, and the order of execution.

A forward node runs where its op is planned, a backward node on the device of ``NAME.backward`` where the plan has that group,
else where its forward ran. A node without an op follows its inputs. Views have no device, see `joint_graph`.

The order of the nodes over all devices is the simulator's, fixed before the step begins. Every process computes the same order,
in which producers come before consumers, and runs its own part of it, so that processes cannot wait in a circle.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from rlplace.errors import InputError
from rlplace.model.aten import count_flops
from rlplace.plan.device_map import LOSS_OP, closest, most_below, plan_groups
from rlplace.plan.plan import PlacementPlan
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.problem import BACKWARD, FORWARD
from rlplace.runtime.placement.forward_graph import ForwardGraph
from rlplace.runtime.placement.joint_graph import JointGraph, base_of, is_view_node, results_of
from rlplace.simulator import simulate


def planned_devices(plan: PlacementPlan) -> dict[str, tuple[int, int]]:
    """Returns the devices of every captured forward op that a plan names, a loss function outside the model among them.

    By op that of its forward, and that of its backward, with the weights that it reads first.
    """
    groups = plan_groups(plan)
    device_of = {str(group["name"]): device for group, device in groups if "name" in group}
    devices: dict[str, tuple[int, int]] = {}
    for group, device in groups:
        for op in group.get("ops", ()):
            devices.setdefault(op, (device, device_of.get(f"{group.get('name')}.backward", device)))
    if not devices:
        raise InputError(
            "plan: its groups name no ops, so that the device of each op is unknown; plan at the finest granularity"
        )
    return devices


def check_same_ops(graph: ForwardGraph, named: Collection[str]) -> None:
    """Refuses a plan that places other ops than those of a graph; names the first op that one of them lacks."""
    exported, named = set(graph.op_of_node.values()), set(named)
    if named - exported == {LOSS_OP}:
        raise InputError("plan: it places a loss function outside the model; give distribute(..., loss=fn, example_target=...)")
    if exported - {LOSS_OP} == named - {LOSS_OP}:  # a loss function that was not planned goes where the output is
        return
    strange, missing = sorted(named - exported), sorted(exported - named)
    example = f"the plan names {strange[0]!r}, which it lacks" if strange else f"the plan does not place {missing[0]!r}"
    raise InputError(
        f"plan: it is for another model: the graph is not the one that was planned ({example}; {len(strange)} ops are in "
        f"the plan only, {len(missing)} in the graph only); give model, mode and inputs as captured, with method='export'"
    )


@dataclass(frozen=True, eq=False)
class JointPlacement:
    """Devices of the plan for one joint graph."""

    joint: JointGraph
    # device of every node that does work; items of an op with several results are where the op is
    device_of: Mapping[fx.Node, int]
    owners: Mapping[str, tuple[int, ...]]  # devices that hold a parameter, buffer or constant, by name, ascending

    @cached_property
    def reads(self) -> Mapping[fx.Node, tuple[fx.Node, ...]]:
        """Inputs of every node that does work: placeholders and nodes with a device, in place of views their bases."""
        return {node: tuple(dict.fromkeys(base_of(n) for n in node.all_input_nodes)) for node in self.device_of}

    @property
    def written(self) -> list[tuple[fx.Node, int]]:
        """New values of the tensors that the forward writes to, each with a device that holds it."""
        return [(node, device) for name, node in self.joint.writes.items() for device in self.owners[name]]

    @property
    def summands(self) -> list[tuple[fx.Node, int]]:
        """Parts of gradients, each with the device that adds them up."""
        return [(part, self.owners[name][0]) for name, parts in self.joint.gradients.items() for part in parts]

    @cached_property
    def forward(self) -> frozenset[fx.Node]:
        """Working nodes that outputs and new values of buffers need."""
        joint = self.joint
        wanted = [item for item in (*joint.outputs, *joint.writes.values()) if isinstance(item, fx.Node)]
        needed = {base_of(node) for node in wanted}
        for node in reversed(list(self.device_of)):
            if node in needed:
                needed.update(self.reads[node])
        return frozenset(node for node in needed if node in self.device_of)


def place_joint_graph(
    joint: JointGraph, plan: PlacementPlan, owners: Mapping[str, tuple[int, ...]] | None = None
) -> JointPlacement:
    """Puts a joint graph on the devices of a plan.

    Args:
        joint: The graph.
        plan: Names the ops of its forward; ops that it lacks, which graphs for other inputs or modes may have, go where most
            ops of their module go.
        owners: Holders of the tensors that are in place already, by name.
    """
    planned = planned_devices(plan)
    below = most_below((name.rpartition("/")[0], device) for name, (device, _) in planned.items())
    home = min(device for device, _ in planned.values())
    device_of: dict[fx.Node, int] = {}
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in joint.graph.nodes:
        if node.op == "placeholder" or is_view_node(node):
            continue
        bases = [base_of(other) for other in node.all_input_nodes]
        for base in bases:
            readers.setdefault(base, []).append(node)
        op = node.meta["owner"]
        if node.target is operator.getitem:
            device_of[node] = device_of[node.args[0]]
        elif op is None:
            device_of[node] = next((device_of[base] for base in reversed(bases) if base in device_of), home)
        elif op in planned:
            device_of[node] = planned[op][node.meta["backward"]]
        else:
            device_of[node] = closest(below, op.rpartition("/")[0]) or 0
    held: dict[str, tuple[int, ...]] = {}
    for name, placeholder in joint.held.items():
        reading = readers.get(placeholder, [])
        if owners is not None and name in owners:
            held[name] = owners[name]
        elif name in joint.writes:  # where that happens
            held[name] = (device_of.get(base_of(joint.writes[name]), home),)
        elif name in joint.gradients:  # where its first reader's backward runs
            first = next((node for node in reading if not node.meta["backward"]), None)
            where = (home, home) if first is None else planned.get(first.meta["owner"], (0, device_of[first]))
            held[name] = (where[1],)
        else:
            held[name] = tuple(sorted({device_of[node] for node in reading})) or (home,)
    return JointPlacement(joint, device_of, held)


_BANDWIDTH_BYTES_PER_S, _COMPUTE_FLOPS_PER_S, _LAUNCH_S = 1e12, 1e14, 5e-6
"""Speeds of a nominal device; only their ratios matter, and only for the order."""


def joint_order(placement: JointPlacement, nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Returns the nodes of all devices in one list, by when they would start on nominal devices.

    Args:
        placement: Where everything runs.
        nodes: The nodes to run, with all that they read. Items of ops with several results are no runs of their own.
    """
    chosen = set(nodes)
    tasks = [node for node in placement.device_of if node in chosen and node.target is not operator.getitem]
    if not tasks:
        return []
    index = {result: number for number, node in enumerate(tasks) for result in (node, *results_of(node))}
    readers: dict[fx.Node, dict[int, None]] = {}
    for node in tasks:
        for value in placement.reads[node]:
            if value in placement.device_of:
                readers.setdefault(value, {})[index[node]] = None
    used = sorted({placement.device_of[node] for node in tasks})
    problem = build_problem(
        "joint",
        time_s=[[_seconds(node)] * len(used) for node in tasks],
        tensors=[
            TensorSpec(index[value], _bytes(value), [reader for reader in reading if reader != index[value]])
            for value, reading in readers.items()
        ],
        memory_bytes=[None] * len(used),
        group=[used.index(placement.device_of[node]) for node in tasks],
        phase=[BACKWARD if node.meta["backward"] else FORWARD for node in tasks],
        bandwidth_bytes_per_s=1e11,
        latency_s=1e-5,
    )
    start_s = simulate(problem, list(range(len(used)))).start_s.tolist()
    return [tasks[op] for op in sorted(range(len(tasks)), key=lambda op: (start_s[op], op))]


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _seconds(node: fx.Node) -> float:
    touched = _bytes(node) + sum(_bytes(other) for other in (*node.all_input_nodes, *node.users))
    made = [value.meta["val"] for value in results_of(node) if "val" in value.meta]
    arguments: Any = fx.map_arg(node.args, lambda value: value.meta.get("val"))
    flops = count_flops(getattr(node.target, "_opname", ""), arguments, made)
    return _LAUNCH_S + touched / _BANDWIDTH_BYTES_PER_S + flops / _COMPUTE_FLOPS_PER_S
