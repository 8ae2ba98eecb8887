"""The loss of the whole batch over replicas: the values that a coupled loss reads are gathered by every replica.

A record of the forward is cut in two. Ops that work on every sample by itself run on a replica's own samples; results that the
rest reads (embeddings, outputs, labels) are gathered over the replicas with their gradients, and the rest runs on those of the
whole batch, on every replica alike. A node counts as working by samples only where planning's rules for cuts (`cuts.passed`)
say so, so that the worst effect of a missing rule is to gather earlier.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, getitem
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from rlplace.errors import InputError
from rlplace.model.aten import base_name
from rlplace.model.capture.export import lies_in
from rlplace.model.torch_adapter import pytree
from rlplace.runtime.base.batches import Batch, autocast_state, map_rows, repeated, signature_of
from rlplace.runtime.base.ranks import group_of
from rlplace.runtime.base.steps import samples_of
from rlplace.runtime.strategy.capture import capture
from rlplace.runtime.strategy.cut import StageGraph, needed_for, stage_graph, stage_module
from rlplace.runtime.strategy.cuts import RefusedError, passed
from rlplace.runtime.strategy.mesh import MeshPlace

_BY_ROWS = frozenset(("one_hot", "pixel_shuffle", "adaptive_avg_pool1d", "group_norm"))
"""Ops whose result for a row of their input follows from that row; planning has no rules for them."""

_ALONG = {
    **dict.fromkeys("amax amin argmax argmin cumsum select slice sort gather max min logsumexp var std".split(), 1),
    **dict.fromkeys(("linalg_vector_norm", "norm", "topk"), 2),
}
"""Ops that do so unless they work along the first dimension, with the position of the argument that says along which."""


@dataclass(frozen=True, eq=False)
class GatherSplit:
    """A forward in two parts."""

    own: fx.GraphModule  # runs on the samples of a replica, returns the values to gather
    # runs on the gathered values of the whole batch, and on inputs without samples; returns the flat outputs
    rest: fx.GraphModule
    own_inputs: tuple[int, ...]  # positions of the flat inputs that `own` reads
    rest_inputs: tuple[int, ...]  # positions of the flat inputs that `rest` reads
    out_spec: Any  # pytree spec of the output


def split_forward(
    model: nn.Module,
    inputs: Batch,
    replicas: int,
    *,
    mixing: Collection[str],
    device: torch.device,
    blocks: Collection[str] = (),
) -> GatherSplit:
    """Cuts the forward of a model where samples meet.

    Args:
        model: Real or meta module.
        inputs: Keyword inputs of a replica.
        replicas: Replicas of a step.
        mixing: Paths of modules whose result for a sample depends on others.
        device: Where the parts run.
        blocks: Paths that stay whole, as the strategy names them.

    Raises:
        InputError: It cannot be recorded, or not alike for both sizes.
    """
    samples = samples_of(dict(inputs))
    own, whole = capture(model, inputs, blocks), capture(model, repeated(inputs, replicas, samples), blocks)
    pairs = list(zip(own.graph.nodes, whole.graph.nodes, strict=False))
    if len(own.graph.nodes) != len(whole.graph.nodes) or any(a.op != b.op or a.target != b.target for a, b in pairs):
        raise InputError("native: the forward does other things with the whole batch than with a replica's samples")
    twin = dict(pairs)
    by_rows, mixed = _kinds(twin, samples, replicas, mixing)
    if pairs[-1][0].args and not any(node in mixed for node in pairs[-1][0].all_input_nodes):
        raise InputError("native: no result of the forward depends on several samples; plan without --couple gather")
    met = [node for node in by_rows if any(user in mixed for user in node.users)]
    first, first_inputs = stage_graph(list(own.graph.nodes), (), met, needed_for(met, set()))
    taken = [twin[node] for node in met]
    nodes = list(whole.graph.nodes)
    rest, rest_inputs = stage_graph(nodes, taken, (), needed_for([nodes[-1]], set(taken)))
    empty = frozenset[str]()
    return GatherSplit(
        stage_module(own, StageGraph(first, (), (), first_inputs, empty), device),
        stage_module(whole, StageGraph(rest, (), (), rest_inputs, empty), device),
        first_inputs,
        rest_inputs,
        own.out_spec,
    )


def _kinds(
    twin: Mapping[fx.Node, fx.Node], samples: int, replicas: int, mixing: Collection[str]
) -> tuple[list[fx.Node], set[fx.Node]]:
    """Returns nodes with samples as their rows, and nodes that depend on samples in any other way.

    Args:
        twin: By node of the forward of a replica that of the whole batch.
        samples: Of a replica.
        replicas: Replicas of a step.
        mixing: See `split_forward`.
    """
    rows, mixed = dict[fx.Node, None](), set[fx.Node]()

    def scales(node: fx.Node) -> bool:
        """Returns whether the first dimension alone grows with the number of samples."""
        own, whole = node.meta.get("val"), twin[node].meta.get("val")
        if not isinstance(own, torch.Tensor) or not isinstance(whole, torch.Tensor) or not own.dim():
            return False
        return own.shape[0] == samples and tuple(whole.shape) == (samples * replicas, *own.shape[1:])

    for node in twin:
        inputs, value = node.all_input_nodes, node.meta.get("val")
        if node.op == "placeholder" and scales(node):
            rows[node] = None
        elif any(value in mixed for value in inputs) or node.op == "output":
            mixed.add(node)
        elif any(value in rows for value in inputs):
            if _keeps(twin[node], {twin[value]: 0 for value in inputs if value in rows}, mixing) and scales(node):
                rows[node] = None
            else:
                mixed.add(node)
        elif isinstance(value, torch.Tensor) and value.shape != twin[node].meta["val"].shape:
            mixed.add(node)  # such as positions of all samples
    return list(rows), mixed


def _keeps(node: fx.Node, rows: Mapping[fx.Node, int], mixing: Collection[str]) -> bool:
    """Returns whether a node that reads samples as rows works on every row by itself, as far as is known."""
    if node.op == "call_module":
        return not any(lies_in(path, str(node.target)) or lies_in(str(node.target), path) for path in mixing)
    if node.target is getitem or str(getattr(node.target, "__name__", "")) == "_leaf":
        return True
    name = base_name(str(node.target))
    if name in _BY_ROWS:
        return [*rows] == [node.args[0]]
    if name == "expand_as":
        return len({value.meta["val"].dim() for value in rows}) == 1
    if name in _ALONG:
        along = node.args[_ALONG[name]] if len(node.args) > _ALONG[name] else node.kwargs.get("dim", None)
        rank = max((value.meta["val"].dim() for value in rows), default=0)
        axes = along if isinstance(along, (list, tuple)) else [along]
        return bool(axes) and all(isinstance(axis, int) and axis % max(rank, 1) != 0 for axis in axes)
    try:
        return passed(node, rows) == 0
    except RefusedError:
        return False


class _Gather(torch.autograd.Function):
    """Rows of all replicas; every replica differentiates the same loss, and gradients are averaged over them afterwards."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, ranks: tuple[int, ...]) -> torch.Tensor:
        group = group_of(ranks, "gather")
        parts = [torch.empty_like(value) for _ in ranks]
        dist.all_gather(parts, value.contiguous(), group=group)
        ctx.own, ctx.replicas = ranks.index(dist.get_rank()), len(ranks)
        in_order = {rank: part for rank, part in zip(sorted(ranks), parts, strict=True)}
        return torch.cat([in_order[rank] for rank in ranks])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient.chunk(ctx.replicas)[ctx.own] * ctx.replicas, None


def gathered(value: torch.Tensor, place: MeshPlace) -> torch.Tensor:
    """Returns a value's rows of all replicas, in the order of the batch; every replica has as many."""
    column = place.mesh.mesh[place.index["pipeline"], :, :, place.index["tensor"]].flatten().tolist()
    if value.dtype == torch.bool:
        return _gather(value.to(torch.uint8), tuple(column)).bool()
    return _gather(value.contiguous(), tuple(column))


_gather: Any = _Gather.apply


class _Live(fx.Interpreter):
    """A run of a graph with the present parameters of a model, which torch's wrappers replace."""

    def __init__(self, module: fx.GraphModule, model: nn.Module) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._model = model

    def fetch_attr(self, target: str) -> Any:
        try:
            return attrgetter(target)(self._model)
        except AttributeError:  # a constant of the record
            return super().fetch_attr(target)


class GatheredForward:
    """The forward of a model on a replica's samples that returns the model's output for the whole batch.

    Args:
        model: What runs; its modules are called.
        meta: The model without values, of which records are made.
        place: Coordinates of this process.
        mixing: See `split_forward`; so is `blocks`.
        blocks: See `mixing`.
    """

    def __init__(
        self, model: nn.Module, meta: nn.Module, place: MeshPlace, mixing: Collection[str], blocks: Collection[str]
    ) -> None:
        self._model, self._meta, self._place = model, meta, place
        self._how: dict[str, Any] = {"mixing": tuple(mixing), "blocks": tuple(blocks), "device": place.device}
        self._splits: dict[Any, GatherSplit] = {}

    def record(self, inputs: Batch) -> GatherSplit:
        """Returns the parts for inputs of this signature, in the present mode."""
        self._meta.train(self._model.training)
        key = signature_of(dict(inputs)), self._model.training, autocast_state()
        if key not in self._splits:
            self._splits[key] = split_forward(self._meta, inputs, self._place.data_degree, **self._how)
        return self._splits[key]

    def __call__(self, **inputs: Any) -> Any:
        split, leaves = self.record(inputs), pytree.tree_leaves(inputs)
        met = _Live(split.own, self._model).run(*(leaves[at] for at in split.own_inputs))
        whole = [gathered(value, self._place) for value in met]
        flat = _Live(split.rest, self._model).run(*whole, *(leaves[at] for at in split.rest_inputs))
        return pytree.tree_unflatten(list(flat), split.out_spec)


def gather_output(output: Any, samples: int, place: MeshPlace) -> Any:
    """Returns a model's output for the samples of all replicas."""
    return map_rows(output, samples, lambda leaf: gathered(leaf, place))


def why_no_gather(model: nn.Module, inputs: Batch, mixing: Sequence[str]) -> str | None:
    """Explains why the loss of the whole batch cannot be kept by gathering; None where it can."""
    try:
        split_forward(model, inputs, 2, mixing=mixing, device=torch.device("cpu"))
    except InputError as error:
        return str(error)
    return None
