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
from rlplace.graph.rescale import rescale
from rlplace.graph.weight_gradients import part_times, split_weight_gradients
from rlplace.strategy.blocks import Blocks, find_blocks
from rlplace.strategy.costs import COLLECTIVE_KINDS, Cut, Floats, HeldCosts, PassCosts, Tie
from rlplace.strategy.divide import divided, moved_by
from rlplace.strategy.layouts import tensor_layouts
from rlplace.strategy.lives import Lives
from rlplace.strategy.tensor_layout import TensorLayout

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
        other: OpGraph | None = None,
        *,
        costs: CostTable | str | Path | None = None,
        host: str = "eager",
    ) -> None:
        """Finds the blocks.

        Args:
            graph: A captured step.
            cluster: Its devices say which kinds there are.
            other: The same model captured at another batch size: both together give all sizes (`rlplace.graph.rescale`). None:
                there is this one only.
            costs: See `rlplace.price`; so is `host`.
            host: See `costs`.
        """
        check_host(host)
        self.graph, self._other, self._host = graph, other, host
        self._table = as_costs(costs)
        self._kinds = {kind.name: kind for kind in as_cluster(cluster).kinds}
        self.kinds = tuple(self._kinds)
        self._kept: dict[Hashable, object] = {}
        self.blocks = find_blocks(graph)
        self._lives = Lives(graph, self.blocks)
        self.names = self.blocks.names
        self.ties = _ties(graph, self.blocks)
        self.classes = self._classes()

    def why_not(self, cut: Cut) -> str | None:
        """Why a pass cannot be cut like that; None where it can."""
        for axis in ("context", "expert"):
            if getattr(cut, axis) > 1:
                return f"{axis} parallelism of blocks has no price yet; leave {axis} at 1"
        if self._other is None and cut.samples != self.graph.samples:
            return f"the model was captured with {self.graph.samples} samples only, asked for {cut.samples}"
        try:
            self._at(cut)
        except InputError as error:
            return str(error)
        return None

    def passes(self, kind: int, cut: Cut) -> PassCosts:
        """A pass on a device of that kind.

        Raises:
            InputError: `why_not` has a reason.
        """
        return self._once(("pass", kind, cut), lambda: self._pass(kind, cut))

    def held(self, tensor: int = 1, expert: int = 1) -> HeldCosts:
        """What one device holds at these degrees."""
        cut = self._whole(tensor, expert)
        return self._once(("held", tensor), lambda: _held(self._at(cut), self.blocks))

    def update_s(self, kind: int, tensor: int = 1, expert: int = 1) -> Floats:
        """float64 [B], seconds of the optimizer step of whole blocks; that of a tied weight counts in every block."""
        cut = self._whole(tensor, expert)
        updates = np.flatnonzero(self.graph.op_phase == UPDATE)
        holders = [self.blocks.of_parameter[parameter] for parameter in self.graph.op_parameter[updates].tolist()]
        counts = np.array([len(blocks) for blocks in holders], dtype=np.int64)
        flat = np.array([block for blocks in holders for block in blocks], dtype=np.int64)
        return _sums(flat, np.repeat(self._seconds(kind, cut)[updates], counts), len(self.names))

    def _pass(self, kind: int, cut: Cut) -> PassCosts:
        self._allowed(cut)
        graph, of_op = self._at(cut), self.blocks.of_op
        seconds, weight = self._seconds(kind, cut), self._weight_seconds(kind, cut)
        memory = self._once(("memory", cut), lambda: self._lives.memory(graph))
        forward, backward = graph.op_phase == FORWARD, ~np.isin(graph.op_phase, (FORWARD, UPDATE))
        count = len(self.names)
        collective_bytes, collective_calls = self._once(("moved", cut), lambda: self._moved(cut))
        return PassCosts(
            forward_s=_sums(of_op, seconds * forward, count),
            backward_s=_sums(of_op, seconds * backward, count),
            weight_s=_sums(of_op, weight, count),
            again_s=np.stack([_sums(of_op[ops], seconds[ops], count) for ops in self._lives.again]),
            kept_bytes=memory.kept_bytes,
            working_bytes=_most(memory.working_bytes, self.classes),
            sent_bytes=memory.sent_bytes,
            returned_bytes=memory.returned_bytes,
            collective_bytes=collective_bytes,
            collective_calls=collective_calls,
        )

    def _whole(self, tensor: int, expert: int) -> Cut:
        """The cut at which a tensor group holds and updates what it holds, at the captured batch."""
        cut = Cut(self.graph.samples, tensor, expert=expert)
        self._allowed(cut)
        return cut

    def _allowed(self, cut: Cut) -> None:
        reason = self.why_not(cut)
        if reason is not None:
            raise InputError(f"blocks: {reason}")

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` makes, or the error it ends with, found once."""
        if key not in self._kept:
            try:
                self._kept[key] = make()
            except InputError as error:
                self._kept[key] = error
        found = self._kept[key]
        if isinstance(found, InputError):
            raise found
        return found  # type: ignore[return-value]

    def _at(self, cut: Cut) -> OpGraph:
        """What one device of a tensor group runs."""

        def make() -> OpGraph:
            if cut.tensor > 1:
                return divided(self._at(Cut(cut.samples)), self._layout(cut))
            if cut.samples == self.graph.samples or self._other is None:
                return self.graph
            return rescale(self.graph, self._other, cut.samples)

        return self._once(("graph", cut), make)

    def _layout(self, cut: Cut) -> TensorLayout:
        """How the blocks are cut over a tensor group."""
        if self.graph.traced is None:
            raise InputError("the graph does not say how its ops can be cut; capture the model again, in this process")
        return self._once(
            ("layout", cut.tensor, cut.sequence_parallel),
            lambda: tensor_layouts(self.graph, self.blocks.of_op, cut.tensor, sequence_parallel=cut.sequence_parallel),
        )

    def _moved(self, cut: Cut) -> tuple[Floats, Floats]:
        if cut.tensor == 1:
            none = np.zeros((2, len(COLLECTIVE_KINDS), len(self.names)))
            return none, none
        return moved_by(self._at(Cut(cut.samples)), self._layout(cut), len(self.names))

    def _seconds(self, kind: int, cut: Cut) -> Floats:
        """float64 [N], of every op."""

        def make() -> Floats:
            graph = self._at(cut)
            calls = self._once(("calls", cut), lambda: calls_of(graph, self._host))
            return times_with(self._table, graph, self._kinds[self.kinds[kind]], calls, self._host).seconds

        return self._once(("seconds", kind, cut), make)

    def _weight_seconds(self, kind: int, cut: Cut) -> Floats:
        """float64 [N], of what every op does for gradients of weights."""
        graph = self._at(cut)
        split, origin = self._once(("split", cut), lambda: split_weight_gradients(graph))
        calls = self._once(("split calls", cut), lambda: calls_of(split, self._host))
        parts = times_with(self._table, split, self._kinds[self.kinds[kind]], calls, self._host).seconds
        whole = self._seconds(kind, cut)
        seconds = part_times(whole[:, None], parts[:, None], origin)[:, 0]
        return _sums(origin, seconds * (split.op_phase == BACKWARD_WEIGHT), graph.num_ops)

    def _classes(self) -> NDArray[np.int64]:
        graph, of_op = self.graph, self.blocks.of_op
        held, memory = self.held(), self._lives.memory(graph)
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
