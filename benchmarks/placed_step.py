"""Times a training step of placements beside the plain model's, in the same processes by turns.

    python -m benchmarks.placed_step [--repeats 15] [--processes 1 2]

On one process: `rlplace.apply` and `rlplace.distribute` with everything on one device. On two processes (gloo, a thread each):
halves of the ops, while the plain model trains in either process alone. The table has medians over the plain model's.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import rlplace
from benchmarks.harness import arguments
from rlplace.model.zoo import load_model
from rlplace.plan import PlacementPlan
from rlplace.runtime.base.steps import loss_of
from rlplace.runtime.placement.forward_graph import ForwardGraph, forward_graph

MODELS = {
    "gpt2, 4 layers of 256": ("hf:gpt2,n_layer=4,n_embd=256,n_head=4,vocab_size=2000,n_positions=64", 4, 64),
    "inception, images of 64": ("zoo:inception,blocks=3,image=64", 4, 1),
}


def plan_of(graph: ForwardGraph, devices: int) -> PlacementPlan:
    """Plans halves of the forward ops on two devices, or everything on one."""
    ops = list(graph.op_of_node.values())
    groups = [{"name": str(d), "ops": ops[len(ops) * d // devices : len(ops) * (d + 1) // devices]} for d in range(devices)]
    return PlacementPlan("0" * 64, "halves", 0, np.arange(devices, dtype=np.int32), groups=groups)


def step_of(model: nn.Module, inputs: Any, loss: Any) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(**inputs), loss).backward()
        optimizer.step()

    return step


def worker(rank: int, world: int, store: str, repeats: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    for name, (spec, batch, seq) in MODELS.items():
        torch.manual_seed(0)
        loaded = load_model(spec, batch=batch, seq=seq, device="cpu")
        model, inputs = loaded.module, loaded.example_inputs
        plan = plan_of(forward_graph(model, (), inputs, loss=loaded.loss), world)
        steps = {"plain": step_of(copy.deepcopy(model), inputs, loaded.loss)}
        if world == 1:
            applied = rlplace.apply(copy.deepcopy(model), plan, ["cpu"], example_inputs=inputs)
            steps["apply"] = step_of(applied, inputs, loaded.loss)
        placed = rlplace.distribute(copy.deepcopy(model), plan, inputs, loss=loaded.loss)
        steps["distribute"] = step_of(placed, inputs, None)
        taken: dict[str, list[float]] = {kind: [] for kind in steps}
        for turn in range(repeats + 3):
            for kind, step in steps.items():
                dist.barrier()
                begin_s = time.perf_counter()
                step()
                if turn >= 3:
                    taken[kind].append(time.perf_counter() - begin_s)
        if rank == 0:
            middle = {kind: statistics.median(seconds) for kind, seconds in taken.items()}
            ratios = "  ".join(f"{kind} {seconds / middle['plain']:.2f}" for kind, seconds in middle.items())
            print(f"{name:24} {world} process(es)  plain {1e3 * middle['plain']:.1f} ms  {ratios}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    options = arguments(__doc__, repeats=(15, "of a step"), processes=((1, 2), "numbers of processes", (1, 2)))
    for world in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, (world, f"{folder}/store", options.repeats), nprocs=world)
