"""`World`: how a cluster may differ from the cost model, search problems there, and `Truth`: a made-up cluster to practise on.

A world is a vector of *axes*, each standard normal a priori: how slow each kind of device and each host is, the links inside
hosts and between them, each host's network, the time that the host adds to a pass of a block, and how much longer every part of
a step (`rlplace.strategy.executor.evaluate.PARTS`) takes than priced. Zero is the cost model itself. The prior's standard
deviations are stated below. Step times of strategies in a few worlds are all that `rlplace.measure.belief` needs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.cluster.links import Links
from rlplace.measure.log import Ended
from rlplace.strategy.costs import BlockCosts, BlockPassCosts, Cut, Floats, HeldCosts, Tie
from rlplace.strategy.drafts import Draft, kind_of
from rlplace.strategy.executor.evaluate import PARTS, DraftEvaluator, StepEvaluation
from rlplace.strategy.search.tries import SearchProblem

SPREAD: Mapping[str, float] = {
    "kind": 0.3, "host": 0.1, "inside": 0.3, "between": 0.3, "network": 0.15, "launch": 0.7,
    "tensor": 0.15, "gather": 0.2, "exchange": 0.2, "hand_over": 0.2, "bubble": 0.15, "update": 0.2,
}  # fmt: skip
"""Standard deviation of the log of each factor, by the first word of its axis."""

LAUNCH_S = 5e-5
"""Seconds that a host adds to a pass of a block, times exp(value) - 1; none below zero."""

SLACK = 0.05, 0.15
"""Mean and standard deviation of the log of a step's memory over its prediction: fragments, libraries, caches."""

LEAST_HOST = 0.03
"""Difference of logs below which hosts are alike, so that a search may exchange them."""


@dataclass(frozen=True, eq=False)
class World:
    """Factors on the costs of a cluster by the cost model; `world_of` makes one from a vector.

    Attributes:
        kind: By kind of device, on the seconds of its ops.
        host: [H], by host, on the seconds of its ops.
        inside: On the seconds of transfers inside a host.
        between: On the seconds of transfers between hosts.
        network: [H], by host, on the seconds of its transfers; the slower of two hosts counts.
        launch_s: Added to every pass of a block, forward and backward.
        parts: By entry of `PARTS`, on the step's seconds there; 1 where it is left out.
        slack: On the memory of a step beyond the reserved bytes.
    """

    kind: Mapping[str, float]
    host: tuple[float, ...]
    inside: float = 1.0
    between: float = 1.0
    network: tuple[float, ...] = ()
    launch_s: float = 0.0
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    slack: float = 1.0

    def seconds(self, step: StepEvaluation) -> float:
        """Returns step time with the factors of its parts; inf where it does not end."""
        if not math.isfinite(step.step_time_s):
            return math.inf
        return sum(seconds * self.parts.get(name, 1.0) for name, seconds in step.parts.items())


def axes(cluster: Cluster) -> tuple[str, ...]:
    """Returns names of the axes of a cluster, P of them; those that cannot differ are left out."""
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
        cluster: The cluster by the cost model.
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
    """Returns the block executor of a model on a cluster, both as in a world; `World.parts` are not in it."""
    hosts = [round(math.log(factor) / LEAST_HOST) * LEAST_HOST for factor in world.host]
    speeds = [
        (kind.name, world.kind.get(kind.name, 1.0) * math.exp(hosts[host]))
        for kind, host in zip(cluster.kinds, cluster.hosts, strict=True)
    ]
    by_speed = {speed: f"{speed[0]}/{number}" for number, speed in enumerate(dict.fromkeys(speeds))}
    changed = _WorldCosts(costs, world, {name: speed for speed, name in by_speed.items()})
    return DraftEvaluator(changed, _changed(cluster, world, [by_speed[speed] for speed in speeds]))


def problem_in(world: World, problem: SearchProblem) -> SearchProblem:
    """Returns a search problem where a world is the truth."""
    return dataclasses.replace(problem, scores=evaluator_in(world, problem.costs, problem.cluster))


def fullest(step: StepEvaluation, cluster: Cluster) -> float:
    """Returns the share of the fullest device's memory beyond its reserved bytes."""
    shares = [0.0]
    for peak, device in zip(step.peak_memory_bytes, cluster.devices, strict=True):
        if device.memory_bytes is not None and peak:
            shares.append((peak - device.reserved_bytes) / max(1, device.memory_bytes - device.reserved_bytes))
    return max(shares)


def _changed(cluster: Cluster, world: World, names: Sequence[str]) -> Cluster:
    kinds = tuple(msgspec.structs.replace(kind, name=name) for kind, name in zip(cluster.kinds, names, strict=True))
    devices = []
    for device, name in zip(cluster.devices, names, strict=True):
        room = None if device.memory_bytes is None else (device.memory_bytes - device.reserved_bytes) / world.slack
        memory = None if room is None else device.reserved_bytes + max(1, int(room))
        devices.append(dataclasses.replace(device, kind=name, memory_bytes=memory))
    return dataclasses.replace(cluster, devices=tuple(devices), kinds=kinds, links=_links(cluster, world), text=None)


def _links(cluster: Cluster, world: World) -> Links:
    host = np.array(cluster.hosts)
    network = np.array(world.network or np.ones(host.max() + 1))[host]
    apart = host[:, None] != host[None, :]
    slow = np.where(apart, world.between * np.maximum(network[:, None], network[None, :]), world.inside)
    np.fill_diagonal(slow, 1.0)
    links = cluster.links.whole
    factors = [float(slow[np.ix_(fabric.devices, fabric.devices)].max()) for fabric in links.fabrics]
    return dataclasses.replace(
        links,
        bandwidth_bytes_per_s=links.bandwidth_bytes_per_s / slow,
        latency_s=links.latency_s * slow,
        fabrics=tuple(fabric.slower(by, latency=by) for fabric, by in zip(links.fabrics, factors, strict=True)),
    )


class _WorldCosts:
    """Costs of blocks with the factors of a world; `kinds` are device kinds with their factors, by name."""

    def __init__(self, base: BlockCosts, world: World, kinds: Mapping[str, tuple[str, float]]) -> None:
        self._base, self._world = base, world
        self.names, self.ties, self.classes, self.experts = base.names, base.ties, base.classes, base.experts
        self.tables = base.tables
        self.joins_replicas = base.joins_replicas
        self.kinds = tuple(kinds)
        number = {name: index for index, name in enumerate(base.kinds)}
        self._kind = [(number[name], factor) for name, factor in kinds.values()]
        self._known: dict[tuple[int, Cut], BlockPassCosts] = {}

    names: tuple[str, ...]
    ties: tuple[Tie, ...]
    classes: NDArray[np.int64]
    experts: int
    tables: bool

    def why_not(self, cut: Cut) -> str | None:
        return self._base.why_not(cut)

    def passes(self, kind: int, cut: Cut) -> BlockPassCosts:
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

    def held(self, *degrees: int) -> HeldCosts:  # type: ignore[override]
        return self._base.held(*degrees)

    def update_s(self, kind: int, *degrees: int) -> Floats:  # type: ignore[override]
        number, factor = self._kind[kind]
        return self._base.update_s(number, *degrees) * factor


@dataclass(frozen=True, eq=False)
class Worlds:
    """The sigma points of the unscented transform (Julier and Uhlmann 1997): a center, and one on either side of every axis.

    They give the mean, the standard deviation and the slopes of a function of normal values.

    Attributes:
        costs: Costs of the model's blocks.
        cluster: The cluster by the cost model.
        center: float64 [P], the middle.
    """

    costs: BlockCosts
    cluster: Cluster
    center: Floats

    @staticmethod
    def of(costs: BlockCosts, cluster: Cluster) -> Worlds:
        """Returns worlds around the cost model itself."""
        return Worlds(costs, cluster, np.zeros(len(axes(cluster))))

    @cached_property
    def values(self) -> Floats:
        """float64 [1 + 2 P, P]: the middle, then one standard deviation up each axis, then down."""
        away = np.eye(len(self.center))
        return self.center + np.concatenate([np.zeros((1, len(away))), away, -away])

    @cached_property
    def _worlds(self) -> list[tuple[World, DraftEvaluator]]:
        """Worlds with their executors; worlds that differ in factors of parts alone share one."""
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
        steps = {id(scores): [scores.evaluate(draft) for draft in drafts] for scores in {s: None for _, s in self._worlds}}
        return np.array([[world.seconds(step) for step in steps[id(scores)]] for world, scores in self._worlds])

    def stage_busy_s(self, draft: Draft) -> Floats:
        """Returns float64 [1 + 2 P, S], seconds of the passes of every stage in every world."""
        return np.array([scores.evaluate(draft).stage_busy_s for _, scores in self._worlds])


BENDS = 0.5
"""Part of the curvature along the axes that is in the mean; 1 for squares. Step times are maxima, whose kinks axes share."""


def linear(center: Floats, figures: Floats) -> tuple[Floats, Floats, Floats]:
    """Returns figures of sigma points as a linear function of the axes, by the unscented transform.

    Args:
        center: float64 [P], of the points.
        figures: float64 [1 + 2 P, N], in the order of `Worlds.values`.

    Returns:
        Its value where all axes are zero [N], so that it has the mean at the center (see `BENDS`); slopes [N, P]; and the
        standard deviation of its residual [N], as if it were a square of every axis.
    """
    count = len(center)
    middle, up, down = figures[0], figures[1 : 1 + count], figures[1 + count :]
    slopes, bent = (up - down).T / 2, (up + down).T / 2 - middle[:, None]
    return middle + BENDS * bent.sum(axis=1) - slopes @ center, slopes, np.sqrt(2 * (bent**2).sum(axis=1))


WIDER, TAIL = 1.0, 5.0
"""Scale of a truth's axes over the prior's, and the degrees of freedom of their distribution (Student's t)."""

HABIT, OWN, NOISE = 0.06, 0.02, 0.01
"""Standard deviations of logs: of a kind of strategy, of a single one, and of a measured step."""

TRUE_SLACK = 0.0, 0.15
"""Mean and standard deviation of the log of a truth's memory over the prediction."""

STALL = 0.25, 1.6
"""Chance that one host is slow, and its slowness at most."""


@dataclass(frozen=True, eq=False)
class Truth:
    """A made-up truth: a world further out than the prior expects, with habits of every kind of strategy and stalling hosts.

    Runs are noisy, and fail where memory is short.

    Attributes:
        question: The search problem by the cost model.
        world: The factors that are wrong with it.
        seed: Seed of residuals without a cause.
    """

    question: SearchProblem
    world: World
    seed: int

    @staticmethod
    def drawn(question: SearchProblem, seed: int) -> Truth:
        """Draws a truth."""
        rng = np.random.default_rng([seed, 7])
        values = WIDER * rng.standard_t(TAIL, len(axes(question.cluster))) / math.sqrt(TAIL / (TAIL - 2))
        world = world_of(question.cluster, values, math.exp(rng.normal(*TRUE_SLACK)))
        host = np.array(world.host)
        if len(host) > 1 and rng.random() < STALL[0]:
            host[rng.integers(len(host))] *= rng.uniform(1.1, STALL[1])
        return Truth(question, dataclasses.replace(world, host=tuple(host.tolist())), seed)

    @cached_property
    def true_problem(self) -> SearchProblem:
        """The search problem with the true factors, without habits."""
        return problem_in(self.world, self.question)

    @property
    def scores(self) -> DraftEvaluator:
        """The executor of strategies with the true factors, without habits."""
        return self.true_problem.scores

    def step_s(self, draft: Draft) -> float:
        """Returns the step time without noise."""
        step = self.scores.evaluate(draft)
        strange = self._drawn(kind_of(draft), draft.schedule).normal(0.0, HABIT) + self._drawn(draft).normal(0.0, OWN)
        return self.world.seconds(step) * math.exp(strange)

    def share(self, draft: Draft) -> float:
        """Returns the share of the fullest device's memory beyond its reserved bytes."""
        own = self._drawn("memory", draft).normal(0.0, OWN)
        return fullest(self.question.scores.evaluate(draft), self.question.cluster) * self.world.slack * math.exp(own)

    def run(self, draft: Draft, rng: Generator) -> Ended:
        """Returns one run of a few steps."""
        share = self.share(draft)
        if share > 1.0:
            return Ended("out_of_memory")
        step_s = self.step_s(draft) * math.exp(rng.normal(0.0, NOISE))
        return Ended("done", (step_s,), share, self.pace_s(rng), self.stage_busy_s(draft))

    def stage_busy_s(self, draft: Draft) -> tuple[float, ...]:
        """Returns seconds of the passes of every stage of a pipeline, each mispriced in its own way."""
        own = self._drawn("stages", draft)
        busy = self.scores.evaluate(draft).stage_busy_s
        return tuple(seconds * math.exp(own.normal(0.0, OWN)) for seconds in busy) if len(busy) > 1 else ()

    def pace_s(self, rng: Generator) -> tuple[float, ...]:
        """Returns seconds of every device for a product that takes a millisecond by the cost model."""
        pairs = zip(self.question.cluster.kinds, self.question.cluster.hosts, strict=True)
        factors = [self.world.kind.get(kind.name, 1.0) * self.world.host[host] for kind, host in pairs]
        return tuple(1e-3 * factor * math.exp(rng.normal(0.0, NOISE)) for factor in factors)

    def _drawn(self, *key: object) -> Generator:
        named = repr((self.seed, key)).replace("Mesh(", "Place(")  # the class's name when the published draws were made
        digest = hashlib.sha256(named.encode()).digest()
        return np.random.default_rng(int.from_bytes(digest[:8], "little"))
