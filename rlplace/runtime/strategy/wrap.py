"""Data axes, recomputation and offload of a stage by torch's wrappers, in torch's order, and gradients that these do not sum.

Tensor layouts come before (`tensor`), because `fully_shard` shards a process's part of a parameter after them. Block by block:
recomputation, then `fully_shard` or `replicate`; the rest belongs to the root. Names of parameters stay the model's.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from rlplace.model.capture.export import lies_in
from rlplace.plan.strategy import Stage
from rlplace.runtime.state.values import Values, fill
from rlplace.runtime.strategy.cut import StageGraph
from rlplace.runtime.strategy.experts import spread_experts
from rlplace.runtime.strategy.mesh import MeshPlace
from rlplace.runtime.strategy.tables import WEIGHT, divide_tables
from rlplace.runtime.torch_adapter import StridedShard, ignore_in_replicas, replicate, selective_contexts


def copies_of(names: Sequence[str], stages: Sequence[StageGraph]) -> dict[int, str]:
    """Returns the name of a tied parameter in each stage that has a copy."""
    held = {n: next((name for name in names if name in stage.parameters), None) for n, stage in enumerate(stages)}
    return {number: name for number, name in held.items() if name is not None}


def part_ties(ties: Sequence[Sequence[str]], stages: Sequence[StageGraph], bodies: Mapping[int, nn.Module]) -> None:
    """Gives each stage of this process a copy of its own of a parameter that stages share, before it is sharded.

    Args:
        ties: Names of parameters that are one tensor, for every such tensor.
        stages: The stages of the cut.
        bodies: Modules of the stages of this process.
    """
    for names in ties:
        held = [(bodies[number], name) for number, name in copies_of(names, stages).items() if number in bodies]
        for body, name in held[1:]:
            shared = body.get_parameter(name)
            fresh = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
            for module in body.modules():
                for key, parameter in module.named_parameters(recurse=False):
                    if parameter is shared:
                        setattr(module, key, fresh)


def left_out(parameter: torch.Tensor) -> bool:
    """Returns whether `fully_shard` and `replicate` take no such parameter: complex, or without dimensions or elements."""
    return not isinstance(parameter, DTensor) and (parameter.is_complex() or not parameter.dim() or not parameter.numel())


def average_left_out(parameter: torch.Tensor, place: MeshPlace) -> None:
    """Averages a gradient over the replicas, where torch's wrappers leave its parameter out; once more changes nothing."""
    if parameter.grad is not None and left_out(parameter):
        for axis in ("replicate", "shard"):
            if place.mesh[axis].size() > 1:
                dist.all_reduce(parameter.grad, group=place.mesh[axis].get_group())
        parameter.grad /= place.columns


def sum_parts(parameter: torch.Tensor) -> None:
    """Sums a gradient of partial sums over the tensor axis, in the placement of its parameter."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def recompute(block: nn.Module, how: str) -> None:
    """Makes a block run its forward again in the backward: all of it, or all but the results that `selective` saves.

    Its `forward` is replaced, not its class or its place, so that names and hooks stay.
    """
    contexts: dict[str, Any] = {}
    if how == "selective":
        contexts["context_fn"] = partial(selective_contexts, keep)
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, **contexts)


def keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Saves results of products with weights, attention and collectives under selective recomputation."""
    name, namespace = getattr(op, "__name__", "").partition(".")[0], getattr(op, "namespace", "")
    products = ("mm", "addmm", "linear", "convolution", "_grouped_mm", "embedding_bag")
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    drawn = bool(given.get("dropout_p"))  # what is kept draws no numbers again, so those that follow would be others
    attention = "scaled_dot_product" in name or name.endswith("_attention_forward")  # under a mask of the last rows
    kept = name in products or (attention and not drawn) or "c10d_functional" in namespace
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def wrap_stage(
    root: nn.Module,
    blocks: Mapping[str, nn.Module],
    stage: Stage,
    place: MeshPlace,
    values: Values,
    *,
    pipelined: bool,
    outside: Collection[str] = (),
    mixed_precision: MixedPrecisionPolicy | None = None,
    unreached: bool = True,
) -> nn.Module:
    """Applies recomputation, data axes and offload to a stage in place; returns the module to call.

    Args:
        root: The stage's module, or the whole model.
        blocks: Its blocks by path.
        stage: The stage of the strategy.
        place: Coordinates of this process.
        values: Of parameters that have none yet, or other ones; shares of them are made after sharding.
        pipelined: Whether torch's schedules will drive it.
        outside: Blocks whose parameters are read while they do not run, or whose results are written in place: they are
            gathered with the root's.
        mixed_precision: Dtype that parameters are cast to; it needs torch's wrappers for one replica, too.
        unreached: Whether parameters may get no gradient, which torch then finds in every step.
    """
    named = [f"{path}.{WEIGHT}" for path in stage.tables]
    if place.tables is not None:
        dtype = None if mixed_precision is None else mixed_precision.param_dtype
        divide_tables(root, stage.tables, place.tables, values, place.device, dtype)
        values = {name: value for name, value in values.items() if name not in named}
    experts = place.experts[stage.expert] if stage.expert > 1 else None
    spread = spread_experts(root, experts["expert"], place.mesh["tensor"]) if experts is not None else []
    for path, how in stage.recompute.items():
        for unit in (unit for name, unit in blocks.items() if lies_in(name, path)):
            recompute(unit, how)
    if stage.sharding == 0:
        fill(root, values, place.device)
    if place.columns == 1 and mixed_precision is None:
        return root
    cast: dict[str, Any] = {} if mixed_precision is None else {"mp_policy": mixed_precision}
    if stage.sharding == 0:
        if not pipelined and stage.axis("tensor") == 1 and mixed_precision is None and experts is None:
            ids = None if place.device.type == "cpu" else [place.device]
            group = place.mesh["replicate"].get_group()
            if not any(p.requires_grad for name, p in root.named_parameters() if name not in named):
                return root
            ignore_in_replicas(root, named)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another word for it, which 2.11 has not
                return DistributedDataParallel(
                    root,
                    device_ids=ids,
                    process_group=group,
                    broadcast_buffers=False,
                    gradient_as_bucket_view=True,
                    find_unused_parameters=unreached,
                )
        shared: Any = partial(replicate, mesh=place.mesh["replicate"], **cast)  # type: ignore[arg-type]
    else:
        axes = place.mesh["replicate", "shard"] if place.mesh["replicate"].size() > 1 else place.mesh["shard"]
        again = stage.sharding == 3
        shared = partial(fully_shard, mesh=axes, reshard_after_forward=again, shard_placement_fn=_shard_dim, **cast)
    ignored = {p for name, p in root.named_parameters() if left_out(p) or name in named}  # see `average_left_out`
    if experts is not None:
        ignored |= _share_experts(spread, experts, stage, mixed_precision)
    shared = partial(shared, ignored_params=ignored)
    dense = {path: block for path, block in blocks.items() if not all(p in ignored for p in block.parameters())}
    alone = {path: block for path, block in dense.items() if path not in outside and stands_alone(root, block)}
    for path, block in alone.items():
        inside = next((how for name, how in stage.offload.items() if lies_in(path, name)), None)
        shared(block, offload_policy=offload(inside, place.device))
    if spread and stage.sharding:
        _gather_ahead([*alone.values()])
    everything = len(stage.offload) == len(stage.blocks) and bool(stage.blocks)
    shared(root, offload_policy=offload("all" if everything else None, place.device))
    if stage.sharding:
        fill(root, values, place.device, [root] if everything else [b for path, b in blocks.items() if _inside(path, stage)])
    return root


def _share_experts(
    spread: Sequence[nn.Module], mesh: DeviceMesh, stage: Stage, policy: MixedPrecisionPolicy | None
) -> set[nn.Parameter]:
    """Shares spread experts over the data ranks that remain; returns the parameters that no other process has."""
    axes = mesh["replicate", "expert_shard"] if mesh["replicate"].size() > 1 else mesh["expert_shard"]
    if axes.size() == 1 and policy is None:
        return {parameter for module in spread for parameter in module.parameters()}
    parts = mesh["expert_shard"].size()
    shared: Any = partial(replicate, mesh=mesh["replicate"])  # type: ignore[arg-type]
    if stage.sharding:
        placed = lambda parameter: Shard(int(parameter.dim() > 1 and parameter.shape[1] % parts == 0))  # noqa: E731
        shared = partial(fully_shard, mesh=axes, reshard_after_forward=stage.sharding == 3, shard_placement_fn=placed)
    for module in spread:
        shared(module, **({} if policy is None else {"mp_policy": replace(policy, cast_forward_inputs=False)}))
    return set()


def _gather_ahead(blocks: Sequence[nn.Module]) -> None:
    """Makes each block gather the next one with its experts: torch's own order ends where the host waits for token counts."""
    units: list[list[FSDPModule]] = [[one for one in block.modules() if isinstance(one, FSDPModule)] for block in blocks]
    for before, after in pairwise(units):
        before[0].set_modules_to_forward_prefetch(after)
        after[0].set_modules_to_backward_prefetch(before)


def _inside(path: str, stage: Stage) -> bool:
    """Returns whether a block lies in one whose parameters are in host memory."""
    return any(lies_in(path, name) for name in stage.offload)


def _shard_dim(parameter: nn.Parameter) -> Shard | None:
    """Returns the second dimension for a weight that packs several on its first, which the tensor axis cuts there."""
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return Shard(1) if any(isinstance(p, StridedShard) and p.dim == 0 for p in placements) else None


def offload(what: str | None, device: torch.device) -> OffloadPolicy:
    """Returns torch's policy for the part of a block in host memory; pinned where a device copies from it."""
    return OffloadPolicy() if what is None else CPUOffloadPolicy(pin_memory=device.type != "cpu")


def stands_alone(root: nn.Module, block: nn.Module) -> bool:
    """Returns whether a block is worth a group of its own: it has a matrix, and shares no parameter with other modules."""
    own = {id(parameter): parameter for parameter in block.parameters()}
    if not any(parameter.dim() > 1 for parameter in own.values()):
        return False
    inside = {id(module) for module in block.modules()}
    others = (module for module in root.modules() if id(module) not in inside)
    return not any(id(parameter) in own for module in others for parameter in module.parameters(recurse=False))
