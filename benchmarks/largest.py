"""Predicts the largest published runs as stated: Llama 3 405B on 8,192 and 16,384 H100 (arXiv 2407.21783, table 4).

    python -m benchmarks.largest

Printed are TFLOP/s a GPU, published and predicted with the attention of cuDNN and with FlashAttention-2; the paper names
neither. FLOPs are counted as there: six a parameter and token, and attention's causal half. Micro-batches have one sample, the
optimizer is sharded, a chunk has one layer, and the first and the last chunk have none (section 3.3.2).
"""

from __future__ import annotations

import sys

from benchmarks.harness import arguments, markdown
from benchmarks.published.price import say
from benchmarks.published.rows import Row

PARAMETERS, LAYERS, WIDTH = 405.85e9, 126, 16384
RUNS = [
    ("TP8 PP16 DP64 z1 v8", 8192, 2048, 8192, 430), ("TP8 PP16 DP128 z1 v8", 16384, 2048, 8192, 400),
    ("TP8 CP16 PP16 DP8 z1 v8", 16384, 128, 131072, 380),
]  # fmt: skip
"""Strategy, GPUs, samples a step, tokens a sample, published TFLOP/s a GPU."""

STACKS = {"cuDNN": "NVIDIA/dgxc", "FlashAttention-2": "Llama 3"}
"""Sources whose software (`benchmarks.published.software`) has that attention."""


def predicted(source: str, words: str, gpus: int, samples: int, tokens: int, recompute: str) -> tuple[float, float]:
    """Returns TFLOP/s a GPU and the largest peak in GB."""
    said = say(Row(source, "Llama3.1-405B", "H100", gpus, words, samples, 1, tokens, "bf16", False, recompute, None, (), ()))
    assert said.step_s is not None, said.reason
    flops = samples * tokens * 6.0 * (PARAMETERS + LAYERS * WIDTH * tokens)
    return flops / said.step_s / gpus / 1e12, max(said.peak_bytes) / 1e9


def main() -> int:
    """Prints the table; the exit code."""
    arguments(__doc__)
    lines = []
    for words, gpus, samples, tokens, published in RUNS:
        rates = [predicted(source, words, gpus, samples, tokens, "no")[0] for source in STACKS.values()]
        again = predicted(STACKS["cuDNN"], words, gpus, samples, tokens, "selective")
        cells = [f"{rate:.0f} ({100 * (rate / published - 1):+.0f} %)" for rate in (*rates, again[0])]
        lines.append([words, f"{gpus:,}", f"{tokens:,}", str(published), *cells, f"{again[1]:.0f}"])
    head = ["strategy", "GPUs", "tokens", "published", *STACKS, "selective recomputation", "its peak GB"]
    print(markdown(head, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
