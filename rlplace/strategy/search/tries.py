"""What a search has tried: every draft is evaluated once, counted against the budget, and the best are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from rlplace.budget import Budget
from rlplace.cluster import Cluster
from rlplace.errors import InputError
from rlplace.plan.strategy import Pipeline, Strategy
from rlplace.strategy.costs import BlockCosts, Cut
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.space import Space

_TOLD = 32
"""Evaluations between calls of `Progress`."""

Progress = Callable[[int, float], None]
"""Called now and then with the evaluations so far and the seconds of the best that fits."""


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """What is asked: the quickest step that processes so many samples.

    Attributes:
        scores: What drafts take, on which cluster, for which model.
        batch: Samples a step.
        space: What may be chosen.
        devices: Which devices may be used; None: all.
        settings: Fields of a strategy that drafts do not have: how its parts make up the loss of a batch.
        layouts: For a cut over a tensor group the layout word of each module, by block, as it is priced; None: not written.
        why_not: Why a draft cannot run, for example an engine's `why_not`, which gives None where it can; None: all can. Which
            blocks of a stage recompute or offload makes no difference to it, only whether some do.
    """

    scores: DraftEvaluator
    batch: int
    space: Space = field(default_factory=Space)
    why_not: Callable[[Draft], str | None] | None = None
    devices: tuple[int, ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    layouts: Callable[[Cut], Mapping[str, Mapping[str, str]]] | None = None

    def strategy(self, draft: Draft) -> Strategy:
        """Makes a draft a strategy for this model, with the tensor layouts that are priced, and checks it."""
        strategy = replace(draft.strategy(self.costs.names), **self.settings)
        if self.layouts is None or all(place.tensor == 1 for place in draft.places):
            return strategy
        return replace(strategy, pipelines=tuple(map(self._laid_out, strategy.pipelines, draft.pipelines)))

    def _laid_out(self, pipeline: Pipeline, draft: Draft) -> Pipeline:
        """Returns the pipeline of a draft with the layout words of its tensor-parallel stages."""
        assert self.layouts is not None
        stages = []
        for stage, place in zip(pipeline.stages, map(draft.places.__getitem__, draft.place_of_stage), strict=True):
            words = self.layouts(place.cut(draft.microbatch[0])) if place.tensor > 1 else {}
            own = {path: word for block in stage.blocks for path, word in words.get(block, {}).items()}
            stages.append(replace(stage, tensor=own))
        return replace(pipeline, stages=tuple(stages))

    @property
    def costs(self) -> BlockCosts:
        """What blocks cost."""
        return self.scores.costs

    @property
    def cluster(self) -> Cluster:
        """The devices."""
        return self.scores.cluster

    @cached_property
    def room_bytes(self) -> tuple[float, ...]:
        """What every device has for a plan; inf where nobody says."""
        return tuple(
            math.inf if device.memory_bytes is None else float(device.memory_bytes - device.reserved_bytes)
            for device in self.cluster.devices
        )


class OutOfBudgetError(Exception):
    """The calls or the seconds of a search are used up."""


@dataclass(frozen=True)
class Tried:
    """A draft and what it takes; ordered by what fits first, then by time, else by the bytes that are missing.

    Attributes:
        draft: The draft.
        step_s: Seconds of a step; inf where it cannot run.
        over_bytes: Bytes over capacity.
        reason: Why it cannot run; empty where it can.
    """

    draft: Draft
    step_s: float
    over_bytes: float
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether it can be a plan."""
        return self.over_bytes == 0 and math.isfinite(self.step_s)

    @property
    def key(self) -> tuple[float, float]:
        """Smaller is better."""
        if math.isinf(self.step_s):
            return math.inf, math.inf
        return self.over_bytes, self.step_s


class Tries:
    """Evaluates drafts within a budget; its seconds run from the beginning.

    Attributes:
        question: What is asked.
        budget: Evaluations and seconds allowed, and those used.
        best: The best so far; None before the first.
        reasons: Why drafts were refused, with how many there were of each.
        timed: Whether the clock may end the search.
    """

    def __init__(
        self,
        question: SearchProblem,
        *,
        calls: int | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.question = question
        self.budget = Budget(calls, time_limit_s)
        self._progress = progress
        self.best: Tried | None = None
        self.reasons: dict[str, int] = {}
        self.timed = True
        self._known: dict[Draft, Tried] = {}
        self._runs: dict[object, str | None] = {}

    def within(self, question: SearchProblem, part: float) -> Tries:
        """Tries of another question with a part of the budget that is left; the caller adds their calls."""
        own = Tries(question, time_limit_s=max(self.budget.left_s(), 0.0) * part)
        own.budget.calls = (self.budget.calls - self.budget.used) * part
        return own

    @property
    def calls(self) -> int:
        """Evaluations so far."""
        return self.budget.used

    def left(self) -> bool:
        """Returns whether there is budget for another evaluation; the clock ends only what is `timed` and has something that
        fits.
        """
        return self.calls < self.budget.calls and (not self.timed or not self.fitting() or self.budget.left_s() > 0.0)

    def end_by_time(self, least: float) -> None:
        """From now on the clock may end the search where something fits; this part of the seconds is left for it at least."""
        self.timed = True
        self.budget.start_clock(max(self.budget.left_s(), least * self.budget.seconds))

    def fitting(self) -> bool:
        """Returns whether something fits."""
        return self.best is not None and self.best.fits

    @property
    def best_s(self) -> float:
        """Seconds of the best that fits; inf where nothing does."""
        return self.best.step_s if self.best is not None and self.best.fits else math.inf

    def spent(self) -> float:
        """Returns the part of the budget that is spent; of calls and seconds the larger. 0 without a budget."""
        return self.budget.share()

    def known(self) -> list[Tried]:
        """Returns all that were evaluated, the best first."""
        return sorted(self._known.values(), key=lambda tried: tried.key)

    def refused(self, draft: Draft) -> str | None:
        """Explains why space, costs or engine exclude a draft, or it contradicts itself; the reason is counted."""
        reason = self._reason(draft)
        if reason is not None:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        return reason

    def _reason(self, draft: Draft) -> str | None:
        question = self.question
        if (key := question.space.forbids(draft)) is not None:
            return f"space: {key}"
        cuts = {place.cut(size) for one in draft.pipelines for place in one.places for size in one.microbatch}
        if why := next((why for cut in cuts if (why := question.costs.why_not(cut)) is not None), None):
            return why
        if question.why_not is None:
            return None
        if (look := tuple(map(_look, draft.pipelines))) not in self._runs:
            try:
                self._runs[look] = question.why_not(draft)
            except InputError as error:  # it is no strategy at all
                self._runs[look] = str(error)
        return self._runs[look]

    def score(self, draft: Draft) -> Tried:
        """What a draft takes; one that is refused takes for ever.

        Raises:
            OutOfBudgetError: It is not known yet, and nothing is left.
        """
        if draft in self._known:
            return self._known[draft]
        if (reason := self.refused(draft)) is not None:
            tried = Tried(draft, math.inf, 0.0, reason)
        else:
            if not self.left():
                raise OutOfBudgetError
            self.budget.used += 1
            if self._progress is not None and self.calls % _TOLD == 0:
                self._progress(self.calls, self.best_s)
            try:
                tried = Tried(draft, *self.question.scores.score(draft))
            except InputError as error:  # the schedule cannot run so many stages or micro-batches
                reason = str(error)
                self.reasons[reason] = self.reasons.get(reason, 0) + 1
                tried = Tried(draft, math.inf, 0.0, reason)
        self._known[draft] = tried
        if self.best is None or tried.key < self.best.key:
            self.best = tried
        return tried


def _look(draft: Draft) -> object:
    """What an engine tells drafts of one pipeline apart by."""
    chosen = [frozenset(zip(draft.recompute[a:b], draft.offload[a:b], strict=True)) for a, b in pairwise(draft.bounds)]
    return (draft.bounds, draft.places, draft.place_of_stage, draft.microbatch, draft.microbatches, draft.schedule, *chosen)
