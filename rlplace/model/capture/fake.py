"""Copies of a module without values, and of it and its inputs on fake CPU tensors: same tree, same ties, nothing allocated.

Capture under autocast: fake CPU tensors that follow the rules of mixed precision on a GPU.

`torch.autocast` has other lists of ops for the CPU than for CUDA; most of all, layer norms and softmaxes run in float32 on CUDA
and in bfloat16 on the CPU, which changes what a step saves for its backward. `autocast_region` enters autocast for the CPU and,
unless the CPU's own rules are wanted, puts CUDA's float32 list (aten/src/ATen/autocast_mode.h) over them for as long as it is
active. Casts are then made where CUDA makes them, inside composite ops too, and a weight is cast once per region and kept, as
torch does it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from rlplace.model.capture.caches import cached_functions, empty, turn_off_caches
from rlplace.model.torch_adapter import FakeTensor, FakeTensorMode, pytree, shape_rule_of_grouped_mm, without_cpu_autocast

SMALL_CONSTANT_BYTES = 1 << 20
"""Plain tensor attributes on the CPU up to this size stay real, so that a forward may read their values."""


def tensors_in(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers by their first names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def first_names(model: nn.Module) -> dict[str, str]:
    """Returns first name of every parameter and buffer by any of its names, so that tied tensors have one."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names[name] = first.setdefault(id(tensor), name)
    return names


def meta_copy(model: nn.Module) -> nn.Module:
    """Returns the module without its values, to be traced with inputs of another shape."""
    memo = computed_values(model)
    for tensor in tensors_in(model).values():
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def replaced_forward(module: nn.Module) -> bool:
    """Returns whether a function took the place of a module's forward: one that closes over the module calls the original of a
    copy.
    """
    own = vars(module).get("forward")
    return own is not None and getattr(own, "__self__", None) is not module


def computed_values(model: nn.Module) -> dict[int, Any]:
    """Returns attributes of modules that `copy.deepcopy` refuses, copied, by id: its memo.

    They are tensors with a history, as weight normalisation by hooks and pruning keep them, whose copies have none; and
    generators of random numbers, whose copies draw the same numbers.
    """
    found: dict[int, Any] = {}
    for module in model.modules():
        made = (value for value in vars(module).values() if isinstance(value, torch.Generator))
        found |= {id(generator): generator.clone_state() for generator in made}
        found |= {id(tensor): tensor.detach() for tensor in _plain_tensors(vars(module)) if not tensor.is_leaf}
    return found


class ForgetfulFakeMode(FakeTensorMode):
    """A fake mode after which no fake tensor is left in the caches of functions (`functools.lru_cache`) of a model's code.

    Attributes:
        caches: Cached functions near the models that `fake_copy` has copied in this mode.
    """

    caches: frozenset[Any] = frozenset()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        empty(self.caches)


def new_fake_mode() -> ForgetfulFakeMode:
    """Returns a fake mode that mixes with the small real constants that a forward creates or holds."""
    return ForgetfulFakeMode(allow_non_fake_inputs=True)


def fake_copy(model: nn.Module, mode: ForgetfulFakeMode, dtype: torch.dtype | None = None) -> nn.Module:
    """Copies a module onto fake CPU tensors.

    Args:
        model: Real or meta module on any device; it is not touched.
        mode: Fake mode that owns the copies; it empties the caches of the model's functions whenever it ends.
        dtype: Floating-point parameters and buffers take this dtype; None keeps theirs.

    Returns:
        A deep copy whose parameters, buffers and tensor attributes are fake; tied tensors stay tied, and caches are off.
    """
    mode.caches |= cached_functions(model)
    empty(mode.caches)
    memo: dict[int, Any] = {key: own for key, own in computed_values(model).items() if isinstance(own, torch.Generator)}
    numbers = {id(buffer): (buffer.item(), buffer.dtype) for buffer in _numbers(model)}
    with mode:
        memo |= {key: torch.tensor(value, dtype=kind) for key, (value, kind) in numbers.items()}  # fake, with known values
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
        copied = copy.deepcopy(model, memo)
    turn_off_caches(copied)
    normalize_alone(copied)
    return copied


class _NormAlone(nn.SyncBatchNorm):
    """SyncBatchNorm of one process, whatever job it is part of."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalizes by the samples of this process."""
        normalized: torch.Tensor = super(nn.SyncBatchNorm, self).forward(input)
        return normalized


def normalize_alone(model: nn.Module) -> None:
    """Makes the SyncBatchNorms of a copy, which no other process runs, wait for none."""
    for module in model.modules():
        if type(module) is nn.SyncBatchNorm:
            module.__class__ = _NormAlone


def fake_inputs(inputs: Any, mode: FakeTensorMode, dtype: torch.dtype | None = None) -> Any:
    """Returns the same nested inputs with every tensor fake and on the CPU."""

    def convert(leaf: Any) -> Any:
        return _fake_like(leaf, dtype) if isinstance(leaf, torch.Tensor) else leaf

    with mode:
        return pytree.tree_map(convert, inputs)


def _fake_like(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if nn.parameter.is_lazy(tensor):
        raise RuntimeError("the model has uninitialised (lazy) parameters; run one forward or give their sizes first")
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad) if tensor.requires_grad else fake


def _numbers(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yields buffers that hold one whole number each and are in no checkpoint, such as the stride of a layer."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            alone = not buffer.dim() and not buffer.is_floating_point() and type(buffer) is not FakeTensor
            if alone and buffer.device.type == "cpu" and name in module._non_persistent_buffers_set:
                yield buffer


def _plain_tensors(attributes: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields tensors that a module holds outside its registered parameters and buffers, one container deep."""
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

    def rule(
        original: Any, mat_a: Any, mat_b: Any, scale_a: Any, scale_b: Any, offs: Any = None, *rest: Any, **named: Any
    ) -> Any:
        if scale_a is not None or mat_a.dtype == torch.bfloat16 or mat_a.dtype != mat_b.dtype:
            return original(mat_a, mat_b, scale_a, scale_b, offs, *rest, **named)
        rows, columns = mat_a.shape[-2], mat_b.shape[-1]
        groups = (mat_a if mat_a.dim() == 3 else mat_b if mat_b.dim() == 3 else offs).shape[0]
        # Two flat operands: one product per group. One flat operand: its ragged dimension survives. None: batched.
        flat = (mat_a.dim() == 2) != (mat_b.dim() == 2)
        return mat_a.new_empty((rows, columns) if flat else (groups, rows, columns))

    with shape_rule_of_grouped_mm(lambda original: functools.partial(rule, original)):
        yield


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
    """Enters autocast over fake CPU tensors by the rules of a device; does nothing for dtype None."""
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
    """Returns the op overload of a name such as ``pow.Scalar``; None where this torch does not have it."""
    packet = getattr(torch.ops.aten, name.partition(".")[0], None)
    return getattr(packet, name.partition(".")[2] or "default", None)


def _lower(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def _in_float32(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with without_cpu_autocast():
            args, kwargs = pytree.tree_map(lambda x: x.float() if _lower(x) else x, (args, kwargs))
            return op(*args, **kwargs)

    return run


def _to_float32(op: Any) -> Callable[..., Any]:
    position = next(i for i, argument in enumerate(op._schema.arguments) if argument.name == "dtype")
    keyword = op._schema.arguments[position].kwarg_only

    def run(*args: Any, **kwargs: Any) -> Any:
        with without_cpu_autocast():
            asked = kwargs.get("dtype") if keyword or "dtype" in kwargs else args[position] if len(args) > position else None
            if asked is None and _lower(args[0]):
                if keyword or len(args) <= position:
                    kwargs = {**kwargs, "dtype": torch.float32}
                else:
                    args = (*args[:position], torch.float32, *args[position + 1 :])
            return op(*args, **kwargs)

    return run
