"""Gradients of parameters that several stages or pipelines hold: every copy gets the sum of all copies' gradients.

Stages that share a parameter have a copy each, and so has every pipeline. Copies may be cut in unlike ways; the *part* of a
process is, by dimension, the indices that it holds. Processes with the same part of a copy divide it among them. Each trades
what it answers for with those that answer for the same elements of other copies, adds all up in one order, so that copies stay
equal bit for bit, and hands its sums to the processes with the same part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rlplace.runtime.base.ranks import gather_objects
from rlplace.runtime.state.whole import local_part
from rlplace.runtime.strategy.mesh import MeshPlace
from rlplace.runtime.torch_adapter import StridedShard

BUCKET_BYTES = 1 << 26
"""Bytes of whole gradients that are summed at once; larger ones come in slices."""

Runs = tuple[tuple[int, int], ...]
"""Rising indices as first and end of each run of them."""

Part = tuple[Runs, ...]
"""Indices by dimension, of which a part has all combinations."""

Holder = tuple[int, int]
"""A stage that holds a copy: number of its pipeline, and of the stage in it."""


class _Copy(NamedTuple):
    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    parts: dict[Holder, dict[int, Part]]  # by process


class _Piece(NamedTuple):
    number: int  # of the copy of this process
    key: tuple[Any, ...]  # index of the elements in its part
    shape: tuple[int, ...]  # how many they are
    peer: int  # the process that has them, too
    holder: Holder  # of the copy there


class _Bucket(NamedTuple):
    answers: list[tuple[int, Holder, tuple[Any, ...]]]  # this process's copies, and the elements that it answers for
    sent: list[_Piece]  # elements that this process answers for, to those that answer for them in other copies
    received: list[_Piece]  # the same elements of other copies
    given: list[_Piece]  # sums to the processes with the same part
    taken: list[_Piece]  # sums from them


class GradientSums:
    """Sums over the copies of parameters. Every process of the job makes it, and calls it at the end of every step.

    Args:
        bodies: By number of the stage, the modules that this process holds, sharded.
        place: Coordinates of this process.
        tied: Names of parameters that are one tensor, for every such tensor.
    """

    def __init__(self, bodies: Mapping[int, nn.Module], place: MeshPlace, tied: Sequence[Sequence[str]]) -> None:
        first = {name: names[0] for names in tied for name in names}
        self._bodies, self._device, self._own = bodies, place.device, list[tuple[str, int, str]]()
        told: list[Any] = []
        for stage, body in bodies.items():
            for name, parameter in body.named_parameters():
                if parameter.requires_grad:
                    self._own.append((first.get(name, name), stage, name))
                    kind = str(parameter.dtype), parameter.element_size(), tuple(parameter.shape) or (1,)
                    told.append((self._own[-1][0], kind, (place.number, stage), part_of(parameter)))
        copies: dict[str, _Copy] = {}
        for rank, others in enumerate(gather_objects(told)):
            for name, kind, holder, part in others:
                copies.setdefault(name, _Copy(kind[0], kind[1], kind[2], {})).parts.setdefault(holder, {})[rank] = part
        copies = {name: copy for name, copy in sorted(copies.items()) if len(copy.parts) > 1}
        self._own = [row for row in self._own if row[0] in copies]
        self._counts = {name: len(copy.parts) for name, copy in copies.items()}
        numbers = {(name, (place.number, stage)): number for number, (name, stage, _) in enumerate(self._own)}
        self._buckets = [_bucket(slices, copies, numbers, dist.get_rank()) for slices in _slices(copies)]

    def copies(self) -> dict[nn.Parameter, int]:
        """Returns of how many copies each parameter of this process is one, of those that have several."""
        return {self._bodies[stage].get_parameter(called): self._counts[name] for name, stage, called in self._own}

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Gives every copy the sum of all copies' gradients of this step; a parameter that no copy has reached gets none."""
        held = [self._bodies[stage].get_parameter(called) for _, stage, called in self._own]
        place_of = {name: place for place, name in enumerate(self._counts)}
        reached = torch.zeros(len(place_of), dtype=torch.int32, device=self._device)
        for parameter, (name, _, _) in zip(held, self._own, strict=True):
            reached[place_of[name]] |= parameter.grad is not None
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if len(reached):
            dist.all_reduce(reached, dist.ReduceOp.MAX)
        parts = [local_part(parameter.grad) for parameter in held]  # type: ignore[arg-type]
        parts = [part if part.dim() else part.view(1) for part in parts]
        for bucket in self._buckets:
            _sum(bucket, parts, self._device)
        for parameter, (name, _, _) in zip(held, self._own, strict=True):
            parameter.grad = parameter.grad if reached[place_of[name]] else None


def part_of(parameter: torch.Tensor) -> Part:
    """Returns the indices of the elements that this process has; a scalar counts as one element in one dimension."""
    if not isinstance(parameter, DTensor):
        return tuple(((0, size),) for size in parameter.shape or (1,))
    found = []
    for dim, size in enumerate(parameter.shape):
        placements: list[Any] = []
        for cut in parameter.placements:
            if not isinstance(cut, (Shard, StridedShard)) or cut.dim != dim:
                placements.append(Replicate())
            else:
                strided = isinstance(cut, StridedShard)
                placements.append(StridedShard(0, split_factor=cut.split_factor) if strided else Shard(0))  # type: ignore[union-attr]
        whole = torch.arange(size, device=parameter.device)
        indices = distribute_tensor(whole, parameter.device_mesh, placements, src_data_rank=None).to_local().tolist()
        assert indices == sorted(indices)  # messages have elements in this order on both sides
        starts = [n for n, index in enumerate(indices) if not n or index != indices[n - 1] + 1]
        ends = [*starts[1:], len(indices)]
        found.append(tuple((indices[a], indices[b - 1] + 1) for a, b in zip(starts, ends, strict=False)))
    return tuple(found)


def _slices(copies: Mapping[str, _Copy]) -> Iterator[list[tuple[str, int, int, int]]]:
    """Yields buckets of slices: name, its longest dimension, and first and last index there; of one dtype each."""
    bucket, filled, before = list[tuple[str, int, int, int]](), 0, ""
    for name, copy in sorted(copies.items(), key=lambda item: item[1].dtype):
        size_bytes, dim = math.prod(copy.shape) * copy.item_bytes, copy.shape.index(max(copy.shape))
        count, length = max(1, -(-size_bytes // BUCKET_BYTES)), copy.shape[dim]
        for number in range(count):
            if bucket and (filled + size_bytes // count > BUCKET_BYTES or copy.dtype != before):
                yield bucket
                bucket, filled = [], 0
            bucket.append((name, dim, length * number // count, length * (number + 1) // count))
            filled, before = filled + size_bytes // count, copy.dtype
    if bucket:
        yield bucket


def _bucket(
    slices: Sequence[tuple[str, int, int, int]],
    copies: Mapping[str, _Copy],
    numbers: Mapping[tuple[str, Holder], int],
    rank: int,
) -> _Bucket:
    """Returns what a process does for slices; messages between two processes have their pieces in one order on both."""
    made, received = _Bucket([], [], [], [], []), list[tuple[Any, _Piece]]()
    for at, (name, dim, begin, end) in enumerate(slices):
        parts = copies[name].parts
        answers = {holder: _divided(own, dim, (begin, end)) for holder, own in sorted(parts.items())}
        for holder, own in answers.items():
            if (number := numbers.get((name, holder))) is None or rank not in parts[holder]:
                continue
            mine, held = own[rank], parts[holder][rank]
            if _count(mine):
                made.answers.append((number, holder, _key(held, mine)))
            for other, theirs in answers.items():
                for peer, part in sorted(theirs.items()) if other != holder else ():
                    both = tuple(map(_both, mine, part))
                    if _count(both):
                        piece = _Piece(number, _key(held, both), _shape(both), peer, other)
                        made.sent.append(piece)
                        received.append(((peer, at, other, holder), piece))
            for peer, part in sorted(own.items()):
                if peer != rank and parts[holder][peer] == held:
                    if _count(mine):
                        made.given.append(_Piece(number, _key(held, mine), _shape(mine), peer, holder))
                    if _count(part):
                        made.taken.append(_Piece(number, _key(held, part), _shape(part), peer, holder))
    made.received.extend(piece for _, piece in sorted(received, key=lambda row: row[0]))
    return made


def _divided(parts: Mapping[int, Part], dim: int, within: tuple[int, int]) -> dict[int, Part]:
    """Returns the elements that each process answers for, of those between two indices of a dimension."""
    alike: dict[Part, list[int]] = defaultdict(list)
    for rank, part in sorted(parts.items()):
        alike[part].append(rank)
    found: dict[int, Part] = {}
    for part, ranks in alike.items():
        runs = _both(part[dim], (within,))
        length = sum(end - first for first, end in runs)
        for number, rank in enumerate(ranks):
            own = _section(runs, length * number // len(ranks), length * (number + 1) // len(ranks))
            found[rank] = (*part[:dim], own, *part[dim + 1 :])
    return found


def _section(runs: Runs, begin: int, end: int) -> Runs:
    """Returns the indices from one place among them to another."""
    found, passed = [], 0
    for first, last in runs:
        one, other = max(begin - passed, 0), min(end - passed, last - first)
        if one < other:
            found.append((first + one, first + other))
        passed += last - first
    return tuple(found)


def _both(one: Runs, other: Runs) -> Runs:
    """Returns the indices that are in both."""
    pairs = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return tuple((first, end) for first, end in pairs if first < end)


def _shape(part: Part) -> tuple[int, ...]:
    return tuple(sum(end - first for first, end in runs) for runs in part)


def _count(part: Part) -> int:
    return math.prod(_shape(part))


def _key(held: Part, wanted: Part) -> tuple[Any, ...]:
    """Returns the index of elements in the tensor of a part that has them: slices, and numbers where they are apart."""
    keys: list[Any] = []
    for own, runs in zip(held, wanted, strict=True):
        spans, passed = list[tuple[int, int]](), 0
        for first, end in own:
            for one, other in _both(((first, end),), runs):
                begin = passed + one - first
                if spans and spans[-1][1] == begin:
                    spans[-1] = spans[-1][0], begin + other - one
                else:
                    spans.append((begin, begin + other - one))
            passed += end - first
        keys.append(slice(*spans[0]) if len(spans) == 1 else [n for span in spans for n in range(*span)])
    if sum(isinstance(key, list) for key in keys) > 1:  # all combinations of them
        full = [list(range(key.start, key.stop)) if isinstance(key, slice) else key for key in keys]
        return tuple(torch.tensor(key).view(-1, *[1] * (len(full) - 1 - dim)) for dim, key in enumerate(full))
    return tuple(torch.tensor(key) if isinstance(key, list) else key for key in keys)


def _sum(bucket: _Bucket, parts: Sequence[torch.Tensor], device: torch.device) -> None:
    """Sums the elements of a bucket in place."""
    came = _traded(parts, bucket.sent, bucket.received, device)
    terms = [(own, number, key, parts[number][key].clone()) for number, own, key in bucket.answers]
    terms += [(one.holder, one.number, one.key, value) for one, value in zip(bucket.received, came, strict=True)]
    for number, _, key in bucket.answers:
        parts[number][key] = 0
    for _, number, key, value in sorted(terms, key=lambda term: term[0]):
        parts[number][key] += value
    for piece, value in zip(bucket.taken, _traded(parts, bucket.given, bucket.taken, device), strict=True):
        parts[piece.number][piece.key] = value


def _traded(
    parts: Sequence[torch.Tensor], sent: Sequence[_Piece], received: Sequence[_Piece], device: torch.device
) -> list[torch.Tensor]:
    """Sends pieces, one message a process, and returns those that come, which have the same dtype."""
    if not (sent or received):
        return []
    out: dict[int, list[torch.Tensor]] = defaultdict(list)
    for piece in sent:
        out[piece.peer].append(parts[piece.number][piece.key].reshape(-1))
    messages = {peer: torch.cat(pieces).to(device) for peer, pieces in out.items()}
    counts: dict[int, list[int]] = defaultdict(list)
    for piece in received:
        counts[piece.peer].append(math.prod(piece.shape))
    dtype, rank = parts[(sent or received)[0].number].dtype, dist.get_rank()
    came = {peer: torch.empty(sum(own), dtype=dtype, device=device) for peer, own in counts.items() if peer != rank}
    ops = [dist.P2POp(dist.irecv, value.view(torch.uint8), peer) for peer, value in came.items()]
    ops += [dist.P2POp(dist.isend, value.view(torch.uint8), peer) for peer, value in messages.items() if peer != rank]
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()
    came |= {peer: value for peer, value in messages.items() if peer == rank}
    pieces = {peer: iter(value.split(counts[peer])) for peer, value in came.items()}
    return [next(pieces[piece.peer]).view(piece.shape) for piece in received]
