"""Made-up truths: clusters that are other than the cost model says, to practise and to compare on.

A truth is a world further out than what a belief expects, and more: every kind of strategy has habits of its own, some
devices stall, and no two strategies are wrong by the same. Runs are noisy, and fail where memory is short.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.random import Generator

from rlplace.measure.log import Ended
from rlplace.measure.pool import asked_in, fullest
from rlplace.measure.world import World, axes, world_of
from rlplace.strategy.drafts import Draft, kind_of
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.tries import SearchProblem

WIDER, TAIL = 1.0, 5.0
"""Of a truth's axes over those of a belief, and the degrees of freedom of their distribution (Student's t)."""

HABIT, OWN, NOISE = 0.06, 0.02, 0.01
"""Standard deviations of logs: of a kind of strategy, of a single one, and of a measured step."""

SLACK = 0.0, 0.15
"""Mean and standard deviation of the log of the memory over what is predicted."""

STALL = 0.25, 1.6
"""Chance that one host is slow, and how slow at most."""


@dataclass(frozen=True, eq=False)
class Truth:
    """What is so.

    Attributes:
        question: As the cost model knows it.
        world: What is wrong with it.
        seed: Of what has no cause.
    """

    question: SearchProblem
    world: World
    seed: int

    @staticmethod
    def drawn(question: SearchProblem, seed: int) -> Truth:
        """Returns a truth at random."""
        rng = np.random.default_rng([seed, 7])
        names = axes(question.cluster)
        values = WIDER * rng.standard_t(TAIL, len(names)) / math.sqrt(TAIL / (TAIL - 2))
        world = world_of(question.cluster, values, math.exp(rng.normal(*SLACK)))
        host = np.array(world.host)
        if len(host) > 1 and rng.random() < STALL[0]:
            host[rng.integers(len(host))] *= rng.uniform(1.1, STALL[1])
        return Truth(question, World(**{**vars(world), "host": tuple(host.tolist())}), seed)

    @cached_property
    def asked(self) -> SearchProblem:
        """The question as somebody who knows the world would ask it."""
        return asked_in(self.world, self.question)

    @property
    def scores(self) -> DraftEvaluator:
        """What strategies take, without habits."""
        return self.asked.scores

    def step_s(self, draft: Draft) -> float:
        """Returns the step time without noise."""
        said = self.scores.evaluate(draft)
        strange = self._drawn(kind_of(draft), draft.schedule).normal(0.0, HABIT) + self._drawn(draft).normal(0.0, OWN)
        return self.world.seconds(said) * math.exp(strange)

    def share(self, draft: Draft) -> float:
        """Of the fullest device's memory beyond what is reserved."""
        own = self._drawn("memory", draft).normal(0.0, OWN)
        return fullest(self.question.scores.evaluate(draft), self.question.cluster) * self.world.slack * math.exp(own)

    def run(self, draft: Draft, rng: Generator) -> Ended:
        """Returns one run of a few steps."""
        share = self.share(draft)
        if share > 1.0:
            return Ended("out_of_memory")
        step_s = self.step_s(draft) * math.exp(rng.normal(0.0, NOISE))
        return Ended("done", (step_s,), share, self.pace_s(rng), self.stage_busy_s(draft))

    def stage_busy_s(self, draft: Draft) -> tuple[float, ...]:
        """Returns seconds of the passes of every stage of a pipeline, each mispriced in its own way."""
        own = self._drawn("stages", draft)
        busy = self.scores.evaluate(draft).stage_busy_s
        return tuple(seconds * math.exp(own.normal(0.0, OWN)) for seconds in busy) if len(busy) > 1 else ()

    def pace_s(self, rng: Generator) -> tuple[float, ...]:
        """What every device takes for a product that takes one a millisecond by the cost model."""
        pairs = zip(self.question.cluster.kinds, self.question.cluster.hosts, strict=True)
        factors = [self.world.kind.get(kind.name, 1.0) * self.world.host[host] for kind, host in pairs]
        return tuple(1e-3 * factor * math.exp(rng.normal(0.0, NOISE)) for factor in factors)

    def _drawn(self, *what: object) -> Generator:
        digest = hashlib.sha256(repr((self.seed, what)).encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:8], "little"))
