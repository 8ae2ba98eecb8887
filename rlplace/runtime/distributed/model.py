"""The module that a training loop sees: one process's part of a distributed model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.runtime.distributed.batches import by_signature, split_batch
from rlplace.runtime.distributed.engine import Engine, Microbatch
from rlplace.runtime.distributed.forward_graph import ForwardGraph, input_signature
from rlplace.runtime.distributed.groups import group_of
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.tensors import Own, register

MakeEngine = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any], Any], tuple[ForwardGraph, Engine]]


@dataclass(frozen=True)
class Batching:
    """How a batch becomes micro-batches; see `rlplace.distribute`."""

    microbatches: int
    share: str
    whole: Collection[str]
    reduction: str


class DistributedModel(nn.Module):
    """A model whose steps run over several processes, used like the model itself.

    Called in training mode with grad enabled, it runs the whole step, forward and backward of all micro-batches, and returns
    the loss where the model would; ``loss.backward()`` then only puts the gradients in place, scaled by what arrives there. In
    eval mode or without grad it runs the forward and returns all outputs. Every rank makes the same calls with the same
    batches.

    Parameters and buffers are those that this rank owns, under the names that they have in the model.
    """

    def __init__(
        self, meta: nn.Module, own: Own, ranks: Ranks, batching: Batching, make_engine: MakeEngine, seed: int, report: Any
    ) -> None:
        super().__init__()
        vars(self)["_meta"] = meta  # not a child: its tensors are not this rank's
        self._own = own
        self._ranks = ranks
        self._batching = batching
        self._make_engine = make_engine
        self._engines: dict[Hashable, tuple[ForwardGraph, Engine]] = {}
        self._seed = seed
        self._step = 0
        self.report = report
        register(self, meta, own)
        super().train(meta.training)

        @functools.wraps(meta.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(*args, **kwargs)

        self.forward = forward  # its signature is the model's, which trainers look at

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(vars(self)["_meta"], name)  # such as a transformers model's config
            if isinstance(value, (nn.Module, torch.Tensor)):
                raise AttributeError(
                    f"{name!r} of the model is not on this rank; state_dict() and named_parameters() have what is"
                ) from None
            return value

    def train(self, mode: bool = True) -> DistributedModel:
        """Sets the mode of all modules."""
        self._meta.train(mode)
        super().train(mode)
        return self

    def _call(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        arguments = ((tuple(args), dict(kwargs)),) if target is None else ((tuple(args), dict(kwargs)), target)
        replicas = len(self._ranks.replicas)
        batching = self._batching
        shared = batching.share == "global"
        split = split_batch(
            arguments, replicas if shared else 1, batching.microbatches, whole=batching.whole, reduction=batching.reduction
        )
        spec = pytree.tree_structure(arguments)
        mine = self._ranks.replica or 0
        training = torch.is_grad_enabled() and self.training
        results: dict[int, list[Any]] = {}
        losses = []
        graph = None
        with self._gradients_aside() as pending:
            for _, numbers in by_signature(split):
                graph, engine = self._engine(split.parts[numbers[0]], spec)
                own = [n for n in numbers if not shared or split.replica[n] == mine]
                parts = [self._part(split.parts[n], shared, replicas, len(split.parts)) for n in own]
                if training:
                    if graph.loss is None:
                        raise InputError(
                            "distribute: the model returns no scalar loss to train on; give distribute(..., loss=fn) and call the "
                            "model with target=..., or evaluate under torch.no_grad()"
                        )
                    losses.append(engine.train(parts, self._seed, self._step))
                    pending.take(self._own.parameters)
                else:
                    results.update(zip(own, engine.evaluate(parts), strict=False))
        if not training:
            return self._outputs(
                graph, [results[n] for n in sorted(results)], [split.samples[n] for n in sorted(results)], target
            )
        self._step += 1
        loss = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
        return self._training_output(graph, _Deliver.apply(_anchor(loss), loss, pending), target)

    def _part(self, part: Microbatch, shared: bool, replicas: int, count: int) -> Microbatch:
        if shared or replicas == 1:
            return part
        number = (self._ranks.replica or 0) * count + part.number
        return Microbatch(number, part.leaves, part.weight / replicas if self._batching.reduction == "mean" else part.weight)

    def _engine(self, part: Microbatch, spec: Any) -> tuple[ForwardGraph, Engine]:
        kind = self._ranks.device.type
        autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        modes = tuple(module.training for module in self._meta.modules())
        key = (input_signature(part.leaves), str(spec), modes, autocast)
        if key not in self._engines:
            rebuilt = pytree.tree_unflatten(list(part.leaves), spec)
            (args, kwargs), target = rebuilt[0], rebuilt[1] if len(rebuilt) > 1 else None
            self._engines[key] = self._make_engine(self._meta, args, kwargs, target)
        return self._engines[key]

    def _gradients_aside(self) -> _Pending:
        return _Pending(self._own.parameters)

    def _training_output(self, graph: Any, loss: torch.Tensor, target: Any) -> Any:
        if graph.loss not in graph.outputs:
            return loss
        flat = [loss if name == graph.loss else None for name in graph.outputs]
        return pytree.tree_unflatten(flat, graph.out_spec)

    def _outputs(self, graph: Any, parts: list[list[Any]], samples: list[int], target: Any) -> Any:
        """Micro-batches put together again: the loss by the share of samples, tensors along the first dimension."""
        joined = []
        names = [*graph.outputs]
        if graph.loss is not None and graph.loss not in names:
            names.append(graph.loss)
        for position, name in enumerate(names):
            values = [part[position] for part in parts]
            if name == graph.loss or (isinstance(values[0], torch.Tensor) and values[0].dim() == 0):
                total = sum(samples)
                mean = self._batching.reduction == "mean"
                joined.append(sum(v * (n / total if mean else 1.0) for v, n in zip(values, samples, strict=True)))
            elif isinstance(values[0], torch.Tensor):
                joined.append(torch.cat(values) if len(values) > 1 else values[0])
            else:
                joined.append(values[0])
        if len(names) > len(graph.outputs):  # a loss function outside the model: what it returns
            return joined[-1]
        return pytree.tree_unflatten(joined, graph.out_spec)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales all gradients of the model so that their common norm is at most `max_norm`; every rank calls it.

        Returns:
            The norm before, the same on every rank.
        """
        place, owners = self._ranks.place, self._own.owners
        grads = [
            p.grad for name, p in self._own.parameters.items() if p.grad is not None and owners[name][0] == place
        ]  # what several places hold counts once
        infinite = norm_type == float("inf")
        total = torch.zeros((), device=self._ranks.device)
        for grad in grads:
            norm = torch.linalg.vector_norm(grad.float(), norm_type)
            total = torch.maximum(total, norm) if infinite else total + norm**norm_type
        if self._ranks.replica is not None:
            row = self._ranks.replicas[self._ranks.replica]
            if len(row) > 1:
                dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group_of(row))
        norm = total if infinite else total ** (1.0 / norm_type)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for parameter in self._own.parameters.values():
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        return norm


class _Pending:
    """Gradients of a step that wait for ``loss.backward()``, while those from before are kept where they are."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._before: dict[str, torch.Tensor | None] = {}
        self.gradients: dict[str, torch.Tensor] = {}

    def __enter__(self) -> _Pending:
        for name, parameter in self._parameters.items():
            self._before[name], parameter.grad = parameter.grad, None
        return self

    def __exit__(self, *_: object) -> None:
        for name, parameter in self._parameters.items():
            parameter.grad = self._before[name]
        self._before.clear()

    def take(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Moves the gradients out of the parameters and adds them to those that wait."""
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                waiting = self.gradients.get(name)
                self.gradients[name] = parameter.grad if waiting is None else waiting + parameter.grad
                parameter.grad = None

    def deliver(self, scale: torch.Tensor) -> None:
        """Adds the gradients, times `scale`, to those of the parameters."""
        factor = float(scale)
        for name, gradient in self.gradients.items():
            if factor != 1.0:
                gradient.mul_(factor)
            parameter = self._parameters[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.gradients = {}


class _Deliver(torch.autograd.Function):
    """The loss of a step that has run already; its backward hands over the gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, loss: torch.Tensor, pending: _Pending) -> torch.Tensor:
        ctx.pending = pending
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.pending is None:
            raise RuntimeError("rlplace: backward through the loss of one step a second time")
        ctx.pending.deliver(grads[0])
        ctx.pending = None
        return None, None, None


def _anchor(loss: torch.Tensor) -> torch.Tensor:
    """Something that requires a gradient, so that the loss has a backward on ranks without parameters too."""
    return torch.zeros((), device=loss.device, requires_grad=True)
