"""A distributed model whose ops run where a placement says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.model.capture.fake import meta_copy, tensors_in
from rlplace.model.torch_adapter import pytree
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.base.forward_graph import ForwardGraph, Graphs, Loss, any_value, flat_inputs
from rlplace.runtime.base.model import Batching, DistributedModel, Stash
from rlplace.runtime.base.ranks import Ranks
from rlplace.runtime.base.values import check_inputs, check_same_graph, has_target, takes_target
from rlplace.runtime.placement.assign import JointPlacement, check_same_ops, place_joint_graph, planned_devices
from rlplace.runtime.placement.engine import Engine
from rlplace.runtime.placement.graph import joint_graph
from rlplace.runtime.state.whole import ParameterHooks, agree, own_tree

JOINT_GRAPH = "joint_graph"
"""What runs placements."""


class PlacedModel(DistributedModel):
    """See `DistributedModel`.

    Args:
        model: The whole model.
        plan: Places its ops.
        ranks: Which process this is.
        example: Positional and keyword arguments of a call, and the target of the loss, if any.
        batching: How a batch becomes micro-batches.
        loss: See `rlplace.distribute`.
        seed: Of random ops.
        graphs: Traces the model.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PlacementPlan,
        ranks: Ranks,
        example: tuple[tuple[Any, ...], Mapping[str, Any], Any],
        *,
        batching: Batching,
        loss: Loss | None,
        seed: int,
        graphs: Graphs,
    ) -> None:
        super().__init__(meta_copy(model), ranks, batching, seed, JOINT_GRAPH)
        self._hooks = ParameterHooks(model)
        self._plan, self._graphs, self._loss = plan, graphs, loss
        args, kwargs, target = example
        self._with_target = target is not None or takes_target(loss)
        if self._with_target and has_target(model):
            raise InputError("distribute: target= is an input of the model, so the loss cannot have one; rename either of them")
        first = graphs(self.meta_model, args, kwargs, any_value if self._with_target and target is None else loss, target)
        check_same_graph(first, ranks)
        check_same_ops(first, planned_devices(plan))
        owners = build_joint(first, plan, ranks.device).owners
        # What nobody reads is on the plan's first device.
        self._owners = {name: owners.get(name, (0,)) for name in tensors_in(model)}
        own = own_tree(model, self._owners, ranks.rank, ranks.device)
        for held in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[held] = vars(own)[held]
        self._engines = {first: self._made_engine(first)}
        agree(tensors_in(own), self._owners)
        super().train(model.training)

    def train(self, mode: bool = True) -> PlacedModel:
        """Sets the mode of all modules."""
        self.meta_model.train(mode)
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
        with Stash(dict(self.named_parameters()), after=self._hooks.run_after) as stash:
            loss = engine.train(flat_inputs(args, kwargs, target), self.random_state)
            self._hooks.run(dict(self.named_parameters()))
        return partial(_output_of, graph), loss, stash

    def _evaluate(self, args: Any, kwargs: Any, target: Any) -> Any:
        graph, engine = self._engine(args, kwargs, target)
        outputs = engine.evaluate(flat_inputs(args, kwargs, target))
        # A loss function outside the model: what it returns.
        return outputs[-1] if len(outputs) > graph.out_spec.num_leaves else pytree.tree_unflatten(outputs, graph.out_spec)

    def _engine(self, args: Any, kwargs: Any, target: Any) -> tuple[ForwardGraph, Engine]:
        loss = None if target is None and self._with_target else self._loss
        graph = self._graphs(self.meta_model, args, kwargs, loss, target)
        if graph not in self._engines:
            check_same_graph(graph, self.ranks)
            self._engines[graph] = self._made_engine(graph)
        return graph, self._engines[graph]

    def _made_engine(self, graph: ForwardGraph) -> Engine:
        return Engine(build_joint(graph, self._plan, self.ranks.device, self._owners), self.ranks, tensors_in(self))

    def _holders(self, name: str, parameter: nn.Parameter) -> int:
        return len(self._owners[name])


def _output_of(graph: ForwardGraph, loss: torch.Tensor) -> Any:
    """What the model returns in training: the loss where it stands."""
    if len(graph.outputs) > graph.out_spec.num_leaves:
        return loss
    made = graph.outputs[graph.loss]  # type: ignore[index]
    return pytree.tree_unflatten([loss if item is made else None for item in graph.outputs], graph.out_spec)


def build_joint(
    source: ForwardGraph, plan: PlacementPlan, device: torch.device, owners: Mapping[str, tuple[int, ...]] | None = None
) -> JointPlacement:
    """Traces the joint graph and puts it on the devices of a plan; nothing is allocated or run.

    Args:
        source: The forward of one micro-batch.
        plan: Names its ops.
        device: Where this process computes; only its kind matters.
        owners: Holders of the tensors that are in place already. Default: chosen by the plan.
    """
    if device.type not in source.joint:
        source.joint[device.type] = joint_graph(source, kind=device.type)
    return place_joint_graph(source.joint[device.type], plan, owners)
