"""The backward of a stage: whole, or the gradients of its inputs first and those of its parameters later.

torch has the split too (`torch.distributed.pipelining._backward`), with limits that depend on its version: 2.11 counts a
parameter twice that is used twice in a stage and adds up the gradients of an op with several outputs, and every version drops
parameters that are off the paths from an input of the stage to its outputs. This one has none of them, and one behaviour.

The *spine* is made of the autograd nodes on a path from the stage's outputs to its inputs. The first half runs only the spine
and keeps the gradients that arrive at its *joints*, the nodes where a path to a parameter branches off. The second half runs
from the joints, and from outputs beside the spine, to the parameters; parameters that share them are taken together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

Node = Any  # torch.autograd.graph.Node
Gradients = tuple[torch.Tensor | None, ...]


def whole_backward(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Accumulates the gradients of the parameters.

    Args:
        outputs: What the stage returned; values that need no gradient are skipped.
        gradients: Gradients of the outputs; None stands for 1, for a scalar.
        inputs: Leaves.

    Returns:
        The gradients of the inputs, contiguous, zero where there is none.
    """
    pairs = [(value, gradient) for value, gradient in zip(outputs, gradients, strict=True) if value.requires_grad]
    if pairs:
        torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
    input_gradients = tuple(_sendable(value.grad, value) for value in inputs)
    for value in inputs:
        value.grad = None
    return input_gradients


def input_backward(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
) -> tuple[tuple[torch.Tensor, ...], Deferred]:
    """The first half; arguments and gradients as in `whole_backward`.

    Returns:
        The gradients of the inputs, and the second half.
    """
    pairs = [
        (value, torch.ones_like(value) if gradient is None else gradient)
        for value, gradient in zip(outputs, gradients, strict=True)
        if value.requires_grad
    ]
    leaves = [value for value in inputs if value.requires_grad]
    edges = [get_gradient_edge(value) for value, _ in pairs]
    output_gradients = [gradient for _, gradient in pairs]
    branches = _branches([edge.node for edge in edges], {get_gradient_edge(value).node for value in leaves})
    arrived: dict[Node, Gradients] = {}
    hooks = [joint.register_prehook(_keep(arrived, joint)) for branch in branches for joint in branch.joints]
    leaf_gradients: Sequence[torch.Tensor | None] = [None] * len(leaves)
    try:
        if pairs and leaves:
            leaf_gradients = torch.autograd.grad(
                [value for value, _ in pairs], leaves, output_gradients, retain_graph=True, allow_unused=True
            )
    finally:
        for hook in hooks:
            hook.remove()
    for branch in branches:
        branch.arrived = {joint: arrived[joint] for joint in branch.joints if joint in arrived}
        branch.ends = [
            (edge, gradient) for edge, gradient in zip(edges, output_gradients, strict=True) if edge.node in branch.outputs
        ]
    of_leaf = dict(zip(map(id, leaves), leaf_gradients, strict=True))
    return tuple(_sendable(of_leaf.get(id(value)), value) for value in inputs), Deferred(branches)


@dataclass(eq=False)
class _Branch:
    """Parameters that are reached together.

    Attributes:
        joints: Nodes of the spine that lead to them.
        outputs: Nodes of outputs beside the spine that lead to them.
        parameters: The parameters.
        arrived: Gradients that arrived at each joint.
        ends: Edges of these outputs and their gradients.
    """

    joints: list[Node] = field(default_factory=list)
    outputs: set[Node] = field(default_factory=set)
    parameters: list[torch.Tensor] = field(default_factory=list)
    arrived: dict[Node, Gradients] = field(default_factory=dict)
    ends: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)

    def run(self) -> None:
        edges = [edge for edge, _ in self.ends]
        gradients = [gradient for _, gradient in self.ends]
        for joint, arrived in self.arrived.items():
            for number, gradient in enumerate(arrived):
                if gradient is not None:
                    edges.append(GradientEdge(joint, number))
                    gradients.append(gradient)
        if not edges:
            return
        # A way from one joint to a parameter may lead over the next joint, which has its whole gradient already.
        clamped = self.arrived if len(self.arrived) > 1 else {}
        hooks = [joint.register_prehook(_give(arrived)) for joint, arrived in clamped.items()]
        try:  # the graph is kept, because such a way passes nodes that other branches need as well
            torch.autograd.backward(edges, gradients, retain_graph=True, inputs=self.parameters)
        finally:
            for hook in hooks:
                hook.remove()


class Deferred:
    """The second half of a backward; keeps the graph until it has run."""

    def __init__(self, branches: list[_Branch]) -> None:
        self._branches = branches

    def run(self) -> None:
        """Accumulates the gradients of the parameters."""
        for branch in self._branches:
            branch.run()
        self._branches = []


def _branches(outputs: Sequence[Node], leaves: set[Node]) -> list[_Branch]:
    order = _outputs_first(outputs)
    spine = set(leaves)
    below: dict[Node, frozenset[Node]] = {}  # of nodes beside the spine: the parameters' nodes that they lead to
    for node in reversed(order):
        after = [other for other, _ in node.next_functions if other is not None]
        if node in spine or any(other in spine for other in after):
            spine.add(node)
        elif after:
            below[node] = frozenset().union(*{below[other] for other in after})
        else:
            below[node] = frozenset((node,) if hasattr(node, "variable") else ())
    leads: dict[Node, frozenset[Node]] = {}  # of joints and of outputs beside the spine
    for node in order:
        if node in spine and node not in leaves:
            beside = {below[other] for other, _ in node.next_functions if other is not None and other not in spine}
            leads[node] = frozenset().union(*beside)
    leads.update({node: below[node] for node in outputs if node in below})
    together: dict[Node, Node] = {}

    def first(node: Node) -> Node:
        while together.setdefault(node, node) is not node:
            node = together[node]
        return node

    for node, parameters in leads.items():
        for parameter in parameters:
            together[first(parameter)] = first(node)
    branches: dict[Node, _Branch] = {}
    for node, parameters in leads.items():
        if parameters:
            branch = branches.setdefault(first(node), _Branch())
            if node in spine:
                branch.joints.append(node)
            else:
                branch.outputs.add(node)
    for parameter in frozenset().union(*leads.values()):
        branches[first(parameter)].parameters.append(parameter.variable)
    return list(branches.values())


def _outputs_first(outputs: Sequence[Node]) -> list[Node]:
    """All nodes that are reached, each before those that it passes gradients on to."""
    waiting: dict[Node, int] = {}
    stack = list(dict.fromkeys(outputs))
    seen = set(stack)
    while stack:
        for other, _ in stack.pop().next_functions:
            if other is not None:
                waiting[other] = waiting.get(other, 0) + 1
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
    order = [node for node in dict.fromkeys(outputs) if node not in waiting]
    for node in order:
        for other, _ in node.next_functions:
            if other is not None:
                waiting[other] -= 1
                if waiting[other] == 0:
                    order.append(other)
    return order


def _keep(arrived: dict[Node, Gradients], joint: Node) -> Callable[[Gradients], None]:
    def hook(gradients: Gradients) -> None:
        arrived[joint] = gradients

    return hook


def _give(arrived: Gradients) -> Callable[[Gradients], Gradients]:
    return lambda gradients: arrived


def _sendable(gradient: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """A gradient of the value's shape that nobody else writes to while it is on its way."""
    if gradient is None:
        return torch.zeros_like(value, memory_format=torch.contiguous_format)
    return gradient.detach().clone(memory_format=torch.contiguous_format)
