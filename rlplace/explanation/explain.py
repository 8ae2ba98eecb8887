"""`explain` and `diff`: what bounds a plan's step, why its groups are placed as they are, what would change it, and how two
plans differ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlplace.explanation.alternatives import MOST_TARGETS, GroupChoice, alternatives, named_groups, weighty_groups
from rlplace.explanation.bounds import StepBounds
from rlplace.explanation.comparison import AS_IS, CALLS, Difference, WhatIf, what_if_lines
from rlplace.explanation.placements import PlacementStep, diff_placements
from rlplace.explanation.relax import Relaxations, relax
from rlplace.explanation.strategies import StrategyStep, diff_strategies
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.simulator.simulated_plan import run_plan
from rlplace.simulator.timeline import EXECUTOR
from rlplace.text import ms

GROUPS = 5
"""Groups whose alternatives are simulated."""

WORTHWHILE = 0.01
"""Share of the step time from which a better plan is worth a note."""


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`.

    Attributes:
        problem: Name of the problem.
        planner: Name of the planner.
        executor: Meaning of the step time.
        feasible: The step completes and fits.
        violations: Why not; empty when it is feasible.
        headline: The largest part of the step in one sentence; empty when it cannot complete.
        bounds: Bounds of the step; None when it cannot complete.
        groups: Alternatives of groups.
        what_if: Gains of other hardware; empty when they were not asked for, or the step cannot complete.
        relaxations: Changes that would make an infeasible plan fit; None for a feasible one.
        notes: Further remarks.
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
        """Returns plain JSON data."""
        data = dataclasses.asdict(self)
        for entry, group in zip(data["groups"], self.groups, strict=True):
            entry["verdict"] = group.verdict
        if self.bounds is not None:
            data["bounds"]["most_gain"] = self.bounds.most_gain
        return data

    def text(self) -> str:
        """Returns the explanation for people."""
        lines = [f"problem {self.problem}, planner {self.planner}, executor {self.executor}, simulated"]
        lines.append("feasible" if self.feasible else "infeasible: " + "; ".join(self.violations))
        if self.bounds is not None:
            lines += [f"step time {ms(self.bounds.step_time_s)} ms: {self.headline}", "", *self.bounds.lines()]
        if self.groups:
            lines += ["", *(line for choice in self.groups for line in choice.lines())]
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
        group: A group, or a module whose groups share a device, whose alternatives are simulated; default those that matter
            most.
        groups: How many of those.
        hardware: Whether to evaluate other hardware, which plans anew for each change.
        at: Prices the plan's problem for a given number of samples, to make it fit.
        calls: Simulations of each search, beside the classical floor; 0: nothing is planned anew.
        time_limit_s: Seconds of each search.
        seed: Seed of the searches.

    Raises:
        InputError: The plan is for another problem, cannot be lowered, or has no such group.
    """
    run = run_plan(problem, plan)
    step = PlacementStep(run)
    chosen = {} if group is None else named_groups(problem, group)
    notes: list[str] = []
    bounds = None if run.line.step_time_s is None else step.bounds()
    choices: Sequence[GroupChoice] = ()
    if chosen or (groups and bounds is not None):
        choices = alternatives(run, chosen or weighty_groups(run, groups))
    if plan.order is not None and choices:
        notes.append("the plan fixes the order of ops; groups are compared with the same plan run by priority")
    limits: dict[str, Any] = {"calls": calls, "time_limit_s": time_limit_s, "seed": seed}
    answers = step.what_if(**limits) if hardware and run.line.feasible else ()
    if choices and problem.num_devices > MOST_TARGETS:
        notes.append(f"groups were tried on {MOST_TARGETS} of {problem.num_devices} devices, those that hold groups first")
    base = next((entry for entry in answers if entry.change == AS_IS), None)
    if base is not None and base.replanned_s is not None and base.replanned_s < (1 - WORTHWHILE) * run.step_s:
        notes.append(f"a small search finds a plan that takes {ms(base.replanned_s)} ms as things are; plan again")
    relaxed = None if run.line.feasible else relax(problem, plan=plan, at=at, **limits)
    return Explanation(
        problem=problem.name,
        planner=plan.planner,
        executor=EXECUTOR,
        feasible=run.line.feasible,
        violations=run.line.violations,
        headline="" if bounds is None else bounds.headline,
        bounds=bounds,
        groups=tuple(choices),
        what_if=answers,
        relaxations=relaxed,
        notes=tuple(notes),
    )


def diff(problem: Problem, first: PlacementPlan, second: PlacementPlan, *, other: Problem | None = None) -> Difference:
    """Compares two placements.

    Args:
        problem: The problem of the first plan, and of the second unless `other` is given.
        first: A plan.
        second: Another.
        other: The second plan's problem where it differs; its groups must have the same names.

    Raises:
        InputError: A plan is not for its problem, or the problems' groups differ.
    """
    target = problem if other is None else other
    return diff_steps(PlacementStep(run_plan(problem, first)), PlacementStep(run_plan(target, second)))


def diff_steps(first: PlacementStep | StrategyStep, second: PlacementStep | StrategyStep) -> Difference:
    """Compares the steps of two plans; a placement and a strategy by what they take and hold alone.

    Raises:
        InputError: They are placements of groups with other names.
    """
    if isinstance(first, PlacementStep) and isinstance(second, PlacementStep):
        return diff_placements(first, second)
    if isinstance(first, StrategyStep) and isinstance(second, StrategyStep):
        return diff_strategies(first, second)
    notes = ("strategies are simulated block by block, placements task by task",)
    return Difference(first.side(), second.side(), notes=notes)
