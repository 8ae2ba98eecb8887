"""One training job under torchrun: a plan, its model, synthetic batches, a number of steps."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rlplace.errors import InputError, MissingError
from rlplace.plan.plan import PlacementPlan
from rlplace.problem import Problem
from rlplace.problem.io import problem_from_dict, problem_to_dict
from rlplace.runtime.distributed.distribute import distribute
from rlplace.runtime.distributed.job.recipe import problem_of_plan, recipe_of, synthetic_batch
from rlplace.runtime.distributed.job.verify import TOLERANCE, Reference, RunComparison, gather_tensors, whole_gradients
from rlplace.runtime.distributed.model import DistributedModel
from rlplace.runtime.distributed.ranks import broadcast_text, devices_of, gather_texts, start_group
from rlplace.runtime.distributed.state.training_state import latest_checkpoint, load_checkpoint, save_checkpoint
from rlplace.runtime.host_memory import StepMemory, held_tensors, keep_freed_memory
from rlplace.runtime.measure import OPTIMIZERS, loss_of

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_START_TIMEOUT_S = 1800.0


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


def start_job(options: JobOptions) -> torch.device:
    """Makes the process group of the job; one process alone is a group, too.

    Returns:
        Where this process computes.

    Raises:
        MissingError: No such device or backend here.
    """
    device = _device(options.device)
    if device.type == "cpu":
        keep_freed_memory()  # as ops were timed; handing pages back and forth takes a third of a step
    backend = options.backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise MissingError("run: the nccl backend needs --device cuda and a CUDA build of torch; take --backend gloo")
    start_group(backend, _START_TIMEOUT_S)
    return device


def processes_needed(plan: PlacementPlan) -> int:
    """One for every device up to the last that the plan uses."""
    if plan.replicas is not None:
        return 1 + max(int(device) for row in plan.replicas for device in row)
    return devices_of(plan)


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
    problem = _problem(plan, options, device)
    memory = StepMemory(device)
    loaded = recipe.build("cpu", options.seed)
    inputs, loss = loaded.example_inputs, loaded.loss
    model = distribute(loaded.module, plan, inputs, loss=loss, device=device, seed=options.seed, problem=problem)
    del loaded  # what this rank does not own
    autocast = options.autocast or recipe.autocast
    make = _optimizer(options.optimizer or recipe.optimizer, options.lr)
    reference = None
    replicas = len(plan.replicas or [0])
    if options.verify and dist.get_rank() == 0:
        whole = recipe.build("cpu", options.seed).module
        reference = Reference(
            whole,
            device,
            loss=loss,
            optimizer=make,
            replicas=replicas,
            microbatches=plan.microbatches,
            seed=options.seed,
            clip=options.clip,
            autocast=_autocast(device, autocast),
        )
    optimizer = make(list(model.parameters()))  # on every rank; those that are frozen get no gradient and no update
    samples = problem.samples_per_microbatch * plan.microbatches * replicas
    tolerance = _tolerance(recipe.dtype, autocast)
    result = JobResult(predicted_step_s=plan.predicted.step_time_s, engine=model.report)
    comparison = RunComparison(tolerance) if options.verify else None
    seconds: list[float] = []
    if options.resume and _has_checkpoint(options, device):
        result.first_step = load_checkpoint(str(options.checkpoint), model, optimizer).step
        if reference is not None:
            reference.resume(load_checkpoint(str(options.checkpoint), reference.model, reference.optimizer).step)
    for step in range(result.first_step, options.steps):
        batch = synthetic_batch(inputs, samples, options.seed, step)
        if step == result.first_step + 1:
            memory.begin(held_tensors(model, optimizer))
        if options.verify:
            dist.barrier()  # rank 0 comes from the unplaced model
        begin = time.perf_counter()
        loss_value = _step(model, optimizer, batch, options.clip, _autocast(device, autocast))
        seconds.append(time.perf_counter() - begin)
        if step == result.first_step + 1:
            memory.end()
        result.losses.append(loss_value)
        if reference is not None and comparison is not None:
            comparison.compare_loss(loss_value, reference.step(batch, tolerance))
        if on_step is not None and dist.get_rank() == 0:
            on_step(step, loss_value, seconds[-1])
        if options.checkpoint is not None and _is_due(step + 1, options):
            save_checkpoint(options.checkpoint, model, optimizer, step=step + 1, extra={"problem": plan.problem})
    result.ranks = _ranks(plan, problem, model, device, seconds, memory.peak_bytes)
    result.step_s = max((r["median_step_s"] for r in result.ranks if r["median_step_s"] is not None), default=None)
    if comparison is not None:
        result.comparison = _compare(comparison, model, reference, device)
    return result


def _problem(plan: PlacementPlan, options: JobOptions, device: torch.device) -> Problem:
    """The plan's problem, built again by rank 0 and checked."""
    text = None
    if dist.get_rank() == 0:
        text = json.dumps(problem_to_dict(problem_of_plan(plan, options.cluster)))
    return problem_from_dict(json.loads(broadcast_text(text, device)))


def _has_checkpoint(options: JobOptions, device: torch.device) -> bool:
    """Whether rank 0 sees one."""
    exists = options.checkpoint is not None and latest_checkpoint(options.checkpoint) is not None
    return bool(broadcast_text("yes" if exists else "", device))


def _is_due(done: int, options: JobOptions) -> bool:
    return done == options.steps or (options.checkpoint_every is not None and done % options.checkpoint_every == 0)


def _step(
    model: DistributedModel,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    clip: float | None,
    autocast: contextlib.AbstractContextManager[Any],
) -> float:
    optimizer.zero_grad(set_to_none=True)
    with autocast:
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
    value = loss_of(output, None)
    value.backward()  # type: ignore[no-untyped-call]
    if clip is not None:
        model.clip_grad_norm_(clip)
    optimizer.step()
    return float(value.detach())


def _ranks(
    plan: PlacementPlan,
    problem: Problem,
    model: DistributedModel,
    device: torch.device,
    seconds: list[float],
    peak_bytes: int | None,
) -> list[dict[str, Any]]:
    warm = seconds[min(2, max(len(seconds) - 1, 0)) :]
    plan_device = model.ranks.plan_device
    facts = {
        "host": platform.node(),
        "device": str(device),
        "stage": plan_device,
        "median_step_s": statistics.median(warm) if warm else None,
        "peak_memory_bytes": peak_bytes,
    }
    predicted = plan.predicted.peak_memory_bytes
    return [
        {"rank": rank, **measured, "predicted_memory_bytes": predicted[rank] if rank < len(predicted) else None}
        for rank, measured in enumerate(gather_texts(facts, device))
    ]


def _compare(
    comparison: RunComparison, model: DistributedModel, reference: Reference | None, device: torch.device
) -> RunComparison:
    parameters = gather_tensors(model.own_tensors.parameters, device)
    gradients = gather_tensors(whole_gradients(model), device)
    if reference is not None:
        comparison.streams = reference.streams
        comparison.compare_tensors(gradients, parameters, reference)
    return comparison


def _optimizer(name: str, lr: float) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
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


def _device(name: str | None) -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = name or ("cuda" if usable else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if local >= usable:
        raise MissingError(
            f"run: process {local} of {platform.node()} has no GPU of its own ({usable} found); start as many processes "
            "as there are GPUs, or take --device cpu"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device
