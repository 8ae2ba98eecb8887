"""A distributed model whose ops run where a placement says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.runtime.distributed.execution.batches import Microbatch, Split, check_inputs, split_batch
from rlplace.runtime.distributed.execution.outputs import gather_outputs, join_leaves
from rlplace.runtime.distributed.execution.recorder import Recorder
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.joint.engine import Engine
from rlplace.runtime.distributed.model import Batching, DistributedModel
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.state.stash import Stash
from rlplace.runtime.distributed.state.tensors import Own, agree, register
from rlplace.runtime.native.clip import clip_grad_norm_

Trace = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any], Any], ForwardGraph]
MakeEngine = Callable[[ForwardGraph], Engine]


class PlacedModel(DistributedModel):
    """See `DistributedModel`."""

    def __init__(
        self,
        meta: nn.Module,
        own: Own,
        ranks: Ranks,
        batching: Batching,
        trace: Trace,
        make: MakeEngine,
        seed: int,
        report: str,
    ) -> None:
        super().__init__(meta, ranks, batching, seed, report)
        self._own = own
        self._trace, self._make_engine = trace, make
        self._engines: dict[ForwardGraph, Engine] = {}
        self._recorder = Recorder(ranks.device)
        register(self, meta, own)
        agree(own)
        super().train(meta.training)

    def engines(self) -> list[Engine]:
        """The engines made so far, one per signature of inputs."""
        return list(self._engines.values())

    def record(self, recorder: Recorder) -> None:
        """Makes the engines, also those to come, write what they do into a recorder."""
        self._recorder = recorder
        for engine in self.engines():
            engine.recorder = recorder

    def train(self, mode: bool = True) -> PlacedModel:
        """Sets the mode of all modules."""
        self._meta.train(mode)
        super().train(mode)
        return self

    def _train(self, args: Any, kwargs: Any, target: Any) -> tuple[Any, torch.Tensor, Stash]:
        arguments = self._arguments(args, kwargs, target)
        split, spec = self._split(arguments), pytree.tree_structure(arguments)
        check_inputs(arguments)
        losses, graph = [], None
        with Stash(self._own.parameters) as stash:
            for part in split.parts:
                graph, engine = self._engine(part, spec)
                if graph.loss is None:
                    raise InputError(
                        "distribute: the model returns no scalar loss to train on; give distribute(..., loss=fn) and call "
                        "the model with target=..., or evaluate under torch.no_grad()"
                    )
                losses.append(engine.train(part.leaves, (*self.random_state, part.number)) * part.weight)
                stash.take(part.weight)
        assert graph is not None  # no batch is without parts
        return partial(_output_of, graph), torch.stack(losses).sum(), stash

    def _evaluate(self, args: Any, kwargs: Any, target: Any) -> Any:
        arguments = self._arguments(args, kwargs, target)
        split, spec = self._split(arguments), pytree.tree_structure(arguments)
        results, graph = [], None
        for part in split.parts:
            graph, engine = self._engine(part, spec)
            outputs = engine.evaluate(part.leaves)
            if len(self._ranks.replicas[0]) < self._ranks.world:  # processes outside of the plan want them, too
                first = self._ranks.rank == self._ranks.replicas[0][0]
                outputs = gather_outputs(outputs if first else None, 0, self._ranks.device)[0]
            results.append(outputs)
        assert graph is not None
        losses = {i for i, name in enumerate(graph.outputs) if name == graph.loss} or {len(graph.outputs)}
        joined = join_leaves(results, split.samples, self.batching.reduction == "mean", losses)
        # A loss function outside the model: what it returns.
        return joined[-1] if len(joined) > len(graph.outputs) else pytree.tree_unflatten(joined, graph.out_spec)

    def _arguments(self, args: Any, kwargs: Any, target: Any) -> Any:
        call = (tuple(args), dict(kwargs))
        return (call,) if target is None else (call, target)

    def _split(self, arguments: Any) -> Split:
        how = self.batching
        return split_batch(arguments, how.microbatches, whole=how.whole, reduction=how.reduction)

    def _engine(self, part: Microbatch, spec: Any) -> tuple[ForwardGraph, Engine]:
        rebuilt = pytree.tree_unflatten(list(part.leaves), spec)
        (args, kwargs), target = rebuilt[0], rebuilt[1] if len(rebuilt) > 1 else None
        graph = self._trace(self._meta, args, kwargs, target)
        if graph not in self._engines:
            self._engines[graph] = self._make_engine(graph)
            self._engines[graph].recorder = self._recorder
        return graph, self._engines[graph]

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See `DistributedModel.trained`."""
        yield from self._own.parameters.items()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        """See `DistributedModel.clip_grad_norm_`."""
        held = [(parameter, len(self._own.owners[name])) for name, parameter in self._own.parameters.items()]
        return clip_grad_norm_(held, 1, self._ranks.device, max_norm, norm_type, error_if_nonfinite)


def _output_of(graph: ForwardGraph, loss: torch.Tensor) -> Any:
    """What the model returns in training: the loss where it stands."""
    if graph.loss not in graph.outputs:
        return loss
    return pytree.tree_unflatten([loss if name == graph.loss else None for name in graph.outputs], graph.out_spec)
