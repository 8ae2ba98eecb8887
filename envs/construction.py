"""Steps of many placement environments in one compiled call, and list-scheduling features of the devices for the next group.

Times are divided by the instance's `ideal_s`, bytes by the memory limit of the device, and everything is clipped to
[-`CLIP`, `CLIP`]. Axes: I instances, N environments, F features; G groups, D devices of an instance or of the spaces.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlplace.arrays import Array, buffers, constants
from rlplace.compiled import entry, inner, stamp_of
from rlplace.envs import bank as banks
from rlplace.envs.bank import bank_of, cutter
from rlplace.envs.guide.features import CLIP
from rlplace.envs.instance import PlacementInstance
from rlplace.envs.observation import NUM_CONTEXT, memory_pressure, static_context

RUNNING, PLACED, STUCK, ILLEGAL = range(4)
"""Status of an environment; STUCK has no legal device for the next group."""


class ConstructionColumns(NamedTuple):
    """Columns of a candidate: the next group on a device."""

    finish_delay: int  # earliest finish of the group on the device minus that on the best allowed device
    load_after: int  # work on the device with the group
    imbalance_change: int  # growth of the largest load of all devices
    work: int  # mean time of the group
    slowdown: int  # log of its time on the device over its mean time
    communication_after: int  # transfer seconds between the group and its neighbours on other devices
    affinity: int  # share of all bytes that it exchanges that would stay on the device
    memory_after: int  # provable bytes on the device with the group; 0 without limit
    tensors_after: int  # bytes of parameters and of all tensors made on the device with the group; 0 without limit
    tensors_over_even: int  # that minus the filling of every device by the same share of the graph
    criticality: int  # static: longest path through the group over the longest path
    depth: int  # where in the step the group starts
    plan_progress: int  # share of the groups that are placed
    plan_load: int  # largest load of a device
    plan_devices: int  # over 8
    plan_groups: int  # log2 over 8
    plan_pressure: int  # provable bytes of all groups over all memory
    plan_tensors: int  # bytes of parameters and of all tensors over all memory; 0 without limit
    plan_side_by_side: int  # whether branches are placed beside one another, not one after another


CONSTRUCTION_FEATURES = ConstructionColumns._fields
NUM_CONSTRUCTION = len(CONSTRUCTION_FEATURES)
COLUMN = ConstructionColumns(*range(NUM_CONSTRUCTION))


class GroupTables(NamedTuple):
    """Arrays of one instance, see `rlplace.envs.instance.PlacementInstance`."""

    order: Any = Array("int32", "G")
    allowed: Any = Array("bool", "G D")
    time_s: Any = Array("float64", "G D")
    mean_time_s: Any = Array("float64", "G")
    neighbor_ptr: Any = Array("int64", "G+1")
    neighbor: Any = Array("int32", ".")
    neighbor_bytes: Any = Array("float64", ".")
    seconds_per_byte: Any = Array("float64", "D D")
    latency_s: Any = Array("float64", "D D")
    criticality: Any = Array("float64", "G")
    depth: Any = Array("float64", "G")
    resident_bytes: Any = Array("float64", "G")
    pinned_bytes: Any = Array("float64", "G")
    footprint_bytes: Any = Array("float64", "G")
    limit_bytes: Any = Array("float64", "D")
    made_bytes: Any = Array("float64", "G")


_tables_of = cutter(GroupTables)


class ConstructionBank(NamedTuple):
    """Constants of the instances."""

    shape: Any  # int64 [I, 2], groups and devices
    context: Any  # float32 [I, 3]
    static: Any  # float64 [I, 5], the columns from `plan_devices` on
    made_bytes: Any  # float64 [I], of all groups
    ideal_s: Any  # float64 [I]
    tables: Any  # bank of `GroupTables`
    layout: Any


class ConstructionState(NamedTuple):
    """Memory and observations of the environments; D and G as in the spaces."""

    instance: Any = Array("int64", "N")
    plan: Any = Array("int32", "N G", -1)  # -1 not placed or padding
    placed: Any = Array("int64", "N")
    load_s: Any = Array("float64", "N D")
    pinned_bytes: Any = Array("float64", "N D")
    resident_bytes: Any = Array("float64", "N D")
    footprint_bytes: Any = Array("float64", "N D")
    made_bytes: Any = Array("float64", "N D")
    free_s: Any = Array("float64", "N D")  # when each device is free
    need_bytes: Any = Array("float64", "N D")  # provable bytes with the next group
    finish_s: Any = Array("float64", "N G")  # of placed groups
    next_s: Any = Array("float64", "N D")  # earliest finish of the next group
    table: Any = Array("float32", "N D*F")
    group: Any = Array("int32", "N D", -1)
    legal: Any = Array("bool", "N D")
    context: Any = Array("float32", f"N {NUM_CONTEXT}")
    overflow: Any = Array("float64", "N")  # of an illegal action
    status: Any = Array("int8", "N")  # see RUNNING


def construction_bank(instances: Sequence[PlacementInstance]) -> ConstructionBank:
    """Returns the constants of instances."""
    return ConstructionBank(
        np.array([one.allowed.shape for one in instances], dtype=np.int64),
        np.clip([static_context(one) for one in instances], -CLIP, CLIP).astype(np.float32),
        np.array([_static(one) for one in instances]),
        np.array([float(one.made_bytes.sum()) for one in instances]),
        np.array([one.ideal_s for one in instances]),
        *bank_of([constants(GroupTables, **one.columns()) for one in instances]),
    )


def _static(instance: PlacementInstance) -> list[float]:
    groups, devices = instance.allowed.shape
    memory = float(instance.limit_bytes.sum())
    tensors = float(instance.made_bytes.sum()) / memory if 0 < memory < math.inf else 0.0
    beside = float(not np.array_equal(instance.order, instance.graph.depth_first_order))
    return [devices / 8.0, float(np.log2(groups)) / 8.0, memory_pressure(instance), tensors, beside]


def construction_state(number: int, groups: int, devices: int) -> ConstructionState:
    """Returns the memory of N environments."""
    state: ConstructionState = buffers(ConstructionState, N=number, G=groups, D=devices, F=NUM_CONSTRUCTION)
    return state


@inner
def _weigh(t, s, e, group, devices):
    """Sums provable bytes on every device with a group, and marks legal ones; returns whether there is one."""
    some = False
    for d in range(devices):
        largest = max(s.footprint_bytes[e, d], t.footprint_bytes[group])
        bare = s.resident_bytes[e, d] + t.resident_bytes[group] + largest
        s.need_bytes[e, d] = max(s.pinned_bytes[e, d] + t.pinned_bytes[group], bare)
        s.legal[e, d] = t.allowed[group, d] and s.need_bytes[e, d] <= t.limit_bytes[d]
        some = some or s.legal[e, d]
    return some


@inner
def _finish(t, s, e, group, devices):
    """Computes the earliest finish of a group on every device; returns the least on an allowed one."""
    best, plan, finish_s, next_s = np.inf, s.plan[e], s.finish_s[e], s.next_s[e]
    for d in range(devices):
        ready = s.free_s[e, d]
        for i in range(t.neighbor_ptr[group], t.neighbor_ptr[group + 1]):
            other = t.neighbor[i]
            where = plan[other]
            if where >= 0:
                # An edge carries activations and their gradients: half of its bytes hold up the forward.
                sent = t.latency_s[where, d] + 0.5 * t.neighbor_bytes[i] * t.seconds_per_byte[where, d]
                ready = max(ready, finish_s[other] + sent)
        next_s[d] = ready + t.time_s[group, d]
        if t.allowed[group, d]:
            best = min(best, next_s[d])
    return 0.0 if best == np.inf else best


@inner
def _describe(b, t, s, e, i, devices, largest, progress):
    """Fills the table of an environment for its next group."""
    c, ideal_s, plan, group = COLUMN, b.ideal_s[i], s.plan[e], t.order[s.placed[e]]
    table = s.table[e].reshape((s.legal.shape[1], NUM_CONSTRUCTION))
    best, placed = _finish(t, s, e, group, devices), t.made_bytes[group]
    for d in range(devices):
        placed += s.made_bytes[e, d]
    even = b.static[i, c.plan_tensors - c.plan_devices] * placed / max(b.made_bytes[i], 1.0)
    for d in range(devices):
        near, total, sent = 0.0, 0.0, 0.0
        for k in range(t.neighbor_ptr[group], t.neighbor_ptr[group + 1]):
            size, where = t.neighbor_bytes[k], plan[t.neighbor[k]]
            total += size
            if where == d:
                near += size
            elif where >= 0:
                sent += t.latency_s[where, d] + size * t.seconds_per_byte[where, d]
        time_s, mean_s, limit = t.time_s[group, d], t.mean_time_s[group], max(t.limit_bytes[d], 1.0)
        after = s.load_s[e, d] + time_s
        row = table[d]
        row[c.finish_delay] = (s.next_s[e, d] - best) / ideal_s
        row[c.load_after] = after / ideal_s
        row[c.imbalance_change] = max(after - largest, 0.0) / ideal_s
        row[c.work] = mean_s / ideal_s
        row[c.slowdown] = np.log(max(time_s, 1e-12) / max(mean_s, 1e-12))
        row[c.communication_after] = sent / ideal_s
        row[c.affinity] = near / total if total > 0 else 0.0
        row[c.memory_after] = s.need_bytes[e, d] / limit if limit < np.inf else 0.0
        row[c.tensors_after] = (s.made_bytes[e, d] + t.made_bytes[group]) / limit if limit < np.inf else 0.0
        row[c.tensors_over_even] = row[c.tensors_after] - even
        row[c.criticality] = t.criticality[group]
        row[c.depth] = t.depth[group]
        row[c.plan_progress] = progress
        row[c.plan_load] = largest / ideal_s
        row[c.plan_devices :] = b.static[i]
        for f in range(NUM_CONSTRUCTION):
            row[f] = min(max(row[f], -CLIP), CLIP)
    s.group[e, :devices] = group


def _compile(stamp):
    @entry(nogil=True)
    def construct(bank, state, rows, actions, begin):
        """Places the next group of environments, or begins their episodes.

        Args:
            bank: `ConstructionBank` as a plain tuple.
            state: `ConstructionState` as a plain tuple, changed.
            rows: int64 [n], the environments.
            actions: int64 [N], devices.
            begin: Whether episodes begin.
        """
        _ = stamp
        b, s = ConstructionBank(*bank), ConstructionState(*state)
        for n in range(len(rows)):
            e = rows[n]
            i, d = s.instance[e], actions[e]
            groups, devices = b.shape[i, 0], b.shape[i, 1]
            t = GroupTables(*_tables_of(b.tables, b.layout, i))
            s.status[e] = RUNNING
            if begin:
                s.plan[e, :], s.placed[e], s.group[e, :] = -1, 0, -1
                for array in (
                    s.load_s, s.pinned_bytes, s.resident_bytes, s.footprint_bytes, s.made_bytes, s.free_s, s.finish_s,
                    s.need_bytes,
                ):  # fmt: skip
                    array[e, :] = 0.0
                s.table[e, :], s.legal[e, :] = 0.0, False
            elif d >= devices or not s.legal[e, d]:
                limit = t.limit_bytes[d] if d < devices else np.inf
                s.overflow[e] = 1.0 if d >= devices else 0.0
                if limit > 0.0 and limit < np.inf:
                    s.overflow[e] = max(0.0, s.need_bytes[e, d] - limit) / limit
                s.status[e] = ILLEGAL
            else:
                group = t.order[s.placed[e]]
                s.free_s[e, d] = s.finish_s[e, group] = s.next_s[e, d]
                s.plan[e, group] = d
                s.load_s[e, d] += t.time_s[group, d]
                s.pinned_bytes[e, d] += t.pinned_bytes[group]
                s.resident_bytes[e, d] += t.resident_bytes[group]
                s.made_bytes[e, d] += t.made_bytes[group]
                s.footprint_bytes[e, d] = max(s.footprint_bytes[e, d], t.footprint_bytes[group])
                s.placed[e] += 1
                if s.placed[e] == groups:
                    s.status[e] = PLACED
                    s.legal[e, :devices] = True
            if s.status[e] == RUNNING and not _weigh(t, s, e, t.order[s.placed[e]], devices):
                for device in range(devices):  # of the first group: the episode ends infeasible, with the next action
                    s.legal[e, device] = t.allowed[t.order[s.placed[e]], device]
                if not begin:
                    s.status[e] = STUCK
            largest, progress, context = 0.0, s.placed[e] / groups, s.context[e]
            for device in range(devices):
                largest = max(largest, s.load_s[e, device])
            context[:3] = b.context[i]
            context[3] = progress
            context[4] = min(max(largest / b.ideal_s[i], -CLIP), CLIP)
            if s.status[e] == RUNNING:
                _describe(b, t, s, e, i, devices, largest, progress)
            else:
                s.table[e, :] = 0.0
                s.group[e, :] = -1

    return construct


construct = _compile(stamp_of(banks))
