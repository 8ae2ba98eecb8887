"""What a compiler saves: point-wise ops, reductions and norms that follow each other run as one kernel.

A value that such an op hands to another such op of the same phase stays in registers: the reader does not load it, and the
producer does not store it when nobody else needs it. Ops that hand on everything they make launch no kernel of their own, and
temporaries inside an op vanish. Matrix products, attention and convolutions are library calls and fuse with nothing. It is the
default behaviour of torch.compile's code generator, without its recomputation of cheap values in backward.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlplace.graph.opgraph import OpGraph

POINTWISE = ("elementwise", "copy", "random")
READS_FUSED = (*POINTWISE, "reduction", "norm", "softmax")
"""Classes that can take a value from the kernel they run in; the point-wise ones, norms and softmax can also hand one on."""
WRITES_FUSED = (*POINTWISE, "norm", "softmax")


def fused_traffic(graph: OpGraph) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bytes and launches of every op when a compiler has fused what can be fused.

    Args:
        graph: N ops.

    Returns:
        float64 [N], bytes read and written; float64 [N], the largest number of kernels that the op launches: 0 where it runs
        inside others' kernels, 1 where it is one, infinity where nothing changes.
    """
    takes, hands = (np.array([kind in names for kind in graph.op_kind], dtype=bool) for names in (READS_FUSED, WRITES_FUSED))
    view = np.array([kind == "view" for kind in graph.op_kind], dtype=bool)
    tensor, consumer, producer = graph.edge_tensor, graph.consumers, graph.tensor_producer
    produced = producer >= 0
    maker = np.maximum(producer, 0)
    size = graph.tensor_bytes.astype(np.float64)
    same_phase = graph.op_phase[consumer] == graph.op_phase[maker[tensor]]
    fused_read = produced[tensor] & hands[maker[tensor]] & takes[consumer] & same_phase
    matters = ~view[consumer]
    count = graph.num_tensors
    readers = np.bincount(tensor[matters], minlength=count)
    fused_readers = np.bincount(tensor[fused_read & matters], minlength=count)
    kept_inside = produced & (readers > 0) & (readers == fused_readers) & (size > 0)

    loads = matters & ~fused_read
    read = np.bincount(consumer[loads], weights=size[tensor[loads]], minlength=graph.num_ops)
    stores = produced & ~kept_inside
    written = np.bincount(producer[stores], weights=size[stores], minlength=graph.num_ops)
    outputs = np.bincount(producer[produced & (size > 0)], minlength=graph.num_ops)
    inside = np.bincount(producer[kept_inside], minlength=graph.num_ops)
    before = graph.op_bytes.astype(np.float64)
    after = np.where(takes, np.minimum(before, read + written), before)
    launches = np.where(takes, np.where((outputs > 0) & (outputs == inside), 0.0, 1.0), np.inf)
    return after, launches
