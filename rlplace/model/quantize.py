"""Frozen weights in 4 or 8 bits: plain tensors, unpacked for the product that reads them and again in its backward.

``nf4``: NormalFloat, 4 bits in blocks of 64 (Dettmers et al., "QLoRA", 2023), packed as bitsandbytes does, whose kernel runs on
GPUs where it is installed. ``int8``: one scale a row. Scales have the dtype of the weights.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from itertools import pairwise
from typing import Any, NamedTuple, Optional

import torch
from torch import nn
from torch.nn import functional as F

from rlplace.errors import InputError, unknown_name

MaybeTensor = Optional[torch.Tensor]  # noqa: UP045 - what torch makes a schema of

FORMATS = ("nf4", "int8")
BLOCK = 64
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution, from the appendix of QLoRA."""


def _unpack(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if packed.dtype == torch.int8:
        return packed.to(scale.dtype) * scale
    if packed.is_cuda and _kernels():
        shape = (len(packed), 2 * packed.shape[1])
        absmax = scale.flatten().float()
        made: torch.Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            packed.view(-1, 1), absmax, BLOCK, "nf4", shape, scale.dtype
        )
        return made
    codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1).int()
    levels = torch.tensor(_LEVELS, dtype=scale.dtype, device=scale.device)
    return (levels[codes].unflatten(1, (-1, BLOCK)) * scale.unsqueeze(-1)).flatten(1)


@functools.cache
def _kernels() -> bool:
    try:
        import bitsandbytes  # type: ignore[import-not-found]  # noqa: F401 - which registers them
    except ImportError:
        return False
    return True


dequantize = torch.library.custom_op("rlplace::dequantize", _unpack, mutates_args=())
"""Unpacks a weight, [rows, columns] in the dtype of its scales."""


@dequantize.register_fake
def _(packed: Any, scale: Any) -> Any:
    return scale.new_empty((packed.shape[0], packed.shape[1] * (1 if packed.dtype == torch.int8 else 2)))


def _linear(
    value: torch.Tensor, weight: torch.Tensor, bias: MaybeTensor, packed: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:  # fmt: skip
    return F.linear(value, weight, bias)


frozen_linear = torch.library.custom_op("rlplace::linear", _linear, mutates_args=())
"""A product with an unpacked weight that keeps the packed one for its backward."""


@frozen_linear.register_fake
def _(value: Any, weight: Any, bias: Any, packed: Any, scale: Any) -> Any:
    return value.new_empty((*value.shape[:-1], weight.shape[0]))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[3:])


def _backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
    weight = dequantize(*ctx.saved_tensors)
    return gradient @ (weight if weight.dtype == gradient.dtype else weight.to(gradient.dtype)), None, None, None, None


frozen_linear.register_autograd(_backward, setup_context=_save)


class PackedLater(NamedTuple):
    """The origin of a packed weight, or of its scales, where that of the weight is known (`rlplace.deferred_weights`)."""

    weight: Any  # the origin of the weight: `make` returns its values, `digest` a text that differs where they do
    dtype: torch.dtype
    how: str
    part: int  # 0: the packed weight; 1: the scales

    def make(self) -> torch.Tensor:
        """Makes the values on the processor."""
        return _pack(self.weight.make().to(self.dtype), self.how)[self.part]

    def digest(self) -> str:
        """Computes a text that differs where values do."""
        return f"{self.how} {self.part} {self.dtype} {self.weight.digest()}"


class QuantizedLinear(nn.Module):
    """A frozen linear layer with packed weights.

    Args:
        linear: Real or on the meta device.
        how: One of `FORMATS`.
    """

    def __init__(self, linear: nn.Linear, how: str) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        packed, scale = _pack(linear.weight.detach(), how)
        self.packed, self.scale = nn.Parameter(packed, requires_grad=False), nn.Parameter(scale, requires_grad=False)
        if (origin := getattr(linear.weight, "deferred", None)) is not None:
            for part, parameter in enumerate((self.packed, self.scale)):
                parameter.deferred = PackedLater(origin, linear.weight.dtype, how, part)  # type: ignore[attr-defined]
        self.bias = linear.bias

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the product, [..., out], of [..., in]."""
        weight = dequantize(self.packed, self.scale)
        weight = weight if weight.dtype == value.dtype else weight.to(value.dtype)
        made: torch.Tensor = frozen_linear(value, weight, self.bias, self.packed, self.scale)
        return made


def _pack(weight: torch.Tensor, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    return (_nf4 if how == "nf4" else _int8)(weight)


def _nf4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    if weight.device.type == "meta":
        return weight.new_empty((rows, columns // 2), dtype=torch.uint8), weight.new_empty((rows, columns // BLOCK))
    blocks = weight.unflatten(1, (-1, BLOCK)).float()
    scale = blocks.abs().amax(-1).to(weight.dtype)
    between = torch.tensor([(a + b) / 2 for a, b in pairwise(_LEVELS)])
    codes = torch.bucketize(blocks / scale.float().clamp_min(1e-30).unsqueeze(-1), between).flatten(1).to(torch.uint8)
    return (codes[:, ::2] << 4) | codes[:, 1::2], scale


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return (weight / scale).round().clamp(-127, 127).to(torch.int8), scale


def quantize(module: nn.Module, how: str, keep: Collection[nn.Module] = ()) -> nn.Module:
    """Packs the weights of all frozen linear layers of a model, in place.

    Args:
        module: Real or meta module.
        how: "nf4" or "int8".
        keep: Layers that stay, such as the head.

    Returns:
        The module.

    Raises:
        InputError: Another format, no such layer, or a width that blocks do not divide.
    """
    if how not in FORMATS:
        raise unknown_name("format of weights", how, FORMATS)
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and not any(p.requires_grad for p in child.parameters()) and child not in keep
    ]
    if not found:
        raise InputError(f"{type(module).__name__} has no frozen linear layer to quantize; freeze some, as --lora r=16 does")
    for parent, name, child in found:
        if how == "nf4" and child.in_features % BLOCK:
            raise InputError(f"{name} reads {child.in_features} features, no multiple of {BLOCK}, a block of nf4; use int8")
        setattr(parent, name, QuantizedLinear(child, how))
    return module
