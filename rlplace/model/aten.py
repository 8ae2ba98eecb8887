"""Facts about single ATen ops: their kind, the sizes that their time depends on beyond FLOPs and bytes, and their FLOPs.

FLOPs count a multiply-add as two. torch's own counter misses fused attention on the CPU, grouped products and recurrent
kernels, and over-counts the backward of grouped convolutions, so every formula that matters is written out here. Elementwise
ops, reductions, norms and softmax count a few operations per element; moving data counts none. Attention counts the full score
matrix, causal or not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

Args = Sequence[Any]

_NAMES: dict[str, str] = {
    "gemm": "mm addmm linear mv addmv addr outer _scaled_mm _int_mm mkldnn_linear _linear",
    "bmm": (
        "bmm baddbmm addbmm matmul einsum bilinear _trilinear _grouped_mm grouped_mm dot vdot _scaled_grouped_mm "
        "grouped_mm_fallback grouped_mm_fallback_backward tensordot _cdist_forward cdist"
    ),
    "recurrent": (
        "recurrent_layer recurrent_layer_backward lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell "
        "rnn_relu_cell mkldnn_rnn_layer mkldnn_rnn_layer_backward _thnn_fused_lstm_cell _thnn_fused_gru_cell _cudnn_rnn "
        "_cudnn_rnn_backward"
    ),
    "reduction": (
        "sum mean amax amin max min prod norm linalg_vector_norm var var_mean std argmax argmin logsumexp any all cumsum "
        "cumprod topk sort histc bincount aminmax count_nonzero nll_loss nll_loss_forward nll_loss2d_forward "
        "cross_entropy_loss mse_loss l1_loss kthvalue median binary_cross_entropy binary_cross_entropy_with_logits nansum "
        "diff logcumsumexp trace unique_dim _unique2 smooth_l1_loss huber_loss kl_div nll_loss_nd"
    ),
    "embedding": (
        "embedding embedding_dense_backward embedding_bag _embedding_bag embedding_backward _embedding_bag_dense_backward "
        "_embedding_bag_backward _embedding_bag_forward_only _embedding_bag_per_sample_weights_backward"
    ),
    "gather": (
        "gather index index_select scatter scatter_ scatter_add scatter_add_ index_put index_put_ index_add index_add_ "
        "take masked_select nonzero _index_put_impl_ index_copy index_copy_ take_along_dim _unsafe_index "
        "_unsafe_index_put gather_backward index_backward repeat_interleave scatter_reduce scatter_reduce_ searchsorted "
        "bucketize one_hot"
    ),
    "copy": (
        "clone copy_ contiguous cat concat stack hstack vstack _to_copy to repeat fill_ zero_ constant_pad_nd pad roll "
        "flip tril triu zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full arange eye linspace "
        "scalar_tensor slice_backward select_backward slice_scatter select_scatter as_strided_scatter lift_fresh_copy "
        "empty new_empty empty_like _pin_memory new_empty_strided empty_strided fill copy tril_ triu_ meshgrid tile "
        "pixel_shuffle channel_shuffle unfold_copy im2col col2im reflection_pad1d reflection_pad2d replication_pad2d "
        "diag_embed im2col_backward unfold_backward reflection_pad2d_backward diagonal_backward as_strided_copy "
        "empty_permuted lift_fresh"
    ),
    "random": (
        "bernoulli bernoulli_ rand randn randint rand_like randn_like uniform_ normal_ randperm native_dropout dropout "
        "dropout_ feature_dropout alpha_dropout multinomial exponential_ randint_like native_dropout_backward geometric_ "
        "random_"
    ),
    "view": (
        "view reshape _unsafe_view t transpose permute expand expand_as squeeze unsqueeze slice select split "
        "split_with_sizes chunk unbind detach alias as_strided narrow flatten unflatten view_as diagonal movedim swapaxes "
        "detach_ squeeze_ unsqueeze_ transpose_ t_ lift unsafe_split unfold unsafe_chunk tensor_split real view_as_real "
        "view_as_complex ravel requires_grad_ numpy_T mT H resolve_conj resolve_neg broadcast_to unsafe_split_with_sizes "
        "broadcast_tensors atleast_1d view_dtype"
    ),
}
_KIND_OF_NAME = {name: kind for kind, names in _NAMES.items() for name in names.split()}

_MARKS = (
    ("attention", "attention"),
    ("conv", "convolution conv1d conv2d conv3d conv_"),
    ("norm", "batch_norm layer_norm group_norm instance_norm rms_norm"),
    ("softmax", "softmax"),
    ("scan", "selective_scan associative_scan"),
    ("reduction", "pool nll_loss _loss"),
    ("recurrent", "lstm gru_ rnn"),
    ("gather", "upsample grid_sampler"),
    ("reduction", "adaptive_"),
    ("bmm", "_cdist"),
    ("other", "_fft"),
)
"""Parts of a name that decide when the whole name is not listed; the first match counts."""


@functools.cache
def kind_of(name: str) -> str:
    """Returns kind of an ATen op.

    Args:
        name: Name without namespace and overload, for example ``"addmm"``.

    Returns:
        One of `OP_KINDS`; "elementwise" for ops that no rule names.
    """
    known = _KIND_OF_NAME.get(name)
    if known is not None:
        return known
    for kind, marks in _MARKS:
        if any(mark in name for mark in marks.split()):
            return kind
    base = name.removesuffix("_backward").removesuffix("_")
    return _KIND_OF_NAME.get(base, "elementwise")


@functools.cache
def base_name(target: str) -> str:
    """Returns ``"add_"`` of ``"aten.add_.Tensor"``: the name that `kind_of` takes."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def dims_of(name: str, args: Args) -> dict[str, int] | None:
    """Returns named sizes of an ATen op that its time depends on beyond FLOPs and bytes; None where there are none.

    Matrix products: m, n, k and, for batched ones, batch. Convolutions of 3 x 3 with stride 1: those of the product that they
    are, and the width of the image, which decides what Winograd's tiles waste. Fused attention: batch, heads, queries, keys,
    width, that of the values where it is another, and causal = 1 where the causal half is skipped. Norms and softmax over
    their last dimensions: rows, columns.

    Args:
        name: Op name without namespace and overload.
        args: Positional arguments as dispatched.
    """
    if name in _PRODUCTS:
        return _product(args, _PRODUCTS[name])
    if name == "linear":  # of a packed weight; torch takes its own apart
        rows, columns = args[1].shape
        return {"m": int(args[0].numel()) // int(columns), "n": int(rows), "k": int(columns)}
    if name in _CONVOLUTIONS:
        return _winograd(args)
    if name in _ROWS:
        return _ROWS[name](args)
    if name.startswith("_scaled_dot_product") and "attention" in name:
        return _attention(name, args)
    return None


def argument_dims(target: Any, args: Args, kwargs: Mapping[str, Any]) -> dict[str, int]:
    """Returns sizes from the arguments of an exported op that change how eager code runs it.

    Attention with dropout: dropout = 1, since capture replaces it by the fused kernel. Grouped convolutions: groups and,
    with one input channel each, depthwise = 1.
    """
    dims: dict[str, int] = {}
    schema = getattr(target, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name not in ("dropout_p", "groups"):
            continue
        value = kwargs.get(argument.name, args[position] if position < len(args) else None)
        if argument.name == "dropout_p" and isinstance(value, float) and value > 0:
            dims["dropout"] = 1
        elif argument.name == "groups" and isinstance(value, int) and value > 1:
            dims["groups"] = value
            if len(args) > 1 and args[1].shape[1] == 1:
                dims["depthwise"] = 1
    return dims


_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}
"""Position of the left operand."""


def _product(args: Args, where: int) -> dict[str, int]:
    left, right = args[where].shape, args[where + 1].shape
    dims = {"m": int(left[-2]), "n": int(right[-1]), "k": int(left[-1])}
    if len(left) == 3:
        dims["batch"] = int(left[0])
    return dims


_CONVOLUTIONS = ("convolution", "_convolution", "convolution_overrideable", "cudnn_convolution")


def _winograd(args: Args) -> dict[str, int] | None:
    inputs, weight = args[0].shape, args[1].shape
    ones = all(step == 1 for step in (*args[3], *args[5])) if len(args) > 8 else False
    if tuple(weight[2:]) != (3, 3) or not ones or args[6] or args[8] != 1 or len(inputs) != 4:
        return None
    height, width = (int(size) + 2 * int(pad) - 2 for size, pad in zip(inputs[2:], (*args[4], *args[4]), strict=False))
    return {"m": int(inputs[0]) * height * width, "n": int(weight[0]), "k": 9 * int(weight[1]), "image": width}


def _attention(name: str, args: Args) -> dict[str, int] | None:
    first = 1 if name.endswith("_backward") else 0
    query, key, value = (argument.shape for argument in args[first : first + 3])
    if len(query) != 4:
        return None
    dims = {name: int(size) for name, size in zip(("batch", "heads", "queries", "width"), query, strict=True)}
    dims["keys"] = int(key[-2])
    if value[-1] != query[-1]:
        dims["value_width"] = int(value[-1])
    if True in args[_causal_at(name) : _causal_at(name) + 1]:
        dims["causal"] = 1
    return dims


@functools.cache
def _causal_at(name: str) -> int:
    """Returns the position of `is_causal`, which differs by kernel, among the arguments of fused attention."""
    return [argument.name for argument in getattr(torch.ops.aten, name).default._schema.arguments].index("is_causal")


def _rows(tensor: Any, columns: int) -> dict[str, int] | None:
    count = int(tensor.numel())
    return {"rows": count // columns, "columns": columns} if columns > 0 and count else None


def _softmax(tensor: Any, dim: int) -> dict[str, int] | None:
    last = tensor.dim() and dim % tensor.dim() == tensor.dim() - 1
    return _rows(tensor, int(tensor.shape[-1])) if last else None


_ROWS: dict[str, Callable[[Args], dict[str, int] | None]] = {
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), lambda args: _rows(args[0], prod(args[1]))),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), lambda args: _rows(args[1], prod(args[2]))),
    **dict.fromkeys(("_softmax", "_log_softmax"), lambda args: _softmax(args[0], int(args[1]))),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), lambda args: _softmax(args[0], int(args[2]))),
}


PER_ELEMENT = {"elementwise": 1.0, "reduction": 1.0, "norm": 6.0, "softmax": 5.0, "random": 2.0, "other": 1.0}
"""Operations per element of the larger of input and output, by kind; kinds that are missing count none."""

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
    tensors = (*outputs, *(argument for argument in args if isinstance(argument, torch.Tensor)))
    return rate * max((t.numel() for t in tensors if not t.is_sparse), default=0)


def _matrix(where: int) -> Formula:
    """Counts 2 m n k for a (batched) product whose left operand is argument `where`."""
    return lambda args, outputs: 2.0 * int(args[where].numel()) * int(args[where + 1].shape[-1])


def _vector(where: int) -> Formula:
    """Counts 2 m k for a product of argument `where` and a vector."""
    return lambda args, outputs: 2.0 * int(args[where].numel())


def _grouped_mm(args: Args, outputs: Sequence[torch.Tensor]) -> float:
    """Counts 2 x rows x k x n over all groups: every row meets one group, so ragged sizes do not matter."""
    left, right = args[0], args[1]
    if left.dim() == 3 and right.dim() == 2:
        return 2.0 * int(left.shape[-2]) * int(left.shape[-1]) * int(right.shape[-1])
    return 2.0 * int(left.numel()) * int(right.shape[-1])


def _convolution_forward(inputs: Sequence[int], weight: Sequence[int], output: Sequence[int], transposed: bool) -> float:
    """Counts 2 x (positions that the kernel visits) x kernel size x channels per group; the weight shape is per group."""
    positions = inputs if transposed else output
    return 2.0 * int(positions[0]) * prod(positions[2:]) * prod(weight)


def _convolution(args: Args, outputs: Sequence[torch.Tensor]) -> float:
    transposed = bool(args[6]) if len(args) > 6 else False
    return _convolution_forward(args[0].shape, args[1].shape, outputs[0].shape, transposed)


def _convolution_backward(args: Args, outputs: Sequence[torch.Tensor]) -> float:
    """Counts the FLOPs of one forward for each of input and weight gradient that is asked for."""
    gradient, inputs, weight, transposed, mask = args[0], args[1], args[2], bool(args[7]), args[10]
    once = _convolution_forward(inputs.shape, weight.shape, gradient.shape, transposed)
    return once * (int(mask[0]) + int(mask[1])) + (int(gradient.numel()) if mask[2] else 0)


def _attention_flops(first: int, products: int) -> Formula:
    """Counts `products` matrix products between [B, H, S, D] and [B, H, T, D], with the query at argument `first`."""

    def formula(args: Args, outputs: Sequence[torch.Tensor]) -> float:
        query, key, value = (args[first + i].shape for i in range(3))
        batch, heads, length, depth = (int(s) for s in query)
        target, width = int(key[-2]), int(value[-1])
        scores = products - products // 2  # products over the key depth; the others run over the value width
        return 2.0 * batch * heads * length * target * (depth * scores + width * (products // 2))

    return formula


def _recurrent_layer(args: Args, outputs: Sequence[torch.Tensor]) -> float:
    """Counts, for `mkldnn_rnn_layer`, gates x hidden x (input + hidden) products for every step and sample of one layer."""
    inputs, weight_input, weight_hidden = args[0], args[1], args[2]
    rows = inputs.numel() // int(inputs.shape[-1])
    return 2.0 * int(rows) * int(weight_input.numel() + weight_hidden.numel())


def _recurrent(inputs: int, weights: int) -> Formula:
    """Counts whole recurrent layers: every two-dimensional weight of the list at argument `weights` meets every row once."""

    def formula(args: Args, outputs: Sequence[torch.Tensor]) -> float:
        rows = args[inputs].numel() // int(args[inputs].shape[-1])
        return 2.0 * int(rows) * sum(int(w.numel()) for w in args[weights] if w.dim() == 2)

    return formula


def _selective_scan(first: int, passes: float) -> Formula:
    """Counts 9 per sample, channel, token and state: step times a, exponential, step times b times input, update, output."""
    return lambda args, outputs: passes * 9.0 * int(args[first].numel()) * int(args[first + 2].shape[-1])


def _twice(formula: Formula) -> Formula:
    return lambda args, outputs: 2.0 * formula(args, outputs)


def _trilinear(args: Args, outputs: Sequence[torch.Tensor]) -> float:
    """Counts `nn.Bilinear`: [N, 1, I, 1] x [1, O, I, J] x [N, 1, 1, J], summed over the inputs."""
    shapes = []
    for tensor, expand in zip(args[:3], args[3:6], strict=True):
        sizes = list(tensor.shape)
        for axis in expand:
            sizes.insert(int(axis), 1)
        shapes.append(sizes)
    return 2.0 * prod(max(map(int, sizes)) for sizes in zip(*shapes, strict=True))


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
        (lambda args, outputs: 2.0 * int(args[0].numel()) * int(args[1].shape[0]), ("linear", "mkldnn_linear")),
        (_grouped_mm, ("_grouped_mm", "_scaled_grouped_mm", "grouped_mm_fallback")),
        (_twice(_matrix(0)), ("grouped_mm_fallback_backward",)),
        (_convolution, ("convolution", "_convolution", "convolution_overrideable", "cudnn_convolution")),
        (_convolution_backward, ("convolution_backward",)),
        (_attention_flops(0, 2), _FUSED_ATTENTION),
        (_attention_flops(1, 5), tuple(f"{name}_backward" for name in _FUSED_ATTENTION)),
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
