"""One real training step with a mark at every op: the exported forward node by node, autograd node by node, the optimizer.

Ops have the names of the captured op graph, so that each time can be put beside what the graph knows of the op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from rlplace.errors import CaptureError, InputError
from rlplace.measure.marks import Marks
from rlplace.model.capture.export import export_training_graph, flatten_inputs
from rlplace.model.capture.inputs import split_inputs
from rlplace.model.capture.loss import LOSS_LABEL
from rlplace.runtime.base.steps import OPTIMIZERS, loss_of

_RATE = 1e-6
"""Keeps random weights random."""


class StepWalk(fx.Interpreter):
    """Runs training steps of a module with marks.

    Args:
        module: Real module on its device.
        inputs: Inputs on the same device, dict or tuple.
        loss: As for `rlplace.capture`.
        optimizer: Name in `rlplace.runtime.base.steps.OPTIMIZERS`.
        marks: Where the marks go.

    Attributes:
        optimizer: The real one. On a processor it updates parameters one after the other, so a group for each shape changes
            nothing and lets shapes be timed; elsewhere it has a single group.
        group_of: Update op to its group.

    Raises:
        CaptureError: The module cannot be exported.
    """

    def __init__(
        self, module: nn.Module, inputs: Any, loss: Callable[[Any], Tensor] | None, optimizer: str, marks: Marks
    ) -> None:
        args, kwargs = split_inputs(inputs)
        try:
            exported = export_training_graph(module, args, kwargs)
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise CaptureError(f"cannot time single ops of {type(module).__name__}: it cannot be exported: {text}") from error
        super().__init__(exported.module)
        self._op_name_of_node, self._out_spec = exported.op_name_of_node, exported.program.call_spec.out_spec
        self.leaves = flatten_inputs(args, kwargs)
        self.loss, self.marks = loss, marks
        self.parameters = trainable(module)
        self._update_of = {id(parameter): f"{name}/update" for name, parameter in self.parameters.items()}
        self.optimizer, self.group_of = make_optimizer(optimizer, self.parameters)
        self._owner_of_sequence: dict[int, str] = {}
        self.mark_cost_s = marks.cost_s()

    def step(self) -> tuple[dict[Any, float], dict[Any, float] | None]:
        """One step.

        Returns:
            Seconds by op name, None for what belongs to no op; and the host's issue seconds likewise, None on a processor.
        """
        marks = self.marks
        marks.mark(None)
        self.optimizer.zero_grad(set_to_none=True)
        self._owner_of_sequence = {}
        value = self._forward()
        handles = self._hook(value)
        marks.mark(None)
        value.backward()  # type: ignore[no-untyped-call]
        marks.mark(None)
        for handle in handles:
            handle.remove()
        del value
        self._update()
        return marks.finish()

    def _forward(self) -> Tensor:
        flat = self.run(*self.leaves, enable_io_processing=False)
        self.env = {}  # the output is not kept
        self.marks.mark(None)
        output = torch.utils._pytree.tree_unflatten(list(flat), self._out_spec)
        begin = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if self.loss is not None:
            self.marks.mark(LOSS_LABEL)
        value = loss_of(output, self.loss)
        self.marks.mark(None)
        self._claim(begin, LOSS_LABEL)
        return value

    def run_node(self, n: fx.Node) -> Any:
        """One node, with a mark before an op."""
        name = self._op_name_of_node.get(n.name)
        if name is None:
            return super().run_node(n)
        begin = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self.marks.mark(name)
        out = super().run_node(n)
        self._claim(begin, name)
        return out

    def _claim(self, begin: int, name: str) -> None:
        """Gives the autograd nodes made since `begin` to an op."""
        for number in range(begin, torch.autograd._get_sequence_nr()):  # type: ignore[attr-defined]
            self._owner_of_sequence[number] = name

    def _hook(self, value: Tensor) -> list[Any]:
        """A mark before every autograd node. Sums of gradients from several readers count for the node before them."""
        handles, seen, pending = [], set(), [value.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
            if node.name().endswith("AccumulateGrad"):
                key = self._update_of.get(id(node.variable))  # type: ignore[attr-defined]
            else:
                owner = self._owner_of_sequence.get(node._sequence_nr())
                key = None if owner is None else f"{owner}.backward"
            handles.append(node.register_prehook(lambda gradients, key=key: self.marks.mark(key)))
        return handles

    def _update(self) -> None:
        """The optimizer group by group on a processor, as a whole where it joins parameters into shared kernels."""
        groups = self.optimizer.param_groups
        try:
            for index, group in enumerate(groups):
                self.optimizer.param_groups = [group]
                self.marks.mark((UPDATE, index))
                self.optimizer.step()
            if self.marks.device.type == "cpu":
                self.optimizer.param_groups = [{**groups[0], "params": []}]
                self.marks.mark((UPDATE, None))
                self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        self.marks.mark(None)


UPDATE = "optimizer"
"""First part of the keys of updates; the second is the number of the group, or None for a step without parameters."""


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """Parameters that take a gradient, by name; a module without any is refused."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not parameters:
        raise InputError(f"{type(module).__name__} has no trainable parameter; unfreeze one")
    return dict(parameters)


def make_optimizer(name: str, parameters: Mapping[str, Tensor]) -> tuple[torch.optim.Optimizer, dict[str, int]]:
    """The optimizer, with a group for each dtype and shape on a processor, and the group of each update op."""
    groups: dict[Any, list[str]] = {}
    for parameter, tensor in parameters.items():
        groups.setdefault((tensor.dtype, tensor.shape) if tensor.device.type == "cpu" else None, []).append(parameter)
    group_of = {f"{parameter}/update": index for index, group in enumerate(groups.values()) for parameter in group}
    return OPTIMIZERS[name]([{"params": [parameters[p] for p in group]} for group in groups.values()], lr=_RATE), group_of
