"""The part of a joint graph that one process runs, as a graph of its own: nodes on their devices, copies and messages between.

Every process gets the same order of the nodes of all devices and writes its part of it. A value is sent once to each other
device that reads it, as soon as it is made: as a copy between devices of one process, else as a message. Views are made by
every reader from their base.
"""

from __future__ import annotations

import contextlib
import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from rlplace.model.torch_adapter import pytree
from rlplace.runtime.base import activity
from rlplace.runtime.placement import wire
from rlplace.runtime.placement.assign import JointPlacement
from rlplace.runtime.placement.forward_graph import random_key
from rlplace.runtime.placement.joint_graph import as_made, base_of, is_view_node, lay_out, results_of


@dataclass(frozen=True, eq=False)
class Program:
    """The program of one process."""

    module: fx.GraphModule  # called with the wire where there are other processes, then the given values
    names: Sequence[Any]  # of its results
    messages: Mapping[int, wire.Message]  # to and from this process, by tag

    def __call__(self, key: tuple[int, int], *arguments: Any) -> dict[Any, torch.Tensor]:
        """Runs it; returns the results by name. Random ops draw from the streams of a seed and a step."""
        with contextlib.ExitStack() as stack:
            for kind in ("cpu", "cuda"):
                if torch.is_autocast_enabled(kind):  # its casts are nodes of the graph
                    stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(random_key(*key))
            return dict(zip(self.names, self.module(*arguments), strict=True))

    @property
    def copies(self) -> int:
        """Copies between devices of this process."""
        return len(self.module.graph.find_nodes(op="call_function", target=wire.start_copy))


AHEAD = 32
"""Receives are posted this many nodes before their values are needed."""

_aten = torch.ops.aten


class Emitter:
    """A writer of the part of one process.

    Args:
        placement: Where everything runs.
        devices: Of the plan, those of this process.
        order: Nodes of all processes, makers before readers; items of ops with several results are with their op.
        given: Values that exist before, each with its device (None: somewhere).
        wanted: Values, views among them, that are read at the end, each with the device.
        wired: Whether there are other processes. Then the first argument is the step's `Wire`.
    """

    def __init__(
        self,
        placement: JointPlacement,
        devices: Mapping[int, torch.device],
        order: Sequence[fx.Node],
        given: Iterable[tuple[fx.Node, int | None]],
        wanted: Iterable[tuple[fx.Node, int]],
        *,
        wired: bool = False,
    ) -> None:
        """Writes all nodes."""
        self.graph = fx.Graph()
        self.messages: dict[int, wire.Message] = {}
        self._placement, self._devices = placement, devices
        self._made: dict[tuple[fx.Node, int | None], fx.Node] = {}
        self._moving: dict[tuple[fx.Node, int], tuple[Any, ...]] = {}
        self._wire = self.graph.placeholder("wire") if wired else None
        sources: dict[fx.Node, list[int | None]] = {}
        for node, device in given:
            sources.setdefault(node, []).append(device)
            if device is None or device in devices:
                name = node.name if device is None else f"{node.name}_at_{device}"
                self._made[node, device] = self.graph.placeholder(name)
        self._leaving = self._plan_moves(order, sources, wanted)
        self._emit(order, sources)

    def _plan_moves(
        self, order: Sequence[fx.Node], sources: Mapping[fx.Node, Sequence[int | None]], wanted: Iterable[tuple[fx.Node, int]]
    ) -> dict[fx.Node, list[wire.Message]]:
        """Returns every move of a value to another device; tags rise in the order in which values are made."""
        device_of = self._placement.device_of
        readers: dict[fx.Node, dict[int, int]] = {}
        for index, node in enumerate(order):
            for base in self._placement.reads[node]:
                readers.setdefault(base, {}).setdefault(device_of[node], index)
        for node, device in wanted:
            readers.setdefault(base_of(node), {}).setdefault(device, len(order))
        moves: dict[fx.Node, list[wire.Message]] = {}
        tag = 0
        for value in (*sources, *(result for node in order for result in results_of(node))):
            there = sources.get(value) or [device_of[value]]
            for device, index in readers.get(value, {}).items():
                if device not in there:
                    tag += 1
                    moves.setdefault(value, []).append(wire.Message(value, there[0], device, tag, index))
        return moves

    def _posts(self, order: Sequence[fx.Node]) -> list[list[wire.Message]]:
        """Lists the receives to start before each own node, and at the end, in the order of each sender.

        NCCL knows no tags: it matches the messages of a direction by their order alone. A value that was sent early may be
        needed late, so receives cannot simply follow the order of needs.
        """
        own = [index for index, node in enumerate(order) if self._placement.device_of[node] in self._devices]
        posts: list[list[wire.Message]] = [[] for _ in range(len(own) + 1)]
        latest: dict[int | None, int] = {}
        for message in reversed([message for row in self._leaving.values() for message in row]):
            if message.source in self._devices or message.source is None or message.destination not in self._devices:
                continue
            needed = max(0, bisect_left(own, message.needed) - AHEAD)
            latest[message.source] = min(needed, latest.get(message.source, needed))
            posts[latest[message.source]].append(message)
        return [row[::-1] for row in posts]

    def _emit(self, order: Sequence[fx.Node], sources: Iterable[fx.Node]) -> None:
        posts = iter(self._posts(order))
        for value in sources:
            self._leave(value)
        phase = None
        for node in order:
            here = self._placement.device_of[node]
            if here not in self._devices:
                continue
            self._post(next(posts))
            if self._wire is not None and phase != node.meta["backward"]:
                phase = node.meta["backward"]
                self.graph.call_function(activity.mark, ("backward" if phase else "forward",))
            args, kwargs = pytree.tree_map(lambda value, here=here: self._operand(value, here), (node.args, dict(node.kwargs)))
            if node.target is _aten.as_strided.default:
                strides = tuple(node.args[0].meta["val"].stride())  # type: ignore[union-attr]
                args = (self.graph.call_function(lay_out, (args[0], strides)), *args[1:])
            made = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            for result in results_of(node):
                item = made if result is node else self.graph.call_function(operator.getitem, (made, result.args[1]))
                self._made[result, here] = item
                self._leave(result)
        self._post(next(posts))

    def _post(self, messages: Iterable[wire.Message]) -> None:
        for message in messages:
            self.messages[message.tag] = message
            posted = self.graph.call_function(wire.post, (self._wire, message.tag))
            self._moving[message.value, message.destination] = wire.arrive, (self._wire, posted)

    def _leave(self, value: fx.Node) -> None:
        """Starts to move a value to every other device that reads it."""
        for message in self._leaving.get(value, ()):
            if (value, message.source) not in self._made:
                continue
            made = self._made[value, message.source]
            if message.destination in self._devices:
                started = self.graph.call_function(wire.start_copy, (made, self._devices[message.destination]))
                self._moving[value, message.destination] = wire.finish, (started,)
            else:
                self.messages[message.tag] = message
                self.graph.call_function(wire.send, (self._wire, made, message.tag))

    def at(self, node: fx.Node, device: int | None) -> fx.Node:
        """Returns a value on a device."""
        if (node, device) not in self._made:
            if is_view_node(node):
                base = self.at(node.args[0], device)  # type: ignore[arg-type]
                made = self.graph.call_function(as_made(node), (base, *node.args[1:]), dict(node.kwargs))
            else:
                finish, arguments = self._moving[node, device]  # type: ignore[index]
                made = self.graph.call_function(finish, arguments)
            self._made[node, device] = made
        return self._made[node, device]

    def anywhere(self, node: Any) -> fx.Node | None:
        """Returns a value where it was made; None: in another process, or it is no node."""
        if not isinstance(node, fx.Node):
            return None
        base = base_of(node)
        return next((self.at(node, device) for value, device in self._made if value is base), None)

    def gradients(self) -> dict[str, fx.Node]:
        """Returns the sum of the parts of every gradient that this process owns, by parameter."""
        joint, owners = self._placement.joint, self._placement.owners
        results = (*(part for parts in joint.gradients.values() for part in parts), *joint.outputs)
        shared = Counter(base_of(item) for item in results if isinstance(item, fx.Node))
        sums = {}
        for name, parts in joint.gradients.items():
            if owners[name][0] in self._devices:
                total, *others = (self.at(part, owners[name][0]) for part in parts)
                if not others and shared[base_of(parts[0])] > 1:  # optimizers write to gradients: each has memory of its own
                    total = self.graph.call_function(_aten.clone.default, (total,))
                for other in others:
                    total = self.graph.call_function(_aten.add.Tensor, (total, other))
                sums[name] = total
        return sums

    def program(self, results: Mapping[Any, fx.Node | None]) -> Program:
        """Returns the program, with those results by name that are here."""
        found = {name: node for name, node in results.items() if node is not None}
        self.graph.output(tuple(found.values()))
        self.graph.lint()
        return Program(fx.GraphModule(nn.Module(), self.graph), tuple(found), self.messages)

    def _operand(self, value: object, device: int) -> object:
        if isinstance(value, fx.Node):
            return self.at(value, device)
        return self._devices[device] if isinstance(value, torch.device) else value
