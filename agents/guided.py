"""The guided search: annealing with moves ranked by the network, in one compiled loop.

From the current plan, moves are drawn and described (`rlplace.envs.guide`), the network scores them, and they are tried in the
order of score plus noise, no plan twice. A plan that is better is kept, a worse one with a probability that falls with its loss
and with the spent budget. Timelines come from simulations that are needed anyway, so only tried plans cost calls.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment, operator"
from __future__ import annotations

import numpy as np

from rlplace.compiled import entry, inner, stamp_of
from rlplace.envs.guide import analysis, draw, facts, features, pressure, view
from rlplace.envs.guide.analysis import analyse
from rlplace.envs.guide.draw import draw_moves
from rlplace.envs.guide.features import move_features
from rlplace.planners.common import movekernels, objective
from rlplace.planners.common.movekernels import Tables, draw_move, draw_uniform
from rlplace.planners.common.objective import descent_s, objective_s
from rlplace.simulator import records as r
from rlplace.simulator.fast import STAMP, simulate_plans

# Entries of `score`.
STEP, OVERFLOW, BEST_STEP, BEST_OVERFLOW = range(4)
# Entries of `counts`.
CALLS, LOOKS, TAKEN, STALLED, FRESH = range(5)


_objective_s, _descent_s = inner(objective_s), inner(descent_s)


@inner(fastmath=True)
def network_scores(table, count, linear, first, first_bias, second, second_bias, last, logits):
    """Logits of the first `count` rows of a table, as `rlplace.agents.network.PlacerNetwork.scores` computes them."""
    hidden, wide = np.empty(first.shape[1], dtype=np.float32), np.empty(second.shape[1], dtype=np.float32)
    for k in range(count):
        hidden[:] = first_bias
        total = np.float32(0.0)
        for i in range(table.shape[1]):
            x = table[k, i]
            if x != 0.0:
                total += x * linear[i]
                for j in range(len(hidden)):
                    hidden[j] += x * first[i, j]
        wide[:] = second_bias
        for i in range(len(hidden)):
            x = hidden[i]
            if x > 0.0:
                for j in range(len(wide)):
                    wide[j] += x * second[i, j]
        for j in range(len(wide)):
            total += max(wide[j], np.float32(0.0)) * last[j]
        logits[k] = total


@inner
def _known(seen, key):
    """Whether a key is in the table of seen plans; adds it, unless the table is full there."""
    if key == 0:
        key = np.uint64(1)
    mask = np.uint64(len(seen) - 1)
    at = key & mask
    for _ in range(16):
        if seen[at] == key:
            return True
        if seen[at] == 0:
            seen[at] = key
            return False
        at = (at + np.uint64(1)) & mask
    seen[at] = key
    return False


def _compile(stamp):
    @entry
    def search(
        simulation, trial, facts, view, tables, weights, plan, best, score, counts, state, keys, seen, shares, ptr,
        groups, targets, kinds, table, logits, calls, noise, tries, stale, fill, hot, cooling, patience,
        progress, slope, kick,
    ):  # fmt: skip
        """Makes `calls` simulations, fewer when no move is found; returns how many.

        Args:
            simulation: Arguments of `fast.simulate_plans`; it simulates `trial` and keeps a timeline.
            trial: int32 [G], equal to `plan` when the loop begins and when it ends.
            facts: `Facts` as a plain tuple.
            view: `View` as a plain tuple.
            tables: `Tables` as a plain tuple, for random moves.
            weights: The network's layers, see `PlacerNetwork.compiled`.
            plan: int32 [G], the current plan, changed.
            best: int32 [G], the best plan, changed.
            score: float64 [4], see STEP to BEST_OVERFLOW, changed.
            counts: int64 [5], see CALLS to FRESH; FRESH tells whether the view is that of the current plan.
            state: uint64 [1], state of the random numbers.
            keys: uint64 [G, D], random, one for each group on each device: their XOR stands for a plan.
            seen: uint64 [2^n], plans that were tried.
            shares: Shares of the kinds of moves, see `draw_moves`.
            ptr: int64 [K + 1], buffer for the offsets of K moves.
            groups: int32, buffer for the groups of the moves.
            targets: int32, buffer for the devices that these groups go to.
            kinds: int8 [K], buffer for the kinds of the moves.
            table: float32 [K, F], buffer for the features of the moves.
            logits: float32 [K], buffer for the scores of the moves.
            calls: Simulations to make.
            noise: Scale of the Gumbel noise on the scores.
            tries: Moves that are tried before others are drawn.
            stale: Moves that may be accepted before the plan is analysed again.
            fill: Plans that provably fill a device beyond this share of its memory are not tried.
            hot: Start temperature relative to the best step time.
            cooling: End temperature relative to `hot`.
            patience: Rounds without a new best plan after which the search returns to the best plan and changes it at random.
            progress: Share of the budget that is spent.
            slope: Increase of `progress` with every simulation.
            kick: Largest number of random moves of such a change.
        """
        _ = stamp
        t = Tables(*tables)
        graph, work, ranks, position, rows, outcome, step_s, peak, busy_s = simulation
        w = r.Work(*work)
        own_groups, own_targets = np.zeros(max(len(plan), 8), dtype=np.int32), np.zeros(max(len(plan), 8), dtype=np.int32)
        key = np.uint64(0)
        for g in range(len(plan)):
            key ^= keys[g, plan[g]]
        _known(seen, key)
        used, empty = 0, 0
        while used < calls and empty < 50:
            if counts[FRESH] == 0:
                step, overflow = simulate_plans(graph, work, ranks, position, rows, outcome, step_s, peak, busy_s)
                used += 1
                counts[FRESH] = 1
                score[STEP], score[OVERFLOW] = step, overflow
                if _objective_s(step, overflow) < _objective_s(score[BEST_STEP], score[BEST_OVERFLOW]):
                    best[:] = plan
                    score[BEST_STEP], score[BEST_OVERFLOW] = step, overflow
                if step == np.inf:  # a link is missing: random changes until the step completes
                    counts[FRESH] = 0
                    size = draw_move(t, state, plan, own_groups, own_targets)
                    for i in range(size):
                        key ^= keys[own_groups[i], plan[own_groups[i]]] ^ keys[own_groups[i], own_targets[i]]
                        plan[own_groups[i]] = own_targets[i]
                        trial[own_groups[i]] = own_targets[i]
                    continue
                analyse(
                    facts, view, plan, w.time_s[0], w.time_s[1], w.transfer[: w.layout[r.TRANSFERS]], peak[0], step, overflow
                )
                counts[LOOKS] += 1
            count = draw_moves(facts, view, plan, state, shares, ptr, groups, targets, kinds)
            move_features(facts, view, plan, ptr, groups, targets, kinds, count, trial, table)
            network_scores(table, count, *weights, logits)
            for k in range(count):
                if table[k, 12] > fill:
                    logits[k] = -1e30
                else:
                    logits[k] -= noise * np.log(-np.log(draw_uniform(state) * (1.0 - 2e-16) + 1e-16))
            order = np.argsort(-logits[:count])
            tried, accepted, at = 0, 0, 0
            improved = False
            while tried < tries and used < calls:
                if at >= count or logits[order[at]] < -1e29:
                    break
                k = order[at]
                at += 1
                size = 0
                for i in range(ptr[k], ptr[k + 1]):
                    if plan[groups[i]] != targets[i]:
                        own_groups[size], own_targets[size] = groups[i], targets[i]
                        size += 1
                if size == 0:
                    continue
                moved_key = key
                for i in range(size):
                    moved_key ^= keys[own_groups[i], plan[own_groups[i]]] ^ keys[own_groups[i], own_targets[i]]
                if _known(seen, moved_key):
                    continue
                for i in range(size):
                    trial[own_groups[i]] = own_targets[i]
                step, overflow = simulate_plans(graph, work, ranks, position, rows, outcome, step_s, peak, busy_s)
                used += 1
                tried += 1
                if _objective_s(step, overflow) < _objective_s(score[BEST_STEP], score[BEST_OVERFLOW]):
                    best[:] = trial
                    score[BEST_STEP], score[BEST_OVERFLOW] = step, overflow
                    improved = True
                now, before = _descent_s(step, overflow), _descent_s(score[STEP], score[OVERFLOW])
                taken = False
                if now != np.inf:
                    taken = now < before
                    if not taken:
                        temperature = hot * cooling ** min(1.0, progress + slope * used)
                        scale = temperature * _descent_s(score[BEST_STEP], score[BEST_OVERFLOW])
                        taken = scale > 0.0 and draw_uniform(state) < np.exp((before - now) / scale)
                if taken:
                    score[STEP], score[OVERFLOW] = step, overflow
                    key = moved_key
                    accepted += 1
                    counts[TAKEN] += 1
                for i in range(size):
                    if taken:
                        plan[own_groups[i]] = own_targets[i]
                    else:
                        trial[own_groups[i]] = plan[own_groups[i]]
                if taken and accepted >= stale:
                    transfers = w.transfer[: w.layout[r.TRANSFERS]]
                    analyse(facts, view, plan, w.time_s[0], w.time_s[1], transfers, peak[0], step, overflow)
                    counts[LOOKS] += 1
                    accepted = 0
                    break
            if accepted > 0:
                counts[FRESH] = 0
            empty = empty + 1 if tried == 0 else 0
            counts[STALLED] = 0 if improved else counts[STALLED] + 1
            if counts[STALLED] > patience and used < calls:
                counts[STALLED] = 0
                counts[FRESH] = 0
                plan[:] = best
                for _ in range(1 + np.int64(draw_uniform(state) * kick)):
                    size = draw_move(t, state, plan, own_groups, own_targets)
                    for i in range(size):
                        plan[own_groups[i]] = own_targets[i]
                trial[:] = plan
                key = np.uint64(0)
                for g in range(len(plan)):
                    key ^= keys[g, plan[g]]
                _known(seen, key)
        counts[CALLS] += used
        return used

    return search


search = _compile(stamp_of(analysis, draw, facts, features, pressure, view, movekernels, objective) ^ STAMP)
