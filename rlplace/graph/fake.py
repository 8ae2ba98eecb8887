"""Copies of a module and its inputs on fake CPU tensors: same tree, same ties, nothing allocated."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

SMALL_CONSTANT_BYTES = 1 << 20
"""Plain tensor attributes on the CPU up to this size stay real, so that a forward may read their values."""


def new_fake_mode() -> FakeTensorMode:
    """A fake mode that mixes with the small real constants that a forward creates or holds."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_copy(model: nn.Module, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> nn.Module:
    """Copies a module onto fake CPU tensors.

    Args:
        model: Real or meta module on any device; it is not touched.
        mode: Fake mode that owns the copies.
        dtype: Floating-point parameters and buffers take this dtype; None keeps theirs.

    Returns:
        A deep copy whose parameters, buffers and tensor attributes are fake; tied tensors stay tied.
    """
    memo: dict[int, Any] = {}
    with mode:
        for tensor in [*model.parameters(), *model.buffers()]:
            if id(tensor) not in memo:
                memo[id(tensor)] = _fake_like(tensor, dtype)
        for module in model.modules():
            for tensor in _plain_tensors(vars(module)):
                small = tensor.device.type == "cpu" and tensor.numel() * tensor.element_size() <= SMALL_CONSTANT_BYTES
                if id(tensor) not in memo:
                    # Shared, not copied: a real tensor cannot be deep-copied under the fake mode.
                    real = small and type(tensor) is torch.Tensor and tensor.grad_fn is None
                    memo[id(tensor)] = tensor if real else _fake_like(tensor, dtype)
        return copy.deepcopy(model, memo)


def fake_inputs(inputs: Any, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> Any:
    """The same nested inputs with every tensor fake and on the CPU."""

    def convert(leaf: Any) -> Any:
        return _fake_like(leaf, dtype) if isinstance(leaf, torch.Tensor) else leaf

    with mode:
        return torch.utils._pytree.tree_map(convert, inputs)


def _fake_like(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if nn.parameter.is_lazy(tensor):
        raise RuntimeError("the model has uninitialised (lazy) parameters; run one forward or give their sizes first")
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad) if tensor.requires_grad else fake


def _plain_tensors(attributes: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Tensors that a module holds outside its registered parameters and buffers, one container deep."""
    for name, value in attributes.items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        yield from (item for item in items if isinstance(item, torch.Tensor) and not isinstance(item, FakeTensor))


@contextlib.contextmanager
def any_dtype_grouped_mm() -> Iterator[None]:
    """Lets `aten._grouped_mm` run on fake tensors of any dtype.

    torch's shape rule for the op accepts bfloat16 only, although its CPU kernel also takes float32 and float16; a
    mixture-of-experts model in float32 would fail to trace.
    """
    from torch import _meta_registrations as registrations

    original = getattr(registrations, "_meta_grouped_mm_common", None)
    if original is None:
        yield
        return

    def shape_rule(mat_a: Any, mat_b: Any, scale_a: Any, scale_b: Any, offs: Any = None, *rest: Any, **named: Any) -> Any:
        if scale_a is not None or mat_a.dtype == torch.bfloat16 or mat_a.dtype != mat_b.dtype:
            return original(mat_a, mat_b, scale_a, scale_b, offs, *rest, **named)
        rows, columns = mat_a.shape[-2], mat_b.shape[-1]
        groups = (mat_a if mat_a.dim() == 3 else mat_b if mat_b.dim() == 3 else offs).shape[0]
        # Two flat operands: one product per group. One flat operand: its ragged dimension survives. None: batched.
        flat = (mat_a.dim() == 2) != (mat_b.dim() == 2)
        return mat_a.new_empty((rows, columns) if flat else (groups, rows, columns))

    registrations._meta_grouped_mm_common = shape_rule
    try:
        yield
    finally:
        registrations._meta_grouped_mm_common = original
