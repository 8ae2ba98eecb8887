"""`explain`: what bounds a plan's step, why its groups are placed as they are, and what would change it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlplace.explanation.alternatives import MOST_TARGETS, GroupChoice, alternatives, named_groups, weighty_groups
from rlplace.explanation.bounds import StepBounds, headline, step_bounds
from rlplace.explanation.comparison import MOST_ROWS
from rlplace.explanation.placement_what_if import placement_what_if
from rlplace.explanation.relax import Relaxations, relax
from rlplace.explanation.what_if import AS_IS, CALLS, WhatIf, what_if_lines
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.simulator.simulated_plan import run_plan
from rlplace.simulator.timeline import EXECUTOR
from rlplace.text import gb, ms, percent, table

GROUPS = 5
"""Groups whose alternatives are looked at."""

WORTHWHILE = 0.01
"""Share of the step time from which a better plan is worth a note."""


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`.

    Attributes:
        problem: Name of the problem.
        planner: Name of the planner.
        executor: What step time means.
        feasible: The step completes and fits.
        violations: Why not; empty when it is feasible.
        headline: One sentence on what takes most of the step; empty when it cannot complete.
        bounds: What bounds the step; None when it cannot complete.
        groups: Alternatives of groups.
        what_if: What other hardware would bring; empty when it was not asked, or the step cannot complete.
        relaxations: What would make an infeasible plan fit; None for a feasible one.
        notes: What else to know.
    """

    problem: str
    planner: str
    executor: str
    feasible: bool
    violations: tuple[str, ...]
    headline: str
    bounds: StepBounds | None
    groups: tuple[GroupChoice, ...]
    what_if: tuple[WhatIf, ...]
    relaxations: Relaxations | None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON data."""
        data = dataclasses.asdict(self)
        for entry, group in zip(data["groups"], self.groups, strict=True):
            entry["verdict"] = group.verdict
        if self.bounds is not None:
            data["bounds"]["most_gain"] = self.bounds.most_gain
        return data

    def text(self) -> str:
        """For people."""
        lines = [f"problem {self.problem}, planner {self.planner}, executor {self.executor}, simulated"]
        lines.append("feasible" if self.feasible else "infeasible: " + "; ".join(self.violations))
        if self.bounds is not None:
            lines += [f"step time {ms(self.bounds.step_time_s)} ms: {self.headline}", "", *_bounds_lines(self.bounds)]
        if self.groups:
            lines += ["", *_group_lines(self.groups)]
        if self.what_if:
            lines += ["", *what_if_lines(self.what_if)]
        if self.relaxations is not None:
            lines += ["", *self.relaxations.lines()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def explain(
    problem: Problem,
    plan: PlacementPlan,
    *,
    group: str | None = None,
    groups: int = GROUPS,
    hardware: bool = True,
    at: Callable[[int], Problem] | None = None,
    calls: int = CALLS,
    time_limit_s: float | None = None,
    seed: int = 0,
) -> Explanation:
    """Explains a plan by simulating it and what is near it.

    Args:
        problem: The problem that the plan is for.
        plan: The plan.
        group: A group, or a module whose groups share a device, to look at; default those that matter most.
        groups: How many of those.
        hardware: Whether to ask what other hardware would bring, which plans anew for each change.
        at: Prices the plan's problem for a given number of samples, to make it fit.
        calls: Simulations of each search, beside the classical floor; 0: nothing is planned anew.
        time_limit_s: Seconds of each search.
        seed: Seed of the searches.

    Raises:
        InputError: The plan is for another problem, cannot be lowered, or has no such group.
    """
    run = run_plan(problem, plan)
    chosen = {} if group is None else named_groups(problem, group)
    notes: list[str] = []
    bounds = None if run.line.step_time_s is None else step_bounds(run)
    choices: Sequence[GroupChoice] = ()
    if chosen or (groups and bounds is not None):
        choices = alternatives(run, chosen or weighty_groups(run, groups))
    if plan.order is not None and choices:
        notes.append("the plan fixes the order of ops; groups are compared with the same plan run by priority")
    limits: dict[str, Any] = {"calls": calls, "time_limit_s": time_limit_s, "seed": seed}
    asked = placement_what_if(run, **limits) if hardware and run.line.feasible else ()
    if choices and problem.num_devices > MOST_TARGETS:
        notes.append(f"groups were tried on {MOST_TARGETS} of {problem.num_devices} devices, those that hold groups first")
    base = next((entry for entry in asked if entry.change == AS_IS), None)
    if base is not None and base.replanned_s is not None and base.replanned_s < (1 - WORTHWHILE) * run.step_s:
        notes.append(f"a small search finds a plan that takes {ms(base.replanned_s)} ms as things are; plan again")
    relaxed = None if run.line.feasible else relax(problem, plan=plan, at=at, **limits)
    return Explanation(
        problem=problem.name,
        planner=plan.planner,
        executor=EXECUTOR,
        feasible=run.line.feasible,
        violations=run.line.violations,
        headline="" if bounds is None else headline(bounds),
        bounds=bounds,
        groups=tuple(choices),
        what_if=tuple(asked),
        relaxations=relaxed,
        notes=tuple(notes),
    )


def _bounds_lines(bounds: StepBounds) -> list[str]:
    step = bounds.step_time_s or 1.0
    rows = [[part.cause, part.where, ms(part.seconds), percent(part.seconds / step)] for part in bounds.path[:MOST_ROWS]]
    if rest := bounds.path[MOST_ROWS:]:
        seconds = sum(part.seconds for part in rest)
        rows.append([f"{len(rest)} more", "", ms(seconds), percent(seconds / step)])
    lines = table(["critical path", "<where", "ms", "of step"], rows)
    lines += ["", *_story_lines(bounds), ""]
    rows = []
    for device in bounds.devices:
        used = percent(device.used) if device.memory_bytes else "-"
        share = percent(device.busy_s / step)
        rows.append(
            [device.name, ms(device.busy_s), share, str(device.groups), gb(device.peak_bytes), gb(device.memory_bytes), used]
        )
    lines += table(["device", "busy ms", "of step", "groups", "peak GB", "memory GB", "used"], rows)
    if bounds.channels:
        rows = [
            [link.name, ms(link.busy_s), percent(link.busy_s / step), str(link.transfers), gb(link.size_bytes)]
            for link in bounds.channels[:4]
        ]
        lines += ["", *table(["link", "busy ms", "of step", "transfers", "GB"], rows)]
    lines += ["", f"busiest device {bounds.busiest.name}"]
    if bounds.tightest is not None:
        lines.append(f"tightest memory {bounds.tightest.name}, {percent(bounds.tightest.used)} used")
    if bounds.lower_bound_s > 0:
        lines.append(
            f"no plan takes less than {ms(bounds.lower_bound_s)} ms ({bounds.lower_bound}): at most "
            f"{percent(max(bounds.most_gain, 0.0))} can be gained"
        )
    return lines


def _story_lines(bounds: StepBounds) -> list[str]:
    """Returns the longest stretches of the path, in order of time."""
    by_length = sorted(bounds.story, key=lambda stretch: stretch.start_s - stretch.end_s)
    longest = {id(stretch) for stretch in by_length[:MOST_ROWS]}
    rows = [[ms(s.start_s), ms(s.end_s), ms(s.wait_s), s.sentence] for s in bounds.story if id(s) in longest]
    lines = table(["from ms", "to ms", "waiting", "<what"], rows)
    left = len(bounds.story) - len(rows)
    return [*lines, f"and {left} shorter stretches in between"] if left else lines


def _group_lines(groups: Sequence[GroupChoice]) -> list[str]:
    lines: list[str] = []
    for choice in groups:
        count = f" ({choice.groups} groups)" if choice.groups > 1 else ""
        lines.append(f"{choice.name}{count} on {choice.device}: {choice.verdict}")
        here = choice.step_time_s
        rows = [[choice.device, ms(here), "", "here"]]
        for other in choice.alternatives:
            change = None if here is None or other.step_time_s is None else other.step_time_s - here
            what = other.reason or _causes(other.changes)
            rows.append([other.device, ms(other.step_time_s), ms(change, sign=True) if change is not None else "-", what])
        lines += table(["  on", "step ms", "change ms", "<why"], [[f"  {row[0]}", *row[1:]] for row in rows])
    return lines


def _causes(changes: Any) -> str:
    """Returns the three causes that change most."""
    largest = sorted(changes.items(), key=lambda item: -abs(item[1]))[:3]
    least = 0.01 * max((abs(seconds) for seconds in changes.values()), default=0.0)
    return ", ".join(f"{cause} {ms(seconds, sign=True)}" for cause, seconds in largest if abs(seconds) > least)
