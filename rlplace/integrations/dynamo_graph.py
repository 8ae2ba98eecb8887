"""One graph of dynamo as a module, its ops placed on devices, and how a call of it runs.

Dynamo hands over a graph of torch calls whose tensors, parameters among them, come in as arguments. It is traced to the ops
that plans are about, for the sizes of a call; other sizes are traced when they first come.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.graph.export import TrainingGraph, export_training_graph
from rlplace.graph.fake import fake_copy, fake_inputs, new_fake_mode
from rlplace.runtime import aliases
from rlplace.runtime.place_graph import PlacedGraph, place_graph

MOST_SIZES = 64
"""Sizes of a graph that are kept; those that came first make room."""

_ROOT = re.compile(r"^[LG]\['[^']*'\](\.__closure__\[\d+\]\.cell_contents)?\.?")


class GraphModule(nn.Module):
    """A graph of dynamo with its tensors as parameters and buffers, called with the rest.

    Parameters keep what they are; other tensors are inputs if their positions are in `inputs`, else buffers.
    """

    def __init__(self, graph: fx.GraphModule, args: Sequence[Any], inputs: Sequence[int] = ()) -> None:
        super().__init__()
        self.position_of: dict[str, int] = {}
        for position, value in enumerate(args):
            if not isinstance(value, torch.Tensor) or position in inputs:
                continue
            name = f"held_{position}"
            self.position_of[name] = position
            if isinstance(value, nn.Parameter):
                self.register_parameter(name, value)
            else:
                self.register_buffer(name, value.detach())
        plain = {p: value for p, value in enumerate(args) if not isinstance(value, torch.Tensor)}
        order, count, names = list(inputs), len(args), {p: name for name, p in self.position_of.items()}

        def run(module: nn.Module, given: Sequence[Any]) -> Any:
            by_position = dict(zip(order, given, strict=True)) | plain
            values = [getattr(module, names[p]) if p in names else by_position[p] for p in range(count)]
            return _Interpreter(graph).run(*values)  # unlike a call, it keeps what dynamo noted on every node

        self._run = run  # a function, so that copies of this module share dynamo's graph instead of copying it

    def forward(self, *given: Any) -> Any:
        return self._run(self, given)


class _Interpreter(fx.Interpreter):
    """Enters autocast itself: traced, dynamo's own function for it is noted, but takes no effect on the ops that follow."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as self._regions:  # closes regions that an error leaves open
            return super().run(*args, **kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(target, "__name__", "")
        if name == "_enter_autocast":
            region = contextlib.ExitStack()
            region.enter_context(torch.autocast(*args, **kwargs))
            return self._regions.enter_context(region)
        if name == "_exit_autocast":
            return args[0].close()
        return super().call_function(target, args, kwargs)


def module_path_of(op: str) -> str:
    """Path of the module that an op belongs to, below the object that was compiled; "" for that itself."""
    path = re.sub(r"\._modules\['([^']*)'\]", r".\1", op.rpartition("/")[0])
    path = re.sub(r"\[(\d+)\]", r".\1", _ROOT.sub("", path))
    return path.replace("['", ".").replace("']", "")


@dataclass(frozen=True, eq=False)
class Traced:
    """A graph for given sizes, as ops.

    Attributes:
        graph: Its ops; the names are those of nodes.
        path_of_op: Module path by op name, in execution order.
        position_of: Argument position of every held tensor, by name.
        written: Names of held tensors that an op writes to.
    """

    graph: TrainingGraph
    path_of_op: Mapping[str, str]
    position_of: Mapping[str, int]
    written: frozenset[str]


def trace(graph: fx.GraphModule, args: Sequence[Any]) -> Traced:
    """Traces a graph of dynamo for the sizes of a call; nothing is computed.

    Raises:
        InputError: It cannot be traced, with the reason.
    """
    module = GraphModule(graph, args)
    mode = new_fake_mode()
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = export_training_graph(fake_copy(module, mode), fake_inputs((), mode))
    except Exception as error:  # tracing runs code of the model and of torch, which may raise anything
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise InputError(
            f"backend rlplace: this graph cannot be traced to ops ({type(error).__name__}: {reason}); "
            "leave the function that causes it out with torch.compiler.disable, or place the model with rlplace.apply"
        ) from error
    paths = {op: module_path_of(op) for op in traced.op_name_of_node.values()}
    return Traced(traced, paths, module.position_of, _written(traced.module))


def _written(module: fx.GraphModule) -> frozenset[str]:
    memory = aliases.UnionFind()
    writes: list[fx.Node] = []
    for node in module.graph.nodes:
        for other in aliases.shared_with(node):
            memory.union(other, node)
        writes += aliases.written_by(node)
    changed = {memory.find(node) for node in writes}
    return frozenset(str(n.target) for n in module.graph.nodes if n.op == "get_attr" and memory.find(n) in changed)


class Runnable:
    """A graph for given sizes on its devices.

    Args:
        traced: The graph.
        device_of_op: Device by op name; ops without one follow their inputs.
        home: Device of what has neither.
        args: Of the call that it is made for.
        keep_weights: Keep the copies of tensors that need no gradient from call to call, until they change.
    """

    def __init__(
        self,
        traced: Traced,
        device_of_op: Mapping[str, torch.device],
        home: torch.device,
        args: Sequence[Any],
        *,
        keep_weights: bool,
    ) -> None:
        node_of = {op: node for node, op in traced.graph.op_name_of_node.items()}
        wanted = {node_of[op]: device for op, device in device_of_op.items()}
        self._position_of, self._keep = traced.position_of, keep_weights
        # What is written to and carries a gradient has a history that a copy cannot be put back into.
        fixed = {
            name: args[p].device for name, p in traced.position_of.items() if name in traced.written and args[p].requires_grad
        }
        source = traced.graph.module
        self.placed: PlacedGraph = place_graph(source, wanted, home, {name: name for name in traced.position_of}, fixed)
        self._written = [(name, traced.position_of[name]) for name in sorted(traced.written) if name not in fixed]
        self._out_spec = traced.graph.program.call_spec.out_spec
        self._constants: dict[str, torch.Tensor] = {}
        self._kept: dict[str, tuple[torch.Tensor, tuple[int, int], torch.Tensor]] = {}
        for name in self.placed.held:
            if name not in self._position_of:
                value = aliases.get_attr(source, name)
                if isinstance(value, torch._subclasses.FakeTensor):
                    raise InputError(
                        f"backend rlplace: tracing made a tensor of its own ({name}); register it as a buffer of the module, "
                        "or leave the code that makes it out with torch.compiler.disable"
                    )
                self._constants[name] = value.detach().to(self.placed.device_of_held[name])

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """The outputs, each where its op ran."""
        held = {name: self._held(name, args) for name in self.placed.held}
        flat = self.placed.module(*held.values())
        with torch.no_grad():
            for name, position in self._written:
                if name in held and held[name] is not args[position]:
                    args[position].copy_(held[name])
        return list(pytree.tree_unflatten(list(flat), self._out_spec))

    def _held(self, name: str, args: Sequence[Any]) -> torch.Tensor:
        if name in self._constants:
            return self._constants[name]
        value: torch.Tensor = args[self._position_of[name]]
        device = self.placed.device_of_held[name]
        if value.device == device:
            return value
        if not self._keep or (value.requires_grad and torch.is_grad_enabled()) or not isinstance(value, nn.Parameter):
            return value.to(device)
        state, kept = (value._version, value.data_ptr()), self._kept.get(name)
        if kept is None or kept[0] is not value or kept[1] != state:
            kept = self._kept[name] = (value, state, value.detach().to(device))
        return kept[2]


def output_devices(graph: fx.GraphModule) -> list[torch.device | None]:
    """Where the code around the graph expects each output; None for what is no tensor."""
    (node,) = (node for node in graph.graph.nodes if node.op == "output")
    found: list[torch.device | None] = []
    for value in node.args[0]:
        known = value.meta.get("example_value") if isinstance(value, fx.Node) else None
        found.append(known.device if isinstance(known, torch.Tensor) else None)
    return found


Assign = Callable[[Traced, Sequence[Any]], Mapping[str, torch.device]]
"""Devices of the ops of a traced graph, by op name; also gets the arguments of the call."""


def check_autocast(graph: fx.GraphModule, devices: Collection[torch.device]) -> None:
    """Refuses autocast that some of the devices would not follow: their ops would run in another dtype than the model's.

    Dynamo makes another graph when autocast changes, so that one look per graph is enough.
    """
    kinds = {device.type for device in devices}
    on = {kind for kind in kinds if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)}
    regions = {str(n.args[0]) for n in _all_nodes(graph) if getattr(n.target, "__name__", "") == "_enter_autocast"}
    for found in (on, regions):
        others = kinds - found
        if found and others:
            raise InputError(
                f"backend rlplace: autocast is on for {min(found)} and not for {min(others)}, but the plan uses both; "
                "use devices of one type, or cast the model itself"
            )


def check_functions(graph: fx.GraphModule) -> None:
    """Refuses functions with a backward of their own: what is traced of them is the forward, whose gradient may be another."""
    for node in _all_nodes(graph):
        if "autograd_function_apply" in str(node.target):
            raise InputError(
                "backend rlplace: the graph calls a torch.autograd.Function, whose own backward would be lost; "
                "leave the code that calls it out with torch.compiler.disable"
            )


def _all_nodes(graph: fx.GraphModule) -> Iterator[fx.Node]:
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            yield from module.graph.nodes


class PlacedCall:
    """What dynamo calls instead of its graph."""

    def __init__(self, graph: fx.GraphModule, assign: Assign, home: torch.device, *, keep_weights: bool) -> None:
        self._graph, self._assign, self._home, self._keep = graph, assign, home, keep_weights
        self._outputs = output_devices(graph)
        self._runnables: dict[Any, Runnable] = {}

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        key = tuple((tuple(a.shape), a.stride(), a.dtype) if isinstance(a, torch.Tensor) else a for a in args)
        runnable = self._runnables.get(key)
        if runnable is None:
            check_functions(self._graph)
            with fx.traceback.preserve_node_meta():  # dynamo's notes on its nodes become the modules of the ops
                traced = trace(self._graph, args)
                devices = self._assign(traced, args)
            check_autocast(self._graph, {*devices.values(), self._home})
            runnable = Runnable(traced, devices, self._home, args, keep_weights=self._keep)
            if len(self._runnables) >= MOST_SIZES:
                del self._runnables[next(iter(self._runnables))]
            self._runnables[key] = runnable
        found = runnable(args)
        return tuple(
            value if device is None or not isinstance(value, torch.Tensor) else value.to(device)
            for value, device in zip(found, self._outputs, strict=True)
        )
