"""Records a model of many equal layers from a few of them.

Exporting a step takes time in proportion to its layers, which are mostly alike. So a copy of the model whose lists of modules
are shortened to `HELD` elements is recorded, and what its middle layer did is repeated: labels, events and storages, with the
references between neighbours shifted, and the numbers in names counted on as `torch.fx` counts them.

This is done only where it can be checked (`UnlikeError` elsewhere): the three middle layers must have done the same
step for step; and the forward of the whole model, run eagerly, must be the forward of the short one, run eagerly and repeated
in the same way, event by event with its tensors. The backward follows from the forward.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from rlplace.model.capture.recording import Recording
from rlplace.model.capture.repeat import HELD, Repeated, UnlikeError, gapless_kinds
from rlplace.model.capture.trace import EagerRecorder

LEAST = 8
"""Elements of a list that may be shortened."""

WORTH = 5
"""Layers that must be saved in all, or recording the whole model is as quick."""


class Watcher(EagerRecorder):
    """Records events of the forward with their modules and how many autograd nodes they made, and no iteration spaces."""

    def __init__(self) -> None:
        super().__init__(by_module=False)

    def _new_label(self, name: str, target: str, leave: int) -> None:
        super()._new_label(name, target, leave)
        self.labels[-1].parts = None

    def claim(self, label: int, leave: int = 0) -> None:
        before = self._last_sequence
        super().claim(label, leave)
        if label >= 0:
            dims = self.labels[label].dims
            dims["autograd"] = dims.get("autograd", 0) + self._last_sequence - before


def repeated_lists(model: nn.Module) -> dict[str, int]:
    """Outermost lists of modules, alike except the first and the last: length by path; none where it saves little."""
    lengths: dict[str, int] = {}
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < LEAST:
            continue
        inside = path.startswith(tuple(f"{outer}." for outer in lengths))
        if path and not inside and len({_looks(item) for item in list(module)[1:-1]}) == 1:
            lengths[path] = len(module)
    return lengths if sum(lengths.values()) - HELD * len(lengths) >= WORTH else {}


def _looks(module: nn.Module) -> tuple[Any, ...]:
    return type(module), *((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())


def shortened(model: nn.Module, lists: Iterable[str]) -> nn.Module:
    """Returns the model with the first `HELD` elements of these lists; it shares all else with the model, which stays
    as it is.
    """
    for path in lists:
        model = _shortened(model, path.split("."))
    return model


def _shortened(module: nn.Module, path: Sequence[str]) -> nn.Module:
    short = copy.copy(module)
    children = dict(list(module._modules.items())[: None if path else HELD])
    if path:
        children[path[0]] = _shortened(module.get_submodule(path[0]), path[1:])
    short._modules = children
    return short


def unroll(recording: Recording, lists: dict[str, int]) -> Recording:
    """Returns the recording of the model whose lists have these lengths, from that of the model that `shortened` made.

    Raises:
        UnlikeError: The middle layers of a list are not alike.
    """
    gapless = gapless_kinds(recording.nodes)
    for path, length in lists.items():
        recording = Repeated(recording, path, length - HELD, gapless).result()
    return recording


def check_equal(repeated: Recording, whole: Recording) -> None:
    """Refuses two recordings of the forward that differ in an event, an autograd node, a tensor or a parameter.

    Raises:
        UnlikeError: They do.
    """
    same = repeated.events == whole.events and all(
        [row(item) for item in one] == [row(item) for item in other]
        for one, other, row in (
            (repeated.labels, whole.labels, lambda label: (label.module, label.target, label.dims)),
            (repeated.leaves, whole.leaves, lambda leaf: (leaf.record, leaf.idle)),
            (repeated.storages, whole.storages, lambda storage: storage.nbytes()),
        )
    )
    if not same:
        raise UnlikeError("the forward of the whole model is not that of its repeated layers")
