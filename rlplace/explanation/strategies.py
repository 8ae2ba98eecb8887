"""The step of a whole strategy, explained: its bounds, the gain of other hardware, and its difference from another strategy.

Each choice in which two strategies differ is put alone into the first, and the step evaluated again. The effects do not add up,
because choices need one another; one that cannot be made alone has none.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from rlplace.cluster.parse import Cluster, parse
from rlplace.errors import InfeasibleError, InputError
from rlplace.explanation.changes import larger
from rlplace.explanation.comparison import (
    AS_IS,
    CALLS,
    STRATEGY,
    ChangedWord,
    Difference,
    Side,
    Variant,
    WhatIf,
    evaluate_variants,
)
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import uniform_words
from rlplace.planned import Planned
from rlplace.strategy.costs import RECOMPUTE
from rlplace.strategy.drafts import OFFLOAD, Draft, joined
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.search import search
from rlplace.strategy.search.tries import SearchProblem
from rlplace.text import gb, ms, percent

_COMMUNICATION = ("tensor", "gather", "exchange", "hand_over")
_BLOCK_WORDS = {"recompute": RECOMPUTE, "offload": OFFLOAD}
_MICRO = ("microbatch", "microbatches")
_PRESET = re.compile(r"(\s*[\w.-]+\s*:\s*)(\d+)((?:x\d+)?(?:,[^+]*)?)")


@dataclass(frozen=True)
class StrategyBounds:
    """The parts of a step's time, by the block executor.

    Attributes:
        seconds: On the busiest stage, by ``computing``, ``running again`` (recomputation, with its collectives),
            ``communication``, ``waiting for other stages`` and ``updates``; they add up to the step.
        blocks: First and last block of the busiest stage.
        devices: Names of the devices of the busiest stage.
        fullest: The device whose memory is fullest.
        peak_bytes: Peak memory of the fullest device.
        memory_bytes: Capacity of the fullest device; None without a limit.
    """

    seconds: Mapping[str, float]
    blocks: tuple[str, str]
    devices: tuple[str, ...]
    fullest: str
    peak_bytes: int
    memory_bytes: int | None

    @property
    def bound(self) -> str:
        """The activity that takes most of the step."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {**dataclasses.asdict(self), "bound": self.bound}

    def lines(self) -> list[str]:
        """Returns the parts of the step, its busiest stage and its fullest device."""
        step_s, limit = sum(self.seconds.values()), self.memory_bytes
        parts = sorted(self.seconds.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{name} {ms(seconds)} ms ({percent(seconds / step_s)})" for name, seconds in parts if seconds > 0)
        span = " to ".join(dict.fromkeys(self.blocks))
        among = " to ".join(dict.fromkeys((self.devices[0], self.devices[-1])))
        room = f" of {gb(limit)} GB ({percent(self.peak_bytes / limit)})" if limit else ""
        return [
            f"bounded by {self.bound}: {shares}",
            f"busiest stage: {span} on {among}",
            f"fullest device: {self.fullest}, {gb(self.peak_bytes)} GB{room}",
        ]


class StrategyStep:
    """A priced strategy as an `rlplace.explanation.comparison.ExplainedStep`.

    Attributes:
        planned: The model and cluster that the strategy is evaluated on.
        plan: A plan with a strategy.
        draft: The plan's strategy as a draft.

    Args:
        planned: See above.
        plan: None: that of `planned`.

    Raises:
        InputError: The strategy cannot be evaluated.
    """

    def __init__(self, planned: Planned, plan: PlacementPlan | None = None) -> None:
        self.planned, self.plan = planned, planned.plan if plan is None else plan
        self.draft = planned.draft(self.plan.strategy)

    def bounds(self) -> StrategyBounds:
        """Evaluates the step with and without recomputation."""
        draft, evaluator, cluster = self.draft, self.planned.search_problem.scores, self.planned.search_problem.cluster
        result = evaluator.evaluate(draft)
        pipelines = (dataclasses.replace(one, recompute=bytes(len(one.recompute))) for one in draft.pipelines)
        plain, parts = evaluator.evaluate(joined(pipelines)).parts, result.parts
        again_s = max(0.0, parts["compute"] + parts["tensor"] - plain["compute"] - plain["tensor"])
        again_compute_s = min(again_s, max(0.0, parts["compute"] - plain["compute"]))
        stage = draft.strategy(self.planned.search_problem.costs.names).stages[result.bottleneck]
        peaks = zip(result.peak_memory_bytes, cluster.devices, strict=True)
        peak, fullest = max(peaks, key=lambda pair: pair[0] / (pair[1].memory_bytes or float("inf")))
        return StrategyBounds(
            seconds={
                "computing": parts["compute"] - again_compute_s,
                "running again": again_s,
                "communication": sum(parts[name] for name in _COMMUNICATION) - (again_s - again_compute_s),
                "waiting for other stages": parts["bubble"],
                "updates": parts["update"],
            },
            blocks=(stage.blocks[0], stage.blocks[-1]),
            devices=tuple(cluster.devices[device].name for device in stage.devices),
            fullest=fullest.name,
            peak_bytes=peak,
            memory_bytes=fullest.memory_bytes,
        )

    def side(self) -> Side:
        """Returns the strategy, evaluated again, as one side of a comparison."""
        strategy, result = self.plan.strategy, self.planned.finer.evaluate(self.draft)
        assert strategy is not None
        names = [device.name for device in self.planned.search_problem.cluster.devices]
        return Side(
            kind=STRATEGY,
            planner=self.plan.planner,
            words=uniform_words(strategy),
            samples=strategy.batch,
            step_time_s=result.step_time_s if result.feasible else None,
            feasible=result.feasible,
            peak_bytes=dict(zip(names, result.peak_memory_bytes, strict=True)),
            parts={part.replace("_", " "): seconds for part, seconds in result.parts.items()},
        )

    def what_if(self, *, calls: int = CALLS, time_limit_s: float | None = None, seed: int = 0) -> tuple[WhatIf, ...]:
        """Returns the strategy on its own hardware, then one change at a time; see `ExplainedStep`. Searches draw nothing."""
        variants = []
        for change, problem in _changes(self.planned.search_problem):
            more = problem.batch // self.draft.batch  # a larger batch is more micro-batches
            same = dataclasses.replace(self.draft, microbatches=tuple(more * count for count in self.draft.microbatches))
            step_s = _step_s(problem, same)
            fits = math.isfinite(step_s)
            anew = partial(_search, problem, calls, time_limit_s) if calls else None
            same_s = step_s if fits else None
            variants.append(Variant(change, problem.batch, same, same_s, fits, partial(_step_s, problem), anew))
        return evaluate_variants(variants)


def _changes(problem: SearchProblem) -> Iterator[tuple[str, SearchProblem]]:
    """Yields all changes, the unchanged hardware first."""

    def on(cluster: Cluster) -> SearchProblem:
        return dataclasses.replace(problem, scores=DraftEvaluator(problem.costs, cluster))

    yield AS_IS, problem
    machine = problem.cluster
    if any(device.memory_bytes is not None for device in machine.devices):
        devices = tuple(larger(device, 2.0) for device in machine.devices)
        yield "double the memory", on(dataclasses.replace(machine, devices=devices))
    if machine.num_devices > 1:
        yield "all links twice as fast", on(dataclasses.replace(machine, links=machine.links.quicker(2.0)))
    known = _PRESET.fullmatch(machine.text or "")
    if known is not None:
        text = f"{known[1]}{2 * int(known[2])}{known[3]}"
        yield f"twice the devices ({text})", on(parse(text))
    yield "twice the batch", dataclasses.replace(problem, batch=2 * problem.batch)


def _step_s(problem: SearchProblem, draft: Draft) -> float:
    """Returns step time; inf for a draft that does not fit, or has another batch or more devices."""
    if draft.batch != problem.batch or max(draft.devices) >= problem.cluster.num_devices:
        return math.inf
    try:
        step_s, over = problem.scores.score(draft)
    except InputError:  # the schedule cannot run that number of micro-batches
        return math.inf
    return math.inf if over else step_s


def _search(problem: SearchProblem, calls: int, time_limit_s: float | None, known: Sequence[Draft]) -> list[Draft]:
    """Returns the best strategy that a search finds; it has its own starts, so known strategies do not matter."""
    try:
        return [search(problem, calls=calls, time_limit_s=time_limit_s).ranked[0].draft]
    except (InputError, InfeasibleError):  # nothing can be chosen there, or nothing fits
        return []


def diff_strategies(first: StrategyStep, second: StrategyStep) -> Difference:
    """Compares two strategies; the effects of choices are those on the model and cluster of the first."""
    a, b, sides = first.draft, second.draft, (first.side(), second.side())
    names = first.planned.search_problem.costs.names
    if second.planned.search_problem.costs.names != names:
        return Difference(*sides, notes=("the plans are for models with other blocks: only their steps are compared",))
    step_s = sides[0].step_time_s
    words = [_changed_word(name, fields, a, b, first.planned, step_s) for name, fields in _choices(a, b).items()]
    notes = ("the plans are for other models or clusters: words are put into the first on its own",)
    return Difference(
        *sides,
        words=tuple(word for word in words if word),
        lines=tuple(_block_lines(a, b, names)),
        notes=notes if second.planned is not first.planned else (),
    )


def _choices(a: Draft, b: Draft) -> dict[str, tuple[str, ...]]:
    """Returns the choices of strategies, with the fields of drafts that hold them."""
    stages: dict[str, tuple[str, ...]] = {"meshes": ("places", "place_of_stage"), "blocks a stage": ("bounds",)}
    if a.stages != b.stages:
        stages = {"stages": ("places", "place_of_stage", "bounds", "schedule")}
    rest = {"micro-batches": _MICRO, "schedule": ("schedule",), "recompute": ("recompute",), "offload": ("offload",)}
    if a.beside or b.beside:
        rest["pipelines beside it"] = ("beside",)
    return stages | rest


def _changed_word(
    name: str, fields: tuple[str, ...], a: Draft, b: Draft, planned: Planned, step_s: float | None
) -> ChangedWord | None:
    """Returns a choice that differs, with its effect; None where both are equal."""
    taken = {field: getattr(b, field) for field in fields}
    if all(getattr(a, field) == value for field, value in taken.items()):
        return None
    word = ChangedWord(name, _word_text(name, a), _word_text(name, b))
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
    """Returns the text of a choice."""
    if name == "micro-batches":
        return _micro_batches(draft)
    if name in _BLOCK_WORDS:
        values, chosen = _BLOCK_WORDS[name], getattr(draft, name)
        counts = [(chosen.count(number), value) for number, value in enumerate(values) if number in chosen]
        return ", ".join(f"{value} of {count}" for count, value in counts)
    if name == "schedule":
        return str(draft.schedule)
    if name == "pipelines beside it":
        return "; ".join(f"{_micro_batches(one)} on {_devices(one.devices)}" for one in draft.beside)
    if name == "blocks a stage":
        return _some([len(blocks) for blocks in draft.ranges])
    shapes = []
    for place in draft.places:
        axes = [f"{axis} {size}" for axis in ("replicate", "shard", "context", "tensor") if (size := getattr(place, axis)) > 1]
        axes += [f"level {place.sharding}"] * (place.sharding > 0) + ["sequence parallel"] * place.sequence_parallel
        shapes.append(f"{', '.join(axes) or 'alone'} on {_devices(place.devices)}")
    chunks = f"{draft.stages} chunks: " if draft.stages > len(draft.places) else ""
    return chunks + "; ".join(shapes)


def _micro_batches(draft: Draft) -> str:
    return f"{_some(draft.microbatches)} of {_some(draft.microbatch)}"


def _some(values: Sequence[int]) -> str:
    return "-".join(map(str, values if len(set(values)) > 1 else values[:1]))


def _devices(devices: Sequence[int]) -> str:
    run = list(range(devices[0], devices[0] + len(devices)))
    return f"{devices[0]} to {devices[-1]}" if list(devices) == run and len(run) > 2 else " ".join(map(str, devices))


def _block_lines(a: Draft, b: Draft, names: Sequence[str]) -> Iterator[str]:
    """Yields one line for each row of consecutive blocks whose recomputation or offload differs alike."""
    for key, values in _BLOCK_WORDS.items():
        for (one, other), run in groupby(zip(getattr(a, key), getattr(b, key), names, strict=True), key=lambda each: each[:2]):
            blocks = [name for *_, name in run]
            if one != other:
                span = " to ".join(dict.fromkeys((blocks[0], blocks[-1])))
                yield f"{key} of {span}: {values[one]} in the first, {values[other]} in the second"
