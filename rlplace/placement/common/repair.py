"""The memory repair that all planners share: makes an assignment fit, by exact simulated peaks.

Two steps. `legalize` moves groups off devices that are not allowed (null times, fixed devices) and away from missing links;
it needs no simulation. `repair` then simulates, moves groups off overflowing devices (least added time per freed byte first,
by estimated footprints), and simulates again. When estimates no longer help, because the peak comes from received copies or
temporaries, it tries single moves and swaps and keeps what truly lowers the overflow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.memoized import memoized
from rlplace.placement.common import kernels
from rlplace.placement.common.evaluate import Assignment, PlanEvaluator, ScoredAssignment
from rlplace.placement.common.groupgraph import GroupGraph, finite_links, group_graph
from rlplace.problem import Problem
from rlplace.simulator import Simulator

MAX_CALLS = 400
"""Simulations that one repair may use."""

_TRIES = 24
"""Single moves tried by simulation before swaps are, and swaps tried after them."""


def legalize(problem: Problem, device_of_group: NDArray[Any]) -> Assignment:
    """Returns a copy with every group on an allowed device, and without missing links where moving groups can avoid them.

    Every group must have an allowed device (`rlplace.placement.common.shortage.check_possible`).
    """
    devices = np.array(device_of_group, dtype=np.int32)
    graph = group_graph(problem)
    illegal = ~problem.group_allowed[np.arange(problem.num_groups), devices]
    if illegal.any():
        kernels.place_illegal(graph.order, devices, graph.time_s, *traffic(problem))
    linked = problem.links.bandwidth_bytes_per_s > 0
    np.fill_diagonal(linked, True)
    if not linked.all():
        kernels.avoid_missing_links(
            graph.order, devices, graph.time_s, graph.neighbor_ptr, graph.neighbor, graph.neighbor_out, linked, 10
        )
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
    budget = evaluator.budget
    last_call = budget.used + max_calls
    current = evaluator.answer(devices)
    while not current.score.feasible and current.score.step_time_s != np.inf:
        if budget.used >= last_call or budget.passed():
            break
        better = _shed_all(current, evaluator)
        if better is None:
            # Estimates failed here: go on with exact tries, then trust them again from the new assignment.
            better = _try_moves(current, evaluator, last_call)
            if better is None:
                break
        current = better
    return current


@memoized
def traffic(problem: Problem) -> tuple[NDArray[Any], ...]:
    """Returns the arguments of `rlplace.placement.common.kernels` that price transfers."""
    graph = group_graph(problem)
    return (
        graph.neighbor_ptr, graph.neighbor, graph.neighbor_edge, graph.neighbor_out,
        graph.edge_bytes, graph.edge_count, graph.edge_fixed_s, *finite_links(problem),
    )  # fmt: skip


def _over(problem: Problem, peaks: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns bytes over and bytes under the limit of every device."""
    return np.maximum(peaks - problem.capacity_bytes, 0.0), np.maximum(problem.capacity_bytes - peaks, 0.0)


def _shed_all(current: ScoredAssignment, evaluator: PlanEvaluator) -> ScoredAssignment | None:
    """Returns one round of estimated moves off all overflowing devices; None when the overflow did not shrink."""
    problem = evaluator.problem
    graph = group_graph(problem)
    over, room = _over(problem, current.peaks)
    links = traffic(problem)
    members, slot = np.zeros(problem.num_groups, dtype=np.int64), np.zeros(problem.num_groups, dtype=np.int64)
    rows = np.zeros((problem.num_groups, problem.num_devices))
    # The estimate of what a move frees can be off either way, so a second try moves twice as much.
    for factor in (1.0, 2.0):
        devices = current.devices.copy()
        seconds = graph.time_s[np.arange(len(devices)), devices]
        load = np.bincount(devices, weights=seconds, minlength=problem.num_devices).astype(np.float64)
        left = room.copy()
        moved = 0
        for device in np.argsort(-over, kind="stable"):
            if over[device] > 0:
                need = over[device] * factor
                moved += kernels.shed(
                    device, need, devices, load, left, graph.footprint_bytes, graph.time_s, members, slot, rows, *links
                )
        if moved == 0:
            return None
        answer = evaluator.answer(devices)
        if answer.score.objective_s < current.score.objective_s:
            return answer
    return None


def _try_moves(current: ScoredAssignment, evaluator: PlanEvaluator, last_call: int) -> ScoredAssignment | None:
    """Returns the first single move or swap, cheapest first, that lowers the simulated overflow."""
    for devices in _neighbors(evaluator.problem, group_graph(evaluator.problem), current):
        if evaluator.budget.used >= last_call or evaluator.budget.passed():
            return None
        answer = evaluator.answer(devices)
        if answer.score.objective_s < current.score.objective_s:
            return answer
    return None


def _neighbors(problem: Problem, graph: GroupGraph, current: ScoredAssignment) -> Iterator[Assignment]:
    over, room = _over(problem, current.peaks)
    device = int(over.argmax())
    rows = np.zeros((problem.num_groups, problem.num_devices))
    kernels.all_communication(current.devices, *traffic(problem), rows)
    mine = np.flatnonzero((current.devices == device) & (graph.footprint_bytes >= 0))
    added = rows[mine] - rows[mine, device][:, None] + graph.time_s[mine] - graph.time_s[mine, device][:, None]
    added[:, device] = np.inf
    freed = np.minimum(graph.footprint_bytes[mine] + 1.0, max(over[device], 1.0))
    # Moves that should fit come first, then by added time per freed byte.
    fits = room[None, :] >= graph.footprint_bytes[mine][:, None]
    key = np.where(added > 0, added / freed[:, None], added * freed[:, None])
    flat = np.lexsort((key.ravel(), ~fits.ravel()))
    for index in flat[: 4 * _TRIES]:
        row, target = divmod(int(index), problem.num_devices)
        if not np.isfinite(added[row, target]):
            continue
        devices = current.devices.copy()
        devices[mine[row]] = target
        yield devices
    yield from _swaps(problem, graph, current, device, mine, float(over[device]), room)


def _swaps(
    problem: Problem,
    graph: GroupGraph,
    current: ScoredAssignment,
    device: int,
    mine: NDArray[np.int64],
    need: float,
    room: NDArray[np.float64],
) -> Iterator[Assignment]:
    """Exchanges of a large group for a smaller one elsewhere, those that free just enough first."""
    size = graph.footprint_bytes
    other = np.flatnonzero((current.devices != device) & np.isfinite(graph.time_s[:, device]))
    if len(mine) == 0 or len(other) == 0:
        return
    mine = mine[np.argsort(-size[mine], kind="stable")][:200]
    other = other[np.argsort(size[other], kind="stable")][:500]
    freed = (size[mine][:, None] - size[other][None, :]).astype(np.float64)
    there = current.devices[other]
    legal = np.isfinite(graph.time_s[mine][:, there]) & (freed > 0)
    fits = freed <= room[there][None, :]
    miss = np.where(freed >= need, freed - need, 2.0 * (need - freed))
    key = np.where(legal, miss + np.where(fits, 0.0, 1e18), np.inf).ravel()
    for index in np.argsort(key, kind="stable")[: 4 * _TRIES]:
        if not np.isfinite(key[index]):
            return
        a, b = divmod(int(index), len(other))
        devices = current.devices.copy()
        devices[mine[a]], devices[other[b]] = there[b], device
        yield devices
