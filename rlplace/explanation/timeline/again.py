"""A plan's whole strategy evaluated again, on its own cluster or on another of as many devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlplace.errors import InputError, show
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import Strategy

if TYPE_CHECKING:
    from rlplace.cluster import Cluster
    from rlplace.strategy.drafts import Draft
    from rlplace.strategy.executor.evaluation import Evaluation
    from rlplace.strategy.search.op_level import OpLevel
    from rlplace.strategy.search.tries import Question


@dataclass(frozen=True, eq=False)
class Asked:
    """A plan, and the question that it answers, built again.

    Attributes:
        plan: A plan with a strategy.
        question: Model, batch and cluster; it allows every strategy that the runtime can execute.
    """

    plan: PlacementPlan
    question: Question

    def draft(self, strategy: Strategy | None = None) -> Draft:
        """The draft of a strategy; None: of the plan's.

        Raises:
            InputError: It cannot be evaluated; the message says why.
        """
        from rlplace.strategy.drafts import draft_of_strategy

        strategy = strategy or self.strategy
        names = self.question.costs.names
        if any(stage.tensor for stage in strategy.stages):
            raise InputError("strategy: tensor layouts of its own have no price; leave them out for the standard ones")
        named = [block for stage in strategy.pipelines[0].stages for block in stage.blocks]
        strange = next((block for block in named if block not in names), None)
        if strange is not None:
            raise InputError(f"strategy: the model has no block {show(strange)}; its blocks are {', '.join(names)}")
        if tuple(named) != names:
            raise InputError(f"strategy: it must name the model's blocks once each, in this order: {', '.join(names)}")
        return draft_of_strategy(strategy, names)

    def evaluate(self, strategy: Strategy | None = None) -> Evaluation:
        """Step time and memory of a strategy (None: the plan's), op by op where the number of ops allows it."""
        return self.finer.evaluate(self.draft(strategy))

    @cached_property
    def finer(self) -> OpLevel:
        """The finest executor of drafts that the number of ops allows."""
        from rlplace.strategy.search.op_level import OpLevel

        return OpLevel(self.question)

    @property
    def model(self) -> str:
        """The model's name, for display."""
        return str(((self.plan.source or {}).get("graph") or {}).get("model", "model"))

    @property
    def strategy(self) -> Strategy:
        """The strategy of the plan."""
        assert self.plan.strategy is not None
        return self.plan.strategy


def ask_again(plan: PlacementPlan, machine: Cluster) -> Asked:
    """Captures a plan's model again and prices its blocks.

    Args:
        plan: A plan with a strategy; its `source` says how to build the model.
        machine: The plan's cluster, or another of as many devices.

    Raises:
        InputError: It cannot be built again, or is another model or another cost table today.
    """
    from rlplace.cost.foreign import as_costs
    from rlplace.model.graph.rescale import two_captures
    from rlplace.planned import capture_recipe, check_graph, recipe_of, source_of
    from rlplace.runtime.strategy.facts import facts_of
    from rlplace.runtime.strategy.why_not import judge
    from rlplace.strategy.search.plan import ask

    strategy = plan.strategy
    if strategy is None:
        raise InputError("plan: it places groups of a problem and has no strategy; simulate it on its problem")
    recipe, source = recipe_of(plan), source_of(plan)
    costs = source.table.path
    if source.table.fingerprint is not None and as_costs(costs).fingerprint != source.table.fingerprint:
        raise InputError(f"plan: the op times it was made with ({show(costs)}) are others today; plan again")
    model = recipe.build("meta", seed=0)
    why_not, only = judge(facts_of(model.module, model.example_inputs))
    if why_not(strategy) is not None:
        only = None  # planned for what cannot run yet
    graph, other = two_captures(check_graph(plan), lambda batch, method=None: capture_recipe(recipe, batch, source, method))
    pricing: dict[str, Any] = {"other": other, "only": only, "costs": costs, "host": source.host or "eager"}
    return Asked(plan, ask(graph, machine, strategy.batch, why_not=why_not, **pricing))


def same_model(one: PlacementPlan, other: PlacementPlan) -> bool:
    """Whether two plans are for one model, cluster and cost table, whatever their batch."""
    keys = ("graph_fingerprint", "cluster_fingerprint", "costs", "host", "cost_version")
    a, b = one.source or {}, other.source or {}
    return all(a.get(key) == b.get(key) and key in a for key in keys)


def other_cluster(plan: PlacementPlan, cluster: str) -> Cluster:
    """Another cluster for a plan with a strategy.

    Raises:
        InputError: It has another number of devices.
    """
    from rlplace.cluster.parse import parse

    assert plan.strategy is not None
    machine, wanted = parse(cluster), len(plan.predicted.peak_memory_bytes) or 1 + max(plan.strategy.devices)
    if machine.num_devices != wanted:
        raise InputError(
            f"the plan is for {wanted} devices, {show(cluster)} has {machine.num_devices}; name a cluster of as many, or plan "
            "for this one with 'rlplace place'"
        )
    return machine
