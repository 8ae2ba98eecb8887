"""Capture under autocast: fake CPU tensors that follow the rules of mixed precision on a GPU.

`torch.autocast` has other lists of ops for the CPU than for CUDA; most of all, layer norms and softmaxes run in float32 on CUDA
and in bfloat16 on the CPU, which changes what a step saves for its backward. `autocast_region` enters autocast for the CPU and,
unless the CPU's own rules are wanted, puts CUDA's float32 list (aten/src/ATen/autocast_mode.h) over them for as long as it is
active. Casts are then made where CUDA makes them, inside composite ops too, and a weight is cast once per region and kept, as
torch does it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from rlplace.errors import unknown_name

DEVICES = ("cuda", "cpu")

_FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor "
    "pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim "
    "cosine_similarity "
    "poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss "
    "mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d "
    "upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d "
    "upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
).split()
"""Ops whose floating-point inputs CUDA autocast casts to float32."""

_FLOAT32_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "sum",
    "sum.dim_IntList",
)  # fmt: skip
"""Ops that CUDA autocast asks for a float32 result, unless the caller asks for a dtype."""


@contextlib.contextmanager
def autocast_region(dtype: torch.dtype | None, device: str = "cuda") -> Iterator[None]:
    """Autocast over fake CPU tensors by the rules of a device; nothing for dtype None."""
    if device not in DEVICES:
        raise unknown_name("autocast device", device, DEVICES)
    if dtype is None:
        yield
        return
    with _cuda_rules() if device == "cuda" else contextlib.nullcontext(), torch.autocast("cpu", dtype):
        yield


@contextlib.contextmanager
def _cuda_rules() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some of the ops are on a list of the CPU's
            for names, wrap in ((_FLOAT32, _in_float32), (_FLOAT32_RESULT, _to_float32)):
                for name in names:
                    op = _overload(name)
                    if op is not None:
                        library.impl(op, wrap(op), "AutocastCPU")
        yield
    finally:
        library._destroy()


def _overload(name: str) -> Any:
    """The op overload of a name such as ``pow.Scalar``; None where this torch does not have it."""
    packet = getattr(torch.ops.aten, name.partition(".")[0], None)
    return getattr(packet, name.partition(".")[2] or "default", None)


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _lower(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _in_float32(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            args, kwargs = torch.utils._pytree.tree_map(lambda x: x.float() if _lower(x) else x, (args, kwargs))
            return op(*args, **kwargs)

    return run


def _to_float32(op: Any) -> Callable[..., Any]:
    position = next(i for i, argument in enumerate(op._schema.arguments) if argument.name == "dtype")
    keyword = op._schema.arguments[position].kwarg_only

    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            asked = kwargs.get("dtype") if keyword or "dtype" in kwargs else args[position] if len(args) > position else None
            if asked is None and _lower(args[0]):
                if keyword or len(args) <= position:
                    kwargs = {**kwargs, "dtype": torch.float32}
                else:
                    args = (*args[:position], torch.float32, *args[position + 1 :])
            return op(*args, **kwargs)

    return run
