"""Blocks of a draft on one device of a place, in plain Python: times and bytes of each, and of the passes of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlplace.cluster import Cluster
from rlplace.cluster.rings import ring_order
from rlplace.strategy.costs import (
    BACKWARD_PASS,
    COLLECTIVE_KINDS,
    FORWARD_PASS,
    FULL,
    NONE,
    RINGS,
    STATISTICS,
    BlockCosts,
    Floats,
    kind_numbers,
)
from rlplace.strategy.drafts import Draft, Mesh
from rlplace.strategy.executor.ahead import GathersAhead
from rlplace.strategy.executor.meshes import (
    Groups,
    Lane,
    copy_degree,
    copy_groups,
    expert_share_degree,
    expert_share_groups,
    places_of,
    share_degree,
    share_groups,
    tensor_groups,
    turn_groups,
)
from rlplace.strategy.executor.rules import (
    BUCKET,
    EACH_BACKWARD,
    EACH_PASS,
    FIRST_BUCKET,
    FULL_OFFLOAD,
    ONCE,
    SLOWDOWN,
    WHOLE,
    at_once_s,
    hidden_buckets,
    keeping,
    slowed_s,
    wider,
)  # fmt: skip
from rlplace.strategy.executor.traffic import ClusterTraffic, table_s, tie_part


@dataclass
class ReferenceBlock:
    """A block on one device of a place, for one pass of the slowest replica of a lane."""

    keeping: int = WHOLE
    offload: int = 0
    compute_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # by pass; the backward with recomputation
    tensor_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    weight_s: float = 0.0  # the weight half of a split backward, without recomputation
    weight_tensor_s: float = 0.0
    again_s: float = 0.0
    update_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    copies_s: float = 0.0
    bucket_bytes: float = 0.0
    sent_bytes: float = 0.0
    returned_bytes: float = 0.0
    weight_bytes: float = 0.0
    gradient_bytes: float = 0.0
    shared_bytes: tuple[float, ...] = (0.0, 0.0, 0.0)  # a device's share of weights, gradients and optimizer state
    kept_bytes: float = 0.0
    working_bytes: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    halved_bytes: float = 0.0  # kept from the first half of a split backward to the second
    remade_bytes: float = 0.0  # peak of recomputation in a second half
    buffer_bytes: float = 0.0  # flat copy of the gradient while it is exchanged
    meets_blocks: bool = False  # collectives inside blocks use a channel of the exchange of weights and gradients
    meets_copies: bool = False  # so do sums over copies
    released: bool = False  # gradients go with the update in the backward

    def static_bytes(self, stages: int, microbatches: int) -> float:
        """Returns bytes from its first gather to the end of the step."""
        weights, gradients, optimizer = self.shared_bytes
        total = 0.0 if self.offload else optimizer
        total += 0.0 if self.offload == FULL_OFFLOAD else weights
        if self.keeping in (ONCE, EACH_BACKWARD):
            total += self.weight_bytes
        if self.released:
            return total
        if self.keeping == WHOLE or (self.keeping == ONCE and (microbatches > 1 or stages > 1)):
            total += self.gradient_bytes
        elif self.offload != FULL_OFFLOAD:
            total += gradients
        return total

    @property
    def gathers_again(self) -> bool:
        """True where parameters are gathered for the backward; frozen blocks before all trained ones have none."""
        return self.keeping == EACH_PASS and self.compute_s[BACKWARD_PASS] > 0.0

    @property
    def host_bytes(self) -> float:
        """Bytes of a device in its host's memory."""
        if self.offload == FULL_OFFLOAD:
            return sum(self.shared_bytes)
        return self.shared_bytes[2] if self.offload else 0.0


def reference_blocks(
    draft: Draft, index: int, lane: Lane, costs: BlockCosts, cluster: Cluster, traffic: ClusterTraffic
) -> list[ReferenceBlock]:
    """Returns all blocks of the model as they would be on a place."""
    place = draft.places[index]
    held, kind_of = costs.held(*place.state), kind_numbers(costs, cluster)
    blocks, plain = [ReferenceBlock() for _ in costs.names], np.zeros((2, len(costs.names)))
    kinds = sorted({kind_of[device] for _, devices in lane.replicas[index] for device in devices})
    for samples, devices in lane.replicas[index]:
        for kind in sorted({kind_of[device] for device in devices}):
            _add_pass(blocks, draft, place, kind, samples, costs, traffic)
            plain = np.maximum(plain, costs.passes(kind, place.cut(samples)).working_bytes[:2, NONE])
    whole, meets = _without_ties(draft, index, costs), _meets(place, cluster)
    share, expert_share, copies = float(share_degree(place)), float(expert_share_degree(place)), copy_degree(place)
    gather, scatter, expert_gather, expert_scatter = (
        traffic.table(kind, groups)
        for groups in (share_groups(place), expert_share_groups(place))
        for kind in ("all_gather", "reduce_scatter")
    )
    all_reduce = traffic.table("all_reduce", copy_groups(place))
    host_rate = min(map(traffic.host_bytes_per_s, place.devices))
    update_rate = min(map(traffic.host_memory_bytes_per_s, place.devices))
    for number, block in enumerate(blocks):
        forward = float(plain[FORWARD_PASS, number]) if draft.recompute[number] == FULL else 0.0
        block.remade_bytes = forward + max(0.0, block.working_bytes[BACKWARD_PASS] - float(plain[BACKWARD_PASS, number]))
        block.offload, block.released = draft.offload[number], held.released
        block.meets_blocks, block.meets_copies = meets
        block.keeping = keeping(place.sharding, block.offload, draft.stages, copies)
        block.weight_bytes, block.gradient_bytes, _ = whole[number]
        expert = [float(size) for size in held.expert_bytes[:, number]]
        dense = [size - own for size, own in zip(whole[number], expert, strict=True)]
        block.shared_bytes = tuple(a / share + b / expert_share for a, b in zip(dense, expert, strict=True))
        weights, gradients, optimizer = block.shared_bytes
        exchanged = block.gradient_bytes * held.gradient_item
        if block.keeping == WHOLE:
            block.bucket_bytes = exchanged if copies > 1 else 0.0
        else:
            block.buffer_bytes = exchanged + (gradients if held.released else 0.0)
            block.gather_s = table_s(gather, dense[0]) + table_s(expert_gather, expert[0])
            block.reduce_s = table_s(scatter, dense[1] * held.gradient_item)
            block.reduce_s += table_s(expert_scatter, expert[1] * held.gradient_item)
            block.copies_s = table_s(all_reduce, gradients * held.gradient_item)
        if block.offload == FULL_OFFLOAD:
            block.gather_s += weights / host_rate
            block.reduce_s += gradients / host_rate
        if block.offload:
            block.update_s = (2.0 * optimizer + gradients + weights) / update_rate
            if block.offload != FULL_OFFLOAD:
                block.update_s += (gradients + weights) / host_rate
        else:
            slowest = max(float(costs.update_s(kind, *place.state)[number]) for kind in kinds)
            whole_bytes = float(held.weight_bytes[number])
            block.update_s = slowest * (weights / whole_bytes if whole_bytes > 0 else 1.0 / share)
            matrices, degree = held.turns[:, number], turn_groups(place).size
            if matrices[0] > 0 and degree > 1:  # each device has a matrix a time, which comes in parts and goes in parts
                table = traffic.table("all_to_all", turn_groups(place))
                block.update_s += 2.0 * (float(matrices[0]) / degree) * table_s(table, float(matrices[1] / matrices[0]))
    return blocks


def _meets(place: Mesh, cluster: Cluster) -> tuple[bool, bool]:
    """Returns `ClusterTraffic.meets` by walking every hop of every ring."""
    channels = cluster.links.whole.effective_channels

    def used(groups: Groups) -> set[int]:
        rings = [ring_order(cluster.links, group) for group in groups.members.tolist() if groups.size > 1]
        hops = [(ring[i - 1], ring[i]) for ring in rings for i in range(len(ring))]
        return {channel for one, other in hops for channel in channels[one][other]}

    inside = {channel for kind in range(STATISTICS) for channel in used(tensor_groups(place, kind))}
    shares, copies = used(share_groups(place)), used(copy_groups(place))
    return bool(place.sharding and inside & shares), bool(place.sharding and copies & shares)


def _add_pass(
    blocks: list[ReferenceBlock], draft: Draft, place: Mesh, kind: int, samples: int, costs: BlockCosts, traffic: ClusterTraffic
) -> None:
    """Makes every block as slow and as large as a pass of so many samples on a device of that kind."""
    passes = costs.passes(kind, place.cut(samples))
    for number, block in enumerate(blocks):
        how = draft.recompute[number]
        moved, around = [0.0, 0.0], [0.0, 0.0]
        for way in (FORWARD_PASS, BACKWARD_PASS):
            for collective, name in enumerate(COLLECTIVE_KINDS):
                size, calls = passes.collective_bytes[way, collective, number], passes.collective_calls[way, collective, number]
                if size > 0.0 and calls > 0.0:
                    table = traffic.table(name, tensor_groups(place, collective))
                    moved[way] += calls * table_s(table, size / calls)
                    around[way] += calls * table_s(table, size / calls) if collective in RINGS else 0.0
            moved[way] -= min(float(passes.hidden_s[way, number]), around[way])
        again = float(passes.again_s[how, number])
        again_tensor = moved[FORWARD_PASS] if how == FULL else 0.0
        computed = (float(passes.forward_s[number]), float(passes.backward_s[number]) + again)
        block.compute_s = [*map(max, block.compute_s, computed)]
        block.tensor_s = [*map(max, block.tensor_s, (moved[0], moved[1] + again_tensor))]
        block.again_s = max(block.again_s, again)
        block.weight_tensor_s = max(block.weight_tensor_s, again_tensor)
        for name in ("weight_s", "sent_bytes", "returned_bytes"):
            setattr(block, name, max(getattr(block, name), float(getattr(passes, name)[number])))
        block.kept_bytes = max(block.kept_bytes, float(passes.kept_bytes[how, number]))
        block.halved_bytes = max(block.halved_bytes, float(passes.halved_bytes[how, number]))
        block.working_bytes = tuple(map(max, block.working_bytes, passes.working_bytes[:, how, number].tolist()))


def _without_ties(draft: Draft, index: int, costs: BlockCosts) -> list[list[float]]:
    """Returns weight, gradient and optimizer bytes of blocks; a tied weight counts in the first block of a place with it."""
    place = draft.places[index]
    held = costs.held(*place.state)
    whole = [list(map(float, row)) for row in zip(held.weight_bytes, held.gradient_bytes, held.optimizer_bytes, strict=True)]
    here = [places_of(draft, (block,)) == (index,) for block in range(len(whole))]
    for tie in costs.ties:
        part = tie_part(costs, tie.blocks, place)
        for block in [block for block in tie.blocks if here[block]][1:]:
            for column, size in enumerate((tie.weight_bytes, tie.gradient_bytes, tie.optimizer_bytes)):
                whole[block][column] = max(0.0, whole[block][column] - size * part)
    return whole


@dataclass
class PlaceWork:
    """Time of a place, in seconds."""

    compute: float = 0.0
    tensor: float = 0.0
    gather: float = 0.0
    exchange: float = 0.0
    hand_over: float = 0.0
    end_s: float = 0.0


def forward_s(blocks: Sequence[ReferenceBlock], first: bool) -> float:
    """Returns seconds of a forward: the parameters of the next block are gathered while one computes."""
    gathers = [
        block.gather_s if block.keeping == EACH_PASS or (first and block.keeping in (ONCE, EACH_BACKWARD)) else 0.0
        for block in blocks
    ] + [0.0]
    seconds = gathers[0]
    for block, gather in zip(blocks, gathers[1:], strict=True):
        compute_s, tensor_s = block.compute_s[FORWARD_PASS], block.tensor_s[FORWARD_PASS]
        held_up_s = at_once_s(block.meets_blocks, compute_s, tensor_s, gather)
        seconds += max(slowed_s(compute_s, tensor_s, gather, held_up_s), gather + held_up_s)
    return seconds


def backward_s(blocks: Sequence[ReferenceBlock], last: bool, all_reduce: Floats) -> float:
    """Returns seconds of a backward of a single stage.

    While a block computes, the gradient of the one after it is reduced and the parameters of the one before it are gathered.
    Shares are all-reduced over copies beside all that, as are whole gradients, in buckets, in the last micro-batch. Where both
    use one channel, copies go after what is gathered and reduced beside the same block.
    """
    gathers = [0.0] + [block.gather_s if block.gathers_again else 0.0 for block in blocks]
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
        own_s, tensor_s = block.compute_s[BACKWARD_PASS] * slower, block.tensor_s[BACKWARD_PASS]
        waits = reduces[index + 1] + gathers[index]
        moving = waits + copies[index + 1]
        held_up_s = at_once_s(block.meets_blocks, own_s, tensor_s, moving)
        times = wider(moving, held_up_s)
        moved = waits * times + (max(start, sent) if block.meets_copies else start)
        copied_from = moved if block.meets_copies else max(sent, start + reduces[index + 1] * times)
        sent = copied_from + copies[index + 1] * times
        time = start + slowed_s(own_s, tensor_s, moving, held_up_s)
        if waits > 0.0:
            time = max(time, moved)
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
    if blocks[0].meets_copies:
        return max(sent, time) + reduces[0] + copies[0]
    return max(sent, time + reduces[0]) + copies[0]


def exchange_s(blocks: Sequence[ReferenceBlock]) -> float:
    """Returns seconds in which a stage of a pipeline exchanges gradients: block by block, copies beside that."""
    reduced, copied = 0.0, 0.0
    for block in reversed(blocks):
        if block.keeping != WHOLE:
            reduced += block.reduce_s
            copied = max(copied, reduced) + block.copies_s
            reduced = copied if block.meets_copies else reduced
    return max(reduced, copied)


def single_stage(blocks: Sequence[ReferenceBlock], microbatches: int, all_reduce: Floats) -> PlaceWork:
    """Returns the work of a step of one stage, whose passes run one after another."""
    forwards = forward_s(blocks, True), forward_s(blocks, False)
    backwards = backward_s(blocks, True, all_reduce), backward_s(blocks, False, all_reduce)
    forward = forwards[0] + (microbatches - 1) * forwards[1]
    backward = backwards[0] + (microbatches - 1) * backwards[1]
    work = PlaceWork(end_s=forward + backward)
    plain = [[0.0, 0.0], [0.0, 0.0]]
    gathered, reduced = 0.0, 0.0
    for block in blocks:
        for way in (FORWARD_PASS, BACKWARD_PASS):
            plain[way][0] += block.compute_s[way]
            plain[way][1] += block.tensor_s[way]
        gathered += block.gather_s if block.gathers_again else 0.0
        reduced += block.reduce_s + block.copies_s if block.keeping else block.bucket_bytes
    work.compute = microbatches * (plain[0][0] + plain[1][0])
    work.tensor = microbatches * (plain[0][1] + plain[1][1])
    exposed = max(0.0, backward - microbatches * (plain[1][0] + plain[1][1]))
    part = gathered / (gathered + reduced) if gathered > 0.0 else 0.0
    work.gather = max(0.0, forward - microbatches * (plain[0][0] + plain[0][1])) + exposed * part
    work.exchange = exposed * (1.0 - part)
    return work


def stage_action(
    blocks: Sequence[ReferenceBlock], kind: str, microbatch: int, ahead: GathersAhead
) -> tuple[float, float, float]:
    """Returns seconds of ops, of collectives inside blocks, and by which gathers prolong an action of a pipeline."""
    if kind == "F":
        pieces = [(block.compute_s[FORWARD_PASS], block.tensor_s[FORWARD_PASS]) for block in blocks]
    elif kind == "W":
        pieces = [(block.weight_s + block.again_s, block.weight_tensor_s) for block in blocks]
    else:
        later = [block.weight_s if kind == "I" else 0.0 for block in blocks]
        pieces = [(b.compute_s[BACKWARD_PASS] - s, b.tensor_s[BACKWARD_PASS]) for b, s in zip(blocks, later, strict=True)]
    compute, tensor = (sum(column) for column in zip(*pieces, strict=True))
    if kind != "F":
        return compute, tensor, 0.0
    moving = ahead.moving_s(microbatch, compute + tensor)
    held_up = at_once_s(blocks[0].meets_blocks, compute, tensor, moving)
    return compute, tensor, slowed_s(compute, tensor, moving, held_up) - compute - tensor
