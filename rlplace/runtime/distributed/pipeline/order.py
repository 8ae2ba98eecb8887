"""The actions of every device of a pipeline, as `rlplace.actions` names them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlplace.actions import BACKWARD_ACTION, FORWARD_ACTION, Action, StageLayout, stage_layout
from rlplace.errors import InputError
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.problem import BACKWARD, FORWARD
from rlplace.runtime.distributed.graph.order import Expected, segment_seconds
from rlplace.runtime.distributed.pipeline.chain import Chain
from rlplace.schedule import free_schedule
from rlplace.simulator import simulate


def torch_layout(chain: Chain, schedule: str, microbatches: int) -> StageLayout | None:
    """How the stages sit, where torch has the schedule for it and for this many micro-batches; else None."""
    try:
        layout = stage_layout(chain.devices, schedule)
        layout.actions(schedule, microbatches)
    except InputError:
        return None
    return layout


def pipeline_order(
    chain: Chain, schedule: str, microbatches: int, expected: Expected | None = None
) -> Mapping[int, list[Action]]:
    """Who does what in which order.

    Torch's own order where it has one. Else the order in which the simulator starts things: stages on any devices, and the
    fewer micro-batches of a small last batch; schedules for chains then become the one that `free_schedule` names.

    Args:
        chain: The stages.
        schedule: One of `rlplace.schedule.PIPELINE_SCHEDULES`.
        microbatches: At least 1.
        expected: Times of the problem that was planned; None guesses from the sizes of values.

    Returns:
        Actions by device of the plan.
    """
    layout = torch_layout(chain, schedule, microbatches)
    if layout is not None:
        return layout.actions(schedule, microbatches)
    return _simulated(chain, free_schedule(schedule), microbatches, expected)


def _simulated(chain: Chain, schedule: str, microbatches: int, expected: Expected | None) -> dict[int, list[Action]]:
    seconds = segment_seconds(chain.cut, expected)
    count = len(chain.stages)
    times = [seconds[stage.index] for stage in chain.stages]
    tensors = [TensorSpec(stage, 1, [stage + 1]) for stage in range(count - 1)]
    tensors += [TensorSpec(count + stage, 1, [count + stage - 1]) for stage in range(1, count)]
    tensors += [TensorSpec(stage, 0, [count + stage]) for stage in range(count)]
    num_devices = 1 + max(chain.devices)
    problem = build_problem(
        "pipeline",
        time_s=[[forward] * num_devices for forward, _ in times] + [[backward] * num_devices for _, backward in times],
        tensors=tensors,
        memory_bytes=[None] * num_devices,
        group=[*range(count), *range(count)],
        phase=[FORWARD] * count + [BACKWARD] * count,
        bandwidth_bytes_per_s=1e12,
    )
    timeline = simulate(
        problem, list(chain.devices), microbatches=microbatches, schedule=schedule, stage_of_group=list(range(count))
    )
    actions: dict[int, list[Action]] = {plan_device: [] for plan_device in sorted(set(chain.devices))}
    for task in np.lexsort((timeline.task_microbatch, timeline.task_op, timeline.start_s)).tolist():
        lap, stage = divmod(int(timeline.task_op[task]), count)
        kind = BACKWARD_ACTION if lap else FORWARD_ACTION
        actions[chain.devices[stage]].append(Action(stage, kind, int(timeline.task_microbatch[task])))
    return actions
