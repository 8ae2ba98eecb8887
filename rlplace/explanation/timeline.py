"""The timeline of a whole strategy: the rows and boxes of its ops, simulated, as a report draws them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.cluster.links import Device
from rlplace.cost.timings import PlanTiming
from rlplace.errors import InputError
from rlplace.explanation.report.data import MAX_OPS, PlannerRow, ReportData
from rlplace.explanation.report.lanes import COLLECTIVE, DEVICE, LINK, LaneRow, Lanes, among, packed_rows
from rlplace.explanation.report.modules import GroupEdges, tree_of
from rlplace.explanation.report.step_timeline import MemoryCurve, StepTimeline, memory_curves
from rlplace.plan.plan import PlacementPlan, make_plan
from rlplace.plan.prediction import rivals_of
from rlplace.planned import Planned
from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD, UPDATE
from rlplace.simulator import EXECUTOR, Timeline
from rlplace.simulator.path import path_parts, realised_path
from rlplace.simulator.simulated_plan import SimulatedPlan
from rlplace.strategy.blocks.op_costs import OpCosts
from rlplace.strategy.costs import kind_numbers
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.evaluate import StepEvaluation, side_by_side
from rlplace.strategy.op_level.expand import ExpandedDraft, tasks_of
from rlplace.strategy.op_level.step_build import GATHER, SEND, TIE, UPDATE_RUN, DeviceRun
from rlplace.strategy.search.op_level import evaluation_of, simulate_ops
from rlplace.strategy.search.tries import SearchProblem
from rlplace.text import bytes_text


def strategy_page(planned: Planned, *, measured: Sequence[PlanTiming] = ()) -> ReportData:
    """Simulates a plan with a strategy op by op, and lays out its report.

    Args:
        planned: The plan, its model and cluster.
        measured: Plans that ran.

    Raises:
        InputError: The step has too many parts for a page, or never ends.
    """
    draft, problem = planned.draft(), planned.search_problem
    cluster, costs = problem.cluster, cast(OpCosts, problem.costs)
    if sum(tasks_of(one, costs) for one in draft.pipelines) > MAX_OPS:
        raise InputError(f"report: the step has more than {MAX_OPS} ops; report a plan with fewer micro-batches")
    ran = [simulate_ops(one, costs, cluster) for one in draft.pipelines]
    alone = [
        evaluation_of(*each, problem.scores.evaluate(one), cluster) for one, each in zip(draft.pipelines, ran, strict=True)
    ]
    result = side_by_side(draft, alone, costs, problem.scores.traffic) if draft.beside else alone[0]
    if math.isinf(result.step_time_s):
        raise InputError("report: the step never ends, because stages or replicas have no link between them")
    shown = _shown([expanded for expanded, _ in ran], cluster)
    ran = [(dataclasses.replace(expanded, stands_for=shown.rows_of(expanded)), line) for expanded, line in ran]
    picture = Picture([device.name for device in shown.devices])
    for one, each, own in zip(draft.pipelines, ran, alone, strict=True):
        picture.add(one, *each, result.passes_s - own.passes_s)
    if draft.beside:
        passes_s = max(own.passes_s for own in alone)
        users = sorted({row for expanded, _ in ran for rows in expanded.stands_for for row in rows})
        picture.collectives(users, [Box(-1, passes_s, result.passes_s, BACKWARD, -1)])  # sums of gradients
    timeline = _timeline(planned, draft, picture.lanes(result.step_time_s), result, _curves(ran, result, shown), shown)
    slowest, its_line = ran[max(range(len(ran)), key=lambda i: alone[i].passes_s)]
    run = SimulatedPlan(slowest.problem, _ordered(slowest), its_line)
    count = len(costs.names)
    none: list[tuple[str, ...]] = [()] * count
    return ReportData(
        plan=planned.plan,
        timeline=timeline,
        modules=tree_of(planned.name, costs.names, np.arange(count), none, none),
        edges=_edges(problem, draft),
        executor=EXECUTOR,
        planners=_rivals(planned, result),
        measured=tuple(measured),
        path=path_parts(run, realised_path(run, through_devices=True)),
    )


MOST_ROWS = 256
"""Devices up to which a page has a row for each; beyond, one for those that do the same."""


class _Shown(NamedTuple):
    """Devices that have rows on a page.

    Attributes:
        devices: R devices; one that represents others says so in its name.
        alike: The devices of the cluster that each represents.
        row: The row of every device of the cluster.
    """

    devices: tuple[Device, ...]
    alike: tuple[tuple[int, ...], ...]
    row: dict[int, int]

    def rows_of(self, expanded: ExpandedDraft) -> tuple[tuple[int, ...], ...]:
        """Returns the rows of each device of an expanded draft."""
        return tuple(tuple(dict.fromkeys(self.row[device] for device in alike)) for alike in expanded.stands_for)


def _shown(drafts: Sequence[ExpandedDraft], cluster: Cluster) -> _Shown:
    if cluster.num_devices <= MOST_ROWS:
        each = range(cluster.num_devices)
        return _Shown(cluster.devices, tuple((device,) for device in each), dict(zip(each, each, strict=True)))
    used = [alike for expanded in drafts for alike in expanded.stands_for]
    idle = tuple(sorted(set(range(cluster.num_devices)).difference(*used)))
    classes = [*used, idle] if idle else used
    devices = []
    for alike in classes:
        device, more = cluster.devices[alike[0]], len(alike) - 1
        devices.append(dataclasses.replace(device, name=f"{device.name} and {more:,} like it") if more else device)
    row = {device: number for number, alike in enumerate(classes) for device in alike}
    return _Shown(tuple(devices), tuple(classes), row)


def _timeline(
    planned: Planned, draft: Draft, lanes: Lanes, result: StepEvaluation, memory: tuple[MemoryCurve, ...], shown: _Shown
) -> StepTimeline:
    """Returns the timeline with blocks as groups, each with an op for every phase."""
    costs, devices, one = planned.search_problem.costs, shown.devices, draft.pipelines[0]
    count, tasks = len(costs.names), lanes.row < len(devices)
    op_s: NDArray[np.float64] = np.zeros(len(OPS) * count)
    np.maximum.at(op_s, lanes.op[tasks], (lanes.end_s - lanes.start_s)[tasks])
    places = [one.places[one.place_of_stage[stage]] for stage in one.stage_of_block]
    group_bytes = []
    for block, stage in enumerate(draft.stage_of_block):
        place = draft.places[draft.place_of_stage[stage]]
        held = costs.held(*place.state)
        group_bytes.append(int(held.weight_bytes[block] + held.gradient_bytes[block] + held.optimizer_bytes[block]))
    peaks = [result.peak_memory_bytes[alike[0]] for alike in shown.alike]
    pairs = list(zip(devices, peaks, strict=True))
    over = [(d.name, peak, d.memory_bytes) for d, peak in pairs if d.memory_bytes is not None and peak > d.memory_bytes]
    return StepTimeline(
        name=planned.name,
        source=planned.plan.source,
        devices=devices,
        op_names=[f"{name} {word}" for name in costs.names for word in OPS.values()],
        op_group=np.repeat(np.arange(count, dtype=np.int32), len(OPS)),
        op_phase=np.tile(np.array(list(OPS)), count),
        op_s=op_s,
        group_names=costs.names,
        group_bytes=np.array(group_bytes, dtype=np.int64),
        device_of_group=np.array([shown.row[place.devices[0]] for place in places], dtype=np.int32),
        lanes=lanes,
        memory=memory,
        resident_bytes=np.array([int(curve.in_use_bytes[0]) for curve in memory]),
        peak_memory_bytes=np.array(peaks),
        busy_s=lanes.busy_s[: len(devices)],
        step_time_s=result.step_time_s,
        samples=planned.strategy.batch,
        feasible=result.feasible,
        violations=tuple(f"{name} needs {bytes_text(peak)} of {bytes_text(limit)}" for name, peak, limit in over),
        devices_used=len({device for stage in planned.strategy.stages if stage.blocks for device in stage.devices}),
        ops_run=int(tasks.sum()),
        tensors=3 * count - 2,  # saved activations of every block, and both directions between two
        alike=shown.alike,
    )


def _edges(problem: SearchProblem, draft: Draft) -> GroupEdges:
    """Returns the traffic between blocks that follow one another."""
    kind_of, ahead, back = kind_numbers(problem.costs, problem.cluster), [], []
    for block, stage in enumerate(draft.stage_of_block[:-1]):
        place = draft.places[draft.place_of_stage[stage]]
        passes = problem.costs.passes(kind_of[place.devices[0]], place.cut(draft.microbatch[0]))
        ahead.append(int(passes.sent_bytes[block]))
        back.append(int(passes.returned_bytes[block]))
    source = np.arange(len(ahead), dtype=np.int32)
    return GroupEdges(source, source + 1, np.array(ahead, dtype=np.int64), np.array(back, dtype=np.int64))


def _ordered(expanded: ExpandedDraft) -> PlacementPlan:
    return make_plan(expanded.problem, expanded.problem.group_device, planner="", order=expanded.order)


def _curves(ran: Sequence[tuple[ExpandedDraft, Timeline]], result: StepEvaluation, shown: _Shown) -> tuple[MemoryCurve, ...]:
    """Returns bytes in use on every device of the page, as on the device that represents it."""
    devices = shown.devices
    curves = [MemoryCurve(np.zeros(1), np.zeros(1, dtype=np.int64)) for _ in devices]
    for expanded, line in ran:
        for curve, alike in zip(memory_curves(expanded.problem, _ordered(expanded), line), expanded.stands_for, strict=True):
            times = np.append(curve.time_s, result.step_time_s)
            for device in alike:
                size = curve.in_use_bytes + devices[device].reserved_bytes
                curves[device] = MemoryCurve(times, np.append(size, size[-1]))
    return tuple(curves)


def _rivals(planned: Planned, result: StepEvaluation) -> tuple[PlannerRow, ...]:
    """Returns the plan and the rivals that it names, with the figures that were predicted then."""
    devices, own = len(planned.strategy.devices), planned.strategy.to_dict()
    rows = [PlannerRow("this strategy", True, result.step_time_s, result.feasible, None, devices, None)]
    for entry in rivals_of(planned.plan.predicted):
        if entry.strategy != own:
            step_s = entry.step_time_s
            rows.append(PlannerRow(entry.kind, False, step_s, step_s is not None, None, entry.devices, None, entry.remark))
    return tuple(sorted(rows, key=lambda row: row.order))


OPS = {FORWARD: "forward", BACKWARD: "backward", BACKWARD_WEIGHT: "gradients of weights", UPDATE: "update"}
"""Ops of every block; they are numbered block by block."""

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
            self.collectives(expanded.stands_for[device], boxes)
        self._exchanged(draft, expanded, start, end)

    def lanes(self, step_s: float) -> Lanes:
        """Returns all boxes, sorted by row and start."""
        types = dict(zip(Box._fields, ("i4", "f8", "f8", "i4", "i4", "i8"), strict=True))
        boxes = np.array(sorted(self.boxes), dtype=list(types.items()))
        columns = {name: np.ascontiguousarray(boxes[name]) for name in types}
        return Lanes(rows=tuple(self.rows), step_s=step_s, group=columns["op"] // len(OPS), **columns)

    def _exchanged(self, draft: Draft, expanded: ExpandedDraft, start: NDArray[np.float64], end: NDArray[np.float64]) -> None:
        """Draws communication: a row for the collectives of each channel, and for each direction between stages."""
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
            self.collectives(devices, boxes)
        for (here, there), boxes in ways.items():
            self._packed(LaneRow(f"{self._names[here]} → {self._names[there]}", LINK, here, there), boxes)

    def collectives(self, devices: Sequence[int], boxes: list[Box]) -> None:
        """Draws collectives among some devices, which never overlap."""
        name = f"collective {among([self._names[device] for device in devices])}"
        self._packed(LaneRow(name, COLLECTIVE, devices[0]), [box for box in boxes if box.end_s > box.start_s])

    def _packed(self, row: LaneRow, boxes: list[Box]) -> None:
        """Draws boxes into the fewest rows that hold them without overlap."""
        if boxes:
            start, end = np.array([box.start_s for box in boxes]), np.array([box.end_s for box in boxes])
            rows = packed_rows(self.rows, row, start, end).tolist()
            self.boxes += [box._replace(row=row) for box, row in zip(boxes, rows, strict=True)]


def _spans(run: DeviceRun, start: NDArray[np.float64], end: NDArray[np.float64]) -> Iterator[tuple[float, float, int, bool]]:
    """Yields start, end and block of uninterrupted computation of a block, and of its collectives, which are marked."""
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
