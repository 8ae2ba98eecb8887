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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.errors import InputError, show
from rlplace.plan.actions import Action, Rows, chain_rows, listed
from rlplace.strategy.costs import CONTEXT_GATHER, EXPERT_ALL_TO_ALL, STATISTICS, Floats
from rlplace.strategy.drafts import Devices, Draft, Mesh, array_of

Ints = NDArray[np.int64]
Passes = frozenset[tuple[int, int]]
"""Samples and device kinds of the passes that some replicas run."""


class Groups(NamedTuple):
    """Groups of one size that fill a mesh in row-major order.

    Attributes:
        devices: Of the mesh.
        size: Devices of a group.
        stride: Between devices of a group.
        times: How often the devices repeat along hosts that are alike (`rlplace.cluster.collectives.collective_s`).
    """

    devices: tuple[int, ...]
    size: int
    stride: int = 1
    times: int = 1

    @property
    def members(self) -> Ints:
        """int64 [G, size], the devices of each group."""
        return array_of(self.devices).reshape(-1, self.size, self.stride).swapaxes(1, 2).reshape(-1, self.size)


class Border(NamedTuple):
    """A border of neighbouring stages, in one direction. The devices of both places are paired in order.

    Attributes:
        senders: Devices of one place.
        receivers: Devices of the other.
        part: Part of a sender's tensor that each pair carries.
    """

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    part: float

    @property
    def pairs(self) -> Ints:
        """int64 [2, N], senders and receivers of all pairs."""
        count = max(len(self.senders), len(self.receivers))
        ends = array_of(self.senders), array_of(self.receivers)
        return np.stack([end[np.arange(count) * len(end) // count] for end in ends])


@dataclass(frozen=True)
class Lane:
    """One slice of the pipeline.

    Attributes:
        microbatches: Passes a step.
        replicas: For each place its replicas in the lane: samples of a pass, and devices.
    """

    microbatches: int
    replicas: tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]


class AlikeLanes(NamedTuple):
    """Lanes with as many micro-batches, as large, on as quick devices.

    Attributes:
        first: Number of one of them.
        microbatches: Passes a step.
        passes: What the replicas of each place run in a lane.
        devices: For each place int64 [.], the devices of all these lanes.
    """

    first: int
    microbatches: int
    passes: tuple[Passes, ...]
    devices: tuple[Ints, ...]


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
    return Groups(place.devices, size, stride)


def room_bytes(cluster: Cluster) -> Floats:
    """Returns the capacity of every device without its reserved bytes, float64 [D]; inf without a limit."""
    sizes = [inf if d.memory_bytes is None else d.memory_bytes - d.reserved_bytes for d in cluster.devices]
    return np.array(sizes, dtype=np.float64)


def lane_count(draft: Draft) -> int:
    """Returns the number of lanes: one at levels 2 and 3, whose passes all have collectives of all replicas."""
    if any(place.sharding > 1 for place in draft.places):
        return 1
    return gcd(*(place.data_degree for place in draft.places))


def lanes(draft: Draft) -> tuple[Lane, ...]:
    """Returns the lanes of a draft."""
    return tuple(lane_of(draft, number) for number in range(lane_count(draft)))


def lane_of(draft: Draft, number: int) -> Lane:
    """Returns one of the lanes of a draft."""
    count, degree, (sizes, counts) = lane_count(draft), draft.data_degree, draft.shares
    found, width = [], degree // count
    for place in draft.places:
        own, part = place.data_degree // count, len(place.devices) // place.data_degree
        samples = np.array(sizes, dtype=np.int64).reshape(place.data_degree, -1).sum(axis=1).tolist()
        inside = range(number * own, (number + 1) * own)
        found.append(tuple([(samples[j], place.devices[j * part : (j + 1) * part]) for j in inside]))
    return Lane(max(counts[number * width : (number + 1) * width]), tuple(found))


def alike_lanes(draft: Draft, kind: Ints) -> list[AlikeLanes]:
    """Returns the lanes of a draft by their work; `kind` is int64 [D], the kind of every device of the cluster."""
    count, (sizes, counts) = lane_count(draft), draft.shares
    looks = [np.array(counts, dtype=np.int64).reshape(count, -1).max(axis=1)[:, None]]
    for place in draft.places:
        samples = np.array(sizes, dtype=np.int64).reshape(place.data_degree, -1).sum(axis=1)
        kinds = kind[array_of(place.devices)].reshape(place.data_degree, -1)
        looks.append(samples.reshape(count, -1))
        looks.append(kinds.reshape(count, -1))
    look = np.concatenate(looks, axis=1)
    if (look == look[:1]).all():
        sorts = np.zeros(count, dtype=np.int64)
    else:
        sorts = np.unique(look, axis=0, return_inverse=True)[1].ravel()
    found: dict[tuple[int, tuple[Passes, ...]], list[int]] = {}
    firsts = np.sort(np.unique(sorts, return_index=True)[1]).tolist()
    for first in firsts:
        passes = tuple(_passes(draft, place, count, first, kind) for place in draft.places)
        found.setdefault((int(looks[0][first, 0]), passes), []).append(first)
    alike = []
    for (microbatches, passes), own in found.items():
        inside = np.isin(sorts, sorts[own])
        devices = tuple(array_of(place.devices).reshape(count, -1)[inside].ravel() for place in draft.places)
        alike.append(AlikeLanes(own[0], microbatches, passes, devices))
    return alike


def _passes(draft: Draft, place: Mesh, count: int, lane: int, kind: Ints) -> Passes:
    """Returns what the replicas of a place run in a lane."""
    own, share = place.data_degree // count, draft.data_degree // place.data_degree
    samples = np.array(draft.shares[0], dtype=np.int64).reshape(-1, share).sum(axis=1)[lane * own : (lane + 1) * own]
    kinds = kind[array_of(place.devices)].reshape(place.data_degree, -1)[lane * own : (lane + 1) * own]
    count = int(kind.max()) + 1
    return frozenset([divmod(pair, count) for pair in np.unique(samples[:, None] * count + kinds).tolist()])


def stage_actions(draft: Draft, microbatches: int) -> list[list[Action]]:
    """Returns the actions of each place in order.

    Raises:
        InputError: The schedule cannot run the chain.
    """
    return list(map(listed, stage_rows(draft, microbatches)))


def stage_rows(draft: Draft, microbatches: int) -> list[Rows]:
    """Returns `stage_actions` as arrays; raises likewise."""
    if draft.stages == 1:
        each = np.arange(2 * microbatches, dtype=np.int32)
        return [np.stack([0 * each, each % 2, each // 2], axis=1)]
    by_place = chain_rows(draft.place_of_stage, str(draft.schedule), microbatches)
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
    devices = np.sort(np.concatenate([array_of(place.devices) for place in draft.places]))
    if devices[0] < 0 or devices[-1] >= cluster.num_devices or (devices[1:] == devices[:-1]).any():
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

    Where the receiver has more replicas, each gets its part of the samples; where it has more devices a replica, each gets
    everything.
    """
    found: dict[tuple[int, int], Border] = {}
    for one, other in pairwise(draft.place_of_stage):
        for sender, receiver in ((one, other), (other, one)):
            if sender != receiver and (sender, receiver) not in found:
                here, there = draft.places[sender], draft.places[receiver]
                part = here.data_degree / max(here.data_degree, there.data_degree)
                found[sender, receiver] = Border(here.devices, there.devices, part)
    return found


def tie_groups(places: Sequence[Mesh]) -> Groups:
    """Returns the devices of several places that sum a tied gradient: those of one coordinate of the smallest place."""
    least = min(len(place.devices) for place in places)
    own = [array_of(place.devices)[np.arange(least) * len(place.devices) // least] for place in places]
    return Groups(Devices(np.stack(own, axis=1).ravel().tolist()), len(places))


def places_of(draft: Draft, blocks: Sequence[int]) -> tuple[int, ...]:
    """Returns the places of these blocks, each once."""
    return tuple(dict.fromkeys(draft.place_of_stage[bisect_right(draft.bounds, block) - 1] for block in blocks))
