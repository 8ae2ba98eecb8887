"""Whole training steps as anybody would write them, and what torch's allocator says of their memory."""

from __future__ import annotations

import copy
import functools
import gc
import statistics
import time
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.gpu.models import Model
from rlplace.model.zoo import LoadedModel, load_model
from rlplace.runtime.base.steps import loss_of

WARMUP, REPEATS = 3, 8
STATS = ("allocated_bytes", "requested_bytes", "reserved_bytes", "active_bytes")


@functools.lru_cache(maxsize=1)
def _load(model: Model, device_type: str) -> tuple[LoadedModel, int, int]:
    """Returns the model on the host, its batch and its length."""
    spec, batch, seq = (model.spec, model.batch, model.seq) if device_type == "cuda" else (model.small, 2, min(model.seq, 32))
    torch.manual_seed(0)
    return load_model(spec, batch=batch, seq=seq, device="cpu"), batch, seq


def measure_step(model: Model, variant: str, device: torch.device) -> dict[str, Any]:
    """Times steps with Adam; seconds of each, and where a GPU is, the allocator's peaks and its segments after the steps."""
    gc.collect()
    loaded, batch, seq = _load(model, device.type)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    dtype = torch.bfloat16 if variant.startswith("bf16") else torch.float32
    module = copy.deepcopy(loaded.module).to(device, dtype).train()
    if "checkpointing" in variant:
        enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    inputs = pytree.tree_map_only(
        torch.Tensor, lambda leaf: leaf.to(device, dtype if leaf.is_floating_point() else None), loaded.example_inputs
    )
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=1e-6)
    seconds = []
    for _ in range(WARMUP + REPEATS):
        begin = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=variant == "autocast"):
            output = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
            value = loss_of(output, loaded.loss)
        del output
        value.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    row: dict[str, Any] = {
        "model": loaded.name, "batch": batch, "seq": seq, "seconds": statistics.median(seconds[WARMUP:]),
        "least_s": min(seconds[WARMUP:]), "loss": float(value.detach()),
        "parameters": sum(p.numel() for p in module.parameters()),
    }  # fmt: skip
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        row |= {name: stats[f"{name}.all.peak"] for name in STATS} | {"before_bytes": before}
        row["segments"] = sorted(segment["total_size"] for segment in torch.cuda.memory_snapshot())
        row["retries"] = stats["num_alloc_retries"]
    return row
