"""`rlplace.distribute`: makes a model train over the processes of a torchrun job as a plan says."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from rlplace.errors import InputError
from rlplace.model.capture.inputs import resize_batch
from rlplace.model.torch_adapter import pytree
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import MEAN, SUM, TARGETS
from rlplace.planned import Planned
from rlplace.runtime.base import faults
from rlplace.runtime.base.environment import own_device
from rlplace.runtime.base.model import Batching, DistributedModel
from rlplace.runtime.base.ranks import check_first_batches, check_same_plan, devices_of, part_text, ranks_of
from rlplace.runtime.base.steps import Loss, micro_batch, samples_of
from rlplace.runtime.placement.forward_graph import Graphs
from rlplace.runtime.placement.placed_model import PlacedModel
from rlplace.runtime.state.training_state import latest_checkpoint, load_checkpoint
from rlplace.runtime.strategy.fact_records import COUPLES
from rlplace.runtime.strategy.strategy_model import keyword_inputs
from rlplace.runtime.strategy.why_not import why_not
from rlplace.runtime.strategy.wrap import average_left_out, left_out, sum_parts

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


def distribute(
    model: nn.Module,
    plan: PlacementPlan,
    example_inputs: Any = None,
    *,
    loss: Loss | None = None,
    example_target: Any = None,
    device: torch.device | str | None = None,
    share: str = "global",
    reduction: str | None = None,
    whole: Collection[str] = (),
    seed: int = 0,
    graphs: Graphs | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    weights: str | Path | None = None,
) -> DistributedModel:
    """Returns this process's part of a distributed model; every process of the job calls it with the same arguments.

    Args:
        model: The whole model, the same on every process; use only the result afterwards, so that the rest can be freed. A
            strategy changes its modules in place.
        plan: A plan for it. Device d of the plan's cluster is the process of rank d; the devices of a strategy are counted in
            rising order.
        example_inputs: Inputs of one micro-batch, as captured: a tuple of arguments or a dict of keyword arguments. Default:
            inputs like those in the plan's `source`.
        loss: For a model that does not return its loss: called with its output, and the ``target=`` of a call.
        example_target: Target of one micro-batch.
        device: Where this process computes; default the CUDA device of its local rank, or the CPU.
        share: ``"global"``: every rank is called with the batch of all replicas and takes its share; ``"replica"``: with the
            batch of its own replica.
        reduction: How the loss of a batch comes from those of its parts, see `rlplace.plan.strategy.Strategy`; None: as the
            plan says, and ``"mean"`` where it does not.
        whole: Names of keyword inputs that are not cut into micro-batches although they are as long as the batch.
        seed: Seed of dropout and other random ops.
        graphs: Traces of the model, for callers that distribute it by many placements.
        mixed_precision: For strategies, torch's policy of the dtypes in which parameters are gathered and gradients reduced.
            Weights, gradients and optimizer state keep the model's dtype.
        weights: Values for all parameters instead of the model's, of which a process reads what it keeps: a safetensors file,
            a folder of such files with the model's names, a checkpoint of `rlplace.save_checkpoint`, or a folder that
            `torch.distributed.checkpoint.save` wrote, its names those of the model, with or without ``model.`` before them. For
            strategies.

    Raises:
        InputError: The plan cannot run like this, with the reason.
        MissingError: This process has no GPU of its own.
    """
    if share not in ("global", "replica"):
        raise InputError(f"distribute: share is {share!r}; it must be 'global' or 'replica'")
    if reduction is None:
        reduction = MEAN if plan.strategy is None else plan.strategy.reduction
    if reduction not in (MEAN, SUM, TARGETS) and ":" not in reduction:
        raise InputError(
            f"distribute: reduction is {reduction!r}; it must be 'mean', 'sum', 'targets', or count an input as 'sum:mask' does"
        )
    if not dist.is_initialized():
        raise InputError("distribute: there is no process group; start the script with torchrun, or call init_process_group")
    where = own_device(device, "distribute")
    if where.type == "cuda" and dist.get_world_size() > 1 and dist.get_backend() == "gloo":
        raise InputError("distribute: gloo sends nothing from a GPU; call init_process_group('nccl'), or give device='cpu'")
    if mixed_precision is not None and plan.strategy is None:
        raise InputError("distribute: mixed_precision is for strategies; call a placed model under torch.autocast")
    if plan.strategy is None and (weights is not None or any(parameter.is_meta for parameter in model.parameters())):
        raise InputError("distribute: a placement needs the whole model with its values: build it without deferred_weights()")
    if share != "global" and plan.strategy is None:
        raise InputError("distribute: share='replica' is for plans with replicas, and this one has none; leave it out")
    if dist.get_rank() == 0:
        for note in plan.predicted.extra.get("notes", ()):
            if str(note).startswith(COUPLES):
                warnings.warn(f"distribute: {note}", stacklevel=2)
    faults.watch_over(part_text(plan, dist.get_rank()))
    check_same_plan(plan)
    args, kwargs = micro_batch(plan, example_inputs)
    options: dict[str, Any] = {"batching": Batching(share, frozenset(whole), reduction), "loss": loss, "seed": seed}
    placed: DistributedModel
    if plan.strategy is None:
        example = args, kwargs, example_target
        placed = PlacedModel(model, plan, ranks_of(plan, where), example, graphs=graphs or Graphs(), **options)
    else:
        from rlplace.runtime.strategy.run import prepare

        inputs = pytree.tree_map_only(
            torch.Tensor,
            lambda leaf: torch.zeros_like(leaf, device="cpu") if leaf.is_meta else leaf,
            {**keyword_inputs(model, args), **kwargs},
        )
        samples, wanted = samples_of(inputs), plan.strategy.pipelines[0].microbatch[0]
        if example_inputs is None and samples != wanted:  # the captured batch has another size
            inputs = resize_batch(inputs, samples, wanted)
        saved = None if weights is None or latest_checkpoint(weights, itself=True) is None else weights
        read = weights if saved is None else None
        placed = prepare(model, plan.strategy, inputs, where.type, mixed_precision=mixed_precision, weights=read, **options)
        if saved is not None:
            load_checkpoint(saved, placed)
    check_first_batches(placed, placed.ranks, placed.batching.share)
    return placed


def parallelize(
    model: nn.Module,
    plan: PlacementPlan,
    example_inputs: Any = None,
    *,
    device: torch.device | str | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
) -> tuple[nn.Module, DeviceMesh]:
    """Puts torch's own parts on a model as a plan's strategy says, and leaves the training loop to the caller.

    Args:
        model: See `distribute`.
        plan: A plan with a strategy.
        example_inputs: See `distribute`.
        device: See `distribute`.
        mixed_precision: See `distribute`.

    Returns:
        The module to call, and the mesh of processes (pipeline, replicate, shard, tensor). Without a pipeline the module is the
        model itself with its blocks checkpointed, laid out and sharded, or torch's `DistributedDataParallel` around it; every
        call is one micro-batch of one replica. With a pipeline it is the result of `distribute`, and its ``step(batch, loss)``
        runs torch's schedule on the batch of a replica.

    Raises:
        InputError: The plan has no strategy, or cannot run, with the reason.
    """
    if plan.strategy is None:
        raise InputError("parallelize: the plan places operations and has no strategy; rlplace.distribute runs it")
    refuse_release(plan, "parallelize")
    if len(plan.strategy.pipelines) > 1:
        raise InputError(
            "parallelize: unlike pipelines side by side sum their gradients after the backward, which a loop of another's does "
            "not do; use rlplace.distribute"
        )
    if any(stage.axis("context") > 1 for stage in plan.strategy.stages):
        raise InputError(
            "parallelize: parts of the positions (context) have unlike numbers of targets, which a loop of another's does not "
            "count; use rlplace.distribute"
        )
    if any(stage.tables for stage in plan.strategy.stages):
        raise InputError(
            "parallelize: processes hold unlike parts of embedding tables, which checkpoints of another's loop would not join; "
            "use rlplace.distribute, or plan with tables=1"
        )
    made: Any = distribute(model, plan, example_inputs, device=device, share="replica", mixed_precision=mixed_precision)
    mesh: DeviceMesh = made.place.mesh
    if len(plan.strategy.stages) > 1:
        return made, mesh
    for parameter in model.parameters():  # torch's wrappers do this to the parameters that they shard
        if left_out(parameter) and not isinstance(made.runner.root, DistributedDataParallel):
            parameter.register_post_accumulate_grad_hook(partial(average_left_out, place=made.place))
        if isinstance(parameter, DTensor) and made.place.columns == 1:  # which a tensor group alone holds whole
            parameter.register_post_accumulate_grad_hook(sum_parts)
    return made.runner.root, mesh


def refuse_release(plan: PlacementPlan, verb: str) -> None:
    """Refuses a plan that releases gradients, where the loop is another's."""
    if plan.strategy is not None and plan.strategy.release_gradients:
        raise InputError(
            f"{verb}: the plan releases gradients, which 'rlplace run' does, and rlplace.distribute with "
            "model.release_gradients(optimizer) in a loop of your own; plan without --release-gradients"
        )


def check_strategy(plan: PlacementPlan, verb: str) -> None:
    """Refuses a strategy that cannot be run, before any process waits for another; placements pass."""
    if plan.strategy is None:
        return
    reason = why_not(plan.strategy)
    if reason is not None:
        raise InputError(f"{verb}: {reason}")
    devices = devices_of(plan)
    if devices != list(range(devices[0], devices[0] + len(devices))) and not _like_the_first(plan, devices):
        raise InputError(
            f"{verb}: the plan uses the devices {', '.join(map(str, devices))}, and processes are numbered without gaps, so "
            "that it would run on devices of other kinds or hosts; plan for a cluster of these devices alone"
        )
    if Planned(plan).recipe.master_weights and verb != "run":
        raise InputError(f"{verb}: the plan keeps its weights in fp32 (--master-weights); 'rlplace run' trains and times it")


def _like_the_first(plan: PlacementPlan, devices: Sequence[int]) -> bool:
    """Returns whether the first devices of the plan's cluster are of the kinds and hosts of these."""
    try:
        cluster = Planned(plan).cluster
    except InputError:  # a cluster of a file that is missing is not known
        return False
    seats = list(zip(cluster.hosts, (kind.name for kind in cluster.kinds), strict=True))
    return max(devices) < len(seats) and [seats[device] for device in devices] == seats[: len(devices)]


def microbatch_of(plan: PlacementPlan, samples: int) -> int:
    """Returns the samples of the micro-batch that a plan's model is built for, which are `samples` for a placement."""
    return samples if plan.strategy is None else plan.strategy.pipelines[0].microbatch[0]


def samples_of_step(plan: PlacementPlan, example_inputs: Any) -> int:
    """Returns the samples of a step: those of the micro-batch for a placement."""
    return samples_of(example_inputs) if plan.strategy is None else plan.strategy.batch
