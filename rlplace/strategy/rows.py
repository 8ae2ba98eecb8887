"""Rows of costs by place: what every block takes in a pass of the slowest replica, and what a place is like."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlplace.cluster import Cluster
from rlplace.strategy import columns as c
from rlplace.strategy.costs import BlockCosts, Floats, kind_numbers
from rlplace.strategy.drafts import Place
from rlplace.strategy.meshes import (
    copy_degree,
    copy_groups,
    expert_share_degree,
    expert_share_groups,
    share_degree,
    share_groups,
)
from rlplace.strategy.traffic import Traffic

Passes = frozenset[tuple[int, int]]
"""Samples and device kinds of the passes that some replicas run."""


class Rows:
    """Makes rows when they are first asked for, and keeps them.

    Attributes:
        rows: float64 [rows, B, ROW]; grows.
    """

    def __init__(self, costs: BlockCosts, cluster: Cluster, traffic: Traffic) -> None:
        self.costs, self.traffic = costs, traffic
        self._kind = kind_numbers(costs, cluster)
        self.rows = np.zeros((8, len(costs.names), c.ROW))
        self._row_of: dict[object, int] = {}
        self._passes: dict[object, Floats] = {}
        self._seat_of: dict[Place, int] = {}
        self._seats: dict[object, int] = {}
        self._place: dict[int, list[float]] = {}
        self._tables: dict[int, tuple[int, ...]] = {}

    @property
    def size_bytes(self) -> float:
        """What is kept."""
        return self.rows.nbytes * (1 + len(self._passes) / len(self.rows))

    def seat(self, place: Place) -> int:
        """A number that places alike in axes, devices and links have in common."""
        if place not in self._seat_of:
            axes = (place.replicate, place.shard, place.context, place.tensor, place.expert, place.sharding)
            alike = axes, self.traffic.seats.alike((place.devices,))
            self._seat_of[place] = self._seats.setdefault(alike, len(self._seats))
        return self._seat_of[place]

    def place(self, place: Place, seat: int) -> list[float]:
        """float64 [PLACE] of a place that has this seat."""
        if seat not in self._place:
            traffic = self.traffic
            row = [0.0] * c.PLACE
            row[c.SHARDING], row[c.SHARE], row[c.COPIES] = place.sharding, share_degree(place), copy_degree(place)
            both = "all_gather", "reduce_scatter"
            row[c.GATHER_TABLE], row[c.SCATTER_TABLE] = traffic.collectives(both, share_groups(place))
            row[c.EXPERT_SHARE] = expert_share_degree(place)
            if place.expert > 1:
                tables = traffic.collectives(both, expert_share_groups(place))
                row[c.EXPERT_GATHER_TABLE], row[c.EXPERT_SCATTER_TABLE] = tables
            row[c.REDUCE_TABLE] = traffic.collective("all_reduce", copy_groups(place))
            row[c.HOST_RATE] = min(traffic.host_bytes_per_s(device) for device in place.devices)
            row[c.UPDATE_RATE] = min(traffic.host_memory_bytes_per_s(device) for device in place.devices)
            row[c.MEETS_BLOCKS], row[c.MEETS_COPIES] = traffic.meets(place)
            row[c.ITEM] = self.costs.held(place.tensor, place.expert).gradient_item
            self._place[seat] = row
        return self._place[seat]

    def passes(self, replicas: Sequence[tuple[int, tuple[int, ...]]]) -> Passes:
        """What replicas run: samples, and the kind of device."""
        kind = self._kind
        return frozenset([pair for samples, devices in replicas for pair in {(samples, kind[device]) for device in devices}])

    def number(self, place: Place, seat: int, passes: Passes) -> int:
        """Number of the row of a place with this seat, whose replicas in a lane have these passes."""
        grouped = place.tensor * place.context * place.expert > 1
        tables = self._tensor_tables(place, seat) if grouped else None
        key = passes, place.tensor, place.sequence_parallel, place.context, place.expert, tables
        number = self._row_of.get(key)
        if number is None:
            rows = [self._pass(place, seat, samples, kind) for samples, kind in passes]  # may be refused: no number before
            number = self._row_of[key] = len(self._row_of)
            if number == len(self.rows):
                self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
            self.rows[number] = rows[0] if len(rows) == 1 else np.max(rows, axis=0)
        return number

    def _tensor_tables(self, place: Place, seat: int) -> tuple[int, ...]:
        """Number of the table of each kind of collective inside blocks."""
        if seat not in self._tables:
            self._tables[seat] = self.traffic.tables_inside(place)
        return self._tables[seat]

    def _pass(self, place: Place, seat: int, samples: int, kind: int) -> Floats:
        """float64 [B, ROW], a pass of so many samples on a device of that kind."""
        cut, tables = place.cut(samples), self._tensor_tables(place, seat)
        key = kind, cut, tables
        if key in self._passes:
            return self._passes[key]
        row = np.zeros(self.rows.shape[1:])
        one, held = self.costs.passes(kind, cut), self.costs.held(place.tensor, place.expert)
        forward, backward = self.traffic.moved_s(tables, one.collective_bytes, one.collective_calls)
        for column, values in (
            (c.WEIGHTS, held.weight_bytes), (c.GRADIENTS, held.gradient_bytes), (c.OPTIMIZER, held.optimizer_bytes),
            (c.FORWARD, one.forward_s), (c.FORWARD_TENSOR, forward), (c.BACKWARD_TENSOR, backward),
            (c.BACKWARD_TENSOR_FULL, backward + forward), (c.WEIGHT, one.weight_s), (c.SENT, one.sent_bytes),
            (c.RETURNED, one.returned_bytes), (c.UPDATE, self.costs.update_s(kind, place.tensor, place.expert)),
        ):  # fmt: skip
            row[:, column] = values
        for column, several in (
            (c.EXPERT_WEIGHTS, held.expert_bytes), (c.BACKWARD, one.backward_s + one.again_s), (c.AGAIN, one.again_s),
            (c.KEPT, one.kept_bytes), (c.HALVED, one.halved_bytes), (c.WORKING_FORWARD, one.working_bytes[0]),
            (c.WORKING_BACKWARD, one.working_bytes[1]), (c.WORKING_END, one.working_bytes[2]),
            (c.WORKING_GROWING, one.working_bytes[3]),
        ):  # fmt: skip
            row[:, column : column + len(several)] = several.T
        self._passes[key] = row  # a pass that is refused leaves none
        return row
