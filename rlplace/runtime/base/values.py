"""What a distributed model is called with: example inputs, and checks that processes trace one graph and get one batch.

Every process traces the forward for itself and then runs its part of it. Where a forward depends on the process, by its rank,
by a random number or by the order of a set, the parts do not fit each other: messages have other sizes than their receivers
expect, which hangs, or aborts a process inside its communication library without a word.

Every process of a replica works on the same samples. A sampler or a loader that deals them out to processes, as for data
parallel training, would give each process another batch, and the model would train on mixtures of them without a sign.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn

from rlplace.errors import InputError
from rlplace.model.capture.inputs import described_inputs, split_inputs
from rlplace.model.torch_adapter import pytree
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.base.forward_graph import ForwardGraph, Loss
from rlplace.runtime.base.ranks import Ranks, gather_objects


def micro_batch(plan: PlacementPlan, example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments of one micro-batch: those given, else, on the meta device, what the plan's model was captured with.

    Raises:
        InputError: Neither is there, or they are something else than a tensor, a sequence or a mapping.
    """
    if example_inputs is None:
        description = ((plan.source or {}).get("graph") or {}).get("inputs")
        if description is None:
            raise InputError(
                "distribute: the plan does not say what the inputs of its model look like; give distribute(model, plan, "
                "example_inputs), the inputs of one micro-batch as a dict by keyword or a tuple"
            )
        return described_inputs(description)
    return split_inputs(example_inputs)


def has_target(model: nn.Module) -> bool:
    """Returns whether ``target=`` of a call is an input of the model itself and not one of the loss."""
    return "target" in inspect.signature(model.forward).parameters


def takes_target(loss: Loss | None) -> bool:
    """Returns whether a loss function needs a second argument besides the model's output."""
    if loss is None:
        return False
    try:
        inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).bind(None)
    except (TypeError, ValueError):  # the output alone is not enough, or it is a builtin
        return True
    return False


def samples_of(arguments: Any) -> int:
    """Samples of a batch: rows of its first tensor.

    Raises:
        InputError: There is no tensor, or it has no first dimension.
    """
    first = next((leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)), None)
    if first is None or first.dim() == 0 or len(first) == 0:
        raise InputError(
            "distribute: the first tensor input must have the batch as its first dimension, and it must not be empty"
        )
    return len(first)


def check_inputs(arguments: Any) -> None:
    """Refuses inputs that require a gradient: a training step runs as a whole, before anybody asks for gradients.

    Raises:
        InputError: One does.
    """
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(arguments)):
        raise InputError(
            "distribute: an input requires a gradient, and none flows out of a distributed model; detach it, or make what "
            "computes it a part of the model"
        )


CALLS = 2
"""Calls that are checked; a batch costs about as much as a look at every element and a message of a few bytes."""


def check_first_batches(model: nn.Module, ranks: Ranks, share: str) -> None:
    """Makes the first calls of a distributed model compare their inputs over the processes that must get the same.

    Args:
        model: The distributed model.
        ranks: Its processes.
        share: See `rlplace.distribute`.
    """
    alike = ranks.replicas if share == "replica" else [{rank for row in ranks.replicas for rank in row}]
    if max(map(len, alike)) < 2:
        return
    left = [CALLS]

    def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        digests = gather_objects(digest((args, kwargs)))
        left[0] -= 1
        if left[0] == 0:
            handle.remove()
        if any(len({digests[rank] for rank in row}) > 1 for row in alike):
            raise InputError(
                "distribute: the processes were called with different batches; every process of a replica works on the whole "
                "batch, so seed all alike and leave out DistributedSampler and loaders that split batches over processes"
            )

    handle = model.register_forward_pre_hook(compare, with_kwargs=True, prepend=True)


def digest(inputs: Any) -> bytes:
    """Returns a few bytes that tell batches apart."""
    seen = hashlib.blake2b(digest_size=16)
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            seen.update(bytes_of(leaf))
    return seen.digest()


_DEVICE = re.compile(r"\b([a-z]+):\d+\b")
"""A device is only known by its kind: every process traces for its own."""


def check_same_graph(graph: ForwardGraph, ranks: Ranks) -> None:
    """Compares a graph over all processes; a message of some 20 bytes a node.

    Raises:
        InputError: On every process, with the first node that differs.
    """
    lines = graph_lines(graph)
    traced = gather_objects([hashlib.blake2b(line.encode(), digest_size=7).digest() for line in lines])
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
    """Returns a line for every node, then one for the rest, without what differs between processes that trace the same
    model.
    """
    modules = [module for module in graph.module.modules() if isinstance(module, fx.GraphModule)]
    lines = [_DEVICE.sub(r"\1", str(node.format_node())) for module in modules for node in module.graph.nodes]
    rest = (graph.held, str(graph.outputs), str(graph.loss), list(graph.op_of_node.items()))
    values = {name: hashlib.blake2b(bytes_of(value)).hexdigest() for name, value in graph.constants.items()}
    return [*lines, repr(rest), repr(values)]


def bytes_of(value: torch.Tensor) -> bytes:
    """Shape, dtype and elements of a tensor; of one without values the first two."""
    described, flat = repr((tuple(value.shape), value.dtype)).encode(), value.detach().flatten()
    return described if value.is_meta else described + flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()
