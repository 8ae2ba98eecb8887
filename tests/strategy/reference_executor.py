"""The block executor, plainly: step time of a draft, rule by rule as docs/cost-model/strategy.md states them.

`rlplace.strategy.kernel` is compiled and agrees to rounding. `reference_blocks` says what blocks take on their places,
`reference_memory` has the rules for memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from reference_blocks import Block, place_blocks
from reference_memory import device_bytes, host_bytes, stage_bytes
from reference_stages import Work, exchange_s, single_stage, stage_action

from rlplace.actions import Action
from rlplace.cluster import Cluster
from rlplace.strategy.beside import side_by_side
from rlplace.strategy.costs import BlockCosts
from rlplace.strategy.drafts import Draft
from rlplace.strategy.evaluation import PARTS, Evaluation, bytes_over
from rlplace.strategy.meshes import Lane, borders, check_draft, copy_groups, lanes, stage_actions
from rlplace.strategy.ties import tie_exchanges
from rlplace.strategy.traffic import Traffic, Way


def evaluate_reference(draft: Draft, costs: BlockCosts, cluster: Cluster, traffic: Traffic | None = None) -> Evaluation:
    """Step time and memory of a draft.

    Raises:
        InputError: The draft contradicts itself, its schedule cannot run it, or a pass cannot be cut as it says.
    """
    traffic = traffic or Traffic(cluster)
    if draft.beside:
        alone = [evaluate_reference(one, costs, cluster, traffic) for one in draft.pipelines]
        return side_by_side(draft, alone, costs, traffic)
    check_draft(draft, cluster, len(costs.names))
    places = range(len(draft.places))
    works: list[Work] = [Work() for _ in places]
    ends, updates = [0.0 for _ in places], [[0.0] for _ in places]
    stage_busy, stage_memory = [0.0] * draft.stages, [0.0] * draft.stages
    peaks, hosts = [0.0] * cluster.num_devices, [0.0] * (max(cluster.hosts) + 1)
    ways = traffic.ways(borders(draft))
    for lane in lanes(draft):
        rows = [place_blocks(draft, place, lane, costs, cluster, traffic) for place in places]
        busy = [0.0] * draft.stages
        if draft.stages == 1:
            ran = [single_stage(rows[0], lane.microbatches, traffic.table("all_reduce", copy_groups(draft.places[0])))]
            busy = [ran[0].compute + ran[0].tensor + ran[0].gather + ran[0].exchange]
            leaving = [[0.0] * (2 * lane.microbatches)]
        else:
            ran, leaving = pipeline(draft, lane, rows, ways, busy)
        stage_busy = [max(pair) for pair in zip(stage_busy, busy, strict=True)]
        stage_memory = [max(pair) for pair in zip(stage_memory, stage_bytes(draft, lane, rows), strict=True)]
        for place in places:
            own = draft.blocks_of(place)
            ends[place] = max(ends[place], ran[place].end_s)
            updated = [rows[place][block].update_s for block in own]
            if sum(updated) >= sum(updates[place]):
                updates[place] = updated
            if ran[place].compute + ran[place].tensor > works[place].compute + works[place].tensor:
                works[place] = ran[place]
            used = device_bytes(draft, place, lane, rows[place], leaving[place])
            for _, devices in lane.replicas[place]:
                for device in devices:
                    peaks[device] = cluster.devices[device].reserved_bytes + used
                    hosts[cluster.hosts[device]] += sum(host_bytes(rows[place][block]) for block in own)
    for seconds, involved in tie_exchanges(draft, costs, traffic):
        together = max(ends[place] for place in involved) + seconds
        for place in involved:
            ends[place] = together
            works[place].exchange += seconds
    step = max(end + sum(update) for end, update in zip(ends, updates, strict=True))
    busiest = max(places, key=lambda place: works[place].compute + works[place].tensor)
    stages = [stage for stage, place in enumerate(draft.place_of_stage) if place == busiest]
    work = works[busiest]
    spent = [work.compute, work.tensor, work.gather, work.exchange, work.hand_over, 0.0, sum(updates[busiest])]
    spent[PARTS.index("bubble")] = max(0.0, step - sum(spent))
    over = bytes_over(peaks, cluster)
    return Evaluation(
        step_time_s=step,
        passes_s=max(ends) if step < math.inf else step,
        feasible=over == 0.0 and step < math.inf,
        peak_memory_bytes=tuple(math.ceil(peak) for peak in peaks),
        host_bytes=tuple(math.ceil(size) for size in hosts),
        over_bytes=over,
        parts=dict(zip(PARTS, spent, strict=True)),
        bottleneck=max(stages, key=lambda stage: stage_busy[stage]),
        stage_busy_s=tuple(stage_busy),
        stage_memory_bytes=tuple(math.ceil(size) for size in stage_memory),
    )


def pipeline(
    draft: Draft,
    lane: Lane,
    rows: Sequence[Sequence[Block]],
    ways: Mapping[tuple[int, int], Way],
    stage_busy: list[float],
) -> tuple[list[Work], list[list[float]]]:
    """Runs the actions of all places: one at a time on each, as soon as what it reads has come.

    Of all places' next actions the one that ends first is run, so that tensors are sent in order of time. A hand-over waits for
    its channels, first come, first served.

    Args:
        draft: Several stages.
        lane: One of its lanes.
        rows: For each place all blocks.
        ways: How places hand tensors over.
        stage_busy: For each stage its seconds; this lane's are added.

    Returns:
        What places spend, and for each of their actions the bytes of gradients that they are still sending.
    """
    ranges = draft.ranges
    stages = [rows[place][blocks.start : blocks.stop] for place, blocks in zip(draft.place_of_stage, ranges, strict=True)]
    waiting = [deque(actions) for actions in stage_actions(draft, lane.microbatches)]
    works = [Work() for _ in draft.places]
    arrived: dict[tuple[int, str, int], tuple[float, float]] = {}  # (stage, way, micro-batch): when, and how long it travelled
    channel_free: dict[int, float] = {}
    backwards = [lane.microbatches] * draft.stages
    going: list[deque[tuple[float, float]]] = [deque() for _ in works]  # gradients on their way: until when, bytes
    leaving: list[list[float]] = [[] for _ in works]

    def awaited(action: Action) -> tuple[float, float] | None:
        """When what an action waits for arrives, and how long it travels; None while it has not been sent."""
        if action.kind == "F" and action.stage > 0:
            return arrived.get((action.stage, "F", action.microbatch))
        if action.kind in "BI" and action.stage < draft.stages - 1:
            return arrived.get((action.stage, "B", action.microbatch))
        return 0.0, 0.0

    def send(source: int, target: int, way: str, microbatch: int, size: float, now: float) -> None:
        here, there = draft.place_of_stage[source], draft.place_of_stage[target]
        if here == there:
            arrived[target, way, microbatch] = now, 0.0
            return
        latency, s_per_byte, part, channels = ways[here, there]
        took = latency + (size * part * s_per_byte if size > 0.0 else 0.0)
        start = max(now, *(channel_free.get(channel, 0.0) for channel in channels)) if channels else now
        channel_free.update(dict.fromkeys(channels, start + took))
        arrived[target, way, microbatch] = start + took, took
        if way == "B":
            going[here].append((start + took, size))

    while True:
        ends = []
        for place, work in enumerate(works):
            if waiting[place] and (came := awaited(waiting[place][0])) is not None:
                stage, kind, microbatch = waiting[place][0]
                ends.append((max(work.end_s, came[0]) + sum(stage_action(stages[stage], kind, microbatch == 0)), place))
        now, place = min(ends, default=(math.inf, 0))
        if now == math.inf:
            break
        action, work = waiting[place].popleft(), works[place]
        stage, kind, microbatch = action
        ready, travelled = awaited(action) or (0.0, 0.0)
        work.hand_over += min(max(0.0, ready - work.end_s), travelled)
        compute, tensor, gather = stage_action(stages[stage], kind, microbatch == 0)
        while going[place] and going[place][0][0] <= (now if kind == "F" else now - (compute + tensor + gather)):
            going[place].popleft()
        leaving[place].append(sum(size for _, size in going[place]))
        work.compute += compute
        work.tensor += tensor
        work.gather += gather
        stage_busy[stage] += compute + tensor + gather
        if kind == "F" and stage < draft.stages - 1:
            send(stage, stage + 1, "F", microbatch, stages[stage][-1].sent_bytes, now)
        if kind in "BI" and stage > 0:
            send(stage, stage - 1, "B", microbatch, rows[place][ranges[stage].start - 1].returned_bytes, now)
        if kind in "BW":
            backwards[stage] -= 1
            if backwards[stage] == 0:
                exchange = exchange_s(stages[stage])
                now += exchange
                work.exchange += exchange
                stage_busy[stage] += exchange
        work.end_s = now
    if any(waiting):
        works[0].end_s = math.inf  # what they wait for never comes
        leaving = [sends + [0.0] * len(rest) for sends, rest in zip(leaving, waiting, strict=True)]
    return works, leaving
