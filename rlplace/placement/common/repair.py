"""The memory repair that all planners share, by exact simulated peaks.

Two steps. `legalize` moves groups off devices that are not allowed (null times, fixed devices) and away from missing links;
it needs no simulation. `repair` then simulates, moves groups off overflowing devices (least added time per freed byte first,
by estimated footprints), and simulates again. When estimates no longer help, because the peak comes from received copies or
temporaries, it tries single moves and swaps and keeps what truly lowers the overflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.placement.common import kernels
from rlplace.placement.common.evaluate import Assignment, PlanEvaluator, ScoredAssignment
from rlplace.placement.common.groupgraph import group_graph, traffic
from rlplace.problem import Problem
from rlplace.simulator import Simulator

MAX_CALLS = 400
"""Simulations that one repair may use."""

_TRIES = 24
"""Single moves tried by simulation before swaps are, and swaps tried after them."""

_FEW = 64
"""Groups of mean size that may be missing where exact tries begin: each of them moves one or exchanges two."""


def legalize(problem: Problem, device_of_group: NDArray[Any]) -> Assignment:
    """Returns a copy with every group on an allowed device, and without missing links where moving groups can avoid them.

    Every group must have an allowed device (`rlplace.placement.common.shortage.check_possible`).
    """
    devices = np.array(device_of_group, dtype=np.int32)
    graph = group_graph(problem)
    illegal = ~problem.group_allowed[np.arange(problem.num_groups), devices]
    if illegal.any():
        kernels.place_illegal(graph.order, devices, graph.time_s, traffic(problem))
    linked = problem.links.bandwidth_bytes_per_s > 0
    np.fill_diagonal(linked, True)
    if not linked.all():
        kernels.avoid_missing_links(graph.order, devices, graph.time_s, traffic(problem), linked, 10)
    return devices


def repair(
    problem: Problem,
    device_of_group: NDArray[Any],
    simulator: Simulator | PlanEvaluator | None = None,
    *,
    max_calls: int = MAX_CALLS,
) -> Assignment | None:
    """Makes an assignment feasible.

    Args:
        problem: The problem.
        device_of_group: int [G], not changed.
        simulator: Counts the simulations; None makes one.
        max_calls: Simulations allowed.

    Returns:
        int32 [G], feasible, or None when no feasible assignment was found.
    """
    evaluator = simulator if isinstance(simulator, PlanEvaluator) else PlanEvaluator(problem, simulator=simulator)
    answer = repair_answer(evaluator, legalize(problem, device_of_group), max_calls=max_calls)
    return answer.devices if answer.score.feasible else None


def repair_answer(evaluator: PlanEvaluator, devices: Assignment, *, max_calls: int = MAX_CALLS) -> ScoredAssignment:
    """Repairs a legal assignment; returns the least overflowing answer when none fits."""
    budget, problem = evaluator.budget, evaluator.problem
    last_call = budget.used + max_calls

    def spent() -> bool:
        return budget.used >= last_call or budget.passed()

    def better(candidates: Iterable[Assignment]) -> ScoredAssignment | None:
        answers = map(evaluator.answer, candidates)
        return next((answer for answer in answers if answer.score.objective_s < current.score.objective_s), None)

    current = evaluator.answer(devices)
    size = group_graph(problem).footprint_bytes
    while not current.score.feasible and current.score.step_time_s != np.inf and not spent():
        found = better(_sheds(problem, current))
        if found is None:  # estimates failed here: go on with exact tries, then trust them again from the new assignment
            over = np.maximum(current.peaks - problem.capacity_bytes, 0.0)
            if over.sum() > _FEW * size.mean():
                break
            found = better(takewhile(lambda _: not spent(), _neighbors(problem, current)))
        if found is None:
            break
        current = found
    return current


def _sheds(problem: Problem, current: ScoredAssignment) -> Iterator[Assignment]:
    """Yields assignments after a round of estimated moves off all overflowing devices.

    The estimate of what a move frees can be off either way, so a second try moves twice as much.
    """
    graph, over = group_graph(problem), current.peaks - problem.capacity_bytes
    for factor in (1.0, 2.0):
        devices = current.devices.copy()
        seconds = graph.time_s[np.arange(len(devices)), devices]
        load = np.bincount(devices, weights=seconds, minlength=problem.num_devices).astype(np.float64)
        loads, moved = kernels.Loads(devices, load, np.maximum(-over, 0.0)), 0
        for device in np.argsort(-np.maximum(over, 0.0), kind="stable"):
            if over[device] > 0:
                need = over[device] * factor
                moved += kernels.shed(device, need, loads, graph.footprint_bytes, graph.time_s, traffic(problem))
        if moved == 0:
            return
        yield devices


def _neighbors(problem: Problem, current: ScoredAssignment) -> Iterator[Assignment]:
    """Yields single moves off the device that overflows most, the cheapest first, then swaps."""
    graph, room = group_graph(problem), np.maximum(problem.capacity_bytes - current.peaks, 0.0)
    device = int((current.peaks - problem.capacity_bytes).argmax())
    need = float(current.peaks[device] - problem.capacity_bytes[device])
    size, time_s = graph.footprint_bytes, graph.time_s
    mine = np.flatnonzero(current.devices == device)
    rows = kernels.all_communication(mine, current.devices, traffic(problem))
    added = rows - rows[:, device][:, None] + time_s[mine] - time_s[mine, device][:, None]
    added[:, device] = np.inf
    freed = np.minimum(size[mine] + 1.0, max(need, 1.0))
    # Moves that should fit come first, then by added time per freed byte.
    fits = (room[None, :] >= size[mine][:, None]).ravel()
    key = np.where(added > 0, added / freed[:, None], added * freed[:, None]).ravel()
    moves = [index for some in (fits, ~fits) for index in _least(np.where(some, key, np.inf), 4 * _TRIES)]
    for index in moves[: 4 * _TRIES]:
        row, target = divmod(index, problem.num_devices)
        devices = current.devices.copy()
        devices[mine[row]] = target
        yield devices
    # Exchanges of a large group for a smaller one elsewhere, those that free just enough first.
    other = np.flatnonzero((current.devices != device) & np.isfinite(time_s[:, device]))
    mine = mine[np.argsort(-size[mine], kind="stable")][:200]
    other = other[np.argsort(size[other], kind="stable")][:500]
    less = (size[mine][:, None] - size[other][None, :]).astype(np.float64)
    there = current.devices[other]
    legal = np.isfinite(time_s[mine][:, there]) & (less > 0)
    miss = np.where(less >= need, less - need, 2.0 * (need - less)) + np.where(less <= room[there][None, :], 0.0, 1e18)
    for index in _least(np.where(legal, miss, np.inf).ravel(), 4 * _TRIES):
        a, b = divmod(index, len(other))
        devices = current.devices.copy()
        devices[mine[a]], devices[other[b]] = there[b], device
        yield devices


def _least(key: NDArray[np.float64], count: int) -> list[int]:
    """Returns the indices of the least finite entries, at most `count` of them, least first, the first of equal ones first."""
    few = np.flatnonzero(key <= np.partition(key, count)[count] if len(key) > count else np.isfinite(key))
    few = few[np.isfinite(key[few])]
    found: list[int] = few[np.argsort(key[few], kind="stable")[:count]].tolist()
    return found
