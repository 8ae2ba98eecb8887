"""Models that recompute their activations themselves (`torch.utils.checkpoint`).

Their backward runs parts of the forward again. An eager trace shows that: the recomputed ops are work of the backward ops that
need them, and what they make again is not saved in between. `torch.export` does not: it traces through a checkpoint as if it
were not there, with neither the second forward nor the memory it saves. So export has to be refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import _engine_run_backward


class RecomputationError(RuntimeError):
    """The forward checkpoints activations, which an exported graph cannot show."""


@contextlib.contextmanager
def refuse_recomputation() -> Iterator[None]:
    """Raises `RecomputationError` when `torch.utils.checkpoint.checkpoint` runs inside.

    Both implementations are replaced, not `checkpoint` itself, which libraries import by name.
    """
    from torch.utils import checkpoint

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RecomputationError(
            "the model checkpoints activations, and an exported graph has no recomputation; use method 'dispatch'"
        )

    with (
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", refuse),
        mock.patch.object(checkpoint.CheckpointFunction, "apply", refuse),
    ):
        yield


def run_backward(loss: torch.Tensor) -> None:
    """`loss.backward()` with torch function modes left on, so that a checkpoint's second forward runs like its first.

    `Tensor.backward` is itself a function that modes may override, and a mode is off while it handles one.
    """
    _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)
