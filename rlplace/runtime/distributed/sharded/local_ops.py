"""What each device computes of an op that is cut.

Along a dimension that runs through all results, the op itself on the pieces. Along others a device has a summand of the
result (a reduced dimension), or the op needs sums from all devices before it can go on (the statistics of a norm).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.nn import functional as F

from rlplace.runtime.distributed.sharded.exchange import Meshes, largest, move, shared, summed
from rlplace.runtime.distributed.sharded.spec import WHOLE, Factor, Spec, moves, whole


@dataclass(frozen=True, eq=False)
class OpCut:
    """How an op is cut, as its local implementation sees it.

    Attributes:
        factors: Factors of every dimension that is cut.
        inputs: Names of the dimensions of each tensor argument, in the order of the flat arguments.
        mesh_shape: Axis sizes.
    """

    factors: Mapping[str, tuple[Factor, ...]]
    inputs: tuple[tuple[str, ...] | None, ...]
    mesh_shape: tuple[int, ...]

    def axes(self, *dims: str) -> frozenset[int]:
        """Mesh axes that cut any of these dimensions."""
        return frozenset(axis for dim in dims for _, axis in self.factors.get(dim, ()) if axis != WHOLE)

    def axes_but(self, *dims: str) -> frozenset[int]:
        """Mesh axes that cut any other dimension."""
        return self.axes(*(dim for dim in self.factors if dim not in dims))

    def parts(self, axes: frozenset[int]) -> int:
        """Number of devices along these axes."""
        return prod(self.mesh_shape[axis] for axis in axes)

    def own(self, values: torch.Tensor, names: Sequence[str], mesh: Meshes) -> torch.Tensor:
        """This device's piece of a tensor that every device has."""
        return mesh.piece(values, self._spec(values.shape, names))

    def all_of(self, piece: torch.Tensor, names: Sequence[str], mesh: Meshes) -> torch.Tensor:
        """The tensor whose piece this device has."""
        spec = self._spec(piece.shape, names)
        return move(piece, moves(spec, whole(spec.shape), mesh.ndim), spec.shape, mesh)

    def _spec(self, shape: Sequence[int], names: Sequence[str]) -> Spec:
        return Spec(tuple(self.factors.get(n) or whole([size]).dims[0] for n, size in zip(names, shape, strict=True)))


Run = Callable[[Any, OpCut, Meshes, Sequence[Any]], Any]
"""Op, cut, mesh and all arguments in the order of the schema to the local results."""


@dataclass(frozen=True)
class LocalOp:
    """A local implementation.

    Attributes:
        cut: Dimensions besides those of all results that may be cut.
        run: Computes the local results.
        partial: Whether cutting such a dimension leaves partial sums; a dimension in `complete` never does.
        complete: See there.
        whole_inputs: Positions of flat tensor arguments that are handed over whole.
        fits: Says for arguments what may be cut after all: gets all arguments and a dimension.
    """

    cut: frozenset[str]
    run: Run
    partial: bool = True
    complete: frozenset[str] = frozenset()
    whole_inputs: frozenset[int] = frozenset()
    fits: Callable[[Sequence[Any], str], bool] = lambda args, dim: True


def bound(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """All arguments in the order of the schema, defaults filled in."""
    rest = op._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(argument.name, argument.default_value) for argument in rest)]


def call(op: Any, args: Sequence[Any]) -> Any:
    """Calls an op with all its arguments in order."""
    named = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
    count = len(op._schema.arguments) - len(named)
    return op(*args[:count], **dict(zip(named, args[count:], strict=False)))


def plain(op: Any, cut: OpCut, mesh: Meshes, args: Sequence[Any]) -> Any:
    """The op on the pieces."""
    return call(op, args)


def _linear(op: Any, cut: OpCut, mesh: Meshes, args: Sequence[Any]) -> Any:
    parts = cut.parts(cut.axes("k"))
    if len(args) < 3 or args[2] is None or parts == 1:
        return call(op, args)
    result = call(op, [args[0], args[1], None])
    return result + shared(args[2], parts).to(result.dtype)


def _addmm(op: Any, cut: OpCut, mesh: Meshes, args: Sequence[Any]) -> Any:
    parts = cut.parts(cut.axes("k"))
    return call(op, [args[0] if parts == 1 else shared(args[0], parts), *args[1:]])


def _convolution(op: Any, cut: OpCut, mesh: Meshes, args: Sequence[Any]) -> Any:
    parts = cut.parts(cut.axes("c"))
    bias = args[2] if args[2] is None or parts == 1 else shared(args[2], parts)
    return call(op, [*args[:2], bias, *args[3:]])


def _mean(op: Any, cut: OpCut, mesh: Meshes, args: Sequence[Any]) -> Any:
    count = args[0].dim() if args[0].dim() else 1
    dims = args[1] if len(args) > 2 else None
    over = {int(d) % count for d in dims} if dims else set(range(count))
    names = ["d"] if count == 1 else [f"d{index}" for index in over]
    return call(op, args) / cut.parts(cut.axes(*names))


def _loss(op: Any, cut: OpCut, mesh: Meshes, args: Sequence[Any]) -> Any:
    result = call(op, args)
    return result / cut.parts(cut.axes(*cut.factors)) if args[2] == 1 else result


def _local_rows(cut: OpCut, mesh: Meshes, device: torch.device) -> torch.Tensor:
    """By number in the vocabulary the row of this device's piece; -1 for rows of other devices."""
    size = prod(size for size, _ in cut.factors["v"])
    mine = cut.own(torch.arange(size, device=device), ["v"], mesh)
    local_row = torch.full((size,), -1, device=device)
    local_row[mine] = torch.arange(len(mine), device=device)
    return local_row


def _embedding(op: Any, cut: OpCut, mesh: Meshes, args: Sequence[Any]) -> Any:
    weight, rows, padding, *rest = args
    if not cut.axes("v"):
        return call(op, args)
    local_row = _local_rows(cut, mesh, rows.device)
    local = local_row[rows]
    padding = int(local_row[padding]) if padding is not None and padding >= 0 else -1
    result = call(op, [weight, local.clamp(min=0), padding, *rest])
    return result.masked_fill((local < 0).unsqueeze(-1), 0.0)


def _widened(inputs: torch.Tensor) -> torch.Tensor:
    """Half precision as single, in which kernels add up."""
    return inputs.float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs


def _layer_norm(op: Any, cut: OpCut, mesh: Meshes, args: Sequence[Any]) -> Any:
    inputs, shape, weight, bias, eps = args[:5]
    axes = cut.axes(*(name for name in cut.inputs[0] or () if name.startswith("c")))
    if not axes:
        return call(op, args)
    x = _widened(inputs)
    dims, count = tuple(range(-len(shape), 0)), prod(shape)
    centred = x - summed(x.sum(dims, keepdim=True), axes, mesh) / count
    result = centred * torch.rsqrt(summed(centred.square().sum(dims, keepdim=True), axes, mesh) / count + eps)
    result = result if weight is None else result * weight
    return (result if bias is None else result + bias).to(inputs.dtype)


def _rms_norm(op: Any, cut: OpCut, mesh: Meshes, args: Sequence[Any]) -> Any:
    inputs, shape, weight, eps = args[:4]
    axes = cut.axes(*(name for name in cut.inputs[0] or () if name.startswith("c")))
    if not axes:
        return call(op, args)
    x = _widened(inputs)
    dims = tuple(range(-len(shape), 0))
    eps = torch.finfo(inputs.dtype).eps if eps is None else eps
    result = x * torch.rsqrt(summed(x.square().sum(dims, keepdim=True), axes, mesh) / prod(shape) + eps)
    return (result if weight is None else result * weight).to(inputs.dtype)


def _batch_norm(op: Any, cut: OpCut, mesh: Meshes, args: Sequence[Any]) -> Any:
    inputs, weight, bias, mean, variance, training, momentum, eps, *rest = args
    held = [None if t is None else cut.own(t, ["c"], mesh) for t in (mean, variance)]
    axes = cut.axes_but("c")
    if not training or not axes:
        own = [t if t is None or not training else t.clone() for t in held]
        result = call(op, [inputs, weight, bias, *own, training, momentum, eps, *rest])
        if training:
            _write_back(cut, mesh, (mean, variance), own)
        return result
    x = _widened(inputs)
    dims = [d for d in range(x.dim()) if d != 1]
    shape = [1, -1, *[1] * (x.dim() - 2)]
    count = x.numel() // x.shape[1] * cut.parts(axes)
    centre = summed(x.sum(dims), axes, mesh) / count
    centred = x - centre.view(shape)
    spread = summed(centred.square().sum(dims), axes, mesh) / count
    result = centred * torch.rsqrt(spread + eps).view(shape)
    result = result if weight is None else result * weight.view(shape)
    result = result if bias is None else result + bias.view(shape)
    if mean is not None:
        with torch.no_grad():
            unbiased = spread * (count / max(count - 1, 1))
            own = [old * (1 - momentum) + new * momentum for old, new in zip(held, (centre, unbiased), strict=True)]
            _write_back(cut, mesh, (mean, variance), own)
    return result.to(inputs.dtype)


def _write_back(cut: OpCut, mesh: Meshes, held: Sequence[Any], own: Sequence[Any]) -> None:
    """Running statistics, which every device has whole."""
    with torch.no_grad():
        for tensor, piece in zip(held, own, strict=True):
            if tensor is not None:
                tensor.copy_(cut.all_of(piece, ["c"], mesh))


def _softmax(op: Any, cut: OpCut, mesh: Meshes, args: Sequence[Any]) -> Any:
    inputs, dim, dtype = args[:3]
    axes = cut.axes((cut.inputs[0] or ())[dim])
    if not axes:
        return call(op, args)
    x = inputs if dtype is None else inputs.to(dtype)
    x = x - largest(x.amax(dim, keepdim=True), axes, mesh)
    total = summed(x.exp().sum(dim, keepdim=True), axes, mesh)
    return x - total.log() if "log" in str(op) else x.exp() / total


def _cross_entropy(op: Any, cut: OpCut, mesh: Meshes, args: Sequence[Any]) -> Any:
    inputs, target, weight, reduction, ignored, *smoothing = args
    rows, words = cut.axes_but("v"), cut.axes("v")
    counted = target != ignored
    total = None
    if reduction == 1:
        each = counted.to(inputs.dtype) if weight is None else weight[torch.where(counted, target, 0)] * counted
        total = summed(each.sum().detach(), rows, mesh)
    if not words:
        result = call(op, [inputs, target, weight, 0 if reduction == 0 else 2, ignored, *smoothing])
    else:
        local = torch.where(counted, _local_rows(cut, mesh, target.device)[torch.where(counted, target, 0)], -1)
        x = _widened(inputs)
        x = x - largest(x.amax(1, keepdim=True), words, mesh)
        log_total = summed(x.exp().sum(1), words, mesh, everywhere=True).log()
        picked = x.gather(1, local.clamp(min=0).unsqueeze(1)).squeeze(1).masked_fill(local < 0, 0.0)
        each = (log_total - summed(picked, words, mesh, everywhere=True)).masked_fill(~counted, 0.0)
        result = (each if reduction == 0 else each.sum()).to(inputs.dtype)
    return result if total is None else result / total


def _cross_entropy_fits(args: Sequence[Any], dim: str) -> bool:
    return dim != "v" or (args[2] is None and (len(args) < 6 or args[5] == 0.0))


def _attention(op: Any, cut: OpCut, mesh: Meshes, args: Sequence[Any]) -> Any:
    return call(op, _with_own_mask(cut, mesh, args))


def _with_own_mask(cut: OpCut, mesh: Meshes, args: Sequence[Any]) -> list[Any]:
    """The arguments of causal attention whose queries are cut, with the rows of the mask that this device has."""
    query, key, value, mask, dropout, causal, scale, grouped = args
    if causal and cut.axes("queries"):
        rows = prod(size for size, _ in cut.factors["queries"])
        every = torch.ones(rows, key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask, causal = cut.own(every, ["queries", ""], mesh), False
    return [query, key, value, mask, dropout, causal, scale, grouped]


def _attention_fits(args: Sequence[Any], dim: str) -> bool:
    """A mask of fewer dimensions than four is handed over whole, which does along dimensions that it does not have."""
    count = len(args[3].shape) if hasattr(args[3], "shape") else 0
    return count in (0, 4) or (count == 2 and dim != "queries")


def dropped_attention(cut: OpCut, mesh: Meshes, args: Sequence[Any], kept: torch.Tensor) -> torch.Tensor:
    """Attention with given dropout factors, as torch computes it without a fused kernel.

    Args:
        cut: How it is cut.
        mesh: The mesh.
        args: All arguments of the op, in order.
        kept: This device's piece of [batch, heads, queries, keys]: 0 or 1 / (1 - probability).
    """
    query, key, value, mask, _, causal, scale, grouped = _with_own_mask(cut, mesh, args)
    if grouped and key.shape[1] != query.shape[1]:
        key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], 1) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        every = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~every, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return F.softmax(scores, -1) * kept @ value


_K, _V = frozenset({"k"}), frozenset({"v"})
_D = frozenset({"d", *(f"d{i}" for i in range(8))})
_ROWS = frozenset({"m", *(f"d{i}" for i in range(8)), "d"})
_C = frozenset({"c", *(f"c{i}" for i in range(8))})

LOCAL_OPS: dict[str, LocalOp] = {
    "linear": LocalOp(_K, _linear),
    "mm": LocalOp(_K, plain), "matmul": LocalOp(_K, plain), "bmm": LocalOp(_K, plain),
    "addmm": LocalOp(_K, _addmm), "baddbmm": LocalOp(_K, _addmm),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), LocalOp(frozenset({"c"}), _convolution)),
    "mean": LocalOp(_D, _mean), "sum": LocalOp(_D, plain),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"), LocalOp(_D, _loss)),
    "embedding": LocalOp(_V, _embedding, fits=lambda args, dim: not any(args[3:])),
    "layer_norm": LocalOp(_C, _layer_norm, partial=False),
    "rms_norm": LocalOp(_C, _rms_norm, partial=False),
    "batch_norm": LocalOp(frozenset("bhwt"), _batch_norm, partial=False, whole_inputs=frozenset({3, 4})),
    "softmax": LocalOp(_D, _softmax, partial=False), "log_softmax": LocalOp(_D, _softmax, partial=False),
    "cross_entropy_loss": LocalOp(_ROWS | _V, _cross_entropy, complete=_V, fits=_cross_entropy_fits),
    "nll_loss_nd": LocalOp(_ROWS, _cross_entropy), "nll_loss": LocalOp(_ROWS, _cross_entropy),
    "scaled_dot_product_attention": LocalOp(frozenset(), _attention, fits=_attention_fits),
}  # fmt: skip
"""Ops that can be cut along more than what runs through all their results, or that have to know how they are cut."""

PLAIN = frozenset(
    {"max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "max_pool1d", "avg_pool1d", "adaptive_max_pool2d", "cat", "concat",
     "pad", "constant_pad_nd", "lstm", "gru", "rnn_tanh", "rnn_relu"}
)  # fmt: skip
"""Ops besides element-wise ones that do the same to pieces along dimensions of all their results."""
