"""How far answers for real models are from the best known: regret over tries and seconds, by class of question.

    python -m benchmarks.quality [--first 0] [--questions 35]               rows that are missing, and the table
    python -m benchmarks.quality --by "search 100 s" "restarts 100 s"       those of the references

Models are captured as `rlplace place MODEL --seq ... --dtype bf16 --master-weights` captures them (fp16 where cards have no
bf16). Every search begins from unpriced blocks. The references are the search itself, and `restarts`: local search from random
members of all uniform strategies and of those with a shape for each kind of device, one after the other. Annealing over the
same moves (`benchmarks.strategy_search`) was 27 and 36 % behind on two of four questions. Regret is measured against the best
that any search found. Seconds are processor time
of one core, so that a busy machine gives about the same figures. Answers to most of `QUESTIONS` were looked at while the order
of the search was mended, so that their regret flatters it; those to `UNSEEN` were not.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.harness import ROOT, Row, add_row, arguments, markdown, missing, read_rows, write_between
from rlplace import budget
from rlplace.api import what_may_be
from rlplace.captured import CapturedModel
from rlplace.cli.models import capture_model
from rlplace.cli.options import ModelOptions
from rlplace.cluster.parse import parse
from rlplace.errors import InfeasibleError
from rlplace.plan.strategy import uniform_words
from rlplace.strategy.executor.evaluate import DraftEvaluator, warm_up
from rlplace.strategy.search.by_kind import starts_by_kind
from rlplace.strategy.search.fit import fitted
from rlplace.strategy.search.listing import listed
from rlplace.strategy.search.plan import ask
from rlplace.strategy.search.search import improve, search
from rlplace.strategy.search.tries import OutOfBudgetError, SearchProblem, Tries
from rlplace.strategy.search.uniform import Option

ROWS, PAGE = Path(__file__).with_suffix(".rows.jsonl"), ROOT / "docs/results.md"
LLAMA = "hf:llama,num_key_value_heads=8,max_position_embeddings=4096"
MODELS = {
    "Llama 3 8B": (f"{LLAMA},vocab_size=128256,intermediate_size=14336", 4096),
    "Llama 33B": (
        "hf:llama,hidden_size=6656,num_hidden_layers=60,num_attention_heads=52,intermediate_size=17920,"
        "max_position_embeddings=4096",
        4096,
    ),
    "Mixtral 8x7B": ("hf:mixtral", 4096),
    "T5 3B": ("hf:t5,d_model=1024,d_kv=128,d_ff=16384,num_heads=32,num_layers=24,num_decoder_layers=24", 512),
    "ViT huge": ("hf:vit,hidden_size=1280,num_hidden_layers=32,num_attention_heads=16,intermediate_size=5120", 128),
}
QUESTIONS = (
    ("Llama 3 8B", "h100:2x8", 128), ("Llama 3 8B", "a100-40g:4x8", 256), ("Llama 3 8B", "l4:8x8,eth=100g", 256),
    ("Llama 3 8B", "a100-80g:2x8+a10:4x8", 256), ("Llama 3 8B", "h100:2x8+a100-40g:2x8+l4:2x8+a10:2x8", 256),
    ("Llama 3 8B", "h100:16x8+a100-80g:16x8", 1024), ("Llama 33B", "a100-40g:8x8+h100:2x8", 256),
    ("Llama 33B", "h100:64x8", 1024), ("Llama 33B", "a100-80g:32x8+h100:32x8+l40s:16x8", 2048),
    ("Llama 33B", "a100-80g:4x8", 128), ("Mixtral 8x7B", "h100:4x8", 256),
    ("Mixtral 8x7B", "a100-80g:8x8+h100:8x8", 512), ("Mixtral 8x7B", "a100-40g:16x8", 512),
    ("Mixtral 8x7B", "h100:128x8", 2048), ("Mixtral 8x7B", "l40s:16x8+h200:4x8", 512),
    ("T5 3B", "v100:4x8", 512), ("T5 3B", "rtx4090:4x8,eth=25g", 512), ("T5 3B", "t4:8x4+v100:4x4", 512),
    ("T5 3B", "a100-80g:32x8", 4096), ("T5 3B", "h100:2x8+l4:2x8+a10:2x8", 512),
    ("ViT huge", "rtx4090:2x8,eth=10g", 1024), ("ViT huge", "a100-40g:4x8+t4:8x4", 2048), ("ViT huge", "h100:32x8", 8192),
    ("ViT huge", "v100:2x8+h100:1x8+t4:4x4+a10:2x4", 2048),
    ("Llama 3 8B", "h100:512x8", 4096), ("Llama 33B", "h100:256x8+a100-80g:256x8", 8192),
    ("Mixtral 8x7B", "h200:1024x8", 16384),
)  # fmt: skip
"""Model, cluster and samples a step."""

UNSEEN = (
    ("Llama 3 8B", "h200:2x8+l40s:4x8", 256), ("Llama 33B", "h100:8x8+l40s:8x8", 512),
    ("Mixtral 8x7B", "a100-80g:4x8+v100:8x8", 256), ("T5 3B", "a100-80g:8x8+a10:8x4", 1024), ("ViT huge", "l4:16x8", 2048),
    ("Llama 33B", "v100:16x8", 256), ("Mixtral 8x7B", "h100:32x8", 1024), ("Llama 3 8B", "a100-40g:2x8+t4:8x4+l4:4x8", 256),
)  # fmt: skip
"""Questions that nobody looked at before the search was done."""

BUDGETS = ("1 s", "2 s", "5 s", "10 s", "64 tries", "256 tries", "1024 tries")
SIZES = 64, 256, 1024, 32768
GREED = 12
"""Exponent of expected seconds by which `restarts` draws."""

PART = 0.85
"""Of the seconds that `rlplace place --time-limit` gives to pricing and search."""


@cache
def captured_of(model: str, dtype: str) -> CapturedModel:
    """Captures a model once."""
    name, seq = MODELS[model]
    return capture_model(name, ModelOptions(seq=seq, dtype=dtype, master_weights=True), 2)


def asker(model: str, cluster: str, batch: int) -> Callable[[], SearchProblem]:
    """Returns a function that makes the question anew, without any prices."""
    machine = parse(cluster)
    captured = captured_of(model, "fp16" if {"v100", "t4"} & {kind.name for kind in machine.kinds} else "bf16")
    asked = what_may_be(captured, space=None, fixed={}, planner="strategy")
    return lambda: ask(cluster=machine, batch=batch, **asked)


def restarts(problem: SearchProblem, seconds: float) -> Row:
    """Searches near random strategies one after the other: seconds a step of the best, tries, and its words.

    Families of the same devices, tensor, context and pipeline degrees are drawn the more often the quicker their best is
    expected to be, then a member of a family likewise; a fifth of the starts has a shape for each kind.
    """
    rng, tries = np.random.default_rng(0), Tries(problem, time_limit_s=seconds)
    families: dict[object, list[Option]] = {}
    for option in listed(problem, seconds / 8).first:
        shape = option.shape
        families.setdefault((shape.devices, shape.axes.tensor, shape.axes.context, shape.places), []).append(option)
    own = list(families.values())
    by_kind = list(starts_by_kind(problem, seconds / 8))

    def drawn(expected_s: Sequence[float]) -> int:
        weights = (min(expected_s) / np.array(expected_s)) ** GREED
        return int(rng.choice(len(weights), p=weights / weights.sum()))

    try:
        while True:
            if by_kind and rng.random() < 0.2:
                draft = by_kind[rng.integers(len(by_kind))]
            else:
                family = own[drawn([min(option.expected_s for option in some) for some in own])]
                draft = family[drawn([option.expected_s for option in family])].draft(problem.balance)
            start = fitted(tries, draft)
            if start is not None and start.fits:
                improve(tries, [start])
    except OutOfBudgetError:
        best = next(tried for tried in tries.known() if tried.fits and tries.runs(tried))
        words = uniform_words(problem.strategy(best.draft, tensor=False))
        return {"step_s": best.step_s, "tries": tries.calls, "words": words}


def found(model: str, cluster: str, batch: int, by: str) -> Row:
    """Returns a row: seconds a step of what a search found, inf for nothing; `by` is one of `BUDGETS` or "NAME SECONDS s"."""
    make = asker(model, cluster, batch)
    make()  # facts of the model
    began_s, problem = process_time(), make()
    cell = {"model": model, "cluster": cluster, "batch": batch, "by": by}
    name, _, seconds = by.removesuffix(" s").rpartition(" ")
    if name == "restarts":
        return {**cell, **restarts(problem, float(seconds))}
    limit: dict[str, Any] = {"calls": int(name)} if seconds == "tries" else {"time_limit_s": float(seconds)}
    if not name:  # as `rlplace place` divides its seconds
        limit = {"time_limit_s": max(PART * float(seconds) - (process_time() - began_s), float(seconds) / 2)}
    try:
        answer = search(problem, **limit)
    except InfeasibleError:
        return {**cell, "step_s": math.inf}
    best = answer.ranked[0]
    said = DraftEvaluator(problem.costs, problem.cluster).evaluate(best.draft)
    assert said.feasible and problem.strategy(best.draft).batch == batch
    words = uniform_words(problem.strategy(best.draft, tensor=False))
    return {**cell, "step_s": said.step_time_s, "tries": answer.calls, "words": words}


def table() -> str:
    """Makes the table of the page: mean and worst regret in per cent by class, for every budget."""
    steps: dict[tuple[str, str, int], dict[str, float]] = {}
    for known in read_rows(ROWS):
        steps.setdefault((known["model"], known["cluster"], known["batch"]), {})[known["by"]] = known["step_s"]
    classes: dict[str, list[dict[str, float]]] = {}
    for question, own in steps.items():
        model, cluster, _ = question
        if all(by in BUDGETS for by in own):  # not compared with a reference yet
            continue
        machine = parse(cluster)
        kinds = "one kind" if len({kind.name for kind in machine.kinds}) == 1 else "several kinds"
        size = next(size for size in SIZES if machine.num_devices <= size)
        if question in UNSEEN:
            classes.setdefault("not looked at", []).append(own)
            continue
        names = [f"{kinds}, up to {size:,} devices", model, "all up to 1,024"]
        for name in names if size <= SIZES[-2] else names[:1]:
            classes.setdefault(name, []).append(own)
    asked = {by for own in steps.values() for by in own}
    columns = [*filter(asked.__contains__, BUDGETS), *sorted({by.rpartition(" ")[0].rpartition(" ")[0] for by in asked} - {""})]
    lines = []
    for name in sorted(classes, key=lambda name: (name[:3] in ("all", "not"), name in MODELS, name)):
        cells = []
        for column in columns:
            regrets = [100 * (step_s / min(own.values()) - 1) for own in classes[name] for by, step_s in own.items()
                       if by == column or (column not in BUDGETS and by.startswith(f"{column} "))]  # fmt: skip
            cells.append(f"{sum(regrets) / len(regrets):.1f} ({max(regrets):.1f})" if regrets else "")
        lines.append([f"{name} ({len(classes[name])})", *cells])
    return markdown(["", *columns], lines)


def main() -> int:
    """Makes missing rows and the table; the exit code."""
    chosen = arguments(
        __doc__,
        by=((*BUDGETS,), "budgets, or references as in 'search 200 s'"),
        first=(0, "first question"),
        questions=(len(QUESTIONS + UNSEEN), "how many"),
    )
    budget.time = SimpleNamespace(monotonic=process_time)  # type: ignore[assignment]
    warm_up()
    some = (QUESTIONS + UNSEEN)[chosen.first : chosen.first + chosen.questions]
    for cell in missing(ROWS, [(*one, by) for one in some for by in chosen.by], "model", "cluster", "batch", "by"):
        add_row(ROWS, found(*cell))
        write_between(PAGE, "quality", table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
