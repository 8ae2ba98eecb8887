"""The forward of a module in one process whose backward ops run on the devices that a plan gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph, flat_inputs, forward_graph
from rlplace.runtime.distributed.joint.assign import place_joint_graph
from rlplace.runtime.distributed.joint.autograd import JointModule
from rlplace.runtime.distributed.joint.graph import joint_graph
from rlplace.runtime.distributed.joint.one_process import TwoParts, two_parts
from rlplace.runtime.op_level import CannotRunError, OpLevelForward, Runnable, without_placed_forward
from rlplace.runtime.place_graph import PlacedGraph


class JointForward(OpLevelForward):
    """Like `OpLevelForward`, with a joint graph: ``loss.backward()`` runs its backward part.

    The ops run in the order of the graph, parameters are where their backward is planned.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PlacementPlan,
        devices: Sequence[torch.device],
        device_of_op: Mapping[str, int],
        device_of_module: Mapping[str, torch.device],
        inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    ) -> None:
        self._plan = plan
        self._owners: dict[str, tuple[int, ...]] = {}
        super().__init__(model, devices, device_of_op, device_of_module, inputs)

    def fix_in_place(self, device_of: Mapping[str, torch.device]) -> None:
        """Tells where parameters and buffers now are."""
        super().fix_in_place(device_of)
        for name, device in device_of.items():
            self._owners.setdefault(name, (list(self._devices).index(device),))

    def _prepare_first(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Runnable:
        runnable = self._prepare(args, kwargs, check=True)
        self.ops_moved = 0
        return runnable

    def _prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, check: bool = False) -> Runnable:
        try:
            with without_placed_forward(self._model):
                source = forward_graph(self._model, args, kwargs)
        except InputError as error:
            raise CannotRunError(str(error)) from error
        if check:
            self._check_plan_matches(source.op_of_node.values())
        held = [self._example(name, source) for name in source.held]
        kind = next((device.type for device in self._devices if device.type != "cpu"), "cpu")

        def make(held: Sequence[torch.Tensor], leaves: Sequence[Any], outputs: tuple[int, ...]) -> TwoParts:
            named = dict(zip(source.held, held, strict=True))
            joint = joint_graph(source, named, leaves, differentiate=outputs, kind=kind)
            if joint.constants:
                raise InputError(
                    "op level: the forward makes tensors that tracing cannot follow; plan the problem that is not split"
                )
            placement = place_joint_graph(source, joint, self._plan, self._owners)
            for name, owner in placement.owners.items():
                self._owners.setdefault(name, owner)
            return two_parts(placement, self._devices)

        loss = source.outputs.index(source.loss) if source.loss in source.outputs else None
        every = tuple(i for i, name in enumerate(source.outputs) if name in source.layout and source.layout[name].requires_grad)
        module = JointModule(make, len(held), every if loss is None else (loss,))
        leaves = flat_inputs(args, kwargs)
        parts = module.parts([*held, *leaves], module.guess)
        placed = PlacedGraph(
            module=module,
            held=source.held,
            device_of_held={name: self._devices[self._owners[name][0]] for name in source.held},
            device_of_node={},
            copies=parts.copies,
        )
        constants = {name: value.to(placed.device_of_held[name]) for name, value in source.constants.items()}
        return Runnable(placed, constants, source.out_spec)

    def _example(self, name: str, source: ForwardGraph) -> torch.Tensor:
        holder = self._holder.get(name)
        tensor: torch.Tensor = source.constants[name] if holder is None else holder[0][holder[1]]
        return tensor
