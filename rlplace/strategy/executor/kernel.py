"""The block executor: the rules of `rlplace.strategy.executor` on packed arrays, compiled.

`rlplace.strategy.executor.arrays` defines the arrays, `rlplace.strategy.executor.packing` fills them. The functions have the
names of those in `rlplace.strategy.executor.reference`, which is written for clarity alone.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import sys

import numpy as np

from rlplace.compiled import entry, inner, stamp_of
from rlplace.strategy import costs
from rlplace.strategy.executor import arrays as c
from rlplace.strategy.executor import passkernels as k
from rlplace.strategy.executor import rules, traffic

STAMP = stamp_of(c, costs, rules, traffic, k, sys.modules[__name__])
"""Digest of all sources of `evaluate_packed`."""


@inner
def seconds_of(y, s, kind, n):
    """Returns seconds of ops, of collectives inside blocks, and by which gathers prolong an action of micro-batch `n`."""
    if kind == c.DO_W:
        return y[s, k.WEIGHT_C], y[s, k.WEIGHT_T], 0.0
    if kind != c.DO_F:
        return y[s, k.INPUT_C if kind == c.DO_I else k.BACKWARD_C], y[s, k.BACKWARD_T], 0.0
    compute, tensor = y[s, k.FORWARD_C], y[s, k.FORWARD_T]
    moving = y[s, k.LEFT_S] - n * (compute + tensor)
    if moving <= 0.0:
        return compute, tensor, 0.0
    held_up = k.at_once_s(y[s, k.MEETS], compute, tensor, moving)
    return compute, tensor, k.slowed_s(compute, tensor, moving, held_up) - compute - tensor


@inner
def next_end(y, actions, a, end, arrived, first, stages, idle_s):
    """Returns the end of the next action of a place that is idle from `idle_s`; inf until its input has been sent."""
    if a == end:
        return np.inf
    s, kind, n = actions[a, 0], actions[a, 1], actions[a, 2]
    ready = 0.0
    if kind == c.DO_F and s > 0:
        ready = arrived[0, first + s, n]
    elif (kind == c.DO_B or kind == c.DO_I) and s < stages - 1:
        ready = arrived[1, first + s, n]
    if ready < 0.0:
        return np.inf
    if kind == c.DO_F and n == 0:
        ready = max(ready, y[first + s, k.READY_S])
    compute, tensor, gather = seconds_of(y, first + s, kind, n)
    return max(idle_s, ready) + (compute + tensor + gather)


@inner
def pipeline(y, works, busy, leaving, rows, frame, bounds):
    """Runs the actions of all places of all lanes; returns whether all of them could run.

    Args:
        y: float64 [L * S, STAGE].
        works: float64 [L * P, ANSWER], to be added to.
        busy: float64 [L * S], to which seconds are added.
        leaving: float64 [.], filled for every action with the bytes of gradients that its place is still sending.
        rows: float64 [rows, B, ROW].
        frame: `FrameArrays`.
        bounds: int64 [S + 1].
    """
    lanes, places = frame.row.shape
    actions, action_ptr, ways, way_ptr, way_channels = (
        frame.actions, frame.action_ptr, frame.ways, frame.way_ptr, frame.way_channels,
    )  # fmt: skip
    stage_place, row = frame.stage_place, frame.row
    stages, most = len(stage_place), 0
    for lane in range(lanes):
        most = max(most, frame.microbatches[lane])
    arrived = np.full((2, lanes * stages, most), -1.0)
    travelled = np.zeros((2, lanes * stages, most))
    channels = 0
    for e in range(len(way_channels)):
        channels = max(channels, way_channels[e] + 1)
    channel_free = np.zeros(lanes * channels)
    left = np.empty(lanes * stages, dtype=np.int64)
    for at in range(lanes * stages):
        left[at] = frame.microbatches[at // stages]
    together, missing = np.zeros(stages), np.full(stages, lanes, dtype=np.int64)  # lanes exchange gradients with one another
    position, ends = action_ptr[:-1].copy(), np.empty(len(works))
    first_gone, last_gone, on_way = action_ptr[:-1].copy(), action_ptr[:-1].copy(), np.zeros(len(works))
    gone_at, gone_bytes = np.empty(len(leaving)), np.empty(len(leaving))
    for p in range(len(works)):
        ends[p] = next_end(y, actions, position[p], action_ptr[p + 1], arrived, p // places * stages, stages, 0.0)
    while True:
        p, now = -1, np.inf
        for e in range(len(works)):
            if ends[e] < now:
                p, now = e, ends[e]
        if p < 0:
            break
        s, kind, n = actions[position[p], 0], actions[position[p], 1], actions[position[p], 2]
        lane = p // places
        at = lane * stages + s
        compute, tensor, gather = seconds_of(y, at, kind, n)
        forward, backward = kind == c.DO_F, kind == c.DO_B or kind == c.DO_I
        if (forward and s > 0) or (backward and s < stages - 1):
            way = 0 if forward else 1
            works[p, c.HAND_OVER] += min(max(0.0, arrived[way, at, n] - works[p, c.END]), travelled[way, at, n])
        waits = 0.0
        if forward and n == 0:
            waits = max(0.0, y[at, k.READY_S] - max(works[p, c.END], arrived[0, at, n] if s > 0 else 0.0))
        works[p, c.COMPUTE] += compute
        works[p, c.TENSOR] += tensor
        works[p, c.GATHER] += gather + waits
        busy[at] += compute + tensor + gather + waits
        starts = now if forward else now - (compute + tensor + gather)
        while first_gone[p] < last_gone[p] and gone_at[first_gone[p]] <= starts:
            on_way[p] -= gone_bytes[first_gone[p]]
            first_gone[p] += 1
        leaving[position[p]] = on_way[p] if first_gone[p] < last_gone[p] else 0.0
        position[p] += 1
        target = at + 1 if forward and s < stages - 1 else at - 1 if backward and s > 0 else -1
        if target >= 0:
            way, q = 0 if forward else 1, lane * places + stage_place[target - lane * stages]
            start, took = now, 0.0
            if q != p:
                own = row[lane, p - lane * places]
                size = rows[own, bounds[s + 1] - 1, c.SENT] if forward else rows[own, bounds[s] - 1, c.RETURNED]
                took = ways[way, s, c.LATENCY]
                if size > 0.0:
                    took += size * ways[way, s, c.PART] * ways[way, s, c.S_PER_BYTE]
                first, last = way_ptr[way * stages + s], way_ptr[way * stages + s + 1]
                for e in range(first, last):
                    start = max(start, channel_free[lane * channels + way_channels[e]])
                for e in range(first, last):
                    channel_free[lane * channels + way_channels[e]] = start + took
                if backward:
                    gone_at[last_gone[p]], gone_bytes[last_gone[p]] = start + took, size
                    on_way[p] += size
                    last_gone[p] += 1
            arrived[way, target, n], travelled[way, target, n] = start + took, took
            if q != p and ends[q] == np.inf:
                ends[q] = next_end(
                    y, actions, position[q], action_ptr[q + 1], arrived, lane * stages, stages, works[q, c.END]
                )  # fmt: skip
        works[p, c.END] = now
        if kind == c.DO_B or kind == c.DO_W:
            left[at] -= 1
            if left[at] == 0 and y[at, k.EXCHANGE_S] > 0.0:
                together[s] = max(together[s], now)
                missing[s] -= 1
                busy[at] += y[at, k.EXCHANGE_S]
                works[p, c.EXCHANGE] -= now
                works[p, c.END] = ends[p] = np.inf
                if missing[s] > 0:
                    continue
                for other in range(lanes):
                    e = other * places + stage_place[s]
                    works[e, c.END] = together[s] + y[at, k.EXCHANGE_S]
                    works[e, c.EXCHANGE] += works[e, c.END]
                    ends[e] = next_end(
                        y, actions, position[e], action_ptr[e + 1], arrived, other * stages, stages, works[e, c.END]
                    )  # fmt: skip
                continue
        ends[p] = next_end(y, actions, position[p], action_ptr[p + 1], arrived, lane * stages, stages, now)
    for p in range(len(works)):
        if position[p] != action_ptr[p + 1]:
            return False
    return True


@inner
def device_bytes(y, leaving, frame, lane, p):
    """Returns the peak memory of the passes of a place in one lane; `y` holds the stages of the lane."""
    at = lane * frame.row.shape[1] + p
    left = np.full(len(frame.stage_place), frame.microbatches[lane], dtype=np.int64)
    held, peak = 0.0, 0.0
    for a in range(frame.action_ptr[at], frame.action_ptr[at + 1]):
        s, kind = frame.actions[a, 0], frame.actions[a, 1]
        if kind == c.DO_F:
            peak = max(peak, held + leaving[a] + y[s, k.FORWARD_PEAK])
            held += y[s, k.KEEPS]
        elif kind != c.DO_W:
            most = y[s, k.BACKWARD_PEAK if kind == c.DO_B else k.HALF_PEAK]
            peak = max(peak, held + leaving[a] - y[s, k.KEEPS] + most)
        if kind == c.DO_I:
            held += y[s, k.HALVES]
        if kind == c.DO_W:
            peak = max(peak, held + leaving[a] + y[s, k.WEIGHT_PEAK])
            held -= y[s, k.HALVES]
        if kind == c.DO_B or kind == c.DO_W:
            held -= y[s, k.KEEPS]
            left[s] -= 1
            if left[s] == 0:
                peak = max(peak, held + y[s, k.EXCHANGE_PEAK])
    return peak


@inner
def summed_again(ties, blocks):
    """Returns float64 [blocks, 3], bytes of tied weights that another block counts, by block."""
    again = np.zeros((blocks, 3))
    for e in range(len(ties.block)):
        for column in range(3):
            again[ties.block[e], column] += ties.again_bytes[e, column]
    return again


@inner
def covers(chosen, stages, blocks):
    """Returns whether the choices cut so many blocks into so many stages, none of them empty."""
    bounds = chosen.bounds
    if len(bounds) != stages + 1 or bounds[0] != 0 or bounds[stages] != blocks:
        return False
    for s in range(stages):
        if bounds[s] >= bounds[s + 1]:
            return False
    return len(chosen.recompute) == blocks and len(chosen.offload) == blocks


def _compile(stamp):
    """Makes the entries, tied to the sources of all that they call."""

    @entry
    def place_blocks(at, chosen, ties):
        """Returns float64 [B, BLOCK], all blocks of the model on a device of a place; types as in `evaluate_packed`."""
        stamp  # noqa: B018
        x, again = np.empty((len(at.row), k.BLOCK)), summed_again(ties, len(at.row))
        for b in range(len(at.row)):
            k.place_block(x, b, at, chosen, again)
        return x

    @entry
    def moved_s(tables, numbers, size_bytes, calls):
        """Returns float64 [W, B], seconds of collectives [W, K, B] of so many bytes in so many calls, by table [K]."""
        stamp  # noqa: B018
        ways, kinds, blocks = size_bytes.shape
        found = np.zeros((ways, blocks))
        for way in range(ways):
            for kind in range(kinds):
                for b in range(blocks):
                    if calls[way, kind, b] > 0.0:
                        size = size_bytes[way, kind, b] / calls[way, kind, b]
                        found[way, b] += calls[way, kind, b] * k.table_s(tables[numbers[kind]], size)
        return found

    @entry
    def evaluate_packed(rows, tables, frame, chosen, ties, out):
        """Computes step time and memory of a packed draft.

        Args:
            rows: float64 [rows, B, ROW].
            tables: float64 [T, G].
            frame: Fields of a `FrameArrays`, as a plain tuple, which numba takes apart twice as fast; so are the others.
            chosen: Of a `BlockChoices`.
            ties: Of a `PackedTies`.
            out: Of a `StepResult`, to be filled.

        Returns:
            False when `chosen.bounds` do not cut the blocks into these stages.
        """
        stamp  # noqa: B018
        frame, chosen, ties, out = c.FrameArrays(*frame), c.BlockChoices(*chosen), c.PackedTies(*ties), c.StepResult(*out)
        stages, (lanes, count), blocks = len(frame.stage_place), frame.row.shape, rows.shape[1]
        if not covers(chosen, stages, blocks):
            return False
        bounds, answers, used = chosen.bounds, out.answers, out.used
        again, x, y = summed_again(ties, blocks), np.empty((blocks, k.BLOCK)), np.empty((lanes * stages, k.STAGE))
        works, busy, leaving = np.zeros((lanes * count, c.ANSWER)), np.zeros(lanes * stages), np.zeros(len(frame.actions))
        answers[:] = 0.0
        used[:] = 0.0
        out.stage_s[:] = 0.0
        out.hosts[:] = 0.0
        over, ended = 0.0, True
        for lane in range(lanes):
            first = lane * stages
            for s in range(stages):
                p = frame.stage_place[s]
                at = c.LanePlace(rows[frame.row[lane, p]], frame.places[p], tables, stages, frame.microbatches[lane])
                for b in range(bounds[s], bounds[s + 1]):
                    k.place_block(x, b, at, chosen, again)
                    works[lane * count + p, c.UPDATE_S] += x[b, k.UPDATE]
                    if lane == 0:
                        out.hosts[p] += x[b, k.HOST]
                k.prepare_stage(x, y[first:], s, bounds[s], bounds[s + 1], at)
                used[lane, p] += y[first + s, k.STATIC_BYTES]
                if stages == 1:
                    used[lane, 0] += k.single_stage(x, y[lane:], works[lane], busy[lane:], blocks, at)
            if stages > 1:
                k.gather_ahead(x, y[first:], frame, bounds)
        if stages > 1:
            ended = pipeline(y, works, busy, leaving, rows, frame, bounds)
        for lane in range(lanes):
            for s in range(stages):
                out.stage_s[s] = max(out.stage_s[s], busy[lane * stages + s])
            for p in range(count):
                if stages > 1:
                    used[lane, p] += device_bytes(y[lane * stages :], leaving, frame, lane, p)
                work = works[lane * count + p]
                end, update = max(answers[p, c.END], work[c.END]), max(answers[p, c.UPDATE_S], work[c.UPDATE_S])
                if work[c.COMPUTE] + work[c.TENSOR] > answers[p, c.COMPUTE] + answers[p, c.TENSOR]:
                    for column in range(c.ANSWER):
                        answers[p, column] = work[column]
                answers[p, c.END], answers[p, c.UPDATE_S] = end, update
                for e in range(frame.room_ptr[lane * count + p], frame.room_ptr[lane * count + p + 1]):
                    over += max(0.0, used[lane, p] - frame.room_bytes[e]) * frame.room_count[e]
        for tie in range(len(ties.seconds)):
            together = 0.0
            for e in range(ties.ptr[tie], ties.ptr[tie + 1]):
                together = max(together, answers[ties.places[e], c.END])
            for e in range(ties.ptr[tie], ties.ptr[tie + 1]):
                answers[ties.places[e], c.END] = together + ties.seconds[tie]
                answers[ties.places[e], c.EXCHANGE] += ties.seconds[tie]
        step = 0.0
        for p in range(count):
            step = max(step, answers[p, c.END] + answers[p, c.UPDATE_S])
        out.step[0] = step if ended else np.inf
        out.step[1] = over
        return True

    return place_blocks, moved_s, evaluate_packed


place_blocks, moved_s, evaluate_packed = _compile(STAMP)
