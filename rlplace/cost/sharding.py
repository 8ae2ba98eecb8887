"""What a priced problem tells sharding planners: `Sharding` from what capture recorded, and the price of smaller shapes."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.parse import Cluster
from rlplace.cost.contract import PricedOps
from rlplace.cost.table import CostTable
from rlplace.errors import InputError
from rlplace.graph.opgraph import BUFFER, FORWARD, INPUT, PARAMETER, UPDATE, OpGraph
from rlplace.problem.sharding import Held, Sharding

_ROWS = ("m", "batch", "rows")
"""Dimensions of the cost model that shrink when a batch is cut; an op's first one that is there."""


def price_sharding(
    graph: OpGraph,
    ops: PricedOps,
    parameter_group: NDArray[np.int32],
    tensor_owner: NDArray[np.int32],
    seconds: NDArray[np.float64],
    cluster: Cluster,
    costs: CostTable,
    host: str,
) -> Sharding:
    """The sharding of a problem at op level.

    Args:
        graph: N captured ops.
        ops: As they stand in the problem.
        parameter_group: int32 [P], see `rlplace.cost.price.owners`.
        tensor_owner: int32 [T], likewise.
        seconds: float64 [N, D], priced times.
        cluster: The D devices.
        costs: What they were priced with.
        host: Likewise.

    Raises:
        InputError: The graph does not say how its ops access tensors.
    """
    if graph.traced is None:
        raise InputError(
            "price: this graph does not say along which dimensions its ops can be cut; capture the model again, in this "
            "process, by export and at the batch size that is to be priced"
        )
    indices = graph.traced.indices
    assert ops.origin is not None
    number = {int(captured): index for index, captured in enumerate(ops.origin)}
    backward = np.flatnonzero((graph.op_phase != FORWARD) & (graph.op_phase != UPDATE)).tolist()
    present = [tensor for tensor in indices.access if tensor in number]
    return Sharding(
        dims=indices.dims,
        axes={number[tensor]: indices.axes[tensor] for tensor in present},
        access={number[tensor]: indices.access[tensor] for tensor in present},
        statistics=indices.statistics,
        follows={op: int(graph.op_forward[op]) for op in backward},
        held=_held(graph, parameter_group, tensor_owner),
        fixed_s=_fixed_s(graph, seconds, cluster, costs, host),
    )


def _held(graph: OpGraph, parameter_group: NDArray[np.int32], tensor_owner: NDArray[np.int32]) -> tuple[Held, ...]:
    assert graph.traced is not None
    indices = graph.traced.indices
    held: list[Held] = []
    for tensor in np.flatnonzero(np.isin(graph.tensor_role, (PARAMETER, BUFFER, INPUT))).tolist():
        readers = graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]]
        names = indices.access.get(tensor, {})
        access = {op: names.get(op, ()) for op in readers[graph.op_phase[readers] == FORWARD].tolist()}
        axes = indices.axes.get(tensor, ())
        access = {op: own if own else ("",) * len(axes) for op, own in access.items()}
        update = readers[graph.op_phase[readers] == UPDATE].tolist()
        if graph.tensor_role[tensor] == INPUT:
            if tensor_owner[tensor] >= 0:
                size_bytes = int(graph.tensor_bytes[tensor])
                item = Held(f"input {tensor}", int(tensor_owner[tensor]), size_bytes, 0, 0, axes, access, is_input=True)
                held.append(item)
            continue
        index = int(graph.tensor_parameter[tensor])
        record = graph.parameters[index]
        sizes = record.size_bytes, record.gradient_bytes, record.optimizer_bytes
        held.append(Held(record.name, int(parameter_group[index]), *sizes, axes, access, update[0] if update else -1))
    return tuple(held)


def _fixed_s(
    graph: OpGraph, seconds: NDArray[np.float64], cluster: Cluster, costs: CostTable, host: str
) -> NDArray[np.float64]:
    """float64 [N, D], the time that stays when ops are cut: from the price of all ops at 1 / D of their size."""
    from rlplace.cost.price import kind_times

    parts = max(2, seconds.shape[1])
    dims = {}
    for op, sizes in graph.op_dims.items():
        cut = next((name for name in _ROWS if name in sizes), None)
        dims[op] = {name: max(1, size // parts) if name == cut else size for name, size in sizes.items()}
    small = dataclasses.replace(
        graph, op_flops=graph.op_flops / parts, op_bytes=-(-graph.op_bytes // parts), op_dims=dims, traced=None
    )
    by_kind = kind_times(small, cluster, costs, host=host)
    part = np.stack([by_kind[kind.name].seconds for kind in cluster.kinds], axis=1)
    return np.clip((parts * part - seconds) / (parts - 1), 0.0, seconds)
