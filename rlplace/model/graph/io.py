"""Op graph files: ``rlplace.graph`` version 1."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from rlplace.errors import InputError
from rlplace.model.graph.opgraph import PHASES, TENSOR_ROLES, OpGraph, OpKind, Parameter, Phase, TensorRole
from rlplace.records import Record, Whole, build, plain

FORMAT = "rlplace.graph"
VERSION = 1


_OPS: dict[str, tuple[str, Any]] = {
    "name": ("op_names", None), "target": ("op_target", None), "kind": ("op_kind", None), "module": ("op_module", None),
    "phase": ("op_phase", np.int8), "forward": ("op_forward", np.int32), "parameter": ("op_parameter", np.int32),
    "dtype": ("op_dtype", None), "flops": ("op_flops", np.float64), "bytes": ("op_bytes", np.int64),
    "temporary_bytes": ("op_temporary_bytes", np.int64), "colocate": ("op_colocate", np.int32),
    "launches": ("op_launches", np.int32),
}  # fmt: skip
"""Column of ops to the field of `OpGraph` and the type of its array, None for a tuple."""

_TENSORS: dict[str, tuple[str, Any]] = {
    "role": ("tensor_role", np.int8), "parameter": ("tensor_parameter", np.int32), "producer": ("tensor_producer", np.int32),
    "bytes": ("tensor_bytes", np.int64),
}  # fmt: skip

_NAMED = {"phase": PHASES, "role": TENSOR_ROLES}
"""Columns whose numbers are written as names."""


def graph_to_dict(graph: OpGraph) -> dict[str, Any]:
    """The graph as plain JSON data: ops and tensors as columns, so that 100,000 ops stay a small file."""
    ptr, consumers = graph.consumer_ptr.tolist(), graph.consumers.tolist()
    rows = [consumers[ptr[i] : ptr[i + 1]] for i in range(graph.num_tensors)]
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": graph.name,
        "samples": int(graph.samples),
        "ops": _columns(graph, _OPS),
        "parameters": plain(graph.parameters),
        "tensors": {**_columns(graph, _TENSORS), "consumers": rows},
    }
    if graph.op_dims:
        data["op_dims"] = {str(op): dict(dims) for op, dims in sorted(graph.op_dims.items())}
    if graph.capture:
        data["capture"] = dict(graph.capture)
    if graph.source is not None:
        data["source"] = dict(graph.source)
    return data


def _columns(graph: OpGraph, table: dict[str, tuple[str, Any]]) -> dict[str, list[Any]]:
    columns = {key: values for key, (field, _) in table.items() if (values := getattr(graph, field)) is not None}
    lists = {key: list(values) if isinstance(values, tuple) else values.tolist() for key, values in columns.items()}
    return {key: [_NAMED[key][number] for number in row] if key in _NAMED else row for key, row in lists.items()}


_Index = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
_Size = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]


class _Ops(Record, frozen=True):
    """Ops of a graph file, by column."""

    name: tuple[str, ...]
    target: tuple[str, ...]
    kind: tuple[OpKind, ...]
    module: tuple[str, ...]
    phase: list[Phase]
    forward: list[_Index]
    parameter: list[_Index]
    dtype: tuple[str, ...]
    flops: list[float]
    bytes: list[_Size]
    temporary_bytes: list[_Size]
    colocate: list[_Index]
    launches: list[_Index] | None = None


class _Tensors(Record, frozen=True):
    """Tensors of a graph file, by column."""

    role: list[TensorRole]
    parameter: list[_Index]
    producer: list[_Index]
    bytes: list[_Size]
    consumers: list[list[_Index]]


class _Graph(Record, frozen=True):
    """What a graph file holds."""

    ops: _Ops
    parameters: tuple[Parameter, ...]
    tensors: _Tensors
    name: str = "graph"
    samples: _Size = 1
    op_dims: dict[Whole, dict[str, _Size]] = msgspec.field(default_factory=dict)
    capture: dict[str, Any] = msgspec.field(default_factory=dict)
    source: dict[str, Any] | None = None


def graph_from_dict(data: dict[str, Any]) -> OpGraph:
    """Builds and checks the graph of a file without its header."""
    graph = build(_Graph, data, "graph")
    consumers = graph.tensors.consumers
    return OpGraph(
        name=graph.name,
        samples=graph.samples,
        parameters=graph.parameters,
        **_fields(graph.ops, _OPS, "ops"),
        **_fields(graph.tensors, _TENSORS, "tensors"),
        consumer_ptr=np.cumsum([0, *map(len, consumers)], dtype=np.int64),
        consumers=np.array(list(chain.from_iterable(consumers)), dtype=np.int32),
        capture=graph.capture,
        source=graph.source,
        op_dims=graph.op_dims,
    )


def _fields(columns: _Ops | _Tensors, table: dict[str, tuple[str, Any]], where: str) -> dict[str, Any]:
    rows = msgspec.structs.asdict(columns)
    first = next(iter(rows))
    for key, row in rows.items():
        if row is not None and len(row) != len(rows[first]):
            raise InputError(f"graph: {where}.{key}: expected a list as long as {where}.{first}")
        if key in _NAMED:
            rows[key] = [_NAMED[key].index(name) for name in row]
    known = [(field, rows[key], dtype) for key, (field, dtype) in table.items() if rows[key] is not None]
    return {field: row if dtype is None else np.array(row, dtype=dtype) for field, row, dtype in known}
