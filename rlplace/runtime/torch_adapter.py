"""The parts of torch that are private and that running a plan needs: the one file of this room that imports them.

Each entry names the upstream issue that would make it public or unneeded; `tests/test_torch_adapter.py` fails once torch no
longer needs it. Versions 2.11 to 2.13 have all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn

# Makes no calls of the function modes around it, but those of dispatch modes: pytorch #94130.
from torch._C import DisableTorchFunction as without_functions

# Collectives that dispatch modes see, so that selective recomputation keeps their results.
from torch.distributed import _functional_collectives as _collectives

# `replicate` on the code of `fully_shard`, for one mesh dimension: pytorch #152710, #158207.
from torch.distributed._composable.replicate_with_fsdp import replicate

# An all-to-all of parts of unlike sizes with a backward, which selective recomputation knows: pytorch #123599, #168140.
from torch.distributed._functional_collectives import all_to_all_single_autograd as all_to_all
from torch.distributed.distributed_c10d import _get_default_group as default_group
from torch.distributed.distributed_c10d import _get_default_store as default_store
from torch.distributed.pipelining import _backward
from torch.distributed.pipelining.stage import _PipelineStageBase

# A shard of a tensor that packs several, each cut for itself; `Shard` cuts the whole.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

# Broadcasts in buckets by dtype, as DistributedDataParallel does.
from torch.distributed.utils import _sync_params_and_buffers as broadcast_in_buckets

# Sets an attribute by its dotted path.
from torch.fx.graph_module import _assign_attr as assign_attribute

# What draws for `torch.nn.init.trunc_normal_`, and draws nothing for tensors without values.
from torch.nn.init import _no_grad_trunc_normal_ as truncated_normal

# Base classes of norms that keep running statistics, and of dropouts.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutNd
from torch.nn.parallel import DistributedDataParallel

# `torch.func.functional_call` calls the module, whose forward is replaced here.
from torch.nn.utils.stateless import _reparametrize_module as with_parameters

# Leaves of nested values: pytorch #96165.
from torch.utils import _pytree as pytree

# Makes no calls of the modes around it: none can make a `CausalBias`.
from torch.utils._python_dispatch import _disable_current_modes as without_modes

# Keep results under selective recomputation, and refuse those that are written to in place: pytorch #119590.
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

__all__ = [
    "BatchNorm",
    "DropoutNd",
    "NormBase",
    "NormOfGroup",
    "StridedShard",
    "all_gather",
    "all_to_all",
    "assign_attribute",
    "broadcast_in_buckets",
    "counted_losses",
    "default_group",
    "default_store",
    "from_functional",
    "functionalized",
    "ignore_in_replicas",
    "joined_parameter_groups",
    "reduce_in_order",
    "reduce_scatter",
    "replicate",
    "ring_attention",
    "selective_contexts",
    "to_functional",
    "truncated_normal",
    "with_parameters",
    "without_functions",
    "without_mkldnn",
    "without_modes",
]


# Parameters that DistributedDataParallel neither reduces nor compares: pytorch #22690.
ignore_in_replicas: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model

# torch 2.13 has other words for them.
all_gather: Any = getattr(_collectives, "all_gather_single", None) or _collectives.all_gather_tensor
reduce_scatter: Any = getattr(_collectives, "reduce_scatter_single", None) or _collectives.reduce_scatter_tensor


def ring_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, group: Any) -> Tensor:
    """Attends to the keys and values of all of a group, which go around it while a process attends to those that it has.

    `torch.distributed.tensor.experimental.context_parallel` does so on GPUs alone, for calls whose heads are equal in number,
    and cuts inputs, not arguments of blocks: pytorch #144351.

    Args:
        query: [samples, heads, positions, width]; causal: two runs, one from each half of the sequence.
        key: Its heads divide those of the queries.
        value: As `key`, of any width.
        causal: Whether positions see none after them.
        scale: Of the products; None takes the width's.
        group: The processes, in the order of their parts.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    made: Tensor = _Ring.apply(query, key, value, causal, scale, group)  # type: ignore[no-untyped-call]
    return made


class _Ring(torch.autograd.Function):
    """Torch's ring; in double precision its sums are, too."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None, group: Any) -> Tensor:
        with _ring(query.dtype, causal) as ring:
            kernel = partial(_on_shared, _kernels(query)[0])
            out, sums, *rest = ring._templated_ring_attention(
                group, 2, kernel, query, key, value, is_causal=causal, dropout_p=0.0, scale=scale
            )
        ctx.save_for_backward(query, key, value, out, sums, *(one for one in rest[:6] if isinstance(one, Tensor)))
        ctx.how, ctx.rest = (causal, scale, group), rest[:6]
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (causal, scale, group), (query, key, value, out, sums, *saved) = ctx.how, ctx.saved_tensors
        names = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
        held = iter(saved)
        more = {name: next(held) if isinstance(one, Tensor) else one for name, one in zip(names, ctx.rest, strict=False)}
        with _ring(query.dtype, causal) as ring:
            made = ring._templated_ring_attention_backward(
                group, 2, partial(_behind_shared, _kernels(query)[1]), gradient.contiguous(), "grad_out", query, key, value,
                out, sums, is_causal=causal, dropout_p=0.0, scale=scale, **more,
            )  # fmt: skip
        return *made[:3], None, None, None


@contextlib.contextmanager
def _ring(dtype: torch.dtype, causal: bool) -> Iterator[Any]:
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring  # it loads much of torch

    options = ring._ContextParallelOptions(dtype != torch.float64, causal, ring._RotateMethod.ALL_TO_ALL)
    with mock.patch.object(ring, "_cp_options", options):
        yield ring


def _kernels(query: Tensor) -> tuple[Any, Any]:
    aten, end = torch.ops.aten, "_for_cpu" if query.device.type == "cpu" else ""
    names = f"_scaled_dot_product_flash_attention{end}", f"_scaled_dot_product_flash_attention{end}_backward"
    return tuple(getattr(aten, name).default for name in names)  # type: ignore[return-value]


def _on_shared(kernel: Any, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Any:
    """Calls a kernel with heads of keys and values repeated for the queries that share them, and all as wide as the widest."""
    out, *rest = kernel(*_of_one_width(query, _for_all(query, key), _for_all(query, value)), **how)
    return out[..., : value.shape[-1]], *rest


def _behind_shared(kernel: Any, *, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, **how: Any) -> Any:
    names, own = ("query", "key", "value", "grad_out", "out"), (query, key, value)
    wide = _of_one_width(query, _for_all(query, key), _for_all(query, value), grad_out, out)
    grads = kernel(**dict(zip(names, wide, strict=True)), **how)
    narrow = [grad[..., : one.shape[-1]] for grad, one in zip(grads, own, strict=False)]
    return narrow[0], *(grad.unflatten(1, (key.shape[1], -1)).sum(2) for grad in narrow[1:])


def _of_one_width(*tensors: Tensor) -> list[Tensor]:
    """Returns the tensors with zeros up to the widest: the kernels of a ring take no values of another width than queries."""
    width = max(tensor.shape[-1] for tensor in tensors)
    missing = [width - tensor.shape[-1] for tensor in tensors]
    return [nn.functional.pad(tensor, (0, less)) if less else tensor for tensor, less in zip(tensors, missing, strict=True)]


def _for_all(query: Tensor, shared: Tensor) -> Tensor:
    times = query.shape[1] // shared.shape[1]
    return shared.repeat_interleave(times, 1) if times > 1 else shared


def selective_contexts(policy: Callable[..., Any]) -> tuple[Any, Any]:
    """Makes the contexts of a selective checkpoint, in which ops may write in place to what is kept.

    Args:
        policy: As of `torch.utils.checkpoint.create_selective_checkpoint_contexts`.
    """
    _, again = checkpointing.create_selective_checkpoint_contexts(policy)
    return _Keeping(policy, again.storage), _Again(policy, again.storage, False)


class _Keeping(_CachingTorchDispatchMode):
    """The mode of torch, which copies a kept result before an op writes to it, as experts add a bias to their products."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(op, "_schema", None)
        if schema is not None and schema.is_mutable and "c10d" not in op.namespace:
            given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | (kwargs or {})
            changed = [given.get(one.name) for one in schema.arguments if one.alias_info and one.alias_info.is_write]
            written = {place for value in pytree.tree_leaves(changed) for place in _storages(value)}
            for kept in pytree.tree_leaves(dict(self.storage)):
                if not written.isdisjoint(_storages(getattr(kept, "val", None))):
                    kept.val = kept.val.clone()
                    kept.version = kept.val._version
        return super().__torch_dispatch__(op, types, args, kwargs)  # type: ignore[no-untyped-call]


class _Again(_CachedTorchDispatchMode):
    """The mode of torch, in which `fully_shard` inside of a checkpoint may do more than it did in the forward."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(op, types, args, kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "not found in storage" not in str(error):
                raise
        return op(*args, **(kwargs or {}))


def _storages(value: Any) -> set[int]:
    """Returns what identifies the memory of a tensor, or of those that it wraps."""
    if hasattr(value, "__tensor_flatten__"):
        return {place for name in value.__tensor_flatten__()[0] for place in _storages(getattr(value, name))}
    return {value.untyped_storage()._cdata} if isinstance(value, Tensor) else set()


class NormOfGroup(BatchNorm):
    """SyncBatchNorm on GPUs, for modules that DistributedDataParallel must not know as such: pytorch #78078.

    It refuses every SyncBatchNorm on a processor, where torch has none.

    Attributes:
        process_group: The processes whose samples are normalized together.
    """

    process_group: Any
    _check_input_dim: Any = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels: Any = nn.SyncBatchNorm._check_non_zero_input_channels

    def on_gpus(self, values: Tensor) -> Tensor:
        """Normalizes values [samples, channels, ...] as SyncBatchNorm does."""
        return nn.SyncBatchNorm.forward(self, values)  # type: ignore[arg-type]


def reduce_in_order(root: nn.Module) -> None:
    """Reduces the gradients of all groups of a module, group by group, as torch's schedules do after the last micro-batch."""
    _PipelineStageBase.perform_reduce_grad(SimpleNamespace(submod=root), 1)  # type: ignore[arg-type]


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """Keeps recurrent layers off mkldnn, which passes a workspace of unknown size from forward to backward.

    `torch.backends.mkldnn.flags` does the same, and warns about settings of other hardware.
    """
    enabled: Any = torch.backends.mkldnn.enabled
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextlib.contextmanager
def functionalized() -> Iterator[None]:
    """Runs code with writes in place recorded as new values.

    `torch.func.functionalize` does so for a function, without its autograd.
    """
    torch._enable_functionalization(reapply_views=True)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._disable_functionalization()  # type: ignore[attr-defined]


def to_functional(value: Tensor) -> Tensor:
    """Wraps a tensor for `functionalized`."""
    return torch._to_functional_tensor(value)  # type: ignore[attr-defined, no-any-return]


def from_functional(value: Tensor) -> Tensor:
    """Returns the present value of a wrapped tensor; another one is returned as it is."""
    if not torch._is_functional_tensor(value):  # type: ignore[attr-defined]
        return value
    torch._sync(value)  # type: ignore[attr-defined]
    return torch._from_functional_tensor(value)  # type: ignore[attr-defined, no-any-return]


@contextlib.contextmanager
def counted_losses(counted: Callable[..., Tensor]) -> Iterator[None]:
    """Sends every cross entropy and likelihood of a forward through a function; function modes do not see all of their calls.

    Args:
        counted: Called with torch's function and its arguments.
    """
    with contextlib.ExitStack() as inside:
        for name in ("cross_entropy_loss", "nll_loss_nd"):
            kernel = getattr(torch._C._nn, name)
            inside.enter_context(mock.patch.object(torch._C._nn, name, partial(counted, kernel)))
        yield


@contextlib.contextmanager
def joined_parameter_groups() -> Iterator[None]:
    """Makes the second half of a split backward visit each weight once (pytorch #180952).

    torch runs one backward per group of parameters. It joins parameters behind one node; a parameter behind nodes of two groups
    (a table of positions that queries and values read) takes the first group's parameters into the second and leaves them in
    the first, too: their gradients count twice, or their graph is freed before its second use.
    """
    before = _backward.get_param_groups

    def joined(*arguments: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for group in before(*arguments):
            for other in [one for one in found if not one["intermediates"].isdisjoint(group["intermediates"])]:
                found.remove(other)
                group = {key: group[key] | other[key] for key in group}
            found.append(group)
        return found

    with mock.patch.object(_backward, "get_param_groups", joined):
        yield
