"""Runs plans that cut ops into parts: every device runs the same program on its own pieces of all tensors.

Parameters are DTensors that hold this device's piece; so are their gradients and the state of an optimizer made over them.
Every change of layout is a redistribution of a DTensor. `rlplace.runtime.distributed.sharded.program` says how each op is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.execution.engine import ChosenEngine, Engine, Microbatch, Recorder, Setup, zero_loss
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.graph.randomness import random_key
from rlplace.runtime.distributed.ranks import devices_of
from rlplace.runtime.distributed.sharded.exchange import Meshes, move, placements, summed_together
from rlplace.runtime.distributed.sharded.loss_graph import open_loss
from rlplace.runtime.distributed.sharded.mesh import factor_mesh
from rlplace.runtime.distributed.sharded.program import make_program
from rlplace.runtime.distributed.sharded.spaces import spaces_of, why_not_shards
from rlplace.runtime.distributed.sharded.spec import WHOLE, Spec, moves, whole
from rlplace.runtime.distributed.sharded.values import Key, Setting, Step, Values, flat_arguments, regions_of
from rlplace.runtime.distributed.state.tensors import Own
from rlplace.schedule import LIST


class ShardedEngine(Engine):
    """See the module.

    Attributes:
        program: Layouts of all values; ``program.report`` says by op name how it runs and why.
        mesh: The device mesh, whose shape is that of `factor_mesh`, and its coarser forms.
    """

    def __init__(
        self,
        graph: ForwardGraph,
        plan: PlacementPlan,
        state: Mapping[str, torch.Tensor],
        device: torch.device,
        mesh: Meshes | None = None,
    ) -> None:
        """Cuts the parameters; no communication but that of making the mesh.

        Args:
            graph: The forward for one signature of inputs.
            plan: With `shards`, or without: then every device does everything.
            state: Parameters (whole, the same on every rank, or those of another engine of this plan), buffers (kept as they
                are, and written to) and constants by first name.
            device: Where this process computes.
            mesh: That of another engine of this plan; default a new one over all processes.
        """
        graph = open_loss(graph)
        shards = plan.shards or {}
        if mesh is None:
            world = torch.distributed.get_world_size()
            shape = factor_mesh(shards, world).shape or (1,)
            mesh = Meshes(DeviceMesh(device.type, torch.arange(world).reshape(shape)))
        self.mesh, self.device, self.graph, self.recorder = mesh, device, graph, Recorder(device)
        fixed: dict[str, Spec] = {}
        for name in graph.held:
            tensor = state[name] if name in state else graph.constants[name]
            if isinstance(tensor, DTensor):
                fixed[name] = _spec_of(tensor)
            elif not isinstance(tensor, nn.Parameter):
                fixed[name] = whole(tensor.shape)
        self.program = make_program(graph, shards, mesh.shape, fixed)
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        for name in graph.held:
            tensor = state[name] if name in state else graph.constants[name]
            if isinstance(tensor, nn.Parameter):
                self.parameters[name] = tensor if isinstance(tensor, DTensor) else self._cut(tensor, self.program.home[name])
            else:
                self.buffers[name] = tensor.to(device)
        buffers = {node: self.buffers[name] for node, name in self.graph.held_of_node.items() if name in self.buffers}
        self._setting = Setting(graph, self.program, mesh, device, buffers, regions_of(graph, device))
        self._loss_steps = _needed(self.program.steps, [graph.loss] if graph.loss else [])
        self._results = [name for name in graph.outputs if isinstance(name, str) and name in self.program.specs]
        self._last_loss = graph.loss is not None and graph.loss not in graph.outputs
        self._output_steps = _needed(self.program.steps, [*self._results, *([graph.loss] if self._last_loss else [])])  # type: ignore[list-item]

    def train(self, microbatches: Sequence[Microbatch], seed: int, step: int) -> torch.Tensor:
        """See `Engine.train`."""
        if self.graph.loss is None:
            raise InputError(
                "distribute: the model makes no loss; give a loss function, or call it in training mode with labels"
            )
        held = self._working_copies(self._loss_steps)
        total = zero_loss(self.graph.loss_dtype, self.device)
        for microbatch in microbatches:
            with random_key(seed, step, microbatch.number):
                with self.recorder.interval("forward", 0, microbatch.number), torch.enable_grad():
                    values = Values(self._setting, held, microbatch.leaves)
                    values.run(self._loss_steps)
                    loss = values.read(self.graph.loss, whole(self.program.specs[self.graph.loss].shape)).reshape(())
                    del values
                with self.recorder.interval("backward", 0, microbatch.number):
                    # The caller's autocast is for the forward; its choice of dtypes is part of the autograd graph by now.
                    with torch.autocast(self.device.type, enabled=False):
                        (loss * microbatch.weight).backward()
            total += loss.detach() * microbatch.weight
        with self.recorder.interval("reduce"):
            self._collect(held)
        return total

    def evaluate(self, microbatches: Sequence[Microbatch]) -> list[list[Any]]:
        """See `Engine.evaluate`; a model in training mode draws the same random numbers at each call."""
        outputs = []
        with torch.no_grad():
            held = self._working_copies(self._output_steps)
            for microbatch in microbatches:
                with random_key(0, 0, microbatch.number):
                    values = Values(self._setting, held, microbatch.leaves)
                    values.run(self._output_steps)
                    names = [*self.graph.outputs, *([self.graph.loss] if self._last_loss else [])]
                    outputs.append([values.whole(name) if name in self.program.specs else name for name in names])
        return outputs

    def _cut(self, parameter: nn.Parameter, spec: Spec) -> nn.Parameter:
        """A parameter as a DTensor with this device's piece of its values."""
        with torch.no_grad():
            local = self.mesh.piece(parameter.detach(), spec)
            if local.is_meta:
                local = torch.empty_like(local, device=self.device)
            local = local.to(self.device, copy=True, memory_format=torch.contiguous_format)
        return nn.Parameter(self._spread(local, spec), requires_grad=parameter.requires_grad)

    def _spread(self, local: torch.Tensor, spec: Spec) -> DTensor:
        dims = [WHOLE] * self.mesh.ndim
        for dim, factors in enumerate(spec.dims):
            for _, axis in factors:
                if axis != WHOLE:
                    dims[axis] = dim
        return DTensor.from_local(local, self.mesh.base, placements(dims), run_check=False)

    def _working_copies(self, steps: Sequence[Step]) -> dict[Key, torch.Tensor]:
        """The held tensors in every layout that the steps read them in; leaves of autograd."""
        name_of = self.graph.held_of_node
        wanted: dict[Key, None] = {}
        for step in steps:
            leaves = flat_arguments(step.node)
            wanted |= dict.fromkeys((leaves[position].name, *demand) for position, demand in step.demands.items())
        for node in self.graph.outputs:
            if node in name_of:
                wanted[node, whole(self.program.specs[node].shape), frozenset()] = None
        copies: dict[Key, torch.Tensor] = {}
        for node, spec, summed in wanted:
            parameter = self.parameters.get(name_of.get(node, ""))
            if parameter is not None:
                local: torch.Tensor = parameter.detach().to_local()  # type: ignore[attr-defined]
                there = moves(self.program.home[name_of[node]], spec, self.mesh.ndim)
                copy = move(local, there, spec.local_shape, self.mesh)
                copies[node, spec, summed] = copy.detach().requires_grad_(parameter.requires_grad)
        return copies

    def _collect(self, held: Mapping[Key, torch.Tensor]) -> None:
        """Gradients of working copies become gradients of the parameters."""
        gradients = [(key, copy.grad) for key, copy in held.items() if copy.grad is not None]
        homes = [self.program.home[self.graph.held_of_node[node]] for (node, _, _), _ in gradients]
        steps = [
            moves(spec.with_partial(summed), home, self.mesh.ndim)
            for ((_, spec, summed), _), home in zip(gradients, homes, strict=True)
        ]
        moved = summed_together([grad for _, grad in gradients], steps, [home.local_shape for home in homes], self.mesh)
        sums: dict[str, torch.Tensor] = {}
        for ((node, _, _), _), local in zip(gradients, moved, strict=True):
            name = self.graph.held_of_node[node]
            sums[name] = sums[name] + local if name in sums else local
        for name, local in sums.items():
            parameter = self.parameters[name]
            gradient = self._spread(local.to(parameter.dtype).contiguous(), self.program.home[name])
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _needed(steps: Sequence[Step], results: Sequence[str]) -> list[Step]:
    """The steps that results, or values that are written to, depend on."""
    needed = set(results)
    chosen = []
    for step in reversed(steps):
        writes = bool(step.writes)
        if writes or step.node.name in needed:
            needed |= {node.name for node in step.node.all_input_nodes}
            chosen.append(step)
    return chosen[::-1]


def _spec_of(tensor: DTensor) -> Spec:
    """The layout of a DTensor whose shards are even."""
    mesh = tensor.device_mesh
    dims = []
    for dim, size in enumerate(tensor.shape):
        axes = [axis for axis, placement in enumerate(tensor.placements) if placement.is_shard(dim)]
        rest = size
        for axis in axes:
            rest //= mesh.size(axis)
        dims.append(tuple([*((mesh.size(axis), axis) for axis in axes), *([(rest, WHOLE)] if rest > 1 else [])]))
    return Spec(tuple(dims))


def why_not(plan: PlacementPlan, graph: ForwardGraph, processes: int) -> str | None:
    """Why the sharded engine cannot run a plan with so many processes; None when it can.

    Args:
        plan: With shards.
        graph: The forward of its model for the inputs that it was made for.
        processes: Number of processes of the job.
    """
    if not plan.shards:
        return "the plan cuts no op; the stage-graph engine runs it"
    for what, given in (
        ("replicas", plan.replicas is not None),
        ("recompute", bool(plan.recompute)),
        ("optimizer_sharding", plan.optimizer_sharding),
        (f"schedule {plan.schedule!r}", plan.schedule != LIST),
        ("stage_of_group", plan.stage_of_group is not None),
    ):
        if given:
            return f"shards and {what} exclude each other; leave one of them out"
    needed = devices_of(plan)
    if processes != needed:
        return f"the plan uses {needed} devices, but there are {processes} processes; start {needed}"
    unknown = why_not_shards(plan.shards, graph, spaces_of(graph))
    if unknown is not None:
        return unknown
    try:
        factor_mesh(plan.shards, processes)
    except InputError as error:
        return str(error).removeprefix("distribute: ")
    return None


__all__ = ["make", "why_not"]


def make(setup: Setup) -> ChosenEngine:
    """The engine of a plan with shards.

    Every process must have been given the same model values: each keeps its pieces without asking the others.
    """
    plan, ranks, source = setup.plan, setup.ranks, setup.graph
    state: dict[str, torch.Tensor] = {}
    for name, tensor in [*setup.model.named_parameters(), *setup.model.named_buffers()]:
        if isinstance(tensor, nn.Parameter):
            state[name] = tensor  # cut where it is, so that the device never holds it whole
        else:
            state[name] = torch.empty_like(tensor, device=ranks.device) if tensor.is_meta else tensor.detach().to(ranks.device)
    first = ShardedEngine(setup.graph, plan, state, ranks.device)
    parameters, buffers = dict(first.parameters), dict(first.buffers)
    for name, tensor in state.items():
        if isinstance(tensor, nn.Parameter) and name not in parameters:  # nobody reads it
            value = torch.empty_like(tensor, device=ranks.device) if tensor.is_meta else tensor.detach().to(ranks.device)
            parameters[name] = nn.Parameter(value, tensor.requires_grad)
        elif not isinstance(tensor, nn.Parameter):
            buffers.setdefault(name, tensor)
    everywhere = tuple(range(ranks.world))

    def engine_for(graph: ForwardGraph) -> Engine:
        if graph is source:
            return first
        return ShardedEngine(graph, plan, {**parameters, **buffers}, ranks.device, first.mesh)

    return ChosenEngine("sharded", Own(parameters, buffers, dict.fromkeys(state, everywhere)), engine_for)
