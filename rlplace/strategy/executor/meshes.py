"""Groups of devices that communicate: the axes of a mesh, lanes of a pipeline, borders of stages.

A *lane* is a slice of all places that runs micro-batches on its own until gradients are exchanged: a replica where all places
have one data degree. Places of unlike degrees run as many lanes as their degrees have in common; a place's replicas inside one
lane take their parts of the same micro-batches and wait for each other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, inf

from rlplace.cluster import Cluster
from rlplace.errors import InputError, show
from rlplace.plan.actions import Action, chain_actions
from rlplace.strategy.costs import CONTEXT_GATHER, EXPERT_ALL_TO_ALL, STATISTICS
from rlplace.strategy.drafts import Draft, Mesh

Groups = tuple[tuple[int, ...], ...]
Pairs = tuple[tuple[int, int], ...]
Border = tuple[Pairs, float]
"""Pairs of devices that send at a stage border, and the part of a sender's tensor that each pair carries."""


@dataclass(frozen=True)
class Lane:
    """One slice of the pipeline.

    Attributes:
        microbatches: Passes a step.
        replicas: For each place its replicas in the lane: samples of a pass, and devices.
    """

    microbatches: int
    replicas: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]


def tensor_groups(place: Mesh, kind: int) -> Groups:
    """Returns the devices that move the tensors of one pass together, by index of `COLLECTIVE_KINDS`.

    Tokens of experts move in the expert group, consecutive devices of shard x context x tensor; rows of divided tables between
    all replicas; keys and values in the context group; statistics of norms over the replicas; the rest in the tensor group.
    """
    if kind == STATISTICS:
        return _groups(place, place.data_degree, place.context * place.tensor)
    if kind == EXPERT_ALL_TO_ALL:
        return _groups(place, place.expert * place.tables, 1)
    if kind >= CONTEXT_GATHER:
        return _groups(place, place.context, place.tensor)
    return _groups(place, place.tensor, 1)


def share_groups(place: Mesh) -> Groups:
    """Returns the devices that share parameters: shard x context, at levels 1 to 3."""
    return _groups(place, share_degree(place), place.tensor)


def turn_groups(place: Mesh) -> Groups:
    """Returns the devices over which matrices are cut that an update needs whole: those of shares, or a tensor group."""
    return share_groups(place) if place.sharding else tensor_groups(place, 0)


def expert_share_groups(place: Mesh) -> Groups:
    """Returns the devices that share the weights of the same experts, at levels 1 to 3."""
    return _groups(place, expert_share_degree(place), place.expert)


def copy_groups(place: Mesh) -> Groups:
    """Returns the devices with the same weights, or the same share of them: replicate, at level 0 replicate x context."""
    return _groups(place, copy_degree(place), place.shard * (place.context if place.sharding else 1) * place.tensor)


def share_degree(place: Mesh) -> int:
    """Returns the number of parts of weights: 1 at level 0."""
    return place.shard * place.context if place.sharding else 1


def expert_share_degree(place: Mesh) -> int:
    """Returns the number of parts of the weights of experts: 1 at level 0, and for divided tables, which nothing shares."""
    return place.shard * place.context * place.tensor // place.expert if place.sharding and place.tables == 1 else 1


def copy_degree(place: Mesh) -> int:
    """Returns the size of `copy_groups`."""
    return place.replicate if place.sharding else place.replicate * place.context


def spreads(place: Mesh) -> bool:
    """Returns whether experts can be spread over the expert groups of a place, and tables be divided over its replicas."""
    group = place.shard * place.context * place.tensor
    if place.tables > 1:
        return place.tables == place.data_degree == len(place.devices) and place.expert == 1
    return group % place.expert == 0 and (place.sharding > 0 or place.expert in (1, group))


def _groups(place: Mesh, size: int, stride: int) -> Groups:
    """Returns groups of `size` devices, `stride` apart."""
    devices, span = place.devices, size * stride
    return tuple(
        devices[start + offset : start + offset + span : stride]
        for start in range(0, len(devices), span)
        for offset in range(stride)
    )


def room_bytes(cluster: Cluster) -> tuple[float, ...]:
    """Returns the capacity of every device without its reserved bytes; inf without a limit."""
    return tuple(inf if d.memory_bytes is None else float(d.memory_bytes - d.reserved_bytes) for d in cluster.devices)


def lanes(draft: Draft) -> tuple[Lane, ...]:
    """Returns the lanes of a draft. Levels 2 and 3 make one: every pass of theirs has collectives of all replicas."""
    degree, (sizes, counts) = draft.data_degree, draft.shares
    count = gcd(*(place.data_degree for place in draft.places))
    if any(place.sharding > 1 for place in draft.places):
        count = 1
    width = degree // count
    found: list[list[tuple[tuple[int, tuple[int, ...]], ...]]] = [[] for _ in range(count)]
    for place in draft.places:
        own, share = place.data_degree // count, degree // place.data_degree
        part = len(place.devices) // place.data_degree
        samples = [sum(sizes[j : j + share]) for j in range(0, degree, share)]
        replicas = [(size, place.devices[j * part : (j + 1) * part]) for j, size in enumerate(samples)]
        for lane in range(count):
            found[lane].append(tuple(replicas[lane * own : (lane + 1) * own]))
    return tuple(Lane(max(counts[lane * width : (lane + 1) * width]), tuple(places)) for lane, places in enumerate(found))


def stage_actions(draft: Draft, microbatches: int) -> list[list[Action]]:
    """Returns the actions of each place in order.

    Raises:
        InputError: The schedule cannot run the chain.
    """
    if draft.stages == 1:
        return [[Action(0, kind, n) for n in range(microbatches) for kind in "FB"]]
    by_place = chain_actions(draft.place_of_stage, str(draft.schedule), microbatches)
    return [by_place[place] for place in range(len(draft.places))]


def check_draft(draft: Draft, cluster: Cluster, blocks: int) -> None:
    """Refuses what has no meaning for an executor; `Draft.strategy` checks the rest.

    Raises:
        InputError: Two fields contradict each other.
    """
    stages, degree = draft.stages, draft.data_degree
    if len(draft.bounds) != stages + 1 or draft.bounds[0] != 0 or draft.bounds[-1] != blocks:
        raise InputError(f"draft: bounds {show(list(draft.bounds))} do not cut {blocks} blocks into {stages} stages")
    if any(begin >= end for begin, end in pairwise(draft.bounds)):
        raise InputError(f"draft: bounds {show(list(draft.bounds))} leave a stage without blocks; leave the stage out")
    if len(draft.recompute) != blocks or len(draft.offload) != blocks:
        raise InputError(f"draft: recompute and offload need one entry for each of {blocks} blocks")
    if set(draft.place_of_stage) != set(range(len(draft.places))):
        raise InputError("draft: every place holds at least one stage, and every stage has one of the places")
    devices = draft.devices
    if len(set(devices)) < len(devices) or min(devices) < 0 or max(devices) >= cluster.num_devices:
        raise InputError(f"draft: devices must be distinct numbers in 0..{cluster.num_devices - 1}")
    for index, place in enumerate(draft.places):
        size = place.replicate * place.shard * place.context * place.tensor
        leveled = place.shard * place.context > 1 if place.sharding else place.shard == 1
        if size != len(place.devices) or not leveled or degree % place.data_degree:
            raise InputError(
                f"draft: places[{index}]: its mesh needs as many devices as it has, a sharding level of at least 1 where "
                "shard is above 1, 0 where shard and context are 1, and a data degree that divides the largest"
            )
        if not spreads(place):
            raise InputError(
                f"draft: places[{index}]: expert {place.expert} does not divide shard x context x tensor, or is less than all "
                "of it at sharding level 0, where experts have no shares; or tables are divided over other than all replicas"
            )
        if stages > 1 and place.tables > 1:
            raise InputError(f"draft: places[{index}]: tables are divided in a single stage")
        if stages > 1 and place.sharding > 1:
            raise InputError(f"draft: places[{index}]: a pipeline has sharding level 0 or 1")
    if len(draft.microbatch) not in (1, degree) or len(draft.microbatches) not in (1, degree):
        raise InputError(f"draft: microbatch and microbatches need one entry, or one for each of {degree} replicas")


def borders(draft: Draft) -> dict[tuple[int, int], Border]:
    """Returns the borders of neighbouring stages on unlike places, by sender and receiver.

    Devices of both places are paired in order. Where the receiver has more replicas, each gets its part of the samples; where
    it has more devices a replica, each gets everything.
    """
    found: dict[tuple[int, int], Border] = {}
    for one, other in pairwise(draft.place_of_stage):
        for sender, receiver in ((one, other), (other, one)):
            if sender != receiver and (sender, receiver) not in found:
                ends = draft.places[sender], draft.places[receiver]
                count = max(len(end.devices) for end in ends)
                spread = [[end.devices[i * len(end.devices) // count] for i in range(count)] for end in ends]
                degrees = [end.data_degree for end in ends]
                found[sender, receiver] = tuple(zip(*spread, strict=True)), degrees[0] / max(degrees)
    return found


def tie_groups(places: Sequence[Mesh]) -> Groups:
    """Returns the devices of several places that sum a tied gradient: those of one coordinate of the smallest place."""
    least = min(len(place.devices) for place in places)
    return tuple(tuple(place.devices[i * len(place.devices) // least] for place in places) for i in range(least))


def places_of(draft: Draft, blocks: Sequence[int]) -> tuple[int, ...]:
    """Returns the places of these blocks, each once."""
    return tuple(dict.fromkeys(draft.place_of_stage[bisect_right(draft.bounds, block) - 1] for block in blocks))
