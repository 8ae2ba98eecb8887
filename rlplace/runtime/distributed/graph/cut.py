"""Cuts a forward graph into segments: what one process runs without waiting for another.

A segment is a group of the plan, or several in a row on one device where joining them delays nobody: no other device waits for
what the first makes, and none makes what the second reads. That is how the simulator runs a plan. The graph of segments is
acyclic, so that each of them can run as one autograd graph: first the nodes are layered by how often the path to them changes
its placement, then segments of one placement are joined as long as no cycle comes of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from rlplace.errors import InputError
from rlplace.runtime.distributed.graph.acyclic import contract, detour, join_acyclic, reaches, topological
from rlplace.runtime.distributed.graph.assign import Assignment, Placement
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph


@dataclass(frozen=True)
class Segment:
    """A part of the forward.

    Attributes:
        index: Its number; what it reads comes from segments with smaller ones.
        placement: Stage and device of the plan.
        groups: The plan's groups that it holds nodes of, with the share of their named ops that it holds.
        nodes: Names of its nodes, in execution order.
        held: Parameters, buffers and constants that it reads, by first name.
        inputs: Numbers of the flat user inputs that it reads.
        reads: Values that other segments make, by node name.
        makes: Values that other segments read or that the model returns, by node name.
    """

    index: int
    placement: Placement
    groups: Mapping[int, float]
    nodes: tuple[str, ...]
    held: tuple[str, ...]
    inputs: tuple[int, ...]
    reads: tuple[str, ...]
    makes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Cut:
    """A forward graph in segments.

    Attributes:
        graph: What was cut.
        segments: In an order in which each comes after those it reads from.
        maker: Number of the segment that makes a value, by node name.
        readers: Numbers of the segments that read a value from another one, by node name, ascending.
        owners: Devices of the plan that hold a parameter, buffer or constant, by first name, ascending.
    """

    graph: ForwardGraph
    segments: tuple[Segment, ...]
    maker: Mapping[str, int]
    readers: Mapping[str, tuple[int, ...]]
    owners: Mapping[str, tuple[int, ...]]

    @property
    def num_devices(self) -> int:
        """Devices of the plan that run something, counted from 0."""
        return 1 + max(segment.placement.device for segment in self.segments)


def cut_graph(graph: ForwardGraph, assignment: Assignment) -> Cut:
    """Cuts a graph where the placement of its nodes changes.

    Args:
        graph: The graph.
        assignment: Spots and groups of its nodes.

    Raises:
        InputError: A value that is no single tensor would have to cross a cut.
    """
    nodes = [node for node in graph.module.graph.nodes if node.name in assignment.placement]
    segment_of = _segments(nodes, assignment)
    position = {name: number for number, name in enumerate(graph.inputs)}
    held = graph.held_of_node
    returned = {name for name in graph.outputs if isinstance(name, str)} | ({graph.loss} if graph.loss else set())
    count = len(set(segment_of.values()))
    members: list[list[fx.Node]] = [[] for _ in range(count)]
    for node in nodes:
        members[segment_of[node]].append(node)
    reads: list[dict[str, None]] = [{} for _ in range(count)]
    returns: list[dict[str, None]] = [{} for _ in range(count)]
    readers: dict[str, set[int]] = {}
    owners: dict[str, set[int]] = {}
    holds: list[dict[str, None]] = [{} for _ in range(count)]
    takes: list[set[int]] = [set() for _ in range(count)]
    maker = {node.name: segment_of[node] for node in nodes}
    for node in nodes:
        here = segment_of[node]
        for other in node.all_input_nodes:
            if other.name in position and other.op == "placeholder":
                takes[here].add(position[other.name])
            elif other.op == "placeholder":
                holds[here][held[other.name]] = None
                owners.setdefault(held[other.name], set()).add(assignment.placement[node.name].device)
            elif other.name in maker and maker[other.name] != here:
                if other.name not in graph.layout:
                    raise InputError(f"distribute: {other.name!r} is no single tensor and cannot go from one device to another")
                reads[here][other.name] = None
                returns[maker[other.name]][other.name] = None
                readers.setdefault(other.name, set()).add(here)
        if node.name in returned:
            returns[here][node.name] = None
    ops_of_group = Counter(assignment.group[node.name] for node in nodes if node.name in graph.op_of_node)
    segments = tuple(
        Segment(
            index=number,
            placement=assignment.placement[inside[0].name],
            groups={
                group: ops / ops_of_group[group]
                for group, ops in Counter(assignment.group[n.name] for n in inside if n.name in graph.op_of_node).items()
            },
            nodes=tuple(node.name for node in inside),
            held=tuple(holds[number]),
            inputs=tuple(sorted(takes[number])),
            reads=tuple(reads[number]),
            makes=tuple(returns[number]),
        )
        for number, inside in enumerate(members)
    )
    return Cut(
        graph=graph,
        segments=segments,
        maker={name: maker[name] for segment in segments for name in segment.makes},
        readers={name: tuple(sorted(found)) for name, found in readers.items()},
        owners={name: tuple(sorted(found)) for name, found in owners.items()},
    )


def _segments(nodes: list[fx.Node], assignment: Assignment) -> dict[fx.Node, int]:
    """Segment number of every node, in topological order of the segments."""
    unit = {node: assignment.unit[node.name] for node in nodes}
    inputs: dict[int, set[int]] = {}
    for node in nodes:
        inputs.setdefault(unit[node], set()).update(unit[other] for other in node.all_input_nodes if other in unit)
    placement = {unit[node]: assignment.placement[node.name] for node in nodes}
    group = {unit[node]: assignment.group[node.name] for node in nodes}
    kind = {number: (placement[number], group[number]) for number in inputs}
    level: dict[int, int] = {}
    for number in topological(inputs):
        above = [level[other] + (kind[other] != kind[number]) for other in inputs[number] if other != number]
        level[number] = max(above, default=0)
    classes: dict[tuple[tuple[Placement, int], int], int] = {}
    for number in sorted(inputs, key=level.__getitem__):
        classes.setdefault((kind[number], level[number]), len(classes))
    class_of = {number: classes[kind[number], level[number]] for number in inputs}
    kinds = {index: key[0] for key, index in classes.items()}
    edges: dict[int, set[int]] = {index: set() for index in kinds}
    for number, before in inputs.items():
        for other in before:
            if class_of[other] != class_of[number]:
                edges[class_of[other]].add(class_of[number])
    merged = _merge_rows(edges, kinds, join_acyclic(edges, kinds))
    joined = {number: merged[class_of[number]] for number in inputs}
    before_of: dict[int, set[int]] = {index: set() for index in set(joined.values())}
    for number, before in inputs.items():
        before_of[joined[number]].update(joined[other] for other in before)
    rank = {index: number for number, index in enumerate(topological(before_of))}
    return {node: rank[joined[unit[node]]] for node in nodes}


def _merge_rows(edges: dict[int, set[int]], kinds: Mapping[int, tuple[Placement, int]], into: dict[int, int]) -> dict[int, int]:
    """Joins classes that follow each other on a device, where that delays no other device.

    The second reads nothing that the first does not come after anyway, and other devices that read the first come after the
    second anyway. The same then holds for the gradients on their way back.
    """
    row = {index: index for index in edges}
    for index in [number for number in kinds if number in edges]:
        before = [other for other, after in edges.items() if index in after]
        here = [other for other in before if kinds[other][0] == kinds[index][0]]
        last = [one for one in here if all(other == one or _leads(edges, other, one) for other in before)]
        if not last:
            continue
        earlier = last[0]
        elsewhere = [other for other in edges[earlier] if kinds[other][0].device != kinds[earlier][0].device]
        if all(_leads(edges, index, other) for other in elsewhere) and not detour(edges, earlier, index):
            row[index] = earlier
            contract(edges, earlier, index)

    def root(index: int) -> int:
        while row[index] != index:
            index = row[index]
        return index

    return {index: root(first) for index, first in into.items()}


def _leads(edges: Mapping[int, set[int]], start: int, end: int) -> bool:
    return end in edges[start] or reaches(edges, start, end)
