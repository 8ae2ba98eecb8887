"""What a plan needs in training: processes, samples, batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.recipe import cluster_of_plan, recipe_of
from rlplace.runtime.distributed.execution.batches import samples_of
from rlplace.runtime.distributed.ranks import devices_of
from rlplace.runtime.native.why_not import why_not


def check_strategy(plan: PlacementPlan, verb: str) -> None:
    """Refuses what cannot be run of a strategy by itself, before any process waits for another; placements pass.

    Raises:
        InputError: With the reason.
    """
    if plan.strategy is None:
        return
    reason = why_not(plan.strategy)
    if reason is not None:
        raise InputError(f"{verb}: {reason}")
    devices = devices_of(plan)
    if devices != list(range(devices[0], devices[0] + len(devices))) and not _like_the_first(plan, devices):
        raise InputError(
            f"{verb}: the plan uses the devices {', '.join(map(str, devices))}, and processes are numbered without gaps, which "
            "would run it on devices of other kinds or hosts; plan for a cluster of these devices alone"
        )
    if recipe_of(plan).master_weights and verb != "run":
        raise InputError(f"{verb}: the plan keeps its weights in fp32 (--master-weights); 'rlplace run' trains and times it")


def _like_the_first(plan: PlacementPlan, devices: Sequence[int]) -> bool:
    """Whether the first devices of the plan's cluster are of the kinds and hosts of these, so that these may be those."""
    try:
        cluster = cluster_of_plan(plan)
    except InputError:  # of a file that is not here: nobody knows
        return False
    seats = list(zip(cluster.hosts, (kind.name for kind in cluster.kinds), strict=True))
    return max(devices) < len(seats) and [seats[device] for device in devices] == seats[: len(devices)]


def microbatch_of(plan: PlacementPlan, samples: int) -> int:
    """Samples of the micro-batch that a plan's model is built for, which are `samples` for a placement."""
    return samples if plan.strategy is None else plan.strategy.pipelines[0].microbatch[0]


def samples_of_step(plan: PlacementPlan, example_inputs: Any) -> int:
    """Samples of a step: those of the micro-batch for a placement."""
    return samples_of(example_inputs) if plan.strategy is None else plan.strategy.batch


def synthetic_batch(example_inputs: Any, samples: int, seed: int, step: int) -> Any:
    """A batch for one step, the same on every rank.

    It comes from a model's example inputs, so that every value is in its range: a sample of a batch is one of theirs with its
    elements shuffled. Tensors of the same shape are shuffled alike, which keeps labels beside their tokens, and tensors of at
    most two different values, such as masks, are not shuffled at all, because their pattern means something.

    Args:
        example_inputs: Nested tensors of one micro-batch; the batch is the first dimension of the first tensor.
        samples: Size of the batch.
        seed: The run's seed.
        step: Number of the step.

    Returns:
        The same nesting; tensors without a batch dimension as they are.
    """
    leaves = pytree.tree_leaves(example_inputs)
    length = next((len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0), None)

    def shuffled(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.dim() == 0 or len(leaf) != length:
            return leaf
        shape = tuple(leaf.shape[1:])
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_000_003 + _number(shape))
        rows = torch.Generator().manual_seed(seed * 1_000_003 + step)
        batch = leaf[torch.randint(len(leaf), (samples,), generator=rows)]
        if shape and leaf.unique().numel() > 2:
            flat = batch.reshape(samples, -1)
            order = torch.rand(flat.shape, generator=generator).argsort(dim=1)
            batch = flat.gather(1, order).reshape(batch.shape)
        return batch

    return pytree.tree_map_only(torch.Tensor, shuffled, example_inputs)


def _number(shape: tuple[int, ...]) -> int:
    number = 0
    for size in shape:
        number = (number * 8191 + size) % 1_000_003
    return number
