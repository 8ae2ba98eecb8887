"""Checks that all processes of a replica traced the same graph.

Every process traces the forward for itself and then runs its part of it. Where a forward depends on the process, by its rank,
by a random number or by the order of a set, the parts do not fit each other: messages have other sizes than their receivers
expect, which hangs, or aborts a process inside its communication library without a word.
"""

from __future__ import annotations

import hashlib
from itertools import zip_longest
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.runtime import aliases
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.ranks import Ranks, gather_objects, group_of


def check_same_graph(graph: ForwardGraph, ranks: Ranks) -> None:
    """Compares a graph over the processes of this replica; a message of some 20 bytes a node.

    Raises:
        InputError: On every process, with the first node that differs.
    """
    row = () if ranks.replica is None else ranks.replicas[ranks.replica]
    if len(row) < 2:
        return
    lines = graph_lines(graph)
    group = group_of(row, "inputs")  # that compares batches, too
    traced = gather_objects([_number(line) for line in lines], group)
    differ = next((number for number, other in enumerate(traced) if other != traced[0]), None)
    if differ is None:
        return
    first = next(number for number, (a, b) in enumerate(zip_longest(traced[0], traced[differ])) if a != b)
    here = lines[first] if first < len(lines) else "nothing more"
    raise InputError(
        f"distribute: ranks {row[0]} and {row[differ]} traced different forwards of the model, from node {first} on (rank "
        f"{ranks.rank} has there: {here[:160]}); a forward must not depend on the rank, on random numbers or the order of sets"
    )


def graph_lines(graph: ForwardGraph) -> list[str]:
    """A line for every node, then one for the rest, without what differs between processes that trace the same model."""
    lines = _lines(graph.module)
    rest = (graph.held, graph.inputs, _text(graph.outputs), graph.loss, sorted(graph.writes), list(graph.op_of_node.items()))
    values = {name: hashlib.blake2b(_bytes(value)).hexdigest() for name, value in graph.constants.items()}
    return [*lines, repr(rest), repr(values)]


def _lines(module: fx.GraphModule) -> list[str]:
    lines = []
    for node in module.graph.nodes:
        value = aliases.get_attr(module, str(node.target)) if node.op == "get_attr" else None
        inner = " ".join(_lines(value)) if isinstance(value, fx.GraphModule) else ""
        lines.append(f"{node.name} = {_target(node.target)}{_text((node.args, node.kwargs))} {inner}".rstrip())
    return lines


def _target(target: Any) -> str:
    if isinstance(target, (str, torch._ops.OpOverload)):
        return str(target)
    return str(getattr(target, "__qualname__", type(target).__qualname__))


def _text(value: Any) -> str:
    """A device is only known by its kind: every process traces for its own."""

    def leaf(item: Any) -> Any:
        if isinstance(item, torch.device):
            return item.type
        if item is None or isinstance(item, (bool, int, float, complex, str, torch.dtype, torch.layout, torch.memory_format)):
            return item
        return str(item) if isinstance(item, fx.Node) else _target(item)

    return repr(tuple(leaf(item) for item in pytree.tree_leaves(value)))


def _bytes(value: torch.Tensor) -> bytes:
    described = repr((tuple(value.shape), value.dtype)).encode()
    return described if value.is_meta else described + value.cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()


def _number(line: str) -> int:
    return int.from_bytes(hashlib.blake2b(line.encode(), digest_size=7).digest())
