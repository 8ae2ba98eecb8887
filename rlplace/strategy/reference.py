"""The block executor, plainly: step time of a draft, rule by rule as docs/cost-model/strategy.md states them.

`rlplace.strategy.kernel` is its compiled twin and agrees to rounding. `reference_blocks` says what blocks take on their places,
`reference_memory` has the rules for memory.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlplace.actions import Action
from rlplace.cluster import Cluster
from rlplace.strategy.beside import side_by_side
from rlplace.strategy.costs import BACKWARD_PASS, FORWARD_PASS, BlockCosts, Floats
from rlplace.strategy.drafts import Draft
from rlplace.strategy.evaluation import PARTS, Evaluation
from rlplace.strategy.events import EXCHANGE, SEND, TIES, UPDATE, Events
from rlplace.strategy.meshes import (
    Lane,
    borders,
    check_draft,
    copy_groups,
    lanes,
    places_of,
    share_degree,
    stage_actions,
    tie_groups,
)
from rlplace.strategy.reference_blocks import Block, place_blocks, stage_ranges, tie_part
from rlplace.strategy.reference_memory import action_bytes, device_bytes, host_bytes, stage_bytes
from rlplace.strategy.rules import (
    BUCKET,
    EACH_BACKWARD,
    EACH_PASS,
    FIRST_BUCKET,
    ONCE,
    SLOWDOWN,
    WHOLE,
    beside_s,
    hidden_buckets,
)
from rlplace.strategy.traffic import Traffic, Way, table_s


@dataclass
class Work:
    """What a place spends its time on, in seconds."""

    compute: float = 0.0
    tensor: float = 0.0
    gather: float = 0.0
    exchange: float = 0.0
    hand_over: float = 0.0
    end_s: float = 0.0

    @property
    def busy_s(self) -> float:
        return self.compute + self.tensor


def evaluate_reference(
    draft: Draft, costs: BlockCosts, cluster: Cluster, traffic: Traffic | None = None, events: Events | None = None
) -> Evaluation:
    """Step time and memory of a draft; `events` is told what happens when.

    Raises:
        InputError: The draft contradicts itself, its schedule cannot run it, or a pass cannot be cut as it says.
    """
    traffic = traffic or Traffic(cluster)
    if draft.beside:
        alone = [evaluate_reference(one, costs, cluster, traffic) for one in draft.pipelines]
        return side_by_side(draft, alone, costs, traffic)
    check_draft(draft, cluster, len(costs.names))
    places, ranges = range(len(draft.places)), stage_ranges(draft)
    works: list[Work] = [Work() for _ in places]
    ends, updates = [0.0 for _ in places], [[0.0] for _ in places]
    stage_busy, stage_memory = [0.0] * draft.stages, [0.0] * draft.stages
    peaks, hosts = [0.0] * cluster.num_devices, [0.0] * (max(cluster.hosts) + 1)
    ways = traffic.ways(borders(draft))
    for lane in lanes(draft):
        rows = [place_blocks(draft, place, lane, costs, cluster, traffic) for place in places]
        busy = [0.0] * draft.stages
        if events is not None:
            events.begin(lane)
        if draft.stages == 1:
            ran = [single_stage(rows[0], lane.microbatches, traffic.table("all_reduce", copy_groups(draft.places[0])), events)]
            busy = [ran[0].compute + ran[0].tensor + ran[0].gather + ran[0].exchange]
        else:
            ran = pipeline(draft, lane, rows, ways, busy, events)
        stage_busy = [max(pair) for pair in zip(stage_busy, busy, strict=True)]
        stage_memory = [max(pair) for pair in zip(stage_memory, stage_bytes(draft, lane, rows), strict=True)]
        for place in places:
            own = [block for stage, blocks in enumerate(ranges) if draft.place_of_stage[stage] == place for block in blocks]
            ends[place] = max(ends[place], ran[place].end_s)
            updated = [rows[place][block].update_s for block in own]
            if sum(updated) >= sum(updates[place]):
                updates[place] = updated
            if ran[place].compute + ran[place].tensor > works[place].compute + works[place].tensor:
                works[place] = ran[place]
            used = device_bytes(draft, place, lane, rows[place])
            if events is not None:
                events.remember(place, *action_bytes(draft, place, lane, rows[place]))
            for _, devices in lane.replicas[place]:
                for device in devices:
                    peaks[device] = cluster.devices[device].reserved_bytes + used
                    hosts[cluster.hosts[device]] += sum(host_bytes(rows[place][block]) for block in own)
    for seconds, involved in tie_exchanges(draft, costs, traffic):
        together = max(ends[place] for place in involved) + seconds
        for place in involved:
            if events is not None:
                events.add(place, TIES, -1, -1, together - seconds, together)
            ends[place] = together
            works[place].exchange += seconds
    step = max(end + sum(update) for end, update in zip(ends, updates, strict=True))
    if events is not None:
        for place in places:
            pieces = [(seconds, 0.0) for seconds in updates[place]]
            events.add(place, UPDATE, -1, -1, ends[place], ends[place] + sum(updates[place]), pieces)
    busiest = max(places, key=lambda place: works[place].compute + works[place].tensor)
    stages = [stage for stage, place in enumerate(draft.place_of_stage) if place == busiest]
    work = works[busiest]
    spent = [work.compute, work.tensor, work.gather, work.exchange, work.hand_over, 0.0, sum(updates[busiest])]
    spent[PARTS.index("bubble")] = max(0.0, step - sum(spent))
    over = sum(
        max(0.0, peak - float(device.memory_bytes or math.inf)) for peak, device in zip(peaks, cluster.devices, strict=True)
    )
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


def tie_exchanges(draft: Draft, costs: BlockCosts, traffic: Traffic) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Seconds in which the places that hold a tied weight sum its gradients, and these places."""
    for tie in costs.ties:
        involved = places_of(draft, tie.blocks)
        if len(involved) > 1:
            places = [draft.places[place] for place in involved]
            item = costs.held(places[0].tensor, places[0].expert).gradient_item
            part = max(tie_part(costs, tie.blocks, place) / share_degree(place) for place in places)
            table = traffic.table("all_reduce", tie_groups(places))
            yield table_s(table, tie.gradient_bytes * item * part), involved


def forward_s(blocks: Sequence[Block], first: bool) -> float:
    """A forward: the parameters of the next block are gathered while one computes."""
    gathers = [
        block.gather_s if block.keeping == EACH_PASS or (first and block.keeping in (ONCE, EACH_BACKWARD)) else 0.0
        for block in blocks
    ] + [0.0]
    seconds = gathers[0]
    for block, gather in zip(blocks, gathers[1:], strict=True):
        seconds += beside_s(block.compute_s[FORWARD_PASS], block.tensor_s[FORWARD_PASS], gather, 0.0)
    return seconds


def backward_s(blocks: Sequence[Block], last: bool, all_reduce: Floats) -> float:
    """A backward of a single stage.

    While a block computes, the gradient of the one after it is reduced and the parameters of the one before it are gathered.
    Shares are all-reduced over copies beside all that, as are whole gradients, in buckets, in the last micro-batch.
    """
    gathers = [0.0] + [block.gather_s if block.keeping == EACH_PASS else 0.0 for block in blocks]
    reduces, copies = [0.0] * (len(blocks) + 1), [0.0] * (len(blocks) + 1)
    for index, block in enumerate(blocks):
        if block.keeping in (EACH_BACKWARD, EACH_PASS) or (last and block.keeping == ONCE):
            reduces[index], copies[index] = block.reduce_s, block.copies_s
    total, compute_s = 0.0, 0.0
    for block in reversed(blocks):
        total += block.bucket_bytes if last else 0.0
        compute_s += block.compute_s[BACKWARD_PASS]
    slower = 1.0
    if total > FIRST_BUCKET and compute_s > 0.0:
        under = table_s(all_reduce, FIRST_BUCKET) + hidden_buckets(total) * table_s(all_reduce, BUCKET)
        slower = 1.0 + SLOWDOWN * (min(under, compute_s) / compute_s)
    time, sent, filled, limit = gathers[len(blocks)], 0.0, 0.0, FIRST_BUCKET
    for index in reversed(range(len(blocks))):
        block, start = blocks[index], time
        reduced = start + reduces[index + 1]
        sent = max(sent, reduced) + copies[index + 1]
        waits = reduces[index + 1] + gathers[index]
        time = start + beside_s(
            block.compute_s[BACKWARD_PASS] * slower, block.tensor_s[BACKWARD_PASS], waits, copies[index + 1]
        )
        left = block.bucket_bytes if last else 0.0
        done = 0.0
        while left > 0.0:
            take = min(limit - filled, left)
            filled, left, done = filled + take, left - take, done + take
            if filled >= limit:
                ready = start + (time - start) * (done / block.bucket_bytes)
                sent = max(sent, ready) + table_s(all_reduce, limit)
                filled, limit = 0.0, BUCKET
    if filled > 0.0:
        sent = max(sent, time) + table_s(all_reduce, filled)
    reduced = time + reduces[0]
    return max(sent, reduced) + copies[0]


def exchange_s(blocks: Sequence[Block]) -> float:
    """Gradients of a stage of a pipeline, after its last backward: reduced block by block, copies beside that."""
    reduced, copied = 0.0, 0.0
    for block in reversed(blocks):
        if block.keeping != WHOLE:
            reduced += block.reduce_s
            copied = max(copied, reduced) + block.copies_s
    return max(reduced, copied)


def single_stage(blocks: Sequence[Block], microbatches: int, all_reduce: Floats, events: Events | None = None) -> Work:
    """The passes of one stage, one after another."""
    forwards = forward_s(blocks, True), forward_s(blocks, False)
    backwards = backward_s(blocks, True, all_reduce), backward_s(blocks, False, all_reduce)
    forward = forwards[0] + (microbatches - 1) * forwards[1]
    backward = backwards[0] + (microbatches - 1) * backwards[1]
    work = Work(end_s=forward + backward)
    if events is not None:
        now = 0.0
        for number in range(microbatches):
            for kind, took in (("F", forwards[number > 0]), ("B", min(backwards))):
                events.add(0, kind, 0, number, now, now + took, stage_pieces(blocks, kind))
                now += took
        events.add(0, EXCHANGE, 0, -1, now, work.end_s)
    plain = [[0.0, 0.0], [0.0, 0.0]]
    gathered, reduced = 0.0, 0.0
    for block in blocks:
        for way in (FORWARD_PASS, BACKWARD_PASS):
            plain[way][0] += block.compute_s[way]
            plain[way][1] += block.tensor_s[way]
        gathered += block.gather_s if block.keeping == EACH_PASS else 0.0
        reduced += block.reduce_s + block.copies_s if block.keeping else block.bucket_bytes
    work.compute = microbatches * (plain[0][0] + plain[1][0])
    work.tensor = microbatches * (plain[0][1] + plain[1][1])
    exposed = max(0.0, backward - microbatches * (plain[1][0] + plain[1][1]))
    part = gathered / (gathered + reduced) if gathered > 0.0 else 0.0
    work.gather = max(0.0, forward - microbatches * (plain[0][0] + plain[0][1])) + exposed * part
    work.exchange = exposed * (1.0 - part)
    return work


def pipeline(
    draft: Draft,
    lane: Lane,
    rows: Sequence[Sequence[Block]],
    ways: Mapping[tuple[int, int], Way],
    stage_busy: list[float],
    events: Events | None = None,
) -> list[Work]:
    """Runs the actions of all places: one at a time on each, as soon as what it reads has come.

    Of all places' next actions the one that ends first is run, so that tensors are sent in order of time. A hand-over waits for
    its channels, first come, first served.

    Args:
        draft: Several stages.
        lane: One of its lanes.
        rows: For each place all blocks.
        ways: How places hand tensors over.
        stage_busy: For each stage its seconds; this lane's are added.
        events: Told what happens when.
    """
    ranges = stage_ranges(draft)
    stages = [rows[place][blocks.start : blocks.stop] for place, blocks in zip(draft.place_of_stage, ranges, strict=True)]
    waiting = [deque(actions) for actions in stage_actions(draft, lane.microbatches)]
    works = [Work() for _ in draft.places]
    arrived: dict[tuple[int, str, int], tuple[float, float]] = {}  # (stage, way, micro-batch): when, and how long it travelled
    channel_free: dict[int, float] = {}
    backwards = [lane.microbatches] * draft.stages

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
        if events is not None:
            events.add(here, SEND, source, microbatch, start, start + took, target=there, size_bytes=size)

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
        if events is not None:
            events.add(place, kind, stage, microbatch, max(work.end_s, ready), now, stage_pieces(stages[stage], kind))
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
                if events is not None:
                    events.add(place, EXCHANGE, stage, -1, now, now + exchange)
                now += exchange
                work.exchange += exchange
                stage_busy[stage] += exchange
        work.end_s = now
    if any(waiting):
        works[0].end_s = math.inf  # what they wait for never comes
    return works


def stage_action(blocks: Sequence[Block], kind: str, first: bool) -> tuple[float, float, float]:
    """Seconds of ops, of collectives inside blocks, and of waiting for parameters."""
    pieces = stage_pieces(blocks, kind)
    compute, tensor = (sum(column) for column in zip(*pieces, strict=True))
    gather = max(0.0, forward_s(blocks, True) - compute - tensor) if kind == "F" and first else 0.0
    return compute, tensor, gather


def stage_pieces(blocks: Sequence[Block], kind: str) -> list[tuple[float, float]]:
    """For each block in model order its seconds of ops, and of collectives inside it."""
    if kind == "F":
        return [(block.compute_s[FORWARD_PASS], block.tensor_s[FORWARD_PASS]) for block in blocks]
    if kind == "W":
        return [(block.weight_s + block.again_s, block.weight_tensor_s) for block in blocks]
    put_off = [block.weight_s if kind == "I" else 0.0 for block in blocks]
    return [
        (block.compute_s[BACKWARD_PASS] - later, block.tensor_s[BACKWARD_PASS])
        for block, later in zip(blocks, put_off, strict=True)
    ]
