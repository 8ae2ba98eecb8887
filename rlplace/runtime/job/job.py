"""One training job under torchrun: a plan, its model, synthetic batches, a number of steps."""

from __future__ import annotations

import contextlib
import copy
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from rlplace.errors import InputError, MissingError
from rlplace.model.capture.fake import computed_values
from rlplace.model.zoo.load import LoadedModel
from rlplace.plan.plan import PlacementPlan
from rlplace.planned import Planned
from rlplace.runtime.base.environment import PeakMemory, held_tensors, keep_freed_memory, own_device, read_clock
from rlplace.runtime.base.optimizers import make_optimizer
from rlplace.runtime.base.ranks import broadcast_object, devices_of, gather_objects, start_group, wait_for_all
from rlplace.runtime.base.steps import synthetic_batch, train_step
from rlplace.runtime.job.distribute import distribute, microbatch_of, samples_of_step
from rlplace.runtime.job.verify import TOLERANCE, Reference, RunComparison, alike_draws
from rlplace.runtime.state.deferred import deferred_weights
from rlplace.runtime.state.training_state import latest_checkpoint, load_checkpoint, save_checkpoint
from rlplace.runtime.strategy.why_not import why_not
from rlplace.strategy.search.remarks import short_host

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class JobOptions:
    """Options of a job besides its plan."""

    steps: int = 10  # training steps in all, those before a checkpoint included
    optimizer: str | None = None  # name; None takes that of the plan
    lr: float = 1e-3
    device: str | None = None  # "cpu", "cuda", or None: a GPU where there is one
    backend: str | None = None  # backend of torch.distributed; None: nccl for GPUs, else gloo
    verify: bool = False  # compare with the unplaced model
    seed: int = 0  # seed of weights, batches and dropout
    autocast: str | None = None  # "bf16" or "fp16"; None takes that of the plan
    clip: float | None = None  # norm that gradients are clipped to
    cluster: str | None = None  # CLUSTER text, checked against the plan's
    checkpoint: str | None = None  # folder of checkpoints; None writes none
    checkpoint_every: int | None = None  # steps from one to the next; one is written at the end in any case
    resume: bool = False  # continue from the latest checkpoint, if there is one


@dataclass(frozen=True)
class JobResult:
    """The result of a job on rank 0."""

    losses: list[float]  # per step that was run
    first_step: int  # number of the first of them
    step_s: float | None  # seconds per step, the longest of all ranks' medians at the end
    predicted_step_s: float | None  # the plan's prediction; None without one
    # per rank ``rank, host, device, stage, median_step_s, peak_memory_bytes, predicted_memory_bytes``
    ranks: list[dict[str, Any]]
    comparison: RunComparison | None  # with the unplaced model; None without `JobOptions.verify`
    engine: str  # name of the engine that ran the plan

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON data."""
        return {
            "engine": self.engine,
            "first_step": self.first_step,
            "losses": self.losses,
            "step_time_s": self.step_s,
            "predicted_step_time_s": self.predicted_step_s,
            "ranks": self.ranks,
            "verified": None if self.comparison is None else self.comparison.to_dict(),
        }


def start_job(options: JobOptions, timeout_s: float = _TIMEOUT_S) -> torch.device:
    """Makes the process group of the job, also for one process alone; returns the device of this process.

    Args:
        options: Device and backend.
        timeout_s: Seconds after which a wait for another process fails.
    """
    device = own_device(options.device, "run")
    if device.type == "cpu":
        keep_freed_memory()  # as when ops were timed; returning pages to the system takes a third of a step
    backend = options.backend or ("nccl" if device.type == "cuda" else "gloo")
    if backend == "nccl" and (device.type != "cuda" or not dist.is_nccl_available()):
        raise MissingError("run: the nccl backend needs --device cuda and a CUDA build of torch; take --backend gloo")
    start_group(backend, timeout_s)
    return device


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
    planned = Planned(plan, options.cluster)
    recipe = planned.recipe
    updates = options.optimizer or recipe.optimizer
    if plan.strategy is not None and (reason := why_not(plan.strategy, optimizer=updates)) is not None:
        raise InputError(f"run: {reason}")
    if plan.strategy is not None and plan.strategy.release_gradients and options.clip is not None:
        raise InputError("run: --clip needs all gradients at once, and the plan releases each in the backward; leave it out")
    name = options.autocast or recipe.autocast
    autocast = contextlib.nullcontext if name is None else partial(torch.autocast, device.type, _AUTOCAST[name])
    loop: dict[str, Any] = {"clip": options.clip, "autocast": autocast}
    short = broadcast_object(_checked(planned) if dist.get_rank() == 0 else None)  # the others wait for the check
    if short is not None and (options.verify or plan.strategy is None):
        remedy = "leave --verify out, so that weights are made where they are kept" if options.verify else "plan a strategy"
        raise InputError(f"run: {short}, and {'--verify does' if options.verify else 'placements do'}; {remedy}")
    policy, known = None, recipe
    # Weights of master copies are priced as gathered, and their gradients as reduced, in the dtype of the plan.
    if plan.strategy is not None and recipe.master_weights and recipe.dtype in _AUTOCAST:
        policy = MixedPrecisionPolicy(param_dtype=_AUTOCAST[recipe.dtype])
        known = msgspec.structs.replace(recipe, dtype="fp32")
    build = partial(known.build, "cpu", options.seed, batch=microbatch_of(plan, recipe.batch))
    loaded = build() if options.verify or plan.strategy is None else _build_later(build, short)
    whole = copy.deepcopy(loaded.module, computed_values(loaded.module)) if options.verify and dist.get_rank() == 0 else None
    held = {parameter.dtype for parameter in loaded.module.parameters()}
    model = distribute(
        loaded.module, plan, loaded.example_inputs, loss=loaded.loss, device=device, seed=options.seed, mixed_precision=policy
    )
    # Frozen parameters, too: they get no gradient and no update.
    make = partial(make_optimizer, updates, lr=options.lr, exact=options.verify)
    optimizer = make(model)
    samples, example = samples_of_step(plan, loaded.example_inputs), loaded.example_inputs
    if plan.strategy is not None and samples != microbatch_of(plan, recipe.batch):
        example = known.build("meta", options.seed, batch=samples).example_inputs  # as many samples, each of its own
    comparison = reference = None
    if whole is not None:
        whole = whole.to(device)
        dtype = None if policy is None else policy.param_dtype
        reference = Reference(
            whole, make(whole), device, loaded.loss, _parts(plan), **loop, dtype=dtype, strategy=plan.strategy
        )
    if options.verify:
        coarse = (TOLERANCE[other] for other, dtype in _AUTOCAST.items() if dtype in held)  # of a file, whatever it was asked
        comparison = RunComparison(max(TOLERANCE[name or recipe.dtype], *coarse, 0.0), device, reference)
    first_step, folder = 0, options.checkpoint
    losses: list[float] = []
    seconds: list[float] = []
    peak_bytes: int | None = None
    if options.resume and folder is not None and broadcast_object(latest_checkpoint(folder) is not None):
        first_step = load_checkpoint(folder, model, optimizer).step
        if reference is not None:
            reference.steps = load_checkpoint(folder, reference.model, reference.optimizer).step
    for step in range(first_step, options.steps):
        batch = synthetic_batch(example, samples, options.seed, step)
        memory = PeakMemory(device, held_tensors(model, optimizer)) if step == first_step + 1 else None
        if options.verify:
            wait_for_all()  # rank 0 has run the unplaced model
        begin = read_clock(device)
        with alike_draws(device) if options.verify else contextlib.nullcontext() as draws:
            losses.append(float(train_step(model, optimizer, batch, **loop)))
        seconds.append(read_clock(device) - begin)
        if memory is not None:
            peak_bytes = memory.read_bytes()
        if draws is not None:
            _check_draws(plan, draws.count)
        if comparison is not None:
            comparison.compare_step(losses[-1], batch)
            if step == first_step:
                comparison.compare_gradients(model)
        if on_step is not None and dist.get_rank() == 0:
            on_step(step, losses[-1], seconds[-1])
        due = step + 1 == options.steps or (options.checkpoint_every and (step + 1) % options.checkpoint_every == 0)
        if folder is not None and due:
            save_checkpoint(folder, model, optimizer, step=step + 1, extra={"problem": plan.problem})
    ranks = _ranks(plan, device, seconds, peak_bytes)
    step_s = max((r["median_step_s"] for r in ranks if r["median_step_s"] is not None), default=None)
    if comparison is not None:
        comparison.compare_state(model)
    return JobResult(losses, first_step, step_s, plan.predicted.step_time_s, ranks, comparison, model.report)


def _checked(planned: Planned) -> str | None:
    """Checks that a plan is for its model and cluster as they are; returns which host has no room for whole models."""
    planned.check()
    return short_host(planned.graph, planned.cluster, devices_of(planned.plan))


def _build_later(build: Callable[[], LoadedModel], short: str | None) -> LoadedModel:
    """Builds a model whose weights are made where they are kept; whole where that cannot be recorded, and says so.

    Args:
        build: Builds it.
        short: Why a host has no room for whole models, if it has none.
    """
    try:
        with deferred_weights():
            return build()
    except InputError as refusal:
        if short is not None:
            raise InputError(f"run: {refusal}; and {short}: take hosts with more memory, or fewer devices of each") from None
        if dist.get_rank() == 0:
            print(f"run: every process builds the whole model first: {refusal}", file=sys.stderr, flush=True)
        return build()


def _ranks(plan: PlacementPlan, device: torch.device, seconds: list[float], peak_bytes: int | None) -> list[dict[str, Any]]:
    used, rank = devices_of(plan), dist.get_rank()
    warm = seconds[min(2, max(len(seconds) - 1, 0)) :]
    measured = {
        "host": platform.node(),
        "device": str(device),
        "stage": used[rank] if rank < len(used) else None,  # None: it has nothing to do
        "median_step_s": statistics.median(warm) if warm else None,
        "peak_memory_bytes": peak_bytes,
    }
    predicted, rows = plan.predicted.peak_memory_bytes, []
    for number, row in enumerate(gather_objects(measured)):
        memory = predicted[row["stage"]] if predicted and row["stage"] is not None else None
        rows.append({"rank": number, **row, "predicted_memory_bytes": memory})
    return rows


def _check_draws(plan: PlacementPlan, count: int) -> None:
    """Refuses to compare where a tensor group draws random numbers for parts of activations."""
    if count and plan.strategy is not None and any(stage.axis("tensor") > 1 for stage in plan.strategy.stages):
        raise InputError(
            "run: --verify: the model draws random numbers (dropout), and a tensor group draws them for parts of activations; "
            "switch them off in the MODEL, for example hf:gpt2,attn_pdrop=0,embd_pdrop=0,resid_pdrop=0, and plan that, or "
            "leave --verify out"
        )


def _parts(plan: PlacementPlan) -> int:
    """Counts the micro-batches of all replicas in a step."""
    if plan.strategy is None:
        return 1
    counts = ((one.microbatches, one.data_degree) for one in plan.strategy.pipelines)
    return sum(sum(passes) * (1 if len(passes) > 1 else degree) for passes, degree in counts)
