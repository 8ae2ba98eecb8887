"""Compiled inner loops that several planners share.

`t` is a `Traffic` (`rlplace.placement.common.groupgraph`), `a` an `OpArrays` (`rlplace.placement.common.oparrays`).
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment, misc"
from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

import numpy as np

from rlplace.compiled import entry, inner


class Loads(NamedTuple):
    """An assignment that moves change, and what its devices have to do and to spare."""

    devices: Any  # int32 [G]
    seconds: Any  # float64 [D], summed times of the groups on each device
    room: Any  # float64 [D] bytes


class Execution(NamedTuple):
    """A simulated step."""

    by_start: Any  # int64 [N], ops by start, end and number
    device_of_op: Any  # int32 [N]
    start_s: Any  # float64 [N]
    end_s: Any  # float64 [N]
    arrival_s: Any  # float64 [T, D], -1 where a tensor was not sent


@inner
def _communication(group, device, devices, t):
    """Returns the seconds of all transfers of `group` if it were on `device` and its neighbours stayed."""
    total = 0.0
    for k in range(t.ptr[group], t.ptr[group + 1]):
        other = devices[t.neighbor[k]]
        if device != other:
            e = t.edge[k]
            if t.out[k]:
                total += t.count[e] * t.latency[device, other] + t.size[e] * t.inverse[device, other] + t.fixed[e]
            else:
                total += t.count[e] * t.latency[other, device] + t.size[e] * t.inverse[other, device] + t.fixed[e]
    return total


AFRESH = 512
"""Of so many groups of a device, those that must have left before the prices of moving the others are all worked out anew."""


@inner
def _cheapest(device, need, busiest, size, row, seconds, loads):
    """Returns the least added time per freed byte at which a group can leave a device, inf where it cannot, and for which.

    size: bytes of the group. row, seconds: float64 [D], its transfers and its time on each device.
    """
    best, where = np.inf, device
    freed = min(float(size), need)
    for d in range(len(row)):
        if d == device or seconds[d] == np.inf or loads.room[d] < size:
            continue
        added = row[d] - row[device] + seconds[d] - seconds[device]
        added += max(0.0, loads.seconds[d] + seconds[d] - busiest)
        ratio = added / freed if added > 0 else added * freed
        if ratio < best:
            best, where = ratio, d
    return best, where


@entry
def shed(device, need, loads, footprint, time_s, t):
    """Moves groups off `device` until an estimated `need` bytes are gone; updates `loads` and returns the number of groups.

    The group with the least added time per byte freed goes first: transfers, a slower device, and load beyond the busiest
    device all count as added time. Of many groups, prices are lower bounds until a group is about to go (`AFRESH`).
    """
    devices, load, room = loads.devices, loads.seconds, loads.room
    num_groups, num_devices = time_s.shape
    members, slot = np.empty(num_groups, dtype=np.int64), np.full(num_groups, -1, dtype=np.int64)
    total = 0
    for g in range(num_groups):
        if devices[g] == device and footprint[g] > 0:
            members[total] = g
            slot[g] = total
            total += 1
    rows = np.empty((total, num_devices))
    for s in range(total):
        for d in range(num_devices):
            rows[s, d] = _communication(members[s], d, devices, t)
    moved, since, highest, prices = 0, num_groups, -np.inf, [(0.0, np.int64(0))][1:]
    while need > 0:
        busiest = -np.inf
        for d in range(num_devices):
            busiest = max(busiest, load[d])
        if busiest > highest and since >= total // AFRESH:  # prices fall only where the busiest device gets more to do
            since, highest = 0, busiest
            prices.clear()
            for s in range(total):
                if members[s] >= 0:
                    g = members[s]
                    price, _ = _cheapest(device, need, busiest, footprint[g], rows[s], time_s[g], loads)
                    if price < np.inf:
                        prices.append((price, np.int64(s)))
            heapify(prices)
        best_slot, best_device = -1, device
        while len(prices) > 0 and best_slot < 0:
            _, s = heappop(prices)
            if members[s] < 0:
                continue
            g = members[s]
            price, d = _cheapest(device, need, busiest, footprint[g], rows[s], time_s[g], loads)
            if len(prices) > 0 and (price, s) > prices[0]:
                if price < np.inf:
                    heappush(prices, (price, s))
            elif price < np.inf:
                best_slot, best_device = s, d
        if best_slot < 0:
            break
        g = members[best_slot]
        members[best_slot] = -1
        slot[g] = -1
        devices[g] = best_device
        load[device] -= time_s[g, device]
        load[best_device] += time_s[g, best_device]
        room[device] += footprint[g]
        room[best_device] -= footprint[g]
        need -= footprint[g]
        moved, since = moved + 1, since + 1
        for k in range(t.ptr[g], t.ptr[g + 1]):
            n = np.int64(t.neighbor[k])
            if slot[n] >= 0:
                for d in range(num_devices):
                    rows[slot[n], d] = _communication(n, d, devices, t)
                price, _ = _cheapest(device, need, busiest, footprint[n], rows[slot[n]], time_s[n], loads)
                heappush(prices, (price, slot[n]))
    return moved


@entry
def all_communication(groups, devices, t):
    """Returns float64 [len(groups), D], the seconds of all transfers of each of some groups if it sat on each device."""
    rows = np.empty((len(groups), len(t.latency)))
    for i in range(len(groups)):
        for d in range(len(t.latency)):
            rows[i, d] = _communication(groups[i], d, devices, t)
    return rows


@inner
def _part_traffic(part, other, where, size, count, latency, inverse):
    """Returns the seconds of all transfers of two parts, both directions, each pair counted once."""
    total = 0.0
    for p in range(len(where)):
        for mine in (part, other):
            if p == mine or (mine == other and p == part):
                continue
            a, b = where[mine], where[p]
            total += count[mine, p] * latency[a, b] + size[mine, p] * inverse[a, b]
            total += count[p, mine] * latency[b, a] + size[p, mine] * inverse[b, a]
    return total


@entry
def swap_parts(where, size, count, load, latency, inverse, rounds):
    """Exchanges the devices `where` of parts while that lowers traffic plus the number of parts times the largest load."""
    parts = len(where)
    for _ in range(rounds):
        improved = False
        for i in range(parts):
            for j in range(i + 1, parts):
                top_before, top_after = 0.0, 0.0
                for p in range(parts):
                    top_before = max(top_before, load[p, where[p]])
                before = _part_traffic(i, j, where, size, count, latency, inverse) + parts * top_before
                where[i], where[j] = where[j], where[i]
                for p in range(parts):
                    top_after = max(top_after, load[p, where[p]])
                after = _part_traffic(i, j, where, size, count, latency, inverse) + parts * top_after
                if after < before * (1 - 1e-12):
                    improved = True
                else:
                    where[i], where[j] = where[j], where[i]
        if not improved:
            return


@entry
def place_illegal(order, devices, time_s, t):
    """Moves groups off devices that are not allowed, to the one with the least time plus transfers, in group order."""
    for i in range(len(order)):
        g = np.int64(order[i])
        if time_s[g, devices[g]] == np.inf:
            best, where = np.inf, devices[g]
            for d in range(len(t.latency)):
                seconds = _communication(g, d, devices, t)
                if time_s[g, d] + seconds < best:
                    best, where = time_s[g, d] + seconds, d
            devices[g] = where


@inner
def _fewer_missing(order, devices, time_s, t, linked, settled):
    """Moves each group in turn to the device with fewest missing links to settled neighbours; returns how many are left."""
    num_devices = len(linked)
    row = np.zeros(num_devices, dtype=np.int64)
    missing = 0
    for g in order:
        row[:] = 0
        for k in range(t.ptr[g], t.ptr[g + 1]):
            if settled[t.neighbor[k]]:
                other = devices[t.neighbor[k]]
                for d in range(num_devices):
                    if d != other and not (linked[d, other] if t.out[k] else linked[other, d]):
                        row[d] += 1
        here = row[devices[g]]
        if here > 0:
            for d in range(num_devices):
                if time_s[g, d] != np.inf and row[d] < here:
                    here, devices[g] = row[d], d
        settled[g] = True
        missing += here
    return missing


@entry
def avoid_missing_links(order, devices, time_s, t, linked, passes):
    """Moves groups so that fewer edges need a link that does not exist.

    Local improvement first, which keeps most groups where they are. Where it gets stuck, groups are settled anew in order, from
    either end, each looking only at those before it.
    """
    everything = np.ones(len(devices), dtype=np.bool_)
    missing = 0
    for start in range(3):
        trial = devices.copy()
        if start > 0:
            _fewer_missing(order if start == 1 else order[::-1], trial, time_s, t, linked, ~everything)
        for _ in range(passes):
            left = _fewer_missing(order, trial, time_s, t, linked, everything)
            if left == 0:
                break
        if start == 0 or left < missing:
            missing = left
            best = trial
        if missing == 0:
            break
    devices[:] = best


@entry
def chain_savings(run, a, idle, saved, touched):
    """Walks the chain of events that ends the step back from its last op; adds what a remedy for each delay would save.

    A delay is a transfer that the later op waited for (remedy: either group goes to the other's device), or a device that an
    earlier op held after the inputs of a later one were there (remedy: either group goes to one of the two idlest others). An
    owner's tensor ends the chain.

    run: An `Execution`. idle: int64 [D], devices by busy time. saved: float64 [G, D] seconds, zeros. touched: bool [G, D],
    False; where something was added.
    """
    by_start, device_of_op, start_s, end_s, arrival_s = run
    before, latest = np.empty(len(by_start), dtype=np.int64), np.full(len(idle), -1, dtype=np.int64)
    for op in by_start:
        before[op] = latest[device_of_op[op]]
        latest[device_of_op[op]] = op
    op = np.argmax(end_s)
    for _ in range(2 * len(by_start)):
        device = device_of_op[op]
        ready, cause, sent = 0.0, -1, False
        for k in range(a.input_ptr[op], a.input_ptr[op + 1]):
            tensor = a.inputs[k]
            source = a.producer[tensor]
            moved = (source < 0 or device_of_op[source] != device) and arrival_s[tensor, device] >= 0.0
            at = arrival_s[tensor, device] if moved else end_s[source] if source >= 0 else 0.0
            if at > ready or cause < 0:
                ready, cause, sent = at, source, moved
        previous = before[op]
        group_of_op = a.op_group[op]
        if previous >= 0 and end_s[previous] == start_s[op] and start_s[op] > ready:
            first = a.op_group[previous]
            if first != group_of_op:
                tried = 0
                for i in range(len(idle)):
                    if idle[i] != device and tried < 2:
                        tried += 1
                        for group in (first, group_of_op):
                            saved[group, idle[i]] += start_s[op] - ready
                            touched[group, idle[i]] = True
            op = previous
        elif cause >= 0:
            if sent:
                first = a.op_group[cause]
                saved[first, device] += ready - end_s[cause]
                touched[first, device] = True
                saved[group_of_op, device_of_op[cause]] += ready - end_s[cause]
                touched[group_of_op, device_of_op[cause]] = True
            op = cause
        else:
            return
