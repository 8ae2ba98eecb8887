"""The compiled loop of the search."""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import numpy as np

from rlplace.compiled import entry


@entry
def min_plus(left, right, left_row, right_row):
    """Minimum over v of ``left[left_row[o], v] + right[right_row[o], v, w]`` for all o and w.

    Args:
        left: Array (rows, V).
        right: Array (rows, V, W).
        left_row: Row of `left` for each o.
        right_row: Row of `right` for each o.

    Returns:
        Minima and the first v that attains each, arrays (o, W).
    """
    outer, width, columns = left_row.size, left.shape[1], right.shape[2]
    values = np.empty((outer, columns))
    arg_min = np.empty((outer, columns), np.uint16)
    best = np.empty(columns)
    first = np.empty(columns, np.int64)  # as wide as a cost, so that both are compared and moved together
    for o in range(outer):
        p, q = left[left_row[o]], right[right_row[o]]
        for w in range(columns):
            best[w] = p[0] + q[0, w]
            first[w] = 0
        for v in range(1, width):
            base = p[v]
            for w in range(columns):
                cost = base + q[v, w]
                better = cost < best[w]
                best[w] = cost if better else best[w]
                first[w] = v if better else first[w]
        for w in range(columns):
            values[o, w] = best[w]
            arg_min[o, w] = first[w]
    return values, arg_min
