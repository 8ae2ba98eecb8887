"""Mamba's selective scan kept whole: one op instead of a Python loop over the sequence.

Without its CUDA kernels, transformers runs the scan as a loop, which export would unroll into a dozen ops per token and
layer. While a module is exported, that function is replaced by the op ``rlplace::selective_scan``. It computes the same
numbers on any device, so an exported graph that holds it can be run and trained.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Optional
from unittest import mock

import torch

MaybeTensor = Optional[torch.Tensor]  # noqa: UP045 (torch reads schemas off annotations, older versions only in this spelling)
_TYPE, _MODULE, _NAME = "mamba", "transformers.models.mamba.modeling_mamba", "mamba_selective_scan"


def _scan(
    inputs: torch.Tensor, step: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    d: MaybeTensor, gate: MaybeTensor, bias: MaybeTensor, softplus: bool,
) -> torch.Tensor:  # fmt: skip
    """Selective scan; shapes are inputs, step, gate [B, D, L]; a [D, N]; b, c [B, N, L]; d, bias [D]."""
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
    return [t.new_empty(t.shape) for t in (inputs, step, a, b, c, d, gate, bias) if t is not None]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.is_tensor = [t is not None for t in inputs[:8]]
    ctx.softplus = inputs[8]
    ctx.save_for_backward(*(t for t in inputs[:8] if t is not None))


def _backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    operands = [next(saved) if is_tensor else None for is_tensor in ctx.is_tensor]
    gradients = iter(torch.ops.rlplace.selective_scan_backward(gradient, *operands, ctx.softplus))
    return (*(next(gradients) if is_tensor else None for is_tensor in ctx.is_tensor), None)


selective_scan.register_autograd(_backward, setup_context=_save)


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
