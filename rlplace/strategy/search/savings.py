"""What recomputation and offload of blocks cost and save: an estimate that says in which order blocks give up memory.

A *choice* for a block is a pair (recompute, offload). Of a block's choices only those on the lower convex hull of seconds over
bytes are worth taking; walked from the quickest on, each is a *step*, and the steps of all blocks of a place in the order of
their seconds per byte saved are the greedy answer to its knapsack. The executor says how many of them it takes
(`rlplace.strategy.search.fit`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.plan.schedule import LOOPED_BFS, ONE, ONE_F_ONE_B, SCHEDULES
from rlplace.strategy.costs import FORWARD_PASS, FULL, PassCosts, kind_numbers
from rlplace.strategy.drafts import Draft, Mesh
from rlplace.strategy.executor.meshes import copy_degree, copy_groups, expert_share_degree, share_degree, share_groups
from rlplace.strategy.executor.rules import EACH_BACKWARD, EACH_PASS, FULL_OFFLOAD, ONCE, WHOLE, keeping
from rlplace.strategy.search.tries import SearchProblem

Choice = tuple[int, int]
"""Indices of `rlplace.strategy.costs.RECOMPUTE` and `rlplace.strategy.drafts.OFFLOAD`."""

Floats = NDArray[np.float64]


class Step(NamedTuple):
    """A block gives up memory; sorted by `price`, the seconds for each of the bytes saved."""

    price: float
    block: int
    choice: Choice
    saved_bytes: float


def steps(question: SearchProblem, draft: Draft, place: int, choices: Sequence[Choice]) -> list[Step]:
    """Returns the steps of a place, the cheapest for what it saves first.

    Args:
        question: Whose costs.
        draft: Stages and micro-batches, and where blocks start.
        place: Index of the place.
        choices: What blocks may choose.
    """
    seconds, held = estimates(question, draft, place, choices)
    passes, stage_of = in_flight_of(draft), draft.stage_of_block
    hulls: dict[tuple[bytes, int, Choice], list[tuple[float, int, float]]] = {}
    found = []
    for block in draft.blocks_of(place):
        now = draft.recompute[block], draft.offload[block]
        key = seconds[:, block].tobytes() + held[:, :, block].tobytes(), passes[stage_of[block]], now
        if key not in hulls:
            start = choices.index(now) if now in choices else 0
            hulls[key] = _hull(seconds[:, block], held[0, :, block] + key[1] * held[1, :, block], start)
        found += [Step(price, block, choices[choice], saved) for price, choice, saved in hulls[key]]
    return sorted(found)


def _hull(seconds: Floats, held: Floats, here: int) -> list[tuple[float, int, float]]:
    """Returns seconds per byte, choice and bytes saved of every corner of the lower hull, after the choice `here`."""
    corners: list[tuple[float, int, float]] = []
    while True:
        saved = held[here] - held
        worth = np.flatnonzero(saved > 0.0)
        if not len(worth):
            return corners
        price = np.maximum(seconds[worth] - seconds[here], 0.0) / saved[worth]
        best = worth[np.lexsort((-saved[worth], price))[0]]
        corners.append((float(price.min()), int(best), float(saved[best])))
        here = best


def in_flight(schedule: str | None, stages: int, places: int, count: int) -> list[int]:
    """About how many of so many micro-batches every stage holds at once."""
    if stages == 1:
        return [1]
    if schedule == ONE_F_ONE_B:
        return [min(count, stages - stage) for stage in range(stages)]
    keeps_all = SCHEDULES[str(schedule)].layout == ONE or schedule == LOOPED_BFS
    return [count if keeps_all else min(count, places + 1)] * stages


def in_flight_of(draft: Draft) -> list[int]:
    """`in_flight` of a draft."""
    return in_flight(draft.schedule, draft.stages, len(draft.places), max(draft.microbatches))


def exchange_s(question: SearchProblem, place: Mesh) -> Floats:
    """Returns float64 [B], seconds in which a place sums the gradients of a block, and gathers its weights where they are
    shared.
    """
    traffic, whole = question.scores.traffic, question.costs.held(place.tensor, place.expert)
    weights, gradients = np.maximum(whole.weight_bytes, 1.0), np.maximum(whole.gradient_bytes * whole.gradient_item, 1.0)
    if place.sharding:
        tables = traffic.collectives(("all_gather", "reduce_scatter"), share_groups(place))
        moved = np.stack([weights, gradients])[None]
    else:
        tables, moved = traffic.collectives(("all_reduce",), copy_groups(place)), gradients[None, None]
    return traffic.moved_s(tables, moved, np.ones(moved.shape))[0]


def inside_s(question: SearchProblem, place: Mesh, passes: PassCosts) -> Floats:
    """Returns float64 [2, B], seconds in which a place moves tensors inside blocks, in a forward and in a backward."""
    traffic = question.scores.traffic
    return traffic.moved_s(traffic.tables_inside(place), passes.collective_bytes, passes.collective_calls)


def estimates(question: SearchProblem, draft: Draft, place: int, choices: Sequence[Choice]) -> tuple[Floats, Floats]:
    """Of every choice for every block of the model on a place: seconds a step, and bytes.

    Returns:
        float64 [C, B] seconds, and float64 [2, C, B] bytes held all step long, and for each micro-batch in flight.
    """
    here, costs, traffic = draft.places[place], question.costs, question.scores.traffic
    kind_of = kind_numbers(costs, question.cluster)
    kinds = sorted({kind_of[device] for device in here.devices})
    count = max(draft.microbatches)
    cut = here.cut(max(draft.microbatch) * (draft.data_degree // here.data_degree))
    again = np.max([costs.passes(kind, cut).again_s for kind in kinds], axis=0)
    kept = np.max([costs.passes(kind, cut).kept_bytes for kind in kinds], axis=0)
    first = costs.passes(kinds[0], cut)
    forward_s = inside_s(question, here, first)[FORWARD_PASS]
    copies, held_costs = copy_degree(here), costs.held(here.tensor, here.expert)
    whole = np.array([held_costs.weight_bytes, held_costs.gradient_bytes, held_costs.optimizer_bytes], dtype=np.float64)
    expert = held_costs.expert_bytes.astype(np.float64)
    shared = (whole - expert) / share_degree(here) + expert / expert_share_degree(here)
    weights, gradients, optimizer = shared
    host_rate = min(traffic.host_bytes_per_s(device) for device in here.devices)
    host_update_s = (2.0 * optimizer + gradients + weights) / min(map(traffic.host_memory_bytes_per_s, here.devices))
    update_s = np.max([costs.update_s(kind, here.tensor, here.expert) for kind in kinds], axis=0) / share_degree(here)
    runs = count * (2 if draft.stages > 1 and SCHEDULES[str(draft.schedule)].splits_backward else 1)
    seconds, held = [], []
    for recompute, offload in choices:
        kept_as = keeping(here.sharding, offload, draft.stages, copies)
        spent = (again[recompute] + (forward_s if recompute == FULL else 0.0)) * runs + (host_update_s if offload else update_s)
        if offload == FULL_OFFLOAD:
            gathers, reduces = {EACH_PASS: (2 * count, count), EACH_BACKWARD: (1, count)}.get(kept_as, (1, 1))
            spent = spent + (gathers * weights + reduces * gradients) / host_rate
        elif offload:
            spent = spent + (gradients + weights) / host_rate
        static = optimizer * (not offload) + weights * (offload != FULL_OFFLOAD)  # as the executor counts it
        static = static + whole[0] * (kept_as in (ONCE, EACH_BACKWARD))
        if kept_as == WHOLE or (kept_as == ONCE and (count > 1 or draft.stages > 1)):
            static = static + whole[1]
        elif offload != FULL_OFFLOAD:
            static = static + gradients
        seconds.append(spent)
        held.append((static, kept[recompute].astype(np.float64)))
    return np.array(seconds), np.array(held).swapaxes(0, 1)
