"""Features of moves, compiled: the quantities of list schedulers, before and after the move.

Times are divided by the step time of the current plan, bytes by the memory limit of the device, and everything is clipped to
[-`CLIP`, `CLIP`].
"""

# Compiled functions take their types from their arguments.
# mypy: disable-error-code="no-untyped-def, assignment"
from __future__ import annotations

import numpy as np

from rlplace.compiled import entry, inner, stamp_of
from rlplace.envs.guide import facts, pressure, view
from rlplace.envs.guide.facts import Facts
from rlplace.envs.guide.pressure import STRICT, TIGHT
from rlplace.envs.guide.view import BUSIEST, CHAIN_SENT, CHAIN_WAIT, CHAIN_WORK, CHANNEL, OVERFLOW, STEP, WORK, View

MOVE_FEATURES = (
    "busiest_change",  # change of the largest load of the devices that the move touches
    "congested_load",  # change of loads, weighted by how loaded each device is
    "work_change",  # change of the sum of all loads: slower or quicker devices
    "work",  # mean time of the moved groups
    "load_source",  # largest load of a device that groups leave
    "load_target",  # largest load of a device that groups go to, after the move
    "sent_change",  # change of all transfer seconds
    "congested_sent",  # change of transfer seconds, weighted by how busy each channel is
    "busiest_channel_change",  # change of the largest load of the channels that the move touches
    "near",  # share of the moved groups' bytes that stays on a device after the move
    "near_change",  # its change
    "peak_target",  # largest peak of a target with what arrives, over its limit
    "pinned_target",  # the same for provable bytes
    "relief",  # bytes taken off devices that overflow
    "chain_work",  # time of the moved groups on the critical chain
    "chain_joined",  # transfers of the critical chain that the move makes local
    "saved",  # delays on the critical chain that the targets take away, see `View.saved`
    "delay_worst",  # largest transfer that the move makes necessary beyond the gap that it has
    "delay_sum",  # all of them
    "gap_won",  # largest gap of a transfer that the move makes local
    "tightness",  # largest tightness of a moved group
    "wait",  # waits for the device that the moved groups leave
    "idle_target",  # share of the groups' time in which the target idles
    "slowdown",  # log of time after over time before
    "moved",  # log2 of the number of moved groups, over 8
    "depth",  # where in the step the first moved group starts
    "criticality",  # static: longest path through a moved group over the longest path
    "clash_target",  # devices' share of work without slack that runs on the target in the groups' time
    "crowd",  # other devices that run work without slack in the groups' time: shortening one chain of several gains nothing
    "blocked",  # waits on the critical chain of or behind the moved groups
    "overdue_worst",  # largest transfer that the move makes necessary beyond the gap and the slack behind it
    "overdue_sum",  # all of them
    "excess",  # how much longer than the step the longest path through the moved groups gets, by gaps and slack
    "strict_clash_target",  # like `clash_target`, counting less slack
    "strict_crowd",  # like `crowd`, counting less slack
    "urgent",  # time of the moved groups that has no slack
    "queue",  # how long tasks without slack wait behind the moved groups
    "hurried_joined",  # transfers without slack that the move makes local
    "is_run",
    "is_cluster",
    "is_swap",
    "is_device",
)
PLAN_FEATURES = (
    "busy",  # largest load over the step time
    "used",  # sum of loads over step time and number of devices
    "channel",  # most loaded channel over the step time
    "chain_work",  # work on the critical chain over the step time
    "chain_wait",  # waits for devices on it
    "chain_sent",  # transfers on it
    "overflow",  # relative memory overflow
    "pressure",  # provable bytes over all memory
    "devices",  # over 8
    "groups",  # log2 over 8
)
FEATURES = MOVE_FEATURES + tuple(f"plan_{name}" for name in PLAN_FEATURES)
NUM_FEATURES = len(FEATURES)
CLIP = 8.0


@inner
def _crossing_s(f, edge, a, b):
    """Seconds that the values of an edge take from one device to another."""
    return f.edge_count[edge] * f.latency[a, b] + f.edge_bytes[edge] * f.inverse[a, b] + f.edge_fixed_s[edge]


def _compile(stamp):
    @entry
    def move_features(facts, view, plan, ptr, groups, targets, kinds, count, trial, out):
        """Fills `out` float32 [K, F] for the first `count` moves.

        Args:
            facts, view: `Facts` and `View` as plain tuples.
            plan: int32 [G], device of each group.
            ptr, groups, targets, kinds: The moves, in the form of `rlplace.envs.guide.draw.draw_moves`.
            count: Number of moves.
            trial: int32 [G], equal to the plan before and after; a buffer.
            out: float32 [>= count, NUM_FEATURES].
        """
        _ = stamp
        f, v = Facts(*facts), View(*view)
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
        first = len(MOVE_FEATURES)
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
                load[source] -= f.group_s[g, source]
                load[d] += f.group_s[g, d]
                arriving[source] -= f.footprint[g]
                arriving[d] += f.footprint[g]
                pinned[source] -= f.pinned[g]
                pinned[d] += f.pinned[g]
                touched[source] = touched[d] = True
                before_s += f.group_s[g, source]
                after_s += f.group_s[g, d]
                work += f.mean_s[g]
                chain += v.chain[g]
                saved += v.saved[g, d]
                tight, crit = max(tight, v.tightness[g]), max(crit, f.criticality[g])
                wait += v.wait[g]
                idle += v.idle[g, d] * f.mean_s[g]
                clash += v.clash[TIGHT, g, d] * f.mean_s[g]
                crowd += v.crowd[TIGHT, g] * f.mean_s[g]
                strict_clash += v.clash[STRICT, g, d] * f.mean_s[g]
                strict_crowd += v.crowd[STRICT, g] * f.mean_s[g]
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
                for c in range(f.channel_ptr[pair], f.channel_ptr[pair + 1]):
                    channel = f.channels[c]
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
            row[0] = (busiest_after - busiest_before) / step
            row[1] = congested_load / (step * step)
            row[2] = (after_s - before_s) / step
            row[3] = work / step
            row[4] = source_load / step
            row[5] = loaded / step
            row[6] = sent / step
            row[7] = congested / (step * step)
            row[8] = (top_after - top_before) / step
            row[9] = near_after / total_bytes if total_bytes > 0 else 0.0
            row[10] = (near_after - near_before) / total_bytes if total_bytes > 0 else 0.0
            row[11] = peak
            row[12] = pin
            row[13] = relief
            row[14] = chain / step
            row[15] = joined / step
            row[16] = saved / step
            row[17] = worst / step
            row[18] = delays / step
            row[19] = won / step
            row[20] = tight
            row[21] = wait / step
            row[22] = idle / work if work > 0 else 0.0
            row[23] = np.log(max(after_s, 1e-12) / max(before_s, 1e-12))
            row[24] = np.log2(float(stop - begin)) / 8.0
            row[25] = f.depth[groups[begin]]
            row[26] = crit
            row[27] = clash / work if work > 0 else 0.0
            row[28] = crowd / work if work > 0 else 0.0
            row[29] = blocked / step
            row[30] = overdue / step
            row[31] = all_overdue / step
            row[32] = (late_in + late_out + (after_s - before_s) - slack) / step
            row[33] = strict_clash / work if work > 0 else 0.0
            row[34] = strict_crowd / work if work > 0 else 0.0
            row[35] = urgent / step
            row[36] = queue / step
            row[37] = hurried / step
            if kinds[k] > 0:
                row[37 + min(kinds[k], 4)] = 1.0
            row[first] = v.total[BUSIEST] / step
            row[first + 1] = v.total[WORK] / (step * devices)
            row[first + 2] = v.total[CHANNEL] / step
            row[first + 3] = v.total[CHAIN_WORK] / step
            row[first + 4] = v.total[CHAIN_WAIT] / step
            row[first + 5] = v.total[CHAIN_SENT] / step
            row[first + 6] = v.total[OVERFLOW]
            row[first + 7] = all_pinned / capacity
            row[first + 8] = devices / 8.0
            row[first + 9] = np.log2(len(plan)) / 8.0
            for i in range(begin, stop):
                trial[groups[i]] = plan[groups[i]]
            for i in range(len(row)):
                row[i] = min(max(row[i], -CLIP), CLIP)

    return move_features


move_features = _compile(stamp_of(facts, pressure, view))
