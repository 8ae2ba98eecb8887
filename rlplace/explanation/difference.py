"""Two plans side by side: what they take, what they hold, and which blocks of groups make the difference.

The groups that sit on different devices are gathered into blocks: groups of one module that go from the same device to the same
device. Each block is moved alone from where the first plan has it to where the second has it, and the step simulated. The
effects of blocks do not add up, because blocks need one another; what is left is stated.

Plans that differ by a renaming of like devices run alike. Where a renaming of the second plan's devices makes it sit closer to
the first, and its step stays what it was, it is compared under those names.

A whole strategy beside another plan: what each takes, and the words in which two strategies differ.

Each word is put alone into the first strategy and the step evaluated again. The effects do not add up, because words need one
another; one that cannot stand alone has none.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.explanation.alternatives import SAME
from rlplace.explanation.comparison import PLACEMENT, STRATEGY, Block, Difference, Side, Word
from rlplace.placement.common.floor import device_classes
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import uniform_words
from rlplace.planned import Planned
from rlplace.problem import Problem
from rlplace.simulator.path import module_of, realised_path, seconds_by_cause
from rlplace.simulator.simulated_plan import SimulatedPlan, moved, run_plan, run_unchecked
from rlplace.strategy.costs import RECOMPUTE
from rlplace.strategy.drafts import OFFLOAD, Draft

_BLOCK_WORDS = {"recompute": RECOMPUTE, "offload": OFFLOAD}
_MICRO = ("microbatch", "microbatches")


def strategy_side(planned: Planned, plan: PlacementPlan) -> Side:
    """Returns a plan with a strategy, evaluated again, as one side of a comparison."""
    assert plan.strategy is not None
    result = planned.evaluate(plan.strategy)
    names = [device.name for device in planned.search_problem.cluster.devices]
    return Side(
        kind=STRATEGY,
        planner=plan.planner,
        words=uniform_words(plan.strategy),
        samples=plan.strategy.batch,
        step_time_s=result.step_time_s if result.feasible else None,
        feasible=result.feasible,
        peak_bytes=dict(zip(names, result.peak_memory_bytes, strict=True)),
        parts={part.replace("_", " "): seconds for part, seconds in result.parts.items()},
    )


def diff_strategies(planned: Planned, first: PlacementPlan, second: PlacementPlan, other: Planned | None = None) -> Difference:
    """Compares two plans that both have a strategy.

    Args:
        planned: The first plan's model and cluster, and the second's unless `other` is given.
        first: A plan.
        second: Another.
        other: The second plan's model and cluster, where they are others.

    Raises:
        InputError: A strategy cannot be evaluated.
    """
    target = other or planned
    a, b = planned.draft(first.strategy), target.draft(second.strategy)
    sides = strategy_side(planned, first), strategy_side(target, second)
    names = planned.search_problem.costs.names
    if target.search_problem.costs.names != names:
        return Difference(*sides, notes=("the plans are for models with other blocks: only their steps are compared",))
    words = [_word(name, fields, a, b, planned, sides[0].step_time_s) for name, fields in _parts(a, b).items()]
    notes = () if other is None else ("the plans are for other models or clusters: words are put into the first on its own",)
    return Difference(*sides, words=tuple(word for word in words if word), lines=tuple(_blocks(a, b, names)), notes=notes)


def _parts(a: Draft, b: Draft) -> dict[str, tuple[str, ...]]:
    """Returns the words of strategies, with the fields of drafts that hold them."""
    stages: dict[str, tuple[str, ...]] = {"meshes": ("places", "place_of_stage"), "blocks a stage": ("bounds",)}
    if a.stages != b.stages:
        stages = {"stages": ("places", "place_of_stage", "bounds", "schedule")}
    rest = {"micro-batches": _MICRO, "schedule": ("schedule",), "recompute": ("recompute",), "offload": ("offload",)}
    if a.beside or b.beside:
        rest["pipelines beside it"] = ("beside",)
    return stages | rest


def _word(name: str, fields: tuple[str, ...], a: Draft, b: Draft, planned: Planned, step_s: float | None) -> Word | None:
    """Returns a word that differs, with its effect; None where both say the same."""
    taken = {field: getattr(b, field) for field in fields}
    if all(getattr(a, field) == value for field, value in taken.items()):
        return None
    word = Word(name, _word_text(name, a), _word_text(name, b))
    if step_s is None:
        return word
    alone, notes = dataclasses.replace(a, **taken), []
    try:
        if alone.batch != a.batch:  # another number of replicas brings its micro-batches along
            notes.append("with its micro-batches")
            alone = dataclasses.replace(alone, microbatch=b.microbatch, microbatches=b.microbatches)
        planned.draft(alone.strategy(planned.search_problem.costs.names))
        result = planned.finer.evaluate(alone)
    except InputError:
        return word
    if alone.batch != a.batch:
        return word
    notes += [] if result.feasible else ["does not fit alone"]
    return dataclasses.replace(word, effect_s=result.step_time_s - step_s, note=", ".join(notes))


def _word_text(name: str, draft: Draft) -> str:
    """Returns the text of a word for a draft."""
    if name == "micro-batches":
        return f"{_some(draft.microbatches)} of {_some(draft.microbatch)}"
    if name in _BLOCK_WORDS:
        values, chosen = _BLOCK_WORDS[name], getattr(draft, name)
        counts = [(chosen.count(number), value) for number, value in enumerate(values) if number in chosen]
        return ", ".join(f"{value} of {count}" for count, value in counts)
    if name == "schedule":
        return str(draft.schedule)
    if name == "pipelines beside it":
        return "; ".join(
            f"{_some(one.microbatches)} of {_some(one.microbatch)} on {_devices(one.devices)}" for one in draft.beside
        )
    if name == "blocks a stage":
        return _some([len(blocks) for blocks in draft.ranges])
    shapes = []
    for place in draft.places:
        axes = [f"{axis} {size}" for axis in ("replicate", "shard", "context", "tensor") if (size := getattr(place, axis)) > 1]
        axes += [f"level {place.sharding}"] * (place.sharding > 0) + ["sequence parallel"] * place.sequence_parallel
        shapes.append(f"{', '.join(axes) or 'alone'} on {_devices(place.devices)}")
    chunks = f"{draft.stages} chunks: " if draft.stages > len(draft.places) else ""
    return chunks + "; ".join(shapes)


def _some(values: Sequence[int]) -> str:
    return "-".join(map(str, values if len(set(values)) > 1 else values[:1]))


def _devices(devices: Sequence[int]) -> str:
    run = list(range(devices[0], devices[0] + len(devices)))
    return f"{devices[0]} to {devices[-1]}" if list(devices) == run and len(run) > 2 else " ".join(map(str, devices))


def _blocks(a: Draft, b: Draft, names: Sequence[str]) -> list[str]:
    """Returns one line for each row of consecutive blocks whose recomputation or offload differs alike."""
    lines = []
    for key, values in _BLOCK_WORDS.items():
        here, there = getattr(a, key), getattr(b, key)
        for (one, other), run in groupby(range(len(names)), key=lambda block: (here[block], there[block])):
            blocks = list(run)
            if one != other:
                span = names[blocks[0]] if len(blocks) == 1 else f"{names[blocks[0]]} to {names[blocks[-1]]}"
                lines.append(f"{key} of {span}: {values[one]} in the first, {values[other]} in the second")
    return lines


_SETTINGS = {"order given": "order", "priorities given": "priority"}
"""What a plan may say beside devices, and its field."""

MOST_BLOCKS = 64
"""Blocks whose effect is simulated; with more, the largest by time are."""


def diff(problem: Problem, first: PlacementPlan, second: PlacementPlan, *, other: Problem | None = None) -> Difference:
    """Compares two plans.

    Args:
        problem: The problem of the first plan, and of the second unless `other` is given.
        first: A plan.
        second: Another.
        other: The second plan's problem where that is another one; its groups must have the same names.

    Raises:
        InputError: A plan is not for its problem, or the problems' groups differ.
    """
    notes: list[str] = []
    target = problem if other is None else other
    if target.group_names != problem.group_names:
        mine, theirs = set(problem.group_names), set(target.group_names)
        raise InputError(
            f"diff: the plans are for problems whose groups differ ({problem.num_groups} and {target.num_groups}, "
            f"{len(mine & theirs)} names in common); compare plans of one model at one granularity"
        )
    a, b = run_plan(problem, first), run_plan(target, second)
    if target.fingerprint != problem.fingerprint:
        notes.append(
            "the plans are for different problems with the same groups: each is simulated on its own, blocks on the first"
        )
    names = {device.name: index for index, device in enumerate(problem.devices)}
    devices, renamed = _second_devices(a, b, names)
    there = placement_side(b)
    peaks = {renamed.get(name, name): peak for name, peak in there.peak_bytes.items()}
    blocks, same, more = _blocks_difference(a, devices)
    notes += more
    given = {name: tuple(getattr(one, field) is not None for one in (first, second)) for name, field in _SETTINGS.items()}
    return Difference(
        first=placement_side(a),
        second=dataclasses.replace(there, peak_bytes={name: peaks.get(name, 0) for name in names}),
        settings={name: (here, there) for name, (here, there) in given.items() if here != there},
        renamed=renamed,
        blocks=blocks,
        same_groups=same,
        notes=tuple(notes),
    )


def placement_side(run: SimulatedPlan) -> Side:
    """Returns a placement as one side of a comparison."""
    problem, plan, line = run.problem, run.plan, run.line
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
        path=seconds_by_cause(realised_path(run)),
    )


def _second_devices(a: SimulatedPlan, b: SimulatedPlan, names: Mapping[str, int]) -> tuple[NDArray[np.int32], dict[str, str]]:
    """Returns the second plan's devices as numbers of the first's problem, renamed among like ones where that changes nothing.

    Raises:
        InputError: The second plan uses a device that the first's problem does not have.
    """
    missing = [d.name for d in b.problem.devices if d.name not in names]
    used = [b.problem.devices[d].name for d in np.unique(b.plan.device_of_group)]
    if any(name in missing for name in used):
        raise InputError(
            f"diff: the second plan uses {next(n for n in used if n in missing)}, which the first's problem does not have"
        )
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
    swapped = {
        device.name: a.problem.devices[renaming[d]].name for d, device in enumerate(a.problem.devices) if renaming[d] != d
    }
    return renamed, swapped


def _closest_names(problem: Problem, first: NDArray[np.int32], second: NDArray[np.int32]) -> NDArray[np.int64]:
    """Int [D], a renaming of devices among like ones under which most groups sit alike."""
    from scipy.optimize import linear_sum_assignment

    renaming = np.arange(problem.num_devices)
    together = np.zeros((problem.num_devices, problem.num_devices))
    np.add.at(together, (second, first), 1.0)
    for members in device_classes(problem):
        own = together[np.ix_(members, members)] + 1e-6 * np.eye(len(members))  # among equal ones the one that renames least
        rows, columns = linear_sum_assignment(-own)
        renaming[np.array(members)[rows]] = np.array(members)[columns]
    return renaming


def _blocks_difference(a: SimulatedPlan, devices: NDArray[np.int32]) -> tuple[tuple[Block, ...], int, list[str]]:
    """Returns the blocks with their effects, how many groups sit alike, and notes."""
    problem, here = a.problem, a.plan.device_of_group
    differ = np.flatnonzero(here != devices)
    members: dict[tuple[str, int, int], list[int]] = {}
    for group in differ.tolist():
        key = (module_of(problem.group_names[group]), int(here[group]), int(devices[group]))
        members.setdefault(key, []).append(group)
    notes = []
    mean_s = np.where(problem.group_allowed, problem.group_time_s, 0.0).sum(axis=1)
    by_time = sorted(members, key=lambda key: -float(mean_s[members[key]].sum()))
    simulated = set(itertools.islice(by_time, MOST_BLOCKS))
    if len(members) > MOST_BLOCKS:
        notes.append(f"of {len(members)} blocks the {MOST_BLOCKS} with most work were simulated")
    base, reason = a, ""
    if a.plan.order is not None:
        base = run_unchecked(problem, dataclasses.replace(a.plan, order=None))
        reason = "the first plan fixes the order of ops; effects of blocks are those of the plan run by priority"
    notes += [reason] if reason and members else []
    blocks = [_block(base, key, groups, key in simulated) for key, groups in members.items()]
    blocks.sort(key=lambda block: (block.effect_s is None, -abs(block.effect_s or 0.0), block.module))
    return tuple(blocks), problem.num_groups - len(differ), notes


def _block(base: SimulatedPlan, key: tuple[str, int, int], groups: list[int], simulate: bool) -> Block:
    module, source, destination = key
    problem, effect, feasible = base.problem, None, False
    if simulate and destination < problem.num_devices and problem.group_allowed[groups, destination].all():
        line = run_unchecked(problem, moved(base.plan, groups, destination)).line
        if line.step_time_s is not None and base.line.step_time_s is not None:
            effect, feasible = line.step_time_s - base.line.step_time_s, line.feasible
    names = problem.devices[source].name, problem.devices[destination].name
    return Block(module, *names, tuple(problem.group_names[group] for group in groups), effect, feasible)
