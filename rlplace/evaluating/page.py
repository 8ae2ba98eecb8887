"""A whole strategy as a report shows it: blocks are its groups, and the block executor's events its timeline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.evaluating.again import Asked
from rlplace.evaluating.boxes import OPS, Box, rows_and_boxes
from rlplace.plan.rivals import rivals_of
from rlplace.problem import BACKWARD, Problem
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.reporting.data import MAX_TASKS, ReportData
from rlplace.reporting.lanes import LINK, LaneRow, Lanes
from rlplace.reporting.memory_curve import MemoryCurve
from rlplace.reporting.modules import group_edges, module_tree
from rlplace.reporting.tables import MeasuredRow, PlannerRow
from rlplace.simulator.timeline import Timeline
from rlplace.strategy.costs import kind_numbers
from rlplace.strategy.drafts import Draft
from rlplace.strategy.evaluation import EXECUTOR, Evaluation
from rlplace.strategy.events import ACTIONS, Events
from rlplace.strategy.reference import evaluate_reference
from rlplace.text import bytes_text


def strategy_page(asked: Asked, *, measured: Sequence[MeasuredRow] = ()) -> ReportData:
    """What a report shows of a plan with a strategy.

    Args:
        asked: The plan, its model and cluster.
        measured: Rows of predicted against measured.

    Raises:
        InputError: The step has too many parts for a page, or never ends.
    """
    draft, question, told = asked.draft(), asked.question, Events()
    cluster = question.cluster
    if draft.beside:
        raise InputError("report: unlike pipelines beside each other have no drawing yet; explain and simulate know them")
    said = evaluate_reference(draft, question.costs, cluster, events=told)
    if sum(len(event.pieces) for event in told.events) * len(draft.devices) > MAX_TASKS:
        raise InputError(f"report: the step has more than {MAX_TASKS} parts; report a plan with fewer micro-batches")
    if math.isinf(said.step_time_s):
        raise InputError("report: the step never ends, because stages or replicas have no link between them")
    rows, boxes = rows_and_boxes(draft, told, [device.name for device in cluster.devices])
    problem = _problem(asked, draft, boxes)
    first_device = [draft.places[draft.place_of_stage[stage]].devices[0] for stage in draft.stage_of_block]
    op = np.array([box.op for box in boxes], dtype=np.int32)
    curves = _curves(told, said, problem)
    return ReportData(
        problem=problem,
        plan=asked.plan,
        drawn=problem,
        timeline=_timeline(asked, said, rows, boxes),
        lanes=Lanes(
            rows=tuple(rows),
            step_s=said.step_time_s,
            row=np.array([box.row for box in boxes], dtype=np.int32),
            start_s=np.array([box.start_s for box in boxes]),
            end_s=np.array([box.end_s for box in boxes]),
            op=op,
            group=problem.op_group[op],
            microbatch=np.array([box.microbatch for box in boxes], dtype=np.int32),
            size_bytes=np.array([box.size_bytes for box in boxes], dtype=np.int64),
        ),
        memory=curves,
        resident_bytes=np.array([int(curve.in_use_bytes[0]) for curve in curves]),
        modules=module_tree(problem, asked.plan),
        edges=group_edges(problem),
        device_of_group=np.array(first_device, dtype=np.int32),
        group_of_drawn=np.arange(problem.num_groups),
        executor=EXECUTOR,
        planners=_rivals(asked),
        measured=tuple(measured),
    )


def _problem(asked: Asked, draft: Draft, boxes: Sequence[Box]) -> Problem:
    """The blocks as groups, each with an op for every phase."""
    costs, cluster = asked.question.costs, asked.question.cluster
    count, kind_of = len(costs.names), kind_numbers(costs, cluster)
    time_s: NDArray[np.float64] = np.zeros((len(OPS) * count, cluster.num_devices))
    for box in boxes:
        if box.row < cluster.num_devices:
            time_s[box.op] = np.maximum(time_s[box.op], box.end_s - box.start_s)
    held, tensors = [], []
    for block, stage in enumerate(draft.stage_of_block):
        place, first = draft.places[draft.place_of_stage[stage]], len(OPS) * block
        whole = costs.held(place.tensor, place.expert)
        held.append(int(whole.weight_bytes[block] + whole.gradient_bytes[block] + whole.optimizer_bytes[block]))
        tensors.append(TensorSpec(first, 0, [first + BACKWARD]))
        if block + 1 < count:
            passes = costs.passes(kind_of[place.devices[0]], place.cut(draft.microbatch[0]))
            following = first + len(OPS)
            tensors.append(TensorSpec(first, int(passes.sent_bytes[block]), [following]))
            tensors.append(TensorSpec(following + BACKWARD, int(passes.returned_bytes[block]), [first + BACKWARD]))
    problem = build_problem(
        asked.model,
        time_s=time_s.tolist(),
        tensors=tensors,
        memory_bytes=[None] * cluster.num_devices,
        group=[block for block in range(count) for _ in OPS],
        resident_bytes=held,
        phase=[*OPS] * count,
        links=cluster.links,
    )
    return dataclasses.replace(
        problem,
        devices=cluster.devices,
        group_names=tuple(costs.names),
        op_names=tuple(f"{name} {word}" for name in costs.names for word in OPS.values()),
        source=asked.plan.source,
    )


def _timeline(asked: Asked, said: Evaluation, rows: Sequence[LaneRow], boxes: Sequence[Box]) -> Timeline:
    devices, strategy = asked.question.cluster.devices, asked.strategy
    tasks = [box for box in boxes if box.row < len(devices)]
    sent = [box for box in boxes if rows[box.row].kind == LINK]
    pairs = list(zip(devices, said.peak_memory_bytes, strict=True))
    over = [(d.name, peak, d.memory_bytes) for d, peak in pairs if d.memory_bytes is not None and peak > d.memory_bytes]
    column = {key: np.array([getattr(box, key) for box in sent]) for key in ("start_s", "end_s", "microbatch")}
    ends = np.array([rows[box.row].device for box in sent], dtype=np.int32)
    return Timeline(
        step_time_s=said.step_time_s,
        feasible=said.feasible,
        violations=tuple(f"{name} needs {bytes_text(peak)} of {bytes_text(limit)}" for name, peak, limit in over),
        peak_memory_bytes=np.array(said.peak_memory_bytes),
        busy_s=np.array([row.busy_s for row in rows[: len(devices)]]),
        device_of_op=np.array([box.row for box in tasks], dtype=np.int32),
        start_s=np.array([box.start_s for box in tasks]),
        end_s=np.array([box.end_s for box in tasks]),
        transfer_tensor=np.array([_tensor(box) for box in sent], dtype=np.int32),
        transfer_source=ends,
        transfer_destination=ends,
        transfer_start_s=column["start_s"],
        transfer_end_s=column["end_s"],
        microbatches=max(strategy.pipelines[0].microbatches),
        samples=strategy.batch,
        task_op=np.array([box.op for box in tasks], dtype=np.int32),
        task_microbatch=np.array([box.microbatch for box in tasks], dtype=np.int32),
        transfer_microbatch=column["microbatch"],
    )


def _tensor(box: Box) -> int:
    """Number in `_problem` of the tensor that a box sends: three for every block, the last two over its border."""
    block, phase = divmod(box.op, len(OPS))
    return 3 * (block - 1) + 2 if phase == BACKWARD else 3 * block + 1


def _curves(told: Events, said: Evaluation, problem: Problem) -> tuple[MemoryCurve, ...]:
    """Bytes in use on every device: what is held all step long, and during and after each of its actions."""
    points: dict[int, list[tuple[float, float]]] = {}
    for number, lane in enumerate(told.lanes):
        for place, replicas in enumerate(lane.replicas):
            held, actions = told.memory[number, place]
            own = [event for event in told.events if (event.lane, event.place) == (number, place) and event.kind in ACTIONS]
            line = [(0.0, held)]
            for event, (during, after) in zip(own, actions, strict=True):
                line += [(event.start_s, held + during), (event.end_s, held + after)]
            points |= {device: [*line, (said.step_time_s, held)] for _, devices in replicas for device in devices}
    curves = []
    for number, device in enumerate(problem.devices):
        mine = points.get(number, [(0.0, -device.reserved_bytes)])
        size = np.array([math.ceil(device.reserved_bytes + held) for _, held in mine], dtype=np.int64)
        curves.append(MemoryCurve(np.array([time for time, _ in mine]), size))
    return tuple(curves)


def _rivals(asked: Asked) -> tuple[PlannerRow, ...]:
    """The plan, and the strategies that it names beside it; they were simulated op by op where that is affordable."""
    plan, said = asked.plan, asked.evaluate()
    assert plan.strategy is not None
    note = "" if said.executor == EXECUTOR else "op by op"
    rows = [
        _rival("this strategy", True, plan.strategy.batch, said.step_time_s, said.feasible, len(plan.strategy.devices), note)
    ]
    own = plan.strategy.to_dict()
    for entry in rivals_of(plan.predicted):
        if entry.strategy != own:
            step_s, note = entry.step_time_s, entry.words
            if step_s is None:
                note = entry.reason or f"{bytes_text(entry.over_bytes)} too large: {entry.words}"
            rows.append(_rival(entry.kind, False, plan.strategy.batch, step_s, step_s is not None, entry.devices, note))
    return tuple(sorted(rows, key=lambda row: (not row.feasible, -(row.samples_per_s or 0.0))))


def _rival(name: str, this: bool, batch: int, step_s: float | None, fits: bool, devices: int, note: str) -> PlannerRow:
    rate = batch / step_s if step_s else None
    return PlannerRow(name, this, step_s, rate, fits, None, devices, None, note)
