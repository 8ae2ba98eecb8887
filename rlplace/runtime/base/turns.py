"""Work on whole matrices that are cut over processes: every process of a group has one of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from rlplace.errors import InputError

Work = Callable[[Tensor], Tensor]


def in_turns(matrices: Sequence[Tensor], work: Work) -> list[Tensor]:
    """Maps matrices; of those that are cut over W processes, W at a time are gathered, one on each, and cut again.

    Args:
        matrices: Plain ones, and DTensors that are cut along one axis of their mesh at most; the same on every process.
        work: Maps a whole matrix to one of its shape and dtype. The rows of a part are in an order of their own where several
            matrices are packed into one, so it must follow exchanges of rows, and of columns.

    Returns:
        As `matrices`.

    Raises:
        InputError: A matrix is cut along two axes.
    """
    found: dict[int, Tensor] = {}
    cut: dict[tuple[int, int], dict[int, DTensor]] = {}
    for number, matrix in enumerate(matrices):
        if not isinstance(matrix, DTensor):
            found[number] = work(matrix)
        elif (axis := _cut_axis(matrix)) is None:
            found[number] = _like(matrix, work(matrix.to_local()))
        else:
            cut.setdefault((id(matrix.device_mesh), axis), {})[number] = matrix
    for (_, axis), own in cut.items():
        numbers, group = [*own], next(iter(own.values())).device_mesh.get_group(axis)
        world = dist.get_world_size(group)
        for turn in (numbers[begin : begin + world] for begin in range(0, len(numbers), world)):
            found |= zip(turn, _turn([own[number] for number in turn], axis, work, group), strict=True)
    return [found[number] for number in range(len(matrices))]


def _cut_axis(matrix: DTensor) -> int | None:
    """Returns the axis of the mesh over which a matrix is cut; None where it is whole."""
    axes = [axis for axis, placement in enumerate(matrix.placements) if not isinstance(placement, Replicate)]
    if len(axes) > 1:
        raise InputError("muon: a matrix is cut by shards and by a tensor group; plan with shard=1 or tensor=1")
    return axes[0] if axes else None


def _turn(matrices: Sequence[DTensor], axis: int, work: Work, group: dist.ProcessGroup) -> list[Tensor]:
    """Maps one matrix on each process of a group, or on the first ones; parts are rows of matrices, turned where needed."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    turned: list[bool] = [matrix.placements[axis].dim == 1 for matrix in matrices]  # type: ignore[attr-defined]
    local = [matrix.to_local().T if turn else matrix.to_local() for matrix, turn in zip(matrices, turned, strict=True)]
    given = [part.numel() for part in local] + [0] * (world - len(local))
    taken, columns = [0] * world, 0
    if rank < len(matrices):
        rows, columns = reversed(matrices[rank].shape) if turned[rank] else matrices[rank].shape
        step = -(-rows // world)  # as torch.chunk cuts
        taken = [columns * min(max(rows - step * process, 0), step) for process in range(world)]
    sent = torch.cat([part.flatten() for part in local])
    own = sent.new_empty(sum(taken))
    dist.all_to_all_single(own, sent, taken, given, group=group)
    if rank < len(matrices):
        whole = own.view(-1, columns)
        own = (work(whole.T).T if turned[rank] else work(whole)).contiguous().flatten()
    dist.all_to_all_single(sent, own, given, taken, group=group)
    parts = [part.view(old.shape) for part, old in zip(sent.split(given[: len(local)]), local, strict=True)]
    return [_like(matrix, p.T if turn else p) for matrix, p, turn in zip(matrices, parts, turned, strict=True)]


def _like(matrix: DTensor, local: Tensor) -> DTensor:
    """Returns a part as a matrix is cut."""
    mesh, placements, local = matrix.device_mesh, matrix.placements, local.contiguous()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=matrix.shape, stride=matrix.stride())
