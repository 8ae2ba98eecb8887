"""How far answers for real models are from the best known: regret over tries and seconds, by class of question.

    python -m benchmarks.quality [--reference-s 600] [--first 0] [--questions 24]     rows that are missing, and the table

Models are captured as `rlplace place MODEL --seq ... --dtype bf16 --master-weights` captures them (fp16 where cards have no
bf16). Every search begins from unpriced blocks. The references are the search itself and annealing over its moves from a
random strategy, so many seconds each; regret is measured against the best that any search found. Seconds are processor time
of one core, so that a busy machine gives the same figures. The search was tuned on other questions (`benchmarks.unlike`,
`benchmarks.scale` and `benchmarks.strategy_search`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import process_time
from types import SimpleNamespace

from benchmarks.harness import ROOT, Row, add_row, arguments, markdown, missing, read_rows, write_between
from benchmarks.strategy_search import annealed
from rlplace import budget
from rlplace.api import what_may_be
from rlplace.captured import CapturedModel
from rlplace.cli.models import capture_model
from rlplace.cli.options import ModelOptions
from rlplace.cluster.parse import parse
from rlplace.errors import InfeasibleError
from rlplace.plan.strategy import uniform_words
from rlplace.strategy.executor.evaluate import DraftEvaluator, warm_up
from rlplace.strategy.search.plan import ask
from rlplace.strategy.search.search import search
from rlplace.strategy.search.tries import SearchProblem

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
    "ViT huge": ("hf:vit,hidden_size=1280,num_hidden_layers=32,num_attention_heads=16,intermediate_size=5120", None),
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
)  # fmt: skip
"""Model, cluster and samples a step."""

LIMITS_S, CALLS = (1.0, 2.0, 5.0, 10.0), (64, 256, 1024)
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


def row(model: str, cluster: str, batch: int, reference_s: float) -> Row:
    """Returns seconds of the answers of all searches; inf where nothing was found."""
    make, found_s, words = asker(model, cluster, batch), dict[str, float](), ""
    make()  # facts of the model
    limits = [{"time_limit_s": limit} for limit in (*LIMITS_S, reference_s)] + [{"calls": calls} for calls in CALLS]
    for limit in limits:
        began_s, problem = process_time(), make()
        if seconds := limit.get("time_limit_s"):
            limit = {"time_limit_s": max(PART * seconds - (process_time() - began_s), seconds / 2)}
        name = "search" if seconds == reference_s else f"{seconds:g} s" if seconds else f"{limit['calls']} tries"
        try:
            answer = search(problem, **limit)  # type: ignore[arg-type]
        except InfeasibleError:
            found_s[name] = float("inf")
            continue
        best = answer.ranked[0]
        said = DraftEvaluator(problem.costs, problem.cluster).evaluate(best.draft)
        assert said.feasible and problem.strategy(best.draft).batch == batch
        found_s[name] = said.step_time_s
        if seconds == 5.0:
            words = f"{uniform_words(problem.strategy(best.draft, tensor=False))} ({answer.calls} tries)"
    found_s["annealing"] = annealed(make(), 0, reference_s)
    return {"found_s": found_s, "reference_s": reference_s, "words": words}


def table() -> str:
    """Makes the table of the page: mean and worst regret in per cent by class, for every budget."""
    rows = [known for known in read_rows(ROWS) if (known["model"], known["cluster"], known["batch"]) in QUESTIONS]
    names = list(rows[0]["found_s"])
    classes: dict[str, list[Row]] = {}
    for known in rows:
        machine = parse(known["cluster"])
        kinds = len({kind.name for kind in machine.kinds})
        size = "to 64" if machine.num_devices <= 64 else "65 to 256" if machine.num_devices <= 256 else "257 to 1,024"
        for name in (f"{'one kind' if kinds == 1 else 'several kinds'}, {size} devices", known["model"], "all"):
            classes.setdefault(name, []).append(known)
    lines = []
    for name in sorted(classes, key=lambda name: (name == "all", name in MODELS, name)):
        cells = []
        for column in names:
            regrets = [100 * (one["found_s"][column] / min(one["found_s"].values()) - 1) for one in classes[name]]
            cells.append(f"{sum(regrets) / len(regrets):.1f} ({max(regrets):.1f})")
        lines.append([f"{name} ({len(classes[name])})", *cells])
    return markdown(["", *names], lines)


def main() -> int:
    """Makes missing rows and the table; the exit code."""
    chosen = arguments(
        __doc__, reference_s=(600.0, "seconds of each reference"), first=(0, "first question"), questions=(24, "how many")
    )
    budget.time = SimpleNamespace(monotonic=process_time)  # type: ignore[assignment]
    warm_up()
    some = QUESTIONS[chosen.first : chosen.first + chosen.questions]
    for model, cluster, batch in missing(ROWS, some, "model", "cluster", "batch"):
        found = row(model, cluster, batch, chosen.reference_s)
        add_row(ROWS, {"model": model, "cluster": cluster, "batch": batch, **found})
    write_between(PAGE, "quality", table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
