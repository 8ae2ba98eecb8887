"""The step with each group on every other device, simulated anew: the reason for its device.

A plan with an `order` fixes what every device runs when, which leaves no place for a group that moves; its alternatives are
compared with the same plan run by priority.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import unknown_name
from rlplace.problem import Problem
from rlplace.simulator.path import realised_path, seconds_by_cause
from rlplace.simulator.simulated_plan import SimulatedPlan, moved, run_unchecked
from rlplace.text import ms, table

SAME = 1e-9
"""Step times nearer than this, relative, are equal."""

MOST_TARGETS = 32
"""Devices on which a group is tried."""


@dataclass(frozen=True)
class Alternative:
    """The plan with a group on another device.

    Attributes:
        device: Name of that device.
        step_time_s: None when the step cannot complete.
        feasible: It completes and fits.
        peak_bytes: Peak memory of that device; -1 when it was not simulated.
        reason: Why it is not feasible, else empty.
        changes: Seconds that each cause of the critical path gains (negative: loses); they add up to the change of the step.
    """

    device: str
    step_time_s: float | None
    feasible: bool
    peak_bytes: int
    reason: str
    changes: Mapping[str, float]

    @property
    def causes(self) -> str:
        """The three causes that change most."""
        largest = sorted(self.changes.items(), key=lambda item: -abs(item[1]))[:3]
        least = 0.01 * max((abs(seconds) for seconds in self.changes.values()), default=0.0)
        return ", ".join(f"{cause} {ms(seconds, sign=True)}" for cause, seconds in largest if abs(seconds) > least)


@dataclass(frozen=True)
class GroupChoice:
    """One group, or the groups of one module that share a device, and its alternatives.

    Attributes:
        name: Name of the group or module.
        groups: Number of groups.
        device: Name of its device in the plan.
        path_s: Seconds of the critical path that are its own: it runs, its outputs are sent, or it waits.
        resident_bytes: Bytes that stay on its device: parameters, gradients, optimizer state.
        step_time_s: Step time of the plan as it is; None when the step cannot complete.
        feasible: Whether the plan as it is completes and fits.
        alternatives: Every other device of the plan, quickest feasible first.
    """

    name: str
    groups: int
    device: str
    path_s: float
    resident_bytes: int
    step_time_s: float | None
    feasible: bool
    alternatives: tuple[Alternative, ...]

    @property
    def better(self) -> Alternative | None:
        """The quickest alternative that is better than where it sits, if there is one."""
        best = self.alternatives[0] if self.alternatives else None
        if best is None or not best.feasible or best.step_time_s is None:
            return None
        here = self.step_time_s
        return best if not self.feasible or here is None or best.step_time_s < here * (1.0 - SAME) else None

    @property
    def verdict(self) -> str:
        """The reason for its device, or a better device, in words."""
        here, best = self.step_time_s, self.better
        if not self.alternatives:
            return "the plan has no other device"
        if best is not None and best.step_time_s is not None:
            if not self.feasible or here is None:
                return f"on {best.device} the plan would be feasible"
            return f"{best.device} would be better: {ms(here - best.step_time_s)} ms less"
        fitting = [a for a in self.alternatives if a.feasible and a.step_time_s is not None]
        if not fitting and not self.feasible:
            return f"no other device alone makes the plan fit: {self.alternatives[0].reason}"
        if not fitting:
            return f"no other device is possible: {self.alternatives[0].reason}"
        if here is None or fitting[0].step_time_s is None:
            return "no other device makes the step complete"
        slower = fitting[0].step_time_s - here
        if slower <= here * SAME:
            return f"{fitting[0].device} would do as well"
        cause = max(fitting[0].changes.items(), key=lambda item: item[1], default=("", 0.0))
        why = f", {cause[0]} {ms(cause[1], sign=True)} ms" if cause[1] > 0 else ""
        return f"best here: {fitting[0].device} takes {ms(slower)} ms more{why}"

    def lines(self) -> list[str]:
        """Returns the verdict, and a table of all devices."""
        here = self.step_time_s
        rows = [[f"  {self.device}", ms(here), "", "here"]]
        for other in self.alternatives:
            change = None if here is None or other.step_time_s is None else other.step_time_s - here
            rows.append([f"  {other.device}", ms(other.step_time_s), ms(change, sign=True), other.reason or other.causes])
        count = f" ({self.groups} groups)" if self.groups > 1 else ""
        title = f"{self.name}{count} on {self.device}: {self.verdict}"
        return [title, *table(["  on", "step ms", "change ms", "<why"], rows)]


def alternatives(run: SimulatedPlan, members: Mapping[str, Sequence[int]]) -> tuple[GroupChoice, ...]:
    """Simulates the step with each set of groups on every other device.

    Args:
        run: The plan as it is.
        members: By name the groups of the plan's problem that move together; those of one name that sit on different devices
            are moved one device after the other.
    """
    base = by_priority(run)
    path, problem = realised_path(base), base.problem
    here = seconds_by_cause(path)
    choices = []
    for name, groups in members.items():
        devices = base.plan.device_of_group[list(groups)]
        for device in np.unique(devices).tolist():
            own = np.array(list(groups))[devices == device]
            others = [alternative(base, own, target, here) for target in targets(base) if target != device]
            others.sort(key=lambda a: (not a.feasible, a.step_time_s is None, a.step_time_s or 0.0))
            choice = GroupChoice(
                name=name,
                groups=len(own),
                device=problem.devices[device].name,
                path_s=float(sum(link.seconds for link in path if link.group in own)),
                resident_bytes=int(problem.resident_bytes[own].sum()),
                step_time_s=base.line.step_time_s,
                feasible=base.line.feasible,
                alternatives=tuple(others),
            )
            choices.append(choice)
    return tuple(choices)


def targets(run: SimulatedPlan) -> list[int]:
    """Returns the plan's devices; of more than `MOST_TARGETS` those that hold groups first."""
    count = run.problem.num_devices
    if count <= MOST_TARGETS:
        return list(range(count))
    used = np.unique(run.plan.device_of_group).tolist()
    return list(dict.fromkeys([*used, *range(count)]))[:MOST_TARGETS]


def by_priority(run: SimulatedPlan) -> SimulatedPlan:
    """Returns the plan without an order, in which a group that moves has no place."""
    return run if run.plan.order is None else run_unchecked(run.problem, dataclasses.replace(run.plan, order=None))


def alternative(
    base: SimulatedPlan, groups: NDArray[np.int64], target: int, here: Mapping[str, float] | None = None
) -> Alternative:
    """Simulates the step with groups on another device; causes of its change where those of the step as it is are given."""
    problem, name = base.problem, base.problem.devices[target].name
    barred = groups[~problem.group_allowed[groups, target]]
    if len(barred):
        fixed = int(problem.group_device[barred[0]])
        reason = f"cannot run on {name}" if fixed < 0 else f"fixed to {problem.devices[fixed].name}"
        return Alternative(name, None, False, -1, reason, {})
    run = run_unchecked(problem, moved(base.plan, groups, target))
    peak = int(run.line.peak_memory_bytes[target])
    changes: dict[str, float] = {}
    if run.line.step_time_s is not None and here is not None:
        there = seconds_by_cause(realised_path(run))
        changes = {cause: there.get(cause, 0.0) - here.get(cause, 0.0) for cause in sorted({*there, *here})}
    reason = "" if run.line.feasible else run.line.violations[0]
    return Alternative(name, run.line.step_time_s, run.line.feasible, peak, reason, changes)


def weighty_groups(run: SimulatedPlan, count: int) -> dict[str, list[int]]:
    """Returns the groups that matter most: two thirds by their seconds on the critical path, the rest by their resident
    bytes.
    """
    problem = run.problem
    own = np.zeros(problem.num_groups)
    for link in realised_path(run):
        own[link.group] += link.seconds
    by_time = [g for g in np.argsort(-own, kind="stable").tolist() if own[g] > 0]
    by_size = np.argsort(-problem.resident_bytes, kind="stable").tolist()
    chosen = dict.fromkeys(by_time[: count - count // 3])
    for group in [*by_size, *by_time]:
        if len(chosen) < count:
            chosen[group] = None
    return {problem.group_names[group]: [group] for group in chosen}


def named_groups(problem: Problem, name: str) -> dict[str, list[int]]:
    """Returns the group of this name; else all groups of the module of this name.

    Raises:
        InputError: There is neither; the message has the nearest name.
    """
    if name in problem.group_names:
        return {name: [problem.group_names.index(name)]}
    inside = [g for g, group in enumerate(problem.group_names) if group.startswith((f"{name}.", f"{name}#"))]
    if not inside:
        raise unknown_name("group or module", name, problem.group_names)
    return {name: inside}
