"""Attention of queries of a part of the positions to all of them, by three methods, named by `Stage.context_method`.

``gather`` gathers the keys and values of all parts, as in Llama 3 (arXiv 2407.21783, section 3.3.2) and Transformer Engine
(pull request 1060). ``heads`` exchanges parts of the positions for parts of the heads and back, as in DeepSpeed Ulysses (arXiv
2309.14509). ``ring`` passes keys and values around while a process attends to those that it has (arXiv 2310.01889): torch's
own, with the kernel of processors, too. A part is two runs of positions, one from each half of the sequence, so that causal
attention is equal work for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, CausalVariant

from rlplace.errors import InputError
from rlplace.plan.strategy import GATHER, HEADS, ContextMethod
from rlplace.runtime.base.ranks import group_of
from rlplace.runtime.torch_adapter import all_gather, all_to_all, reduce_scatter, ring_attention, without_modes

attention: Any = F.scaled_dot_product_attention

Gather = Callable[[torch.Tensor], torch.Tensor]


class Part(NamedTuple):
    """One of the parts of a sequence: run `number` of its first half, and the run as far from the end of the second."""

    number: int
    degree: int

    def starts(self, length: int) -> tuple[int, int]:
        """Returns where its two runs begin in a sequence of so many positions."""
        run = length // (2 * self.degree)
        return self.number * run, (2 * self.degree - 1 - self.number) * run

    def of(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns its positions of a whole value."""
        run = value.shape[dim] // (2 * self.degree)
        return torch.cat([value.narrow(dim, start, run) for start in self.starts(value.shape[dim])], dim)


class Call(NamedTuple):
    """A call of `torch.nn.functional.scaled_dot_product_attention` with a part of queries, keys and values.

    Keys and values are [samples, heads, positions, width]; heads of queries may share theirs.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    how: Mapping[str, Any] = MappingProxyType({})


Attend = Callable[[Call], torch.Tensor]


def _whole(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns all positions (dimension -2) of the parts, in their order."""
    pairs = [part.chunk(2, -2) for part in parts]
    return torch.cat([first for first, _ in pairs] + [second for _, second in reversed(pairs)], -2)


def attend_gathered(call: Call, part: Part, gather: Gather) -> torch.Tensor:
    """Attends to the keys and values of all positions; of a mask the rows of the part are given."""
    key, value = gather(call.key), gather(call.value)
    if not call.causal:
        return attention(call.query, key, value, call.mask, call.dropout, **call.how)  # type: ignore[no-any-return]
    made = []
    for start, rows in zip(part.starts(key.shape[-2]), call.query.chunk(2, -2), strict=True):
        end = start + rows.shape[-2]
        with without_modes():  # whose own constructor would reserve eight bytes for every query and key
            bias = torch.empty(0).as_subclass(CausalBias)
            bias.__init__(CausalVariant.LOWER_RIGHT, rows.shape[-2], end)  # type: ignore[misc]
        made.append(attention(rows, key[..., :end, :], value[..., :end, :], bias, call.dropout, **call.how))
    return torch.cat(made, -2)


class _GatherPositions(torch.autograd.Function):
    """Keys or values of all positions; gradients are summed over the group, each process has that of its part."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, ranks: tuple[int, ...]) -> torch.Tensor:
        ctx.ranks = ranks
        return _whole(all_gather(value.contiguous(), 0, group_of(ranks, "context")).chunk(len(ranks)))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        parts = [Part(number, len(ctx.ranks)).of(gradient, -2) for number in range(len(ctx.ranks))]
        return reduce_scatter(torch.cat(parts), "sum", 0, group_of(ctx.ranks, "context")), None


def _gather(value: torch.Tensor, ranks: tuple[int, ...]) -> torch.Tensor:
    made: torch.Tensor = _GatherPositions.apply(value, ranks)  # type: ignore[no-untyped-call]
    return made


def _attend_by_heads(call: Call, part: Part, ranks: tuple[int, ...]) -> torch.Tensor:
    """Attends with a part of the heads over all positions; the mask is whole."""
    degree, group, heads = part.degree, group_of(ranks, "context"), call.query.shape[1]
    mask, narrow = call.mask, call.key.shape[1] < degree  # every process has the one head of keys that its queries share
    if mask is not None and mask.dim() > 2 and mask.shape[-3] == heads > 1:
        mask = mask.chunk(degree, -3)[part.number]

    def exchange(value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made: torch.Tensor = all_to_all(value.contiguous(), None, None, group)
        return tuple(made.chunk(degree))

    taken = [call.query, *(wide(one, degree) if narrow else one for one in (call.key, call.value))]
    own = (_whole(exchange(torch.cat(one.chunk(degree, 1)))) for one in taken)
    made = attention(*own, mask, call.dropout, call.causal, **call.how)
    return torch.cat(exchange(torch.cat([Part(n, degree).of(made, -2) for n in range(degree)])), 1)


def wide(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Returns keys or values with as many heads, each repeated for the queries that share it."""
    return value.repeat_interleave(heads // value.shape[1], 1)


def _ring(call: Call, ranks: tuple[int, ...]) -> torch.Tensor:
    if call.mask is not None or call.dropout:
        raise InputError(f"native: {NO_RING}; plan with another context_method, such as gather")
    return ring_attention(call.query, call.key, call.value, call.causal, call.how.get("scale"), group_of(ranks, "context"))


NO_RING = "torch's ring of keys and values takes neither masks (of padding, or of packed documents) nor dropout of attention"


def attends(method: ContextMethod, part: Part, ranks: Sequence[int]) -> Attend:
    """Returns how a process with a part attends; `ranks` are those of all parts, in their order."""
    own = tuple(ranks)
    if method == GATHER:
        return partial(attend_gathered, part=part, gather=partial(_gather, ranks=own))
    return partial(_attend_by_heads, part=part, ranks=own) if method == HEADS else partial(_ring, ranks=own)
