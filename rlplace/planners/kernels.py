"""Compiled inner loops that several planners share."""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def communication_row(group, devices, ptr, neighbor, edge, out, size, count, fixed, latency, inverse, row):
    """Fills `row` [D] with the seconds of all transfers of `group` if it sat on each device, neighbours staying put."""
    for device in range(len(row)):
        row[device] = 0.0
    for k in range(ptr[group], ptr[group + 1]):
        other = devices[neighbor[k]]
        e = edge[k]
        for device in range(len(row)):
            if device != other:
                if out[k]:
                    row[device] += count[e] * latency[device, other] + size[e] * inverse[device, other] + fixed[e]
                else:
                    row[device] += count[e] * latency[other, device] + size[e] * inverse[other, device] + fixed[e]


@njit(cache=True)
def shed(
    device, need, devices, load, room, footprint, time_s,
    ptr, neighbor, edge, out, size, count, fixed, latency, inverse,
):  # fmt: skip
    """Moves groups off `device` until an estimated `need` bytes are gone; updates `devices`, `load` and `room`.

    The group with the least added time per byte freed goes first: transfers, a slower device, and load beyond the busiest
    device all count as added time. Returns the number of groups moved.
    """
    num_groups, num_devices = time_s.shape
    members = np.empty(num_groups, dtype=np.int64)
    rows = np.zeros((num_groups, num_devices))
    slot = np.full(num_groups, -1, dtype=np.int64)
    total = 0
    for g in range(num_groups):
        if devices[g] == device and footprint[g] > 0:
            members[total] = g
            slot[g] = total
            communication_row(g, devices, ptr, neighbor, edge, out, size, count, fixed, latency, inverse, rows[total])
            total += 1
    moved = 0
    while need > 0:
        busiest = load.max()
        best, best_slot, best_device = np.inf, -1, -1
        for s in range(total):
            g = members[s]
            if g < 0:
                continue
            freed = min(float(footprint[g]), need)
            for d in range(num_devices):
                if d == device or time_s[g, d] == np.inf or room[d] < footprint[g]:
                    continue
                added = rows[s, d] - rows[s, device] + time_s[g, d] - time_s[g, device]
                added += max(0.0, load[d] + time_s[g, d] - busiest)
                ratio = added / freed if added > 0 else added * freed
                if ratio < best:
                    best, best_slot, best_device = ratio, s, d
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
        moved += 1
        for k in range(ptr[g], ptr[g + 1]):
            n = neighbor[k]
            if slot[n] >= 0:
                communication_row(n, devices, ptr, neighbor, edge, out, size, count, fixed, latency, inverse, rows[slot[n]])
    return moved


@njit(cache=True)
def all_communication(devices, ptr, neighbor, edge, out, size, count, fixed, latency, inverse):
    """float64 [G, D], `communication_row` of every group."""
    num_groups, num_devices = len(devices), len(latency)
    rows = np.zeros((num_groups, num_devices))
    for g in range(num_groups):
        communication_row(g, devices, ptr, neighbor, edge, out, size, count, fixed, latency, inverse, rows[g])
    return rows


@njit(cache=True)
def _part_traffic(part, other, where, size, count, latency, inverse):
    """Seconds of all transfers of two parts, both directions, each pair counted once."""
    total = 0.0
    for p in range(len(where)):
        for mine in (part, other):
            if p == mine or (mine == other and p == part):
                continue
            a, b = where[mine], where[p]
            total += count[mine, p] * latency[a, b] + size[mine, p] * inverse[a, b]
            total += count[p, mine] * latency[b, a] + size[p, mine] * inverse[b, a]
    return total


@njit(cache=True)
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


@njit(cache=True)
def place_illegal(order, devices, time_s, ptr, neighbor, edge, out, size, count, fixed, latency, inverse):
    """Moves groups off devices where they may not sit, to the one with the least time plus transfers, in group order."""
    row = np.zeros(len(latency))
    for g in order:
        if time_s[g, devices[g]] == np.inf:
            communication_row(g, devices, ptr, neighbor, edge, out, size, count, fixed, latency, inverse, row)
            best, where = np.inf, devices[g]
            for d in range(len(row)):
                if time_s[g, d] + row[d] < best:
                    best, where = time_s[g, d] + row[d], d
            devices[g] = where


@njit(cache=True)
def _fewer_missing(order, devices, time_s, ptr, neighbor, out, linked, settled):
    """Moves each group in turn to the device with fewest missing links to settled neighbours; returns how many are left."""
    num_devices = len(linked)
    row = np.zeros(num_devices, dtype=np.int64)
    missing = 0
    for g in order:
        row[:] = 0
        for k in range(ptr[g], ptr[g + 1]):
            if settled[neighbor[k]]:
                other = devices[neighbor[k]]
                for d in range(num_devices):
                    if d != other and not (linked[d, other] if out[k] else linked[other, d]):
                        row[d] += 1
        here = row[devices[g]]
        if here > 0:
            for d in range(num_devices):
                if time_s[g, d] != np.inf and row[d] < here:
                    here, devices[g] = row[d], d
        settled[g] = True
        missing += here
    return missing


@njit(cache=True)
def avoid_missing_links(order, devices, time_s, ptr, neighbor, out, linked, passes):
    """Moves groups so that fewer edges need a link that does not exist; returns the number still missing.

    Local improvement first, which keeps most groups where they are. Where it gets stuck, groups are settled anew in order, from
    either end, each looking only at those before it.
    """
    everything = np.ones(len(devices), dtype=np.bool_)
    missing = 0
    for start in range(3):
        trial = devices.copy()
        if start > 0:
            _fewer_missing(order if start == 1 else order[::-1], trial, time_s, ptr, neighbor, out, linked, ~everything)
        for _ in range(passes):
            left = _fewer_missing(order, trial, time_s, ptr, neighbor, out, linked, everything)
            if left == 0:
                break
        if start == 0 or left < missing:
            missing = left
            best = trial
        if missing == 0:
            break
    devices[:] = best
    return missing
