"""`Planned`: a plan with its model, graph, cluster, problem and blocks, rebuilt on demand."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from rlplace.captured import Cached, Recipe, afresh
from rlplace.errors import InputError, show
from rlplace.plan.plan import PlacementPlan
from rlplace.problem.check import Source
from rlplace.records import build, plain

if TYPE_CHECKING:
    from rlplace.cluster.parse import Cluster
    from rlplace.model.graph.opgraph import OpGraph
    from rlplace.plan.strategy import Strategy
    from rlplace.problem import Problem
    from rlplace.strategy.drafts import Draft
    from rlplace.strategy.executor.evaluate import StepEvaluation
    from rlplace.strategy.search.op_level import OpLevel
    from rlplace.strategy.search.tries import SearchProblem


class Planned:
    """A plan, and what it was made for: every part is rebuilt on first use, once, and refused where it differs today.

    Attributes:
        plan: The plan.

    Args:
        plan: The plan.
        cluster: The cluster to use instead of the plan's own; or text that names the plan's own, where its source does not.
        cached: Returns captures and facts on models, maybe of an earlier command.
        **known: Parts that need no rebuilding, by name: `problem`, `search_problem` and so on.
    """

    def __init__(
        self, plan: PlacementPlan, cluster: Cluster | str | None = None, *, cached: Cached = afresh, **known: Any
    ) -> None:
        self.plan, self._named, self._cached = plan, cluster, cached
        vars(self).update(known)

    @cached_property
    def source(self) -> Source:
        """The plan's `source`."""
        return _source(self.plan)

    @cached_property
    def recipe(self) -> Recipe:
        """The arguments of the model's capture; building runs code where the model is a function of a module, and says so.

        Raises:
            InputError: The plan was not made from a MODEL text.
        """
        source = self.source.graph or {}
        if not isinstance(source.get("model"), str):
            raise InputError(
                "plan: its source does not name a MODEL, so it cannot be built again; plan with 'rlplace place MODEL', or call "
                "rlplace.distribute(model, plan) in a script of your own"
            )
        try:
            return build(Recipe, source, "plan: source.graph")
        except InputError as error:
            raise InputError(f"{error}; plan again with 'rlplace place MODEL'") from None

    @cached_property
    def cluster(self) -> Cluster:
        """The cluster that the plan was made for.

        Raises:
            InputError: It cannot be found again, or has another fingerprint than the plan was made for.
        """
        from rlplace.cluster.parse import parse

        if self._named is not None and not isinstance(self._named, str):
            return self._named
        text, wanted = self.source.cluster, self.source.cluster_fingerprint
        name = text if self._named is None else self._named
        if name is None:
            raise InputError("plan: it does not say for which cluster it was made; name it with --cluster")
        try:
            cluster = parse(name)
        except InputError as error:
            raise InputError(f"the plan's cluster {show(name)} cannot be read ({error}); name it with --cluster") from None
        if wanted is not None and cluster.fingerprint != wanted:
            raise InputError(
                f"the plan is for cluster {wanted[:12]} ({text or 'no name'}), {show(name)} is "
                f"{cluster.fingerprint[:12]}; plan again for this cluster, or name the one that it was made for with --cluster"
            )
        return cluster

    def on(self, cluster: str) -> Planned:
        """Returns the strategy on another cluster of as many devices.

        Raises:
            InputError: It has another number of devices.
        """
        from rlplace.cluster.parse import parse

        machine = parse(cluster)
        wanted = len(self.plan.predicted.peak_memory_bytes) or 1 + max(self.strategy.devices)
        if machine.num_devices != wanted:
            raise InputError(
                f"the plan is for {wanted} devices, {show(cluster)} has {machine.num_devices}; name a cluster of as many, or "
                "plan for this one with 'rlplace place'"
            )
        return Planned(self.plan, machine, cached=self._cached)

    @cached_property
    def _graph(self) -> OpGraph:
        return self.capture(self.recipe.batch)

    @cached_property
    def graph(self) -> OpGraph:
        """The model, captured again.

        Raises:
            InputError: It is another today; with both fingerprints, and what most likely changed.
        """
        reason = _another_graph(self.source)
        _check_same("graph", str(self.source.graph_fingerprint), "model gives", self._graph.fingerprint, reason)
        return self._graph

    def check(self) -> None:
        """Refuses a plan whose cluster or model differs today.

        Raises:
            InputError: With the reason.
        """
        _ = self.cluster, self.graph

    def capture(self, samples: int, method: str | None = None) -> OpGraph:
        """Captures the model with so many samples, by the plan's method or by `method`."""
        recipe, known = self.recipe, self.source
        made = known.capture or {}
        fell_back = any(" failed: " in str(note) for note in made.get("notes", ()))  # it will again, with the same notes
        method = method or ("module" if made.get("method") == "module" and not fell_back else None)

        def make() -> OpGraph:
            loaded = recipe.build("meta", seed=0, batch=samples)
            return recipe.capture(loaded, source={**(known.graph or {}), "batch": samples}, method=method)

        graph: OpGraph = self._cached("graph", recipe.model, {**recipe.source(samples), "method": method}, make)
        return graph

    @cached_property
    def problem(self) -> Problem:
        """The plan's problem, captured and priced again.

        Raises:
            InputError: It is not what the plan's source gives today; with both fingerprints, and what most likely changed.
        """
        problem = self._priced(self.cluster, self._graph)
        then, now = self.source, _source(problem)
        if then.graph_fingerprint != now.graph_fingerprint:
            reason = _another_graph(then)
        elif then.table.fingerprint != now.table.fingerprint:
            reason = "its op times are others"
        else:
            reason = "the plan's file was edited, or its groups were given by hand"
        _check_same("problem", self.plan.problem, "model and cluster give", problem.fingerprint, reason)
        return problem

    def problem_at(self, samples: int) -> Problem:
        """Returns the problem with another number of samples a micro-batch."""
        return self._priced(self.cluster, self.capture(samples))

    def _priced(self, cluster: Cluster, graph: OpGraph) -> Problem:
        from rlplace.cost.contract import split_backward
        from rlplace.cost.price import price

        source = self.source
        groups, level, host = source.groups or 200, source.level or "task", source.host or "eager"
        problem = price(graph, cluster, groups=groups, level=level, costs=source.table.path, host=host)
        return split_backward(problem) if source.split_backward else problem

    @property
    def name(self) -> str:
        """The model's name, for display."""
        return str(((self.plan.source or {}).get("graph") or {}).get("model", "model"))

    @property
    def strategy(self) -> Strategy:
        """The strategy of the plan, which has one."""
        assert self.plan.strategy is not None
        return self.plan.strategy

    @cached_property
    def search_problem(self) -> SearchProblem:
        """The blocks of a strategy's model, priced; every strategy is allowed that the runtime can execute.

        Raises:
            InputError: The plan has no strategy, or is for another model or another cost table today.
        """
        from rlplace.cost.foreign import as_costs
        from rlplace.model.graph.rescale import two_captures
        from rlplace.runtime.strategy.facts import facts_of
        from rlplace.runtime.strategy.why_not import judge
        from rlplace.strategy.search.plan import ask

        if self.plan.strategy is None:
            raise InputError("plan: it places groups of a problem and has no strategy; simulate it on its problem")
        recipe, table, machine = self.recipe, self.source.table, self.cluster
        if table.fingerprint is not None and as_costs(table.path).fingerprint != table.fingerprint:
            raise InputError(f"plan: the op times it was made with ({show(table.path)}) are others today; plan again")
        whole = self.graph
        facts = recipe.known(self._cached)("facts", lambda: facts_of(*recipe.parts(True, whole), whole))
        why_not, only = judge(facts, optimizer=recipe.optimizer, release=self.strategy.release_gradients)
        if why_not(self.strategy) is not None:
            only = None  # planned for what cannot run yet
        graph, other = two_captures(whole, self.capture)
        pricing: dict[str, Any] = {"other": other, "only": only, "costs": table.path, "host": self.source.host or "eager"}
        settings = {key: getattr(self.strategy, key) for key in ("statistics", "release_gradients")}
        return ask(graph, machine, self.strategy.batch, why_not=why_not, settings=settings, **pricing)

    def draft(self, strategy: Strategy | None = None) -> Draft:
        """Returns the draft of a strategy; None: of the plan's.

        Raises:
            InputError: It cannot be evaluated; the message says why.
        """
        from rlplace.strategy.drafts import draft_of_strategy

        strategy = strategy or self.strategy
        names = self.search_problem.costs.names
        named = [block for stage in strategy.pipelines[0].stages for block in stage.blocks]
        strange = next((block for block in named if block not in names), None)
        if strange is not None:
            raise InputError(f"strategy: the model has no block {show(strange)}; its blocks are {', '.join(names)}")
        if tuple(named) != names:
            raise InputError(f"strategy: it must name the model's blocks once each, in this order: {', '.join(names)}")
        draft = draft_of_strategy(strategy, names)
        priced = [stage.tensor for stage in self.search_problem.strategy(draft).stages]
        if any(stage.tensor and stage.tensor != own for stage, own in zip(strategy.stages, priced, strict=True)):
            raise InputError("strategy: its tensor layouts are not those that are priced; leave them out, or plan again")
        return draft

    def evaluate(self, strategy: Strategy | None = None) -> StepEvaluation:
        """Returns step time and memory of a strategy (None: the plan's), op by op where the number of ops allows it."""
        return self.finer.evaluate(self.draft(strategy))

    @cached_property
    def finer(self) -> OpLevel:
        """The finest executor of drafts that the number of ops allows."""
        from rlplace.strategy.search.op_level import OpLevel

        return OpLevel(self.search_problem)


def same_model(one: PlacementPlan, other: PlacementPlan) -> bool:
    """Returns whether two plans are for one model, cluster and cost table, whatever their batch."""
    keys = ("graph_fingerprint", "cluster_fingerprint", "costs", "host", "cost_version")
    a, b = one.source or {}, other.source or {}
    return all(a.get(key) == b.get(key) and key in a for key in keys)


def _source(made: PlacementPlan | Problem) -> Source:
    return build(Source, plain(made.source or {}), "plan: source")


def _check_same(kind: str, then: str, origin: str, now: str, reason: str) -> None:
    if then != now:
        raise InputError(
            f"the plan is for {kind} {then[:12]}, its {origin} {now[:12]}: {reason}; plan again with 'rlplace place'"
        )


def _another_graph(source: Source) -> str:
    """Explains why a graph has another fingerprint than a plan's source says."""
    made_with = (source.capture or {}).get("torch")
    if made_with is None or made_with == torch.__version__:
        return "its graph is another"
    return f"its graph is another, maybe because it was captured with torch {made_with} and this is {torch.__version__}"
