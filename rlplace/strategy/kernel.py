"""The compiled twin of `rlplace.strategy.reference`: the same rules on packed arrays, a few thousand times quicker.

`rlplace.strategy.columns` says what the arrays hold, `rlplace.strategy.packing` makes them. The functions follow those of
`reference`, `reference_blocks` and `reference_memory` by name.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import sys

import numpy as np

from rlplace.compiled import entry, inner, stamp_of
from rlplace.strategy import columns as c
from rlplace.strategy import costs, rules, traffic
from rlplace.strategy.costs import FULL
from rlplace.strategy.rules import BUCKET, EACH_BACKWARD, EACH_PASS, FIRST_BUCKET, FULL_OFFLOAD, ONCE, SLOWDOWN, WHOLE

STAMP = stamp_of(c, costs, rules, traffic, sys.modules[__name__])
"""Of all that `evaluate_packed` is compiled from."""

table_s = inner(traffic.table_s)
keeping = inner(rules.keeping)
beside_s = inner(rules.beside_s)
hidden_buckets = inner(rules.hidden_buckets)

# A block on its place in one lane, float64 [B, BLOCK].
(
    HOW, FORWARD, FORWARD_TENSOR, BACKWARD, BACKWARD_TENSOR, WEIGHT, WEIGHT_TENSOR, AGAIN, UPDATE, GATHER, REDUCE, COPIES,
    BUCKETS, WEIGHTS, GRADIENTS, BUFFER, STATIC, HOST, KEPT, WORKING_FORWARD, WORKING_BACKWARD,
) = range(21)  # fmt: skip
BLOCK = 21

# What a stage's micro-batches take, float64 [S, STAGE].
# The last seven are seconds of ops and of collectives of its actions.
(
    KEEPS, FORWARD_PEAK, BACKWARD_PEAK, HALF_PEAK, EXCHANGE_PEAK, STATIC_BYTES, EXCHANGE_S, FIRST_GATHER_S, FORWARD_C,
    FORWARD_T, BACKWARD_C, BACKWARD_T, INPUT_C, WEIGHT_C, WEIGHT_T,
) = range(15)  # fmt: skip
STAGE = 15


@inner
def place_block(x, b, row, place, tables, recompute, offload, again, stages, microbatches):
    """Fills ``x[b]``: see `reference_blocks.place_blocks` and `reference_memory.static_bytes`."""
    share, copies = place[c.SHARE], place[c.COPIES]
    weights = max(0.0, row[b, c.WEIGHTS] - again[0])
    gradients = max(0.0, row[b, c.GRADIENTS] - again[1])
    optimizer = max(0.0, row[b, c.OPTIMIZER] - again[2])
    how = keeping(int(place[c.SHARDING]), offload, stages, int(copies))
    exchanged = gradients * place[c.ITEM]
    full = recompute == FULL
    x[b, HOW] = how
    x[b, FORWARD], x[b, FORWARD_TENSOR] = row[b, c.FORWARD], row[b, c.FORWARD_TENSOR]
    x[b, BACKWARD] = row[b, c.BACKWARD + recompute]
    x[b, BACKWARD_TENSOR] = row[b, c.BACKWARD_TENSOR_FULL if full else c.BACKWARD_TENSOR]
    x[b, WEIGHT], x[b, AGAIN] = row[b, c.WEIGHT], row[b, c.AGAIN + recompute]
    x[b, WEIGHT_TENSOR] = row[b, c.FORWARD_TENSOR] if full else 0.0
    x[b, KEPT] = row[b, c.KEPT + recompute]
    x[b, WORKING_FORWARD] = row[b, c.WORKING_FORWARD + recompute]
    x[b, WORKING_BACKWARD] = row[b, c.WORKING_BACKWARD + recompute]
    x[b, WEIGHTS], x[b, GRADIENTS] = weights, gradients
    gather, reduce, copied, buckets, buffer = 0.0, 0.0, 0.0, 0.0, 0.0
    if how == WHOLE:
        buckets = exchanged if copies > 1.0 else 0.0
    else:
        buffer = exchanged
        gather = table_s(tables[int(place[c.GATHER_TABLE])], weights)
        reduce = table_s(tables[int(place[c.SCATTER_TABLE])], exchanged)
        copied = table_s(tables[int(place[c.REDUCE_TABLE])], exchanged / share)
    host = place[c.HOST_RATE]
    if offload == FULL_OFFLOAD:
        gather += weights / share / host
        reduce += gradients / share / host
    x[b, GATHER], x[b, REDUCE], x[b, COPIES], x[b, BUCKETS], x[b, BUFFER] = gather, reduce, copied, buckets, buffer
    if offload:
        x[b, UPDATE] = (2.0 * (optimizer / share) + gradients / share + weights / share) / place[c.UPDATE_RATE]
        if offload != FULL_OFFLOAD:
            x[b, UPDATE] += (gradients / share + weights / share) / host
    else:
        left = weights / row[b, c.WEIGHTS] if row[b, c.WEIGHTS] > 0.0 else 1.0
        x[b, UPDATE] = row[b, c.UPDATE] * left / share
    static = 0.0 if offload else optimizer / share
    static += 0.0 if offload == FULL_OFFLOAD else weights / share
    if how == ONCE or how == EACH_BACKWARD:
        static += weights
    if how == WHOLE or (how == ONCE and (microbatches > 1 or stages > 1)):
        static += gradients
    elif offload != FULL_OFFLOAD:
        static += gradients / share
    x[b, STATIC] = static
    x[b, HOST] = 0.0
    if offload == FULL_OFFLOAD:
        x[b, HOST] = (weights + gradients + optimizer) / share
    elif offload:
        x[b, HOST] = optimizer / share


@inner
def forward_s(x, begin, end, first):
    """As `reference.forward_s`."""
    seconds = 0.0
    for b in range(begin - 1, end):
        gather = 0.0
        if b + 1 < end:
            how = x[b + 1, HOW]
            if how == EACH_PASS or (first and (how == ONCE or how == EACH_BACKWARD)):
                gather = x[b + 1, GATHER]
        seconds += gather if b < begin else beside_s(x[b, FORWARD], x[b, FORWARD_TENSOR], gather, 0.0)
    return seconds


@inner
def reduces(x, b, last):
    """Whether a block's gradient is reduced in a backward."""
    how = x[b, HOW]
    return how == EACH_BACKWARD or how == EACH_PASS or (last and how == ONCE)


@inner
def backward_s(x, begin, end, last, table):
    """As `reference.backward_s`."""
    total, compute = 0.0, 0.0
    for b in range(end - 1, begin - 1, -1):
        total += x[b, BUCKETS] if last else 0.0
        compute += x[b, BACKWARD]
    slower, bucket = 1.0, 0.0
    if total > FIRST_BUCKET and compute > 0.0:
        bucket = table_s(table, BUCKET)
        under = table_s(table, FIRST_BUCKET) + hidden_buckets(total) * bucket
        slower = 1.0 + SLOWDOWN * (min(under, compute) / compute)
    time = x[end - 1, GATHER] if x[end - 1, HOW] == EACH_PASS else 0.0
    copied, sent, filled, limit = 0.0, 0.0, 0.0, FIRST_BUCKET
    reduced, following = 0.0, 0.0
    for b in range(end - 1, begin - 1, -1):
        start = time
        copied = max(copied, start + reduced) + following
        waits = reduced
        if b > begin and x[b - 1, HOW] == EACH_PASS:
            waits += x[b - 1, GATHER]
        time = start + beside_s(x[b, BACKWARD] * slower, x[b, BACKWARD_TENSOR], waits, following)
        left = x[b, BUCKETS] if last else 0.0
        done = 0.0
        while left > 0.0:
            take = min(limit - filled, left)
            filled, left, done = filled + take, left - take, done + take
            if filled >= limit:
                ready = start + (time - start) * (done / x[b, BUCKETS])
                sent = max(sent, ready) + (bucket if limit == BUCKET else table_s(table, limit))
                filled, limit = 0.0, BUCKET
        reduced, following = (x[b, REDUCE], x[b, COPIES]) if reduces(x, b, last) else (0.0, 0.0)
    if filled > 0.0:
        sent = max(sent, time) + table_s(table, filled)
    copied = max(copied, time + reduced) + following
    return max(copied, sent)


@inner
def prepare_stage(x, y, s, begin, end, row, stages, microbatches):
    """Fills ``y[s]``: see `reference_memory._pass_bytes` and `reference.stage_action`."""
    single = stages == 1
    kept, forward, backward, most, exchange, static = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for k in range(FORWARD_C, STAGE):
        y[s, k] = 0.0
    for b in range(begin, end):
        how = x[b, HOW]
        kept += x[b, KEPT]
        here = x[b, WEIGHTS] if how == EACH_PASS else 0.0
        after = x[b + 1, WEIGHTS] if b + 1 < end and x[b + 1, HOW] == EACH_PASS else 0.0
        before = x[b - 1, WEIGHTS] if b > begin and x[b - 1, HOW] == EACH_PASS else 0.0
        forward = max(forward, kept + x[b, WORKING_FORWARD] + here + max(here, after))
        passing = how == EACH_BACKWARD or how == EACH_PASS or (how == ONCE and single and microbatches == 1)
        moving = here + max(here, before) + (x[b, GRADIENTS] if passing else 0.0)
        if single:
            moving += max(x[b, BUFFER], x[b + 1, BUFFER] if b + 1 < end else 0.0)
        else:
            exchange = max(exchange, x[b, BUFFER])
        backward = max(backward, kept + x[b, WORKING_BACKWARD] + moving)
        most = max(most, x[b, WORKING_BACKWARD] + moving)
        static += x[b, STATIC]
        y[s, FORWARD_C] += x[b, FORWARD]
        y[s, FORWARD_T] += x[b, FORWARD_TENSOR]
        y[s, BACKWARD_C] += x[b, BACKWARD]
        y[s, BACKWARD_T] += x[b, BACKWARD_TENSOR]
        y[s, INPUT_C] += x[b, BACKWARD] - x[b, WEIGHT]
        y[s, WEIGHT_C] += x[b, WEIGHT] + x[b, AGAIN]
        y[s, WEIGHT_T] += x[b, WEIGHT_TENSOR]
    received = row[begin - 1, c.SENT] if s > 0 else 0.0
    returned = row[end - 1, c.RETURNED] if s < stages - 1 else 0.0
    sends = row[begin - 1, c.RETURNED] if s > 0 else 0.0
    y[s, KEEPS], y[s, FORWARD_PEAK], y[s, EXCHANGE_PEAK] = kept, forward, exchange
    y[s, BACKWARD_PEAK], y[s, HALF_PEAK] = backward + sends, kept + most + sends
    y[s, STATIC_BYTES] = static + microbatches * (received + returned)
    if not single:
        reduced, copied = 0.0, 0.0
        for b in range(end - 1, begin - 1, -1):
            if x[b, HOW] != WHOLE:
                reduced += x[b, REDUCE]
                copied = max(copied, reduced) + x[b, COPIES]
        y[s, EXCHANGE_S] = max(reduced, copied)
        y[s, FIRST_GATHER_S] = max(0.0, forward_s(x, begin, end, True) - y[s, FORWARD_C] - y[s, FORWARD_T])


@inner
def single_stage(x, y, work, busy, count, microbatches, table):
    """As `reference.single_stage`; returns the most that passes hold."""
    again = microbatches - 1
    forward = forward_s(x, 0, count, True) + again * forward_s(x, 0, count, False)
    backward = backward_s(x, 0, count, True, table) + again * backward_s(x, 0, count, False, table)
    gathered, reduced = 0.0, 0.0
    for b in range(count):
        gathered += x[b, GATHER] if x[b, HOW] == EACH_PASS else 0.0
        reduced += x[b, REDUCE] + x[b, COPIES] if x[b, HOW] != WHOLE else x[b, BUCKETS]
    work[c.END] = forward + backward
    work[c.COMPUTE] = microbatches * (y[0, FORWARD_C] + y[0, BACKWARD_C])
    work[c.TENSOR] = microbatches * (y[0, FORWARD_T] + y[0, BACKWARD_T])
    exposed = max(0.0, backward - microbatches * (y[0, BACKWARD_C] + y[0, BACKWARD_T]))
    part = gathered / (gathered + reduced) if gathered > 0.0 else 0.0
    work[c.GATHER] = max(0.0, forward - microbatches * (y[0, FORWARD_C] + y[0, FORWARD_T])) + exposed * part
    work[c.EXCHANGE] = exposed * (1.0 - part)
    work[c.HAND_OVER] = 0.0
    busy[0] = work[c.COMPUTE] + work[c.TENSOR] + work[c.GATHER] + work[c.EXCHANGE]
    return max(0.0, y[0, FORWARD_PEAK], y[0, BACKWARD_PEAK])


@inner
def seconds_of(y, s, kind, first):
    """Ops, collectives inside blocks, and gathers of an action: as `reference.stage_action`."""
    if kind == c.DO_F:
        return y[s, FORWARD_C], y[s, FORWARD_T], y[s, FIRST_GATHER_S] if first else 0.0
    if kind == c.DO_W:
        return y[s, WEIGHT_C], y[s, WEIGHT_T], 0.0
    return y[s, INPUT_C if kind == c.DO_I else BACKWARD_C], y[s, BACKWARD_T], 0.0


@inner
def next_end(y, actions, a, end, arrived, idle_s):
    """When the next action of a place ends that is idle from `idle_s`; inf while what it waits for has not been sent."""
    if a == end:
        return np.inf
    s, kind, n = actions[a, 0], actions[a, 1], actions[a, 2]
    ready = 0.0
    if kind == c.DO_F and s > 0:
        ready = arrived[0, s, n]
    elif (kind == c.DO_B or kind == c.DO_I) and s < arrived.shape[1] - 1:
        ready = arrived[1, s, n]
    if ready < 0.0:
        return np.inf
    compute, tensor, gather = seconds_of(y, s, kind, n == 0)
    return max(idle_s, ready) + (compute + tensor + gather)


@inner
def pipeline(y, works, busy, actions, action_ptr, stage_place, rows, row, bounds, ways, way_ptr, way_channels, microbatches):
    """As `reference.pipeline`; returns whether all actions ran.

    Args:
        y: float64 [S, STAGE].
        works: float64 [P, ANSWER], filled.
        busy: float64 [S], filled with seconds.
        actions: int32 [., 3].
        action_ptr: int64 [P + 1], of this lane.
        stage_place: int64 [S].
        rows: float64 [rows, B, ROW].
        row: int64 [P].
        bounds: int64 [S + 1].
        ways: float64 [2, S, WAY], from every stage to the next one and to the one before it.
        way_ptr: int64 [2 S + 1] into `way_channels`.
        way_channels: int64.
        microbatches: Passes.
    """
    stages, places = len(stage_place), len(works)
    arrived = np.full((2, stages, microbatches), -1.0)
    travelled = np.zeros((2, stages, microbatches))
    channel_free = np.zeros(way_channels.max() + 1 if len(way_channels) else 0)
    left = np.full(stages, microbatches, dtype=np.int64)
    position, ends = action_ptr[:places].copy(), np.empty(places)
    works[:], busy[:] = 0.0, 0.0
    for p in range(places):
        ends[p] = next_end(y, actions, position[p], action_ptr[p + 1], arrived, 0.0)
    while True:
        p, now = -1, np.inf
        for k in range(places):
            if ends[k] < now:
                p, now = k, ends[k]
        if p < 0:
            break
        s, kind, n = actions[position[p], 0], actions[position[p], 1], actions[position[p], 2]
        compute, tensor, gather = seconds_of(y, s, kind, n == 0)
        forward, backward = kind == c.DO_F, kind == c.DO_B or kind == c.DO_I
        if (forward and s > 0) or (backward and s < stages - 1):
            way = 0 if forward else 1
            works[p, c.HAND_OVER] += min(max(0.0, arrived[way, s, n] - works[p, c.END]), travelled[way, s, n])
        works[p, c.COMPUTE] += compute
        works[p, c.TENSOR] += tensor
        works[p, c.GATHER] += gather
        busy[s] += compute + tensor + gather
        target = s + 1 if forward and s < stages - 1 else s - 1 if backward and s > 0 else -1
        if target >= 0:
            way = 0 if forward else 1
            start, took = now, 0.0
            if stage_place[target] != p:
                size = rows[row[p], bounds[s + 1] - 1, c.SENT] if forward else rows[row[p], bounds[s] - 1, c.RETURNED]
                took = ways[way, s, c.LATENCY]
                if size > 0.0:
                    took += size * ways[way, s, c.PART] * ways[way, s, c.S_PER_BYTE]
                first, last = way_ptr[way * stages + s], way_ptr[way * stages + s + 1]
                for k in range(first, last):
                    start = max(start, channel_free[way_channels[k]])
                for k in range(first, last):
                    channel_free[way_channels[k]] = start + took
            arrived[way, target, n], travelled[way, target, n] = start + took, took
        if kind == c.DO_B or kind == c.DO_W:
            left[s] -= 1
            if left[s] == 0:
                now += y[s, EXCHANGE_S]
                works[p, c.EXCHANGE] += y[s, EXCHANGE_S]
                busy[s] += y[s, EXCHANGE_S]
        works[p, c.END] = now
        position[p] += 1
        ends[p] = next_end(y, actions, position[p], action_ptr[p + 1], arrived, now)
        if target >= 0:
            q = stage_place[target]
            if q != p and ends[q] == np.inf:
                ends[q] = next_end(y, actions, position[q], action_ptr[q + 1], arrived, works[q, c.END])
    for p in range(places):
        if position[p] < action_ptr[p + 1]:
            return False
    return True


@inner
def held_bytes(y, peaks, flights, actions, action_ptr, microbatches):
    """Fills the most that the passes of each place hold, and of each stage the most micro-batches in flight.

    As `reference_memory.device_bytes`.
    """
    left = np.full(len(flights), microbatches, dtype=np.int64)
    in_flight = np.zeros(len(flights), dtype=np.int64)
    flights[:] = 0
    for p in range(len(peaks)):
        held, peak = 0.0, 0.0
        for a in range(action_ptr[p], action_ptr[p + 1]):
            s, kind = actions[a, 0], actions[a, 1]
            if kind == c.DO_F:
                peak = max(peak, held + y[s, FORWARD_PEAK])
                held += y[s, KEEPS]
                in_flight[s] += 1
                flights[s] = max(flights[s], in_flight[s])
            elif kind != c.DO_W:
                peak = max(peak, held - y[s, KEEPS] + y[s, BACKWARD_PEAK if kind == c.DO_B else HALF_PEAK])
            if kind == c.DO_B or kind == c.DO_W:
                held -= y[s, KEEPS]
                in_flight[s] -= 1
                left[s] -= 1
                if left[s] == 0:
                    peak = max(peak, held + y[s, EXCHANGE_PEAK])
        peaks[p] = peak


def _compile(stamp):
    """The entry, tied to the sources of what it calls."""

    @entry
    def evaluate_packed(
        rows, tables, stage_place, places, lane_microbatches, row_of, actions, action_ptr, ways, way_ptr, way_channels,
        room_bytes, room_count, room_ptr, bounds, recompute, offload, tie_s, tie_ptr, tie_places, again_block, again_bytes,
        result, answers, used, hosts, stage_out,
    ):  # fmt: skip
        """Step time and memory of a packed draft.

        Rows float64 [rows, B, ROW] and tables float64 [T, G]; from `stage_place` to `room_ptr` the arrays of a
        `packing.Frame`; bounds int64 [S + 1], recompute and offload uint8 [B]; from `tie_s` to `again_bytes` those of
        `packing.Ties`. The rest is filled: result float64 [2] with step time and bytes over capacity, answers float64
        [P, ANSWER], used float64 [L, P] with the bytes that devices hold beside reserved ones, hosts float64 [P] with the bytes
        that each device has in its host's memory, stage_out float64 [2, S] with busy seconds and bytes.

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
        again = np.zeros((blocks, 3))
        for k in range(len(again_block)):
            for column in range(3):
                again[again_block[k], column] += again_bytes[k, column]
        x = np.empty((blocks, BLOCK))
        y = np.empty((stages, STAGE))
        works = np.zeros((count, c.ANSWER))
        busy = np.zeros(stages)
        peaks = np.zeros(count)
        flights = np.ones(stages, dtype=np.int64)
        answers[:] = 0.0
        stage_out[:] = 0.0
        hosts[:] = 0.0
        over, ended = 0.0, True
        for lane in range(len(lane_microbatches)):
            microbatches = lane_microbatches[lane]
            row = row_of[lane]
            used[lane] = 0.0
            works[:, c.UPDATE_S] = 0.0
            for s in range(stages):
                p = stage_place[s]
                for b in range(bounds[s], bounds[s + 1]):
                    place_block(x, b, rows[row[p]], places[p], tables, recompute[b], offload[b], again[b], stages, microbatches)
                    if lane == 0:
                        hosts[p] += x[b, HOST]
                prepare_stage(x, y, s, bounds[s], bounds[s + 1], rows[row[p]], stages, microbatches)
                used[lane, p] += y[s, STATIC_BYTES]
            if stages == 1:
                table = tables[int(places[0, c.REDUCE_TABLE])]
                peaks[0] = single_stage(x, y, works[0], busy, blocks, microbatches, table)
            else:
                part = action_ptr[lane * count : (lane + 1) * count + 1]
                ended &= pipeline(
                    y, works, busy, actions, part, stage_place, rows, row, bounds, ways, way_ptr, way_channels, microbatches
                )
                held_bytes(y, peaks, flights, actions, part, microbatches)
            for s in range(stages):
                for b in range(bounds[s], bounds[s + 1]):
                    works[stage_place[s], c.UPDATE_S] += x[b, UPDATE]
                stage_out[0, s] = max(stage_out[0, s], busy[s])
                stage_out[1, s] = max(stage_out[1, s], y[s, STATIC_BYTES] + flights[s] * y[s, KEEPS])
            for p in range(count):
                end = max(answers[p, c.END], works[p, c.END])
                update = max(answers[p, c.UPDATE_S], works[p, c.UPDATE_S])
                if works[p, c.COMPUTE] + works[p, c.TENSOR] > answers[p, c.COMPUTE] + answers[p, c.TENSOR]:
                    answers[p] = works[p]
                answers[p, c.END], answers[p, c.UPDATE_S] = end, update
                used[lane, p] += peaks[p]
                for k in range(room_ptr[lane * count + p], room_ptr[lane * count + p + 1]):
                    over += max(0.0, used[lane, p] - room_bytes[k]) * room_count[k]
        for tie in range(len(tie_s)):
            together = 0.0
            for k in range(tie_ptr[tie], tie_ptr[tie + 1]):
                together = max(together, answers[tie_places[k], c.END])
            for k in range(tie_ptr[tie], tie_ptr[tie + 1]):
                answers[tie_places[k], c.END] = together + tie_s[tie]
                answers[tie_places[k], c.EXCHANGE] += tie_s[tie]
        step = 0.0
        for p in range(count):
            step = max(step, answers[p, c.END] + answers[p, c.UPDATE_S])
        result[0] = step if ended else np.inf
        result[1] = over
        return True

    return evaluate_packed


evaluate_packed = _compile(STAMP)
