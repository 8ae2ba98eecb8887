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
from rlplace.strategy.executor.traffic import ClusterTraffic
from rlplace.strategy.op_level.expand import ExpandedDraft, expand_draft, tasks_of
from rlplace.strategy.search.search import SearchResult
from rlplace.strategy.search.tries import SearchProblem, Tried

MOST_TASKS = 100_000
"""A draft of more tasks keeps the figures of the block executor; so many take half a second."""

TASKS_OF_RIVALS = 300_000
"""Tasks at most beside the first drafts; further drafts keep the figures of the block executor."""

LEADERS = 4
"""Drafts that fit op by op, of which the quickest is chosen."""

SIMPLER = 4
"""Simpler drafts that are checked, of which the simplest near the quickest is the answer."""

NEAR = 1.01
"""A plan that takes at most so many times as long as the quickest is as good: the simpler one is the answer."""


def simplicity(draft: Draft) -> tuple[int, ...]:
    """Returns measures of a strategy's complexity, the most important first; the smaller is simpler.

    Fewer devices, fewer pipelines beside each other, fewer stages, nothing that is cut (tensor, context and expert axes,
    divided tables), nothing offloaded, nothing recomputed, whole copies or a low sharding level, fewer axes, fewer
    micro-batches.
    """
    pipelines = draft.pipelines
    places = [place for one in pipelines for place in one.places]
    tensor, context, expert, tables, shard, replicate = (
        max(getattr(place, axis) for place in places)
        for axis in ("tensor", "context", "expert", "tables", "shard", "replicate")
    )
    return (
        len(draft.devices),
        len(pipelines),
        sum(one.stages for one in pipelines),
        tensor * context * expert * tables,
        int(any(any(one.offload) for one in pipelines)),
        int(any(any(one.recompute) for one in pipelines)),
        max(place.sharding for place in places),
        sum(size > 1 for size in (tensor, context, expert, tables, shard, replicate)),
        max(count for one in pipelines for count in one.microbatches),
    )


def simpler(tried: Iterable[Tried], than: Tried, most_s: float) -> list[Tried]:
    """Returns drafts that fit, take at most `most_s` and are simpler than `than`, the simplest first; of equals the first."""
    found: dict[tuple[int, ...], Tried] = {}
    for one in tried:
        if one.fits and one.step_s <= most_s:
            found.setdefault(simplicity(one.draft), one)
    own = simplicity(than.draft)
    return [found[key] for key in sorted(found) if key < own]


def evaluate_ops(
    draft: Draft, costs: OpCosts, cluster: Cluster, blocks: StepEvaluation, traffic: ClusterTraffic | None = None
) -> StepEvaluation:
    """Evaluates a draft with the op-level simulator; parts and stages are those of the block executor, in `blocks`."""
    return evaluation_of(*simulate_ops(draft, costs, cluster, traffic), blocks, cluster)


def simulate_ops(
    draft: Draft, costs: OpCosts, cluster: Cluster, traffic: ClusterTraffic | None = None, *, named: bool = False
) -> tuple[ExpandedDraft, Timeline]:
    """Returns the ops of one pipeline, and their timeline; `named`: ops have names for people."""
    expanded = expand_draft(draft, costs, cluster, traffic, named=named)
    return expanded, simulate(expanded.problem, expanded.problem.group_device, order=expanded.order)


def evaluation_of(expanded: ExpandedDraft, line: Timeline, blocks: StepEvaluation, cluster: Cluster) -> StepEvaluation:
    """Returns the evaluation of a simulated step; parts and stages are those of the block executor, in `blocks`."""
    step = math.inf if line.step_time_s is None else line.step_time_s
    peaks = [0] * cluster.num_devices
    for peak, devices in zip(line.peak_memory_bytes.tolist(), expanded.stands_for, strict=True):
        for device in devices:
            peaks[device] = peak + cluster.devices[device].reserved_bytes
    over = bytes_over(peaks, blocks.starting_bytes, cluster)
    return dataclasses.replace(
        blocks,
        step_time_s=step,
        passes_s=step - (blocks.step_time_s - blocks.passes_s),
        feasible=over == 0.0 and step < math.inf,
        peak_memory_bytes=tuple(peaks),
        over_bytes=over,
        parts={name: seconds * (step / blocks.step_time_s) for name, seconds in blocks.parts.items()},
        executor=EXECUTOR,
    )


class OpLevel:
    """Evaluations of drafts by the finest executor that is affordable, each computed once.

    Args:
        problem: A problem whose costs are known op by op.
        ends_s: By `time.monotonic`, when checks end but for that of the answer.
    """

    def __init__(self, problem: SearchProblem, ends_s: float = math.inf) -> None:
        self._ends_s = ends_s
        self._problem, self._traffic = problem, ClusterTraffic(problem.cluster)
        self._costs = cast(OpCosts, problem.costs)
        self._known: dict[Draft, StepEvaluation] = {}
        self._tasks = 0
        self._larger: dict[str | None, float] = {}  # by schedule, peaks of drafts that did not fit over the block executor's

    def evaluate(self, draft: Draft) -> StepEvaluation:
        """Returns step time and memory."""
        if draft in self._known:
            return self._known[draft]
        if draft.beside:
            alone = [self.evaluate(one) for one in draft.pipelines]
            found = side_by_side(draft, alone, self._costs, self._traffic)
        else:
            found, tasks = self._problem.scores.evaluate(draft), tasks_of(draft, self._costs)
            if tasks <= MOST_TASKS:
                self._tasks += tasks
                found = evaluate_ops(draft, self._costs, self._problem.cluster, found, self._traffic)
        self._known[draft] = found
        return found

    def checked(self, result: SearchResult) -> SearchResult:
        """Returns the result with the figures of its first drafts, and of its rivals; none that does not fit is announced.

        Unchecked drafts never come before the best of the checked ones. The first is the simplest near the quickest (`NEAR`),
        then drafts follow by their step time.

        Raises:
            InfeasibleError: Nothing fits.
        """
        leaders = self._fitting(result.ranked, LEADERS)
        if not leaders:
            nearest = min(self._known, key=lambda draft: self._known[draft].over_bytes)
            short = self._known[nearest].over_bytes
            raise InfeasibleError(
                f"no strategy fits op by op: the nearest is {too_large(short, len(nearest.devices))}, though it "
                "fits block by block; use more or larger devices, a smaller batch, or a wider space",
                short_bytes=int(short),
            )
        ranked = [*leaders, *(tried for tried in result.ranked if tried.draft not in self._known)]
        self._tasks = 0
        of_kinds = {
            kind: self._rival(tried, (other for other in ranked if kind_of(other.draft) == kind))
            for kind, tried in sorted(result.of_kinds.items(), key=lambda item: item[1].key)
        }
        uniform = None if result.uniform is None else self._rival(result.uniform, ())
        first = self._simplest(result.ranked)
        checked = self._checked(result.ranked)
        others = [tried for tried in result.ranked if tried.draft not in self._known and tried.step_s >= checked[0].step_s]
        ranked = sorted([*checked, *others], key=lambda tried: (tried != first, tried.key))
        return dataclasses.replace(result, ranked=tuple(ranked), uniform=uniform, of_kinds=of_kinds)

    def _checked(self, ranked: Iterable[Tried]) -> list[Tried]:
        """Returns drafts that were checked and fit, the quickest first, with the figures of the check."""
        checked = [self._tried(tried) for tried in ranked if tried.draft in self._known]
        return sorted((tried for tried in checked if tried.fits), key=lambda tried: tried.key)

    def _simplest(self, ranked: Sequence[Tried]) -> Tried:
        """Returns the simplest checked draft near the quickest, or the quickest; checks a few more."""
        by_blocks = {tried.draft: tried.step_s for tried in ranked}
        checked = self._checked(ranked)
        quickest = checked[0]
        known = [tried for tried in checked if tried.step_s <= NEAR * quickest.step_s]
        behind = [tried for tried in ranked if tried.draft not in self._known]
        others = simpler(behind, quickest, NEAR * by_blocks[quickest.draft])[:SIMPLER]
        if time.monotonic() <= self._ends_s:
            known += self._fitting(others, SIMPLER)
        known.sort(key=lambda tried: tried.key)
        return next(iter(simpler(known, known[0], NEAR * known[0].step_s)), known[0])

    def _rival(self, tried: Tried, others: Iterable[Tried]) -> Tried:
        """Returns the best of a kind, as far as tasks are left."""
        if not tried.fits or self._tasks > TASKS_OF_RIVALS or time.monotonic() > self._ends_s:
            return tried
        return next(iter(self._fitting([tried, *others], 1)), self._tried(tried))

    def _tried(self, tried: Tried) -> Tried:
        found = self.evaluate(tried.draft)
        return Tried(tried.draft, found.step_time_s, found.over_bytes)

    def _fitting(self, ranked: Iterable[Tried], count: int) -> list[Tried]:
        """Returns the first drafts that fit op by op."""
        found: list[Tried] = []
        devices = self._problem.cluster.devices
        for tried in ranked:
            if len(found) == count or (found and time.monotonic() > self._ends_s):
                break
            blocks, schedule = self._problem.scores.evaluate(tried.draft).peak_memory_bytes, tried.draft.schedule
            larger = self._larger.get(schedule, 1.0)
            if any(larger * peak > (device.memory_bytes or math.inf) for peak, device in zip(blocks, devices, strict=True)):
                continue
            finer = self.evaluate(tried.draft)
            if finer.feasible:
                found.append(Tried(tried.draft, finer.step_time_s, 0.0))
            else:
                pairs = zip(finer.peak_memory_bytes, blocks, strict=True)
                self._larger[schedule] = max(larger, *(peak / max(1, other) for peak, other in pairs))
        return found
