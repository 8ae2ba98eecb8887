"""A joint graph on several devices of one process: its forward part and its backward part as two modules, copies inserted."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from rlplace.runtime import streams
from rlplace.runtime.distributed.joint.assign import JointPlaces
from rlplace.runtime.distributed.joint.order import forward_nodes
from rlplace.runtime.distributed.joint.views import base_of, is_view

_aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class TwoParts:
    """A joint graph in two parts.

    Attributes:
        places: What was split.
        forward: Called with the held tensors and the flat tensor inputs, in placeholder order; returns the tensor outputs, the
            new values of what is written, and what the backward part reads.
        backward: Called with the latter and the tangents; returns the gradients of the held tensors in `gradients`, each on its
            owner's device, and those of the inputs in `input_gradients`.
        held: Names of the held tensors, in calling order.
        inputs: Flat input numbers, in calling order.
        outputs: Flat output numbers that the forward part returns.
        writes: Names of what is written.
        gradients: Names.
        input_gradients: Flat input numbers.
        copies: Copies between devices in the forward part.
    """

    places: JointPlaces
    forward: fx.GraphModule
    backward: fx.GraphModule
    held: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    writes: tuple[str, ...]
    gradients: tuple[str, ...]
    input_gradients: tuple[int, ...]
    copies: int


def two_parts(places: JointPlaces, devices: Sequence[torch.device]) -> TwoParts:
    """Splits a joint graph into forward and backward and puts each node on its device.

    Args:
        places: Where everything runs.
        devices: One per device of the plan.
    """
    joint = places.joint
    early = forward_nodes(places)
    early |= {node for node in places.place if node.target is operator.getitem and node.args[0] in early}
    first = [node for node in places.place if node in early]
    second = [node for node in places.place if node not in early]
    inputs = tuple(i for i, node in enumerate(joint.inputs) if node is not None)
    outputs = tuple(i for i, item in enumerate(joint.outputs) if isinstance(item, fx.Node))
    given = [*joint.held.values(), *(joint.inputs[i] for i in inputs)]
    home = {node: places.owners[name][0] for name, node in joint.held.items()}

    # What the backward part reads of the forward part, and where.
    tangents = list(joint.tangents.values())
    reads = [(base, places.place[node]) for node in second for base in places.reads[node] if base in early or base in given]
    parts = [(part, places.owners[name][0]) for name, found in joint.gradients.items() for part in found]
    reads += [(base_of(part), place) for part, place in parts if base_of(part) in early or base_of(part) in given]
    saved = list(dict.fromkeys(reads))

    forward = _Emitter(places, devices, home)
    for node in given:
        forward.placeholder(node)  # type: ignore[arg-type]
    new = [(node, home[joint.held[name]]) for name, node in joint.writes.items()]
    forward.emit(first, [*saved, *new])
    made = [forward.anywhere(joint.outputs[i]) for i in outputs]
    written = [forward.at(node, place) for node, place in new]
    forward_module = forward.module((*made, *written, *(forward.at(base, place) for base, place in saved)))

    backward = _Emitter(places, devices, home)
    for base, place in saved:
        backward.received(base, place)
    for node in tangents:
        backward.placeholder(node)
    backward.emit(second, parts)
    sums = []
    shared = Counter(base_of(part) for part, _ in parts)
    for name, found in joint.gradients.items():
        total, *others = (backward.at(part, places.owners[name][0]) for part in found)
        if not others and shared[base_of(found[0])] > 1:  # optimizers write to gradients: each has memory of its own
            total = backward.graph.call_function(_aten.clone.default, (total,))
        for other in others:
            total = backward.graph.call_function(_aten.add.Tensor, (total, other))
        sums.append(total)
    of_inputs = [backward.anywhere(node) for node in joint.input_gradients.values()]
    return TwoParts(
        places=places,
        forward=forward_module,
        backward=backward.module((*sums, *of_inputs)),
        held=tuple(joint.held),
        inputs=inputs,
        outputs=outputs,
        writes=tuple(joint.writes),
        gradients=tuple(joint.gradients),
        input_gradients=tuple(joint.input_gradients),
        copies=forward.copies,
    )


class _Emitter:
    """Writes nodes of a joint graph into a new graph, each on its device, and starts copies where their values are made."""

    def __init__(self, places: JointPlaces, devices: Sequence[torch.device], home: Mapping[fx.Node, int]) -> None:
        self.graph = fx.Graph()
        self.graph.set_codegen(fx.graph.CodeGen())
        self.copies = 0
        self._places = places
        self._devices = devices
        self._home = home
        self._made: dict[tuple[fx.Node, int | None], fx.Node] = {}
        self._moving: dict[tuple[fx.Node, int], fx.Node] = {}

    def placeholder(self, node: fx.Node) -> None:
        """A value that comes from outside: a held tensor on its owner's device, anything else from anywhere."""
        self._made[node, self._home.get(node)] = self.graph.placeholder(node.name)

    def received(self, node: fx.Node, place: int) -> None:
        """A value that comes from outside and is on a device already."""
        self._made[node, place] = self.graph.placeholder(f"{node.name}_at_{place}")

    def emit(self, nodes: Sequence[fx.Node], also: Iterable[tuple[fx.Node, int]]) -> None:
        """Writes nodes, and starts the copies that they and `also` need."""
        wanted: dict[fx.Node, dict[int, None]] = {}
        for node in nodes:
            for base in self._places.reads[node]:
                wanted.setdefault(base, {})[self._places.place[node]] = None
        for node, place in also:
            wanted.setdefault(base_of(node), {})[place] = None
        for node in {key[0]: None for key in self._made}:
            self._start(node, wanted.get(node, ()))
        for node in nodes:
            here = self._places.place[node]
            args, kwargs = pytree.tree_map(lambda value, here=here: self._operand(value, here), (node.args, dict(node.kwargs)))
            self._made[node, here] = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            if "val" in node.meta:
                self._start(node, wanted.get(node, ()))

    def at(self, node: fx.Node, place: int | None) -> fx.Node:
        """A value on a device."""
        if (node, place) not in self._made:
            if is_view(node):
                inner, op = self.at(node.args[0], place), node.target  # type: ignore[arg-type]
                if op in (_aten.view.default, _aten._unsafe_view.default):
                    op = _aten.reshape.default  # a copy may lie otherwise in memory than what was traced
                self._made[node, place] = self.graph.call_function(op, (inner, *node.args[1:]), dict(node.kwargs))  # type: ignore[arg-type]
            else:
                self._made[node, place] = self.graph.call_function(streams.finish, (self._moving[node, place],))  # type: ignore[index]
        return self._made[node, place]

    def anywhere(self, node: fx.Node) -> fx.Node:
        """A value where it was made."""
        base = base_of(node)
        return self.at(node, next(place for made, place in self._made if made is base))

    def module(self, results: tuple[fx.Node, ...]) -> fx.GraphModule:
        """The graph with its results."""
        self.graph.output(results)
        self.graph.lint()
        return fx.GraphModule(nn.Module(), self.graph)

    def _operand(self, value: object, place: int) -> object:
        if isinstance(value, fx.Node):
            if value.meta.get("val") is None:  # several results: their items are where they are
                return self._made[value, place]
            return self.at(value, place)
        return self._devices[place] if isinstance(value, torch.device) else value

    def _start(self, node: fx.Node, places: Iterable[int]) -> None:
        """Starts the copies of a value to every other device that reads it."""
        sources = [at for made, at in self._made if made is node]
        for place in places:
            if place in sources or (node, place) in self._moving:
                continue
            source = self._made[node, sources[0]]
            self._moving[node, place] = self.graph.call_function(streams.start, (source, self._devices[place]))
            self.copies += 1
