"""Interchangeable devices: the program considers only one plan of each set that differs by exchanging them."""

from __future__ import annotations

from collections import Counter

import numpy as np

from rlplace.problem import Problem


def interchangeable(problem: Problem) -> list[list[int]]:
    """Returns classes of devices, each in ascending order, that may be permuted freely; classes of one device are left out.

    Two devices are in a class when exchanging them leaves op times, memory, fixed groups, links, transfer times and the sharing
    of channels as they are.
    """
    classes: list[list[int]] = []
    for device in range(problem.num_devices):
        home = next((c for c in classes if _exchangeable(problem, c[0], device)), None)
        if home is None:
            classes.append([device])
        else:
            home.append(device)
    return [c for c in classes if len(c) > 1]


def _exchangeable(problem: Problem, first: int, second: int) -> bool:
    limits = problem.memory_limit_bytes
    allowed = problem.group_allowed[problem.op_group]
    times = np.where(allowed, problem.time_s, np.inf)
    if limits[first] != limits[second] or not np.array_equal(times[:, first], times[:, second]):
        return False
    if not np.array_equal(problem.group_allowed[:, first], problem.group_allowed[:, second]):
        return False
    swap = np.arange(problem.num_devices)
    swap[[first, second]] = second, first
    off = ~np.eye(problem.num_devices, dtype=bool)
    links = problem.links
    for matrix in (links.bandwidth_bytes_per_s, links.latency_s, *problem.tensor_transfer_s.values()):
        if not np.array_equal(matrix[off], matrix[np.ix_(swap, swap)][off]):
            return False
    return links.channels is None or _sharing(problem, np.arange(problem.num_devices)) == _sharing(problem, swap)


def _sharing(problem: Problem, names: np.ndarray) -> Counter[frozenset[tuple[int, int]]]:
    """Returns the ordered pairs that share each channel, regardless of channel numbers, with devices renamed."""
    pairs: dict[int, set[tuple[int, int]]] = {}
    for i, row in enumerate(problem.links.effective_channels):
        for j, channels in enumerate(row):
            for channel in channels:
                pairs.setdefault(channel, set()).add((int(names[i]), int(names[j])))
    return Counter(frozenset(held) for held in pairs.values())
