"""Features of moves, compiled: the quantities of list schedulers, before and after the move.

Times are divided by the step time of the current plan, bytes by the memory limit of the device, and everything is clipped to
[-`CLIP`, `CLIP`].
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlplace.compiled import entry, inner, stamp_of
from rlplace.envs.guide import records
from rlplace.envs.guide.records import (
    BUSIEST,
    CHAIN_SENT,
    CHAIN_WAIT,
    CHAIN_WORK,
    CHANNEL,
    OVERFLOW,
    STEP,
    STRICT,
    TIGHT,
    WORK,
    AnalysisTables,
    MoveSet,
    View,
)  # fmt: skip


class MoveColumns(NamedTuple):
    """Columns of a move; those of the current plan are last."""

    busiest_change: int  # change of the largest load of the devices that the move touches
    congested_load: int  # change of loads, weighted by how loaded each device is
    work_change: int  # change of the sum of all loads: slower or quicker devices
    work: int  # mean time of the moved groups
    load_source: int  # largest load of a device that groups leave
    load_target: int  # largest load of a device that groups go to, after the move
    sent_change: int  # change of all transfer seconds
    congested_sent: int  # change of transfer seconds, weighted by how busy each channel is
    busiest_channel_change: int  # change of the largest load of the channels that the move touches
    near: int  # share of the moved groups' bytes that stays on a device after the move
    near_change: int  # its change
    peak_target: int  # largest peak of a target with what arrives, over its limit
    pinned_target: int  # the same for provable bytes
    relief: int  # bytes taken off devices that overflow
    chain_work: int  # time of the moved groups on the critical chain
    chain_joined: int  # transfers of the critical chain that the move makes local
    saved: int  # delays on the critical chain that the targets take away, see `View.saved`
    delay_worst: int  # largest transfer that the move makes necessary beyond the gap that it has
    delay_sum: int  # all of them
    gap_won: int  # largest gap of a transfer that the move makes local
    tightness: int  # largest tightness of a moved group
    wait: int  # waits for the device that the moved groups leave
    idle_target: int  # share of the groups' time in which the target idles
    slowdown: int  # log of time after over time before
    moved: int  # log2 of the number of moved groups, over 8
    depth: int  # where in the step the first moved group starts
    criticality: int  # static: longest path through a moved group over the longest path
    clash_target: int  # devices' share of work without slack that runs on the target in the groups' time
    crowd: int  # other devices that run work without slack in the groups' time: shortening one chain of several gains nothing
    blocked: int  # waits on the critical chain of or behind the moved groups
    overdue_worst: int  # largest transfer that the move makes necessary beyond the gap and the slack behind it
    overdue_sum: int  # all of them
    excess: int  # how much longer than the step the longest path through the moved groups gets, by gaps and slack
    strict_clash_target: int  # like `clash_target`, counting less slack
    strict_crowd: int  # like `crowd`, counting less slack
    urgent: int  # time of the moved groups that has no slack
    queue: int  # how long tasks without slack wait behind the moved groups
    hurried_joined: int  # transfers without slack that the move makes local
    is_run: int
    is_cluster: int
    is_swap: int
    is_device: int
    plan_busy: int  # largest load over the step time
    plan_used: int  # sum of loads over step time and number of devices
    plan_channel: int  # most loaded channel over the step time
    plan_chain_work: int  # work on the critical chain over the step time
    plan_chain_wait: int  # waits for devices on it
    plan_chain_sent: int  # transfers on it
    plan_overflow: int  # relative memory overflow
    plan_pressure: int  # provable bytes over all memory
    plan_devices: int  # over 8
    plan_groups: int  # log2 over 8


FEATURES = MoveColumns._fields
NUM_FEATURES = len(FEATURES)
COLUMN = MoveColumns(*range(NUM_FEATURES))
CLIP = 8.0


@inner
def _crossing_s(f, edge, a, b):
    """Returns the seconds that the values of an edge take from one device to another."""
    return f.edge_count[edge] * f.latency[a, b] + f.edge_bytes[edge] * f.inverse[a, b] + f.edge_fixed_s[edge]


def _compile(stamp):
    @entry
    def move_features(facts, view, plan, moves, count, trial, out):
        """Fills `out` float32 [K, F] for the first `count` moves.

        Args:
            facts, view, moves: `AnalysisTables`, `View` and `MoveSet` as plain tuples.
            plan: int32 [G], device of each group.
            count: Number of moves.
            trial: int32 [G], equal to the plan before and after; a buffer.
            out: float32 [>= count, NUM_FEATURES].
        """
        _ = stamp
        f, v, m, c = AnalysisTables(*facts), View(*view), MoveSet(*moves), COLUMN
        ptr, groups, targets, kinds = m.ptr, m.groups, m.targets, m.kinds
        devices = len(v.load)
        step = max(v.total[STEP], 1e-30)
        load, arriving, pinned = np.zeros(devices), np.zeros(devices), np.zeros(devices)
        touched = np.zeros(devices, dtype=np.bool_)
        pair_s, pairs = np.zeros(devices * devices), np.zeros(devices * devices, dtype=np.int64)
        channel_s, held = np.zeros(len(v.channel)), np.zeros(len(v.channel), dtype=np.int64)
        listed, holds = np.zeros(devices * devices, dtype=np.bool_), np.zeros(len(v.channel), dtype=np.bool_)
        capacity, all_pinned = 0.0, 0.0
        for d in range(devices):
            capacity += f.limit[d]
            all_pinned += v.pinned[d]
        for k in range(count):
            row = out[k]
            row[:] = 0.0
            begin, stop = ptr[k], ptr[k + 1]
            load[:], arriving[:], pinned[:], touched[:] = 0.0, 0.0, 0.0, False
            before_s, after_s, work = 0.0, 0.0, 0.0
            chain, tight, wait, idle, crit, saved = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
            clash, crowd, blocked, slack = 0.0, 0.0, 0.0, np.inf
            strict_clash, strict_crowd, urgent, queue, hurried = 0.0, 0.0, 0.0, 0.0, 0.0
            for i in range(begin, stop):
                g, d = groups[i], targets[i]
                source = plan[g]
                trial[g] = d
                load[source] -= f.time_s[g, source]
                load[d] += f.time_s[g, d]
                arriving[source] -= f.footprint[g]
                arriving[d] += f.footprint[g]
                pinned[source] -= f.pinned_bytes[g]
                pinned[d] += f.pinned_bytes[g]
                touched[source] = touched[d] = True
                before_s += f.time_s[g, source]
                after_s += f.time_s[g, d]
                work += f.mean_time_s[g]
                chain += v.chain[g]
                saved += v.saved[g, d]
                tight, crit = max(tight, v.tightness[g]), max(crit, f.criticality[g])
                wait += v.wait[g]
                idle += v.idle[g, d] * f.mean_time_s[g]
                clash += v.clash[TIGHT, g, d] * f.mean_time_s[g]
                crowd += v.crowd[TIGHT, g] * f.mean_time_s[g]
                strict_clash += v.clash[STRICT, g, d] * f.mean_time_s[g]
                strict_crowd += v.crowd[STRICT, g] * f.mean_time_s[g]
                urgent += v.urgent[g]
                queue += v.queue[g]
                blocked += v.blocked[g]
                slack = min(slack, v.slack[g])
            sent, near_before, near_after, total_bytes = 0.0, 0.0, 0.0, 0.0
            joined, worst, delays, won, num_pairs = 0.0, 0.0, 0.0, 0.0, 0
            late_in, late_out, overdue, all_overdue = 0.0, 0.0, 0.0, 0.0
            for i in range(begin, stop):
                g = groups[i]
                for n in range(f.neighbor_ptr[g], f.neighbor_ptr[g + 1]):
                    other = f.neighbor[n]
                    inside = trial[other] != plan[other]
                    if inside and other < g:
                        continue  # counted from the other end
                    e = f.neighbor_edge[n]
                    old_a, old_b, new_a, new_b = plan[g], plan[other], trial[g], trial[other]
                    if not f.neighbor_out[n]:
                        old_a, old_b, new_a, new_b = old_b, old_a, new_b, new_a
                    total_bytes += f.edge_bytes[e]
                    # A value is sent once to a device, however many groups read it there.
                    share_was = share_now = v.part[e]
                    reads, sends = not inside and not f.neighbor_out[n], not inside and f.neighbor_out[n]
                    if reads:
                        share_was, share_now = 1.0 - v.shared[e, old_b], 1.0 - v.shared[e, new_b]
                    was_s = 0.0
                    if old_a != old_b:
                        was_s = _crossing_s(f, e, old_a, old_b)
                        pair = old_a * devices + old_b
                        if not listed[pair]:
                            listed[pair] = True
                            pairs[num_pairs] = pair
                            num_pairs += 1
                        pair_s[pair] -= share_was * was_s
                    else:
                        near_before += f.edge_bytes[e]
                    if new_a != new_b:
                        now_s = _crossing_s(f, e, new_a, new_b)
                        pair = new_a * devices + new_b
                        if not listed[pair]:
                            listed[pair] = True
                            pairs[num_pairs] = pair
                            num_pairs += 1
                        pair_s[pair] += share_now * now_s
                        sent += share_now * now_s - share_was * was_s
                        if reads:
                            now_s *= share_now  # what others read there arrives anyway
                        late = now_s - was_s - max(v.gap[e] - was_s, 0.0)
                        if late > 0.0:
                            worst = max(worst, late)
                            delays += late
                            if sends:
                                late_out = max(late_out, late)
                            elif reads:
                                late_in = max(late_in, late)
                        late = now_s - was_s - max(v.margin[e] - was_s, 0.0)
                        if late > 0.0:
                            overdue = max(overdue, late)
                            all_overdue += late
                    else:
                        near_after += f.edge_bytes[e]
                        sent -= share_was * was_s
                        if old_a != old_b:
                            joined += v.sent[e]
                            hurried += v.hurried[e]
                            won = max(won, min(v.gap[e], was_s))
            congested, top_before, top_after, num_held = 0.0, 0.0, 0.0, 0
            for p in range(num_pairs):
                pair = pairs[p]
                for n in range(f.channel_ptr[pair], f.channel_ptr[pair + 1]):
                    channel = f.channels[n]
                    if not holds[channel]:
                        holds[channel] = True
                        held[num_held] = channel
                        num_held += 1
                    channel_s[channel] += pair_s[pair]
                pair_s[pair], listed[pair] = 0.0, False
            for h in range(num_held):
                channel = held[h]
                congested += channel_s[channel] * v.channel[channel]
                top_before = max(top_before, v.channel[channel])
                top_after = max(top_after, v.channel[channel] + channel_s[channel])
                channel_s[channel], holds[channel] = 0.0, False
            loaded, busiest_before, busiest_after, congested_load = 0.0, 0.0, 0.0, 0.0
            source_load, peak, pin, relief = 0.0, 0.0, 0.0, 0.0
            for d in range(devices):
                if touched[d]:
                    busiest_before = max(busiest_before, v.load[d])
                    busiest_after = max(busiest_after, v.load[d] + load[d])
                    congested_load += load[d] * v.load[d]
                    if load[d] < 0:
                        source_load = max(source_load, v.load[d])
                    if load[d] > 0:
                        loaded = max(loaded, v.load[d] + load[d])
                    if f.limit[d] < np.inf:
                        if load[d] > 0 or arriving[d] > 0 or pinned[d] > 0:
                            peak = max(peak, (v.peak[d] + arriving[d]) / f.limit[d])
                            pin = max(pin, (v.pinned[d] + pinned[d]) / f.limit[d])
                        if v.peak[d] > f.limit[d] and arriving[d] < 0:
                            relief += min(-arriving[d], v.peak[d] - f.limit[d]) / f.limit[d]
            row[c.busiest_change] = (busiest_after - busiest_before) / step
            row[c.congested_load] = congested_load / (step * step)
            row[c.work_change] = (after_s - before_s) / step
            row[c.work] = work / step
            row[c.load_source] = source_load / step
            row[c.load_target] = loaded / step
            row[c.sent_change] = sent / step
            row[c.congested_sent] = congested / (step * step)
            row[c.busiest_channel_change] = (top_after - top_before) / step
            row[c.near] = near_after / total_bytes if total_bytes > 0 else 0.0
            row[c.near_change] = (near_after - near_before) / total_bytes if total_bytes > 0 else 0.0
            row[c.peak_target] = peak
            row[c.pinned_target] = pin
            row[c.relief] = relief
            row[c.chain_work] = chain / step
            row[c.chain_joined] = joined / step
            row[c.saved] = saved / step
            row[c.delay_worst] = worst / step
            row[c.delay_sum] = delays / step
            row[c.gap_won] = won / step
            row[c.tightness] = tight
            row[c.wait] = wait / step
            row[c.idle_target] = idle / work if work > 0 else 0.0
            row[c.slowdown] = np.log(max(after_s, 1e-12) / max(before_s, 1e-12))
            row[c.moved] = np.log2(float(stop - begin)) / 8.0
            row[c.depth] = f.depth[groups[begin]]
            row[c.criticality] = crit
            row[c.clash_target] = clash / work if work > 0 else 0.0
            row[c.crowd] = crowd / work if work > 0 else 0.0
            row[c.blocked] = blocked / step
            row[c.overdue_worst] = overdue / step
            row[c.overdue_sum] = all_overdue / step
            row[c.excess] = (late_in + late_out + (after_s - before_s) - slack) / step
            row[c.strict_clash_target] = strict_clash / work if work > 0 else 0.0
            row[c.strict_crowd] = strict_crowd / work if work > 0 else 0.0
            row[c.urgent] = urgent / step
            row[c.queue] = queue / step
            row[c.hurried_joined] = hurried / step
            if kinds[k] > 0:
                row[c.is_run - 1 + min(kinds[k], 4)] = 1.0
            row[c.plan_busy] = v.total[BUSIEST] / step
            row[c.plan_used] = v.total[WORK] / (step * devices)
            row[c.plan_channel] = v.total[CHANNEL] / step
            row[c.plan_chain_work] = v.total[CHAIN_WORK] / step
            row[c.plan_chain_wait] = v.total[CHAIN_WAIT] / step
            row[c.plan_chain_sent] = v.total[CHAIN_SENT] / step
            row[c.plan_overflow] = v.total[OVERFLOW]
            row[c.plan_pressure] = all_pinned / capacity
            row[c.plan_devices] = devices / 8.0
            row[c.plan_groups] = np.log2(len(plan)) / 8.0
            for i in range(begin, stop):
                trial[groups[i]] = plan[groups[i]]
            for i in range(len(row)):
                row[i] = min(max(row[i], -CLIP), CLIP)

    return move_features


move_features = _compile(stamp_of(records))
