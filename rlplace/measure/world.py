"""`World`: what a cluster may be other than the cost model says, and questions of strategies asked there.

A world is a vector of *axes*, each standard normal by what is believed before anything ran: how slow each kind of device and
each host is, the links inside hosts and between them, each host's network, what the host adds to a pass of a block, and how
much longer every part of a step (`rlplace.strategy.executor.evaluate.PARTS`) takes than it should. Zero is the cost model
itself. The spreads are stated below. Step times of strategies in a few worlds are all that `rlplace.measure.belief` needs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.cluster.links import Links
from rlplace.strategy.costs import BlockCosts, Cut, Floats, HeldCosts, PassCosts, Tie
from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.evaluate import PARTS, DraftEvaluator, StepEvaluation

SPREAD: Mapping[str, float] = {
    "kind": 0.3, "host": 0.1, "inside": 0.3, "between": 0.3, "network": 0.15, "launch": 0.7,
    "tensor": 0.15, "gather": 0.2, "exchange": 0.2, "hand_over": 0.2, "bubble": 0.15, "update": 0.2,
}  # fmt: skip
"""Standard deviation of the log of each factor, by the first word of its axis."""

LAUNCH_S = 5e-5
"""What a host adds to a pass of a block is this times exp(value) - 1, and nothing below zero."""

SLACK = 0.05, 0.15
"""Mean and standard deviation of the log of how much more memory a step takes than is predicted: fragments, libraries,
caches."""

LEAST_HOST = 0.03
"""Hosts that are nearer to each other than that are alike, so that a search may treat them so."""


@dataclass(frozen=True, eq=False)
class World:
    """Factors on what a cost model says of a cluster; `world_of` makes one from a vector.

    Attributes:
        kind: By kind of device, on the seconds of its ops.
        host: [H], likewise, by host.
        inside: On the seconds of everything that moves inside a host.
        between: Between hosts.
        network: [H], further factor of what a host sends or receives; the slower of two counts.
        launch_s: Added to every pass of a block, forward and backward.
        parts: By entry of `PARTS`, on what the step spends there; 1 where it is left out.
        slack: On the memory of a step beyond what is reserved.
    """

    kind: Mapping[str, float]
    host: tuple[float, ...]
    inside: float = 1.0
    between: float = 1.0
    network: tuple[float, ...] = ()
    launch_s: float = 0.0
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    slack: float = 1.0

    def seconds(self, said: StepEvaluation) -> float:
        """Returns step time with the factors of its parts; inf where it does not end."""
        if not math.isfinite(said.step_time_s):
            return math.inf
        return sum(seconds * self.parts.get(name, 1.0) for name, seconds in said.parts.items())


def axes(cluster: Cluster) -> tuple[str, ...]:
    """Names of the axes of a cluster, P of them; those that cannot differ are left out."""
    kinds, hosts = dict.fromkeys(kind.name for kind in cluster.kinds), sorted(set(cluster.hosts))
    names = [f"kind {name}" for name in kinds]
    if len(hosts) > 1:
        names += [f"host {host}" for host in hosts]
    if len(cluster.devices) > len(hosts):
        names.append("inside")
    if len(hosts) > 1:
        names += ["between", *(f"network {host}" for host in hosts)]
    return (*names, "launch", *(part for part in PARTS if part in SPREAD))


def world_of(cluster: Cluster, values: Sequence[float] | Floats, slack: float = 1.0) -> World:
    """Returns the world of a vector.

    Args:
        cluster: As the cost model knows it.
        values: [P], in standard deviations, by `axes`.
        slack: Factor on memory.
    """
    log = {name: SPREAD[name.partition(" ")[0]] * float(value) for name, value in zip(axes(cluster), values, strict=True)}

    def factor(name: str) -> float:
        return math.exp(log.get(name, 0.0))

    hosts = range(max(cluster.hosts) + 1)
    return World(
        kind={kind.name: factor(f"kind {kind.name}") for kind in cluster.kinds},
        host=tuple(factor(f"host {host}") for host in hosts),
        inside=factor("inside"),
        between=factor("between"),
        network=tuple(factor(f"network {host}") for host in hosts),
        launch_s=LAUNCH_S * math.expm1(max(0.0, log["launch"])),
        parts={part: factor(part) for part in PARTS if part in SPREAD},
        slack=slack,
    )


def evaluator_in(world: World, costs: BlockCosts, cluster: Cluster) -> DraftEvaluator:
    """Returns the block executor of a model on a cluster as a world says that both are; `World.parts` are not in it."""
    names = _kind_names(world, cluster)
    changed = _Costs(costs, world, dict(zip(names, _factors(world, cluster), strict=True)))
    return DraftEvaluator(changed, _changed(cluster, world, names))


def _factors(world: World, cluster: Cluster) -> list[tuple[str, float]]:
    """Of every device its kind, and what its ops take over what the cost model says."""
    hosts = [round(math.log(factor) / LEAST_HOST) * LEAST_HOST for factor in world.host]
    return [
        (kind.name, world.kind.get(kind.name, 1.0) * math.exp(hosts[host]))
        for kind, host in zip(cluster.kinds, cluster.hosts, strict=True)
    ]


def _kind_names(world: World, cluster: Cluster) -> list[str]:
    """Of every device a name of its kind that it shares with those that are as fast."""
    seen: dict[tuple[str, float], str] = {}
    for name, factor in _factors(world, cluster):
        seen.setdefault((name, factor), f"{name}/{len(seen)}")
    return [seen[device] for device in _factors(world, cluster)]


def _changed(cluster: Cluster, world: World, names: Sequence[str]) -> Cluster:
    kinds = tuple(msgspec.structs.replace(kind, name=name) for kind, name in zip(cluster.kinds, names, strict=True))
    devices = []
    for device, name in zip(cluster.devices, names, strict=True):
        room = None if device.memory_bytes is None else (device.memory_bytes - device.reserved_bytes) / world.slack
        memory = None if room is None else device.reserved_bytes + max(1, int(room))
        devices.append(dataclasses.replace(device, kind=name, memory_bytes=memory))
    return dataclasses.replace(
        cluster, devices=tuple(devices), kinds=kinds, links=_links(cluster, world), text=None
    )  # fmt: skip


def _links(cluster: Cluster, world: World) -> Links:
    host = np.array(cluster.hosts)
    network = np.array(world.network or np.ones(host.max() + 1))[host]
    apart = host[:, None] != host[None, :]
    slow = np.where(apart, world.between * np.maximum(network[:, None], network[None, :]), world.inside)
    np.fill_diagonal(slow, 1.0)
    links = cluster.links
    factors = [float(slow[np.ix_(fabric.devices, fabric.devices)].max()) for fabric in links.fabrics]
    return dataclasses.replace(
        links,
        bandwidth_bytes_per_s=links.bandwidth_bytes_per_s / slow,
        latency_s=links.latency_s * slow,
        fabrics=tuple(fabric.slower(by, latency=by) for fabric, by in zip(links.fabrics, factors, strict=True)),
    )


class _Costs:
    """Costs of blocks with the factors of a world; `kinds` are names of kinds by speed."""

    def __init__(self, base: BlockCosts, world: World, kinds: Mapping[str, tuple[str, float]]) -> None:
        self._base, self._world = base, world
        self.names, self.ties, self.classes, self.experts = base.names, base.ties, base.classes, base.experts
        self.kinds = tuple(kinds)
        number = {name: index for index, name in enumerate(base.kinds)}
        self._kind = [(number[name], factor) for name, factor in kinds.values()]
        self._known: dict[tuple[int, Cut], PassCosts] = {}

    names: tuple[str, ...]
    ties: tuple[Tie, ...]
    classes: NDArray[np.int64]
    experts: int

    def why_not(self, cut: Cut) -> str | None:
        return self._base.why_not(cut)

    def passes(self, kind: int, cut: Cut) -> PassCosts:
        if (kind, cut) not in self._known:
            number, factor = self._kind[kind]
            base, launch_s = self._base.passes(number, cut), self._world.launch_s
            again_s = base.again_s * factor + np.where(base.again_s > 0, launch_s, 0.0)
            self._known[kind, cut] = dataclasses.replace(
                base,
                forward_s=base.forward_s * factor + launch_s,
                backward_s=base.backward_s * factor + launch_s,
                weight_s=base.weight_s * factor,
                again_s=again_s,
            )
        return self._known[kind, cut]

    def held(self, tensor: int = 1, expert: int = 1) -> HeldCosts:
        return self._base.held(tensor, expert)

    def update_s(self, kind: int, tensor: int = 1, expert: int = 1) -> Floats:
        number, factor = self._kind[kind]
        return self._base.update_s(number, tensor, expert) * factor


@dataclass(frozen=True, eq=False)
class Worlds:
    """The worlds that tell how figures change along the axes: one in the middle, and one on either side of it on every axis.

    They are the sigma points of the unscented transform (Julier and Uhlmann 1997), which has the mean and the spread of a
    function of normal values from them, and its slopes.

    Attributes:
        costs: Of the model.
        cluster: As the cost model knows it.
        center: float64 [P], the middle.
    """

    costs: BlockCosts
    cluster: Cluster
    center: Floats

    @staticmethod
    def of(costs: BlockCosts, cluster: Cluster) -> Worlds:
        """Those around the cost model itself."""
        return Worlds(costs, cluster, np.zeros(len(axes(cluster))))

    @cached_property
    def values(self) -> Floats:
        """float64 [1 + 2 P, P]: the middle, then one standard deviation up each axis, then down."""
        away = np.eye(len(self.center))
        return self.center + np.concatenate([np.zeros((1, len(away))), away, -away])

    @cached_property
    def _worlds(self) -> list[tuple[World, DraftEvaluator]]:
        """Each with its executor; worlds that differ in factors of parts alone share one."""
        made: dict[Any, DraftEvaluator] = {}
        found = []
        for world in (world_of(self.cluster, values) for values in self.values):
            key = (tuple(world.kind.items()), world.host, world.inside, world.between, world.network, world.launch_s)
            if key not in made:
                made[key] = evaluator_in(world, self.costs, self.cluster)
            found.append((world, made[key]))
        return found

    def seconds(self, drafts: Sequence[Draft]) -> Floats:
        """Returns float64 [1 + 2 P, C], step times of drafts in every world."""
        said = {id(scores): [scores.evaluate(draft) for draft in drafts] for scores in {s: None for _, s in self._worlds}}
        return np.array([[world.seconds(one) for one in said[id(scores)]] for world, scores in self._worlds])

    def stage_busy_s(self, draft: Draft) -> Floats:
        """Returns float64 [1 + 2 P, S], seconds of the passes of every stage in every world."""
        return np.array([scores.evaluate(draft).stage_busy_s for _, scores in self._worlds])


BENDS = 0.5
"""Part of what axes bend a figure that its mean has; 1 for squares. Step times are maxima, whose kinks several axes share."""


def linear(center: Floats, figures: Floats) -> tuple[Floats, Floats, Floats]:
    """Returns figures of sigma points as a linear function of the axes, by the unscented transform.

    Args:
        center: float64 [P], of the points.
        figures: float64 [1 + 2 P, N], in the order of `Worlds.values`.

    Returns:
        Its value where all axes are zero [N], so that it has the mean at the center (see `BENDS`); slopes [N, P]; and the
        standard deviation of what it leaves over [N], as if every axis bent it like a square.
    """
    count = len(center)
    middle, up, down = figures[0], figures[1 : 1 + count], figures[1 + count :]
    slopes, bent = (up - down).T / 2, (up + down).T / 2 - middle[:, None]
    return middle + BENDS * bent.sum(axis=1) - slopes @ center, slopes, np.sqrt(2 * (bent**2).sum(axis=1))
