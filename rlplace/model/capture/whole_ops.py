"""Calls that torch takes apart, or that depend on values, kept whole as one op while a step is captured.

Capture uses fake CPU tensors, so that no GPU is needed. CPU decompositions would misstate a step on a GPU: attention with
dropout falls apart into full score matrices, dropout saves a floating-point mask instead of a byte per element, and recurrent
layers unroll over time into thousands of small products. `NeutralFunctions` and `REPLACED_TARGETS` run what an accelerator
runs.

* Each layer and direction of an LSTM, GRU or RNN is one op, ``rlplace::recurrent_layer``. CTC is one op, ``rlplace::ctc_loss``.
  Both are shape rules only: they never run on real data and are never part of an exported graph.
* How much packed sequences and CTC compute depends on lengths, which fake tensors have no values of. Full lengths are the most
  work and memory that the step can take, so that a plan is valid for every batch; the capture notes the guess (`FullLengths`).
* Without its CUDA kernels, transformers runs Mamba's selective scan as a loop, a dozen ops per token and layer. While a module
is
  exported, that function is replaced by the op ``rlplace::selective_scan``. It computes the same numbers on any device, so an
  exported graph with it can be run and trained.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional
from unittest import mock

import torch
from torch.library import Library
from torch.overrides import TorchFunctionMode

from rlplace.model.torch_adapter import packed_sequence_functions, recurrent_decompositions

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


@functools.cache
def _library() -> Library:
    """Defines the ops that are shape rules, once; the library object must stay alive."""
    library = Library("rlplace", "FRAGMENT")
    for schema, shapes in (
        (
            "recurrent_layer(Tensor input, Tensor hidden, Tensor? cell, Tensor[] weights, int gates)"
            " -> (Tensor output, Tensor last_hidden, Tensor last_cell, Tensor reserve)",
            _recurrent_shapes,
        ),
        (
            "recurrent_layer_backward(Tensor gradient, Tensor input, Tensor hidden, Tensor? cell, Tensor[] weights,"
            " Tensor output, Tensor reserve)"
            " -> (Tensor input_gradient, Tensor hidden_gradient, Tensor cell_gradient, Tensor[] weight_gradients)",
            _recurrent_gradient_shapes,
        ),
        ("ctc_loss(Tensor log_probs, Tensor targets, int samples, int labels) -> (Tensor loss, Tensor alpha)", _ctc_shapes),
        (
            "ctc_loss_backward(Tensor gradient, Tensor log_probs, Tensor targets, Tensor loss, Tensor alpha) -> Tensor",
            lambda gradient, log_probs, *rest: torch.empty_like(log_probs),
        ),
    ):
        library.define(schema)
        library.impl(schema.partition("(")[0], shapes, "Meta")
    register = functools.partial(torch.library.register_autograd, lib=library)
    register("rlplace::recurrent_layer", _recurrent_backward, setup_context=_save_recurrent)
    register("rlplace::ctc_loss", _ctc_backward, setup_context=_save_ctc)
    return library


def _recurrent_shapes(inputs: Any, hidden: Any, cell: Any, weights: Sequence[Any], gates: int) -> tuple[Any, Any, Any, Any]:
    # Gate activations, and for the LSTM the cell state, of every step are saved for backward.
    saved = (gates + (cell is not None)) * (weights[1].shape[0] // gates)
    output, reserve = (inputs.new_empty((*inputs.shape[:2], width)) for width in (hidden.shape[-1], saved))
    return output, _like(hidden), _like(hidden if cell is None else cell), reserve


def _recurrent_gradient_shapes(
    gradient: Any, inputs: Any, hidden: Any, cell: Any, weights: Sequence[Any], output: Any, reserve: Any
) -> tuple[Any, Any, Any, list[Any]]:
    return _like(inputs), _like(hidden), _like(hidden if cell is None else cell), [_like(w) for w in weights]


def _like(tensor: Any) -> Any:
    return tensor.new_empty(tensor.shape)


def _save_recurrent(ctx: Any, inputs: Any, output: Any) -> None:
    layer_input, hidden, cell, weights, _ = inputs
    ctx.has_cell, ctx.count = cell is not None, len(weights)
    ctx.save_for_backward(layer_input, hidden, output[0], output[3], *([] if cell is None else [cell]), *weights)


def _recurrent_backward(
    ctx: Any, gradient: Any, hidden_gradient: Any, cell_gradient: Any, reserve_gradient: Any
) -> tuple[Any, ...]:
    layer_input, hidden, output, reserve, *rest = ctx.saved_tensors
    cell = rest[0] if ctx.has_cell else None
    weights = rest[len(rest) - ctx.count :]
    result = torch.ops.rlplace.recurrent_layer_backward(gradient, layer_input, hidden, cell, weights, output, reserve)
    return result[0], result[1], result[2] if ctx.has_cell else None, result[3], None


def run_whole(kind: str, inputs: Any, states: Any, parameters: Sequence[Any], *options: Any) -> tuple[Any, ...]:
    """Returns the result of ``aten.{kind}.input``, with each layer and direction as one op.

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
        return inp.new_empty((*inp.shape[:2], hidden[0].shape[-1])), (_like(hidden[0]), _like(hidden[1]))

    def rnn(inp: Any, hidden: Any, params: Any, has_biases: Any, hidden_fn: Any, reverse: bool = False) -> Any:
        return inp.new_empty((*inp.shape[:2], hidden.shape[-1])), _like(hidden)

    with recurrent_decompositions({"one_layer_lstm": lstm, "one_layer_rnn": rnn}):
        yield


def _ctc_shapes(log_probs: Any, targets: Any, samples: int, labels: int) -> tuple[Any, Any]:
    return log_probs.new_empty((samples,)), log_probs.new_empty((samples, log_probs.shape[0], 2 * labels + 1))


def _save_ctc(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], *output)


def _ctc_backward(ctx: Any, gradient: Any, alpha_gradient: Any) -> tuple[Any, ...]:
    return torch.ops.rlplace.ctc_loss_backward(gradient, *ctx.saved_tensors), None, None, None


def _ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Any:
    _library()
    samples = log_probs.shape[1] if log_probs.dim() == 3 else 1
    labels = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // samples)
    loss, _ = torch.ops.rlplace.ctc_loss(log_probs, targets, samples, labels)
    if reduction in ("none", 0):
        return loss if log_probs.dim() == 3 else loss[0]
    return loss.mean() if reduction in ("mean", 1) else loss.sum()


class FullLengths:
    """Calls of torch whose result depends on the lengths of sequences, replaced.

    Args:
        guesses: Counts the calls that were replaced.
    """

    def __init__(self, guesses: Counter[str]) -> None:
        self._guesses = guesses
        self._batch_sizes: list[Any] = []
        pack, unpack = packed_sequence_functions()
        self._replaced: dict[Any, Callable[..., Any]] = {
            torch.nn.functional.ctc_loss: self._guessed("ctc_loss", _ctc_loss),
            torch.ctc_loss: self._guessed("ctc_loss", _ctc_loss),
            pack: self._guessed("pack_padded_sequence", self._pack),
            unpack: self._unpack,
        }

    def replacement(self, func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """Returns the function to call in place of a function; None: itself."""
        if func is torch.Tensor.__getitem__ and self.packed(args[0]):
            return lambda sizes, index: self._samples(sizes) if isinstance(index, int) else sizes
        return self._replaced.get(func)

    def packed(self, value: Any) -> bool:
        """Returns whether a value is the batch sizes of a packed sequence that was made here."""
        return any(value is sizes for sizes, _ in self._batch_sizes)

    def whole(self, run: Callable[..., tuple[Any, ...]], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns a recurrent layer over a packed sequence, as one over all its steps.

        Args:
            run: The layer, as `torch.lstm` is called with padded sequences.
            args: The arguments of `torch.lstm` for packed ones.
        """
        data, sizes, states, parameters, *options = args
        steps = data.unflatten(0, (sizes.shape[0], self._samples(sizes)))
        output, *last = run(steps, states, parameters, *options, False)
        return output.flatten(0, 1), *last

    def _guessed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._guesses[name] += 1
            return call(*args, **kwargs)

        return counted

    def _samples(self, sizes: Any) -> int:
        return next(samples for known, samples in self._batch_sizes if sizes is known)

    def _pack(self, padded: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:
        steps = padded.transpose(0, 1) if batch_first else padded
        sizes = lengths.new_empty((steps.shape[0],))
        self._batch_sizes.append((sizes, int(steps.shape[1])))
        return steps.flatten(0, 1), sizes

    def _unpack(self, data: Any, sizes: Any, batch_first: bool, value: float, total: int) -> tuple[Any, Any]:
        samples = self._samples(sizes)
        steps = data.unflatten(0, (sizes.shape[0], samples))
        if total > steps.shape[0]:
            steps = torch.cat([steps, steps.new_full((total - steps.shape[0], *steps.shape[1:]), value)])
        return steps.transpose(0, 1) if batch_first else steps, sizes.new_empty((samples,))


def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, **named: Any
) -> Any:
    """Runs attention without its dropout, which costs nothing: the fused kernels draw it on the fly.

    Values of another width than queries, as in multi-head latent attention, have no fused kernel on processors, but on
    accelerators (`rlplace.cost.scaled.slower_attention`), for widths that 8 divides.
    """
    aten, widths = torch.ops.aten, (query.shape[-1], value.shape[-1])
    plain = query.dim() != 4 or query.shape[-1] != key.shape[-1] or (attn_mask is not None and attn_mask.requires_grad)
    if plain or widths[0] == widths[1] or any(width % 8 for width in widths):
        return aten.scaled_dot_product_attention.default(query, key, value, attn_mask, 0.0, is_causal, **named)
    if torch.is_autocast_enabled("cpu"):
        low, operands = torch.get_autocast_dtype("cpu"), (query, key, value, attn_mask)
        query, key, value, attn_mask = (one if one is None or one.dtype != torch.float32 else one.to(low) for one in operands)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
    fused = aten._scaled_dot_product_cudnn_attention.default
    return fused(query, key, value, attn_mask, True, 0.0, is_causal, scale=named.get("scale"))[0]


def dropout(inputs: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Runs dropout as the one fused kernel that saves one byte per element."""
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
        if func in _RECURRENT and not kwargs and len(args) == 9:
            if self._lengths.packed(args[1]):
                return self._lengths.whole(functools.partial(run_whole, _RECURRENT[func]), args)
            # Arguments are (input, states, weights, ...), or (data, batch sizes, states, weights, ...) of packed sequences.
            if isinstance(args[2], (list, tuple)) and not isinstance(args[3], (list, tuple, torch.Tensor)):
                return run_whole(_RECURRENT[func], *args)
        return func(*args, **kwargs)


MaybeTensor = Optional[torch.Tensor]  # noqa: UP045 (torch reads schemas off annotations, older versions only in this spelling)
_TYPE, _MODULE, _NAME = "mamba", "transformers.models.mamba.modeling_mamba", "mamba_selective_scan"


def _scan(
    inputs: torch.Tensor, step: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    d: MaybeTensor, gate: MaybeTensor, bias: MaybeTensor, softplus: bool,
) -> torch.Tensor:  # fmt: skip
    """Runs the selective scan; shapes are inputs, step, gate [B, D, L]; a [D, N]; b, c [B, N, L]; d, bias [D]."""
    size = step if bias is None else step + bias.to(step.dtype)[..., None]
    size = torch.nn.functional.softplus(size) if softplus else size
    state, outputs = inputs.new_zeros((inputs.shape[0], inputs.shape[1], a.shape[-1])), []
    for token in range(inputs.shape[-1]):  # state = exp(size a) state + size b input, output c state
        now = size[:, :, token, None]
        drive = now * b[:, None, :, token].float() * inputs[:, :, token, None].float()
        state = torch.exp(a * now) * state + drive
        outputs.append(torch.matmul(state.to(inputs.dtype), c[:, :, token, None])[..., 0])
    result = torch.stack(outputs, dim=-1)
    if d is not None:
        result = result + inputs * d[None, :, None]
    return result if gate is None else result * torch.nn.functional.silu(gate)


selective_scan = torch.library.custom_op("rlplace::selective_scan", _scan, mutates_args=())


@torch.library.custom_op("rlplace::selective_scan_backward", mutates_args=())
def selective_scan_backward(
    gradient: torch.Tensor, inputs: torch.Tensor, step: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    d: MaybeTensor, gate: MaybeTensor, bias: MaybeTensor, softplus: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """Returns gradients of the operands that are tensors, in order; the states are computed again, as the fused kernel does."""
    operands = (inputs, step, a, b, c, d, gate, bias)

    def scan_of(*tensors: torch.Tensor) -> torch.Tensor:
        rest = iter(tensors)
        own: list[Any] = [*(None if tensor is None else next(rest) for tensor in operands), softplus]
        return _scan(*own)

    gradients = torch.func.vjp(scan_of, *(tensor for tensor in operands if tensor is not None))[1]
    return [value.clone(memory_format=torch.contiguous_format) for value in gradients(gradient)]


@selective_scan.register_fake
def _(inputs: Any, step: Any, a: Any, b: Any, c: Any, d: Any, gate: Any, bias: Any, softplus: bool) -> Any:
    return inputs.new_empty(inputs.shape, dtype=torch.promote_types(inputs.dtype, inputs.dtype if d is None else d.dtype))


@selective_scan_backward.register_fake
def _(gradient: Any, inputs: Any, step: Any, a: Any, b: Any, c: Any, d: Any, gate: Any, bias: Any, softplus: bool) -> Any:
    return [_like(t) for t in (inputs, step, a, b, c, d, gate, bias) if t is not None]


def _save_scan(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.is_tensor = [t is not None for t in inputs[:8]]
    ctx.softplus = inputs[8]
    ctx.save_for_backward(*(t for t in inputs[:8] if t is not None))


def _scan_backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    operands = [next(saved) if is_tensor else None for is_tensor in ctx.is_tensor]
    gradients = iter(torch.ops.rlplace.selective_scan_backward(gradient, *operands, ctx.softplus))
    return (*(next(gradients) if is_tensor else None for is_tensor in ctx.is_tensor), None)


selective_scan.register_autograd(_scan_backward, setup_context=_save_scan)


def keeps_whole(module_type: str) -> bool:
    """Returns whether the scan of a transformers type is kept whole with the installed version of the library."""
    import importlib

    with contextlib.suppress(ImportError):
        return module_type == _TYPE and hasattr(importlib.import_module(_MODULE), _NAME)
    return False


@contextlib.contextmanager
def whole_scans() -> Iterator[None]:
    """Replaces the library's scan where it is loaded."""
    module = sys.modules.get(_MODULE)
    original = getattr(module, _NAME, None)
    with mock.patch.object(module, _NAME, _replacement(original)) if original is not None else contextlib.nullcontext():
        yield


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    def scan(
        hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, delta_bias: Any = None,
        delta_softplus: bool = False, return_last_state: bool = False, **named: Any,
    ) -> Any:  # fmt: skip
        if return_last_state:
            return original(hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, **named)
        return torch.ops.rlplace.selective_scan(hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus)

    return scan
