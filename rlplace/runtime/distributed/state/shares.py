"""Optimizer sharding (ZeRO stage 1): which part of each parameter a replica updates.

Each process holds its parameters whole for the forward and backward, but hands only its replica's share of each one to the
optimizer: a parameter that is a view of the whole one, so that an update of the share is an update of the whole. The optimizer
keeps state for the share alone, about 1 / R of it. After the update the shares are gathered.

A share is a slice along one dimension, cut like `torch.chunk` and `DTensor`'s ``Shard(dim)`` cut it, so optimizers that treat
every element alike (SGD, Adam, AdamW and their like) compute what they would on the whole parameter, and state of a share is
state of a shard when it is saved. Optimizers that look at a parameter as a matrix (Muon, Shampoo, Adafactor) do not: they must
not be sharded.

FSDP2's `fully_shard` does this natively and was not taken: its parameters are DTensors over the replicas, while a parameter
that is tied across devices has to stay a plain tensor, and one optimizer cannot update both in one (foreach) call; it must own
the modules whose forward it wraps, while here a parameter may be read by several segments; and its gathers and reductions wait
for every replica in every pass, while a short last batch leaves replicas without a pass. It also shards gradients, which the
plan does not ask for. Giving each replica whole parameters (as `ZeroRedundancyOptimizer` does) was not taken because one large
embedding is often a third of a model, and no partition of whole parameters then comes near 1 / R.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rlplace.errors import InputError
from rlplace.runtime.distributed.ranks import Ranks, all_gather, group_of
from rlplace.simulator.replicas import BUCKET_BYTES


@dataclass(frozen=True)
class Share:
    """A slice of a parameter.

    Attributes:
        dim: Dimension that is cut; None: every replica has the whole parameter.
        start, stop: Where the slice begins and ends in that dimension.
    """

    dim: int | None
    start: int = 0
    stop: int = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The share of a tensor of the parameter's shape, as a view."""
        return tensor if self.dim is None else tensor.narrow(self.dim, self.start, self.stop - self.start)


def share_of(shape: Sequence[int], replicas: int, replica: int) -> Share:
    """A replica's share of a parameter.

    The first dimension that is not 1 is cut, so that shares are contiguous, unless the replicas do not divide it and it is
    so short that some would get much more than others; then the first that they divide is cut, or the longest.
    """
    dim = _dimension(shape, replicas)
    if dim is None:
        return Share(None)
    length = -(-shape[dim] // replicas)
    start = min(replica * length, shape[dim])
    return Share(dim, start, min(start + length, shape[dim]))


def _dimension(shape: Sequence[int], replicas: int) -> int | None:
    long = [dim for dim, size in enumerate(shape) if size > 1]
    if not long:
        return None
    first = long[0]
    if shape[first] % replicas == 0 or shape[first] >= 8 * replicas:
        return first
    divided = [dim for dim in long if shape[dim] % replicas == 0]
    return divided[0] if divided else max(long, key=lambda dim: shape[dim])


class SharedParameters:
    """This replica's shares of the parameters of one device of the plan.

    Attributes:
        shares: Share by name, of the parameters that are cut.
        trained: What an optimizer gets, by name of every parameter: the share as a parameter that is a view of the whole one,
            or the parameter itself where it is not cut.
        nothing: A parameter without elements.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks, cut: bool) -> None:
        """Cuts the parameters; from then on an update by any torch optimizer is followed by `gather`.

        Args:
            parameters: Those that this process holds, by name.
            ranks: The processes.
            cut: Whether to; else everything stays whole.
        """
        self._parameters = parameters
        self._ranks = ranks
        self._replicas = len(ranks.replicas)
        self.nothing = nn.Parameter(torch.zeros(0, device=ranks.device))
        self.shares: dict[str, Share] = {}
        self.trained: dict[str, nn.Parameter] = dict(parameters)
        self._versions: dict[str, int] = {}
        self._names: dict[int, str] = {}
        if not cut or self._replicas == 1 or ranks.plan_device is None:
            return
        for name, parameter in parameters.items():
            share = share_of(parameter.shape, self._replicas, ranks.replica or 0)
            if share.dim is not None and parameter.requires_grad and not isinstance(parameter, DTensor):
                self.shares[name] = share
                self.trained[name] = nn.Parameter(share.of(parameter.detach()))
        self._names = {id(self.trained[name]): name for name in self.shares}
        self._note_versions(self.shares)
        me = weakref.ref(self)

        def updated(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            shared = me()
            if shared is not None:
                held = [p for group in optimizer.param_groups for p in group["params"]]
                shared.gather([shared._names[id(p)] for p in held if id(p) in shared._names])

        def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            shared = me()
            fused = [p for group in optimizer.param_groups if group.get("fused") for p in group["params"]]
            if shared is not None and any(id(p) in shared._names and not p.is_contiguous() for p in fused):
                raise InputError(
                    "optimizer sharding cuts a parameter that is short in its first dimension along another one, and torch's "
                    "fused optimizers compute nonsense on such slices; make the optimizer with foreach=True"
                )

        for handle in (register_optimizer_step_pre_hook(check), register_optimizer_step_post_hook(updated)):  # type: ignore[no-untyped-call]
            weakref.finalize(self, handle.remove)

    def gather(self, names: Iterable[str] | None = None) -> None:
        """Brings the shares of all replicas together in the whole parameters.

        Args:
            names: Default all. The replicas give the same names in the same order.
        """
        for bucket in fill_buckets({name: self._parameters[name] for name in (self.shares if names is None else names)}):
            self._gather(bucket)
            self._note_versions(bucket)

    def gather_changed(self) -> None:
        """Gathers what was changed otherwise than by an optimizer, as loops that set parameters by hand do."""
        self.gather([name for name in self.shares if self.trained[name]._version != self._versions[name]])

    def _gather(self, names: Sequence[str]) -> None:
        replicas, me = range(self._replicas), self._ranks.replica or 0
        first = self._parameters[names[0]]
        cuts = {n: [share_of(self._parameters[n].shape, self._replicas, r) for r in replicas] for n in names}
        with torch.no_grad():
            mine = torch.cat([cuts[n][me].of(self._parameters[n]).reshape(-1) for n in names])
            length = max(sum(cuts[n][r].of(self._parameters[n]).numel() for n in names) for r in replicas)
            padded = torch.cat([mine, mine.new_zeros(length - len(mine))])
            rows = first.new_empty(self._replicas * length)
            group = group_of(self._ranks.data_parallel_ranks(self._ranks.plan_device or 0), "gradients")
            all_gather(rows, padded, group)
            for replica in replicas:
                at = replica * length
                for name in names if replica != me else ():
                    target = cuts[name][replica].of(self._parameters[name])
                    target.copy_(rows[at : at + target.numel()].view(target.shape))
                    at += target.numel()

    def _note_versions(self, names: Iterable[str]) -> None:
        self._versions.update((name, self.trained[name]._version) for name in names)


def fill_buckets(parameters: Mapping[str, nn.Parameter], first_bytes: int = BUCKET_BYTES) -> list[list[str]]:
    """Names by bucket, in order; a bucket holds one dtype and about `BUCKET_BYTES`, the first one `first_bytes`."""
    buckets: list[list[str]] = []
    limit = first_bytes
    open_of: dict[tuple[torch.dtype, torch.device], tuple[list[str], int]] = {}
    for name, parameter in parameters.items():
        key = (parameter.dtype, parameter.device)
        inside, size = open_of.pop(key, ([], 0))
        inside.append(name)
        size += parameter.numel() * parameter.element_size()
        if size >= limit:
            buckets.append(inside)
            limit = BUCKET_BYTES
        else:
            open_of[key] = (inside, size)
    return buckets + [inside for inside, _ in open_of.values()]
