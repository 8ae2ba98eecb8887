"""Op graph files: ``rlplace.graph`` version 1."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from rlplace.errors import InputError, unknown_name
from rlplace.limits import MAX_BYTES
from rlplace.model.graph.opgraph import (
    ACTIVATION,
    BACKWARD,
    BACKWARD_WEIGHT,
    BUFFER,
    FORWARD,
    GRADIENT,
    INPUT,
    OP_KINDS,
    PARAMETER,
    PHASES,
    TENSOR_ROLES,
    UPDATE,
    OpGraph,
    OpKind,
    Parameter,
    Phase,
    TensorRole,
)  # fmt: skip
from rlplace.problem.check import check_arrays, check_consumers, check_counts, check_names, first, refuse
from rlplace.problem.order import topological_order
from rlplace.records import Record, Whole, build, is_trusted, plain

MAX_FLOPS = 1e24


def check_graph(graph: OpGraph) -> None:
    """Checks every field of a graph.

    Raises:
        InputError: Names the first field, item and value that is wrong.
    """
    if is_trusted():
        return
    check_counts(graph.num_ops, 1, graph.num_tensors, len(graph.consumers), "graph")
    _check_ops(graph)
    _check_parameters(graph)
    _check_tensors(graph)
    _check_order(graph)


def _fail(where: str, what: str) -> InputError:
    return InputError(f"graph: {where}: {what}")


def _check_ops(graph: OpGraph) -> None:
    count = graph.num_ops
    if count == 0:
        raise _fail("ops", "the graph is empty; it needs at least one op")
    if not 1 <= graph.samples <= MAX_BYTES:
        raise _fail("samples", f"{graph.samples} is not a positive count")
    check_names(graph.op_names, "graph", "op_names")
    for field in ("op_target", "op_kind", "op_module", "op_dtype"):
        if len(getattr(graph, field)) != count:
            raise _fail(field, f"expected {count} values, found {len(getattr(graph, field))}")
    unknown = set(graph.op_kind) - set(OP_KINDS)
    if unknown:
        raise unknown_name("op kind", min(unknown), OP_KINDS)
    ranges: dict[str, tuple[float, float]] = {
        "op_phase": (FORWARD, UPDATE), "op_flops": (0, MAX_FLOPS), "op_bytes": (0, MAX_BYTES),
        "op_temporary_bytes": (0, MAX_BYTES), "op_colocate": (0, 2**31 - 1), "op_forward": (-1, count - 1),
        "op_parameter": (-1, len(graph.parameters) - 1),
    }  # fmt: skip
    check_arrays(graph, "graph", count, ranges | ({} if graph.op_launches is None else {"op_launches": (0, 2**31 - 1)}))
    phase, forward = graph.op_phase, graph.op_forward
    ids = np.arange(count)
    refuse((phase == FORWARD) & (forward != ids), "graph", "op_forward[{}]", "a forward op belongs to itself")
    is_backward = (phase == BACKWARD) | (phase == BACKWARD_WEIGHT)
    bad = is_backward & ((forward < 0) | (phase[np.maximum(forward, 0)] != FORWARD))
    refuse(bad, "graph", "op_forward[{}]", "a backward op must name its forward op")
    bad = is_backward & (graph.op_colocate != graph.op_colocate[np.maximum(forward, 0)])
    refuse(bad, "graph", "op_colocate[{}]", "a backward op must share a device with its forward op")
    bad = (phase == UPDATE) != (graph.op_parameter >= 0)
    refuse(bad, "graph", "op_parameter[{}]", "update ops, and only they, name a parameter")
    refuse((phase == UPDATE) & (forward != -1), "graph", "op_forward[{}]", "an update op belongs to no forward op")
    if any(not 0 <= op < count for op in graph.op_dims):
        raise _fail("op_dims", "names an op that does not exist")


def _check_parameters(graph: OpGraph) -> None:
    check_names(tuple(p.name for p in graph.parameters), "graph", "parameters")
    for index, parameter in enumerate(graph.parameters):
        where = f"parameters[{index}] ({parameter.name[:80]})"
        for field in ("size_bytes", "gradient_bytes", "optimizer_bytes"):
            value = getattr(parameter, field)
            if not 0 <= value <= MAX_BYTES:
                raise _fail(f"{where}.{field}", f"{value} is outside 0..{MAX_BYTES}")
        if not parameter.trainable and (parameter.gradient_bytes or parameter.optimizer_bytes):
            raise _fail(where, "has gradient or optimizer bytes but is not trainable")
        if parameter.is_buffer and parameter.trainable:
            raise _fail(where, "a buffer is not trainable")


def _check_tensors(graph: OpGraph) -> None:
    count, ops = graph.num_tensors, graph.num_ops
    ranges = {
        "tensor_role": (ACTIVATION, GRADIENT), "tensor_bytes": (0, MAX_BYTES), "tensor_producer": (-1, ops - 1),
        "tensor_parameter": (-1, len(graph.parameters) - 1),
    }  # fmt: skip
    check_arrays(graph, "graph", count, ranges)
    role = graph.tensor_role
    external = (role == PARAMETER) | (role == BUFFER) | (role == INPUT)
    bad = external != (graph.tensor_producer < 0)
    refuse(bad, "graph", "tensor_producer[{}]", "parameters, buffers and inputs, and only they, have no producer")
    owned = (role == PARAMETER) | (role == BUFFER) | (role == GRADIENT)
    bad = owned != (graph.tensor_parameter >= 0)
    refuse(bad, "graph", "tensor_parameter[{}]", "parameters, buffers and gradients, and only they, name a parameter")
    check_consumers(graph, "graph", ops, ordered=True)


def _check_order(graph: OpGraph) -> None:
    producer = graph.tensor_producer[graph.edge_tensor]
    bad = producer >= graph.consumers
    if not bad.any():
        return
    edge = first(bad)
    produced = producer >= 0
    _, stuck = topological_order(producer[produced], graph.consumers[produced], graph.num_ops)
    if stuck is not None:
        raise _fail(f"op {graph.op_names[stuck][:80]!r}", "the graph is cyclic; this op waits on a cycle")
    names = graph.op_names[graph.consumers[edge]][:80], graph.op_names[producer[edge]][:80]
    raise _fail(f"op {names[0]!r}", f"is listed before {names[1]!r}, which it depends on; list ops in execution order")


FORMAT = "rlplace.graph"
VERSION = 1


OP_COLUMNS: dict[str, tuple[str, Any]] = {
    "name": ("op_names", None), "target": ("op_target", None), "kind": ("op_kind", None), "module": ("op_module", None),
    "phase": ("op_phase", np.int8), "forward": ("op_forward", np.int32), "parameter": ("op_parameter", np.int32),
    "dtype": ("op_dtype", None), "flops": ("op_flops", np.float64), "bytes": ("op_bytes", np.int64),
    "temporary_bytes": ("op_temporary_bytes", np.int64), "colocate": ("op_colocate", np.int32),
    "launches": ("op_launches", np.int32),
}  # fmt: skip
"""Column of ops to the field of `OpGraph` and the type of its array, None for a tuple."""

TENSOR_COLUMNS: dict[str, tuple[str, Any]] = {
    "role": ("tensor_role", np.int8), "parameter": ("tensor_parameter", np.int32), "producer": ("tensor_producer", np.int32),
    "bytes": ("tensor_bytes", np.int64),
}  # fmt: skip

_NAMED = {"phase": PHASES, "role": TENSOR_ROLES}
"""Columns whose numbers are written as names."""


def graph_to_dict(graph: OpGraph) -> dict[str, Any]:
    """Returns the graph as plain JSON data: ops and tensors as columns, so that 100,000 ops stay a small file."""
    ptr, consumers = graph.consumer_ptr.tolist(), graph.consumers.tolist()
    rows = [consumers[ptr[i] : ptr[i + 1]] for i in range(graph.num_tensors)]
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": graph.name,
        "samples": int(graph.samples),
        "ops": _columns(graph, OP_COLUMNS),
        "parameters": plain(graph.parameters),
        "tensors": {**_columns(graph, TENSOR_COLUMNS), "consumers": rows},
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


class _OpTable(Record, frozen=True):
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


class _TensorTable(Record, frozen=True):
    """Tensors of a graph file, by column."""

    role: list[TensorRole]
    parameter: list[_Index]
    producer: list[_Index]
    bytes: list[_Size]
    consumers: list[list[_Index]]


class _GraphFile(Record, frozen=True):
    """Contents of a graph file."""

    ops: _OpTable
    parameters: tuple[Parameter, ...]
    tensors: _TensorTable
    name: str = "graph"
    samples: _Size = 1
    op_dims: dict[Whole, dict[str, _Size]] = msgspec.field(default_factory=dict)
    capture: dict[str, Any] = msgspec.field(default_factory=dict)
    source: dict[str, Any] | None = None


def graph_from_dict(data: dict[str, Any]) -> OpGraph:
    """Builds and checks the graph of a file without its header."""
    graph = build(_GraphFile, data, "graph")
    consumers = graph.tensors.consumers
    return OpGraph(
        name=graph.name,
        samples=graph.samples,
        parameters=graph.parameters,
        **_fields(graph.ops, OP_COLUMNS, "ops"),
        **_fields(graph.tensors, TENSOR_COLUMNS, "tensors"),
        consumer_ptr=np.cumsum([0, *map(len, consumers)], dtype=np.int64),
        consumers=np.array(list(chain.from_iterable(consumers)), dtype=np.int32),
        capture=graph.capture,
        source=graph.source,
        op_dims=graph.op_dims,
    )


def _fields(columns: _OpTable | _TensorTable, table: dict[str, tuple[str, Any]], where: str) -> dict[str, Any]:
    rows = msgspec.structs.asdict(columns)
    first = next(iter(rows))
    for key, row in rows.items():
        if row is not None and len(row) != len(rows[first]):
            raise InputError(f"graph: {where}.{key}: expected a list as long as {where}.{first}")
        if key in _NAMED:
            rows[key] = [_NAMED[key].index(name) for name in row]
    known = [(field, rows[key], dtype) for key, (field, dtype) in table.items() if rows[key] is not None]
    return {field: row if dtype is None else np.array(row, dtype=dtype) for field, row, dtype in known}
