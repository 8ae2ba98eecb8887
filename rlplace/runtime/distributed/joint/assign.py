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
from rlplace.runtime.distributed.graph.assign import assign, planned_spots
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.joint.graph import JointGraph
from rlplace.runtime.distributed.joint.views import base_of, is_view


@dataclass(frozen=True, eq=False)
class JointPlaces:
    """Devices of the plan for one joint graph.

    Attributes:
        joint: The graph.
        place: Device of every node that does work; items of an op with several results are where the op is.
        owners: Devices that hold a parameter, buffer or constant, by name, ascending.
    """

    joint: JointGraph
    place: Mapping[fx.Node, int]
    owners: Mapping[str, tuple[int, ...]]

    @cached_property
    def reads(self) -> Mapping[fx.Node, tuple[fx.Node, ...]]:
        """What every node that does work reads, views replaced by their bases; these are placeholders or nodes with a place."""
        return {node: tuple(dict.fromkeys(base_of(n) for n in node.all_input_nodes)) for node in self.place}


def backward_places(plan: PlacementPlan) -> dict[str, int]:
    """Where the plan runs the backward of every forward op, and holds the weights that it reads first, by op name."""
    groups = plan_groups(plan)
    device = {str(group["name"]): place for group, place in groups if "name" in group}
    places: dict[str, int] = {}
    for group, place in groups:
        for op in group.get("ops", ()):
            places.setdefault(op, device.get(f"{group.get('name')}.backward", place))
    return places


def joint_places(
    source: ForwardGraph,
    joint: JointGraph,
    plan: PlacementPlan,
    owners: Mapping[str, tuple[int, ...]] | None = None,
) -> JointPlaces:
    """Puts a joint graph on the devices of a plan.

    Args:
        source: The forward that was traced.
        joint: Its joint graph.
        plan: Names the ops of `source`; ops that it lacks, which graphs for other inputs or modes may have, go where most
            ops of their module go.
        owners: Holders of the tensors that are in place already, by name.
    """
    planned = planned_spots(plan)
    nearest = assign(source, planned).spot
    of_backward = backward_places(plan)
    place: dict[fx.Node, int] = {}
    home = min(spot.place for spot in planned.values())
    for node in joint.graph.nodes:
        if node.op == "placeholder" or is_view(node):
            continue
        if node.target is operator.getitem:
            place[node] = place[node.args[0]]
            continue
        owner = node.meta["owner"]
        op = source.op_of_node.get(owner)
        if op is not None:
            here = planned[op].place if op in planned else nearest[owner].place
            place[node] = of_backward.get(op, here) if node.meta["backward"] else here
            continue
        before = [place[base] for base in map(base_of, node.all_input_nodes) if base in place]
        place[node] = before[-1] if before else nearest[owner].place if owner in nearest else home
    return JointPlaces(joint, place, _owners(source, joint, place, of_backward, owners or {}, home))


def _owners(
    source: ForwardGraph,
    joint: JointGraph,
    place: Mapping[fx.Node, int],
    of_backward: Mapping[str, int],
    known: Mapping[str, tuple[int, ...]],
    home: int,
) -> dict[str, tuple[int, ...]]:
    """A trainable parameter is where its first reader's backward runs, what the forward writes where that happens.

    Anything else is on all devices that read it.
    """
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in place:
        for other in node.all_input_nodes:
            if base_of(other).op == "placeholder":
                readers.setdefault(base_of(other), []).append(node)
    owners: dict[str, tuple[int, ...]] = {}
    for name, node in joint.held.items():
        found = readers.get(node, [])
        if name in known:
            owners[name] = known[name]
        elif name in joint.writes:
            base = base_of(joint.writes[name])
            owners[name] = (place.get(base, home),)
        elif name in joint.gradients:
            first = next((n for n in found if not n.meta["backward"]), None)
            op = None if first is None else source.op_of_node.get(first.meta["owner"])
            fallback = place[first] if first is not None else home
            owners[name] = (of_backward.get(op, fallback) if op is not None else fallback,)
        else:
            owners[name] = tuple(sorted({place[n] for n in found})) or (home,)
    return owners
