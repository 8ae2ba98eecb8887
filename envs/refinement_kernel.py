"""Steps of many refinement environments in one compiled call: simulation, analysis, moves and their features.

Axes: I instances, N environments, K moves with stop, L without, F features, G = `max_groups`, R room
of a draw.
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlplace.arrays import Array, buffers
from rlplace.compiled import entry, inner, stamp_of
from rlplace.envs import bank as banks
from rlplace.envs import instance as instances_of
from rlplace.envs.bank import bank_of, cutter
from rlplace.envs.guide import analysis, draw, features, guide, records
from rlplace.envs.guide.analysis import analyse
from rlplace.envs.guide.draw import draw_moves
from rlplace.envs.guide.features import CLIP, COLUMN, NUM_FEATURES, move_features
from rlplace.envs.guide.guide import ROOM
from rlplace.envs.guide.records import BUSIEST, WORK, AnalysisTables, View, analysis_tables, make_view
from rlplace.envs.guide.records import STEP as STEP_S
from rlplace.envs.instance import SHORTEST_S, UNFIT, PlacementInstance
from rlplace.envs.observation import NUM_CONTEXT, static_context
from rlplace.placement.common import evaluate as objective
from rlplace.placement.common import movekernels
from rlplace.placement.common.evaluate import UNFIT_S, objective_s
from rlplace.simulator import records as r
from rlplace.simulator.fast import STAMP, simulate_plans
from rlplace.simulator.lowering import lower

RUNNING, STOPPED, ILLEGAL = range(3)
"""Status of an environment."""

STEP, BEGIN, LOOK = range(3)
"""Modes of `refine`."""


_graph_of, _tables_of, _work_of, _view_of = map(cutter, (r.Graph, AnalysisTables, r.Work, View))


class RefinementBank(NamedTuple):
    """Constants of the instances."""

    shape: Any  # int64 [I, 2], groups and devices
    context: Any  # float32 [I, 3]
    ideal_s: Any  # float64 [I]
    reference_s: Any  # float64 [I]
    graph: Any  # bank of `Graph`
    graph_layout: Any
    tables: Any  # bank of `AnalysisTables`
    tables_layout: Any


class Scratch(NamedTuple):
    """Buffers of a thread."""

    work: Any  # of `Work`; values and layouts of every instance stay
    work_layout: Any
    analysis: Any  # of `View`
    analysis_layout: Any
    plan: Any  # uint32 [G]
    trial: Any  # int32 [G]
    table: Any  # float32 [K - 1, F]
    outcome: Any  # int8 [1]
    step_s: Any  # float64 [1]
    peak: Any  # int64 [D]
    busy_s: Any  # float64 [D]


class RefinementState(NamedTuple):
    """Memory and observations of the environments."""

    instance: Any = Array("int64", "N")
    random: Any = Array("uint64", "N")
    plan: Any = Array("int32", "N G", -1)  # -1 padding
    best_plan: Any = Array("int32", "N G", -1)
    best_s: Any = Array("float64", "N")  # step time of the best plan
    best_overflow: Any = Array("float64", "N")
    score: Any = Array("float64", "N")
    best_score: Any = Array("float64", "N")
    left: Any = Array("int64", "N")  # moves left
    ptr: Any = Array("int64", "N K")
    groups: Any = Array("int32", "N R")
    targets: Any = Array("int32", "N R")
    kinds: Any = Array("int8", "N L")
    table: Any = Array("float32", "N K*F")
    group: Any = Array("int32", "N K", -1)  # the first group of each move
    legal: Any = Array("bool", "N K")
    context: Any = Array("float32", f"N {NUM_CONTEXT}")
    reward: Any = Array("float64", "N")
    status: Any = Array("int8", "N")  # see RUNNING
    loads_s: Any = Array("float64", "N")  # the largest load of a device
    measured: Any = Array("float64", "N 2", math.nan)  # step time and overflow of the plan by another backend, if any


class InstanceParts(NamedTuple):
    """One instance, cut out of the bank and of a thread's buffers: the records as plain tuples."""

    graph: Any
    work: Any
    tables: Any
    analysis: Any


def refinement_bank(instances: Sequence[PlacementInstance]) -> RefinementBank:
    """Returns the constants of instances."""
    return RefinementBank(
        np.array([instance.allowed.shape for instance in instances], dtype=np.int64),
        np.clip([static_context(instance) for instance in instances], -CLIP, CLIP).astype(np.float32),
        np.array([instance.ideal_s for instance in instances]),
        np.array([instance.reference_step_time_s for instance in instances]),
        *bank_of([lower(instance.problem).graph for instance in instances]),
        *bank_of([analysis_tables(instance) for instance in instances]),
    )


def scratch_for(instances: Sequence[PlacementInstance], moves: int) -> Scratch:
    """Returns the buffers of a thread."""
    groups, devices = np.max([instance.allowed.shape for instance in instances], axis=0)
    return Scratch(
        *bank_of([lower(instance.problem).new_work(timeline=True) for instance in instances], own=("value", "layout")),
        *bank_of([make_view(analysis_tables(instance)) for instance in instances], own=()),
        np.zeros(groups, dtype=np.uint32),
        np.zeros(groups, dtype=np.int32),
        np.zeros((moves - 1, NUM_FEATURES), dtype=np.float32),
        np.zeros(1, dtype=np.int8),
        np.zeros(1),
        np.zeros(devices, dtype=np.int64),
        np.zeros(devices),
    )


def refinement_state(number: int, moves: int, groups: int) -> RefinementState:
    """Returns the memory of N environments."""
    sizes = {"G": groups, "K": moves, "L": moves - 1, "F": NUM_FEATURES, "R": max(ROOM, 4 * groups)}
    state: RefinementState = buffers(RefinementState, N=number, **sizes)
    return state


_objective_s = inner(objective_s)


@inner
def _score(step_s, overflow, reference_s):
    """Returns `rlplace.envs.instance.score`."""
    worth_s = _objective_s(step_s, overflow)
    if worth_s < UNFIT_S:
        return min(np.log(max(worth_s, SHORTEST_S) / reference_s), UNFIT)
    return UNFIT + np.log(min(worth_s / UNFIT_S, 11.0)) if worth_s < np.inf else 4 * UNFIT


@inner
def _withdraw(s, e, choice):
    s.table[e, choice * NUM_FEATURES : (choice + 1) * NUM_FEATURES] = 0.0
    s.group[e, choice], s.legal[e, choice] = -1, False


@inner
def _clear(s, e):
    s.table[e, :] = 0.0
    s.group[e, :] = -1
    s.legal[e, :] = False
    s.legal[e, 0] = True


@inner
def _show(b, s, e, most_moves):
    """Fills the context of an environment; see `rlplace.envs.observation.context_vector`."""
    i, row = s.instance[e], s.context[e]
    row[:3] = b.context[i]
    row[3] = min(max(s.left[e] / most_moves, -CLIP), CLIP)
    row[4] = min(max(s.score[e], -CLIP), CLIP)
    row[5] = min(max(s.best_score[e], -CLIP), CLIP)
    row[6] = min(max(s.loads_s[e] / b.ideal_s[i], -CLIP), CLIP)


@inner(forceinline=True)
def _simulate(t, s, e, parts, groups, devices):
    """Returns step time and overflow of the plan of an environment."""
    plan, row, none = s.plan[e, :groups], t.plan[:groups], np.zeros(0, dtype=np.uint32)
    for g in range(groups):
        row[g] = plan[g]
    peak, busy_s = t.peak[:devices].reshape((1, devices)), t.busy_s[:devices].reshape((1, devices))
    rows = row.reshape((1, groups))
    ranks = AnalysisTables(*parts.tables).ranks
    return simulate_plans(parts.graph, parts.work, ranks, none, rows, (t.outcome, t.step_s, peak, busy_s))


@inner
def _blind(facts, view, plan, reference_s):
    """Fills the view of a plan that cannot complete, which has no timeline: only the placement is known.

    Loads and provable bytes are true, every group counts as tight and nothing waits. The unit of time, which is the step time
    elsewhere, is the instance's reference.
    """
    f, v = AnalysisTables(*facts), View(*view)
    for whole in (
        v.load, v.peak, v.pinned, v.channel, v.slack, v.wait, v.queue, v.urgent, v.chain, v.blocked, v.sent, v.hurried, v.total,
        v.late,
    ):  # fmt: skip
        whole[:] = 0.0
    for table in (v.saved, v.idle, v.crowd, v.shared, v.free_bins):
        table[:] = 0.0
    for cube in (v.clash, v.critical_bins):
        cube[:] = 0.0
    v.before[:] = 0
    for g in range(len(plan)):
        v.load[plan[g]] += f.time_s[g, plan[g]]
        v.pinned[plan[g]] += f.pinned_bytes[g]
    v.peak[:] = v.pinned
    v.tightness[:] = 1.0
    v.part[:] = 1.0
    v.gap[:] = np.inf  # no transfer is known to be urgent
    v.margin[:] = np.inf
    v.total[STEP_S], v.total[WORK], v.total[BUSIEST] = reference_s, v.load.sum(), v.load.max()


@inner(forceinline=True)
def _analyse(b, t, s, e, parts, step_s, overflow):
    """Analyses the timeline of the plan of an environment, which was simulated last."""
    i = s.instance[e]
    plan, devices = s.plan[e, : b.shape[i, 0]], b.shape[i, 1]
    if step_s == np.inf:
        _blind(parts.tables, parts.analysis, plan, b.reference_s[i])
    else:
        w = r.Work(*parts.work)
        step = w.time_s[0], w.time_s[1], w.transfer[: w.layout[r.TRANSFERS]], t.peak[:devices], step_s, overflow
        analyse(parts.tables, parts.analysis, plan, step)


@inner(forceinline=True)
def _offer(t, s, e, parts, groups):
    """Draws moves of the analysed plan and computes their features."""
    plan, moves, room = s.plan[e, :groups], len(t.table) + 1, max(ROOM, 4 * groups)
    drawn = s.ptr[e], s.groups[e, :room], s.targets[e, :room], s.kinds[e]
    count = draw_moves(parts.tables, parts.analysis, plan, s.random[e : e + 1], drawn)
    trial = t.trial[:groups]
    trial[:] = plan
    move_features(parts.tables, parts.analysis, plan, drawn, count, trial, t.table)
    _clear(s, e)
    f, v = AnalysisTables(*parts.tables), View(*parts.analysis)
    fullest = 1.0
    for d in range(len(v.load)):
        if f.limit[d] < np.inf:
            fullest = max(fullest, v.pinned[d] / f.limit[d])
    table = s.table[e].reshape((moves, NUM_FEATURES))
    for m in range(count):
        table[m + 1] = t.table[m]
        s.group[e, m + 1] = s.groups[e, s.ptr[e, m]]
        s.legal[e, m + 1] = t.table[m, COLUMN.pinned_target] <= np.float32(fullest)


def _compile(stamp):
    @entry(nogil=True)
    def refine(bank, scratch, state, rows, actions, most_moves, mode, choosy):
        """Steps environments, or begins their episodes.

        Args:
            bank: `RefinementBank` as a plain tuple.
            scratch: `Scratch` as a plain tuple, that of the thread.
            state: `RefinementState` as a plain tuple, changed.
            rows: int64 [n], the environments.
            actions: int64 [N].
            most_moves: Moves of an episode.
            mode: STEP; BEGIN, after `instance`, `random`, `plan` and `left` were set; LOOK only draws moves of the plan.
            choosy: Moves after which the score is no lower are taken back.
        """
        _ = stamp
        b, t, s = RefinementBank(*bank), Scratch(*scratch), RefinementState(*state)
        for n in range(len(rows)):
            e = rows[n]
            i, choice = s.instance[e], actions[e]
            groups, devices = b.shape[i, 0], b.shape[i, 1]
            s.reward[e], s.status[e] = 0.0, RUNNING
            if mode == STEP:
                if choice == 0 or not s.legal[e, choice]:
                    s.status[e] = STOPPED if choice == 0 else ILLEGAL
                    if choice > 0:
                        column = choice * NUM_FEATURES + COLUMN.pinned_target
                        s.reward[e] = -_score(UNFIT_S, max(0.0, np.float64(s.table[e, column]) - 1.0), 1.0)
                    _clear(s, e)
                    _show(b, s, e, most_moves)
                    continue
                t.trial[:groups] = s.plan[e, :groups]
                for m in range(s.ptr[e, choice - 1], s.ptr[e, choice]):
                    s.plan[e, s.groups[e, m]] = s.targets[e, m]
            parts = InstanceParts(
                _graph_of(b.graph, b.graph_layout, i),
                _work_of(t.work, t.work_layout, i),
                _tables_of(b.tables, b.tables_layout, i),
                _view_of(t.analysis, t.analysis_layout, i),
            )
            step_s, overflow = _simulate(t, s, e, parts, groups, devices)
            worth_s, excess = step_s, overflow
            if mode != LOOK and not np.isnan(s.measured[e, 0]):
                worth_s, excess = s.measured[e, 0], s.measured[e, 1]
            before, s.score[e] = s.score[e], _score(worth_s, excess, b.reference_s[i])
            kept = mode != STEP or not choosy or s.score[e] < before
            if kept:
                _analyse(b, t, s, e, parts, step_s, overflow)
                s.loads_s[e] = View(*parts.analysis).load.max()
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
                    _show(b, s, e, most_moves)
                    continue
                if not kept:
                    if s.legal[e, 1:].any():
                        _show(b, s, e, most_moves)
                        continue
                    step_s, overflow = _simulate(t, s, e, parts, groups, devices)
                    _analyse(b, t, s, e, parts, step_s, overflow)
            _offer(t, s, e, parts, groups)
            _show(b, s, e, most_moves)

    return refine


refine = _compile(stamp_of(analysis, banks, draw, features, guide, instances_of, movekernels, objective, records) ^ STAMP)
