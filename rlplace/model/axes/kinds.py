"""Which class of kernel an ATen op belongs to (`OP_KINDS`), by its name."""

from __future__ import annotations

import functools

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
    """Kind of an ATen op.

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
