"""Arrays of packed drafts: names of their columns, and records of them as the kernels take them.

Axes: B blocks, S stages, P places (meshes), L lanes that differ, T tables of collectives, G entries of a table.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlplace.strategy.costs import Floats

Ints = NDArray[np.int64]
T = TypeVar("T", float, Floats)

# Rows, float64 [rows, B, ROW]: every block in one pass of the slowest replica of a lane. The last eight have a column for each
# entry of `costs.RECOMPUTE`.
(
    FORWARD, FORWARD_TENSOR, BACKWARD_TENSOR, BACKWARD_TENSOR_FULL, WEIGHT, SENT, RETURNED, WEIGHTS, GRADIENTS, OPTIMIZER,
    UPDATE, EXPERT_WEIGHTS, EXPERT_GRADIENTS, EXPERT_OPTIMIZER, TURNS, TURN_BYTES,
) = range(16)  # fmt: skip
BACKWARD, AGAIN, KEPT, HALVED, WORKING_FORWARD, WORKING_BACKWARD, WORKING_END, WORKING_GROWING = range(16, 40, 3)
ROW = 40

# Places, float64 [P, PLACE].
(
    SHARDING, SHARE, COPIES, GATHER_TABLE, SCATTER_TABLE, REDUCE_TABLE, HOST_RATE, UPDATE_RATE, ITEM, EXPERT_SHARE,
    EXPERT_GATHER_TABLE, EXPERT_SCATTER_TABLE, MEETS_BLOCKS, MEETS_COPIES, RELEASED, TURN_TABLE, TURN_DEGREE,
) = range(17)  # fmt: skip
PLACE = 17

# Actions, int32 [., 3]: stage, kind, micro-batch.
DO_F, DO_B, DO_I, DO_W = range(4)

# Stage transfers, float64 [2, S, WAY].
LATENCY, S_PER_BYTE, PART = range(3)
WAY = 3

# Results of places, float64 [P, ANSWER]; the first columns are seconds of the lane with most work.
(COMPUTE, TENSOR, GATHER, EXCHANGE, HAND_OVER, END, UPDATE_S) = range(7)
ANSWER = 7


class FrameArrays(NamedTuple):
    """Arrays of drafts that differ in cuts, recomputation and offload alone."""

    stage_place: Ints  # int64 [S]
    places: Floats  # float64 [P, PLACE]
    microbatches: Ints  # int64 [L]
    row: Ints  # int64 [L, P], index into the rows of costs
    actions: NDArray[np.int32]  # int32 [., 3]
    action_ptr: Ints  # int64 [L * P + 1]
    ways: Floats  # float64 [2, S, WAY], from every stage to the next one and to the one before it
    way_ptr: Ints  # int64 [2 S + 1] into `way_channels`
    way_channels: Ints  # int64, channels that a transfer occupies
    room_bytes: Floats  # float64 [R], capacity without reserved bytes
    room_count: Ints  # int64 [R], devices with that capacity
    room_ptr: Ints  # int64 [L * P + 1] into both


class PackedTies(NamedTuple):
    """Tied weights of drafts that have them on the same places."""

    seconds: Floats  # float64 [X], to sum the gradients of each tie that is on several places
    ptr: Ints  # int64 [X + 1] into `places`
    places: Ints  # int64
    block: Ints  # int64 [A], blocks whose copy another block of their place counts
    again_bytes: Floats  # float64 [A, 3], of weights, gradients and optimizer state


class BlockChoices(NamedTuple):
    """Fields of a draft that change from one evaluation to the next."""

    bounds: Ints  # int64 [S + 1]
    recompute: NDArray[np.uint8]  # uint8 [B]
    offload: NDArray[np.uint8]  # uint8 [B]


class LanePlace(NamedTuple):
    """A place in one lane."""

    row: Floats  # float64 [B, ROW]
    place: Floats  # float64 [PLACE]
    tables: Floats  # float64 [T, G]
    stages: int
    microbatches: int


class PlacedBlock(NamedTuple, Generic[T]):
    """A block on one device of a place for one pass of the slowest replica, or float64 [B] of all blocks."""

    backward_s: T  # with recomputation
    again_s: T
    kept_bytes: T
    halved_bytes: T
    working_forward_bytes: T
    working_backward_bytes: T
    working_end_bytes: T
    working_growing_bytes: T
    keeping: T  # see `rlplace.strategy.executor.rules`
    forward_s: T
    forward_tensor_s: T
    backward_tensor_s: T
    weight_s: T
    weight_tensor_s: T  # collectives that run again
    update_s: T
    gather_s: T
    reduce_s: T
    copies_s: T
    bucket_bytes: T
    weight_bytes: T
    gradient_bytes: T
    buffer_bytes: T  # flat copy of the gradient while it is exchanged; with the share that is released after it
    held_weight_bytes: T  # from its first gather to the end of the step; likewise the next two
    held_gradient_bytes: T
    held_optimizer_bytes: T
    host_bytes: T
    remade_bytes: T  # peak of recomputation in the second half of a split backward
    sent_bytes: T
    returned_bytes: T

    @property
    def static_bytes(self) -> T:
        """Bytes from its first gather to the end of the step."""
        return self.held_weight_bytes + self.held_gradient_bytes + self.held_optimizer_bytes


class StepResult(NamedTuple):
    """Arrays that `kernel.evaluate_packed` fills."""

    step: Floats  # float64 [2], seconds of a step and bytes over capacity
    answers: Floats  # float64 [P, ANSWER]
    used: Floats  # float64 [L, P], bytes on each device beside reserved ones
    hosts: Floats  # float64 [P], bytes of each device in its host's memory
    stage_s: Floats  # float64 [S], busy seconds

    @classmethod
    def of(cls, lanes: int, places: int, stages: int) -> StepResult:
        """Returns arrays of these axes."""
        sizes = (2,), (places, ANSWER), (lanes, places), (places,), (stages,)
        return cls(*map(np.zeros, sizes))
