"""Puts every node of an exported graph on its device and inserts the copies.

Rules beyond "each op where the plan says":

* Views, in-place ops and tuple items stay with the tensor they belong to.
* What is written to (running statistics of a batch norm, counters) stays with the op that writes.
* A tensor is copied once per device, and again only after a write to it; the copy starts where the tensor is made.
* A parameter or constant sits with the first op that reads it; other devices read a copy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rlplace.errors import InputError
from rlplace.problem.order import UnionFind
from rlplace.runtime import aliases, streams
from rlplace.runtime.aliases import is_tensor
from rlplace.runtime.held import hold_attributes, rewrite_devices


@dataclass(frozen=True, eq=False)
class PlacedGraph:
    """A graph whose ops run on several devices.

    Attributes:
        module: Called with the tensors of `held`, then the flat user inputs; returns the flat outputs.
        held: Names of parameters, buffers and constants, in calling order.
        device_of_held: Device of each of them.
        device_of_node: Device by name, for every node that makes tensors.
        copies: Copies in the graph, those of user inputs included.
    """

    module: Callable[..., Any]
    held: tuple[str, ...]
    device_of_held: Mapping[str, torch.device]
    device_of_node: Mapping[str, torch.device]
    copies: int


def place_graph(
    source: fx.GraphModule,
    wanted: Mapping[str, torch.device],
    home: torch.device,
    first_name: Mapping[str, str],
    fixed: Mapping[str, torch.device],
) -> PlacedGraph:
    """Rewrites an exported graph for several devices.

    Args:
        source: The exported module (`TrainingGraph.module`); its graph is copied.
        wanted: Device by node name; nodes that are not in it follow their inputs.
        home: Device of nodes that have neither.
        first_name: First name of each parameter and buffer by any of its names, so that ties have one holder.
        fixed: Devices of parameters and buffers that are already in place, by first name.

    Raises:
        InputError: The graph has a construct that cannot be split over devices.
    """
    module, _, held = hold_attributes(source, first_name)
    placer = _Placer(module, held, wanted, home, fixed)
    placer.assign()
    copies = placer.insert_copies()
    for node in module.graph.nodes:
        rewrite_devices(node, placer.device.get(node, home))
    module.graph.lint()
    module.recompile()
    return PlacedGraph(
        module=module,
        held=tuple(held),
        device_of_held={name: placer.device[node] for name, node in held.items()},
        device_of_node={node.name: device for node, device in placer.device.items()},
        copies=copies,
    )


class _Placer:
    """Devices of the nodes of one graph."""

    def __init__(
        self,
        module: fx.GraphModule,
        held: Mapping[str, fx.Node],
        wanted: Mapping[str, torch.device],
        home: torch.device,
        fixed: Mapping[str, torch.device],
    ) -> None:
        self.module = module
        self.graph = module.graph
        self.held = set(held.values())
        self.wanted = wanted
        self.home = home
        self.fixed = {node: fixed[name] for name, node in held.items() if name in fixed}
        self.inputs = {node for node in self.graph.nodes if node.op == "placeholder" and node not in self.held}
        self.device: dict[fx.Node, torch.device] = {}
        self.memory = aliases.shared_memory(self.graph.nodes)
        self.written = aliases.changed_memory(self.graph.nodes, self.memory)

    def assign(self) -> None:
        """Gives every node that makes tensors a device."""
        together = self._colocated()
        members: dict[fx.Node, list[fx.Node]] = {}
        for node in self.graph.nodes:
            members.setdefault(together.find(node), []).append(node)
        decided: dict[fx.Node, torch.device] = {}
        for node in self.graph.nodes:
            root = together.find(node)
            if node.op in ("placeholder", "get_attr", "output") and root not in decided:
                continue  # they follow the ops that read them
            if root not in decided:
                decided[root] = self._decide(members[root], node)
            self.device[node] = decided[root]
        for node in [*self.held, *self.inputs]:
            readers = [user for user in node.users if user in self.device]
            default = self.device[readers[0]] if readers else self.home
            self.device[node] = self.fixed.get(node, decided.get(together.find(node), default))

    def _colocated(self) -> UnionFind:
        """Sets of nodes that must share a device."""
        together = UnionFind()
        input_memory = {self.memory.find(node) for node in self.graph.nodes if node.op == "placeholder"}
        for node in self.graph.nodes:
            item = node.target is operator.getitem
            for other in aliases.shared_with(node):
                memory = self.memory.find(other)
                # Reading a parameter or input through a view is as good on a copy, unless somebody writes to it or the view
                # depends on how it lies in memory.
                if item or memory in self.written or node.target is torch.ops.aten.as_strided.default:
                    together.union(other, node)
                elif memory not in input_memory and aliases.surely_shares(node):
                    together.union(other, node)
            for other in aliases.written_by(node):
                together.union(other, node)
        return together

    def _decide(self, members: list[fx.Node], first: fx.Node) -> torch.device:
        for node in members:
            if node in self.fixed:
                return self.fixed[node]
        # The op that makes the tensor decides for its views; a lone view decides for itself.
        for node in members:
            if node.name in self.wanted:
                return self.wanted[node.name]
        for node in first.all_input_nodes:
            if node in self.device and node not in self.held:
                return self.device[node]
        return self.home

    def insert_copies(self) -> int:
        """Makes every op read its operands on its own device; returns how many copies that takes."""
        copies = 0
        version: dict[fx.Node, fx.Node] = {}  # the last write to each memory
        known: dict[tuple[fx.Node, torch.device, fx.Node | None], fx.Node] = {}
        copies += self._copy_written_inputs()
        position = {node: number for number, node in enumerate(self.graph.nodes)}
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        for node in list(self.graph.nodes):
            if node.op in ("placeholder", "get_attr", "output") or node.meta.get("is_copy"):
                continue
            device = self.device[node]
            for operand in node.all_input_nodes:
                if operand.op == "get_attr" or not self._moves(operand, device):
                    continue
                if not is_tensor(operand):
                    raise InputError(f"op {node.name!r} reads several tensors of another device as one value")
                write = version.get(self.memory.find(operand))
                key = (operand, device, write)
                if key not in known:
                    latest = operand if write is None or position[write] < position[operand] else write
                    early = latest.next if latest.op != "placeholder" else first
                    known[key] = self._copy(operand, device, early, node)
                    copies += 1
                node.replace_input_with(operand, known[key])
            for operand in aliases.written_by(node):
                version[self.memory.find(operand)] = node
        return copies

    def _moves(self, operand: fx.Node, device: torch.device) -> bool:
        if operand.op == "placeholder" and operand in self.inputs:
            return is_tensor(operand)  # it may come from anywhere
        value = operand.meta.get("val")
        leaves = torch.utils._pytree.tree_leaves(value)
        return any(isinstance(leaf, torch.Tensor) for leaf in leaves) and self.device[operand] != device

    def _copy(self, operand: fx.Node, device: torch.device, early: fx.Node, late: fx.Node) -> fx.Node:
        """Starts a copy before one node and waits for it before another."""
        with self.graph.inserting_before(early):
            moving = self.graph.call_function(streams.start_copy, (operand, device))
        with self.graph.inserting_before(late):
            copy = self.graph.call_function(streams.finish, (moving,))
        for node in (moving, copy):
            node.meta = {"val": operand.meta["val"], "is_copy": True}
            self.device[node] = device
        return copy

    def _copy_written_inputs(self) -> int:
        """A user input that the model writes to is moved once, first thing, and that copy stands for it."""
        copies = 0
        first = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        for node in self.graph.nodes:
            if node in self.inputs and is_tensor(node) and self.memory.find(node) in self.written and first is not None:
                copy = self._copy(node, self.device[node], first, first)
                node.replace_all_uses_with(copy, delete_user_cb=lambda user, moving=copy.args[0]: user is not moving)
                self.memory.union(node, copy)
                copies += 1
        return copies
