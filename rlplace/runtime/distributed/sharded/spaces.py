"""Iteration spaces of the ops of a forward graph, by the names that the shards of a plan use.

The forward runs once on fake tensors, as capture runs it, so that dimensions are split into the same pieces (``n.0``, ``n.1``)
for the same model. Capture describes storages; here the names of the dimensions of each argument and result are kept, too,
since they say how these are laid out when the op is cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from rlplace.graph.access import Access, Space, _in_order, access_of, rule_of
from rlplace.graph.build import composed
from rlplace.graph.fake import any_dtype_grouped_mm, new_fake_mode
from rlplace.graph.indices import Layouts
from rlplace.graph.record import Recorder
from rlplace.plan.device_map import LOSS_OP
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.graph.randomness import seeded
from rlplace.runtime.distributed.sharded.loss_graph import LOSS_PREFIX

Names = tuple[str, ...]


@dataclass(frozen=True)
class TensorShape:
    """A tensor as the forward sees it: sizes, strides and dtype."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class OpSpace:
    """Iteration space of one op.

    Attributes:
        dims: Per dimension its pieces and their sizes, outermost first; a dimension that is not split is its own piece.
        inputs: Names of the dimensions of each tensor among the flat arguments, None for a tensor that no part reads by name.
        outputs: Likewise for the flat results.
        statistics: Names that the sums inside the op are kept for; other dimensions are summed over.
    """

    dims: Mapping[str, tuple[tuple[str, int], ...]]
    inputs: tuple[Names | None, ...]
    outputs: tuple[Names | None, ...]
    statistics: tuple[Names, ...]


@dataclass(frozen=True, eq=False)
class Spaces:
    """What one fake run of a forward tells.

    Attributes:
        values: By node name the node's value with a `TensorShape` for every tensor.
        of: By node name the space of an op that has one.
        pieces: By node name all pieces that a plan may cut, ops that only compose others included.
    """

    values: Mapping[str, Any]
    of: Mapping[str, OpSpace]
    pieces: Mapping[str, Mapping[str, int]]


def spaces_of(graph: ForwardGraph) -> Spaces:
    """Runs the forward on fake tensors; nothing is allocated.

    Args:
        graph: Its held tensors are taken to be contiguous.
    """
    mode = new_fake_mode()
    recorder = Recorder()
    runner = _Runner(graph, recorder)
    with mode, any_dtype_grouped_mm(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        inputs = [_fake(graph, node, mode) for node in graph.module.graph.nodes if node.op == "placeholder"]
        with recorder:
            runner.run(*inputs)
    accesses = _accesses(recorder)
    layouts = Layouts(accesses)
    of: dict[str, OpSpace] = {}
    for number, named in runner.spaces.items():
        of[runner.node_of[number]] = _op_space(named, layouts.dims.get(number, {}))
    for node, named in runner.loss_spaces.items():
        of[node] = _op_space(named, named[0].dims)
    pieces = {runner.node_of[number]: sizes for number, sizes in layouts.dims.items()}
    return Spaces(runner.values, of, pieces)


def _op_space(named_space: tuple[Space, list[Any], list[Any]], sizes: Mapping[str, int]) -> OpSpace:
    """A space with its dimensions split into pieces of these sizes; dimensions without any cannot be cut."""
    space, arguments, results = named_space
    dims: dict[str, tuple[tuple[str, int], ...]] = {}
    for name, size in space.dims.items():
        split = tuple((piece, size) for piece, size in sizes.items() if _base(piece) == name)
        if split and size > 1:
            dims[name] = split
    named = {id(tensor): tuple(n if n in dims else "" for n in names) for tensor, names in space.tensors}
    return OpSpace(
        dims=dims,
        inputs=tuple(None if t is None else named.get(id(t)) for t in arguments),
        outputs=tuple(None if t is None else named.get(id(t)) for t in results),
        statistics=tuple(names for names, _ in space.statistics),
    )


def in_loss(graph: ForwardGraph, node: fx.Node) -> bool:
    """Whether a node is an op of a loss function outside the model, see `open_loss`."""
    name = graph.op_of_node.get(node.name, "")
    return name.startswith(LOSS_PREFIX) or (name == LOSS_OP and isinstance(node.target, torch._ops.OpOverload))


def _base(piece: str) -> str:
    return piece.partition(".")[0]


def _fake(graph: ForwardGraph, node: fx.Node, mode: FakeTensorMode) -> Any:
    layout = graph.layout.get(node.name)
    if layout is None:
        return node.meta.get("val")
    tensor = torch.empty(layout.shape, dtype=layout.dtype, device="cpu")
    return tensor.requires_grad_(layout.requires_grad)


def _accesses(recorder: Recorder) -> dict[int, Access]:
    """The accesses of all labels, those of ops without a rule from the ATen ops that they ran."""
    accesses: dict[int, Access] = {}
    for number, label in enumerate(recorder.labels):
        access = label.access
        if access is None:
            known = [part for part in label.parts or () if part is not None]
            if known and len(known) == len(label.parts or ()):
                created = frozenset(s for event in recorder.events if event.owner == number for s in event.creates)
                access = composed(known, created)
        if access is not None:
            accesses[number] = access
    return accesses


class _Runner(fx.Interpreter):
    """Runs each op inside a label, as capture does."""

    def __init__(self, graph: ForwardGraph, recorder: Recorder) -> None:
        super().__init__(graph.module)
        self.graph_, self.recorder = graph, recorder
        self.node: fx.Node | None = None
        self.values: dict[str, Any] = {}
        self.spaces: dict[int, tuple[Space, list[Any], list[Any]]] = {}
        self.loss_spaces: dict[str, tuple[Space, list[Any], list[Any]]] = {}
        self.loss_label: Any = None
        self.open = contextlib.ExitStack()
        self.node_of: dict[int, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        value = super().run_node(n)
        if n.op != "output":
            self.values[n.name] = pytree.tree_map(_described, value)
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node = self.node
        assert node is not None
        if target is seeded:
            target, args = args[0], args[2:]
        name = self.graph_.op_of_node.get(node.name)
        if name is None:
            return super().call_function(target, args, kwargs)
        if in_loss(self.graph_, node):
            return self._call_loss(node, target, args, kwargs)
        with self.recorder.label(name, str(target), "") as label:
            number = len(self.recorder.labels) - 1
            self.node_of[number] = node.name
            rule = rule_of(target)
            label.parts = [] if rule is None else None
            result = super().call_function(target, args, kwargs)
            label.access = access_of(target, args, kwargs, result, self.recorder.storage)
        if rule is not None and label.access is not None:
            space = _named(rule, target, args, kwargs, result)
            if space is not None:
                self.spaces[number] = space
        return result

    def _call_loss(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An op of the loss; capture knows the loss as one op, so they share a label, which the last one closes."""
        if self.loss_label is None:
            self.loss_label = self.open.enter_context(self.recorder.label(LOSS_OP, LOSS_OP, ""))
            self.loss_label.parts = []
        result = fx.Interpreter.call_function(self, target, args, kwargs)
        rule = rule_of(target)
        space = None if rule is None else _named(rule, target, args, kwargs, result)
        if space is not None:
            self.loss_spaces[node.name] = space
        if self.graph_.op_of_node[node.name] == LOSS_OP:
            self.node_of[len(self.recorder.labels) - 1] = node.name
            self.open.close()
        return result


def _named(rule: Any, target: Any, args: Any, kwargs: Any, result: Any) -> tuple[Space, list[Any], list[Any]] | None:
    """The space of a call with an object of its own for every occurrence of a tensor, so that each has its own names."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    own = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    results, results_spec = pytree.tree_flatten(result)
    results = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in results]
    space = Space()
    own_args, own_kwargs = pytree.tree_unflatten(own, spec)
    if not rule(space, _in_order(target, own_args, own_kwargs), pytree.tree_unflatten(results, results_spec)):
        return None
    keep: Sequence[Any] = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in own]
    return space, list(keep), [leaf if isinstance(leaf, torch.Tensor) else None for leaf in results]


def _described(leaf: Any) -> Any:
    return TensorShape(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def why_not_shards(shards: Mapping[str, Mapping[str, int]], graph: ForwardGraph, spaces: Spaces) -> str | None:
    """Why the shards cannot be those of this graph: an op or a dimension that it does not have, or parts that do not divide."""
    node_of = {op: node for node, op in graph.op_of_node.items()}
    for op, dims in shards.items():
        if op not in node_of:
            return f"the plan cuts {op!r}, which is no op of this model; plan for this model and these inputs"
        known = spaces.pieces.get(node_of[op], {})
        for dim, parts in dims.items():
            if parts > 1 and known.get(dim, 0) % parts + (dim not in known):
                has = ", ".join(f"{name} of {size}" for name, size in known.items()) or "none that can be cut"
                return f"the plan cuts {op!r} along {dim!r} into {parts}, but its dimensions are {has}; plan for these inputs"
    return None


__all__ = ["OpSpace", "Spaces", "TensorShape", "spaces_of", "why_not_shards"]
