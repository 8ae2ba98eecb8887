"""Times the steps of a whole strategy on the processes of a job."""

from __future__ import annotations

import contextlib
import gc
import time

import torch
import torch.distributed as dist

from rlplace.cost.timings import PlanTiming
from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.job.job import JobOptions, check_strategy, processes_needed
from rlplace.runtime.distributed.job.placed import Part
from rlplace.runtime.distributed.job.recipe import recipe_of, synthetic_batch
from rlplace.runtime.environment import read_clock
from rlplace.runtime.measure import OPTIMIZERS


def time_strategy(
    plan: PlacementPlan, device: torch.device, name: str, *, warmup: int, repeats: int, cluster: str | None = None
) -> PlanTiming:
    """Builds a plan's model and times training steps of its strategy; every process of the job calls it.

    Args:
        plan: With a strategy.
        device: Where this process computes.
        name: For people.
        warmup: Steps before timing.
        repeats: Timed steps.
        cluster: See `JobOptions`.

    Returns:
        The same on every process; what single processes did in a step is not known.

    Raises:
        InputError: The plan cannot run here.
    """
    check_strategy(plan)
    processes = dist.get_world_size()
    if processes_needed(plan) != processes:
        raise InputError(f"measure: the plan needs {processes_needed(plan)} processes, the job has {processes}")
    begin, recipe = time.perf_counter(), recipe_of(plan)
    optimizer = OPTIMIZERS[recipe.optimizer]
    options = JobOptions(device=device.type, cluster=cluster)
    part = Part(plan, device, options, lambda parameters: optimizer(parameters, lr=1e-3), contextlib.nullcontext)
    batch = synthetic_batch(part.inputs, part.samples, 0, 0)
    part.step(batch)
    setup_s = time.perf_counter() - begin
    seconds = [_step(part, batch, device) for _ in range(warmup - 1 + repeats)]
    timing = PlanTiming(
        name=name,
        plan=plan.fingerprint,
        problem=plan.problem,
        planner=plan.planner,
        engine=str(part.engine),
        mode="computed",
        step_s=tuple(seconds[warmup - 1 :]),
        predicted_s=plan.predicted.step_time_s,
        places=(),
        setup_s=setup_s,
    )
    del part
    gc.collect()
    return timing


def _step(part: Part, batch: object, device: torch.device) -> float:
    """Seconds of a step on the slowest process."""
    dist.barrier()
    start = read_clock(device)
    part.step(batch)
    took = torch.tensor(read_clock(device) - start, dtype=torch.float64, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)
