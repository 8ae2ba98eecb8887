"""A replica's share of a batch, in micro-batches, what each counts in the loss of the step, and outputs put together again.

A mean over something else than samples, such as valid targets or the ones of a mask, is the mean over the parts of a batch
weighted by their counts. Cross-entropies count their own targets when they are called; a mask is an input, and is counted by
the name of the input: ``sum:mask``, ``valid:labels`` (elements that are not -100), ``nonzero:ids``, with ``[1:]`` or ``[:-1]``
behind where the model drops the first or the last position.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch.nn import functional as F

from rlplace.errors import InputError
from rlplace.model.capture.inputs import flatten_rows, length_of
from rlplace.model.torch_adapter import FakeTensor, pytree
from rlplace.plan.strategy import TARGETS, Strategy
from rlplace.runtime.torch_adapter import counted_losses

Batch = Mapping[str, Any]

_LEAVES = (torch.Tensor, type(None), bool, int, float, str, torch.dtype)

IGNORED = -100
"""The target that torch and transformers ignore."""

COUNT = "num_items_in_batch"
"""Keyword of transformers' losses for the number of labels of all batches of a step, which they divide a sum by."""

_COUNTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda value: value,
    "valid": lambda value: value != IGNORED,
    "nonzero": lambda value: value != 0,
}
_REDUCTIONS = ("none", "mean", "sum")
"""By torch's numbers."""

_SLICES = {"": slice(None), "[1:]": slice(1, None), "[:-1]": slice(None, -1)}


def candidates(inputs: Any, rows: int) -> dict[str, float]:
    """Returns the count of a batch of so many samples by every reduction that its keyword inputs offer."""
    return {way: count_of(way, inputs) for way in _ways(inputs, rows)}


def _ways(inputs: Any, rows: int) -> Iterator[str]:
    for name, leaf in inputs.items() if isinstance(inputs, Mapping) else ():
        if not isinstance(leaf, torch.Tensor) or leaf.is_complex() or not leaf.dim() or len(leaf) != rows:
            continue
        integers = not leaf.is_floating_point() and leaf.dtype != torch.bool
        kinds = [kind for kind in _COUNTS if kind == "sum" or integers]
        if not bool(((leaf == 0) | (leaf == 1)).all()):
            kinds.remove("sum")
        yield from (f"{kind}:{name}{cut}" for kind in kinds for cut in (_SLICES if leaf.dim() > 1 else ("",)))


def count_of(way: str, inputs: Mapping[str, Any]) -> float:
    """Returns the count of a batch or a micro-batch with these keyword inputs, by a reduction such as ``"sum:mask"``."""
    kind, _, rest = way.partition(":")
    cut = next((cut for cut in _SLICES if cut and rest.endswith(cut)), "")
    name = rest.removesuffix(cut)
    value = inputs.get(name)
    if kind not in _COUNTS or not isinstance(value, torch.Tensor):
        raise InputError(f"reduction {way!r} counts an input {name!r}, which is no tensor of this batch; plan the model again")
    value = value if not cut else value[:, _SLICES[cut]]
    return float(_COUNTS[kind](value).sum(dtype=torch.float64))


class Targets:
    """Counts of the targets of cross-entropies that are not ignored, by their class weights where there are any.

    As a context it intercepts torch's calls of their kernels. A mean over no targets at all is 0 inside, and not a number
    outside.

    Attributes:
        count: Of all calls so far; float64 [] on the device of the targets after the first.
        met: Whether a mean over targets was among the calls.
    """

    def __init__(self, *, thin: bool = False) -> None:
        """Starts at 0; `thin` ignores a third of the targets, by their values."""
        self.count: torch.Tensor = torch.zeros((), dtype=torch.float64)
        self.met = False
        self._thin, self._inside = thin, contextlib.ExitStack()

    def __enter__(self) -> Targets:
        self._inside.enter_context(counted_losses(self._counted))
        return self

    def __exit__(self, *_: object) -> None:
        self._inside.close()

    def _counted(
        self,
        kernel: Callable[..., torch.Tensor],
        value: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = IGNORED,
        *smoothing: float,
    ) -> torch.Tensor:
        traced = isinstance(target, FakeTensor) or target.is_meta
        if traced or _REDUCTIONS[reduction] != "mean" or target.is_floating_point():
            return kernel(value, target, weight, reduction, ignore_index, *smoothing)
        if self._thin:
            target = torch.where(target % 3 == 1, ignore_index, target)
        valid = target != ignore_index
        if weight is None:
            own = valid.sum(dtype=torch.float64)
        else:
            own = (weight.detach()[torch.where(valid, target, 0)] * valid).sum(dtype=torch.float64)
        self.met, self.count = True, self.count.to(own.device) + own
        total = kernel(value, target, weight, _REDUCTIONS.index("sum"), ignore_index, *smoothing)
        return total / own.clamp_min(1e-30).to(total.dtype)


@contextlib.contextmanager
def counting_alone(targets: Targets | None) -> Iterator[None]:
    """Counts a loss of the model's output, which is computed inside, alone where it is a mean over targets itself."""
    if targets is None:
        yield
        return
    before, targets.met, targets.count = (targets.met, targets.count), False, torch.zeros_like(targets.count)
    yield
    if not targets.met:
        targets.met, targets.count = before


def _seen(function: Callable[..., torch.Tensor], *names: str) -> Callable[..., torch.Tensor]:
    """Returns a function that takes the arguments of an op and calls torch's function."""

    def called(value: torch.Tensor, target: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
        given = dict(zip(names, options, strict=False)) | named
        return function(value, target, **given | {"reduction": _REDUCTIONS[given.get("reduction", 1)]})

    return called


_OPTIONS = ("weight", "reduction", "ignore_index")
SEEN: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.cross_entropy_loss.default: _seen(F.cross_entropy, *_OPTIONS, "label_smoothing"),
    torch.ops.aten.nll_loss_nd.default: _seen(F.nll_loss, *_OPTIONS),
    torch.ops.aten.nll_loss.default: _seen(F.nll_loss, *_OPTIONS),
}
"""Functions in place of ops of a recorded graph, whose targets `Targets` counts."""


@dataclass(frozen=True)
class Share:
    """The share of one replica in a step."""

    first: int  # number of its first sample in the batch
    sizes: tuple[int, ...]  # samples of each pass
    # factors of the mean losses of the passes, by which the mean over the data degree of the replicas' sums is the mean over
    # the samples of the batch
    weights: tuple[float, ...]
    whole: int  # samples of the batch
    joined: int = 1  # replicas of a wider stage that it computes together: each pass is one of each of theirs

    @property
    def samples(self) -> int:
        """Samples of the replica in a step."""
        return sum(self.sizes)


@dataclass(frozen=True, eq=False)
class Pass:
    """One micro-batch."""

    inputs: dict[str, Any]  # keyword inputs of the model
    part: dict[str, Any]  # everything of the batch that belongs to it, for the loss
    weight: float  # weight of its loss, or of one of its targets
    samples: int  # its number of samples
    by_targets: bool = False  # whether the loss is a mean over targets

    def counting(self) -> contextlib.AbstractContextManager[Targets | None]:
        """Returns a context for the forward and the loss, which counts targets where the loss is a mean over them."""
        return Targets() if self.by_targets else contextlib.nullcontext()

    def counted(self, targets: Targets | None, device: torch.device, *, trains: bool = False) -> torch.Tensor:
        """Returns the weight of its loss, once its forward has run: float64 [], float32 where the device has no float64.

        Raises:
            InputError: It trains by a loss that is no mean over targets, although losses count by them.
        """
        if trains and targets is not None and not targets.met:
            raise InputError(
                "native: losses count by the targets of their cross-entropies, and this loss is the mean of none; say what it "
                "is a mean over: distribute(reduction='mean') for samples, 'sum', or an input as in 'sum:mask'"
            )
        dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        count = 1.0 if targets is None else targets.count.to(device, dtype)
        return torch.as_tensor(self.weight * count, dtype=dtype, device=device)


def share_of(
    strategy: Strategy, replica: int, samples: int | None = None, own_degree: int | None = None, number: int = 0
) -> Share:
    """Returns the share of a replica.

    A batch of another size than the strategy's, such as the last one of an epoch, is split as evenly as possible, in the
    strategy's number of passes or fewer, the same on all replicas. In a pipeline the passes of a replica are of one size.
    Unlike pipelines take samples one after the other, of other batches in the proportion of their own.

    Args:
        strategy: The strategy.
        replica: Number of the replica in its pipeline, on replicate x shard.
        samples: Of the batch; None: as many as the strategy says.
        own_degree: Data degree of its stage; None: the pipeline's, which is the largest.
        number: Of its pipeline.

    Raises:
        InputError: There are fewer samples than replicas, or stages of unlike degrees cannot split them.
    """
    whole = strategy.batch if samples is None else samples
    if (replicas := sum(pipeline.data_degree for pipeline in strategy.pipelines)) > whole:
        raise InputError(
            f"native: {whole} samples for {replicas} replicas are too few; drop the batch (drop_last=True), or pad it"
        )
    each = [*_passes(strategy, whole)]
    degree, before, passes = strategy.pipelines[number].data_degree, each[:number], each[number]
    joined = degree // (own_degree or degree)
    sizes = tuple(size * joined for size in passes[replica * joined])
    first = sum(map(sum, chain(*before, passes[: replica * joined])))
    return Share(first, sizes, tuple(size * degree / joined / whole for size in sizes), whole, joined)


def _passes(strategy: Strategy, whole: int) -> Iterator[list[tuple[int, ...]]]:
    """Yields for every pipeline the sizes of the passes of each replica; refuses the same on all processes."""
    degrees = [pipeline.data_degree for pipeline in strategy.pipelines]
    ends, more = [0, *accumulate(pipeline.samples for pipeline in strategy.pipelines)], whole - sum(degrees)
    least = [first + end * more // strategy.batch for first, end in zip(accumulate([0, *degrees]), ends, strict=True)]
    for pipeline, degree, (first, end) in zip(strategy.pipelines, degrees, pairwise(least), strict=True):
        if whole == strategy.batch:
            sizes = pipeline.microbatch * (degree // len(pipeline.microbatch))
            counts = pipeline.microbatches * (degree // len(pipeline.microbatches))
            passes = [(size,) * count for size, count in zip(sizes, counts, strict=True)]
        else:
            own = even_sizes(end - first, degree)
            most, one_size = min(max(pipeline.microbatches), own[-1]), len(pipeline.stages) > 1
            passes = [even_sizes(n, next(m for m in range(most, 0, -1) if n % m == 0 or not one_size)) for n in own]
        if len({stage.data_degree for stage in pipeline.stages}) > 1 and len(set(passes)) > 1:
            raise InputError(
                f"native: stages of unlike degrees need as many samples in every replica, found {sum(map(sum, passes))} over "
                f"{degree}; drop a short last batch (drop_last=True), or pad it"
            )
        yield passes


def even_sizes(samples: int, parts: int) -> tuple[int, ...]:
    """Returns sizes as equal as possible, larger ones first."""
    return tuple(samples // parts + (number < samples % parts) for number in range(parts))


def repeated(batch: Batch, times: int, samples: int) -> dict[str, Any]:
    """Returns the micro-batch of several replicas together, as far as shapes go; tensors with so many rows are repeated."""
    made: dict[str, Any] = map_rows(dict(batch), samples, lambda leaf: _joined([leaf] * times))
    return made


def _joined(parts: Sequence[Any]) -> Any:
    """Joins rows of tensors, or items of lists."""
    return [item for part in parts for item in part] if isinstance(parts[0], list) else torch.cat([*parts])


def map_rows(tree: Any, samples: int, function: Callable[[Any], Any]) -> Any:
    """Returns any nesting of tensors with a function of those that have so many rows in their place.

    Where samples are items of lists (`rlplace.model.capture.inputs.flatten_rows`), the function gets lists of so many, too.
    """
    leaves, each, spec = flatten_rows(tree, samples)
    return pytree.tree_unflatten([function(leaf) if one else leaf for leaf, one in zip(leaves, each, strict=True)], spec)


def take(leaf: Any, rows: Any) -> Any:
    """Returns rows of a tensor, or items of a list, by a slice or a tensor of numbers."""
    return [leaf[int(row)] for row in rows] if isinstance(leaf, list) and isinstance(rows, torch.Tensor) else leaf[rows]


def cast(batch: Batch, dtype: torch.dtype | None) -> dict[str, Any]:
    """Converts floating-point tensors to another dtype; None leaves all as they are."""
    made: dict[str, Any] = dict(batch)
    if dtype is not None:
        made = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, made)
    return made


def passes_of(
    batch: Batch,
    share: Share,
    names: Collection[str],
    kept: Collection[str],
    device: torch.device,
    counted: str | None = None,
    items: bool | None = None,
) -> list[Pass]:
    """Cuts a replica's micro-batches out of a batch: every tensor with as many rows as the batch is cut, others are kept.

    Args:
        batch: Inputs of the model and of the loss.
        share: Of the replica.
        names: Keyword inputs of the model.
        kept: Names of tensors that are not cut although they have as many rows.
        device: Where the micro-batches go.
        counted: The reduction that weights losses in place of samples; None: samples.
        items: See `rlplace.model.capture.inputs.rows_of`.

    Raises:
        InputError: An input is missing, or no tensor has that many rows.
    """
    if missing := [name for name in names if name not in batch]:
        raise InputError(f"native: the batch has no {', '.join(missing)}, which example_inputs had; add it")
    flat, cut, spec = flatten_rows({name: value for name, value in batch.items() if name not in kept}, share.whole, items)
    if not any(cut):
        rows = {length_of(leaf) for leaf in flat if isinstance(leaf, (list, torch.Tensor))}
        found = ", ".join(map(str, sorted(rows - {0})))
        raise InputError(
            f"native: the strategy runs {share.whole} samples here, but no tensor of the batch has that many rows (found "
            f"{found or 'no tensors'}); drop a short last batch (drop_last=True), or pad it"
        )
    each = share.samples // share.joined
    firsts = [number * each for number in range(share.joined)]
    whole = {name: batch[name] for name in batch if name in kept}
    own = slice(share.first, share.first + share.samples)
    leaves = [leaf[own] if is_cut else leaf for leaf, is_cut in zip(flat, cut, strict=True)]
    leaves, whole = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), (leaves, whole))
    passes, start = [], 0
    for size, weight in zip(share.sizes, share.weights, strict=True):
        runs = [slice(first + start, first + start + size // share.joined) for first in firsts]
        taken = [
            leaf if not is_cut else _joined([leaf[run] for run in runs]) if len(runs) > 1 else leaf[runs[0]]
            for leaf, is_cut in zip(leaves, cut, strict=True)
        ]
        part: dict[str, Any] = pytree.tree_unflatten(taken, spec) | whole
        inputs = {name: part[name] for name in names}
        if counted not in (None, TARGETS):
            weight *= count_of(str(counted), part)
        passes.append(Pass(inputs, part, weight, size, counted == TARGETS))
        start += size // share.joined
    return passes


def join_leaves(parts: Sequence[Sequence[Any]], samples: Sequence[int], weights: Sequence[float]) -> list[Any]:
    """Joins the flat outputs of micro-batches, given their numbers of samples and the weights of their scalars.

    Floating-point scalars, such as losses, are summed by their weights, tensors whose first dimension grows with the batch are
    concatenated along it; of all other outputs the last micro-batch's is taken.
    """
    joined: list[Any] = []
    for values in zip(*parts, strict=True):
        first, tensor = values[0], isinstance(values[0], torch.Tensor)
        if tensor and first.is_floating_point() and first.dim() == 0:
            joined.append(sum(value * weight for value, weight in zip(values, weights, strict=True)))
        else:
            joined.append(torch.cat(values) if tensor and first.dim() > 0 and _grows(values, samples) else values[-1])
    return joined


def _grows(values: Sequence[torch.Tensor], samples: Sequence[int]) -> bool:
    """Returns whether the first dimension grows with the number of samples.

    It does when it is that number, or always so many times it, unless every micro-batch has the same values: a mask of ten
    by ten tokens is as long as ten tokens of one sample, but does not depend on the sample.
    """
    if any(len(v) * samples[0] != len(values[0]) * n or len(v) % n for v, n in zip(values, samples, strict=True)):
        return False
    return len(values[0]) == samples[0] or not all(torch.equal(v, values[0]) for v in values[1:])


def signature_of(inputs: Any) -> tuple[str, tuple[Any, ...]]:
    """Returns the signature of a recorded forward: structure, and by leaf shape and dtype, or type and value."""
    leaves, spec = pytree.tree_flatten(inputs)
    strange = next((leaf for leaf in leaves if not isinstance(leaf, _LEAVES)), None)
    if strange is not None:
        raise InputError(f"a model that runs a plan cannot take a {type(strange).__name__} as input; give tensors and numbers")
    kinds = ((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves)
    return str(spec), tuple(kinds)


def autocast_state() -> Hashable:
    """Returns the present settings of autocast."""
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
