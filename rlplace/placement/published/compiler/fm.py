"""Compiled refinement of a partition: moves between devices by gain, in the manner of Fiduccia and Mattheyses.

A *cell* is a device in a band; its load is limited. The *excess* of a partition is what cells are above their limits, in shares
of the limit, plus the same for memory; a partition without excess is balanced. `g` is a `Level`
(`rlplace.placement.published.compiler.nets`), `m` the `Machine`, `s` a `PartitionState`, `buckets` the `Buckets` of its moves.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, arg-type, assignment"
from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from rlplace.compiled import entry, inner

BUCKETS = 512
"""Gain buckets on each side of zero."""

LOOKS = 24
"""Entries of a device's buckets that are tried for one that fits, before the device is skipped."""

AFRESH = 2048
"""Graphs of fewer vertices are refined move by move as said. In others cells above their limits are treated one after another,
and vertices of a cell that were of no use are tried anew when one of so many has moved, `MOST_AGAIN` times in a pass."""

MOST_AGAIN = 8


class Machine(NamedTuple):
    """The devices in use, and what they may take."""

    latency: Any  # float64 [K, K] seconds
    inverse: Any  # float64 [K, K] seconds per byte
    limit: Any  # float64 [K, W], seconds of work in each band
    room: Any  # float64 [K] bytes


class PartitionState(NamedTuple):
    """A partition, and what follows from it."""

    part: Any  # int32 [G], device of each vertex
    held: Any  # int32 [N, K], readers of each net by device
    load: Any  # float64 [K, W] seconds
    used: Any  # float64 [K] bytes


class Buckets(NamedTuple):
    """Moves in doubly linked lists by gain; an entry is a vertex and a device, ``vertex * K + device``."""

    bucket_of: Any  # int64 [G * K], -1 where out
    following: Any  # int64 [G * K]
    before: Any  # int64 [G * K]
    head: Any  # int64 [K, 2 BUCKETS]
    top: Any  # int64 [K], a bucket that no entry is above of


# Kernels take the arrays out of records first: each access to a field inside of a loop would
# count references. What takes records is inlined, since records are passed by value.


@inner
def _seconds(net, a, b, size, count, fixed, latency, inverse):
    """Returns the seconds that a net takes from device a to another device b."""
    return count[net] * latency[a, b] + size[net] * inverse[a, b] + fixed[net]


@inner(forceinline=True)
def _gains(vertex, g, m, s, gain, near):
    """Fills a row of `gain` with the seconds saved by moving a vertex to each device, and `near` where it has neighbours."""
    source, _, _, size, count, fixed = g.nets
    s_ptr, s_nets, r_ptr, r_nets = g.source_ptr, g.source_nets, g.reader_ptr, g.reader_nets
    part, held, latency, inverse = s.part, s.held, m.latency, m.inverse
    here = part[vertex]
    devices = len(latency)
    for b in range(devices):
        gain[b], near[b] = 0.0, False
    for i in range(s_ptr[vertex], s_ptr[vertex + 1]):
        net = s_nets[i]
        for to in range(devices):
            if held[net, to] == 0:
                continue
            near[to] = True
            paid = _seconds(net, here, to, size, count, fixed, latency, inverse) if to != here else 0.0
            for b in range(devices):
                if b != here:
                    gain[b] += paid
                    if to != b:
                        gain[b] -= _seconds(net, b, to, size, count, fixed, latency, inverse)
    for i in range(r_ptr[vertex], r_ptr[vertex + 1]):
        net = r_nets[i]
        sender = part[source[net]]
        near[sender] = True
        paid = 0.0
        if sender != here and held[net, here] == 1:
            paid = _seconds(net, sender, here, size, count, fixed, latency, inverse)
        for b in range(devices):
            if b != here:
                gain[b] += paid
                if b != sender:
                    if held[net, b] == 0:
                        gain[b] -= _seconds(net, sender, b, size, count, fixed, latency, inverse)
                    else:
                        near[b] = True


@inner
def _unlink(entry, target, bucket_of, following, before, head):
    if bucket_of[entry] < 0:
        return
    if before[entry] >= 0:
        following[before[entry]] = following[entry]
    else:
        head[target, bucket_of[entry]] = following[entry]
    if following[entry] >= 0:
        before[following[entry]] = before[entry]
    bucket_of[entry] = -1


@inner(forceinline=True)
def _enter(vertex, gain, near, quantum, g, s, buckets):
    """Enters the moves of a vertex to its neighbours' devices, after those that were entered before are out."""
    bucket_of, following, before, head, top = buckets
    time_s, here, devices = g.time_s, s.part[vertex], len(top)
    for target in range(devices):
        entry = vertex * devices + target
        _unlink(entry, target, bucket_of, following, before, head)
        if target != here and near[target] and time_s[vertex, target] < np.inf:
            bucket = np.int64(np.floor(gain[target] / quantum)) + BUCKETS
            bucket = min(max(bucket, 0), 2 * BUCKETS - 1)
            bucket_of[entry] = bucket
            following[entry], before[entry] = head[target, bucket], -1
            if head[target, bucket] >= 0:
                before[head[target, bucket]] = entry
            head[target, bucket] = entry
            top[target] = max(top[target], bucket)


@inner
def _above(device, w, load, used, limit, room):
    """Returns whether a device is above its memory, or above the limit of its load in a band."""
    return load[device, w] > limit[device, w] or used[device] > room[device]


@inner
def _highest(vertex, here, gain, time_s):
    """Returns the highest gain of a vertex over all devices that may take it."""
    highest = -np.inf
    for b in range(gain.shape[1]):
        if b != here and time_s[vertex, b] < np.inf:
            highest = max(highest, gain[vertex, b])
    return highest


@inner
def _over(value, limit):
    """Returns the excess of a value over its limit, as a share of the limit; rounding of sums does not count."""
    return max(0.0, value / limit - 1.0 - 1e-9) if limit < np.inf else 0.0


@inner(forceinline=True)
def _excess_change(vertex, to, g, m, s):
    """Returns the change of the excess when a vertex moves."""
    load, used, limit, room, time_s = s.load, s.used, m.limit, m.room, g.time_s
    here, w, size = s.part[vertex], g.band[vertex], g.footprint_bytes[vertex]
    change = _over(load[to, w] + time_s[vertex, to], limit[to, w]) - _over(load[to, w], limit[to, w])
    change += _over(load[here, w] - time_s[vertex, here], limit[here, w]) - _over(load[here, w], limit[here, w])
    change += _over(used[to] + size, room[to]) - _over(used[to], room[to])
    return change + _over(used[here] - size, room[here]) - _over(used[here], room[here])


@inner(forceinline=True)
def _easing(vertex, least, locked, gain, g, m, s):
    """Returns the device of highest gain, not below `least`, among the moves of a vertex that lower the excess; -1: none."""
    here, time_s, to = s.part[vertex], g.time_s, np.int64(-1)
    for b in range(gain.shape[1]):
        if locked[vertex] or b == here or time_s[vertex, b] == np.inf or gain[vertex, b] < least:
            continue
        if (to < 0 or gain[vertex, b] > gain[vertex, to]) and _excess_change(vertex, b, g, m, s) < -1e-12:
            to = np.int64(b)
    return to


@entry
def evaluate(part, g, m):
    """Returns the state of a partition int32 [G], its cut in seconds and its excess."""
    latency, inverse, limit, room = m
    source, pin_ptr, pins, size, count, fixed = g.nets
    time_s, footprint, band, devices = g.time_s, g.footprint_bytes, g.band, len(latency)
    held = np.zeros((len(source), devices), dtype=np.int32)
    load, used = np.zeros(limit.shape), np.zeros(devices)
    for vertex in range(len(part)):
        load[part[vertex], band[vertex]] += time_s[vertex, part[vertex]]
        used[part[vertex]] += footprint[vertex]
    cut, excess = 0.0, 0.0
    for net in range(len(source)):
        for i in range(pin_ptr[net], pin_ptr[net + 1]):
            held[net, part[pins[i]]] += 1
        sender = part[source[net]]
        for to in range(devices):
            if to != sender and held[net, to] > 0:
                cut += _seconds(net, sender, to, size, count, fixed, latency, inverse)
    for device in range(devices):
        for w in range(load.shape[1]):
            excess += _over(load[device, w], limit[device, w])
        excess += _over(used[device], room[device])
    return PartitionState(part, held, load, used), cut, excess


@entry
def refine(part, loose, patience, g, m):
    """Makes one pass; `part` becomes its best prefix. Returns whether that is better than the start.

    Better is less excess, then less cut, then a smaller largest load. With excess, only moves that lower it are made, the one
    of highest gain first (see `AFRESH`). Without, the move of highest gain is made that keeps the balance, or with `loose` any
    whose target cell is not above its limit yet, so that the next move makes room: together they are a swap.
    """
    vertices, devices = g.time_s.shape
    s, cut, excess = evaluate(part, g, m)
    held, load, used = s.held, s.load, s.used
    source, pin_ptr, pins = g.nets.source, g.nets.pin_ptr, g.nets.pins
    s_ptr, s_nets, r_ptr, r_nets = g.source_ptr, g.source_nets, g.reader_ptr, g.reader_nets
    time_s, footprint, band, limit, room = g.time_s, g.footprint_bytes, g.band, m.limit, m.room
    gain, near = np.zeros((vertices, devices)), np.zeros((vertices, devices), dtype=np.bool_)
    largest = 0.0
    for v in range(vertices):
        _gains(v, g, m, s, gain[v], near[v])
        for b in range(devices):
            largest = max(largest, abs(gain[v, b]))
    quantum = max(largest, 1e-30) / (BUCKETS - 1)
    out = np.full((3, vertices * devices), -1, dtype=np.int64)
    head, top = np.full((devices, 2 * BUCKETS), -1, dtype=np.int64), np.full(devices, -1, dtype=np.int64)
    bucket_of, following, before = out[0], out[1], out[2]
    buckets = Buckets(bucket_of, following, before, head, top)
    locked = np.zeros(vertices, dtype=np.bool_)
    for v in range(vertices):
        _enter(v, gain[v], near[v], quantum, g, s, buckets)
    log = np.zeros((vertices, 2), dtype=np.int64)
    moves, kept, largest_load = 0, 0, load.max()
    bands = load.shape[1]
    # A vertex moves once in a pass, so that those which may move stay in their cell.
    cell_of, cell_ptr, cell_vertices = part * np.int64(bands) + band, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    ranked = [[(0.0, np.int64(0))]][1:]  # vertices of a cell by their highest gain
    ranked_at = np.full(devices * bands, -(vertices + 1))  # moves made when they were ranked
    passed, lag = [(0.0, np.int64(0))][1:], vertices // AFRESH
    above, is_above = [np.int64(0)][1:], np.zeros(devices * bands, dtype=np.bool_)  # cells above their limits
    stuck, returned, looks_again = [np.int64(0)][1:], 0, 0  # those that no move helps; moves when they were last tried
    for cell in range(devices * bands):
        if _above(cell // bands, cell % bands, load, used, limit, room):
            is_above[cell] = True
            above.append(np.int64(cell))
    best_cut, best_excess, best_load = cut, excess, largest_load
    start_cut, start_excess, start_load = best_cut, best_excess, best_load
    seen = np.full(vertices, -1, dtype=np.int64)
    while moves < vertices and moves - kept <= patience:
        vertex, to, best = -1, -1, -np.inf
        if excess > 1e-9:
            if len(ranked) == 0:
                for _ in range(devices * bands):
                    ranked.append([(0.0, np.int64(0))][1:])
                cell_ptr = np.cumsum(np.bincount(cell_of + 1, minlength=devices * bands + 1))
                cell_vertices = np.argsort(cell_of, kind="mergesort")
            seen_cells = 0
            while vertex < 0 or lag == 0:
                if seen_cells == len(above):
                    if len(stuck) == 0 or moves - returned <= lag:
                        break
                    above, stuck, returned = stuck, above, moves
                index = seen_cells if lag == 0 else len(above) - 1
                cell = above[index]
                here, w, heap = cell // bands, cell % bands, ranked[cell]
                if not _above(here, w, load, used, limit, room):
                    is_above[cell] = False
                    last = above.pop()
                    if index < len(above):
                        above[index] = last
                    continue
                passed.clear()
                if lag == 0:
                    for v in cell_vertices[cell_ptr[cell] : cell_ptr[cell + 1]]:
                        b = _easing(v, best, locked, gain, g, m, s)
                        if b >= 0 and (gain[v, b] > best or v < vertex):
                            vertex, to, best = v, b, gain[v, b]
                while len(heap) > 0 and -heap[0][0] > best:
                    first, v = heappop(heap)
                    if locked[v] or first != -_highest(v, here, gain, time_s):
                        continue
                    passed.append((first, v))
                    b = _easing(v, best, locked, gain, g, m, s)
                    if b >= 0:
                        vertex, to, best = v, b, gain[v, b]
                for i in range(len(passed) if len(passed) <= LOOKS else 0):
                    heappush(heap, passed[i])
                again = 0 < lag < moves - ranked_at[cell] and looks_again < MOST_AGAIN * vertices
                if vertex < 0 and len(heap) == 0 and again:
                    ranked_at[cell] = moves
                    looks_again += cell_ptr[cell + 1] - cell_ptr[cell]
                    for v in cell_vertices[cell_ptr[cell] : cell_ptr[cell + 1]]:
                        if not locked[v]:
                            heap.append((-_highest(v, here, gain, time_s), np.int64(v)))
                    heapify(heap)
                elif lag == 0:
                    seen_cells += 1
                elif vertex < 0:
                    stuck.append(above.pop())
        else:
            for b in range(devices):
                while top[b] >= 0 and head[b, top[b]] < 0:
                    top[b] -= 1
                bucket, looks = top[b], 0
                while bucket >= 0 and looks < LOOKS:
                    if (bucket - BUCKETS + 1) * quantum < best and bucket < 2 * BUCKETS - 1:
                        break
                    entry = head[b, bucket]
                    while entry >= 0 and looks < LOOKS:
                        v = entry // devices
                        looks += 1
                        w = band[v]
                        fits = load[b, w] <= limit[b, w] if loose else load[b, w] + time_s[v, b] <= limit[b, w]
                        if fits and used[b] + footprint[v] <= room[b]:
                            better = gain[v, b] > best or (gain[v, b] == best and load[b, w] < load[to, band[vertex]])
                            if better:
                                vertex, to, best = v, b, gain[v, b]
                        entry = following[entry]
                    bucket -= 1
        if vertex < 0:
            break
        here = part[vertex]
        excess += _excess_change(vertex, to, g, m, s)
        cut -= gain[vertex, to]
        shrinks = load[here, band[vertex]] == largest_load
        load[here, band[vertex]] -= time_s[vertex, here]
        load[to, band[vertex]] += time_s[vertex, to]
        largest_load = load.max() if shrinks else max(largest_load, load[to, band[vertex]])
        used[here] -= footprint[vertex]
        used[to] += footprint[vertex]
        first_band, last_band = (0, bands - 1) if used[to] > room[to] else (band[vertex], band[vertex])
        for w in range(first_band, last_band + 1):
            if _above(to, w, load, used, limit, room) and not is_above[to * bands + w]:
                is_above[to * bands + w] = True
                above.append(np.int64(to * bands + w))
        locked[vertex] = True
        for b in range(devices):
            _unlink(vertex * devices + b, b, bucket_of, following, before, head)
        part[vertex] = to
        log[moves, 0], log[moves, 1] = vertex, here
        moves += 1
        first, last, sent = r_ptr[vertex], r_ptr[vertex + 1], s_ptr[vertex + 1]
        for i in range(first, last):
            held[r_nets[i], here] -= 1
            held[r_nets[i], to] += 1
        seen[vertex] = moves
        for i in range(s_ptr[vertex], sent + last - first):
            sends = i < sent
            net = s_nets[i] if sends else r_nets[i - sent + first]
            if not sends and held[net, here] > 1 and held[net, to] > 2:
                continue  # no gain depends on these counts
            for j in range(pin_ptr[net] - 1, pin_ptr[net + 1]):
                v = np.int64(pins[j] if j >= pin_ptr[net] else source[net])
                if locked[v] or seen[v] == moves:
                    continue
                seen[v] = moves
                before_gain = _highest(v, part[v], gain, time_s)
                _gains(v, g, m, s, gain[v], near[v])
                _enter(v, gain[v], near[v], quantum, g, s, buckets)
                if ranked_at[cell_of[v]] >= 0 and _highest(v, part[v], gain, time_s) != before_gain:
                    heappush(ranked[cell_of[v]], (-_highest(v, part[v], gain, time_s), v))
        if _better(excess, cut, largest_load, best_excess, best_cut, best_load):
            best_excess, best_cut, best_load, kept = excess, cut, largest_load, moves
    for i in range(moves - 1, kept - 1, -1):
        part[log[i, 0]] = log[i, 1]
    return _better(best_excess, best_cut, best_load, start_excess, start_cut, start_load)


@inner
def _better(excess, cut, load, than_excess, than_cut, than_load):
    if abs(excess - than_excess) > 1e-9:
        return excess < than_excess
    if abs(cut - than_cut) > 1e-9 * max(abs(cut), abs(than_cut)):
        return cut < than_cut
    return load < than_load * (1 - 1e-9)
