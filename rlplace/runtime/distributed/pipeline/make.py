"""Makes the pipeline engines of a plan."""

from __future__ import annotations

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.execution.engine import Engine, StepOptions
from rlplace.runtime.distributed.execution.make import make_segments
from rlplace.runtime.distributed.execution.setup import ChosenEngine, Setup, why_not_autograd
from rlplace.runtime.distributed.execution.stage_graph import StageGraphEngine
from rlplace.runtime.distributed.graph.assign import assign, planned_placements
from rlplace.runtime.distributed.graph.cut import Cut, cut_graph
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.pipeline.engine import PipelineEngine
from rlplace.runtime.distributed.pipeline.support import unsupported
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.state.tensors import Own
from rlplace.schedule import LIST


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
