"""The three ways to run one fake training step under a `StepRecorder`: exported graph, eager ops, eager modules."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from rlplace.model.aten import argument_dims
from rlplace.model.axes.access import access_of, rule_of
from rlplace.model.capture.export import TrainingGraph, export_training_graph, flatten_inputs, module_path
from rlplace.model.capture.record import Label, StepRecorder
from rlplace.model.capture.whole_ops import REPLACED_TARGETS, NeutralFunctions, whole_scans
from rlplace.model.torch_adapter import DataDependentOutputException, DynamicOutputShapeException, pytree

_GRAD_REGION = "wrap_with_set_grad_enabled"
_AUTOCAST_REGION = "wrap_with_autocast"


def trace_export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: StepRecorder, finish: Callable[[Any], None]
) -> frozenset[str]:
    """Exports the fake module, then interprets the graph once: one label per node that yields tensors.

    Args:
        model: Fake module.
        args: Fake positional inputs.
        kwargs: Fake keyword inputs.
        recorder: Receives labels and events.
        finish: Called with the model's output while the recorder is active; computes the loss and runs backward.

    Returns:
        Names of all nodes of the graph.
    """
    graph = export_training_graph(model, args, kwargs)
    runner = _Runner(graph, recorder)
    with recorder:
        flat = runner.run(*flatten_inputs(args, kwargs), enable_io_processing=False)
        output = pytree.tree_unflatten(list(flat), graph.program.call_spec.out_spec)
        finish(output)
    return frozenset(node.name for node in graph.module.graph.nodes)


class _Runner(fx.Interpreter):
    """Interpreter that runs each op of a graph inside its label; regions without gradient stay one op."""

    def __init__(self, graph: TrainingGraph, recorder: StepRecorder) -> None:
        super().__init__(graph.module)
        self.recorder = recorder
        self.names = graph.op_name_of_node
        self.node: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node = self.node
        name = self.names.get(node.name) if node is not None else None
        if node is None or name is None:
            return super().call_function(target, args, kwargs)
        with self.recorder.label(name, str(target), module_path(node)) as label:
            label.dims = argument_dims(target, args, kwargs)
            before = len(self.recorder.events)
            label.parts = [] if rule_of(target) is None else None
            out = _call(target, args, kwargs)
            label.access = access_of(target, args, kwargs, out, self.recorder.storage)
            if len(self.recorder.events) == before:
                self.recorder.note_silent((args, kwargs), out)
        return out


def _call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = str(target)
    if name == _GRAD_REGION:
        enabled, region, *operands = args
        with torch.set_grad_enabled(enabled):
            return _Region(region).run(*operands)
    if name == _AUTOCAST_REGION:
        device_type, dtype, enabled, cache, region, *operands = args
        with torch.autocast(device_type, dtype, enabled, cache):
            return _Region(region).run(*operands)
    call: Any = REPLACED_TARGETS.get(target, target)
    return call(*args, **kwargs)


class _Region(fx.Interpreter):
    """A nested graph, run under the label of the node that holds it."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _call(target, args, kwargs)


def trace_eager(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: EagerRecorder, finish: Callable[[Any], None]
) -> None:
    """Runs the fake module itself; the recorder makes a label per op or per module call."""
    with _module_hooks(model, recorder), NeutralFunctions(recorder.guesses), whole_scans(), recorder:
        output = model(*args, **kwargs)
        recorder.end_forward()
        finish(output)


class EagerRecorder(StepRecorder):
    """Recorder that makes labels while the module runs.

    Args:
        by_module: A label per call of a module without children, and per run of ops between such calls, instead of one per
            op. Values that the forward reads out of tensors are then guessed (`guesses` counts them), since fake tensors
            have none.
        truth: The guess of a truth value.
    """

    def __init__(self, by_module: bool, truth: bool = True) -> None:
        super().__init__()
        self.by_module = by_module
        self.truth = truth
        self.path: list[str] = []
        self.guesses: Counter[str] = Counter()
        self._coins: list[Any] = []
        self._names: Counter[str] = Counter()
        self._open = False
        self._active = True

    def enter_module(self, path: str, name: str, is_leaf: bool) -> None:
        """Enters a module call."""
        self.path.append(path)
        if self.by_module and self._active:
            self._open = False
            if is_leaf:
                self._new_label("forward", name, leave=0)

    def leave_module(self) -> None:
        """Leaves the innermost module call."""
        self.path.pop()
        if self.by_module:
            self._open = False

    def end_forward(self) -> None:
        """Closes the last label, before the loss and the backward."""
        self.claim(self.current)
        self.current = -1
        self._active = False

    def before_dispatch(self, func: Any) -> None:
        if not self._active or (self.by_module and self._open):
            return
        name = func._schema.name.rpartition("::")[2]
        self._new_label("call" if self.by_module else name, "call" if self.by_module else str(func), leave=1)

    def _new_label(self, name: str, target: str, leave: int) -> None:
        self.claim(self.current, leave)
        module = self.path[-1] if self.path else ""
        full = f"{module}/{name}" if module else name
        count = self._names[full]
        self._names[full] += 1
        self.current = len(self.labels)
        parts: list[Any] | None = None if self.by_module else []
        self.labels.append(Label(f"{full}_{count}" if count else full, target, module, whole=self.by_module, parts=parts))
        # Autograd makes the node of an op just before the op reaches us, so the newest node, if new, is this op's.
        self.claim(self.current)
        self._open = self.by_module

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if self.by_module:
            coin = any(args[0] is one for one in self._coins) if args else False
            if coin or _draws_one(func, args):  # whether a layer is dropped: it runs; which of several sizes: the first
                if func is torch.ops.aten._local_scalar_dense.default:
                    self.guesses["rand"] += 1
                    return False
                self._coins.append(super().__torch_dispatch__(func, types, args, kwargs))
                return self._coins[-1]
            guess = _GUESSES.get(func) or _GUESSES.get(str(func))
            if guess is not None:
                with contextlib.suppress(DataDependentOutputException, DynamicOutputShapeException):
                    return super().__torch_dispatch__(func, types, args, kwargs)  # a constant of the forward
                self.guesses[func._schema.name.rpartition("::")[2]] += 1
                value = guess(*args)
                return self.truth if value is True else value
            if func is torch.ops.aten.split_with_sizes.default and sum(args[1]) != args[0].shape[dim := [*args, 0][2]]:
                size, parts = args[0].shape[dim], len(args[1])  # parts that are guessed, such as the tokens of each expert
                args = (args[0], [len(range(n, size, parts)) for n in range(parts)], dim)
            if func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1]):
                self.guesses["index"] += 1
                args = (args[0], _all_positions(args[1]))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _draws_one(func: Any, args: Sequence[Any]) -> bool:
    """Returns whether an op draws one number from zero on."""
    if func is torch.ops.aten.uniform_.default:
        return args[0].numel() == 1 and (len(args) < 2 or args[1] == 0)
    return func is torch.ops.aten.rand.default and not args[0]


def _scalar(tensor: torch.Tensor) -> bool | int | float:
    return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


def _all_positions(indices: Sequence[Any]) -> list[Any]:
    """Returns the indices with boolean masks that select all positions: the upper bound of the work."""
    result: list[Any] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            result += [index.new_empty((index.numel(),), dtype=torch.int64) for _ in range(index.dim())]
        else:
            result.append(index)
    return result


_GUESSES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._local_scalar_dense.default: _scalar,
    torch.ops.aten.equal.default: lambda a, b: True,
    torch.ops.aten.nonzero.default: lambda a: a.new_empty((a.numel(), a.dim()), dtype=torch.int64),
    torch.ops.aten.masked_select.default: lambda a, mask: a.new_empty((max(a.numel(), mask.numel()),)),
    torch.ops.aten.bincount.default: lambda a, weights=None, least=0: a.new_empty((max(least, 1),), dtype=torch.int64),
    "torchvision.nms.default": lambda boxes, scores, threshold: boxes.new_empty((boxes.shape[0],), dtype=torch.int64),
}


@contextlib.contextmanager
def _module_hooks(model: nn.Module, recorder: EagerRecorder) -> Iterator[None]:
    handles = []
    for path, module in model.named_modules():
        is_leaf = next(module.children(), None) is None
        name = type(module).__name__

        def enter(module: nn.Module, inputs: Any, path: str = path, name: str = name, is_leaf: bool = is_leaf) -> None:
            recorder.enter_module(path, name, is_leaf)

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            recorder.leave_module()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
