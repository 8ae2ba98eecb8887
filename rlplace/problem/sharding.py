"""What a sharding planner may know beyond a problem: which dimensions of an op run along which axes of which tensor.

An op's dimensions are those that can be cut into equal parts; a tensor is seen as a row-major array of axes; an access says for
every axis of a tensor which dimension of an op runs along it. A dimension that does not run along an output is summed over:
cutting it leaves partial sums, which an all-reduce adds up. Backward ops are cut like the forward op that they follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import asdict
from numpy.typing import NDArray

from rlplace.errors import InputError, show
from rlplace.records import Number, Record

if TYPE_CHECKING:
    from rlplace.problem.problem import Problem

Names = tuple[str, ...]
"""Per axis of a tensor the op's dimension that runs along it, "" where each part of the op needs the whole axis."""


@dataclass(frozen=True, eq=False)
class Indices:
    """Iteration spaces of ops, and how they access tensors; ops and tensors by number.

    Attributes:
        dims: Sizes of an op's dimensions by name; ops that cannot be cut are left out.
        axes: Sizes of a tensor's axes, outermost first; left out where the layout is not known.
        access: Tensor to op (its producer or a consumer) to names, one an axis.
        statistics: ``(names, bytes)`` by op: sums of so many bytes in all, indexed by these dimensions, that are needed from
            all parts of the other dimensions before the op can go on.
    """

    dims: Mapping[int, Mapping[str, int]]
    axes: Mapping[int, tuple[int, ...]]
    access: Mapping[int, Mapping[int, Names]]
    statistics: Mapping[int, tuple[tuple[Names, int], ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Held:
    """A parameter, buffer or input: bytes that a group pins, in parts that follow the ops that read them.

    Attributes:
        name: For people.
        group: Group whose resident bytes it is part of.
        weight_bytes: Bytes of itself.
        gradient_bytes: Bytes of its gradient.
        optimizer_bytes: Bytes of its optimizer state.
        axes: Sizes of its axes.
        access: Forward op that reads it to names, one an axis; a reader without names needs the whole.
        update: Op that updates it, -1 without one.
        is_input: An input of the model: its first axis runs along the samples.
    """

    name: str
    group: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    axes: tuple[int, ...]
    access: Mapping[int, Names]
    update: int = -1
    is_input: bool = False


@dataclass(frozen=True, eq=False)
class Sharding(Indices):
    """`Indices` of a problem, and what its groups hold.

    Attributes:
        follows: Backward op to the forward op whose parts it takes.
        held: Everything that groups pin and ops read.
        fixed_s: float64 [N, D], what of an op's time no cut makes smaller (launches, and what small shapes lose), None for
            nothing. A part of P then takes ``fixed_s + (time_s - fixed_s) / P``.
    """

    follows: Mapping[int, int] = field(default_factory=dict)
    held: tuple[Held, ...] = ()
    fixed_s: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        if self.fixed_s is not None:
            self.fixed_s.setflags(write=False)


def gradient_sums(sharding: Sharding, op: int, makers: Mapping[int, Sequence[int]]) -> frozenset[str]:
    """Dimensions of a forward op that gradients of its inputs may be summed over: those that run along its outputs.

    The gradient of a bias of a product, for example, is no sum over the reduced dimension: devices that hold other parts of it
    compute the same.

    Args:
        sharding: The problem's sharding.
        op: Forward op.
        makers: Op to the tensors that it makes.
    """
    names = (name for tensor in makers.get(op, ()) for name in sharding.access.get(tensor, {}).get(op, ()))
    return frozenset(name for name in names if name)


def check_sharding(sharding: Sharding, problem: Problem) -> None:
    """Refuses numbers out of range, names that are no dimensions, axes that do not fit, and more bytes than a group has.

    Raises:
        InputError: Names the first thing that is wrong.
    """
    ops, devices = problem.num_ops, problem.num_devices
    if sharding.fixed_s is not None and (sharding.fixed_s.shape != (ops, devices) or not (sharding.fixed_s >= 0).all()):
        raise InputError(f"problem: sharding.fixed_s: expected {ops} x {devices} numbers from 0 up")
    for op, dims in sharding.dims.items():
        if not 0 <= op < ops or any(not name or size < 1 for name, size in dims.items()):
            raise InputError(f"problem: ops[{op}].dims: expected an existing op, and sizes from 1 up by name")
    for op, forward in sharding.follows.items():
        if not 0 <= op < ops or not 0 <= forward < ops or op == forward or forward in sharding.follows:
            raise InputError(f"problem: ops[{op}].follows: {forward} is not an op that is cut on its own account")
    for tensor, readers in sharding.access.items():
        if not 0 <= tensor < problem.num_tensors or tensor not in sharding.axes:
            raise InputError(f"problem: tensors[{tensor}].access: the tensor must exist and have axes")
        _check_access(sharding, readers, sharding.axes[tensor], f"tensors[{tensor}]", ops)
    left = problem.resident_bytes.tolist()
    updates: set[int] = set()
    for index, item in enumerate(sharding.held):
        if not 0 <= item.group < problem.num_groups or not -1 <= item.update < ops:
            raise InputError(f"problem: held[{index}] ({item.name}): its group or update op does not exist")
        if item.update in updates:
            raise InputError(f"problem: held[{index}] ({item.name}): op {item.update} updates another item already")
        updates |= {item.update} - {-1}
        left[item.group] -= item.weight_bytes + item.gradient_bytes + item.optimizer_bytes
        if left[item.group] < 0:
            raise InputError(f"problem: held[{index}] ({item.name}): more bytes than its group {item.group} has")
        _check_access(sharding, item.access, item.axes, f"held[{index}] ({item.name})", ops)
    for op, sums in sharding.statistics.items():
        if not 0 <= op < ops or any(name not in sharding.dims.get(op, {}) for names, _ in sums for name in names):
            raise InputError(f"problem: ops[{op}].statistics: names a dimension that the op does not have")


def _check_access(sharding: Sharding, access: Mapping[int, Names], axes: tuple[int, ...], where: str, ops: int) -> None:
    if prod(axes) < 1:
        raise InputError(f"problem: {where}.axes: sizes must be 1 or more")
    for op, names in access.items():
        dims = sharding.dims.get(sharding.follows.get(op, op), {})
        if not 0 <= op < ops or len(names) != len(axes):
            raise InputError(f"problem: {where}.access[{op}]: not an op, or {len(names)} names for {len(axes)} axes")
        for name, size in zip(names, axes, strict=True):
            if name and dims.get(name) != size:
                raise InputError(f"problem: {where}.access[{op}]: {show(name)} is not a dimension of size {size} of that op")


def sharding_to_dict(sharding: Sharding) -> dict[str, Any]:
    """As plain JSON data: the key ``sharding`` of a problem file; an op's dims stand with the op."""
    data: dict[str, Any] = {
        "tensors": [
            {"tensor": tensor, "axes": list(sharding.axes[tensor]), "access": _names_to_dict(access)}
            for tensor, access in sorted(sharding.access.items())
        ],
        "statistics": [
            {"op": op, "sums": [[list(names), size] for names, size in sums]}
            for op, sums in sorted(sharding.statistics.items())
        ],
        "follows": [[op, forward] for op, forward in sorted(sharding.follows.items())],
        "held": [
            {
                "name": item.name, "group": item.group, "axes": list(item.axes), "access": _names_to_dict(item.access),
                "weight_bytes": item.weight_bytes, "gradient_bytes": item.gradient_bytes,
                "optimizer_bytes": item.optimizer_bytes, "update": item.update if item.update >= 0 else None,
                "input": item.is_input,
            }
            for item in sharding.held
        ],
    }  # fmt: skip
    if sharding.fixed_s is not None:
        data["fixed_s"] = [row[0] if len(set(row)) == 1 else row for row in sharding.fixed_s.tolist()]
    return data


def _names_to_dict(access: Mapping[int, Names]) -> dict[str, list[str]]:
    return {str(op): list(names) for op, names in sorted(access.items())}


_Size = Annotated[int, Meta(ge=0, lt=1 << 60)]
_Access = dict[_Size, Names]


class _TensorEntry(Record, frozen=True):
    """Axes of a tensor, and how ops access it."""

    tensor: _Size
    axes: tuple[_Size, ...]
    access: _Access


class _SumsEntry(Record, frozen=True):
    """Statistics of an op."""

    op: _Size
    sums: tuple[tuple[Names, _Size], ...]


class _HeldEntry(Record, frozen=True):
    """A parameter, buffer or input."""

    name: str
    group: _Size
    axes: tuple[_Size, ...]
    access: _Access
    weight_bytes: _Size
    gradient_bytes: _Size
    optimizer_bytes: _Size
    update: _Size | None
    is_input: bool = msgspec.field(name="input")


class ShardingEntry(Record, frozen=True):
    """The key ``sharding`` of a problem file."""

    tensors: tuple[_TensorEntry, ...]
    held: tuple[_HeldEntry, ...]
    follows: tuple[tuple[_Size, _Size], ...]
    statistics: tuple[_SumsEntry, ...] = ()
    fixed_s: list[Number | list[Number]] | None = None


def sharding_of(entry: ShardingEntry, dims: Mapping[int, Mapping[str, int]], devices: int) -> Sharding:
    """What an entry describes; ranges are checked with the problem.

    Args:
        entry: What a problem file holds.
        dims: Dimensions by op, from the problem's ops.
        devices: Number of devices.
    """
    return Sharding(
        dims={op: dict(sizes) for op, sizes in dims.items()},
        axes={row.tensor: row.axes for row in entry.tensors},
        access={row.tensor: row.access for row in entry.tensors},
        statistics={row.op: row.sums for row in entry.statistics},
        follows=dict(entry.follows),
        held=tuple(Held(**asdict(row) | {"update": -1 if row.update is None else row.update}) for row in entry.held),
        fixed_s=None if entry.fixed_s is None else _fixed(entry.fixed_s, devices),
    )


def _fixed(values: list[float | list[float]], devices: int) -> NDArray[np.float64]:
    rows = [row if isinstance(row, list) else [row] * devices for row in values]
    if any(len(row) != devices for row in rows):
        raise InputError(f"sharding.fixed_s: expected a number, or {devices} numbers, for every op")
    return np.array(rows, dtype=np.float64).reshape(len(rows), devices)
