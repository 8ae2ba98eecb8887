"""Random ops that draw the same numbers wherever they run.

A random op of a distributed model does not continue its device's random stream: which other ops ran there before depends on the
plan. It draws from a stream of its own, seeded by the step and the number of the op in the model. So every plan of a model, one
device included, draws the same dropout masks in the same step (on the same kind of device: CPU and CUDA generators differ).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from rlplace.model.capture.export import is_random

_key: tuple[int, int] | None = None  # seed and step of what runs now in this process


@contextlib.contextmanager
def random_key(seed: int, step: int) -> Iterator[None]:
    """Names the pass over the model that random ops inside belong to.

    Args:
        seed: The run's seed.
        step: Number of the training step.
    """
    global _key
    before, _key = _key, (seed, step)
    try:
        yield
    finally:
        _key = before


def seeded(op: Callable[..., Any], number: int, *args: Any, **kwargs: Any) -> Any:
    """Calls a random op with its own stream; outside of `random_key` it continues the device's stream as always."""
    if _key is None:
        return op(*args, **kwargs)
    schema = getattr(op, "_schema", None)
    if schema is None or not schema.is_mutable:
        # Numbers are drawn in the order of memory, which must not depend on the way that a tensor came here.
        args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, (args, kwargs))
    device = next(
        (leaf.device for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None
    )
    device = kwargs.get("device") or device or torch.device("cpu")
    digest = hashlib.blake2b(repr((*_key, number)).encode(), digest_size=8).digest()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        # torch.manual_seed would seed the other devices, too, whose own streams nobody puts back.
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(int.from_bytes(digest) >> 1)
        else:
            torch.default_generator.manual_seed(int.from_bytes(digest) >> 1)
        return op(*args, **kwargs)


def seed_random_ops(graph: fx.Graph) -> int:
    """Gives every random op of a graph its number; returns how many there are."""
    count = 0
    for node in list(graph.nodes):
        if node.op == "call_function" and is_random(node):
            node.args = (node.target, count, *node.args)
            node.target = seeded
            count += 1
    return count
