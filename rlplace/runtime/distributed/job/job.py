"""One training job under torchrun: a plan, its model, synthetic batches, a number of steps."""

from __future__ import annotations

import contextlib
import platform
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from rlplace.errors import InputError, MissingError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.job.placed import MakeOptimizer, Part
from rlplace.runtime.distributed.job.recipe import recipe_of, synthetic_batch
from rlplace.runtime.distributed.job.verify import TOLERANCE, Reference, RunComparison
from rlplace.runtime.distributed.ranks import broadcast_object, devices_of, gather_objects, start_group
from rlplace.runtime.distributed.state.training_state import latest_checkpoint, load_checkpoint
from rlplace.runtime.distributed.state.whole_state import gather_tensors
from rlplace.runtime.environment import own_device, read_clock
from rlplace.runtime.host_memory import StepMemory, keep_freed_memory
from rlplace.runtime.measure import OPTIMIZERS
from rlplace.runtime.native.why_not import why_not

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class JobOptions:
    """What a job does beside what its plan says.

    Attributes:
        steps: Training steps in all, those before a checkpoint included.
        optimizer: Name; None takes that of the plan.
        lr: Learning rate.
        device: "cpu", "cuda", or None: a GPU where there is one.
        backend: Backend of torch.distributed; None: nccl for GPUs, else gloo.
        verify: Compare with the unplaced model.
        seed: Seed of weights, batches and dropout.
        autocast: "bf16" or "fp16"; None takes what the plan was captured with.
        clip: Norm that gradients are clipped to.
        cluster: CLUSTER text, checked against the plan's.
        checkpoint: Folder of checkpoints; None writes none.
        checkpoint_every: Steps from one to the next; one is written at the end in any case.
        resume: Continue from the latest checkpoint, if there is one.
    """

    steps: int = 10
    optimizer: str | None = None
    lr: float = 1e-3
    device: str | None = None
    backend: str | None = None
    verify: bool = False
    seed: int = 0
    autocast: str | None = None
    clip: float | None = None
    cluster: str | None = None
    checkpoint: str | None = None
    checkpoint_every: int | None = None
    resume: bool = False


@dataclass
class JobResult:
    """What rank 0 knows when a job has ended.

    Attributes:
        losses: Per step that was run.
        first_step: Number of the first of them.
        step_s: Seconds per step, the longest of all ranks' medians at the end.
        predicted_step_s: As the plan says; None when it does not.
        ranks: Per rank ``rank, host, device, stage, median_step_s, peak_memory_bytes, predicted_memory_bytes``.
        comparison: With the unplaced model; None without `JobOptions.verify`.
        engine: What ran the plan.
    """

    losses: list[float] = field(default_factory=list)
    first_step: int = 0
    step_s: float | None = None
    predicted_step_s: float | None = None
    ranks: list[dict[str, Any]] = field(default_factory=list)
    comparison: RunComparison | None = None
    engine: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON data."""
        comparison = self.comparison
        verified = None if comparison is None else {
            "equal": comparison.equal,
            "tolerance": comparison.tolerance,
            "losses": comparison.losses,
            "worst_gradient": list(comparison.worst_gradient),
            "worst_parameter": list(comparison.worst_parameter),
            "reference": "graph" if comparison.streams else "module",
        }  # fmt: skip
        return {
            "engine": self.engine,
            "first_step": self.first_step,
            "losses": self.losses,
            "step_time_s": self.step_s,
            "predicted_step_time_s": self.predicted_step_s,
            "ranks": self.ranks,
            "verified": verified,
        }


def start_job(options: JobOptions, timeout_s: float = _TIMEOUT_S) -> torch.device:
    """Makes the process group of the job; one process alone is a group, too.

    Args:
        options: Device and backend.
        timeout_s: How long a process may stand still while others wait for it.

    Returns:
        Where this process computes.

    Raises:
        MissingError: No such device or backend here.
    """
    device = own_device(options.device, "run")
    if device.type == "cpu":
        keep_freed_memory()  # as ops were timed; handing pages back and forth takes a third of a step
    backend = options.backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise MissingError("run: the nccl backend needs --device cuda and a CUDA build of torch; take --backend gloo")
    start_group(backend, timeout_s)
    return device


def processes_needed(plan: PlacementPlan) -> int:
    """One for every device up to the last that a placement uses; one for every device of a strategy."""
    if plan.strategy is not None:
        return len(plan.strategy.devices)
    if plan.older is not None and plan.older.replicas:
        return 1 + max(device for row in plan.older.replicas for device in row)
    return devices_of(plan)


def check_strategy(plan: PlacementPlan) -> None:
    """Refuses what `rlplace run` cannot do with a strategy, before any process waits for another.

    Args:
        plan: With a strategy.

    Raises:
        InputError: With the reason.
    """
    assert plan.strategy is not None
    reason = why_not(plan.strategy)
    if reason is not None:
        raise InputError(f"run: {reason}")
    devices = sorted(plan.strategy.devices)
    if devices != list(range(devices[0], devices[0] + len(devices))):
        raise InputError(
            f"run: the plan uses the devices {', '.join(map(str, devices))}, and processes are numbered without gaps; plan for "
            "a cluster of these devices alone"
        )
    if recipe_of(plan).master_weights:
        raise InputError(
            "run: the plan keeps optimizer state and a copy of the weights in fp32, which is not run yet for strategies; plan "
            "without --master-weights, in fp32 with --autocast"
        )


def train(
    plan: PlacementPlan, device: torch.device, options: JobOptions, on_step: Callable[[int, float, float], None] | None = None
) -> JobResult:
    """Runs the job on this rank; every rank of the process group calls it.

    Args:
        plan: With a `source` that names its model.
        device: See `start_job`.
        options: The same on every rank.
        on_step: Called on rank 0 after each step with its number, loss and seconds.

    Returns:
        Complete on rank 0 only.
    """
    recipe = recipe_of(plan)
    memory = StepMemory(device)
    name = options.autocast or recipe.autocast
    autocast = partial(_autocast, device, name)
    make = _optimizer(options.optimizer or recipe.optimizer, options.lr)
    part = Part(plan, device, options, make, autocast)
    reference = None
    if options.verify and dist.get_rank() == 0:
        whole = recipe.build("cpu", options.seed).module
        reference = Reference(
            whole,
            device,
            loss=part.loss,
            optimizer=make,
            microbatches=part.microbatches,
            seed=options.seed,
            clip=options.clip,
            autocast=autocast(),
            same_streams=part.same_streams,
        )
    tolerance = _tolerance(recipe.dtype, name)
    result = JobResult(predicted_step_s=plan.predicted.step_time_s, engine=part.engine)
    comparison = RunComparison(tolerance) if options.verify else None
    seconds: list[float] = []
    if options.resume and _has_checkpoint(options):
        result.first_step = part.load(str(options.checkpoint))
        if reference is not None:
            reference.resume(load_checkpoint(str(options.checkpoint), reference.model, reference.optimizer).step)
    for step in range(result.first_step, options.steps):
        batch = synthetic_batch(part.inputs, part.samples, options.seed, step)
        if step == result.first_step + 1:
            memory.begin(part.held())
        if options.verify:
            dist.barrier()  # rank 0 comes from the unplaced model
        begin = read_clock(device)
        loss_value = part.step(batch)
        seconds.append(read_clock(device) - begin)
        if step == result.first_step + 1:
            memory.end()
        result.losses.append(loss_value)
        if reference is not None and comparison is not None:
            comparison.compare_loss(loss_value, reference.step(batch, tolerance))
        if on_step is not None and dist.get_rank() == 0:
            on_step(step, loss_value, seconds[-1])
        if options.checkpoint is not None and _is_due(step + 1, options):
            part.save(options.checkpoint, step + 1)
    result.ranks = _ranks(plan, part, device, seconds, memory.peak_bytes)
    result.step_s = max((r["median_step_s"] for r in result.ranks if r["median_step_s"] is not None), default=None)
    if comparison is not None:
        result.comparison = _compare(comparison, part, reference, device)
    return result


def _has_checkpoint(options: JobOptions) -> bool:
    """Whether rank 0 sees one."""
    return bool(broadcast_object(options.checkpoint is not None and latest_checkpoint(options.checkpoint) is not None))


def _is_due(done: int, options: JobOptions) -> bool:
    return done == options.steps or (options.checkpoint_every is not None and done % options.checkpoint_every == 0)


def _ranks(
    plan: PlacementPlan, part: Part, device: torch.device, seconds: list[float], peak_bytes: int | None
) -> list[dict[str, Any]]:
    warm = seconds[min(2, max(len(seconds) - 1, 0)) :]
    facts = {
        "host": platform.node(),
        "device": str(device),
        "stage": part.device_number,
        "median_step_s": statistics.median(warm) if warm else None,
        "peak_memory_bytes": peak_bytes,
    }
    predicted = plan.predicted.peak_memory_bytes
    return [
        {"rank": rank, **measured, "predicted_memory_bytes": predicted[rank] if rank < len(predicted) else None}
        for rank, measured in enumerate(gather_objects(facts))
    ]


def _compare(comparison: RunComparison, part: Part, reference: Reference | None, device: torch.device) -> RunComparison:
    parameters = gather_tensors(part.parameters(), device)
    gradients = gather_tensors(part.gradients(), device)
    if reference is not None:
        comparison.streams = reference.streams
        comparison.compare_tensors(gradients, parameters, reference)
    return comparison


def _optimizer(name: str, lr: float) -> MakeOptimizer:
    def make(parameters: list[Any]) -> torch.optim.Optimizer:
        return OPTIMIZERS[name](parameters, lr=lr)

    return make


def _autocast(device: torch.device, name: str | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if name is None else torch.autocast(device.type, _AUTOCAST[name])


def _tolerance(dtype: str, autocast: str | None) -> float:
    name = autocast or dtype
    known = {"fp64": torch.float64, "fp32": torch.float32, **_AUTOCAST}
    if name not in known:
        raise InputError(f"run: there is no tolerance for dtype {name!r}; leave --verify out")
    return TOLERANCE[known[name]]
