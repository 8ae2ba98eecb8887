"""Export of a module to the graph whose node names carry a plan back to the module.

`capture` exports a fake copy of the model, `apply` exports the real one; both go through `export_training_graph`, so the
same forward gives the same nodes, in the same order, with the same names. The forward op ``encoder.0.linear/linear_3`` of
an op graph (capture method "export") is the node ``linear_3``. Nodes without an op are placeholders, `get_attr`, tuple
indexing and size arithmetic: they do no work and belong wherever their inputs are.

Models that recompute their activations themselves (`torch.utils.checkpoint`).

Their backward runs parts of the forward again. An eager trace shows that: the recomputed ops are work of the backward ops that
need them, and what they make again is not saved in between. `torch.export` does not: it traces through a checkpoint as if it
were not there, with neither the second forward nor the memory it saves. So export has to be refused.

Models that define gradients themselves (`torch.autograd.Function`).

`torch.export` traces through such a function: the graph has the ops of its forward, and a backward of that graph is theirs,
which need not be the function's own. For planning that is near enough; a graph that is to train in place of the model has to be
refused.
"""

from __future__ import annotations

import contextlib
import io
import logging
import operator
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from rlplace.model.capture.caches import cached_functions, empty
from rlplace.model.capture.fake import any_dtype_grouped_mm
from rlplace.model.capture.masks import masks_of_runs
from rlplace.model.capture.outputs import register_dataclasses
from rlplace.model.capture.whole_ops import quick_recurrent_shapes, whole_scans
from rlplace.model.torch_adapter import pytree


class OwnBackwardError(RuntimeError):
    """The forward calls a function with a backward of its own, which an exported graph would lose."""


@contextlib.contextmanager
def refuse_functions() -> Iterator[None]:
    """Raises `OwnBackwardError` when a `torch.autograd.Function` from outside torch is applied inside."""
    original = vars(torch.autograd.Function)["apply"].__func__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            raise OwnBackwardError(f"the model calls {cls.__qualname__}, whose own backward an exported graph would lose")
        return original(cls, *args, **kwargs)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


HOOKS, TOGGLES = "the forward registers a hook on an activation", "the forward changes requires_grad of a parameter"
_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


def loses(function: Any, args: Any, kwargs: Any) -> str | None:
    """Returns what an exported graph would lose of a call in a `TorchFunctionMode`: `HOOKS`, `TOGGLES`, or None."""
    if function is torch.Tensor.requires_grad_ or function == _SET_REQUIRES_GRAD:
        wanted = (*args[1:], *(kwargs or {}).values(), True)[0]
        return TOGGLES if isinstance(args[0], nn.Parameter) and args[0].requires_grad != wanted else None
    hooks = function is torch.Tensor.register_hook and not isinstance(args[0], nn.Parameter)
    return HOOKS if hooks else None


class RefuseLosses(TorchFunctionMode):
    """Mode that raises `OwnBackwardError` for calls that an exported graph would lose."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        changed = loses(function, args, kwargs)
        if changed is not None:
            raise OwnBackwardError(f"{changed}, which an exported graph would lose")
        return function(*args, **(kwargs or {}))


def _muted(record: logging.LogRecord) -> bool:
    return False


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Mutes torch's own log handlers, which print tracebacks of errors that the caller handles; not when TORCH_LOGS is set."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    names = [name for name in list(logging.root.manager.loggerDict) if name == "torch" or name.startswith("torch.")]
    handlers = {handler for name in names for handler in logging.getLogger(name).handlers}
    for handler in handlers:
        handler.addFilter(_muted)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(_muted)


class TransformedError(RuntimeError):
    """The forward calls a function of `torch.func`, whose exported nodes only run as a whole."""


@dataclass(frozen=True, eq=False)
class TrainingGraph:
    """An exported forward.

    Attributes:
        program: The result of `torch.export`: training IR, in-place ops and ties kept.
        module: Its `fx.GraphModule`. It holds the parameters and buffers of the exported module itself (the same tensor
            objects, also when tied) under ``get_attr`` nodes, and is called like that module, with the same argument
            structure.
        op_name_of_node: Node name to op name (``module.path/node``) for every node that is an op, in execution order.
    """

    program: Any
    module: fx.GraphModule
    op_name_of_node: Mapping[str, str]


def export_training_graph(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> TrainingGraph:
    """Exports the forward of a module to training IR without running it.

    Args:
        model: Real, meta or fake module, in the mode (`train()` or `eval()`) that is to be captured.
        args: Example positional inputs.
        kwargs: Example keyword inputs; their order must be the same in every export of the model.

    Returns:
        The graph. Shapes are those of the example inputs.

    Raises:
        RecomputationError: The model checkpoints activations.
        TransformedError: It calls `torch.vmap` or another function of `torch.func`.
    """
    with (
        any_dtype_grouped_mm(),
        quick_recurrent_shapes(),
        whole_scans(),
        masks_of_runs(model, args, kwargs or {}),
        warnings.catch_warnings(),
        contextlib.ExitStack() as end,
    ):
        end.callback(empty, cached_functions(model))
        # nn.LSTM and nn.GRU re-list their own weights while they are traced; export warns about that.
        warnings.filterwarnings("ignore", message="The tensor attribute")
        # It prints the whole graph so far to stderr when a forward depends on tensor values.
        with quiet_logs(), contextlib.redirect_stderr(io.StringIO()), refuse_recomputation():
            with _dataclasses_known(model):
                program = torch.export.export(model, args, dict(kwargs or {}), strict=False)
    _refuse_transforms(program.graph)
    module = program.module(check_guards=False)
    names = {node.name: op_name(module_path(node), node.name) for node in module.graph.nodes if is_op(node)}
    return TrainingGraph(program, module, names)


@contextlib.contextmanager
def _dataclasses_known(model: nn.Module) -> Iterator[None]:
    """Registers the dataclasses that a forward returns, before export takes its output apart."""
    hook = model.register_forward_hook(lambda module, args, output: register_dataclasses(output))
    try:
        yield
    finally:
        hook.remove()


def _refuse_transforms(graph: fx.Graph) -> None:
    """Raises `TransformedError` where `torch.func` transforms part of a graph, whose values are then no plain tensors."""
    for node in graph.nodes:
        if node.op == "call_function" and str(getattr(node.target, "__module__", "")).startswith("torch._functorch"):
            raise TransformedError(
                f"the forward calls torch.vmap or another function of torch.func ({node.target.__name__}), which an exported "
                "graph cannot split into ops; use method 'dispatch'"
            )


def flatten_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the leaves of call arguments in placeholder order."""
    return pytree.tree_flatten((tuple(args), dict(kwargs)))[0]


def op_name(module: str, node: str) -> str:
    """Returns name of the forward op of a node: ``module.path/node``, or the bare node in the root module."""
    return f"{module}/{node}" if module else node


def module_path(node: fx.Node) -> str:
    """Returns path of the innermost module whose forward made the node, "" for the root."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    # Repeated calls of one module are numbered "@1", "@2"; non-strict export prefixes "L['self']" in some versions.
    path = path.partition("@")[0]
    for prefix in ("L['self'].", "L['self']", "L__self___"):
        path = path.removeprefix(prefix)
    return path


def is_op(node: fx.Node) -> bool:
    """Returns whether the node is a call that yields tensors; indexing a tuple and arithmetic on sizes are not."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op == "call_module" and _yields_tensor(node)
    return _yields_tensor(node)


def _yields_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


class RecomputationError(RuntimeError):
    """The forward checkpoints activations, which an exported graph cannot show."""


@contextlib.contextmanager
def refuse_recomputation() -> Iterator[None]:
    """Raises `RecomputationError` when `torch.utils.checkpoint.checkpoint` runs inside.

    Both implementations are replaced, not `checkpoint` itself, which libraries import by name.
    """
    from torch.utils import checkpoint

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RecomputationError(
            "the model checkpoints activations, and an exported graph has no recomputation; use method 'dispatch'"
        )

    with (
        mock.patch.object(checkpoint, "_checkpoint_without_reentrant_generator", refuse),
        mock.patch.object(checkpoint.CheckpointFunction, "apply", refuse),
    ):
        yield


def lies_in(path: str, module: str) -> bool:
    """Returns whether a path is that of a module, or of something in it."""
    return path == module or path.startswith(f"{module}.")


def is_random(node: fx.Node) -> bool:
    """Returns whether the op of a node draws random numbers as it is called."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded not in tags:
        return False
    arguments: Any = node.target._schema.arguments  # type: ignore[union-attr]
    given = zip((argument.name for argument in arguments), node.args, strict=False)
    named = {argument.name: argument.default_value for argument in arguments} | dict(given) | node.kwargs
    return not (named.get("train") is False or 0.0 in (named.get(name) for name in ("dropout_p", "p", "dropout")))


def is_check(node: fx.Node) -> bool:
    """Returns whether a node only asserts devices, dtypes and sizes of the export, which may differ here."""
    return (node.op == "call_module" and str(node.target) == "_guards_fn") or (
        node.op == "call_function" and "_assert_tensor_metadata" in str(node.target)
    )


def rewrite_devices(node: fx.Node, device: torch.device) -> None:
    """Replaces the devices that export wrote into the arguments, sub-graphs included."""
    if node.op != "call_function":
        return
    if any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values())):
        node.args = tuple(device if isinstance(value, torch.device) else value for value in node.args)
        node.kwargs = {key: device if isinstance(value, torch.device) else value for key, value in node.kwargs.items()}
    for module in _sub_graphs(node):
        for inner in list(module.graph.nodes):
            if is_check(inner):
                module.graph.erase_node(inner)
            else:
                rewrite_devices(inner, device)
        module.recompile()


def _sub_graphs(node: fx.Node) -> list[fx.GraphModule]:
    """Returns the graph modules that a higher-order node calls."""
    owner = node.graph.owning_module
    values = (operator.attrgetter(str(one.target))(owner) for one in node.all_input_nodes if one.op == "get_attr")
    return [value for value in values if isinstance(value, fx.GraphModule)]
