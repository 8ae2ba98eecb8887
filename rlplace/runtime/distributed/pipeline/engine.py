"""The pipeline engine: a chain of stages under one of torch's pipeline schedules.

`torch.distributed.pipelining` moves values and gradients between neighbouring stages and decides, by its schedule, which stage
works on which micro-batch when. What goes where else is `chain`'s matter, what a stage computes `stage`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlplace.actions import BACKWARD_ACTION, FORWARD_ACTION, Action, chain_actions
from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.problem import BACKWARD, FORWARD
from rlplace.runtime.distributed.execution.engine import (
    ChosenEngine,
    Engine,
    Microbatch,
    Recorder,
    Setup,
    StepOptions,
    why_not_autograd,
    zero_loss,
)
from rlplace.runtime.distributed.execution.make import make_segments
from rlplace.runtime.distributed.execution.replicas import GradientReducer
from rlplace.runtime.distributed.execution.stage_graph import StageGraphEngine
from rlplace.runtime.distributed.execution.wire import Message
from rlplace.runtime.distributed.graph.assign import assign, planned_placements
from rlplace.runtime.distributed.graph.cut import Cut, cut_graph
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.graph.order import Expected, segment_seconds
from rlplace.runtime.distributed.pipeline.chain import Chain, chain_of
from rlplace.runtime.distributed.pipeline.stage import Current, StageModule, asides_of
from rlplace.runtime.distributed.pipeline.torch_schedules import Stage, make_schedule, unsupported_version
from rlplace.runtime.distributed.ranks import Ranks, group_of
from rlplace.runtime.distributed.state.tensors import Own
from rlplace.schedule import LIST, PIPELINE_SCHEDULES, SCHEDULES, free_schedule
from rlplace.simulator import simulate
from rlplace.text import either


@dataclass(frozen=True, eq=False)
class PipelineProgram:
    """A step of a certain number of micro-batches.

    Attributes:
        schedule: Torch's, with the stages of this process.
        asides: Messages that go past the pipeline.
    """

    schedule: Any
    asides: Sequence[Message]


class PipelineEngine(Engine):
    """Runs the stages of one device of the plan; see `support.unsupported` for which plans.

    Attributes:
        most_in_flight: By own stage, the most micro-batches that it held at once in the last step.
        most_held: The same for all own stages together.
    """

    def __init__(self, cut: Cut, ranks: Ranks, own: Own, options: StepOptions) -> None:
        self.cut = cut
        self.ranks = ranks
        self.own = own
        self.parameters = own.parameters
        self.buffers = own.buffers
        self.options = options
        self.recorder = Recorder(ranks.device)
        self.chain = chain_of(cut)
        self.most_in_flight: dict[int, int] = {}
        self.most_held = 0
        self._modules = [
            StageModule(self.chain, number, own.parameters, own.buffers, ranks.device, options.recompute)
            for number, plan_device in enumerate(self.chain.devices)
            if plan_device == ranks.plan_device
        ]
        self._programs: dict[int, PipelineProgram] = {}
        self._forward_only: StageGraphEngine | None = None
        latest = dict.fromkeys(name for module in reversed(self._modules) for name in reversed(module.segment.held))
        order = [name for name in latest if name in own.parameters]
        self._reducer = GradientReducer(own.parameters, own.owners, ranks, order, sharded=options.optimizer_sharding)

    def train(self, microbatches: Sequence[Microbatch], seed: int, step: int) -> torch.Tensor:
        """See `Engine.train`."""
        self._reducer.begin()
        total = zero_loss(self.cut.graph.loss_dtype, self.ranks.device)
        if microbatches and self._modules:
            total += self._run(microbatches, seed, step)
        with self.recorder.interval("reduce"):
            self._reducer.finish()
        dist.all_reduce(total)
        return total

    def evaluate(self, microbatches: Sequence[Microbatch]) -> list[list[Any]]:
        """See `Engine.evaluate`; without a backward there is no schedule to keep."""
        if self._forward_only is None:
            options = StepOptions(LIST, self.options.expected)
            self._forward_only = StageGraphEngine(self.cut, self.ranks, self.own, options)
        self._forward_only.recorder = self.recorder
        return self._forward_only.evaluate(microbatches)

    def _run(self, microbatches: Sequence[Microbatch], seed: int, step: int) -> torch.Tensor:
        count = len(microbatches)
        if count not in self._programs:
            self._programs[count] = self._program(count)
        program = self._programs[count]
        current = Current(self.chain, self.ranks, microbatches, (seed, step), program.asides, self.recorder, self._reducer)
        for module in self._modules:
            module.current = current
        losses: list[torch.Tensor] = []
        try:
            program.schedule.step(
                number=torch.arange(count),
                target=torch.tensor([part.weight for part in microbatches], dtype=torch.float64),
                losses=losses,
                return_outputs=False,
            )
            current.finish()
        finally:
            for module in self._modules:
                module.current = None
        self.most_in_flight, self.most_held = current.most_in_flight, current.most_held
        return (
            torch.stack([loss.detach() for loss in losses]).sum()
            if losses
            else zero_loss(self.cut.graph.loss_dtype, self.ranks.device)
        )

    def _program(self, count: int) -> PipelineProgram:
        chain = self.chain
        ranks = sorted({self.ranks.rank_of(plan_device) for plan_device in chain.devices})
        group_rank = {plan_device: ranks.index(self.ranks.rank_of(plan_device)) for plan_device in set(chain.devices)}
        group = group_of(ranks, "pipeline")
        of_stage = [group_rank[plan_device] for plan_device in chain.devices]
        actions = pipeline_order(chain, self.options.schedule, count, self.options.expected)
        stages = [Stage(module, of_stage, self.ranks.device, group) for module in self._modules]
        forwards = {
            plan_device: [(action.stage, action.microbatch) for action in row if action.kind == "F"]
            for plan_device, row in actions.items()
        }
        schedule = make_schedule(
            self.options.schedule,
            stages,
            count,
            {group_rank[plan_device]: row for plan_device, row in actions.items()},
            torchs=torch_order(chain, self.options.schedule, count) is not None,
        )
        return PipelineProgram(schedule, asides_of(chain, forwards))


def torch_order(chain: Chain, schedule: str, microbatches: int) -> Mapping[int, list[Action]] | None:
    """Torch's own order, where it has the schedule for stages that sit like this and for this many micro-batches; else None."""
    try:
        return chain_actions(chain.devices, schedule, microbatches)
    except InputError:
        return None


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
    actions = torch_order(chain, schedule, microbatches)
    return _simulated(chain, free_schedule(schedule), microbatches, expected) if actions is None else actions


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


def unsupported(cut: Cut, plan: PlacementPlan) -> str | None:
    """Why the pipeline engine cannot run a cut as a plan says, and what can; None: it can.

    Args:
        cut: A forward with its loss, by stages (``grain="stage"``).
        plan: The plan that it was cut for.
    """
    version = unsupported_version()
    if version is not None:
        return f"{version}; the stage-graph engine runs the plan"
    schedule = SCHEDULES[plan.schedule]
    if not schedule.torch_class:
        return f"schedule {plan.schedule} is no pipeline schedule; the stage-graph engine runs it"
    if plan.order is not None:
        return "the plan fixes the order of every op; the stage-graph engine runs the nearest order"
    try:
        chain = chain_of(cut)
        if len(set(chain.devices)) < 2:
            return "all stages are on one device, so nothing is piped; the stage-graph engine runs the plan"
        if not schedule.free:
            chain_actions(chain.devices, plan.schedule, plan.microbatches)
    except InputError as error:
        return str(error)
    if cut.graph.loss is None:
        return "the model returns no scalar loss, so there is no backward to schedule; the stage-graph engine evaluates it"
    if schedule.splits_backward and plan.recompute:
        whole = [name for name in PIPELINE_SCHEDULES[::-1] if not SCHEDULES[name].splits_backward]
        return (
            f"schedule {plan.schedule} runs the backward of a stage in two halves, and each would run a recomputed forward "
            f"again; use the schedule {either(whole)}, or no recompute"
        )
    return None


def why_not(plan: PlacementPlan, graph: ForwardGraph, processes: int) -> str | None:
    """Why the pipeline engine cannot run a plan; None: it can."""
    return why_not_autograd(plan) or unsupported(cut_graph(graph, assign(graph, planned_placements(plan))), plan)


def make(setup: Setup) -> ChosenEngine:
    """The pipeline engine; graphs without a loss, which are only evaluated, go to the stage-graph engine on the same cut."""
    plan = setup.plan

    def make_engine(cut: Cut, ranks: Ranks, own: Own, options: StepOptions) -> Engine:
        if cut.graph.loss is None:
            return StageGraphEngine(cut, ranks, own, StepOptions(LIST, options.expected))
        reason = unsupported(cut, plan)
        if reason is not None:
            raise InputError(f"distribute: the pipeline engine cannot run this plan: {reason}")
        return PipelineEngine(cut, ranks, own, options)

    return make_segments(setup, "pipeline", "stage", make_engine)
