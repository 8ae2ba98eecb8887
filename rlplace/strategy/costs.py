"""Costs of blocks, the only knowledge of executor, memory and search about a model.

Axes: B blocks in model order. A *pass* is one micro-batch through a block on one device of its tensor group. The numbers come
from the captured ops (`rlplace.strategy.blocks.price`) or, in tests, from a generator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster import Cluster
from rlplace.plan.strategy import GATHER, ContextMethod
from rlplace.problem.check import freeze

Floats = NDArray[np.float64]
Bytes = NDArray[np.int64]

NONE, SELECTIVE, FULL = range(3)
"""Recomputation in the backward; indices of axis R."""

RECOMPUTE = ("none", "selective", "full")

COLLECTIVE_KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_gather", "reduce_scatter", "all_to_all", "all_to_all",
    "all_reduce",
)  # fmt: skip
"""Axis K: collectives of the tensor group, three of the context group, one of the expert group, and one of the replicas."""

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, *_OTHERS = range(9)
CONTEXT_GATHER, CONTEXT_SCATTER, CONTEXT_ALL_TO_ALL, EXPERT_ALL_TO_ALL, STATISTICS = _OTHERS
"""Indices of axis K."""

RINGS = (CONTEXT_GATHER, CONTEXT_SCATTER)
"""Those that go around under attention where the method of the context is a ring."""

FORWARD_PASS, BACKWARD_PASS, STAGE_END, WITH_GRADIENTS = range(4)
"""Passes of a block; the last two are backwards, too: where a stage ends behind the block, so that a buffer has the incoming
gradients; and with the gradients of the block's own weights as they are made."""


@dataclass(frozen=True)
class Cut:
    """The parts of one pass of a block.

    Attributes:
        samples: Samples of the micro-batch of one replica.
        tensor: Tensor-parallel degree.
        sequence_parallel: Whether activations between tensor-parallel parts are split along the sequence.
        context: Context-parallel degree: parts of the sequence.
        expert: Expert-parallel degree.
        context_method: How parts of the sequence attend to all of it.
        tables: Replicas that divide embedding tables.
    """

    samples: int
    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    expert: int = 1
    context_method: ContextMethod = GATHER
    tables: int = 1


@dataclass(frozen=True, eq=False)
class BlockPassCosts:
    """One pass of every block on one device.

    Attributes:
        forward_s: float64 [B], seconds of the forward, collectives apart.
        backward_s: float64 [B], seconds of the whole backward without recomputation.
        weight_s: float64 [B], the part of `backward_s` for gradients of weights, which split schedules delay.
        again_s: float64 [R, B], seconds of recomputation.
        kept_bytes: int64 [R, B], saved activations of one micro-batch, the block's input included unless it is the output of
            the block before, which counts there.
        working_bytes: int64 [4, R, B], peak of a pass beyond saved activations, by `FORWARD_PASS`, `BACKWARD_PASS`, `STAGE_END`
            and `WITH_GRADIENTS`; recomputed activations are part of the backward's.
        sent_bytes: int64 [B], bytes that a stage border behind this block sends forward; 0 for the last.
        returned_bytes: int64 [B], gradients that the same border sends back.
        halved_bytes: int64 [R, B], saved from the first half of a split backward to the second, in place of `kept_bytes`: with
            the gradients from which those of weights are computed, without activations behind the last weight.
        collective_bytes: float64 [2, K, B], bytes of the whole tensors that the groups move, by pass and kind; of an
            all-to-all of experts or heads those of one device.
        collective_calls: float64 [2, K, B], number of calls.
        hidden_s: float64 [2, B], seconds of attention that hide as many of `RINGS`.
    """

    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    again_s: Floats
    kept_bytes: Bytes
    working_bytes: Bytes
    sent_bytes: Bytes
    returned_bytes: Bytes
    halved_bytes: Bytes
    collective_bytes: Floats
    collective_calls: Floats
    hidden_s: Floats

    def __post_init__(self) -> None:
        freeze(self)


@dataclass(frozen=True, eq=False)
class HeldCosts:
    """State of every block on one device of a tensor group between steps, nothing sharded.

    A tied weight counts in every block that reads it.

    Attributes:
        weight_bytes: int64 [B], parameters and buffers.
        gradient_bytes: int64 [B].
        optimizer_bytes: int64 [B], optimizer state and master weights; also weights, gradients and state of the parts of
            embedding tables that replicas divide, for nothing of them is exchanged.
        expert_bytes: int64 [3, B], the part of these three of experts that an expert group spreads, or of divided tables; 0
            where there are none.
        gradient_item: Bytes of an element in which gradients are exchanged between replicas, over those of `gradient_bytes`.
        turns: float64 [2, B], number of cut matrices that an update needs whole, and their bytes as they are sent, whole;
            devices that share them gather one each at a time (`rlplace.runtime.base.turns`).
        released: Gradients go with the update of their parameters in the backward.
    """

    weight_bytes: Bytes
    gradient_bytes: Bytes
    optimizer_bytes: Bytes
    expert_bytes: Bytes
    turns: Floats
    gradient_item: float = 1.0
    released: bool = False

    def __post_init__(self) -> None:
        freeze(self)


@dataclass(frozen=True)
class Tie:
    """A weight of several blocks: copies with a summed gradient where they are on several stages.

    Attributes:
        blocks: Numbers of the blocks.
        weight_bytes: Of one copy.
        gradient_bytes: Of one copy.
        optimizer_bytes: Of one copy.
    """

    blocks: tuple[int, ...]
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


class BlockCosts(Protocol):
    """Costs of a model on the device kinds of a cluster.

    Attributes:
        names: B module paths in model order.
        kinds: Names of the device kinds.
        ties: Weights that several blocks share.
        classes: int64 [B]; blocks of one number cost the same.
        experts: Expert degrees divide it: the number of experts of every mixture, 1 without any.
        tables: Whether most parameters are embedding tables, which replicas can divide.
        joins_replicas: Whether passes sum statistics over replicas (`STATISTICS`).
    """

    names: tuple[str, ...]
    kinds: tuple[str, ...]
    ties: tuple[Tie, ...]
    classes: NDArray[np.int64]
    experts: int
    tables: bool
    joins_replicas: bool

    def why_not(self, cut: Cut) -> str | None:
        """Explains why a pass cannot be cut like that; None where it can."""
        ...

    def passes(self, kind: int, cut: Cut) -> BlockPassCosts:
        """Returns a pass on a device of that kind.

        Raises:
            InputError: `why_not` has a reason.
        """
        ...

    def held(self, tensor: int = 1, expert: int = 1, tables: int = 1, shard: int = 1) -> HeldCosts:
        """Returns the state that one device holds at these degrees (`Mesh.state`)."""
        ...

    def update_s(self, kind: int, tensor: int = 1, expert: int = 1, tables: int = 1, shard: int = 1) -> Floats:
        """Returns float64 [B], seconds of the optimizer step of whole blocks; a tied weight counts in every block.

        Blocks are shared over `shard` devices afterwards, divided tables are not: their updates count so often.
        """
        ...


def kind_numbers(costs: BlockCosts, cluster: Cluster) -> list[int]:
    """Returns the index into the kinds of the costs of every device of a cluster."""
    number = {name: kind for kind, name in enumerate(costs.kinds)}
    return [number[kind.name] for kind in cluster.kinds]
