"""What the blocks of a captured model cost on the devices of a cluster: `BlockCosts` from ops, dimensions and liveness.

Times are those of the ops (`rlplace.cost.price`), memory is that of their tensors (`rlplace.strategy.lives`), at any batch size
and for any device kind; what is known of a cut is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.parse import Cluster, as_cluster
from rlplace.cost.calls import calls_of
from rlplace.cost.compute import check_host, times_with
from rlplace.cost.foreign import as_costs
from rlplace.cost.table import CostTable
from rlplace.errors import InputError
from rlplace.graph.opgraph import BACKWARD_WEIGHT, FORWARD, UPDATE, OpGraph
from rlplace.graph.weight_gradients import part_times, split_weight_gradients
from rlplace.strategy.blocks import Blocks, find_blocks
from rlplace.strategy.costs import COLLECTIVE_KINDS, Cut, Floats, HeldCosts, PassCosts, Tie
from rlplace.strategy.lives import Lives

T = TypeVar("T")


class PricedBlocks:
    """`rlplace.strategy.costs.BlockCosts` of a captured model.

    Attributes:
        names: B module paths in model order.
        kinds: Names of the device kinds of the cluster.
        ties: Parameters and buffers that several blocks read.
        classes: int64 [B]; blocks of one number cost the same.
        blocks: Which block every op belongs to.
        graph: The captured graph.
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster | str,
        graph_of: Callable[[int], OpGraph] | None = None,
        *,
        costs: CostTable | str | Path | None = None,
        host: str = "eager",
    ) -> None:
        """Finds the blocks.

        Args:
            graph: A captured step.
            cluster: Its devices say which kinds there are.
            graph_of: The same model captured at another batch size (see `rlplace.graph.rescale`); None: there is this one only.
            costs: See `rlplace.price`; so is `host`.
            host: See `costs`.
        """
        check_host(host)
        self.graph, self._graph_of, self._host = graph, graph_of, host
        self._table = as_costs(costs)
        self._kinds = {kind.name: kind for kind in as_cluster(cluster).kinds}
        self.kinds = tuple(self._kinds)
        self._kept: dict[Hashable, object] = {}
        self._structures: list[tuple[OpGraph, Blocks, Lives]] = []
        self.blocks, _ = self._structure(graph)
        self.names = self.blocks.names
        self.ties = _ties(graph, self.blocks)
        self.classes = self._classes()

    def why_not(self, cut: Cut) -> str | None:
        """Why a pass cannot be cut like that; None where it can."""
        for axis in ("tensor", "context", "expert"):
            if getattr(cut, axis) > 1:
                return f"{axis} parallelism of blocks has no price yet; leave {axis} at 1"
        if self._graph_of is None and cut.samples != self.graph.samples:
            return f"the model was captured with {self.graph.samples} samples only, asked for {cut.samples}"
        return None

    def passes(self, kind: int, cut: Cut) -> PassCosts:
        """A pass on a device of that kind.

        Raises:
            InputError: `why_not` has a reason.
        """
        return self._once(("pass", kind, cut), lambda: self._pass(kind, cut))

    def held(self, tensor: int = 1, expert: int = 1) -> HeldCosts:
        """What one device holds at these degrees."""
        self._allowed(Cut(self.graph.samples, tensor, expert=expert))
        return self._once("held", lambda: _held(self.graph, self.blocks))

    def update_s(self, kind: int, tensor: int = 1, expert: int = 1) -> Floats:
        """float64 [B], seconds of the optimizer step of whole blocks; that of a tied weight counts in every block."""
        self._allowed(Cut(self.graph.samples, tensor, expert=expert))
        updates = np.flatnonzero(self.graph.op_phase == UPDATE)
        holders = [self.blocks.of_parameter[parameter] for parameter in self.graph.op_parameter[updates].tolist()]
        seconds = self._seconds(kind, self.graph.samples)[updates]
        counts = np.array([len(blocks) for blocks in holders], dtype=np.int64)
        flat = np.array([block for blocks in holders for block in blocks], dtype=np.int64)
        return _sums(flat, np.repeat(seconds, counts), len(self.names))

    def _pass(self, kind: int, cut: Cut) -> PassCosts:
        self._allowed(cut)
        graph, blocks, lives = self._at(cut.samples)
        seconds, weight = self._seconds(kind, cut.samples), self._weight_seconds(kind, cut.samples)
        memory = self._once(("memory", cut.samples), lambda: lives.memory(graph))
        forward, backward = graph.op_phase == FORWARD, ~np.isin(graph.op_phase, (FORWARD, UPDATE))

        def total(values: Floats) -> Floats:
            return _sums(blocks.of_op, values, len(self.names))

        again = [_sums(blocks.of_op[ops], seconds[ops], len(self.names)) for ops in lives.again]
        none = np.zeros((2, len(COLLECTIVE_KINDS), len(self.names)))
        return PassCosts(
            forward_s=total(seconds * forward),
            backward_s=total(seconds * backward),
            weight_s=total(weight),
            again_s=np.stack(again),
            kept_bytes=memory.kept_bytes,
            working_bytes=_most(memory.working_bytes, self.classes),
            sent_bytes=memory.sent_bytes,
            returned_bytes=memory.returned_bytes,
            collective_bytes=none,
            collective_calls=none.copy(),
        )

    def _allowed(self, cut: Cut) -> None:
        reason = self.why_not(cut)
        if reason is not None:
            raise InputError(f"blocks: {reason}")

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]  # type: ignore[return-value]

    def _at(self, samples: int) -> tuple[OpGraph, Blocks, Lives]:
        """The graph at a batch size, its blocks and lifetimes."""

        def make() -> OpGraph:
            if samples == self.graph.samples or self._graph_of is None:
                return self.graph
            found = self._graph_of(samples)
            if found.samples != samples:
                raise InputError(
                    f"blocks: the model was asked for a batch of {samples} samples and has one of {found.samples}; "
                    "let its function take a parameter batch"
                )
            return found

        graph = self._once(("graph", samples), make)
        blocks, lives = self._structure(graph)
        return graph, blocks, lives

    def _structure(self, graph: OpGraph) -> tuple[Blocks, Lives]:
        """Blocks and lifetimes, found once for graphs that differ in sizes alone."""
        for known, blocks, lives in self._structures:
            if known is graph or _same_structure(known, graph):
                return blocks, lives
        blocks = find_blocks(graph)
        if self._structures and blocks.names != self.names:
            raise InputError(f"blocks: with {graph.samples} samples the model has other blocks than with {self.graph.samples}")
        lives = Lives(graph, blocks)
        self._structures.append((graph, blocks, lives))
        return blocks, lives

    def _seconds(self, kind: int, samples: int) -> Floats:
        """float64 [N], of every op."""

        def make() -> Floats:
            graph = self._at(samples)[0]
            calls = self._once(("calls", samples), lambda: calls_of(graph, self._host))
            return times_with(self._table, graph, self._kinds[self.kinds[kind]], calls, self._host).seconds

        return self._once(("seconds", kind, samples), make)

    def _weight_seconds(self, kind: int, samples: int) -> Floats:
        """float64 [N], of what every op does for gradients of weights."""
        graph = self._at(samples)[0]
        split, origin = self._once(("split", samples), lambda: split_weight_gradients(graph))
        calls = self._once(("split calls", samples), lambda: calls_of(split, self._host))
        parts = times_with(self._table, split, self._kinds[self.kinds[kind]], calls, self._host).seconds
        whole = self._seconds(kind, samples)
        seconds = part_times(whole[:, None], parts[:, None], origin)[:, 0]
        return _sums(origin, seconds * (split.op_phase == BACKWARD_WEIGHT), graph.num_ops)

    def _classes(self) -> NDArray[np.int64]:
        graph, of_op = self.graph, self.blocks.of_op
        held, memory = self.held(), self._once(("memory", graph.samples), lambda: self._structures[0][2].memory(graph))
        tied = [tuple(index for index, tie in enumerate(self.ties) if b in tie.blocks) for b in range(len(self.names))]
        ops: list[list[Hashable]] = [[] for _ in self.names]
        for op, block in enumerate(of_op.tolist()):
            ops[block].append(
                (
                    graph.op_phase[op], graph.op_kind[op], graph.op_target[op], graph.op_dtype[op], graph.op_flops[op],
                    graph.op_bytes[op], graph.op_temporary_bytes[op], tuple(graph.op_dims.get(op, {}).items()),
                    None if graph.op_launches is None else graph.op_launches[op],
                )
            )  # fmt: skip
        columns = (
            *memory.kept_bytes, memory.sent_bytes, memory.returned_bytes,
            held.weight_bytes, held.gradient_bytes, held.optimizer_bytes,
        )  # fmt: skip
        sizes = np.stack(columns, axis=1).tolist()
        numbers: dict[Hashable, int] = {}
        rows = [(tuple(ops[b]), tied[b], tuple(sizes[b])) for b in range(len(self.names))]
        return np.array([numbers.setdefault(row, len(numbers)) for row in rows], dtype=np.int64)


def _same_structure(a: OpGraph, b: OpGraph) -> bool:
    """Whether two graphs of a model differ in sizes alone."""
    return (
        a.op_names == b.op_names
        and np.array_equal(a.tensor_producer, b.tensor_producer)
        and np.array_equal(a.consumer_ptr, b.consumer_ptr)
        and np.array_equal(a.consumers, b.consumers)
        and np.array_equal(a.op_forward, b.op_forward)
    )


def _most(values: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The largest value of each class for all of its blocks: what neighbours leave behind makes small differences."""
    most = np.stack([values[..., classes == number].max(axis=-1) for number in range(int(classes.max()) + 1)], axis=-1)
    same: NDArray[np.int64] = most[..., classes]
    return same


def _sums(index: NDArray[Any], values: Floats, count: int) -> Floats:
    return np.bincount(index, values, count).astype(np.float64)


def _held(graph: OpGraph, blocks: Blocks) -> HeldCosts:
    parts = np.zeros((3, len(blocks.names)), dtype=np.int64)
    for parameter, holders in zip(graph.parameters, blocks.of_parameter, strict=True):
        sizes = np.array([parameter.size_bytes, parameter.gradient_bytes, parameter.optimizer_bytes], dtype=np.int64)
        parts[:, list(holders)] += sizes[:, None]
    return HeldCosts(parts[0].copy(), parts[1].copy(), parts[2].copy())


def _ties(graph: OpGraph, blocks: Blocks) -> tuple[Tie, ...]:
    """Shared weights, those of the same blocks as one."""
    sizes: dict[tuple[int, ...], NDArray[np.int64]] = {}
    for parameter, holders in zip(graph.parameters, blocks.of_parameter, strict=True):
        if len(holders) > 1:
            own = np.array([parameter.size_bytes, parameter.gradient_bytes, parameter.optimizer_bytes], dtype=np.int64)
            sizes[holders] = sizes.get(holders, np.zeros(3, dtype=np.int64)) + own
    return tuple(Tie(holders, *map(int, total)) for holders, total in sizes.items())
