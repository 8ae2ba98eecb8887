"""What the arrays hold that drafts are packed into, by name of column; compiled code reads these numbers."""

from __future__ import annotations

# Rows, float64 [rows, B, ROW]: every block in one pass of the slowest replica of a lane. The last eight have a column for each
# entry of `costs.RECOMPUTE`.
(
    FORWARD,
    FORWARD_TENSOR,
    BACKWARD_TENSOR,
    BACKWARD_TENSOR_FULL,
    WEIGHT,
    SENT,
    RETURNED,
    WEIGHTS,
    GRADIENTS,
    OPTIMIZER,
    UPDATE,
    EXPERT_WEIGHTS,
    EXPERT_GRADIENTS,
    EXPERT_OPTIMIZER,
) = range(14)
BACKWARD, AGAIN, KEPT, HALVED, WORKING_FORWARD, WORKING_BACKWARD, WORKING_END, WORKING_GROWING = range(14, 38, 3)
ROW = 38

# Places, float64 [P, PLACE].
(
    SHARDING, SHARE, COPIES, GATHER_TABLE, SCATTER_TABLE, REDUCE_TABLE, HOST_RATE, UPDATE_RATE, ITEM, EXPERT_SHARE,
    EXPERT_GATHER_TABLE, EXPERT_SCATTER_TABLE, MEETS_BLOCKS, MEETS_COPIES,
) = range(14)  # fmt: skip
PLACE = 14

# Actions, int32 [., 3]: stage, kind, micro-batch.
KINDS = "FBIW"
DO_F, DO_B, DO_I, DO_W = range(4)

# Ways of hand-overs, float64 [2, S, WAY].
LATENCY, S_PER_BYTE, PART = range(3)
WAY = 3

# Answers about places, float64 [P, ANSWER]; the first are seconds of the lane with most work.
(COMPUTE, TENSOR, GATHER, EXCHANGE, HAND_OVER, END, UPDATE_S) = range(7)
ANSWER = 7
