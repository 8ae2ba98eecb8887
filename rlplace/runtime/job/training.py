"""What a plan needs in training: processes, samples, batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlplace.errors import InputError
from rlplace.model.torch_adapter import pytree
from rlplace.plan.plan import PlacementPlan
from rlplace.planned import cluster_of_plan, recipe_of
from rlplace.runtime.base.ranks import devices_of
from rlplace.runtime.base.values import samples_of
from rlplace.runtime.strategy.why_not import why_not

_INTEGERS = (torch.int64, torch.int32)


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
    """Returns whether the first devices of the plan's cluster are of the kinds and hosts of these, so that these may be
    those.
    """
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
    """Returns a batch for one step, the same on every rank: whole samples of a model's example inputs.

    Every sample of the example comes as often as any other, or once more, in an order of the step's own. Tensors with one row a
    sample are indexed alike; all others stay as they are. Where rows may belong to samples in another way, such as values with
    offsets or lengths in falling order, samples stay in their order.

    Args:
        example_inputs: Nested tensors; the batch is the first dimension of the first tensor that has one.
        samples: Size of the batch.
        seed: The run's seed.
        step: Number of the step.

    Returns:
        The same nesting.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(example_inputs) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    if not leaves:
        return example_inputs
    length = len(leaves[0])
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    rounds = -(-samples // length)
    if _in_order(leaves, length):
        rows = torch.arange(length).repeat(rounds)[:samples]
    else:
        rows = torch.cat([torch.randperm(length, generator=generator) for _ in range(rounds)])[:samples]

    def drawn(leaf: torch.Tensor) -> torch.Tensor:
        return leaf if leaf.dim() == 0 or len(leaf) != length else leaf[rows]

    return pytree.tree_map_only(torch.Tensor, drawn, example_inputs)


def _in_order(leaves: Sequence[torch.Tensor], length: int) -> bool:
    """Returns whether the order of samples may mean something.

    It may where a tensor has another number of rows (ids of all bags behind one another, a graph's edges), where a vector of
    integers falls (lengths, as packed sequences need them), and where one counts rows of another (an offset for every id).
    """
    if any(len(leaf) not in (1, length) for leaf in leaves):
        return True
    vectors = [leaf for leaf in leaves if leaf.dim() == 1 and len(leaf) == length > 1 and leaf.dtype in _INTEGERS]
    falling = any(bool((leaf.diff() <= 0).all()) and bool(leaf[0] > leaf[-1]) for leaf in vectors)
    return falling or (
        len(vectors) > 1 and any(torch.equal(leaf.cpu(), torch.arange(length).to(leaf.dtype)) for leaf in vectors)
    )
