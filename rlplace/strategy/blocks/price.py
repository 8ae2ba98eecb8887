"""`BlockCosts` of a captured model on the devices of a cluster, from ops, dimensions and lifetimes.

Times are those of the ops (`rlplace.cost.price`), memory is that of their tensors (`rlplace.strategy.blocks.lives`), at any
batch size and for any device kind; results are cached by cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.parse import Cluster, as_cluster
from rlplace.cluster.presets import DeviceKind
from rlplace.cost.calls import Calls, calls_of
from rlplace.cost.compute import check_host, device_times, fold_issue, issue_times
from rlplace.cost.foreign import ModelledCosts, as_costs
from rlplace.cost.scaled import base_name
from rlplace.cost.table import CostTable, KindCosts
from rlplace.errors import InputError
from rlplace.model.capture.weight_gradients import part_times, split_weight_gradients
from rlplace.model.graph.opgraph import BACKWARD_WEIGHT, FORWARD, UPDATE, OpGraph, with_causal_attention
from rlplace.model.graph.rescale import affine, check_counts, rescale
from rlplace.plan.strategy import RING
from rlplace.records import trusted
from rlplace.strategy.blocks.blocks import find_blocks
from rlplace.strategy.blocks.context import context_bytes, context_layout, hidden_s, kernel_times, why_no_context
from rlplace.strategy.blocks.experts import find_experts
from rlplace.strategy.blocks.folded import Folded, fold
from rlplace.strategy.blocks.lives import Lives, Memory
from rlplace.strategy.blocks.op_costs import (
    PassOps,
    StepOps,
    TensorCollective,
    captured_collectives,
    captured_step,
    halved_bytes,
    held_costs,
    representatives,
    statistics_sums,
    ties_of,
)
from rlplace.strategy.blocks.rows import PricedRows, every_op, graph_of_rows, rows_of_blocks
from rlplace.strategy.blocks.tables import find_tables
from rlplace.strategy.costs import COLLECTIVE_KINDS, FULL, RECOMPUTE, BlockPassCosts, Cut, Floats, HeldCosts
from rlplace.strategy.layouts.tensor_layout import (
    VOCABULARY,
    LayoutSearch,
    TensorLayout,
    divided,
    moved_by,
    plain_word,
    shares,
    tensor_parts,
)

T = TypeVar("T")

_SORTING = 0.5
"""Share of the memory's bandwidth at which rows are sorted; assumed, as gathers of whole rows were not timed apart."""


@dataclass(frozen=True, eq=False)
class _Sized:
    """The model at a batch size and cut.

    Attributes:
        whole: The priced ops of one device, with their kernels.
        halves: The same with weight gradients apart.
        rows: For both, which op represents each.
        first: int64 [B], the first block that is priced alike.
        tensor_bytes: int64 [T], of tensors of the captured graph on one device.
        temporary_bytes: int64 [N], likewise of its ops.
        moved_bytes: For each layout int64 [T], bytes of tensors as its groups move them.
        memory: Of one device.
        seconds: float64 [N] by device kind, as far as known.
    """

    whole: tuple[OpGraph, Calls]
    halves: tuple[OpGraph, Calls]
    rows: tuple[PricedRows, PricedRows]
    first: NDArray[np.int64]
    tensor_bytes: NDArray[np.int64]
    temporary_bytes: NDArray[np.int64]
    moved_bytes: tuple[NDArray[np.int64], ...]
    memory: Memory
    seconds: dict[int, Floats]


class PricedBlocks:
    """`rlplace.strategy.costs.BlockCosts` of a captured model.

    Attributes:
        names: B module paths in model order.
        kinds: Names of the device kinds of the cluster.
        ties: Parameters and buffers that several blocks read.
        classes: int64 [B]; blocks of one number cost the same.
        experts: Expert degrees divide it: the number of experts of every mixture, 1 without any.
        tables: Whether most parameters are embedding tables, which replicas can divide.
        joins_replicas: Whether BatchNorms normalize by the samples of all replicas.
        blocks: Which block every op belongs to.
        graph: The captured graph.
    """

    def __init__(
        self,
        graph: OpGraph,
        cluster: Cluster | str,
        other: OpGraph | None = None,
        *,
        only: Mapping[str, str] | None = None,
        costs: CostTable | str | Path | None = None,
        host: str = "eager",
        statistics: str = "replica",
        release_gradients: bool = False,
    ) -> None:
        """Finds the blocks.

        Args:
            graph: A captured step.
            cluster: Its devices say which kinds there are.
            other: The same model captured at another batch size: both together give all sizes (`rlplace.model.graph.rescale`).
                None: there is this one only.
            only: By path of module the layout in which a runtime cuts its weights over a tensor group (`plain_word`); others
                stay whole. None: all may be cut.
            costs: See `rlplace.price`; so is `host`.
            host: See `costs`.
            statistics: See `rlplace.plan.strategy.Strategy`; so is `release_gradients`.
            release_gradients: See `statistics`.

        Raises:
            InputError: `other` has another number of ops, as the capture of one sample may have.
        """
        check_host(host)
        graph = with_causal_attention(graph)
        other = None if other is None else with_causal_attention(other)
        if other is not None:
            check_counts(graph, other)
        self.graph, self._host, self._only = graph, host, only
        self._table = as_costs(costs)
        self._kinds = {kind.name: kind for kind in as_cluster(cluster).kinds}
        self.kinds = tuple(self._kinds)
        self._kept: dict[Hashable, object] = {}
        self.blocks = find_blocks(graph)
        self._lives, self._experts, self._tables = Lives(graph, self.blocks), find_experts(graph), find_tables(graph)
        self._graphs = (graph,) if other is None else (graph, other)
        self.names, self.experts, self.tables = self.blocks.names, self._experts.most, self._tables.prevail
        self.ties = ties_of(graph, self.blocks)
        self.joins_replicas, self._released = statistics == "batch", release_gradients
        self.classes = self._classes()

    def why_not(self, cut: Cut) -> str | None:
        """Explains why a pass cannot be cut like that; None where it can."""
        return self._once(("why not", cut), lambda: self._why_not(cut))

    def _why_not(self, cut: Cut) -> str | None:
        if cut.expert > 1 and (reason := self._experts.why_not(cut.expert)) is not None:
            return reason
        if cut.tables > 1 and (reason := self._tables.why_not(cut.tables)) is not None:
            return reason
        if len(self._graphs) == 1 and cut.samples != self.graph.samples:
            size = self.graph.samples
            return (
                f"the model was captured with {size} samples only, asked for {cut.samples}: use a batch of {size} or a "
                "multiple of it, or place the module itself with its example inputs"
            )
        try:
            self._at(cut)
        except InputError as error:
            return str(error)
        layout, runs = self._layout(cut), self._only
        if runs is None or layout is None or cut.tensor == 1:
            return None
        priced = {path: plain_word(word) for path, word in layout.modules.items()}
        for path in dict.fromkeys((*priced, *runs)):
            word, own = priced.get(path, "whole"), runs.get(path, "whole")
            # Where the degree does not divide a vocabulary, or another name of the table is laid out, both leave it whole.
            if word != own and word != "sequence" and not (word == "whole" and own == VOCABULARY):
                return f"{path} would be priced as {word} and run as {own}; plan with tensor=1"
        return None

    def modules(self, cut: Cut) -> Mapping[str, Mapping[str, str]]:
        """Returns the layout word of each module that a tensor group cuts, or replicas divide, by name of its block."""
        layout, found = self._layout(cut), dict[str, dict[str, str]]()
        block_of = dict(zip(self.graph.op_module, self.blocks.of_op.tolist(), strict=True))
        words = {} if layout is None else layout.modules
        for path, word in (self._tables.words(cut.tables) if cut.tables > 1 else words).items():
            found.setdefault(self.names[block_of[path]], {})[path] = word
        return found

    def passes(self, kind: int, cut: Cut) -> BlockPassCosts:
        """Returns a pass on a device of that kind.

        Raises:
            InputError: `why_not` has a reason.
        """
        return self._once(("pass", kind, cut), lambda: self._pass(kind, cut))

    def held(self, tensor: int = 1, expert: int = 1, tables: int = 1, shard: int = 1) -> HeldCosts:
        """Returns the state that one device holds at these degrees (`Mesh.state`)."""
        if tables > 1:
            return self._once(("held", "tables", tables), lambda: self._tables.held(self.held(), self.blocks, tables))
        cut, own = self._whole(tensor, expert), self._experts.counts if expert > 1 else ()
        made = partial(held_costs, self.graph, self.blocks, released=self._released)
        return self._once(("held", tensor, expert), lambda: made(self._layout(cut), own))

    def update_s(self, kind: int, tensor: int = 1, expert: int = 1, tables: int = 1, shard: int = 1) -> Floats:
        """Returns float64 [B], seconds of the optimizer step of whole blocks; that of a tied weight counts in every block.

        Blocks are shared over `shard` devices afterwards, divided tables are not: their updates count so often.
        """
        cut = self._whole(tensor, expert, tables)
        updates, flat, counts = self._once("updates", self._updates)
        seconds = self._seconds(kind, cut)[updates]
        if tables > 1:
            own = np.isin(self.graph.op_parameter[updates], self._tables.parameters(tables))
            seconds = np.where(own, seconds * shard, seconds)
        return self._totals(self._at(cut), flat, np.repeat(seconds, counts))

    def _updates(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Returns update ops, the blocks that hold what they update, one after the other, and how many do."""
        updates = np.flatnonzero(self.graph.op_phase == UPDATE)
        holders = [self.blocks.of_parameter[parameter] for parameter in self.graph.op_parameter[updates].tolist()]
        flat = np.array([block for blocks in holders for block in blocks], dtype=np.int64)
        return updates, flat, np.array([len(blocks) for blocks in holders], dtype=np.int64)

    def step_ops(self, split: bool) -> StepOps:
        """Returns the ops of a pass; see `rlplace.strategy.blocks.op_costs.OpCosts`."""
        return self._once(("step", split), lambda: captured_step(*self._ops(split), self.blocks, self._lives))

    def pass_ops(self, kind: int, cut: Cut, split: bool) -> PassOps:
        """Returns their times and sizes; see `rlplace.strategy.blocks.op_costs.OpCosts`."""
        self._allowed(cut)
        found, (graph, origin) = self._at(cut), self._ops(split)
        layouts, hidden = zip(self._layouts(cut), found.moved_bytes, strict=True), self._hidden_s(kind, cut)
        return PassOps(
            seconds=self._half_seconds(kind, cut) if split else self._pass_seconds(kind, cut),
            temporary_bytes=found.temporary_bytes[origin],
            tensor_bytes=np.pad(found.tensor_bytes, (0, graph.num_tensors - len(found.tensor_bytes))),
            collectives=(
                *(item for pair in layouts for item in captured_collectives(self.graph, *pair, origin, hidden)),
                *self._sums(split),
                *self._exchanges(cut, split),
            ),
        )  # fmt: skip

    def _sums(self, split: bool) -> tuple[TensorCollective, ...]:
        """Returns the sums of statistics over replicas in a pass."""
        if not self.joins_replicas:
            return ()
        return self._once(("sums", split), lambda: tuple(statistics_sums(self.graph, self.blocks, self._ops(split)[1])))

    def _exchanges(self, cut: Cut, split: bool) -> Iterator[TensorCollective]:
        """Yields what replicas that divide embedding tables send in a pass."""
        if cut.tables > 1:
            yield from self._tables.exchanges(self.blocks, cut.samples, self._ops(split)[1], cut.tables)

    def _ops(self, split: bool) -> tuple[OpGraph, NDArray[np.int32]]:
        """Returns the captured graph, or that with weight gradients apart, and which captured op each op is a part of."""
        return self._split()[0] if split else (self.graph, np.arange(self.graph.num_ops, dtype=np.int32))

    def _pass_seconds(self, kind: int, cut: Cut) -> Floats:
        """Returns float64 [N], of every captured op, on the busiest device of an expert group, which sorts rows, too."""
        seconds = self._seconds(kind, cut)
        if cut.context > 1:
            key = "kernels", kind, cut.context, cut.context_method, cut.tensor
            seconds = seconds * self._once(key, lambda: self._kernel_times(kind, cut))
        if cut.expert == 1:
            return seconds
        rate = _SORTING * self._kinds[self.kinds[kind]].memory_bandwidth_bytes_per_s
        seconds = np.where(self._experts.again, 2 * seconds, seconds)
        sorting: Floats = self._experts.sorted_bytes(self._at(cut).tensor_bytes) / rate
        return np.where(self._experts.routed, (seconds + sorting) * self._table.busiest(cut.expert), seconds)

    def _kernel_times(self, kind: int, cut: Cut) -> Floats:
        return kernel_times(self.graph, self._layouts(cut)[-1], self._kinds[self.kinds[kind]], cut.context_method)

    def _half_seconds(self, kind: int, cut: Cut) -> Floats:
        """Returns float64 [N'], the same with weight gradients apart."""
        parts = self._priced(kind, cut, halves=True)
        seconds: Floats = part_times(self._pass_seconds(kind, cut)[:, None], parts[:, None], self._split()[0][1])[:, 0]
        return seconds

    def _pass(self, kind: int, cut: Cut) -> BlockPassCosts:
        self._allowed(cut)
        found = self._at(cut)
        of_op, seconds = self.blocks.of_op, self._pass_seconds(kind, cut)
        halves, origin = self._split()[0]
        weight = self._half_seconds(kind, cut) * (halves.op_phase == BACKWARD_WEIGHT)
        moved = np.zeros((2, 2, len(COLLECTIVE_KINDS), len(self.names)))
        for layout, whole in zip(self._layouts(cut), found.moved_bytes, strict=True):
            moved += moved_by(layout, whole, len(self.names))
        for item in (*self._sums(False), *self._exchanges(cut, False)):
            moved[:, item.when, item.kind, item.block] += item.size_bytes, 1.0
        hidden = np.zeros((2, len(self.names)))
        for (op, when), taken_s in self._hidden_s(kind, cut).items():
            hidden[when, of_op[op]] += taken_s
        phase, memory, step = self.graph.op_phase, found.memory, self.step_ops(True)
        sizes = np.pad(found.tensor_bytes, (0, len(step.producer) - len(found.tensor_bytes)))
        return BlockPassCosts(
            forward_s=self._totals(found, of_op, seconds * (phase == FORWARD)),
            backward_s=self._totals(found, of_op, seconds * ((phase != FORWARD) & (phase != UPDATE))),
            weight_s=self._totals(found, of_op[origin], weight),
            again_s=np.stack([self._totals(found, of_op[ops], seconds[ops]) for ops in self._lives.again]),
            kept_bytes=memory.kept_bytes,
            working_bytes=_most(memory.working_bytes, self.classes),
            sent_bytes=memory.sent_bytes,
            returned_bytes=memory.returned_bytes,
            halved_bytes=_most(halved_bytes(step, sizes, memory.kept_bytes), self.classes),
            collective_bytes=moved[0],
            collective_calls=moved[1],
            hidden_s=np.stack([self._totals(found, np.arange(len(self.names)), row) for row in hidden]),
        )

    def _hidden_s(self, kind: int, cut: Cut) -> dict[tuple[int, int], float]:
        """Returns by op and pass the seconds that hide what goes around in a ring."""
        if cut.context_method != RING or cut.context == 1:
            return {}
        return hidden_s(self.graph, self._layouts(cut)[-1], self._pass_seconds(kind, cut))

    def _totals(self, found: _Sized, block: NDArray[Any], values: Floats) -> Floats:
        """Returns float64 [B], sums by block; equal blocks share what the host's lead makes unlike."""
        count = len(self.names)
        total = np.bincount(found.first, np.bincount(block, values, count), count)
        alike = np.bincount(found.first, minlength=count)
        return (total[found.first] / alike[found.first]).astype(np.float64)

    def _whole(self, tensor: int, expert: int, tables: int = 1) -> Cut:
        """Returns the cut at which a tensor group holds and updates what it holds, at the captured batch."""
        cut = Cut(self.graph.samples, tensor, expert=expert, tables=tables)
        self._allowed(cut)
        return cut

    def _allowed(self, cut: Cut) -> None:
        reason = self.why_not(cut)
        if reason is not None:
            raise InputError(f"blocks: {reason}")

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the result of `make`, or raises its error, computed once."""
        if key not in self._kept:
            try:
                self._kept[key] = make()
            except InputError as error:
                self._kept[key] = error
        found = self._kept[key]
        if isinstance(found, InputError):
            raise found
        return found  # type: ignore[return-value]

    def _at(self, cut: Cut) -> _Sized:
        """Returns ops, tensors and memory at a batch size, as one device of a tensor group has them."""
        with trusted():
            return self._once(("sized", cut), lambda: self._sized(cut))

    def _sized(self, cut: Cut) -> _Sized:
        layouts = self._layouts(cut)
        parts = [tensor_parts(self.graph, layout) for layout in layouts]
        sizes, temporary = (self._values(name, cut.samples) for name in ("tensor_bytes", "op_temporary_bytes"))
        first = representatives(self.graph, self.blocks, self.classes, layouts)
        rows = self._rows(False, cut, first), self._rows(True, cut, first)
        graph, split = (self._divided(halves, rows[halves].ops, cut, layouts, parts) for halves in (False, True))
        moved = tuple(reduce(shares, parts[:index] + parts[index + 1 :], sizes) for index in range(len(layouts)))
        temporary = reduce(shares, [layout.op_parts for layout in layouts], temporary)
        if cut.context > 1:
            passing, beside = context_bytes(self.graph, layouts[-1], moved[-1], cut.context_method)
            temporary = temporary + passing
        sizes = reduce(shares, parts, sizes)
        if cut.tables > 1:
            sizes = self._tables.sizes(sizes, cut.tables)
        memory = self._lives.memory(sizes, temporary)
        if cut.context > 1:
            ahead = self.graph.op_phase == FORWARD
            kept = np.bincount(self.blocks.of_op[ahead], beside[ahead], len(self.names)).astype(np.int64)
            again = np.arange(len(RECOMPUTE))[:, None] == FULL
            memory = dataclasses.replace(memory, kept_bytes=memory.kept_bytes + np.where(again, 0, kept))
        return _Sized(
            whole=(graph, calls_of(graph, self._host)),
            halves=(split, calls_of(split, self._host)),
            rows=rows,
            first=first,
            tensor_bytes=sizes,
            temporary_bytes=temporary,
            moved_bytes=moved,
            memory=memory,
            seconds={},
        )

    def _values(self, name: str, samples: int) -> NDArray[np.int64]:
        """Returns a field of the whole graph at a batch size, bytes."""
        if len(self._graphs) == 1:
            return getattr(self.graph, name)  # type: ignore[no-any-return]
        small, large = self._graphs
        values = affine(getattr(small, name), getattr(large, name), small.samples, large.samples, samples)
        return np.maximum(values, 0)

    def _rows(self, halves: bool, cut: Cut, first: NDArray[np.int64]) -> PricedRows:
        """Returns which ops are priced: those of blocks that represent others, where no price depends on other blocks."""
        origin = self._ops(halves)[1]
        if self._host == "compiled" or isinstance(self._table, ModelledCosts) or cut.tables > 1:
            return self._once(("rows", halves), lambda: every_op(len(origin)))
        return self._once(("rows", halves, first.tobytes()), lambda: rows_of_blocks(self.blocks.of_op[origin], first))

    def _divided(
        self,
        halves: bool,
        ops: NDArray[np.int64],
        cut: Cut,
        layouts: Sequence[TensorLayout],
        parts: Sequence[NDArray[np.int64]],
    ) -> OpGraph:
        """Returns ops, or those with weight gradients apart, at a batch size, as one device of its groups runs them."""
        graph, origin = self._batch(halves, cut.samples)
        if len(ops) < len(origin):
            whole, key = graph, ("rows", halves, cut.samples, ops.tobytes())
            graph, origin = self._once(key, lambda: graph_of_rows(whole, ops)), origin[ops]
        if cut.tables > 1:
            graph = self._tables.divided(graph, cut.tables)
        for layout, parts_of_tensor in zip(layouts, parts, strict=True):
            more = graph.num_tensors - len(parts_of_tensor)  # those between halves, of no bytes
            graph = divided(graph, layout, origin, np.pad(parts_of_tensor, (0, more), constant_values=1))
        return graph

    def _batch(self, halves: bool, samples: int) -> tuple[OpGraph, NDArray[np.int32]]:
        """Returns all ops, or those with weight gradients apart, at a batch size, and which captured op each is a part of."""
        return self._once(("batch", halves, samples), lambda: self._at_batch(halves, samples))

    def _at_batch(self, halves: bool, samples: int) -> tuple[OpGraph, NDArray[np.int32]]:
        graphs: Sequence[OpGraph] = [graph for graph, _ in self._split()] if halves else self._graphs
        known = {graph.samples: graph for graph in graphs}
        return known.get(samples) or rescale(graphs[0], graphs[1], samples), self._ops(halves)[1]

    def _split(self) -> list[tuple[OpGraph, NDArray[np.int32]]]:
        return self._once("split", lambda: [split_weight_gradients(graph) for graph in self._graphs])

    def _folded(self) -> Folded:
        _, first, number = np.unique(self.classes, return_index=True, return_inverse=True)
        return self._once("folded", lambda: fold(self.graph, self.blocks.of_op, first[number]))

    def _search(self) -> LayoutSearch:
        folded = self._folded()
        return self._once("layouts", lambda: LayoutSearch(folded.graph, self.blocks.of_op[folded.ops], self._only))

    def _layouts(self, cut: Cut) -> tuple[TensorLayout, ...]:
        """Returns how ops and tensors are cut, one after the other: over tensor and expert groups, then over the context."""
        layout = self._layout(cut)
        layouts = () if layout is None else (layout,)
        if cut.context == 1:
            return layouts
        key = "context", cut.context, cut.context_method, cut.tensor
        return *layouts, self._once(key, lambda: self._context(cut))

    def _context(self, cut: Cut) -> TensorLayout:
        ops, folded = self._search().ops, self._folded()
        reason = why_no_context(ops, cut)
        if reason is not None:
            raise InputError(reason)
        return folded.unfold(context_layout(ops, cut, self._experts.routed[folded.ops]))

    def _layout(self, cut: Cut) -> TensorLayout | None:
        """Returns how the blocks are cut over a tensor and an expert group; None where they are whole."""
        if cut.expert > 1:
            base = self._layout(dataclasses.replace(cut, expert=1))
            key = "spread", cut.tensor, cut.sequence_parallel, cut.expert
            busiest = self._table.busiest(cut.expert)
            return self._once(key, lambda: self._experts.spread(base, cut, self.blocks.of_op, busiest))
        if cut.tensor == 1:
            return None
        return self._once(
            ("layout", cut.tensor, cut.sequence_parallel),
            lambda: self._folded().unfold(self._search().layout(cut.tensor, sequence_parallel=cut.sequence_parallel)),
        )

    def _seconds(self, kind: int, cut: Cut) -> Floats:
        """Returns float64 [N], of every captured op."""
        found = self._at(cut)
        if kind not in found.seconds:
            found.seconds[kind] = self._priced(kind, cut, halves=False)
        return found.seconds[kind]

    def _priced(self, kind: int, cut: Cut, *, halves: bool) -> Floats:
        """Returns times of all ops; launches are serial."""
        found, device = self._at(cut), self._kinds[self.kinds[kind]]
        graph, calls = found.halves if halves else found.whole
        device_s = device_times(self._table, graph, device, calls, self._host)[0][found.rows[halves].row]
        return fold_issue(
            device_s, self._once(("issue", kind, halves, cut.samples), lambda: self._issue_s(device, halves, cut))
        )

    def _issue_s(self, device: DeviceKind, halves: bool, cut: Cut) -> Floats:
        """Returns float64 [N], host time to issue every op; a cut of tensors launches as many kernels."""
        own = self._table.kinds.get(base_name(device.name), KindCosts())
        return issue_times(self._batch(halves, cut.samples)[0], own, self._host, device)

    def _classes(self) -> NDArray[np.int64]:
        graph, of_op = self.graph, self.blocks.of_op
        held, memory = held_costs(graph, self.blocks), self._lives.memory(graph.tensor_bytes, graph.op_temporary_bytes)
        tied = [tuple(index for index, tie in enumerate(self.ties) if b in tie.blocks) for b in range(len(self.names))]
        parts = np.bincount(self._split()[0][1], minlength=graph.num_ops)
        ops: list[list[Hashable]] = [[] for _ in self.names]
        for op, block in enumerate(of_op.tolist()):
            ops[block].append(
                (
                    graph.op_phase[op], graph.op_kind[op], graph.op_target[op], graph.op_dtype[op], graph.op_flops[op],
                    graph.op_bytes[op], graph.op_temporary_bytes[op], tuple(graph.op_dims.get(op, {}).items()),
                    None if graph.op_launches is None else graph.op_launches[op], self._graphs[-1].op_flops[op],
                    self._graphs[-1].op_bytes[op], parts[op],
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
    """Returns the largest value of each class for all of its blocks, which differ slightly by their neighbours."""
    most = np.stack([values[..., classes == number].max(axis=-1) for number in range(int(classes.max()) + 1)], axis=-1)
    same: NDArray[np.int64] = most[..., classes]
    return same
