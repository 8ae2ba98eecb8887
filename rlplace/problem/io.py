"""Problem files, ``rlplace.problem`` version 1 (docs/formats.md), and problems from networkx graphs.

Any directed acyclic graph can be placed. Node attributes: `group` (name, default: the node's own), `phase`, `time_s` (number or
one per device, None where it cannot run), `temporary_bytes`, `resident_bytes` and `device` (taken from the first node of a
group that has them), `kind`. Edge attributes: `bytes` and `tensor`: edges out of one node with equal `tensor` are the same
tensor (sent once per device); without the attribute every edge is a tensor of its own, parallel edges of a multigraph too.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import asdict
from numpy.typing import NDArray

from rlplace.cluster.fabric import fabrics_from_list
from rlplace.cluster.links import Device, LinksTable, matrix
from rlplace.errors import InputError, show
from rlplace.files import check_header, read_record, without_collections
from rlplace.problem.build import TensorRow, tensor_fields
from rlplace.problem.check import check_counts, check_source
from rlplace.problem.problem import PHASES, RESIDENT_PARTS, Collective, Phase, Problem, WideInt
from rlplace.records import Bytes, Record, build, plain

if TYPE_CHECKING:
    import networkx as nx

    from rlplace.cluster.parse import Cluster


FORMAT = "rlplace.problem"
VERSION = 1


@without_collections()
def load_problem(path: str | Path) -> Problem:
    """Reads a problem file.

    Raises:
        InputError: The file is missing, malformed, newer than this code, or describes an impossible problem.
    """
    return read_record(path, FORMAT, VERSION, _parse)


def problem_from_dict(data: dict[str, Any]) -> Problem:
    """Builds a problem from parsed JSON, with the same checks as `load_problem`."""
    return _parse(check_header(data, FORMAT, VERSION, where="problem"))


@without_collections()
def problem_to_dict(problem: Problem) -> dict[str, Any]:
    """Returns the problem as plain JSON data; defaults are left out, so equal problems give equal text."""
    links = problem.links
    matrices = links.bandwidth_bytes_per_s.tolist(), links.latency_s.tolist()
    numbers = [getattr(problem, name) for name in (*_RESIDENT, "group_device")]
    columns = [[None if n < 0 else n for n in row.tolist()] for row in numbers]
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": problem.name,
        "samples_per_microbatch": int(problem.samples_per_microbatch),
        "devices": plain([_DeviceEntry(d.name, d.memory_bytes, d.reserved_bytes, d.kind) for d in problem.devices]),
        "links": plain(_LinksEntry(*matrices, links.channels, links.fabrics)),
        "groups": plain([_GroupEntry(*row) for row in zip(problem.group_names, *columns, strict=True)]),
        "ops": msgspec.to_builtins(_op_entries(problem)),
        "tensors": msgspec.to_builtins(_tensor_entries(problem)),
        **({"collectives": plain(problem.collectives)} if problem.collectives else {}),
        **({} if problem.source is None else {"source": dict(problem.source)}),
    }


def _op_entries(problem: Problem) -> list[_OpEntry]:
    same = (problem.time_s == problem.time_s[:, :1]).all(axis=1).tolist()
    times = [
        row[0] if one else [None if t != t else t for t in row] for row, one in zip(problem.time_s.tolist(), same, strict=True)
    ]
    phases = [PHASES[phase] for phase in problem.op_phase.tolist()]
    kinds = problem.op_kind or ("",) * problem.num_ops
    dims = [dict(problem.op_dims[op]) if op in problem.op_dims else None for op in range(problem.num_ops)]
    columns = (problem.op_names, problem.op_group.tolist(), phases, times, problem.temporary_bytes.tolist(), kinds, dims)
    return [_OpEntry(*row) for row in zip(*columns, strict=True)]


def _tensor_entries(problem: Problem) -> list[_TensorEntry]:
    ptr, consumers, sizes = problem.consumer_ptr.tolist(), problem.consumers.tolist(), problem.tensor_bytes.tolist()
    own = {number: table.tolist() for number, table in problem.tensor_transfer_s.items()}
    ends = enumerate(zip(problem.tensor_producer.tolist(), problem.tensor_owner.tolist(), strict=True))
    return [
        _TensorEntry(
            producer=None if producer < 0 else producer,
            owner=None if owner < 0 else owner,
            size_bytes=sizes[i],
            consumers=consumers[ptr[i] : ptr[i + 1]],
            transfer_s=own.get(i),
        )
        for i, (producer, owner) in ends
    ]


Index = Annotated[int, Meta(ge=0, lt=1 << 31)]


class _DeviceEntry(Record, frozen=True):
    """A device of a problem file.

    Attributes:
        name: Unique.
        memory_bytes: Capacity; null: no limit.
        reserved_bytes: Always in use.
        kind: Name of its kind, for display.
    """

    name: str
    memory_bytes: WideInt | None
    reserved_bytes: WideInt = 0
    kind: str | None = None


class _LinksEntry(LinksTable, frozen=True):
    """Links of a problem file; fabrics are read by `rlplace.cluster.fabric`.

    Attributes:
        fabrics: As ``[[fabric]]`` of a cluster file.
    """

    fabrics: Any = ()


class _GroupEntry(Record, frozen=True, gc=False):
    """A group of a problem file.

    Attributes:
        name: Unique.
        resident_bytes: Held on its device all step long: weights, gradients, optimizer state.
        weight_bytes: The weights' part of it; null where unknown.
        gradient_bytes: The gradients' part.
        optimizer_bytes: The optimizer state's part.
        device: The only device that it may be placed on.
    """

    written: ClassVar[tuple[str, ...]] = ("resident_bytes",)

    name: str
    resident_bytes: Bytes = 0
    weight_bytes: Bytes | None = None
    gradient_bytes: Bytes | None = None
    optimizer_bytes: Bytes | None = None
    device: Index | None = None


class _OpEntry(Record, frozen=True, gc=False, omit_defaults=True):
    """An op of a problem file.

    Attributes:
        name: Unique.
        group: Number of its group.
        phase: Part of the step.
        time_s: One number, or one per device; null where it cannot run.
        temporary_bytes: Held while it runs.
        kind: Op class, for display; ``"collective"`` for ops of `collectives`.
        dims: Sizes by name.
    """

    name: str
    group: Index
    phase: Phase
    time_s: float | list[float | None] | None
    temporary_bytes: Bytes = 0
    kind: str = ""
    dims: dict[str, WideInt] | None = None


class _TensorEntry(Record, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """A tensor of a problem file; it has a producer or an owner.

    Attributes:
        producer: Op that makes it.
        owner: Group whose parameter it is, read by other groups.
        size_bytes: Size; 0 is an ordering edge.
        consumers: Ops that read it.
        transfer_s: Devices by devices, in place of latency + bytes / bandwidth.
    """

    producer: Index | None = None
    owner: Index | None = None
    size_bytes: Bytes = msgspec.field(name="bytes")
    consumers: list[Index]
    transfer_s: list[list[float]] | None = None


class _ProblemEntry(Record, frozen=True):
    """The content of a problem file.

    Attributes:
        devices: Up to 4,096.
        links: Communication between them.
        groups: Parts of the model that share a device.
        ops: Of one pass of one batch: forward, backward and updates.
        tensors: What ops hand to each other.
        name: For display; not part of the fingerprint.
        samples_per_microbatch: Samples of the pass.
        source: What it was built from; not part of the fingerprint.
        collectives: Ops that communicate as one.
    """

    devices: list[_DeviceEntry]
    links: _LinksEntry
    groups: list[_GroupEntry]
    ops: list[_OpEntry]
    tensors: list[_TensorEntry]
    name: str = "problem"
    samples_per_microbatch: WideInt = 1
    source: Any = None
    collectives: tuple[Collective, ...] = ()


def _parse(data: dict[str, Any]) -> Problem:
    for key in ("devices", "ops", "tensors"):  # before anything is made of them
        if not isinstance(data.get(key, []), list):
            raise InputError(f"problem: {key}: expected a list, found {show(data[key])}")
    check_counts(len(data.get("ops", [])), len(data.get("devices", [])), len(data.get("tensors", [])), 0)
    entry = build(_ProblemEntry, data, "problem", whole_floats=True)
    if entry.source is not None:
        check_source(entry.source, "problem")
    count = len(entry.devices)
    if not count:
        raise InputError("problem: devices: a problem needs at least one device")
    return _problem(
        entry.groups,
        entry.ops,
        [
            (-1 if t.producer is None else t.producer, -1 if t.owner is None else t.owner, t.size_bytes, t.consumers)
            for t in entry.tensors
        ],
        name=entry.name,
        samples_per_microbatch=entry.samples_per_microbatch,
        devices=tuple(Device(**asdict(device)) for device in entry.devices),
        links=entry.links.links(fabrics_from_list(entry.links.fabrics, count)),
        op_dims={index: op.dims for index, op in enumerate(entry.ops) if op.dims is not None},
        tensor_transfer_s={
            index: matrix(tensor.transfer_s, f"problem: tensors[{index}].transfer_s")
            for index, tensor in enumerate(entry.tensors)
            if tensor.transfer_s is not None
        },
        collectives=entry.collectives,
        source=entry.source,
    )


def problem_from_networkx(graph: nx.DiGraph, cluster: Cluster, *, name: str = "networkx") -> Problem:
    """Builds a problem from a directed acyclic graph with the attributes named in the module docstring."""
    if not hasattr(cluster, "to_problem_devices"):
        raise InputError(f"from_networkx: expected a Cluster, as Cluster.preset('a100-80g:4') gives, found {show(cluster)}")
    if not (hasattr(graph, "is_directed") and graph.is_directed()):
        raise InputError("from_networkx: expected a directed networkx graph; edges point from producer to consumer")
    devices, links = cluster.to_problem_devices()
    number = {node: index for index, node in enumerate(graph.nodes)}
    groups: dict[str, dict[str, Any]] = {}
    ops: list[_OpEntry] = []
    for node, data in graph.nodes(data=True):
        where = f"node {show(node)}"
        given: dict[str, Any] = {key: plain(value) for key, value in data.items() if value is not None}
        group = str(given.get("group", node))
        held: dict[str, Any] = {key: given[key] for key in ("resident_bytes", "device") if key in given}
        build(_GroupEntry, held | {"name": group}, where)
        groups[group] = held | groups.get(group, {"number": len(groups)})
        entry: dict[str, Any] = {"phase": "forward", "time_s": None}
        entry |= {key: given[key] for key in ("phase", "time_s", "temporary_bytes") if key in given}
        entry |= {"name": str(node), "group": groups[group]["number"], "kind": str(given.get("kind", ""))}
        op = build(_OpEntry, entry, where)
        if any(value != value for value in (op.time_s if isinstance(op.time_s, list) else [op.time_s])):
            raise InputError(f"{where}: time_s: NaN is not a number in range; use None where the op cannot run")
        ops.append(op)
    tensors: dict[tuple[int, Any], set[int]] = {}
    sizes: dict[tuple[int, Any], int] = {}
    for edge, (source, target, data) in enumerate(graph.edges(data=True)):
        where, tensor = f"edge {show(source)} to {show(target)}", data.get("tensor")
        if not isinstance(tensor, Hashable):
            raise InputError(f"{where}: tensor must be a number or a name, found {show(tensor)}")
        key = (number[source], ("edge", edge) if tensor is None else tensor)
        tensors.setdefault(key, set()).add(number[target])
        sizes[key] = max(sizes.get(key, 0), build(Bytes, plain(data.get("bytes", 0)), f"{where}: bytes"))
    rows = [(key[0], -1, sizes[key], sorted(readers)) for key, readers in tensors.items()]
    entries = [_GroupEntry(group, held.get("resident_bytes", 0), device=held.get("device")) for group, held in groups.items()]
    return _problem(entries, ops, rows, name=name, devices=devices, links=links, source={"networkx": name})


_RESIDENT = ("resident_bytes", *RESIDENT_PARTS)


def _problem(groups: Sequence[_GroupEntry], ops: Sequence[_OpEntry], tensors: Sequence[TensorRow], **fields: Any) -> Problem:
    """Returns the problem of checked entries, with further fields."""
    kinds, number = tuple(op.kind for op in ops), {phase: index for index, phase in enumerate(PHASES)}
    held: dict[str, Any] = {name: _numbers([getattr(group, name) for group in groups]) for name in _RESIDENT}
    return Problem(
        group_names=tuple(group.name for group in groups),
        **held,
        group_device=_numbers([group.device for group in groups]).astype(np.int32),
        op_names=tuple(op.name for op in ops),
        op_group=_numbers([op.group for op in ops]).astype(np.int32),
        op_phase=np.array([number[op.phase] for op in ops], dtype=np.int8),
        time_s=_times([op.time_s for op in ops], len(fields["devices"])),
        temporary_bytes=_numbers([op.temporary_bytes for op in ops]),
        **tensor_fields(tensors),
        op_kind=kinds if any(kinds) else None,
        **fields,
    )


def _numbers(values: list[int | None] | list[int]) -> NDArray[np.int64]:
    """Returns an array with -1 for entries that are null or left out."""
    return np.array([-1 if value is None else value for value in values], dtype=np.int64)


def _times(rows: list[float | list[float | None] | None], num_devices: int) -> NDArray[np.float64]:
    for index, row in enumerate(rows):
        if isinstance(row, list) and len(row) != num_devices:
            raise InputError(f"problem: ops[{index}].time_s: expected {num_devices} values, found {len(row)}")
    full = [row if isinstance(row, list) else [row] * num_devices for row in rows]
    return np.array(full, dtype=np.float64).reshape(len(rows), num_devices)  # None becomes NaN
