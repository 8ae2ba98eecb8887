"""A whole strategy beside another plan: what each takes, and the words in which two strategies differ.

Each word is put alone into the first strategy and the step evaluated again. The effects do not add up, because words need one
another; one that cannot stand alone has none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby

from rlplace.errors import InputError
from rlplace.explanation.comparison import STRATEGY, Difference, Side, Word
from rlplace.explanation.timeline.again import Asked
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import uniform_words
from rlplace.strategy.costs import RECOMPUTE
from rlplace.strategy.drafts import OFFLOAD, Draft

_BLOCK_WORDS = {"recompute": RECOMPUTE, "offload": OFFLOAD}
_MICRO = ("microbatch", "microbatches")


def strategy_side(asked: Asked, plan: PlacementPlan) -> Side:
    """A plan with a strategy, evaluated again, as one side of a comparison."""
    assert plan.strategy is not None
    result = asked.evaluate(plan.strategy)
    names = [device.name for device in asked.question.cluster.devices]
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


def diff_strategies(asked: Asked, first: PlacementPlan, second: PlacementPlan, other: Asked | None = None) -> Difference:
    """Compares two plans that both have a strategy.

    Args:
        asked: The first plan's model and cluster, and the second's unless `other` is given.
        first: A plan.
        second: Another.
        other: The second plan's model and cluster, where they are others.

    Raises:
        InputError: A strategy cannot be evaluated.
    """
    target = other or asked
    a, b = asked.draft(first.strategy), target.draft(second.strategy)
    sides = strategy_side(asked, first), strategy_side(target, second)
    names = asked.question.costs.names
    if target.question.costs.names != names:
        return Difference(*sides, notes=("the plans are for models with other blocks: only their steps are compared",))
    words = [_word(name, fields, a, b, asked, sides[0].step_time_s) for name, fields in _parts(a, b).items()]
    notes = () if other is None else ("the plans are for other models or clusters: words are put into the first on its own",)
    return Difference(*sides, words=tuple(word for word in words if word), lines=tuple(_blocks(a, b, names)), notes=notes)


def _parts(a: Draft, b: Draft) -> dict[str, tuple[str, ...]]:
    """The words of strategies, with the fields of drafts that hold them."""
    stages: dict[str, tuple[str, ...]] = {"meshes": ("places", "place_of_stage"), "blocks a stage": ("bounds",)}
    if a.stages != b.stages:
        stages = {"stages": ("places", "place_of_stage", "bounds", "schedule")}
    rest = {"micro-batches": _MICRO, "schedule": ("schedule",), "recompute": ("recompute",), "offload": ("offload",)}
    if a.beside or b.beside:
        rest["pipelines beside it"] = ("beside",)
    return stages | rest


def _word(name: str, fields: tuple[str, ...], a: Draft, b: Draft, asked: Asked, step_s: float | None) -> Word | None:
    """A word that differs, with its effect; None where both say the same."""
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
        asked.draft(alone.strategy(asked.question.costs.names))
        result = asked.finer.evaluate(alone)
    except InputError:
        return word
    if alone.batch != a.batch:
        return word
    notes += [] if result.feasible else ["does not fit alone"]
    return dataclasses.replace(word, effect_s=result.step_time_s - step_s, note=", ".join(notes))


def _word_text(name: str, draft: Draft) -> str:
    """The text of a word for a draft."""
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
    """One line for each row of consecutive blocks whose recomputation or offload differs alike."""
    lines = []
    for key, values in _BLOCK_WORDS.items():
        here, there = getattr(a, key), getattr(b, key)
        for (one, other), run in groupby(range(len(names)), key=lambda block: (here[block], there[block])):
            blocks = list(run)
            if one != other:
                span = names[blocks[0]] if len(blocks) == 1 else f"{names[blocks[0]]} to {names[blocks[-1]]}"
                lines.append(f"{key} of {span}: {values[one]} in the first, {values[other]} in the second")
    return lines
