"""The forward of a model as one graph, from which the joint graph is traced.

It is the exported graph whose op names a plan uses, with three changes. Parameters, buffers and constants are placeholders, so
that a process holds only those it needs. A loss function outside the model is a node of its own. A random op draws from a
stream of its own, seeded by the step and the number of the op in the model, instead of its device's stream, which depends on
the ops that ran there before. So every plan of a model, one device included, draws the same dropout masks in the same step (on
the same kind of device: CPU and CUDA generators differ).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, zip_longest
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind

from rlplace.errors import InputError
from rlplace.model.capture.export import (
    OwnBackwardError,
    RefuseLosses,
    export_training_graph,
    is_check,
    is_random,
    refuse_functions,
)
from rlplace.model.capture.fake import (
    any_dtype_grouped_mm,
    fake_copy,
    fake_inputs,
    first_names,
    new_fake_mode,
    replaced_forward,
    tensors_in,
)
from rlplace.model.capture.outputs import add_losses, is_losses, own_loss
from rlplace.model.torch_adapter import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, pytree
from rlplace.plan.device_map import LOSS_OP
from rlplace.runtime.base.batches import autocast_state, signature_of
from rlplace.runtime.base.ranks import Ranks, bytes_of, gather_objects
from rlplace.runtime.base.steps import Loss

_key: tuple[int, int] | None = None  # seed and step of the present pass in this process

_DEVICE = re.compile(r"\b([a-z]+):\d+\b")
"""A device, of which only the kind is compared: every process traces for its own."""


@contextlib.contextmanager
def random_key(seed: int, step: int) -> Iterator[None]:
    """Sets the pass over the model that random ops inside belong to, by the run's seed and the training step."""
    global _key
    before, _key = _key, (seed, step)
    try:
        yield
    finally:
        _key = before


def seeded(op: Callable[..., Any], number: int, *args: Any, **kwargs: Any) -> Any:
    """Calls a random op with its own stream; outside of `random_key` it continues the device's stream as always."""
    if _key is None:
        return op(*args, **kwargs)
    schema = getattr(op, "_schema", None)
    if schema is None or not schema.is_mutable:
        # Numbers are drawn in the order of memory, which must not depend on the way that a tensor came here.
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.contiguous, (args, kwargs))
    device = next((leaf.device for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
    device = kwargs.get("device") or device or torch.device("cpu")
    digest = hashlib.blake2b(repr((*_key, number)).encode(), digest_size=8).digest()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        # torch.manual_seed would seed the other devices, too, whose own streams are not restored here.
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(int.from_bytes(digest) >> 1)
        else:
            torch.default_generator.manual_seed(int.from_bytes(digest) >> 1)
        return op(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class ForwardGraph:
    """The forward and loss of a model for one signature of inputs."""

    # its graph: placeholders for `held` in order, then one for every flat input; returns one flat tuple, with the value of a
    # loss function outside the model at its end
    module: fx.GraphModule
    held: tuple[str, ...]  # first names of the parameters, buffers and constants that the forward reads
    outputs: tuple[Any, ...]  # per item of that tuple the node that makes it, or a value that is no node
    out_spec: Any  # pytree spec of the model's output
    loss: int | None  # number of the output that is the scalar loss, None when there is none (a model that is only evaluated)
    # op name (``module.path/node``, as plans have it) by node name, for nodes that are ops, in execution order
    op_of_node: Mapping[str, str]
    examples: tuple[Any, ...]  # arguments of the placeholders when it was exported, without values
    constants: Mapping[str, torch.Tensor]  # values of the held tensors that are no parameters or buffers of the model, by name
    joint: dict[str, Any] = field(default_factory=dict)  # its joint graphs by kind of device, where they were traced already


def forward_graph(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, loss: Loss | None = None, target: Any = None
) -> ForwardGraph:
    """Exports the forward of a model in its present mode; nothing is allocated or run.

    Args:
        model: Real or meta module. With grad enabled its loss is looked for.
        args: Positional inputs of one micro-batch, real, meta or fake; only shapes and dtypes matter.
        kwargs: Keyword inputs.
        loss: Called with the model's output, and `target` unless that is None; returns a scalar. None: the output's ``loss``
            (attribute or key), its first element, or the output itself, where that is a scalar.
        target: Second argument of `loss`; any nesting of tensors.

    Raises:
        InputError: The model cannot be exported, with the reason.
    """
    mode = new_fake_mode()
    try:
        with torch.enable_grad(), refuse_functions(), warnings.catch_warnings(), torch.autocast("cpu", enabled=False):
            warnings.simplefilter("ignore")
            fake = fake_copy(model, mode)
            fake_args, fake_kwargs = fake_inputs((tuple(args), dict(kwargs)), mode)
            refuse_backward_hooks(model)
            with RefuseLosses():
                traced = export_training_graph(fake, fake_args, fake_kwargs)
    except Exception as error:  # export runs the model's own code, which may raise anything
        reason = (str(error).strip().splitlines() or [""])[0]
        raise InputError(
            f"torch.export fails on {type(model).__name__} with {type(error).__name__}: {reason[:200]}; a placement of ops "
            "needs a model that exports: plan a strategy (rlplace.place(model, batch=...)), which runs the model's own modules"
        ) from error
    graph_module, ops = traced.program.graph_module, dict(traced.op_name_of_node)
    graph = graph_module.graph
    held = _held(traced.program, first_names(model))
    out_spec = traced.program.call_spec.out_spec
    returned: Any = graph.output_node().args[0]
    values = [node.meta.get("val") if isinstance(node, fx.Node) else node for node in returned]
    if loss is None and torch.is_grad_enabled() and is_losses(pytree.tree_unflatten(values, out_spec)):
        loss = add_losses
    loss_node = _add_loss(graph, out_spec, loss, target)
    if loss is not None:
        ops[loss_node.name] = LOSS_OP  # type: ignore[union-attr]
    number = count()
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
        elif node.op == "call_function" and is_random(node):
            node.args, node.target = (node.target, next(number), *node.args), seeded
    output = graph.output_node()
    if loss is not None:
        output.args = ((*output.args[0], loss_node),)  # type: ignore[arg-type, misc]
    outputs: tuple[Any, ...] = tuple(output.args[0])  # type: ignore[arg-type]
    graph.lint()
    graph_module.recompile()
    fakes = tensors_in(fake)
    constants = {name: _constant(name, traced.program.constants[name]) for name in held if name not in fakes}
    examples = (*({**fakes, **constants}[name] for name in held), *fake_inputs(flat_inputs(args, kwargs, target), mode))
    try:
        with mode, any_dtype_grouped_mm(), torch.enable_grad():
            values = fx.Interpreter(graph_module).run(*examples)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InputError(
            f"the forward of {type(model).__name__} depends on values ({str(error).splitlines()[0]}); a placement of ops needs "
            "one graph: plan a strategy, which runs the model's own modules"
        ) from error
    loss_output = None if loss_node is None else outputs.index(loss_node)
    value = None if loss_output is None else values[loss_output]
    trains = isinstance(value, torch.Tensor) and value.requires_grad and value.dim() < 2 and value.numel() == 1
    return ForwardGraph(
        module=graph_module,
        held=tuple(held),
        outputs=outputs,
        out_spec=out_spec,
        loss=loss_output if trains else None,
        op_of_node={node.name: ops[node.name] for node in graph.nodes if node.name in ops},
        examples=examples,
        constants=constants,
    )


def any_value(output: Any, target: Any = None) -> torch.Tensor:
    """Computes a loss for graphs of which only the shape matters: the sum of all floating-point results."""
    floats = [v for v in pytree.tree_leaves(output) if isinstance(v, torch.Tensor) and v.is_floating_point()]
    if not floats:
        raise InputError("distribute: the model returns no floating-point tensor that a loss could read")
    return torch.stack([v.float().sum() for v in floats]).sum()


def refuse_backward_hooks(model: nn.Module) -> None:
    """Raises `OwnBackwardError` where a module has a hook on gradients, or a forward put in from outside."""
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise OwnBackwardError(f"{path or 'the model'} has a backward hook, which an exported graph would lose")
        if replaced_forward(module):
            raise OwnBackwardError(f"the forward of {path or 'the model'} was replaced by a function, which no copy follows")


def _held(program: Any, first_name: Mapping[str, str]) -> list[str]:
    """Makes each parameter, buffer and constant of an exported graph one placeholder; returns the first names of those read."""
    graph, held = program.graph, dict[str, fx.Node]()
    for node in reversed(graph.nodes):
        if is_check(node):
            graph.erase_node(node)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True):
        if spec.kind is not InputKind.USER_INPUT:
            first = held.setdefault(first_name.get(spec.target, spec.target), node) if node.users else None
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
    return list(held)


def _constant(name: str, value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, FakeTensor) and value.constant is not None:
        value = value.constant  # export may keep a small literal as a fake that knows its value
    if isinstance(value, FakeTensor):
        raise InputError(f"distribute: the model keeps a tensor outside its parameters and buffers ({name}); register it")
    return value.detach()


class Graphs:
    """Forward graphs of one model, each traced when it is first needed."""

    def __init__(self) -> None:
        self._made: dict[Hashable, ForwardGraph] = {}

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Loss | None, target: Any
    ) -> ForwardGraph:
        """See `forward_graph`."""
        modes = tuple(module.training for module in model.modules())
        key = (signature_of((args, dict(kwargs), target)), modes, autocast_state(), loss)
        if key not in self._made:
            self._made[key] = forward_graph(model, args, kwargs, loss=loss, target=target)
        return self._made[key]


def flat_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any = None) -> list[Any]:
    """Returns the leaves of a call's arguments, then those of the target, in the order of a graph's input placeholders."""
    leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
    return leaves if target is None else [*leaves, *pytree.tree_leaves(target)]


def _add_loss(graph: fx.Graph, out_spec: Any, loss: Loss | None, target: Any) -> fx.Node | None:
    """Returns the node of the loss; a loss function becomes the last op, with a placeholder for every leaf of the target."""
    output = graph.output_node()
    flat: Sequence[Any] = output.args[0]  # type: ignore[assignment]
    if loss is None:
        values = [node.meta.get("val") if isinstance(node, fx.Node) else node for node in flat]
        candidate = own_loss(pytree.tree_unflatten(values, out_spec))
        return next((n for n, v in zip(flat, values, strict=True) if isinstance(n, fx.Node) and v is candidate), None)
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    leaves, target_spec = pytree.tree_flatten(() if target is None else (target,))
    placeholders = []
    for index in range(len(leaves)):
        with graph.inserting_after(last):
            last = graph.placeholder(f"target_{index}")
        placeholders.append(last)

    def call_loss(*values: Any) -> torch.Tensor:
        targets = pytree.tree_unflatten(list(values[len(flat) :]), target_spec)
        return loss(pytree.tree_unflatten(list(values[: len(flat)]), out_spec), *targets)

    with graph.inserting_before(output):
        node = graph.call_function(call_loss, (*flat, *placeholders))
    return node


def check_same_graph(graph: ForwardGraph, ranks: Ranks) -> None:
    """Compares a graph over all processes, by a message of some 20 bytes a node.

    Every process traces the forward for itself and then runs its part of it. Where a forward depends on the process, by its
    rank, by a random number or by the order of a set, messages have other sizes than their receivers expect, which hangs, or
    silently aborts a process inside its communication library.

    Raises:
        InputError: On every process, with the first node that differs.
    """
    lines = graph_lines(graph)
    traced = gather_objects([hashlib.blake2b(line.encode(), digest_size=7).digest() for line in lines])
    differ = next((number for number, other in enumerate(traced) if other != traced[0]), None)
    if differ is None:
        return
    first = next(number for number, (a, b) in enumerate(zip_longest(traced[0], traced[differ])) if a != b)
    here = lines[first] if first < len(lines) else "nothing more"
    raise InputError(
        f"distribute: ranks 0 and {differ} traced different forwards of the model, from node {first} on (rank "
        f"{ranks.rank} has there: {here[:160]}); a forward must not depend on the rank, on random numbers or the order of sets"
    )


def graph_lines(graph: ForwardGraph) -> list[str]:
    """Returns a line for every node, then one for the rest, alike on all processes that trace the same model."""
    modules = [module for module in graph.module.modules() if isinstance(module, fx.GraphModule)]
    lines = [_DEVICE.sub(r"\1", str(node.format_node())) for module in modules for node in module.graph.nodes]
    rest = (graph.held, str(graph.outputs), str(graph.loss), list(graph.op_of_node.items()))
    values = {name: hashlib.blake2b(bytes_of(value)).hexdigest() for name, value in graph.constants.items()}
    return [*lines, repr(rest), repr(values)]
