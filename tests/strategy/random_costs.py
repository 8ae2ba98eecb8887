"""Costs of made-up models on preset clusters, and drafts for them: to test executor and search without capturing anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.errors import InputError
from rlplace.plan.schedule import LOOP, ONE, SCHEDULES, V
from rlplace.plan.strategy import CONTEXT_METHODS, GATHER
from rlplace.strategy.costs import (
    COLLECTIVE_KINDS,
    CONTEXT_GATHER,
    CONTEXT_SCATTER,
    EXPERT_ALL_TO_ALL,
    STATISTICS,
    BlockPassCosts,
    Cut,
    HeldCosts,
    Tie,
)
from rlplace.strategy.drafts import Draft, Mesh

CLUSTERS = ("a100-80g:4", "a100-80g:8", "a100-80g:2+t4:2", "h100:2x4,ib=400g", "v100:8", "rtx4090:4")


@dataclass(frozen=True)
class RandomCosts:
    """Blocks whose costs follow simple laws of the cut, with the numbers of a transformer of random size."""

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    speed: NDArray[np.float64]  # of each kind
    classes: NDArray[np.int64]
    forward: NDArray[np.float64]  # seconds a sample on a kind of speed 1
    ratio: NDArray[np.float64]
    activation: NDArray[np.float64]
    border: NDArray[np.float64]
    weights: NDArray[np.float64]
    state: float = 6.0
    item: float = 1.0
    fixed_s: float = 5e-5
    weight_part: float = 0.45
    between: float = 0.25  # of what is kept: what the first half of a split backward leaves for the second
    ties: tuple[Tie, ...] = ()
    experts: int = 1
    tables: bool = False
    joins_replicas: bool = False
    released: bool = False
    matrices: float = 0.0  # that an update needs whole, of each block
    known: dict[object, object] = field(default_factory=dict, compare=False)

    @property
    def turns(self) -> NDArray[np.float64]:
        return np.stack([np.full(len(self.names), self.matrices), self.weights * 0.4 * (self.matrices > 0)])

    def why_not(self, cut: Cut) -> str | None:
        if self.experts % cut.expert:  # a search finds no experts; `passes` has prices for drafts that say so all the same
            return "no such expert degree"
        return None if cut.tensor <= 8 else "no such tensor degree"

    def passes(self, kind: int, cut: Cut) -> BlockPassCosts:
        if cut.tensor > 8:
            raise InputError("cut: no such tensor degree")
        if (kind, cut) not in self.known:
            self.known[kind, cut] = self._passes(kind, cut)
        return self.known[kind, cut]  # type: ignore[return-value]

    def _passes(self, kind: int, cut: Cut) -> BlockPassCosts:
        part = cut.samples / cut.context / cut.tensor
        forward = self.fixed_s + self.forward * part / self.speed[kind]
        backward = forward * self.ratio
        spread = cut.tensor if cut.sequence_parallel else 1
        kept = self.activation * cut.samples / cut.context / cut.tensor
        border = self.border * cut.samples / cut.context
        bytes_, calls = np.zeros((2, 2, len(COLLECTIVE_KINDS), len(self.names)))
        if cut.tensor > 1:
            for way in range(2):
                if cut.sequence_parallel:
                    bytes_[way, 1], bytes_[way, 2] = 2 * border, 2 * border
                    calls[way, 1], calls[way, 2] = 2.0, 2.0
                else:
                    bytes_[way, 0], calls[way, 0] = 2 * border, 2.0
        if cut.context > 1:
            bytes_[0, CONTEXT_GATHER] = bytes_[1, CONTEXT_SCATTER] = 0.5 * border
            calls[0, CONTEXT_GATHER] = calls[1, CONTEXT_SCATTER] = 1.0
        if cut.expert > 1:
            bytes_[:, EXPERT_ALL_TO_ALL], calls[:, EXPERT_ALL_TO_ALL] = 2 * border, 2.0
        if self.joins_replicas:
            bytes_[:, STATISTICS], calls[:, STATISTICS] = 0.01 * border, 3.0
        sent = (border / spread).astype(np.int64)
        sent[-1] = 0
        returned = sent * 3 // 4  # what is sent need not be trained
        light = (border / spread).astype(np.int64)
        whole = kept.astype(np.int64)
        keeps = np.stack([light + whole, light + whole // 3, light])
        # A backward begins with the gradient of its output, what runs again and something for a moment; then pieces of
        # `random_ops` go, a third with the last but one and the last one each, where that of its input is there, too.
        begins = whole // 3 + np.stack([0 * whole, whole * 2 // 3, whole])
        ends = light + whole // 3 + np.append(0, returned[:-1]) - keeps
        gradients = self.held(cut.tensor, cut.expert).gradient_bytes
        grown = [
            light + whole + gradients // 10 - keeps,
            light + whole * 2 // 3 + gradients * 9 // 10 - keeps,
            ends + gradients,
        ]
        most = np.maximum(begins + returned, ends)
        working = [np.stack([whole // 5] * 3), most, np.maximum(begins, ends), np.maximum.reduce([most, *grown])]
        return BlockPassCosts(
            forward_s=forward,
            backward_s=backward,
            weight_s=backward * self.weight_part,
            again_s=np.stack([forward * 0, forward * 0.2, forward]),
            kept_bytes=keeps,
            working_bytes=np.stack(working),
            sent_bytes=sent,
            returned_bytes=returned,
            halved_bytes=keeps + (whole * self.between).astype(np.int64),
            collective_bytes=bytes_,
            collective_calls=calls,
            hidden_s=np.stack([forward, backward]) * (0.01 if cut.context_method == "ring" else 0.0),
        )

    def held(self, tensor: int = 1, expert: int = 1) -> HeldCosts:
        if ("held", tensor, expert) not in self.known:
            tied = self.classes == 4  # see `random_costs`
            experts = np.where(tied, 0, self.weights / tensor / 3 / expert).astype(np.int64)
            weights = experts + (self.weights / tensor * np.where(tied, 1, 2 / 3)).astype(np.int64)
            state = (weights * self.state).astype(np.int64)
            own = np.stack([experts, experts, (experts * self.state).astype(np.int64)]) * (expert > 1)
            self.known["held", tensor, expert] = HeldCosts(weights, weights, state, own, self.turns, self.item, self.released)
        return self.known["held", tensor, expert]  # type: ignore[return-value]

    def update_s(self, kind: int, tensor: int = 1, expert: int = 1) -> NDArray[np.float64]:
        return self.held(tensor, expert).weight_bytes * (self.state + 2) / (1.5e12 * self.speed[kind])


def random_costs(rng: Generator, cluster: Cluster, blocks: int, *, tied: bool = False, alike: bool = False) -> RandomCosts:
    """A model of so many blocks on the device kinds of a cluster.

    Args:
        rng: Source of the numbers.
        cluster: Where it would run.
        blocks: Blocks.
        tied: Whether the first and the last block share a weight.
        alike: Whether all blocks are of one class; else of up to four.
    """
    kinds = tuple(dict.fromkeys(str(device.kind) for device in cluster.devices))
    by_name = {kind.name: kind for kind in cluster.kinds}
    speed = np.array([by_name[name].memory_bandwidth_bytes_per_s for name in kinds]) / 2e12
    classes = np.zeros(blocks, dtype=np.int64) if alike else rng.integers(0, 4, blocks)

    def drawn(low: float, high: float) -> NDArray[np.float64]:
        return np.exp(rng.uniform(np.log(low), np.log(high), 5))[classes]

    size = float(np.exp(rng.uniform(np.log(3e6), np.log(5e8))))
    ties: tuple[Tie, ...] = ()
    if tied and blocks > 1:
        classes[0] = classes[-1] = 4
    weights = drawn(0.7, 1.4) * size
    if tied and blocks > 1:
        copy = int(weights[0])
        ties = (Tie((0, blocks - 1), copy, copy, int(copy * 6.0)),)
    return RandomCosts(
        names=tuple(f"layers.{block}" for block in range(blocks)),
        kinds=kinds,
        speed=speed,
        classes=classes,
        forward=drawn(0.6, 1.7) * size * 2e-11 * 10 ** rng.uniform(-0.5, 0.5),
        ratio=drawn(1.6, 2.4),
        activation=drawn(0.5, 2.0) * size * 10 ** rng.uniform(-1, 0.5),
        border=np.full(blocks, size * 10 ** rng.uniform(-2, -0.5)),
        weights=weights,
        item=float(rng.choice([1.0, 2.0])),
        ties=ties,
    )


def random_draft(rng: Generator, cluster: Cluster, blocks: int, *, wild: bool = True) -> Draft:
    """A draft that contradicts itself nowhere.

    Args:
        rng: Source of the choices.
        cluster: Its devices.
        blocks: Blocks of the model.
        wild: Whether replicas may have unlike micro-batches, and devices any order.
    """
    count = cluster.num_devices
    stages_on = [p for p in (1, 1, 2, 3, 4, 8) if p <= min(count, blocks)]
    places = int(rng.choice(stages_on))
    width = int(rng.choice([w for w in (1, 2, 4, 8, 16) if w * places <= count]))
    devices = rng.permutation(count) if wild and rng.random() < 0.5 else np.arange(count)
    schedules = [name for name in SCHEDULES if SCHEDULES[name].layout != V or 2 * places <= blocks]
    schedule = str(rng.choice(schedules)) if places > 1 else None
    layout = ONE if schedule is None else SCHEDULES[schedule].layout
    chunks = int(rng.integers(1, min(3, blocks // places) + 1)) if layout == LOOP else 1
    order = list(range(places)) * chunks if layout != V else [*range(places), *reversed(range(places))]
    found = [_random_place(rng, devices[i * width : (i + 1) * width].tolist(), places > 1) for i in range(places)]
    if places > 1 and rng.random() < 0.7:
        found = [Mesh(place.devices, *(getattr(found[0], name) for name in _AXES)) for place in found]
    cuts = sorted(rng.choice(np.arange(1, blocks), len(order) - 1, replace=False).tolist()) if len(order) > 1 else []
    degree = max(place.data_degree for place in found)
    microbatches = places * int(rng.integers(1, 4)) if places > 1 else int(rng.integers(1, 5))
    microbatches *= 2 if schedule == "dualpipev" else 1
    lockstep = any(place.sharding > 1 for place in found)
    unlike = wild and degree > 1 and rng.random() < 0.3
    sizes = tuple(rng.integers(1, 5, degree).tolist()) if unlike else (int(rng.integers(1, 5)),)
    counts: tuple[int, ...] = (microbatches,)
    if unlike and not lockstep and len({place.data_degree for place in found}) == 1:
        counts = tuple(microbatches * int(k) for k in rng.integers(1, 3, degree))
    return Draft(
        (0, *cuts, blocks), tuple(found), tuple(order), bytes(rng.choice(3, blocks, p=[0.6, 0.2, 0.2]).tolist()),
        bytes(rng.choice(3, blocks, p=[0.8, 0.1, 0.1]).tolist()), sizes, counts, schedule,
    )  # fmt: skip


_AXES = ("replicate", "shard", "context", "tensor", "expert", "sharding", "sequence_parallel")


def _random_place(rng: Generator, devices: list[int], pipeline: bool) -> Mesh:
    left, axes = len(devices), [1, 1, 1, 1]
    while left > 1:
        axes[int(rng.choice(4, p=[0.3, 0.35, 0.05, 0.3]))] *= 2
        left //= 2
    level = 0 if axes[1] * axes[2] == 1 or (axes[1] == 1 and rng.random() < 0.5) else 1 if pipeline else int(rng.integers(1, 4))
    expert = int(rng.choice([1, 1, axes[1] if level else 1, prod(axes[1:])]))
    method = CONTEXT_METHODS[len(devices) % len(CONTEXT_METHODS)] if axes[2] > 1 else GATHER
    return Mesh(tuple(devices), *axes, expert, level, axes[3] > 1 and bool(rng.random() < 0.5), method)
