"""Prices captured training steps on one device against published end-to-end figures (never used for fitting).

    python benchmarks/op_anchors.py [--only NAME]

Published: nanoGPT's README; MPT tables of mosaicml/llm-foundry (FSDP on one node of 8, tokens/s per GPU); Llama 3.1 8B of
torchtitan (FSDP on 8 H100 with 2.4 TB/s memory and a 500 W cap, selective recompute). Predicted is what one device computes:
forward, backward and one update of the whole model per step; collectives are not in it. Attention is priced as causal.
"""

from __future__ import annotations

import argparse
import dataclasses

import msgspec
import torch

from rlplace.cluster import KINDS
from rlplace.cost.compute import explain_times
from rlplace.model.capture.capture import capture
from rlplace.model.graph.opgraph import FORWARD, UPDATE, OpGraph
from rlplace.model.zoo import load_model

GPT = "hf:gpt2,vocab_size=50304,n_positions=2048,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0,activation_function=gelu"
MPT = GPT + ",n_embd={0},n_head={1},n_layer={2}"
LLAMA_8B = (
    "hf:llama,hidden_size=4096,intermediate_size=14336,num_hidden_layers=32,num_attention_heads=32,num_key_value_heads=8,"
    "vocab_size=128256,max_position_embeddings=8192"
)
TITAN = msgspec.structs.replace(KINDS["h100"], memory_bandwidth_bytes_per_s=2.4e12)


@dataclasses.dataclass(frozen=True)
class Anchor:
    """A published figure in tokens/s per device; `update_share` of the update runs there, `accumulate` batches share it."""

    name: str
    model: str
    kind: str
    batch: int
    seq: int
    host: str
    published: float
    update_share: float = 1.0
    accumulate: int = 1
    recompute: float = 0.0


ANCHORS = (
    Anchor("nanoGPT 124M, A100-40, compile", GPT, "a100-40g", 20, 1024, "compiled", 5 * 20 * 1024 / 0.755, accumulate=5),
    Anchor("MPT 125M, A100-80", MPT.format(768, 12, 12), "a100-80g", 32, 2048, "eager", 141737, 1 / 8, 2),
    Anchor("MPT 1B, A100-80", MPT.format(2048, 16, 24), "a100-80g", 14, 2048, "eager", 20513, 1 / 8, 4),
    Anchor("MPT 3B, A100-80", MPT.format(2560, 20, 32), "a100-80g", 10, 2048, "eager", 10811, 1 / 8, 2),
    Anchor("MPT 7B, A100-80", MPT.format(4096, 32, 32), "a100-80g", 6, 2048, "eager", 4641, 1 / 8, 2),
    Anchor("MPT 7B, H100", MPT.format(4096, 32, 32), "h100", 6, 2048, "eager", 10643, 1 / 8),
    Anchor("MPT 1B, H100", MPT.format(2048, 16, 24), "h100", 14, 2048, "eager", 45455, 1 / 8),
    Anchor("Llama 3.1 8B, H100-96, eager", LLAMA_8B, "titan", 2, 8192, "eager", 5762, 1 / 8, recompute=0.5),
    Anchor("Llama 3.1 8B, H100-96, compile", LLAMA_8B, "titan", 2, 8192, "compiled", 6667, 1 / 8, recompute=0.5),
)


def causal(graph: OpGraph) -> OpGraph:
    """Marks every attention op as causal: exported transformers models carry a mask instead of the flag."""
    dims = {op: dict(sizes) for op, sizes in graph.op_dims.items()}
    for op, kind in enumerate(graph.op_kind):
        if kind == "attention" and op in dims:
            dims[op]["causal"] = 1
    return dataclasses.replace(graph, op_dims=dims)


def predict(anchor: Anchor, graph: OpGraph) -> tuple[float, float, str]:
    """Seconds of a step, tokens/s, and what it rests on."""
    kind = TITAN if anchor.kind == "titan" else KINDS[anchor.kind]
    explained = explain_times(graph, kind, host=anchor.host)
    update = graph.op_phase == UPDATE
    seconds = explained.seconds[~update].sum() + explained.seconds[update].sum() * anchor.update_share / anchor.accumulate
    # Selective recompute: that share of the layers' forward products runs twice, with all that is not a product.
    seconds += anchor.recompute * explained.seconds[graph.op_phase == FORWARD].sum()
    shares = ", ".join(f"{100 * share:.0f} % {basis}" for basis, share in explained.shares().items())
    return seconds, anchor.batch * anchor.seq / seconds, shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="anchors whose name holds this text")
    parser.add_argument("--classes", action="store_true", help="time by op class as well")
    options = parser.parse_args()
    torch.set_num_threads(1)
    graphs: dict[tuple[str, int, int], OpGraph] = {}
    print(f"{'anchor':34s}{'published':>11s}{'predicted':>11s}{'error':>8s}   tokens/s per device")
    for anchor in ANCHORS:
        if options.only not in anchor.name:
            continue
        key = (anchor.model, anchor.batch, anchor.seq)
        if key not in graphs:
            loaded = load_model(anchor.model, batch=anchor.batch, seq=anchor.seq, dtype="bf16")
            graphs[key] = causal(capture(loaded.module, loaded.example_inputs, loss=loaded.loss, optimizer="adamw"))
        seconds, rate, shares = predict(anchor, graphs[key])
        error = 100 * (rate / anchor.published - 1)
        print(
            f"{anchor.name:34s}{anchor.published:11.0f}{rate:11.0f}{error:+7.0f}%   {1e3 * seconds:.1f} ms, {shares}",
            flush=True,
        )
        if options.classes:
            show_classes(anchor, graphs[key])


def show_classes(anchor: Anchor, graph: OpGraph) -> None:
    kind = TITAN if anchor.kind == "titan" else KINDS[anchor.kind]
    explained = explain_times(graph, kind, host=anchor.host)
    rows: dict[str, list[float]] = {}
    for op, name in enumerate(graph.op_kind):
        row = rows.setdefault(
            f"{name} {('forward', 'backward', 'backward', 'update')[graph.op_phase[op]]}", [0.0, 0.0, 0.0, 0.0]
        )
        row[0] += explained.device_s[op]
        row[1] += explained.seconds[op]
        row[2] += graph.op_flops[op]
        row[3] += graph.op_bytes[op]
    for name, (device, seconds, flops, size) in sorted(rows.items(), key=lambda item: -item[1][1])[:12]:
        print(f"    {name:24s}{1e3 * device:9.2f} ms device {1e3 * seconds:9.2f} ms {flops:9.2e} FLOP {size:9.2e} B")


if __name__ == "__main__":
    main()
