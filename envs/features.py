"""List-scheduling features of candidate moves, compiled.

A candidate puts a set of groups on one device (see `rlplace.envs.moves`). Both environments describe their candidates with
the same features, so that one network can score devices (Placement-v0) and moves (Refinement-v0). All times are divided by the
instance's `ideal_s`, all bytes by the memory limit of the device, and everything is clipped to [-`CLIP`, `CLIP`].
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

FEATURES = (
    "load_after",  # work on the destination after the move
    "load_source",  # work on the source before it (0 while constructing)
    "imbalance_change",  # change of the larger of the two loads
    "work",  # mean time of the moved groups
    "slowdown",  # log of time on the destination over time on the source (or mean over devices)
    "communication_after",  # transfer seconds between the moved groups and all other placed groups, after the move
    "communication_change",  # the same, minus its value before
    "affinity",  # share of the moved groups' exchanged bytes that stays on the destination
    "memory_after",  # provable bytes on the destination after the move
    "peak_after",  # simulated peak of the destination plus what arrives (0 while constructing)
    "criticality",  # static: longest path through the groups over the longest path
    "tightness",  # 1 on the realised critical path, falling with slack (0 while constructing)
    "idle_at_destination",  # share of the groups' time window in which the destination idles (0 while constructing)
    "finish_delay",  # earliest finish on this device minus the best device's (0 while refining)
    "length",  # log2 of the number of moved groups, over 8
    "depth",  # where in the step the first moved group starts
    "expected_saving",  # what the bottleneck analysis expects to save (0 for random moves and while constructing)
)
NUM_FEATURES = len(FEATURES)
CLIP = 8.0
TIME_BINS = 64

# A division by zero cannot happen, so no code for its error, nor for callers in C; buffers come from the caller: all of it
# shortens the first start, when everything is compiled.
_KERNEL = {"cache": True, "error_model": "numpy", "no_cfunc_wrapper": True}


@njit(**_KERNEL)  # type: ignore[misc]
def candidate_features(  # type: ignore[no-untyped-def]
    ptr, groups, device, saving_s, finish_delay_s, device_of_group, load_s, pinned_bytes, peak_bytes, tightness, window, idle,
    limit_bytes, time_s, mean_time_s, group_pinned_bytes, neighbor_ptr, neighbor, neighbor_bytes, seconds_per_byte, latency_s,
    criticality, depth, ideal_s, moved, out,
):  # fmt: skip
    """Fills `out` float32 [K, F], zeros, for K candidates; rows of candidates without groups stay zero.

    Args:
        ptr, groups, device, saving_s: The moves, see `rlplace.envs.moves.Moves`.
        finish_delay_s: float64 [K].
        device_of_group: int32 [G], -1 where not placed yet.
        load_s: float64 [D], work placed on each device.
        pinned_bytes: float64 [D], provable bytes on each device. peak_bytes: float64 [D], simulated peaks (0 if unknown).
        tightness: float64 [G]. window: int32 [G, 2], first and last time bin of the group. idle: float64 [D, TIME_BINS].
        moved: bool [G], False, a buffer.
        (the others: see `rlplace.envs.instance.Instance`)
    """
    for k in range(len(device)):
        if ptr[k] == ptr[k + 1]:
            continue
        destination = device[k]
        source = device_of_group[groups[ptr[k]]]
        for index in range(ptr[k], ptr[k + 1]):
            moved[groups[index]] = True
        here, there, work, arriving = 0.0, 0.0, 0.0, 0.0
        before, after, near, total = 0.0, 0.0, 0.0, 0.0
        crit, tight, idle_sum, idle_count = 0.0, 0.0, 0.0, 0
        for index in range(ptr[k], ptr[k + 1]):
            group = groups[index]
            there += time_s[group, destination]
            here += time_s[group, source] if source >= 0 else mean_time_s[group]
            work += mean_time_s[group]
            arriving += group_pinned_bytes[group]
            crit = max(crit, criticality[group])
            tight = max(tight, tightness[group])
            for b in range(window[group, 0], window[group, 1] + 1):
                idle_sum += idle[destination, b]
                idle_count += 1
            for entry in range(neighbor_ptr[group], neighbor_ptr[group + 1]):
                other = neighbor[entry]
                if moved[other]:
                    continue
                where = device_of_group[other]
                size = neighbor_bytes[entry]
                total += size
                if where < 0:
                    continue
                if where == destination:
                    near += size
                else:
                    after += latency_s[where, destination] + size * seconds_per_byte[where, destination]
                if source >= 0 and where != source:
                    before += latency_s[where, source] + size * seconds_per_byte[where, source]
        for index in range(ptr[k], ptr[k + 1]):
            moved[groups[index]] = False
        source_load = load_s[source] if source >= 0 else 0.0
        larger_before = max(source_load, load_s[destination])
        larger_after = max(source_load - here if source >= 0 else 0.0, load_s[destination] + there)
        limit = limit_bytes[destination]
        out[k, 0] = (load_s[destination] + there) / ideal_s
        out[k, 1] = source_load / ideal_s
        out[k, 2] = (larger_after - larger_before) / ideal_s
        out[k, 3] = work / ideal_s
        out[k, 4] = np.log(max(there, 1e-12) / max(here, 1e-12)) if there < np.inf else CLIP
        out[k, 5] = after / ideal_s
        out[k, 6] = (after - before) / ideal_s if before < np.inf else -CLIP
        out[k, 7] = near / total if total > 0 else 0.0
        out[k, 8] = (pinned_bytes[destination] + arriving) / limit if limit < np.inf else 0.0
        out[k, 9] = (peak_bytes[destination] + arriving) / limit if limit < np.inf and peak_bytes[destination] > 0 else 0.0
        out[k, 10] = crit
        out[k, 11] = tight
        out[k, 12] = idle_sum / idle_count if idle_count > 0 else 0.0
        out[k, 13] = finish_delay_s[k] / ideal_s
        out[k, 14] = np.log2(float(ptr[k + 1] - ptr[k])) / 8.0
        out[k, 15] = depth[groups[ptr[k]]]
        out[k, 16] = saving_s[k] / ideal_s
        for f in range(out.shape[1]):
            out[k, f] = min(max(out[k, f], -CLIP), CLIP)


@njit(**_KERNEL)  # type: ignore[misc]
def realised_slack(  # type: ignore[no-untyped-def]
    order_by_end, start_s, end_s, device_of_op, producer_ptr, producer_tensor, consumer_ptr, consumers, lag_s, late_end,
    next_start,
):  # fmt: skip
    """How late each op could end without delaying the step, given the realised order and transfers.

    Args:
        order_by_end: int64 [N], ops by end time.
        producer_ptr, producer_tensor: CSR of the tensors that each op produces.
        lag_s: float64 [T, D], arrival of tensor t on device d minus its producer's end; 0 where it is local.
        late_end: float64 [N], the step time; becomes the latest end of each op.
        next_start: float64 [D], the step time; a buffer.
    """
    for index in range(len(start_s) - 1, -1, -1):
        op = order_by_end[index]
        device = device_of_op[op]
        late = min(late_end[op], next_start[device])
        for entry in range(producer_ptr[op], producer_ptr[op + 1]):
            tensor = producer_tensor[entry]
            for edge in range(consumer_ptr[tensor], consumer_ptr[tensor + 1]):
                consumer = consumers[edge]
                latest = late_end[consumer] - (end_s[consumer] - start_s[consumer]) - lag_s[tensor, device_of_op[consumer]]
                late = min(late, latest)
        late_end[op] = late
        next_start[device] = min(next_start[device], late - (end_s[op] - start_s[op]))


@njit(**_KERNEL)  # type: ignore[misc]
def idle_profile(  # type: ignore[no-untyped-def]
    start_s, end_s, device_of_op, op_group, step_time_s, idle, window
):
    """Share of each time bin in which a device idles, and the bins that each group's ops span.

    Args:
        start_s, end_s, device_of_op, op_group, step_time_s: Of a timeline.
        idle: float64 [D, TIME_BINS], ones; becomes the share, by rounding a little below zero where nothing idles.
        window: int32 [G, 2], rows (TIME_BINS - 1, 0); becomes first and last bin.
    """
    width = max(step_time_s, 1e-30) / TIME_BINS
    for op in range(len(start_s)):
        low = min(int(start_s[op] / width), TIME_BINS - 1)
        high = min(int(end_s[op] / width), TIME_BINS - 1)
        group, device = op_group[op], device_of_op[op]
        window[group, 0] = min(window[group, 0], low)
        window[group, 1] = max(window[group, 1], high)
        for b in range(low, high + 1):
            part = min(end_s[op], (b + 1) * width) - max(start_s[op], b * width)
            idle[device, b] -= max(part, 0.0) / width


def no_window(num_groups: int) -> NDArray[np.int32]:
    """The window of groups that have no timeline yet: empty."""
    window = np.zeros((num_groups, 2), dtype=np.int32)
    window[:, 0] = 1
    return window
