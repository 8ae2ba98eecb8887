"""The `Strategy` record: how a training step uses its devices, without the placement of single ops.

Words: a *block* is a module that strategies speak of (an element of a module list, or another repeated or top-level module),
named by its path. A *stage* is consecutive blocks on one *mesh* of devices. A *pipeline* is the chain of stages, in model
order; a device that holds several stages holds several *chunks*. The *data degree* of a stage is replicate x shard; one
coordinate of it is a *replica*. docs/strategy.md has the whole vocabulary, docs/formats.md the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from math import prod
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta
from msgspec.structs import astuple

from rlplace.errors import InputError, show
from rlplace.limits import DEVICES, MICROBATCHES
from rlplace.plan.actions import check_chain
from rlplace.plan.device_runs import with_runs, without_runs
from rlplace.records import Count, Record, Text, build, check_record, plain
from rlplace.text import either

AXES = ("replicate", "shard", "context", "tensor", "branch")
"""Axes of a stage's mesh, outermost first; devices fill it in row-major order."""

MEAN, SUM, TARGETS = "mean", "sum", "targets"
"""Reductions of losses by other things than an input, see `Strategy`."""

ROWS, COLUMNS, TABLE = "rows", "columns", "table"
"""Ways to divide an embedding table; the last is followed by the number of the replica that has it."""

Axis = Literal["replicate", "shard", "context", "tensor", "branch"]
Recompute = Literal["selective", "full"]
"""Parts of a block's forward that run again in the backward: all but weight products, attention and collectives, or all."""

Offload = Literal["optimizer", "all"]
"""Parts of a block in host memory: the optimizer state, or parameters, gradients and optimizer state."""

ContextMethod = Literal["gather", "heads", "ring"]
GATHER, HEADS, RING = CONTEXT_METHODS = get_args(ContextMethod)
"""How parts of the positions attend to all of them: keys and values are gathered, parts of the positions become parts of the
heads and back, or keys and values go around."""

Couple = Literal["replica", "gather"]
Buffers = Literal["whole", "replica"]
Statistics = Literal["replica", "batch"]
"""What a loss that couples samples is computed over, who writes buffers by samples, and what BatchNorm normalizes by; see
`Strategy`."""

_Device = Annotated[int, Meta(ge=0, lt=DEVICES)]
_Microbatches = Annotated[int, Meta(ge=1, le=MICROBATCHES)]


class Stage(Record, frozen=True):
    """Consecutive blocks on one mesh of devices.

    Attributes:
        blocks: Paths of its blocks in model order; empty in a plan for a problem whose groups are no modules.
        devices: Device numbers of the cluster, filling the mesh in row-major order.
        mesh: Size of each axis; an axis that is left out is 1.
        sharding: 0 whole copies; 1 parameters, gradients and optimizer state are shared over `shard`, gathered once a step,
            gradients reduced once a step; 2 the same, reduced every micro-batch; 3 gathered again in the backward, too.
        sequence_parallel: Activations between the tensor-parallel parts of a block are split along the sequence.
        expert: Expert-parallel degree; it divides shard x context x tensor.
        context_method: How parts of the positions attend to all.
        recompute: By block what runs again; blocks that are left out keep everything.
        offload: By block what is in host memory; blocks that are left out keep everything on their device.
        tensor: Layout over `tensor` by module path, as it is priced: "column", "row"; "packed column": several matrices in
            one, each cut; "gathered column": its output is gathered; "embedding": rows of a table; "sequence": works on a part
            of the sequence. What is left out is whole; without any, as in older files, the runtime takes its own layout.
        tables: Embedding tables that replicas divide instead of copying, by module path: "rows" or "columns", cut over all of
            replicate x shard, or "table N", whole on the N-th of them.
    """

    blocks: tuple[Text, ...]
    devices: Annotated[tuple[_Device, ...], Meta(min_length=1)]
    mesh: dict[Axis, Count] = msgspec.field(default_factory=dict)
    sharding: Annotated[int, Meta(ge=0, le=3)] = 0
    sequence_parallel: bool = False
    expert: Count = 1
    context_method: ContextMethod = "gather"
    recompute: dict[str, Recompute] = msgspec.field(default_factory=dict)
    offload: dict[str, Offload] = msgspec.field(default_factory=dict)
    tensor: dict[str, str] = msgspec.field(default_factory=dict)
    tables: dict[str, str] = msgspec.field(default_factory=dict)

    def axis(self, name: str) -> int:
        """Returns size of an axis of the mesh."""
        return self.mesh.get(name, 1)  # type: ignore[call-overload]

    @property
    def data_degree(self) -> int:
        """Replicas that the stage runs: replicate x shard."""
        return self.axis("replicate") * self.axis("shard")


class Pipeline(Record, frozen=True):
    """A chain of stages, and how a step's micro-batches pass through it.

    Attributes:
        stages: Stages in model order.
        microbatch: Samples of one pass of one replica: one entry, or one a replica.
        microbatches: Passes a step: one entry, or one a replica.
        schedule: One of `rlplace.plan.schedule`; None with one stage.
    """

    stages: Annotated[tuple[Stage, ...], Meta(min_length=1)]
    microbatch: Annotated[tuple[Count, ...], Meta(min_length=1)] = (1,)
    microbatches: Annotated[tuple[_Microbatches, ...], Meta(min_length=1)] = (1,)
    schedule: str | None = None

    @property
    def data_degree(self) -> int:
        """Replicas of the pipeline: the largest data degree of its stages."""
        return max(stage.data_degree for stage in self.stages)

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices of the pipeline in the order in which its stages name them."""
        return tuple(dict.fromkeys(chain.from_iterable(self.device_sets)))

    @property
    def device_sets(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each mesh in the chain; a mesh with several chunks is listed once."""
        return tuple(dict.fromkeys(stage.devices for stage in self.stages))

    @property
    def unlike_meshes(self) -> bool:
        """True where its stages have unlike meshes; a context group has shares or copies."""
        return len({(stage.sharding > 0, *(stage.axis(axis) for axis in AXES)) for stage in self.stages}) > 1

    @property
    def samples(self) -> int:
        """Samples of a step, over all replicas."""
        degree = self.data_degree
        if len(self.microbatch) == len(self.microbatches) == 1:
            return degree * self.microbatch[0] * self.microbatches[0]
        sizes = self.microbatch * (degree if len(self.microbatch) == 1 else 1)
        counts = self.microbatches * (degree if len(self.microbatches) == 1 else 1)
        return sum(size * count for size, count in zip(sizes, counts, strict=True))


class Strategy(Record, frozen=True):
    """A strategy: how one training step runs.

    Attributes:
        batch: Samples a step, over all pipelines.
        pipelines: Usually one. Several are replicas that are unlike in cut, depth or degrees; each shards inside itself, and
            the gradients of a block are summed over all that hold it.
        reduction: How the loss of a batch comes from those of its micro-batches: ``"mean"`` over samples, ``"sum"``, or a mean
            weighted by what each counts: ``"targets"`` (of cross-entropies, those ignored left out), or an input, such as
            ``"sum:mask"``, ``"valid:labels"`` or ``"nonzero:ids"``.
        couple: What a loss that couples samples is computed over: the samples of each pass of a ``"replica"``, or
            ``"gather"``, those of the whole batch, whose embeddings or outputs replicas exchange.
        mixing: With ``"gather"``, modules whose result for a sample depends on other samples.
        buffers: Where a forward writes buffers by its samples: ``"whole"`` keeps batches in one piece, ``"replica"`` lets every
            replica and micro-batch write by its own samples.
        statistics: What BatchNorm normalizes by: the samples of each pass of a ``"replica"``, as under DDP, or of the same pass
            of all replicas, ``"batch"``.
        release_gradients: Whether a parameter is updated in the backward, as soon as its gradient is there, and frees it.

    Raises:
        InputError: It contradicts itself; the message says where and how.
    """

    batch: Count
    pipelines: Annotated[tuple[Pipeline, ...], Meta(min_length=1)]
    reduction: Text = MEAN
    couple: Couple = "replica"
    mixing: tuple[Text, ...] = ()
    buffers: Buffers = "whole"
    statistics: Statistics = "replica"
    release_gradients: bool = False

    def __post_init__(self) -> None:
        check_record(self, "strategy")
        for number, pipeline in enumerate(self.pipelines):
            where = "strategy" if len(self.pipelines) == 1 else f"strategy: pipelines[{number}]"
            for index, stage in enumerate(pipeline.stages):
                _check_stage(stage, f"{where}: stages[{index}]")
            _check_pipeline(pipeline, where)
        _check_together(self)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of all pipelines."""
        return tuple(stage for pipeline in self.pipelines for stage in pipeline.stages)

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices in use."""
        return tuple(dict.fromkeys(device for pipeline in self.pipelines for device in pipeline.devices))

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON data; one pipeline stands without its list."""
        data = {key: value for key, value in plain(self).items() if key != "pipelines"}
        if len(self.pipelines) > 1:
            return data | {"pipelines": [_written(pipeline) for pipeline in self.pipelines]}
        return data | _written(self.pipelines[0])

    @staticmethod
    def from_dict(data: Any, where: str = "strategy") -> Strategy:
        """Builds a strategy from parsed JSON.

        Raises:
            InputError: Malformed, or it contradicts itself.
        """
        if isinstance(data, Mapping) and isinstance(pipelines := data.get("pipelines"), list):
            read = [without_runs(one, f"{where}.pipelines[{number}]") for number, one in enumerate(pipelines)]
            data = {**data, "pipelines": read}
        elif isinstance(data, Mapping) and "pipelines" not in data:
            own = without_runs({key: item for key, item in data.items() if key not in _OF_STEP}, where)
            data = {**{key: data[key] for key in _OF_STEP if key in data}, "pipelines": [own]}
            build(Pipeline, own, where)  # whose messages name its fields without a list
        return Strategy(*astuple(build(_File, data, where)))


_OF_STEP = ("batch", "reduction", "couple", "mixing", "buffers", "statistics", "release_gradients")
"""Keys of a file that belong to the step, where those of its one pipeline stand beside them."""


class _File(Strategy, frozen=True):
    """A strategy of several pipelines as it stands in a file, which is checked as a strategy once all of it is read."""

    def __post_init__(self) -> None:
        pass


def _written(pipeline: Pipeline) -> dict[str, Any]:
    data = {"microbatch": list(pipeline.microbatch), "microbatches": list(pipeline.microbatches)}
    return data | with_runs(plain(pipeline))


def _check_stage(stage: Stage, where: str) -> None:
    """Refuses a stage that contradicts itself."""
    if len(set(stage.blocks)) < len(stage.blocks):
        raise InputError(f"{where}: a block stands twice; name every block once")
    if len(set(stage.devices)) < len(stage.devices):
        raise InputError(f"{where}: a device stands twice; name every device once")
    size = prod(stage.mesh.values())
    if size != len(stage.devices):
        shape = " x ".join(f"{name} {stage.axis(name)}" for name in AXES if stage.axis(name) > 1) or "1"
        raise InputError(f"{where}: a mesh of {shape} has {size} devices, found {len(stage.devices)}; make them agree")
    shard, shares = stage.axis("shard"), stage.axis("shard") * stage.axis("context")
    if shares == 1 if stage.sharding else shard > 1:
        raise InputError(
            f"{where}: sharding level {stage.sharding} with shard {shard}; levels 1 to 3 share parameters over shard x context "
            "of 2 or more, level 0 has no axis shard (its copies are the axis replicate)"
        )
    if stage.sequence_parallel and stage.axis("tensor") == 1:
        raise InputError(f"{where}: sequence_parallel splits activations over the tensor axis, which is 1; leave it out")
    if stage.tensor and stage.axis("tensor") == 1:
        raise InputError(f"{where}: it gives tensor layouts, but the tensor axis is 1; leave them out")
    if (shared := shares * stage.axis("tensor")) % stage.expert:
        raise InputError(f"{where}: expert {stage.expert} does not divide shard x context x tensor = {shared}")
    wanted = (ROWS, COLUMNS, *(f"{TABLE} {number}" for number in range(stage.data_degree if stage.tables else 0)))
    if (strange := next((word for word in stage.tables.values() if word not in wanted), None)) is not None:
        raise InputError(f"{where}: tables: {show(strange)} is not {either(wanted)}")
    if stage.tables and stage.data_degree == 1:
        raise InputError(f"{where}: tables are divided over replicate x shard, which is 1; leave them out")
    for key, blocks in (("recompute", stage.recompute), ("offload", stage.offload)):
        strange = next((block for block in blocks if block not in stage.blocks), None)
        if strange is not None:
            raise InputError(f"{where}: {key}: {show(strange)} is no block of the stage")


def _check_pipeline(pipeline: Pipeline, where: str) -> None:
    """Refuses stages that do not form one pipeline."""
    stages, degree = pipeline.stages, pipeline.data_degree
    meshes, seen = dict[tuple[int, ...], Stage](), set[int]()
    for index, stage in enumerate(stages):
        if degree % stage.data_degree:
            raise InputError(
                f"{where}: stages[{index}] has data degree {stage.data_degree}, which does not divide the largest, {degree}"
            )
        first = meshes.setdefault(stage.devices, stage)
        shared = None if (first.mesh, first.sharding) == (stage.mesh, stage.sharding) else stage.devices[0]
        if first is stage and shared is None and not seen.isdisjoint(stage.devices):
            shared = next(device for device in stage.devices if device in seen)
        if shared is not None:
            raise InputError(
                f"{where}: stages[{index}] shares device {shared} with another stage, but not its devices, mesh and "
                "sharding level; chunks on the same devices share all three"
            )
        seen.update(stage.devices if first is stage else ())
    for key, values in (("microbatch", pipeline.microbatch), ("microbatches", pipeline.microbatches)):
        if len(values) not in (1, degree):
            raise InputError(f"{where}: {key} has {len(values)} entries; give one, or one for each of {degree} replicas")
    if len(stages) > 1 and any(stage.sharding > 1 for stage in stages):
        raise InputError(
            f"{where}: a pipeline has sharding level 0 or 1: torch keeps its gradients unsharded until the step ends, and "
            "resharding under a split backward would lose gradients"
        )
    if len(set(pipeline.microbatches)) > 1 and any(stage.sharding > 1 for stage in stages):
        raise InputError(
            f"{where}: replicas with unlike numbers of micro-batches need sharding level 0 or 1; at higher levels their "
            "collectives would wait for each other for ever"
        )
    check_chain(pipeline.schedule, [stage.devices for stage in stages], min(pipeline.microbatches), where)


def _check_together(strategy: Strategy) -> None:
    """Refuses pipelines that share devices, miss blocks, or process another number of samples than the batch."""
    users = [set(pipeline.devices) for pipeline in strategy.pipelines]
    named: set[int] = set()
    for number, devices in enumerate(users):
        if named & devices:
            raise InputError(f"strategy: pipelines[{number}] shares device {min(named & devices)} with another pipeline")
        named |= devices
    held = [[block for stage in pipeline.stages for block in stage.blocks] for pipeline in strategy.pipelines]
    for number, blocks in enumerate(held):
        where = "strategy" if len(held) == 1 else f"strategy: pipelines[{number}]"
        if len(set(blocks)) < len(blocks):
            twice = next(block for block in blocks if blocks.count(block) > 1)
            raise InputError(f"{where}: block {show(twice)} is in two stages; name every block once")
        if blocks and len(pipeline_stages := strategy.pipelines[number].stages) > 1:
            empty = next((index for index, stage in enumerate(pipeline_stages) if not stage.blocks), None)
            if empty is not None:
                raise InputError(f"{where}: stages[{empty}] has no blocks; leave the stage out")
    for one, other in pairwise(held):
        if one != other:
            raise InputError("strategy: every pipeline runs all blocks, in the same order; these differ")
    samples = sum(pipeline.samples for pipeline in strategy.pipelines)
    if samples != strategy.batch:
        raise InputError(
            f"strategy: batch is {strategy.batch}, but its replicas process {samples} samples a step (micro-batch x "
            "micro-batches, summed over replicas); make them agree"
        )


def uniform_words(strategy: Strategy) -> str:
    """Returns the strategy in one line of plain words."""
    parts = [_pipeline_words(pipeline) for pipeline in strategy.pipelines]
    return "; beside it ".join(parts) + (", gradients released" if strategy.release_gradients else "")


def _from_to(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(most) if least == most else f"{least} to {most}"


def _pipeline_words(pipeline: Pipeline) -> str:
    stages = pipeline.stages
    words: list[str] = []
    meshes = len(pipeline.device_sets)
    if len(stages) > 1:
        chunks = f" ({len(stages)} chunks)" if len(stages) > meshes else ""
        words.append(f"{meshes} pipeline stages{chunks}, {pipeline.schedule}")
    names = {"replicate": "replicas", "shard": "fully sharded over", "tensor": "tensor parallel", "context": "context parallel"}
    for axis in ("tensor", "shard", "replicate", "context"):
        sizes = sorted({stage.axis(axis) for stage in stages})
        if sizes != [1]:
            text = "-".join(map(str, sizes))
            words.append(f"{text} replicas" if axis == "replicate" else f"{names[axis]} {text}")
            more, levels = list[str](), sorted({stage.sharding for stage in stages})
            if axis == "context" and (methods := sorted({stage.context_method for stage in stages})) != [GATHER]:
                more.append(f"by {either(methods)}")
            if axis == "shard" or (axis == "context" and levels != [0] and all(stage.axis("shard") == 1 for stage in stages)):
                more.append(f"level {either(map(str, levels))}")
            words[-1] += f" ({', '.join(more)})" if more else ""
    experts = sorted({stage.expert for stage in stages})
    if experts != [1]:
        words.append(f"expert {'-'.join(map(str, experts))}")
    if tables := sum(len(stage.tables) for stage in stages):
        words.append(f"{tables} embedding table{'s' * (tables > 1)} divided")
    blocks = sum(len(stage.blocks) for stage in stages)
    for key in ("recompute", "offload"):
        chosen: Sequence[str] = [how for stage in stages for how in getattr(stage, key).values()]
        for how in sorted(set(chosen)):
            count = chosen.count(how)
            words.append(f"{how} {key} of {'all' if count == blocks else f'{count} of {blocks}'} blocks")
    samples, counts = (_from_to(numbers) for numbers in (pipeline.microbatch, pipeline.microbatches))
    unlike = ", unlike by replica" if len({*pipeline.microbatch}) > 1 or len({*pipeline.microbatches}) > 1 else ""
    words.append(f"{counts} micro-batch{'' if counts == '1' else 'es'} of {samples}{unlike}")
    used = len(pipeline.devices)
    return (", ".join(words) if used > 1 else f"one device, {', '.join(words)}") + (f" on {used} devices" if used > 1 else "")
