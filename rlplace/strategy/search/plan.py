"""From a captured model, a cluster and a batch to a plan: the whole strategy, and what its rivals would take."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from rlplace.cluster import Cluster
from rlplace.cluster.links import fullest_share
from rlplace.cost.compute import VERSION
from rlplace.cost.foreign import as_costs
from rlplace.cost.price import kind_times
from rlplace.cost.table import CostTable
from rlplace.model.graph.opgraph import OpGraph
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.prediction import Prediction
from rlplace.plan.strategy import Strategy, uniform_words
from rlplace.records import plain
from rlplace.strategy.blocks.op_costs import OpCosts
from rlplace.strategy.blocks.price import PricedBlocks
from rlplace.strategy.costs import Cut
from rlplace.strategy.drafts import KINDS, Draft, kind_of
from rlplace.strategy.executor.evaluate import DraftEvaluator, StepEvaluation
from rlplace.strategy.search.efficiency import BatchCurve, search_batches
from rlplace.strategy.search.op_level import OpLevel
from rlplace.strategy.search.remarks import bf16_note, fp16_step_s, without_bf16
from rlplace.strategy.search.search import SearchResult, search
from rlplace.strategy.search.space import Space
from rlplace.strategy.search.tries import Progress, SearchProblem, Tried

SEARCH_PART, LEAST_PART = 0.85, 0.5
"""Of the time that is left, for the search before the check op by op; and of the whole limit, what the search gets at least."""

RANKED = 3
"""Strategies beside the best that a plan lists, before the best of each kind; see `unlike`."""


def plan_strategy(
    graph: OpGraph,
    cluster: Cluster,
    batch: int,
    *,
    other: OpGraph | None = None,
    space: Space | None = None,
    why_not: Callable[[Strategy], str | None] | None = None,
    calls: int | None = None,
    time_limit_s: float | None = None,
    began_s: float | None = None,
    seed: int = 0,
    only: Mapping[str, str] | None = None,
    costs: CostTable | str | Path | None = None,
    host: str = "eager",
    curve: BatchCurve | None = None,
    planner: str = "strategy",
    progress: Progress | None = None,
    settings: Mapping[str, Any] | None = None,
    memory: bool = False,
) -> PlacementPlan:
    """Returns the best strategy for a step of `batch` samples.

    Args:
        graph: A captured step of the model.
        cluster: The devices.
        batch: Samples a step, everything together.
        other: The same model captured at another batch size: both together give all sizes; None: micro-batches have the size
            that was captured.
        space: What may be chosen; None: everything.
        why_not: Why a strategy cannot run, for example `rlplace.runtime.strategy.why_not`; None: all may.
        calls: Evaluations at most.
        time_limit_s: Seconds at most, of pricing, search, first use of a kernel and check op by op together. The search gets at
            least `LEAST_PART` of them, and nothing is answered that was not checked.
        began_s: When they began, by `time.monotonic`; None: now.
        seed: Written into the plan; the search draws nothing.
        only: Modules whose weights a tensor group may cut, with the layouts that a runtime has for them; None: all, any.
        costs: See `rlplace.price`; so is `host`.
        host: See `costs`.
        curve: Epochs by batch: `batch` is then the smallest of those from which one is chosen
            (`rlplace.strategy.search.efficiency`).
        planner: Who answers, as the plan says it.
        progress: Told how far the search is.
        settings: See `SearchProblem`.
        memory: Whether ``predicted.memory`` says what fills the devices (`rlplace.strategy.search.remarks`).

    Returns:
        A plan whose prediction lists its rivals (``predicted.strategies``): the next best, the quickest where a simpler one is
        the answer, and the best of each kind.

    Raises:
        InputError: Nothing is left to choose from.
        InfeasibleError: Nothing fits.
    """
    pricing: dict[str, Any] = {"other": other, "only": only, "costs": costs, "host": host}
    limit_s = math.inf if time_limit_s is None else time_limit_s
    ends_s = (time.monotonic() if began_s is None else began_s) + limit_s
    asked_s = time.monotonic()
    question = ask(graph, cluster, batch, space=space, why_not=why_not, settings=settings, **pricing)
    ask_s = time.monotonic() - asked_s
    extra: dict[str, Any] = {}
    search_s = max(SEARCH_PART * (ends_s - time.monotonic()), LEAST_PART * limit_s)
    if curve is None:
        answer = search(question, calls=calls, time_limit_s=search_s, progress=progress)
    else:
        question, answer, extra["batches"] = search_batches(
            question, curve, calls=calls, time_limit_s=search_s, progress=progress
        )
    finer = OpLevel(question, ends_s)
    answer = finer.checked(answer)
    best = answer.ranked[0]
    if kinds := without_bf16(graph, cluster, best.draft.devices):
        affordable = time.monotonic() + ask_s <= ends_s  # as long as pricing took once
        fp16_s = fp16_step_s(question, best.draft, (graph, other), only=only, costs=costs, host=host) if affordable else None
        extra["notes"] = [bf16_note(graph, kinds, finer.evaluate(best.draft).step_time_s, fp16_s)]
    source = {
        "name": graph.name,
        "graph": None if graph.source is None else dict(graph.source),
        "capture": dict(graph.capture),
        "graph_fingerprint": graph.fingerprint,
        "cluster": cluster.text,
        "cluster_fingerprint": cluster.fingerprint,
        "costs": {"path": str(costs) if isinstance(costs, (str, Path)) else None, "fingerprint": as_costs(costs).fingerprint},
        "host": host,
        "cost_version": VERSION,
        "op_times": {name: times.shares() for name, times in kind_times(graph, cluster, as_costs(costs), host=host).items()},
    }
    asked = {key: source[key] for key in ("graph_fingerprint", "cluster_fingerprint", "costs", "host", "cost_version")}
    return PlacementPlan(
        problem=hashlib.sha256(json.dumps({**asked, "batch": question.batch}, sort_keys=True).encode()).hexdigest(),
        planner=planner,
        seed=seed,
        device_of_group=np.zeros(0, dtype=np.int32),
        strategy=question.strategy(best.draft),
        source=source,
        predicted=predict(question, answer, finer, **extra).replace(memory=_memory(question, answer, finer) if memory else ()),
    )


def ask(
    graph: OpGraph,
    cluster: Cluster,
    batch: int,
    *,
    space: Space | None = None,
    why_not: Callable[[Strategy], str | None] | None = None,
    settings: Mapping[str, Any] | None = None,
    **pricing: Any,
) -> SearchProblem:
    """Returns the question of a model's step on a cluster, its blocks priced; `pricing` holds arguments of `PricedBlocks`."""
    blocks = PricedBlocks(graph, cluster, **pricing)
    names = blocks.names
    excluded = None if why_not is None else lambda draft: why_not(draft.strategy(names))
    return SearchProblem(
        DraftEvaluator(blocks, cluster), batch, space or Space(), excluded, settings=settings or {}, layouts=blocks.modules
    )


def predict(question: SearchProblem, answer: SearchResult, finer: OpLevel, **extra: Any) -> Prediction:
    """What the best draft takes by the finest executor, with its rivals; `extra` is told beside."""
    best = answer.ranked[0]
    kinds = sorted(answer.of_kinds.values(), key=lambda tried: tried.key)
    quickest = min(answer.ranked, key=lambda tried: tried.key)
    near = sorted(unlike(answer.ranked, 1 + RANKED), key=lambda tried: (tried != best, tried.key))
    chosen = dict.fromkeys([*near, quickest, *filter(None, [answer.uniform]), *kinds])
    return prediction(finer.evaluate(best.draft), question.batch, question.cluster).replace(
        search_calls=answer.calls,
        extra={"complete": answer.complete, **extra},
        strategies=(*(_entry(question, tried, answer) for tried in chosen), *_missing(question, answer)),
    )


def _memory(question: SearchProblem, answer: SearchResult, finer: OpLevel) -> tuple[Mapping[str, Any], ...]:
    """What fills the devices under the best draft, an entry for those that hold the same."""
    from rlplace.strategy.search.remarks import memory_parts

    draft, costs = answer.ranked[0].draft, cast(OpCosts, question.costs)
    rows = memory_parts(draft, costs, question.cluster, finer.evaluate(draft), question.scores.traffic)
    return tuple(plain(row) for row in rows)


def unlike(ranked: Sequence[Tried], count: int) -> list[Tried]:
    """Returns the best drafts that differ in their degrees; then, where those are fewer, in level, schedule or micro-batch.

    Neighbours of the best that recompute a block less are no choice for a person who wants to try three strategies.
    """
    found: dict[Tried, None] = {}
    for detailed in (False, True):
        seen: set[tuple[object, ...]] = {_look(tried.draft, detailed) for tried in found}
        for tried in ranked:
            if len(found) < count and _look(tried.draft, detailed) not in seen:
                seen.add(_look(tried.draft, detailed))
                found[tried] = None
    return sorted(found, key=lambda tried: tried.key)


def _look(draft: Draft, detailed: bool) -> tuple[object, ...]:
    """What two alike drafts have in common."""
    degrees = {(len(p.devices), p.tensor, p.context, p.expert, p.shard > 1) for p in draft.places}
    look: tuple[object, ...] = (len(draft.places), frozenset(degrees))
    if detailed:
        levels = frozenset((place.shard, place.sharding) for place in draft.places)
        look += (levels, draft.schedule, draft.stages, draft.microbatch)
    return look


def prediction(said: StepEvaluation, batch: int, cluster: Cluster) -> Prediction:
    """What an executor says of a step of so many samples on a cluster, as plans keep it."""
    return Prediction(
        step_time_s=said.step_time_s if said.feasible else None,
        samples_per_s=batch / said.step_time_s if said.feasible else None,
        peak_memory_bytes=said.peak_memory_bytes,
        fullest_share=fullest_share(said.peak_memory_bytes, cluster.devices),
        host_bytes=said.host_bytes,
        feasible=said.feasible,
        parts=said.parts,
        executor=said.executor,
    )


def _entry(question: SearchProblem, tried: Tried, answer: SearchResult) -> Mapping[str, Any]:
    """Returns a strategy as plans list it, without its tensor layouts, which the answer has."""
    strategy = dataclasses.replace(question, layouts=None).strategy(tried.draft)
    return {
        "kind": kind_of(tried.draft),
        "words": uniform_words(strategy),
        "devices": len(tried.draft.devices),
        "step_time_s": tried.step_s if tried.fits else None,
        "samples_per_s": question.batch / tried.step_s if tried.fits else None,
        "over_bytes": int(tried.over_bytes),
        "uniform": tried == answer.uniform,
        "reason": None,
        "strategy": strategy.to_dict(),
    }


def _missing(question: SearchProblem, answer: SearchResult) -> Iterator[Mapping[str, Any]]:
    """Yields an entry for every kind with one dimension of which nothing was evaluated, with the reason."""
    sizes = answer.ranked[0].draft.microbatch
    for kind in KINDS:
        if kind in answer.of_kinds:
            continue
        if question.cluster.num_devices == 1:
            reason = "needs two devices"
        elif kind in answer.refused:
            reason = answer.refused[kind].replace("space: ", "left out by the space: ")
        elif not answer.all_kinds:
            reason = "not evaluated: the budget ended before"
        elif question.space.text():
            reason = "left out by the space"
        elif kind == "tensor parallel" and (cannot := question.costs.why_not(Cut(sizes[0], 2, True))):
            reason = cannot
        else:
            reason = f"no degree divides a batch of {question.batch} over these devices"
        none = dict.fromkeys(("step_time_s", "samples_per_s", "strategy"))
        yield {"kind": kind, "words": "", "devices": 0, **none, "over_bytes": 0, "uniform": False, "reason": reason}
