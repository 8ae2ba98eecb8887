"""Compiled parts of `rlplace.strategy.executor.kernel`: blocks on their places, their passes, and a step of one stage.

`x` is float64 [B, BLOCK], the blocks on a place; `y` is float64 [S, STAGE], the micro-batches of each stage.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

import numpy as np

from rlplace.compiled import inner
from rlplace.strategy.costs import FULL
from rlplace.strategy.executor import arrays as c
from rlplace.strategy.executor import rules, traffic
from rlplace.strategy.executor.rules import BUCKET, EACH_BACKWARD, EACH_PASS, FIRST_BUCKET, FULL_OFFLOAD, ONCE, SLOWDOWN, WHOLE

table_s = inner(traffic.table_s)
keeping = inner(rules.keeping)
at_once_s = inner(rules.at_once_s)
slowed_s = inner(rules.slowed_s)
wider = inner(rules.wider)
hidden_buckets = inner(rules.hidden_buckets)

# A block on its place in one lane, float64 [B, BLOCK]: the fields of `arrays.PlacedBlock`; the first eight are columns of
# `arrays.BACKWARD` and following.
(
    BACKWARD, AGAIN, KEPT, HALVED, WORKING_FORWARD, WORKING_BACKWARD, WORKING_END, WORKING_GROWING,
    HOW, FORWARD, FORWARD_TENSOR, BACKWARD_TENSOR, WEIGHT, WEIGHT_TENSOR, UPDATE, GATHER, REDUCE, COPIES, BUCKETS,
    WEIGHTS, GRADIENTS, BUFFER, HELD_WEIGHTS, HELD_GRADIENTS, HELD_OPTIMIZER, HOST, REMADE, SENT, RETURNED,
) = range(29)  # fmt: skip
BLOCK, CHOSEN = 29, 8

# Seconds and bytes of a stage's micro-batches, float64 [S, STAGE]; the last seven are ops and collectives of its actions.
# `READY_S` and `LEFT_S` are those of `ahead.GathersAhead`.
(
    KEEPS, HALVES, FORWARD_PEAK, BACKWARD_PEAK, HALF_PEAK, WEIGHT_PEAK, EXCHANGE_PEAK, STATIC_BYTES, EXCHANGE_S,
    READY_S, LEFT_S, MEETS, FORWARD_C, FORWARD_T, BACKWARD_C, BACKWARD_T, INPUT_C, WEIGHT_C, WEIGHT_T,
) = range(19)  # fmt: skip
STAGE = 19


@inner
def place_block(x, b, at, chosen, again):
    """Fills ``x[b]`` for a block on `at`, a `LanePlace`; `again` is float64 [B, 3], bytes that another block counts."""
    row, place, tables = at.row[b], at.place, at.tables
    recompute, offload = chosen.recompute[b], chosen.offload[b]
    share, expert_share, copies = place[c.SHARE], place[c.EXPERT_SHARE], place[c.COPIES]
    weights = max(0.0, row[c.WEIGHTS] - again[b, 0])
    gradients = max(0.0, row[c.GRADIENTS] - again[b, 1])
    optimizer = max(0.0, row[c.OPTIMIZER] - again[b, 2])
    own_weights, own_gradients, own_optimizer = row[c.EXPERT_WEIGHTS], row[c.EXPERT_GRADIENTS], row[c.EXPERT_OPTIMIZER]
    shared_weights = (weights - own_weights) / share + own_weights / expert_share
    shared_gradients = (gradients - own_gradients) / share + own_gradients / expert_share
    shared_optimizer = (optimizer - own_optimizer) / share + own_optimizer / expert_share
    how = keeping(int(place[c.SHARDING]), offload, at.stages, int(copies))
    exchanged = gradients * place[c.ITEM]
    full = recompute == FULL
    for column in range(CHOSEN):
        x[b, column] = row[c.BACKWARD + 3 * column + recompute]
    x[b, HOW], x[b, FORWARD], x[b, FORWARD_TENSOR], x[b, WEIGHT] = how, row[c.FORWARD], row[c.FORWARD_TENSOR], row[c.WEIGHT]
    x[b, BACKWARD_TENSOR] = row[c.BACKWARD_TENSOR_FULL if full else c.BACKWARD_TENSOR]
    x[b, WEIGHT_TENSOR] = row[c.FORWARD_TENSOR] if full else 0.0
    remade = max(0.0, row[c.WORKING_BACKWARD + recompute] - row[c.WORKING_BACKWARD])
    x[b, REMADE] = remade + (row[c.WORKING_FORWARD] if full else 0.0)
    x[b, WEIGHTS], x[b, GRADIENTS] = weights, gradients
    x[b, SENT], x[b, RETURNED] = row[c.SENT], row[c.RETURNED]
    gather, reduce, buckets, buffer = 0.0, 0.0, 0.0, 0.0
    copied = table_s(tables[int(place[c.REDUCE_TABLE])], shared_gradients * place[c.ITEM])
    if how == WHOLE:
        buckets = exchanged if copies > 1.0 else 0.0
    else:
        buffer = exchanged + (shared_gradients if place[c.RELEASED] > 0.0 else 0.0)
        gather = table_s(tables[int(place[c.GATHER_TABLE])], weights - own_weights)
        reduce = table_s(tables[int(place[c.SCATTER_TABLE])], (gradients - own_gradients) * place[c.ITEM])
        if own_weights > 0.0:
            gather += table_s(tables[int(place[c.EXPERT_GATHER_TABLE])], own_weights)
            reduce += table_s(tables[int(place[c.EXPERT_SCATTER_TABLE])], own_gradients * place[c.ITEM])
    host = place[c.HOST_RATE]
    if offload == FULL_OFFLOAD:
        gather += shared_weights / host
        reduce += shared_gradients / host
    x[b, GATHER], x[b, REDUCE], x[b, COPIES], x[b, BUCKETS], x[b, BUFFER] = gather, reduce, copied, buckets, buffer
    if offload:
        x[b, UPDATE] = (2.0 * shared_optimizer + shared_gradients + shared_weights) / place[c.UPDATE_RATE]
        if offload != FULL_OFFLOAD:
            x[b, UPDATE] += (shared_gradients + shared_weights) / host
    else:
        x[b, UPDATE] = row[c.UPDATE] * (shared_weights / row[c.WEIGHTS] if row[c.WEIGHTS] > 0.0 else 1.0 / share)
        turns, degree = row[c.TURNS], place[c.TURN_DEGREE]
        if turns > 0.0 and degree > 1.0:
            x[b, UPDATE] += 2.0 * (turns / degree) * table_s(tables[int(place[c.TURN_TABLE])], row[c.TURN_BYTES] / turns)
    gathered = weights if how == ONCE or how == EACH_BACKWARD else 0.0
    x[b, HELD_WEIGHTS] = gathered + (0.0 if offload == FULL_OFFLOAD else shared_weights)
    if place[c.RELEASED] > 0.0:
        x[b, HELD_GRADIENTS] = 0.0
    elif how == WHOLE or (how == ONCE and (at.microbatches > 1 or at.stages > 1)):
        x[b, HELD_GRADIENTS] = gradients
    else:
        x[b, HELD_GRADIENTS] = 0.0 if offload == FULL_OFFLOAD else shared_gradients
    x[b, HELD_OPTIMIZER] = 0.0 if offload else shared_optimizer
    x[b, HOST] = 0.0
    if offload == FULL_OFFLOAD:
        x[b, HOST] = shared_weights + shared_gradients + shared_optimizer
    elif offload:
        x[b, HOST] = shared_optimizer


@inner
def forward_s(x, count, first, place):
    """Returns seconds of a forward through all blocks of a single stage."""
    seconds = 0.0
    for b in range(-1, count):
        gather = 0.0
        if b + 1 < count:
            how = x[b + 1, HOW]
            if how == EACH_PASS or (first and (how == ONCE or how == EACH_BACKWARD)):
                gather = x[b + 1, GATHER]
        if b < 0:
            seconds += gather
        else:
            held_up = at_once_s(place[c.MEETS_BLOCKS], x[b, FORWARD], x[b, FORWARD_TENSOR], gather)
            seconds += max(slowed_s(x[b, FORWARD], x[b, FORWARD_TENSOR], gather, held_up), gather + held_up)
    return seconds


@inner
def reduces(x, b, last):
    """Returns whether a block's gradient is reduced in a backward."""
    how = x[b, HOW]
    return how == EACH_BACKWARD or how == EACH_PASS or (last and how == ONCE)


@inner
def gathers_again(x, b):
    """Returns whether a block's parameters are gathered for its backward; frozen blocks before all trained ones have none."""
    return x[b, HOW] == EACH_PASS and x[b, BACKWARD] > 0.0


@inner
def backward_s(x, count, last, at):
    """Returns seconds of a backward through all blocks of a single stage."""
    place, table = at.place, at.tables[int(at.place[c.REDUCE_TABLE])]
    total, compute = 0.0, 0.0
    for b in range(count - 1, -1, -1):
        total += x[b, BUCKETS] if last else 0.0
        compute += x[b, BACKWARD]
    slower, bucket = 1.0, table_s(table, BUCKET) if total > FIRST_BUCKET else 0.0
    if total > FIRST_BUCKET and compute > 0.0:
        under = table_s(table, FIRST_BUCKET) + hidden_buckets(total) * bucket
        slower = 1.0 + SLOWDOWN * (min(under, compute) / compute)
    time = x[count - 1, GATHER] if gathers_again(x, count - 1) else 0.0
    sent, filled, limit = 0.0, 0.0, FIRST_BUCKET
    reduced, following = 0.0, 0.0
    for b in range(count - 1, -1, -1):
        start, own, tensor = time, x[b, BACKWARD] * slower, x[b, BACKWARD_TENSOR]
        waits = reduced
        if b > 0 and gathers_again(x, b - 1):
            waits += x[b - 1, GATHER]
        held_up = at_once_s(place[c.MEETS_BLOCKS], own, tensor, waits + following)
        times = wider(waits + following, held_up)
        moved = start + waits * times
        if place[c.MEETS_COPIES] > 0.0:
            moved += max(0.0, sent - start)
            sent = moved + following * times
        else:
            sent = max(sent, start + reduced * times) + following * times
        time = start + slowed_s(own, tensor, waits + following, held_up)
        if waits > 0.0:
            time = max(time, moved)
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
    if place[c.MEETS_COPIES] > 0.0:
        return max(sent, time) + reduced + following
    return max(sent, time + reduced) + following


@inner
def prepare_stage(x, y, s, begin, end, at):
    """Fills ``y[s]`` for blocks `begin` to `end` - 1."""
    row, stages, single = at.row, at.stages, at.stages == 1
    kept, forward, backward, exchange, static = 0.0, 0.0, 0.0, 0.0, 0.0
    half, halved, weight = 0.0, 0.0, 0.0
    for k in range(FORWARD_C, STAGE):
        y[s, k] = 0.0
    for b in range(begin, end):
        how = x[b, HOW]
        first = kept
        kept += x[b, KEPT]
        here = x[b, WEIGHTS] if how == EACH_PASS else 0.0
        after = x[b + 1, WEIGHTS] if b + 1 < end and x[b + 1, HOW] == EACH_PASS else 0.0
        before = x[b - 1, WEIGHTS] if b > begin and x[b - 1, HOW] == EACH_PASS else 0.0
        forward = max(forward, first + 2.0 * here, kept + x[b, WORKING_FORWARD] + here + after)
        passing = how == EACH_BACKWARD or how == EACH_PASS or (how == ONCE and single and at.microbatches == 1)
        passing = passing or at.place[c.RELEASED] > 0.0
        moving = here + before
        buffer = x[b + 1, BUFFER] if single and b + 1 < end else 0.0
        working = x[b, WORKING_END] if b + 1 == end and s < stages - 1 else x[b, WORKING_BACKWARD]
        gradient = x[b, GRADIENTS] if passing else 0.0
        if passing:
            working = min(working + gradient, x[b, WORKING_GROWING])
        running = working + moving + buffer
        ends = first + moving + gradient + (x[b, BUFFER] if single else 0.0)
        backward = max(backward, kept + 2.0 * here + buffer, kept + running, ends)
        exchange = max(exchange, x[b, BUFFER] if not single else 0.0)
        own = max(0.0, x[b, HALVED] - x[b, KEPT])
        half = max(half + own, running, own + (row[b - 1, c.RETURNED] if b == begin and s > 0 else 0.0))
        halved += x[b, HALVED] - x[b, KEPT]
        weight = max(weight - own, x[b, REMADE])
        static += x[b, HELD_WEIGHTS] + x[b, HELD_GRADIENTS] + x[b, HELD_OPTIMIZER]
        y[s, FORWARD_C] += x[b, FORWARD]
        y[s, FORWARD_T] += x[b, FORWARD_TENSOR]
        y[s, BACKWARD_C] += x[b, BACKWARD]
        y[s, BACKWARD_T] += x[b, BACKWARD_TENSOR]
        y[s, INPUT_C] += x[b, BACKWARD] - x[b, WEIGHT]
        y[s, WEIGHT_C] += x[b, WEIGHT] + x[b, AGAIN]
        y[s, WEIGHT_T] += x[b, WEIGHT_TENSOR]
    received = row[begin - 1, c.SENT] if s > 0 else 0.0
    returned = row[end - 1, c.RETURNED] if s < stages - 1 else 0.0
    y[s, KEEPS], y[s, FORWARD_PEAK], y[s, EXCHANGE_PEAK] = kept, forward, exchange
    y[s, BACKWARD_PEAK], y[s, HALF_PEAK] = backward, kept + half
    y[s, HALVES], y[s, WEIGHT_PEAK] = halved, weight
    y[s, STATIC_BYTES] = static + at.microbatches * (received + returned)
    if not single:
        reduced, copied = 0.0, 0.0
        for b in range(end - 1, begin - 1, -1):
            if x[b, HOW] != WHOLE:
                reduced += x[b, REDUCE]
                if at.place[c.MEETS_COPIES] > 0.0:
                    reduced += x[b, COPIES]
                else:
                    copied = max(copied, reduced) + x[b, COPIES]
        y[s, EXCHANGE_S] = max(reduced, copied)


@inner
def end_s(gathered, begins, delay):
    """Returns the end of so many seconds of gathers of a place whose blocks begin at `begins`."""
    return gathered + delay * (gathered - begins) if delay > 0.0 and gathered > begins else gathered


@inner
def gather_ahead(x, y, frame, bounds):
    """Fills `READY_S` to `MEETS` of the stages of a lane, `y`, from all blocks on their places."""
    stages, places = len(frame.stage_place), len(frame.places)
    total, done, delay, begun = np.zeros(places), np.zeros(places), np.zeros(places), np.full(places, -1.0)
    for s in range(stages):
        for b in range(bounds[s], bounds[s + 1]):
            total[frame.stage_place[s]] += x[b, GATHER]
    came = 0.0
    for s in range(stages):
        p, first, ready, before = frame.stage_place[s], bounds[s], 0.0, 0.0
        compute, tensor, meets = y[s, FORWARD_C], y[s, FORWARD_T], frame.places[frame.stage_place[s], c.MEETS_BLOCKS]
        begins, gathered = came, x[first, GATHER]
        if begun[p] < 0.0:
            begun[p] = max(came, gathered)
            delay[p] = meets * tensor / (compute + tensor) if compute + tensor > 0.0 else 0.0
        if gathered > 0.0:
            begins = max(came, end_s(done[p] + gathered, begun[p], delay[p]))
        ends = end_s(total[p], begun[p], delay[p])
        left = ends - begins if ends > begins else 0.0
        slower = slowed_s(compute, 0.0, left, 0.0) / compute if compute > 0.0 else 1.0
        longer = wider(tensor, at_once_s(meets, compute, tensor, left))
        for b in range(first, bounds[s + 1]):
            if x[b, GATHER] > 0.0:
                done[p] += x[b, GATHER]
                ready = max(ready, end_s(done[p], begun[p], delay[p]) - before)
            before += x[b, FORWARD] * slower + x[b, FORWARD_TENSOR] * longer
        came = max(came, ready) + before
        y[s, READY_S], y[s, LEFT_S], y[s, MEETS] = ready, left, meets


@inner
def single_stage(x, y, work, busy, count, at):
    """Fills the work of a step of one stage; returns the peak memory of its passes."""
    microbatches, again = at.microbatches, at.microbatches - 1
    forward = forward_s(x, count, True, at.place) + again * forward_s(x, count, False, at.place)
    backward = backward_s(x, count, True, at) + again * backward_s(x, count, False, at)
    gathered, reduced = 0.0, 0.0
    for b in range(count):
        gathered += x[b, GATHER] if gathers_again(x, b) else 0.0
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
