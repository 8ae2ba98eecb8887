"""`IncrementalSimulator`: what a plan costs after a few groups have moved, without simulating what the move cannot change."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.problem import Problem
from rlplace.simulator.inputs import check_devices, priority_ranks

Move = Sequence[tuple[int, int]]
"""Groups and the devices that they move to."""


class IncrementalSimulator:
    """Simulates a plan, then plans that differ from it in a few groups, under the `list` schedule.

    The results are those of `Simulator`. A run after a move begins at the last saved state before the first input of a moved
    group is there; groups that wait for nothing, or own a tensor that others read, change a step from its beginning.

    Attributes:
        peak_memory_bytes: int64 [D], of the last plan looked at.
        busy_s: float64 [D], likewise.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        priority: Sequence[float] | NDArray[Any] | None = None,
        microbatches: int = 1,
        checkpoints: int = 16,
    ) -> None:
        """Prepares.

        Args:
            problem: The priced graph.
            priority: float [N], higher starts first; default `default_priority`.
            microbatches: Passes over the forward and backward ops.
            checkpoints: States to save of the plan that moves start from.
        """
        from rlplace.simulator.checkpoints import run_from, saved_for, state_of
        from rlplace.simulator.lowering import first_inputs, lower

        lowered = lower(problem, microbatches)
        self._run, self._graph = run_from, tuple(lowered.graph)
        self._ranks = priority_ranks(problem, lowered, priority)
        self._base, trial = lowered.new_work(timeline=True), lowered.new_work()
        self._saved = saved_for(trial, checkpoints)
        self._on_base = tuple(self._base), tuple(state_of(self._base)), tuple(self._saved), self._ranks
        self._on_trial = tuple(trial), tuple(state_of(trial)), tuple(self._saved), self._ranks
        self._inputs = first_inputs(problem, lowered.tasks)
        self._never = np.zeros(0, dtype=np.int64)
        self._pauses = np.unique(np.arange(1, checkpoints + 1) * lowered.tasks.num_tasks // (checkpoints + 1))
        self._devices = np.zeros(problem.num_groups, dtype=np.int32)
        self._num_devices = problem.num_devices
        self._touched_s: list[float] = []  # when the first input of each group was there, -1 where it waits for none
        self._now_s: list[float] = []
        self._problem = problem
        self.peak_memory_bytes, self.busy_s = np.zeros(problem.num_devices, dtype=np.int64), np.zeros(problem.num_devices)

    def evaluate(self, device_of_group: Sequence[int] | NDArray[Any]) -> tuple[float, float]:
        """Simulates the plan that moves start from.

        Args:
            device_of_group: int [G].

        Returns:
            Step time in seconds, inf when the step cannot complete; and the memory overflow, as `Simulator.evaluate` does.
        """
        self._devices[:] = check_devices(device_of_group, (len(self._devices),), self._problem)
        return self._rebase(-1)

    def evaluate_move(self, move: Move) -> tuple[float, float]:
        """What `evaluate` would return after a move; the plan stays as it is."""
        before = self._apply(move)
        first = self.saved_state(move)
        _, step, overflow, _ = self._run(
            self._graph, *self._on_trial, self._devices.view(np.uint32), self._never, first, self.peak_memory_bytes, self.busy_s
        )
        for group, device in before:
            self._devices[group] = device
        return step, overflow

    def accept(self, move: Move) -> tuple[float, float]:
        """Makes a move: later ones start from the plan that it leads to."""
        self._apply(move)
        return self._rebase(self.saved_state(move))

    def _apply(self, move: Move) -> list[tuple[int, int]]:
        """Changes the plan; returns the move back."""
        if not self._touched_s:
            raise InputError("IncrementalSimulator: evaluate a plan before its moves")
        for group, device in move:
            if not (0 <= group < len(self._devices) and 0 <= device < self._num_devices):
                raise InputError(f"move: no group {group} or no device {device}")
        back = [(group, int(self._devices[group])) for group, _ in move]
        for group, device in move:
            self._devices[group] = device
        return back[::-1]

    def saved_state(self, move: Move) -> int:
        """Number of the last saved state before a move makes a difference, -1 where there is none."""
        return bisect_left(self._now_s, min((self._touched_s[group] for group, _ in move), default=np.inf)) - 1

    def _rebase(self, first: int) -> tuple[float, float]:
        outcome, step, overflow, count = self._run(
            self._graph, *self._on_base, self._devices.view(np.uint32), self._pauses, first, self.peak_memory_bytes, self.busy_s
        )
        touched = np.full(len(self._devices), -1.0)
        self._now_s = []
        ptr, tasks = self._inputs
        some = np.flatnonzero(np.diff(ptr))
        if outcome == 0 and len(some):
            self._now_s = self._saved.now_s[:count].tolist()
            end_s = self._base.time_s[1]
            touched[some] = np.minimum.reduceat(end_s[tasks], ptr[some])
            if first < 0:  # next time, save states where moves begin to make a difference
                share = (np.arange(len(self._saved.now_s)) + 0.5) / len(self._saved.now_s)
                ended = np.searchsorted(np.sort(end_s), touched[some])
                self._pauses = np.unique(np.quantile(ended, share, method="lower").astype(np.int64))
        self._touched_s = touched.tolist()
        return step, overflow
