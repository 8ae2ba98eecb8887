"""The blocks of a draft as one device of a place sees them: times, bytes and communication, by the rules, no shortcuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlplace.cluster import Cluster
from rlplace.cluster.collectives import ring_order
from rlplace.strategy.costs import BACKWARD_PASS, COLLECTIVE_KINDS, FORWARD_PASS, FULL, NONE, BlockCosts, kind_numbers
from rlplace.strategy.drafts import Draft, Mesh
from rlplace.strategy.executor.meshes import (
    Lane,
    copy_degree,
    copy_groups,
    expert_share_degree,
    expert_share_groups,
    places_of,
    share_degree,
    share_groups,
    tensor_groups,
)
from rlplace.strategy.executor.rules import EACH_BACKWARD, FULL_OFFLOAD, ONCE, WHOLE, keeping
from rlplace.strategy.executor.traffic import Traffic, table_s, tie_part


@dataclass
class Block:
    """A block on one device of a place, for one pass of the slowest replica of a lane."""

    keeping: int = WHOLE
    offload: int = 0
    compute_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # by pass; the backward with what runs again
    tensor_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    weight_s: float = 0.0  # the part of a split backward that waits, with what runs again a second time
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
    optimizer_bytes: float = 0.0
    shared_bytes: tuple[float, ...] = (0.0, 0.0, 0.0)  # a device's share of the three
    kept_bytes: float = 0.0
    working_bytes: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)
    halved_bytes: float = 0.0  # kept from the first half of a split backward to the second
    remade_bytes: float = 0.0  # the most that running again holds in a second half
    buffer_bytes: float = 0.0  # flat copy of the gradient while it is exchanged
    meets_blocks: bool = False  # collectives inside blocks use a channel of the exchange of weights and gradients
    meets_copies: bool = False  # so do sums over copies


def place_blocks(draft: Draft, index: int, lane: Lane, costs: BlockCosts, cluster: Cluster, traffic: Traffic) -> list[Block]:
    """All blocks of the model as they would be on a place, those of other places too."""
    place = draft.places[index]
    held = costs.held(place.tensor, place.expert)
    kind_of = kind_numbers(costs, cluster)
    blocks, plain = [Block() for _ in costs.names], np.zeros((2, len(costs.names)))
    kinds = sorted({kind_of[device] for _, devices in lane.replicas[index] for device in devices})
    for samples, devices in lane.replicas[index]:
        for kind in sorted({kind_of[device] for device in devices}):
            _add_pass(blocks, draft, place, kind, samples, costs, traffic)
            plain = np.maximum(plain, costs.passes(kind, place.cut(samples)).working_bytes[:2, NONE])
    whole = _without_ties(draft, index, costs)
    meets = _meets(place, cluster)
    share, expert_share, copies = float(share_degree(place)), float(expert_share_degree(place)), copy_degree(place)
    gather, scatter = (traffic.table(kind, share_groups(place)) for kind in ("all_gather", "reduce_scatter"))
    expert_gather, expert_scatter = (
        traffic.table(kind, expert_share_groups(place)) for kind in ("all_gather", "reduce_scatter")
    )
    all_reduce = traffic.table("all_reduce", copy_groups(place))
    host_rate = min(traffic.host_bytes_per_s(d) for d in place.devices)
    update_rate = min(traffic.host_memory_bytes_per_s(d) for d in place.devices)
    for number_of, block in enumerate(blocks):
        forward = float(plain[FORWARD_PASS, number_of]) if draft.recompute[number_of] == FULL else 0.0
        block.remade_bytes = forward + max(0.0, block.working_bytes[BACKWARD_PASS] - float(plain[BACKWARD_PASS, number_of]))
        block.offload = draft.offload[number_of]
        block.meets_blocks, block.meets_copies = meets
        block.keeping = keeping(place.sharding, block.offload, draft.stages, copies)
        block.weight_bytes, block.gradient_bytes, block.optimizer_bytes = whole[number_of]
        expert = [float(size) for size in held.expert_bytes[:, number_of]]
        dense = [size - own for size, own in zip(whole[number_of], expert, strict=True)]
        block.shared_bytes = tuple(a / share + b / expert_share for a, b in zip(dense, expert, strict=True))
        weights, gradients, optimizer = block.shared_bytes
        exchanged = block.gradient_bytes * held.gradient_item
        if block.keeping == WHOLE:
            block.bucket_bytes = exchanged if copies > 1 else 0.0
        else:
            block.buffer_bytes = exchanged
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
            slowest = max(float(costs.update_s(kind, place.tensor, place.expert)[number_of]) for kind in kinds)
            whole_bytes = float(held.weight_bytes[number_of])
            block.update_s = slowest * (weights / whole_bytes if whole_bytes > 0 else 1.0 / share)
    return blocks


def _meets(place: Mesh, cluster: Cluster) -> tuple[bool, bool]:
    """Whether two sets of groups send over one channel, by walking every hop of every ring."""
    channels = cluster.links.effective_channels

    def used(groups: Sequence[Sequence[int]]) -> set[int]:
        rings = [ring_order(cluster.links, group) for group in groups if len(group) > 1]
        hops = [(ring[i - 1], ring[i]) for ring in rings for i in range(len(ring))]
        return {channel for one, other in hops for channel in channels[one][other]}

    inside = {channel for kind in range(len(COLLECTIVE_KINDS)) for channel in used(tensor_groups(place, kind))}
    shares, copies = used(share_groups(place)), used(copy_groups(place))
    return bool(place.sharding and inside & shares), bool(place.sharding and copies & shares)


def static_bytes(block: Block, stages: int, microbatches: int) -> float:
    """What a block holds from its first gather to the end of the step."""
    weights, gradients, optimizer = block.shared_bytes
    total = 0.0 if block.offload else optimizer
    total += 0.0 if block.offload == FULL_OFFLOAD else weights
    if block.keeping in (ONCE, EACH_BACKWARD):
        total += block.weight_bytes
    if block.keeping == WHOLE or (block.keeping == ONCE and (microbatches > 1 or stages > 1)):
        total += block.gradient_bytes
    elif block.offload != FULL_OFFLOAD:
        total += gradients
    return total


def received_bytes(draft: Draft, stage: int, microbatches: int, blocks: Sequence[Block]) -> float:
    """Torch's stages receive every micro-batch's input and gradient in a buffer of its own, made once."""
    inside = draft.ranges[stage]
    received = blocks[inside.start - 1].sent_bytes if stage > 0 else 0.0
    returned = blocks[inside.stop - 1].returned_bytes if stage < draft.stages - 1 else 0.0
    return microbatches * (received + returned)


def _add_pass(
    blocks: list[Block], draft: Draft, place: Mesh, kind: int, samples: int, costs: BlockCosts, traffic: Traffic
) -> None:
    """Makes every block as slow and as large as a pass of so many samples on a device of that kind."""
    passes = costs.passes(kind, place.cut(samples))
    for number, block in enumerate(blocks):
        how = draft.recompute[number]
        moved = [0.0, 0.0]
        for way in (FORWARD_PASS, BACKWARD_PASS):
            for collective, name in enumerate(COLLECTIVE_KINDS):
                size, calls = passes.collective_bytes[way, collective, number], passes.collective_calls[way, collective, number]
                if size > 0.0 and calls > 0.0:
                    table = traffic.table(name, tensor_groups(place, collective))
                    moved[way] += calls * table_s(table, size / calls)
        again = float(passes.again_s[how, number])
        again_tensor = moved[FORWARD_PASS] if how == FULL else 0.0
        computed = (float(passes.forward_s[number]), float(passes.backward_s[number]) + again)
        for way, (compute, tensor) in enumerate(zip(computed, (moved[0], moved[1] + again_tensor), strict=True)):
            block.compute_s[way] = max(block.compute_s[way], compute)
            block.tensor_s[way] = max(block.tensor_s[way], tensor)
        block.weight_s = max(block.weight_s, float(passes.weight_s[number]))
        block.again_s = max(block.again_s, again)
        block.weight_tensor_s = max(block.weight_tensor_s, again_tensor)
        block.sent_bytes = max(block.sent_bytes, float(passes.sent_bytes[number]))
        block.returned_bytes = max(block.returned_bytes, float(passes.returned_bytes[number]))
        block.kept_bytes = max(block.kept_bytes, float(passes.kept_bytes[how, number]))
        working = passes.working_bytes[:, how, number].tolist()
        block.working_bytes = tuple(map(max, zip(block.working_bytes, working, strict=True)))
        block.halved_bytes = max(block.halved_bytes, float(passes.halved_bytes[how, number]))


def _without_ties(draft: Draft, index: int, costs: BlockCosts) -> list[list[float]]:
    """Weight, gradient and optimizer bytes of the blocks; a tied weight counts in the first block of a place that reads it."""
    place = draft.places[index]
    held = costs.held(place.tensor, place.expert)
    whole = [list(map(float, row)) for row in zip(held.weight_bytes, held.gradient_bytes, held.optimizer_bytes, strict=True)]
    here = [places_of(draft, (block,)) == (index,) for block in range(len(whole))]
    for tie in costs.ties:
        part = tie_part(costs, tie.blocks, place)
        for block in [block for block in tie.blocks if here[block]][1:]:
            for column, size in enumerate((tie.weight_bytes, tie.gradient_bytes, tie.optimizer_bytes)):
                whole[block][column] = max(0.0, whole[block][column] - size * part)
    return whole
