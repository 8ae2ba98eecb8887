"""The ways to run a chain of stages on places, in arrays: schedules, stages a place, and which place holds which stage."""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.plan.actions import check_schedule
from rlplace.plan.schedule import ONE_F_ONE_B, SCHEDULES
from rlplace.strategy.costs import Floats
from rlplace.strategy.search.fit import in_flight
from rlplace.strategy.search.shapes import chains, stage_order
from rlplace.strategy.search.space import Space


class Chains(NamedTuple):
    """The O ways to run a chain on so many places, of at most S stages on P places, and their G orders of stages.

    Attributes:
        names: Stages a place, and schedule, of each.
        orders: The place of every stage.
        order: int64 [O], the number of the order of each.
        splits: int64 [O], 1 where the backward is split.
        alone: bool [O], whether every place has one stage.
        unfilled: float64 [O], about which part of a pass through a place every further one waits for.
        waits: float64 [O], about how many stage transfers a micro-batch waits for while the chain is full.
        holds: float64 [O, S, P], 1 where a stage is on a place.
    """

    names: tuple[tuple[int, str | None], ...]
    orders: tuple[tuple[int, ...], ...]
    order: NDArray[np.int64]
    splits: NDArray[np.int64]
    alone: NDArray[np.bool_]
    unfilled: Floats
    waits: Floats
    holds: Floats


@lru_cache(maxsize=256)
def chains_on(space: Space, places: int, blocks: int) -> Chains:
    """Returns the ways to run a chain of so many blocks on so many places."""
    names = tuple(chains(space, places, blocks))
    each = [stage_order(places, schedule, chunks) for chunks, schedule in names]
    orders = tuple(dict.fromkeys(each))
    holds = np.zeros((len(names), max(map(len, orders), default=0), places))
    for own, order in zip(holds, each, strict=True):
        own[np.arange(len(order)), order] = 1.0
    return Chains(
        names, orders, np.array([orders.index(order) for order in each], dtype=np.int64),
        np.array([schedule is not None and SCHEDULES[schedule].splits_backward for _, schedule in names], dtype=np.int64),
        np.array([len(order) == places for order in each], dtype=np.bool_),
        np.array([SCHEDULES[schedule].unfilled / chunks if schedule else 0.0 for chunks, schedule in names]),
        np.array([2.0 if schedule == ONE_F_ONE_B else 0.0 for _, schedule in names]), holds,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def runs(schedule: str | None, places: int, chunks: int, count: int) -> bool:
    """Returns whether a schedule runs so many micro-batches on so many places of so many stages; one stage needs none."""
    with contextlib.suppress(InputError):
        if schedule is not None:
            check_schedule(schedule, places, chunks, count)
        return True
    return False


@lru_cache(maxsize=1024)
def all_in_flight(names: tuple[tuple[int, str | None], ...], places: int, count: int) -> Floats:
    """Returns float64 [O, S], about how many of so many micro-batches every stage holds at once."""
    rows = [in_flight(schedule, places * chunks, places, count) for chunks, schedule in names]
    return np.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows], dtype=np.float64)
