"""Problem files: ``rlplace.problem`` version 1 (docs/formats.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import asdict
from numpy.typing import NDArray

from rlplace.cluster.fabric import fabrics_from_list
from rlplace.cluster.links import Device, LinksTable, matrix
from rlplace.errors import InputError, show
from rlplace.files import check_header, read_record, without_collections
from rlplace.problem.build import tensor_fields
from rlplace.problem.check import check_counts
from rlplace.problem.problem import PHASES, RESIDENT_PARTS, Collective, Phase, Problem, WideInt
from rlplace.records import Bytes, Count, Record, build, plain


class Costs(msgspec.Struct, frozen=True):
    """The cost table of a problem: where it was read, and its fingerprint."""

    path: str | None = None
    fingerprint: str | None = None


class Source(msgspec.Struct, frozen=True):
    """The entries of a source that are read, out of possibly more: how the problem was made."""

    graph: dict[str, Any] | None = None
    costs: Costs | None = None
    capture: dict[str, Any] | None = None
    op_times: dict[str, dict[str, float]] | None = None
    cluster: str | None = None
    cluster_fingerprint: str | None = None
    graph_fingerprint: str | None = None
    groups: Count | None = None
    split_backward: bool | None = None
    level: str | None = None
    host: str | None = None

    @property
    def table(self) -> Costs:
        """The cost table's entry."""
        return self.costs or Costs()


def check_source(source: Any, where: str) -> None:
    """Checks the `source` of a parsed file.

    Raises:
        InputError: It is no object, or one of these entries has another type than rlplace writes.
    """
    build(Source, source, f"{where}: source")


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
    numbers = [getattr(problem, name) for name in ("resident_bytes", *RESIDENT_PARTS, "group_device")]
    columns = [[None if n < 0 else n for n in row.tolist()] for row in numbers]
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": problem.name,
        "samples_per_microbatch": int(problem.samples_per_microbatch),
        "devices": plain([_DeviceEntry(**vars(device)) for device in problem.devices]),
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
    ops, groups, tensors = entry.ops, entry.groups, entry.tensors
    dims = {index: op.dims for index, op in enumerate(ops) if op.dims is not None}
    kinds = tuple(op.kind for op in ops)
    number = {phase: index for index, phase in enumerate(PHASES)}
    return Problem(
        name=entry.name,
        samples_per_microbatch=entry.samples_per_microbatch,
        devices=tuple(Device(**asdict(device)) for device in entry.devices),
        links=entry.links.links(fabrics_from_list(entry.links.fabrics, count)),
        group_names=tuple(group.name for group in groups),
        resident_bytes=_numbers([group.resident_bytes for group in groups]),
        weight_bytes=_numbers([group.weight_bytes for group in groups]),
        gradient_bytes=_numbers([group.gradient_bytes for group in groups]),
        optimizer_bytes=_numbers([group.optimizer_bytes for group in groups]),
        group_device=_numbers([group.device for group in groups]).astype(np.int32),
        op_names=tuple(op.name for op in ops),
        op_group=_numbers([op.group for op in ops]).astype(np.int32),
        op_phase=np.array([number[op.phase] for op in ops], dtype=np.int8),
        time_s=_times([op.time_s for op in ops], count),
        temporary_bytes=_numbers([op.temporary_bytes for op in ops]),
        **tensor_fields(
            [
                (-1 if t.producer is None else t.producer, -1 if t.owner is None else t.owner, t.size_bytes, t.consumers)
                for t in tensors
            ]
        ),
        op_kind=kinds if any(kinds) else None,
        op_dims=dims,
        tensor_transfer_s={
            index: matrix(tensor.transfer_s, f"problem: tensors[{index}].transfer_s")
            for index, tensor in enumerate(tensors)
            if tensor.transfer_s is not None
        },
        collectives=entry.collectives,
        source=entry.source,
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
