"""The forward of a module in one process whose backward ops run on the devices that a plan gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import once_differentiable

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph, flat_inputs, forward_graph
from rlplace.runtime.distributed.graph.randomness import current_key, random_key
from rlplace.runtime.distributed.joint.assign import place_joint_graph
from rlplace.runtime.distributed.joint.graph import joint_graph
from rlplace.runtime.distributed.joint.one_process import TwoParts, two_parts
from rlplace.runtime.op_level import CannotRunError, OpLevelForward, Runnable, without_placed_forward
from rlplace.runtime.place_graph import PlacedGraph


class JointForward(OpLevelForward):
    """Like `OpLevelForward`, with a joint graph: ``loss.backward()`` runs its backward part.

    The ops run in the order of the graph, parameters are where their backward is planned.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PlacementPlan,
        devices: Sequence[torch.device],
        device_of_op: Mapping[str, int],
        device_of_module: Mapping[str, torch.device],
        inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    ) -> None:
        self._plan = plan
        self._owners: dict[str, tuple[int, ...]] = {}
        super().__init__(model, devices, device_of_op, device_of_module, inputs)

    def fix_in_place(self, device_of: Mapping[str, torch.device]) -> None:
        """Tells where parameters and buffers now are."""
        super().fix_in_place(device_of)
        for name, device in device_of.items():
            self._owners.setdefault(name, (list(self._devices).index(device),))

    def _prepare_first(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Runnable:
        runnable = self._prepare(args, kwargs, check=True)
        self.ops_moved = 0
        return runnable

    def _prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, check: bool = False) -> Runnable:
        try:
            with without_placed_forward(self._model):
                source = forward_graph(self._model, args, kwargs)
        except InputError as error:
            raise CannotRunError(str(error)) from error
        if check:
            self._check_plan_matches(source.op_of_node.values())
        held = [self._example(name, source) for name in source.held]
        kind = next((device.type for device in self._devices if device.type != "cpu"), "cpu")

        def make(held: Sequence[torch.Tensor], leaves: Sequence[Any], outputs: tuple[int, ...]) -> TwoParts:
            named = dict(zip(source.held, held, strict=True))
            joint = joint_graph(source, named, leaves, differentiate=outputs, kind=kind)
            if joint.constants:
                raise InputError(
                    "op level: the forward makes tensors that tracing cannot follow; plan the problem that is not split"
                )
            placement = place_joint_graph(source, joint, self._plan, self._owners)
            for name, owner in placement.owners.items():
                self._owners.setdefault(name, owner)
            return two_parts(placement, self._devices)

        loss = source.outputs.index(source.loss) if source.loss in source.outputs else None
        every = tuple(i for i, name in enumerate(source.outputs) if name in source.layout and source.layout[name].requires_grad)
        module = JointModule(make, len(held), every if loss is None else (loss,))
        leaves = flat_inputs(args, kwargs)
        parts = module.parts([*held, *leaves], module.guess)
        placed = PlacedGraph(
            module=module,
            held=source.held,
            device_of_held={name: self._devices[self._owners[name][0]] for name in source.held},
            device_of_node={},
            copies=parts.copies,
        )
        constants = {name: value.to(placed.device_of_held[name]) for name, value in source.constants.items()}
        return Runnable(placed, constants, source.out_spec)

    def _example(self, name: str, source: ForwardGraph) -> torch.Tensor:
        holder = self._holder.get(name)
        return source.constants[name] if holder is None else holder[0][holder[1]]


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
