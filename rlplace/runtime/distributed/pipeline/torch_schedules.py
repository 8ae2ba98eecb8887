"""All that touches `torch.distributed.pipelining`, public and private.

Private are the method of `PipelineStage` that is overridden here (same name and arguments in torch 2.11 to 2.13), and
`_PipelineScheduleRuntime` with its actions, which runs the layouts that no schedule class of torch has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining

from rlplace.actions import Action
from rlplace.errors import InputError
from rlplace.runtime.distributed.execution import activity
from rlplace.runtime.distributed.pipeline.split_backward import input_backward, whole_backward
from rlplace.runtime.distributed.pipeline.stage import StageModule
from rlplace.schedule import ONE, SCHEDULES

FIRST, BEYOND = (2, 11), (2, 14)


def unsupported_version() -> str | None:
    """What is wrong with the installed torch; None: nothing.

    The engine overrides one method of `PipelineStage` and, where torch has no schedule for a layout, fills in the action lists
    of its schedule runtime. Both are private, so versions that nobody has looked at are not trusted.
    """
    installed = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if FIRST <= installed < BEYOND:
        return None
    return f"the pipeline engine knows torch 2.{FIRST[1]} to 2.{BEYOND[1] - 1}, found {torch.__version__}"


class Stage(pipelining.PipelineStage):
    """A pipeline stage with its own backward: every input gets a gradient, and the split one is exact."""

    def __init__(
        self, module: StageModule, group_rank_of_stage: Sequence[int], device: torch.device, group: dist.ProcessGroup
    ) -> None:
        number = module.index
        super().__init__(
            module,
            number,
            len(group_rank_of_stage),
            device,
            input_args=module.layouts(module.taken) if number else (),
            output_args=module.loss_layout() if module.is_last else module.layouts(module.handed_on),
            group=group,
        )
        self.stage_index_to_group_rank = dict(enumerate(group_rank_of_stage))
        self._module = module
        self._takes = 0 if number == 0 else max(1, len(module.taken))
        self._microbatch = -1

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Runs a whole backward or its first half; called by the schedule."""
        self._microbatch = bwd_chunk_id
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Runs the second half of a backward; called by the schedule."""
        self._microbatch = bwd_chunk_id
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False) -> Any:
        """Runs one of the backward actions; called by the two above, which prepare and keep what goes in and out."""
        module, current = self._module, self._module.now()
        # The caller's autocast is for the forward; its choice of dtypes is part of the autograd graph by now.
        with (
            current.recorder.interval("backward", module.segment.index, self._microbatch),
            torch.autocast(self.device.type, enabled=False),
        ):
            activity.doing("the backward of stage {} (micro-batch {})", self.stage_index, self._microbatch)
            if backward_type == "input":
                return self._first_half(**bwd_kwargs)
            with current.ending(module.segment.held):
                if backward_type == "weight":
                    bwd_kwargs["param_groups"].run()
                    input_gradients: tuple[torch.Tensor, ...] = ()
                else:
                    input_gradients = whole_backward(*self._values(**bwd_kwargs))
            current.end(self.stage_index)
            return input_gradients, None

    def _first_half(self, **bwd_kwargs: Any) -> Any:
        outputs, gradients, inputs = self._values(**bwd_kwargs)
        halves = input_backward(outputs, gradients, inputs)
        if self.is_last:
            outputs[0].detach_()  # the schedule keeps all losses of a step, which must not keep their graphs
        return halves

    def _values(self, stage_output: Any, output_grads: Any, input_values: Any) -> tuple[Any, Any, Any]:
        outputs = (stage_output,) if isinstance(stage_output, torch.Tensor) else stage_output
        gradients = (None,) * len(outputs) if output_grads is None else output_grads
        return outputs, gradients, input_values[: self._takes]  # keyword arguments come after the inputs

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Torch 2.11 greets every neighbour before the first step, also one on the same rank, which gloo cannot send to."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


def weighted(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The share of a micro-batch in the loss of the step."""
    return loss * float(weight)


def make_schedule(
    schedule: str,
    stages: Sequence[Stage],
    microbatches: int,
    actions: Mapping[int, Sequence[Action]],
    *,
    torchs: bool,
) -> Any:
    """The object that runs a step.

    Args:
        schedule: As in a plan.
        stages: The stages of this process.
        microbatches: Number of them in a step.
        actions: By rank in the stages' group.
        torchs: Torch has the schedule for stages that sit like these and this many micro-batches.

    Raises:
        InputError: A version of torch that the engine does not know.
    """
    reason = unsupported_version()
    if reason is not None:
        raise InputError(f"pipeline: {reason}; use the schedule list")
    options: dict[str, Any] = {"loss_fn": weighted, "scale_grads": False}
    record = SCHEDULES[schedule]
    if torchs and record.layout == ONE:
        return getattr(pipelining, record.torch_class)(stages[0], microbatches, **options)
    if torchs and _as_torch_counts(stages[0]):
        return getattr(pipelining, record.torch_class)(list(stages), microbatches, **options)
    return _runtime(stages, microbatches, actions, options)


def _as_torch_counts(stage: Stage) -> bool:
    """Whether the group's ranks come in the order in which the chain visits them, as torch's classes take it."""
    visited = list(dict.fromkeys(stage.stage_index_to_group_rank.values()))
    return visited == sorted(visited)


def _runtime(
    stages: Sequence[Stage], microbatches: int, actions: Mapping[int, Sequence[Action]], options: Mapping[str, Any]
) -> Any:
    from torch.distributed.pipelining.schedules import _Action, _ComputationType, _PipelineScheduleRuntime

    schedule = _PipelineScheduleRuntime(list(stages), microbatches, **options)
    schedule.pipeline_order = {
        rank: [_Action(a.stage, _ComputationType.from_str(a.kind), a.microbatch) for a in row]
        for rank, row in sorted(actions.items())
    }
    # It changes the lists that it is given, and sets which rank each stage is on.
    schedule._prepare_schedule_with_comms({rank: list(row) for rank, row in schedule.pipeline_order.items()})
    return schedule
