"""Checks that all processes traced the same graph.

Every process traces the forward for itself and then runs its part of it. Where a forward depends on the process, by its rank,
by a random number or by the order of a set, the parts do not fit each other: messages have other sizes than their receivers
expect, which hangs, or aborts a process inside its communication library without a word.
"""

from __future__ import annotations

import hashlib
import re
from itertools import zip_longest

import torch
from torch import fx

from rlplace.errors import InputError
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.ranks import Ranks, gather_objects

_DEVICE = re.compile(r"\b([a-z]+):\d+\b")
"""A device is only known by its kind: every process traces for its own."""


def check_same_graph(graph: ForwardGraph, ranks: Ranks) -> None:
    """Compares a graph over all processes; a message of some 20 bytes a node.

    Raises:
        InputError: On every process, with the first node that differs.
    """
    if ranks.world < 2:
        return
    lines = graph_lines(graph)
    traced = gather_objects([_number(line) for line in lines])
    differ = next((number for number, other in enumerate(traced) if other != traced[0]), None)
    if differ is None:
        return
    first = next(number for number, (a, b) in enumerate(zip_longest(traced[0], traced[differ])) if a != b)
    here = lines[first] if first < len(lines) else "nothing more"
    raise InputError(
        f"distribute: ranks 0 and {differ} traced different forwards of the model, from node {first} on (rank "
        f"{ranks.rank} has there: {here[:160]}); a forward must not depend on the rank, on random numbers or the order of sets"
    )


def graph_lines(graph: ForwardGraph) -> list[str]:
    """A line for every node, then one for the rest, without what differs between processes that trace the same model."""
    modules = [module for module in graph.module.modules() if isinstance(module, fx.GraphModule)]
    lines = [_DEVICE.sub(r"\1", str(node.format_node())) for module in modules for node in module.graph.nodes]
    rest = (graph.held, str(graph.outputs), str(graph.loss), list(graph.op_of_node.items()))
    values = {name: hashlib.blake2b(bytes_of(value)).hexdigest() for name, value in graph.constants.items()}
    return [*lines, repr(rest), repr(values)]


def bytes_of(value: torch.Tensor) -> bytes:
    """Shape, dtype and elements of a tensor; of one without values the first two."""
    described, flat = repr((tuple(value.shape), value.dtype)).encode(), value.detach().flatten()
    return described if value.is_meta else described + flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _number(line: str) -> int:
    return int.from_bytes(hashlib.blake2b(line.encode(), digest_size=7).digest())
