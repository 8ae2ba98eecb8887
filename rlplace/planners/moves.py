"""Random changes of an assignment, shared by the search planners.

Kinds, with their share of the draws:
    neighbor  one group joins the device of a group it exchanges tensors with
    single    one group goes to a random device
    swap      two groups on different devices change places
    segment   consecutive groups of the depth-first order go to one device, mostly that of the group before or after them
    cluster   a group and some of its neighbours on the same device move together
"""

from __future__ import annotations

from random import Random

import numpy as np

from rlplace.planners.groupgraph import group_graph
from rlplace.problem import Problem

SHARES = (("neighbor", 0.32), ("single", 0.18), ("swap", 0.12), ("segment", 0.28), ("cluster", 0.10))


class MoveMaker:
    """Draws random moves for one problem; a move is a list of (group, device)."""

    def __init__(self, problem: Problem, rng: Random) -> None:
        graph = group_graph(problem)
        self.rng = rng
        self.groups, self.devices = problem.num_groups, problem.num_devices
        self.allowed = [np.flatnonzero(row).tolist() for row in problem.group_allowed]
        self.may = problem.group_allowed.tolist()
        self.movable = [group for group, devices in enumerate(self.allowed) if len(devices) > 1]
        neighbors = graph.neighbor.tolist()
        ptr = graph.neighbor_ptr.tolist()
        self.neighbors = [neighbors[ptr[g] : ptr[g + 1]] for g in range(self.groups)]
        self.order = graph.depth_first_order.tolist()
        self.position = np.argsort(graph.depth_first_order).tolist()
        self.kinds = [kind for kind, _ in SHARES]
        self.thresholds = np.cumsum([share for _, share in SHARES]).tolist()

    def draw(self, devices: list[int]) -> list[tuple[int, int]]:
        """A move that changes `devices`; empty when the draw came to nothing."""
        if not self.movable:
            return []
        number = self.rng.random()
        group = self.movable[int(self.rng.random() * len(self.movable))]
        if number < self.thresholds[0]:
            return self._neighbor(group, devices)
        if number < self.thresholds[1]:
            return self._to(group, self._other(group, devices))
        if number < self.thresholds[2]:
            return self._swap(group, devices)
        if number < self.thresholds[3]:
            return self._segment(group, devices)
        return self._cluster(group, devices)

    def _other(self, group: int, devices: list[int]) -> int:
        choices = self.allowed[group]
        device = choices[int(self.rng.random() * len(choices))]
        if device == devices[group]:
            device = choices[(choices.index(device) + 1) % len(choices)]
        return device

    def _to(self, group: int, device: int) -> list[tuple[int, int]]:
        return [(group, device)]

    def _neighbor(self, group: int, devices: list[int]) -> list[tuple[int, int]]:
        here = devices[group]
        others = [devices[n] for n in self.neighbors[group] if devices[n] != here and self.may[group][devices[n]]]
        if not others:
            return self._to(group, self._other(group, devices)) if self.rng.random() < 0.3 else []
        return self._to(group, others[int(self.rng.random() * len(others))])

    def _swap(self, group: int, devices: list[int]) -> list[tuple[int, int]]:
        for _ in range(4):
            other = self.movable[int(self.rng.random() * len(self.movable))]
            a, b = devices[group], devices[other]
            if a != b and self.may[group][b] and self.may[other][a]:
                return [(group, b), (other, a)]
        return []

    def _segment(self, group: int, devices: list[int]) -> list[tuple[int, int]]:
        # Short segments are common, long ones possible: lengths fall off geometrically up to half of all groups.
        length = min(1 + int(2.0 ** (self.rng.random() * np.log2(max(2.0, self.groups / 2)))), self.groups)
        first = max(0, min(self.position[group] - int(self.rng.random() * length), self.groups - length))
        number = self.rng.random()
        if number < 0.4 and first > 0:
            device = devices[self.order[first - 1]]
        elif number < 0.8 and first + length < self.groups:
            device = devices[self.order[first + length]]
        else:
            device = int(self.rng.random() * self.devices)
        segment = self.order[first : first + length]
        return [(g, device) for g in segment if devices[g] != device and self.may[g][device]]

    def _cluster(self, group: int, devices: list[int]) -> list[tuple[int, int]]:
        here, device = devices[group], self._other(group, devices)
        size = 2 + int(self.rng.random() * 6)
        found, frontier = [group], [group]
        while frontier and len(found) < size:
            last = frontier.pop(int(self.rng.random() * len(frontier)))
            for n in self.neighbors[last]:
                if devices[n] == here and n not in found and len(found) < size:
                    found.append(n)
                    frontier.append(n)
        return [(g, device) for g in found if self.may[g][device]]
