"""Runs plans that cut ops into parts: every device runs the same program on its own pieces of all tensors.

Parameters are DTensors that hold this device's piece; so are their gradients and the state of an optimizer made over them.
Every change of layout is a redistribution of a DTensor. `rlplace.runtime.distributed.sharded.program` says how each op is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime import aliases
from rlplace.runtime.distributed.engine import Engine, Microbatch
from rlplace.runtime.distributed.events import Recorder
from rlplace.runtime.distributed.forward_graph import ForwardGraph
from rlplace.runtime.distributed.randomness import random_key, seeded
from rlplace.runtime.distributed.sharded.exchange import Meshes, exchange, exchanged, move, placements
from rlplace.runtime.distributed.sharded.local_ops import bound, dropped_attention
from rlplace.runtime.distributed.sharded.loss_graph import open_loss
from rlplace.runtime.distributed.sharded.mesh import factor_mesh
from rlplace.runtime.distributed.sharded.program import Demand, Step, make_program
from rlplace.runtime.distributed.sharded.spec import WHOLE, Spec, moves, whole

Key = tuple[str, Spec, frozenset[int]]


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
            device: Of this process.
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
        placeholders = [node.name for node in graph.module.graph.nodes if node.op == "placeholder"]
        self._held_of_node = dict(zip(placeholders, graph.held, strict=False))
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        for name in graph.held:
            tensor = state[name] if name in state else graph.constants[name]
            if isinstance(tensor, nn.Parameter):
                self.parameters[name] = tensor if isinstance(tensor, DTensor) else self._cut(tensor, self.program.home[name])
            else:
                self.buffers[name] = tensor.to(device)
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
        double = self.graph.layout[self.graph.loss].dtype == torch.float64
        total = torch.zeros((), device=self.device, dtype=torch.float64 if double else torch.float32)
        for microbatch in microbatches:
            with random_key(seed, step, microbatch.number):
                with self.recorder.interval("forward", 0, microbatch.number), torch.enable_grad():
                    values = _Values(self, held, microbatch.leaves)
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
        found = []
        with torch.no_grad():
            held = self._working_copies(self._output_steps)
            for microbatch in microbatches:
                with random_key(0, 0, microbatch.number):
                    values = _Values(self, held, microbatch.leaves)
                    values.run(self._output_steps)
                    names = [*self.graph.outputs, *([self.graph.loss] if self._last_loss else [])]
                    found.append([values.whole(name) if name in self.program.specs else name for name in names])
        return found

    def _cut(self, parameter: nn.Parameter, spec: Spec) -> nn.Parameter:
        """A parameter as a DTensor with this device's piece of its values."""
        with torch.no_grad():
            values = parameter.detach().to(self.device)
            local = move(values, moves(whole(spec.shape), spec, self.mesh.ndim), spec.local_shape, self.mesh)
            local = local.clone(memory_format=torch.contiguous_format)
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
        name_of = self._held_of_node
        wanted: dict[Key, None] = {}
        for step in steps:
            leaves = _leaves(step.node)
            wanted |= dict.fromkeys((leaves[position].name, *demand) for position, demand in step.demands.items())
        for node in self.graph.outputs:
            if node in name_of:
                wanted[node, whole(self.program.specs[node].shape), frozenset()] = None
        found: dict[Key, torch.Tensor] = {}
        for node, spec, summed in wanted:
            parameter = self.parameters.get(name_of.get(node, ""))
            if parameter is not None:
                local: torch.Tensor = parameter.detach().to_local()  # type: ignore[attr-defined]
                there = moves(self.program.home[name_of[node]], spec, self.mesh.ndim)
                copy = move(local, there, spec.local_shape, self.mesh)
                found[node, spec, summed] = copy.detach().requires_grad_(parameter.requires_grad)
        return found

    def _collect(self, held: Mapping[Key, torch.Tensor]) -> None:
        """Gradients of working copies become gradients of the parameters."""
        name_of = self._held_of_node
        sums: dict[str, torch.Tensor] = {}
        for (node, spec, summed), copy in held.items():
            if copy.grad is not None:
                name = name_of[node]
                home = self.program.home[name]
                back = moves(spec.with_partial(summed), home, self.mesh.ndim)
                local = move(copy.grad, back, home.local_shape, self.mesh)
                sums[name] = sums[name] + local if name in sums else local
        for name, local in sums.items():
            parameter = self.parameters[name]
            gradient = self._spread(local.to(parameter.dtype).contiguous(), self.program.home[name])
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class _Values:
    """The values of one pass over the program on this device."""

    def __init__(self, engine: ShardedEngine, held: Mapping[Key, torch.Tensor], leaves: Sequence[Any]) -> None:
        self.engine, self.mesh, self.program = engine, engine.mesh, engine.program
        self.values: dict[str, Any] = {}
        self.read_as: dict[str, dict[Demand, torch.Tensor]] = {}
        graph = engine.graph
        for node, name in engine._held_of_node.items():
            if name in engine.buffers:
                self.values[node] = engine.buffers[name]
        for (node, spec, summed), copy in held.items():
            self.read_as.setdefault(node, {})[spec, summed] = copy
        for node, leaf in zip(graph.inputs, leaves, strict=True):
            self.values[node] = leaf.to(engine.device) if isinstance(leaf, torch.Tensor) else leaf

    def run(self, steps: Sequence[Step]) -> None:
        """Runs steps in order; values are dropped after their last reader."""
        last: dict[str, int] = {}
        for index, step in enumerate(steps):
            for other in step.node.all_input_nodes:
                last[other.name] = index
        keep = {str(name) for name in self.engine.graph.outputs} | {str(self.engine.graph.loss)}
        for index, step in enumerate(steps):
            self.values[step.node.name] = self._run(step)
            for other in step.writes:
                self._forget(other)
            for other in step.node.all_input_nodes:
                if last[other.name] == index and other.name not in keep and other.op != "placeholder":
                    self.values.pop(other.name, None)
                    self.read_as.pop(other.name, None)

    def whole(self, name: str) -> Any:
        """A value as the unplaced model has it."""
        return pytree.tree_map(lambda spec: self.read(name, whole(spec.shape)), self.program.specs[name])

    def read(self, name: str, spec: Spec, summed: frozenset[int] = frozenset()) -> torch.Tensor:
        """A value in a given layout; several readers of one layout share its communication."""
        known = self.read_as.setdefault(name, {})
        if (spec, summed) not in known:
            local: torch.Tensor = self.values[name]
            found = exchange(self.program.specs[name], spec, summed, self.mesh.ndim)
            known[spec, summed] = local if found is None else exchanged(local, found, self.mesh)
        return known[spec, summed]

    def _forget(self, node: fx.Node) -> None:
        family = self.program.family.get(node)
        for other, number in self.program.family.items():
            if number == family:
                self.read_as.pop(other.name, None)

    def _run(self, step: Step) -> Any:
        node = step.node
        if node.op == "get_attr":
            return aliases.get_attr(self.engine.graph.module, str(node.target))
        if getattr(node.target, "__name__", "") == "getitem":
            return self.values[node.args[0].name][node.args[1]]  # type: ignore[union-attr, index]
        target: Any = node.target
        args: Any = node.args
        if target is seeded and step.way == "random":
            target, args = args[0], args[2:]
        leaves, tree = pytree.tree_flatten((args, node.kwargs))
        offset = len(leaves) - len(_leaves(node))  # the stream of a random op comes first
        filled = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, fx.Node):
                demand = step.demands.get(position - offset)
                filled.append(self.values[leaf.name] if demand is None else self.read(leaf.name, *demand))
            else:
                filled.append(self.engine.device if isinstance(leaf, torch.device) else leaf)
        if step.call is not None:
            return step.call(filled[0])
        local_args, local_kwargs = pytree.tree_unflatten(filled, tree)
        if step.way == "random":
            return self._draw(step, target, bound(target, local_args, local_kwargs))
        if step.local is not None and step.cut is not None:
            return step.local.run(target, step.cut, self.mesh, bound(target, local_args, local_kwargs))
        return target(*local_args, **local_kwargs)  # type: ignore[operator]

    def _draw(self, step: Step, op: Any, args: Sequence[Any]) -> torch.Tensor:
        """A random op on pieces: the factors of the whole op are drawn, and this device's taken."""
        cut, number = step.cut, step.node.args[1]
        assert cut is not None
        source = step.node.args[2]
        assert isinstance(source, fx.Node)
        shape = self.program.specs[source.name].shape
        if "attention" in str(op):
            key: Any = step.node.args[3]
            keys = self.program.specs[key.name].shape[-2]
            ones = torch.ones((*shape[:-1], keys), dtype=args[0].dtype, device=args[0].device)
            kept = seeded(torch.ops.aten.dropout.default, number, ones, args[4], True)  # type: ignore[arg-type]
            names = [*(cut.inputs[0] or ())[:3], ""]
            return dropped_attention(cut, self.mesh, args, cut.own(kept, names, self.mesh))
        ones = torch.ones(shape, dtype=args[0].dtype, device=args[0].device)
        kept = seeded(op, number, ones, *args[1:])  # type: ignore[arg-type]
        return args[0] * cut.own(kept, cut.inputs[0] or (), self.mesh)


def _leaves(node: fx.Node) -> list[Any]:
    """The flat arguments of a node's op, without those of the stream that a random op draws from."""
    args = node.args[2:] if node.target is seeded else node.args
    return pytree.tree_leaves((args, node.kwargs))


def _needed(steps: Sequence[Step], results: Sequence[str]) -> list[Step]:
    """The steps that results, or values that are written to, depend on."""
    needed = set(results)
    found = []
    for step in reversed(steps):
        writes = bool(step.writes)
        if writes or step.node.name in needed:
            needed |= {node.name for node in step.node.all_input_nodes}
            found.append(step)
    return found[::-1]


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
