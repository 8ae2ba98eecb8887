"""From the iteration spaces of single ops to axes of tensors that all ops agree on.

Each storage is a number line of its elements; a view's dimension of size z and stride t covers the strides from t to z t. Where
one op sees 768 columns and the next 12 heads of 64, the storage is cut at stride 64, the op that made it gets dimensions
``n.0`` (12) and ``n.1`` (64), and so does everything that these run along. A dimension that cannot be aligned (a slice that
does not divide its storage) cannot be cut.

Gradients have no rules of their own: the op that makes the gradient of a tensor sees the axes of that tensor as its forward op
does. Of the tensors that this op has touched it is that of equal size, which the readers' forward ops have touched, too.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

Names = tuple[str, ...]
"""Per dimension of a tensor the op's dimension that runs along it, "" for none."""


@dataclass(frozen=True)
class Use:
    """One read or write of a tensor by an op.

    Attributes:
        storage: Number of the storage.
        elements: Elements that the storage holds.
        runs: ``(dimension of the op, size, stride in elements)`` for every dimension of the tensor that has a name.
    """

    storage: int
    elements: int
    runs: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Access:
    """Iteration space of an op.

    Attributes:
        dims: Sizes of its dimensions by name.
        uses: One entry for each tensor that it reads or writes.
        statistics: ``(names, bytes)``: sums of that size, indexed by these dimensions, that run over the others and that
            every device needs before it can go on (means of a norm, the denominators of a softmax).
    """

    dims: Mapping[str, int]
    uses: tuple[Use, ...]
    statistics: tuple[tuple[Names, int], ...] = ()


class StrideCuts:
    """Strides at which a number line of `size` elements is cut; each divides the next."""

    def __init__(self, size: int) -> None:
        self.at = [1, size] if size > 1 else [1]

    def add(self, stride: int) -> bool:
        """Adds a cut; False where it does not fit the present cuts."""
        index = bisect_left(self.at, stride)
        if index < len(self.at) and self.at[index] == stride:
            return True
        if index in (0, len(self.at)) or stride % self.at[index - 1] or self.at[index] % stride:
            return False
        insort(self.at, stride)
        return True

    def ranges(self) -> list[tuple[int, int]]:
        """Returns (low, high) strides of the pieces, outermost first."""
        return list(pairwise(self.at))[::-1]


class _DimensionRun:
    """A dimension of an op along strides of a storage."""

    def __init__(self, dim: StrideCuts, line: StrideCuts, size: int, stride: int) -> None:
        self.dim, self.line, self.size, self.stride = dim, line, size, stride
        self.alive = line.add(stride) and line.add(stride * size)
        self._agreed = 0, 0  # cuts on both sides when they agreed; cuts are only added

    def agree(self) -> None:
        """Cuts either side where the other is cut."""
        if self._agreed == (len(self.line.at), len(self.dim.at)):
            return
        for cut in [c for c in self.line.at if self.stride < c < self.stride * self.size]:
            self.alive = self.alive and self.dim.add(cut // self.stride)
        for cut in list(self.dim.at):
            self.alive = self.alive and self.line.add(cut * self.stride)
        self._agreed = len(self.line.at), len(self.dim.at)


class AxisSystem:
    """Ops and storages in one system of axes.

    Attributes:
        dims: Sizes by op and name, after cutting.
        axes: Sizes of the axes of a storage.
        access: Storage to op to names.
    """

    def __init__(self, accesses: Mapping[int, Access]) -> None:
        """Brings the accesses of all forward ops, by op number, in line."""
        lines: dict[int, StrideCuts] = {}
        dims: dict[tuple[int, str], StrideCuts] = {}
        runs: dict[tuple[int, int], list[list[tuple[str, _DimensionRun]]]] = {}
        for op, access in accesses.items():
            for name, size in access.dims.items():
                dims[op, name] = StrideCuts(size)
            for use in access.uses:
                line = lines.setdefault(use.storage, StrideCuts(use.elements))
                use_runs = [(name, _DimensionRun(dims[op, name], line, size, stride)) for name, size, stride in use.runs]
                runs.setdefault((use.storage, op), []).append(use_runs)
        every = [run for uses in runs.values() for use in uses for _, run in use]
        while True:
            before = sum(len(cuts.at) for cuts in (*lines.values(), *dims.values())), sum(run.alive for run in every)
            for run in every:
                if run.alive:
                    run.agree()
            if before == (sum(len(cuts.at) for cuts in (*lines.values(), *dims.values())), sum(run.alive for run in every)):
                break
        lost = {(op, name) for (_, op), uses in runs.items() for use in uses for name, run in use if not run.alive}
        dims = {key: cuts for key, cuts in dims.items() if key not in lost}  # cutting it would not cut the tensor
        self._dims = dims
        self.dims: dict[int, dict[str, int]] = {}
        for (op, name), cuts in dims.items():
            pieces = cuts.ranges()
            for index, (low, high) in enumerate(pieces):
                self.dims.setdefault(op, {})[_piece(name, index, len(pieces))] = high // low
        self.axes = {storage: tuple(high // low for low, high in line.ranges()) for storage, line in lines.items()}
        self.access: dict[int, dict[int, Names]] = {}
        for (storage, op), uses in runs.items():
            seen = [self._names(op, lines[storage], use) for use in uses]
            agreed = tuple(names[0] if len(set(names)) == 1 else "" for names in zip(*seen, strict=True))
            self.access.setdefault(storage, {})[op] = agreed

    def _names(self, op: int, line: StrideCuts, use: Sequence[tuple[str, _DimensionRun]]) -> Names:
        name_of_piece: dict[tuple[int, int], str] = {}
        for name, run in use:
            pieces = run.dim.ranges()
            for index, (low, high) in enumerate(pieces):
                if (op, name) in self._dims:
                    name_of_piece[low * run.stride, high * run.stride] = _piece(name, index, len(pieces))
        return tuple(name_of_piece.get(piece, "") for piece in line.ranges())

    def statistics(self, op: int, access: Access) -> tuple[tuple[Names, int], ...]:
        """Returns the op's statistics by the dimensions that it has now."""
        statistics = []
        for names, size in access.statistics:
            pieces = [
                _piece(name, index, count)
                for name in names
                if (op, name) in self._dims
                for count in [len(self._dims[op, name].at) - 1]
                for index in range(count)
            ]
            statistics.append((tuple(pieces), size))
        return tuple(statistics)


def _piece(name: str, index: int, count: int) -> str:
    return name if count == 1 else f"{name}.{index}"


@dataclass(frozen=True, eq=False)
class Indices:
    """Iteration spaces of ops, and how they access tensors; ops and tensors by number.

    Attributes:
        dims: Sizes of an op's dimensions by name; ops that cannot be cut are left out.
        axes: Sizes of a tensor's axes, outermost first; left out where the layout is not known.
        access: Tensor to op (its producer or a consumer) to names, one an axis.
        statistics: ``(names, bytes)`` by op: sums of that size in all, indexed by these dimensions, that are needed from
            all parts of the other dimensions before the op can go on.
    """

    dims: Mapping[int, Mapping[str, int]]
    axes: Mapping[int, tuple[int, ...]]
    access: Mapping[int, Mapping[int, Names]]
    statistics: Mapping[int, tuple[tuple[Names, int], ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Traced:
    """The data of a capture that layouts of tensor groups read.

    Attributes:
        accesses: Iteration space by forward op.
        rows: Per tensor its storage (-1: none of its own), producer (-1: none), bytes and consumers.
        forward_of: Backward op to forward op.
    """

    accesses: Mapping[int, Access]
    rows: tuple[tuple[int, int, int, tuple[int, ...]], ...]
    forward_of: Mapping[int, int]

    @cached_property
    def indices(self) -> Indices:
        """Dimensions of ops and axes of tensors that agree, of gradients for their makers alone; computed on first use."""
        layouts = AxisSystem(self.accesses)
        forward_of = self.forward_of
        forward_bytes = {row[0]: row[2] for row in self.rows if row[0] >= 0 and row[1] >= 0 and row[1] not in forward_of}
        touched: dict[int, list[int]] = {}
        for storage in sorted(forward_bytes.keys() & layouts.access.keys()):
            for op in layouts.access[storage]:
                touched.setdefault(op, []).append(storage)
        axes: dict[int, tuple[int, ...]] = {}
        access: dict[int, dict[int, Names]] = {}
        for tensor, (storage, producer, size, users) in enumerate(self.rows):
            if size == 0 or storage < 0:
                continue
            ops = [*([producer] if producer >= 0 else []), *users]
            if producer in forward_of:
                readers = {forward_of[user] for user in users if user in forward_of}
                fit = [s for s in touched.get(forward_of[producer], ()) if forward_bytes[s] >= size]
                rank = [(forward_bytes[s] == size, len(readers & layouts.access[s].keys())) for s in fit]
                storage, ops = fit[rank.index(max(rank))] if fit else -1, [producer]
            if seen := layouts.access.get(storage):
                axes[tensor] = layouts.axes[storage]
                access[tensor] = {op: seen[f] for op in ops if (f := forward_of.get(op, op)) in seen}
        statistics = {op: layouts.statistics(op, space) for op, space in self.accesses.items() if space.statistics}
        return Indices(layouts.dims, axes, access, statistics)
