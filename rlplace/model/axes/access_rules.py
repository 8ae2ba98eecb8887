"""Iteration spaces of the ATen ops that can be cut, by op name; see `rlplace.model.axes.access`.

Dimension names: m rows (m0, m1, ... where the input has several leading dimensions), n output columns, k reduced,
v vocabulary; b batch, c input channels, n output channels, h and w positions; batch, heads, queries of attention; d0, d1, ...
of element-wise ops. Windows (h, w of convolutions and poolings) are not named, since their parts overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from rlplace.model.axes.access import IterationSpace, Rule, numbered, tensors_in

Args = Sequence[Any]


def elementwise(space: IterationSpace, args: Args, result: Any) -> bool:
    """Names one dimension for each of the result; arguments are aligned at the right, broadcast ones stay whole."""
    output = next(tensors_in(result), None)
    if output is None or output.dim() == 0:
        return False
    names = numbered("d", output.dim())
    for tensor in [*tensors_in(args), *tensors_in(result)]:
        if tensor.dim() > output.dim():
            return False
        tail = output.shape[output.dim() - tensor.dim() :]
        if any(size not in (1, whole) for size, whole in zip(tensor.shape, tail, strict=True)):
            return False
        own = names[output.dim() - tensor.dim() :]
        space.add(tensor, [name if size == whole else "" for name, size, whole in zip(own, tensor.shape, tail, strict=True)])
    return True


def _linear(space: IterationSpace, args: Args, result: Any) -> bool:
    inputs, weight, bias = args[0], args[1], args[2] if len(args) > 2 else None
    rows = numbered("m", inputs.dim() - 1)
    space.add(inputs, [*rows, "k"])
    space.add(weight, ["n", "k"])
    space.add(bias, ["n"])
    space.add(result, [*rows, "n"])
    return bool(weight.dim() == 2)


def _addmm(space: IterationSpace, args: Args, result: Any) -> bool:
    bias = args[0]
    if bias.dim() in (1, 2):
        space.add(bias, ["m", "n"][2 - bias.dim() :] if bias.dim() == 1 or bias.shape[0] > 1 else ["", "n"])
    return _matmul(space, args[1:], result)


def _matmul(space: IterationSpace, args: Args, result: Any) -> bool:
    left, right = args[0], args[1]
    if left.dim() < 2 or right.dim() < 2:
        return False
    if right.dim() == 2:
        rows = numbered("m", left.dim() - 1)
        space.add(left, [*rows, "k"])
        space.add(right, ["k", "n"])
        space.add(result, [*rows, "n"])
        return True
    lead = numbered("b", result.dim() - 2)
    for tensor, last in ((left, ["m", "k"]), (right, ["k", "n"]), (result, ["m", "n"])):
        own = lead[len(lead) - (tensor.dim() - 2) :]
        whole = result.shape[result.dim() - tensor.dim() : -2]
        named = [name if size == full else "" for name, size, full in zip(own, tensor.shape[:-2], whole, strict=True)]
        space.add(tensor, [*named, *last])
    return True


def _baddbmm(space: IterationSpace, args: Args, result: Any) -> bool:
    if args[0].shape == result.shape:
        space.add(args[0], ["b", "m", "n"])
    return _matmul(space, args[1:], result)


def _attention(space: IterationSpace, args: Args, result: Any) -> bool:
    query, key, value = args[:3]
    output = next(tensors_in(result), None)
    if output is None or query.dim() != 4 or key.dim() != 4:
        return False
    heads, shared = int(query.shape[1]), int(key.shape[1])
    names = ["batch", "heads", "queries", ""]
    grouped = shared > 1 and heads != shared and heads % shared == 0
    if grouped:  # query heads in groups that share a head of keys and values
        names.insert(2, "group")
    elif heads != shared > 1:
        names[1] = ""
    for tensor in (query, output):
        space.add(tensor.unflatten(1, (shared, -1)) if grouped else tensor, names)
    for tensor in (key, value):
        batch = "batch" if tensor.shape[0] == query.shape[0] else ""
        space.add(tensor, [batch, names[1] if grouped or shared == heads else "", "", ""])
    mask = args[3] if len(args) > 3 else None
    if isinstance(mask, torch.Tensor) and mask.dim() == 4:
        named = ["batch", "" if grouped else names[1], "queries"]
        sizes = zip(named, mask.shape, query.shape, strict=False)
        space.add(mask, [*(name if size == whole else "" for name, size, whole in sizes), ""])
    return True


def _convolution(space: IterationSpace, args: Args, result: Any) -> bool:
    inputs, weight, bias = args[:3]
    spatial = inputs.dim() - 2
    if len(args) > 6 and args[6] is True:  # transposed
        return False
    if spatial < 1 or weight.dim() != inputs.dim() or result.dim() != inputs.dim():
        return False
    dense = weight.shape[1] == inputs.shape[1]  # one group; grouped ones tie input and output channels together
    output_channels, input_channels = ("n", "c") if dense else ("", "")
    space.add(inputs, ["b", input_channels, *[""] * spatial])
    space.add(weight, [output_channels, input_channels, *[""] * spatial])
    space.add(bias, [output_channels])
    space.add(result, ["b", output_channels, *[""] * spatial])
    return True


def _pool(space: IterationSpace, args: Args, result: Any) -> bool:
    output = next(tensors_in(result), None)
    if output is None or output.dim() != args[0].dim() or output.dim() < 3:
        return False
    names = ["b", "c"] if output.dim() > 3 or output.shape[0] == args[0].shape[0] else ["", ""]
    for tensor in [args[0], *tensors_in(result)]:
        space.add(tensor, [*names, *[""] * (output.dim() - 2)])
    return True


def _layer_norm(space: IterationSpace, args: Args, result: Any) -> bool:
    inputs = args[0]
    width = len(args[1])
    rows = numbered("m", inputs.dim() - width) if inputs.dim() > width else ()
    columns = numbered("c", width)
    outputs = list(tensors_in(result))
    space.add(inputs, [*rows, *columns])
    for weight in list(tensors_in(args[1:]))[:2]:
        space.add(weight, columns)
    space.add(outputs[0], [*rows, *columns])
    space.statistics.append((rows, 8 * prod(inputs.shape[: inputs.dim() - width])))  # mean and variance in float32
    return True


def _batch_norm(space: IterationSpace, args: Args, result: Any) -> bool:
    inputs = args[0]
    output = next(tensors_in(result), None)
    if inputs.dim() < 2 or output is None:
        return False
    names = ["b", "c", "h", "w", "t"][: inputs.dim()]
    space.add(inputs, names)
    for weight in args[1:5]:
        space.add(weight, ["c"])
    space.add(output, names)
    if any(value is True for value in args[5:7]):
        space.statistics.append((("c",), 8 * int(inputs.shape[1])))
    return True


def _softmax(space: IterationSpace, args: Args, result: Any) -> bool:
    inputs = args[0]
    if inputs.dim() == 0:
        return False
    names = numbered("d", inputs.dim())
    dim = int(args[1]) % inputs.dim()
    space.add(inputs, names)
    space.add(result, names)
    space.statistics.append((tuple(n for i, n in enumerate(names) if i != dim), 8 * inputs.numel() // int(inputs.shape[dim])))
    return True


def _cross_entropy(space: IterationSpace, args: Args, result: Any) -> bool:
    inputs, target = args[:2]
    if inputs.dim() < 2 or target.dim() != inputs.dim() - 1:
        return False
    rest = numbered("d", inputs.dim() - 2) if inputs.dim() > 2 else ()
    space.add(inputs, ["m", "v", *rest])
    space.add(target, ["m", *rest])
    space.add(result, [""] * result.dim() if result.dim() == 0 else ["m", *rest])
    space.statistics.append((("m", *rest), 8 * target.numel()))
    return True


def _picked(space: IterationSpace, args: Args, result: Any) -> bool:
    """Picks log-likelihoods of targets; a part of the vocabulary has those of its own targets."""
    inputs, target = args[:2]
    outputs = list(tensors_in(result))
    if inputs.dim() != 2 or target.dim() != 1 or not outputs:
        return False
    space.add(inputs, ["m", "v"])
    space.add(target, ["m"])
    for tensor in outputs:
        space.add(tensor, ["m"][: tensor.dim()])
    return True


def _embedding(space: IterationSpace, args: Args, result: Any) -> bool:
    weight, rows = args[:2]
    names = numbered("m", rows.dim()) if rows.dim() else ()
    space.add(weight, ["v", "n"])
    space.add(rows, names)
    space.add(result, [*names, "n"])
    return True


def _reduce(space: IterationSpace, args: Args, result: Any) -> bool:
    """Names all dimensions of sums and means: reduced ones can be cut, as partial sums add up."""
    inputs, dims = args[0], args[1] if len(args) > 1 else None
    if inputs.dim() == 0 or not isinstance(result, torch.Tensor):
        return False
    over = {int(d) % inputs.dim() for d in dims} if isinstance(dims, (list, tuple)) and dims else set(range(inputs.dim()))
    names = numbered("d", inputs.dim())
    space.add(inputs, names)
    if result.dim() == inputs.dim():
        space.add(result, ["" if i in over else name for i, name in enumerate(names)])
    else:
        space.add(result, [name for i, name in enumerate(names) if i not in over])
    return True


def _made_up(space: IterationSpace, args: Args, result: Any) -> bool:
    """Names all dimensions of constants and ranges: each device makes its own part."""
    space.add(result, numbered("d", result.dim()) if result.dim() else ())
    return bool(result.dim())


def _loss(space: IterationSpace, args: Args, result: Any) -> bool:
    """Names the dimensions of losses of two tensors of one shape, element by element or summed up."""
    inputs, target = args[:2]
    if inputs.shape != target.shape or result.dim() not in (0, inputs.dim()):
        return False
    names = numbered("d", inputs.dim())
    space.add(inputs, names)
    space.add(target, names)
    space.add(result, names if result.dim() else ())
    return True


def _joined(space: IterationSpace, args: Args, result: Any) -> bool:
    """Names the dimensions of concatenated or stacked tensors apart from the joined one."""
    dim = (int(args[1]) if len(args) > 1 and args[1] is not None else 0) % result.dim()
    names = ["" if i == dim else f"d{i}" for i in range(result.dim())]
    for tensor in tensors_in(args[0]):
        space.add(tensor, names if tensor.dim() == result.dim() else names[:dim] + names[dim + 1 :])
    space.add(result, names)
    return True


def _pad(space: IterationSpace, args: Args, result: Any) -> bool:
    """Names the dimensions without padding."""
    names = [f"d{i}" if a == b else "" for i, (a, b) in enumerate(zip(args[0].shape, result.shape, strict=True))]
    space.add(args[0], names)
    space.add(result, names)
    return True


def _recurrent(space: IterationSpace, args: Args, result: Any) -> bool:
    """Names the batch alone: all layers and steps are one op."""
    batch_first = args[-1] is True
    inputs, states = args[0], args[1]
    names = ["b", "", ""] if batch_first else ["", "b", ""]
    outputs = list(tensors_in(result))
    if inputs.dim() != 3 or outputs[0].dim() != 3:
        return False
    space.add(inputs, names)
    space.add(outputs[0], names)
    for state in [*tensors_in(states), *outputs[1:]]:
        space.add(state, ["", "b", ""][: state.dim()])
    return True


RULES: dict[str, Rule] = {
    "linear": _linear, "mm": _matmul, "addmm": _addmm, "matmul": _matmul, "bmm": _matmul, "baddbmm": _baddbmm,
    "scaled_dot_product_attention": _attention, "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention, "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "conv1d": _convolution, "conv2d": _convolution, "conv3d": _convolution, "convolution": _convolution,
    "max_pool2d": _pool, "avg_pool2d": _pool, "adaptive_avg_pool2d": _pool, "max_pool2d_with_indices": _pool,
    "max_pool1d": _pool, "avg_pool1d": _pool, "adaptive_max_pool2d": _pool,
    "layer_norm": _layer_norm, "native_layer_norm": _layer_norm, "rms_norm": _layer_norm,
    "batch_norm": _batch_norm, "native_batch_norm": _batch_norm,
    "softmax": _softmax, "_softmax": _softmax, "log_softmax": _softmax, "_log_softmax": _softmax,
    "cross_entropy_loss": _cross_entropy, "nll_loss_forward": _picked, "nll_loss": _picked, "nll_loss_nd": _picked,
    "embedding": _embedding,
    "mean": _reduce, "sum": _reduce,
    "mse_loss": _loss, "l1_loss": _loss, "smooth_l1_loss": _loss, "huber_loss": _loss,
    "binary_cross_entropy_with_logits": _loss,
    **dict.fromkeys(("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "arange"), _made_up),
    "cat": _joined, "concat": _joined, "stack": _joined,
    "pad": _pad, "constant_pad_nd": _pad,
    "lstm": _recurrent, "gru": _recurrent, "rnn_tanh": _recurrent, "rnn_relu": _recurrent,
}  # fmt: skip
"""Op name to rule."""
