"""The rows and boxes of a whole strategy's step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.explanation.report.lanes import COLLECTIVE, DEVICE, LINK, LaneRow, among, packed_rows
from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD, UPDATE
from rlplace.simulator import Timeline
from rlplace.strategy.drafts import Draft
from rlplace.strategy.op_level.expand import ExpandedDraft
from rlplace.strategy.op_level.step_build import GATHER, SEND, TIE, UPDATE_RUN, DeviceRun

OPS = {FORWARD: "forward", BACKWARD: "backward", BACKWARD_WEIGHT: "gradients of weights", UPDATE: "update"}
"""What every block does; ops are numbered block by block."""

_PHASES = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": BACKWARD_WEIGHT, UPDATE_RUN: UPDATE}


class Box(NamedTuple):
    """A span of time in a row.

    Attributes:
        row: Number of the row.
        start_s, end_s: Seconds from the beginning of the step.
        op: Block times the number of `OPS`, plus the phase.
        microbatch: Its number; -1 for what runs once a step.
        size_bytes: Bytes sent; -1 where nothing is.
    """

    row: int
    start_s: float
    end_s: float
    op: int
    microbatch: int
    size_bytes: int = -1


class Picture:
    """Rows, devices first, and boxes; `add` draws one pipeline after the other.

    Attributes:
        rows: Rows so far.
        boxes: Their boxes.

    Args:
        names: Names of the cluster's devices.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.rows = [LaneRow(name, DEVICE, number) for number, name in enumerate(names)]
        self.boxes: list[Box] = []

    def add(self, draft: Draft, expanded: ExpandedDraft, line: Timeline, update_after_s: float = 0.0) -> None:
        """Draws a pipeline.

        Args:
            draft: The strategy that was run.
            expanded: The ops of the strategy.
            line: Their start and end times.
            update_after_s: Seconds by which updates run later than in `line`, because they wait for other pipelines.
        """
        start, end = line.start_s, line.end_s
        inside: dict[int, list[Box]] = {}
        for run in expanded.runs:
            if run.part is None:
                own = draft.blocks_of(run.device % len(draft.places))
                span = slice(run.first, run.first + len(own))
                times = zip((start[span] + update_after_s).tolist(), (end[span] + update_after_s).tolist(), own, strict=True)
                spans = [(begin, stop, block, False) for begin, stop, block in times]
            else:
                spans = list(_spans(run, start, end))
            for begin, stop, block, moves in spans:
                box = Box(-1, begin, stop, len(OPS) * int(block) + _PHASES[run.kind], run.microbatch)
                if moves:
                    inside.setdefault(run.device, []).append(box)
                elif stop > begin:
                    self.boxes += [box._replace(row=device) for device in expanded.stands_for[run.device]]
        for device, boxes in inside.items():
            self._collectives(expanded.stands_for[device], boxes)
        self._exchanged(draft, expanded, start, end)

    def _exchanged(self, draft: Draft, expanded: ExpandedDraft, start: NDArray[np.float64], end: NDArray[np.float64]) -> None:
        """Communication: a row for the collectives of each channel, and for each direction between stages."""
        shared: dict[tuple[int, ...], tuple[list[int], list[Box]]] = {}
        ways: dict[tuple[int, int], list[Box]] = {}
        for key, collective in zip(expanded.exchanges, expanded.problem.collectives, strict=True):
            first = collective.ops[0]
            begin, stop = float(start[first]), float(end[first])
            if key[0] == SEND:
                _, lane, source, target, microbatch, size = key
                block, phase = (draft.bounds[target] - 1, FORWARD) if target > source else (draft.bounds[source], BACKWARD)
                places = (lane * len(draft.places) + draft.place_of_stage[stage] for stage in (source, target))
                here, there = (expanded.stands_for[place][0] for place in places)
                box = Box(-1, begin, stop, len(OPS) * block + phase, microbatch, size)
                ways.setdefault((here, there), []).append(box)
            elif stop > begin:
                place = 0 if key[0] == TIE else key[1]
                of_block = isinstance(key[2], int) and len(key) == 4 if key[0] != TIE else False
                block = key[2] if of_block else draft.blocks_of(place)[0]
                phase = FORWARD if key[0] == GATHER and key[3].startswith("F") else BACKWARD
                devices, boxes = shared.setdefault(collective.channels, ([], []))
                members = [d for op in collective.ops for d in expanded.stands_for[expanded.problem.op_group[op]]]
                devices[:] = sorted({*devices, *members})
                boxes.append(Box(-1, begin, stop, len(OPS) * block + phase, -1))
        for devices, boxes in shared.values():
            self._collectives(devices, boxes)
        for (here, there), boxes in ways.items():
            self._packed(LaneRow(f"{self._names[here]} → {self._names[there]}", LINK, here, there), boxes)

    def sum_gradients(self, devices: Sequence[int], start_s: float, end_s: float) -> None:
        """Draws the sums of gradients that parallel pipelines wait for together."""
        self._collectives(devices, [Box(-1, start_s, end_s, BACKWARD, -1)])

    def _collectives(self, devices: Sequence[int], boxes: list[Box]) -> None:
        name = f"collective {among([self._names[device] for device in devices])}"
        self._packed(LaneRow(name, COLLECTIVE, devices[0]), [box for box in boxes if box.end_s > box.start_s])

    def _packed(self, row: LaneRow, boxes: list[Box]) -> None:
        """The fewest rows like one that hold the boxes without overlap."""
        if boxes:
            start, end = np.array([box.start_s for box in boxes]), np.array([box.end_s for box in boxes])
            rows = packed_rows(self.rows, row, start, end).tolist()
            self.boxes += [box._replace(row=row) for box, row in zip(boxes, rows, strict=True)]


def _spans(run: DeviceRun, start: NDArray[np.float64], end: NDArray[np.float64]) -> Iterator[tuple[float, float, int, bool]]:
    """Start, end and block of what a block computes without a pause, and of its collectives, which are marked."""
    part = run.part
    assert part is not None
    rows = np.flatnonzero((part.op >= 0) | (part.collective >= 0))
    moves, block = part.collective[rows] >= 0, part.block[rows]
    begins = np.ones(len(rows), dtype=bool)
    begins[1:] = (block[1:] != block[:-1]) | moves[1:] | moves[:-1]
    first = np.flatnonzero(begins)
    last = np.append(first, len(rows))[1:] - 1
    at = rows + run.first
    return zip(start[at[first]].tolist(), end[at[last]].tolist(), block[first].tolist(), moves[first].tolist(), strict=True)
