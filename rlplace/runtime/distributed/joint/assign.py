"""Which device runs every node of a joint graph, and which holds every parameter.

A forward node runs where its op is planned, a backward node on the device of ``NAME.backward`` where the plan has that group,
else where its forward ran. What belongs to no op follows its inputs. Views have no device, see `views`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import fx

from rlplace.plan.device_map import closest, most_below
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.graph.assign import backward_devices, planned_devices
from rlplace.runtime.distributed.joint.graph import JointGraph
from rlplace.runtime.distributed.joint.views import base_of, is_view_node


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

    @cached_property
    def forward(self) -> frozenset[fx.Node]:
        """Working nodes that outputs, loss and new values of buffers need."""
        joint = self.joint
        wanted = [item for item in (joint.loss, *joint.outputs, *joint.writes.values()) if isinstance(item, fx.Node)]
        needed = {base_of(node) for node in wanted}
        for node in reversed(list(self.device_of)):
            if node in needed:
                needed.update(self.reads[node])
        return frozenset(node for node in needed if node in self.device_of)


def place_joint_graph(
    joint: JointGraph,
    plan: PlacementPlan,
    owners: Mapping[str, tuple[int, ...]] | None = None,
) -> JointPlacement:
    """Puts a joint graph on the devices of a plan.

    Args:
        joint: The graph.
        plan: Names the ops of its forward; ops that it lacks, which graphs for other inputs or modes may have, go where most
            ops of their module go.
        owners: Holders of the tensors that are in place already, by name.
    """
    planned, of_backward = planned_devices(plan), backward_devices(plan)
    below = most_below((name.rpartition("/")[0], device) for name, device in planned.items())
    device_of: dict[fx.Node, int] = {}
    home = min(planned.values())
    for node in joint.graph.nodes:
        if node.op == "placeholder" or is_view_node(node):
            continue
        if node.target is operator.getitem:
            device_of[node] = device_of[node.args[0]]
            continue
        op = node.meta["owner"]
        if op is None:
            before = [device_of[base] for base in map(base_of, node.all_input_nodes) if base in device_of]
            device_of[node] = before[-1] if before else home
        else:
            here = planned[op] if op in planned else closest(below, op.rpartition("/")[0]) or 0
            device_of[node] = of_backward.get(op, here) if node.meta["backward"] else here
    return JointPlacement(joint, device_of, _owners(joint, device_of, of_backward, owners or {}, home))


def _owners(
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
            owners[name] = (home if first is None else of_backward.get(first.meta["owner"], device_of[first]),)
        else:
            owners[name] = tuple(sorted({device_of[n] for n in reading})) or (home,)
    return owners
