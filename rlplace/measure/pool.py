"""`Pool`: strategies that may be worth a run, with what they take in the worlds that the cluster may be.

Strategies are what the search answers by the cost model, by a few draws of the world, and with less memory than there is, so
that there is something to run whatever the truth is. C candidates, P axes, F features.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rlplace.cluster import Cluster
from rlplace.errors import InfeasibleError
from rlplace.measure.world import SLACK, World, Worlds, evaluator_in, world_of
from rlplace.plan.schedule import SCHEDULES
from rlplace.strategy.costs import FULL, SELECTIVE, Floats
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.evaluate import PARTS, StepEvaluation
from rlplace.strategy.search.plan import unlike
from rlplace.strategy.search.search import search
from rlplace.strategy.search.tries import SearchProblem

CALLS, OTHER_WORLDS, OF_EACH, MOST = 400, 6, 4, 48
"""Evaluations of the search by the cost model, half of them in every other world; worlds that are asked besides; strategies of
each answer; and candidates at most."""

CHOICES = (
    "devices", "replicas", "shared", "tensor", "stages", "chunks", "microbatches", "microbatch", "level", "selective", "full",
    "offload", "split", "unlike",
)  # fmt: skip
"""What a strategy chooses; degrees are logarithms to base 2."""

FEATURES = (*CHOICES, *PARTS)
"""Of a candidate; parts are shares of the step by the cost model."""


@dataclass(frozen=True, eq=False)
class Pool:
    """Candidates of one question.

    Attributes:
        worlds: Along the axes.
        drafts: C candidates.
        said: What the cost model says of each.
        by_model_s: float64 [C], step times by the cost model.
        log_s: float64 [1 + 2 P, C], log of step times in the worlds.
        share: float64 [C], of the fullest device's memory beyond what is reserved, by the cost model.
        features: float64 [C, F].
    """

    worlds: Worlds
    drafts: tuple[Draft, ...]
    said: tuple[StepEvaluation, ...]
    by_model_s: Floats
    log_s: Floats
    share: Floats
    features: Floats

    def around(self, center: Floats, question: SearchProblem) -> Pool:
        """Returns the same candidates in worlds around another one."""
        return pool_of(self.drafts, question, dataclasses.replace(self.worlds, center=center))

    def with_drafts(self, drafts: Iterable[Draft], question: SearchProblem) -> Pool:
        """With those that are new and can run, behind the others."""
        new = [draft for draft in dict.fromkeys(drafts) if draft not in self.drafts]
        more = pool_of(new, question, self.worlds)
        return Pool(
            self.worlds,
            self.drafts + more.drafts,
            self.said + more.said,
            np.concatenate([self.by_model_s, more.by_model_s]),
            np.concatenate([self.log_s, more.log_s], axis=1),
            np.concatenate([self.share, more.share]),
            np.concatenate([self.features, more.features]),
        )


def pool_of(drafts: Sequence[Draft], question: SearchProblem, worlds: Worlds) -> Pool:
    """What drafts take; those that never end are left out."""
    said = [question.scores.evaluate(draft) for draft in drafts]
    with np.errstate(divide="ignore"):
        log_s = np.log(worlds.seconds(drafts)).reshape(len(worlds.values), len(drafts))
    kept = [number for number in range(len(drafts)) if np.isfinite(log_s[:, number]).all()]  # in one world as in another
    return Pool(
        worlds,
        tuple(drafts[number] for number in kept),
        tuple(said[number] for number in kept),
        np.array([said[number].step_time_s for number in kept]),
        log_s[:, kept],
        np.array([fullest(said[number], question.cluster) for number in kept]),
        np.array([features(drafts[number], said[number]) for number in kept]).reshape(len(kept), len(FEATURES)),
    )


def first_pool(question: SearchProblem, *, calls: int = CALLS, most: int = MOST, seed: int = 0) -> Pool:
    """Returns candidates before anything ran.

    Args:
        question: What is asked.
        calls: Evaluations of the search by the cost model.
        most: Candidates at most.
        seed: Of the other worlds that are asked.

    Raises:
        InfeasibleError: No strategy fits.
        InputError: Nothing is left to choose from.
    """
    worlds = Worlds.of(question.costs, question.cluster)
    drawn = np.random.default_rng(seed).standard_normal((OTHER_WORLDS, len(worlds.center)))
    chosen = candidates(question, calls, 3 * OF_EACH)
    roomy = World({}, (1.0,) * (max(question.cluster.hosts) + 1), slack=math.exp(SLACK[0] + 2.5 * SLACK[1]))
    others = [world_of(question.cluster, values, math.exp(SLACK[0] + SLACK[1])) for values in drawn]
    for world in (roomy, *others):
        try:
            chosen += candidates(asked_in(world, question), max(1, calls // 2), OF_EACH)
        except InfeasibleError:  # in this world there is too little memory
            continue
    return pool_of(list(dict.fromkeys(chosen))[:most], question, worlds)


def asked_in(world: World, question: SearchProblem) -> SearchProblem:
    """Returns the same question where a world is the truth."""
    return dataclasses.replace(question, scores=evaluator_in(world, question.costs, question.cluster))


def candidates(question: SearchProblem, calls: int, count: int) -> list[Draft]:
    """Unlike strategies that fit, the best first, and the best of each kind."""
    answer = search(question, calls=calls)
    kinds = sorted((tried for tried in answer.of_kinds.values() if tried.fits), key=lambda tried: tried.key)
    return [tried.draft for tried in dict.fromkeys([*unlike(answer.ranked, count), *kinds[:count]])]


def fullest(said: StepEvaluation, cluster: Cluster) -> float:
    """Returns share of the fullest device's memory beyond what is reserved."""
    shares = [0.0]
    for peak, device in zip(said.peak_memory_bytes, cluster.devices, strict=True):
        if device.memory_bytes is not None and peak:
            shares.append((peak - device.reserved_bytes) / max(1, device.memory_bytes - device.reserved_bytes))
    return max(shares)


def features(draft: Draft, said: StepEvaluation) -> Floats:
    """Returns float64 [F] by `FEATURES`."""
    return np.array([*choices(draft), *(said.parts.get(name, 0.0) / said.step_time_s for name in PARTS)])


def choices(draft: Draft) -> list[float]:
    """What a draft chooses, by `CHOICES`."""
    places, blocks = draft.places, len(draft.recompute)

    def log2(values: Iterable[int]) -> float:
        return math.log2(max(values))

    schedule = None if draft.schedule is None else SCHEDULES[draft.schedule]
    return [
        log2([len(draft.devices)]),
        log2(place.replicate for place in places),
        log2(place.shard for place in places),
        log2(place.tensor for place in places),
        log2([len(places)]),
        log2([max(1, draft.stages // len(places))]),
        log2(draft.microbatches),
        log2(draft.microbatch),
        max(place.sharding for place in places) / 3.0,
        draft.recompute.count(SELECTIVE) / blocks,
        draft.recompute.count(FULL) / blocks,
        sum(map(bool, draft.offload)) / blocks,
        float(schedule is not None and schedule.splits_backward),
        float(len({place.data_degree for place in places}) > 1 or bool(draft.beside)),
    ]
