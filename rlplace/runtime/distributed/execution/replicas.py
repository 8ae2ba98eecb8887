"""Gradients summed over replicas while the backward still runs.

As in DistributedDataParallel, gradients go into buckets in the order in which they are complete, a first one of 1 MiB, then of
25 MiB, and a bucket is reduced as soon as its gradients are there; the plan is priced the same way. DistributedDataParallel
itself does not fit: it wants a module of its own for every parameter, while segments share them; a forward before
every backward, in its own order, while a stage runs several micro-batches at once; and the same number of passes on every
replica, while a short last batch leaves some replicas with fewer or none. It would also divide by the number of replicas. So
buckets are filled by autograd's hooks on the parameters, and a replica that has nothing to add takes part with zeros.

With optimizer sharding a bucket is a reduce-scatter: each replica gets the sum of its share only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlplace.runtime.distributed.ranks import Ranks, connect_now, group_of, reduce_scatter
from rlplace.runtime.distributed.state.shares import Share, fill_buckets, share_of
from rlplace.simulator.replicas import FIRST_BUCKET_BYTES


def sum_gradients(parameters: Mapping[str, nn.Parameter], owners: Mapping[str, tuple[int, ...]], ranks: Ranks) -> None:
    """Adds up the gradients of every parameter over all processes that hold it, coalesced by holders.

    A parameter without a gradient on some of them counts as zero there; one without a gradient on all of them keeps none.
    """
    groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        who = ranks.holders(owners[name])
        if parameter.requires_grad and len(who) > 1:
            groups.setdefault(who, []).append(parameter)
    for who, shared in sorted(groups.items()):
        group = group_of(who)
        has = torch.tensor([p.grad is not None for p in shared], dtype=torch.int32, device=shared[0].device)
        dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
        kept = [p for p, some in zip(shared, has.tolist(), strict=True) if some]
        for parameter in kept:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in kept:
            by_dtype.setdefault(parameter.dtype, []).append(parameter.grad)  # type: ignore[arg-type]
        for gradients in by_dtype.values():
            flat = torch._utils._flatten_dense_tensors(gradients)
            dist.all_reduce(flat, group=group)
            for gradient, value in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True):
                gradient.copy_(value)


def clip_grad_norm(
    parameters: Mapping[str, nn.Parameter],
    cut: Collection[str],
    owners: Mapping[str, tuple[int, ...]],
    ranks: Ranks,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scales the gradients of all processes so that their common norm is at most `max_norm`; all processes of the job call it.

    Args:
        parameters: Those of this process.
        cut: Names of those that are this replica's share only; of the others every replica has the same gradient.
        owners: Devices of the plan that hold a parameter, by name; what several hold counts once.
        ranks: The processes.
        max_norm: Upper limit.
        norm_type: 2 for the Euclidean norm, ``float("inf")`` for the largest element.
        error_if_nonfinite: Whether a norm that is not finite is an error, as in `torch.nn.utils.clip_grad_norm_`.

    Returns:
        The norm before, the same on every process.

    Raises:
        RuntimeError: The norm is not finite, and that is an error.
    """
    infinite = norm_type == float("inf")
    total = torch.zeros((), device=ranks.device, dtype=torch.float64)
    for name, parameter in parameters.items():
        grad = parameter.grad
        if grad is None:
            continue
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.promote_types(grad.dtype, torch.float32))
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()  # a collective of its mesh
        if owners[name][0] == ranks.plan_device and (name in cut or ranks.replica == 0):
            total = torch.maximum(total, norm.double()) if infinite else total + norm.double() ** norm_type
    dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM)
    norm = total if infinite else total ** (1.0 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {float(norm)}; they cannot be scaled to {max_norm}")
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in parameters.values():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm


@dataclass(eq=False)
class _Bucket:
    names: list[str]
    waiting: set[str]
    buffer: torch.Tensor | None = None
    work: Any = None


class GradientReducer:
    """Sums the gradients of one process's parameters over all processes that hold them.

    ``begin``, then backward passes, then ``finish``. Parameters that only the replicas of this device hold are reduced as
    soon as they are complete; those that are tied across devices follow at the end.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        owners: Mapping[str, tuple[int, ...]],
        ranks: Ranks,
        order: Sequence[str] = (),
        *,
        sharded: bool = False,
    ) -> None:
        """Makes the buckets; the replicas of one device do so together.

        Args:
            parameters: Those that this process holds, by first name.
            owners: Devices of the plan that hold each parameter.
            ranks: The processes.
            order: Names in the order in which gradients become complete, as far as it is known; the same on every replica.
            sharded: Only the share of this replica is needed: see `shares`. The rest of a gradient is undefined.
        """
        self._ranks = ranks
        self._owners = owners
        self._replicas = len(ranks.replicas)
        own = {name: p for name, p in parameters.items() if p.requires_grad}
        alone = {name for name in own if owners[name] == (ranks.plan_device,)} if self._replicas > 1 else set()
        self._parameters = {name: own[name] for name in dict.fromkeys([*order, *reversed(own)]) if name in alone}
        self._others = {name: p for name, p in own.items() if name not in alone}
        self._shares: dict[str, list[Share]] = {
            name: [share_of(p.shape, self._replicas, r) if sharded else Share(None) for r in range(self._replicas)]
            for name, p in self._parameters.items()
        }
        self._sharded = sharded
        self._bucket_names = fill_buckets(self._parameters, FIRST_BUCKET_BYTES)
        self._of = {name: number for number, names in enumerate(self._bucket_names) for name in names}
        self._group = (
            group_of(ranks.data_parallel_ranks(ranks.plan_device), "gradients")
            if self._parameters and ranks.plan_device is not None
            else None
        )
        if self._group is not None:
            connect_now(self._group, ranks.device)
        self._buckets: list[_Bucket] = []
        self._next = 0
        self._completing: frozenset[str] = frozenset()
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._accumulated(name))

    def begin(self) -> None:
        """Starts a step."""
        self._buckets = [_Bucket(names, set(names)) for names in self._bucket_names]
        self._next = 0
        self._completing = frozenset()

    @contextlib.contextmanager
    def completing(self, names: Iterable[str]) -> Iterator[None]:
        """Around the last backward pass of a step that gives gradients to some parameters."""
        self._completing = frozenset(names)
        try:
            yield
            self.complete(self._completing)
        finally:
            self._completing = frozenset()

    def complete(self, names: Iterable[str]) -> None:
        """Says that nothing is added to the gradients of some parameters any more in this step."""
        for name in names:
            if name in self._of:
                self._buckets[self._of[name]].waiting.discard(name)
        # In one order on all replicas, whatever the order in which theirs are complete.
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._launch(self._buckets[self._next])
            self._next += 1

    def finish(self) -> None:
        """Reduces what is left and waits; gradients hold the sums afterwards. All processes with parameters call it.

        A parameter without a gradient counts as zero, and keeps none when no process has one for it.
        """
        self.complete(self._of)
        flags = []
        for bucket in self._buckets:
            bucket.work.wait()
            flags.append(bucket.buffer[-len(bucket.names) :].float())  # type: ignore[index]
        some = torch.cat(flags).tolist() if flags else []
        for bucket in self._buckets:
            self._spread(bucket, some[: len(bucket.names)])
            some = some[len(bucket.names) :]
        self._buckets = []
        sum_gradients(self._others, self._owners, self._ranks)

    def _accumulated(self, name: str) -> None:
        if name in self._completing:
            self.complete((name,))

    def _launch(self, bucket: _Bucket) -> None:
        first = self._parameters[bucket.names[0]]
        has = [float(self._parameters[name].grad is not None) for name in bucket.names]
        flags = torch.tensor(has, dtype=first.dtype, device=first.device)
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in map(self._parameters.__getitem__, bucket.names)]
        if not self._sharded:
            bucket.buffer = torch.cat([*(grad.reshape(-1) for grad in grads), flags])
            bucket.work = dist.all_reduce(bucket.buffer, group=self._group, async_op=True)
            for name in bucket.names:  # the bucket has it now
                self._parameters[name].grad = None
            return
        length = max(sum(_numel(self._shares[n][r], self._parameters[n]) for n in bucket.names) for r in range(self._replicas))
        rows = first.new_zeros((self._replicas, length + len(flags)))
        for replica, row in enumerate(rows):
            parts = [self._shares[n][replica].of(grad).reshape(-1) for n, grad in zip(bucket.names, grads, strict=True)]
            joined = torch.cat(parts)
            row[: len(joined)] = joined
            row[length:] = flags
        bucket.buffer = rows.new_empty(length + len(flags))
        bucket.work = reduce_scatter(bucket.buffer, rows.reshape(-1), self._group)

    def _spread(self, bucket: _Bucket, some: Sequence[float]) -> None:
        """Puts the sums of a bucket in place."""
        at, replica = 0, self._ranks.replica or 0
        for name, has in zip(bucket.names, some, strict=True):
            parameter, share = self._parameters[name], self._shares[name][replica]
            size = _numel(share, parameter)
            value = bucket.buffer[at : at + size]  # type: ignore[index]
            at += size
            if not has:
                continue
            if share.dim is None:
                parameter.grad = value.view(parameter.shape)
            else:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                target = share.of(parameter.grad)
                target.copy_(value.view(target.shape))


def _numel(share: Share, parameter: torch.Tensor) -> int:
    return share.of(parameter).numel()
