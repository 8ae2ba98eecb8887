"""`ReportData`: the content of a report on a plan, and its compact form inside the page."""

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
)
from rlplace.explanation.report.modules import GroupEdges, ReportTree, forward_order, group_edges, module_tree
from rlplace.explanation.report.step_timeline import MemoryCurve, StepTimeline, placement_timeline
from rlplace.plan import PlacementPlan
from rlplace.problem import PHASES, Problem
from rlplace.simulator import EXECUTOR, simulate
from rlplace.simulator.path import PathPart, path_parts, realised_path
from rlplace.simulator.simulated_plan import SimulatedPlan

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
CURVE_POINTS = 24_000, 6000, 500
"""Of the memory of all devices in the page; of one device at most, and at least."""


@dataclass(frozen=True)
class PlannerRow:
    """A planner's plan for the report's problem.

    Attributes:
        planner: Name of the planner.
        this: Whether it is the plan of the report.
        step_time_s: Simulated step time; None without a plan.
        feasible: Whether the plan fits.
        memory_share: Largest share of a device's memory; None where no device has a limit.
        devices_used: Devices with a group; 0 without a plan.
        seconds: Time of planning; None for the plan of the report.
        note: Reason why there is no plan, or a remark.
    """

    planner: str
    this: bool
    step_time_s: float | None
    feasible: bool
    memory_share: float | None
    devices_used: int
    seconds: float | None
    note: str = ""

    @property
    def order(self) -> tuple[bool, float]:
        """A key to sort by: plans that fit first, the quickest first."""
        return not self.feasible, self.step_time_s or math.inf


@dataclass(frozen=True, eq=False)
class ReportData:
    """A plan with its timeline, and what stands beside it on the page.

    Attributes:
        plan: The plan.
        timeline: Its simulated step.
        modules: The tree of the groups.
        edges: Edges between groups.
        executor: Name of the executor that simulated it.
        planners: Rows of the table of planners, may be empty.
        measured: Plans that ran, with predicted times, may be empty; this plan is known by its fingerprint.
        path: The critical path by cause and place, longest first; empty when the step does not complete.
    """

    plan: PlacementPlan
    timeline: StepTimeline
    modules: ReportTree
    edges: GroupEdges
    executor: str = EXECUTOR
    planners: tuple[PlannerRow, ...] = ()
    measured: tuple[PlanTiming, ...] = ()
    path: tuple[PathPart, ...] = ()

    @property
    def lanes(self) -> Lanes:
        """The boxes of the timeline."""
        return self.timeline.lanes

    @property
    def memory(self) -> tuple[MemoryCurve, ...]:
        """The curves of memory in use, by device."""
        return self.timeline.memory

    @cached_property
    def groups_on_device(self) -> NDArray[np.int64]:
        """int64 [D], groups of the first replica, or the blocks that each device holds under a strategy."""
        count = np.bincount(self.timeline.device_of_group, minlength=len(self.timeline.devices))
        if self.plan.strategy is not None:
            alike = self.timeline.alike or tuple((device,) for device in range(len(count)))
            holds = [(set(stage.devices), len(stage.blocks)) for stage in self.plan.strategy.stages]
            count = np.array([sum(blocks for own, blocks in holds if first in own) for first, *_ in alike])
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
        every, most, least = CURVE_POINTS
        points = max(least, min(most, every // len(self.memory)))
        unit = max(1, int(max(curve.peak_bytes for curve in self.memory)) // 100_000)
        line = self.timeline
        step = line.step_time_s
        tick = ticks_of(step or 0.0)
        return {
            "format": FORMAT,
            "version": VERSION,
            "name": line.name,
            "step_s": step,
            "tick_s": tick,
            "memory_unit_bytes": unit,
            "phases": list(PHASES),
            "colors": {"category": COLORS, "phase": PHASE_COLORS, "collective": COLLECTIVE_COLOR, "transfer": TRANSFER_COLOR},
            "microbatches": line.microbatches,
            "devices": [
                {"name": device.name, "memory_bytes": device.memory_bytes, "peak_bytes": peak}
                for device, peak in zip(line.devices, line.peak_memory_bytes.tolist(), strict=True)
            ],
            "ops": {**_names(line.op_names), "group": line.op_group.tolist(), "phase": line.op_phase.tolist()},
            "groups": self._groups(),
            "modules": {name: list(getattr(self.modules, name)) for name in ("parent", "label", "own")},
            "edges": {name: column.tolist() for name, column in vars(self.edges).items()},
            **self._boxes(tick),
            "memory": [_curve(curve.thinned(points), tick, unit) for curve in self.memory],
        }

    def _groups(self) -> dict[str, Any]:
        line = self.timeline
        return {
            **_names(line.group_names),
            "device": line.device_of_group.tolist(),
            "node": list(self.modules.node_of_group),
            "order": self.modules.order.tolist(),
            "block": list(self.modules.block),
            "block_names": list(self.modules.block_names),
            "time_us": [float(f"{value * 1e6:.4g}") for value in line.group_s.tolist()],
            "resident_bytes": line.group_bytes.tolist(),
            "ops": np.bincount(line.op_group, minlength=len(line.group_names)).tolist(),
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
        boxes = {"gap": (start - before).tolist(), "length": (end - start).tolist(), "op": lanes.op[kept].tolist()}
        if self.timeline.microbatches > 1:
            boxes["microbatch"] = lanes.microbatch[kept].tolist()
        transfer = np.array([r.kind == LINK for r in lanes.rows])[row]
        return {
            "rows": [{**vars(lanes.rows[i]), "boxes": int(counts[i])} for i in shown],
            "links": sum(r.kind in (LINK, COLLECTIVE) for r in lanes.rows),
            "boxes": boxes,
            "transfers": {
                "bytes": lanes.size_bytes[kept][transfer].tolist(),
                "group": lanes.group[kept][transfer].tolist(),
            },
        }


def _curve(curve: MemoryCurve, tick: float, unit: int) -> dict[str, list[int]]:
    time = np.rint(curve.time_s / tick).astype(np.int64)
    size = np.rint(curve.in_use_bytes / unit).astype(np.int64)
    return {"time": np.diff(time, prepend=0).tolist(), "size": np.diff(size, prepend=0).tolist()}


def _names(names: Sequence[str]) -> dict[str, Any]:
    shared, rest = front_coded(names)
    return {"shared": shared, "rest": rest}


def report_data(
    problem: Problem,
    plan: PlacementPlan,
    *,
    planners: Sequence[PlannerRow] = (),
    measured: Sequence[PlanTiming] = (),
) -> ReportData:
    """Simulates a placement and lays out the report.

    Args:
        problem: The priced problem.
        plan: A plan for it; an infeasible one has a report too, which states the reasons.
        planners: Rows of `rlplace.explanation.report.report.planner_rows`.
        measured: Plans that ran.

    Raises:
        InputError: The plan is for another problem, or has more than `MAX_OPS` ops.
    """
    if problem.num_ops > MAX_OPS:
        raise InputError(
            f"report: the step has {problem.num_ops} ops, a page holds {MAX_OPS}; rlplace simulate --trace writes them all"
        )
    run = SimulatedPlan(problem, plan, simulate(problem, plan))
    return ReportData(
        plan=plan,
        timeline=placement_timeline(run),
        modules=module_tree(problem, plan, forward_order(problem)),
        edges=group_edges(problem),
        planners=tuple(planners),
        measured=tuple(measured),
        path=path_parts(run, realised_path(run)),
    )
