"""Records of arrays for compiled code: each array is declared once, by the default of its field: its type and its axes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Array(NamedTuple):
    """The declaration of an array, default of a field of a NamedTuple.

    Attributes:
        dtype: Type of the entries.
        axes: Names of the axes with spaces between them; ``*`` stands between the factors of a product.
        first: Value of all entries of a new array.
    """

    dtype: Any
    axes: str
    first: float = 0


def buffers(record: Any, **sizes: int) -> Any:
    """Returns a record of new arrays.

    Args:
        record: A NamedTuple all of whose fields have an `Array` as default.
        sizes: Lengths of the axes by name.
    """
    made = []
    for declared in record._field_defaults.values():
        axes = [[int(n) if n.isdigit() else sizes[n] for n in axis.split("*")] for axis in declared.axes.split()]
        made.append(np.zeros([*map(math.prod, axes)], dtype=declared.dtype))  # which takes no memory until it is used
        if declared.first != 0:
            made[-1].fill(declared.first)
    return record(*made)


def constants(record: Any, **columns: Any) -> Any:
    """Returns a record of read-only arrays, cast to the types that are declared: one type each for the compiler.

    Args:
        record: A NamedTuple as for `buffers`.
        columns: Arrays by name, those of the fields among them.
    """
    return record(*(frozen_array(columns[name], declared.dtype) for name, declared in record._field_defaults.items()))


def frozen_array(array: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Returns a contiguous read-only view or copy: one array type for the compiler, whatever the problem was built from."""
    frozen = np.ascontiguousarray(array, dtype=dtype).view()
    frozen.setflags(write=False)
    return frozen
