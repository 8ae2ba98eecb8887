"""Default answers for large mixtures and long sequences on H100s, beside what practice does; the table of docs/results.md.

    python -m benchmarks.answers                          all rows, an hour of two cores
    python -m benchmarks.answers Qwen3 Mixtral --gpus 8   some of them; rows of others stay
    python -m benchmarks.answers --table                  the table again

Weights and gradients are in bfloat16, state is Adam's of the same dtype: a step is what `rlplace place` predicts, nothing was
run. A search ends after so many evaluations, not by the clock, so that the answer is the same on every machine.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.harness import ROOT, Row, add_row, arguments, markdown, read_rows, timed, write_between, write_rows
from rlplace.cli.main import main as rlplace
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import uniform_words

ROWS, PAGE = Path(__file__).with_suffix(".rows.jsonl"), ROOT / "docs/results.md"
CLUSTERS = {8: "h100:8", 64: "h100:8x8", 256: "h100:32x8"}
MIXTURES, SAMPLES = 4096, 8
"""Tokens of a sample, and samples a device, of the mixtures."""

QWEN = "hidden_size=2048,moe_intermediate_size=768,num_attention_heads=32,num_key_value_heads=4,head_dim=128"
LLAMA = "num_key_value_heads=8,intermediate_size=14336,vocab_size=128256"
MODELS = {
    "Qwen3-30B-A3B": f"hf:qwen3_moe,num_hidden_layers=48,{QWEN},num_experts=128,num_experts_per_tok=8",
    "Mixtral 8x7B": "hf:mixtral",
    "Mixtral 8x22B": "hf:mixtral,hidden_size=6144,intermediate_size=16384,num_hidden_layers=56,num_attention_heads=48,"
    "vocab_size=32768",
    "DeepSeek-V3": "hf:deepseek_v3",
    "gpt-oss-120b": "hf:gpt_oss",
}
PRACTICE = {
    "Qwen3-30B-A3B": "TP 4, PP 2, EP 4; 16 H100 in FP8: PP 2, EP 8, 5,275 tokens/s a card",
    "Mixtral 8x7B": "64 H100: PP 4, EP 8, 468 TFLOP/s a card",
    "Mixtral 8x22B": "128 H100: TP 4, PP 8, EP 2",
    "DeepSeek-V3": "TP 2, PP 16, EP 64",
    "gpt-oss-120b": "64 H100: PP 4, EP 8, micro-batches of 4, 5,630 tokens/s a card",
}
"""Of Megatron Bridge (recipes, and its performance summary 25.11), for Mixtral of Megatron Core (README of its mixtures)."""

LONG = {32768: 32, 131072: 8, 1048576: 1}
"""Tokens of a sample to samples a step on 8 devices, for Llama 3 8B."""


def cases() -> list[tuple[str, str, int, int, int]]:
    """Lists name, MODEL, devices, samples a step and tokens a sample."""
    found = [(name, model, gpus, SAMPLES * gpus, MIXTURES) for gpus in CLUSTERS for name, model in MODELS.items()]
    for gpus in (8, 64):
        for tokens, samples in LONG.items():
            model = f"hf:llama,{LLAMA},max_position_embeddings={tokens}"
            found.append((f"Llama 3 8B, {tokens // 1024}k tokens", model, gpus, samples * gpus // 8, tokens))
    return found


def answer(model: str, gpus: int, samples: int, tokens: int, calls: int) -> Row:
    """Asks for the default answer; a row without `words` says why there is none."""
    words = ["place", model, "--cluster", CLUSTERS[gpus], "--batch", samples, "--seq", tokens, "--dtype", "bf16"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer.plan.json"
        code, took_s = timed(lambda: rlplace([*map(str, words), "--calls", str(calls), "--out", str(path)]))
        if code:
            return {"failed": code, "took_s": took_s}
        plan = PlacementPlan.load(path)
    assert plan.strategy is not None
    step_s = plan.predicted.step_s
    found = {"words": uniform_words(plan.strategy), "step_s": step_s, "tokens_s": samples * tokens / step_s / gpus}
    return found | {"peak_bytes": max(plan.predicted.peak_memory_bytes), "took_s": took_s}


def rows() -> list[Row]:
    """Reads what was found last, in the order of the cases."""
    found = {(row["model"], row["gpus"]): row for row in read_rows(ROWS)}
    return [found[name, gpus] for name, _, gpus, _, _ in cases() if (name, gpus) in found]


def table() -> str:
    """Makes the table of the page."""
    lines = [
        [
            row["model"], str(row["gpus"]), f"{row['samples']:,} x {row['tokens']:,}",
            row.get("words", "nothing fits"), f"{row['step_s']:.2f}" if "step_s" in row else "",
            f"{row['tokens_s']:,.0f}" if "tokens_s" in row else "",
            PRACTICE.get(row["model"], "") if row["gpus"] == min(CLUSTERS) else "",
        ]
        for row in rows()
    ]  # fmt: skip
    return markdown(["model", "H100", "samples x tokens", "answer", "step s", "tokens/s a card", "practice"], lines)


def main() -> int:
    """Makes rows and the table; the exit code."""
    chosen = arguments(
        __doc__,
        "models",
        gpus=((*CLUSTERS,), "devices", CLUSTERS),
        calls=(2000, "evaluations of each search"),
        table="write the table of the page from the rows",
    )
    for name, model, gpus, samples, tokens in [] if chosen.table else cases():
        if gpus in chosen.gpus and (not chosen.models or any(word in name for word in chosen.models)):
            case = {"model": name, "gpus": gpus, "samples": samples, "tokens": tokens, "calls": chosen.calls}
            add_row(ROWS, case | answer(model, gpus, samples, tokens, chosen.calls))
    write_rows(ROWS, rows())
    write_between(PAGE, "answers", table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
