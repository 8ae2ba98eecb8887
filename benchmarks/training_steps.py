"""Prices public training steps with their whole strategy, and asks which of several strategies the planner would pick.

    python benchmarks/training_steps.py STEPS.csv [--group TEXT] [--all] [--save FILE]

STEPS.csv holds published steps (model, devices, strategy, batch, precision, tokens/s a device or ms a step); it is no part of
this repository. Rows of one model, cluster, batch and precision with several strategies are a group: the table says which of
them the block executor would pick, what the rule of thumb would, and what either costs beside the measured best. Without --all
only groups are priced. Nothing is fitted on these rows. Models have fused norms, as the published runs have; what ran in eight
bits is priced as bf16, with float32 master weights and optimizer state.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from rlplace.cluster import KINDS, Cluster
from rlplace.errors import InputError
from rlplace.graph.capture import capture
from rlplace.graph.opgraph import OpGraph
from rlplace.strategy.drafts import Draft, Place
from rlplace.strategy.evaluate import Evaluator
from rlplace.strategy.price import PricedBlocks
from rlplace.zoo import load_model

GPT = (
    "hf:gpt2,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0,activation_function=gelu,n_positions={seq},vocab_size=50304,"
    "n_embd=%d,n_head=%d,n_layer=%d"
)
LLAMA = (
    "hf:llama,max_position_embeddings={seq},hidden_size=%d,intermediate_size=%d,num_hidden_layers=%d,num_attention_heads=%d,"
    "num_key_value_heads=%d,vocab_size=%d"
)
MODELS = {
    "MPT-125m": GPT % (768, 12, 12), "MPT-350m": GPT % (1024, 16, 24), "MPT-760m": GPT % (1536, 12, 24),
    "MPT-1b": GPT % (2048, 16, 24), "MPT-3b": GPT % (2560, 20, 32), "MPT-7b": GPT % (4096, 32, 32),
    "MPT-13b": GPT % (5120, 40, 40), "MPT-30b": GPT % (7168, 56, 48), "MPT-70b": GPT % (8192, 64, 80),
    "Llama3.1-8B": LLAMA % (4096, 14336, 32, 32, 8, 128256), "Llama3.1-70B": LLAMA % (8192, 28672, 80, 64, 8, 128256),
    "Llama3.1-405B": LLAMA % (16384, 53248, 126, 128, 8, 128256), "Llama2-7B": LLAMA % (4096, 11008, 32, 32, 32, 32000),
    "Llama2-13B": LLAMA % (5120, 13824, 40, 40, 40, 32000), "Llama2-34B": LLAMA % (8192, 22016, 48, 64, 8, 32000),
    "TinyLlama-1.1B": LLAMA % (2048, 5632, 22, 32, 4, 32000), "GPT 7B GQA h4096 L32": LLAMA % (4096, 14336, 32, 32, 8, 50304),
    "GPT 12L h512 a8": GPT % (512, 8, 12), "GPT-3 175B": GPT % (12288, 96, 96), "GPT-1.3B": GPT % (2048, 32, 24),
    "GPT-2.7B": GPT % (2560, 32, 32), "GPT-Neo-2.7B": GPT % (2560, 20, 32), "OPT-350M": GPT % (1024, 16, 24),
    "GPT-2 124M": GPT % (768, 12, 12), "GPT-2 1558M": GPT % (1600, 25, 48), "1.7B": LLAMA % (2048, 8192, 24, 32, 32, 49152),
    "Qwen2.5-7B": LLAMA % (3584, 18944, 28, 28, 4, 152064), "Qwen2.5-1.5B": LLAMA % (1536, 8960, 28, 12, 2, 151936),
}  # fmt: skip
ALIASES = {
    "Llama3-8B": "Llama3.1-8B", "Llama-3-8B": "Llama3.1-8B", "Llama-3.1-8B": "Llama3.1-8B", "Llama3-70B": "Llama3.1-70B",
    "Llama-3-70B": "Llama3.1-70B", "Llama-3.1-70B": "Llama3.1-70B", "Llama3-405B": "Llama3.1-405B",
    "Llama-3.1-405B": "Llama3.1-405B", "Llama-2-7B": "Llama2-7B", "Llama-7B": "Llama2-7B", "Llama-2-13B": "Llama2-13B",
    "GPT 12L h512 a8 TE": "GPT 12L h512 a8",
}  # fmt: skip
KIND_OF_GPU = {
    "h100_80gb": "h100", "H100": "h100", "H100-80": "h100", "H200": "h200", "A100": "a100-80g", "A100-80": "a100-80g",
    "a100_80gb": "a100-80g", "a800_80gb": "a100-80g", "a100_40gb": "a100-40g", "A100-40": "a100-40g", "l4": "l4",
    "mi300x": "mi300x", "rtx4090": "rtx4090", "rtx4090 (no P2P)": "rtx4090",
}  # fmt: skip
TITAN = msgspec.structs.replace(KINDS["h100"], memory_bandwidth_bytes_per_s=2.4e12, memory_bytes=96_000_000_000)
"""H100 with 96 GB of slower memory, capped at 500 W, as torchtitan's runs had it."""

# What rows leave out: sequence lengths by their sources, batches in micro-batches a replica.
SEQUENCES = {"eth-easl/sailor": 2048, "AMD-AGI/Primus": 4096, "cortwave": 1024}
MICROBATCHES = {"AMD-AGI/Primus": 64, "foundation-model-stack": 1, "jzhang38": 1, "gist": 1}
PER_PASS = ("Lightning-AI/litgpt", "NVIDIA DeepLearningExamples")  # their milliseconds are those of one micro-batch


@dataclasses.dataclass(frozen=True)
class Row:
    """A published step; `taken_s` is seconds of it, None where only memory was published."""

    source: str
    model: str
    gpu: str
    gpus: int
    words: str
    batch: int
    microbatch: int
    seq: int
    precision: str
    recompute: str
    taken_s: float | None

    @property
    def group(self) -> tuple[str, ...]:
        """What rows share that differ in their strategy only."""
        batch, seq = f"batch {self.batch}", f"seq {self.seq}"
        return self.model, f"{self.gpus} x {self.gpu}", batch, seq, self.precision, self.host, self.source.split()[0]

    @property
    def master_weights(self) -> bool:
        """Whether weights and optimizer state are kept in float32, too."""
        return not (self.precision == "bf16/PURE" or self.source.startswith("Lightning-AI/litgpt"))

    @property
    def host(self) -> str:
        return "compiled" if "compile" in self.words else "eager"


def read(path: Path) -> list[Row]:
    """The rows whose model and devices are known here."""
    rows = []
    for data in csv.DictReader(path.open(encoding="utf-8")):
        source, words = data["source"], data["strategy"] + (" T4" if "T4" in data["gpu"] else "")
        gpus, micro = int(data["gpus"]), int(data["micro_batch"] or 1)
        seq = int(data["seq"] or next((n for name, n in SEQUENCES.items() if source.startswith(name)), 0))
        if not seq or ALIASES.get(data["model"], data["model"]) not in MODELS or not _known(data["gpu"]):
            continue
        own = next((n for name, n in MICROBATCHES.items() if source.startswith(name)), 0)
        batch = int(data["global_batch"] or 0)
        if "torchtitan" in source and degrees(words, gpus)["pipeline"] > 1:
            micro = 1  # their local batch is cut into micro-batches of one
        if own or source.startswith(PER_PASS) or not batch:
            batch = micro * (own or 1) * degrees(words, gpus)["data"]
        taken = None
        if data["step_ms"]:
            taken = float(data["step_ms"]) / 1e3
        elif data["tokens_s_gpu"]:
            taken = batch * seq / gpus / float(data["tokens_s_gpu"])
        elif data["samples_s"]:
            taken = batch / float(data["samples_s"])
        rows.append(
            Row(source, data["model"], data["gpu"], gpus, words, batch, micro, seq, data["precision"], data["recompute"], taken)
        )
    return rows


def _known(gpu: str) -> bool:
    return gpu in KIND_OF_GPU or gpu.startswith(("H100 96GB", "gh200"))


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
        "virtual": int(virtual[1]) if virtual else 1,
    }  # fmt: skip


def schedule_of(words: str, virtual: int) -> str:
    if "zero bubble V" in words:
        return "zbv"
    if "zero bubble" in words:
        return "interleaved_zero_bubble"
    return "interleaved_1f1b" if virtual > 1 or "interleaved" in words else "1f1b"


def even_bounds(names: Sequence[str], stages: int) -> tuple[int, ...]:
    """Equal numbers of layers a stage, what comes before and after them at the ends: as configuration files cut."""
    layers = [index for index, name in enumerate(names) if re.search(r"\.\d+$", name)]
    cuts = [layers[len(layers) * stage // stages] for stage in range(1, stages)]
    return (0, *cuts, len(names))


def draft_of_row(row: Row, names: Sequence[str]) -> Draft:
    """The strategy of a row."""
    said = degrees(row.words, row.gpus)
    virtual = 2 if "zero bubble V" in row.words else 3 if row.words.endswith("PP8 interleaved") else said["virtual"]
    places, data, level = said["pipeline"], said["data"], said["level"]
    schedule = schedule_of(row.words, virtual) if places > 1 else None
    width, tensor = row.gpus // places, said["tensor"]
    meshes = tuple(
        Place(
            tuple(range(index * width, (index + 1) * width)), 1 if level else data, data if level else 1, said["context"],
            tensor, sharding=level, sequence_parallel=tensor > 1,
        )
        for index in range(places)
    )  # fmt: skip
    loop = tuple(range(places))
    order = (*loop, *reversed(loop)) if schedule == "zbv" else loop * virtual
    again = bytearray(len(names))
    for index, name in enumerate(names):
        if "full" in row.recompute or ("every 2nd" in row.recompute and re.search(r"[02468]$", name)):
            again[index] = 2
        elif "selective" in row.recompute and "every" not in row.recompute:
            again[index] = 1
    passes = row.batch // (data * row.microbatch)
    moved_out = bytes([1 if "optimizer offload" in row.words else 0]) * len(names)
    return Draft(even_bounds(names, len(order)), meshes, order, bytes(again), moved_out, (row.microbatch,), (passes,), schedule)


@functools.cache
def cluster_of(gpu: str, gpus: int) -> Cluster:
    """Hosts of eight devices, of four for GH200."""
    kind, host = KIND_OF_GPU.get(gpu, "h100"), 8
    if gpu.startswith("gh200"):
        host = 4
    network = ",ib=4x200g" if gpu.startswith("gh200") else ""
    text = f"{kind}:{gpus}" if gpus <= host else f"{kind}:{gpus // host}x{host}{network}"
    cluster = Cluster.preset(text)
    if gpu.startswith("H100 96GB"):
        devices = tuple(dataclasses.replace(d, memory_bytes=TITAN.memory_bytes) for d in cluster.devices)
        return dataclasses.replace(cluster, kinds=(TITAN,) * gpus, devices=devices)
    return cluster


def fuse_norms(module: torch.nn.Module) -> None:
    """A norm that keeps its input alone, as fused RMSNorm does on a GPU, in place of transformers' with its float32 copies."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                weight = child.weight
                fused = torch.nn.LayerNorm(weight.shape, bias=False, device=weight.device, dtype=weight.dtype)
                setattr(parent, name, fused)


@functools.lru_cache(maxsize=2)
def captures(model: str, seq: int, master_weights: bool) -> tuple[OpGraph, OpGraph]:
    """A model at two batch sizes, which give all."""
    spec = MODELS[ALIASES.get(model, model)].format(seq=seq)

    def graph(batch: int) -> OpGraph:
        loaded = load_model(spec, batch=batch, seq=seq, dtype="bf16")
        fuse_norms(loaded.module)
        module, inputs = loaded.module, loaded.example_inputs
        return capture(module, inputs, loss=loaded.loss, optimizer="adamw", master_weights=master_weights)

    return graph(2), graph(4)


@functools.lru_cache(maxsize=4)
def evaluator(model: str, seq: int, gpu: str, gpus: int, host: str, master_weights: bool) -> Evaluator:
    cluster = cluster_of(gpu, gpus)
    small, large = captures(model, seq, master_weights)
    return Evaluator(PricedBlocks(small, cluster, large, host=host), cluster)


@dataclasses.dataclass(frozen=True)
class Said:
    """What the planner says about a row: seconds (None: cannot be priced), bytes over capacity, and where the time goes."""

    row: Row
    step_s: float | None
    over_bytes: float
    peak_bytes: int
    parts: dict[str, float]
    reason: str = ""


def say(row: Row) -> Said:
    """Prices a row."""
    scores = evaluator(row.model, row.seq, row.gpu, row.gpus, row.host, row.master_weights)
    draft = draft_of_row(row, scores.costs.names)
    try:
        cuts = {place.cut(row.microbatch) for place in draft.places}
        if reason := next((why for cut in cuts if (why := scores.costs.why_not(cut))), None):
            return Said(row, None, 0.0, 0, {}, reason)
        found = scores.evaluate(draft)
    except InputError as error:
        return Said(row, None, 0.0, 0, {}, str(error))
    return Said(row, found.step_time_s, found.over_bytes, max(found.peak_memory_bytes), found.parts)


def show(said: Said) -> str:
    row = said.row
    name = f"  {row.words[:44]:44s}{row.recompute[:12]:13s}{row.microbatch:4d}"
    if said.step_s is None:
        return f"{name}   {said.reason}"
    taken = "" if row.taken_s is None else f"{1e3 * row.taken_s:10.1f}"
    error = "" if row.taken_s is None else f"{100 * (said.step_s / row.taken_s - 1):+7.0f} %"
    over = f", {said.over_bytes / 1e9:.1f} GB over" if said.over_bytes else ""
    parts = " ".join(f"{part} {1e3 * seconds:.0f}" for part, seconds in said.parts.items() if seconds > 0.005 * said.step_s)
    return f"{name}{taken:>10s}{1e3 * said.step_s:10.1f} ms{error:>9s}  {said.peak_bytes / 1e9:5.1f} GB{over}  ({parts})"


def rule_of_thumb(rows: Iterable[Row]) -> Row:
    """What the rule of thumb takes: sharded optimizer, least tensor x pipeline, tensor at most 8, largest micro-batch."""

    def key(row: Row) -> tuple[float, ...]:
        said = degrees(row.words, row.gpus)
        width = said["tensor"] * said["pipeline"] * said["context"]
        return (said["tensor"] > 8, width, said["level"] == 0, said["pipeline"], len(row.recompute), -row.microbatch)

    return min(rows, key=key)


def judge(found: Sequence[Said]) -> dict[str, float | str]:
    """Of a group: the planner's pick, its first three and the rule's, as performance beside the measured best."""
    timed = [said for said in found if said.row.taken_s is not None]
    best = min(said.row.taken_s for said in timed)
    ranked = sorted((said for said in timed if said.step_s is not None), key=lambda said: (said.over_bytes, said.step_s))
    return {
        "measured best": min(timed, key=lambda said: said.row.taken_s).row.words,
        "pick": ranked[0].row.words,
        "planner": best / ranked[0].row.taken_s,
        "first three": best / min(said.row.taken_s for said in ranked[:3]),
        "rule": best / rule_of_thumb([said.row for said in timed]).taken_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", type=Path)
    parser.add_argument("--group", default="", help="groups whose model, source or devices hold this text")
    parser.add_argument("--all", action="store_true", help="rows without rivals, too")
    parser.add_argument("--save", type=Path, help="write predictions as JSON")
    options = parser.parse_args()
    if not options.steps.exists():
        sys.exit(f"{options.steps}: not there; the published steps are no part of this repository, nothing to compare")
    torch.set_num_threads(1)
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in read(options.steps):
        if options.group in ", ".join(row.group):
            groups.setdefault(row.group, []).append(row)
    saved = []
    for key, rows in sorted(groups.items()):
        if len(rows) < 2 and not options.all:
            continue
        print(", ".join(key), flush=True)
        found = []
        for row in rows:
            found.append(say(row))
            print(show(found[-1]), flush=True)
        answer = judge(found) if len([said for said in found if said.row.taken_s and said.step_s]) > 1 else {}
        if answer:
            print("  -> " + ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k}: {v}" for k, v in answer.items()))
        predicted = [
            {"strategy": one.row.words, "recompute": one.row.recompute, "predicted_s": one.step_s and round(one.step_s, 4)}
            for one in found
        ]
        saved.append({"group": key, "judged": answer, "rows": predicted})
    for name in ("planner", "first three", "rule"):
        shares = [entry["judged"][name] for entry in saved if entry["judged"]]
        if shares:
            mean = np.exp(np.log(shares).mean())
            print(f"{name}: {mean:.3f} of the measured best, worst {min(shares):.3f}, {len(shares)} groups")
    if options.save is not None:
        options.save.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
