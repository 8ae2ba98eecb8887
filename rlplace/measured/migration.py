"""`migration`: what it costs to go from one plan to another of the same problem on the same devices.

Weights and optimizer state of every group go to the devices that hold it under the new plan and did not under the old one;
gradients and activations do not, since plans change between steps. A device takes them from the holder with the fastest link.
Transfers that share a channel run one after the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import lcm

import numpy as np

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem

RESTART_S = 60.0
"""Assumed seconds to stop a job and start it again: checkpoint, processes, the first steps. Measure your own."""


@dataclass(frozen=True)
class LinkLoad:
    """What one link carries.

    Attributes:
        source: Device number.
        destination: Device number.
        size_bytes: Of all groups together.
        messages: Groups, or shares of their optimizer state.
        seconds: Latency of every message, and bytes over bandwidth; inf where there is no link.
    """

    source: int
    destination: int
    size_bytes: int
    messages: int
    seconds: float


@dataclass(frozen=True)
class Migration:
    """Cost of a change of plan.

    Attributes:
        moved_groups: Groups of which some device gets a copy that it did not have.
        loads: Per link that is used.
        transfer_s: From the first transfer to the end of the last one; inf where devices without a link would have to send.
        restart_s: Stated overhead, see `RESTART_S`; 0 when nothing changes.
    """

    moved_groups: int = 0
    loads: tuple[LinkLoad, ...] = ()
    transfer_s: float = 0.0
    restart_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Bytes sent over all links."""
        return sum(load.size_bytes for load in self.loads)

    @property
    def seconds(self) -> float:
        """Transfers and restart."""
        return self.transfer_s + self.restart_s

    def break_even_steps(self, gain_s: float) -> int | None:
        """Steps after which a gain of so many seconds a step has paid for it; None when it never does."""
        if not gain_s > 0 or not math.isfinite(self.seconds):
            return None
        return math.ceil(self.seconds / gain_s)


@dataclass
class _Bundle:
    """Messages of one link."""

    size_bytes: int = 0
    messages: int = 0


def migration(problem: Problem, old: PlacementPlan, new: PlacementPlan, *, restart_s: float = RESTART_S) -> Migration:
    """Compares two plans.

    Args:
        problem: Links, and bytes of groups. Where a group does not say its weights and optimizer state apart, all of its
            resident bytes count.
        old: The running plan.
        new: The plan to go to.
        restart_s: Seconds to stop and start the job, on top of the transfers. It is 0 when the plans are the same.

    Raises:
        InputError: A plan has other groups or devices than the problem, or `restart_s` is negative.
    """
    if not 0 <= restart_s < math.inf:
        raise InputError("migration: restart_s must be a number of seconds from 0 up")
    for plan in (old, new):
        devices = plan.device_of_group
        if (
            devices.shape != (problem.num_groups,)
            or devices.min(initial=0) < 0
            or devices.max(initial=0) >= problem.num_devices
        ):
            raise InputError("migration: a plan has other groups or devices than the problem")
    bundles: dict[tuple[int, int], _Bundle] = {}
    known = (problem.weight_bytes >= 0) & (problem.optimizer_bytes >= 0)
    weights = np.where(known, problem.weight_bytes, problem.resident_bytes)
    states = np.where(known, problem.optimizer_bytes, 0)
    pieces = lcm(_shares(old), _shares(new))
    moved: set[int] = set()
    rows_old, rows_new = _rows(old, problem.num_devices), _rows(new, problem.num_devices)
    for group in range(problem.num_groups):
        have = [row[old.device_of_group[group]] for row in rows_old]
        want = [row[new.device_of_group[group]] for row in rows_new]
        if set(want) - set(have):
            moved.add(group)  # also one without weights
        _send(bundles, problem, int(weights[group]), have, want)
        whole = int(states[group])
        for piece in range(pieces):
            size = whole * (piece + 1) // pieces - whole * piece // pieces
            holders = [have[piece * len(have) // pieces]] if _shares(old) > 1 else have
            getters = [want[piece * len(want) // pieces]] if _shares(new) > 1 else want
            _send(bundles, problem, size, holders, getters)
    loads = tuple(_load(problem, pair, bundles[pair]) for pair in sorted(bundles))
    same = not loads and old.fingerprint == new.fingerprint
    return Migration(len(moved), loads, _makespan(problem, loads), 0.0 if same else restart_s)


def _shares(plan: PlacementPlan) -> int:
    """Parts that optimizer state is kept in."""
    return len(plan.replicas) if plan.optimizer_sharding and plan.replicas else 1


def _rows(plan: PlacementPlan, num_devices: int) -> list[list[int]]:
    if plan.replicas is None:
        return [list(range(num_devices))]
    return [[int(device) for device in row] for row in plan.replicas]


def _send(bundles: dict[tuple[int, int], _Bundle], problem: Problem, size_bytes: int, have: list[int], want: list[int]) -> None:
    if size_bytes <= 0:
        return
    for destination in sorted(set(want) - set(have)):
        source = min(sorted(set(have)), key=lambda device: problem.links.transfer_s(device, destination, size_bytes))
        bundle = bundles.setdefault((source, destination), _Bundle())
        bundle.size_bytes += size_bytes
        bundle.messages += 1


def _load(problem: Problem, pair: tuple[int, int], bundle: _Bundle) -> LinkLoad:
    latency_s = float(problem.links.latency_s[pair])
    seconds = problem.links.transfer_s(*pair, bundle.size_bytes) + (bundle.messages - 1) * latency_s
    return LinkLoad(*pair, bundle.size_bytes, bundle.messages, seconds)


def _makespan(problem: Problem, loads: tuple[LinkLoad, ...]) -> float:
    """End of the last transfer: longest first, each as soon as all of its channels are free."""
    channels = problem.links.effective_channels
    free: dict[int, float] = {}
    end = 0.0
    for load in sorted(loads, key=lambda load: -load.seconds):
        held = channels[load.source][load.destination]
        begin = max((free.get(channel, 0.0) for channel in held), default=0.0)
        end = max(end, begin + load.seconds)
        free.update(dict.fromkeys(held, begin + load.seconds))
    return end
