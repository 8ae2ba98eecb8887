"""Makes the pipeline engines of a plan."""

from __future__ import annotations

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.execution.engine import Engine, StepOptions
from rlplace.runtime.distributed.execution.setup import Made, Setup, why_not_autograd
from rlplace.runtime.distributed.execution.stage_graph import StageGraphEngine
from rlplace.runtime.distributed.graph.assign import Assignment, assign, planned_groups, planned_spots
from rlplace.runtime.distributed.graph.cut import Cut, cut_graph
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.graph.order import expected_of
from rlplace.runtime.distributed.graph.recomputed import recompute_sets
from rlplace.runtime.distributed.pipeline.engine import PipelineEngine
from rlplace.runtime.distributed.pipeline.support import unsupported
from rlplace.runtime.distributed.state.tensors import own_tensors
from rlplace.schedule import LIST


def why_not(plan: PlacementPlan, graph: ForwardGraph, processes: int) -> str | None:
    """Why the pipeline engine cannot run a plan; None: it can."""
    return why_not_autograd(plan) or unsupported(cut_graph(graph, assign(graph, planned_spots(plan))), plan)


def make(setup: Setup) -> Made:
    """The pipeline engine; graphs without a loss, which are only evaluated, go to the stage-graph engine on the same cut.

    Raises:
        InputError: The plan is none for it, with the reason.
    """
    plan, ranks, source = setup.plan, setup.ranks, setup.graph
    planned, groups = planned_spots(plan), planned_groups(plan)
    assigned = assign(setup.graph, planned, None, groups)
    first = cut_graph(setup.graph, assigned)
    _refuse(unsupported(first, plan))
    own = own_tensors(setup.model, first.owners, setup.graph.constants, ranks.place, ranks.device)
    places = {name: who[0] for name, who in own.owners.items()}
    expected = None if setup.problem is None else expected_of(setup.problem)

    def cut_of(graph: ForwardGraph) -> tuple[Assignment, Cut]:
        if graph is source:
            return assigned, first
        assignment = assign(graph, planned, places, groups)
        return assignment, cut_graph(graph, assignment)

    def engine_for(graph: ForwardGraph) -> Engine:
        assignment, cut = cut_of(graph)
        held = own.holding(graph.constants, ranks.device)
        if graph.loss is None:
            return StageGraphEngine(cut, ranks, held, StepOptions(LIST, expected))
        _refuse(unsupported(cut, plan))
        again = recompute_sets(plan.recompute, assignment)
        return PipelineEngine(cut, ranks, held, StepOptions(plan.schedule, expected, again, plan.optimizer_sharding))

    return Made("pipeline", own, engine_for)


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise InputError(f"distribute: the pipeline engine cannot run this plan: {reason}")
