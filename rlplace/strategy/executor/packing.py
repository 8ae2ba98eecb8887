"""Drafts packed into arrays, whose common parts are cached, and blocks of a draft on its devices for the op-level expansion."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from itertools import accumulate, chain

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.strategy.costs import BlockCosts, Floats, kind_numbers
from rlplace.strategy.drafts import Draft, Mesh
from rlplace.strategy.executor import arrays as c
from rlplace.strategy.executor.arrays import BlockChoices, FrameArrays, Ints, LanePlace, PackedTies, PlacedBlock, StepResult
from rlplace.strategy.executor.meshes import (
    Lane,
    Passes,
    alike_lanes,
    borders,
    check_draft,
    copy_degree,
    copy_groups,
    expert_share_degree,
    expert_share_groups,
    room_bytes,
    share_degree,
    share_groups,
    stage_rows,
    turn_groups,
)
from rlplace.strategy.executor.traffic import ClusterTraffic, tie_exchanges, tie_part

KEPT_BYTES, KEPT_FRAMES = 256 << 20, 5_000
"""Bytes of rows and actions, and number of frames, above which the caches are dropped."""

NO_TIES = PackedTies(
    np.zeros(0), np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros((0, 3))
)
"""Ties of models without tied weights."""


class Rows:
    """Rows of costs, made on first use.

    Attributes:
        rows: float64 [rows, B, ROW]; grows.
        kind: int64 [D], the kind of every device.
    """

    def __init__(self, costs: BlockCosts, cluster: Cluster, traffic: ClusterTraffic) -> None:
        self.costs, self.traffic = costs, traffic
        self.kind = np.array(kind_numbers(costs, cluster), dtype=np.int64)
        self.rows = np.zeros((8, len(costs.names), c.ROW))
        self._row_of: dict[object, int] = {}
        self._place: dict[Mesh, list[float]] = {}
        self._tables: dict[Mesh, tuple[int, ...]] = {}

    def place(self, place: Mesh) -> list[float]:
        """Returns float64 [PLACE] of a place."""
        if place not in self._place:
            traffic, both = self.traffic, ("all_gather", "reduce_scatter")
            row = [0.0] * c.PLACE
            row[c.SHARDING], row[c.SHARE], row[c.COPIES] = place.sharding, share_degree(place), copy_degree(place)
            row[c.GATHER_TABLE], row[c.SCATTER_TABLE] = traffic.collectives(both, share_groups(place))
            row[c.EXPERT_SHARE] = expert_share_degree(place)
            if place.expert > 1:
                tables = traffic.collectives(both, expert_share_groups(place))
                row[c.EXPERT_GATHER_TABLE], row[c.EXPERT_SCATTER_TABLE] = tables
            row[c.REDUCE_TABLE] = traffic.collective("all_reduce", copy_groups(place))
            row[c.HOST_RATE], row[c.UPDATE_RATE] = traffic.slowest_host_bytes_per_s(place.devices)
            row[c.MEETS_BLOCKS], row[c.MEETS_COPIES] = traffic.meets(place)
            held = self.costs.held(*place.state)
            row[c.ITEM], row[c.RELEASED] = held.gradient_item, held.released
            if held.turns.any():
                turns = turn_groups(place)
                row[c.TURN_TABLE], row[c.TURN_DEGREE] = traffic.collective("all_to_all", turns), turns.size
            self._place[place] = row
        return self._place[place]

    def passes(self, replicas: Sequence[tuple[int, tuple[int, ...]]]) -> Passes:
        """Returns the passes of replicas, each with its samples and devices."""
        kind = self.kind[np.array(list(chain.from_iterable(devices for _, devices in replicas)), dtype=np.int64)]
        samples = np.repeat([size for size, _ in replicas], [len(devices) for _, devices in replicas])
        pairs = np.unique(samples * len(self.costs.kinds) + kind)
        return frozenset([divmod(pair, len(self.costs.kinds)) for pair in pairs.tolist()])

    def number(self, place: Mesh, passes: Passes) -> int:
        """Returns the index of the row of a place whose replicas in a lane have these passes."""
        grouped = self.costs.joins_replicas or place.tensor * place.context * place.expert * place.tables > 1
        tables = self._tensor_tables(place) if grouped else None
        key = passes, place.cut(0), place.state, tables
        number = self._row_of.get(key)
        if number is None:
            rows = [self._pass(place, samples, kind) for samples, kind in passes]  # may be refused: no number before
            number = self._row_of[key] = len(self._row_of)
            if number == len(self.rows):
                self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
            self.rows[number] = rows[0] if len(rows) == 1 else np.max(rows, axis=0)
        return number

    def _tensor_tables(self, place: Mesh) -> tuple[int, ...]:
        if place not in self._tables:
            self._tables[place] = self.traffic.tables_inside(place, self.costs.joins_replicas)
        return self._tables[place]

    def _pass(self, place: Mesh, samples: int, kind: int) -> Floats:
        """Returns float64 [B, ROW], a pass of so many samples on a device of that kind."""
        cut, tables = place.cut(samples), self._tensor_tables(place)
        row = np.zeros(self.rows.shape[1:])
        one, held = self.costs.passes(kind, cut), self.costs.held(*place.state)
        forward, backward = self.traffic.moved_s(tables, one.collective_bytes, one.collective_calls, one.hidden_s)
        for column, values in (
            (c.WEIGHTS, held.weight_bytes), (c.GRADIENTS, held.gradient_bytes), (c.OPTIMIZER, held.optimizer_bytes),
            (c.FORWARD, one.forward_s), (c.FORWARD_TENSOR, forward), (c.BACKWARD_TENSOR, backward),
            (c.BACKWARD_TENSOR_FULL, backward + forward), (c.WEIGHT, one.weight_s), (c.SENT, one.sent_bytes),
            (c.RETURNED, one.returned_bytes), (c.UPDATE, self.costs.update_s(kind, *place.state)),
            (c.EXPERT_WEIGHTS, held.expert_bytes), (c.BACKWARD, one.backward_s + one.again_s), (c.AGAIN, one.again_s),
            (c.KEPT, one.kept_bytes), (c.HALVED, one.halved_bytes), (c.WORKING_FORWARD, one.working_bytes[0]),
            (c.WORKING_BACKWARD, one.working_bytes[1]), (c.WORKING_END, one.working_bytes[2]),
            (c.WORKING_GROWING, one.working_bytes[3]), (c.TURNS, held.turns),
        ):  # fmt: skip
            several = np.atleast_2d(values)
            row[:, column : column + len(several)] = several.T
        return row


@dataclass(frozen=True, eq=False)
class Frame:
    """Drafts that differ in cuts, recomputation and offload alone.

    Attributes:
        arrays: Arrays of the kernels.
        devices: For each sort of lanes and place its devices, int64 [.].
        result: Where the executor writes; overwritten by the next evaluation of the frame.
        known_ties: Ties by the places of all tied blocks.
    """

    arrays: FrameArrays
    devices: tuple[Ints, ...]
    result: StepResult
    known_ties: dict[tuple[tuple[int, ...], ...], PackedTies] = field(default_factory=dict)


class Packer:
    """Packed drafts of one model on one cluster.

    Attributes:
        costed: Rows of costs, which frames refer to.
    """

    def __init__(self, costs: BlockCosts, cluster: Cluster, traffic: ClusterTraffic) -> None:
        self.costs, self.cluster, self.traffic = costs, cluster, traffic
        self._room = room_bytes(cluster)
        self._forget()

    def _forget(self) -> None:
        self.costed = Rows(self.costs, self.cluster, self.traffic)
        self._frames: dict[object, Frame] = {}
        self._actions: dict[object, tuple[NDArray[np.int32], Ints]] = {}
        self._action_bytes = 0
        self._ways: dict[object, tuple[Floats, Ints, Ints]] = {}
        self._placed: dict[object, Floats] = {}

    def frame(self, draft: Draft) -> Frame:
        """Returns the frame of a draft.

        Raises:
            InputError: The draft contradicts itself, its schedule cannot run it, or a pass cannot be cut as it says.
        """
        key = draft.places, draft.place_of_stage, draft.schedule, draft.microbatch, draft.microbatches
        frame = self._frames.get(key)
        if frame is None:
            check_draft(draft, self.cluster, len(self.costs.names))
            if self.costed.rows.nbytes + self._action_bytes > KEPT_BYTES or len(self._frames) >= KEPT_FRAMES:
                self._forget()
            frame = self._frames[key] = self._make(draft)
        return frame

    def ties(self, frame: Frame, draft: Draft) -> PackedTies:
        """Returns the ties of a draft."""
        if not self.costs.ties:
            return NO_TIES
        bounds, at = draft.bounds, draft.place_of_stage
        held = tuple([tuple([at[bisect_right(bounds, block) - 1] for block in tie.blocks]) for tie in self.costs.ties])
        if held not in frame.known_ties:
            frame.known_ties[held] = self._tie(draft, held)
        return frame.known_ties[held]

    @staticmethod
    def choices(draft: Draft) -> BlockChoices:
        """Returns the choices of a draft, unchecked."""
        chosen = np.frombuffer(draft.recompute, dtype=np.uint8), np.frombuffer(draft.offload, dtype=np.uint8)
        return BlockChoices(np.array(draft.bounds, dtype=np.int64), *chosen)

    def lane_place(self, draft: Draft, lane: Lane, place: int) -> LanePlace:
        """Returns a place of a draft in one lane."""
        passes = self.costed.passes(lane.replicas[place])
        return self._place(draft.places[place], passes, draft.stages, lane.microbatches)

    def _place(self, mesh: Mesh, passes: Passes, stages: int, microbatches: int) -> LanePlace:
        costed = self.costed
        row = costed.rows[costed.number(mesh, passes)]
        return LanePlace(row, np.array(costed.place(mesh)), self.traffic.tables, stages, microbatches)

    def all_blocks(
        self, mesh: Mesh, samples: int, stages: int, microbatches: int, choices: Sequence[tuple[int, int]]
    ) -> PlacedBlock[Floats]:
        """Returns every block as it would be on a place, with each choice of recomputation and offload, float64 [C, B] each.

        Args:
            mesh: The place.
            samples: Of a pass of a replica.
            stages: Of the pipeline; those beyond two make no difference, and so it is with micro-batches.
            microbatches: Passes a step.
            choices: Indices into `rlplace.strategy.costs.RECOMPUTE` and `rlplace.strategy.drafts.OFFLOAD`.

        Raises:
            InputError: A pass cannot be cut like that.
        """
        from rlplace.strategy.executor.kernel import place_blocks

        passes, count = self.costed.passes([(samples, mesh.devices)]), len(self.costs.names)
        number, looks = self.costed.number(mesh, passes), (min(stages, 2), min(microbatches, 2))
        found = []
        for choice in choices:
            key = number, *self.costed.place(mesh), *looks, choice
            if key not in self._placed:
                chosen = BlockChoices(
                    np.zeros(0, dtype=np.int64), *(np.frombuffer(bytes([one]) * count, dtype=np.uint8) for one in choice)
                )
                self._placed[key] = place_blocks(self._place(mesh, passes, *looks), chosen, NO_TIES)
            found.append(self._placed[key])
        return PlacedBlock(*np.moveaxis(np.array(found), -1, 0))

    def _make(self, draft: Draft) -> Frame:
        costed, places = self.costed, draft.places
        alike = alike_lanes(draft, costed.kind)
        counts = tuple([one.microbatches for one in alike])
        actions, action_ptr = self._actions_of(draft, counts)
        devices = tuple([own for one in alike for own in one.devices])
        rooms = [np.unique(self._room[own], return_counts=True) for own in devices]
        arrays = FrameArrays(
            np.array(draft.place_of_stage, dtype=np.int64), np.array(list(map(costed.place, places))),
            np.array(counts, dtype=np.int64),
            np.array([list(map(costed.number, places, one.passes)) for one in alike], dtype=np.int64),
            actions, action_ptr, *self._ways_of(draft), np.concatenate([sizes for sizes, _ in rooms]),
            np.concatenate([count for _, count in rooms]).astype(np.int64), _starts([sizes for sizes, _ in rooms]),
        )  # fmt: skip
        return Frame(arrays, devices, StepResult.of(len(alike), len(places), draft.stages))

    def _ways_of(self, draft: Draft) -> tuple[Floats, Ints, Ints]:
        """Returns the stage transfers of a draft: `ways`, `way_ptr` and `way_channels` of its frame."""
        key = tuple([(place.devices, place.data_degree) for place in draft.places]), draft.place_of_stage
        if key not in self._ways:
            known = self.traffic.ways(borders(draft))
            ways = np.zeros((2, draft.stages, c.WAY))
            channels: list[tuple[int, ...]] = [()] * (2 * draft.stages)
            for stage, here in enumerate(draft.place_of_stage):
                for way, target in enumerate((stage + 1, stage - 1)):
                    if 0 <= target < draft.stages and draft.place_of_stage[target] != here:
                        *ways[way, stage], channels[way * draft.stages + stage] = known[here, draft.place_of_stage[target]]
            flat = np.array([channel for held in channels for channel in held], dtype=np.int64)
            self._ways[key] = ways, _starts(channels), flat
        return self._ways[key]

    def _actions_of(self, draft: Draft, counts: tuple[int, ...]) -> tuple[NDArray[np.int32], Ints]:
        """Returns the actions of all places for each number of micro-batches, and the first of each."""
        key = draft.place_of_stage, draft.schedule, counts
        if key not in self._actions:
            rows = [row for count in counts for row in stage_rows(draft, count)]
            flat = np.ascontiguousarray(np.concatenate(rows))
            self._actions[key] = flat, _starts(rows)
            self._action_bytes += flat.nbytes
        return self._actions[key]

    def _tie(self, draft: Draft, held: Sequence[Sequence[int]]) -> PackedTies:
        exchanges = list(tie_exchanges(draft, self.costs, self.traffic))
        again: list[tuple[int, tuple[float, ...]]] = []
        for tie, placed in zip(self.costs.ties, held, strict=True):
            for number in dict.fromkeys(placed):
                part = tie_part(self.costs, tie.blocks, draft.places[number])
                copies = [block for block, place in zip(tie.blocks, placed, strict=True) if place == number][1:]
                sizes = (tie.weight_bytes * part, tie.gradient_bytes * part, tie.optimizer_bytes * part)
                again += [(block, sizes) for block in copies]
        return PackedTies(
            np.array([seconds for seconds, _ in exchanges], dtype=np.float64),
            _starts([involved for _, involved in exchanges]),
            np.array([place for _, involved in exchanges for place in involved], dtype=np.int64),
            np.array([block for block, _ in again], dtype=np.int64),
            np.array([sizes for _, sizes in again], dtype=np.float64).reshape(-1, 3),
        )


def _starts(parts: Sequence[Sized]) -> Ints:
    """Returns int64 [N + 1], offsets of parts one after another, and the end of the last one."""
    return np.array([0, *accumulate(map(len, parts))], dtype=np.int64)


def placed_blocks(draft: Draft, lane: Lane, packer: Packer) -> list[list[PlacedBlock[float]]]:
    """Returns for each place of a lane all blocks of the model on it, for one pass of the slowest replica."""
    from rlplace.strategy.executor.kernel import place_blocks

    ties, chosen = packer.ties(packer.frame(draft), draft), packer.choices(draft)
    at = [packer.lane_place(draft, lane, place) for place in range(len(draft.places))]
    return [[PlacedBlock(*row) for row in place_blocks(one, chosen, ties).tolist()] for one in at]


def received_bytes(draft: Draft, lane: Lane, rows: Sequence[PlacedBlock[float]], place: int) -> float:
    """Returns torch's receive buffers on a device of a place, one for every micro-batch; `rows` are its blocks."""
    received = 0.0
    for stage, inside in enumerate(draft.ranges):
        if draft.place_of_stage[stage] == place:
            sent = rows[inside.start - 1].sent_bytes if stage > 0 else 0.0
            returned = rows[inside.stop - 1].returned_bytes if stage < draft.stages - 1 else 0.0
            received += lane.microbatches * (sent + returned)
    return received
