"""Which ops come before or after an op."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rlplace.problem.order import successor_lists

if TYPE_CHECKING:
    from rlplace.problem.problem import Problem


def reach(problem: Problem, op: int, *, backwards: bool) -> NDArray[np.bool_]:
    """The strict descendants of an op, or its strict ancestors when `backwards`: bool [N]."""
    made = problem.tensor_producer[problem.edge_tensor] >= 0
    head = problem.tensor_producer[problem.edge_tensor][made]
    tail = problem.consumers[made]
    if backwards:
        head, tail = tail, head
    following, starts = successor_lists(head, tail, problem.num_ops)
    found = np.zeros(problem.num_ops, dtype=bool)
    stack = [op]
    while stack:
        current = stack.pop()
        for other in following[starts[current] : starts[current + 1]]:
            if not found[other]:
                found[other] = True
                stack.append(other)
    return found
