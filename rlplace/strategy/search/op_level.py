"""Drafts that a search has chosen, simulated op by op: the figures that plans announce where so many ops are affordable."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from typing import cast

from rlplace.cluster import Cluster
from rlplace.errors import InfeasibleError
from rlplace.plan.prediction import too_large
from rlplace.simulator import EXECUTOR, Timeline, simulate
from rlplace.strategy.blocks.op_costs import OpCosts
from rlplace.strategy.drafts import Draft, kind_of
from rlplace.strategy.executor.evaluate import StepEvaluation, bytes_over, side_by_side
from rlplace.strategy.executor.traffic import Traffic
from rlplace.strategy.op_level.expand import ExpandedDraft, expand_draft, tasks_of
from rlplace.strategy.search.search import SearchResult
from rlplace.strategy.search.simpler import NEAR, simpler
from rlplace.strategy.search.tries import SearchProblem, Tried

MOST_TASKS = 100_000
"""A draft of more tasks keeps the figures of the block executor; so many take half a second."""

TASKS_OF_RIVALS = 300_000
"""Tasks at most of what is checked beside the first drafts; the others keep the figures of the block executor."""

LEADERS = 4
"""Drafts that fit op by op, of which the quickest is chosen."""

SIMPLER = 4
"""Simpler drafts that are looked at, of which the simplest that comes near the quickest is answered."""


def evaluate_ops(
    draft: Draft, costs: OpCosts, cluster: Cluster, said: StepEvaluation, traffic: Traffic | None = None
) -> StepEvaluation:
    """What the op-level simulator says of a draft; parts and stages are those of the block executor.

    Args:
        draft: The draft.
        costs: What ops take.
        cluster: Where it runs.
        said: What the block executor says of it.
        traffic: Of the cluster, where it is known.
    """
    return evaluation_of(*simulate_ops(draft, costs, cluster, traffic), said, cluster)


def simulate_ops(
    draft: Draft, costs: OpCosts, cluster: Cluster, traffic: Traffic | None = None, *, named: bool = False
) -> tuple[ExpandedDraft, Timeline]:
    """Returns the ops of one pipeline, and when they run; `named`: ops have names for people."""
    expanded = expand_draft(draft, costs, cluster, traffic, named=named)
    return expanded, simulate(expanded.problem, expanded.problem.group_device, order=expanded.order)


def evaluation_of(expanded: ExpandedDraft, line: Timeline, said: StepEvaluation, cluster: Cluster) -> StepEvaluation:
    """What a simulated step says; parts and stages are those of the block executor, in `said`."""
    step = math.inf if line.step_time_s is None else line.step_time_s
    peaks = [0] * cluster.num_devices
    for peak, devices in zip(line.peak_memory_bytes.tolist(), expanded.stands_for, strict=True):
        for device in devices:
            peaks[device] = peak + cluster.devices[device].reserved_bytes
    over = bytes_over(peaks, cluster)
    return dataclasses.replace(
        said,
        step_time_s=step,
        passes_s=step - (said.step_time_s - said.passes_s),
        feasible=over == 0.0 and step < math.inf,
        peak_memory_bytes=tuple(peaks),
        over_bytes=over,
        parts={name: seconds * (step / said.step_time_s) for name, seconds in said.parts.items()},
        executor=EXECUTOR,
    )


class OpLevel:
    """What drafts take by the finest executor that is affordable; everything is simulated once.

    Args:
        question: What was asked, with costs that are known op by op.
        ends_s: By `time.monotonic`, when only what must be checked still is: the one that is answered.
    """

    def __init__(self, question: SearchProblem, ends_s: float = math.inf) -> None:
        self._ends_s = ends_s
        self._question, self._traffic = question, Traffic(question.cluster)
        self._costs = cast(OpCosts, question.costs)
        self._known: dict[Draft, StepEvaluation] = {}
        self._tasks = 0
        self._larger: dict[str | None, float] = {}  # by schedule, peaks of what did not fit over those of the block executor

    def evaluate(self, draft: Draft) -> StepEvaluation:
        """Returns step time and memory."""
        if draft.beside and draft not in self._known:
            alone = [self.evaluate(one) for one in draft.pipelines]
            self._known[draft] = side_by_side(draft, alone, self._costs, self._traffic)
        elif draft not in self._known:
            said, tasks = self._question.scores.evaluate(draft), tasks_of(draft, self._costs)
            if tasks <= MOST_TASKS:
                self._tasks += tasks
                said = evaluate_ops(draft, self._costs, self._question.cluster, said, self._traffic)
            self._known[draft] = said
        return self._known[draft]

    def checked(self, answer: SearchResult) -> SearchResult:
        """Returns the same answer with the figures of the first of its drafts, and of its rivals; none announced that does not
        fit.

        What is not checked is never before the best of what is. The first is the simplest that is near the quickest
        (`rlplace.strategy.search.simpler`), the others follow by their step time.

        Raises:
            InfeasibleError: Nothing fits.
        """
        leaders = self._fitting(answer.ranked, LEADERS)
        if not leaders:
            nearest = min(self._known, key=lambda draft: self._known[draft].over_bytes)
            short = self._known[nearest].over_bytes
            raise InfeasibleError(
                f"no strategy fits op by op: the nearest is {too_large(short, len(nearest.devices))}, though it "
                "fits block by block; use more or larger devices, a smaller batch, or a wider space",
                short_bytes=int(short),
            )
        ranked = [*leaders, *(tried for tried in answer.ranked if tried.draft not in self._known)]
        self._tasks = 0
        of_kinds = {
            kind: self._rival(tried, (other for other in ranked if kind_of(other.draft) == kind))
            for kind, tried in sorted(answer.of_kinds.items(), key=lambda item: item[1].key)
        }
        uniform = None if answer.uniform is None else self._rival(answer.uniform, ())
        first = self._simplest(answer.ranked)
        checked = self._checked(answer.ranked)
        others = [tried for tried in answer.ranked if tried.draft not in self._known and tried.step_s >= checked[0].step_s]
        ranked = sorted([*checked, *others], key=lambda tried: (tried != first, tried.key))
        return dataclasses.replace(answer, ranked=tuple(ranked), uniform=uniform, of_kinds=of_kinds)

    def _checked(self, ranked: Iterable[Tried]) -> list[Tried]:
        """Those that were checked and fit, the quickest first, with the figures of the check."""
        checked = [self._tried(tried) for tried in ranked if tried.draft in self._known]
        return sorted((tried for tried in checked if tried.fits), key=lambda tried: tried.key)

    def _simplest(self, ranked: Sequence[Tried]) -> Tried:
        """Returns the simplest near the quickest that was checked, which it is itself where no simpler one is; checks a few
        more.
        """
        by_blocks = {tried.draft: tried.step_s for tried in ranked}
        quickest = self._checked(ranked)[0]
        known = [tried for tried in self._checked(ranked) if tried.step_s <= NEAR * quickest.step_s]
        behind = [tried for tried in ranked if tried.draft not in self._known]
        others = simpler(behind, quickest, NEAR * by_blocks[quickest.draft])[:SIMPLER]
        if time.monotonic() <= self._ends_s:
            known += self._fitting(others, SIMPLER)
        quickest = min(known, key=lambda tried: tried.key)
        return next(iter(simpler(sorted(known, key=lambda tried: tried.key), quickest, NEAR * quickest.step_s)), quickest)

    def _rival(self, tried: Tried, others: Iterable[Tried]) -> Tried:
        """Returns the best of a kind, as far as tasks are left."""
        if not tried.fits or self._tasks > TASKS_OF_RIVALS or time.monotonic() > self._ends_s:
            return tried
        return next(iter(self._fitting([tried, *others], 1)), self._tried(tried))

    def _tried(self, tried: Tried) -> Tried:
        said = self.evaluate(tried.draft)
        return Tried(tried.draft, said.step_time_s, said.over_bytes)

    def _fitting(self, ranked: Iterable[Tried], count: int) -> list[Tried]:
        """Returns the first that fit."""
        found: list[Tried] = []
        devices = self._question.cluster.devices
        for tried in ranked:
            if len(found) == count or (found and time.monotonic() > self._ends_s):
                break
            said = self._question.scores.evaluate(tried.draft)
            sizes, larger = zip(said.peak_memory_bytes, devices, strict=True), self._larger.get(tried.draft.schedule, 1.0)
            if any(larger * peak > (device.memory_bytes or math.inf) for peak, device in sizes):
                continue
            finer = self.evaluate(tried.draft)
            if finer.feasible:
                found.append(Tried(tried.draft, finer.step_time_s, 0.0))
            else:
                pairs = zip(finer.peak_memory_bytes, said.peak_memory_bytes, strict=True)
                self._larger[tried.draft.schedule] = max(larger, *(peak / max(1, other) for peak, other in pairs))
        return found
