"""Numbers the assembled ops, puts them in execution order, finds which share a device, and makes the `OpGraph`.

One iteration space for an op that runs several ATen ops, such as a loss function.

The spaces of the ATen ops are joined through the storages that they share: dimensions that run along the same strides are
one. A sum inside the op, over a dimension that does not run along what it makes, is a statistic: devices that share the
dimension need it before they can go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.model.capture.assemble import Assembly, CyclicStepError, Key, TensorRow, Tensors
from rlplace.model.capture.record import BACKWARD_OF, FORWARD_OF, UPDATE_OF
from rlplace.model.graph.indices import Access, AxisSystem, Names, Traced, Use
from rlplace.model.graph.io import OP_COLUMNS, TENSOR_COLUMNS
from rlplace.model.graph.opgraph import BACKWARD, FORWARD, UPDATE, OpGraph
from rlplace.problem.order import UnionFind, components, topological_order


def build_graph(assembly: Assembly, **fields: Any) -> OpGraph:
    """Assigns numbers to the ops, forms the tensors and returns the checked graph.

    Args:
        assembly: Events by op.
        fields: `name`, `samples`, `capture` and `source` of the graph.
    """
    tensors = Tensors(assembly)
    order = _execution_order(assembly, tensors)
    number = {key: index for index, key in enumerate(order)}
    rows = tensors.rows(number)
    ops = [_op_row(assembly, key, number) | {"temporary_bytes": tensors.temporary_bytes(key)} for key in order]
    colocate = _colocation(assembly, order, number)
    columns: dict[str, Any] = {
        field: tuple(op[key] for op in ops) if dtype is None else np.array([op[key] for op in ops], dtype=dtype)
        for key, (field, dtype) in OP_COLUMNS.items()
        if key != "colocate"
    }
    columns |= {
        field: np.array([getattr(row, key) for row in rows], dtype=dtype) for key, (field, dtype) in TENSOR_COLUMNS.items()
    }
    return OpGraph(
        **columns,
        op_colocate=colocate,
        parameters=tuple(leaf.record for leaf in assembly.leaves),
        consumer_ptr=np.concatenate([[0], np.cumsum([len(row.consumers) for row in rows])]).astype(np.int64),
        consumers=np.array([op for row in rows for op in row.consumers], dtype=np.int32),
        op_dims={index: dims for index, key in enumerate(order) if (dims := _op_dims(assembly, key)) is not None},
        traced=_traced(assembly, number, rows),
        **fields,
    )


def _op_row(assembly: Assembly, key: Key, number: dict[Key, int]) -> dict[str, Any]:
    """Returns the values of an op by column of `OP_COLUMNS`."""
    (phase, owner), op, event = key, assembly.ops[key], assembly.dominant(key)
    work = {"flops": op.flops, "bytes": op.bytes, "launches": assembly.launches(key), "kind": assembly.kind(key)}
    if phase == UPDATE_OF:
        record = assembly.leaves[owner].record
        rule, whole = assembly.rule.of(record.name in assembly.apart), not record.sparse
        return work | {
            "name": f"{record.name}/update",
            "target": "optimizer",
            "module": record.name.rpartition(".")[0],
            "phase": UPDATE,
            "forward": -1,
            "parameter": owner,
            "kind": "gemm" if rule.products else work["kind"],
            "dtype": "bfloat16" if rule.products else record.dtype,
            "flops": op.flops + whole * rule.update_flops(record.shape),
            "bytes": op.bytes + whole * (int(rule.weight_traffic * record.size_bytes) + 2 * record.optimizer_bytes),
        }
    label, forward = assembly.recording.labels[owner], phase == FORWARD_OF
    return work | {
        "name": label.name if forward else f"{label.name}.backward",
        "target": label.target if forward or event is None else f"aten.{event.name}",
        "module": label.module,
        "phase": FORWARD if forward else BACKWARD,
        "forward": number[FORWARD_OF, owner],
        "parameter": -1,
        "dtype": "none" if event is None else event.dtype,
    }


def _op_dims(assembly: Assembly, key: Key) -> dict[str, int] | None:
    """Returns the named sizes of an op; the two products of a backward op follow from those of its forward op."""
    if key[0] == UPDATE_OF:
        return None
    shapes = [event.dims for i in assembly.ops[key].events if (event := assembly.events[i]).dims]
    dims = shapes[0] if len(shapes) == 1 else None
    own = assembly.recording.labels[key[1]].dims if key[0] == FORWARD_OF else {}
    return {**(dims or {}), **own} if own else dims


def _traced(assembly: Assembly, number: dict[Key, int], rows: Sequence[TensorRow]) -> Traced | None:
    """Returns the accesses of all forward ops; None when there are none, as at module granularity."""
    accesses = {
        number[FORWARD_OF, index]: access
        for index, label in enumerate(assembly.recording.labels)
        if not label.whole and (access := label.access or _composed(assembly, index)) is not None
    }
    if not accesses:
        return None
    forward_of = {op: number[FORWARD_OF, owner] for (kind, owner), op in number.items() if kind == BACKWARD_OF}
    return Traced(accesses, tuple((row.storage, row.producer, row.bytes, tuple(row.consumers)) for row in rows), forward_of)


def _composed(assembly: Assembly, index: int) -> Access | None:
    """Returns the access of a label that no rule knows, from those of the ATen ops that it ran."""
    parts = assembly.recording.labels[index].parts
    known = [part for part in parts or () if part is not None]
    if not known or len(known) < len(parts or ()):
        return None
    created = frozenset(s for i in assembly.ops[FORWARD_OF, index].events for s in assembly.events[i].creates)
    return composed(known, created)


def _execution_order(assembly: Assembly, tensors: Tensors) -> list[Key]:
    """Returns forward, backward, update; backward ops by the time of their first work, as far as dependencies allow."""
    keys = [key for key in assembly.ops if key[0] != UPDATE_OF]
    priority = {
        key: (0, key[1]) if key[0] == FORWARD_OF else (1, assembly.ops[key].events[0]) for key in keys
    }  # fmt: skip
    keys.sort(key=lambda key: (priority[key], key))
    number = {key: index for index, key in enumerate(keys)}
    edges = np.array([(number[a], number[b]) for a, b in set(tensors.edges())], dtype=np.int64).reshape(-1, 2)
    order, stuck = topological_order(edges[:, 0], edges[:, 1], len(keys), key=np.arange(len(keys)))
    if stuck is not None:
        raise CyclicStepError(f"op {assembly.recording.labels[keys[stuck][1]].name} waits on a cycle")
    return [keys[index] for index in order] + sorted(key for key in assembly.ops if key[0] == UPDATE_OF)


def _colocation(assembly: Assembly, order: list[Key], number: dict[Key, int]) -> NDArray[np.int32]:
    """Sets of ops that must share a device; each set is named by its smallest op number."""
    pairs = [(number[key], number[FORWARD_OF, key[1]]) for key in order if key[0] == BACKWARD_OF]
    views = {key for key in order if key[0] == FORWARD_OF and assembly.is_view(key)}
    for storage, touches in assembly.touches.items():
        producer = assembly.producer(storage)
        forward = [(key, writes) for key, writes in touches if key[0] == FORWARD_OF]
        writers = [key for key, writes in forward if writes]
        if producer is not None and producer[0] == FORWARD_OF:
            group = [producer, *writers, *(key for key, _ in forward if key in views)]
        elif writers:
            # An in-place chain on an input or buffer has no producer to follow; all ops that read it stay together.
            group = [key for key, _ in forward]
        else:
            continue
        pairs += [(number[group[0]], number[key]) for key in group[1:]]
    joined = np.array(pairs, dtype=np.int32).reshape(-1, 2)
    return components(len(order), joined[:, 0], joined[:, 1])


def composed(parts: Sequence[Access], inner: frozenset[int]) -> Access | None:
    """Returns the access of an op from those of the ATen ops that it runs.

    Args:
        parts: Their accesses, in execution order.
        inner: Storages that the op makes.

    Returns:
        None when nothing can be cut.
    """
    layouts = AxisSystem(dict(enumerate(parts)))
    classes = _classes(layouts)
    dims = {name: layouts.dims[part][piece] for (part, piece), name in classes.items()}
    outer: dict[int, Use] = {}
    elements = {use.storage: use.elements for part in parts for use in part.uses}
    for storage, access in layouts.access.items():
        runs = []
        stride = prod(layouts.axes[storage])
        agreed = _agreed(classes, access)
        for size, name in zip(layouts.axes[storage], agreed, strict=True):
            stride //= size
            if name:
                runs.append((name, size, stride))
        outer[storage] = Use(storage, elements[storage], tuple(runs))
    statistics: list[tuple[Names, int]] = []
    for number, part in enumerate(parts):
        statistics += [
            (tuple(classes[number, name] for name in names), size) for names, size in layouts.statistics(number, part)
        ]
        before = {use.storage for earlier in parts[:number] for use in earlier.uses}
        created = [use.storage for use in part.uses if use.storage in inner and use.storage not in before]
        for storage in created:
            names = _agreed(classes, layouts.access[storage])
            own = {classes[number, piece] for piece in layouts.dims.get(number, {})}
            later = any(use.storage == storage for after in parts[number + 1 :] for use in after.uses)
            if later and not own <= set(names):
                statistics.append((tuple(name for name in names if name), 4 * elements[storage]))
    return Access(dims, tuple(outer.values()), tuple(statistics)) if dims else None


def _agreed(classes: dict[tuple[int, str], str], access: dict[int, Names]) -> list[str]:
    """Returns per axis the class that all ATen ops see there, "" where they do not agree."""
    seen = [[classes[part, name] if name else "" for name in names] for part, names in access.items()]
    return [row[0] if len(set(row)) == 1 else "" for row in zip(*seen, strict=True)]


def _classes(layouts: AxisSystem) -> dict[tuple[int, str], str]:
    """Returns a common name for the dimensions of different ATen ops that run along the same axes."""
    sets = UnionFind()
    for access in layouts.access.values():
        for axis in range(len(next(iter(access.values())))):
            keys = [(part, names[axis]) for part, names in access.items() if names[axis]]
            for key in keys[1:]:
                if sets.find(keys[0])[0] != sets.find(key)[0]:  # two dimensions of one ATen op stay two
                    sets.union(*sorted((sets.find(keys[0]), sets.find(key))))
    keys = [(part, piece) for part, pieces in layouts.dims.items() for piece in pieces]
    roots = sorted({sets.find(key) for key in keys})
    name_of = {root: f"d{index}" for index, root in enumerate(roots)}
    return {key: name_of[sets.find(key)] for key in keys}
