"""Strategies of one device on torch's own parts, and what several processes on one card can run.

One process runs micro-batches, recomputation, FSDP2 in mixed precision over a group of one, and parameters in host memory.
NCCL gives a card to one process only, unless NCCL_MULTI_RANK_GPU_ENABLE is set, which newer ones know; where
that works, cells of `benchmarks.equality` run on eight processes of one card.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

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
    "torch: DistributedDataParallel": {"torch": "ddp"},
    "torch: fully_shard": {"torch": "fsdp"},
    "torch: fully_shard, bf16 over fp32": {"torch": "fsdp", "half": True},
    "torch: fully_shard, parameters on the host": {"torch": "offload", "half": True},
}
"""Strategies for `prepare`, and torch's wrappers over a group of one, whose cost a strategy of one device has not."""


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
    how, model = dict(STRATEGIES[name]), FIT["gpt2"]
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
    stage: dict[str, Any] = {"blocks": named, "devices": [0], "mesh": {}, "sharding": how.get("sharding", 0)}
    for key in ("recompute", "offload"):
        if key in how:
            stage[key] = dict.fromkeys(named if key == "offload" else blocks, how[key])
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
    half = HALF if how.get("half") else None
    if "torch" in how:
        wrapped = _wrap(module, blocks, how["torch"], half, device)
        groups: Any = wrapped.parameters()
    else:
        native = prepare(module, strategy, first, device.type, mixed_precision=half)
        groups = native.parameter_groups()
    optimizer = torch.optim.Adam(groups, lr=1e-6)
    seconds, losses = [], []
    for _ in range(WARMUP + REPEATS):
        begin = time.perf_counter()
        optimizer.zero_grad()
        moved = {key: value.to(device) for key, value in inputs.items()}
        if "torch" in how:
            value = wrapped(**moved).loss
            value.backward()
        else:
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


def _wrap(module: nn.Module, blocks: list[str], how: str, half: MixedPrecisionPolicy | None, device: torch.device) -> nn.Module:
    module.to(device)
    if how == "ddp":
        ids = [device] if device.type == "cuda" else None
        return DistributedDataParallel(module, device_ids=ids, gradient_as_bucket_view=True)
    mesh = init_device_mesh(device.type, (1,))
    policy: dict[str, Any] = {} if half is None else {"mp_policy": half}
    if how == "offload":
        policy["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for block in blocks:
        fully_shard(module.get_submodule(block), mesh=mesh, **policy)
    fully_shard(module, mesh=mesh, **policy)
    return module


def _probe(rank: int, folder: str, backend: str, answers: Any) -> None:
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    torch.cuda.set_device(0)
    try:
        dist.init_process_group(backend, f"file://{folder}/store", world_size=2, rank=rank)
        for name, run in COLLECTIVES.items():
            run(rank, torch.full((1024,), float(rank + 1), device="cuda"))
            torch.cuda.synchronize()
            answers.put((name, "works"))
    except Exception as error:
        answers.put((name, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
    time.sleep(1)
    os._exit(0)


def _reduce(rank: int, value: torch.Tensor) -> None:
    dist.all_reduce(value)
    assert value[0].item() == 3.0, "a wrong sum"


def _gather(rank: int, value: torch.Tensor) -> None:
    out = value.new_empty(2048)
    dist.all_gather_into_tensor(out, value)
    assert out[-1].item() == 2.0, "a wrong gather"


def _scatter(rank: int, value: torch.Tensor) -> None:
    out = value.new_empty(512)
    dist.reduce_scatter_tensor(out, value)
    assert out[0].item() == 3.0, "a wrong sum"


def _send(rank: int, value: torch.Tensor) -> None:
    if rank == 0:
        dist.send(value, 1)
    else:
        dist.recv(value, 0)
        assert value[0].item() == 1.0, "a wrong value"


COLLECTIVES: dict[str, Callable[[int, torch.Tensor], None]] = {
    "all_reduce": _reduce, "all_gather": _gather, "reduce_scatter": _scatter, "send": _send,
}  # fmt: skip


def two_on_one_card(backend: str) -> dict[str, Any]:
    """Says which collectives two processes of one card can run, up to the first that they cannot."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_probe, args=(rank, folder, backend, answers)) for rank in range(2)]
        for process in processes:
            process.start()
        with contextlib.suppress(queue.Empty):
            for _ in range(2 * len(COLLECTIVES)):
                name, answer = answers.get(timeout=20)
                found[name] = answer
                if answer != "works":
                    break
        for process in processes:
            process.kill()
            process.join()
    return found
