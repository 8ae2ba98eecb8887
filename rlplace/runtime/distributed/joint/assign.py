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

from rlplace.plan.device_map import plan_groups
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.graph.assign import assign, planned_placements
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
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
