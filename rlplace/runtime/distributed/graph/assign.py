"""Where a plan puts the ops of a forward graph."""

from __future__ import annotations

from collections.abc import Collection

from rlplace.errors import InputError
from rlplace.plan.device_map import LOSS_OP, plan_groups
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph


def planned_devices(plan: PlacementPlan) -> dict[str, int]:
    """The device of every captured forward op that a plan names, a loss function outside the model among them.

    Raises:
        InputError: The plan does not say what its groups hold.
    """
    devices: dict[str, int] = {}
    for group, device in plan_groups(plan):
        for name in group.get("ops", ()):
            devices.setdefault(name, device)
    if not devices:
        raise InputError("plan: its groups name no ops, so nobody knows what goes where; plan at the finest granularity")
    return devices


def backward_devices(plan: PlacementPlan) -> dict[str, int]:
    """Where the plan runs the backward of every forward op, and holds the weights that it reads first, by op name."""
    groups = plan_groups(plan)
    device_of = {str(group["name"]): device for group, device in groups if "name" in group}
    devices: dict[str, int] = {}
    for group, device in groups:
        for op in group.get("ops", ()):
            devices.setdefault(op, device_of.get(f"{group.get('name')}.backward", device))
    return devices


def check_same_ops(graph: ForwardGraph, named: Collection[str]) -> None:
    """Refuses a plan that was made for another graph than that of the example inputs.

    Args:
        graph: The graph.
        named: The ops that the plan places.

    Raises:
        InputError: Naming the first op that one of them lacks.
    """
    exported, named = set(graph.op_of_node.values()), set(named)
    if named - exported == {LOSS_OP}:
        raise InputError("plan: it places a loss function outside the model; give distribute(..., loss=fn, example_target=...)")
    if exported - {LOSS_OP} == named - {LOSS_OP}:  # a loss function that was not planned goes where the output is
        return
    strange, missing = sorted(named - exported), sorted(exported - named)
    example = f"the plan names {strange[0]!r}, which it lacks" if strange else f"the plan does not place {missing[0]!r}"
    raise InputError(
        f"plan: it is for another model: the graph of this one is not the one that was planned ({example}; {len(strange)} and "
        f"{len(missing)} such ops); give the model, its mode and inputs as they were captured, with method='export'"
    )
