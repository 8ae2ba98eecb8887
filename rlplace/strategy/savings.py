"""What recomputation and offload of blocks cost and save: an estimate that says in which order blocks give up memory.

A *choice* for a block is a pair (recompute, offload). Of a block's choices only those on the lower convex hull of seconds over
bytes are worth taking; walked from the quickest on, each is a *step*, and the steps of all blocks of a place in the order of
their seconds per byte saved are the greedy answer to its knapsack. The executor says how many of them it takes
(`rlplace.strategy.fit`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.schedule import LOOPED_BFS, ONE, ONE_F_ONE_B, SCHEDULES
from rlplace.strategy.costs import FORWARD_PASS, FULL, kind_numbers
from rlplace.strategy.drafts import Draft
from rlplace.strategy.meshes import copy_degree, expert_share_degree, share_degree
from rlplace.strategy.rules import EACH_BACKWARD, EACH_PASS, FULL_OFFLOAD, ONCE, WHOLE, keeping
from rlplace.strategy.tries import Question

Choice = tuple[int, int]
"""Indices of `rlplace.strategy.costs.RECOMPUTE` and `rlplace.strategy.drafts.OFFLOAD`."""

Floats = NDArray[np.float64]


def steps(question: Question, draft: Draft, place: int, choices: Sequence[Choice]) -> list[tuple[int, Choice]]:
    """The steps of a place, the cheapest for what it saves first: a block, and its choice from then on.

    Args:
        question: Whose costs.
        draft: Stages and micro-batches.
        place: Index of the place.
        choices: What blocks may choose; the first is where all of them start.
    """
    seconds, held = estimates(question, draft, place, choices)
    passes, stage_of = in_flight(draft), draft.stage_of_block
    hulls: dict[tuple[bytes, int], list[tuple[float, int]]] = {}
    found = []
    for block in draft.blocks_of(place):
        key = seconds[:, block].tobytes() + held[:, :, block].tobytes(), passes[stage_of[block]]
        if key not in hulls:
            hulls[key] = _hull(seconds[:, block], held[0, :, block] + key[1] * held[1, :, block])
        found += [(price, block, choice) for price, choice in hulls[key]]
    return [(block, choices[choice]) for _, block, choice in sorted(found)]


def _hull(seconds: Floats, held: Floats) -> list[tuple[float, int]]:
    """Seconds per byte and choice of every corner of the lower hull, after the first choice."""
    corners: list[tuple[float, int]] = []
    here = 0
    while True:
        saved = held[here] - held
        worth = np.flatnonzero(saved > 0.0)
        if not len(worth):
            return corners
        price = np.maximum(seconds[worth] - seconds[here], 0.0) / saved[worth]
        best = worth[np.lexsort((-saved[worth], price))[0]]
        corners.append((float(price.min()), int(best)))
        here = best


def in_flight(draft: Draft) -> list[int]:
    """About how many micro-batches every stage holds at once."""
    count = max(draft.microbatches)
    most = most_in_flight(draft.schedule, draft.stages, len(draft.places), count)
    if draft.schedule == ONE_F_ONE_B:
        return [min(count, draft.stages - stage) for stage in range(draft.stages)]
    return [most] * draft.stages


def most_in_flight(schedule: str | None, stages: int, places: int, count: int) -> int:
    """Likewise, of the stage that holds most."""
    if stages == 1:
        return 1
    if schedule == ONE_F_ONE_B:
        return min(count, stages)
    keeps_all = SCHEDULES[str(schedule)].layout == ONE or schedule == LOOPED_BFS
    return count if keeps_all else min(count, places + 1)


def estimates(question: Question, draft: Draft, place: int, choices: Sequence[Choice]) -> tuple[Floats, Floats]:
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
    forward_s = traffic.moved_s(traffic.tables_inside(here), first.collective_bytes, first.collective_calls)[FORWARD_PASS]
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
