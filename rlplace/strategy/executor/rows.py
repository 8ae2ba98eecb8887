"""Rows of costs by place: what every block takes in a pass of the slowest replica, and what a place is like."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlplace.cluster import Cluster
from rlplace.strategy.costs import BlockCosts, Floats, kind_numbers
from rlplace.strategy.drafts import Place
from rlplace.strategy.executor import columns as c
from rlplace.strategy.executor.meshes import (
    copy_degree,
    copy_groups,
    expert_share_degree,
    expert_share_groups,
    share_degree,
    share_groups,
)
from rlplace.strategy.executor.traffic import Traffic

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
        self._place: dict[Place, list[float]] = {}
        self._tables: dict[Place, tuple[int, ...]] = {}

    @property
    def size_bytes(self) -> int:
        """What is kept."""
        return self.rows.nbytes

    def place(self, place: Place) -> list[float]:
        """float64 [PLACE] of a place."""
        if place not in self._place:
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
            self._place[place] = row
        return self._place[place]

    def passes(self, replicas: Sequence[tuple[int, tuple[int, ...]]]) -> Passes:
        """What replicas run: samples, and the kind of device."""
        kind = self._kind
        return frozenset([pair for samples, devices in replicas for pair in {(samples, kind[device]) for device in devices}])

    def number(self, place: Place, passes: Passes) -> int:
        """Number of the row of a place whose replicas in a lane have these passes."""
        grouped = place.tensor * place.context * place.expert > 1
        tables = self._tensor_tables(place) if grouped else None
        key = passes, place.tensor, place.sequence_parallel, place.context, place.expert, tables
        number = self._row_of.get(key)
        if number is None:
            rows = [self._pass(place, samples, kind) for samples, kind in passes]  # may be refused: no number before
            number = self._row_of[key] = len(self._row_of)
            if number == len(self.rows):
                self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
            self.rows[number] = rows[0] if len(rows) == 1 else np.max(rows, axis=0)
        return number

    def _tensor_tables(self, place: Place) -> tuple[int, ...]:
        """Number of the table of each kind of collective inside blocks."""
        if place not in self._tables:
            self._tables[place] = self.traffic.tables_inside(place)
        return self._tables[place]

    def _pass(self, place: Place, samples: int, kind: int) -> Floats:
        """float64 [B, ROW], a pass of so many samples on a device of that kind."""
        cut, tables = place.cut(samples), self._tensor_tables(place)
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
        return row
