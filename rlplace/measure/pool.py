"""`Pool`: strategies that may be worth a run, with their step times in worlds that the cluster may be.

Strategies are the answers of the search under the cost model, under a few draws of the world, and with less memory than there
is, so that there is something to run whatever the truth is. C candidates, P axes, F features.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InfeasibleError
from rlplace.measure.world import SLACK, World, Worlds, fullest, problem_in, world_of
from rlplace.plan.schedule import SCHEDULES
from rlplace.strategy.costs import FULL, SELECTIVE, Floats
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.evaluate import PARTS, StepEvaluation
from rlplace.strategy.search.plan import unlike
from rlplace.strategy.search.search import search
from rlplace.strategy.search.tries import SearchProblem

CALLS, OTHER_WORLDS, OF_EACH, MOST = 400, 6, 4, 48
"""Evaluations of the search by the cost model, half as many in every other world; number of other worlds; strategies of each
answer; and candidates at most."""

CHOICES = (
    "devices", "replicas", "shared", "tensor", "stages", "chunks", "microbatches", "microbatch", "level", "selective", "full",
    "offload", "split", "unlike",
)  # fmt: skip
"""Choices of a strategy; degrees are logarithms to base 2."""

FEATURES = (*CHOICES, *PARTS)
"""Features of a candidate; parts are shares of the step by the cost model."""


@dataclass(frozen=True, eq=False)
class Pool:
    """Candidates of one search problem.

    Attributes:
        worlds: Sigma points along the axes.
        drafts: C candidates.
        steps: Their steps by the cost model.
        by_model_s: float64 [C], step times by the cost model.
        log_s: float64 [1 + 2 P, C], log of step times in the worlds.
        share: float64 [C], of the fullest device's memory beyond its reserved bytes, by the cost model.
        features: float64 [C, F], by `FEATURES`.
    """

    worlds: Worlds
    drafts: tuple[Draft, ...]
    steps: tuple[StepEvaluation, ...]
    by_model_s: Floats
    log_s: Floats
    share: Floats
    features: Floats

    def around(self, center: Floats, problem: SearchProblem) -> Pool:
        """Returns the candidates with worlds around another center."""
        return pool_of(self.drafts, problem, dataclasses.replace(self.worlds, center=center))

    def with_drafts(self, drafts: Iterable[Draft], problem: SearchProblem) -> Pool:
        """Adds drafts that are new and can run, behind the others."""
        new = [draft for draft in dict.fromkeys(drafts) if draft not in self.drafts]
        more = pool_of(new, problem, self.worlds)
        log_s = np.concatenate([self.log_s, more.log_s], axis=1)
        rest = (np.concatenate([getattr(one, name) for one in (self, more)]) for name in ("by_model_s", "share", "features"))
        by_model_s, share, features = rest
        return Pool(self.worlds, self.drafts + more.drafts, self.steps + more.steps, by_model_s, log_s, share, features)


def pool_of(drafts: Sequence[Draft], problem: SearchProblem, worlds: Worlds) -> Pool:
    """Evaluates drafts in all worlds; those that never end are left out."""
    with np.errstate(divide="ignore"):
        log_s = np.log(worlds.seconds(drafts)).reshape(len(worlds.values), len(drafts))
    ending: NDArray[np.bool_] = np.all(np.isfinite(log_s), axis=0)  # in one world as in another
    kept = tuple(draft for draft, ends in zip(drafts, ending.tolist(), strict=True) if ends)
    steps = tuple(problem.scores.evaluate(draft) for draft in kept)
    rows = [features(draft, step) for draft, step in zip(kept, steps, strict=True)]
    by_model_s = np.array([step.step_time_s for step in steps])
    share = np.array([fullest(step, problem.cluster) for step in steps])
    return Pool(worlds, kept, steps, by_model_s, log_s[:, ending], share, np.array(rows).reshape(len(kept), len(FEATURES)))


def first_pool(problem: SearchProblem, *, calls: int = CALLS, most: int = MOST, seed: int = 0) -> Pool:
    """Returns candidates before anything ran.

    Args:
        problem: The search problem.
        calls: Evaluations of the search by the cost model.
        most: Candidates at most.
        seed: Seed of the other worlds.

    Raises:
        InfeasibleError: No strategy fits.
        InputError: Nothing is left to choose from.
    """
    worlds = Worlds.of(problem.costs, problem.cluster)
    drawn = np.random.default_rng(seed).standard_normal((OTHER_WORLDS, len(worlds.center)))
    chosen = candidates(problem, calls, 3 * OF_EACH)
    roomy = World({}, (1.0,) * (max(problem.cluster.hosts) + 1), slack=math.exp(SLACK[0] + 2.5 * SLACK[1]))
    others = [world_of(problem.cluster, values, math.exp(SLACK[0] + SLACK[1])) for values in drawn]
    for world in (roomy, *others):
        try:
            chosen += candidates(problem_in(world, problem), max(1, calls // 2), OF_EACH)
        except InfeasibleError:  # in this world there is too little memory
            continue
    return pool_of(list(dict.fromkeys(chosen))[:most], problem, worlds)


def candidates(problem: SearchProblem, calls: int, count: int) -> list[Draft]:
    """Searches for unlike strategies that fit, the best first, and the best of each kind."""
    answer = search(problem, calls=calls)
    kinds = sorted((tried for tried in answer.of_kinds.values() if tried.fits), key=lambda tried: tried.key)
    return [tried.draft for tried in dict.fromkeys([*unlike(answer.ranked, count), *kinds[:count]])]


def features(draft: Draft, step: StepEvaluation) -> Floats:
    """Returns float64 [F] by `FEATURES`."""
    return np.array([*choices(draft), *(step.parts.get(name, 0.0) / step.step_time_s for name in PARTS)])


def choices(draft: Draft) -> list[float]:
    """Returns the choices of a draft, by `CHOICES`."""
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
