"""Strategies of one device on torch's own parts: micro-batches, recomputation, FSDP2 in mixed precision over a group of one."""

from __future__ import annotations

import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from benchmarks.gpu.models import FIT
from benchmarks.gpu.steps import REPEATS, WARMUP
from rlplace.model.zoo import load_model
from rlplace.plan.strategy import Strategy
from rlplace.runtime.strategy.run import prepare

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
    how, model = STRATEGIES[name], FIT["gpt2"]
    cuda = device.type == "cuda"
    spec, batch, seq = (model.spec, model.batch, model.seq) if cuda else (model.small, 2, 32)
    spec += ",resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"
    torch.manual_seed(0)
    loaded = load_model(spec, batch=batch, seq=seq, dtype="fp32", device="cpu")
    module = loaded.module.train()
    inputs = {key: value for key, value in loaded.example_inputs.items() if isinstance(value, torch.Tensor)}
    blocks = [f"transformer.h.{n}" for n in range(module.config.n_layer)]
    named = ["transformer.wte", "transformer.wpe", *blocks, "transformer.ln_f", "lm_head"]
    count = how.get("micro", 1)
    stage: dict[str, Any] = {"blocks": named, "devices": [0], "mesh": {}, "sharding": 0}
    if "recompute" in how:
        stage["recompute"] = dict.fromkeys(blocks, how["recompute"])
    counts = {"batch": batch, "microbatch": [batch // count], "microbatches": [count]}
    strategy = Strategy.from_dict({**counts, "stages": [stage]})
    if cuda:
        module.to(device)
    with torch.no_grad():
        expected = float(module(**{key: value.to(device) for key, value in inputs.items()}).loss)
    gc.collect()  # models of before are in cycles
    before = 0
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device) - sum(p.nbytes for p in module.parameters())
    first = {key: value[: batch // count] for key, value in inputs.items()}
    native = prepare(module, strategy, first, device.type, mixed_precision=HALF if how.get("half") else None)
    optimizer = torch.optim.Adam(native.parameter_groups(), lr=1e-6)
    seconds, losses = [], []
    for _ in range(WARMUP + REPEATS):
        begin = time.perf_counter()
        optimizer.zero_grad()
        moved = {key: value.to(device) for key, value in inputs.items()}
        value = native.step(moved, lambda output, part: output.loss)
        losses.append(float(value.detach()))
        optimizer.step()
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    row = {"seconds": statistics.median(seconds[WARMUP:]), "loss": losses[0], "plain_loss": expected}
    row |= {"batch": batch, "seq": seq}
    if cuda:
        row["before_bytes"] = before
        row["allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        row["reserved_bytes"] = torch.cuda.max_memory_reserved(device)
    return row
