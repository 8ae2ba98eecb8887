"""The parts of torch that are private and that capture needs: the one file of this room that imports them.

Each entry names the upstream issue that would make it public or unneeded; `tests/test_torch_adapter.py` fails once torch no
longer needs it. Versions 2.11 to 2.13 have all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

# Tensors without data, and the errors of their ops where a value is read: pytorch #173589 (`torch.subclasses`).
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode

# `Tensor.backward` switches function modes off while it runs, so that a checkpoint's second forward would run unlike its first.
from torch.autograd.graph import _engine_run_backward

# Nested containers of tensors: pytorch #65761, #175082 (`torch.utils.pytree`).
from torch.utils import _pytree as pytree

# Documented as a class to derive from, at a private path only.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "backward_node",
    "in_backward",
    "packed_sequence_functions",
    "pytree",
    "recurrent_decompositions",
    "run_backward",
    "sequence_number",
    "shape_rule_of_grouped_mm",
    "sleep_on_gpu",
    "without_cpu_autocast",
]


def sequence_number() -> int:
    """Returns number of the next node that autograd makes in this thread; nodes of a forward and its backward share theirs."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def in_backward() -> bool:
    """Returns whether autograd runs a backward in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def backward_node() -> Any:
    """Returns the autograd node whose backward runs in this thread; None outside of one."""
    return torch._C._current_autograd_node()


def run_backward(loss: Tensor) -> None:
    """Computes gradients like `loss.backward()`, with torch function modes left on."""
    _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def packed_sequence_functions() -> tuple[Any, Any]:
    """Returns the functions that `pack_padded_sequence` and `pad_packed_sequence` call, to be replaced by function modes."""
    return torch._VF._pack_padded_sequence, torch._VF._pad_packed_sequence  # type: ignore[attr-defined]


@contextlib.contextmanager
def recurrent_decompositions(rules: Mapping[str, Any]) -> Iterator[None]:
    """Replaces torch's decompositions of recurrent layers, which unroll them over time (pytorch #120626, #140845).

    Args:
        rules: Functions by the names that they have in torch; names that this version lacks are left out.
    """
    from torch._decomp import decompositions

    known = {name: rule for name, rule in rules.items() if hasattr(decompositions, name)}
    with mock.patch.multiple(decompositions, **known):
        yield


@contextlib.contextmanager
def shape_rule_of_grouped_mm(wrap: Any) -> Iterator[None]:
    """Replaces torch's shape rule of `aten._grouped_mm`, which takes bfloat16 alone (pytorch #159547).

    Args:
        wrap: Called with torch's rule, returns the new one.
    """
    from torch import _meta_registrations as registrations

    original = getattr(registrations, "_meta_grouped_mm_common", None)
    if original is None:
        yield
        return
    with mock.patch.object(registrations, "_meta_grouped_mm_common", wrap(original)):
        yield


def without_cpu_autocast() -> Any:
    """Returns a guard under which ops of the CPU run without autocast."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def sleep_on_gpu(cycles: int) -> None:
    """Keeps the current stream of a GPU busy for so many clock cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
