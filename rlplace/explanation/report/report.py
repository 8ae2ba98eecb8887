"""`rlplace.report`: a plan as an HTML page that needs no network."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from rlplace.cluster.links import Device, fullest_share
from rlplace.cost.timings import PlanTiming, PlanTimings
from rlplace.errors import InputError, RlplaceError, show
from rlplace.explanation.report import DEFAULT_PLANNERS, sections
from rlplace.explanation.report.data import PlannerRow, ReportData, report_data
from rlplace.explanation.report.step_timeline import StepTimeline
from rlplace.files import check_output, write_text
from rlplace.placement import NEEDS_SPLIT, get_planner
from rlplace.placement.ask import MISSING, attempt
from rlplace.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.simulator import Timeline, simulate


def report(
    problem: Problem,
    plan: PlacementPlan,
    path: str | Path,
    *,
    planners: Sequence[str] = DEFAULT_PLANNERS,
    measurements: PlanTimings | Sequence[PlanTiming] | None = None,
    seed: int = 0,
    time_limit_s: float | None = 2.0,
    progress: Callable[[str], None] | None = None,
) -> ReportData:
    """Writes a report of a plan: one HTML file, complete or not at all.

    Args:
        problem: The priced problem.
        plan: A plan for it. An infeasible one gets a report too, which states the reasons.
        path: The HTML file.
        planners: Planners whose plans for the same problem the table shows; none: no table.
        measurements: Step times of plans on real devices, as `rlplace measure --plans` writes them.
        seed: Seed of the planners.
        time_limit_s: Time limit of each planner, in seconds.
        progress: Called with the name of each planner that begins.

    Returns:
        The content of the report.

    Raises:
        InputError: The plan is for another problem, the path cannot be written, or a planner is unknown.
    """
    check_arguments(problem, plan, planners)
    check_output(path)
    measured = measurements.plans if isinstance(measurements, PlanTimings) else tuple(measurements or ())
    data = report_data(problem, plan, measured=measured)
    rows = planner_rows(problem, plan, data.timeline, planners, seed=seed, time_limit_s=time_limit_s, report=progress)
    data = dataclasses.replace(data, planners=rows)
    write_text(path, render(data))
    return data


def check_arguments(problem: Any, plan: Any, planners: Any) -> None:
    """Refuses arguments that are not a problem, a plan and a list of names."""
    if not isinstance(problem, Problem):
        raise InputError(f"report: expected a Problem, found {type(problem).__name__}; Problem.load reads a file")
    if not isinstance(plan, PlacementPlan):
        raise InputError(f"report: expected a PlacementPlan, found {type(plan).__name__}; PlacementPlan.load reads a file")
    if isinstance(planners, str) or not isinstance(planners, Iterable) or not all(isinstance(name, str) for name in planners):
        raise InputError(f"report: planners must be a list of names such as ['heft', 'best'], found {show(planners)}")


def planner_rows(
    problem: Problem,
    plan: PlacementPlan,
    timeline: StepTimeline,
    names: Sequence[str] = DEFAULT_PLANNERS,
    *,
    seed: int = 0,
    time_limit_s: float | None = 2.0,
    report: Callable[[str], None] | None = None,
) -> tuple[PlannerRow, ...]:
    """Returns the plan of the report and those of other planners, quickest first, those that do not fit last.

    Every planner plans steps with the plan's number of samples.

    Args:
        problem: The priced problem.
        plan: The plan of the report.
        timeline: Timeline of that plan.
        names: Names of planners; none: no table.
        seed: Seed of all planners.
        time_limit_s: Time limit of each planner in seconds.
        report: Called with the name of each planner that begins.

    Raises:
        InputError: Unknown planner, or one that plans another kind of problem.
    """
    for name in names:
        get_planner(name)
        if name in NEEDS_SPLIT:
            raise InputError(f"planner {name} plans another kind of problem, so its step times do not compare; leave it out")
    if not names:
        return ()
    rows = [_row(plan.planner, plan, timeline, timeline.devices, None)]
    for name in dict.fromkeys(names):
        if report is not None:
            report(name)
        run = attempt(get_planner(name), problem, seed=seed, catch=(RlplaceError,), time_limit_s=time_limit_s)
        if isinstance(run.error, InputError):
            raise run.error
        if run.answer is None:
            note = f"{'cannot run' if run.status == MISSING else 'no plan'}: {run.reason}"
            rows.append(PlannerRow(name, False, None, False, None, 0, None, note))
        else:
            rows.append(_row(name, run.answer, simulate(problem, run.answer), problem.devices, run.seconds))
    return tuple(sorted(rows, key=lambda row: row.order))


def _row(
    name: str, plan: PlacementPlan, line: Timeline | StepTimeline, devices: Sequence[Device], seconds: float | None
) -> PlannerRow:
    """Returns the row of a planner; `seconds` is None for the plan of the report."""
    return PlannerRow(
        planner=name,
        this=seconds is None,
        step_time_s=line.step_time_s,
        feasible=line.feasible,
        memory_share=fullest_share(line.peak_memory_bytes.tolist(), devices),
        devices_used=len(np.unique(plan.device_of_group)),
        seconds=seconds,
        note="" if line.feasible else line.violations[0],
    )


SCRIPTS = ("base.js", "timeline.js", "memory.js", "tree.js", "graph.js", "main.js")
_SECTIONS = {
    "timeline": "Timeline", "path": "Critical path", "devices": "Devices", "graph": "Graph", "planners": "Planners",
    "measured": "Measured", "about": "About",
}  # fmt: skip
_ALWAYS = ("timeline", "graph", "about")


def render(data: ReportData) -> str:
    """Returns the page as one HTML text that loads nothing: a policy in its head forbids every request and all other
    scripts.
    """
    from jinja2 import Environment

    from rlplace import __version__

    style = _text("page.css")
    script = '(() => {\n"use strict";\n' + "\n".join(_text(name) for name in SCRIPTS) + "\n})();\n"
    tables, allowed = sections.sections(data), f"script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    template = Environment(autoescape=True, keep_trailing_newline=True).from_string(_text("page.html"))
    page = template.render(
        title=sections.page_title(data),
        links={name: title for name, title in _SECTIONS.items() if name in (*_ALWAYS, *tables)},
        summary=sections.summary(data),
        sections=tables,
        costliest=sections.costliest(data),
        about=sections.about(data, __version__),
        style=style,
        script=script,
        data=json_text(data.to_dict()),
        policy=f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'",
    )
    return page.encode("utf-8", "replace").decode("utf-8")


def json_text(data: Any) -> str:
    """Returns JSON that is safe inside a script element: no tag can begin or end in it, whatever the names are."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(name: str) -> str:
    return resources.files("rlplace.explanation.report.page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()
