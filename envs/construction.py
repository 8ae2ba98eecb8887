"""List-scheduling features of the devices for the next group of a plan that is built group by group, compiled.

Times are divided by the instance's `ideal_s`, bytes by the memory limit of the device, and everything is clipped to
[-`CLIP`, `CLIP`]. Axes: D devices, G groups.
"""

from __future__ import annotations

import math

import numpy as np

from rlplace.compiled import inner
from rlplace.envs.guide.features import CLIP
from rlplace.envs.instance import Instance
from rlplace.envs.observation import memory_pressure

CONSTRUCTION_FEATURES = (
    "finish_delay",  # earliest finish of the group on the device minus that on the best allowed device
    "load_after",  # work on the device with the group
    "imbalance_change",  # growth of the largest load of all devices
    "work",  # mean time of the group
    "slowdown",  # log of its time on the device over its mean time
    "communication_after",  # transfer seconds between the group and what is placed on other devices
    "affinity",  # share of all bytes that it exchanges that would stay on the device
    "memory_after",  # provable bytes on the device with the group; 0 without limit
    "tensors_after",  # bytes of parameters and of all tensors made on the device with the group; 0 without limit
    "tensors_over_even",  # that minus what the same share of the graph would fill everywhere
    "criticality",  # static: longest path through the group over the longest path
    "depth",  # where in the step the group starts
    "plan_progress",  # share of the groups that are placed
    "plan_load",  # largest load of a device
    "plan_devices",  # over 8
    "plan_groups",  # log2 over 8
    "plan_pressure",  # provable bytes of all groups over all memory
    "plan_tensors",  # bytes of parameters and of all tensors over all memory; 0 without limit
    "plan_side_by_side",  # whether branches are placed beside one another, not one after another
)
NUM_CONSTRUCTION = len(CONSTRUCTION_FEATURES)


def static_features(instance: Instance) -> list[float]:
    """Returns the last of `CONSTRUCTION_FEATURES`, and the bytes of parameters and tensors."""
    devices, groups, memory = instance.problem.num_devices, instance.problem.num_groups, float(instance.limit_bytes.sum())
    made_bytes = float(instance.made_bytes.sum())
    tensors = made_bytes / memory if 0 < memory < math.inf else 0.0
    beside = float(not np.array_equal(instance.order, instance.graph.depth_first_order))
    return [devices / 8.0, float(np.log2(groups)) / 8.0, memory_pressure(instance), tensors, beside, made_bytes]


@inner
def describe(  # type: ignore[no-untyped-def]
    group, plan, load_s, free_s, finish_s, need_bytes, made, made_bytes, limit_bytes, allowed, time_s, mean_time_s,
    neighbor_ptr, neighbor, neighbor_bytes, seconds_per_byte, latency_s, criticality, depth, ideal_s, progress, static, finish,
    out,
):  # fmt: skip
    """Fills `out` float32 [D, F] and `finish` float64 [D], the earliest finish of a group on every device.

    Args:
        group: The group.
        plan: int32 [G], -1 where not placed.
        load_s: float64 [D]. free_s: float64 [D], when each device is free. finish_s: float64 [G], of placed groups.
        need_bytes, limit_bytes: float64 [D]. made: float64 [D], made bytes of the groups on each device.
        progress: Share of the groups that are placed. static: float64 [6], `static_features`.
        (the others: see `rlplace.envs.instance.Instance`)
    """
    devices = len(load_s)
    best, largest, placed = np.inf, 0.0, made_bytes[group]
    for d in range(devices):
        largest = max(largest, load_s[d])
        placed += made[d]
        ready = free_s[d]
        for place in range(neighbor_ptr[group], neighbor_ptr[group + 1]):
            other = neighbor[place]
            where = plan[other]
            if where >= 0:
                # An edge carries activations and their gradients: half of its bytes hold up the forward.
                sent = latency_s[where, d] + 0.5 * neighbor_bytes[place] * seconds_per_byte[where, d]
                ready = max(ready, finish_s[other] + sent)
        finish[d] = ready + time_s[group, d]
        if allowed[group, d]:
            best = min(best, finish[d])
    if best == np.inf:
        best = 0.0
    even = static[3] * placed / max(static[5], 1.0)
    for d in range(devices):
        near, total, sent = 0.0, 0.0, 0.0
        for place in range(neighbor_ptr[group], neighbor_ptr[group + 1]):
            size, where = neighbor_bytes[place], plan[neighbor[place]]
            total += size
            if where == d:
                near += size
            elif where >= 0:
                sent += latency_s[where, d] + size * seconds_per_byte[where, d]
        after = load_s[d] + time_s[group, d]
        row = out[d]
        row[0] = (finish[d] - best) / ideal_s
        row[1] = after / ideal_s
        row[2] = max(after - largest, 0.0) / ideal_s
        row[3] = mean_time_s[group] / ideal_s
        row[4] = np.log(max(time_s[group, d], 1e-12) / max(mean_time_s[group], 1e-12))
        row[5] = sent / ideal_s
        row[6] = near / total if total > 0 else 0.0
        row[7] = need_bytes[d] / limit_bytes[d] if limit_bytes[d] < np.inf else 0.0
        row[8] = (made[d] + made_bytes[group]) / limit_bytes[d] if limit_bytes[d] < np.inf else 0.0
        row[9] = row[8] - even
        row[10] = criticality[group]
        row[11] = depth[group]
        row[12] = progress
        row[13] = largest / ideal_s
        row[14:19] = static[:5]
        for f in range(len(row)):
            row[f] = min(max(row[f], -CLIP), CLIP)
