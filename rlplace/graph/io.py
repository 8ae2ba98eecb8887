"""Op graph files: ``rlplace.graph`` version 1."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from rlplace.errors import InputError
from rlplace.graph.opgraph import PHASES, TENSOR_ROLES, OpGraph, OpKind, Parameter, Phase, TensorRole
from rlplace.records import Record, Whole, build, plain

FORMAT = "rlplace.graph"
VERSION = 1


def graph_to_dict(graph: OpGraph) -> dict[str, Any]:
    """The graph as plain JSON data: ops and tensors as columns, so that 100,000 ops stay a small file."""
    ops = {
        "name": list(graph.op_names),
        "target": list(graph.op_target),
        "kind": list(graph.op_kind),
        "module": list(graph.op_module),
        "phase": [PHASES[phase] for phase in graph.op_phase.tolist()],
        "forward": graph.op_forward.tolist(),
        "parameter": graph.op_parameter.tolist(),
        "dtype": list(graph.op_dtype),
        "flops": graph.op_flops.tolist(),
        "bytes": graph.op_bytes.tolist(),
        "temporary_bytes": graph.op_temporary_bytes.tolist(),
        "colocate": graph.op_colocate.tolist(),
    }
    if graph.op_launches is not None:
        ops["launches"] = graph.op_launches.tolist()
    ptr, consumers = graph.consumer_ptr.tolist(), graph.consumers.tolist()
    tensors = {
        "role": [TENSOR_ROLES[role] for role in graph.tensor_role.tolist()],
        "parameter": graph.tensor_parameter.tolist(),
        "producer": graph.tensor_producer.tolist(),
        "bytes": graph.tensor_bytes.tolist(),
        "consumers": [consumers[ptr[i] : ptr[i + 1]] for i in range(graph.num_tensors)],
    }
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "name": graph.name,
        "samples": int(graph.samples),
        "ops": ops,
        "parameters": plain(graph.parameters),
        "tensors": tensors,
    }
    if graph.op_dims:
        data["op_dims"] = {str(op): dict(dims) for op, dims in sorted(graph.op_dims.items())}
    if graph.capture:
        data["capture"] = dict(graph.capture)
    if graph.source is not None:
        data["source"] = dict(graph.source)
    return data


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
    size_bytes: list[_Size] = msgspec.field(name="bytes")
    temporary_bytes: list[_Size]
    colocate: list[_Index]
    launches: list[_Index] | None = None


class _Tensors(Record, frozen=True):
    """Tensors of a graph file, by column."""

    role: list[TensorRole]
    parameter: list[_Index]
    producer: list[_Index]
    size_bytes: list[_Size] = msgspec.field(name="bytes")
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
    ops, tensors = graph.ops, graph.tensors
    _check_lengths(ops, "ops")
    _check_lengths(tensors, "tensors")
    return OpGraph(
        name=graph.name,
        samples=graph.samples,
        op_names=ops.name,
        op_target=ops.target,
        op_kind=ops.kind,
        op_module=ops.module,
        op_phase=np.array([PHASES.index(phase) for phase in ops.phase], dtype=np.int8),
        op_forward=np.array(ops.forward, dtype=np.int32),
        op_parameter=np.array(ops.parameter, dtype=np.int32),
        op_dtype=ops.dtype,
        op_flops=np.array(ops.flops, dtype=np.float64),
        op_bytes=np.array(ops.size_bytes, dtype=np.int64),
        op_temporary_bytes=np.array(ops.temporary_bytes, dtype=np.int64),
        op_colocate=np.array(ops.colocate, dtype=np.int32),
        parameters=graph.parameters,
        tensor_role=np.array([TENSOR_ROLES.index(role) for role in tensors.role], dtype=np.int8),
        tensor_parameter=np.array(tensors.parameter, dtype=np.int32),
        tensor_producer=np.array(tensors.producer, dtype=np.int32),
        tensor_bytes=np.array(tensors.size_bytes, dtype=np.int64),
        consumer_ptr=np.cumsum([0, *map(len, tensors.consumers)], dtype=np.int64),
        consumers=np.array(list(chain.from_iterable(tensors.consumers)), dtype=np.int32),
        capture=graph.capture,
        source=graph.source,
        op_dims=graph.op_dims,
        op_launches=None if ops.launches is None else np.array(ops.launches, dtype=np.int32),
    )


def _check_lengths(columns: _Ops | _Tensors, where: str) -> None:
    first, *others = msgspec.structs.fields(columns)
    for field in others:
        column = getattr(columns, field.name)
        if column is not None and len(column) != len(getattr(columns, first.name)):
            raise InputError(f"graph: {where}.{field.encode_name}: expected a list as long as {where}.{first.encode_name}")
