"""Runs of the compiled simulator that go on from a saved state, after a few groups have moved.

Nothing that happens before the first of a group's inputs is there depends on where the group sits, but for its resident bytes,
and those shift the memory of a device and its peak by a constant. So the state of a run is saved at a few moments, and the run
after a move begins at the last of them before that one. The result is that of a whole run, bit for bit.
"""

# mypy: allow-untyped-defs, disable-error-code="assignment"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rlplace.compiled import entry, inner
from rlplace.simulator import records as r
from rlplace.simulator.fast import STAMP, begin, report, reset
from rlplace.simulator.loop import DONE, PAUSED, run
from rlplace.simulator.queues import part


class State(NamedTuple):
    """What changes while a run goes on: views of the records of a `Work`, 8 bytes a word."""

    value: Any  # uint64 [V + 1, 4], the second half changes
    slot: Any  # uint64 [3 * slots]
    event: Any  # uint64 [2 * events]
    device: Any  # uint64 [5 * D]
    channel: Any  # uint64 [channels]
    ready: Any  # uint64 [.]


class Saved(NamedTuple):
    """Saved states. Axis: C checkpoints."""

    now_s: Any  # float64 [C]
    clock: Any  # int64 [C, 7]
    words: Any  # uint64 [C, .], the used parts of `State`, one after another
    halves: Any  # uint32 [C, .], the used parts of `Work.words`


def state_of(work: r.Work) -> State:
    """Views of the buffers of a run."""
    parts = (work.value, work.slot, work.event, work.device, work.channel, work.ready)
    value, *rest = (np.asarray(part).reshape(-1).view(np.uint64) for part in parts)
    return State(value.reshape(-1, 4), *rest)


def saved_for(work: r.Work, checkpoints: int) -> Saved:
    """Room for the states of a run; memory is taken when it is used."""
    state = state_of(work)
    words = state.value.size // 2 + sum(array.size for array in state[1:])
    halves = int(work.layout[r.GATE_PTR])
    return Saved(
        np.zeros(checkpoints),
        np.zeros((checkpoints, r.FOUND + 1 - r.KEY), dtype=np.int64),
        np.empty((checkpoints, words), dtype=np.uint64),
        np.empty((checkpoints, halves), dtype=np.uint32),
    )


@inner
def _copy(target, at, source, begin, count):
    """Copies `count` items; returns where the next ones go."""
    for i in range(count):
        target[at + i] = source[begin + i]
    return at + count


@inner
def _save(g, w, state, saved, number):
    """Saves where a run stands."""
    clock, layout, words, halves = saved.clock[number], w.layout, saved.words[number], saved.halves[number]
    _copy(clock, 0, layout, r.KEY, len(clock))
    value = state.value
    for v in range(len(value)):
        words[2 * v], words[2 * v + 1] = value[v, 2], value[v, 3]
    at = _copy(words, 2 * len(value), state.slot, 0, 3 * layout[r.SLOTS])
    at = _copy(words, at, state.event, 0, 2 * layout[r.EVENTS])
    at = _copy(words, at, state.device, 0, len(state.device))
    at = _copy(words, at, state.channel, 0, len(state.channel))
    _copy(words, at, state.ready, 0, len(state.ready))
    waits, following, absent = part(w, r.WAITS), part(w, r.FOLLOWING), part(w, r.ABSENT)
    at = _copy(halves, 0, waits, 0, len(waits))
    at = _copy(halves, at, following, 0, layout[r.SLOTS] * g.layout[r.WIDTH])
    _copy(halves, at, absent, 0, len(absent))


@inner
def _restore(g, w, state, saved, number):
    """Brings back where a run stood; the order of parts is that of `_save`."""
    clock, layout, words, halves = saved.clock[number], w.layout, saved.words[number], saved.halves[number]
    _copy(layout, r.KEY, clock, 0, len(clock))
    value = state.value
    for v in range(len(value)):
        value[v, 2], value[v, 3] = words[2 * v], words[2 * v + 1]
    at = 2 * len(value)
    for target, count in (
        (state.slot, 3 * layout[r.SLOTS]),
        (state.event, 2 * layout[r.EVENTS]),
        (state.device, len(state.device)),
        (state.channel, len(state.channel)),
        (state.ready, len(state.ready)),
    ):
        _copy(target, 0, words, at, count)
        at += count
    waits, following, absent = part(w, r.WAITS), part(w, r.FOLLOWING), part(w, r.ABSENT)
    _copy(waits, 0, halves, 0, len(waits))
    at, count = len(waits), layout[r.SLOTS] * g.layout[r.WIDTH]
    _copy(following, 0, halves, at, count)
    _copy(absent, 0, halves, at + count, len(absent))


@inner
def _shift_memory(g, w, device_of_group, sign):
    """Adds or takes away what groups have resident, so that saved states fit every plan that they may be continued for."""
    device, sizes = w.device, g.bytes
    for group, d in enumerate(device_of_group):
        device[d].memory += sign * sizes[group]
        device[d].peak += sign * sizes[group]


def _compile(stamp):
    """The function that is called from outside, with the stamp as an enclosed value."""

    @entry(nogil=True)
    def run_from(graph, work, state, saved, ranks, device_of_group, pauses, first, peak, busy_s):
        """Simulates a plan from a saved state on.

        Args:
            graph: As in `fast.simulate_plans`.
            work: Likewise.
            state: `state_of(work)`, as a plain tuple.
            saved: A `Saved`, as a plain tuple.
            ranks: As in `fast.simulate_plans`.
            device_of_group: uint32 [G], every number a device.
            pauses: int64, ascending: the state is saved as soon as so many tasks have ended; empty to save nothing.
            first: Row of `saved` to go on from, -1 for none. Later rows are filled.
            peak: int64 [D], bytes, filled.
            busy_s: float64 [D], filled.

        Returns:
            Outcome, step time (inf unless DONE), memory overflow relative to the limits, number of states saved by now.
        """
        _ = stamp
        g, w, s, kept = r.Graph(*graph), r.Work(*work), State(*state), Saved(*saved)
        now, count = 0.0, first + 1
        reset(g, w, device_of_group)
        if first < 0:
            begin(g, w, ranks, device_of_group, device_of_group)
        else:
            now = kept.now_s[first]
            _restore(g, w, s, kept, first)
            _shift_memory(g, w, device_of_group, 1)
        result = PAUSED
        while result == PAUSED:
            pause = pauses[count] if count < len(pauses) else np.iinfo(np.int64).max
            result, now = run(g, w, ranks, device_of_group, device_of_group, False, now, pause)
            if result == PAUSED:
                kept.now_s[count] = now
                _shift_memory(g, w, device_of_group, -1)
                _save(g, w, s, kept, count)
                _shift_memory(g, w, device_of_group, 1)
                count += 1
        if result != DONE:
            reset(g, w, device_of_group)
        overflow = report(g, w, peak, busy_s)
        return result, now if result == DONE else np.inf, overflow, count

    return run_from


run_from = _compile(STAMP)
