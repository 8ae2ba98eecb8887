"""The `Problem` record: all that planners and the simulator read of a placement task.

Axes used below: D devices, G groups, N ops, T tensors, E tensor-to-consumer pairs.

A problem needs no model and no GPU. It is immutable; its arrays are made read-only. Files are read and written by
`rlplace.problem.io`, which also reads networkx graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from rlplace.cluster.links import Device, Links
from rlplace.files import fingerprint, write_json
from rlplace.records import Record

if TYPE_CHECKING:
    import networkx as nx

Phase = Literal["forward", "backward", "backward_weight", "update"]
PHASES: tuple[str, ...] = get_args(Phase)
FORWARD, BACKWARD, BACKWARD_WEIGHT, UPDATE = range(4)

RESIDENT_PARTS = ("weight_bytes", "gradient_bytes", "optimizer_bytes")

_GROUP, _OP, _TENSOR = "group_names", "op_names", "tensor_bytes"
_ARRAYS: Mapping[str, tuple[Any, str, int]] = {
    "resident_bytes": (np.int64, _GROUP, 0), **dict.fromkeys(RESIDENT_PARTS, (np.int64, _GROUP, -1)),
    "group_device": (np.int32, _GROUP, -1), "op_group": (np.int32, _OP, -1), "op_phase": (np.int8, _OP, FORWARD),
    "time_s": (np.float64, _OP, 0), "temporary_bytes": (np.int64, _OP, 0), "tensor_producer": (np.int32, _TENSOR, -1),
    "tensor_owner": (np.int32, _TENSOR, -1), "tensor_bytes": (np.int64, _TENSOR, 0), "consumer_ptr": (np.int64, _TENSOR, 0),
    "consumers": (np.int32, _TENSOR, 0),
}  # fmt: skip
"""Type of each array, the field that is as long, and the value of all entries where it is left out."""

_LEFT_OUT: Any = None

WideInt = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]


class Collective(Record, frozen=True):
    """Ops on several devices that communicate as one, for example the all-reduce of a gradient bucket.

    It starts when the inputs of all its ops are present and its channels are free, holds the channels for the longest of its
    ops' times, and occupies no device; all its ops end with it.

    Attributes:
        ops: One op for each participant, of one phase; their `op_kind` is ``"collective"``.
        channels: The link resources that it holds.
    """

    ops: tuple[WideInt, ...]
    channels: tuple[WideInt, ...]


@dataclass(frozen=True, eq=False)
class Problem:
    """Ops, tensors and groups of one training step, priced for a set of devices.

    Attributes:
        name: For display; not part of the fingerprint.
        samples_per_microbatch: Samples that one pass over the ops processes.
        devices: D devices.
        links: Communication between them.
        group_names: G unique names.
        resident_bytes: int64 [G], weights, gradients and optimizer state that the group pins for the whole step.
        weight_bytes, gradient_bytes, optimizer_bytes: int64 [G], the parts of `resident_bytes`; -1 where not given.
        group_device: int32 [G], the only device that the group may be placed on, -1 where it is free.
        op_names: N unique names.
        op_group: int32 [N], group of each op.
        op_phase: int8 [N], index into `PHASES`.
        time_s: float64 [N, D], NaN where the op cannot run on the device.
        temporary_bytes: int64 [N], bytes in use only while the op runs.
        tensor_producer: int32 [T], producing op, or -1 for an owner's tensor.
        tensor_owner: int32 [T], owning group of a parameter that other groups read, or -1.
        tensor_bytes: int64 [T]; 0 is a pure ordering edge.
        consumer_ptr: int64 [T + 1], tensor t is consumed by ``consumers[consumer_ptr[t]:consumer_ptr[t + 1]]``.
        consumers: int32 [E], distinct within a tensor.
        op_kind: N op classes ("" where unknown), or None.
        op_dims: Sizes of named dimensions by op number.
        tensor_transfer_s: Optional float64 [D, D] by tensor number that replaces latency + bytes / bandwidth.
        collectives: Ops that communicate as one; each op is in at most one of them.
        source: Where the problem came from (MODEL, CLUSTER, options, fingerprints), or None; not part of the fingerprint.
        group_ops: Names of the captured forward ops of each group, when priced from a graph in this process; not saved.
        group_modules: Module paths of each group, when priced from a graph in this process; not saved.

    Raises:
        InputError: On construction, when any field is out of range or the ops form a cycle.
    """

    name: str
    devices: tuple[Device, ...]
    links: Links
    group_names: tuple[str, ...]
    op_names: tuple[str, ...]
    op_group: NDArray[np.int32]
    time_s: NDArray[np.float64]
    tensor_producer: NDArray[np.int32]
    tensor_bytes: NDArray[np.int64]
    consumer_ptr: NDArray[np.int64]
    consumers: NDArray[np.int32]
    samples_per_microbatch: int = 1
    resident_bytes: NDArray[np.int64] = _LEFT_OUT
    weight_bytes: NDArray[np.int64] = _LEFT_OUT
    gradient_bytes: NDArray[np.int64] = _LEFT_OUT
    optimizer_bytes: NDArray[np.int64] = _LEFT_OUT
    group_device: NDArray[np.int32] = _LEFT_OUT
    op_phase: NDArray[np.int8] = _LEFT_OUT
    temporary_bytes: NDArray[np.int64] = _LEFT_OUT
    tensor_owner: NDArray[np.int32] = _LEFT_OUT
    op_kind: tuple[str, ...] | None = None
    op_dims: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    tensor_transfer_s: Mapping[int, NDArray[np.float64]] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()
    source: Mapping[str, Any] | None = None
    group_ops: tuple[tuple[str, ...], ...] | None = None
    group_modules: tuple[tuple[str, ...], ...] | None = None

    def __post_init__(self) -> None:
        from rlplace.problem.check import check_problem, freeze

        for name, (kind, axis, default) in _ARRAYS.items():
            values = getattr(self, name)
            values = np.full(len(getattr(self, axis)), default) if values is None else np.asarray(values)
            object.__setattr__(self, name, values.astype(kind, casting="same_kind" if values.size else "unsafe", copy=False))
        freeze(self)
        object.__setattr__(self, "topological_order", check_problem(self))

    topological_order: NDArray[np.int32] = field(init=False, repr=False)
    """int32 [N], an order of the ops in which producers come before consumers."""

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def num_groups(self) -> int:
        return len(self.group_names)

    @property
    def num_ops(self) -> int:
        return len(self.op_names)

    @property
    def num_tensors(self) -> int:
        return len(self.tensor_bytes)

    @cached_property
    def memory_limit_bytes(self) -> NDArray[np.float64]:
        """float64 [D], capacity minus reserved bytes; inf where there is no limit."""
        reserved = np.array([device.reserved_bytes for device in self.devices], dtype=np.float64)
        return self.capacity_bytes - reserved

    @cached_property
    def capacity_bytes(self) -> NDArray[np.float64]:
        """float64 [D], capacity with reserved bytes; inf where there is no limit."""
        return np.array([np.inf if d.memory_bytes is None else d.memory_bytes for d in self.devices], dtype=np.float64)

    @cached_property
    def op_allowed(self) -> NDArray[np.bool_]:
        """Boolean [N, D], where each op has a time."""
        return ~np.isnan(self.time_s)

    @cached_property
    def group_allowed(self) -> NDArray[np.bool_]:
        """Boolean [G, D], devices on which every op of the group can run and that a fixed device admits."""
        allowed = np.ones((self.num_groups, self.num_devices), dtype=bool)
        np.logical_and.at(allowed, self.op_group, self.op_allowed)
        fixed = np.flatnonzero(self.group_device >= 0)
        allowed[fixed] &= np.arange(self.num_devices)[None, :] == self.group_device[fixed, None]
        return allowed

    @cached_property
    def group_time_s(self) -> NDArray[np.float64]:
        """float64 [G, D], summed op times of each group; inf on devices that are not allowed."""
        total = np.zeros((self.num_groups, self.num_devices))
        np.add.at(total, self.op_group, np.nan_to_num(self.time_s, nan=0.0))
        total[~self.group_allowed] = np.inf
        return total

    @cached_property
    def tensor_group(self) -> NDArray[np.int32]:
        """int32 [T], the group that makes or owns each tensor."""
        return np.where(self.tensor_producer >= 0, self.op_group[np.maximum(self.tensor_producer, 0)], self.tensor_owner)

    @cached_property
    def edge_tensor(self) -> NDArray[np.int32]:
        """int32 [E], the tensor of each entry of `consumers`."""
        return np.repeat(np.arange(self.num_tensors, dtype=np.int32), np.diff(self.consumer_ptr))

    @cached_property
    def op_edges(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """int32 [.] and int32 [.], producer and consumer of each entry of `consumers` whose tensor an op makes."""
        producer = self.tensor_producer[self.edge_tensor]
        return producer[producer >= 0], self.consumers[producer >= 0]

    @cached_property
    def edge_source_group(self) -> NDArray[np.int32]:
        """int32 [E], the group that each entry of `consumers` reads from: its producer's, or the owner."""
        return self.tensor_group[self.edge_tensor]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON without `name` and `source`."""
        from rlplace.problem.io import problem_to_dict

        return fingerprint(problem_to_dict(self))

    def save(self, path: str | Path) -> None:
        """Writes the problem as ``*.problem.json``, atomically."""
        from rlplace.problem.io import problem_to_dict

        write_json(path, problem_to_dict(self))

    @staticmethod
    def load(path: str | Path) -> Problem:
        """Reads and checks a problem file; see `rlplace.problem.io`."""
        from rlplace.problem.io import load_problem

        return load_problem(path)

    @staticmethod
    def from_networkx(graph: nx.DiGraph, cluster: Any, *, name: str = "networkx") -> Problem:
        """Builds a problem from any directed acyclic networkx graph; see `rlplace.problem.io`."""
        from rlplace.problem.io import problem_from_networkx

        return problem_from_networkx(graph, cluster, name=name)
