"""Runs a module op by op over several devices, from its exported graph.

The graph is exported for one signature: the shapes and structure of the inputs, and which submodules are in training mode. A
new signature (a smaller last batch, ``eval()``) is exported when it first comes, on fake tensors, and kept. All graphs read the
same parameters and buffers, which stay in the module.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.graph.export import TrainingGraph, export_training_graph, refuse_functions
from rlplace.graph.fake import fake_copy, fake_inputs, new_fake_mode
from rlplace.runtime import aliases
from rlplace.runtime.distributed.graph.forward_graph import input_signature
from rlplace.runtime.held import first_names
from rlplace.runtime.place_graph import PlacedGraph, place_graph


class CannotRunError(Exception):
    """Why a module cannot run at op level."""


class OpLevelForward:
    """The forward of a module whose ops run on the devices of a plan.

    Attributes:
        first: The graph placed for the example inputs.
        device_of_held: Device of every parameter and buffer that the first graph reads, by first name.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Sequence[torch.device],
        device_of_op: Mapping[str, int],
        device_of_module: Mapping[str, torch.device],
        inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    ) -> None:
        self.__signature__ = inspect.signature(model.forward)
        self._model = model
        self._devices = devices
        self._device_of_op = device_of_op
        self._device_of_module = device_of_module
        self._first_name = first_names(model)
        self._holder = _holders(model)
        self._modules = list(model.modules())
        self._graphs: dict[Hashable, Runnable] = {}
        self._in_place: dict[str, torch.device] = {}
        key, _ = self._signature(*inputs)
        self.ops = len(device_of_op)
        runnable = self._graphs[key] = self._prepare_first(*inputs)
        self.first = runnable.placed
        known = set(self._holder)
        self.device_of_held = {name: d for name, d in self.first.device_of_held.items() if name in known}

    def _prepare_first(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Runnable:
        """The graph for the example inputs, whose ops must be those of the plan; also sets `ops_moved`."""
        traced = self._export(args, kwargs)
        self._check_plan_matches(traced.op_name_of_node.values())
        runnable = self._place(traced)
        self.ops_moved = sum(
            runnable.placed.device_of_node.get(node) != self._devices[self._device_of_op[op]]
            for node, op in traced.op_name_of_node.items()
        )
        return runnable

    def _prepare(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Runnable:
        """The graph for a further signature."""
        return self._place(self._export(args, kwargs))

    def fix_in_place(self, device_of: Mapping[str, torch.device]) -> None:
        """Tells where parameters and buffers now are; graphs for other signatures take them from there."""
        self._in_place = dict(device_of)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(torch.is_autocast_enabled(kind) for kind in {device.type for device in self._devices} | {"cpu"}):
            raise InputError(
                "a module placed at op level cannot run under autocast; use level='module', or cast the module itself"
            )
        key, leaves = self._signature(args, kwargs)
        runnable = self._graphs.get(key)
        if runnable is None:
            try:
                runnable = self._prepare(args, kwargs)
            except CannotRunError as error:
                raise InputError(f"op level cannot run this call: {error}; use level='module'") from None
            self._graphs[key] = runnable
        held = [self._value(name, runnable) for name in runnable.placed.held]
        flat = runnable.placed.module(*held, *leaves)
        return pytree.tree_unflatten(list(flat), runnable.out_spec)

    def _value(self, name: str, runnable: Runnable) -> torch.Tensor:
        holder = self._holder.get(name)
        return runnable.constants[name] if holder is None else holder[0][holder[1]]

    def _signature(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Hashable, list[Any]]:
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        modes = tuple(module.training for module in self._modules)
        return (input_signature(leaves, strides=True), str(spec), modes), leaves

    def _export(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TrainingGraph:
        mode = new_fake_mode()
        try:
            with without_placed_forward(self._model), torch.enable_grad(), refuse_functions(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = fake_copy(self._model, mode)
                fake_args, fake_kwargs = fake_inputs((tuple(args), dict(kwargs)), mode)
                return export_training_graph(model, fake_args, fake_kwargs)
        except Exception as error:  # export runs the model's own code, which may raise anything
            reason = (str(error).strip().splitlines() or [""])[0]
            raise CannotRunError(f"torch.export fails on it with {type(error).__name__}: {reason[:200]}") from error

    def _check_plan_matches(self, ops: Iterable[str]) -> None:
        exported = set(ops)
        planned = set(self._device_of_op)
        if planned != exported:
            strange, missing = sorted(planned - exported), sorted(exported - planned)
            example = f"the plan names {strange[0]!r}, which it lacks" if strange else f"the plan does not place {missing[0]!r}"
            raise CannotRunError(
                f"its graph for these example inputs is not the one that was planned ({example}; "
                f"{len(strange)} and {len(missing)} such ops); give the inputs and the mode of the capture"
            )

    def _place(self, traced: TrainingGraph) -> Runnable:
        wanted: dict[str, torch.device] = {}
        for node, op in traced.op_name_of_node.items():
            index = self._device_of_op.get(op)
            # Other signatures may have other nodes: those go where their module is.
            module = op.rpartition("/")[0]
            device = self._device_of_module.get(module) if index is None else self._devices[index]
            if device is not None:
                wanted[node] = device
        home = self._device_of_module[""]
        try:
            placed = place_graph(traced.module, wanted, home, self._first_name, self._in_place)
        except InputError as error:
            raise CannotRunError(str(error)) from None
        constants = {}
        for name in placed.held:
            if name not in self._holder:
                value = aliases.get_attr(traced.module, name)
                if isinstance(value, torch._subclasses.FakeTensor):
                    raise CannotRunError(f"the model keeps a tensor outside its parameters and buffers ({name}); register it")
                constants[name] = value.detach().to(placed.device_of_held[name])
        return Runnable(placed, constants, traced.program.call_spec.out_spec)


class Runnable:
    """A placed graph with what a call needs besides its inputs."""

    def __init__(self, placed: PlacedGraph, constants: dict[str, torch.Tensor], out_spec: Any) -> None:
        self.placed = placed
        self.constants = constants
        self.out_spec = out_spec


def _holders(model: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    """The dictionary and key that hold each parameter and buffer, by first name: read anew in every call."""
    holders: dict[str, tuple[dict[str, Any], str]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in first_names(model).values():
        path, _, key = name.rpartition(".")
        module = modules[path]
        holders[name] = (module._parameters if key in module._parameters else module._buffers, key)
    return holders


@contextlib.contextmanager
def without_placed_forward(model: nn.Module) -> Iterator[None]:
    """Lets export see the class's own forward while the placed one is installed."""
    placed = vars(model).get("forward")
    if not isinstance(placed, OpLevelForward):
        yield
        return
    hidden = {key: vars(model).pop(key) for key in ("forward", "__deepcopy__")}
    try:
        yield
    finally:
        vars(model).update(hidden)
