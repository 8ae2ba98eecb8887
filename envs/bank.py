"""Arrays of many instances behind one another, so that one compiled call steps environments on different problems.

numba compiles for types, not for shapes: instances differ in where an array begins and in its shape. A *bank* is a tuple of
flat arrays, one a field of a record, with a *layout* int64 [fields, I, 4]: where the array of an instance begins, and up to
three dimensions. `cutter` compiles the way back from a bank to the record of one instance.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numba.core import types
from numba.core.cgutils import unpack_tuple
from numba.core.types.containers import Tuple
from numba.extending import intrinsic
from numpy.typing import NDArray

Bank = tuple[NDArray[Any], ...]


def bank_of(records: Sequence[Any], *, own: Collection[str] | None = None) -> tuple[Bank, NDArray[np.int64]]:
    """Returns the bank of I records and its layout.

    Args:
        records: NamedTuples of arrays, one an instance; a field has one dtype in all of them. Flat arrays are writable or not
            as those of the first.
        own: Fields of which every instance has its own array, all by default; of others there is one buffer that is long
            enough for any instance.
    """
    flat, layout = [], np.ones((len(records[0]), len(records), 4), dtype=np.int64)
    for field, arrays in enumerate(zip(*records, strict=True)):
        sizes = [array.size for array in arrays]
        shared = own is not None and records[0]._fields[field] not in own
        layout[field, :, 0] = 0 if shared else np.cumsum(sizes) - sizes
        for row, array in zip(layout[field], arrays, strict=True):
            row[1 : 1 + array.ndim] = array.shape
        longest = arrays[int(np.argmax(sizes))]
        joined = np.ravel(longest).copy() if shared else np.concatenate([np.ravel(array) for array in arrays])
        joined.setflags(write=arrays[0].flags.writeable)
        flat.append(joined)
    return tuple(flat), layout


def _cut_1d(array, layout, field, i):  # type: ignore[no-untyped-def]
    begin = layout[field, i, 0]
    return array[begin : begin + layout[field, i, 1]]


def _cut_2d(array, layout, field, i):  # type: ignore[no-untyped-def]
    begin, rows, columns = layout[field, i, 0], layout[field, i, 1], layout[field, i, 2]
    return array[begin : begin + rows * columns].reshape((rows, columns))


def _cut_3d(array, layout, field, i):  # type: ignore[no-untyped-def]
    begin, planes, rows, columns = layout[field, i, 0], layout[field, i, 1], layout[field, i, 2], layout[field, i, 3]
    return array[begin : begin + planes * rows * columns].reshape((planes, rows, columns))


def cutter(record: Any) -> Any:
    """Returns a compiled function of a bank, its layout and the number of an instance, for compiled callers.

    It returns the arrays of the instance as a plain tuple in the order of the fields.

    Args:
        record: A NamedTuple of declared arrays, see `rlplace.arrays`.
    """
    counts = [len(declared.axes.split()) for declared in record._field_defaults.values()]

    @intrinsic  # type: ignore[untyped-decorator]
    def cut(typing: Any, bank: Any, layout: Any, i: Any) -> Any:
        parts = [array.copy(ndim=count) for array, count in zip(bank, counts, strict=True)]

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            made = []
            for field, array in enumerate(unpack_tuple(builder, arguments[0], len(counts))):
                function = (_cut_1d, _cut_2d, _cut_3d)[counts[field] - 1]
                one = parts[field](bank[field], layout, types.intp, i)
                given = [array, arguments[1], context.get_constant(types.intp, field), arguments[2]]
                made.append(context.compile_internal(builder, function, one, given))
            return context.make_tuple(builder, signature.return_type, made)

        return Tuple(parts)(bank, layout, i), generate

    return cut
