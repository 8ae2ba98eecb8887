"""The block executor, plainly: step time of a draft, rule by rule as `rlplace.strategy.executor` states them.

`rlplace.strategy.executor.kernel` is compiled and agrees to rounding. `reference_blocks` says what blocks take on their places,
`reference_memory` has the rules for memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from rlplace.cluster import Cluster
from rlplace.plan.actions import Action
from rlplace.strategy.costs import BlockCosts
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.evaluate import PARTS, StepEvaluation, bytes_over, side_by_side
from rlplace.strategy.executor.meshes import Lane, borders, check_draft, copy_groups, lanes, stage_actions
from rlplace.strategy.executor.traffic import Traffic, Way, tie_exchanges
from tests.strategy.reference_blocks import Block, place_blocks
from tests.strategy.reference_memory import device_bytes, host_bytes
from tests.strategy.reference_stages import Work, exchange_s, single_stage, stage_action


def evaluate_reference(draft: Draft, costs: BlockCosts, cluster: Cluster, traffic: Traffic | None = None) -> StepEvaluation:
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
    stage_busy = [0.0] * draft.stages
    peaks, hosts = [0.0] * cluster.num_devices, [0.0] * (max(cluster.hosts) + 1)
    ways = traffic.ways(borders(draft))
    together = lanes(draft)
    rows_of = [[place_blocks(draft, place, lane, costs, cluster, traffic) for place in places] for lane in together]
    if draft.stages == 1:
        table = traffic.table("all_reduce", copy_groups(draft.places[0]))
        done = [[single_stage(rows[0], lane.microbatches, table)] for lane, rows in zip(together, rows_of, strict=True)]
        busy_of = [[ran[0].compute + ran[0].tensor + ran[0].gather + ran[0].exchange] for ran in done]
        sends = [[[0.0] * (2 * lane.microbatches)] for lane in together]
    else:
        done, busy_of, sends = pipeline(draft, together, rows_of, ways)
    for lane, rows, ran, busy, leaving in zip(together, rows_of, done, busy_of, sends, strict=True):
        stage_busy = [max(pair) for pair in zip(stage_busy, busy, strict=True)]
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
    return StepEvaluation(
        step_time_s=step,
        passes_s=max(ends) if step < math.inf else step,
        feasible=over == 0.0 and step < math.inf,
        peak_memory_bytes=tuple(math.ceil(peak) for peak in peaks),
        host_bytes=tuple(math.ceil(size) for size in hosts),
        over_bytes=over,
        parts=dict(zip(PARTS, spent, strict=True)),
        bottleneck=max(stages, key=lambda stage: stage_busy[stage]),
        stage_busy_s=tuple(stage_busy),
    )


def pipeline(
    draft: Draft, together: Sequence[Lane], rows: Sequence[Sequence[Sequence[Block]]], ways: Mapping[tuple[int, int], Way]
) -> tuple[list[list[Work]], list[list[float]], list[list[list[float]]]]:
    """Runs the actions of all places of all lanes: one at a time on each, as soon as what it reads has come.

    Of all places' next actions the one that ends first is run, so that tensors are sent in order of time. A hand-over waits for
    its channels, first come, first served. After the last backward of a stage its place waits for the same stage of all lanes,
    whose gradients are exchanged with its own.

    Args:
        draft: Several stages.
        together: Its lanes.
        rows: For each lane and place all blocks.
        ways: How places hand tensors over.

    Returns:
        For each lane what places spend, the seconds of each stage, and for each action of each place the bytes of gradients
        that it is still sending.
    """
    ranges, places = draft.ranges, range(len(draft.places))
    stages = [
        [own[place][blocks.start : blocks.stop] for place, blocks in zip(draft.place_of_stage, ranges, strict=True)]
        for own in rows
    ]
    waiting = [[deque(actions) for actions in stage_actions(draft, lane.microbatches)] for lane in together]
    works = [[Work() for _ in places] for _ in together]
    busy = [[0.0] * draft.stages for _ in together]
    arrived: dict[tuple[int, int, str, int], tuple[float, float]] = {}  # (lane, stage, way, micro-batch): when, how long
    channel_free: dict[tuple[int, int], float] = {}
    backwards = [[lane.microbatches] * draft.stages for lane in together]
    stopped: dict[int, dict[int, float]] = {stage: {} for stage in range(draft.stages)}  # by lane, since when
    going: dict[tuple[int, int], deque[tuple[float, float]]]  # gradients on their way: until when, bytes
    going = {(lane, place): deque() for lane in range(len(together)) for place in places}
    leaving: list[list[list[float]]] = [[[] for _ in places] for _ in together]

    def awaited(lane: int, action: Action) -> tuple[float, float] | None:
        """When what an action waits for arrives, and how long it travels; None while it has not been sent."""
        if action.kind == "F" and action.stage > 0:
            return arrived.get((lane, action.stage, "F", action.microbatch))
        if action.kind in "BI" and action.stage < draft.stages - 1:
            return arrived.get((lane, action.stage, "B", action.microbatch))
        return 0.0, 0.0

    def send(lane: int, source: int, target: int, way: str, microbatch: int, size: float, now: float) -> None:
        here, there = draft.place_of_stage[source], draft.place_of_stage[target]
        if here == there:
            arrived[lane, target, way, microbatch] = now, 0.0
            return
        latency, s_per_byte, part, numbers = ways[here, there]
        took = latency + (size * part * s_per_byte if size > 0.0 else 0.0)
        channels = [(lane, number) for number in numbers]
        start = max([now, *(channel_free.get(channel, 0.0) for channel in channels)])
        channel_free.update(dict.fromkeys(channels, start + took))
        arrived[lane, target, way, microbatch] = start + took, took
        if way == "B":
            going[lane, here].append((start + took, size))

    while True:
        ends = []
        for lane, place in going:
            left = waiting[lane][place]
            if left and (came := awaited(lane, left[0])) is not None:
                stage, kind, microbatch = left[0]
                took = sum(stage_action(stages[lane][stage], kind, microbatch == 0))
                ends.append((max(works[lane][place].end_s, came[0]) + took, lane, place))
        now, lane, place = min(ends, default=(math.inf, 0, 0))
        if now == math.inf:
            break
        action, work = waiting[lane][place].popleft(), works[lane][place]
        stage, kind, microbatch = action
        ready, travelled = awaited(lane, action) or (0.0, 0.0)
        work.hand_over += min(max(0.0, ready - work.end_s), travelled)
        compute, tensor, gather = stage_action(stages[lane][stage], kind, microbatch == 0)
        gone = going[lane, place]
        while gone and gone[0][0] <= (now if kind == "F" else now - (compute + tensor + gather)):
            gone.popleft()
        leaving[lane][place].append(sum(size for _, size in gone))
        work.compute += compute
        work.tensor += tensor
        work.gather += gather
        busy[lane][stage] += compute + tensor + gather
        if kind == "F" and stage < draft.stages - 1:
            send(lane, stage, stage + 1, "F", microbatch, stages[lane][stage][-1].sent_bytes, now)
        if kind in "BI" and stage > 0:
            size = rows[lane][place][ranges[stage].start - 1].returned_bytes
            send(lane, stage, stage - 1, "B", microbatch, size, now)
        work.end_s = now
        if kind in "BW":
            backwards[lane][stage] -= 1
            exchange = exchange_s(stages[lane][stage])
            if backwards[lane][stage] == 0 and exchange > 0.0:
                stopped[stage][lane] = now
                work.end_s = math.inf  # until the others are there
                busy[lane][stage] += exchange
                if len(stopped[stage]) == len(together):
                    for other, since in stopped[stage].items():
                        works[other][place].end_s = max(stopped[stage].values()) + exchange
                        works[other][place].exchange += works[other][place].end_s - since
    if any(left for own in waiting for left in own):
        works[0][0].end_s = math.inf  # what they wait for never comes
        for own, rest in zip(leaving, waiting, strict=True):
            own[:] = [sent + [0.0] * len(left) for sent, left in zip(own, rest, strict=True)]
    return works, busy, leaving
