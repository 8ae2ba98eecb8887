"""Context parallelism: processes that run the whole model on parts of the positions of the same samples.

What comes before the first block with attention (embeddings, positions, masks) runs on whole sequences, on every process alike,
so that it is what the plain model computes, whatever code does it. Blocks with attention take their part of every argument;
what follows them gets parts. Inside of a block only `torch.nn.functional.scaled_dot_product_attention` may mix positions:
queries of a part attend to those of all parts (`rlplace.runtime.strategy.attention`). A cross-entropy takes the targets of the
part, after the model has shifted them. A later stage of a pipeline takes parts from the start; masks, positions and rotary
tables, which it computes itself, are whole until its blocks take their part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rlplace.errors import InputError
from rlplace.model.torch_adapter import pytree
from rlplace.runtime.strategy.attention import Attend, Call, Part, attention
from rlplace.runtime.strategy.why_not_divided import uneven
from rlplace.runtime.torch_adapter import counted_losses


class Context:
    """A forward on a part of the positions.

    Args:
        blocks: Modules by path; their forwards are replaced.
        attending: By path of those with attention, the position of the activation among their flat arguments.
        part: The part.
        attend: How the part attends.
        whole_masks: Whether it takes masks of all queries.

    Attributes:
        unit: The block that runs, or ran last.
        by_positions: Of every cross-entropy of the last forward whether its targets were cut.
        watch: What blocks run inside of.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        attending: Mapping[str, int],
        part: Part,
        attend: Attend,
        whole_masks: bool = False,
    ) -> None:
        self._part, self._attend_as, self._whole_masks, self._length = part, attend, whole_masks, 0
        named = (torch.Tensor.view, torch.Tensor.reshape, torch.ops.aten.view.default, torch.ops.aten.reshape.default)
        self._shapes = Replaced({function: partial(self._own_shape, function) for function in named})
        self.unit, self.by_positions = "", list[bool]()
        self.watch: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        for path, block in blocks.items():
            vars(block)["forward"] = partial(self._call, path, attending.get(path), block.forward)

    def divide(self, module: nn.Module, length: int = 0) -> None:
        """Replaces the forward of a model, or of a stage that takes parts of so many positions."""
        vars(module)["forward"] = partial(self._run, module.forward, length)

    def _run(self, forward: Callable[..., Any], length: int, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self._length, self.by_positions = length, []
        with counted_losses(self._own_targets), self._shapes:
            return forward(*args, **kwargs)

    def _own_shape(self, function: Callable[..., Any], value: torch.Tensor, *shape: Any, **named: Any) -> torch.Tensor:
        """Gives a part between blocks the positions of a part, where the model's code names those of its whole inputs."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        own = self._length // self._part.degree
        by_samples = len(sizes) > 1 and (len(sizes) >= value.dim() or sizes[0] == value.shape[0])  # else it joins dimensions
        if own and by_samples and value.dim() > 1 and value.shape[1] == own and sizes[1] == self._length:
            shape = ([sizes[0], own, *sizes[2:]],)
        made: torch.Tensor = function(value, *shape, **named)
        return made

    def _call(self, path: str, activation: int | None, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a block; without gradients, as in evaluation, all is whole."""
        if not torch.is_grad_enabled() or (activation is None and not self._length):
            return forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if not self._length and activation is not None:
            self._length = leaves[activation].shape[1]
            if self._length % (2 * self._part.degree):
                raise InputError(f"native: {uneven(self._length, self._part.degree)}")
        args, kwargs = pytree.tree_unflatten([self._own(leaf) for leaf in leaves], spec)
        self.unit = path
        with Replaced({attention: self._attend}), self.watch:
            return forward(*args, **kwargs)

    def _own(self, leaf: Any) -> Any:
        """Returns the part of an argument of a block; of a mask the rows of the queries. Parts stay."""
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return leaf
        if leaf.dim() > 3 and leaf.shape[-1] == self._length:
            return self._part.of(leaf, -2) if leaf.shape[-2] == self._length and not self._whole_masks else leaf
        dims = range(1, leaf.dim() - (leaf.dim() > 2)) if leaf.dim() > 1 else (0,)
        along = next((dim for dim in dims if leaf.shape[dim] == self._length), None)
        return leaf if along is None else self._part.of(leaf, along)

    def _own_targets(self, kernel: Callable[..., Any], value: torch.Tensor, target: torch.Tensor, *options: Any) -> Any:
        """Calls a cross-entropy with the targets of the part: flat ones follow samples, then positions."""
        whole, length, given = value.shape[0] * self._part.degree, self._length, target
        if length and value.dim() == 2 and target.dim() == 1 and len(target) == whole and not whole % length:
            target = self._part.of(target.view(-1, length), 1).reshape(-1)
        elif length and value.dim() > 2 and target.dim() > 1 and target.shape[1] == length:
            target = self._part.of(target, 1)
        self.by_positions.append(target is not given)
        return kernel(value, target, *options)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **how: Any,
    ) -> torch.Tensor:
        """Attends from the queries of the part to the keys and values of all positions."""
        if query.shape[-2] * self._part.degree != self._length or key.shape[-2] != query.shape[-2]:
            raise InputError(f"native: {self.unit} attends to other positions than its own sequence; plan with context=1")
        return self._attend_as(Call(query, key, value, attn_mask, dropout_p, is_causal, how))


class Replaced(TorchFunctionMode):
    """Calls of other functions in place of torch's.

    Args:
        functions: By torch's function what is called with its arguments.
    """

    def __init__(self, functions: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._functions.get(function, function)(*args, **(kwargs or {}))
