"""The forward of a module in one process whose ops, forward and backward, run on the devices of a plan."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import once_differentiable

from rlplace.model.torch_adapter import pytree
from rlplace.plan.device_map import device_of_op
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.placement.assign import JointPlacement, check_same_ops, place_joint_graph
from rlplace.runtime.placement.emit import Emitter, Program
from rlplace.runtime.placement.forward_graph import ForwardGraph, Graphs, flat_inputs
from rlplace.runtime.placement.joint_graph import base_of, joint_graph, results_of

Key = tuple[int, int]


@dataclass(frozen=True, eq=False)
class TwoParts:
    """A joint graph in two parts."""

    placement: JointPlacement  # of the whole graph
    # called with the held tensors and the flat tensor inputs; returns the outputs by number, the new values of written tensors
    # by name, and `saved`
    forward: Program
    saved: Sequence[tuple[fx.Node, int]]  # values that the backward part reads, each with its device
    # called with them and the tangents; returns gradients of held tensors by name, each on its owner's device, and of inputs by
    # number
    backward: Program
    constants: Mapping[str, torch.Tensor]  # held tensors that never change, each on its device, by name


def two_parts(placement: JointPlacement, devices: Sequence[torch.device]) -> TwoParts:
    """Splits a joint graph into forward and backward and puts each node on its device, one per device of the plan."""
    joint, on = placement.joint, dict(enumerate(devices))
    order = [node for node in placement.device_of if node.target is not operator.getitem]
    first = [node for node in order if node in placement.forward]
    second = [node for node in order if node not in placement.forward]
    late = {*joint.tangents.values(), *(result for node in second for result in results_of(node))}
    home = {name: placement.owners[name][0] for name in joint.held}
    reads = [(base, placement.device_of[node]) for node in second for base in placement.reads[node]]
    reads += [(base_of(part), device) for part, device in placement.summands]
    saved = list(dict.fromkeys((base, device) for base, device in reads if base not in late))

    given: list[tuple[fx.Node, int | None]] = [(node, home[name]) for name, node in joint.held.items()]
    given += [(node, None) for node in joint.inputs if node is not None]
    forward = Emitter(placement, on, first, given, [*saved, *placement.written])
    results = {number: forward.anywhere(item) for number, item in enumerate(joint.outputs)}
    results |= {name: forward.at(node, home[name]) for name, node in joint.writes.items()}  # type: ignore[misc]
    results |= {at: forward.at(*at) for at in saved}  # type: ignore[misc]
    tangents = [(node, None) for node in joint.tangents.values()]
    backward = Emitter(placement, on, second, [*saved, *tangents], placement.summands)
    of_inputs = {number: backward.anywhere(node) for number, node in joint.input_gradients.items()}
    return TwoParts(
        placement=placement,
        forward=forward.program(results),
        saved=saved,
        backward=backward.program({**backward.gradients(), **of_inputs}),
        constants={name: value.to(devices[home[name]]) for name, value in joint.constants.items()},
    )


class PlacedForward:
    """The forward of a module whose ops run on the devices of a plan; ``loss.backward()`` runs the backward ops.

    A graph is traced for one signature: the shapes and structure of the inputs, which submodules are in training mode, and
    autocast. A new signature (a smaller last batch, ``eval()``) is traced when it first comes, on fake tensors, and kept. All
    graphs read the same parameters and buffers, which stay in the module.

    Attributes:
        model: The module.
        owners: Device of the plan by first name, for every parameter and buffer that a graph reads.
        copies: Copies between devices in the forward of the example inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PlacementPlan,
        devices: Sequence[torch.device],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Traces the forward for example inputs; refuses one that cannot be exported, or that was not planned."""
        self.__signature__ = inspect.signature(model.forward)
        self.model, self._plan, self._devices = model, plan, devices
        self._graphs = Graphs()
        self._parts: dict[Hashable, TwoParts] = {}
        self._guess: dict[ForwardGraph, tuple[int, ...]] = {}
        self.owners: dict[str, int] = {}
        source = self._trace(args, kwargs)
        check_same_ops(source, set(device_of_op(plan)))
        self.copies = self.parts(source, self._values(source, args, kwargs), self.guess(source)).forward.copies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        source = self._trace(args, kwargs)
        names, values = _names(source), self._values(source, args, kwargs)
        training = torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
        parts = self.parts(source, values, self.guess(source) if training else ())
        joint = parts.placement.joint
        # Running statistics change before backward reads them.
        before = [v.detach().clone() if n in joint.writes else v for n, v in zip_longest(names, values)]
        key = int(torch.randint(1 << 62, ()).item()), 0
        if training and joint.differentiable:
            made = _PlacedStep.apply(self, source, parts, key, *before)
        else:
            made = run_forward(source, parts, key, before).values()
        results = dict(zip(parts.forward.names, made, strict=False))
        with torch.no_grad():
            for name in joint.writes:
                values[names.index(name)].copy_(results[name])
        flat = [results.get(number, item) for number, item in enumerate(joint.outputs)]
        return pytree.tree_unflatten(flat, source.out_spec)

    def guess(self, source: ForwardGraph, outputs: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Returns the numbers of the outputs that are expected to get a gradient.

        Only backward knows them. The forward prepares for those that got one the last time, at first for the loss; if others
        get one, it runs again, with the same random numbers.

        Args:
            source: The forward that was traced.
            outputs: Those that got one now.
        """
        if outputs is not None:
            self._guess[source] = outputs
        return self._guess.setdefault(source, tuple(range(len(source.outputs))) if source.loss is None else (source.loss,))

    def parts(self, source: ForwardGraph, values: Sequence[Any], outputs: tuple[int, ...]) -> TwoParts:
        """Returns the graph that differentiates some outputs, for parameters and buffers, then flat inputs, as they are now."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        key = source, outputs, tuple((tensor.stride(), bool(outputs) and tensor.requires_grad) for tensor in tensors)
        if key not in self._parts:
            names = _names(source)
            held = dict(zip(names, values, strict=False))
            kind = next((device.type for device in self._devices if device.type != "cpu"), "cpu")
            joint = joint_graph(source, held, values[len(names) :], differentiate=outputs, kind=kind)
            placement = place_joint_graph(joint, self._plan, {name: (at,) for name, at in self.owners.items()})
            for name in names:
                self.owners.setdefault(name, placement.owners[name][0])
            self._parts[key] = two_parts(placement, self._devices)
        return self._parts[key]

    def _trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ForwardGraph:
        own = vars(self.model)  # export sees the class's own forward, and copies the module
        hidden: dict[str, Any] = {key: own.pop(key) for key in ("forward", "__deepcopy__") if key in own}
        try:
            return self._graphs(self.model, args, kwargs, None, None)
        finally:
            own.update(hidden)

    def _values(self, source: ForwardGraph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Returns the parameters and buffers that a graph reads, then the flat inputs."""
        return [*(operator.attrgetter(name)(self.model) for name in _names(source)), *flat_inputs(args, kwargs)]


def _names(source: ForwardGraph) -> list[str]:
    """Returns the names of the parameters and buffers that a graph reads."""
    return [name for name in source.held if name not in source.constants]


def run_forward(source: ForwardGraph, parts: TwoParts, key: Key, values: Sequence[Any]) -> dict[Any, torch.Tensor]:
    """Runs the forward part."""
    names, joint = _names(source), parts.placement.joint
    held = {**dict(zip(names, values, strict=False)), **parts.constants}
    inputs = [value for node, value in zip(joint.inputs, values[len(names) :], strict=True) if node is not None]
    return parts.forward(key, *(value.detach() for value in (*(held[name] for name in joint.held), *inputs)))


class _PlacedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: PlacedForward, source: ForwardGraph, parts: TwoParts, key: Key, *values: Any) -> Any:
        results = run_forward(source, parts, key, values)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(results.pop(at) for at in parts.saved))
        ctx.of, ctx.source, ctx.parts, ctx.key, ctx.values, ctx.names = of, source, parts, key, values, tuple(results)
        differentiable = parts.placement.joint.differentiable
        ctx.mark_non_differentiable(*(value for name, value in results.items() if name not in differentiable))
        return tuple(results.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        source, parts, saved = ctx.source, ctx.parts, ctx.saved_tensors
        incoming = {name: gradient for name, gradient in zip(ctx.names, gradients, strict=True) if gradient is not None}
        if tuple(incoming) != tuple(parts.placement.joint.tangents):
            parts = ctx.of.parts(source, ctx.values, ctx.of.guess(source, tuple(incoming)))
            again = run_forward(source, parts, ctx.key, ctx.values)
            saved = [again[at] for at in parts.saved]
        found = parts.backward(ctx.key, *saved, *(incoming[number] for number in parts.placement.joint.tangents))
        names = _names(source)
        leaves = enumerate(ctx.values[len(names) :])
        of_leaves = [found[number].to(leaf.device) if number in found else None for number, leaf in leaves]
        return None, None, None, None, *(found.get(name) for name in names), *of_leaves
