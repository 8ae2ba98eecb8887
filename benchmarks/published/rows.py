"""Rows of a table of published steps: what they say, what they leave out, and which of them cannot be priced."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published.models import ALIASES, MODELS
from benchmarks.published.software import Software, software_of

KIND_OF_GPU = {
    "h100_80gb": "h100", "H100": "h100", "H100-80": "h100", "H200": "h200", "A100": "a100-80g", "A100-80": "a100-80g",
    "a100_80gb": "a100-80g", "a800_80gb": "a100-80g", "a100_40gb": "a100-40g", "A100-40": "a100-40g", "l4": "l4",
    "mi300x": "mi300x", "rtx4090": "rtx4090", "rtx4090 (no P2P)": "rtx4090", "V100-16": "v100", "H800": "h800",
}  # fmt: skip
UNLIKE = ("H100 96GB", "gh200")
"""Devices without a preset, priced as the nearest one: 96 GB of slower memory under a cap of 500 W, and Grace hosts of four."""

# What rows leave out, from what their sources say elsewhere: tokens of a sample, micro-batches of a replica.
SEQUENCES = {"eth-easl/sailor": 2048, "AMD-AGI/Primus": 4096, "cortwave": 1024}
PASSES = {"AMD-AGI/Primus": 64, "foundation-model-stack": 1, "jzhang38": 1, "gist": 1}
PER_PASS = ("Lightning-AI/litgpt", "NVIDIA DeepLearningExamples")  # their milliseconds are those of one micro-batch
IMAGES = ("ResNet-50",)
DTYPES = {"fp16": "fp16", "AMP fp16": "fp16", "TF32": "tf32", "fp32": "fp32", "fp8": "fp8", "amp_fp8": "fp8"}


@dataclass(frozen=True)
class Row:
    """A published step.

    Attributes:
        source: Who published it.
        model: As published.
        gpu: As published.
        gpus: How many.
        words: The strategy in the publisher's words.
        batch: Samples of a step over all devices.
        microbatch: Samples of a pass.
        seq: Tokens of a sample, 1 for images.
        precision: "bf16", "fp16", "tf32", "fp32" or "fp8".
        pure: Weights and optimizer state in that precision alone.
        recompute: In the publisher's words.
        taken_s: Seconds of a step, None where only memory was published.
        peak_bytes: Peak memory by stage, empty where it was not published.
        assumed: What of it the source does not state.
    """

    source: str
    model: str
    gpu: str
    gpus: int
    words: str
    batch: int
    microbatch: int
    seq: int
    precision: str
    pure: bool
    recompute: str
    taken_s: float | None
    peak_bytes: tuple[float, ...]
    assumed: tuple[str, ...]

    @property
    def group(self) -> tuple[str, ...]:
        """The facts that rows share which differ in their strategy only."""
        batch, seq = f"batch {self.batch}", f"seq {self.seq}"
        host = "compiled" if self.software.compiled(self.words) else "eager"
        return self.model, f"{self.gpus} x {self.gpu}", batch, seq, self.precision, host, self.source.split()[0]

    @property
    def software(self) -> Software:
        """The software that ran it."""
        return software_of(self.source)

    @property
    def strict(self) -> bool:
        """Of 16-bit, TF32 or fp32, everything stated, on a device that a preset describes."""
        return self.taken_s is not None and not self.assumed and self.precision != "fp8" and not self.gpu.startswith(UNLIKE)


@dataclass(frozen=True)
class Excluded:
    """A row that is not priced, and why."""

    source: str
    model: str
    words: str
    reason: str


def read(path: Path) -> tuple[list[Row], list[Excluded]]:
    """Returns every row of a table, priced or excluded."""
    rows: list[Row] = []
    excluded: list[Excluded] = []
    for data in csv.DictReader(path.open(encoding="utf-8")):
        found = _row(data)
        if isinstance(found, Row):
            rows.append(found)
        else:
            excluded.append(Excluded(data["source"], data["model"], data["strategy"], found))
    return rows, excluded


def _row(data: dict[str, str]) -> Row | str:
    """Returns the row, or why it is none."""
    source, words = data["source"], data["strategy"] + (" T4" if "T4" in data["gpu"] else "")
    if ALIASES.get(data["model"], data["model"]) not in MODELS:
        return "its model is unknown here"
    if data["gpu"] not in KIND_OF_GPU and not data["gpu"].startswith(UNLIKE):
        return "its device is unknown here"
    if "tuned" in words or "needed" in data["recompute"]:
        return "its strategy is not stated"
    gpus, micro = int(data["gpus"]), int(data["micro_batch"] or 1)
    assumed = [name for name in ("micro_batch", "precision") if not data[name]]
    seq = 1 if data["model"] in IMAGES else int(data["seq"] or 0)
    if not seq:
        seq = next((n for name, n in SEQUENCES.items() if source.startswith(name)), 0)
        assumed.append("seq")
    if not seq:
        return "its sequence length is not stated"
    batch = int(data["global_batch"] or 0)
    if "torchtitan" in source and degrees(words, gpus)["pipeline"] > 1:
        micro = 1  # their local batch is cut into micro-batches of one
    own = next((n for name, n in PASSES.items() if source.startswith(name)), 0)
    if own or source.startswith(PER_PASS) or not batch:
        if not batch and not source.startswith(PER_PASS):
            assumed.append("global_batch")
        batch = micro * (own or 1) * degrees(words, gpus)["data"]
    taken = None
    if data["step_ms"]:
        taken = float(data["step_ms"]) / 1e3
    elif data["tokens_s_gpu"]:
        taken = batch * seq / gpus / float(data["tokens_s_gpu"])
    elif data["samples_s"]:
        taken = batch / float(data["samples_s"])
    said = data["precision"]
    pure = said == "bf16/PURE" or source.startswith("Lightning-AI/litgpt") or said in ("TF32", "fp32")
    peaks = tuple(1e9 * float(part) for part in data["peak_gb"].split("/") if part)
    precision = DTYPES.get(said, "bf16")
    return Row(
        source, data["model"], data["gpu"], gpus, words, batch, micro, seq, precision, pure, data["recompute"], taken, peaks,
        tuple(assumed),
    )  # fmt: skip


def degrees(words: str, gpus: int) -> dict[str, int]:
    """Degrees and sharding level that a strategy's words say; the data degree is what they leave of the devices."""

    def of(letters: str) -> int:
        found = re.search(rf"(?<![A-Za-z]){letters}(\d+)", words)
        return int(found[1]) if found else 1

    tensor, pipeline, context = of("TP?"), of("PP?"), of("CP?")
    data = gpus // (tensor * pipeline * context)
    virtual = re.search(r"(?<![A-Za-z])[vV]=?(\d+)", words)
    level = 0
    if "SHARD_GRAD_OP" in words or re.search(r"\bz2\b", words):
        level = 2
    elif "FULL_SHARD" in words or re.search(r"FSDP|ZeRO-3|\bF\d*\b|z3", words):
        level = 3
    elif re.search(r"ZeRO-1|z1|distributed optimizer|bf16 Adam", words):
        level = 1
    if pipeline > 1:
        level = min(level, 1)
    return {
        "data": data, "tensor": tensor, "pipeline": pipeline, "context": context, "level": level if data * context > 1 else 0,
        "virtual": int(virtual[1]) if virtual else 1, "expert": of("EP"),
    }  # fmt: skip
