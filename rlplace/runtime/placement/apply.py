"""`rlplace.apply`: a module that runs a plan in one process, forward and backward ops on several devices."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import once_differentiable
from torch.nn.parameter import is_lazy

from rlplace.errors import InputError, MissingError, show, unknown_name
from rlplace.model.capture.fake import tensors_in
from rlplace.model.torch_adapter import pytree
from rlplace.plan.device_map import closest, device_of_loss, device_of_op, most_below, plan_groups, round_to_modules
from rlplace.plan.plan import PlacementPlan, require_placement
from rlplace.runtime.base.steps import micro_batch
from rlplace.runtime.placement.assign import JointPlacement, check_same_ops, place_joint_graph, planned_devices
from rlplace.runtime.placement.emit import Emitter, Program
from rlplace.runtime.placement.forward_graph import ForwardGraph, Graphs, flat_inputs
from rlplace.runtime.placement.joint_graph import base_of, joint_graph, results_of

Key = tuple[int, int]
"""Seed and step of random ops."""


@dataclass
class ApplyReport:
    """The devices on which a module runs its plan.

    Attributes:
        devices: The devices, by the plan's device index.
        device_of_module: Device index by path, where most ops of a module run.
        parameter_bytes: Bytes of parameters and buffers on each device.
        ops: Ops that the plan places.
        copies_per_forward: Copies between devices in one forward pass.
        loss_device: Where the plan puts the loss function it was captured with; None when the module computes its own loss.
        notes: Approximations, in sentences.
    """

    devices: tuple[str, ...]
    device_of_module: Mapping[str, int]
    parameter_bytes: tuple[int, ...]
    ops: int
    copies_per_forward: int
    loss_device: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        copies = f"{self.copies_per_forward} copies between devices per forward pass"
        return "\n".join([f"{self.ops} ops on {', '.join(self.devices)}, {copies}", *self.notes])


def apply(
    model: nn.Module, plan: PlacementPlan, devices: Sequence[torch.device | str], *, example_inputs: Any = None
) -> nn.Module:
    """Makes `model` train over several devices as `plan` says.

    The module is changed in place and returned: its parameters and buffers move to their devices (the `Parameter` objects stay
    the same), and its forward is replaced. ``state_dict``, parameter names, ties, ``train()`` and ``eval()`` are as before.
    Inputs may be on any device; outputs, the loss among them, stay on the device that made them. ``.report`` of the result is
    an `ApplyReport`. Build the optimizer from the result.

    Args:
        model: A module with real weights.
        plan: A plan for it, with groups of ops, for one process: one micro-batch.
        devices: One per device of the plan, for example ``["cuda:0", "cuda:1"]``.
        example_inputs: Inputs of one forward pass, as it was captured: a tuple of positional arguments or a dict of keyword
            arguments. Default: inputs like those in the plan's `source`.

    Returns:
        `model`.

    Raises:
        InputError: The plan cannot run here, with the reason; `model` is unchanged.
        MissingError: This machine lacks one of the devices.
    """
    if not isinstance(plan, PlacementPlan):
        raise InputError(f"apply: plan is a {type(plan).__name__}, not a PlacementPlan; rlplace.place makes one")
    instead = "one process for each of its devices runs it: rlplace.distribute, or 'rlplace run', under torchrun"
    require_placement(plan, "apply: plan", instead)
    planned_devices(plan)
    _check_model(model)
    _check_module_names(model, plan)
    on = _check_devices(plan, devices)
    forward = PlacedForward(model, plan, on, *micro_batch(plan, example_inputs))
    planned = device_of_op(plan)
    below = most_below((op.rpartition("/")[0], device) for op, device in planned.items())
    for name in tensors_in(model):
        forward.owners.setdefault(name, closest(below, name.rpartition(".")[0]) or 0)
    _move_tensors(model, {name: on[device] for name, device in forward.owners.items()})
    model.forward = forward  # type: ignore[method-assign]
    _refuse_deepcopy(model)
    first_path = {module: path for path, module in model.named_modules()}
    rounding = round_to_modules(plan, {path: first_path[m] for path, m in model.named_modules(remove_duplicate=False)})
    loss, tensors = device_of_loss(plan), tensors_in(model).values()
    followed = plan.order is None and plan.priority is None
    vars(model)["report"] = ApplyReport(
        devices=tuple(str(device) for device in on),
        device_of_module=rounding.device_of_module,
        parameter_bytes=tuple(sum(tensor.nbytes for tensor in tensors if tensor.device == device) for device in on),
        ops=len(planned),
        copies_per_forward=forward.copies,
        loss_device=None if loss is None else str(on[loss]),
        notes=() if followed else ("the plan's order of ops is not followed: one process issues ops in program order",),
    )
    return model


def _check_model(model: nn.Module) -> None:
    """Refuses modules without real weights, and modules that already run a plan."""
    if not isinstance(model, nn.Module):
        raise InputError(f"apply: model is a {type(model).__name__}, not a torch.nn.Module")
    if "report" in vars(model) and type(vars(model)["report"]).__name__ == "ApplyReport":
        raise InputError("apply: this module already runs a plan; build it again and apply the other plan to that")
    if "forward" in vars(model):
        raise InputError("apply: the module's forward was replaced on the instance, and a plan would replace it again")
    if hasattr(model, "report"):
        raise InputError("apply: the module has an attribute 'report', which apply wants to set; rename it")
    for name, tensor in tensors_in(model).items():
        if is_lazy(tensor):
            raise InputError(f"apply: {name!r} is not initialised yet; run the module once on a small batch first")
        if tensor.is_meta:
            raise InputError(
                f"apply: {name!r} is on the meta device and has no values; build or load the module with real weights"
            )


def _check_module_names(model: nn.Module, plan: PlacementPlan) -> None:
    """Refuses a plan whose modules the model lacks."""
    known = {path for path, _ in model.named_modules(remove_duplicate=False)}
    named = [name.rpartition("/")[0] for name in device_of_op(plan)]
    for group, _ in plan_groups(plan):
        named += group.get("modules", ())
    for path in named:
        if path not in known:
            error = unknown_name("module", path, known)
            raise InputError(f"plan: it is for another model: {type(model).__name__} has no such module ({error})")


def _check_devices(plan: PlacementPlan, devices: Sequence[Any]) -> tuple[torch.device, ...]:
    """Returns the devices as tensors name them, one per device of the plan."""
    if isinstance(devices, (str, torch.device)) or not isinstance(devices, Sequence):
        raise InputError("apply: devices must be a list, one entry per device of the plan")
    if plan.device_of_group.min(initial=0) < 0:
        raise InputError("plan: device_of_group holds a negative device")
    needed = int(plan.device_of_group.max(initial=0)) + 1
    if len(devices) < needed:
        raise InputError(f"apply: the plan uses {needed} devices, {len(devices)} given; name one per device of the plan")
    found = []
    for item in devices:
        try:
            device = torch.device(item)
        except (RuntimeError, TypeError):
            raise InputError(f"apply: {show(item)} is not a device; for example 'cuda:0' or 'cpu'") from None
        try:
            found.append(torch.empty(0, device=device).device)  # "cuda" becomes "cuda:0"
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = (str(error).splitlines() or ["no reason given"])[0]
            raise MissingError(f"apply: device {str(device)!r} is not usable on this machine: {reason}") from None
    return tuple(found)


def _move_tensors(model: nn.Module, device_of: Mapping[str, torch.device]) -> None:
    """Moves parameters and buffers in place, by their first names.

    A `Parameter` stays the same object, so ties and existing references (an optimizer, ``nn.LSTM``'s weight list) survive.
    """
    held = tensors_in(model)
    gradients = [(name, tensor.grad) for name, tensor in held.items() if isinstance(tensor, nn.Parameter)]
    there = {id(tensor): device_of[name] for name, tensor in (*held.items(), *gradients)}
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        device = there.get(id(tensor))
        if device is None:  # a gradient that was moved with another name of its parameter
            return tensor
        return tensor.to(device) if isinstance(tensor, nn.Parameter) else moved.setdefault(id(tensor), tensor.to(device))

    for module in model.modules():
        module._apply(move, recurse=False)


def _refuse_deepcopy(module: nn.Module) -> None:
    """Makes ``copy.deepcopy(module)`` an error: the copy would share the original's forward, and run its weights."""

    def refuse(memo: Any) -> Any:
        raise InputError(f"deepcopy: this {type(module).__name__} runs a plan and cannot be copied; copy it before apply")

    vars(module)["__deepcopy__"] = refuse


@dataclass(frozen=True, eq=False)
class TwoParts:
    """A joint graph in two parts."""

    placement: JointPlacement  # of the whole graph
    # called with the held tensors and the flat tensor inputs; returns the outputs by number, the new values of written tensors
    # by name, and `saved`
    forward: Program
    saved: Sequence[tuple[fx.Node, int]]  # values that the backward part reads, each with its device
    # called with them and the tangents; returns gradients of held tensors by name, each on its owner's device, and of inputs by
    # number
    backward: Program
    constants: Mapping[str, torch.Tensor]  # held tensors that never change, each on its device, by name


def two_parts(placement: JointPlacement, devices: Sequence[torch.device]) -> TwoParts:
    """Splits a joint graph into forward and backward and puts each node on its device, one per device of the plan."""
    joint, on = placement.joint, dict(enumerate(devices))
    order = [node for node in placement.device_of if node.target is not operator.getitem]
    first = [node for node in order if node in placement.forward]
    second = [node for node in order if node not in placement.forward]
    late = {*joint.tangents.values(), *(result for node in second for result in results_of(node))}
    home = {name: placement.owners[name][0] for name in joint.held}
    reads = [(base, placement.device_of[node]) for node in second for base in placement.reads[node]]
    reads += [(base_of(part), device) for part, device in placement.summands]
    saved = list(dict.fromkeys((base, device) for base, device in reads if base not in late))

    given: list[tuple[fx.Node, int | None]] = [(node, home[name]) for name, node in joint.held.items()]
    given += [(node, None) for node in joint.inputs if node is not None]
    forward = Emitter(placement, on, first, given, [*saved, *placement.written])
    results = {number: forward.anywhere(item) for number, item in enumerate(joint.outputs)}
    results |= {name: forward.at(node, home[name]) for name, node in joint.writes.items()}  # type: ignore[misc]
    results |= {at: forward.at(*at) for at in saved}  # type: ignore[misc]
    tangents = [(node, None) for node in joint.tangents.values()]
    backward = Emitter(placement, on, second, [*saved, *tangents], placement.summands)
    of_inputs = {number: backward.anywhere(node) for number, node in joint.input_gradients.items()}
    return TwoParts(
        placement=placement,
        forward=forward.program(results),
        saved=saved,
        backward=backward.program({**backward.gradients(), **of_inputs}),
        constants={name: value.to(devices[home[name]]) for name, value in joint.constants.items()},
    )


class PlacedForward:
    """The forward of a module whose ops run on the devices of a plan; ``loss.backward()`` runs the backward ops.

    A graph is traced for one signature: the shapes and structure of the inputs, which submodules are in training mode, and
    autocast. A new signature (a smaller last batch, ``eval()``) is traced when it first comes, on fake tensors, and kept. All
    graphs read the same parameters and buffers, which stay in the module.

    Attributes:
        model: The module.
        owners: Device of the plan by first name, for every parameter and buffer that a graph reads.
        copies: Copies between devices in the forward of the example inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: PlacementPlan,
        devices: Sequence[torch.device],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Traces the forward for example inputs; refuses one that cannot be exported, or that was not planned."""
        self.__signature__ = inspect.signature(model.forward)
        self.model, self._plan, self._devices = model, plan, devices
        self._graphs = Graphs()
        self._parts: dict[Hashable, TwoParts] = {}
        self._guess: dict[ForwardGraph, tuple[int, ...]] = {}
        self.owners: dict[str, int] = {}
        source = self._trace(args, kwargs)
        check_same_ops(source, set(device_of_op(plan)))
        self.copies = self.parts(source, self._values(source, args, kwargs), self.guess(source)).forward.copies

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        source = self._trace(args, kwargs)
        names, values = _names(source), self._values(source, args, kwargs)
        training = torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)
        parts = self.parts(source, values, self.guess(source) if training else ())
        joint = parts.placement.joint
        # Running statistics change before backward reads them.
        before = [v.detach().clone() if n in joint.writes else v for n, v in zip_longest(names, values)]
        key = int(torch.randint(1 << 62, ()).item()), 0
        if training and joint.differentiable:
            made = _PlacedStep.apply(self, source, parts, key, *before)
        else:
            made = run_forward(source, parts, key, before).values()
        results = dict(zip(parts.forward.names, made, strict=False))
        with torch.no_grad():
            for name in joint.writes:
                values[names.index(name)].copy_(results[name])
        flat = [results.get(number, item) for number, item in enumerate(joint.outputs)]
        return pytree.tree_unflatten(flat[: source.out_spec.num_leaves], source.out_spec)  # without an added loss

    def guess(self, source: ForwardGraph, outputs: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Returns the numbers of the outputs that are expected to get a gradient.

        Only backward knows them. The forward prepares for those that got one the last time, at first for the loss; if others
        get one, it runs again, with the same random numbers.

        Args:
            source: The forward that was traced.
            outputs: Those that got one now.
        """
        if outputs is not None:
            self._guess[source] = outputs
        return self._guess.setdefault(source, tuple(range(len(source.outputs))) if source.loss is None else (source.loss,))

    def parts(self, source: ForwardGraph, values: Sequence[Any], outputs: tuple[int, ...]) -> TwoParts:
        """Returns the graph that differentiates some outputs, for parameters and buffers, then flat inputs, as they are now."""
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        key = source, outputs, tuple((tensor.stride(), bool(outputs) and tensor.requires_grad) for tensor in tensors)
        if key not in self._parts:
            names = _names(source)
            held = dict(zip(names, values, strict=False))
            kind = next((device.type for device in self._devices if device.type != "cpu"), "cpu")
            joint = joint_graph(source, held, values[len(names) :], differentiate=outputs, kind=kind)
            placement = place_joint_graph(joint, self._plan, {name: (at,) for name, at in self.owners.items()})
            for name in names:
                self.owners.setdefault(name, placement.owners[name][0])
            self._parts[key] = two_parts(placement, self._devices)
        return self._parts[key]

    def _trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ForwardGraph:
        own = vars(self.model)  # export sees the class's own forward, and copies the module
        hidden: dict[str, Any] = {key: own.pop(key) for key in ("forward", "__deepcopy__") if key in own}
        try:
            return self._graphs(self.model, args, kwargs, None, None)
        finally:
            own.update(hidden)

    def _values(self, source: ForwardGraph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Returns the parameters and buffers that a graph reads, then the flat inputs."""
        return [*(operator.attrgetter(name)(self.model) for name in _names(source)), *flat_inputs(args, kwargs)]


def _names(source: ForwardGraph) -> list[str]:
    """Returns the names of the parameters and buffers that a graph reads."""
    return [name for name in source.held if name not in source.constants]


def run_forward(source: ForwardGraph, parts: TwoParts, key: Key, values: Sequence[Any]) -> dict[Any, torch.Tensor]:
    """Runs the forward part."""
    names, joint = _names(source), parts.placement.joint
    held = {**dict(zip(names, values, strict=False)), **parts.constants}
    inputs = [value for node, value in zip(joint.inputs, values[len(names) :], strict=True) if node is not None]
    return parts.forward(key, *(value.detach() for value in (*(held[name] for name in joint.held), *inputs)))


class _PlacedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: PlacedForward, source: ForwardGraph, parts: TwoParts, key: Key, *values: Any) -> Any:
        results = run_forward(source, parts, key, values)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(results.pop(at) for at in parts.saved))
        ctx.of, ctx.source, ctx.parts, ctx.key, ctx.values, ctx.names = of, source, parts, key, values, tuple(results)
        differentiable = parts.placement.joint.differentiable
        ctx.mark_non_differentiable(*(value for name, value in results.items() if name not in differentiable))
        return tuple(results.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        source, parts, saved = ctx.source, ctx.parts, ctx.saved_tensors
        incoming = {name: gradient for name, gradient in zip(ctx.names, gradients, strict=True) if gradient is not None}
        if tuple(incoming) != tuple(parts.placement.joint.tangents):
            parts = ctx.of.parts(source, ctx.values, ctx.of.guess(source, tuple(incoming)))
            again = run_forward(source, parts, ctx.key, ctx.values)
            saved = [again[at] for at in parts.saved]
        found = parts.backward(ctx.key, *saved, *(incoming[number] for number in parts.placement.joint.tangents))
        names = _names(source)
        leaves = enumerate(ctx.values[len(names) :])
        of_leaves = [found[number].to(leaf.device) if number in found else None for number, leaf in leaves]
        return None, None, None, None, *(found.get(name) for name in names), *of_leaves
