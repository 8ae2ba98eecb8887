"""Makes the pipeline engines of a plan."""

from __future__ import annotations

from rlplace.actions import stage_layout
from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.execution.engine import Engine, StepOptions
from rlplace.runtime.distributed.execution.make import make_segments
from rlplace.runtime.distributed.execution.setup import ChosenEngine, Setup, why_not_autograd
from rlplace.runtime.distributed.execution.stage_graph import StageGraphEngine
from rlplace.runtime.distributed.graph.assign import assign, planned_placements
from rlplace.runtime.distributed.graph.cut import Cut, cut_graph
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.pipeline.chain import chain_of
from rlplace.runtime.distributed.pipeline.engine import PipelineEngine
from rlplace.runtime.distributed.pipeline.torch_schedules import unsupported_version
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.state.tensors import Own
from rlplace.schedule import LIST, PIPELINE_SCHEDULES, SCHEDULES
from rlplace.text import either


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
            stage_layout(chain.devices, plan.schedule).actions(plan.schedule, plan.microbatches)
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
