"""Steps of many placement environments in one compiled call: `Construction`, by the same kernel.

Axes: I instances, N environments, F features, G = `max_groups`, D = `max_devices`.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlplace.compiled import entry, inner, stamp_of
from rlplace.envs import construction
from rlplace.envs.base import static_context
from rlplace.envs.construction import NUM_CONSTRUCTION, describe, static_features
from rlplace.envs.guide.features import CLIP
from rlplace.envs.instance import Instance
from rlplace.envs.observation import NUM_CONTEXT
from rlplace.envs.vector import bank
from rlplace.envs.vector.bank import bank_of, cut

RUNNING, PLACED, STUCK, ILLEGAL = range(4)
"""What became of an environment: STUCK has no legal device for the next group."""


class Plots(NamedTuple):
    """Constants of the instances."""

    shape: Any  # int64 [I, 2], groups and devices
    context: Any  # float32 [I, 3]
    static: Any  # float64 [I, 6], see `describe`
    ideal_s: Any  # float64 [I]
    fields: Any  # bank: order, allowed, time_s, mean_time_s, neighbor_ptr, neighbor, neighbor_bytes, seconds_per_byte,
    # latency_s, criticality, depth, resident, pinned, footprint, limit and made in bytes
    at: Any


class Builds(NamedTuple):
    """What environments remember and show; D and G as in the spaces."""

    instance: Any  # int64 [N]
    plan: Any  # int32 [N, G], -1 not placed or padding
    placed: Any  # int64 [N]
    load_s: Any  # float64 [N, D]
    pinned: Any  # float64 [N, D]
    resident: Any  # float64 [N, D]
    footprint: Any  # float64 [N, D]
    made: Any  # float64 [N, D]
    free_s: Any  # float64 [N, D]
    need: Any  # float64 [N, D], provable bytes with the next group
    finish_s: Any  # float64 [N, G]
    next_s: Any  # float64 [N, D], earliest finish of the next group
    table: Any  # float32 [N, D * F]
    group: Any  # int32 [N, D]
    legal: Any  # bool [N, D]
    context: Any  # float32 [N, 8]
    overflow: Any  # float64 [N], of an illegal action
    status: Any  # int8 [N], see RUNNING


def plots_of(instances: Sequence[Instance]) -> Plots:
    """Returns the constants of instances."""
    problems = [instance.problem for instance in instances]
    context = [static_context(instance) for instance in instances]
    rows = [
        (
            one.order, one.allowed, one.graph.time_s, one.graph.mean_time_s, one.graph.neighbor_ptr,
            one.graph.neighbor, one.neighbor_bytes, one.seconds_per_byte, one.latency_s, one.criticality, one.depth,
            one.problem.resident_bytes.astype(np.float64), one.pinned_bytes, one.footprint_bytes, one.limit_bytes,
            one.made_bytes,
        )
        for one in instances
    ]  # fmt: skip
    return Plots(
        np.array([[problem.num_groups, problem.num_devices] for problem in problems], dtype=np.int64),
        np.clip(context, -CLIP, CLIP).astype(np.float32),
        np.array([static_features(instance) for instance in instances]),
        np.array([one.ideal_s for one in instances]),
        *bank_of(rows),
    )


def builds_for(number: int, groups: int, devices: int) -> Builds:
    """Returns the memory of N environments."""
    wide = (number, devices)
    return Builds(
        np.zeros(number, dtype=np.int64), np.full((number, groups), -1, dtype=np.int32), np.zeros(number, dtype=np.int64),
        np.zeros(wide), np.zeros(wide), np.zeros(wide), np.zeros(wide), np.zeros(wide), np.zeros(wide), np.zeros(wide),
        np.zeros((number, groups)), np.zeros(wide),
        np.zeros((number, devices * NUM_CONSTRUCTION), dtype=np.float32), np.full(wide, -1, dtype=np.int32),
        np.zeros(wide, dtype=np.bool_), np.zeros((number, NUM_CONTEXT), dtype=np.float32), np.zeros(number),
        np.zeros(number, dtype=np.int8),
    )  # fmt: skip


@inner
def _weigh(p, b, e, i, group, devices):
    """Provable bytes on every device with a group, and where it may sit; returns whether it may sit anywhere."""
    f, at = p.fields, p.at
    resident, pinned, footprint = cut(f[11], at, 11, i)[group], cut(f[12], at, 12, i)[group], cut(f[13], at, 13, i)[group]
    allowed, limit, some = cut(f[1], at, 1, i), cut(f[14], at, 14, i), False
    for d in range(devices):
        bare = b.resident[e, d] + resident + max(b.footprint[e, d], footprint)
        b.need[e, d] = max(b.pinned[e, d] + pinned, bare)
        b.legal[e, d] = allowed[group * devices + d] and b.need[e, d] <= limit[d]
        some = some or b.legal[e, d]
    return some


@inner
def _show(p, b, e, i, groups, devices, over):
    """Table, groups and context of an environment."""
    largest, row = 0.0, b.context[e]
    for d in range(devices):
        largest = max(largest, b.load_s[e, d])
    row[:3] = p.context[i]
    row[3] = b.placed[e] / groups
    row[4] = min(max(largest / p.ideal_s[i], -CLIP), CLIP)
    if over:
        b.table[e, :] = 0.0
        b.group[e, :] = -1
        return
    f, at = p.fields, p.at
    group = cut(f[0], at, 0, i)[b.placed[e]]
    limit = np.maximum(cut(f[14], at, 14, i), 1.0)
    describe(
        group, b.plan[e], b.load_s[e, :devices], b.free_s[e], b.finish_s[e], b.need[e], b.made[e], cut(f[15], at, 15, i), limit,
        cut(f[1], at, 1, i).reshape((groups, devices)), cut(f[2], at, 2, i).reshape((groups, devices)), cut(f[3], at, 3, i),
        cut(f[4], at, 4, i), cut(f[5], at, 5, i), cut(f[6], at, 6, i), cut(f[7], at, 7, i).reshape((devices, devices)),
        cut(f[8], at, 8, i).reshape((devices, devices)), cut(f[9], at, 9, i), cut(f[10], at, 10, i), p.ideal_s[i],
        b.placed[e] / groups, p.static[i], b.next_s[e], b.table[e].reshape((b.need.shape[1], NUM_CONSTRUCTION)),
    )  # fmt: skip
    b.group[e, :devices] = group


def _compile(stamp):
    @entry(nogil=True)
    def construct(plots, builds, rows, actions, begin):
        """Places the next group of environments, or begins their episodes.

        Args:
            plots: `Plots` as a plain tuple.
            builds: `Builds` as a plain tuple, changed.
            rows: int64 [n], the environments.
            actions: int64 [N], devices.
            begin: Whether episodes begin.
        """
        _ = stamp
        p, b = Plots(*plots), Builds(*builds)
        for n in range(len(rows)):
            e = rows[n]
            i, d = b.instance[e], actions[e]
            groups, devices = p.shape[i, 0], p.shape[i, 1]
            f, at, order = p.fields, p.at, cut(p.fields[0], p.at, 0, i)
            b.status[e] = RUNNING
            if begin:
                b.plan[e, :], b.placed[e], b.group[e, :] = -1, 0, -1
                for array in (b.load_s, b.pinned, b.resident, b.footprint, b.made, b.free_s, b.finish_s, b.need):
                    array[e, :] = 0.0
                b.table[e, :], b.legal[e, :] = 0.0, False
            elif d >= devices or not b.legal[e, d]:
                limit = cut(f[14], at, 14, i)[d] if d < devices else np.inf
                b.overflow[e] = 1.0 if d >= devices else 0.0
                if limit > 0.0 and limit < np.inf:
                    b.overflow[e] = max(0.0, b.need[e, d] - limit) / limit
                b.status[e] = ILLEGAL
            else:
                group = order[b.placed[e]]
                b.free_s[e, d] = b.finish_s[e, group] = b.next_s[e, d]
                b.plan[e, group] = d
                b.load_s[e, d] += cut(f[2], at, 2, i)[group * devices + d]
                b.pinned[e, d] += cut(f[12], at, 12, i)[group]
                b.resident[e, d] += cut(f[11], at, 11, i)[group]
                b.made[e, d] += cut(f[15], at, 15, i)[group]
                b.footprint[e, d] = max(b.footprint[e, d], cut(f[13], at, 13, i)[group])
                b.placed[e] += 1
                if b.placed[e] == groups:
                    b.status[e] = PLACED
                    b.legal[e, :devices] = True
            if b.status[e] == RUNNING:
                group = order[b.placed[e]]
                if not _weigh(p, b, e, i, group, devices):
                    for device in range(devices):  # of the first group: the episode ends infeasible, with the next action
                        b.legal[e, device] = cut(f[1], at, 1, i)[group * devices + device]
                    if not begin:
                        b.status[e] = STUCK
            _show(p, b, e, i, groups, devices, b.status[e] != RUNNING)

    return construct


construct = _compile(stamp_of(bank, construction))
