"""Which ops come before or after an op."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rlplace.problem.problem import Problem


def reach(problem: Problem, op: int, *, backwards: bool) -> NDArray[np.bool_]:
    """The strict descendants of an op, or its strict ancestors when `backwards`: bool [N]."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order

    ends = problem.op_edges
    edges = csr_array((np.ones(len(ends[0]), dtype=np.int8), ends[::-1] if backwards else ends), shape=(problem.num_ops,) * 2)
    reached = np.zeros(problem.num_ops, dtype=bool)
    reached[breadth_first_order(edges, op, return_predecessors=False)[1:]] = True  # the op itself comes first
    return reached
