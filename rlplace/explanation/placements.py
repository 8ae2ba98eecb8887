"""The step of a placement, explained: what other hardware would bring, and the difference from another placement.

Groups that two placements have on different devices are gathered into blocks: groups of one module that go from the same device
to the same device. Each block is moved alone from its device in the first plan to that in the second, and the step simulated.
The effects of blocks do not add up, because blocks need one another.

Plans that differ by a renaming of like devices run alike. Where a renaming of the second plan's devices brings it closer to the
first, and its step stays the same, it is compared under those names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InfeasibleError, InputError
from rlplace.explanation import changes
from rlplace.explanation.alternatives import SAME, alternative, by_priority
from rlplace.explanation.bounds import StepBounds, channel_loads, device_loads, step_bounds
from rlplace.explanation.comparison import (
    AS_IS,
    CALLS,
    PLACEMENT,
    Difference,
    MovedBlock,
    Side,
    Variant,
    WhatIf,
    evaluate_variants,
)
from rlplace.placement import get_planner
from rlplace.placement.common.floor import device_classes
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.simulator.path import module_of, realised_path, seconds_by_cause
from rlplace.simulator.simulated_plan import SimulatedPlan, run_unchecked

SETTINGS = {"order given": "order", "priorities given": "priority"}
"""Settings of a plan beside devices, and their fields."""

MOST_BLOCKS = 64
"""Blocks whose effect is simulated; with more, the largest by time are."""


@dataclass(frozen=True, eq=False)
class PlacementStep:
    """A simulated placement as an `rlplace.explanation.comparison.ExplainedStep`."""

    run: SimulatedPlan

    def bounds(self) -> StepBounds:
        """Returns the bounds of the step, which completes."""
        return step_bounds(self.run)

    def side(self) -> Side:
        """Returns the placement as one side of a comparison."""
        problem, plan, line = self.run.problem, self.run.plan, self.run.line
        predicted, used = line.predicted(problem), len(np.unique(plan.device_of_group))
        return Side(
            kind=PLACEMENT,
            planner=plan.planner,
            words=f"groups on {used} device{'s' if used > 1 else ''}",
            samples=line.samples,
            step_time_s=line.step_time_s,
            feasible=line.feasible,
            peak_bytes={d.name: int(peak) for d, peak in zip(problem.devices, line.peak_memory_bytes, strict=True)},
            parts={"computing": predicted.compute, "moving": predicted.transfer, "idle": predicted.idle},
            path=seconds_by_cause(realised_path(self.run)),
        )

    def what_if(self, *, calls: int = CALLS, time_limit_s: float | None = None, seed: int = 0) -> tuple[WhatIf, ...]:
        """Returns the plan on its own hardware, then one change at a time; see `ExplainedStep`."""
        limits: dict[str, Any] = {"time_limit_s": time_limit_s, "seed": seed}
        variants = []
        for change, problem in _hardware(self.run):
            if problem is None:
                continue
            same = run_unchecked(problem, _fitted(self.run.plan, problem))
            line, devices = same.line, tuple(same.plan.device_of_group.tolist())
            search = partial(_search, same, calls, limits) if calls else None
            step_s = partial(_step_s, same)
            variants.append(Variant(change, line.samples, devices, line.step_time_s, line.feasible, step_s, search))
        return evaluate_variants(variants)


def _hardware(run: SimulatedPlan) -> Iterator[tuple[str, Problem | None]]:
    """Yields the problem as it is, then on other hardware; None where it cannot be changed so."""
    problem = run.problem
    yield AS_IS, problem
    busiest = int(np.argmax([load.busy_s for load in device_loads(run)]))
    yield f"one more device like {problem.devices[busiest].name}", changes.with_device(problem, busiest)
    if any(device.memory_bytes is not None for device in problem.devices):
        yield "double the memory", changes.with_memory(problem, 2.0)
    yield f"{problem.devices[busiest].name} twice as fast", changes.with_speed(problem, busiest, 2.0)
    if problem.num_devices == 1:
        return
    yield "all links twice as fast", changes.with_links(problem, 2.0)
    used = channel_loads(run)
    if used:
        yield f"link {used[0].name} twice as fast", changes.with_links(problem, 2.0, channel=used[0].channel)
    yield "communication for free", changes.with_free_links(problem)


def _fitted(plan: PlacementPlan, problem: Problem) -> PlacementPlan:
    """Returns the plan for a problem that may have more devices."""
    if plan.order is None:
        return plan
    empty: list[Any] = [[]] * (problem.num_devices - len(plan.order))
    return dataclasses.replace(plan, order=[*plan.order, *empty])


def _step_s(same: SimulatedPlan, devices: tuple[int, ...]) -> float:
    if max(devices, default=0) >= same.problem.num_devices:
        return math.inf
    plan = dataclasses.replace(same.plan, device_of_group=np.array(devices, dtype=np.int32), priority=None, order=None)
    run = run_unchecked(same.problem, plan)
    return run.step_s if run.line.feasible else math.inf


def _search(same: SimulatedPlan, calls: int, limits: dict[str, Any], known: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns the floor's plan, and the result of a search from the best plan that is known."""
    candidates = list(known)
    for planner in ("best", "local_search"):
        extra: dict[str, Any] = {}
        if planner == "local_search":
            extra = {"calls": calls, "start": np.array(min(candidates, key=partial(_step_s, same)), dtype=np.int32)}
        with contextlib.suppress(InfeasibleError):
            candidates.append(tuple(get_planner(planner)(same.problem, **limits, **extra).device_of_group.tolist()))
    return candidates


def diff_placements(first: PlacementStep, second: PlacementStep) -> Difference:
    """Compares two placements whose groups have the same names.

    Raises:
        InputError: The problems' groups differ, or the second plan uses a device that the first's problem does not have.
    """
    a, b = first.run, second.run
    problem, target, notes = a.problem, b.problem, []
    if target.group_names != problem.group_names:
        common = set(problem.group_names) & set(target.group_names)
        raise InputError(
            f"diff: the plans are for problems whose groups differ ({problem.num_groups} and {target.num_groups}, "
            f"{len(common)} names in common); compare plans of one model at one granularity"
        )
    if target.fingerprint != problem.fingerprint:
        notes.append(
            "the plans are for different problems with the same groups: each is simulated on its own, blocks on the first"
        )
    names = {device.name: index for index, device in enumerate(problem.devices)}
    devices, renamed = _second_devices(a, b, names)
    there = second.side()
    peaks = {renamed.get(name, name): peak for name, peak in there.peak_bytes.items()}
    blocks, more = _moved_blocks(a, devices)
    given = {name: tuple(getattr(run.plan, field) is not None for run in (a, b)) for name, field in SETTINGS.items()}
    return Difference(
        first=first.side(),
        second=dataclasses.replace(there, peak_bytes={name: peaks.get(name, 0) for name in names}),
        settings={name: (mine, theirs) for name, (mine, theirs) in given.items() if mine != theirs},
        renamed=renamed,
        blocks=blocks,
        same_groups=int((a.plan.device_of_group == devices).sum()),
        notes=(*notes, *more),
    )


def _second_devices(a: SimulatedPlan, b: SimulatedPlan, names: Mapping[str, int]) -> tuple[NDArray[np.int32], dict[str, str]]:
    """Returns the second plan's devices as numbers of the first's problem, renamed among like ones where that changes nothing.

    Raises:
        InputError: The second plan uses a device that the first's problem does not have.
    """
    used = [b.problem.devices[d].name for d in np.unique(b.plan.device_of_group)]
    missing = next((name for name in used if name not in names), None)
    if missing is not None:
        raise InputError(f"diff: the second plan uses {missing}, which the first's problem does not have")
    number = np.array([names.get(device.name, -1) for device in b.problem.devices], dtype=np.int32)
    devices = number[b.plan.device_of_group]
    if b.problem is not a.problem or b.plan.order is not None:
        return devices, {}
    renaming = _closest_names(a.problem, a.plan.device_of_group, devices)
    renamed = renaming[devices].astype(np.int32)
    if (renamed == devices).all():
        return devices, {}
    same = run_unchecked(a.problem, dataclasses.replace(b.plan, device_of_group=renamed))
    if abs(same.step_s - b.step_s) > SAME * b.step_s:
        return devices, {}
    here = [device.name for device in a.problem.devices]
    return renamed, {name: here[new] for name, new in zip(here, renaming.tolist(), strict=True) if name != here[new]}


def _closest_names(problem: Problem, first: NDArray[np.int32], second: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns int [D], a renaming of devices among like ones under which most groups sit alike."""
    from scipy.optimize import linear_sum_assignment

    renaming = np.arange(problem.num_devices)
    together = np.zeros((problem.num_devices, problem.num_devices))
    np.add.at(together, (second, first), 1.0)
    for members in device_classes(problem):
        own = together[np.ix_(members, members)] + 1e-6 * np.eye(len(members))  # among equal ones the one that renames least
        rows, columns = linear_sum_assignment(-own)
        renaming[np.array(members)[rows]] = np.array(members)[columns]
    return renaming


def _moved_blocks(a: SimulatedPlan, devices: NDArray[np.int32]) -> tuple[tuple[MovedBlock, ...], list[str]]:
    """Returns the blocks with their effects, and notes."""
    problem, here = a.problem, a.plan.device_of_group
    members: dict[tuple[str, int, int], list[int]] = {}
    for group in np.flatnonzero(here != devices).tolist():
        key = (module_of(problem.group_names[group]), int(here[group]), int(devices[group]))
        members.setdefault(key, []).append(group)
    notes = []
    mean_s = np.where(problem.group_allowed, problem.group_time_s, 0.0).sum(axis=1)
    by_time = sorted(members, key=lambda key: -float(mean_s[members[key]].sum()))
    if len(members) > MOST_BLOCKS:
        notes.append(f"of {len(members)} blocks the {MOST_BLOCKS} with most work were simulated")
    base = by_priority(a) if members else a
    if members and a.plan.order is not None:
        notes.append("the first plan fixes the order of ops; effects of blocks are those of the plan run by priority")
    simulated = set(by_time[:MOST_BLOCKS])
    blocks = [_moved_block(base, key, groups, key in simulated) for key, groups in members.items()]
    blocks.sort(key=lambda block: (block.effect_s is None, -abs(block.effect_s or 0.0), block.module))
    return tuple(blocks), notes


def _moved_block(base: SimulatedPlan, key: tuple[str, int, int], groups: list[int], simulate: bool) -> MovedBlock:
    module, source, destination = key
    problem, effect, feasible = base.problem, None, False
    there = alternative(base, np.array(groups), destination) if simulate else None
    if there is not None and there.step_time_s is not None and base.line.step_time_s is not None:
        effect, feasible = there.step_time_s - base.line.step_time_s, there.feasible
    names = problem.devices[source].name, problem.devices[destination].name
    return MovedBlock(module, *names, tuple(problem.group_names[group] for group in groups), effect, feasible)
