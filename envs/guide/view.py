"""The record of an analysed plan, which `rlplace.envs.guide.analysis` fills."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rlplace.envs.guide.facts import Facts
from rlplace.envs.guide.pressure import BINS

# Entries of `View.total`.
STEP, BUSIEST, WORK, CHANNEL, CHAIN_WORK, CHAIN_WAIT, CHAIN_SENT, OVERFLOW = range(8)


class View(NamedTuple):
    """An analysed plan; axes as in `rlplace.envs.guide.facts`. Seconds unless stated otherwise.

    D devices, G groups, M merged edges, C channels, K tasks, V values.
    """

    # Devices and channels.
    load: Any  # float64 [D], work on each device
    peak: Any  # float64 [D] bytes
    pinned: Any  # float64 [D] provable bytes
    channel: Any  # float64 [C], how long each channel is held
    # Groups.
    tightness: Any  # float64 [G], 1 where a delay would lengthen the step, falling with slack
    slack: Any  # float64 [G], least slack of the group's tasks
    wait: Any  # float64 [G], how long tasks waited for their device
    queue: Any  # float64 [G], how long tasks without slack wait for the device while the group runs
    urgent: Any  # float64 [G], time of the group's tasks that have no slack
    chain: Any  # float64 [G], time of the group's tasks on the critical chain
    blocked: Any  # float64 [G], waits for devices on the critical chain, of the group or behind it
    saved: Any  # float64 [G, D], delays on the critical chain that the group would take away on the device
    idle: Any  # float64 [G, D], share of the time of a group's tasks in which a device idles
    clash: Any  # float64 [2, G, D], share of the time of a group's tasks in which a device runs critical work, TIGHT and STRICT
    crowd: Any  # float64 [2, G], devices that run critical work during the group's tasks, its own left out, TIGHT and STRICT
    # Edges.
    gap: Any  # float64 [M], least time between the end of a producer and the start of its consumer
    margin: Any  # float64 [M], least time between the end of a producer and the latest start of its consumer
    sent: Any  # float64 [M], transfer time on the critical chain
    hurried: Any  # float64 [M], longest transfer without slack
    shared: Any  # float64 [M, D], share of the bytes that other readers bring to a device anyway
    part: Any  # float64 [M], share of the bytes when those that are sent for several readers are divided among them
    # The whole.
    total: Any  # float64 [8], see STEP to OVERFLOW
    # Buffers.
    arrival: Any  # float64 [V * D], -1 everywhere between calls
    late: Any  # float64 [K]
    before: Any  # int64 [K]
    free_bins: Any  # float64 [D, BINS]
    critical_bins: Any  # float64 [2, D, BINS]


def make_view(facts: Facts, num_channels: int) -> View:
    """Returns buffers for an instance."""
    groups, devices = facts.group_s.shape
    tasks, values, edges = len(facts.task_group), len(facts.consumer_ptr) - 1, len(facts.edge_bytes)
    sizes = {
        "channel": max(num_channels, 1), "total": 8, "arrival": values * devices, "late": tasks, "before": tasks,
        **dict.fromkeys(("load", "peak", "pinned"), devices),
        **dict.fromkeys(("tightness", "slack", "wait", "queue", "urgent", "chain", "blocked"), groups),
        **dict.fromkeys(("saved", "idle"), (groups, devices)),
        **dict.fromkeys(("gap", "margin", "sent", "hurried", "part"), edges),
        "shared": (edges, devices),
        "clash": (2, groups, devices), "crowd": (2, groups), "free_bins": (devices, BINS), "critical_bins": (2, devices, BINS),
    }  # fmt: skip
    view = View(**{name: np.zeros(size, dtype=np.int64 if name == "before" else np.float64) for name, size in sizes.items()})
    view.arrival[:] = -1.0
    return view
