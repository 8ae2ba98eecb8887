"""LSTM, GRU and RNN layers kept whole while a step is captured.

On fake CPU tensors torch unrolls most of them into thousands of small products, which is neither what an accelerator runs
nor what a user wants to place. While capturing, each layer and direction is one op, ``rlplace::recurrent_layer``, that
exists as a shape rule only: it is never run on real data and never part of an exported graph.

Calls that the CPU would run in a different way than an accelerator, replaced by what an accelerator runs.

Capture uses fake CPU tensors, so that no GPU is needed. Three CPU decompositions would misstate a step on a GPU: attention
with dropout falls apart into full score matrices, dropout saves a floating-point mask instead of a byte per element, and
recurrent layers unroll over time.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.library import Library
from torch.overrides import TorchFunctionMode

from rlplace.model.capture.padded import FullLengths
from rlplace.model.torch_adapter import recurrent_decompositions

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@functools.cache
def _library() -> Library:
    """Defines the op once; the library object must stay alive."""
    library = Library("rlplace", "FRAGMENT")
    library.define(
        "recurrent_layer(Tensor input, Tensor hidden, Tensor? cell, Tensor[] weights, int gates)"
        " -> (Tensor output, Tensor last_hidden, Tensor last_cell, Tensor reserve)"
    )
    library.define(
        "recurrent_layer_backward(Tensor gradient, Tensor input, Tensor hidden, Tensor? cell, Tensor[] weights, Tensor output,"
        " Tensor reserve) -> (Tensor input_gradient, Tensor hidden_gradient, Tensor cell_gradient, Tensor[] weight_gradients)"
    )
    library.impl("recurrent_layer", _forward_rule, "Meta")
    library.impl("recurrent_layer_backward", _backward_rule, "Meta")
    torch.library.register_autograd("rlplace::recurrent_layer", _backward, setup_context=_save, lib=library)
    return library


def _forward_rule(inputs: Any, hidden: Any, cell: Any, weights: Sequence[Any], gates: int) -> tuple[Any, Any, Any, Any]:
    steps, samples = inputs.shape[:2]
    # Gate activations, and for the LSTM the cell state, of every step are kept for backward.
    kept = gates + (1 if cell is not None else 0)
    width = weights[1].shape[0] // gates
    return (
        inputs.new_empty((steps, samples, hidden.shape[-1])),
        hidden.new_empty(hidden.shape),
        (hidden if cell is None else cell).new_empty(hidden.shape if cell is None else cell.shape),
        inputs.new_empty((steps, samples, kept * width)),
    )


def _backward_rule(
    gradient: Any, inputs: Any, hidden: Any, cell: Any, weights: Sequence[Any], output: Any, reserve: Any
) -> tuple[Any, Any, Any, list[Any]]:
    like = hidden if cell is None else cell
    return (
        inputs.new_empty(inputs.shape),
        hidden.new_empty(hidden.shape),
        like.new_empty(like.shape),
        [w.new_empty(w.shape) for w in weights],
    )


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    layer_input, hidden, cell, weights, _ = inputs
    ctx.has_cell, ctx.count = cell is not None, len(weights)
    extra = [cell] if cell is not None else []
    ctx.save_for_backward(layer_input, hidden, output[0], output[3], *extra, *weights)


def _backward(ctx: Any, gradient: Any, hidden_gradient: Any, cell_gradient: Any, reserve_gradient: Any) -> tuple[Any, ...]:
    layer_input, hidden, output, reserve, *rest = ctx.saved_tensors
    cell = rest[0] if ctx.has_cell else None
    weights = rest[len(rest) - ctx.count :]
    result = torch.ops.rlplace.recurrent_layer_backward(gradient, layer_input, hidden, cell, weights, output, reserve)
    return result[0], result[1], result[2] if ctx.has_cell else None, result[3], None


def run_whole(kind: str, inputs: Any, states: Any, parameters: Sequence[Any], *options: Any) -> tuple[Any, ...]:
    """What ``aten.{kind}.input`` returns, with each layer and direction as one op.

    Args:
        kind: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        inputs: [T, B, I], or [B, T, I] with `batch_first`.
        states: Initial hidden state [L, B, H], for the LSTM a pair of hidden and cell state.
        parameters: Weights of all layers and directions, in torch's order.
        options: has_biases, num_layers, dropout, train, bidirectional, batch_first.
    """
    _library()
    _, layers, dropout, train, bidirectional, batch_first = options
    directions = 2 if bidirectional else 1
    each = len(parameters) // (layers * directions)
    hidden, cell = (states[0], states[1]) if kind == "lstm" else (states, None)
    value = inputs.transpose(0, 1) if batch_first else inputs
    last_hidden, last_cell = [], []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            weights = list(parameters[index * each : (index + 1) * each])
            state = None if cell is None else cell[index]
            output, final, final_cell, _ = torch.ops.rlplace.recurrent_layer(value, hidden[index], state, weights, _GATES[kind])
            outputs.append(output)
            last_hidden.append(final)
            last_cell.append(final_cell)
        value = torch.cat(outputs, -1) if directions == 2 else outputs[0]
        if dropout and train and layer < layers - 1:
            value = torch.ops.aten.native_dropout.default(value, dropout, True)[0]
    if batch_first:
        value = value.transpose(0, 1)
    if cell is None:
        return value, torch.stack(last_hidden)
    return value, torch.stack(last_hidden), torch.stack(last_cell)


@contextlib.contextmanager
def quick_recurrent_shapes() -> Iterator[None]:
    """Lets export find the output shapes of a recurrent layer without unrolling it over time."""

    def lstm(inp: Any, hidden: Any, params: Any, has_biases: Any, reverse: bool = False) -> Any:
        hx, cx = hidden[0], hidden[1]
        return inp.new_empty((*inp.shape[:2], hx.shape[-1])), (hx.new_empty(hx.shape), cx.new_empty(cx.shape))

    def rnn(inp: Any, hidden: Any, params: Any, has_biases: Any, hidden_fn: Any, reverse: bool = False) -> Any:
        return inp.new_empty((*inp.shape[:2], hidden.shape[-1])), hidden.new_empty(hidden.shape)

    quick: dict[str, Any] = {"one_layer_lstm": lstm, "one_layer_rnn": rnn}
    with recurrent_decompositions(quick):
        yield


def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **named: Any) -> Any:
    """Attention with dropout costs what it costs without, in time and memory: the fused kernels draw it on the fly."""
    return torch.ops.aten.scaled_dot_product_attention.default(query, key, value, attn_mask, 0.0, *rest, **named)


def dropout(inputs: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Dropout as the one fused kernel that saves one byte per element."""
    if not training or not 0.0 < p < 1.0 or inplace or inputs.numel() == 0:
        return torch.ops.aten.dropout.default(inputs, p, training)
    return torch.ops.aten.native_dropout.default(inputs, p, training)[0]


REPLACED_TARGETS = {
    torch.ops.aten.scaled_dot_product_attention.default: attention,
    torch.ops.aten.dropout.default: dropout,
    **{getattr(torch.ops.aten, kind).input: functools.partial(run_whole, kind) for kind in _GATES},
}
"""Export IR target to replacement."""


_RECURRENT = {getattr(torch, kind): kind for kind in _GATES}


class NeutralFunctions(TorchFunctionMode):
    """The same replacements for eager code, and sequences of full lengths.

    Args:
        guesses: Counts calls whose result depends on lengths.
    """

    def __init__(self, guesses: Counter[str]) -> None:
        super().__init__()
        self._lengths = FullLengths(guesses)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        if func is torch.nn.functional.dropout:
            named = {{"input": "inputs"}.get(k, k): v for k, v in kwargs.items()}
            if not named.get("inplace", args[3] if len(args) > 3 else False):
                return dropout(*args, **named)
        if (full := self._lengths.replacement(func, args)) is not None:
            return full(*args, **kwargs)
        if func in _RECURRENT and not kwargs and len(args) == 9 and self._lengths.packed(args[1]):
            return self._lengths.whole(functools.partial(run_whole, _RECURRENT[func]), args)
        # The variant for packed sequences takes the batch sizes, a tensor, as its second argument and 9 arguments in all.
        if func in _RECURRENT and not kwargs and len(args) == 9 and not isinstance(args[-1], torch.Tensor) and _is_plain(args):
            return run_whole(_RECURRENT[func], *args)
        return func(*args, **kwargs)


def _is_plain(args: Any) -> bool:
    """Returns whether the arguments are (input, states, weights, ...) and not (data, batch sizes, states, weights, ...)."""
    return isinstance(args[2], (list, tuple)) and not isinstance(args[3], (list, tuple))
