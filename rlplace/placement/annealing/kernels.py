"""The compiled loop of `annealing`: moves, simulations and decisions without a step back to Python.

It minimises `objective_s` and weighs moves by `descent_s` (`rlplace.placement.common.evaluate`). It holds the simulator.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import numpy as np

from rlplace.compiled import entry, inner, stamp_of
from rlplace.placement.common import evaluate as objective
from rlplace.placement.common import movekernels
from rlplace.placement.common.evaluate import descent_s, objective_s
from rlplace.placement.common.movekernels import Tables, draw_move, draw_uniform
from rlplace.simulator.fast import STAMP, simulate_plans

IDLE = 1000
"""Draws in a row without a move after which nothing counts as movable."""

_COOL_EVERY = 16  # simulations between two changes of the temperature


_objective_s, _descent_s = inner(objective_s), inner(descent_s)


def _compile(stamp):
    @entry
    def anneal(simulation, trial, tables, state, devices, best, score, groups, targets, calls, hot, cooling, progress, slope):
        """Makes `calls` simulations, fewer when no move is found; returns how many.

        Args:
            simulation: Arguments of `fast.simulate_plans`; it simulates `trial`.
            trial: int32 [G], `devices` when the loop begins and when it ends.
            tables: A `Tables` as a plain tuple.
            state: uint64 [1], state of the random numbers.
            devices: int32 [G], the current assignment, changed.
            best: int32 [G], the best assignment so far, changed.
            score: float64 [4], step time and overflow of the current assignment and of the best one, changed.
            groups: int32 [max(G, CLUSTER)], buffer for the groups of a move.
            targets: int32 [max(G, CLUSTER)], buffer for their devices.
            calls: Simulations to make.
            hot: Start temperature relative to the best step time.
            cooling: End temperature relative to `hot`.
            progress: Share of the budget that is spent.
            slope: Increase of `progress` with every simulation.
        """
        _ = stamp
        t = Tables(*tables)
        graph, work, ranks, position, rows, outcome, step_s, peak, busy_s = simulation
        used, idle, temperature = 0, 0, 0.0
        while used < calls and idle < IDLE:
            count = draw_move(t, state, devices, groups, targets)
            if count == 0:
                idle += 1
                continue
            idle = 0
            if used % _COOL_EVERY == 0:
                temperature = hot * cooling ** min(1.0, progress + slope * used)
            for i in range(count):
                trial[groups[i]] = targets[i]
            step, overflow = simulate_plans(graph, work, ranks, position, rows, outcome, step_s, peak, busy_s)
            used += 1
            if _objective_s(step, overflow) < _objective_s(score[2], score[3]):
                best[:] = trial
                score[2], score[3] = step, overflow
            now, before = _descent_s(step, overflow), _descent_s(score[0], score[1])
            taken = False
            if now != np.inf:
                taken = now <= before
                scale = temperature * _descent_s(score[2], score[3])
                if not taken and scale > 0.0:
                    taken = draw_uniform(state) < np.exp((before - now) / scale)
            if taken:
                score[0], score[1] = step, overflow
            for i in range(count):
                if taken:
                    devices[groups[i]] = targets[i]
                else:
                    trial[groups[i]] = devices[groups[i]]
        return used

    return anneal


anneal = _compile(stamp_of(movekernels, objective) ^ STAMP)
