"""Floating-point operations of one ATen op from its arguments; a multiply-add counts two.

torch's own counter misses fused attention on the CPU, grouped products and recurrent kernels, and over-counts the backward
of grouped convolutions, so every formula that matters is written out here. Elementwise ops, reductions, norms and softmax
count a few operations per element; moving data counts none. Attention counts the full score matrix, causal or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from rlplace.model.axes.dims import kind_of

PER_ELEMENT = {"elementwise": 1.0, "reduction": 1.0, "norm": 6.0, "softmax": 5.0, "random": 2.0, "other": 1.0}
"""Operations per element of the larger of input and output, by kind; kinds that are missing count none."""

Args = Sequence[Any]
Formula = Callable[[Args, Sequence[torch.Tensor]], float]
"""FLOPs from the arguments and the tensors that were returned."""


def count_flops(name: str, args: Args, outputs: Sequence[torch.Tensor]) -> float:
    """Returns FLOPs of one ATen op.

    Args:
        name: Op name without namespace and overload.
        args: Positional arguments as dispatched.
        outputs: The tensors it returned.
    """
    formula = _FORMULAS.get(name)
    if formula is not None:
        return float(formula(args, outputs))
    rate = PER_ELEMENT.get(kind_of(name), 0.0)
    if not rate:
        return 0.0
    sizes = [t.numel() for t in outputs]
    sizes += [a.numel() for a in args if isinstance(a, torch.Tensor)]
    return rate * max(sizes, default=0)


def _matrix(where: int) -> Formula:
    """2 m n k for a (batched) product whose left operand is argument `where`."""
    return lambda args, outputs: 2.0 * int(args[where].numel()) * int(args[where + 1].shape[-1])


def _vector(where: int) -> Formula:
    """2 m k for a product of argument `where` and a vector."""
    return lambda args, outputs: 2.0 * int(args[where].numel())


def _linear(args: Args, outputs: Sequence[torch.Tensor]) -> float:
    return 2.0 * int(args[0].numel()) * int(args[1].shape[0])


def _grouped_mm(args: Args, outputs: Sequence[torch.Tensor]) -> float:
    """Returns every row meets one group, so ragged sizes do not matter: 2 x rows x k x n over all groups."""
    left, right = args[0], args[1]
    if left.dim() == 3 and right.dim() == 2:
        return 2.0 * int(left.shape[-2]) * int(left.shape[-1]) * int(right.shape[-1])
    return 2.0 * int(left.numel()) * int(right.shape[-1])


def _grouped_mm_fallback_backward(args: Args, outputs: Sequence[torch.Tensor]) -> float:
    return 4.0 * int(args[0].numel()) * int(args[1].shape[-1])


def _convolution_forward(inputs: Sequence[int], weight: Sequence[int], output: Sequence[int], transposed: bool) -> float:
    """2 x (positions that the kernel visits) x kernel size x channels per group; the weight shape already is per group."""
    positions = inputs if transposed else output
    return 2.0 * int(positions[0]) * prod(positions[2:]) * prod(weight)


def _convolution(args: Args, outputs: Sequence[torch.Tensor]) -> float:
    transposed = bool(args[6]) if len(args) > 6 else False
    return _convolution_forward(args[0].shape, args[1].shape, outputs[0].shape, transposed)


def _convolution_backward(args: Args, outputs: Sequence[torch.Tensor]) -> float:
    """Returns one forward's worth for each of input and weight gradient that is asked for; groups are in the weight shape."""
    gradient, inputs, weight, transposed, mask = args[0], args[1], args[2], bool(args[7]), args[10]
    once = _convolution_forward(inputs.shape, weight.shape, gradient.shape, transposed)
    return once * (int(mask[0]) + int(mask[1])) + (int(gradient.numel()) if mask[2] else 0)


def _attention(first: int, products: int) -> Formula:
    """`products` matrix products between [B, H, S, D] and [B, H, T, D], with the query at argument `first`."""

    def formula(args: Args, outputs: Sequence[torch.Tensor]) -> float:
        query, key, value = (args[first + i].shape for i in range(3))
        batch, heads, length, depth = (int(s) for s in query)
        target, width = int(key[-2]), int(value[-1])
        scores = products - products // 2  # products over the key depth; the others run over the value width
        return 2.0 * batch * heads * length * target * (depth * scores + width * (products // 2))

    return formula


def _recurrent_layer(args: Args, outputs: Sequence[torch.Tensor]) -> float:
    """`mkldnn_rnn_layer`: gates x hidden x (input + hidden) products for every step and sample of one layer."""
    inputs, weight_input, weight_hidden = args[0], args[1], args[2]
    rows = inputs.numel() // int(inputs.shape[-1])
    return 2.0 * int(rows) * int(weight_input.numel() + weight_hidden.numel())


def _recurrent(inputs: int, weights: int) -> Formula:
    """Whole recurrent layers: every two-dimensional weight of the list at argument `weights` meets every row once."""

    def formula(args: Args, outputs: Sequence[torch.Tensor]) -> float:
        rows = args[inputs].numel() // int(args[inputs].shape[-1])
        return 2.0 * int(rows) * sum(int(w.numel()) for w in args[weights] if w.dim() == 2)

    return formula


def _selective_scan(first: int, passes: float) -> Formula:
    """9 per sample, channel, token and state: step times a, exponential, step times b times input, state update, output."""
    return lambda args, outputs: passes * 9.0 * int(args[first].numel()) * int(args[first + 2].shape[-1])


def _twice(formula: Formula) -> Formula:
    return lambda args, outputs: 2.0 * formula(args, outputs)


def _trilinear(args: Args, outputs: Sequence[torch.Tensor]) -> float:
    """`nn.Bilinear`: [N, 1, I, 1] x [1, O, I, J] x [N, 1, 1, J], summed over the inputs."""
    return 2.0 * prod([max(int(a), int(b), int(c)) for a, b, c in zip(*_common_shapes(args), strict=True)])


def _common_shapes(args: Args) -> list[list[int]]:
    shapes = []
    for tensor, expand in zip(args[:3], args[3:6], strict=True):
        sizes = [int(s) for s in tensor.shape]
        for axis in expand:
            sizes.insert(int(axis), 1)
        shapes.append(sizes)
    return shapes


_FUSED_ATTENTION = tuple(
    f"_scaled_dot_product_{name}"
    for name in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention",
                 "fused_attention_overrideable")
)  # fmt: skip

_FORMULAS: dict[str, Formula] = {
    name: formula
    for formula, names in (
        (_matrix(0), ("mm", "bmm", "_scaled_mm", "_int_mm")),
        (_matrix(1), ("addmm", "baddbmm", "addbmm")),
        (_vector(0), ("mv", "dot", "vdot")),
        (_vector(1), ("addmv",)),
        (_linear, ("linear", "mkldnn_linear")),
        (_grouped_mm, ("_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback")),
        (_grouped_mm_fallback_backward, ("grouped_mm_fallback_backward",)),
        (_convolution, ("convolution", "_convolution", "convolution_overrideable", "cudnn_convolution")),
        (_convolution_backward, ("convolution_backward",)),
        (_attention(0, 2), _FUSED_ATTENTION),
        (_attention(1, 5), tuple(f"{name}_backward" for name in _FUSED_ATTENTION)),
        (_recurrent_layer, ("mkldnn_rnn_layer",)),
        (_twice(_recurrent_layer), ("mkldnn_rnn_layer_backward",)),
        (_recurrent(0, 3), ("recurrent_layer",)),
        (_twice(_recurrent(1, 4)), ("recurrent_layer_backward",)),
        (_recurrent(0, 1), ("_cudnn_rnn",)),
        (_twice(_recurrent(0, 1)), ("_cudnn_rnn_backward",)),
        (_selective_scan(0, 1.0), ("selective_scan",)),
        (_selective_scan(1, 3.0), ("selective_scan_backward",)),  # computes the states again and then walks them twice
        (lambda args, outputs: 0.0, ("embedding",)),
        (lambda args, outputs: float(args[0].numel()), ("embedding_dense_backward",)),
        (_trilinear, ("_trilinear",)),
    )
    for name in names
}
