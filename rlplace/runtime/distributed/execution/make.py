"""Makes engines that run a cut of the forward segment by segment."""

from __future__ import annotations

from collections.abc import Callable

from rlplace.runtime.distributed.execution.engine import (
    ChosenEngine,
    Engine,
    Setup,
    StepOptions,
)
from rlplace.runtime.distributed.execution.stage_graph import StageGraphEngine
from rlplace.runtime.distributed.graph.assign import assign, planned_groups, planned_placements
from rlplace.runtime.distributed.graph.cut import Cut, cut_graph
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.graph.order import expected_of
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.state.tensors import Own, own_tensors


def make(setup: Setup) -> ChosenEngine:
    """The stage-graph engine of a plan."""
    return make_segments(setup, "stage_graph", StageGraphEngine)


MakeEngine = Callable[[Cut, Ranks, Own, StepOptions], Engine]


def make_segments(setup: Setup, name: str, make_engine: MakeEngine) -> ChosenEngine:
    """An engine that runs segments of the forward.

    Args:
        setup: What it is for.
        name: The engine's name.
        make_engine: Makes it for a cut.
    """
    plan, ranks, source = setup.plan, setup.ranks, setup.graph
    planned, groups = planned_placements(plan), planned_groups(plan)
    assigned = assign(source, planned, None, groups)
    first = cut_graph(source, assigned)
    own = own_tensors(setup.model, first.owners, source.constants, ranks.plan_device, ranks.device)
    first_owner = {name: who[0] for name, who in own.owners.items()}
    expected = None if setup.problem is None else expected_of(setup.problem)

    def engine_for(graph: ForwardGraph) -> Engine:
        assignment = assigned if graph is source else assign(graph, planned, first_owner, groups)
        cut = first if graph is source else cut_graph(graph, assignment)
        options = StepOptions(plan.schedule, expected)
        return make_engine(cut, ranks, own.holding(graph.constants, ranks.device), options)

    return ChosenEngine(name, own, engine_for)
