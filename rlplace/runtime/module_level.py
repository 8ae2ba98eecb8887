"""Runs a module whose submodules sit on different devices.

Each module that runs ops itself has a device (`rlplace.plan.device_map.round_to_modules`). A subtree that sits on one device
receives its inputs there. Between such subtrees, where a parent combines their results (residual sums, masks, losses), an op
runs where its operands are; when they are on several devices they are first copied to the parent's device, except that an
in-place op and indexing run where their first operand is. A copy is made once per tensor and device in a forward pass.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rlplace.errors import InputError
from rlplace.runtime.report import ApplyReport
from rlplace.runtime.transfer import CopyCache, map_tensors, refuse_deepcopy

_AUGMENTED = {
    f"__i{op}__"
    for op in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "matmul")
}
_FIRST_DECIDES = _AUGMENTED | {"__getitem__", "__setitem__"}
# These take operands on several devices by themselves, or look at a tensor without reading it.
_UNTOUCHED = {
    "to",
    "copy_",
    "type_as",
    "set_",
    "backward",
    "__set__",
    "__get__",
    "register_hook",
    "retain_grad",
    "swap_tensors",
}
_RUNNING_STATS = {"batch_norm", "instance_norm"}

_running = threading.local()


class _AlignDevices(TorchFunctionMode):
    """Copies the operands of an op to one device when they sit on several."""

    def __init__(self, cache: CopyCache, stack: list[torch.device]) -> None:
        self.cache = cache
        self.stack = stack

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
            return func(*args)
        kwargs = kwargs or {}
        tensors: list[torch.Tensor] = []
        _collect((args, kwargs), tensors)
        if len(tensors) > 1:
            device = tensors[0].device
            if any(tensor.device != device for tensor in tensors):
                name = getattr(func, "__name__", "")
                if name not in _UNTOUCHED:
                    target = self._target(name, tensors, args, kwargs)
                    args, kwargs = map_tensors((args, dict(kwargs)), lambda t: self.cache.get(t, target))
        return func(*args, **kwargs)

    def _target(self, name: str, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> torch.device:
        out = kwargs.get("out")
        if isinstance(out, torch.Tensor):
            return out.device
        if name in _FIRST_DECIDES or (name.endswith("_") and not name.endswith("__")):
            return tensors[0].device
        if name in _RUNNING_STATS:
            stats = args[1] if len(args) > 1 else kwargs.get("running_mean")
            if stats is not None:
                return stats.device  # type: ignore[no-any-return]
        return self.stack[-1]


def _collect(value: Any, tensors: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, tensors)
    elif type(value) is dict:
        for item in value.values():
            _collect(item, tensors)


def install_moves(model: nn.Module, device_of_module: Mapping[str, torch.device], report: ApplyReport) -> None:
    """Replaces the forward of the modules that need it; parameters must already be in place.

    Args:
        model: The root module.
        device_of_module: Device of every module, by its first path.
        report: Its `copies_per_forward` is set in every forward pass.
    """
    paths = {module: path for path, module in model.named_modules()}
    uniform = _uniform_subtrees(model, paths, device_of_module)
    covered: set[nn.Module] = set()
    for module, path in paths.items():  # parents come before children
        if module is not model and module in covered:
            continue
        moves_inputs = module in uniform and getattr(module, "inplace", False) is not True
        if module in uniform:
            covered.update(module.modules())
        _wrap_forward(module, path, device_of_module[path], moves_inputs, report if module is model else None)


def _uniform_subtrees(
    model: nn.Module, paths: Mapping[nn.Module, str], device_of_module: Mapping[str, torch.device]
) -> set[nn.Module]:
    """Modules whose whole subtree sits on one device."""
    return {module for module in model.modules() if len({device_of_module[paths[child]] for child in module.modules()}) == 1}


def _wrap_forward(module: nn.Module, path: str, device: torch.device, moves_inputs: bool, report: ApplyReport | None) -> None:
    forward: Callable[..., Any] = module.forward

    @functools.wraps(forward)
    def placed_forward(*args: Any, **kwargs: Any) -> Any:
        mode: _AlignDevices | None = getattr(_running, "mode", None)
        if mode is not None:
            return run(mode, args, kwargs)
        mode = _AlignDevices(CopyCache(), [])
        _running.mode = mode
        try:
            with mode:
                return run(mode, args, kwargs)
        finally:
            _running.mode = None
            if report is not None:
                report.copies_per_forward = mode.cache.copies

    def run(mode: _AlignDevices, args: Any, kwargs: Any) -> Any:
        mode.stack.append(device)
        try:
            if not moves_inputs:
                return forward(*args, **kwargs)
            moved: list[tuple[torch.Tensor, int]] = []

            def move(tensor: torch.Tensor) -> torch.Tensor:
                copy = mode.cache.get(tensor, device)
                if copy is not tensor and not copy.is_inference():
                    moved.append((copy, copy._version))
                return copy

            args, kwargs = map_tensors((args, kwargs), move)
            result = forward(*args, **kwargs)
            if any(copy._version != version for copy, version in moved):
                raise InputError(
                    f"module {path or 'root'!r} writes to its input, which comes from another device, where the change would "
                    "be lost; put both on one device, or make the operation not in-place"
                )
            return result
        finally:
            mode.stack.pop()

    module.forward = placed_forward  # type: ignore[method-assign]
    refuse_deepcopy(module)


def spread(
    model: nn.Module, voted: Mapping[str, int], devices: Sequence[torch.device], fallback: int
) -> dict[str, torch.device]:
    """Device of every module: its own vote, else its parent's.

    A module without ops of its own (a container, or one whose weight its parent reads) has no vote; a container all of whose
    voters agree takes their device.
    """
    result: dict[str, torch.device] = {}
    below: dict[str, set[int]] = {}
    for path, device in voted.items():
        parts = path.split(".") if path else []
        for end in range(len(parts) + 1):
            below.setdefault(".".join(parts[:end]), set()).add(device)
    for path, _ in model.named_modules():
        agreed = below.get(path, set())
        if path in voted:
            index = voted[path]
        elif len(agreed) == 1:
            index = next(iter(agreed))
        elif path:
            result[path] = result[path.rpartition(".")[0]]
            continue
        else:
            index = fallback
        result[path] = devices[index]
    return result
