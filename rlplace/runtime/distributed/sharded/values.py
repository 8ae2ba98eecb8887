"""The values of one pass over a sharded program on this device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from rlplace.runtime import aliases
from rlplace.runtime.distributed.execution.engine import to_device
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.graph.randomness import seeded
from rlplace.runtime.distributed.sharded.exchange import Meshes, exchange_between, exchanged
from rlplace.runtime.distributed.sharded.local_ops import LocalOp, OpCut, bound, dropped_attention
from rlplace.runtime.distributed.sharded.spaces import TensorShape
from rlplace.runtime.distributed.sharded.spec import WHOLE, Spec, normal, whole
from rlplace.runtime.distributed.sharded.views import Call
from rlplace.runtime.held import is_check, rewrite_devices

Demand = tuple[Spec, frozenset[int]]
"""Layout in which an op takes an argument, and the mesh axes over which the gradients that it leaves are to be summed."""


@dataclass(frozen=True, eq=False)
class Step:
    """One op of the program.

    Attributes:
        node: Its node of the forward graph.
        way: ``cut``, ``view``, ``whole``, ``random`` or ``made``.
        demands: By position among the flat arguments.
        cut: For ``cut`` and ``random``.
        local: Local implementation, for ``cut``.
        call: For ``view``.
        writes: Nodes whose memory it changes.
        drawn: For ``random``: the first argument of the whole op.
    """

    node: fx.Node
    way: str
    demands: Mapping[int, Demand] = field(default_factory=dict)
    cut: OpCut | None = None
    local: LocalOp | None = None
    call: Call | None = None
    writes: tuple[fx.Node, ...] = ()
    drawn: TensorShape | None = None


@dataclass(frozen=True, eq=False)
class ShardedProgram:
    """What every device runs.

    Attributes:
        mesh_shape: Axis sizes.
        steps: In order, placeholders and output left out.
        specs: By node name the layout of the node's value, a list for a node of several values.
        home: By name of a held tensor its layout between steps.
        report: By op name how it runs and why.
        family: By node the number of its family of nodes that share memory, for nodes whose memory is written to.
    """

    mesh_shape: tuple[int, ...]
    steps: tuple[Step, ...]
    specs: Mapping[str, Any]
    home: Mapping[str, Spec]
    report: Mapping[str, str]
    family: Mapping[fx.Node, int]


def storable(spec: Spec) -> Spec:
    """The nearest layout that a DTensor of the tensor's own shape has: axes that spread a dimension outermost, in order."""
    dims = []
    for factors in spec.dims:
        axes = sorted((axis, size) for size, axis in factors if axis != WHOLE)
        rest = prod(size for size, axis in factors if axis == WHOLE)
        dims.append(normal([*((size, axis) for axis, size in axes), (rest, WHOLE)]))
    return Spec(tuple(dims))


def written_families(graph: fx.Graph) -> dict[fx.Node, int]:
    """Nodes that share memory with something that is written to after it was made."""
    memory = aliases.shared_memory(graph.nodes)
    written: list[fx.Node] = []
    for node in graph.nodes:
        for other in writes_of(node):
            if node.target is seeded:
                memory.union(other, node)
            written.append(other)
    changed = {root: number for number, root in enumerate(dict.fromkeys(memory.find(node) for node in written))}
    return {node: changed[root] for node in graph.nodes if (root := memory.find(node)) in changed}


def writes_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Nodes whose values the node changes."""
    if node.target is not seeded:
        return tuple(aliases.written_by(node))
    arguments = node.args[0]._schema.arguments  # type: ignore[union-attr]
    pairs = zip(arguments, node.args[2:], strict=False)
    return tuple(v for a, v in pairs if a.alias_info is not None and a.alias_info.is_write and isinstance(v, fx.Node))


Key = tuple[str, Spec, frozenset[int]]
"""A held tensor by its node, the layout that it is read in, and the axes that its gradients are summed over."""


@dataclass(frozen=True, eq=False)
class Setting:
    """What all passes have in common.

    Attributes:
        graph: The forward.
        program: Its layouts.
        mesh: The devices.
        device: Where this process computes.
        buffers: Held tensors that every device has, by node name.
        regions: Graphs inside the graph, for this device, by attribute.
    """

    graph: ForwardGraph
    program: ShardedProgram
    mesh: Meshes
    device: torch.device
    buffers: Mapping[str, torch.Tensor]
    regions: Mapping[str, fx.GraphModule]


def regions_of(graph: ForwardGraph, device: torch.device) -> dict[str, fx.GraphModule]:
    """Copies of the graphs inside a graph that make their constants on a device."""
    regions: dict[str, fx.GraphModule] = {}
    for node in graph.module.graph.nodes:
        value = aliases.get_attr(graph.module, str(node.target)) if node.op == "get_attr" else None
        if isinstance(value, fx.GraphModule):
            regions[str(node.target)] = copy.deepcopy(value)
            for inner in list(regions[str(node.target)].graph.nodes):
                if is_check(inner):
                    regions[str(node.target)].graph.erase_node(inner)
                else:
                    rewrite_devices(inner, device)
            regions[str(node.target)].recompile()
    return regions


class Values:
    """The values of one pass over the program on this device."""

    def __init__(self, setting: Setting, held: Mapping[Key, torch.Tensor], leaves: Sequence[Any]) -> None:
        """Before the first op.

        Args:
            setting: The program and where it runs.
            held: Parameters in every layout that they are read in.
            leaves: Flat inputs.
        """
        self.setting, self.mesh, self.program = setting, setting.mesh, setting.program
        self.values: dict[str, Any] = dict(setting.buffers)
        self.read_as: dict[str, dict[Demand, torch.Tensor]] = {}
        for (node, spec, summed), local in held.items():
            self.read_as.setdefault(node, {})[spec, summed] = local
        for node, leaf in zip(setting.graph.inputs, leaves, strict=True):
            self.values[node] = to_device(leaf, setting.device)

    def run(self, steps: Sequence[Step]) -> None:
        """Runs steps in order; values are dropped after their last reader."""
        last: dict[str, int] = {}
        for index, step in enumerate(steps):
            for other in step.node.all_input_nodes:
                last[other.name] = index
        keep = {str(name) for name in self.setting.graph.outputs} | {str(self.setting.graph.loss)}
        for index, step in enumerate(steps):
            self.values[step.node.name] = self._run(step)
            for other in step.writes:
                self._forget(other)
            for other in step.node.all_input_nodes:
                if last[other.name] == index and other.name not in keep and other.op != "placeholder":
                    self.values.pop(other.name, None)
                    self.read_as.pop(other.name, None)

    def whole(self, name: str) -> Any:
        """A value as the unplaced model has it."""
        return pytree.tree_map(lambda spec: self.read(name, whole(spec.shape)), self.program.specs[name])

    def read(self, name: str, spec: Spec, summed: frozenset[int] = frozenset()) -> torch.Tensor:
        """A value in a given layout; several readers of one layout share its communication."""
        known = self.read_as.setdefault(name, {})
        if (spec, summed) not in known:
            local: torch.Tensor = self.values[name]
            route = exchange_between(self.program.specs[name], spec, summed, self.mesh.ndim)
            known[spec, summed] = local if route is None else exchanged(local, route, self.mesh)
        return known[spec, summed]

    def _forget(self, node: fx.Node) -> None:
        family = self.program.family.get(node)
        for other, number in self.program.family.items():
            if number == family:
                self.read_as.pop(other.name, None)

    def _run(self, step: Step) -> Any:
        node = step.node
        if node.op == "get_attr":
            name = str(node.target)
            return self.setting.regions.get(name) or aliases.get_attr(self.setting.graph.module, name)
        if getattr(node.target, "__name__", "") == "getitem":
            return self.values[node.args[0].name][node.args[1]]  # type: ignore[union-attr, index]
        target: Any = node.target
        args: Any = node.args
        if target is seeded and step.way == "random":
            target, args = args[0], args[2:]
        leaves, tree = pytree.tree_flatten((args, node.kwargs))
        offset = len(leaves) - len(flat_arguments(node))  # the stream of a random op comes first
        filled = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, fx.Node):
                demand = step.demands.get(position - offset)
                filled.append(self.values[leaf.name] if demand is None else self.read(leaf.name, *demand))
            else:
                filled.append(self.setting.device if isinstance(leaf, torch.device) else leaf)
        if step.call is not None:
            return step.call(filled[0])
        local_args, local_kwargs = pytree.tree_unflatten(filled, tree)
        if step.way == "random":
            return self._draw(step, target, bound(target, local_args, local_kwargs))
        if step.local is not None and step.cut is not None:
            return step.local.run(target, step.cut, self.mesh, bound(target, local_args, local_kwargs))
        return target(*local_args, **local_kwargs)  # type: ignore[operator]

    def _draw(self, step: Step, op: Any, args: Sequence[Any]) -> torch.Tensor:
        """A random op on pieces: the factors of the whole op are drawn, and this device's taken."""
        cut, number = step.cut, step.node.args[1]
        assert cut is not None
        assert step.drawn is not None
        shape = step.drawn.shape
        if "attention" in str(op):
            key: Any = step.node.args[3]
            keys = self.program.specs[key.name].shape[-2]
            ones = torch.ones((*shape[:-1], keys), dtype=args[0].dtype, device=args[0].device)
            kept = seeded(torch.ops.aten.dropout.default, number, ones, args[4], True)  # type: ignore[arg-type]
            names = [*(cut.inputs[0] or ())[:3], ""]
            return dropped_attention(cut, self.mesh, args, cut.own(kept, names, self.mesh))
        # In the strides of the whole op's argument, since a kernel may draw in the order of memory.
        dense = torch.empty(shape, device="meta").stride()
        stride = step.drawn.stride if sorted(step.drawn.stride) == sorted(dense) else dense
        ones = torch.empty_strided(shape, stride, dtype=args[0].dtype, device=args[0].device).fill_(1.0)
        kept = seeded(op, number, ones, *args[1:])  # type: ignore[arg-type]
        return args[0] * cut.own(kept, cut.inputs[0] or (), self.mesh)


def flat_arguments(node: fx.Node) -> list[Any]:
    """The flat arguments of a node's op, without those of the stream that a random op draws from."""
    args = node.args[2:] if node.target is seeded else node.args
    return pytree.tree_leaves((args, node.kwargs))
