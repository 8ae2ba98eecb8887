"""A distributed model that runs as a strategy says, by torch's own parts (`rlplace.runtime.native`)."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.runtime.distributed.execution.batches import check_inputs, samples_of
from rlplace.runtime.distributed.execution.outputs import gather_outputs, join_leaves
from rlplace.runtime.distributed.graph.forward_graph import Loss
from rlplace.runtime.distributed.graph.inputs import takes_target
from rlplace.runtime.distributed.model import Batching, DistributedModel
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.state.stash import Stash
from rlplace.runtime.distributed.state.whole import own_part
from rlplace.runtime.measure import loss_of
from rlplace.runtime.native.accumulate import Loss as PartLoss
from rlplace.runtime.native.batches import Batch, Share, micro_batches, own_samples, passes_of, share_of
from rlplace.runtime.native.run import NativeModel

TARGET = "target"


class StrategyModel(DistributedModel):
    """See `DistributedModel`.

    `step` offers what torch's pipelines do by themselves: forward and backward of a batch, with any loss.

    Attributes:
        native: This process's part of the model.
    """

    def __init__(
        self, meta: nn.Module, native: NativeModel, batching: Batching, loss: Loss | None, seed: int, report: str
    ) -> None:
        place = native.place
        first = native.strategy.pipelines[0].stages[0]
        rows = place.mesh.mesh.permute(1, 2, 0, 3).reshape(first.data_degree, -1).tolist()
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), place.device, tuple(map(tuple, rows)))
        super().__init__(meta, ranks, batching, seed, report)
        self.native, self._loss = native, loss
        self._latest: weakref.ref[Stash] | None = None

    def step(self, batch: Batch, loss: PartLoss) -> torch.Tensor:
        """Forward and backward of one batch in one call; gradients are added to ``.grad`` of the parameters.

        Args:
            batch: The whole batch, the same on every rank: keyword inputs of the model, and what the loss needs besides.
            loss: Called with the model's output and a micro-batch; returns the mean over its samples.

        Returns:
            The mean loss over the batch, the same on every rank.
        """
        share = self._share(batch, self.native.place.replica)
        native = self._drawing()
        value = native.run(self._passes(batch, share, native.names), loss)
        self.random_state = native.random_state
        return value

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What an optimizer gets: plain tensors and DTensors apart, which one foreach or fused operation cannot take."""
        return self.native.parameter_groups()

    def train(self, mode: bool = True) -> StrategyModel:
        """Sets the mode of all modules."""
        self.meta_model.train(mode)
        self.native.train(mode)
        self.training = mode
        return self

    def _train(self, args: Any, kwargs: Any, target: Any) -> tuple[Any, torch.Tensor, Stash]:
        check_inputs((args, kwargs))
        inputs = self._keywords(args, kwargs)
        batch = inputs if target is None else {**inputs, TARGET: target}
        passes = self._passes(batch, self._share(batch, self.native.place.replica), inputs)
        seen: list[Any] = []

        def loss(output: Any, part: Batch) -> torch.Tensor:
            seen[:] = [output]
            return self._loss_of(output, part.get(TARGET))

        earlier = self._latest() if self._latest is not None and self.native.runner.keeps_gradients else None
        if earlier is not None:
            earlier.keep()
        with Stash(dict(self.native.named_parameters()), copy=self.native.runner.keeps_gradients) as stash:
            value = self._drawing().run(passes, loss)
            stash.take()
        self._latest = weakref.ref(stash)
        output = seen[0] if seen else self.native.runner.recorded(passes)[1].output  # type: ignore[attr-defined]
        flat, spec = pytree.tree_flatten(output)
        position = None if self._loss is not None else next(i for i, leaf in enumerate(flat) if leaf is loss_of(output, None))

        def made(total: torch.Tensor) -> Any:
            if position is None:
                return total
            return pytree.tree_unflatten([total if i == position else None for i in range(len(flat))], spec)

        return made, value, stash

    def _evaluate(self, args: Any, kwargs: Any, target: Any) -> Any:
        inputs = self._keywords(args, kwargs)
        batch = inputs if target is None else {**inputs, TARGET: target}
        replicas = [self._share(batch, replica) for replica in range(self.ranks.replica_count)]
        own = self.native.place.replica
        passes = self._passes(batch, replicas[own], inputs)
        outputs = self._drawing().evaluate(passes)
        if outputs is not None and self._loss is not None and (target is not None or not takes_target(self._loss)):
            with torch.no_grad():
                outputs = [self._loss_of(o, one.part.get(TARGET)) for o, one in zip(outputs, passes, strict=True)]
        place, pipeline = self.native.place, self.native.strategy.pipelines[0]
        makes = dist.get_rank() == place.ranks_of_stage(pipeline, len(pipeline.stages) - 1) and place.index["tensor"] == 0
        wanted = [own] if self.batching.share == "replica" else list(range(len(replicas)))
        gathered = gather_outputs(outputs if makes else None, own, place.device)
        parts = [output for replica in wanted for output in gathered[replica]]
        sizes = [size for replica in wanted for size in replicas[replica].sizes]
        spec = pytree.tree_structure(parts[0])
        joined = join_leaves([pytree.tree_leaves(part) for part in parts], sizes, self.batching.reduction == "mean")
        return pytree.tree_unflatten(joined, spec)

    def _keywords(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Everything that the model is called with, by name."""
        if not args:
            return dict(kwargs)
        return keyword_inputs(self.meta_model, args) | dict(kwargs)

    def _share(self, batch: Batch, replica: int) -> Share:
        samples = samples_of(dict(batch)) * (self.ranks.replica_count if self.batching.share == "replica" else 1)
        return share_of(self.native.strategy, replica, samples)

    def _passes(self, batch: Batch, share: Share, names: Any) -> list[Any]:
        """This replica's micro-batches of a batch, on its device."""
        kept, device = self.batching.whole, self.ranks.device
        own = own_samples(batch, share, samples_of(dict(batch)), kept) if self.batching.share == "global" else batch
        own = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), dict(own))
        if self.batching.reduction == "sum":
            share = Share(share.first, share.sizes, tuple(float(self.ranks.replica_count) for _ in share.sizes))
        return passes_of(micro_batches(own, share, kept), share, names)

    def _loss_of(self, output: Any, target: Any) -> torch.Tensor:
        if self._loss is None:
            return loss_of(output, None)
        return self._loss(output) if target is None else self._loss(output, target)  # type: ignore[call-arg]

    def _drawing(self) -> NativeModel:
        """Random ops draw anew in every step, and the same again after a checkpoint was loaded."""
        self.native.random_state = self.random_state
        return self.native

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See `DistributedModel.trained`."""
        for name, parameter in self.native.named_parameters():
            yield self.native.first_name(name), parameter

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """What this rank trains, under the names that it has in the model; a DTensor where it is shared out or laid out."""
        dot = f"{prefix}." if prefix else ""
        return ((dot + name, parameter) for name, parameter in self.native.named_parameters())

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's buffers, under the names that they have in the model."""
        dot = f"{prefix}." if prefix else ""
        return ((dot + name, buffer) for name, buffer in self.native.named_buffers())

    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """This rank's parameters and buffers, under the names that they have in the model."""
        own = {f"{prefix}{name}": value for name, value in self.native.state_dict().items()}
        return own if destination is None else {**destination, **own}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:  # type: ignore[override]
        """Overwrites this rank's tensors by name; values are whole, or cut as its own are.

        Raises:
            InputError: With `strict`, one is missing.
        """
        for name, own in self.native.state_dict().items():
            value = state_dict.get(name)
            if value is None and strict and isinstance(own, torch.Tensor):
                raise InputError(f"load_state_dict: there is no {name}; give all tensors of this rank, or strict=False")
            if isinstance(own, DTensor):
                part = value if isinstance(value, DTensor) or value is None else own_part(value, own)
                if part is not None and part is not own:
                    own.to_local().copy_(part.to_local())
            elif isinstance(own, torch.Tensor) and value is not None and value is not own:
                own.copy_(value)
        self.native.loaded()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        """See `DistributedModel.clip_grad_norm_`."""
        return self.native.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)


def keyword_inputs(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Example inputs under the names that the model's forward gives them.

    Raises:
        InputError: It has no names for them.
    """
    if isinstance(inputs, Mapping):
        return dict(inputs)
    signature = inspect.signature(model.forward)
    strange = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind not in strange]
    if len(names) < len(inputs):
        raise InputError(
            f"a strategy is run with keyword inputs, but forward{signature} names {len(names)} of its {len(inputs)} inputs"
        )
    return dict(zip(names, inputs, strict=False))
