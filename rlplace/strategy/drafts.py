"""`Draft`: a strategy by numbers instead of names, as search and executor handle it by the thousand.

A draft says what a `rlplace.plan.strategy.Pipeline` says. It is cheap to make, hash and change, and checked only when it
becomes a strategy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from rlplace.plan.strategy import GATHER, ContextMethod, Pipeline, Stage, Strategy
from rlplace.strategy.costs import RECOMPUTE, Cut

OFFLOAD = ("none", "optimizer", "all")
"""Parts of a block in host memory."""


_MANY = 64  # devices from which on their hash is kept


class Devices(tuple[int, ...]):
    """Device numbers whose hash and array are computed once: sets of thousands of devices are keys of many caches."""

    @cached_property
    def array(self) -> NDArray[np.int64]:
        """int64 [D], the numbers."""
        return np.array(self, dtype=np.int64)

    @cached_property
    def consecutive(self) -> bool:
        """True where each is one more than the one before."""
        return bool((np.diff(self.array) == 1).all())

    def __hash__(self) -> int:
        if "_hash" not in self.__dict__:
            self._hash = super().__hash__()
        return self._hash


def array_of(devices: tuple[int, ...]) -> NDArray[np.int64]:
    """Returns device numbers as an array, which must not be changed."""
    return devices.array if isinstance(devices, Devices) else np.array(devices, dtype=np.int64)


@dataclass(frozen=True)
class Mesh:
    """A mesh of devices that holds one or more stages.

    Attributes:
        devices: Device numbers, filling replicate x shard x context x tensor in row-major order.
        replicate: Whole copies.
        shard: Devices that share parameters, gradients and optimizer state by `sharding`.
        context: Parts of the sequence.
        tensor: Tensor-parallel degree.
        expert: Expert-parallel degree; divides shard x context x tensor.
        sharding: Level 0 to 3.
        sequence_parallel: See `rlplace.plan.strategy.Stage`.
        context_method: See there.
        tables: Replicas that divide embedding tables: all, or 1.
    """

    devices: tuple[int, ...]
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    sharding: int = 0
    sequence_parallel: bool = False
    context_method: ContextMethod = GATHER
    tables: int = 1

    def __post_init__(self) -> None:
        if len(self.devices) >= _MANY and type(self.devices) is tuple:
            object.__setattr__(self, "devices", Devices(self.devices))

    @property
    def state(self) -> tuple[int, ...]:
        """Degrees on which the state of a device depends, as `rlplace.strategy.costs.BlockCosts.held` takes them."""
        return (self.tensor, self.expert) if self.tables == 1 else (self.tensor, self.expert, self.tables, self.shard)

    @property
    def data_degree(self) -> int:
        """Replicas: replicate x shard."""
        return self.replicate * self.shard

    def cut(self, samples: int) -> Cut:
        """Returns how a pass of so many samples of a replica is cut."""
        groups = self.tensor, self.sequence_parallel, self.context, self.expert
        return Cut(samples, *groups, self.context_method, self.tables)


@dataclass(frozen=True)
class Draft:
    """One pipeline, or one stage, over all B blocks.

    Attributes:
        bounds: S + 1 block numbers; stage s holds blocks ``bounds[s]`` to ``bounds[s + 1] - 1``.
        places: The meshes.
        place_of_stage: S indices into `places`.
        recompute: B indices into `rlplace.strategy.costs.RECOMPUTE`.
        offload: B indices into `OFFLOAD`.
        microbatch: Samples of a pass: one entry, or one a replica.
        microbatches: Passes a step: likewise.
        schedule: Name of a schedule for chains; None with one stage.
        beside: Further pipelines over all blocks on other devices. All other fields describe the first.
    """

    bounds: tuple[int, ...]
    places: tuple[Mesh, ...]
    place_of_stage: tuple[int, ...]
    recompute: bytes
    offload: bytes
    microbatch: tuple[int, ...]
    microbatches: tuple[int, ...]
    schedule: str | None = None
    beside: tuple[Draft, ...] = ()

    @property
    def pipelines(self) -> tuple[Draft, ...]:
        """Each pipeline on its own."""
        return (dataclasses.replace(self, beside=()), *self.beside) if self.beside else (self,)

    @property
    def stages(self) -> int:
        """Number of stages, S."""
        return len(self.place_of_stage)

    @property
    def ranges(self) -> list[range]:
        """Blocks of each stage."""
        return [range(begin, end) for begin, end in pairwise(self.bounds)]

    @property
    def stage_of_block(self) -> list[int]:
        """The stage of every block."""
        return [stage for stage, blocks in enumerate(self.ranges) for _ in blocks]

    def blocks_of(self, place: int) -> list[int]:
        """Blocks on a place, in model order."""
        return [block for at, blocks in zip(self.place_of_stage, self.ranges, strict=True) if at == place for block in blocks]

    @property
    def data_degree(self) -> int:
        """Replicas: the largest data degree of the places."""
        return max(place.data_degree for place in self.places)

    @property
    def all_places(self) -> tuple[Mesh, ...]:
        """Places of all pipelines."""
        return sum((one.places for one in self.beside), start=self.places)

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices in use, of all pipelines."""
        return tuple(chain.from_iterable(place.devices for place in self.all_places))

    @property
    def shares(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Samples of a micro-batch, and micro-batches, of every replica."""
        degree = self.data_degree
        sizes, counts = self.microbatch, self.microbatches
        return sizes * degree if len(sizes) == 1 else sizes, counts * degree if len(counts) == 1 else counts

    @property
    def batch(self) -> int:
        """Samples of a step, over all replicas of all pipelines."""
        alike = len(self.microbatch) == len(self.microbatches) == 1
        shares = ((self.microbatch[0], self.data_degree * self.microbatches[0]),) if alike else zip(*self.shares, strict=True)
        own = sum(size * count for size, count in shares)
        return own + sum(one.batch for one in self.beside)

    def pipeline(self, names: Sequence[str]) -> Pipeline:
        """Returns the first pipeline with the names of the blocks, and checked.

        Raises:
            InputError: It contradicts itself.
        """
        return Pipeline(
            stages=tuple(self._stage(index, names) for index in range(self.stages)),
            microbatch=self.microbatch,
            microbatches=self.microbatches,
            schedule=self.schedule,
        )

    def strategy(self, names: Sequence[str]) -> Strategy:
        """Returns the strategy with the names of the blocks, and checked; raises as `pipeline` does."""
        return Strategy(self.batch, tuple(one.pipeline(names) for one in self.pipelines))

    def _stage(self, index: int, names: Sequence[str]) -> Stage:
        place = self.places[self.place_of_stage[index]]
        blocks = range(self.bounds[index], self.bounds[index + 1])
        axes = {"replicate": place.replicate, "shard": place.shard, "context": place.context, "tensor": place.tensor}
        return Stage(
            blocks=tuple(names[block] for block in blocks),
            devices=place.devices,
            mesh={axis: size for axis, size in axes.items() if size > 1},  # type: ignore[misc]
            sharding=place.sharding,
            sequence_parallel=place.sequence_parallel,
            expert=place.expert,
            context_method=place.context_method,
            recompute={names[b]: RECOMPUTE[self.recompute[b]] for b in blocks if self.recompute[b]},  # type: ignore[misc]
            offload={names[b]: OFFLOAD[self.offload[b]] for b in blocks if self.offload[b]},  # type: ignore[misc]
        )


def plain_draft(
    bounds: tuple[int, ...],
    places: Sequence[Mesh],
    order: Sequence[int] | None = None,
    *,
    microbatch: tuple[int, ...] = (1,),
    microbatches: tuple[int, ...] = (1,),
    schedule: str | None = None,
) -> Draft:
    """Returns a draft without recomputation and offload; without an order a stage has the place of its number."""
    nothing, order = bytes(bounds[-1]), range(len(places)) if order is None else order
    return Draft(bounds, tuple(places), tuple(order), nothing, nothing, microbatch, microbatches, schedule)


def joined(pipelines: Iterable[Draft]) -> Draft:
    """Returns one draft of several pipelines."""
    first, *others = pipelines
    return dataclasses.replace(first, beside=tuple(others))


def draft_of_strategy(strategy: Strategy, names: Sequence[str]) -> Draft:
    """Returns the numbers of a strategy whose blocks have these names, in this order."""
    return joined(draft_of(pipeline, names) for pipeline in strategy.pipelines)


def draft_of(pipeline: Pipeline, names: Sequence[str]) -> Draft:
    """Returns the numbers of a pipeline whose blocks have these names, in this order."""
    number = {name: index for index, name in enumerate(names)}
    places: dict[Mesh, int] = {}
    bounds, place_of_stage = [0], []
    recompute, offload = bytearray(len(names)), bytearray(len(names))
    for stage in pipeline.stages:
        place = Mesh(
            stage.devices, stage.axis("replicate"), stage.axis("shard"), stage.axis("context"), stage.axis("tensor"),
            stage.expert, stage.sharding, stage.sequence_parallel, stage.context_method,
            stage.data_degree if stage.tables else 1,
        )  # fmt: skip
        place_of_stage.append(places.setdefault(place, len(places)))
        bounds.append(bounds[-1] + len(stage.blocks))
        for key, values, chosen in (("recompute", RECOMPUTE, recompute), ("offload", OFFLOAD, offload)):
            for block, how in getattr(stage, key).items():
                chosen[number[block]] = values.index(how)
    return Draft(
        tuple(bounds), tuple(places), tuple(place_of_stage), bytes(recompute), bytes(offload), pipeline.microbatch,
        pipeline.microbatches, pipeline.schedule,
    )  # fmt: skip


KINDS = ("one device", "data parallel", "fully sharded", "tensor parallel", "pipeline")
"""Kinds with one dimension; other kinds are named after all of theirs."""

UNLIKE = "unlike pipelines"
"""Kind of several pipelines."""


def kind_of(draft: Draft) -> str:
    """Returns the name of a draft's kind, for people."""
    return UNLIKE if draft.beside else kind_named(draft.stages, draft.places)


_WORDS = {
    "tensor": "tensor parallel",
    "context": "context parallel",
    "expert": "expert parallel",
    "tables": "divided tables",
    "shard": "fully sharded",
    "replicate": "data parallel",
}
_DEGREES = attrgetter(*_WORDS)


def kind_named(stages: int, places: Sequence[Mesh]) -> str:
    """Returns the name of a kind, from its number of stages and its places."""
    return _kind_of_axes(stages > 1, frozenset((*_DEGREES(place), place.sharding) for place in places))


@lru_cache(maxsize=4096)
def _kind_of_axes(pipeline: bool, degrees: frozenset[tuple[int, ...]]) -> str:
    words = [word for axis, word in enumerate(_WORDS.values()) if any(own[axis] > 1 for own in degrees)]
    if _WORDS["shard"] not in words and any(level for *_, level in degrees):
        words.append(_WORDS["shard"])  # over a context group alone
    return " x ".join(["pipeline", *words] if pipeline else words) or KINDS[0]
