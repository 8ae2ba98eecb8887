"""Whether a model can be cut by leaving out the blocks of other stages, as a person would write it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


class Elsewhere(nn.Module):
    """Stands where the block of another stage was: hands activations on, and adds nothing for ids."""

    def forward(self, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return value if value.is_floating_point() else torch.zeros((), device=value.device)


class _Mark(nn.Module):
    """Stands for a block without its weights: no two give the same, in no two orders."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self._number, self._width = number, width

    def forward(self, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not value.is_floating_point():
            value = torch.cos(value.unsqueeze(-1) * torch.arange(1, self._width + 1))
        return torch.sin(value * 1.1 + self._number)


def is_cut_by_skipping(
    model: nn.Module, inputs: Mapping[str, Any], stages: Sequence[Sequence[str]], width: int, first: str, hidden: str
) -> bool:
    """Runs a model whose blocks are marks, whole and stage by stage, and compares what comes out.

    Args:
        model: On the meta device; it is not changed.
        inputs: Of one micro-batch, with values and without labels.
        stages: Blocks by stage.
        width: Last dimension of what stages hand on.
        first: The input that later stages do without.
        hidden: The input that takes what the stage before made.
    """
    numbers = {path: number for number, path in enumerate(path for stage in stages for path in stage)}

    def run(held: Sequence[str], given: Mapping[str, Any]) -> torch.Tensor:
        marked = copy.deepcopy(model)
        for path, number in numbers.items():
            marked.set_submodule(path, _Mark(number, width) if path in held else Elsewhere())
        output = marked.to_empty(device="cpu")(**given)
        return next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))

    try:
        with torch.no_grad():
            wanted = run(list(numbers), inputs)
            value = run(stages[0], inputs)
            for held in stages[1:]:
                value = run(held, {name: item for name, item in inputs.items() if name != first} | {hidden: value})
    except Exception:  # the model's own code runs on what it was not written for
        return False
    return torch.equal(wanted, value)
