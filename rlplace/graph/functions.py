"""Models that define gradients themselves (`torch.autograd.Function`).

`torch.export` traces through such a function: the graph has the ops of its forward, and a backward of that graph is theirs,
which need not be the function's own. For planning that is near enough; a graph that is to train in place of the model has to be
refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


class OwnBackwardError(RuntimeError):
    """The forward calls a function with a backward of its own, which an exported graph would lose."""


@contextlib.contextmanager
def refuse_functions() -> Iterator[None]:
    """Raises `OwnBackwardError` when a `torch.autograd.Function` from outside torch is applied inside."""
    original = vars(torch.autograd.Function)["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            raise OwnBackwardError(f"the model calls {cls.__qualname__}, whose own backward an exported graph would lose")
        return original(cls, *args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield
