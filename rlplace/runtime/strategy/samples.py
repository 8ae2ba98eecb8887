"""How a captured step treats samples, by rules about its ops: for models that are too large to be rehearsed.

What runs along the samples is known from the capture. They meet where one op runs along them twice, as the product of the
embeddings of a contrastive loss does, or where an op needs sums over them before it can go on, as batch normalisation does. A
cross-entropy that is the loss itself is a mean over the targets that are not ignored.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rlplace.model.aten import base_name
from rlplace.model.graph.opgraph import FORWARD, OpGraph
from rlplace.runtime.base.conduct import TARGETS, Conduct
from rlplace.strategy.layouts.cut_moves import SAMPLE
from rlplace.strategy.layouts.forward_ops import ForwardOps

_OVER_TARGETS = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss_forward")


def conduct_of_graph(graph: OpGraph, unseen: str) -> Conduct:
    """What the rules find.

    Args:
        graph: Captured in this process.
        unseen: Why the model was not rehearsed.
    """
    found = Conduct(unseen=unseen)
    if graph.traced is None:
        return found
    ops = ForwardOps(graph, np.zeros(graph.num_ops, dtype=np.int32))
    meets = next((op for op in np.flatnonzero(ops.searched).tolist() if _meets(ops, op)), None)
    if meets is not None:
        where = graph.op_module[meets]
        return replace(found, reduction="", where=where, mixing=(where,) if where else ())
    return replace(found, reduction=TARGETS) if _is_mean_over_targets(ops) else found


def _meets(ops: ForwardOps, op: int) -> bool:
    """Returns whether samples meet in an op."""
    indices = ops.indices
    along = {name.partition(".")[0] for name in indices.dims.get(op, {}) if ops.runs(op, name) == SAMPLE}
    sums = indices.statistics.get(op, ())
    return len(along) > 1 or any(along and not any(name.partition(".")[0] in along for name in names) for names, _ in sums)


def _is_mean_over_targets(ops: ForwardOps) -> bool:
    """Returns whether the only cross-entropy of the step is its loss, which no other op reads."""
    graph = ops.graph
    forward = np.flatnonzero(graph.op_phase == FORWARD).tolist()
    found = [op for op in forward if base_name(graph.op_target[op]) in _OVER_TARGETS]
    return len(found) == 1 and not ops.after.get(found[0])
