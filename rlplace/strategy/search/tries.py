"""The problem of a search, and the drafts it has tried: each is evaluated once, counted against the budget."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
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
from rlplace.records import trusted
from rlplace.strategy.costs import BlockCosts, Cut, Floats
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.executor.meshes import room_bytes
from rlplace.strategy.search.cuts import Balance
from rlplace.strategy.search.space import Space

_REPORTED = 32
"""Evaluations between calls of `Progress`."""

LEAST_CALLS, GRACE_S = 32, 0.25
"""Evaluations that a search makes at least, and seconds after its limit in which it still does."""

NEAR = 1.1
"""The engine is asked at once for drafts that take at most so many times as long as the best."""

Progress = Callable[[int, float], None]
"""Called now and then with the evaluations so far and the seconds of the best that fits."""


def priced_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those settings of a `SearchProblem` that change its prices, as arguments of `PricedBlocks`."""
    return {key: settings[key] for key in ("statistics", "release_gradients") if key in settings}


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """The problem: the quickest step that processes so many samples.

    Attributes:
        scores: Step times of drafts of one model on one cluster.
        batch: Samples a step.
        space: Allowed strategies.
        devices: Devices that may be used; None: all.
        settings: Fields of a strategy that drafts do not have: how its parts make up the loss of a batch.
        layouts: For a cut over a tensor group the layout word of each module, by block, as it is priced; for tables that
            replicas divide how they do; None: not written.
        why_not: Explains why a draft cannot run, or returns None, for example an engine's `why_not`; None: all can. Which
            blocks of a stage recompute or offload makes no difference to it, only whether some do.
    """

    scores: DraftEvaluator
    batch: int
    space: Space = field(default_factory=Space)
    why_not: Callable[[Draft], str | None] | None = None
    devices: tuple[int, ...] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    layouts: Callable[[Cut], Mapping[str, Mapping[str, str]]] | None = None

    def strategy(self, draft: Draft, *, tensor: bool = True) -> Strategy:
        """Makes a draft a strategy for this model, with the layouts that are priced, and checks it; `tensor`: those, too."""
        strategy = replace(self.named(draft), **self.settings)
        if not tensor or self.layouts is None or all(place.tensor == 1 for place in draft.places):
            return strategy
        return replace(strategy, pipelines=tuple(map(self._laid_out, strategy.pipelines, draft.pipelines)))

    def named(self, draft: Draft) -> Strategy:
        """Makes a draft a strategy without settings and tensor layouts, but with the tables that replicas divide."""
        strategy = draft.strategy(self.costs.names)
        if self.layouts is None or all(place.tables == 1 for place in draft.places):
            return strategy
        return replace(strategy, pipelines=tuple(map(self._laid_out, strategy.pipelines, draft.pipelines)))

    def _laid_out(self, pipeline: Pipeline, draft: Draft) -> Pipeline:
        """Returns the pipeline of a draft with the layout words of its tensor-parallel stages, and of divided tables."""
        assert self.layouts is not None
        stages = []
        for stage, place in zip(pipeline.stages, map(draft.places.__getitem__, draft.place_of_stage), strict=True):
            words = self.layouts(place.cut(draft.microbatch[0])) if place.tensor * place.tables > 1 else {}
            own = {path: word for block in stage.blocks for path, word in words.get(block, {}).items()}
            stages.append(replace(stage, **{"tables" if place.tables > 1 else "tensor": own}))
        return replace(pipeline, stages=tuple(stages))

    @property
    def costs(self) -> BlockCosts:
        """Costs of blocks."""
        return self.scores.costs

    @property
    def cluster(self) -> Cluster:
        """The devices."""
        return self.scores.cluster

    @cached_property
    def room_bytes(self) -> Floats:
        """Capacity of every device without its reserved bytes, float64 [D]; inf without a limit."""
        return room_bytes(self.cluster)

    @cached_property
    def balance(self) -> Balance:
        """Balanced stages."""
        return Balance(self.costs, self.cluster)


class OutOfBudgetError(Exception):
    """The calls or the seconds of a search are used up."""


@dataclass(frozen=True)
class Tried:
    """A draft and its score.

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
        """True where it can be a plan."""
        return self.over_bytes == 0 and math.isfinite(self.step_s)

    @property
    def key(self) -> tuple[float, float]:
        """Sort key: what fits first, by time; then by missing bytes."""
        return (math.inf, math.inf) if math.isinf(self.step_s) else (self.over_bytes, self.step_s)


class Tries:
    """Evaluates drafts within a budget; its seconds run from the beginning.

    Attributes:
        problem: The problem.
        budget: Calls and seconds.
        best: The best so far; None before the first.
        reasons: Why drafts were refused, with how many there were of each.
    """

    def __init__(
        self,
        problem: SearchProblem,
        *,
        calls: float | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
        in_time: bool = False,
    ) -> None:
        self.problem, self.budget = problem, Budget(calls, time_limit_s)
        self.best: Tried | None = None
        self.reasons: Counter[str] = Counter()
        self._progress = progress
        self._known: dict[Draft, Tried] = {}
        self._runs: dict[object, str | None] = {}
        self._forms: dict[object, bool] = {}
        self._running: set[Draft] = set()
        self._in_time = in_time  # the clock ends it though nothing fits so far

    def within(self, problem: SearchProblem, part: float) -> Tries:
        """Returns tries of another problem with a part of the budget that is left; the caller adds their calls.

        Their clock ends them whatever they found.
        """
        budget = self.budget
        calls, left_s = budget.calls - budget.used, max(budget.left_s(), 0.0)
        return Tries(problem, calls=calls * part, time_limit_s=left_s * part, in_time=True)

    @property
    def calls(self) -> int:
        """Evaluations so far."""
        return self.budget.used

    def left(self) -> bool:
        """Returns whether the budget allows another evaluation; the clock ends it only where something fits."""
        if self.calls >= self.budget.calls:
            return False
        if self._in_time:
            return self.budget.left_s() > 0.0
        late_s = GRACE_S if self.calls < LEAST_CALLS else 0.0
        return not self.fitting() or self.budget.left_s() > -late_s

    def late(self, part: float) -> bool:
        """Returns whether so large a part of the seconds is over, and some drafts were evaluated."""
        return self.calls >= LEAST_CALLS and self.budget.left_s() < (1.0 - part) * self.budget.seconds

    def fitting(self) -> bool:
        """Returns whether something fits."""
        return self.best is not None and self.best.fits

    @property
    def best_s(self) -> float:
        """Seconds of the best that fits; inf where nothing does."""
        return self.best.step_s if self.best is not None and self.best.fits else math.inf

    def spent(self) -> float:
        """Returns the spent part of the budget, the larger of calls and seconds; 0 without a budget."""
        return self.budget.share()

    def known(self) -> list[Tried]:
        """Returns everything that was evaluated, the best first."""
        return sorted(self._known.values(), key=lambda tried: tried.key)

    def runs(self, tried: Tried, *, ask: bool = True) -> bool:
        """Returns whether the engine runs a draft; unless it may be asked now, whether that is known."""
        tried = self._known[tried.draft]
        if tried.draft in self._running or math.isinf(tried.step_s) or not ask:
            return tried.draft in self._running
        return math.isfinite(self._asked(tried).step_s)

    def refused(self, draft: Draft) -> str | None:
        """Explains why space, costs or engine exclude a draft, or it contradicts itself; the reason is counted."""
        reason = self._barred(draft) or self._engine_refuses(draft)
        if reason is not None:
            self.reasons[reason] += 1
        return reason

    def choice_refused(self, draft: Draft) -> bool:
        """Returns whether the engine refuses what blocks of a draft recompute and offload, asked once for all of its form."""
        form = tuple(map(_form, draft.pipelines))
        if form not in self._forms:
            self._forms[form] = self.refused(draft) is not None
        return self._forms[form]

    def _barred(self, draft: Draft) -> str | None:
        """Explains why space or costs exclude a draft."""
        problem = self.problem
        if (key := problem.space.forbids(draft)) is not None:
            return f"space: {key}"
        cuts = {place.cut(size) for one in draft.pipelines for place in one.places for size in one.microbatch}
        return next((why for cut in cuts if (why := problem.costs.why_not(cut)) is not None), None)

    def _engine_refuses(self, draft: Draft) -> str | None:
        """Explains why the engine cannot run a draft, or it is no strategy at all."""
        problem = self.problem
        if problem.why_not is None:
            return None
        if (look := tuple(map(_look, draft.pipelines))) not in self._runs:
            try:
                with trusted():
                    self._runs[look] = problem.why_not(draft)
            except InputError as error:  # it is no strategy at all
                self._runs[look] = str(error)
        return self._runs[look]

    def score(self, draft: Draft) -> Tried:
        """Returns the score of a draft; inf seconds where it is refused. The engine is asked only near the best: `runs`.

        Raises:
            OutOfBudgetError: It is not known yet, and nothing is left.
        """
        if draft in self._known:
            return self._known[draft]
        if (reason := self._barred(draft)) is not None:
            return self._refuse(draft, reason)
        if not self.left():
            raise OutOfBudgetError
        self.budget.used += 1
        if self._progress is not None and self.calls % _REPORTED == 0:
            self._progress(self.calls, self.best_s)
        try:
            tried = Tried(draft, *self.problem.scores.score(draft))
        except InputError as error:  # the schedule cannot run so many stages or micro-batches
            return self._refuse(draft, str(error))
        self._known[draft] = tried
        if self.best is None or tried.key < self.best.key or (tried.fits and tried.step_s < NEAR * self.best_s):
            tried = self._asked(tried)
        if self.best is None or tried.key < self.best.key:
            self.best = tried
        return tried

    def _asked(self, tried: Tried) -> Tried:
        """Asks the engine; returns the score, which a refusal changes."""
        reason = self._engine_refuses(tried.draft)
        if reason is not None:
            return self._refuse(tried.draft, reason)
        self._running.add(tried.draft)
        return tried

    def _refuse(self, draft: Draft, reason: str) -> Tried:
        """Keeps a draft as one that cannot run, and counts the reason."""
        self.reasons[reason] += 1
        tried = self._known[draft] = Tried(draft, math.inf, 0.0, reason)
        if self.best is None:
            self.best = tried
        return tried


def _form(draft: Draft) -> object:
    """Returns what decides which choices an engine runs: degrees, levels and schedule, but no devices, cuts or samples."""
    degrees = {dataclasses.replace(place, devices=()) for place in draft.places}
    return frozenset(degrees), draft.stages, draft.schedule, frozenset(draft.recompute), frozenset(draft.offload)


def _look(draft: Draft) -> object:
    """Returns what an engine distinguishes drafts of one pipeline by."""
    chosen = [frozenset(zip(draft.recompute[a:b], draft.offload[a:b], strict=True)) for a, b in pairwise(draft.bounds)]
    return (draft.bounds, draft.places, draft.place_of_stage, draft.microbatch, draft.microbatches, draft.schedule, *chosen)
