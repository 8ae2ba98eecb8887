"""Prices of moves: one simulation each, in one compiled loop. Every price is a label that a network can learn from."""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from rlplace.compiled import entry
from rlplace.simulator.fast import STAMP, simulate_plans


def _compile(stamp):
    @entry
    def price_moves(simulation, plan, ptr, groups, targets, which, trial, step_s, overflow):
        """Simulates the plan after each of some moves.

        Args:
            simulation: Arguments of `fast.simulate_plans`; it simulates `trial`.
            plan: int32 [G].
            ptr, groups, targets: Moves, see `rlplace.envs.guide.draw.draw_moves`.
            which: int64 [N], the moves to price.
            trial: int32 [G], holds the plan afterwards.
            step_s: float64 [N], filled with step times, inf when the step cannot complete.
            overflow: float64 [N], filled with relative memory overflow.
        """
        _ = stamp
        graph, work, ranks, position, rows, stages, outcome, step, peak, busy_s = simulation
        trial[:] = plan
        for n in range(len(which)):
            k = which[n]
            for i in range(ptr[k], ptr[k + 1]):
                trial[groups[i]] = targets[i]
            step_s[n], overflow[n] = simulate_plans(graph, work, ranks, position, rows, stages, outcome, step, peak, busy_s)
            for i in range(ptr[k], ptr[k + 1]):
                trial[groups[i]] = plan[groups[i]]

    return price_moves


price_moves = _compile(STAMP)
