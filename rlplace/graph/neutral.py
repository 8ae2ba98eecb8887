"""Calls that the CPU would run in a different way than an accelerator, replaced by what an accelerator runs.

Capture uses fake CPU tensors, so that no GPU is needed. Three CPU decompositions would misstate a step on a GPU: attention
with dropout falls apart into full score matrices, dropout saves a floating-point mask instead of a byte per element, and
recurrent layers unroll over time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rlplace.graph.recurrent import WHOLE_TARGETS, run_whole


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
    **WHOLE_TARGETS,
}
"""Export IR target to replacement."""


_RECURRENT = {torch.lstm: "lstm", torch.gru: "gru", torch.rnn_tanh: "rnn_tanh", torch.rnn_relu: "rnn_relu"}


class NeutralFunctions(TorchFunctionMode):
    """The same replacements for eager code."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        if func is torch.nn.functional.dropout:
            named = {{"input": "inputs"}.get(k, k): v for k, v in kwargs.items()}
            if not named.get("inplace", args[3] if len(args) > 3 else False):
                return dropout(*args, **named)
        # The variant for packed sequences takes the batch sizes, a tensor, as its second argument and 9 arguments in all.
        if func in _RECURRENT and not kwargs and len(args) == 9 and not isinstance(args[-1], torch.Tensor) and _is_plain(args):
            return run_whole(_RECURRENT[func], *args)
        return func(*args, **kwargs)


def _is_plain(args: Any) -> bool:
    """Whether the arguments are (input, states, weights, ...) and not (data, batch sizes, states, weights, ...)."""
    return isinstance(args[2], (list, tuple)) and not isinstance(args[3], (list, tuple))
