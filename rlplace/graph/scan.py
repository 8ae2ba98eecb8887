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

import torch

MaybeTensor = Optional[torch.Tensor]  # noqa: UP045 (torch reads schemas off annotations, older versions only in this spelling)
_PLACES = (("transformers.models.mamba.modeling_mamba", "mamba_selective_scan"),)


def _step_sizes(step: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Step sizes before and after the softplus."""
    raw = step if bias is None else step + bias.to(step.dtype)[..., None]
    return raw, torch.nn.functional.softplus(raw) if softplus else raw


def _states(inputs: torch.Tensor, size: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    """The recurrence state = exp(size a) state + size b input; [B, D, N] per token, the initial zeros first."""
    states = [inputs.new_zeros((inputs.shape[0], inputs.shape[1], a.shape[-1]))]
    for token in range(inputs.shape[-1]):
        now = size[:, :, token, None]
        drive = now * b[:, None, :, token].float() * inputs[:, :, token, None].float()
        states.append(torch.exp(a * now) * states[-1] + drive)
    return states


def _read(states: list[torch.Tensor], c: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Output c state of every token, [B, D, L]."""
    outputs = [torch.matmul(state.to(dtype), c[:, :, token, None])[..., 0] for token, state in enumerate(states[1:])]
    return torch.stack(outputs, dim=-1)


@torch.library.custom_op("rlplace::selective_scan", mutates_args=())
def selective_scan(
    inputs: torch.Tensor, step: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    d: MaybeTensor, gate: MaybeTensor, bias: MaybeTensor, softplus: bool,
) -> torch.Tensor:  # fmt: skip
    """Selective scan; shapes are inputs, step, gate [B, D, L]; a [D, N]; b, c [B, N, L]; d, bias [D]."""
    _, size = _step_sizes(step, bias, softplus)
    result = _read(_states(inputs, size, a, b), c, inputs.dtype)
    if d is not None:
        result = result + inputs * d[None, :, None]
    return result if gate is None else result * torch.nn.functional.silu(gate)


@torch.library.custom_op("rlplace::selective_scan_backward", mutates_args=())
def selective_scan_backward(
    gradient: torch.Tensor, inputs: torch.Tensor, step: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor,
    d: MaybeTensor, gate: MaybeTensor, bias: MaybeTensor, softplus: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """Gradients of the tensors that are given, in order; the states are computed again, as the fused kernel does."""
    raw, size = _step_sizes(step, bias, softplus)
    states = _states(inputs, size, a, b)
    of_gate = None
    if gate is not None:
        ungated = _read(states, c, inputs.dtype)
        if d is not None:
            ungated = ungated + inputs * d[None, :, None]
        share = torch.sigmoid(gate)
        of_gate = gradient * ungated * share * (1 + gate * (1 - share))
        gradient = gradient * gate * share
    of_inputs = gradient * d[None, :, None] if d is not None else torch.zeros_like(inputs)
    of_size, of_a = torch.zeros_like(size), torch.zeros_like(a)
    of_b, of_c = torch.zeros_like(b), torch.zeros_like(c)
    flow = torch.zeros_like(states[0])
    for token in reversed(range(inputs.shape[-1])):
        now, value = size[:, :, token, None], inputs[:, :, token, None]
        above = gradient[:, :, token, None]
        of_c[:, :, token] = (above * states[token + 1]).sum(1)
        flow = flow + above * c[:, None, :, token]
        decay = torch.exp(a * now)
        through_decay = flow * states[token] * decay
        through_drive = (flow * b[:, None, :, token]).sum(-1)
        of_a += (through_decay * now).sum(0)
        of_b[:, :, token] = (flow * now * value).sum(1)
        of_size[:, :, token] = (through_decay * a).sum(-1) + through_drive * value[..., 0]
        of_inputs[:, :, token] += through_drive * now[..., 0]
        flow = flow * decay
    of_step = of_size * torch.sigmoid(raw) if softplus else of_size
    optional = (
        (d, (gradient * inputs).sum((0, 2))),
        (gate, of_gate),
        (bias, of_step.sum((0, 2))),
    )
    present = [(tensor, value) for tensor, value in optional if tensor is not None and value is not None]
    pairs = [(inputs, of_inputs), (step, of_step), (a, of_a), (b, of_b), (c, of_c), *present]
    return [value.to(tensor.dtype).clone(memory_format=torch.contiguous_format) for tensor, value in pairs]


@selective_scan.register_fake
def _(inputs: Any, step: Any, a: Any, b: Any, c: Any, d: Any, gate: Any, bias: Any, softplus: bool) -> Any:
    return inputs.new_empty(inputs.shape, dtype=torch.promote_types(inputs.dtype, inputs.dtype if d is None else d.dtype))


@selective_scan_backward.register_fake
def _(gradient: Any, inputs: Any, step: Any, a: Any, b: Any, c: Any, d: Any, gate: Any, bias: Any, softplus: bool) -> Any:
    return [t.new_empty(t.shape) for t in (inputs, step, a, b, c, d, gate, bias) if t is not None]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.given = [t is not None for t in inputs[:8]]
    ctx.softplus = inputs[8]
    ctx.save_for_backward(*(t for t in inputs[:8] if t is not None))


def _backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)
    operands = [next(saved) if is_tensor else None for is_tensor in ctx.given]
    gradients = iter(torch.ops.rlplace.selective_scan_backward(gradient, *operands, ctx.softplus))
    return (*(next(gradients) if is_tensor else None for is_tensor in ctx.given), None)


selective_scan.register_autograd(_backward, setup_context=_save)


def keeps_whole(module_type: str) -> bool:
    """Whether the scan of a transformers type is kept whole with the installed version of the library."""
    import importlib

    for place, name in _PLACES:
        if place.split(".")[2] == module_type:
            with contextlib.suppress(ImportError):
                return hasattr(importlib.import_module(place), name)
    return False


@contextlib.contextmanager
def whole_scans() -> Iterator[None]:
    """Replaces the scan functions of the libraries that are loaded."""
    replaced: list[tuple[Any, str, Callable[..., Any]]] = []
    for place, name in _PLACES:
        module = sys.modules.get(place)
        original = getattr(module, name, None)
        if module is not None and original is not None:
            setattr(module, name, _replacement(original))
            replaced.append((module, name, original))
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    def scan(
        hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, D: Any = None, z: Any = None, delta_bias: Any = None,
        delta_softplus: bool = False, return_last_state: bool = False, **named: Any,
    ) -> Any:  # fmt: skip
        if return_last_state:
            return original(hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, return_last_state, **named)
        return torch.ops.rlplace.selective_scan(hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus)

    return scan
