"""The block executor in plain Python: step time and memory of a draft, as `rlplace.strategy.executor` states the rules.

This is the definition; `rlplace.strategy.executor.kernel` is compiled and agrees to 1e-12.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from rlplace.cluster import Cluster
from rlplace.plan.actions import Action
from rlplace.strategy.costs import BACKWARD_PASS, FORWARD_PASS, STAGE_END, WITH_GRADIENTS, BlockCosts
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.ahead import gather_ahead
from rlplace.strategy.executor.evaluate import PARTS, StepEvaluation, bytes_over, side_by_side, starting
from rlplace.strategy.executor.meshes import Lane, borders, check_draft, copy_groups, lanes, stage_actions
from rlplace.strategy.executor.reference_blocks import (
    PlaceWork,
    ReferenceBlock,
    exchange_s,
    reference_blocks,
    single_stage,
    stage_action,
)
from rlplace.strategy.executor.rules import EACH_BACKWARD, EACH_PASS, ONCE
from rlplace.strategy.executor.traffic import ClusterTraffic, Way, tie_exchanges


def evaluate_reference(
    draft: Draft, costs: BlockCosts, cluster: Cluster, traffic: ClusterTraffic | None = None
) -> StepEvaluation:
    """Returns step time and memory of a draft.

    Raises:
        InputError: The draft contradicts itself, its schedule cannot run it, or a pass cannot be cut as it says.
    """
    traffic = traffic or ClusterTraffic(cluster)
    if draft.beside:
        alone = [evaluate_reference(one, costs, cluster, traffic) for one in draft.pipelines]
        return side_by_side(draft, alone, costs, traffic)
    check_draft(draft, cluster, len(costs.names))
    places = range(len(draft.places))
    works: list[PlaceWork] = [PlaceWork() for _ in places]
    ends, updates = [0.0 for _ in places], [[0.0] for _ in places]
    stage_busy = [0.0] * draft.stages
    peaks, hosts = [0.0] * cluster.num_devices, [0.0] * (max(cluster.hosts) + 1)
    ways = traffic.ways(borders(draft))
    together = lanes(draft)
    rows_of = [[reference_blocks(draft, place, lane, costs, cluster, traffic) for place in places] for lane in together]
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
                    hosts[cluster.hosts[device]] += sum(rows[place][block].host_bytes for block in own)
    for seconds, involved in tie_exchanges(draft, costs, traffic):
        end_s = max(ends[place] for place in involved) + seconds
        for place in involved:
            ends[place] = end_s
            works[place].exchange += seconds
    step = max(end + sum(update) for end, update in zip(ends, updates, strict=True))
    busiest = max(places, key=lambda place: works[place].compute + works[place].tensor)
    stages = [stage for stage, place in enumerate(draft.place_of_stage) if place == busiest]
    work = works[busiest]
    spent = [work.compute, work.tensor, work.gather, work.exchange, work.hand_over, 0.0, sum(updates[busiest])]
    spent[PARTS.index("bubble")] = max(0.0, step - sum(spent))
    at_start = starting(draft, hosts, costs, cluster)
    over = bytes_over(peaks, at_start, cluster)
    return StepEvaluation(
        step_time_s=step,
        passes_s=max(ends) if step < math.inf else step,
        feasible=over == 0.0 and step < math.inf,
        peak_memory_bytes=tuple(math.ceil(peak) for peak in peaks),
        host_bytes=tuple(math.ceil(size) for size in hosts),
        starting_bytes=tuple(math.ceil(size) for size in at_start),
        over_bytes=over,
        parts=dict(zip(PARTS, spent, strict=True)),
        bottleneck=max(stages, key=lambda stage: stage_busy[stage]),
        stage_busy_s=tuple(stage_busy),
    )


def pipeline(
    draft: Draft,
    together: Sequence[Lane],
    rows: Sequence[Sequence[Sequence[ReferenceBlock]]],
    ways: Mapping[tuple[int, int], Way],
) -> tuple[list[list[PlaceWork]], list[list[float]], list[list[list[float]]]]:
    """Runs the actions of all places of all lanes: one at a time on each, as soon as what it reads has come.

    Of all places' next actions the one that ends first is run, so that tensors are sent in order of time. A stage transfer
    waits for its channels, first come, first served. After the last backward of a stage its place waits for the same stage of
    all lanes, whose gradients are exchanged with its own.

    Args:
        draft: Several stages.
        together: Its lanes.
        rows: For each lane and place all blocks.
        ways: Of stage transfers.

    Returns:
        For each lane the work of places, the seconds of each stage, and for each action of each place the bytes of gradients
        that it is still sending.
    """
    ranges, places = draft.ranges, range(len(draft.places))
    stages = [
        [own[place][blocks.start : blocks.stop] for place, blocks in zip(draft.place_of_stage, ranges, strict=True)]
        for own in rows
    ]
    ahead = []
    for by_place in rows:
        times = [[(b.gather_s, b.compute_s[FORWARD_PASS], b.tensor_s[FORWARD_PASS]) for b in row] for row in by_place]
        ahead.append(gather_ahead(draft, times, [row[0].meets_blocks for row in by_place]))
    waiting = [[deque(actions) for actions in stage_actions(draft, lane.microbatches)] for lane in together]
    works = [[PlaceWork() for _ in places] for _ in together]
    busy = [[0.0] * draft.stages for _ in together]
    arrived: dict[tuple[int, int, str, int], tuple[float, float]] = {}  # (lane, stage, way, micro-batch): when, how long
    channel_free: dict[tuple[int, int], float] = {}
    backwards = [[lane.microbatches] * draft.stages for lane in together]
    stopped: dict[int, dict[int, float]] = {stage: {} for stage in range(draft.stages)}  # by lane, since when
    going: dict[tuple[int, int], deque[tuple[float, float]]]  # gradients on their way: until when, bytes
    going = {(lane, place): deque() for lane in range(len(together)) for place in places}
    leaving: list[list[list[float]]] = [[[] for _ in places] for _ in together]

    def awaited(lane: int, action: Action) -> tuple[float, float] | None:
        """Returns arrival and travel time of the input of an action; None while it has not been sent."""
        if action.kind == "F" and action.stage > 0:
            return arrived.get((lane, action.stage, "F", action.microbatch))
        if action.kind in "BI" and action.stage < draft.stages - 1:
            return arrived.get((lane, action.stage, "B", action.microbatch))
        return 0.0, 0.0

    def action_of(lane: int, action: Action) -> tuple[tuple[float, float, float], float]:
        """Returns the seconds of an action, and the time before which it does not start, as its parameters are not there."""
        stage, kind, microbatch = action
        own = ahead[lane][stage]
        late_s = own.ready_s if kind == "F" and microbatch == 0 else 0.0
        return stage_action(stages[lane][stage], kind, microbatch, own), late_s

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
                took, late_s = action_of(lane, left[0])
                ends.append((max(works[lane][place].end_s, came[0], late_s) + sum(took), lane, place))
        now, lane, place = min(ends, default=(math.inf, 0, 0))
        if now == math.inf:
            break
        action, work = waiting[lane][place].popleft(), works[lane][place]
        stage, kind, microbatch = action
        ready, travelled = awaited(lane, action) or (0.0, 0.0)
        work.hand_over += min(max(0.0, ready - work.end_s), travelled)
        (compute, tensor, gather), late_s = action_of(lane, action)
        waits = max(0.0, late_s - max(work.end_s, ready))
        gone = going[lane, place]
        while gone and gone[0][0] <= (now if kind == "F" else now - (compute + tensor + gather)):
            gone.popleft()
        leaving[lane][place].append(sum(size for _, size in gone))
        work.compute += compute
        work.tensor += tensor
        work.gather += gather + waits
        busy[lane][stage] += compute + tensor + gather + waits
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


def device_bytes(draft: Draft, place: int, lane: Lane, blocks: Sequence[ReferenceBlock], leaving: Sequence[float]) -> float:
    """Returns the peak memory of a device of a place, reserved bytes apart.

    `blocks` are all blocks as they are on the place; `leaving` has for each action the bytes that earlier ones still send.
    """
    total = 0.0
    holds: dict[int, tuple[float, ...]] = {}
    for stage, inside in enumerate(draft.ranges):
        if draft.place_of_stage[stage] == place:
            own = blocks[inside.start : inside.stop]
            total += sum(block.static_bytes(draft.stages, lane.microbatches) for block in own)
            received = blocks[inside.start - 1].sent_bytes if stage > 0 else 0.0  # in torch a buffer for each micro-batch
            returned = blocks[inside.stop - 1].returned_bytes if stage < draft.stages - 1 else 0.0
            total += lane.microbatches * (received + returned)
            holds[stage] = _pass_bytes(draft, stage, lane.microbatches, blocks)
    held, peak = 0.0, 0.0
    left = {stage: lane.microbatches for stage in holds}
    for (stage, kind, _), sends in zip(stage_actions(draft, lane.microbatches)[place], leaving, strict=True):
        kept, forward, backward, half, between, weight, exchange = holds[stage]
        if kind == "F":
            peak = max(peak, held + sends + forward)
            held += kept
        elif kind in "BI":
            peak = max(peak, held + sends - kept + (backward if kind == "B" else half))
        if kind == "I":
            held += between - kept
        if kind == "W":
            peak = max(peak, held + sends + weight)
            held += kept - between
        if kind in "BW":
            held -= kept
            left[stage] -= 1
            if left[stage] == 0:
                peak = max(peak, held + exchange)
    return total + peak


def _pass_bytes(draft: Draft, stage: int, microbatches: int, blocks: Sequence[ReferenceBlock]) -> tuple[float, ...]:
    """Returns bytes of a micro-batch on a stage.

    Kept from forward to backward; peaks of forward, backward and the first half of a split one; kept between the halves; peaks
    that the second half and the exchange add.

    On top of what blocks up to the one that runs have kept comes: what it works with; its parameters and those of the next
    one, gathered where they are not kept (before it runs a block is there twice, flat and as parameters); its unsharded
    gradient, with the flat copy of the last block's that is being reduced, and at its end its own. The first half of a split
    backward frees nothing before it ends, and keeps the gradients that those of weights are made from.
    """
    inside = draft.ranges[stage]
    own = blocks[inside.start : inside.stop]
    gathered = [0.0, *(block.weight_bytes if block.keeping == EACH_PASS else 0.0 for block in own), 0.0]
    single = draft.stages == 1
    buffers = [block.buffer_bytes if single else 0.0 for block in own] + [0.0]
    kept, forward, backward, half, weight = 0.0, 0.0, 0.0, 0.0, 0.0
    returned = blocks[inside.start - 1].returned_bytes if stage > 0 else 0.0
    for index, block in enumerate(own):
        before, kept = kept, kept + block.kept_bytes
        here, ahead, behind = gathered[index + 1], gathered[index + 2], gathered[index]
        forward = max(forward, before + 2 * here, kept + block.working_bytes[FORWARD_PASS] + here + ahead)
        passing = block.keeping in (EACH_BACKWARD, EACH_PASS) or (block.keeping == ONCE and single and microbatches == 1)
        passing = passing or block.released
        gradient = block.gradient_bytes if passing else 0.0
        at_end = index + 1 == len(own) and stage < draft.stages - 1
        working = block.working_bytes[STAGE_END if at_end else BACKWARD_PASS]
        if passing:
            working = min(working + gradient, block.working_bytes[WITH_GRADIENTS])
        running = working + here + behind + buffers[index + 1]
        ends = before + here + behind + gradient + buffers[index]
        backward = max(backward, kept + 2 * here + buffers[index + 1], kept + running, ends)
        left = max(0.0, block.halved_bytes - block.kept_bytes)
        weight = max(weight - left, block.remade_bytes)
        half = max(half + left, running, left + (returned if index == 0 else 0.0))
    exchange = 0.0 if single else max(block.buffer_bytes for block in own)
    return kept, forward, backward, kept + half, sum(block.halved_bytes for block in own), weight, exchange
