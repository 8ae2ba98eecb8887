"""A whole strategy as a report shows it: blocks are its groups, and its ops, simulated, its timeline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from rlplace.cost.timings import PlanTiming
from rlplace.errors import InputError
from rlplace.explanation.report.data import MAX_OPS, ReportData
from rlplace.explanation.report.lanes import LINK, LaneRow, Lanes
from rlplace.explanation.report.memory_curve import MemoryCurve, memory_curves
from rlplace.explanation.report.modules import group_edges, module_tree
from rlplace.explanation.report.tables import PlannerRow
from rlplace.explanation.timeline.again import OPS, Box, Picture
from rlplace.plan.plan import PlacementPlan, make_plan
from rlplace.plan.prediction import rivals_of
from rlplace.planned import Planned
from rlplace.problem import BACKWARD, Problem
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.simulator import EXECUTOR
from rlplace.simulator.path import path_parts, realised_path
from rlplace.simulator.simulated_plan import SimulatedPlan
from rlplace.simulator.timeline import Timeline
from rlplace.strategy.blocks.op_costs import OpCosts
from rlplace.strategy.costs import kind_numbers
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.evaluate import StepEvaluation, side_by_side
from rlplace.strategy.op_level.expand import ExpandedDraft, tasks_of
from rlplace.strategy.search.op_level import evaluation_of, simulate_ops
from rlplace.text import bytes_text


def strategy_page(planned: Planned, *, measured: Sequence[PlanTiming] = ()) -> ReportData:
    """What a report shows of a plan with a strategy.

    Args:
        planned: The plan, its model and cluster.
        measured: Plans that ran.

    Raises:
        InputError: The step has too many parts for a page, or never ends.
    """
    draft, question = planned.draft(), planned.search_problem
    cluster, costs = question.cluster, cast(OpCosts, question.costs)
    if sum(tasks_of(one, costs) for one in draft.pipelines) > MAX_OPS:
        raise InputError(f"report: the step has more than {MAX_OPS} ops; report a plan with fewer micro-batches")
    ran = [simulate_ops(one, costs, cluster) for one in draft.pipelines]
    alone = [
        evaluation_of(*each, question.scores.evaluate(one), cluster) for one, each in zip(draft.pipelines, ran, strict=True)
    ]
    result = side_by_side(draft, alone, costs, question.scores.traffic) if draft.beside else alone[0]
    if math.isinf(result.step_time_s):
        raise InputError("report: the step never ends, because stages or replicas have no link between them")
    picture = Picture([device.name for device in cluster.devices])
    for one, each, own in zip(draft.pipelines, ran, alone, strict=True):
        picture.add(one, *each, result.passes_s - own.passes_s)
    if draft.beside:
        picture.sum_gradients(draft.devices, max(own.passes_s for own in alone), result.passes_s)
    rows, boxes = picture.rows, sorted(picture.boxes)
    problem = _problem(planned, draft, boxes)
    one = draft.pipelines[0]
    first_device = [one.places[one.place_of_stage[stage]].devices[0] for stage in one.stage_of_block]
    curves, lanes = _curves(ran, result, problem), _lanes(rows, boxes, result.step_time_s, problem)
    slowest, its_line = ran[max(range(len(ran)), key=lambda i: alone[i].passes_s)]
    run = SimulatedPlan(slowest.problem, _ordered(slowest), its_line)
    return ReportData(
        problem=problem,
        plan=planned.plan,
        timeline=_timeline(planned, result, lanes),
        lanes=lanes,
        memory=curves,
        resident_bytes=np.array([int(curve.in_use_bytes[0]) for curve in curves]),
        modules=module_tree(problem, planned.plan),
        edges=group_edges(problem),
        device_of_group=np.array(first_device, dtype=np.int32),
        executor=EXECUTOR,
        planners=_rivals(planned, result),
        measured=tuple(measured),
        path=path_parts(run, realised_path(run, through_devices=True)),
    )


def _problem(planned: Planned, draft: Draft, boxes: Sequence[Box]) -> Problem:
    """Returns the blocks as groups, each with an op for every phase."""
    costs, cluster = planned.search_problem.costs, planned.search_problem.cluster
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
        planned.name,
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
        source=planned.plan.source,
    )


def _lanes(rows: Sequence[LaneRow], boxes: Sequence[Box], step_s: float, problem: Problem) -> Lanes:
    op = np.array([box.op for box in boxes], dtype=np.int32)
    return Lanes(
        rows=tuple(rows),
        step_s=step_s,
        row=np.array([box.row for box in boxes], dtype=np.int32),
        start_s=np.array([box.start_s for box in boxes]),
        end_s=np.array([box.end_s for box in boxes]),
        op=op,
        group=problem.op_group[op],
        microbatch=np.array([box.microbatch for box in boxes], dtype=np.int32),
        size_bytes=np.array([box.size_bytes for box in boxes], dtype=np.int64),
    )


def _timeline(planned: Planned, result: StepEvaluation, lanes: Lanes) -> Timeline:
    devices, strategy = planned.search_problem.cluster.devices, planned.strategy
    tasks, sent = lanes.row < len(devices), np.array([row.kind == LINK for row in lanes.rows])[lanes.row]
    pairs = list(zip(devices, result.peak_memory_bytes, strict=True))
    over = [(d.name, peak, d.memory_bytes) for d, peak in pairs if d.memory_bytes is not None and peak > d.memory_bytes]
    ends = np.array([row.device for row in lanes.rows], dtype=np.int32)[lanes.row[sent]]
    block, phase = np.divmod(lanes.op[sent], len(OPS))  # `_problem` has three tensors a block, the last two over its border
    return Timeline(
        step_time_s=result.step_time_s,
        feasible=result.feasible,
        violations=tuple(f"{name} needs {bytes_text(peak)} of {bytes_text(limit)}" for name, peak, limit in over),
        peak_memory_bytes=np.array(result.peak_memory_bytes),
        busy_s=lanes.busy_s[: len(devices)],
        device_of_op=lanes.row[tasks],
        start_s=lanes.start_s[tasks],
        end_s=lanes.end_s[tasks],
        transfer_tensor=np.where(phase == BACKWARD, 3 * (block - 1) + 2, 3 * block + 1).astype(np.int32),
        transfer_source=ends,
        transfer_destination=ends,
        transfer_start_s=lanes.start_s[sent],
        transfer_end_s=lanes.end_s[sent],
        samples=strategy.batch,
    )


def _ordered(expanded: ExpandedDraft) -> PlacementPlan:
    return make_plan(expanded.problem, expanded.problem.group_device, planner="", order=expanded.order)


def _curves(ran: Sequence[tuple[ExpandedDraft, Timeline]], result: StepEvaluation, problem: Problem) -> tuple[MemoryCurve, ...]:
    """Returns bytes in use on every device of the cluster, as on the device that stands for it."""
    curves = [MemoryCurve(np.zeros(1), np.zeros(1, dtype=np.int64)) for _ in problem.devices]
    for expanded, line in ran:
        for curve, devices in zip(memory_curves(expanded.problem, _ordered(expanded), line), expanded.stands_for, strict=True):
            times = np.append(curve.time_s, result.step_time_s)
            for device in devices:
                size = curve.in_use_bytes + problem.devices[device].reserved_bytes
                curves[device] = MemoryCurve(times, np.append(size, size[-1]))
    return tuple(curves)


def _rivals(planned: Planned, result: StepEvaluation) -> tuple[PlannerRow, ...]:
    """Returns the plan and the rivals that it names, with the figures that were predicted then."""
    plan, strategy = planned.plan, planned.strategy
    rows = [_rival("this strategy", True, strategy.batch, result.step_time_s, result.feasible, len(strategy.devices), "")]
    own = strategy.to_dict()
    for entry in rivals_of(plan.predicted):
        if entry.strategy != own:
            step_s = entry.step_time_s
            rows.append(_rival(entry.kind, False, strategy.batch, step_s, step_s is not None, entry.devices, entry.remark))
    return tuple(sorted(rows, key=lambda row: (not row.feasible, -(row.samples_per_s or 0.0))))


def _rival(name: str, this: bool, batch: int, step_s: float | None, fits: bool, devices: int, note: str) -> PlannerRow:
    rate = batch / step_s if step_s else None
    return PlannerRow(name, this, step_s, rate, fits, None, devices, None, note)
