"""Layouts over an expert group, which spreads experts over its devices.

Experts are products that read one weight for all of them, cut by expert: torch's and transformers' grouped products, whose
rows a router has sorted, and batched products of rows for every expert, as llama4's; or modules in a list that is named after
them, whose mixture runs its own ops twice (`rlplace.runtime.strategy.lists`). Every device of an expert group holds
some experts and works on the tokens of all devices that chose them: on average as many as it had itself, on the busiest one
more (`CostTable.busiest`). A tensor group inside of it divides its tokens, which all of its devices have, instead of the
experts' matrices, as torchtitan does (its `ReordererSequenceParallel`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.model.aten import base_name
from rlplace.model.graph.opgraph import FORWARD, PARAMETER, UPDATE, OpGraph
from rlplace.strategy.costs import (
    ALL_GATHER,
    BACKWARD_PASS,
    EXPERT_ALL_TO_ALL,
    FORWARD_PASS,
    REDUCE_SCATTER,
    Cut,
)
from rlplace.strategy.layouts.tensor_layout import LayoutCollective, TensorLayout

_LISTED = re.compile(r"((?:.*\.)?[^.]*expert[^.]*)\.(\d+)\..+")
"""Name of a parameter of an expert in a list: path of the list, and number of the expert."""


class Sent(NamedTuple):
    """Tokens of an all-to-all."""

    op: int
    tensor: int
    times: float = 1.0  # bytes that move, over those of the tensor


@dataclass(frozen=True, eq=False)
class Experts:
    """The experts of a captured step.

    Attributes:
        counts: By parameter the number of experts, along its first axis or in its list.
        routed: bool [N], forward and backward ops that work on sorted tokens.
        again: bool [N], forward ops of mixtures with lists, which run twice.
        products: int64, ops that read or write weights of experts.
        sent: By module or list of experts the tokens that are sent to experts, and those that come back.
        outputs: Tensors from routed ops to others; the first of every module is its output.
    """

    graph: OpGraph
    counts: dict[int, int]
    routed: NDArray[np.bool_]
    again: NDArray[np.bool_]
    products: NDArray[np.int64]
    sent: tuple[tuple[Sent, Sent], ...]
    outputs: NDArray[np.int64]

    @property
    def most(self) -> int:
        """Degrees over which they can be spread divide it; 1 without experts."""
        return gcd(*self.counts.values()) or 1

    def sorted_bytes(self, tensor_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns int64 [N], bytes that a device reads and writes to sort rows for an all-to-all and back, in both passes.

        Out, the rows of tokens are read once for each expert and written, in the backward added to; back, they are read in the
        order of the tokens, written, and weighed once more.

        Args:
            tensor_bytes: int64 [T], of a device's tensors.
        """
        found = np.zeros(self.graph.num_ops, dtype=np.int64)
        for ends in self.sent:
            for (op, tensor, share), times in zip(ends, (2, 4), strict=True):
                behind = np.flatnonzero((self.graph.op_forward == op) & (self.graph.op_phase != UPDATE))
                for each in (op, *behind[behind != op][:1].tolist()):
                    found[each] += round(times * share * tensor_bytes[tensor])
        return found

    def why_not(self, degree: int) -> str | None:
        """Explains why the experts cannot be spread over so many devices."""
        if not self.counts:
            return "the model has no experts in grouped or batched products; leave expert at 1"
        return f"expert degree {degree} does not divide {self.most} experts" if self.most % degree else None

    def spread(self, layout: TensorLayout | None, cut: Cut, of_op: NDArray[np.int32], busiest: float) -> TensorLayout:
        """Returns a layout in which an expert group spreads the experts, from that of the tensor group (None: one device).

        `of_op` is int32 [N], the block of every op; `busiest` tokens of the busiest device, for which all wait, over the mean.
        """
        graph, rows = self.graph, cut.tensor
        layout = layout or _whole(graph)
        op_parts, tensor_parts = layout.op_parts.copy(), layout.tensor_parts.copy()
        parameter_parts = layout.parameter_parts.copy()
        parameter_parts[list(self.counts)] = cut.expert
        op_parts[self.routed] = rows
        updates = np.flatnonzero(graph.op_phase == UPDATE)
        op_parts[updates] = parameter_parts[graph.op_parameter[updates]]
        made = np.flatnonzero((graph.tensor_producer >= 0) & self.routed[np.maximum(graph.tensor_producer, 0)])
        tensor_parts[made], tensor_parts[self.outputs] = rows, 1
        collectives = [item for item in layout.collectives if not self.routed[item.op]]
        for ends in self.sent:
            block = int(of_op[ends[0].op])
            for when, sent in product((FORWARD_PASS, BACKWARD_PASS), ends):
                times = busiest * sent.times
                collectives.append(LayoutCollective(block, sent.op, sent.tensor, when, EXPERT_ALL_TO_ALL, times))
        if rows > 1:
            # Every device of the tensor group has the output of its own tokens, and the gradients of what it took of its input.
            ahead, behind = (
                ((REDUCE_SCATTER,), (ALL_GATHER, REDUCE_SCATTER)) if cut.sequence_parallel else ((ALL_GATHER,), (ALL_GATHER,))
            )
            for tensor in self.outputs[graph.op_phase[graph.tensor_producer[self.outputs]] == FORWARD].tolist():
                op = int(graph.tensor_producer[tensor])
                for when, kinds in ((FORWARD_PASS, ahead), (BACKWARD_PASS, behind)):
                    collectives += [LayoutCollective(int(of_op[op]), op, tensor, when, kind) for kind in kinds]
        return dataclasses.replace(
            layout,
            op_parts=op_parts,
            op_dims={op: dim for op, dim in layout.op_dims.items() if not self.routed[op]},
            tensor_parts=tensor_parts,
            parameter_parts=parameter_parts,
            collectives=tuple(collectives),
            thin_ops=self.products,
        )


def find_experts(graph: OpGraph) -> Experts:
    """Returns the experts of a captured step, if it has any."""
    readers, tensors = graph.consumers, graph.edge_tensor
    grouped = np.array(["grouped_mm" in target or base_name(target) == "bmm" for target in graph.op_target], dtype=bool)
    weight = (graph.tensor_role == PARAMETER)[tensors] & (graph.op_phase[readers] == FORWARD)
    held: dict[int, int] = {}
    of_module: dict[str, list[int]] = {}
    listed = _listed(graph)
    for tensor, op in zip(tensors[weight].tolist(), readers[weight].tolist(), strict=True):
        number = int(graph.tensor_parameter[tensor])
        parameter = graph.parameters[number]
        if number in listed:
            held[number] = len(listed[number][1])
            of_module.setdefault(listed[number][0], []).append(op)
        elif len(parameter.shape) == 3 and grouped[op]:
            held[number] = parameter.shape[0]
            of_module.setdefault(parameter.name.rpartition(".")[0], []).append(op)
    modules = tuple(f"{module}." for module in of_module)
    inside = np.array([f"{path}.".startswith(modules) for path in graph.op_module], dtype=bool)
    ahead = inside & (graph.op_phase == FORWARD)
    behind = (graph.op_phase != FORWARD) & (graph.op_phase != UPDATE) & (graph.op_forward >= 0)
    routed = ahead | (behind & ahead[np.maximum(graph.op_forward, 0)])
    forward_products = sorted(op for ops in of_module.values() for op in ops)
    products = np.flatnonzero(np.isin(np.where(behind, graph.op_forward, np.arange(graph.num_ops)), forward_products))
    made = graph.tensor_producer[tensors]
    leaves = (made >= 0) & routed[np.maximum(made, 0)] & ~routed[readers] & (graph.op_phase[readers] != UPDATE)
    lists = {path: numbers for path, numbers in listed.values() if path in of_module}
    around = tuple(f"{path.rpartition('.')[0]}." for path in lists if "." in path)
    again = np.array([f"{path}.".startswith(around) for path in graph.op_module], dtype=bool)
    again &= (graph.op_phase == FORWARD) & ~ahead
    sent = []
    for path, ops in of_module.items():
        paths = [f"{path}.{number}." for number in lists.get(path, ())]
        parts = [[op for op in ops if f"{graph.op_module[op]}.".startswith(each)] for each in paths] or [ops]
        sent.append(_ends(graph, [part for part in parts if part]))
    return Experts(graph, held, routed, again, products, tuple(sent), np.unique(tensors[leaves]).astype(np.int64))


def _listed(graph: OpGraph) -> dict[int, tuple[str, tuple[str, ...]]]:
    """Returns by parameter of an expert in a list the path of the list, and the numbers in it."""
    names = {number: _LISTED.fullmatch(parameter.name) for number, parameter in enumerate(graph.parameters)}
    found = {number: match for number, match in names.items() if match and "shared" not in match[1].rpartition(".")[2]}
    members: dict[str, dict[str, None]] = {}
    for match in found.values():
        members.setdefault(match[1], {})[match[2]] = None
    return {number: (match[1], tuple(members[match[1]])) for number, match in found.items()}


def _ends(graph: OpGraph, parts: Sequence[Sequence[int]]) -> tuple[Sent, Sent]:
    """Returns the input of the first product of experts, and the output of the last one; of several by those of one."""
    ends = []
    for part in parts:
        read = graph.edge_tensor[(graph.consumers == min(part)) & (graph.tensor_role[graph.edge_tensor] != PARAMETER)]
        made = np.flatnonzero(graph.tensor_producer == max(part))
        ends.append([int(values[np.argmax(graph.tensor_bytes[values])]) for values in (read, made)])
    whole = graph.tensor_bytes[np.array(ends)].sum(0) / np.maximum(graph.tensor_bytes[ends[0]], 1)
    ops = min(parts[0]), max(parts[0])
    ahead, back = (Sent(op, tensor, float(times)) for op, tensor, times in zip(ops, ends[0], whole, strict=True))
    return ahead, back


def _whole(graph: OpGraph) -> TensorLayout:
    """Returns the layout of a tensor group of one device."""
    ones = [np.ones(count, dtype=np.int32) for count in (graph.num_ops, graph.num_tensors, len(graph.parameters))]
    return TensorLayout(1, ones[0], {}, ones[1], ones[2], (), {})
