"""The forward of a module in one process whose ops, forward and backward, run on the devices that a plan gives them."""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from rlplace.plan.device_map import device_of_op
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.graph.assign import check_same_ops
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph, Graphs, flat_inputs
from rlplace.runtime.distributed.graph.randomness import random_key
from rlplace.runtime.distributed.joint.assign import place_joint_graph
from rlplace.runtime.distributed.joint.graph import joint_graph
from rlplace.runtime.distributed.joint.two_parts import TwoParts, two_parts
from rlplace.runtime.held import first_names

Key = tuple[int, int]


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
        """Traces the forward for example inputs.

        Raises:
            InputError: It cannot be exported, or is not what was planned.
        """
        self.__signature__ = inspect.signature(model.forward)
        self.model, self._plan, self._devices = model, plan, devices
        self._names = set(first_names(model).values())
        self._trace = Graphs()
        self._graphs: dict[ForwardGraph, PlacedGraph] = {}
        self.owners: dict[str, int] = {}
        first = self._graph(args, kwargs)
        check_same_ops(first.source, set(device_of_op(plan)))
        self.copies = first.parts([*first.held(), *flat_inputs(args, kwargs)], first.guess).copies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        graph = self._graph(args, kwargs)
        return pytree.tree_unflatten(graph(flat_inputs(args, kwargs)), graph.source.out_spec)

    def _graph(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PlacedGraph:
        with _without_placed_forward(self.model):
            source = self._trace(self.model, args, kwargs, None, None)
        return self._graphs.setdefault(source, PlacedGraph(self, source))

    def make_parts(
        self, source: ForwardGraph, held: Mapping[str, torch.Tensor], leaves: Sequence[Any], outputs: tuple[int, ...]
    ) -> TwoParts:
        """Traces and places the joint graph for parameters and buffers, flat inputs and the outputs to differentiate."""
        kind = next((device.type for device in self._devices if device.type != "cpu"), "cpu")
        joint = joint_graph(source, {**held, **source.constants}, leaves, differentiate=outputs, kind=kind)
        placement = place_joint_graph(joint, self._plan, {name: (at,) for name, at in self.owners.items()})
        for name, owner in placement.owners.items():
            if name in self._names:
                self.owners.setdefault(name, owner[0])
        return two_parts(placement, self._devices, {**source.constants, **joint.constants})


class PlacedGraph:
    """The graphs of one signature of inputs.

    Which outputs get a gradient is known in backward only. The forward prepares for those that got one the last time, at first
    for the loss; should others get one, it runs again, with the same random numbers.

    Attributes:
        source: The forward that was traced.
        names: Of the parameters and buffers that it reads.
        guess: Numbers of the outputs that are likely to get a gradient.
    """

    def __init__(self, of: PlacedForward, source: ForwardGraph) -> None:
        self._of, self.source = of, source
        self.names = [name for name in source.held if name not in source.constants]
        loss = source.outputs.index(source.loss) if source.loss in source.outputs else None
        self.guess = tuple(range(len(source.outputs))) if loss is None else (loss,)
        self._parts: dict[Hashable, TwoParts] = {}
        self._held = [operator.attrgetter(name) for name in self.names]

    def held(self) -> list[torch.Tensor]:
        """The parameters and buffers that the graph reads."""
        return [value(self._of.model) for value in self._held]

    def parts(self, values: Sequence[Any], outputs: tuple[int, ...]) -> TwoParts:
        """The graph that differentiates some outputs."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        key = outputs, tuple((tensor.stride(), bool(outputs) and tensor.requires_grad) for tensor in tensors)
        if key not in self._parts:
            count = len(self.names)
            held = dict(zip(self.names, values[:count], strict=True))
            self._parts[key] = self._of.make_parts(self.source, held, values[count:], outputs)
        return self._parts[key]

    def __call__(self, leaves: Sequence[Any]) -> list[Any]:
        """The flat outputs."""
        values = [*self.held(), *leaves]
        training = torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
        parts = self.parts(values, self.guess if training else ())
        joint = parts.placement.joint
        # Running statistics change before backward reads them.
        before = list(values)
        for index, name in enumerate(self.names):
            if name in joint.writes:
                before[index] = values[index].detach().clone()
        key = int(torch.randint(1 << 62, ()).item()), 0
        if training and joint.differentiable:
            results = list(_Step.apply(self, parts, key, *before))
        else:
            results = self.run_forward(parts, key, before)[0]
        outputs, new = results[: len(parts.outputs)], results[len(parts.outputs) :]
        with torch.no_grad():
            for name, value in zip(joint.writes, new, strict=True):
                values[self.names.index(name)].copy_(value)
        remaining = iter(outputs)
        return [next(remaining) if isinstance(item, fx.Node) else item for item in joint.outputs]

    def run_forward(self, parts: TwoParts, key: Key, values: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Runs the forward part; returns outputs and written values, and what backward reads."""
        count = len(self.names)
        arguments = [*values[:count], *parts.constants, *(values[count + index] for index in parts.inputs)]
        with running(key):
            results = parts.forward(*(value.detach() for value in arguments))
        made = len(parts.outputs) + len(parts.placement.joint.writes)
        return list(results[:made]), list(results[made:])


@contextlib.contextmanager
def running(key: Key) -> Iterator[None]:
    """Ops draw from the streams of a step; casts of autocast are nodes of the graph."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(random_key(*key))
        yield


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: PlacedGraph, parts: TwoParts, key: Key, *values: Any) -> Any:
        results, saved = graph.run_forward(parts, key, values)
        ctx.graph, ctx.parts, ctx.key, ctx.values = graph, parts, key, values
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        joint = parts.placement.joint
        numbers = [*parts.outputs, *(-1 for _ in joint.writes)]
        constant = (result for result, number in zip(results, numbers, strict=True) if number not in joint.differentiable)
        ctx.mark_non_differentiable(*constant)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        parts, graph = ctx.parts, ctx.graph
        incoming = {i: g for i, g in zip(parts.outputs, gradients, strict=False) if g is not None}
        wanted, saved = tuple(incoming), ctx.saved_tensors
        if wanted != tuple(parts.placement.joint.tangents):
            graph.guess = wanted
            parts = graph.parts(ctx.values, wanted)
            saved = graph.run_forward(parts, ctx.key, ctx.values)[1]
        with running(ctx.key):
            results = parts.backward(*saved, *(incoming[i] for i in parts.placement.joint.tangents))
        of_values: list[torch.Tensor | None] = [None] * len(ctx.values)
        joint = parts.placement.joint
        for name, gradient in zip(joint.gradients, results, strict=False):
            of_values[graph.names.index(name)] = gradient
        for number, gradient in zip(joint.input_gradients, results[len(joint.gradients) :], strict=True):
            position = len(graph.names) + number
            of_values[position] = gradient.to(ctx.values[position].device)
        return None, None, None, *of_values


@contextlib.contextmanager
def _without_placed_forward(model: nn.Module) -> Iterator[None]:
    """Lets export see the class's own forward while the placed one is installed."""
    hidden = {}
    if isinstance(vars(model).get("forward"), PlacedForward):
        hidden = {key: vars(model).pop(key) for key in ("forward", "__deepcopy__")}
    try:
        yield
    finally:
        vars(model).update(hidden)
