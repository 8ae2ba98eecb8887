"""Convex pieces of a graph: what of it can run as one function.

A set of nodes is convex when no path leaves it and comes back: only then can it be one call. A set that is not is taken apart
into as few convex pieces as a simple rule finds: nodes are layered by how often the way to them changes its set, what is of one
set and layer is a piece, and pieces of one set are joined, lower layers first, as long as no cycle comes of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from rlplace.runtime.distributed.graph.acyclic import join_acyclic, topological


@dataclass(frozen=True, eq=False)
class Piece:
    """Nodes that run one after the other.

    Attributes:
        label: Number of their set; None: of none.
        nodes: In execution order.
    """

    label: int | None
    nodes: tuple[fx.Node, ...]


def convex_pieces(nodes: Sequence[fx.Node], unit: Mapping[fx.Node, int], label: Mapping[fx.Node, int]) -> list[Piece]:
    """Takes a graph apart into convex pieces of sets.

    Args:
        nodes: In execution order.
        unit: Number of each node; nodes with one number stay together, and contracting them leaves the graph acyclic.
        label: Set of a node; nodes of one unit have the same, nodes of no set none. Those make a piece for every unit.

    Returns:
        The pieces in an order in which they can run, close to that of `nodes`.
    """
    inputs: dict[int, set[int]] = {}
    first: dict[int, int] = {}
    label_of: dict[int, int | None] = {}
    for position, node in enumerate(nodes):
        number = unit[node]
        first.setdefault(number, position)
        label_of.setdefault(number, label.get(node))
        inputs.setdefault(number, set()).update(unit[other] for other in node.all_input_nodes if other in unit)
    level: dict[int, int] = {}
    for number in topological(inputs, first):
        before = [level[other] + (label_of[other] != label_of[number]) for other in inputs[number] if other != number]
        level[number] = max(before, default=0)
    # A class is named by one of its units.
    of_set: dict[tuple[int, int], int] = {}
    member = {
        number: number if label_of[number] is None else of_set.setdefault((label_of[number], level[number]), number)  # type: ignore[arg-type]
        for number in inputs
    }
    edges: dict[int, set[int]] = {number: set() for number in set(member.values())}
    for number, before_it in inputs.items():
        for other in before_it:
            if member[other] != member[number]:
                edges[member[other]].add(member[number])
    into = join_acyclic(edges, {index: key[0] for key, index in sorted(of_set.items(), key=lambda item: item[0][::-1])})
    member = {number: into.get(index, index) for number, index in member.items()}
    between: dict[int, set[int]] = {index: set() for index in edges}
    start: dict[int, int] = {}
    inside: dict[int, list[fx.Node]] = {}
    for number, before_it in inputs.items():
        between[member[number]].update(member[other] for other in before_it)
        start[member[number]] = min(start.get(member[number], len(nodes)), first[number])
    for node in nodes:
        inside.setdefault(member[unit[node]], []).append(node)
    return [Piece(label_of[index], tuple(inside[index])) for index in topological(between, start)]
