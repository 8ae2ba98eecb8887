"""Checks that an `OpGraph` is well formed before its numbers are used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, unknown_name
from rlplace.limits import MAX_BYTES
from rlplace.problem.check import check_counts, check_names, first, refuse
from rlplace.problem.order import topological_order

if TYPE_CHECKING:
    from rlplace.model.graph.opgraph import OpGraph

MAX_FLOPS = 1e24


def check_graph(graph: OpGraph) -> None:
    """Checks every field of a graph.

    Raises:
        InputError: Names the first field, item and value that is wrong.
    """
    check_counts(graph.num_ops, 1, graph.num_tensors, len(graph.consumers), "graph")
    _check_ops(graph)
    _check_parameters(graph)
    _check_tensors(graph)
    _check_order(graph)


def _fail(where: str, what: str) -> InputError:
    return InputError(f"graph: {where}: {what}")


def _check_shape(graph: OpGraph, field: str, count: int) -> None:
    values = getattr(graph, field)
    shape = values.shape if isinstance(values, np.ndarray) else (len(values),)
    if shape != (count,):
        raise _fail(field, f"expected {count} values, found shape {shape}")


def _check_range(values: NDArray[np.generic], where: str, low: float, high: float) -> None:
    """`low` and `high` inclusive; NaN is outside every range."""
    bad = ~((values >= low) & (values <= high))  # type: ignore[operator]
    if bad.any():
        index = first(bad)
        raise _fail(f"{where}[{index}]", f"{values[index]} is outside {low:g}..{high:g}")


def _check_ops(graph: OpGraph) -> None:
    from rlplace.model.graph.opgraph import BACKWARD, BACKWARD_WEIGHT, FORWARD, OP_KINDS, UPDATE

    count = graph.num_ops
    if count == 0:
        raise _fail("ops", "the graph is empty; it needs at least one op")
    if not 1 <= graph.samples <= MAX_BYTES:
        raise _fail("samples", f"{graph.samples} is not a positive count")
    check_names(graph.op_names, "graph", "op_names")
    for field in ("op_target", "op_kind", "op_module", "op_phase", "op_forward", "op_parameter", "op_dtype", "op_flops",
                  "op_bytes", "op_temporary_bytes", "op_colocate"):  # fmt: skip
        _check_shape(graph, field, count)
    unknown = set(graph.op_kind) - set(OP_KINDS)
    if unknown:
        raise unknown_name("op kind", min(unknown), OP_KINDS)
    _check_range(graph.op_phase, "op_phase", FORWARD, UPDATE)
    _check_range(graph.op_flops, "op_flops", 0, MAX_FLOPS)
    _check_range(graph.op_bytes, "op_bytes", 0, MAX_BYTES)
    _check_range(graph.op_temporary_bytes, "op_temporary_bytes", 0, MAX_BYTES)
    _check_range(graph.op_colocate, "op_colocate", 0, 2**31 - 1)
    _check_range(graph.op_forward, "op_forward", -1, count - 1)
    _check_range(graph.op_parameter, "op_parameter", -1, len(graph.parameters) - 1)
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
    if graph.op_launches is not None:
        _check_shape(graph, "op_launches", count)
        _check_range(graph.op_launches, "op_launches", 0, 2**31 - 1)
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
    from rlplace.model.graph.opgraph import ACTIVATION, BUFFER, GRADIENT, INPUT, PARAMETER

    count, ops = graph.num_tensors, graph.num_ops
    for field in ("tensor_role", "tensor_parameter", "tensor_producer", "tensor_bytes"):
        _check_shape(graph, field, count)
    _check_range(graph.tensor_role, "tensor_role", ACTIVATION, GRADIENT)
    _check_range(graph.tensor_bytes, "tensor_bytes", 0, MAX_BYTES)
    _check_range(graph.tensor_producer, "tensor_producer", -1, ops - 1)
    _check_range(graph.tensor_parameter, "tensor_parameter", -1, len(graph.parameters) - 1)
    role = graph.tensor_role
    external = (role == PARAMETER) | (role == BUFFER) | (role == INPUT)
    bad = external != (graph.tensor_producer < 0)
    refuse(bad, "graph", "tensor_producer[{}]", "parameters, buffers and inputs, and only they, have no producer")
    owned = (role == PARAMETER) | (role == BUFFER) | (role == GRADIENT)
    bad = owned != (graph.tensor_parameter >= 0)
    refuse(bad, "graph", "tensor_parameter[{}]", "parameters, buffers and gradients, and only they, name a parameter")
    ptr = graph.consumer_ptr
    if ptr.shape != (count + 1,) or ptr[0] != 0 or ptr[-1] != len(graph.consumers) or (np.diff(ptr) < 0).any():
        raise _fail("consumer_ptr", "offsets are not a partition of the consumer list")
    _check_range(graph.consumers, "consumers", 0, ops - 1)
    key = graph.edge_tensor.astype(np.int64) * ops + graph.consumers
    twice = key[1:] <= key[:-1]
    if twice.any():
        raise _fail(f"consumers of tensor {int(key[1:][twice][0] // ops)}", "must be distinct and in execution order")


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
