"""What a sharded program is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import fx

from rlplace.runtime import aliases
from rlplace.runtime.distributed.graph.randomness import seeded
from rlplace.runtime.distributed.sharded.local_ops import LocalOp, OpCut
from rlplace.runtime.distributed.sharded.spaces import TensorShape
from rlplace.runtime.distributed.sharded.spec import WHOLE, Spec, normal
from rlplace.runtime.distributed.sharded.views import Call

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
