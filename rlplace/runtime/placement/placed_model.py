"""A distributed model whose ops, forward and backward, run each on the process that a placement says.

Every process computes the same order of all ops and runs its own part of it. A value is sent once to each process that reads
it, a parameter once per step from its owner. Gradients of parameters are added up by the owner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from rlplace.errors import InputError
from rlplace.model.capture.fake import meta_copy, tensors_in
from rlplace.model.torch_adapter import pytree
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.base import activity
from rlplace.runtime.base.model import Batching, DistributedModel, Stash
from rlplace.runtime.base.ranks import Ranks
from rlplace.runtime.base.steps import Loss, check_inputs, has_target, takes_target
from rlplace.runtime.placement.assign import JointPlacement, check_same_ops, joint_order, place_joint_graph, planned_devices
from rlplace.runtime.placement.emit import Emitter, Program
from rlplace.runtime.placement.forward_graph import ForwardGraph, Graphs, any_value, check_same_graph, flat_inputs
from rlplace.runtime.placement.joint_graph import joint_graph, lay_out
from rlplace.runtime.placement.wire import Wire
from rlplace.runtime.state.whole import ParameterHooks, agree, gather_values, own_tree


class Engine:
    """This process's part of the steps of one plan, for one signature of inputs.

    All processes of the plan call the same methods in the same order with the same inputs.

    Attributes:
        placement: The graph and where its nodes run.
        ranks: Which process this is.
        tensors: The parameters and buffers that this rank holds by ``placement.owners``, and the constants, by name.
    """

    def __init__(self, placement: JointPlacement, ranks: Ranks, tensors: Mapping[str, torch.Tensor]) -> None:
        """Prepares a process; nothing is sent."""
        constants = {name: value.detach().to(ranks.device) for name, value in placement.joint.constants.items()}
        self.placement, self.ranks, self.tensors = placement, ranks, {**tensors, **constants}
        self._programs: dict[bool, Program] = {}

    def train(self, leaves: Sequence[Any], key: tuple[int, int]) -> torch.Tensor:
        """Runs forward and backward.

        Afterwards ``.grad`` of every own parameter holds the gradient of the loss (it is None on entry; it stays None for a
        parameter without any gradient).

        Args:
            leaves: Flat inputs, see `flat_inputs`; the same on every rank.
            key: Seed and step, which name the random streams.

        Returns:
            The loss, 0-d, detached, the same on every rank.
        """
        joint = self.placement.joint
        double = any(joint.outputs[number].meta["val"].dtype == torch.float64 for number in joint.tangents)
        loss = torch.zeros((), device=self.ranks.device, dtype=torch.float64 if double else torch.float32)
        for name, value in self._run(leaves, True, key).items():
            if name in joint.tangents:
                loss += value.reshape(())
                continue
            parameter = self.tensors[name]
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                torch.autograd.backward([parameter], [value])  # calls them
            else:
                parameter.grad = lay_out(value, parameter.stride())  # optimizers expect the layout of the parameter
        dist.all_reduce(loss)
        return loss

    def evaluate(self, leaves: Sequence[Any]) -> list[Any]:
        """Runs the forward only, without gradients; returns the outputs of the forward graph, on every rank."""
        made = gather_values(self._run(leaves, False, (0, 0)), self.ranks.device, everywhere=True)
        return [made.get(number, item) for number, item in enumerate(self.placement.joint.outputs)]

    def _run(self, leaves: Sequence[Any], training: bool, key: tuple[int, int]) -> dict[Any, torch.Tensor]:
        """Runs a step; returns the part of the loss or the outputs that is made here, and the gradients that it owns."""
        ranks, joint = self.ranks, self.placement.joint
        if ranks.replica is None:
            return {}
        new = training not in self._programs
        program = self._programs[training] = self._program(training) if new else self._programs[training]
        wire = Wire(ranks.rank, ranks.device, program.messages)
        if new:
            wire.connect()
        held = [self.tensors[name].detach() for name in joint.held if ranks.rank in self.placement.owners[name]]
        roots = [node.meta["val"] for node in joint.tangents.values()]
        ones = [torch.ones(root.shape, dtype=root.dtype, device=ranks.device) for root in roots]
        inputs = [leaf.to(ranks.device, non_blocking=True) for node, leaf in zip(joint.inputs, leaves, strict=True) if node]
        results = program(key, wire, *held, *ones, *inputs)
        wire.finish()
        activity.doing("the gradients of its parameters")
        with torch.no_grad():
            for name in joint.writes:
                if (name, None) in results:
                    self.tensors[name].copy_(results.pop((name, None)))
        return results

    def _program(self, training: bool) -> Program:
        placement, rank = self.placement, self.ranks.rank
        joint, owners = placement.joint, placement.owners
        given = [(node, device) for name, node in joint.held.items() for device in owners[name]]
        inputs = [node for node in (*joint.tangents.values(), *joint.inputs) if node is not None]
        given += [(node, device) for node in inputs for device in self.ranks.replicas[0]]
        wanted = placement.written + (placement.summands if training else [])
        order = joint_order(placement, placement.device_of if training else placement.forward)
        emitter = Emitter(placement, {rank: self.ranks.device}, order, given, wanted, wired=True)
        numbers = joint.tangents if training else range(len(joint.outputs))
        results: dict[Any, fx.Node | None] = {number: emitter.anywhere(joint.outputs[number]) for number in numbers}
        results |= {(name, None): emitter.at(node, rank) for name, node in joint.writes.items() if rank in owners[name]}
        return emitter.program(results | (emitter.gradients() if training else {}))


class PlacedModel(DistributedModel):
    """A distributed model of a placement; see `DistributedModel`.

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
        super().__init__(meta_copy(model), ranks, batching, seed, "joint_graph")
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
        # Tensors without a reader are on the plan's first device.
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
        return partial(_output_of, graph, self._loss is None), loss, stash

    def _evaluate(self, args: Any, kwargs: Any, target: Any) -> Any:
        graph, engine = self._engine(args, kwargs, target)
        outputs = engine.evaluate(flat_inputs(args, kwargs, target))
        # The value of a loss function outside the model is the last one.
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


def _output_of(graph: ForwardGraph, added: bool, loss: torch.Tensor) -> Any:
    """Returns the model's output in training: the loss in its place, None in all others."""
    if len(graph.outputs) > graph.out_spec.num_leaves:
        return {"loss": loss} if added else loss
    made = graph.outputs[graph.loss]  # type: ignore[index]
    return pytree.tree_unflatten([loss if item is made else None for item in graph.outputs], graph.out_spec)


def build_joint(
    source: ForwardGraph, plan: PlacementPlan, device: torch.device, owners: Mapping[str, tuple[int, ...]] | None = None
) -> JointPlacement:
    """Traces the joint graph for a kind of device and puts it on the devices of a plan; nothing is allocated or run.

    `owners` are the holders of the tensors that are in place already; by default the plan chooses them.
    """
    if device.type not in source.joint:
        source.joint[device.type] = joint_graph(source, kind=device.type)
    return place_joint_graph(source.joint[device.type], plan, owners)
