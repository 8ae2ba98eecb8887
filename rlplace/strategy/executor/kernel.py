"""The block executor: the rules of `rlplace.strategy.executor` on packed arrays, compiled.

`rlplace.strategy.executor.columns` says what the arrays hold, `rlplace.strategy.executor.packing` makes them. The functions
follow by name those of tests/strategy/reference_executor.py and reference_memory.py, written for clarity alone.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import sys

import numpy as np

from rlplace.compiled import entry, inner, stamp_of
from rlplace.strategy import costs
from rlplace.strategy.executor import columns as c
from rlplace.strategy.executor import passkernels as k
from rlplace.strategy.executor import rules, traffic

STAMP = stamp_of(c, costs, rules, traffic, k, sys.modules[__name__])
"""Of all that `evaluate_packed` is compiled from."""


@inner
def seconds_of(y, s, kind, first):
    """Ops, collectives inside blocks, and gathers of an action: as `reference_stages.stage_action`."""
    if kind == c.DO_F:
        return y[s, k.FORWARD_C], y[s, k.FORWARD_T], y[s, k.FIRST_GATHER_S] if first else 0.0
    if kind == c.DO_W:
        return y[s, k.WEIGHT_C], y[s, k.WEIGHT_T], 0.0
    return y[s, k.INPUT_C if kind == c.DO_I else k.BACKWARD_C], y[s, k.BACKWARD_T], 0.0


@inner
def next_end(y, actions, a, end, arrived, first, stages, idle_s):
    """When the next action of a place ends that is idle from `idle_s`; inf while what it waits for has not been sent."""
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
    compute, tensor, gather = seconds_of(y, first + s, kind, n == 0)
    return max(idle_s, ready) + (compute + tensor + gather)


@inner
def pipeline(
    y, works, busy, leaving, actions, action_ptr, stage_place, rows, row, bounds, ways, way_ptr, way_channels, microbatches
):
    """As `reference_executor.pipeline`; returns whether all actions ran. Lanes stand one after the other in rows of stages and
    places.

    Args:
        y: float64 [L * S, STAGE].
        works: float64 [L * P, ANSWER], to be added to.
        busy: float64 [L * S], to which seconds are added.
        leaving: float64 [.], filled for every action with the bytes of gradients that its place is still sending.
        actions: int32 [., 3].
        action_ptr: int64 [L * P + 1].
        stage_place: int64 [S].
        rows: float64 [rows, B, ROW].
        row: int64 [L, P].
        bounds: int64 [S + 1].
        ways: float64 [2, S, WAY], from every stage to the next one and to the one before it.
        way_ptr: int64 [2 S + 1] into `way_channels`.
        way_channels: int64.
        microbatches: int64 [L], passes.
    """
    lanes, places = row.shape
    stages, most = len(stage_place), 0
    for lane in range(lanes):
        most = max(most, microbatches[lane])
    arrived = np.full((2, lanes * stages, most), -1.0)
    travelled = np.zeros((2, lanes * stages, most))
    channels = 0
    for e in range(len(way_channels)):
        channels = max(channels, way_channels[e] + 1)
    channel_free = np.zeros(lanes * channels)
    left = np.empty(lanes * stages, dtype=np.int64)
    for at in range(lanes * stages):
        left[at] = microbatches[at // stages]
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
        compute, tensor, gather = seconds_of(y, at, kind, n == 0)
        forward, backward = kind == c.DO_F, kind == c.DO_B or kind == c.DO_I
        if (forward and s > 0) or (backward and s < stages - 1):
            way = 0 if forward else 1
            works[p, c.HAND_OVER] += min(max(0.0, arrived[way, at, n] - works[p, c.END]), travelled[way, at, n])
        works[p, c.COMPUTE] += compute
        works[p, c.TENSOR] += tensor
        works[p, c.GATHER] += gather
        busy[at] += compute + tensor + gather
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
def held_bytes(y, peaks, stages, leaving, actions, action_ptr, microbatches):
    """Fills the most that the passes of each place hold, as `reference_memory.device_bytes`."""
    left = np.full(stages, microbatches, dtype=np.int64)
    for p in range(len(peaks)):
        held, peak = 0.0, 0.0
        for a in range(action_ptr[p], action_ptr[p + 1]):
            s, kind = actions[a, 0], actions[a, 1]
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
        peaks[p] = peak


@inner
def _summed(block, sizes, blocks):
    """float64 [blocks, 3], bytes that tied weights have again, by block."""
    again = np.zeros((blocks, 3))
    for e in range(len(block)):
        for column in range(3):
            again[block[e], column] += sizes[e, column]
    return again


def _compile(stamp):
    """The entries, tied to the sources of what they call."""

    @entry
    def place_blocks(row, place, tables, recompute, offload, again_block, again_bytes, stages, microbatches):
        """All blocks on a device of a place, float64 [B, BLOCK]: see `evaluate_packed`, of which it has one row and place."""
        stamp  # noqa: B018
        x, again = np.empty((len(row), k.BLOCK)), _summed(again_block, again_bytes, len(row))
        for b in range(len(row)):
            k.place_block(x, b, row, place, tables, recompute[b], offload[b], again[b], stages, microbatches)
        return x

    @entry
    def moved_s(tables, numbers, size_bytes, calls):
        """float64 [W, B], seconds of collectives [W, K, B] of so many bytes in so many calls, by their tables' numbers [K]."""
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
    def evaluate_packed(
        rows, tables, stage_place, places, lane_microbatches, row_of, actions, action_ptr, ways, way_ptr, way_channels,
        room_bytes, room_count, room_ptr, bounds, recompute, offload, tie_s, tie_ptr, tie_places, again_block, again_bytes,
        result, answers, used, hosts, stage_s,
    ):  # fmt: skip
        """Step time and memory of a packed draft.

        Rows float64 [rows, B, ROW] and tables float64 [T, G]; from `stage_place` to `room_ptr` the arrays of a
        `packing.Frame`; bounds int64 [S + 1], recompute and offload uint8 [B]; from `tie_s` to `again_bytes` those of
        `packing.Ties`. The rest is filled: result float64 [2] with step time and bytes over capacity, answers float64
        [P, ANSWER], used float64 [L, P] with the bytes that devices hold beside reserved ones, hosts float64 [P] with the bytes
        that each device has in its host's memory, stage_s float64 [S] with busy seconds.

        Returns:
            False when `bounds` do not cut the blocks into these stages.
        """
        stamp  # noqa: B018
        stages, count, blocks = len(stage_place), len(places), rows.shape[1]
        if len(bounds) != stages + 1 or bounds[0] != 0 or bounds[stages] != blocks:
            return False
        if len(recompute) != blocks or len(offload) != blocks:
            return False
        for s in range(stages):
            if bounds[s] >= bounds[s + 1]:
                return False
        again = _summed(again_block, again_bytes, blocks)
        x = np.empty((blocks, k.BLOCK))
        lanes = len(lane_microbatches)
        y = np.empty((lanes * stages, k.STAGE))
        works = np.zeros((lanes * count, c.ANSWER))
        busy = np.zeros(lanes * stages)
        peaks = np.zeros(count)
        leaving = np.zeros(len(actions))
        answers[:] = 0.0
        stage_s[:] = 0.0
        hosts[:] = 0.0
        over, ended = 0.0, True
        for lane in range(lanes):
            microbatches, row, first = lane_microbatches[lane], row_of[lane], lane * stages
            used[lane] = 0.0
            for s in range(stages):
                p = stage_place[s]
                for b in range(bounds[s], bounds[s + 1]):
                    k.place_block(
                        x, b, rows[row[p]], places[p], tables, recompute[b], offload[b], again[b], stages, microbatches
                    )
                    works[lane * count + p, c.UPDATE_S] += x[b, k.UPDATE]
                    if lane == 0:
                        hosts[p] += x[b, k.HOST]
                k.prepare_stage(x, y[first:], s, bounds[s], bounds[s + 1], rows[row[p]], places[p], stages, microbatches)
                used[lane, p] += y[first + s, k.STATIC_BYTES]
            if stages == 1:
                used[lane, 0] += k.single_stage(x, y[lane:], works[lane], busy[lane:], blocks, microbatches, places[0], tables)
        if stages > 1:
            ended = pipeline(
                y, works, busy, leaving, actions, action_ptr, stage_place, rows, row_of, bounds, ways, way_ptr, way_channels,
                lane_microbatches,
            )  # fmt: skip
        for lane in range(lanes):
            first = lane * stages
            if stages > 1:
                part = action_ptr[lane * count : (lane + 1) * count + 1]
                held_bytes(y[first:], peaks, stages, leaving, actions, part, lane_microbatches[lane])
                for p in range(count):
                    used[lane, p] += peaks[p]
            for s in range(stages):
                stage_s[s] = max(stage_s[s], busy[first + s])
            for p in range(count):
                work = works[lane * count + p]
                end, update = max(answers[p, c.END], work[c.END]), max(answers[p, c.UPDATE_S], work[c.UPDATE_S])
                if work[c.COMPUTE] + work[c.TENSOR] > answers[p, c.COMPUTE] + answers[p, c.TENSOR]:
                    for column in range(c.ANSWER):
                        answers[p, column] = work[column]
                answers[p, c.END], answers[p, c.UPDATE_S] = end, update
                for e in range(room_ptr[lane * count + p], room_ptr[lane * count + p + 1]):
                    over += max(0.0, used[lane, p] - room_bytes[e]) * room_count[e]
        for tie in range(len(tie_s)):
            together = 0.0
            for e in range(tie_ptr[tie], tie_ptr[tie + 1]):
                together = max(together, answers[tie_places[e], c.END])
            for e in range(tie_ptr[tie], tie_ptr[tie + 1]):
                answers[tie_places[e], c.END] = together + tie_s[tie]
                answers[tie_places[e], c.EXCHANGE] += tie_s[tie]
        step = 0.0
        for p in range(count):
            step = max(step, answers[p, c.END] + answers[p, c.UPDATE_S])
        result[0] = step if ended else np.inf
        result[1] = over
        return True

    return place_blocks, moved_s, evaluate_packed


place_blocks, moved_s, evaluate_packed = _compile(STAMP)
