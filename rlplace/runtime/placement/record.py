"""Records the forward and backward of a graph as one functional graph.

torch's functionalization turns every write into an op that makes a new tensor; a dispatch mode below it sees the functional ops
one by one and writes them down, each with the op of the forward that caused it. A backward op belongs to the op that made its
autograd node: sequence numbers say which.

Views that keep all elements are no work: every device that reads one makes it from its base, so that bases travel and views
do not.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from rlplace.errors import InputError
from rlplace.model.capture.export import is_random
from rlplace.model.torch_adapter import FakeTensor, TorchDispatchMode, backward_node, in_backward, pytree, sequence_number
from rlplace.runtime.base.forward_graph import seeded

_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default, _aten.lift.default}
"""Ops that return their input; a functional graph needs no node for them."""


class Recorder(TorchDispatchMode):
    """Writes down the functional ops that run inside, on fake tensors.

    Attributes:
        graph: What ran so far.
        constants: Real tensors that came up on the way, by placeholder.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[fx.Node, torch.Tensor] = {}
        self._node_of: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # ids stay unique while their tensors live
        self._owner: dict[int, str | None] = {}
        # Of the forward node that runs now; None between nodes and in backward.
        self._op: str | None = None
        self._number: int | None = None
        self._draws: list[tuple[Any, ...]] = []

    def input(self, name: str, value: torch.Tensor) -> fx.Node:
        """Returns a placeholder for a tensor."""
        node = self.graph.placeholder(name)
        self._name(value, node)
        return node

    @contextlib.contextmanager
    def running(self, op: str | None, number: int | None) -> Iterator[None]:
        """Returns a node of the forward runs inside, which is this op or none, and draws from the stream of this number or of
        none.
        """
        self._op, self._number, self._draws = op, number, []
        first = sequence_number()
        yield
        self._owner |= dict.fromkeys(range(first, sequence_number()), op)
        self._op = self._number = None

    def node(self, value: torch.Tensor) -> fx.Node:
        """Returns the node that made a tensor."""
        node = self._node_of.get(id(value))
        return self._constant(value) if node is None else node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _SAME:
            self._name(result, self.node(args[0]))
        elif any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        node_args, node_kwargs = pytree.tree_map(self._operand, (tuple(args), dict(kwargs)))
        written: list[torch.Tensor] = []
        if func is _aten.native_batch_norm.default and args[3] is not None and args[5]:
            # Writes the running statistics without saying so.
            written = [args[3], args[4]]
            func = _aten._native_batch_norm_legit_functional.default
        elif func._schema.is_mutable:
            raise InputError(f"distribute: the model runs {func}, which writes in place and has no functional twin")
        node = self.graph.call_function(func, node_args, node_kwargs)
        self._describe(node)
        if is_random(node):
            self._seed(node)
        if isinstance(result, torch.Tensor):
            self._name(result, node)
            return
        for index, item in enumerate([*result, *written]):
            if isinstance(item, torch.Tensor):
                part = self.graph.call_function(operator.getitem, (node, index))
                part.meta = {**node.meta, "val": item}
                self._name(item, part)

    def _describe(self, node: fx.Node) -> None:
        backward = in_backward()
        owner = self._op
        if backward:
            autograd = backward_node()
            # None: autograd sums two gradients of one tensor, between its nodes.
            owner = None if autograd is None else self._owner.get(autograd._sequence_nr())
        node.meta.update(owner=owner, backward=backward)

    def _seed(self, node: fx.Node) -> None:
        if self._number is None:
            raise InputError(f"distribute: {node.target} draws random numbers outside of the forward; run the stages instead")
        op: Any = node.target
        self._draws.append((op, dict(node.kwargs), *node.args))
        if len(self._draws) == 1:
            node.args = (op, self._number, *node.args)
        else:
            last: Any = last_draw
            node.args, node.kwargs = (last, self._number, *self._draws), {}
        node.target = seeded

    def _operand(self, value: Any) -> Any:
        return self.node(value) if isinstance(value, torch.Tensor) else value

    def _name(self, value: torch.Tensor, node: fx.Node) -> None:
        self._node_of[id(value)] = node
        self._alive.append(value)
        node.meta.setdefault("val", value)

    def _constant(self, value: torch.Tensor) -> fx.Node:
        if isinstance(value, FakeTensor):
            raise InputError("distribute: a tensor of the model comes from outside of its graph; register it as a buffer")
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(f"constant_{len(self.constants)}")
        node.meta.update(owner=None, backward=False)
        self.constants[node] = value
        self._name(value, node)
        return node


def last_draw(*draws: tuple[Any, ...]) -> Any:
    """Returns the last of several draws that one op makes from its stream, each an op with its keyword and other arguments."""
    result = None
    for op, kwargs, *args in draws:
        result = op(*args, **kwargs)
    return result


def is_view_node(node: fx.Node) -> bool:
    """Returns whether every reader makes the node for itself: a view of all elements of its base, however that lies in
    memory.
    """
    target, value = node.target, node.meta.get("val")
    if not getattr(target, "is_view", False) or target is _aten.as_strided.default or not isinstance(value, torch.Tensor):
        return target is _aten._unsafe_view.default
    return value.numel() >= node.args[0].meta["val"].numel()  # type: ignore[union-attr]


def base_of(node: fx.Node) -> fx.Node:
    """Returns the node that a chain of views starts from; the node itself when it is no view."""
    while is_view_node(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def as_made(node: fx.Node) -> Any:
    """Returns the op that makes a view of a base which may lie otherwise in memory than it did when it was traced."""
    return _aten.reshape.default if node.target in (_aten.view.default, _aten._unsafe_view.default) else node.target


def results_of(node: fx.Node) -> list[fx.Node]:
    """Returns the values that a run makes: the node's own, or its items."""
    items = [user for user in node.users if user.target is operator.getitem]
    return items if items else [node]


def lay_out(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """Returns the value with the strides that tracing promised, unless those are of an expanded one."""
    expanded = any(step == 0 and size > 1 for step, size in zip(strides, value.shape, strict=True))
    if value.stride() == tuple(strides) or expanded:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
