"""A joint graph in one process as a step of autograd: its call runs the forward part, the backward of its outputs the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from rlplace.runtime.distributed.graph.randomness import current_key, random_key
from rlplace.runtime.distributed.joint.one_process import TwoParts

Flags = tuple[bool, ...]
MakeParts = Callable[[Sequence[torch.Tensor], Sequence[Any], tuple[int, ...]], TwoParts]


class JointModule:
    """Called with held tensors and flat inputs like the graph of a forward; returns the flat outputs.

    Which outputs get a gradient is known in backward only. The forward prepares for those that got one the last time, at first
    for `guess`; should others get one, it runs again, with the same random numbers.
    """

    def __init__(self, make: MakeParts, held: int, guess: tuple[int, ...]) -> None:
        """Keeps what is needed for tracing.

        Args:
            make: Traces and places the graph for held tensors, flat inputs and the outputs to differentiate.
            held: Number of held tensors.
            guess: Numbers of the outputs that are likely to get a gradient.
        """
        self._make = make
        self._held = held
        self.guess = guess
        self._parts: dict[tuple[tuple[int, ...], Flags], TwoParts] = {}

    def parts(self, values: Sequence[Any], outputs: tuple[int, ...]) -> TwoParts:
        """The graph that differentiates some outputs."""
        flags = tuple(isinstance(value, torch.Tensor) and value.requires_grad for value in values)
        key = (outputs, flags if outputs else ())
        if key not in self._parts:
            self._parts[key] = self._make(values[: self._held], values[self._held :], outputs)
        return self._parts[key]

    def __call__(self, *values: Any) -> list[Any]:
        training = torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
        parts = self.parts(values, self.guess if training else ())
        joint = parts.placement.joint
        # Running statistics change before backward reads them.
        before = list(values)
        for index, name in enumerate(parts.held):
            if name in parts.writes:
                before[index] = values[index].detach().clone()
        key = current_key() or (int(torch.randint(1 << 62, ()).item()), 0, 0)
        if training and joint.differentiable:
            results = list(_Step.apply(self, parts, key, *before))
        else:
            results = run_forward(parts, key, before)[0]
        outputs, new = results[: len(parts.outputs)], results[len(parts.outputs) :]
        with torch.no_grad():
            for name, value in zip(parts.writes, new, strict=True):
                values[parts.held.index(name)].copy_(value)
        remaining = iter(outputs)
        return [next(remaining) if isinstance(item, fx.Node) else item for item in joint.outputs]


def run_forward(
    parts: TwoParts, key: tuple[int, int, int], values: Sequence[Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Runs the forward part; returns outputs and written values, and what backward reads."""
    arguments = [values[index] for index in range(len(parts.held))] + [
        values[len(parts.held) + index] for index in parts.inputs
    ]
    with torch.no_grad(), random_key(*key):
        results = parts.forward(*(value.detach() for value in arguments))
    count = len(parts.outputs) + len(parts.writes)
    return list(results[:count]), list(results[count:])


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, module: JointModule, parts: TwoParts, key: tuple[int, int, int], *values: Any) -> Any:
        results, saved = run_forward(parts, key, values)
        ctx.module, ctx.parts, ctx.key, ctx.values = module, parts, key, values
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        differentiable = parts.placement.joint.differentiable
        numbers = [*parts.outputs, *(-1 for _ in parts.writes)]
        ctx.mark_non_differentiable(*(r for r, number in zip(results, numbers, strict=True) if number not in differentiable))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        parts, module = ctx.parts, ctx.module
        incoming = {i: g for i, g in zip(parts.outputs, gradients, strict=False) if g is not None}
        wanted, saved = tuple(incoming), ctx.saved_tensors
        if wanted != tuple(parts.placement.joint.tangents):
            module.guess = wanted
            parts = module.parts(ctx.values, wanted)
            saved = run_forward(parts, ctx.key, ctx.values)[1]
        with torch.no_grad(), random_key(*ctx.key):
            results = parts.backward(*saved, *(incoming[i] for i in parts.placement.joint.tangents))
        of_values: list[torch.Tensor | None] = [None] * len(ctx.values)
        for name, gradient in zip(parts.gradients, results, strict=False):
            of_values[parts.held.index(name)] = gradient
        for number, gradient in zip(parts.input_gradients, results[len(parts.gradients) :], strict=True):
            position = len(parts.held) + number
            of_values[position] = gradient.to(ctx.values[position].device)
        return None, None, None, *of_values
