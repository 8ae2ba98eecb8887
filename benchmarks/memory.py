"""Predicted memory against real training steps on the CPU and against published runs.

    python -m benchmarks.memory [real] [anchors]      default: all

`real` runs forward and backward of small models and counts every live storage (and asks torch's MemTracker too); `anchors`
captures the published models at full size without allocating anything (minutes). One thread.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from benchmarks.harness import arguments, markdown, one_thread
from rlplace.cost import price
from rlplace.cost.footprint import MemoryOptions, footprint
from rlplace.model.capture.capture import capture
from rlplace.model.zoo import load_model
from rlplace.plan import PlacementPlan
from tests.cost.live_bytes import LiveBytes, step

GIB = 1 << 30
OUTSIDE = ("slack", "context", "communication", "workspace")
NO_DROPOUT = {
    "gpt2": "resid_pdrop=0,embd_pdrop=0,attn_pdrop=0",
    "bert": "hidden_dropout_prob=0,attention_probs_dropout_prob=0",
    "t5": "dropout_rate=0",
}
REAL = (
    (f"hf:gpt2,n_layer=4,n_embd=256,n_head=4,vocab_size=8000,{NO_DROPOUT['gpt2']}", 4, 256),
    (
        "hf:bert,num_hidden_layers=4,hidden_size=256,num_attention_heads=4,intermediate_size=1024,vocab_size=8000,"
        + NO_DROPOUT["bert"], 4, 256,
    ),
    (f"hf:t5,num_layers=4,d_model=256,d_ff=1024,num_heads=4,d_kv=64,vocab_size=8000,{NO_DROPOUT['t5']}", 4, 128),
    (
        "hf:llama,num_hidden_layers=4,hidden_size=256,num_attention_heads=4,num_key_value_heads=4,intermediate_size=688,"
        "vocab_size=8000", 4, 256,
    ),
    ("hf:vit,num_hidden_layers=4,hidden_size=192,num_attention_heads=3,intermediate_size=768", 4, 1),
    ("hf:resnet,depths=1/1/1/1", 4, 1),
    ("zoo:lstm", 4, 64),
    ("zoo:transformer", 4, 64),
    ("zoo:inception", 4, 64),
    ("zoo:unet", 2, 64),
)  # fmt: skip


def real_peak(spec: str, batch: int, seq: int, autocast: torch.dtype | None = None) -> int:
    loaded = load_model(spec, batch=batch, seq=seq, device="cpu")
    live = LiveBytes()
    inputs = [leaf for leaf in tree_leaves(loaded.example_inputs) if torch.is_tensor(leaf)]
    for tensor in [*loaded.module.parameters(), *loaded.module.buffers(), *inputs]:
        live.add(tensor)
    with live:
        step(loaded.module, loaded.example_inputs, autocast)
    return live.peak


def tracked_peak(spec: str, batch: int, seq: int) -> int | None:
    """Returns peak by torch's own MemTracker; None where it fails."""
    from torch.distributed._tools.mem_tracker import MemTracker

    loaded = load_model(spec, batch=batch, seq=seq, device="cpu")
    tracker = MemTracker()
    inputs = [leaf for leaf in tree_leaves(loaded.example_inputs) if torch.is_tensor(leaf)]
    tracker.track_external(loaded.module, *inputs)
    try:
        with tracker:
            step(loaded.module, loaded.example_inputs)
    except Exception as error:
        print(f"MemTracker: {type(error).__name__}: {str(error)[:80]}", file=sys.stderr)
        return None
    totals = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return int(next(size for key, size in totals.items() if str(key).endswith("Total")))


def program_order(graph, cluster: str, options: MemoryOptions):
    """Returns the footprint of one device that runs the ops in the order of the program."""
    problem = price(graph, cluster, level="op")
    order = [list(range(problem.num_ops))]
    plan = PlacementPlan(problem.fingerprint, "program", 0, np.zeros(problem.num_groups, dtype=np.int32), order=order)
    return footprint(problem, plan, graph=graph, options=options)[0]


def predicted_peak(spec: str, batch: int, seq: int, **how) -> int:
    loaded = load_model(spec, batch=batch, seq=seq)
    graph = capture(loaded.module, loaded.example_inputs, loss=loaded.loss, optimizer="sgd", **how)
    item = program_order(graph, "cpu:1", MemoryOptions(workspace_bytes=0, steps=1))
    return sum(size for part, size in item.parts.items() if part not in OUTSIDE)


def show_real() -> None:
    """Prints peaks of small models, two of them with recomputation, one under autocast."""
    how = {"autocast": torch.bfloat16}, {"autocast": "bf16", "autocast_device": "cpu"}
    cases: list[tuple[Any, ...]] = [(spec, *sizes, {}, {}) for spec, *sizes in REAL]
    cases += [
        (*REAL[0], *how),
        *((f"{spec},gradient_checkpointing=true", *sizes, {}, {}) for spec, *sizes in (REAL[0], REAL[3])),
    ]
    print(markdown(["model", "real MB", "MemTracker", "predicted", "error %"], []))
    for spec, batch, seq, ran, asked in cases:
        real, found = real_peak(spec, batch, seq, **ran), predicted_peak(spec, batch, seq, **asked)
        tracked = None if ran or "checkpointing" in spec else tracked_peak(spec, batch, seq)
        name = f"{spec.partition(',')[0]}{' autocast' * bool(ran)}{' recomputed' * ('checkpointing' in spec)}"
        other = "-" if tracked is None else f"{tracked / 1e6:.3f}"
        print(f"| {name} | {real / 1e6:.3f} | {other} | {found / 1e6:.3f} | {100 * (found / real - 1):+.2f} |", flush=True)


LLAMA_3B = (
    "hf:llama,hidden_size=3072,intermediate_size=8192,num_hidden_layers=28,num_attention_heads=24,num_key_value_heads=8,"
    "head_dim=128,vocab_size=128256,tie_word_embeddings=true,max_position_embeddings=131072"
)


def show_anchors() -> None:
    print("Llama 3.2 3B, batch 2, sequence 4096, bf16, AdamW with state in bf16, one A100 (torchtune), GiB reserved")
    rows = (
        ("plain", LLAMA_3B, "foreach", 60.0),
        ("checkpointing", f"{LLAMA_3B},gradient_checkpointing=true", "foreach", None),
        ("plain, fused update", LLAMA_3B, "fused", None),
    )
    for name, spec, kernel, published in rows:
        begin = time.perf_counter()
        loaded = load_model(spec, batch=2, seq=4096, dtype="bf16")
        graph = capture(loaded.module, loaded.example_inputs, optimizer="adamw")
        item = program_order(graph, "a100-80g:1", MemoryOptions(optimizer_kernel=kernel))
        parts = ", ".join(f"{part} {size / GIB:.1f}" for part, size in item.parts.items() if size > GIB // 20)
        known = "" if published is None else f"; published {published}"
        print(
            f"  {name:22} allocated {item.allocated_peak_bytes / GIB:.1f}, reserved {item.reserved_peak_bytes / GIB:.1f}"
            f"{known} ({parts}; {time.perf_counter() - begin:.0f} s)"
        )


if __name__ == "__main__":
    one_thread()
    shows = {"real": show_real, "anchors": show_anchors}
    for name in arguments(__doc__, "parts").parts or shows:
        print(f"== {name}")
        shows[name]()
