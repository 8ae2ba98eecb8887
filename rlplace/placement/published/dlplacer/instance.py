"""A problem in whole numbers, from which the placement program is built.

Axes: K tasks, which are the ops, V values, which are the tensors, G groups, D devices.

Whole numbers for the solver: seconds become ticks, exactly where that is possible.

CP-SAT works on integers. Where all times of a problem are multiples of one unit, as in problems written by hand, a tick is that
unit and nothing is lost. Elsewhere a tick is a small fraction of the step and every time is rounded down, so that the optimum
in ticks is a lower bound of the optimum in seconds.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.problem import Problem
from rlplace.problem.order import longest_ways

HORIZON_TICKS = 1 << 28
"""Ticks in the longest step considered, where times have no common unit: rounding costs less than 4e-9 of it for each time on
the critical chain."""

_MAX_DENOMINATOR = 10**9
_EXACT_TICKS = 1 << 40

_LONGER_THAN_ANY = 1 << 41
"""Limit on times in ticks: longer than every step that is considered, and small enough for sums in 64 bits."""


@dataclass(frozen=True)
class Ticks:
    """Seconds to ticks and back.

    Attributes:
        per_s: Ticks in a second.
        exact: Whether every time of the problem is a whole number of ticks.
    """

    per_s: float
    exact: bool

    def down(self, seconds: NDArray[np.float64]) -> NDArray[np.int64]:
        """Returns int64, the ticks of times, rounded down where they are not whole; inf and NaN become -1."""
        finite = np.isfinite(seconds)
        raw = np.where(finite, seconds, 0.0) * self.per_s
        # A product that is whole but for rounding must not lose a tick.
        whole = np.rint(raw) if self.exact else np.floor(raw * (1 + 1e-15))
        return np.where(finite, np.minimum(whole, _LONGER_THAN_ANY), -1).astype(np.int64)

    def seconds(self, ticks: float) -> float:
        """Returns seconds of a number of ticks."""
        return float(ticks) / self.per_s


def choose_ticks(times_s: NDArray[Any], horizon_s: float) -> Ticks:
    """Returns the unit for a set of times.

    Args:
        times_s: Float [.], every op and transfer time in seconds; inf and NaN are left out.
        horizon_s: Longest step that is considered.
    """
    values = np.unique(times_s[np.isfinite(times_s) & (times_s > 0)])
    common = _common_unit(values.tolist(), horizon_s)
    if common is not None:
        return Ticks(common, True)
    # A step that takes no time at all cannot be improved: any unit will do.
    return Ticks(HORIZON_TICKS / horizon_s if horizon_s > 0 else 1.0, False)


def _common_unit(values: list[float], horizon_s: float) -> float | None:
    """Returns ticks per second of the largest unit that all values are multiples of, or None."""
    denominator, numerator = 1, 0
    fractions = []
    for value in values:
        fraction = Fraction(value).limit_denominator(_MAX_DENOMINATOR)
        if abs(float(fraction) - value) > 1e-14 * value:
            return None
        denominator = math.lcm(denominator, fraction.denominator)
        if denominator > _MAX_DENOMINATOR or denominator * horizon_s > _EXACT_TICKS:
            return None
        fractions.append(fraction)
    for fraction in fractions:
        numerator = math.gcd(numerator, int(fraction * denominator))
    return denominator / max(numerator, 1)


@dataclass(frozen=True, eq=False)
class TickedProblem:
    """Times of a problem in ticks.

    Attributes:
        problem: The problem.
        ticks: Conversion of seconds to ticks.
        horizon: Ticks of the longest step that is considered.
        duration: int64 [K, D], ticks of each task, -1 where its group is not allowed.
        transfer: int64 [V, D, D], ticks of a value from one device to another, -1 where there is no link; 0 on the diagonal.
        readers: Tasks that read each value.
        occupies: bool [K], False for ops of collectives, which hold no device.
    """

    problem: Problem
    ticks: Ticks
    horizon: int
    duration: NDArray[np.int64]
    transfer: NDArray[np.int64]
    readers: tuple[tuple[int, ...], ...]
    occupies: NDArray[np.bool_]

    @cached_property
    def shortest(self) -> NDArray[np.int64]:
        """int64 [K], ticks of each task on its fastest device."""
        return np.where(self.duration >= 0, self.duration, np.iinfo(np.int64).max).min(axis=1)

    @cached_property
    def heads(self) -> list[int]:
        """Per task, ticks that must pass before it can start: the longest chain of its ancestors."""
        return longest_ways(self.problem, self.shortest.tolist(), backwards=False)

    @cached_property
    def tails(self) -> list[int]:
        """Per task, ticks that must pass after its end: the longest chain of its descendants."""
        return longest_ways(self.problem, self.shortest.tolist(), backwards=True)


def make_instance(problem: Problem, horizon_s: float | None = None) -> TickedProblem:
    """Returns a problem in whole numbers.

    Args:
        problem: The problem.
        horizon_s: Step time of some plan in seconds; the program considers no slower step. None where no plan is known: then
            everything one after another, in which any step completes if it can.
    """
    sent_s = transfer_seconds(problem)
    if horizon_s is None:
        worst = np.where(np.isfinite(sent_s), sent_s, 0.0).max(axis=(1, 2), initial=0.0).sum() * (problem.num_devices - 1)
        horizon_s = float(np.nan_to_num(problem.time_s, nan=0.0).max(axis=1).sum() + worst)
    time_s = np.where(problem.group_allowed[problem.op_group], problem.time_s, np.nan)
    ticks = choose_ticks(
        np.concatenate([time_s.ravel(), sent_s[:, ~np.eye(problem.num_devices, dtype=bool)].ravel()]), horizon_s
    )
    occupies = np.ones(problem.num_ops, dtype=bool)
    occupies[[op for collective in problem.collectives for op in collective.ops]] = False
    flat = problem.consumers.tolist()
    return TickedProblem(
        problem=problem,
        ticks=ticks,
        horizon=int(ticks.down(np.array([horizon_s]))[0]) + (not ticks.exact),
        duration=ticks.down(time_s),
        transfer=ticks.down(sent_s),
        readers=tuple(tuple(flat[low:high]) for low, high in pairwise(problem.consumer_ptr.tolist())),
        occupies=occupies,
    )


def transfer_seconds(problem: Problem) -> NDArray[np.float64]:
    """Returns float64 [T, D, D], seconds of every tensor between every two devices; inf where there is no link, 0 on the
    diagonal.
    """
    links = problem.links
    with np.errstate(divide="ignore", invalid="ignore"):
        sent: NDArray[np.float64] = (
            links.latency_s + problem.tensor_bytes.astype(np.float64)[:, None, None] / links.bandwidth_bytes_per_s
        )
    for tensor, table in problem.tensor_transfer_s.items():
        sent[tensor] = table
    sent[:, links.bandwidth_bytes_per_s == 0.0] = np.inf
    diagonal = np.arange(problem.num_devices)
    sent[:, diagonal, diagonal] = 0.0
    return sent


def interchangeable(problem: Problem) -> list[list[int]]:
    """Returns classes of devices, each in ascending order, that may be permuted freely; classes of one device are left out.

    Two devices are in a class when exchanging them leaves op times, memory, fixed groups, links, transfer times and the sharing
    of channels as they are. The program considers only one plan of each set that differs by such exchanges.
    """
    time_s = np.where(problem.group_allowed[problem.op_group], problem.time_s, np.inf)
    off, devices = ~np.eye(problem.num_devices, dtype=bool), np.arange(problem.num_devices)
    tables = [problem.links.bandwidth_bytes_per_s, problem.links.latency_s, *problem.tensor_transfer_s.values()]

    def sharing(names: NDArray[np.int64]) -> Counter[frozenset[tuple[int, int]]]:
        """Returns the ordered pairs of renamed devices that share each channel, whatever the channel's number."""
        pairs: dict[int, set[tuple[int, int]]] = {}
        for i, row in enumerate(problem.links.effective_channels):
            for j, channels in enumerate(row):
                for channel in channels:
                    pairs.setdefault(channel, set()).add((int(names[i]), int(names[j])))
        return Counter(map(frozenset, pairs.values()))

    def exchangeable(first: int, second: int) -> bool:
        if problem.memory_limit_bytes[first] != problem.memory_limit_bytes[second]:
            return False
        if any((table[:, first] != table[:, second]).any() for table in (time_s, problem.group_allowed)):
            return False
        swap = devices.copy()
        swap[[first, second]] = second, first
        if any((table[off] != table[np.ix_(swap, swap)][off]).any() for table in tables):
            return False
        return problem.links.channels is None or sharing(devices) == sharing(swap)

    classes: list[list[int]] = []
    for device in devices.tolist():
        home = next((members for members in classes if exchangeable(members[0], device)), None)
        if home is None:
            classes.append([device])
        else:
            home.append(device)
    return [members for members in classes if len(members) > 1]
