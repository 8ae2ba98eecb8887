"""`rlplace.report`: a plan as an HTML page that needs no network."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from rlplace.cost.timings import PlanTiming, PlanTimings
from rlplace.errors import InputError, show
from rlplace.explanation.report import sections
from rlplace.explanation.report.data import ReportData, report_data
from rlplace.explanation.report.defaults import DEFAULT_PLANNERS
from rlplace.explanation.report.tables import planner_rows
from rlplace.files import check_output, write_text
from rlplace.plan import PlacementPlan
from rlplace.plan.words import escape
from rlplace.problem import Problem


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


SCRIPTS = ("base.js", "timeline.js", "memory.js", "tree.js", "graph.js", "main.js")
_SECTIONS = {
    "timeline": "Timeline", "path": "Critical path", "devices": "Devices", "graph": "Graph", "planners": "Planners",
    "measured": "Measured", "about": "About",
}  # fmt: skip


def render(data: ReportData) -> str:
    """Returns the page as one HTML text that loads nothing: a policy in its head forbids every request and all other
    scripts.
    """
    from rlplace import __version__

    style = _text("page.css")
    script = '(() => {\n"use strict";\n' + "\n".join(_text(name) for name in SCRIPTS) + "\n})();\n"
    parts = {
        "summary": sections.summary(data),
        "path": sections.path(data),
        "devices": sections.devices(data),
        "costliest": sections.costliest(data),
        "planners": sections.planners(data),
        "measured": sections.measured(data),
        "about": sections.about(data, __version__),
        "title": escape(sections.page_title(data)),
        "style": style,
        "script": script,
        "data": json_text(data.to_dict()),
        "policy": (
            f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; form-action 'none'"
        ),
    }
    shown = {name: title for name, title in _SECTIONS.items() if parts.get(name, "-")}
    parts["links"] = "".join(f'<a href="#{name}">{title}</a>' for name, title in shown.items())
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _text("page.html"))


def json_text(data: Any) -> str:
    """JSON that is safe inside a script element: no tag can begin or end in it, whatever the names are."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(name: str) -> str:
    return resources.files("rlplace.explanation.report.page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()
