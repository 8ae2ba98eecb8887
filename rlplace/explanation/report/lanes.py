"""Layout of a timeline: rows of devices and links, and boxes for everything that runs in them.

The report and `render_mode` of the environments all draw these boxes.
"""

from __future__ import annotations

import dataclasses
import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.problem import Problem
from rlplace.simulator import Timeline

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B3A125", "#8C8C8C")
"""Colours of categories, in this order; further categories repeat them."""

PHASE_COLORS = ("#0072B2", "#E69F00", "#D55E00", "#009E73")
"""Colours of `rlplace.problem.PHASES`."""

COLLECTIVE_COLOR, TRANSFER_COLOR = "#CC79A7", "#8C8C8C"


def rgb(colors: tuple[str, ...]) -> NDArray[np.uint8]:
    """Returns uint8 [number of colours, 3] of ``#RRGGBB``."""
    return np.array([[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in colors], dtype=np.uint8)


DEVICE, LINK, COLLECTIVE = "device", "link", "collective"


@dataclass(frozen=True)
class LaneRow:
    """One row of a picture.

    Attributes:
        name: Name of the device, or of both ends of the link.
        kind: `DEVICE`, `LINK` or `COLLECTIVE`.
        device: Number of the device, of the sender, or of the first participant.
        to: Number of the device that receives; -1 but for links.
    """

    name: str
    kind: str
    device: int
    to: int = -1


@dataclass(frozen=True, eq=False)
class Lanes:
    """Rows, and B boxes sorted by row and start. Boxes of one row do not overlap.

    Attributes:
        rows: Devices first, by number, then links and collectives.
        step_s: Length of the step, 0 when it does not complete.
        row: int32 [B], row of each box.
        start_s, end_s: float64 [B], seconds from the beginning of the step.
        op: int32 [B], op of each box; for a transfer the op that made the tensor, -1 where a group owns it.
        group: int32 [B], group of each box.
        microbatch: int32 [B], micro-batch of each box, -1 for what runs once a step.
        size_bytes: int64 [B], bytes of a transfer; -1 for tasks.
    """

    rows: tuple[LaneRow, ...]
    step_s: float
    row: NDArray[np.int32]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    op: NDArray[np.int32]
    group: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    size_bytes: NDArray[np.int64]

    @property
    def busy_s(self) -> NDArray[np.float64]:
        """float64 [rows], seconds in which something runs there."""
        busy: NDArray[np.float64] = np.zeros(len(self.rows))
        np.add.at(busy, self.row, self.end_s - self.start_s)
        return busy


def lanes_of(problem: Problem, timeline: Timeline) -> Lanes:
    """Returns rows and boxes of a timeline; only the rows of devices when the step does not complete.

    Args:
        problem: The simulated problem.
        timeline: Timeline of that problem.
    """
    rows = [LaneRow(device.name, DEVICE, number) for number, device in enumerate(problem.devices)]
    if timeline.step_time_s is None:
        none = np.zeros(0, dtype=np.int32)
        return Lanes(tuple(rows), 0.0, none, np.zeros(0), np.zeros(0), none, none, none, np.zeros(0, dtype=np.int64))
    single = np.ones(problem.num_ops, dtype=bool)
    single[[op for collective in problem.collectives for op in collective.ops]] = False
    ops = np.flatnonzero(single)
    parts = [_op_boxes(problem, timeline, ops, timeline.device_of_op[ops])]
    parts += _link_boxes(problem, timeline, rows)
    parts += _collective_boxes(problem, timeline, rows)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    sort = np.lexsort((columns[2], columns[1], columns[0]))
    row, start, end, op, group, microbatch, size = (column[sort] for column in columns)
    return Lanes(tuple(rows), float(timeline.step_time_s), row, start, end, op, group, microbatch, size)


def pack(start_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> NDArray[np.int32]:
    """Returns lanes for intervals that may overlap: int32 [X], as few lanes as possible, earlier ones first."""
    lane = np.zeros(len(start_s), dtype=np.int32)
    free: list[int] = []
    used: list[tuple[float, int]] = []
    count = 0
    for i in np.lexsort((end_s, start_s)).tolist():
        while used and used[0][0] <= start_s[i]:
            heapq.heappush(free, heapq.heappop(used)[1])
        if free:
            lane[i] = heapq.heappop(free)
        else:
            lane[i], count = count, count + 1
        heapq.heappush(used, (float(end_s[i]), int(lane[i])))
    return lane


def packed_rows(
    rows: list[LaneRow], row: LaneRow, start_s: NDArray[np.float64], end_s: NDArray[np.float64]
) -> NDArray[np.int32]:
    """Adds as few rows like one as hold the intervals without overlap: int32 [X], the row of each."""
    lane, first = pack(start_s, end_s), len(rows)
    count = 1 + int(lane.max(initial=0))
    rows += [dataclasses.replace(row, name=f"{row.name}, {more + 1}" if more else row.name) for more in range(count)]
    return first + lane


Columns = tuple[NDArray, ...]


def _op_boxes(problem: Problem, timeline: Timeline, ops: NDArray[np.int64], row: NDArray) -> Columns:
    once, size = np.full(len(ops), -1, dtype=np.int32), np.full(len(ops), -1, dtype=np.int64)
    span = timeline.start_s[ops], timeline.end_s[ops]
    return row.astype(np.int32), *span, ops.astype(np.int32), problem.op_group[ops], once, size


def _link_boxes(problem: Problem, timeline: Timeline, rows: list[LaneRow]) -> list[Columns]:
    pair = timeline.transfer_source.astype(np.int64) * problem.num_devices + timeline.transfer_destination
    parts: list[Columns] = []
    for key in np.unique(pair).tolist():
        here = np.flatnonzero(pair == key)
        source, destination = divmod(key, problem.num_devices)
        start, end = timeline.transfer_start_s[here], timeline.transfer_end_s[here]
        tensor = timeline.transfer_tensor[here]
        producer = problem.tensor_producer[tensor]
        group = np.where(producer >= 0, problem.op_group[np.maximum(producer, 0)], problem.tensor_owner[tensor])
        name = f"{problem.devices[source].name} → {problem.devices[destination].name}"
        row = packed_rows(rows, LaneRow(name, LINK, source, destination), start, end)
        once = np.full(len(here), -1, dtype=np.int32)
        size = problem.tensor_bytes[tensor]
        parts.append((row, start, end, producer, group.astype(np.int32), once, size))
    return parts


def _collective_boxes(problem: Problem, timeline: Timeline, rows: list[LaneRow]) -> list[Columns]:
    """Returns a row for every set of channels that collectives hold: those of one set never overlap."""
    held = sorted({collective.channels for collective in problem.collectives})
    leader = np.full(problem.num_ops, -1, dtype=np.int32)
    for collective in problem.collectives:
        leader[collective.ops[0]] = held.index(collective.channels)
    parts: list[Columns] = []
    for number, channels in enumerate(held):
        members = next(collective.ops for collective in problem.collectives if collective.channels == channels)
        where = [int(timeline.device_of_op[op]) for op in members]
        ops = np.flatnonzero(leader == number)
        name = "collective " + among([problem.devices[device].name for device in where])
        row = packed_rows(rows, LaneRow(name, COLLECTIVE, where[0]), timeline.start_s[ops], timeline.end_s[ops])
        parts.append(_op_boxes(problem, timeline, ops, row))
    return parts


def among(names: list[str]) -> str:
    """Names some devices."""
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]} ({len(names)})"


def paint(lanes: Lanes, *, width: int = 640, row_height: int = 24, gap: int = 6) -> NDArray[np.uint8]:
    """Returns the devices' rows as an image, every group in the colour of its number.

    Args:
        lanes: Rows and boxes to paint; boxes of links are left out.
        width: Width in pixels.
        row_height: Height of a device's row in pixels.
        gap: Pixels between rows and around them.

    Returns:
        uint8 [devices * (row_height + gap) + gap, width, 3] on white.
    """
    devices = sum(row.kind == DEVICE for row in lanes.rows)
    image = empty_image(devices, width=width, row_height=row_height, gap=gap)
    scale = (width - 1) / max(lanes.step_s, 1e-30)
    colors = rgb(COLORS)[lanes.group % len(COLORS)]
    low = np.floor(lanes.start_s * scale).astype(int)
    high = np.maximum(np.floor(lanes.end_s * scale).astype(int), low + 1)
    for box in np.flatnonzero(lanes.row < devices).tolist():
        top = gap + int(lanes.row[box]) * (row_height + gap)
        image[top : top + row_height, low[box] : high[box]] = colors[box]
    return image


def empty_image(devices: int, *, width: int = 640, row_height: int = 24, gap: int = 6) -> NDArray[np.uint8]:
    """Returns the white image that `paint` returns when nothing runs."""
    return np.full((devices * (row_height + gap) + gap, width, 3), 255, dtype=np.uint8)
