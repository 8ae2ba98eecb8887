"""Embedding tables of a captured step that replicas divide instead of copying, as recommenders do.

Every replica holds a part of the large tables, and looks rows up for the samples of all: ids travel to who holds their rows,
rows travel back, and their gradients the same way, by all-to-all. What a device looks up stays as much as before; the dense
gradient of a table and its update become those of a part. A sparse gradient is never summed over replicas, so its table is
divided however small it is; its update counts with the backward (`Parameter.gradient_bytes`), which stays as much as before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.model.graph.opgraph import FORWARD, GRADIENT, PARAMETER, UPDATE, OpGraph
from rlplace.plan.strategy import COLUMNS, ROWS, TABLE
from rlplace.strategy.blocks.blocks import Blocks
from rlplace.strategy.blocks.op_costs import TensorCollective
from rlplace.strategy.costs import BACKWARD_PASS, EXPERT_ALL_TO_ALL, FORWARD_PASS, HeldCosts
from rlplace.strategy.layouts.forward_ops import TABLE as LOOKS_UP

LEAST_BYTES = 1 << 20
"""Bytes of the smallest table with a dense gradient that is divided; those of smaller ones are reduced with others."""

MOST_UNEVEN = 1.1
"""Bytes, and bytes looked up, of the busiest device over the mean, as far as cutting tables allows."""

LEAST_COLUMNS = 16
"""Columns of the narrowest part of a table: a transaction of memory in fp32; narrower tables are cut by rows."""

ID_BYTES = 8


class EmbeddingTable(NamedTuple):
    """An embedding table: rows, columns, bytes with gradient and optimizer state, and bytes that a sample looks up."""

    path: str
    rows: int
    columns: int
    weight_bytes: int
    size_bytes: int
    looked_up: float
    sparse: bool = False

    @property
    def large(self) -> bool:
        """True where it is divided."""
        return self.sparse or self.weight_bytes >= LEAST_BYTES


def deal(tables: Sequence[EmbeddingTable], degree: int) -> dict[str, str]:
    """Divides tables over devices, so that none has much more memory or lookups than the mean, and the fewest are cut.

    Tables are given whole, the largest first, to who then has the least; as many of the largest as that needs are cut instead
    (the greedy rule of torchrec's planner).

    Returns:
        By path the word of `rlplace.plan.strategy.Stage.tables`; tables below `LEAST_BYTES` are left out, but
        for sparse ones.
    """
    large = sorted((one for one in tables if one.large), key=lambda one: -one.size_bytes)
    cut = 0
    while True:
        words = {one.path: _cut(one, degree) for one in large[:cut]}
        loads = loads_of(large[:cut], words, degree)
        mean = np.maximum(np.array([[one.size_bytes, one.looked_up] for one in large]).sum(0) / degree, 1e-9)
        for one in large[cut:]:
            own = np.array([one.size_bytes, one.looked_up])
            device = int(((loads + own[:, None]) / mean[:, None]).max(0).argmin())
            loads[:, device] += own
            words[one.path] = f"{TABLE} {device}"
        if cut == len(large) or (loads.max(1) <= MOST_UNEVEN * mean).all():
            return words
        cut = min(len(large), max(cut + 1, cut * 5 // 4))


def _cut(table: EmbeddingTable, degree: int) -> str:
    return COLUMNS if table.columns % degree == 0 and table.columns >= LEAST_COLUMNS * degree else ROWS


def loads_of(tables: Sequence[EmbeddingTable], words: Mapping[str, str], degree: int) -> NDArray[np.float64]:
    """Returns float64 [2, degree], bytes of the divided tables on every device, and bytes that it looks up for one sample."""
    loads = np.zeros((2, degree))
    for one in tables:
        word = words.get(one.path, "")
        own = np.array([one.size_bytes, one.looked_up])
        if word.startswith(TABLE):
            loads[:, int(word.split()[1])] += own
        elif word:
            loads += own[:, None] / degree
    return loads


class _Lookup(NamedTuple):
    """A forward op that looks up a table."""

    op: int
    parameter: int
    ids: float  # of a sample


@dataclass(frozen=True, eq=False)
class EmbeddingTables:
    """The embedding tables of a captured step; those that other ops read as well are none."""

    graph: OpGraph
    lookups: tuple[_Lookup, ...]
    known: dict[int, dict[str, str]] = field(default_factory=dict)

    @property
    def prevail(self) -> bool:
        """True where most bytes of parameters are tables that would be divided, or one has a sparse gradient."""
        tables, whole = self.tables(), sum(parameter.size_bytes for parameter in self.graph.parameters)
        return any(one.sparse for one in tables) or 2 * sum(one.weight_bytes for one in tables if one.large) > whole

    def tables(self) -> list[EmbeddingTable]:
        """Returns all of them."""
        found = []
        for one in self.lookups:
            parameter = self.graph.parameters[one.parameter]
            size = parameter.size_bytes + parameter.gradient_bytes + parameter.optimizer_bytes
            rows, columns = parameter.shape
            looked_up = one.ids * parameter.size_bytes / rows
            path = parameter.name.rpartition(".")[0]
            found.append(EmbeddingTable(path, rows, columns, parameter.size_bytes, size, looked_up, parameter.sparse))
        return found

    def words(self, degree: int) -> dict[str, str]:
        """Returns how they are divided, see `deal`."""
        if degree not in self.known:
            self.known[degree] = deal(self.tables(), degree)
        return self.known[degree]

    def why_not(self, degree: int) -> str | None:
        """Explains why no table can be divided over so many replicas."""
        return None if self.words(degree) else f"the model has no embedding table of {LEAST_BYTES >> 20} MiB; leave tables at 1"

    def _divided(self, degree: int) -> list[tuple[_Lookup, str]]:
        words = self.words(degree)
        named = ((one, words.get(self.graph.parameters[one.parameter].name.rpartition(".")[0])) for one in self.lookups)
        return [(one, word) for one, word in named if word is not None]

    def parameters(self, degree: int) -> list[int]:
        """Returns numbers of the parameters that are divided."""
        return [one.parameter for one, _ in self._divided(degree)]

    def held(self, whole: HeldCosts, blocks: Blocks, degree: int) -> HeldCosts:
        """Returns the state of the busiest device, from that of one with whole tables; see `HeldCosts.optimizer_bytes`."""
        words, tables = self.words(degree), self.tables()
        loads = loads_of(tables, words, degree)[0]
        part = loads.max() / loads.sum()
        rows = [whole.weight_bytes.copy(), whole.gradient_bytes.copy(), whole.optimizer_bytes.copy()]
        own = np.zeros_like(whole.expert_bytes)
        for number in self.parameters(degree):
            parameter, block = self.graph.parameters[number], blocks.of_parameter[number][0]
            sizes = parameter.size_bytes, parameter.gradient_bytes, parameter.optimizer_bytes
            for row, size in zip(rows, sizes, strict=True):
                row[block] -= size
            own[2, block] += int(np.ceil(sum(sizes) * part))
        rows[2] += own[2]
        return dataclasses.replace(
            whole, weight_bytes=rows[0], gradient_bytes=rows[1], optimizer_bytes=rows[2], expert_bytes=own
        )

    def divided(self, graph: OpGraph, degree: int) -> OpGraph:
        """Returns ops of the step with updates and dense gradients of parts of tables."""
        own = np.isin(np.arange(len(graph.parameters)), self.parameters(degree))
        update = (graph.op_phase == UPDATE) & own[np.maximum(graph.op_parameter, 0)]
        moved = np.where(update, graph.op_bytes / degree, graph.op_bytes)
        gradients = np.flatnonzero((graph.tensor_role == GRADIENT) & own[np.maximum(graph.tensor_parameter, 0)])
        makers = graph.tensor_producer[gradients]
        np.subtract.at(moved, makers, graph.tensor_bytes[gradients] * (1.0 - 1.0 / degree))
        return dataclasses.replace(
            graph,
            op_flops=np.where(update, graph.op_flops / degree, graph.op_flops),
            op_bytes=np.maximum(np.rint(moved), 0).astype(np.int64),
            tensor_bytes=self.sizes(graph.tensor_bytes, degree),
        )

    def sizes(self, tensor_bytes: NDArray[np.int64], degree: int) -> NDArray[np.int64]:
        """Returns bytes of tensors, at least int64 [T], with those of divided tables and their gradients as parts."""
        of_table = np.isin(self.graph.tensor_role, (PARAMETER, GRADIENT))
        of_table &= np.isin(self.graph.tensor_parameter, self.parameters(degree))
        cut = np.pad(of_table, (0, len(tensor_bytes) - len(of_table)))
        sizes: NDArray[np.int64] = np.where(cut, -(-tensor_bytes // degree), tensor_bytes)
        return sizes

    def exchanges(self, blocks: Blocks, samples: int, origin: NDArray[np.int32], degree: int) -> Iterator[TensorCollective]:
        """Yields the all-to-alls of a pass of so many samples: numbers of ids, ids, rows, and gradients of rows, of all tables.

        All ids count as unlike. A process sends the rows that it holds of a whole table to all others, and of a divided one a
        part; the one that sends most counts, as if every process sent as much. Rows are there before the first lookup, and
        their gradients go after the last is known, that of the first.
        """
        found, (ids, rows, back) = self._divided(degree), np.zeros((3, degree))
        if not found:
            return
        for one, word in found:
            parameter = self.graph.parameters[one.parameter]
            count = min(samples * one.ids, float(parameter.shape[0]))
            held = np.arange(degree) == int(word.split()[1]) if word.startswith(TABLE) else np.full(degree, 1.0 / degree)
            sent = held * degree * count * parameter.size_bytes / parameter.shape[0]
            ids += count * ID_BYTES * degree * (held if word != COLUMNS else 1.0)
            rows += sent
            back += sent * parameter.trainable
        first = min(one.op for one, _ in found)
        block, number = int(blocks.of_op[first]), float(np.searchsorted(origin, first))
        for size in (ID_BYTES * degree * len(found), ids.max(), rows.max()):
            yield TensorCollective(block, FORWARD_PASS, EXPERT_ALL_TO_ALL, float(size), number - 0.5)
        if back.any():
            yield TensorCollective(block, BACKWARD_PASS, EXPERT_ALL_TO_ALL, float(back.max()), number + 0.5)


def find_tables(graph: OpGraph) -> EmbeddingTables:
    """Returns the embedding tables of a captured step: matrices that one op looks up, and that nothing else reads."""
    readers: dict[int, set[int]] = {}
    weights = np.flatnonzero(graph.tensor_role == PARAMETER).tolist()
    for tensor in weights:
        own = graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]]
        readers.setdefault(int(graph.tensor_parameter[tensor]), set()).update(own[graph.op_phase[own] == FORWARD].tolist())
    made = np.bincount(graph.tensor_producer + 1, graph.tensor_bytes, graph.num_ops + 1)[1:]
    found = []
    for number, ops in readers.items():
        parameter, op = graph.parameters[number], min(ops, default=-1)
        alone = len(ops) == 1 and len(parameter.shape) == 2 and not parameter.aliases
        if alone and graph.op_kind[op] == LOOKS_UP:
            row_bytes = parameter.size_bytes / parameter.shape[0]  # an op reads its ids and their rows
            found.append(_Lookup(op, number, (graph.op_bytes[op] - made[op]) / (ID_BYTES + row_bytes) / graph.samples))
    return EmbeddingTables(graph, tuple(found))
