"""The layouts of all values of a forward graph, worked out before it runs.

Each op takes one of five ways. *cut*: on pieces, as the plan says, or along with its input for an element-wise op that the plan
says nothing about. *view*: on the pieces at hand. *whole*: alike on all devices, after its inputs are gathered; everything
whose cut is not known, and what writes in place. *random*: on pieces, with the numbers that the whole op would draw.
*made*: constants, which every device makes whole and readers cut without communication.

A parameter lies in the pieces that its first reader needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from rlplace.graph.access import rule_of
from rlplace.graph.access_rules import elementwise
from rlplace.graph.kinds import base_name
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.graph.randomness import seeded
from rlplace.runtime.distributed.sharded.local_ops import LOCAL_OPS, PLAIN, LocalOp, OpCut, bound, plain
from rlplace.runtime.distributed.sharded.mesh import assignments
from rlplace.runtime.distributed.sharded.spaces import OpSpace, Spaces, TensorShape, in_loss, spaces_of
from rlplace.runtime.distributed.sharded.spec import WHOLE, Factor, Spec, moved_elements, normal, whole
from rlplace.runtime.distributed.sharded.values import Demand, ShardedProgram, Step, storable, writes_of, written_families
from rlplace.runtime.distributed.sharded.views import is_view_op, view

Factors = Mapping[str, tuple[Factor, ...]]
"""Factors of the dimensions of an op that are cut."""

_MADE = frozenset({"zeros", "ones", "full", "empty", "arange", "new_zeros", "new_ones", "new_full", "new_empty", "eye"})
_DRAWN = frozenset({"dropout", "scaled_dot_product_attention"})
"""Random ops whose numbers can be drawn apart from the rest of the op."""


def make_program(
    graph: ForwardGraph,
    shards: Mapping[str, Mapping[str, int]],
    mesh_shape: tuple[int, ...],
    home: Mapping[str, Spec] | None = None,
    spaces: Spaces | None = None,
) -> ShardedProgram:
    """Works out all layouts.

    Args:
        graph: The forward.
        shards: Parts by op name and dimension; dimensions that this graph does not have, or that the parts do not divide, are
            left whole and reported.
        mesh_shape: Axis sizes of a mesh that the shards factor over.
        home: Layouts of held tensors that are fixed already.
        spaces: Iteration spaces of the graph's ops, where they are known already.
    """
    return _Maker(graph, shards, mesh_shape, home or {}, spaces or spaces_of(graph)).run()


class _Maker:
    def __init__(
        self,
        graph: ForwardGraph,
        shards: Mapping[str, Mapping[str, int]],
        mesh_shape: tuple[int, ...],
        home: Mapping[str, Spec],
        spaces: Spaces,
    ) -> None:
        self.graph, self.shards, self.mesh_shape, self.spaces = graph, shards, mesh_shape, spaces
        self.specs: dict[str, Any] = {}
        self.home: dict[str, Spec] = dict(home)
        self.report: dict[str, str] = {}
        self.held = graph.held_of_node
        self.family = written_families(graph.module.graph)

    def run(self) -> ShardedProgram:
        steps = []
        for node in self.graph.module.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op != "output":
                step = self._step(node)
                if step is not None:
                    steps.append(step)
        for name, node_name in ((name, node_name) for node_name, name in self.held.items()):
            value = self.spaces.values[node_name]
            self.home.setdefault(name, whole(value.shape))
            self.specs[node_name] = self.home[name]
        return ShardedProgram(self.mesh_shape, tuple(steps), self.specs, self.home, self.report, self.family)

    def _placeholder(self, node: fx.Node) -> None:
        value: Any = self.spaces.values.get(node.name)
        name = self.held.get(node.name)
        if name is not None and (name in self.graph.writes or node in self.family):
            self.home[name] = whole(value.shape)
        if name is None or name in self.home:
            self.specs[node.name] = self.home[name] if name is not None else _wholes(value)

    def _step(self, node: fx.Node) -> Step | None:
        if node.op == "get_attr":
            return Step(node, "whole")
        target: Any = node.target
        args: Any = node.args
        if target is seeded:
            target, args = args[0], args[2:]
        name = self.graph.op_of_node.get(node.name)
        if getattr(target, "__name__", "") == "getitem":
            self.specs[node.name] = self.specs[args[0].name][args[1]]  # type: ignore[union-attr, index]
            return Step(node, "view", call=None)
        leaves = pytree.tree_leaves((args, node.kwargs))
        writes = writes_of(node)
        if node in self.family:
            return self._whole(node, leaves, name, "it shares memory that is written to", writes)
        if not isinstance(target, torch._ops.OpOverload):
            return self._whole(node, leaves, name, "it is no single op", writes)
        if is_view_op(target) and isinstance(leaves[0], fx.Node):
            return self._view(node, target, args, name)
        if base_name(str(target)) in _MADE:
            self._tell(name, "made whole everywhere, cut where it is read")
            return self._whole(node, leaves, None, "", writes, way="made")
        space = self.spaces.of.get(node.name)
        if space is None:
            return self._whole(node, leaves, name, "no rule says how it is cut", writes)
        return self._cut(node, target, args, leaves, space, name)

    # Ways

    def _whole(
        self,
        node: fx.Node,
        leaves: Sequence[Any],
        name: str | None,
        why: str,
        writes: tuple[fx.Node, ...] = (),
        way: str = "whole",
    ) -> Step:
        demands = {}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, fx.Node) and isinstance(self.spaces.values.get(leaf.name), TensorShape):
                demands[position] = self._demand(leaf, whole(self.spaces.values[leaf.name].shape), frozenset())
        self.specs[node.name] = _wholes(self.spaces.values[node.name])
        if name is not None and why:
            self._tell(name, f"whole: {why}")
        return Step(node, way, demands, writes=writes)

    def _view(self, node: fx.Node, target: Any, args: Sequence[Any], name: str | None) -> Step:
        source = args[0]
        assert isinstance(source, fx.Node)
        described = self.spaces.values[node.name]
        results = [described] if isinstance(described, TensorShape) else list(described)
        rest = bound(target, args, node.kwargs)[1:]
        spec = self._known(source)
        viewed = view(target, rest, spec, [result.shape for result in results])
        gathered: set[int] = set()
        while viewed.call is None:
            gathered |= viewed.gather
            spec = spec.gathered(viewed.gather)
            viewed = view(target, rest, spec, [result.shape for result in results])
        if gathered:
            self._tell(name, f"view: gathered over mesh axes {sorted(gathered)}, whose pieces it cuts through")
        self.specs[node.name] = viewed.specs[0] if isinstance(described, TensorShape) else list(viewed.specs)
        return Step(node, "view", {0: self._demand(source, spec, frozenset())}, call=viewed.call)

    def _cut(
        self, node: fx.Node, target: Any, args: Sequence[Any], leaves: Sequence[Any], space: OpSpace, name: str | None
    ) -> Step:
        writes = writes_of(node)
        asked = {piece: parts for piece, parts in self.shards.get(name or "", {}).items() if parts > 1}
        loss = in_loss(self.graph, node)
        follows = loss or (not asked and rule_of(target) is elementwise)
        random = node.target is seeded
        kind = base_name(str(target))
        local = LOCAL_OPS.get(kind)
        if any(names is None for names in space.outputs if names is not None) or all(names is None for names in space.outputs):
            return self._whole(node, leaves, name, "no rule says how its results are cut", writes)
        if random and kind not in _DRAWN:
            return self._whole(node, leaves, name, "its random numbers are drawn at once", writes)
        if local is None and kind not in PLAIN and rule_of(target) is not elementwise:
            why = "no rule says how it is cut" if asked else "the plan does not cut it"
            return self._whole(node, leaves, name, why, writes)
        described = [self._described(leaf) for leaf in bound(target, args, node.kwargs)]
        said: list[str] = []
        if follows:
            factors = self._followed(leaves, space)
            factors = {dim: f for dim, f in factors.items() if _allowed(dim, space, local, described)}
        else:
            dim_of = {piece: (dim, size) for dim, pieces in space.dims.items() for piece, size in pieces}
            usable = {}
            for piece, parts in asked.items():
                if piece not in dim_of or dim_of[piece][1] % parts:
                    said.append(f"whole along {piece}: these inputs have no {parts} equal parts of it")
                elif not _allowed(dim_of[piece][0], space, local, described):
                    said.append(f"whole along {piece}: no device can do a part of it on its own")
                else:
                    usable[piece] = parts
            factors = self._chosen(node, usable, leaves, space, local) if usable else {}
        if not any(axis != WHOLE for f in factors.values() for _, axis in f):
            self._tell(name, "; ".join(said) or "whole: the plan does not cut it")
            return self._whole(node, leaves, None, "", writes)
        demands, outputs = self._layouts(node, factors, leaves, space, local)
        for position, demand in list(demands.items()):
            demands[position] = self._demand(leaves[position], *demand)
        value = self.spaces.values[node.name]
        flat, spec = pytree.tree_flatten(value)
        result_layouts = [outputs[i] if isinstance(leaf, TensorShape) else None for i, leaf in enumerate(flat)]
        self.specs[node.name] = pytree.tree_unflatten(result_layouts, spec)
        self._tell(name, "; ".join([f"cut: {_text(factors)}" + (" with its input" if follows else ""), *said]))
        drawn = self.spaces.values[leaves[0].name] if random else None
        cut = OpCut(factors, space.inputs, self.mesh_shape)
        way = "random" if random else "cut"
        return Step(node, way, demands, cut, local or LocalOp(frozenset(), plain), writes=writes, drawn=drawn)

    # Layouts

    def _followed(self, leaves: Sequence[Any], space: OpSpace) -> Factors:
        """The factors of the largest spread input of an element-wise op, by the op's names."""
        best: tuple[int, Factors] | None = None
        for position, names in enumerate(space.inputs):
            leaf = leaves[position]
            if names is None or not isinstance(leaf, fx.Node) or self.specs.get(leaf.name) is None:
                continue
            spec = self.specs[leaf.name]
            if spec.axes and (best is None or prod(spec.shape) > best[0]):
                best = prod(spec.shape), {name: factors for name, factors in zip(names, spec.dims, strict=True) if name}
        return {} if best is None else best[1]

    def _chosen(
        self, node: fx.Node, parts: Mapping[str, int], leaves: Sequence[Any], space: OpSpace, local: LocalOp | None
    ) -> Factors:
        """The mesh axes for each dimension with which fewest bytes of the inputs have to move; the first of several."""
        best: tuple[float, Factors] | None = None
        for choice in assignments(self.mesh_shape, list(parts.values())):
            axes = dict(zip(parts, choice, strict=True))
            factors = {}
            for dim, pieces in space.dims.items():
                own: list[Factor] = []
                for piece, size in pieces:
                    own += [(self.mesh_shape[axis], axis) for axis in axes.get(piece, ())]
                    own.append((size // prod(self.mesh_shape[axis] for axis in axes.get(piece, ())), WHOLE))
                if any(axis != WHOLE for _, axis in own):
                    factors[dim] = normal(own)
            cost = 0.0
            for position, (spec, _) in self._layouts(node, factors, leaves, space, local)[0].items():
                have = self.specs.get(leaves[position].name)
                if isinstance(have, Spec):
                    size = self.spaces.values[leaves[position].name].dtype.itemsize
                    cost += moved_elements(have, spec, self.mesh_shape) * size
            if best is None or cost < best[0] * (1 - 1e-12):
                best = cost, factors
        assert best is not None
        return best[1]

    def _layouts(
        self, node: fx.Node, factors: Factors, leaves: Sequence[Any], space: OpSpace, local: LocalOp | None
    ) -> tuple[dict[int, Demand], list[Spec | None]]:
        """Layouts of the arguments, by position, and of the results of an op that is cut."""
        cut = OpCut(factors, space.inputs, self.mesh_shape)
        along = {name for names in space.outputs if names is not None for name in names}
        outer = frozenset().union(*(cut.axes(dim) for dim in factors if dim in along)) if factors else frozenset()
        demands: dict[int, Demand] = {}
        for position, names in enumerate(space.inputs):
            leaf = leaves[position]
            if not isinstance(leaf, fx.Node) or not isinstance(self.spaces.values.get(leaf.name), TensorShape):
                continue
            shape = self.spaces.values[leaf.name].shape
            if names is None or (local is not None and position in local.whole_inputs):
                demands[position] = whole(shape), outer
                continue
            spec = _spec(names, shape, factors)
            demands[position] = spec, outer - spec.axes
        partial: frozenset[int] = frozenset()
        if local is not None and local.partial:
            partial = frozenset().union(*(cut.axes(d) for d in factors if d not in along and d not in local.complete))
        outputs: list[Spec | None] = []
        shapes = pytree.tree_leaves(self.spaces.values[node.name])
        for names, value in zip(space.outputs, shapes, strict=True):
            outputs.append(None if names is None else _spec(names, value.shape, factors).with_partial(partial))
        return demands, outputs

    def _demand(self, leaf: fx.Node, spec: Spec, summed: frozenset[int]) -> Demand:
        """Notes what a reader wants; the first one says where a parameter lies."""
        name = self.held.get(leaf.name)
        if name is not None and name not in self.home:
            self.home[name] = self.specs[leaf.name] = storable(spec)
        return spec, summed

    def _known(self, node: fx.Node) -> Spec:
        if node.name not in self.specs:
            self._demand(node, whole(self.spaces.values[node.name].shape), frozenset())
        return self.specs[node.name]

    def _described(self, leaf: Any) -> Any:
        return self.spaces.values.get(leaf.name) if isinstance(leaf, fx.Node) else leaf

    def _tell(self, name: str | None, text: str) -> None:
        if name is not None:
            self.report[name] = text


def _spec(names: Sequence[str], shape: Sequence[int], factors: Factors) -> Spec:
    dims = []
    for name, size in zip(names, shape, strict=True):
        own = factors.get(name, ())
        dims.append(own if own and prod(part for part, _ in own) == size else normal([(size, WHOLE)]))
    return Spec(tuple(dims))


def _wholes(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: whole(leaf.shape) if isinstance(leaf, TensorShape) else None, value)


def _allowed(dim: str, space: OpSpace, local: LocalOp | None, args: Sequence[Any]) -> bool:
    """Whether an op can be cut along a dimension."""
    if local is not None and not local.fits(args, dim):
        return False
    through = all(dim in names for names in space.outputs if names is not None)
    inside = any(dim not in names for names in space.statistics)
    return (through and not inside) or (local is not None and dim in local.cut)


def _text(factors: Factors) -> str:
    texts = []
    for dim, own in factors.items():
        parts = [f"{size} (axis {axis})" for size, axis in own if axis != WHOLE]
        if parts:
            texts.append(f"{dim} x {' x '.join(parts)}")
    return ", ".join(texts)
