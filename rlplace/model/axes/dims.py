"""Sizes of the dimensions of one ATen op that its time depends on beyond FLOPs and bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

Args = Sequence[Any]


def dims_of(name: str, args: Args) -> dict[str, int] | None:
    """Named sizes of an ATen op; None for ops whose time is a matter of FLOPs and bytes alone.

    Matrix products: m, n, k and, for batched ones, batch. Convolutions of 3 x 3 with stride 1: those of the product that they
    are, and the width of the image, which decides what Winograd's tiles waste. Fused attention: batch, heads, queries, keys,
    width and, where the causal half is skipped, causal = 1. Norms and softmax over their last dimensions: rows, columns.

    Args:
        name: Op name without namespace and overload.
        args: Positional arguments as dispatched.
    """
    if name in _PRODUCTS:
        return _product(args, _PRODUCTS[name])
    if name in _CONVOLUTIONS:
        return _winograd(args)
    if name in _ROWS:
        return _ROWS[name](args)
    if name.startswith("_scaled_dot_product") and "attention" in name:
        return _attention(args, 1 if name.endswith("_backward") else 0)
    return None


def argument_dims(target: Any, args: Args, kwargs: Mapping[str, Any]) -> dict[str, int]:
    """What the arguments of an exported op change in how eager code runs it.

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


def _attention(args: Args, first: int) -> dict[str, int] | None:
    query, key = args[first].shape, args[first + 1].shape
    if len(query) != 4:
        return None
    dims = {name: int(size) for name, size in zip(("batch", "heads", "queries", "width"), query, strict=True)}
    dims["keys"] = int(key[-2])
    # The position of is_causal differs by kernel; it is the only argument that can be the value True.
    if any(argument is True for argument in args[first + 3 :]):
        dims["causal"] = 1
    return dims


def _rows(tensor: Any, columns: int) -> dict[str, int] | None:
    count = int(tensor.numel())
    return {"rows": count // columns, "columns": columns} if columns > 0 and count else None


def _layer_norm(inputs: int, shape: int) -> Callable[[Args], dict[str, int] | None]:
    def rule(args: Args) -> dict[str, int] | None:
        return _rows(args[inputs], prod(args[shape]))

    return rule


def _softmax(args: Args) -> dict[str, int] | None:
    tensor, dim = args[0], int(args[1])
    if not tensor.dim() or dim % tensor.dim() != tensor.dim() - 1:
        return None
    return _rows(tensor, int(tensor.shape[-1]))


def _softmax_backward(args: Args) -> dict[str, int] | None:
    return _softmax((args[0], args[2]))


_ROWS: dict[str, Callable[[Args], dict[str, int] | None]] = {
    "native_layer_norm": _layer_norm(0, 1),
    "native_layer_norm_backward": _layer_norm(1, 2),
    "_fused_rms_norm": _layer_norm(0, 1),
    "_fused_rms_norm_backward": _layer_norm(1, 2),
    "_softmax": _softmax,
    "_log_softmax": _softmax,
    "_softmax_backward_data": _softmax_backward,
    "_log_softmax_backward_data": _softmax_backward,
}


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
    """``"aten.add_.Tensor"`` to ``"add_"``: the name that `kind_of` takes."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 else parts[0]
