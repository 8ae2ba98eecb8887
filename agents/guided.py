"""The guided search: annealing with moves ranked by a policy; what surrounds the policy, compiled.

From the current plan, moves are drawn and described (`look`), the policy scores them, and they are tried in the order of score
plus noise, no plan twice (`attempt`). A plan that is better is kept, a worse one with a probability that falls with its loss
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
from rlplace.placement.common import evaluate as objective
from rlplace.placement.common import movekernels
from rlplace.placement.common.evaluate import descent_s, objective_s
from rlplace.placement.common.movekernels import Tables, draw_move, draw_uniform
from rlplace.simulator import records as r
from rlplace.simulator.fast import STAMP, simulate_plans

_PINNED = features.FEATURES.index("pinned_target")

# Entries of `score`.
STEP, OVERFLOW, BEST_STEP, BEST_OVERFLOW = range(4)
# Entries of `counts`.
CALLS, LOOKS, TAKEN, STALLED, FRESH = range(5)


_objective_s, _descent_s = inner(objective_s), inner(descent_s)


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


@inner
def _key(keys, plan):
    """The XOR of the keys of all groups on their devices."""
    key = np.uint64(0)
    for g in range(len(plan)):
        key ^= keys[g, plan[g]]
    return key


@inner
def _room(plan):
    """Buffers for the groups and targets of one move."""
    return np.zeros(max(len(plan), 8), dtype=np.int32), np.zeros(max(len(plan), 8), dtype=np.int32)


def _compile(stamp):
    @entry
    def look(
        simulation, trial, facts, view, tables, plan, best, score, counts, state, shares, ptr, groups, targets, kinds, table,
        calls,
    ):  # fmt: skip
        """Simulates and analyses the plan where that was not done, draws moves and describes them; returns their number.

        Args:
            simulation: Arguments of `fast.simulate_plans`; it simulates `trial` and keeps a timeline.
            trial: int32 [G], equal to `plan` before and after.
            facts: `Facts` as a plain tuple.
            view: `View` as a plain tuple.
            tables: `Tables` as a plain tuple, for random moves.
            plan: int32 [G], the current plan; changed where it cannot complete, by random moves until it can.
            best: int32 [G], the best plan, changed.
            score: float64 [4], see STEP to BEST_OVERFLOW, changed.
            counts: int64 [5], see CALLS to FRESH; FRESH tells whether the view is that of the current plan.
            state: uint64 [1], state of the random numbers.
            shares: Shares of the kinds of moves, see `draw_moves`.
            ptr: int64 [K + 1], filled: offsets of up to K moves.
            groups: int32, filled: the groups of the moves.
            targets: int32, filled: the devices that these groups go to.
            kinds: int8 [K], filled: the kinds of the moves.
            table: float32 [K, F], filled: the features of the moves.
            calls: Simulations to make at most; after them no move is drawn.
        """
        _ = stamp
        t = Tables(*tables)
        graph, work, ranks, position, rows, outcome, step_s, peak, busy_s = simulation
        w = r.Work(*work)
        used = 0
        while counts[FRESH] == 0:
            if used == calls:
                return 0
            step, overflow = simulate_plans(graph, work, ranks, position, rows, outcome, step_s, peak, busy_s)
            used += 1
            counts[CALLS] += 1
            score[STEP], score[OVERFLOW] = step, overflow
            if _objective_s(step, overflow) < _objective_s(score[BEST_STEP], score[BEST_OVERFLOW]):
                best[:] = plan
                score[BEST_STEP], score[BEST_OVERFLOW] = step, overflow
            if step == np.inf:  # a link is missing: random changes until the step completes
                own_groups, own_targets = _room(plan)
                for i in range(draw_move(t, state, plan, own_groups, own_targets)):
                    plan[own_groups[i]] = trial[own_groups[i]] = own_targets[i]
                continue
            counts[FRESH] = 1
            analyse(facts, view, plan, w.time_s[0], w.time_s[1], w.transfer[: w.layout[r.TRANSFERS]], peak[0], step, overflow)
            counts[LOOKS] += 1
        count = draw_moves(facts, view, plan, state, shares, ptr, groups, targets, kinds)
        move_features(facts, view, plan, ptr, groups, targets, kinds, count, trial, table)
        return count

    @entry
    def attempt(
        simulation, trial, facts, view, tables, plan, best, score, counts, state, keys, seen, ptr, groups, targets, table,
        logits, count, calls, noise, stale, fill, hot, cooling, patience, progress, slope, kick,
    ):  # fmt: skip
        """Tries moves in the order of their logits; returns how many were tried.

        Args:
            simulation: As in `look`, and so on up to `targets`.
            trial: See there.
            facts: See there.
            view: See there; that of the plan, unless some moves were accepted.
            tables: See there.
            plan: int32 [G], the current plan, changed.
            best: See there.
            score: See there.
            counts: See there.
            state: See there.
            keys: uint64 [G, D], random, one for each group on each device: their XOR stands for a plan.
            seen: uint64 [2^n], plans that were tried.
            ptr: Moves, from `look`.
            groups: Likewise.
            targets: Likewise.
            table: Likewise.
            logits: float32 [K], the scores of the moves, changed.
            count: Number of moves.
            calls: Moves to try at most.
            noise: Scale of the Gumbel noise on the scores.
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
        own_groups, own_targets = _room(plan)
        key = _key(keys, plan)
        _known(seen, key)
        for k in range(count):
            if table[k, _PINNED] > fill:
                logits[k] = -1e30
            else:
                logits[k] -= noise * np.log(-np.log(draw_uniform(state) * (1.0 - 2e-16) + 1e-16))
        order = np.argsort(-logits[:count])
        tried, accepted, at, improved = 0, 0, 0, False
        while tried < calls:
            if at >= count or logits[order[at]] < -1e29:
                break
            k = order[at]
            at += 1
            size, moved_key = 0, key
            for i in range(ptr[k], ptr[k + 1]):
                if plan[groups[i]] != targets[i]:
                    own_groups[size], own_targets[size] = groups[i], targets[i]
                    moved_key ^= keys[groups[i], plan[groups[i]]] ^ keys[groups[i], targets[i]]
                    size += 1
            if size == 0 or _known(seen, moved_key):
                continue
            for i in range(size):
                trial[own_groups[i]] = own_targets[i]
            step, overflow = simulate_plans(graph, work, ranks, position, rows, outcome, step_s, peak, busy_s)
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
                    temperature = hot * cooling ** min(1.0, progress + slope * tried)
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
        counts[CALLS] += tried
        if accepted > 0:
            counts[FRESH] = 0
        counts[STALLED] = 0 if improved else counts[STALLED] + 1
        if counts[STALLED] > patience and tried < calls:
            counts[STALLED] = 0
            counts[FRESH] = 0
            plan[:] = best
            for _ in range(1 + np.int64(draw_uniform(state) * kick)):
                for i in range(draw_move(t, state, plan, own_groups, own_targets)):
                    plan[own_groups[i]] = own_targets[i]
            trial[:] = plan
        return tried

    return look, attempt


look, attempt = _compile(stamp_of(analysis, draw, facts, features, pressure, view, movekernels, objective) ^ STAMP)
