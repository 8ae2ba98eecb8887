"""`CapturedModel`: a model to plan. `Planned`: a plan with its model, graph, cluster, problem and blocks, rebuilt on demand."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from rlplace.errors import InputError, show
from rlplace.plan.plan import PlacementPlan
from rlplace.problem.io import Source
from rlplace.records import Count, build, plain

if TYPE_CHECKING:
    from rlplace.cluster.parse import Cluster
    from rlplace.model.graph.opgraph import OpGraph
    from rlplace.model.graph.rescale import CaptureAt
    from rlplace.model.zoo import LoadedModel
    from rlplace.plan.strategy import Strategy
    from rlplace.problem import Problem
    from rlplace.runtime.strategy.why_not import ModelFacts
    from rlplace.strategy.drafts import Draft
    from rlplace.strategy.executor.evaluate import StepEvaluation
    from rlplace.strategy.search.op_level import OpLevel
    from rlplace.strategy.search.tries import SearchProblem


class Recipe(msgspec.Struct, frozen=True):
    """The arguments of a capture.

    Attributes:
        model: MODEL text.
        batch: Samples of a micro-batch.
        seq: Sequence length.
        dtype: Name of the dtype of parameters and compute.
        optimizer: Name.
        autocast: dtype of mixed precision, None without.
        master_weights: Whether optimizer state is kept in fp32.
    """

    model: str
    batch: Count
    seq: Count
    dtype: str
    optimizer: str
    autocast: str | None = None
    master_weights: bool = False

    def build(self, device: str, seed: int, batch: int | None = None) -> LoadedModel:
        """Builds the model, with random weights that depend on `seed` only, and inputs of one micro-batch."""
        from rlplace.model.zoo.functions import runs_code

        if runs_code(self.model) and os.environ.get("RANK", "0") == "0":
            _note_code(self.model)
        return self.load(device, seed, batch)

    def load(self, device: str = "meta", seed: int = 0, batch: int | None = None) -> LoadedModel:
        """Builds the model, without a word on the code that runs: a person has just named it."""
        from rlplace.model.zoo import load_model

        with contextlib.redirect_stdout(sys.stderr), torch.random.fork_rng(devices=[]):  # what a model prints is no result
            torch.manual_seed(seed)
            samples = batch or self.batch
            return load_model(self.model, batch=samples, seq=self.seq, dtype=self.dtype, device=device, resize=True)

    def capture(self, loaded: LoadedModel, **how: Any) -> OpGraph:
        """Captures the training step of a model that was built, with further arguments of `rlplace.capture`."""
        from rlplace.model.capture.capture import capture

        own = {name: getattr(self, name) for name in ("optimizer", "autocast", "master_weights")}
        with contextlib.redirect_stdout(sys.stderr):
            return capture(loaded.module, loaded.example_inputs, loss=loaded.loss, name=loaded.name, **own, **how)


@cache
def _note_code(model: str) -> None:
    """Says once which function of the user runs."""
    print(f"running code of this machine that the plan names: {show(model)}", file=sys.stderr, flush=True)


@dataclass(frozen=True, eq=False)
class CapturedModel:
    """A model that was captured once and can be priced for any cluster.

    Attributes:
        graph: The captured training step.
        capture_at: Captures the model with a number of samples; None: it has this micro-batch size only.
        examine: Finds out what the runtime can execute of the model; None checks strategies alone.
        why_not_traced: Explains why the engine of placements cannot trace the model; None: not examined.
    """

    graph: OpGraph
    capture_at: CaptureAt | None = None
    examine: Callable[[], ModelFacts] | None = None
    why_not_traced: Callable[[], str | None] | None = None

    @staticmethod
    def of(
        graph: OpGraph,
        capture_at: CaptureAt,
        build: Callable[[bool], tuple[nn.Module, Any, Callable[..., Any] | None]],
        known: Callable[[str, Callable[[], Any]], Any] = lambda kind, make: make(),
    ) -> CapturedModel:
        """Returns a captured model that is examined when it is asked for, and once.

        Args:
            graph: The captured training step.
            capture_at: Captures it with a number of samples.
            build: Returns the module, its inputs and loss; for what only values tell with weights, where they are affordable.
            known: Returns the result of a function, maybe from an earlier command.
        """
        from rlplace.model.graph.opgraph import FORWARD

        def examine() -> ModelFacts:
            from rlplace.runtime.strategy.facts import facts_of

            return facts_of(*build(True), graph)

        def trace() -> str | None:
            from rlplace.runtime.placement.joint_graph import why_not_traced

            return why_not_traced(*build(False)[:2], graph.capture["method"], int((graph.op_phase == FORWARD).sum()))

        return CapturedModel(graph, capture_at, cache(lambda: known("facts", examine)), cache(lambda: known("traced", trace)))

    @property
    def facts(self) -> ModelFacts | None:
        """Facts on the model for the runtime; None where it was not examined."""
        return None if self.examine is None else self.examine()

    def why_no_placement(self) -> str | None:
        """Explains why the engine of placements cannot run this model; None where nothing is known against it."""
        if self.why_not_traced is None:
            return None
        facts = self.facts
        conduct = None if facts is None else facts.conduct
        if facts is not None and facts.sync_norm:
            return "SyncBatchNorm exchanges statistics between processes, which a placement does not"
        if conduct is not None and conduct.sparse:
            return f"the gradient of {conduct.sparse[0]} is sparse, which it does not add up"
        if conduct is not None and conduct.kept:
            return f"the forward writes {conduct.kept[0]}, a plain attribute, which no graph holds; register it as a buffer"
        return self.why_not_traced()

    def check_placed(self) -> None:
        """Refuses placements of a model that their engine cannot run.

        Raises:
            InputError: With the reason.
        """
        reason = self.why_no_placement()
        if reason is not None:
            raise InputError(f"a placement of ops cannot run this model: {reason}; leave --space out, which plans a strategy")


class Planned:
    """A plan, and what it was made for: every part is rebuilt on first use, once, and refused where it differs today.

    Attributes:
        plan: The plan.

    Args:
        plan: The plan.
        cluster: The cluster to use instead of the plan's own; or text that names the plan's own, where its source does not.
        **known: Parts that need no rebuilding, by name: `problem`, `search_problem` and so on.
    """

    def __init__(self, plan: PlacementPlan, cluster: Cluster | str | None = None, **known: Any) -> None:
        self.plan, self._named = plan, cluster
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
        return Planned(self.plan, machine)

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
        loaded, known = self.recipe.build("meta", seed=0, batch=samples), self.source
        again = "module" if (known.capture or {}).get("method") == "module" else None
        return self.recipe.capture(loaded, source={**(known.graph or {}), "batch": samples}, method=method or again)

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
        model = recipe.build("meta", seed=0)
        why_not, only = judge(facts_of(model.module, model.example_inputs))
        if why_not(self.strategy) is not None:
            only = None  # planned for what cannot run yet
        graph, other = two_captures(self.graph, self.capture)
        pricing: dict[str, Any] = {"other": other, "only": only, "costs": table.path, "host": self.source.host or "eager"}
        return ask(graph, machine, self.strategy.batch, why_not=why_not, **pricing)

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
