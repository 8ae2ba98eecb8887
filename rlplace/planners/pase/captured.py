"""The layer graph of a captured model: what `solve` searches, from a problem that says how its ops can be cut.

Vertices are forward ops with their backward ops. Element-wise ops, norms and everything else whose dimensions all run along
their output join the op that makes their input and take its configuration, so a residual stream is one vertex; products,
convolutions, embeddings, attention and recurrent layers stand alone. What no rule knows is a vertex that cannot be cut.

Costs are the paper's, with the problem's numbers: the work of a vertex is its priced time (the part of it that a cut makes
smaller is divided by the parts), updates included; partial sums, weight gradients and the statistics of norms and softmaxes are
all-reduces of their bytes; an edge moves what the consumer lacks, once forward and, where there is a gradient, once
backward. Departures: every all-reduce also costs the time of an empty one, and every change of layout the start of the
messages to all other devices, since captured graphs have many small tensors; all-reduces of weight gradients can be priced
lower, since they overlap with the backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import numpy as np

from rlplace.errors import InputError
from rlplace.planners.pase.layers import (
    AllReduce,
    Dim,
    Exchange,
    Layer,
    LayerEdge,
    LayerGraph,
    Layout,
    Machine,
    Strategy,
    Term,
    Work,
)
from rlplace.problem import FORWARD, Problem
from rlplace.problem.collectives import collective_s
from rlplace.problem.sharding import Names, Sharding, gradient_sums

FLOP_PER_S = 1e12
"""Unit of work: costs are seconds times this, so its value has no influence."""

WORD_BYTES = 4
_PROBE_BYTES = 64 << 20


def machine_of(problem: Problem, devices: int) -> Machine:
    """The paper's machine for the first devices of a problem: the bandwidth that their all-reduce reaches, or a copy does."""
    if devices == 1:
        return Machine(FLOP_PER_S, 1e12, WORD_BYTES)
    group = list(range(devices))
    took = collective_s(problem.links, "all_reduce", group, _PROBE_BYTES) - empty_s(problem, devices)
    if not np.isfinite(took):
        raise InputError(f"pase: no links join the first {devices} devices; use fewer devices")
    copies = min(float(problem.links.bandwidth_bytes_per_s[i, j]) for i in group for j in group if i != j)
    reached = 2 * (devices - 1) / devices * _PROBE_BYTES / max(took, 1e-12)
    return Machine(FLOP_PER_S, max(min(reached, copies) if copies > 0 else reached, 1.0), WORD_BYTES)


def empty_s(problem: Problem, devices: int) -> float:
    """Seconds of an all-reduce of nothing among the first devices."""
    return collective_s(problem.links, "all_reduce", list(range(devices)), 0.0) if devices > 1 else 0.0


def sharding_of(problem: Problem) -> Sharding:
    """What the problem says about cutting ops.

    Raises:
        InputError: It says nothing.
    """
    if problem.sharding is None:
        raise InputError(
            'pase: the problem does not say along which dimensions its ops can be cut; price the model with level="op" and '
            "sharding=True"
        )
    return problem.sharding


@dataclass
class _Vertex:
    """Ops that share a configuration: the leader's dimensions, and those of each op by the leader's names."""

    leader: int
    names: dict[int, dict[str, str]] = field(default_factory=dict)
    terms: list[Term] = field(default_factory=list)


def layer_graph(
    problem: Problem, devices: int | None = None, gradient_price: float = 1.0, memory_price: float = 0.0
) -> LayerGraph:
    """The layer graph of a captured step.

    Args:
        problem: Priced at level "op" with sharding.
        devices: Devices that will be used, for the latency of all-reduces; default all.
        gradient_price: Factor on all-reduces of weight gradients: 1 as in the paper, 0 where they are hidden entirely.
        memory_price: Extra seconds for every byte of weights, gradients and optimizer state on a device: raises the price of
            copies where memory is short.

    Returns:
        Layers in order of their first ops, with the names of those ops; dimensions are those of the first op of a layer.
    """
    return _Layers(problem, problem.num_devices if devices is None else devices, gradient_price, memory_price).graph()


def shards_of(problem: Problem, graph: LayerGraph, strategy: Strategy) -> dict[str, dict[str, int]]:
    """The strategy as the `shards` of a plan, for every op of every layer that is cut."""
    vertices, _ = _cluster(problem, sharding_of(problem))
    of_leader = {problem.op_names[vertex.leader]: vertex for vertex in vertices}
    found: dict[str, dict[str, int]] = {}
    for layer in graph.layers:
        parts = strategy.parts[layer.name]
        if not parts:
            continue
        for op, names in of_leader[layer.ops[0]].names.items():
            cut = {own: parts[name] for own, name in names.items() if parts.get(name, 1) > 1}
            if cut:
                found[problem.op_names[op]] = cut
    return found


def batch_dims(problem: Problem) -> dict[int, str]:
    """The dimension of each forward op that runs along the samples, where one does; inputs are batch first."""
    sharding = sharding_of(problem)
    touched: dict[int, list[int]] = {}
    for tensor, access in sharding.access.items():
        for op in access:
            touched.setdefault(op, []).append(tensor)
    found: dict[int, str] = {}
    pending: deque[int] = deque()

    def reach(op: int, name: str) -> None:
        if name and op not in found and op not in sharding.follows:
            found[op] = name
            pending.append(op)

    for item in sharding.held:
        if item.is_input and item.axes and item.axes[0] == problem.samples_per_microbatch:
            for op, names in item.access.items():
                reach(op, names[0])
    while pending:
        op = pending.popleft()
        for tensor in touched.get(op, ()):
            access = sharding.access[tensor]
            if found[op] in access[op]:
                axis = access[op].index(found[op])
                for other, names in access.items():
                    reach(other, names[axis])
    return found


def data_parallel(problem: Problem, devices: int) -> dict[str, dict[str, int]]:
    """Shards that cut every op along its samples and nothing else."""
    sharding = sharding_of(problem)
    return {
        problem.op_names[op]: {name: devices}
        for op, name in sorted(batch_dims(problem).items())
        if sharding.dims[op][name] % devices == 0
    }


def _cluster(problem: Problem, sharding: Sharding) -> tuple[list[_Vertex], dict[int, _Vertex]]:
    """Forward ops by vertex, in order of leaders."""
    inputs: dict[int, list[int]] = {}
    for tensor, access in sharding.access.items():
        maker = int(problem.tensor_producer[tensor])
        if maker in access and problem.op_phase[maker] == FORWARD:
            for op in access:
                if op != maker and problem.op_phase[op] == FORWARD:
                    inputs.setdefault(op, []).append(tensor)
    with_backward = set(sharding.follows.values())
    vertices: list[_Vertex] = []
    of: dict[int, _Vertex] = {}
    for op in problem.topological_order.tolist():
        if problem.op_phase[op] != FORWARD or (np.nanmax(problem.time_s[op]) == 0.0 and op not in with_backward):
            continue
        dims = sharding.dims.get(op, {})
        joined = False
        for tensor in sorted(inputs.get(op, ()), key=lambda t: (-int(problem.tensor_bytes[t]), t)):
            maker = int(problem.tensor_producer[tensor])
            if maker not in of or not dims:
                continue
            names = of[maker].names[maker]
            access = sharding.access[tensor]
            pairs = {
                own: names[theirs] for own, theirs in zip(access[op], access[maker], strict=True) if own and theirs in names
            }
            if len(pairs) == len(dims) == len(set(pairs.values())) == len(sharding.dims.get(of[maker].leader, {})):
                of[op] = of[maker]
                of[op].names[op] = pairs
                joined = True
                break
        if not joined:
            of[op] = _Vertex(op, {op: {name: name for name in dims}})
            vertices.append(of[op])
    return vertices, of


class _Layers:
    def __init__(self, problem: Problem, devices: int, gradient_price: float, memory_price: float) -> None:
        self.problem, self.sharding = problem, sharding_of(problem)
        self.gradient_price, self.memory_price = gradient_price, memory_price
        self.vertices, self.of = _cluster(problem, self.sharding)
        self.makes: dict[int, list[int]] = {}
        for tensor, maker in enumerate(problem.tensor_producer.tolist()):
            self.makes.setdefault(maker, []).append(tensor)
        self.followers: dict[int, list[int]] = {}
        for op, forward in self.sharding.follows.items():
            self.followers.setdefault(forward, []).append(op)
        machine = machine_of(problem, devices)
        self.latency_words = empty_s(problem, devices) * FLOP_PER_S / machine.flop_per_word
        starts = (devices - 1) * float(problem.links.latency_s[:devices, :devices].max(initial=0.0))
        self.startup_words = starts * FLOP_PER_S / machine.flop_per_word
        times = problem.time_s[:, :devices]
        fixed = np.zeros_like(times) if self.sharding.fixed_s is None else self.sharding.fixed_s[:, :devices]
        with np.errstate(invalid="ignore"):
            self.seconds = np.nan_to_num(np.nanmax(times, axis=1))  # the slowest device is what all wait for
            self.fixed = np.minimum(fixed.max(axis=1), self.seconds)

    def graph(self) -> LayerGraph:
        index = {id(vertex): number for number, vertex in enumerate(self.vertices)}
        for op, vertex in self.of.items():
            self._work(op, vertex)
        for tensor in self.sharding.access:
            self._sums(tensor)
        for op, sums in self.sharding.statistics.items():
            if op in self.of:
                for names, size_bytes in sums:
                    for _ in range(1 + self._has_backward(op)):
                        self._reduce(op, names, size_bytes)
        self._weights()
        layers = tuple(self._layer(vertex) for vertex in self.vertices)
        edges = [
            edge for tensor in sorted(self.sharding.access) for edge in self._edges(tensor, lambda op: index[id(self.of[op])])
        ]
        return LayerGraph(self.problem.name, layers, tuple(edges))

    def _layer(self, vertex: _Vertex) -> Layer:
        sizes = self.sharding.dims.get(vertex.leader, {})
        dims = tuple(Dim(name, size) for name, size in sizes.items()) or (Dim("whole", 1, False),)
        kind = "" if self.problem.op_kind is None else self.problem.op_kind[vertex.leader]
        names = tuple(self.problem.op_names[op] for op in vertex.names)
        return Layer(names[0], kind, dims, tuple(_merged(vertex.terms)), ops=names)

    def _names(self, op: int, names: Names) -> tuple[str, ...]:
        """An op's names as the leader calls them, those of no dimension left out."""
        known = self.of[op].names[op]
        return tuple(known[name] for name in names if name)

    def _has_backward(self, op: int) -> bool:
        return op in self.followers

    def _work(self, op: int, vertex: _Vertex) -> None:
        for part in (op, *self.followers.get(op, ())):
            rest = float(self.seconds[part] - self.fixed[part])
            dims = tuple(vertex.names[op].values())
            size = prod(self.sharding.dims.get(vertex.leader, {}).values())
            vertex.terms.append(Work(float(self.fixed[part]) * FLOP_PER_S, ()))
            vertex.terms.append(Work(rest * FLOP_PER_S / size, dims))

    def _reduce(self, op: int, names: Names, size_bytes: float, *, gradient: bool = False, price: float = 1.0) -> None:
        """An all-reduce of bytes that are indexed by some dimensions of an op, over the others that it sums over."""
        vertex = self.of[op]
        dims = self._names(op, names)
        summed = gradient_sums(self.sharding, op, self.makes) if gradient else vertex.names[op]
        over = tuple(name for own, name in vertex.names[op].items() if own in summed and name not in dims)
        if over and size_bytes > 0:
            sizes = self.sharding.dims[vertex.leader]
            vertex.terms.append(AllReduce(price * size_bytes / WORD_BYTES / prod(sizes[name] for name in dims), dims, over))
            vertex.terms.append(Exchange(price * self.latency_words, (), over))

    def _sums(self, tensor: int) -> None:
        """Partial sums that the producer of a tensor leaves."""
        maker = int(self.problem.tensor_producer[tensor])
        op = self.sharding.follows.get(maker, maker)
        if op in self.of and maker in self.sharding.access[tensor]:
            names, size_bytes = self.sharding.access[tensor][maker], float(self.problem.tensor_bytes[tensor])
            self._reduce(op, names, size_bytes, gradient=maker != op)

    def _weights(self) -> None:
        """Gradients of weights, their updates and the price of the memory that copies take."""
        for item in self.sharding.held:
            readers = [op for op in item.access if op in self.of]
            for op in readers:
                if item.gradient_bytes and self._has_backward(op):
                    self._reduce(op, item.access[op], item.gradient_bytes, gradient=True, price=self.gradient_price)
            if not readers:
                continue
            home = min(readers, key=lambda op: (self.problem.op_group[op] != item.group, op))
            dims = self._names(home, item.access[home])
            size = prod(self.sharding.dims[self.of[home].leader][name] for name in dims)
            price = self.memory_price * (item.weight_bytes + item.gradient_bytes + item.optimizer_bytes)
            if item.update >= 0:
                price += float(self.seconds[item.update])
            self.of[home].terms.append(Work(price * FLOP_PER_S / size, dims))

    def _edges(self, tensor: int, number: Callable[[int], int]) -> list[LayerEdge]:
        maker = int(self.problem.tensor_producer[tensor])
        access, axes = self.sharding.access[tensor], self.sharding.axes[tensor]
        if maker not in self.of or maker not in access:
            return []
        factor = self.problem.tensor_bytes[tensor] / WORD_BYTES / prod(axes)
        found: dict[tuple[int, Layout], LayerEdge] = {}
        for op, names in access.items():
            if op in self.of and self.of[op] is not self.of[maker]:
                source, target = self._layout(maker, access[maker]), self._layout(op, names)
                ways = 2.0 if self._has_backward(op) and self._has_backward(maker) else 1.0
                found.setdefault(
                    (number(op), target),
                    LayerEdge(number(maker), number(op), axes, source, target, ways * float(factor), ways * self.startup_words),
                )
        return list(found.values())

    def _layout(self, op: int, names: Names) -> Layout:
        known = self.of[op].names[op]
        return tuple((known[name],) if name else () for name in names)


def _merged(terms: list[Term]) -> list[Term]:
    """Terms that differ in their factor only, added up."""
    found: dict[object, Term] = {}
    for term in terms:
        match term:
            case Work(factor, dims):
                key: object = (Work, dims)
                old = found.get(key)
                found[key] = Work(factor + (old.factor if old else 0.0), dims)
            case AllReduce(factor, dims, over):
                key = (AllReduce, dims, over)
                old = found.get(key)
                found[key] = AllReduce(factor + (old.factor if old else 0.0), dims, over)
            case Exchange(factor, dims, when):
                key = (Exchange, dims, when)
                old = found.get(key)
                found[key] = Exchange(factor + (old.factor if old else 0.0), dims, when)
            case _:
                found[object()] = term
    return list(found.values())


__all__ = ["batch_dims", "data_parallel", "layer_graph", "machine_of", "shards_of", "sharding_of"]
