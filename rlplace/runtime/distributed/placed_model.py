"""A distributed model whose ops run where a placement says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.runtime.distributed.execution.batches import check_inputs
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph, flat_inputs
from rlplace.runtime.distributed.joint.engine import Engine
from rlplace.runtime.distributed.model import Batching, DistributedModel, Stash
from rlplace.runtime.distributed.ranks import Ranks
from rlplace.runtime.distributed.state.whole import agree
from rlplace.runtime.held import tensors_in
from rlplace.runtime.native.clip import clip_grad_norm_

Trace = Callable[[tuple[Any, ...], Mapping[str, Any], Any], ForwardGraph]
MakeEngine = Callable[[ForwardGraph], Engine]


class PlacedModel(DistributedModel):
    """See `DistributedModel`."""

    def __init__(
        self,
        meta: nn.Module,
        own: nn.Module,
        owners: Mapping[str, tuple[int, ...]],
        ranks: Ranks,
        batching: Batching,
        trace: Trace,
        make: MakeEngine,
        seed: int,
        report: str,
    ) -> None:
        super().__init__(meta, ranks, batching, seed, report)
        for held in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[held] = vars(own)[held]
        self._owners = owners
        self._trace, self._make_engine = trace, make
        self._engines: dict[ForwardGraph, Engine] = {}
        agree(tensors_in(own), owners)
        super().train(meta.training)

    def engines(self) -> list[Engine]:
        """The engines made so far, one per signature of inputs."""
        return list(self._engines.values())

    def train(self, mode: bool = True) -> PlacedModel:
        """Sets the mode of all modules."""
        self._meta.train(mode)
        super().train(mode)
        return self

    def _train(self, args: Any, kwargs: Any, target: Any) -> tuple[Any, torch.Tensor, Stash]:
        check_inputs((args, kwargs, target))
        graph, engine = self._engine(args, kwargs, target)
        if graph.loss is None:
            raise InputError(
                "distribute: the model returns no scalar loss to train on; give distribute(..., loss=fn) and call "
                "the model with target=..., or evaluate under torch.no_grad()"
            )
        with Stash(dict(self.named_parameters())) as stash:
            loss = engine.train(flat_inputs(args, kwargs, target), self.random_state)
        return partial(_output_of, graph), loss, stash

    def _evaluate(self, args: Any, kwargs: Any, target: Any) -> Any:
        graph, engine = self._engine(args, kwargs, target)
        outputs = engine.evaluate(flat_inputs(args, kwargs, target))
        # A loss function outside the model: what it returns.
        return outputs[-1] if len(outputs) > graph.out_spec.num_leaves else pytree.tree_unflatten(outputs, graph.out_spec)

    def _engine(self, args: Any, kwargs: Any, target: Any) -> tuple[ForwardGraph, Engine]:
        graph = self._trace(args, kwargs, target)
        if graph not in self._engines:
            self._engines[graph] = self._make_engine(graph)
        return graph, self._engines[graph]

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """See `DistributedModel.trained`."""
        yield from self.named_parameters()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        """See `DistributedModel.clip_grad_norm_`."""
        held = [(parameter, len(self._owners[name])) for name, parameter in self.named_parameters()]
        return clip_grad_norm_(held, 1, self._ranks.device, max_norm, norm_type, error_if_nonfinite)


def _output_of(graph: ForwardGraph, loss: torch.Tensor) -> Any:
    """What the model returns in training: the loss where it stands."""
    if len(graph.outputs) > graph.out_spec.num_leaves:
        return loss
    made = graph.outputs[graph.loss]  # type: ignore[index]
    return pytree.tree_unflatten([loss if item is made else None for item in graph.outputs], graph.out_spec)
