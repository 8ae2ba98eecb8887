"""Whole training steps as anybody would write them, steps of strategies of one device, and what torch's allocator says of both.

Strategies run on torch's own parts: micro-batches, recomputation, FSDP2 in mixed precision over a group of one.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils import _pytree as pytree

from benchmarks.gpu.models import FIT, Model
from rlplace.model.zoo import LoadedModel, load_model
from rlplace.plan.strategy import Strategy
from rlplace.runtime.base.steps import loss_of
from rlplace.runtime.strategy.run import prepare

WARMUP, REPEATS = 3, 8
STATS = ("allocated_bytes", "requested_bytes", "reserved_bytes", "active_bytes")
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "full recomputation": {"recompute": "full"},
    "selective recomputation": {"recompute": "selective"},
    "two micro-batches": {"micro": 2},
    "bf16 over fp32": {"half": True},
    "bf16 over fp32, full recomputation": {"half": True, "recompute": "full"},
}
"""Strategies for `prepare`; rows of torch's own wrappers are of commit f4799299."""


def held(device: torch.device) -> int:
    """Forgets what earlier steps left; bytes that are still allocated."""
    gc.collect()  # models of before are in cycles
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))


def timed(step: Callable[[], Tensor], device: torch.device) -> tuple[list[float], list[float]]:
    """Takes steps after some that warm up: seconds of each, and the losses of all."""
    seconds, losses = [], []
    for _ in range(WARMUP + REPEATS):
        begin = time.perf_counter()
        loss = step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
        losses.append(float(loss.detach()))
    return seconds[WARMUP:], losses


@functools.lru_cache(maxsize=1)
def _load(model: Model, device_type: str) -> tuple[LoadedModel, int, int]:
    """Returns the model on the host, its batch and its length."""
    spec, batch, seq = (model.spec, model.batch, model.seq) if device_type == "cuda" else (model.small, 2, min(model.seq, 32))
    torch.manual_seed(0)
    return load_model(spec, batch=batch, seq=seq, device="cpu"), batch, seq


def measure_step(model: Model, variant: str, device: torch.device) -> dict[str, Any]:
    """Times steps with Adam; seconds of each, and where a GPU is, the allocator's peaks and its segments after the steps."""
    loaded, batch, seq = _load(model, device.type)
    before = held(device)
    dtype = torch.bfloat16 if variant.startswith("bf16") else torch.float32
    module = copy.deepcopy(loaded.module).to(device, dtype).train()
    if "checkpointing" in variant:
        enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    inputs = pytree.tree_map_only(
        Tensor, lambda leaf: leaf.to(device, dtype if leaf.is_floating_point() else None), loaded.example_inputs
    )
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=1e-6)

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=variant == "autocast"):
            value = loss_of(module(**inputs) if isinstance(inputs, dict) else module(*inputs), loaded.loss)
        value.backward()
        optimizer.step()
        return value

    seconds, losses = timed(step, device)
    row: dict[str, Any] = {
        "model": loaded.name, "batch": batch, "seq": seq, "seconds": statistics.median(seconds), "least_s": min(seconds),
        "loss": losses[-1], "parameters": sum(p.numel() for p in module.parameters()),
    }  # fmt: skip
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        row |= {name: stats[f"{name}.all.peak"] for name in STATS} | {"before_bytes": before}
        row["segments"] = sorted(segment["total_size"] for segment in torch.cuda.memory_snapshot())
        row["retries"] = stats["num_alloc_retries"]
    return row


@contextlib.contextmanager
def one_process(device: torch.device) -> Iterator[None]:
    """Yields a process group of one."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, f"file://{folder}/store", world_size=1, rank=0)
        try:
            yield
        finally:
            dist.destroy_process_group()


def run_strategy(name: str, device: torch.device) -> dict[str, Any]:
    """Steps of gpt2 under a strategy, beside the loss of the plain model."""
    how, model, cuda = STRATEGIES[name], FIT["gpt2"], device.type == "cuda"
    spec, batch, seq = (model.spec, model.batch, model.seq) if cuda else (model.small, 2, 32)
    torch.manual_seed(0)
    loaded = load_model(f"{spec},resid_pdrop=0,embd_pdrop=0,attn_pdrop=0", batch=batch, seq=seq, dtype="fp32", device="cpu")
    module = loaded.module.train().to(device)
    inputs = {key: value for key, value in loaded.example_inputs.items() if isinstance(value, Tensor)}
    blocks, count = [f"transformer.h.{n}" for n in range(module.config.n_layer)], how.get("micro", 1)
    named = ["transformer.wte", "transformer.wpe", *blocks, "transformer.ln_f", "lm_head"]
    stage: dict[str, Any] = {"blocks": named, "devices": [0], "mesh": {}, "sharding": 0}
    if "recompute" in how:
        stage["recompute"] = dict.fromkeys(blocks, how["recompute"])
    counts = {"batch": batch, "microbatch": [batch // count], "microbatches": [count]}
    strategy = Strategy.from_dict({**counts, "stages": [stage]})
    with torch.no_grad():
        expected = float(module(**{key: value.to(device) for key, value in inputs.items()}).loss)
    before = held(device) - sum(p.nbytes for p in module.parameters())
    first = {key: value[: batch // count] for key, value in inputs.items()}
    native = prepare(module, strategy, first, device.type, mixed_precision=HALF if how.get("half") else None)
    optimizer = torch.optim.Adam(native.parameter_groups(), lr=1e-6)

    def step() -> Tensor:
        optimizer.zero_grad()
        moved = {key: value.to(device) for key, value in inputs.items()}
        value: Tensor = native.step(moved, lambda output, part: output.loss)
        optimizer.step()
        return value

    seconds, losses = timed(step, device)
    row = {"seconds": statistics.median(seconds), "loss": losses[0], "plain_loss": expected, "batch": batch, "seq": seq}
    if cuda:
        row["before_bytes"] = before
        row["allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        row["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return row
