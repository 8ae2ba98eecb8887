"""The coarse problem: nodes of joined groups as groups, one op for each of their phases.

A coarse op takes as long as its ops one after another and ends with the last of them, so a tensor leaves a node later than it
could. Where joining the ops of a phase would make a cycle (a node is left and entered again), those ops stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.placement.published.dlplacer.instance import transfer_seconds
from rlplace.problem import PHASES, Problem
from rlplace.problem.build import tensor_fields, unknown_parts
from rlplace.problem.order import topological_order


def contract_groups(problem: Problem, node_of_group: NDArray[np.int32]) -> tuple[Problem, NDArray[np.int64]]:
    """The problem with joined groups, and the op of it that each op is part of; the problem itself when no groups are joined.

    Args:
        problem: The problem.
        node_of_group: int32 [G], numbered from 0 without gaps.

    Raises:
        InputError: The problem has collectives.
    """
    nodes = int(node_of_group.max()) + 1
    if nodes == problem.num_groups:
        return problem, np.arange(problem.num_ops, dtype=np.int64)
    if problem.collectives:
        raise InputError("dlplacer: the problem has collectives; plan the problem of one replica, before `expand`")
    node = node_of_group[problem.op_group]
    part = _acyclic_parts(problem, node)
    count = int(part.max()) + 1
    first = np.zeros(count, dtype=np.int64)
    first[part[::-1]] = np.arange(problem.num_ops)[::-1]
    time_s = np.zeros((count, problem.num_devices))
    np.add.at(time_s, part, problem.time_s)  # NaN stays NaN: a part runs only where all of its ops do
    resident = np.bincount(node_of_group, weights=problem.resident_bytes, minlength=nodes).astype(np.int64)
    fixed = np.full(nodes, -1, dtype=np.int32)
    held = problem.group_device >= 0
    fixed[node_of_group[held]] = problem.group_device[held]
    tensors = _tensors(problem, node_of_group, part)
    coarse = Problem(
        name=f"{problem.name}, {nodes} nodes",
        samples_per_microbatch=problem.samples_per_microbatch,
        devices=problem.devices,
        links=problem.links,
        group_names=tuple(f"node{i}" for i in range(nodes)),
        resident_bytes=resident,
        **unknown_parts(nodes),
        group_device=fixed,
        op_names=tuple(f"part{i}/{PHASES[problem.op_phase[op]]}" for i, op in enumerate(first.tolist())),
        op_group=node[first].astype(np.int32),
        op_phase=problem.op_phase[first].copy(),
        time_s=time_s,
        temporary_bytes=_temporary(problem, part, count),
        **tensor_fields([t[:4] for t in tensors]),
        tensor_transfer_s={i: t[4] for i, t in enumerate(tensors) if t[4] is not None},
    )
    return coarse, part


def _acyclic_parts(problem: Problem, node: NDArray[np.int32]) -> NDArray[np.int64]:
    """int64 [N], the part of every op: one per node and phase, broken up into its ops where parts would wait for each other."""
    key = node.astype(np.int64) * len(PHASES) + problem.op_phase
    source, target = problem.op_edges
    loose = np.zeros(problem.num_ops, dtype=bool)
    while True:
        own = len(PHASES) * problem.num_groups + np.arange(problem.num_ops)
        part = np.unique(np.where(loose, own, key), return_inverse=True)[1].astype(np.int64)
        count = int(part.max()) + 1
        apart = part[source] != part[target]
        heads, tails = part[source[apart]], part[target[apart]]
        order, stuck = topological_order(heads, tails, count)
        if stuck is None:
            return part
        # What neither Kahn's algorithm nor its mirror image can order lies on cycles or between them.
        back, _ = topological_order(tails, heads, count)
        cyclic = np.ones(count, dtype=bool)
        cyclic[order] = False
        cyclic[back] = False
        several = np.bincount(part, minlength=count) > 1
        loose |= cyclic[part] & several[part]


def _temporary(problem: Problem, part: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """int64 [parts], most bytes that one op of each part needs for itself and for outputs that stay inside the part."""
    need = problem.temporary_bytes.copy()
    leaves = np.zeros(problem.num_tensors, dtype=bool)
    producer = problem.tensor_producer[problem.edge_tensor]
    leaves[problem.edge_tensor[(producer >= 0) & (part[np.maximum(producer, 0)] != part[problem.consumers])]] = True
    inner = (problem.tensor_producer >= 0) & ~leaves
    np.add.at(need, problem.tensor_producer[inner], problem.tensor_bytes[inner])
    most = np.zeros(count, dtype=np.int64)
    np.maximum.at(most, part, need)
    return most


CoarseTensor = tuple[int, int, int, Sequence[int], "NDArray[Any] | None"]


def _tensors(problem: Problem, node_of_group: NDArray[np.int32], part: NDArray[np.int64]) -> list[CoarseTensor]:
    """(producer, owner, bytes, consumers, transfer times) of tensors that leave their part; equal ends are one tensor."""
    alike: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
    for tensor in range(problem.num_tensors):
        readers = problem.consumers[problem.consumer_ptr[tensor] : problem.consumer_ptr[tensor + 1]]
        producer, owner = int(problem.tensor_producer[tensor]), int(problem.tensor_owner[tensor])
        outside = set(part[readers].tolist())
        if producer >= 0:
            producer = int(part[producer])
            outside.discard(producer)
        else:
            owner = int(node_of_group[owner])
            outside = set(part[readers[node_of_group[problem.op_group[readers]] != owner]].tolist())
        if outside:
            alike.setdefault((producer, owner, tuple(sorted(outside))), []).append(tensor)
    sent = transfer_seconds(problem)
    rows: list[CoarseTensor] = []
    for (producer, owner, outside_readers), tensors in alike.items():
        table = None
        if len(tensors) > 1 or tensors[0] in problem.tensor_transfer_s:
            table = sent[tensors].sum(axis=0)
            table[~np.isfinite(table)] = 0.0  # no link: never used
        rows.append((producer, owner, int(problem.tensor_bytes[tensors].sum()), outside_readers, table))
    return rows
