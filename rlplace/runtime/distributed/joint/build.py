"""From a forward graph to a joint graph on the devices of a plan, in one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.forward_graph import ForwardGraph
from rlplace.runtime.distributed.joint.assign import JointPlaces, joint_places
from rlplace.runtime.distributed.joint.graph import joint_graph


def build_joint(
    source: ForwardGraph,
    plan: PlacementPlan,
    model: nn.Module,
    leaves: Sequence[Any],
    device: torch.device,
    owners: Mapping[str, tuple[int, ...]] | None = None,
) -> JointPlaces:
    """Traces the joint graph and puts it on the devices of a plan; nothing is allocated or run.

    Args:
        source: The forward of one micro-batch.
        plan: Names its ops.
        model: Whose forward it is, real or meta.
        leaves: Flat inputs of one micro-batch, real or meta.
        device: Where this process computes; only its kind matters.
        owners: Holders of the tensors that are in place already: ``places.owners`` of the first graph. Default: chosen by the
            plan.

    Raises:
        InputError: The plan asks for something that a joint graph cannot do, with the reason.
    """
    refuse(plan)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers()), **source.constants}
    joint = joint_graph(source, held, leaves, kind=device.type)
    return joint_places(source, joint, plan, owners)


def refuse(plan: PlacementPlan) -> None:
    """Refuses plans that the joint graph cannot run.

    Raises:
        InputError: With the reason and the nearest plan that it can run.
    """
    if plan.shards:
        name = next(iter(plan.shards))
        raise InputError(
            f"plan: it splits {len(plan.shards)} ops over devices ({name!r} first), which the joint graph does not; plan without shards"
        )
    if plan.recompute:
        raise InputError(
            f"plan: it recomputes {len(plan.recompute)} segments, which the joint graph does not; plan without recompute"
        )
    if plan.schedule not in ("list", "gpipe", "1f1b"):
        raise InputError(
            f"plan: schedule {plan.schedule!r} needs a chain of stages; the joint graph runs 'list', 'gpipe' and '1f1b'"
        )
