"""One strategy after the other on emulated hosts: processes whose blocks sleep for the rest of their priced time.

    python -m benchmarks.emulated_worker FOLDER     what `benchmarks.emulated_lab` starts on every host

Torch's own parts run as `rlplace run` has them; what a block computes is stretched to the time that a cell states, in equal
parts before, between and after the collectives inside of it. Three things are as on a GPU, other than torch does them on a
processor: `fully_shard` gathers the next block's parameters and reduces gradients while a block computes, and what a block
computes beside such collectives is slower by `COMPUTE_SLOWDOWN`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from rlplace.cluster.collectives import COMPUTE_SLOWDOWN
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import Strategy

LIMIT_S = 900
LATE_S, SLICE_S = 0.01, 0.004


@contextlib.contextmanager
def first_in_line() -> Iterator[None]:
    """Lets what this process does, or starts, go before all other work of the machine: real time, which needs root."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@dataclass
class Turn:
    """A pass of a block: how long it sleeps at each of its collectives, what is left, since when, and collectives so far."""

    key: Any
    part_s: float
    left_s: float
    since: float
    seen: int = 0


def beside() -> bool:
    """Returns whether parameters are gathered, or gradients reduced, at present."""
    GATHERS[:] = [work for work in GATHERS if not work.is_completed()]
    return bool(GATHERS) or not all(work.done() for work in PENDING)


class Sleeper:
    """Stretches what blocks do to their priced times; what took too long is taken from the next sleep, `LATE_S` at most.

    Seconds in which a block waits for collectives of its groups are not the block's: `waited_s` counts them. `late_s` counts
    those that blocks took beyond their priced times: a machine that is too busy.
    """

    def __init__(self) -> None:
        self.on, self.halves, self.owed_s, self.waited_s, self.late_s = False, False, 0.0, 0.0, 0.0
        self._turn: Turn | None = None
        self._collectives: dict[Any, int] = {}

    def clock(self) -> float:
        """Returns seconds without those waited for collectives inside blocks."""
        return time.perf_counter() - self.waited_s

    def pay(self, seconds: float, since: float) -> None:
        """Sleeps the rest of a time, of which this has passed."""
        owed_s = self.owed_s + seconds - (self.clock() - since)
        self.owed_s = max(owed_s, -LATE_S)
        self.late_s += self.owed_s - owed_s
        while self.owed_s > 0:
            begin, slower = time.perf_counter(), COMPUTE_SLOWDOWN if beside() else 1.0
            time.sleep(min(SLICE_S, self.owed_s * slower))
            self.owed_s -= (time.perf_counter() - begin) / slower

    def enter(self, key: Any, seconds: float) -> None:
        """Begins a pass of a block; half of one without collectives comes first, as gradients come evenly over its time."""
        expected = self._collectives.get(key, 0)
        self._turn = Turn(key, seconds / (expected + 1), seconds, self.clock())
        if not expected and self.on:
            self.pay(seconds / 2, self._turn.since)
            self._turn.left_s, self._turn.since = seconds / 2, self.clock()

    def collective(self) -> None:
        """Sleeps for the part of a pass before a collective inside of it; as many are expected as the last one had."""
        if (turn := self._turn) is not None:
            turn.seen += 1
            part_s = min(turn.part_s, turn.left_s - turn.part_s)
            if part_s > 0 and self.on:
                self.pay(part_s, turn.since)
                turn.left_s, turn.since = turn.left_s - part_s, self.clock()

    def leave(self) -> None:
        """Ends a pass of a block."""
        if (turn := self._turn) is not None:
            self._turn, self._collectives[turn.key] = None, turn.seen
            self.pay(turn.left_s, turn.since)

    def stretch(self, block: Any, forward_s: float, backward_s: float, weight_s: float) -> None:
        """Hooks of a block: its forward, and its backward from the gradient of its output to that of its input."""
        import torch
        from torch.utils import _pytree as pytree

        def first(values: Any) -> Any:
            return next((v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor) and v.requires_grad), None)

        def backward_s_now() -> float:
            return backward_s - (weight_s if self.halves else 0.0)

        def before(module: Any, args: Any, kwargs: Any) -> None:
            self.enter((id(block), "forward"), forward_s)

        def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if not self.on:
                return
            self.leave()
            taken, made = first((args, kwargs)), first(output)
            if made is None:
                return
            if taken is None:
                made.register_hook(lambda gradient: self.pay(backward_s_now(), self.clock()))
            else:
                # after the hooks of the tensor, in one of which the next block sleeps
                made.grad_fn.register_prehook(lambda gradients: self.enter((id(block), self.halves), backward_s_now()))
                hooks: list[Any] = []  # removed when called: stages keep what they receive into from step to step

                def leaves(gradient: Any) -> None:
                    hooks.pop().remove()
                    self.leave()

                hooks.append(taken.register_hook(leaves))

        block.register_forward_pre_hook(before, with_kwargs=True)
        block.register_forward_hook(after, with_kwargs=True)


def run(cell: dict[str, Any], strategy: Strategy, mine: list[dict[str, Any]]) -> list[float]:
    """Returns seconds of some steps of a strategy, the slowest process of each; `mine` are the sleeps of this one's stages."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule
    from torch.nn.parallel import DistributedDataParallel

    from rlplace.model.zoo import load_model
    from rlplace.runtime.base import activity
    from rlplace.runtime.base.steps import train_step
    from rlplace.runtime.job.distribute import distribute

    torch.manual_seed(0)
    size = strategy.pipelines[0].microbatch[0]
    loaded = load_model(cell["model"], batch=size, seq=cell["seq"], device="cpu")
    modules = dict(loaded.module.named_modules())
    plan = PlacementPlan("0" * 64, "emulated", 0, np.zeros(0, dtype=np.int32), strategy=strategy)
    model = distribute(loaded.module, plan, loaded.example_inputs, loss=loaded.loss, device="cpu")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(None, averaged)
    optimizer = torch.optim.SGD(model.parameter_groups(), lr=0.0)
    sleeper = Sleeper()  # hooks of a model that is being distributed are refused in tensor groups
    for sleeps in mine:
        for path, seconds in sleeps["blocks"].items():
            sleeper.stretch(modules[path], *seconds)
    shared = [modules[path] for sleeps in mine for path in sleeps["blocks"] if isinstance(modules[path], FSDPModule)]
    for block, following in pairwise(shared):
        block.set_modules_to_forward_prefetch([m for m in following.modules() if isinstance(m, FSDPModule)])
    for module in (m for block in shared for m in block.modules() if isinstance(m, FSDPModule)):
        module._set_unshard_async_op(True)
    weights = [sum(seconds[2] for seconds in sleeps["blocks"].values()) for sleeps in mine]
    batch = load_model(cell["model"], batch=strategy.batch, seq=cell["seq"], device="cpu").example_inputs
    update = optimizer.step

    def slow_update() -> None:
        for work in PENDING:
            work.result()
        PENDING.clear()
        begin = sleeper.clock()
        update()
        sleeper.pay(sum(sleeps["update_s"] for sleeps in mine), begin)

    optimizer.step = slow_update
    CHUNKS.update(sleeper=sleeper, weights=weights)
    seconds = []
    for step in range(cell["steps"] + 1):
        sleeper.on, sleeper.owed_s, sleeper.late_s = True, 0.0, 0.0
        dist.barrier()
        activity.record(torch.device("cpu"))
        begin = time.perf_counter()
        train_step(model, optimizer, batch)
        CHUNKS.update(spent_s=activity.recorded(), late_s=sleeper.late_s)
        took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        if step:
            seconds.append(took.item())
    return seconds


PENDING: list[Any] = []
GATHERS: list[Any] = []
WAITERS = ThreadPoolExecutor(64)  # gloo's works of reductions say nothing until they are waited for
LIBRARY: list[Any] = []
CHUNKS: dict[str, Any] = {}


def averaged(state: None, bucket: Any) -> Any:
    """Averages a bucket of DistributedDataParallel, as it does itself."""
    import torch.distributed as dist

    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    GATHERS.append(work)
    return work.get_future().then(lambda future: future.value()[0])


def as_a_gpu() -> None:
    """Reductions of `fully_shard` run beside what is computed; halves of a backward sleep for their own part."""
    import torch
    import torch.distributed as dist
    from torch._C import DispatchKey, DispatchKeySet
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.pipelining import PipelineStage

    def scatter(output: Any, input: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:
        PENDING.append(WAITERS.submit(dist.reduce_scatter_tensor(output, input, group=group, async_op=True).wait))

    def reduce(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:
        PENDING.append(WAITERS.submit(dist.all_reduce(tensor, group=group, async_op=True).wait))

    gather_name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"

    def gather(*args: Any, **kwargs: Any) -> Any:
        work = getattr(dist, gather_name)(*args, **kwargs)
        GATHERS.extend([work] if work is not None else [])
        return work

    names = {"reduce_scatter_single": scatter, "reduce_scatter_tensor": scatter, "all_reduce": reduce, gather_name: gather}
    collectives.dist = SimpleNamespace(**{**vars(dist), **names})
    wait, kernel = torch.ops._c10d_functional.wait_tensor.default, DispatchKeySet(DispatchKey.PrivateUse1)

    def waited(waits: Any, *args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return waits(*args)
        finally:
            CHUNKS["sleeper"].waited_s += time.perf_counter() - begin

    LIBRARY.append(torch.library.Library("_c10d_functional", "IMPL"))  # waits of Python and of backwards in C++ are here
    LIBRARY[0].impl("wait_tensor", partial(waited, partial(wait.redispatch, kernel)), "CPU")  # torch has one for all devices

    def begun(op: Any, *args: Any) -> Any:
        CHUNKS["sleeper"].collective()
        return op.redispatch(kernel, *args)

    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        LIBRARY[0].impl(name, partial(begun, getattr(torch.ops._c10d_functional, name).default), "CPU")
    gathered = FSDPParamGroup.wait_for_unshard
    FSDPParamGroup.wait_for_unshard = lambda self: waited(gathered, self)  # of experts inside of blocks
    first, second = PipelineStage.backward_one_chunk, PipelineStage.backward_weight_one_chunk

    def backward(self: Any, number: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> Any:
        CHUNKS["sleeper"].halves = not full_backward
        return first(self, number, loss, full_backward, last_backward)

    def weights(self: Any, number: int, last_backward: bool = False) -> Any:
        sleeper, begin = CHUNKS["sleeper"], CHUNKS["sleeper"].clock()
        sleeper.halves = True
        result = second(self, number, last_backward)
        sleeper.pay(CHUNKS["weights"][sorted(CHUNKS["stages"]).index(self.stage_index)], begin)
        return result

    PipelineStage.backward_one_chunk, PipelineStage.backward_weight_one_chunk = backward, weights


def worker(folder: str) -> None:
    """Runs, in one process, strategies as their files appear."""
    import torch

    from rlplace.runtime.base.ranks import start_group

    torch.set_num_threads(1)
    as_a_gpu()
    with first_in_line():  # threads that start now, too
        start_group("gloo", LIMIT_S)
        serve(folder)


def serve(folder: str) -> NoReturn:
    """Runs cells for ever."""
    import torch.distributed as dist

    from rlplace.runtime.base.ranks import gather_objects

    rank, served = dist.get_rank(), 0
    while True:
        path = Path(folder, f"{served}.json")
        if not path.exists():
            time.sleep(0.02)
            continue
        cell = json.loads(path.read_text())
        strategy, factor = Strategy.from_dict(cell["strategy"]), cell.get("factors", [1.0] * dist.get_world_size())[rank]
        for sleeps in cell["sleeps"]:
            sleeps["blocks"] = {name: [factor * s for s in seconds] for name, seconds in sleeps["blocks"].items()}
            sleeps["update_s"] *= factor
        stages = [(number, stage) for one in strategy.pipelines for number, stage in enumerate(one.stages)]
        mine = {n: sleeps for (n, stage), sleeps in zip(stages, cell["sleeps"], strict=True) if rank in stage.devices}
        CHUNKS["stages"] = [*mine]
        seconds = run(cell, strategy, [*mine.values()])
        said, late_s = gather_objects(CHUNKS["spent_s"]), max(gather_objects(CHUNKS["late_s"]))
        busy_s = [max(one.get(f"stage {n}", 0.0) for one in said) for n in range(len(stages))] if len(stages) > 1 else []
        if rank == 0:
            print(json.dumps({"step_s": seconds, "late_s": late_s, "stage_busy_s": busy_s}), flush=True)
        served += 1


if __name__ == "__main__":
    worker(sys.argv[1])
