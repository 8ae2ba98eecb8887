"""Collectives of the sharded engine: every one is a redistribution of a DTensor.

The forward and backward of a redistribution are both stated, instead of left to DTensor's autograd, whose rules for partial
sums differ between torch versions: the gradient of a replicated tensor is summed where each device used its copy for another
part of the work, and the gradient of partial sums is that of their sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from rlplace.runtime.distributed.sharded.spec import PARTIAL, WHOLE, Move, Spec, coarsened, moves
from rlplace.simulator.replicas import BUCKET_BYTES


class Meshes:
    """A device mesh, and the meshes of the same devices whose axes are some of its axes joined.

    Attributes:
        base: The mesh.
        ndim: Number of its axes.
    """

    def __init__(self, base: DeviceMesh) -> None:
        self.base, self.ndim = base, int(base.ndim)
        self.shape: tuple[int, ...] = tuple(base.shape)
        self._known = {self.shape: base}

    def piece(self, values: torch.Tensor, spec: Spec) -> torch.Tensor:
        """This device's piece of a tensor that it has whole, a view where that is possible."""
        coordinate = self.base.get_coordinate()
        assert coordinate is not None
        fine = values.reshape([size for factors in spec.dims for size, _ in factors])
        index = tuple(slice(None) if axis == WHOLE else coordinate[axis] for factors in spec.dims for _, axis in factors)
        return fine[index].reshape(spec.local_shape)

    def of(self, shape: tuple[int, ...]) -> DeviceMesh:
        """That with the given axis sizes; made once, by all devices alike."""
        if shape not in self._known:
            self._known[shape] = DeviceMesh(self.base.device_type, self.base.mesh.reshape(shape))
        return self._known[shape]


@dataclass(frozen=True)
class Exchange:
    """From one layout of a tensor to another, and back for its gradient.

    Attributes:
        there: Redistributions of the values.
        back: Redistributions of the gradient.
        before: Local shape of the values before.
        after: Local shape of the values after.
    """

    there: tuple[Move, ...]
    back: tuple[Move, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]


@lru_cache(maxsize=1 << 14)
def exchange_between(source: Spec, target: Spec, summed: frozenset[int], axes: int) -> Exchange | None:
    """How a tensor gets where it is used; None when it is there.

    Args:
        source: Layout that it has; the gradient comes back like that, with its partial sums complete.
        target: Layout that is wanted.
        summed: Mesh axes over which its gradients are to be added up, since each device uses it for other work.
        axes: Number of mesh axes.
    """
    there = moves(source, target, axes)
    back = moves(target.with_partial(summed), source.with_partial(()), axes)
    if not there and not back:
        return None
    return Exchange(there, back, source.local_shape, target.local_shape)


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, route: Exchange, mesh: Meshes) -> torch.Tensor:
        ctx.route, ctx.mesh = route, mesh
        result = move(local, route.there, route.after, mesh)
        return result.view_as(result) if result is local else result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return move(gradients[0], ctx.route.back, ctx.route.before, ctx.mesh), None, None


def exchanged(local: torch.Tensor, route: Exchange, mesh: Meshes) -> torch.Tensor:
    """The values after an exchange, with its gradient."""
    if torch.is_grad_enabled() and local.requires_grad:
        return _Exchanged.apply(local, route, mesh)
    return move(local, route.there, route.after, mesh)


def move(local: torch.Tensor, steps: Sequence[Move], shape: Sequence[int], mesh: Meshes) -> torch.Tensor:
    """Local values after some redistributions, without autograd."""
    with torch.no_grad():
        for step in steps:
            local = _redistributed(local, step, "sum", mesh)
        return local.reshape(tuple(shape))


def _redistributed(local: torch.Tensor, step: Move, how: str, meshes: Meshes) -> torch.Tensor:
    """One redistribution, on the mesh with the fewest axes that does."""
    step, shape = coarsened(step, meshes.shape)
    mesh = meshes.of(shape)
    local = local.reshape(step.local_shape).contiguous()
    spread = DTensor.from_local(local, mesh, placements(step.source, how), run_check=False)
    if mesh.device_type == "cpu" and any(a >= 0 and b >= 0 and a != b for a, b in zip(step.source, step.target, strict=True)):
        # DTensor has no all-to-all on the CPU and says so in a warning; it gathers and cuts, as this does.
        between = [a if a == b or a < 0 or b < 0 else WHOLE for a, b in zip(step.source, step.target, strict=True)]
        spread = spread.redistribute(mesh, placements(between, how))
    return spread.redistribute(mesh, placements(step.target)).to_local()


def placements(dims: Sequence[int], reduce: str = "sum") -> list[Placement]:
    """DTensor's placements for the dimension that each mesh axis spreads."""
    kind: dict[int, Placement] = {WHOLE: Replicate(), PARTIAL: Partial(reduce)}
    return [kind[dim] if dim in kind else Shard(dim) for dim in dims]


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, axes: frozenset[int], everywhere: bool, mesh: Meshes) -> torch.Tensor:
        ctx.axes, ctx.everywhere, ctx.mesh = axes, everywhere, mesh
        return _reduced(local, axes, "sum", mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0]
        return gradient if ctx.everywhere else _reduced(gradient, ctx.axes, "sum", ctx.mesh), None, None, None


def summed(local: torch.Tensor, axes: frozenset[int], mesh: Meshes, *, everywhere: bool = False) -> torch.Tensor:
    """The sum over mesh axes.

    Args:
        local: This device's summand.
        axes: Mesh axes to sum over.
        mesh: The mesh.
        everywhere: All devices do the same with the sum, so that each has its whole gradient; otherwise each has a part of it.
    """
    if not axes:
        return local
    if torch.is_grad_enabled() and local.requires_grad:
        return _Summed.apply(local, axes, everywhere, mesh)
    return _reduced(local, axes, "sum", mesh)


def largest(local: torch.Tensor, axes: frozenset[int], mesh: Meshes) -> torch.Tensor:
    """The maximum over mesh axes, without gradient."""
    return _reduced(local.detach(), axes, "max", mesh) if axes else local.detach()


def _reduced(local: torch.Tensor, axes: frozenset[int], how: str, mesh: Meshes) -> torch.Tensor:
    with torch.no_grad():
        source = tuple(PARTIAL if axis in axes else WHOLE for axis in range(mesh.ndim))
        return _redistributed(local, Move(tuple(local.shape), source, (WHOLE,) * mesh.ndim), how, mesh)


def summed_together(
    locals_: Sequence[torch.Tensor], steps: Sequence[tuple[Move, ...]], shapes: Sequence[tuple[int, ...]], mesh: Meshes
) -> list[torch.Tensor]:
    """As `move` for many tensors; those that are only to be summed over the same axes share an all-reduce of
    at most `BUCKET_BYTES`.

    Args:
        locals_: Local values.
        steps: Redistributions of each.
        shapes: Local shapes afterwards.
        mesh: The mesh.
    """
    results: dict[int, torch.Tensor] = {}
    buckets: dict[tuple[frozenset[int], torch.dtype, int], list[int]] = {}
    filled: dict[tuple[frozenset[int], torch.dtype], int] = {}
    for index, (local, moved) in enumerate(zip(locals_, steps, strict=True)):
        axes = _only_sums(moved)
        if axes is None:
            results[index] = move(local, moved, shapes[index], mesh)
            continue
        before = filled.get((axes, local.dtype), 0)
        filled[axes, local.dtype] = before + local.numel() * local.element_size()
        buckets.setdefault((axes, local.dtype, before // BUCKET_BYTES), []).append(index)
    for (axes, _, _), indices in buckets.items():
        flat = _reduced(torch.cat([locals_[index].reshape(-1) for index in indices]), axes, "sum", mesh)
        for index, values in zip(indices, flat.split([locals_[index].numel() for index in indices]), strict=True):
            results[index] = values.view(shapes[index])
    return [results[index] for index in range(len(locals_))]


def _only_sums(steps: tuple[Move, ...]) -> frozenset[int] | None:
    """The mesh axes of redistributions that are nothing but sums over them."""
    if len(steps) != 1:
        return None
    pairs = list(zip(steps[0].source, steps[0].target, strict=True))
    if any(before != after and (before, after) != (PARTIAL, WHOLE) for before, after in pairs):
        return None
    return frozenset(axis for axis, (before, _) in enumerate(pairs) if before == PARTIAL)


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, count: int) -> torch.Tensor:
        return whole / count

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def shared(whole: torch.Tensor, count: int) -> torch.Tensor:
    """An equal share of something that is added to partial sums; each device has its whole gradient."""
    return _Shared.apply(whole, count)
