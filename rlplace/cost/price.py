"""From op graph and cluster to a placement problem."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.parse import Cluster, as_cluster
from rlplace.cluster.presets import DeviceKind
from rlplace.cost.calls import calls_of
from rlplace.cost.compute import VERSION, OpTimes, check_host, times_with
from rlplace.cost.contract import contract_tasks, split_backward
from rlplace.cost.foreign import as_costs
from rlplace.cost.table import CostTable
from rlplace.errors import InputError, unknown_name
from rlplace.model.graph.atoms import ModuleHierarchy
from rlplace.model.graph.coarsen import DEFAULT_TARGET, Grouping, coarsen
from rlplace.model.graph.opgraph import BUFFER, FORWARD, GRADIENT, INPUT, PARAMETER, UPDATE, OpGraph, with_causal_attention
from rlplace.problem import Problem

__all__ = ["LEVELS", "device_times", "owners", "price", "split_backward"]

LEVELS = ("task", "op")


def price(
    graph: OpGraph,
    cluster: Cluster | str,
    *,
    groups: int | Grouping = DEFAULT_TARGET,
    level: str = "task",
    name: str | None = None,
    costs: CostTable | str | Path | None = None,
    host: str = "eager",
) -> Problem:
    """Prices a captured step for a cluster.

    Args:
        graph: The captured step.
        cluster: The devices and links, or their text such as ``"a100-80g:4"``.
        groups: Largest number of groups, or an existing grouping of the graph.
        level: ``"task"`` contracts every group to one op per phase (groups that tie distant parts of the model together
            have several); ``"op"`` keeps every captured op. Groups, their order and their resident bytes are the same at both.
        name: Name of the problem; default the graph's.
        costs: A cost table, file, or name of a cost model of an installed package, laid over the coefficients that come with
            rlplace; None: those alone.
        host: How ops are issued: "eager", or "compiled" for a compiled graph; an op cannot start before it is issued.

    Returns:
        The problem, with `group_ops` and `group_modules` filled in. A group's resident bytes are the weights, gradients and
        optimizer state of its parameters, and, counted as weights, the buffers and inputs that it reads first. Its `source`
        has the basis of the times of each device kind (``source["op_times"]``: share of the step by basis).
    """
    if level not in LEVELS:
        raise unknown_name("level", level, LEVELS)
    if not isinstance(graph, OpGraph):
        raise InputError(f"price: expected a captured graph, found {type(graph).__name__}")
    cluster = as_cluster(cluster)
    table = as_costs(costs)
    by_kind = kind_times(graph, cluster, table, host=host)
    seconds = np.stack([by_kind[kind.name].seconds for kind in cluster.kinds], axis=1)
    grouping = groups if isinstance(groups, Grouping) else coarsen(graph, groups, cost=seconds.mean(axis=1))
    if grouping.op_cluster.shape != (graph.num_ops,):
        raise InputError(f"price: the grouping is for {len(grouping.op_cluster)} ops, the graph has {graph.num_ops}")
    source = {  # prices the same problem again, and checks it
        "name": graph.name,
        "graph": None if graph.source is None else dict(graph.source),
        "capture": dict(graph.capture),
        "graph_fingerprint": graph.fingerprint,
        "cluster": cluster.text,
        "cluster_fingerprint": cluster.fingerprint,
        "groups": grouping.num_groups if isinstance(groups, Grouping) else int(groups),
        "level": level,
        "cost_version": VERSION,
        "costs": {"path": str(costs) if isinstance(costs, (str, Path)) else None, "fingerprint": table.fingerprint},
        "host": host,
        "op_times": {name: times.shares() for name, times in by_kind.items()},
    }
    members: list[list[str]] = [[] for _ in range(grouping.num_groups)]
    for op in np.flatnonzero(graph.op_phase == FORWARD).tolist():
        members[grouping.op_group[op]].append(graph.op_names[op])
    parameter_group, tensor_owner = owners(graph, grouping)
    weight, gradient, optimizer = _resident_parts(graph, grouping, parameter_group, tensor_owner)
    devices, links = cluster.to_problem_devices()
    problem = Problem(
        name=graph.name if name is None else name,
        samples_per_microbatch=graph.samples,
        devices=devices,
        links=links,
        group_names=grouping.names,
        resident_bytes=weight + gradient + optimizer,
        weight_bytes=weight,
        gradient_bytes=gradient,
        optimizer_bytes=optimizer,
        op_names=graph.op_names,
        op_group=grouping.op_group,
        op_phase=graph.op_phase.copy(),
        time_s=seconds,
        temporary_bytes=graph.op_temporary_bytes.copy(),
        op_kind=graph.op_kind,
        **_tensors(graph, grouping, parameter_group, tensor_owner),
        op_dims=dict(graph.op_dims),
        source=source,
        group_ops=tuple(map(tuple, members)),
        group_modules=grouping.modules,
    )
    return contract_tasks(problem, grouping) if level == "task" else problem


def device_times(
    graph: OpGraph, cluster: Cluster, *, costs: CostTable | str | Path | None = None, host: str = "eager"
) -> NDArray[np.float64]:
    """Returns float64 [N, D], seconds of every captured op on every device."""
    by_kind = kind_times(graph, cluster, as_costs(costs), host=host)
    return np.stack([by_kind[kind.name].seconds for kind in cluster.kinds], axis=1)


def kind_times(graph: OpGraph, cluster: Cluster, table: CostTable, *, host: str = "eager") -> dict[str, OpTimes]:
    """Times of every captured op with their basis, by the name of each device kind of the cluster; causal masks are found."""
    kinds: dict[str, DeviceKind] = {kind.name: kind for kind in cluster.kinds}
    check_host(host)
    graph = with_causal_attention(graph)
    calls = calls_of(graph, host)
    return {name: times_with(table, graph, kind, calls, host) for name, kind in kinds.items()}


def owners(graph: OpGraph, grouping: Grouping) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Groups that hold the parameters, buffers and tensors without a producer.

    A trainable parameter belongs to the group of its update; anything else to the first group that reads it; a parameter that
    nothing reads to the group nearest to its module.

    Returns:
        int32 [P], group of every parameter and buffer; and int32 [T], group of every tensor without a producer, else -1.
    """
    op_group = grouping.op_group
    of_parameter = np.full(len(graph.parameters), -1, dtype=np.int32)
    of_tensor = np.full(graph.num_tensors, -1, dtype=np.int32)
    read = np.flatnonzero((graph.tensor_producer < 0) & (np.diff(graph.consumer_ptr) > 0))
    first_group = op_group[graph.consumers[graph.consumer_ptr[read]]]
    of_tensor[read] = first_group
    held = np.isin(graph.tensor_role[read], (PARAMETER, BUFFER))
    of_parameter[graph.tensor_parameter[read[held]][::-1]] = first_group[held][::-1]
    updates = np.flatnonzero(graph.op_phase == UPDATE)
    of_parameter[graph.op_parameter[updates]] = op_group[updates]
    missing = np.flatnonzero(of_parameter < 0)
    if len(missing):
        forward = np.flatnonzero(graph.op_phase == FORWARD)
        tree = ModuleHierarchy(graph.op_module[op] for op in forward.tolist())
        for index in missing.tolist():
            op = forward[tree.nearest(graph.parameters[index].name.rpartition(".")[0])]
            of_parameter[index] = op_group[op]
    held_tensors = np.flatnonzero(np.isin(graph.tensor_role, (PARAMETER, BUFFER)))
    of_tensor[held_tensors] = of_parameter[graph.tensor_parameter[held_tensors]]
    return of_parameter, of_tensor


def _tensors(
    graph: OpGraph, grouping: Grouping, parameter_group: NDArray[np.int32], tensor_owner: NDArray[np.int32]
) -> dict[str, Any]:
    """Returns the tensors of a problem without those that a group holds itself; its own gradients have no bytes."""
    op_group = grouping.op_group
    tensor = graph.edge_tensor
    consumer_group = op_group[graph.consumers]
    producer = graph.tensor_producer
    produced = producer >= 0
    # Edges from a held tensor to its own group go; a tensor without edges then goes too.
    keep_edge = produced[tensor] | (consumer_group != tensor_owner[tensor])
    keep = produced.copy()
    keep[tensor[keep_edge]] = True
    # A view reads no memory: beside the producer it waits for it, but must not keep the storage alive until it is its turn.
    looks = _plain_views(graph)[graph.consumers] & produced[tensor] & (op_group[producer[tensor]] == consumer_group)
    keep_edge &= ~looks
    # A gradient that is made and used where its parameter lives is part of the resident bytes.
    size = graph.tensor_bytes.copy()
    gradient = graph.tensor_role == GRADIENT
    home = (
        np.where(gradient, parameter_group[np.maximum(graph.tensor_parameter, 0)], -1) if len(parameter_group) else tensor_owner
    )
    own = gradient & (op_group[np.maximum(producer, 0)] == home)
    own[tensor[consumer_group != home[tensor]]] = False
    size[own] = 0
    kept = np.bincount(tensor[keep_edge], minlength=graph.num_tensors)[keep]
    pairs = np.unique(producer[tensor[looks]].astype(np.int64) * graph.num_ops + graph.consumers[looks])
    viewed, waits = np.unique(pairs // graph.num_ops, return_counts=True)  # one tensor without bytes per producer with views
    return {
        "tensor_producer": np.concatenate([producer[keep], viewed]),
        "tensor_owner": np.concatenate([np.where(produced, -1, tensor_owner)[keep], np.full(len(viewed), -1)]),
        "tensor_bytes": np.concatenate([size[keep], np.zeros(len(viewed), dtype=np.int64)]),
        "consumer_ptr": np.concatenate([[0], np.cumsum(np.concatenate([kept, waits]))]),
        "consumers": np.concatenate([graph.consumers[keep_edge], pairs % graph.num_ops]),
    }


def _plain_views(graph: OpGraph) -> NDArray[np.bool_]:
    """Marks [N] the views that make no storage of their own and so take none of their inputs' bytes anywhere."""
    view = np.array([kind == "view" for kind in graph.op_kind], dtype=bool)
    makes = graph.tensor_producer[(graph.tensor_producer >= 0) & (graph.tensor_bytes > 0)]
    view[makes] = False
    return view


def _resident_parts(
    graph: OpGraph, grouping: Grouping, parameter_group: NDArray[np.int32], tensor_owner: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns per group: bytes of weights (with buffers and inputs), gradients and optimizer state."""
    parts = np.zeros((3, grouping.num_groups), dtype=np.int64)
    if graph.parameters:
        sizes = np.array([(p.size_bytes, p.gradient_bytes, p.optimizer_bytes) for p in graph.parameters], dtype=np.int64)
        for row, column in zip(parts, sizes.T, strict=True):
            np.add.at(row, parameter_group, column)
    inputs = (graph.tensor_role == INPUT) & (tensor_owner >= 0)
    np.add.at(parts[0], tensor_owner[inputs], graph.tensor_bytes[inputs])
    return parts[0].copy(), parts[1].copy(), parts[2].copy()
