"""From a captured model, a cluster and a batch to a plan: the whole strategy, and the predictions of its rivals."""

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
from rlplace.model.graph.opgraph import OpGraph
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.prediction import Prediction
from rlplace.plan.strategy import Strategy, uniform_words
from rlplace.records import plain, trusted
from rlplace.strategy.blocks.op_costs import OpCosts
from rlplace.strategy.blocks.price import PricedBlocks
from rlplace.strategy.costs import Cut
from rlplace.strategy.drafts import KINDS, Draft, kind_of
from rlplace.strategy.executor.evaluate import DraftEvaluator, StepEvaluation
from rlplace.strategy.search.efficiency import BatchCurve, search_batches
from rlplace.strategy.search.op_level import OpLevel
from rlplace.strategy.search.remarks import DEFER, bf16_note, fp16_step_s, memory_parts, short_host, without_bf16
from rlplace.strategy.search.search import SearchResult, search
from rlplace.strategy.search.space import Space
from rlplace.strategy.search.tries import Progress, SearchProblem, Tried, priced_settings

SEARCH_PART, LEAST_PART = 0.85, 0.5
"""Part of the remaining time for the search before the check op by op; least part of the whole limit for the search."""

RECORDS_S = 1.2e-5
"""Seconds a device, of the check op by op and of the records of a plan: measured from 32,768 devices on."""

RANKED = 3
"""Strategies beside the best that a plan lists, before the best of each kind; see `unlike`."""


def plan_strategy(
    graph: OpGraph,
    cluster: Cluster,
    batch: int,
    *,
    space: Space | None = None,
    why_not: Callable[[Strategy], str | None] | None = None,
    calls: int | None = None,
    time_limit_s: float | None = None,
    began_s: float | None = None,
    seed: int = 0,
    curve: BatchCurve | None = None,
    planner: str = "strategy",
    progress: Progress | None = None,
    settings: Mapping[str, Any] | None = None,
    memory: bool = False,
    **pricing: Any,
) -> PlacementPlan:
    """Returns the best strategy for a step of `batch` samples.

    Args:
        graph: A captured step of the model.
        cluster: The devices.
        batch: Samples a step, everything together.
        space: Allowed strategies; None: all.
        why_not: Why a strategy cannot run, for example `rlplace.runtime.strategy.why_not`; None: all may.
        calls: Evaluations at most.
        time_limit_s: Seconds at most, of pricing, search, first use of a kernel and check op by op together. The search gets at
            least `LEAST_PART` of them, and the answer is always checked.
        began_s: When they began, by `time.monotonic`; None: now.
        seed: Written into the plan; the search draws nothing.
        curve: Epochs by batch: `batch` is then the smallest of those from which one is chosen
            (`rlplace.strategy.search.efficiency`).
        planner: Name of the planner in the plan.
        progress: Called as the search proceeds.
        settings: See `SearchProblem`.
        memory: Whether ``predicted.memory`` lists the parts of peak memory (`rlplace.strategy.search.remarks`).
        **pricing: Arguments of `PricedBlocks`: `other`, `only`, `costs`, `host`.

    Returns:
        A plan whose prediction lists its rivals (``predicted.strategies``): the next best, the quickest where a simpler one is
        the answer, and the best of each kind.

    Raises:
        InputError: Nothing is left to choose from.
        InfeasibleError: Nothing fits.
    """
    limit_s = math.inf if time_limit_s is None else time_limit_s
    ends_s = (time.monotonic() if began_s is None else began_s) + limit_s
    asked_s = time.monotonic()
    problem = ask(graph, cluster, batch, space=space, why_not=why_not, settings=settings, **pricing)
    ask_s = time.monotonic() - asked_s
    extra: dict[str, Any] = {}
    budget: dict[str, Any] = {
        "calls": calls,
        "time_limit_s": max(_search_s(ends_s - time.monotonic(), cluster.num_devices), LEAST_PART * limit_s),
        "progress": progress,
    }
    if curve is None:
        result = search(problem, **budget)
    else:
        problem, result, extra["batches"] = search_batches(problem, curve, **budget)
    finer = OpLevel(problem, ends_s)
    result = finer.checked(result)
    best = result.ranked[0].draft
    notes = [] if (short := short_host(graph, cluster, best.devices)) is None else [f"{short}: {DEFER}"]
    if kinds := without_bf16(graph, cluster, best.devices):
        affordable = time.monotonic() + ask_s <= ends_s  # as long as pricing took once
        graphs = graph, pricing.pop("other", None)
        fp16_s = fp16_step_s(problem, best, graphs, **pricing) if affordable else None
        notes.append(bf16_note(graph, kinds, finer.evaluate(best).step_time_s, fp16_s))
    if notes:
        extra["notes"] = notes
    predicted = predict(problem, result, finer, **extra)
    if memory:
        costs = cast(OpCosts, problem.costs)
        parts = memory_parts(best, costs, problem.cluster, finer.evaluate(best), problem.scores.traffic)
        predicted = predicted.replace(memory=tuple(plain(part) for part in parts))
    source = _source(graph, cluster, pricing.get("costs"), pricing.get("host", "eager"))
    asked = {key: source[key] for key in ("graph_fingerprint", "cluster_fingerprint", "costs", "host", "cost_version")}
    return PlacementPlan(
        problem=hashlib.sha256(json.dumps({**asked, "batch": problem.batch}, sort_keys=True).encode()).hexdigest(),
        planner=planner,
        seed=seed,
        device_of_group=np.zeros(0, dtype=np.int32),
        strategy=problem.strategy(best),
        source=source,
        predicted=predicted,
    )


def _search_s(left_s: float, devices: int) -> float:
    """Returns seconds of the search; the rest is for the check op by op and the plan's records."""
    return min(SEARCH_PART * left_s, left_s - RECORDS_S * devices)


def _source(graph: OpGraph, cluster: Cluster, costs: Any, host: str) -> dict[str, Any]:
    """Returns the `source` of a plan."""
    table = as_costs(costs)
    return {
        "name": graph.name,
        "graph": None if graph.source is None else dict(graph.source),
        "capture": dict(graph.capture),
        "graph_fingerprint": graph.fingerprint,
        "cluster": cluster.text,
        "cluster_fingerprint": cluster.fingerprint,
        "costs": {"path": str(costs) if isinstance(costs, (str, Path)) else None, "fingerprint": table.fingerprint},
        "host": host,
        "cost_version": VERSION,
        "op_times": {name: times.shares() for name, times in kind_times(graph, cluster, table, host=host).items()},
    }


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
    """Returns the problem of a model's step on a cluster, its blocks priced; `pricing` holds arguments of `PricedBlocks`."""
    pricing |= priced_settings(settings or {})
    blocks = PricedBlocks(graph, cluster, **pricing)
    scores = DraftEvaluator(blocks, cluster)
    problem = SearchProblem(scores, batch, space or Space(), settings=settings or {}, layouts=blocks.modules)
    if why_not is None:
        return problem
    return dataclasses.replace(problem, why_not=lambda draft: why_not(problem.named(draft)))


def predict(problem: SearchProblem, result: SearchResult, finer: OpLevel, **extra: Any) -> Prediction:
    """Predicts the best draft by the finest executor, with its rivals and `extra` entries."""
    best = result.ranked[0]
    kinds = sorted(result.of_kinds.values(), key=lambda tried: tried.key)
    quickest = min(result.ranked, key=lambda tried: tried.key)
    near = sorted(unlike(result.ranked, 1 + RANKED), key=lambda tried: (tried != best, tried.key))
    chosen = dict.fromkeys([*near, quickest, *filter(None, [result.uniform]), *kinds])
    return prediction(finer.evaluate(best.draft), problem.batch, problem.cluster).replace(
        search_calls=result.calls,
        extra={"complete": result.complete, **extra},
        strategies=(*(_entry(problem, tried, result) for tried in chosen), *_missing(problem, result)),
    )


def unlike(ranked: Sequence[Tried], count: int) -> list[Tried]:
    """Returns the best drafts that differ in their degrees; then, where those are fewer, in level, schedule or micro-batch.

    Near-duplicates (one block recomputed more or less) are no useful alternatives.
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
    """Returns a key that alike drafts share."""
    degrees = {(len(p.devices), *p.state, p.context, p.shard > 1) for p in draft.places}
    look: tuple[object, ...] = (len(draft.places), frozenset(degrees))
    if detailed:
        levels = frozenset((place.shard, place.sharding) for place in draft.places)
        look += (levels, draft.schedule, draft.stages, draft.microbatch)
    return look


def prediction(evaluation: StepEvaluation, batch: int, cluster: Cluster) -> Prediction:
    """Returns the evaluation of a step of so many samples on a cluster as a plan's prediction."""
    fits = evaluation.feasible
    return Prediction(
        step_time_s=evaluation.step_time_s if fits else None,
        samples_per_s=batch / evaluation.step_time_s if fits else None,
        peak_memory_bytes=evaluation.peak_memory_bytes,
        fullest_share=fullest_share(evaluation.peak_memory_bytes, cluster.devices),
        host_bytes=evaluation.host_bytes,
        feasible=fits,
        parts=evaluation.parts,
        executor=evaluation.executor,
    )


def _entry(problem: SearchProblem, tried: Tried, result: SearchResult) -> Mapping[str, Any]:
    """Returns a strategy as plans list it, without its tensor layouts, which only the plan's own strategy has."""
    with trusted():  # the answer's own record is checked
        strategy = problem.strategy(tried.draft, tensor=False)
    return {
        "kind": kind_of(tried.draft),
        "words": uniform_words(strategy),
        "devices": len(tried.draft.devices),
        "step_time_s": tried.step_s if tried.fits else None,
        "samples_per_s": problem.batch / tried.step_s if tried.fits else None,
        "over_bytes": int(tried.over_bytes),
        "uniform": tried == result.uniform,
        "reason": None,
        "strategy": strategy.to_dict(),
    }


def _missing(problem: SearchProblem, result: SearchResult) -> Iterator[Mapping[str, Any]]:
    """Yields an entry for every kind with one dimension of which nothing was evaluated, with the reason."""
    sizes = result.ranked[0].draft.microbatch
    for kind in KINDS:
        if kind in result.of_kinds:
            continue
        if problem.cluster.num_devices == 1:
            reason = "needs two devices"
        elif kind in result.refused:
            reason = result.refused[kind].replace("space: ", "left out by the space: ")
        elif not result.all_kinds:
            reason = "not evaluated: the budget ended before"
        elif problem.space.text():
            reason = "left out by the space"
        elif kind == "tensor parallel" and (cannot := problem.costs.why_not(Cut(sizes[0], 2, True))):
            reason = cannot
        else:
            reason = f"no degree divides a batch of {problem.batch} over these devices"
        none = dict.fromkeys(("step_time_s", "samples_per_s", "strategy"))
        yield {"kind": kind, "words": "", "devices": 0, **none, "over_bytes": 0, "uniform": False, "reason": reason}
