"""Packs drafts into arrays, and keeps what they have in common: search changes little from one draft to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.strategy import columns as c
from rlplace.strategy.costs import COLLECTIVE_KINDS, CONTEXT_GATHER, EXPERT_ALL_TO_ALL, FULL, BlockCosts, Floats
from rlplace.strategy.drafts import Draft, Place
from rlplace.strategy.meshes import (
    borders,
    check_draft,
    copy_degree,
    copy_groups,
    expert_share_degree,
    expert_share_groups,
    lanes,
    places_of,
    share_degree,
    share_groups,
    stage_actions,
    tensor_groups,
    tie_groups,
)
from rlplace.strategy.reference_blocks import tie_part
from rlplace.strategy.traffic import Traffic, table_s, tables_s

KEPT_BYTES, KEPT_FRAMES = 256 << 20, 5_000
"""Above one of these, what is kept is forgotten: rows and actions, and frames."""


@dataclass(frozen=True, eq=False)
class Ties:
    """Tied weights of drafts that hold them on the same places.

    Attributes:
        seconds: float64 [T], to sum the gradients of each tie that is on several places.
        ptr: int64 [T + 1] into `places`.
        places: int64, the places of each.
        block: int64 [A], blocks whose copy another block of their place counts.
        again_bytes: float64 [A, 3], of weights, gradients and optimizer state.
    """

    seconds: Floats
    ptr: NDArray[np.int64]
    places: NDArray[np.int64]
    block: NDArray[np.int64]
    again_bytes: Floats


@dataclass(frozen=True, eq=False)
class Frame:
    """Drafts that differ in cuts, recomputation and offload alone.

    Attributes:
        stage_place: int64 [S].
        places: float64 [P, PLACE].
        microbatches: int64 [L], of lanes that differ.
        row: int64 [L, P], number of the row of costs.
        actions: int32 [., 3].
        action_ptr: int64 [L * P + 1].
        ways: float64 [2, S, WAY], from every stage to the next one and to the one before it.
        way_ptr: int64 [2 S + 1] into `way_channels`.
        way_channels: int64, what a hand-over holds.
        room_bytes: float64 [R], capacity without what is reserved.
        room_count: int64 [R], devices that have that.
        room_ptr: int64 [L * P + 1] into both.
        devices: For each lane and place its devices.
        known_ties: `Ties` by the places of all tied blocks.
    """

    stage_place: NDArray[np.int64]
    places: Floats
    microbatches: NDArray[np.int64]
    row: NDArray[np.int64]
    actions: NDArray[np.int32]
    action_ptr: NDArray[np.int64]
    ways: Floats
    way_ptr: NDArray[np.int64]
    way_channels: NDArray[np.int64]
    room_bytes: Floats
    room_count: NDArray[np.int64]
    room_ptr: NDArray[np.int64]
    devices: tuple[tuple[int, ...], ...]
    known_ties: dict[tuple[tuple[int, ...], ...], Ties] = field(default_factory=dict)


class Packer:
    """Makes frames and rows of costs.

    Attributes:
        rows: float64 [rows, B, ROW]; grows.
    """

    def __init__(self, costs: BlockCosts, cluster: Cluster, traffic: Traffic) -> None:
        self.costs, self.cluster, self.traffic = costs, cluster, traffic
        number = {name: kind for kind, name in enumerate(costs.kinds)}
        self._kind = [number[str(device.kind)] for device in cluster.devices]
        self._room = [
            np.inf if device.memory_bytes is None else float(device.memory_bytes - device.reserved_bytes)
            for device in cluster.devices
        ]
        self._one_room = self._room[0] if len(set(self._room)) == 1 else None
        self._forget()

    def _forget(self) -> None:
        self.rows = np.zeros((8, len(self.costs.names), c.ROW))
        self._row_of: dict[object, int] = {}
        self._frames: dict[object, Frame] = {}
        self._actions: dict[object, tuple[NDArray[np.int32], NDArray[np.int64]]] = {}
        self._action_bytes = 0
        self._ways: dict[object, tuple[Floats, NDArray[np.int64], NDArray[np.int64]]] = {}
        self._seat_of: dict[Place, int] = {}
        self._seats: dict[object, int] = {}
        self._place: dict[int, list[float]] = {}
        self._tables: dict[int, tuple[int, ...]] = {}

    def frame(self, draft: Draft) -> Frame:
        """The frame of a draft.

        Raises:
            InputError: The draft contradicts itself, its schedule cannot run it, or a pass cannot be cut as it says.
        """
        key = draft.places, draft.place_of_stage, draft.schedule, draft.microbatch, draft.microbatches
        frame = self._frames.get(key)
        if frame is None:
            check_draft(draft, self.cluster, len(self.costs.names))
            if self.rows.nbytes + self._action_bytes > KEPT_BYTES or len(self._frames) >= KEPT_FRAMES:
                self._forget()
            frame = self._frames[key] = self._make(draft)
        return frame

    def ties(self, frame: Frame, draft: Draft) -> Ties:
        """The ties of a draft."""
        held = tuple([tuple([places_of(draft, (block,))[0] for block in tie.blocks]) for tie in self.costs.ties])
        if held not in frame.known_ties:
            frame.known_ties[held] = self._tie(draft, held)
        return frame.known_ties[held]

    def _make(self, draft: Draft) -> Frame:
        differ: dict[tuple[int, tuple[int, ...]], list[list[int]]] = {}
        for lane in lanes(draft):
            rows = tuple(self._row(place, replicas) for place, replicas in zip(draft.places, lane.replicas, strict=True))
            inside = differ.setdefault((lane.microbatches, rows), [[] for _ in draft.places])
            for place, replicas in enumerate(lane.replicas):
                inside[place] += [device for _, own in replicas for device in own]
        counts = tuple(key[0] for key in differ)
        actions, action_ptr = self._actions_of(draft, counts)
        devices: list[tuple[int, ...]] = [tuple(own) for lane in differ.values() for own in lane]
        rooms = [self._rooms(own) for own in devices]
        ways, way_ptr, way_channels = self._ways_of(draft)
        return Frame(
            stage_place=np.array(draft.place_of_stage, dtype=np.int64),
            places=np.array([self._place_row(place) for place in draft.places]),
            microbatches=np.array(counts, dtype=np.int64),
            row=np.array([key[1] for key in differ], dtype=np.int64),
            actions=actions,
            action_ptr=action_ptr,
            ways=ways,
            way_ptr=way_ptr,
            way_channels=way_channels,
            room_bytes=np.array([size for room in rooms for size in room]),
            room_count=np.array([count for room in rooms for count in room.values()], dtype=np.int64),
            room_ptr=_starts(rooms),
            devices=tuple(devices),
        )

    def _ways_of(self, draft: Draft) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
        """How stages hand over, as in `Frame`: `ways`, `way_ptr` and `way_channels`; chains that lie alike do it alike."""
        alike = self.traffic.alike(tuple([place.devices for place in draft.places]))
        key = alike, tuple([place.data_degree for place in draft.places]), draft.place_of_stage
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

    def _rooms(self, devices: tuple[int, ...]) -> Mapping[float, int]:
        """How many of the devices have how much room."""
        if self._one_room is not None:
            return {self._one_room: len(devices)}
        return Counter([self._room[device] for device in devices])

    def _actions_of(self, draft: Draft, counts: tuple[int, ...]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Actions of all places with each of these numbers of micro-batches, and where each of them begins."""
        key = draft.place_of_stage, draft.schedule, counts
        if key not in self._actions:
            kind = {letter: number for number, letter in enumerate(c.KINDS)}
            rows = [row for count in counts for row in stage_actions(draft, count)]
            flat = [(stage, kind[letter], n) for row in rows for stage, letter, n in row]
            self._actions[key] = np.array(flat, dtype=np.int32), _starts(rows)
            self._action_bytes += self._actions[key][0].nbytes
        return self._actions[key]

    def _seat(self, place: Place) -> int:
        """A number that places alike in axes, devices and links have in common."""
        if place not in self._seat_of:
            axes = (place.replicate, place.shard, place.context, place.tensor, place.expert, place.sharding)
            alike = axes, self.traffic.alike((place.devices,))
            self._seat_of[place] = self._seats.setdefault(alike, len(self._seats))
        return self._seat_of[place]

    def _place_row(self, place: Place) -> list[float]:
        seat = self._seat(place)
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
            row[c.ITEM] = self.costs.held(place.tensor, place.expert).gradient_item
            self._place[seat] = row
        return self._place[seat]

    def _row(self, place: Place, replicas: Sequence[tuple[int, tuple[int, ...]]]) -> int:
        """Number of the row of a place's replicas in a lane."""
        passes = {(samples, kind) for samples, devices in replicas for kind in {self._kind[device] for device in devices}}
        grouped = place.tensor * place.context * place.expert > 1
        key = (
            frozenset(passes), place.tensor, place.sequence_parallel, place.context, place.expert,
            self._tensor_tables(place) if grouped else None,
        )  # fmt: skip
        number = self._row_of.get(key)
        if number is None:
            number = self._row_of[key] = len(self._row_of)
            if number == len(self.rows):
                self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
            self._fill(self.rows[number], place, passes)
        return number

    def _tensor_tables(self, place: Place) -> tuple[int, ...]:
        """Number of the table of each kind of collective inside blocks."""
        seat = self._seat(place)
        if seat not in self._tables:
            tables: list[int] = []
            for kinds in (range(CONTEXT_GATHER), range(CONTEXT_GATHER, EXPERT_ALL_TO_ALL), (EXPERT_ALL_TO_ALL,)):
                names = [COLLECTIVE_KINDS[kind] for kind in kinds]
                tables += self.traffic.collectives(names, tensor_groups(place, kinds[0]))
            self._tables[seat] = tuple(tables)
        return self._tables[seat]

    def _fill(self, row: Floats, place: Place, passes: set[tuple[int, int]]) -> None:
        """Every column: the most that any of the passes (samples, device kind) takes."""

        def most(column: int, values: NDArray) -> None:
            np.maximum(row[:, column], values, out=row[:, column])

        held = self.costs.held(place.tensor, place.expert)
        row[:, c.WEIGHTS], row[:, c.GRADIENTS], row[:, c.OPTIMIZER] = (
            held.weight_bytes, held.gradient_bytes, held.optimizer_bytes,
        )  # fmt: skip
        row[:, c.EXPERT_WEIGHTS : c.EXPERT_OPTIMIZER + 1] = held.expert_bytes.T
        for samples, kind in passes:
            one = self.costs.passes(kind, place.cut(samples))
            forward, backward = (self._moved(place, one.collective_bytes[way], one.collective_calls[way]) for way in range(2))
            most(c.FORWARD, one.forward_s)
            most(c.FORWARD_TENSOR, forward)
            most(c.BACKWARD_TENSOR, backward)
            most(c.BACKWARD_TENSOR_FULL, backward + forward)
            most(c.WEIGHT, one.weight_s)
            most(c.SENT, one.sent_bytes)
            most(c.RETURNED, one.returned_bytes)
            most(c.UPDATE, self.costs.update_s(kind, place.tensor, place.expert))
            for how in range(FULL + 1):
                most(c.BACKWARD + how, one.backward_s + one.again_s[how])
                most(c.AGAIN + how, one.again_s[how])
                most(c.KEPT + how, one.kept_bytes[how])
                most(c.WORKING_FORWARD + how, one.working_bytes[0, how])
                most(c.WORKING_BACKWARD + how, one.working_bytes[1, how])

    def _moved(self, place: Place, sizes: Floats, calls: Floats) -> Floats:
        """Seconds of the collectives inside blocks [B] in one pass; sizes and calls [K, B]."""
        total = np.zeros(sizes.shape[1])
        for kind in range(len(COLLECTIVE_KINDS)):
            here = (sizes[kind] > 0.0) & (calls[kind] > 0.0)
            if here.any():
                number = self._tensor_tables(place)[kind]
                table = self.traffic.tables[number]
                total[here] += calls[kind, here] * tables_s(table, sizes[kind, here] / calls[kind, here])
        return total

    def _tie(self, draft: Draft, held: Sequence[Sequence[int]]) -> Ties:
        seconds: list[float] = []
        involved: list[tuple[int, ...]] = []
        again: list[tuple[int, tuple[float, ...]]] = []
        for tie, placed in zip(self.costs.ties, held, strict=True):
            numbers = tuple(dict.fromkeys(placed))
            places = [draft.places[number] for number in numbers]
            parts = [tie_part(self.costs, tie.blocks, place) for place in places]
            if len(places) > 1:
                item = self.costs.held(places[0].tensor, places[0].expert).gradient_item
                part = max(part / share_degree(place) for part, place in zip(parts, places, strict=True))
                table = self.traffic.table("all_reduce", tie_groups(places))
                seconds.append(table_s(table, tie.gradient_bytes * item * part))
                involved.append(numbers)
            for number, part in zip(numbers, parts, strict=True):
                copies = [block for block, place in zip(tie.blocks, placed, strict=True) if place == number][1:]
                sizes = (tie.weight_bytes * part, tie.gradient_bytes * part, tie.optimizer_bytes * part)
                again += [(block, sizes) for block in copies]
        return Ties(
            np.array(seconds, dtype=np.float64),
            _starts(involved),
            np.array([place for row in involved for place in row], dtype=np.int64),
            np.array([block for block, _ in again], dtype=np.int64),
            np.array([sizes for _, sizes in again], dtype=np.float64).reshape(-1, 3),
        )


def _starts(parts: Sequence[Sized]) -> NDArray[np.int64]:
    """Where each part begins when they stand one after another, and where the last one ends."""
    return np.array([0, *accumulate(map(len, parts))], dtype=np.int64)


NO_TIES = Ties(
    np.zeros(0), np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros((0, 3))
)
"""Of models without tied weights."""
