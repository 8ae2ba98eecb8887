"""The module that a training loop sees: one process's part of a distributed model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.runtime.distributed.execution import activity
from rlplace.runtime.distributed.execution.batches import by_signature, check_inputs, split_batch
from rlplace.runtime.distributed.execution.engine import Engine, Microbatch, Recorder
from rlplace.runtime.distributed.execution.outputs import exchange_outputs, join_microbatches
from rlplace.runtime.distributed.execution.replicas import clip_grad_norm
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph, input_signature
from rlplace.runtime.distributed.graph.inputs import has_target
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.state.shares import SharedParameters
from rlplace.runtime.distributed.state.stash import Deliver, Stash, anchor
from rlplace.runtime.distributed.state.tensors import Own, agree, register, send_from_first
from rlplace.runtime.held import first_names

MakeEngine = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any], Any], tuple[ForwardGraph, Engine]]


@dataclass(frozen=True)
class Batching:
    """How a batch becomes micro-batches; see `rlplace.distribute`."""

    microbatches: int
    share: str
    whole: Collection[str]
    reduction: str
    optimizer_sharding: bool = False


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
        self._recorder = Recorder(ranks.device)
        self.report = report
        taken = {name.partition(".")[0] for name in first_names(meta)} & {*dir(type(self)), "report"}
        if taken:
            raise InputError(
                f"distribute: the model has a part named {min(taken)!r}, which means something else in a distributed model; "
                "give that attribute another name"
            )
        register(self, meta, own)
        agree(own, ranks)
        self._shared = SharedParameters(own.parameters, ranks, batching.optimizer_sharding)
        super().train(meta.training)

        @functools.wraps(meta.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with activity.inside("the model"):
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

    @property
    def ranks(self) -> Ranks:
        """The processes that run the model."""
        return self._ranks

    @property
    def meta_model(self) -> nn.Module:
        """The model without its values, all of it: names, shapes, modes, code."""
        return vars(self)["_meta"]

    @property
    def own_tensors(self) -> Own:
        """What this rank holds, and who holds what."""
        return self._own

    @property
    def shared_parameters(self) -> SharedParameters:
        """What an optimizer gets on this rank: the own parameters, or this replica's shares of them."""
        return self._shared

    @property
    def batching(self) -> Batching:
        """How a batch becomes micro-batches from the next call on."""
        return self._batching

    @batching.setter
    def batching(self, batching: Batching) -> None:
        self._batching = batching

    @property
    def random_state(self) -> tuple[int, int]:
        """Seed of the random ops, and number of the next training step: what their streams depend on."""
        return self._seed, self._step

    @random_state.setter
    def random_state(self, state: tuple[int, int]) -> None:
        self._seed, self._step = state

    def engines(self) -> list[Engine]:
        """The engines made so far, one per signature of inputs."""
        return [engine for _, engine in self._engines.values()]

    def record(self, recorder: Recorder) -> None:
        """Makes the engines, also those to come, write what they do into a recorder."""
        self._recorder = recorder
        for engine in self.engines():
            engine.recorder = recorder

    def train(self, mode: bool = True) -> DistributedModel:
        """Sets the mode of all modules."""
        self._meta.train(mode)
        super().train(mode)
        return self

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        target = None if has_target(self._meta) else kwargs.pop("target", None)
        arguments = ((tuple(args), dict(kwargs)),) if target is None else ((tuple(args), dict(kwargs)), target)
        replicas = len(self._ranks.replicas)
        batching = self._batching
        shared = batching.share == "global"
        split = split_batch(
            arguments, replicas if shared else 1, batching.microbatches, whole=batching.whole, reduction=batching.reduction
        )
        spec = pytree.tree_structure(arguments)
        self._shared.gather_changed()
        mine = self._ranks.replica or 0
        training = torch.is_grad_enabled() and self.training
        if training:
            check_inputs(arguments)
        results: dict[int, list[Any]] = {}
        losses = []
        written: set[str] = set()
        graph = None
        with Stash(self._own.parameters, self._shared.trained, self._shared.shares) as stash:
            for _, numbers in by_signature(split):
                graph, engine = self._engine(split.parts[numbers[0]], spec)
                written |= graph.writes
                own = [n for n in numbers if not shared or split.replica[n] == mine]
                parts = [self._part(split.parts[n], shared, replicas, len(split.parts)) for n in own]
                if training:
                    if graph.loss is None:
                        raise InputError(
                            "distribute: the model returns no scalar loss to train on; give distribute(..., loss=fn) and call "
                            "the model with target=..., or evaluate under torch.no_grad()"
                        )
                    losses.append(engine.train(parts, self._seed, self._step))
                    stash.take()
                else:
                    replica_of = {n: split.replica[n] for n in (numbers if shared else own)}
                    outputs = dict(zip(own, engine.evaluate(parts), strict=False))
                    results.update(exchange_outputs(graph, self._ranks, replica_of, outputs, everywhere=shared))
        assert graph is not None  # no batch is without parts
        send_from_first(self._own, written, self._ranks)
        if not training:
            order = sorted(results)
            mean = batching.reduction == "mean"
            joined = join_microbatches(graph, [results[n] for n in order], [split.samples[n] for n in order], mean)
            # A loss function outside the model: what it returns.
            return joined[-1] if len(joined) > len(graph.outputs) else pytree.tree_unflatten(joined, graph.out_spec)
        self._step += 1
        loss = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
        return self._training_output(graph, Deliver.apply(anchor(loss), loss, stash), target)  # type: ignore[no-untyped-call]

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
            self._engines[key][1].recorder = self._recorder
        return self._engines[key]

    def _training_output(self, graph: Any, loss: torch.Tensor, target: Any) -> Any:
        if graph.loss not in graph.outputs:
            return loss
        flat = [loss if name == graph.loss else None for name in graph.outputs]
        return pytree.tree_unflatten(flat, graph.out_spec)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """What this rank trains, under the names that they have in the model: with optimizer sharding its shares."""
        trained = {id(self._own.parameters[name]): share for name, share in self._shared.trained.items()}
        for name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            yield name, trained.get(id(parameter), parameter)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """What this rank trains. On a rank without parameters an empty one, since no optimizer can be made of nothing."""
        empty = True
        for parameter in super().parameters(recurse):
            empty = False
            yield parameter
        if empty:
            yield self._shared.nothing

    def gather_parameters(self) -> None:
        """With optimizer sharding, brings the shares of all replicas together after ``p.data`` was set by hand.

        After the step of a torch optimizer, and after in-place changes of parameters, this happens by itself. Every rank calls
        it.
        """
        self._shared.gather()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scales all gradients of the model so that their common norm is at most `max_norm`; every rank calls it.

        `torch.nn.utils.clip_grad_norm_` would see the gradients of this rank only.

        Returns:
            The norm before, the same on every rank.

        Raises:
            RuntimeError: The norm is not finite, and that is an error.
        """
        return clip_grad_norm(
            self._shared.trained, self._shared.shares, self._own.owners, self._ranks, max_norm, norm_type, error_if_nonfinite
        )
