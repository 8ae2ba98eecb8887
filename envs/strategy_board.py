"""A question of `rlplace/Strategy-v0` as a game: where it starts, what the moves of the search lead to, and what is seen.

What was evaluated is kept, for all environments of a question. S stages, P places, D devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from rlplace.envs import cluster
from rlplace.envs.guide.features import CLIP
from rlplace.errors import InfeasibleError, InputError
from rlplace.measure.pool import CHOICES, choices
from rlplace.plan.prediction import too_large
from rlplace.plan.strategy import Strategy
from rlplace.strategy.drafts import Draft, draft_of_strategy
from rlplace.strategy.executor.evaluate import PARTS
from rlplace.strategy.search import moves
from rlplace.strategy.search.fit import changed, fitted, other_choices
from rlplace.strategy.search.search import SearchResult, search
from rlplace.strategy.search.tries import SearchProblem, Tried, Tries
from rlplace.strategy.search.uniform import Option, UniformOptions

MEMORY = "memory"
KINDS = (*moves.KINDS, MEMORY)
"""Kinds of moves: those of `rlplace.strategy.search.moves`, and what a block recomputes or has in host memory."""

FEATURES = (*KINDS, "lowers", *(f"more {name}" for name in CHOICES))
"""Of a move: its kind, one of which is 1; log of the step time now over that after it, which the executor says with the memory;
by how much `rlplace.measure.pool.CHOICES` rise."""

STAGE_FEATURES = (*cluster.STAGE_FEATURES, "devices", "context", "expert", "offloaded", *(f"in {part}" for part in PARTS))
"""Of a stage: those of Cluster-v0; degrees as logarithms to base 2; share of its blocks; shares of the step on its place."""

STARTS = ("uniform", "floor", "random")
KEPT_DRAFTS, KEPT_MOVES = 1 << 16, 1 << 12
"""Drafts of a question that are kept, and those whose moves are."""

_BY_DEVICE = {
    "compute_s": ("compute", "update"), "transfer_s": ("tensor", "gather", "exchange", "hand_over"), "idle_s": ("bubble",),
}  # fmt: skip


class Board:
    """One question.

    Args:
        question: What is asked.
        calls: Evaluations of the classical search.

    Attributes:
        fits: The draft of a move of this kind with the least recomputation and offload that fits; None where none does or may
            run. Moves of `MEMORY` say what blocks choose.
        choices: float64, by `rlplace.measure.pool.CHOICES`, of a draft.
    """

    def __init__(self, question: SearchProblem, calls: int) -> None:
        self.question, self._calls = question, calls
        self._moves, self._tries = moves.Moves(question), Tries(question)
        scores = question.scores
        self._said = lru_cache(KEPT_MOVES)(lambda draft: (scores.evaluate(draft), scores.parts_of_places(draft)))
        self._parts = lru_cache(KEPT_MOVES)(self._by_kind)
        self.fits = lru_cache(KEPT_DRAFTS)(self._fitted)
        self.choices = lru_cache(KEPT_DRAFTS)(lambda draft: np.array(choices(draft)))

    @cached_property
    def _answer(self) -> SearchResult:
        return search(self.question, calls=self._calls)

    @cached_property
    def _uniform(self) -> list[Option]:
        return list(UniformOptions(self.question).every())

    @cached_property
    def floor(self) -> Tried:
        """The best strategy of one pipeline that the classical search finds; raises as `search` does."""
        for tried in self._answer.ranked:
            if not tried.draft.beside:
                return tried
        raise InfeasibleError(f"{self._calls} calls found only unlike pipelines that fit; raise calls of Strategy-v0")

    def first(self, start: str, rng: Generator) -> Tried:
        """Returns the start of an episode, by one of `STARTS`; the floor where no uniform strategy fits."""
        if start == "random":
            drawn = (self._uniform[number] for number in rng.permutation(len(self._uniform)))
            return next(
                filter(None, (self.fits(KINDS[0], option.draft(self.question.balance)) for option in drawn)), self.floor
            )
        return (self._answer.uniform if start == "uniform" else None) or self.floor

    def given(self, strategy: Strategy) -> Tried:
        """Returns a strategy to start from; raises InputError where it is of another question, cannot run or does not fit."""
        names, batch, why = tuple(self.question.costs.names), self.question.batch, "this one has others"
        if strategy.batch == batch and tuple(name for stage in strategy.stages for name in stage.blocks) == names:
            tried = self._tries.score(draft_of_strategy(strategy, names))
            if tried.fits:
                return tried
            why = tried.reason or f"this one is {too_large(tried.over_bytes, len(tried.draft.devices))}"
        raise InputError(f"options['strategy'] must be a pipeline of the question's blocks, a batch of {batch}, and fit: {why}")

    def moves(self, draft: Draft, room: int, rng: Generator) -> list[tuple[str, Draft, Tried | None]]:
        """Returns at most `room` moves of the local search, kinds taking turns, drawn within each: kind, draft, its `fits`."""
        found: dict[Draft, str] = {draft: ""}
        rows = (_shuffled(kind, parts, rng) for kind, parts in self._parts(draft).items())
        for kind, other in (one for turn in zip_longest(*rows) for one in turn if one is not None):
            if len(found) > room:
                break
            found.setdefault(other, kind)
        return [(kind, other, self.fits(kind, other)) for other, kind in found.items() if kind]

    def stages(self, draft: Draft, room: int) -> dict[str, NDArray[Any]]:
        """Returns a strategy as a graph, with room for S stages: float32 ``stages`` [S F], and int32 ``place`` [S] (-1:
        none).
        """
        said, parts = self._said(draft)
        table, place = np.zeros((room, len(STAGE_FEATURES)), dtype=np.float32), np.full(room, -1, dtype=np.int32)
        rows, held = cluster.stages_of(draft, said, self.question.cluster)
        place[: len(held)] = held
        for stage, blocks in enumerate(draft.ranges):
            own, offload = draft.places[held[stage]], draft.offload[blocks.start : blocks.stop]
            degrees = map(math.log2, (len(own.devices), own.context, own.expert))
            spent = parts[held[stage]] / said.step_time_s
            table[stage] = [*rows[stage], *degrees, sum(map(bool, offload)) / len(blocks), *spent]
        return {"stages": table.clip(-CLIP, CLIP).ravel(), "place": place}

    def devices(self, draft: Draft, room: int) -> dict[str, NDArray[Any]]:
        """Returns by device [D] float64 seconds of work, of exposed communication and of neither, and int64 peak bytes."""
        said, parts = self._said(draft)
        peaks, found = np.zeros(room, dtype=np.int64), {name: np.zeros(room) for name in _BY_DEVICE}
        peaks[: len(said.peak_memory_bytes)] = said.peak_memory_bytes
        found["idle_s"][: len(said.peak_memory_bytes)] = said.step_time_s
        for place, spent in zip(draft.places, parts, strict=True):
            for name, of in _BY_DEVICE.items():
                found[name][list(place.devices)] = sum(spent[PARTS.index(part)] for part in of)
        return {**found, "peak_memory_bytes": peaks}

    def _by_kind(self, draft: Draft) -> dict[str, list[Iterable[Draft]]]:
        """Returns every move of every kind, in parts that are made when they are asked for."""
        found: dict[str, list[Iterable[Draft]]] = {kind: [] for kind in KINDS}
        for kind, part in self._moves.of_kinds(draft, self._said(draft)[0]):
            found[kind].append(part)
        if any(draft.recompute + draft.offload):
            found[MEMORY].append(changed(draft, chosen) for chosen in other_choices(self._tries, draft, (1,)))
        return found

    def _fitted(self, kind: str, draft: Draft) -> Tried | None:
        if self._tries.calls > KEPT_DRAFTS:
            self._tries = Tries(self.question)
        tried = self._tries.score(draft) if kind == MEMORY else fitted(self._tries, draft)
        return tried if tried is not None and tried.fits else None


board_of = lru_cache(256)(Board)
"""The board of a question and so many calls, which environments share."""


def _shuffled(kind: str, parts: list[Iterable[Draft]], rng: Generator) -> Iterator[tuple[str, Draft]]:
    """Moves of a kind, part by part in random order; what was made stays in `parts`."""
    for number in rng.permutation(len(parts)):
        made = parts[number] = list(parts[number])
        yield from ((kind, made[index]) for index in rng.permutation(len(made)))
