"""Predicts the largest published runs as stated beside the search's own answers; the table of docs/cost-model/accuracy.md.

    python -m benchmarks.largest                    rows that are missing
    python -m benchmarks.largest --models MT-NLG    of these models
    python -m benchmarks.largest --table            the table again

Llama 3 405B (arXiv 2407.21783, table 4): micro-batches of one sample, a sharded optimizer, one layer a chunk, none in the first
and the last (section 3.3.2); FLOPs as there: six a parameter and token, and attention's causal half. Priced with the attention
of cuDNN and with FlashAttention-2, since the paper names neither.

Megatron-Turing NLG 530B (arXiv 2201.11990): tensor 8, pipeline 35; its seconds and TFLOP/s agree if every layer is recomputed.
The same model on the same machine, 2,240 samples, is in arXiv 2104.04473, table 2. Assumed: 1F1B, plain replicas, micro-batches
of one or two samples (not stated), bf16, fused attention, and whole activations between the products, as Megatron had then.

DeepSeek-V3 (arXiv 2412.19437): pipeline 16, experts over 64, sharded optimizer. Assumed: micro-batches of one. Unlike the run:
bf16 for fp8, DualPipeV for DualPipe, no prediction of a second token, no limit on the hosts that a token's experts are on, and
exchange of experts not hidden.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.harness import ROOT, add_row, arguments, markdown, read_rows, write_between
from benchmarks.published.price import plan, say
from benchmarks.published.rows import Row

ROWS, PAGE = Path(__file__).with_suffix(".rows.jsonl"), ROOT / "docs/cost-model/accuracy.md"
STACKS = {"NVIDIA/dgxc": "cuDNN", "Llama 3": "FlashAttention-2", "NVIDIA/Megatron-LM": "fused"}
"""Attention of sources' software (`benchmarks.published.software`)."""


def llama(words: str, gpus: int, samples: int, tokens: int, published: float) -> Row:
    """Returns a run of 405B from its TFLOP/s a GPU."""
    taken_s = samples * tokens * 6.0 * (405.85e9 + 126 * 16384 * tokens) / (published * 1e12 * gpus)
    return Row("NVIDIA/dgxc", "Llama3.1-405B", "H100", gpus, words, samples, 1, tokens, "bf16", False, "no", taken_s, (), ())


def megatron(gpus: int, samples: int, microbatch: int, taken_s: float) -> Row:
    """Returns a run of 530B."""
    words, assumed = f"TP8 PP35 DP{gpus // 280} whole activations", ("micro_batch", "precision")
    source, model = "NVIDIA/Megatron-LM", "MT-NLG 530B"
    return Row(source, model, "A100-80", gpus, words, samples, microbatch, 2048, "bf16", False, "full", taken_s, (), assumed)


def faster(gpus: int, published: float) -> Row:
    """Returns a run of 530B of the year before, from its TFLOP/s a GPU; counted with the recomputed forward."""
    flops = 96.0 * 2240 * 2048 * 105 * 20480**2 * (1 + 2048 / (6 * 20480) + 51200 / (16 * 105 * 20480))
    return megatron(gpus, 2240, 1, flops / (published * 1e12 * gpus))


def deepseek(recompute: str) -> Row:
    """Returns the run of V3 from its 180,000 GPU hours a trillion tokens."""
    taken_s, words = 180e3 * 3600 / 1e12 * 15360 * 4096 / 2048, "PP16 DP128 EP64 z1 DualPipeV"
    source, assumed = "NVIDIA/Megatron-LM", ("micro_batch",)
    return Row(source, "DeepSeek-V3", "H800", 2048, words, 15360, 1, 4096, "bf16", False, recompute, taken_s, (), assumed)


LLAMA = [
    llama("TP8 PP16 DP64 z1 v8", 8192, 2048, 8192, 430), llama("TP8 PP16 DP128 z1 v8", 16384, 2048, 8192, 400),
    llama("TP8 CP16 PP16 DP8 z1 v8", 16384, 128, 131072, 380),
]  # fmt: skip
TURING = [(2240, 60.1), (2800, 50.2), (3360, 44.4)]
RUNS = [
    *(megatron(gpus, 1920, size, step_s) for gpus, step_s in TURING for size in (1, 2)),
    faster(560, 171), faster(1120, 167), faster(2240, 159), *LLAMA,
    *(dataclasses.replace(row, recompute="selective") for row in LLAMA),
    *(dataclasses.replace(row, source="Llama 3") for row in LLAMA), deepseek("selective"), deepseek("full"),
]  # fmt: skip

SEARCHED = (RUNS[0], *LLAMA[:2])
ASKED = [(run, limit_s) for run in RUNS for limit_s in ((0.0, 5.0, 60.0) if run in SEARCHED else (0.0,))]
"""Runs; 0: as stated, otherwise the seconds of a search for the same model, batch and GPUs."""


def row_of(run: Row, limit_s: float) -> dict[str, Any]:
    """Returns the row of a run as stated, or, with a limit, of the search's answer; its seconds are of this process alone."""
    answer, calls = "", 0
    if limit_s:
        with patch("time.monotonic", time.process_time):
            said, answer, calls = plan(run, limit_s)
    else:
        said = say(run)
    found = {"step_s": said.step_s, "parts": said.parts, "peak_bytes": max(said.peak_bytes, default=0.0), "why": said.reason}
    return {**dataclasses.asdict(run), "limit_s": limit_s, "calls": calls, "answer": answer, **found}


def table() -> str:
    """Makes the table of the page."""
    lines = []
    for row in sorted(read_rows(ROWS), key=lambda row: CASES.index(key(row))):
        words = f"*{row['answer']}*" if row["limit_s"] else f"{row['words']}, micro-batches of {row['microbatch']}"
        words += "" if row["limit_s"] or row["recompute"] == "no" else f", {row['recompute']} recomputation"
        off = f"{row['step_s']:.1f} ({100 * (row['step_s'] / row['taken_s'] - 1):+.0f} %)" if row["step_s"] else row["why"]
        question = [row["model"], f"{row['gpus']:,} {row['gpu']}", f"{row['batch']:,} x {row['seq']:,}", STACKS[row["source"]]]
        asked = f"search, {row['limit_s']:g} s, tries: {row['calls']}" if row["limit_s"] else "as stated"
        lines.append([*question, asked, words, f"{row['taken_s']:.1f}", off, f"{row['peak_bytes'] / 1e9:.0f}"])
    head = ["model", "GPUs", "samples x tokens", "attention", "", "strategy", "published s", "predicted s", "peak GB"]
    return markdown(head, lines)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what a row was asked."""
    return tuple(
        row[name] for name in ("source", "model", "gpus", "words", "batch", "microbatch", "seq", "recompute", "limit_s")
    )


CASES = [key(dataclasses.asdict(run) | {"limit_s": limit_s}) for run, limit_s in ASKED]


def main() -> int:
    """Makes the rows that are missing, and the table; the exit code."""
    chosen = arguments(__doc__, models=(("",), "starts of their names"), table="write the table of the page from the rows")
    for case, (run, limit_s) in zip(CASES, ASKED, strict=True):
        known = chosen.table or case in map(key, read_rows(ROWS))
        if not known and run.model.startswith(tuple(chosen.models)):
            add_row(ROWS, row_of(run, limit_s))
    write_between(PAGE, "largest", table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
