"""`ReportData`: the content of a report on a problem and a plan, and its compact form inside the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cost.timings import PlanTiming
from rlplace.errors import InputError
from rlplace.explanation.report.lanes import (
    COLLECTIVE,
    COLLECTIVE_COLOR,
    COLORS,
    DEVICE,
    LINK,
    PHASE_COLORS,
    TRANSFER_COLOR,
    Lanes,
    lanes_of,
)
from rlplace.explanation.report.memory_curve import MemoryCurve, memory_curves
from rlplace.explanation.report.modules import GroupEdges, ModuleTree, group_edges, module_tree
from rlplace.explanation.report.tables import PlannerRow
from rlplace.plan import PlacementPlan
from rlplace.problem import PHASES, Problem
from rlplace.simulator import EXECUTOR, Timeline, simulate
from rlplace.simulator.path import PathPart, path_parts, realised_path
from rlplace.simulator.simulated_plan import SimulatedPlan
from rlplace.simulator.timeline import resident_by_device

_TICKS = 1e8
"""A step has between a tenth of this and this many ticks: more than any screen shows at any zoom that is offered."""


def ticks_of(step_s: float) -> float:
    """Returns the unit in which the page counts time, a power of ten of a second."""
    return 10.0 ** math.ceil(math.log10(step_s / _TICKS)) if step_s > 0 else 1.0


def front_coded(names: Sequence[str]) -> tuple[list[int], list[str]]:
    """Returns per name the length that it shares with the one before, in UTF-16 units as in browsers, and the rest of it."""
    shared, rest, before = [], [], ""
    for name in names:
        least = min(len(before), len(name))
        same = next((i for i in range(least) if before[i] != name[i]), least)
        shared.append(len(name[:same].encode("utf-16-le", "surrogatepass")) // 2)
        rest.append(name[same:])
        before = name
    return shared, rest


FORMAT = "rlplace.report"
VERSION = 1
MAX_LINKS = 40
"""Rows of links in the page, the busiest ones."""
MAX_OPS = 1_000_000
"""Of a step that a page is made of; it then has some 70 MB, which browsers still open."""
CURVE_POINTS = 6000
"""Of the memory of one device in the page."""


@dataclass(frozen=True, eq=False)
class ReportData:
    """A plan, simulated and laid out.

    Attributes:
        problem: The problem of the plan. Axes: D devices, G groups.
        plan: The plan.
        timeline: Its timeline.
        lanes: Boxes of the timeline.
        memory: D curves of memory in use.
        resident_bytes: int64 [D], bytes in use all the time.
        modules: The tree of the groups of `problem`.
        edges: Edges between groups of `problem`.
        device_of_group: int32 [G], device of each group in the first replica.
        executor: Name of the executor that simulated it.
        planners: Rows of the table of planners, may be empty.
        measured: Plans that ran, with predicted times, may be empty; this plan is known by its fingerprint.
        path: The critical path by cause and place, longest first; empty when the step does not complete.
    """

    problem: Problem
    plan: PlacementPlan
    timeline: Timeline
    lanes: Lanes
    memory: tuple[MemoryCurve, ...]
    resident_bytes: NDArray[np.int64]
    modules: ModuleTree
    edges: GroupEdges
    device_of_group: NDArray[np.int32]
    executor: str = EXECUTOR
    planners: tuple[PlannerRow, ...] = ()
    measured: tuple[PlanTiming, ...] = ()
    path: tuple[PathPart, ...] = ()

    @cached_property
    def groups_on_device(self) -> NDArray[np.int64]:
        """int64 [D], groups of the first replica, or the blocks that each device holds under a strategy."""
        count = np.bincount(self.device_of_group, minlength=self.problem.num_devices)
        if self.plan.strategy is not None:
            count[:] = 0
            for stage in self.plan.strategy.stages:
                count[list(stage.devices)] += len(stage.blocks)
        return count

    def to_dict(self) -> dict[str, Any]:
        """Returns the page's data as columns of small numbers, for the page's JavaScript alone.

        Keys: `tick_s` and `memory_unit_bytes` are what times and sizes count. Names of `ops` and `groups` are `shared`
        (characters in common with the name before, in UTF-16 units) and `rest`. `modules` is a tree: `parent` (-1: the root),
        `label`; `own` are nodes for groups outside of a module's children. `edges` are between groups. `boxes` stand one row
        after the other: ticks of `gap` since the end of the one before and of `length`, `op` (-1: a parameter), `microbatch`.
        `transfers` are the boxes on links. `memory` has by device ticks and units since the point before. `links` counts all
        links, also where only the busiest are rows.
        """
        unit = max(1, int(max(curve.peak_bytes for curve in self.memory)) // 100_000)
        step = self.timeline.step_time_s
        tick = ticks_of(step or 0.0)
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": self.problem.name,
            "step_s": step,
            "tick_s": tick,
            "memory_unit_bytes": unit,
            "phases": list(PHASES),
            "colors": {"category": COLORS, "phase": PHASE_COLORS, "collective": COLLECTIVE_COLOR, "transfer": TRANSFER_COLOR},
            "microbatches": self.microbatches,
            "devices": [
                {"name": device.name, "memory_bytes": device.memory_bytes, "peak_bytes": int(peak)}
                for device, peak in zip(self.problem.devices, self.timeline.peak_memory_bytes, strict=True)
            ],
            "ops": self._ops(),
            "groups": self._groups(),
            "modules": {"parent": list(self.modules.parent), "label": list(self.modules.label), "own": list(self.modules.own)},
            "edges": {
                "source": self.edges.source.tolist(),
                "target": self.edges.target.tolist(),
                "forward_bytes": self.edges.forward_bytes.tolist(),
                "backward_bytes": self.edges.backward_bytes.tolist(),
            },
            **self._boxes(tick),
            "memory": [self._curve(curve, tick, unit) for curve in self.memory],
        }

    @property
    def microbatches(self) -> int:
        """Micro-batches of a strategy's step; 1 for a placement."""
        return 1 + int(self.lanes.microbatch.max(initial=0))

    @cached_property
    def time_of_group_s(self) -> NDArray[np.float64]:
        """float64 [G], seconds that each group computes a step, all micro-batches added up."""
        problem, spent = self.problem, np.zeros(self.problem.num_groups)
        runs = np.where(problem.op_phase == PHASES.index("update"), 1, self.microbatches)
        time_s = problem.time_s[np.arange(problem.num_ops), self.device_of_group[problem.op_group]]
        np.add.at(spent, problem.op_group, np.nan_to_num(time_s) * runs)
        return spent

    def _ops(self) -> dict[str, Any]:
        shared, rest = front_coded(self.problem.op_names)
        group, phase = self.problem.op_group.tolist(), self.problem.op_phase.tolist()
        return {"shared": shared, "rest": rest, "group": group, "phase": phase}

    def _groups(self) -> dict[str, Any]:
        problem = self.problem
        shared, rest = front_coded(problem.group_names)
        return {
            "shared": shared,
            "rest": rest,
            "device": self.device_of_group.tolist(),
            "node": list(self.modules.node_of_group),
            "order": self.modules.order.tolist(),
            "block": list(self.modules.block),
            "block_names": list(self.modules.block_names),
            "time_us": [float(f"{value * 1e6:.4g}") for value in self.time_of_group_s.tolist()],
            "resident_bytes": problem.resident_bytes.tolist(),
            "ops": np.bincount(problem.op_group, minlength=problem.num_groups).tolist(),
        }

    def _boxes(self, tick: float) -> dict[str, Any]:
        """Returns rows of the picture, and their boxes one after the other; only the busiest links."""
        lanes, busy_s = self.lanes, self.lanes.busy_s
        links = [i for i, row in enumerate(lanes.rows) if row.kind != DEVICE]
        links = sorted(sorted(links, key=lambda i: -busy_s[i])[:MAX_LINKS])
        shown = [i for i, row in enumerate(lanes.rows) if row.kind == DEVICE] + links
        kept = np.isin(lanes.row, shown)
        row = lanes.row[kept]
        start, end = np.rint(lanes.start_s[kept] / tick).astype(np.int64), np.rint(lanes.end_s[kept] / tick).astype(np.int64)
        before = np.concatenate([[0], end[:-1]])
        before[np.flatnonzero(np.diff(row, prepend=-1))] = 0
        counts = np.bincount(row, minlength=len(lanes.rows))
        boxes = {
            "gap": (start - before).tolist(),
            "length": (end - start).tolist(),
            "op": lanes.op[kept].tolist(),
        }
        if self.microbatches > 1:
            boxes["microbatch"] = lanes.microbatch[kept].tolist()
        transfer = np.array([r.kind == LINK for r in lanes.rows])[row]
        return {
            "rows": [
                {
                    "name": lanes.rows[i].name,
                    "kind": lanes.rows[i].kind,
                    "device": lanes.rows[i].device,
                    "to": lanes.rows[i].to,
                    "boxes": int(counts[i]),
                }
                for i in shown
            ],
            "links": sum(r.kind in (LINK, COLLECTIVE) for r in lanes.rows),
            "boxes": boxes,
            "transfers": {
                "bytes": lanes.size_bytes[kept][transfer].tolist(),
                "group": lanes.group[kept][transfer].tolist(),
            },
        }

    @staticmethod
    def _curve(curve: MemoryCurve, tick: float, unit: int) -> dict[str, list[int]]:
        thin = curve.thinned(CURVE_POINTS)
        time = np.rint(thin.time_s / tick).astype(np.int64)
        size = np.rint(thin.in_use_bytes / unit).astype(np.int64)
        return {"time": np.diff(time, prepend=0).tolist(), "size": np.diff(size, prepend=0).tolist()}


def report_data(
    problem: Problem,
    plan: PlacementPlan,
    *,
    planners: Sequence[PlannerRow] = (),
    measured: Sequence[PlanTiming] = (),
) -> ReportData:
    """Simulates a plan and lays out the report.

    Args:
        problem: The priced problem.
        plan: A plan for it; an infeasible one has a report too, which states the reasons.
        planners: Rows of `rlplace.explanation.report.tables.planner_rows`.
        measured: Plans that ran.

    Raises:
        InputError: The plan is for another problem, or has more than `MAX_OPS` ops.
    """
    if problem.num_ops > MAX_OPS:
        raise InputError(
            f"report: the step has {problem.num_ops} ops, a page holds {MAX_OPS}; rlplace simulate --trace writes them all"
        )
    timeline = simulate(problem, plan)
    run = SimulatedPlan(problem, plan, timeline)
    return ReportData(
        problem=problem,
        plan=plan,
        timeline=timeline,
        lanes=lanes_of(problem, timeline),
        memory=tuple(memory_curves(problem, plan, timeline)),
        resident_bytes=resident_by_device(problem, plan.device_of_group),
        modules=module_tree(problem, plan),
        edges=group_edges(problem),
        device_of_group=plan.device_of_group,
        planners=tuple(planners),
        measured=tuple(measured),
        path=path_parts(run, realised_path(run)),
    )
