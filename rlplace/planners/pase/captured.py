"""The layer graph of a captured model: what `least_cost_strategy` searches, from a problem that says how its ops can be cut.

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

from dataclasses import dataclass, replace
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
from rlplace.problem.memoized import memoized
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
            "pase: the problem does not say along which dimensions its ops can be cut; name the model itself, or give "
            "a problem of `rlplace capture --level cut` or of price(..., level='op', sharding=True)"
        )
    return problem.sharding


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


def shards_of(problem: Problem, strategy: Strategy) -> dict[str, dict[str, int]]:
    """The strategy as the `shards` of a plan, for every op of every layer that is cut."""
    leaders, members = _cluster(problem)
    shards: dict[str, dict[str, int]] = {}
    for op, member in members.items():
        parts = strategy.parts[problem.op_names[leaders[member.layer]]]
        cut = {own: parts[name] for own, name in member.names.items() if parts.get(name, 1) > 1}
        if cut:
            shards[problem.op_names[op]] = cut
    return shards


@dataclass(frozen=True)
class _Member:
    """An op of a layer, and its dimensions by the names of the layer's first op."""

    layer: int
    names: dict[str, str]


@memoized
def _cluster(problem: Problem) -> tuple[list[int], dict[int, _Member]]:
    """The first op of every layer, and the layer of every op that belongs to one; kept with the problem."""
    sharding = sharding_of(problem)
    inputs: dict[int, list[int]] = {}
    for tensor, access in sharding.access.items():
        maker = int(problem.tensor_producer[tensor])
        if maker in access and problem.op_phase[maker] == FORWARD:
            for op in access:
                if op != maker and problem.op_phase[op] == FORWARD:
                    inputs.setdefault(op, []).append(tensor)
    with_backward = set(sharding.follows.values())
    leaders: list[int] = []
    members: dict[int, _Member] = {}
    longest = np.nanmax(problem.time_s, axis=1)
    for op in problem.topological_order.tolist():
        if problem.op_phase[op] != FORWARD or (longest[op] == 0.0 and op not in with_backward):
            continue
        dims = sharding.dims.get(op, {})
        member: _Member | None = None
        for tensor in sorted(inputs.get(op, ()), key=lambda t: (-int(problem.tensor_bytes[t]), t)) if dims else ():
            maker = int(problem.tensor_producer[tensor])
            if maker not in members:
                continue
            names, access = members[maker].names, sharding.access[tensor]
            pairs = {
                own: names[theirs] for own, theirs in zip(access[op], access[maker], strict=True) if own and theirs in names
            }
            leader = leaders[members[maker].layer]
            if len(pairs) == len(dims) == len(set(pairs.values())) == len(sharding.dims.get(leader, {})):
                member = _Member(members[maker].layer, pairs)
                break
        if member is None:
            member = _Member(len(leaders), {name: name for name in dims})
            leaders.append(op)
        members[op] = member
    return leaders, members


class _Layers:
    def __init__(self, problem: Problem, devices: int, gradient_price: float, memory_price: float) -> None:
        self.problem, self.sharding = problem, sharding_of(problem)
        self.gradient_price, self.memory_price = gradient_price, memory_price
        self.leaders, self.of = _cluster(problem)
        self.terms: list[list[Term]] = [[] for _ in self.leaders]
        self.sizes = [self.sharding.dims.get(leader, {}) for leader in self.leaders]
        self.members: list[list[int]] = [[] for _ in self.leaders]
        for op, member in self.of.items():
            self.members[member.layer].append(op)
        self.along_outputs: dict[int, frozenset[str]] = {}
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
        for op in self.of:
            self._work(op)
        for tensor in self.sharding.access:
            self._sums(tensor)
        for op, sums in self.sharding.statistics.items():
            if op in self.of:
                for names, size_bytes in sums:
                    for _ in range(1 + self._has_backward(op)):
                        self._reduce(op, names, size_bytes)
        self._weights()
        layers = tuple(self._layer(number) for number in range(len(self.leaders)))
        edges = [edge for tensor in sorted(self.sharding.access) for edge in self._edges(tensor)]
        return LayerGraph(self.problem.name, layers, tuple(edges))

    def _layer(self, number: int) -> Layer:
        dims = tuple(Dim(name, size) for name, size in self.sizes[number].items()) or (Dim("whole", 1, False),)
        kind = "" if self.problem.op_kind is None else self.problem.op_kind[self.leaders[number]]
        names = tuple(self.problem.op_names[op] for op in self.members[number])
        return Layer(names[0], kind, dims, tuple(_merged(self.terms[number])), ops=names)

    def _names(self, op: int, names: Names) -> tuple[str, ...]:
        """An op's names as the leader calls them, those of no dimension left out."""
        known = self.of[op].names
        return tuple(known[name] for name in names if name)

    def _has_backward(self, op: int) -> bool:
        return op in self.followers

    def _work(self, op: int) -> None:
        member = self.of[op]
        dims, size = tuple(member.names.values()), prod(self.sizes[member.layer].values())
        for part in (op, *self.followers.get(op, ())):
            rest = float(self.seconds[part] - self.fixed[part])
            self.terms[member.layer].append(Work(float(self.fixed[part]) * FLOP_PER_S, ()))
            self.terms[member.layer].append(Work(rest * FLOP_PER_S / size, dims))

    def _reduce(self, op: int, names: Names, size_bytes: float, *, gradient: bool = False, price: float = 1.0) -> None:
        """An all-reduce of bytes that are indexed by some dimensions of an op, over the others that it sums over."""
        member, dims = self.of[op], self._names(op, names)
        if gradient and op not in self.along_outputs:
            self.along_outputs[op] = gradient_sums(self.sharding, op, self.makes)
        summed = self.along_outputs[op] if gradient else member.names
        over = tuple(name for own, name in member.names.items() if own in summed and name not in dims)
        if over and size_bytes > 0:
            sizes, terms = self.sizes[member.layer], self.terms[member.layer]
            terms.append(AllReduce(price * size_bytes / WORD_BYTES / prod(sizes[name] for name in dims), dims, over))
            terms.append(Exchange(price * self.latency_words, (), over))

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
            size = prod(self.sizes[self.of[home].layer][name] for name in dims)
            price = self.memory_price * (item.weight_bytes + item.gradient_bytes + item.optimizer_bytes)
            if item.update >= 0:
                price += float(self.seconds[item.update])
            self.terms[self.of[home].layer].append(Work(price * FLOP_PER_S / size, dims))

    def _edges(self, tensor: int) -> list[LayerEdge]:
        maker = int(self.problem.tensor_producer[tensor])
        access, axes = self.sharding.access[tensor], self.sharding.axes[tensor]
        if maker not in self.of or maker not in access:
            return []
        factor = self.problem.tensor_bytes[tensor] / WORD_BYTES / prod(axes)
        edges: dict[tuple[int, Layout], LayerEdge] = {}
        for op, names in access.items():
            if op in self.of and self.of[op].layer != self.of[maker].layer:
                source, target = self._layout(maker, access[maker]), self._layout(op, names)
                ways = 2.0 if self._has_backward(op) and self._has_backward(maker) else 1.0
                ends = self.of[maker].layer, self.of[op].layer
                edge = LayerEdge(*ends, axes, source, target, ways * float(factor), ways * self.startup_words)
                edges.setdefault((ends[1], target), edge)
        return list(edges.values())

    def _layout(self, op: int, names: Names) -> Layout:
        known = self.of[op].names
        return tuple((known[name],) if name else () for name in names)


def _merged(terms: list[Term]) -> list[Term]:
    """Terms that differ in their factor only, added up."""
    factors: dict[Term, float] = {}
    for term in terms:
        kind = replace(term, factor=0.0)
        factors[kind] = factors.get(kind, 0.0) + term.factor
    return [replace(kind, factor=factor) for kind, factor in factors.items()]
