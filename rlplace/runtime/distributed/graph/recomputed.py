"""Activation checkpointing: a piece of a segment that keeps its inputs only and runs again before its backward.

torch.utils.checkpoint does the work. What it cannot know of an exported graph is added here:

* Random ops draw the masks of the first run again: their key is entered again, see `randomness`.
* Parameters and buffers that the forward writes to, such as running statistics and counters, are written once. The second run
  works on copies of what they held when the first one began, so it also reads what the first one read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from rlplace.runtime.distributed.graph.assign import Assignment
from rlplace.runtime.distributed.graph.randomness import current_key, random_key


def recompute_sets(segments: Iterable[Iterable[int]] | None, assignment: Assignment) -> dict[str, int]:
    """Number of the plan's recompute segment by node name, for every node of a group that is in one."""
    set_of_group = {int(group): number for number, groups in enumerate(segments or ()) for group in groups}
    return {name: set_of_group[group] for name, group in assignment.group.items() if group in set_of_group}


class Recomputed(nn.Module):
    """Runs a graph; under grad it keeps the inputs, drops everything inside and runs the graph again in the backward."""

    def __init__(self, code: fx.GraphModule, changing: Sequence[int]) -> None:
        """Wraps a graph.

        Args:
            code: The graph.
            changing: Positions of inputs that somebody writes to in a step.
        """
        super().__init__()
        self.code = code
        self.changing = tuple(changing)

    def forward(self, *values: Any) -> Any:
        """Runs the graph."""
        if not torch.is_grad_enabled():
            return self.code(*values)
        key = current_key()
        written = {position: values[position] for position in self.changing}
        before = {position: value.detach().clone() for position, value in written.items()}
        kept = [None if position in written else value for position, value in enumerate(values)]
        runs = 0

        def run(*kept: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs == 1:
                return self.code(*(written.get(position, value) for position, value in enumerate(kept)))
            copies = {position: value.clone() for position, value in before.items()}
            with random_key(*key) if key is not None else contextlib.nullcontext():
                return self.code(*(copies.get(position, value) for position, value in enumerate(kept)))

        return checkpoint(run, *kept, use_reentrant=False, preserve_rng_state=key is None)
