"""Arrays of many instances behind one another, so that one compiled call steps environments on different problems.

numba compiles for types, not for shapes: what differs between instances is where an array begins and ends. A *bank* is a tuple
of flat arrays, one a field, and `at` int64 [fields, I + 1] says where the part of instance i begins in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.compiled import inner

Bank = tuple[NDArray[Any], ...]


def bank_of(rows: Sequence[Sequence[NDArray[Any]]]) -> tuple[Bank, NDArray[np.int64]]:
    """Returns the bank of I tuples of arrays of the same fields.

    Args:
        rows: One tuple an instance; a field has one dtype in all of them.

    Returns:
        Flat arrays, writable or not as the first tuple's, and int64 [fields, I + 1].
    """
    flat, at = [], np.zeros((len(rows[0]), len(rows) + 1), dtype=np.int64)
    for field, arrays in enumerate(zip(*rows, strict=True)):
        joined = np.concatenate([np.ravel(array) for array in arrays])
        joined.setflags(write=arrays[0].flags.writeable)
        at[field, 1:] = np.cumsum([array.size for array in arrays])
        flat.append(joined)
    return tuple(flat), at


def room_of(rows: Sequence[Sequence[NDArray[Any]]]) -> tuple[Bank, NDArray[np.int64]]:
    """Returns buffers for the arrays of any one of I tuples: a copy of the longest of each field, and lengths int64 [fields,
    I].
    """
    sizes = np.array([[array.size for array in arrays] for arrays in zip(*rows, strict=True)], dtype=np.int64)
    longest = [arrays[int(np.argmax(length))] for arrays, length in zip(zip(*rows, strict=True), sizes, strict=True)]
    return tuple(np.ravel(array).copy() for array in longest), sizes


@inner
def cut(flat, at, field, i):  # type: ignore[no-untyped-def]
    """The part of instance `i`, flat."""
    return flat[at[field, i] : at[field, i + 1]]
