"""Masks of transformers' models in records: those that the models make when they run.

While a model is traced, on fake tensors too, transformers makes a mask of positions x positions where a run only tells
attention that it is causal, or nothing: whether samples are packed or padded is a question about values. Without inputs about
either there is nothing to ask.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

from torch import nn

_ABOUT = ("mask", "position", "seq")
"""Parts of names of inputs that say which positions attend to which."""


@contextlib.contextmanager
def masks_of_runs(model: nn.Module, args: Sequence[Any], kwargs: Iterable[str]) -> Iterator[None]:
    """Lets models of transformers leave masks out inside of the context, as runs do, where no input is about positions.

    Args:
        model: The model.
        args: Its positional inputs.
        kwargs: Names of the keyword inputs.
    """
    inputs = [*list(inspect.signature(model.forward).parameters)[: len(args)], *kwargs]
    library = sys.modules.get("transformers.masking_utils")
    with contextlib.ExitStack() as inside:
        if library is not None and not any(part in name for name in inputs for part in _ABOUT):
            for name, answer in (("is_torchdynamo_exporting", False), ("find_packed_sequence_indices", None)):
                if hasattr(library, name):
                    inside.enter_context(mock.patch.object(library, name, lambda *_, answer=answer, **__: answer))
        yield
