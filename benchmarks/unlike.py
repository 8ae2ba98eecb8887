"""Do unlike pipelines pay on mixed clusters? Answers of the search with and without them in the same seconds.

    python -m benchmarks.unlike [--limit-s 5]       rows that are missing, and the table of docs/results.md

Models are captured as `rlplace place hf:llama,... --seq 2048 --dtype bf16` captures them (fp16 where cards have no bf16).
Seconds are processor time of one core, from the pricing of blocks on, so that a busy machine gives the same figures. Answers
are the quickest found, block by block.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.harness import ROOT, Row, add_row, arguments, geometric, markdown, missing, read_rows, write_between
from rlplace import budget
from rlplace.api import default_batch, what_may_be
from rlplace.captured import CapturedModel
from rlplace.cli.models import capture_model
from rlplace.cli.options import ModelOptions
from rlplace.cluster.parse import parse
from rlplace.plan.strategy import uniform_words
from rlplace.strategy.search import search as searching
from rlplace.strategy.search.plan import ask

ROWS, PAGE = Path(__file__).with_suffix(".rows.jsonl"), ROOT / "docs/results.md"
LLAMA = "hf:llama,vocab_size=128256,num_key_value_heads=8,max_position_embeddings=8192"
SMALL = f"{LLAMA},tie_word_embeddings=true,intermediate_size=8192"
ONE = "Llama 3.2 1B"
MODELS = {
    "Llama 3 8B": f"{LLAMA},intermediate_size=14336",
    "Llama 3.2 3B": f"{SMALL},hidden_size=3072,num_hidden_layers=28,num_attention_heads=24",
    ONE: f"{SMALL},hidden_size=2048,num_hidden_layers=16",
}
LARGE = (
    "a100-80g:2x8+v100:2x8", "h100:4x8+a100-40g:4x8", "a100-80g:8x8+h100:4x8+l4:4x8", "l4:16x8+h200:2x8", "a10:8+t4:8",
    "h100:8+l4:8",
)  # fmt: skip
FEW = {
    "h100:1+l4:8": 512, "h100:1+l4:4": 512, "h100:2+l4:8": 512, "h200:1+l4:8": 512, "h100:1+a10:8": 512,
    "a100-80g:1+l4:4": 256, "h100:1+rtx4090:4": 512,
}  # fmt: skip
"""Clusters of few large cards beside smaller ones, with samples a step."""


def cases() -> Iterator[tuple[str, str, int]]:
    """Yields model, cluster and samples a step."""
    yield from ((model, text, default_batch(parse(text))) for text in LARGE for model in MODELS)
    yield from ((ONE, text, batch) for text, batch in FEW.items())


@cache
def captured_of(model: str, dtype: str) -> CapturedModel:
    """Captures a model once."""
    return capture_model(MODELS[model], ModelOptions(seq=2048, dtype=dtype), 2)


def answer(model: str, cluster: str, batch: int, unlike: bool, limit_s: float) -> Row:
    """Searches once, in so many seconds with pricing as `rlplace place --time-limit` divides them."""
    machine = parse(cluster)
    captured = captured_of(model, "fp16" if {"v100", "t4"} & {kind.name for kind in machine.kinds} else "bf16")
    asked = what_may_be(captured, space=None, fixed={}, planner="strategy")
    began_s = process_time()
    problem = ask(cluster=machine, batch=batch, **asked)
    left_s = max(0.85 * (limit_s - process_time() + began_s), limit_s / 2)
    spent, searched = list[float](), searching.try_unlike

    def try_unlike(*given: Any) -> None:
        before_s = process_time()
        try:
            if unlike:
                searched(*given)
        finally:
            spent.append(process_time() - before_s)

    with mock.patch.object(searching, "try_unlike", try_unlike):
        found = searching.search(problem, time_limit_s=left_s)
    best = found.ranked[0]
    words = uniform_words(problem.strategy(best.draft, tensor=False))
    row = {"step_s": best.step_s, "beside": bool(best.draft.beside), "words": words, "calls": found.calls}
    return row | {"share": sum(spent) / left_s}


def table() -> str:
    """Makes the table of the page."""
    rows = {(row["model"], row["cluster"], row["batch"], row["unlike"]): row for row in read_rows(ROWS)}
    lines, large = list[list[Any]](), list[tuple[Row, Row]]()
    for case in cases():
        without, with_them = rows[*case, False], rows[*case, True]
        if case[1] in LARGE:
            large.append((without, with_them))
            continue
        words = with_them["words"] if with_them["beside"] else "one pipeline"
        lines.append(
            [case[1], case[2], f"{without['step_s']:.2f}", f"{with_them['step_s']:.2f}", f"{with_them['share']:.0%}", words]
        )
    ratios = [with_them["step_s"] / without["step_s"] for without, with_them in large]
    clusters, answered = ", ".join(f"`{name}`" for name in LARGE), sum(row["beside"] for _, row in large)
    share = max(row["share"] for _, row in large)
    text = (
        f"Of {len(large)} questions about larger clusters (Llama 8B, 3B and 1B, 8 samples a device, on {clusters}) {answered} "
        f"are answered by unlike pipelines. To look for them takes {share:.0%} of the seconds at most; answers take "
        f"{min(ratios):.3f} to {max(ratios):.3f} times as long, {geometric(ratios):.3f} in the mean."
    )
    table = markdown(["cluster", "samples", "step time without, s", "with", "share of the seconds", "answer"], lines)
    return f"{table}\n\n{textwrap.fill(text, 140)}"


def main() -> int:
    """Makes missing rows and the table; the exit code."""
    chosen = arguments(__doc__, limit_s=(5.0, "seconds"))
    budget.time = SimpleNamespace(monotonic=process_time)  # type: ignore[assignment]
    cells = [(*case, unlike) for case in cases() for unlike in (True, False)]
    for model, cluster, batch, unlike in missing(ROWS, cells, "model", "cluster", "batch", "unlike"):
        row = {"model": model, "cluster": cluster, "batch": batch, "unlike": unlike, "limit_s": chosen.limit_s}
        add_row(ROWS, row | answer(model, cluster, batch, unlike, chosen.limit_s))
    write_between(PAGE, "unlike", table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
