"""Steps of many refinement environments in one compiled call: `RefinementEnv.step`, by the same kernels.

Axes: I instances, N environments, K moves with stop, F features, G = `max_groups`, D = `max_devices`, R room of a draw.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlplace.compiled import entry, inner, stamp_of
from rlplace.envs import instance as instances_of
from rlplace.envs.base import static_context
from rlplace.envs.guide import analysis, draw, facts, features, guide, pressure, view
from rlplace.envs.guide.analysis import analyse
from rlplace.envs.guide.draw import draw_moves
from rlplace.envs.guide.facts import make_facts
from rlplace.envs.guide.features import CLIP, FEATURES, NUM_FEATURES, move_features
from rlplace.envs.guide.guide import ROOM, blind
from rlplace.envs.guide.view import make_view
from rlplace.envs.instance import SHORTEST_S, UNFIT, Instance
from rlplace.envs.observation import NUM_CONTEXT
from rlplace.envs.vector import bank
from rlplace.envs.vector import facts as cuts
from rlplace.envs.vector.bank import bank_of, cut, room_of
from rlplace.envs.vector.facts import facts_at, graph_at, view_at, work_at
from rlplace.placement.common import evaluate as objective
from rlplace.placement.common import movekernels
from rlplace.placement.common.evaluate import UNFIT_S, objective_s
from rlplace.simulator import records as r
from rlplace.simulator.fast import STAMP, simulate_plans
from rlplace.simulator.lowering import lower

RUNNING, STOPPED, ILLEGAL = range(3)
"""What became of an environment."""

STEP, BEGIN, LOOK = range(3)
"""What `refine` does."""

_PINNED = FEATURES.index("pinned_target")


class Known(NamedTuple):
    """Constants of the instances."""

    shape: Any  # int64 [I, 2], groups and devices
    context: Any  # float32 [I, 3]
    ideal_s: Any  # float64 [I]
    reference_s: Any  # float64 [I]
    graph: Any  # bank of `Graph`
    graph_at: Any
    ranks: Any  # bank of one field
    ranks_at: Any
    facts: Any  # bank of `Facts`
    facts_at: Any


class Room(NamedTuple):
    """Buffers of a thread."""

    work: Any  # of `Work`
    work_size: Any  # int64 [fields, I]
    values: Any  # bank of the two fields of `Work` that an instance keeps
    values_at: Any
    seen: Any  # of `View`
    seen_size: Any
    plan: Any  # uint32 [G]
    trial: Any  # int32 [G]
    table: Any  # float32 [K - 1, F]
    outcome: Any  # int8 [1]
    step_s: Any  # float64 [1]
    peak: Any  # int64 [D]
    busy_s: Any  # float64 [D]


class State(NamedTuple):
    """What environments remember and show."""

    instance: Any  # int64 [N]
    random: Any  # uint64 [N]
    plan: Any  # int32 [N, G], -1 padding
    best_plan: Any  # int32 [N, G]
    best_s: Any  # float64 [N], step time of the best plan
    best_overflow: Any  # float64 [N]
    score: Any  # float64 [N]
    best_score: Any  # float64 [N]
    left: Any  # int64 [N], moves left
    ptr: Any  # int64 [N, K]
    groups: Any  # int32 [N, R]
    targets: Any  # int32 [N, R]
    kinds: Any  # int8 [N, K - 1]
    table: Any  # float32 [N, K * F]
    first: Any  # int32 [N, K]
    legal: Any  # bool [N, K]
    context: Any  # float32 [N, 8]
    reward: Any  # float64 [N]
    status: Any  # int8 [N], see RUNNING
    loads_s: Any  # float64 [N], the largest load of a device
    measured: Any  # float64 [N, 2], step time and overflow of the plan by another backend than the simulator; NaN: simulated


def known_of(instances: Sequence[Instance]) -> Known:
    """Returns the constants of instances."""
    problems = [instance.problem for instance in instances]
    lowered = [lower(problem) for problem in problems]
    return Known(
        np.array([[problem.num_groups, problem.num_devices] for problem in problems], dtype=np.int64),
        np.clip([static_context(instance) for instance in instances], -CLIP, CLIP).astype(np.float32),
        np.array([instance.ideal_s for instance in instances]),
        np.array([instance.reference_step_time_s for instance in instances]),
        *bank_of([one.graph for one in lowered]),
        *bank_of([(one.ranks,) for one in lowered]),
        *bank_of([make_facts(instance) for instance in instances]),
    )


def room_for(instances: Sequence[Instance], moves: int) -> Room:
    """Returns the buffers of a thread."""
    works, views = [], []
    for instance in instances:
        facts_ = make_facts(instance)
        works.append(lower(instance.problem).new_work(timeline=True))
        views.append(make_view(facts_, int(facts_.channels.max(initial=-1)) + 1))
    groups = max(instance.problem.num_groups for instance in instances)
    devices = max(instance.problem.num_devices for instance in instances)
    return Room(
        *room_of(works), *bank_of([(work.value, work.layout) for work in works]), *room_of(views),
        np.zeros(groups, dtype=np.uint32), np.zeros(groups, dtype=np.int32),
        np.zeros((moves - 1, NUM_FEATURES), dtype=np.float32),
        np.zeros(1, dtype=np.int8), np.zeros(1), np.zeros(devices, dtype=np.int64), np.zeros(devices),
    )  # fmt: skip


def state_for(number: int, moves: int, groups: int) -> State:
    """Returns the memory of N environments."""
    room = max(ROOM, 4 * groups)
    seconds = np.zeros((6, number))
    plans = np.full((2, number, groups), -1, dtype=np.int32)
    drawn = np.zeros((2, number, room), dtype=np.int32)
    return State(
        np.zeros(number, dtype=np.int64), np.zeros(number, dtype=np.uint64), plans[0], plans[1],
        seconds[0], seconds[1], seconds[2], seconds[3],
        np.zeros(number, dtype=np.int64), np.zeros((number, moves), dtype=np.int64), drawn[0], drawn[1],
        np.zeros((number, moves - 1), dtype=np.int8), np.zeros((number, moves * NUM_FEATURES), dtype=np.float32),
        np.full((number, moves), -1, dtype=np.int32), np.zeros((number, moves), dtype=np.bool_),
        np.zeros((number, NUM_CONTEXT), dtype=np.float32), seconds[4], np.zeros(number, dtype=np.int8), seconds[5],
        np.full((number, 2), np.nan),
    )  # fmt: skip


_objective_s = inner(objective_s)


@inner
def _score(step_s, overflow, reference_s):
    """`rlplace.envs.instance.score`."""
    worth_s = _objective_s(step_s, overflow)
    if worth_s < UNFIT_S:
        return min(np.log(max(worth_s, SHORTEST_S) / reference_s), UNFIT)
    return UNFIT + np.log(min(worth_s / UNFIT_S, 11.0)) if worth_s < np.inf else 4 * UNFIT


@inner
def _withdraw(s, e, choice):
    s.table[e, choice * NUM_FEATURES : (choice + 1) * NUM_FEATURES] = 0.0
    s.first[e, choice], s.legal[e, choice] = -1, False


@inner
def _clear(s, e):
    s.table[e, :] = 0.0
    s.first[e, :] = -1
    s.legal[e, :] = False
    s.legal[e, 0] = True


@inner
def _show(k, s, e, most_moves):
    """The context of an environment, as `rlplace.envs.base.context_vector` gives it."""
    i, row = s.instance[e], s.context[e]
    row[:3] = k.context[i]
    row[3] = min(max(s.left[e] / most_moves, -CLIP), CLIP)
    row[4] = min(max(s.score[e], -CLIP), CLIP)
    row[5] = min(max(s.best_score[e], -CLIP), CLIP)
    row[6] = min(max(s.loads_s[e] / k.ideal_s[i], -CLIP), CLIP)


@inner
def _simulate(room, s, e, graph, work, ranks, groups, devices):
    """Step time and overflow of the plan of an environment."""
    plan, row, none = s.plan[e, :groups], room.plan[:groups], np.zeros(0, dtype=np.uint32)
    for g in range(groups):
        row[g] = plan[g]
    peak, busy_s = room.peak[:devices].reshape((1, devices)), room.busy_s[:devices].reshape((1, devices))
    return simulate_plans(graph, work, ranks, none, row.reshape((1, groups)), room.outcome, room.step_s, peak, busy_s)


@inner
def _read(k, room, s, e, facts_, view_, work, groups, devices, step_s, overflow):
    """Analyses the timeline of the plan of an environment, which was simulated last."""
    plan = s.plan[e, :groups]
    if step_s == np.inf:
        blind(facts_, view_, plan, k.reference_s[s.instance[e]])
    else:
        sent = work[9][: work[7][r.TRANSFERS]]
        analyse(facts_, view_, plan, work[8][0], work[8][1], sent, room.peak[:devices], step_s, overflow)


@inner
def _offer(room, s, e, facts_, view_, groups, shares):
    """Draws moves of the plan that was looked at and describes them."""
    plan, moves = s.plan[e, :groups], len(room.table) + 1
    count = draw_moves(
        facts_, view_, plan, s.random[e : e + 1], shares, s.ptr[e], s.groups[e, : max(ROOM, 4 * groups)],
        s.targets[e, : max(ROOM, 4 * groups)], s.kinds[e],
    )  # fmt: skip
    trial = room.trial[:groups]
    trial[:] = plan
    move_features(facts_, view_, plan, s.ptr[e], s.groups[e], s.targets[e], s.kinds[e], count, trial, room.table)
    _clear(s, e)
    f, v = facts.Facts(*facts_), view.View(*view_)
    fullest = 1.0
    for d in range(len(v.load)):
        if f.limit[d] < np.inf:
            fullest = max(fullest, v.pinned[d] / f.limit[d])
    table = s.table[e].reshape((moves, NUM_FEATURES))
    for m in range(count):
        table[m + 1] = room.table[m]
        s.first[e, m + 1] = s.groups[e, s.ptr[e, m]]
        s.legal[e, m + 1] = room.table[m, _PINNED] <= np.float32(fullest)


def _compile(stamp):
    @entry(nogil=True)
    def refine(known, room, state, rows, actions, most_moves, mode, choosy, shares):
        """Steps environments, or begins their episodes.

        Args:
            known: `Known` as a plain tuple.
            room: `Room` as a plain tuple, that of the thread.
            state: `State` as a plain tuple, changed.
            rows: int64 [n], the environments.
            actions: int64 [N].
            most_moves: Moves of an episode.
            mode: STEP; BEGIN, after `instance`, `random`, `plan` and `left` were set; LOOK only draws moves of the plan.
            choosy: Moves after which the score is no lower are taken back.
            shares: See `rlplace.envs.guide.draw.SHARES`.
        """
        _ = stamp
        k, t, s = Known(*known), Room(*room), State(*state)
        for n in range(len(rows)):
            e = rows[n]
            i, choice = s.instance[e], actions[e]
            groups, devices = k.shape[i, 0], k.shape[i, 1]
            s.reward[e], s.status[e] = 0.0, RUNNING
            if mode == STEP:
                if choice == 0 or not s.legal[e, choice]:
                    s.status[e] = STOPPED if choice == 0 else ILLEGAL
                    if choice > 0:
                        column = choice * NUM_FEATURES + _PINNED
                        s.reward[e] = -_score(UNFIT_S, max(0.0, np.float64(s.table[e, column]) - 1.0), 1.0)
                    _clear(s, e)
                    _show(k, s, e, most_moves)
                    continue
                t.trial[:groups] = s.plan[e, :groups]
                for m in range(s.ptr[e, choice - 1], s.ptr[e, choice]):
                    s.plan[e, s.groups[e, m]] = s.targets[e, m]
            facts_ = facts_at(k.facts, k.facts_at, i, groups, devices)
            view_ = view_at(t.seen, t.seen_size, i, groups, devices)
            graph = graph_at(k.graph, k.graph_at, i, devices)
            work = work_at(t.work, t.work_size, t.values, t.values_at, i, devices)
            ranks = cut(k.ranks[0], k.ranks_at, 0, i)
            ranks = ranks.reshape((2, len(ranks) // 2))
            step_s, overflow = _simulate(t, s, e, graph, work, ranks, groups, devices)
            worth_s, excess = step_s, overflow
            if mode != LOOK and not np.isnan(s.measured[e, 0]):
                worth_s, excess = s.measured[e, 0], s.measured[e, 1]
            before, s.score[e] = s.score[e], _score(worth_s, excess, k.reference_s[i])
            kept = mode != STEP or not choosy or s.score[e] < before
            if kept:
                _read(k, t, s, e, facts_, view_, work, groups, devices, step_s, overflow)
                s.loads_s[e] = view_[0].max()
            gain = max(0.0, s.best_score[e] - s.score[e])
            if (gain > 0.0 and mode == STEP) or mode == BEGIN:
                s.best_score[e], s.best_s[e], s.best_overflow[e] = s.score[e], worth_s, excess
                s.best_plan[e] = s.plan[e]
            if mode == STEP:
                s.reward[e] = gain
                s.left[e] -= 1
                if not kept:
                    s.score[e] = before
                    s.plan[e, :groups] = t.trial[:groups]
                    _withdraw(s, e, choice)
                if s.left[e] == 0:
                    s.status[e] = STOPPED
                    _clear(s, e)
                    _show(k, s, e, most_moves)
                    continue
                if not kept:
                    if s.legal[e, 1:].any():
                        _show(k, s, e, most_moves)
                        continue
                    step_s, overflow = _simulate(t, s, e, graph, work, ranks, groups, devices)
                    _read(k, t, s, e, facts_, view_, work, groups, devices, step_s, overflow)
            _offer(t, s, e, facts_, view_, groups, shares)
            _show(k, s, e, most_moves)

    return refine


refine = _compile(
    stamp_of(analysis, bank, cuts, draw, facts, features, guide, instances_of, movekernels, objective, pressure, view) ^ STAMP
)
