"""The events of a step as boxes in rows: of devices, of collectives by place and lane, and of what stages hand on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD, UPDATE
from rlplace.reporting.lanes import COLLECTIVE, DEVICE, LINK, LaneRow, among, pack
from rlplace.strategy import events as happened
from rlplace.strategy.drafts import Draft
from rlplace.strategy.events import Event, Events

OPS = {FORWARD: "forward", BACKWARD: "backward", BACKWARD_WEIGHT: "gradients of weights", UPDATE: "update"}
"""What every block does; ops are numbered block by block."""

_PHASES = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": BACKWARD_WEIGHT, happened.UPDATE: UPDATE}
_COMPUTE, _BESIDE = range(2)


class Box(NamedTuple):
    """Something in a row.

    Attributes:
        row: Number of the row.
        start_s, end_s: When.
        op: Block times the number of `OPS`, plus the phase.
        microbatch: -1 for what exists once a step.
        size_bytes: Of what is sent; -1 otherwise.
    """

    row: int
    start_s: float
    end_s: float
    op: int
    microbatch: int
    size_bytes: int = -1


def rows_and_boxes(draft: Draft, told: Events, names: Sequence[str]) -> tuple[list[LaneRow], list[Box]]:
    """All rows, devices first, and their boxes by row and start.

    Args:
        draft: What was run.
        told: What happened.
        names: Of the cluster's devices.
    """
    rows = [LaneRow(name, DEVICE, number, 0.0) for number, name in enumerate(names)]
    boxes: list[Box] = []
    for number, lane in enumerate(told.lanes):
        for place, replicas in enumerate(lane.replicas):
            devices = [device for _, own in replicas for device in own]
            mine = [event for event in told.events if event.place == place and event.lane in (number, -1)]
            pieces = [piece for event in mine for piece in _pieces(draft, event) if piece.end_s > piece.start_s]
            boxes += [box._replace(row=device) for device in devices for box in pieces if box.row == _COMPUTE]
            beside = [box._replace(row=len(rows)) for box in pieces if box.row == _BESIDE]
            if beside:
                rows.append(LaneRow(f"collective {among([names[device] for device in devices])}", COLLECTIVE, devices[0], 0.0))
                boxes += beside
    ways: dict[tuple[int, int, int], list[Event]] = {}
    for event in told.events:
        if event.kind == happened.SEND:
            ways.setdefault((event.lane, event.place, event.target), []).append(event)
    for (number, place, target), sent in ways.items():
        source, destination = (told.lanes[number].replicas[at][0][1][0] for at in (place, target))
        extra = pack(np.array([event.start_s for event in sent]), np.array([event.end_s for event in sent])).tolist()
        for event, more in zip(sent, extra, strict=True):
            size = int(event.size_bytes)
            boxes.append(Box(len(rows) + more, event.start_s, event.end_s, _sender(draft, event), event.microbatch, size))
        name = f"{names[source]} → {names[destination]}"
        rows += [LaneRow(f"{name}, {more + 1}" if more else name, LINK, source, 0.0) for more in range(max(extra) + 1)]
    busy = np.zeros(len(rows))
    np.add.at(busy, [box.row for box in boxes], [box.end_s - box.start_s for box in boxes])
    return [dataclasses.replace(row, busy_s=time) for row, time in zip(rows, busy.tolist(), strict=True)], sorted(boxes)


def _sender(draft: Draft, event: Event) -> int:
    """The op whose result is sent: the forward of a stage's last block, or the backward of its first."""
    following = event.stage + 1
    forward = following < draft.stages and draft.place_of_stage[following] == event.target
    return len(OPS) * (draft.bounds[following] - 1) if forward else len(OPS) * draft.bounds[event.stage] + BACKWARD


def _pieces(draft: Draft, event: Event) -> Iterator[Box]:
    """The boxes of an event: what blocks compute, and beside it their collectives and the waiting for others.

    What a stage waits for inside a forward is drawn before it, inside a backward after it.
    """
    if event.kind == happened.SEND:
        return
    of_place = draft.blocks_of(event.place)
    if event.kind in (happened.EXCHANGE, happened.TIES):
        yield Box(_BESIDE, event.start_s, event.end_s, len(OPS) * of_place[0] + BACKWARD, -1)
        return
    phase = _PHASES[event.kind]
    blocks = of_place if phase == UPDATE else draft.ranges[event.stage]
    parts = list(zip(blocks, event.pieces, strict=True))
    now = event.start_s
    if phase == FORWARD:
        now = max(now, event.end_s - sum(map(sum, event.pieces)))
        yield Box(_BESIDE, event.start_s, now, len(OPS) * blocks[0] + phase, event.microbatch)
    for block, (compute, tensor) in parts if phase in (FORWARD, UPDATE) else reversed(parts):
        op = len(OPS) * block + phase
        yield Box(_COMPUTE, now, now + compute, op, event.microbatch)
        yield Box(_BESIDE, now + compute, now + compute + tensor, op, event.microbatch)
        now += compute + tensor
    if phase in (BACKWARD, BACKWARD_WEIGHT):
        yield Box(_BESIDE, now, event.end_s, len(OPS) * blocks[0] + phase, event.microbatch)
