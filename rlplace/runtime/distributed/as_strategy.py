"""Plans of older files that place groups and ask for what only whole strategies have: micro-batches, schedules, replicas,
recomputation and a sharded optimizer.

Such a plan is a strategy when its stages are whole blocks of the model. Then it runs as one.
"""

from __future__ import annotations

from torch import nn

from rlplace.errors import InputError, show
from rlplace.plan.device_map import plan_groups
from rlplace.plan.plan import Older, PlacementPlan
from rlplace.plan.strategy import Pipeline, Stage, Strategy
from rlplace.runtime.distributed.joint.assign import planned_devices
from rlplace.runtime.native.blocks import block_names, owner
from rlplace.schedule import GPIPE

_INSTEAD = "plan a strategy: rlplace.place(model, cluster, batch=...), or 'rlplace place MODEL'"


def strategy_of_plan(plan: PlacementPlan, model: nn.Module, samples: int) -> Strategy:
    """The strategy that a placement says.

    Args:
        plan: Its groups name ops.
        model: What it is for.
        samples: Of one micro-batch.

    Raises:
        InputError: It is none, with the reason.
    """
    older = plan.older or Older()
    moved = next((op for op, (forward, backward) in planned_devices(plan).items() if forward != backward), None)
    if moved is not None:
        raise InputError(
            f"plan: it moves the backward of {moved!r}, which strategies do not, and has micro-batches, replicas or "
            f"recomputation; {_INSTEAD}"
        )
    stages = list(older.stage_of_group) or plan.device_of_group.tolist()
    again = {int(group) for segment in older.recompute for group in segment}
    blocks = block_names(model)
    stage_of: dict[str, dict[int, None]] = {block: {} for block in blocks}
    repeated: dict[str, set[bool]] = {block: set() for block in blocks}
    device_of: dict[int, int] = {}
    for number, ((group, device), stage) in enumerate(zip(plan_groups(plan), stages, strict=True)):
        if device_of.setdefault(stage, device) != device:
            raise InputError(f"plan: stage {stage} lies on devices {device_of[stage]} and {device}; {_INSTEAD}")
        for op in group.get("ops", ()):
            block = owner(op.rpartition("/")[0], blocks)
            if block is not None:
                stage_of[block][stage] = None
                repeated[block].add(number in again)
    for block, found in stage_of.items():
        if len(found) > 1:
            raise InputError(
                "plan: with micro-batches, replicas or recomputation its stages must be whole blocks of the model, "
                f"but {show(block)} lies in stages {' and '.join(map(str, found))}; {_INSTEAD}"
            )
        if len(repeated[block]) > 1:
            raise InputError(f"plan: it recomputes a part of block {show(block)}, and blocks are recomputed whole; {_INSTEAD}")
    seen = dict.fromkeys(stage for found in stage_of.values() for stage in found)
    order = sorted(device_of) if older.stage_of_group else list(seen)
    held = {stage: [block for block in blocks if stage in (stage_of[block] or {order[0]: None})] for stage in order}
    order = [stage for stage in order if held[stage]]
    rows = older.replicas or [range(max(device_of.values()) + 1)]
    degree, shared = len(rows), older.optimizer_sharding
    mesh = {} if degree == 1 else {"shard" if shared else "replicate": degree}
    made = tuple(
        Stage(
            blocks=tuple(held[stage]),
            devices=tuple(int(row[device_of[stage]]) for row in rows),
            mesh=mesh,  # type: ignore[arg-type]
            sharding=int(shared and degree > 1),
            recompute={block: "full" for block in held[stage] if repeated[block] == {True}},
        )
        for stage in order
    )
    schedule = None if len(made) == 1 else older.schedule or GPIPE
    pipeline = Pipeline(made, (samples,), (older.microbatches,), schedule)
    return Strategy(samples * older.microbatches * degree, (pipeline,))
