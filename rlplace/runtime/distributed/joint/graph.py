"""The joint graph: forward and backward of one micro-batch as one functional graph, each op with its forward op."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from rlplace.graph.fake import any_dtype_grouped_mm
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph
from rlplace.runtime.distributed.graph.randomness import seeded
from rlplace.runtime.distributed.joint.record import Recorder
from rlplace.runtime.distributed.joint.views import base_of, is_view_node


@dataclass(frozen=True, eq=False)
class JointGraph:
    """Forward and backward of one micro-batch.

    Every node of `graph` is a placeholder or makes new tensors from its inputs. ``node.meta`` has ``val`` (a fake tensor; none
    for an op with several results, whose items are nodes of their own), ``owner`` (the op of the forward that it belongs to, as
    plans name it, or None) and ``backward``.

    Attributes:
        graph: Only what outputs, gradients and writes need, in an order that runs.
        held: Placeholder of every parameter, buffer and constant, by name.
        inputs: Placeholders of the flat inputs; None for an input that is no tensor or is not read.
        tangents: Placeholder of the gradient of an output, by output index; none for the loss graph of an engine, whose loss
            has the gradient 1.
        constants: Values of constants that only the joint graph has.
        loss: Node of the scalar loss.
        outputs: Per flat output its node; other values stand for themselves.
        differentiable: Numbers of the flat outputs that a gradient can flow back from.
        gradients: Nodes that add up to the gradient, for every trainable held parameter that has one.
        input_gradients: Likewise for flat inputs that require one, by index.
        writes: Node of the new value of every held tensor that the forward writes to; never a view.
    """

    graph: fx.Graph
    held: Mapping[str, fx.Node]
    inputs: tuple[fx.Node | None, ...]
    tangents: Mapping[int, fx.Node]
    constants: Mapping[str, torch.Tensor]
    loss: fx.Node | None
    outputs: tuple[Any, ...]
    differentiable: tuple[int, ...]
    gradients: Mapping[str, tuple[fx.Node, ...]]
    input_gradients: Mapping[int, fx.Node]
    writes: Mapping[str, fx.Node]


def joint_graph(
    source: ForwardGraph,
    held: Mapping[str, torch.Tensor] | None = None,
    leaves: Sequence[Any] | None = None,
    *,
    differentiate: Sequence[int] | None = None,
    kind: str = "cpu",
) -> JointGraph:
    """Traces the joint graph on fake CPU tensors, under the autocast state of the caller.

    Args:
        source: The forward.
        held: The tensors of ``source.held`` by name, real, meta or fake; only shape, dtype and ``requires_grad`` matter. None:
            as they were exported.
        leaves: Flat inputs of one micro-batch, likewise.
        differentiate: Flat outputs whose gradients come in as tangents, if one can flow back from them; None differentiates the
            loss. With neither a loss nor outputs the graph has no backward.
        kind: Type of the devices that run the graph, such as ``"cuda"``. Tracing takes the ops that these have: on the CPU its
            own kernel for attention, elsewhere matrix products and a softmax.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder()
    tracer = _Tracer(source, recorder, kind)
    with contextlib.ExitStack() as stack:
        stack.enter_context(any_dtype_grouped_mm())
        stack.enter_context(torch.enable_grad())
        # Its recurrent layers pass a workspace from forward to backward whose size only the kernel knows.
        stack.enter_context(_without_mkldnn())
        if kind != "cpu":
            stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
        if kind == "cuda":
            # Tracing casts where autocast casts on the CPU.
            enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            stack.enter_context(torch.autocast("cpu", dtype=dtype, enabled=enabled))
        stack.enter_context(mode)
        examples = [_fake(value) if isinstance(value, torch.Tensor) else value for value in source.examples]
        count = len(source.held)
        fakes = [_fake(held[name]) for name in source.held] if held is not None else examples[:count]
        fake_leaves = examples[count:]
        if leaves is not None:
            fake_leaves = [_fake(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        stack.enter_context(recorder)
        return tracer.trace(fakes, fake_leaves, differentiate)


class _Tracer(fx.Interpreter):
    def __init__(self, source: ForwardGraph, recorder: Recorder, kind: str) -> None:
        super().__init__(source.module, garbage_collect_values=False)
        self.source = source
        self.recorder = recorder
        self.kind = kind

    def trace(self, fakes: list[torch.Tensor], leaves: list[Any], differentiate: Sequence[int] | None) -> JointGraph:
        source, recorder = self.source, self.recorder
        named = zip(source.held, fakes, strict=True)
        held = {name: recorder.input(f"held_{name.replace('.', '_')}", fake) for name, fake in named}
        inputs = [
            recorder.input(f"input_{index}", leaf) if isinstance(leaf, torch.Tensor) else None
            for index, leaf in enumerate(leaves)
        ]
        torch._enable_functionalization(reapply_views=True)  # type: ignore[attr-defined]
        try:
            arguments = [_wrap(value) for value in (*fakes, *leaves)]
            with torch.fx.traceback.preserve_node_meta(False):
                self.run(*arguments, enable_io_processing=False)
            wrapped = [self.env[item] if isinstance(item, fx.Node) else item for item in source.outputs]
            loss = None if source.loss is None else self.env[source.loss]
            tangents: dict[int, torch.Tensor] = {}
            differentiable = [i for i, v in enumerate(wrapped) if isinstance(v, torch.Tensor) and v.requires_grad]
            if differentiate is not None:
                taken = [index for index in differentiate if index in differentiable]
                roots = [wrapped[index] for index in taken]
                made = [torch.empty_strided(root.shape, root.stride(), dtype=root.dtype) for root in roots]
                tangents = dict(zip(taken, made, strict=True))
            else:
                roots = [] if loss is None else [loss]
            tangent_nodes = {i: recorder.input(f"tangent_{i}", _unwrap(value)) for i, value in tangents.items()}
            wanted = [
                i
                for i, value in enumerate(arguments)
                if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
            ]
            differentiated: Sequence[torch.Tensor | None] = [None] * len(wanted)
            if roots:
                differentiated = torch.autograd.grad(
                    roots, [arguments[i] for i in wanted], list(tangents.values()) or None, allow_unused=True
                )
            gradients = {
                i: _made(recorder.graph, recorder.node(_unwrap(value)))
                for i, value in zip(wanted, differentiated, strict=True)
                if value is not None
            }
            outputs = tuple(
                _made(recorder.graph, recorder.node(_unwrap(v))) if isinstance(v, torch.Tensor) else v for v in wrapped
            )
            writes = {name: recorder.node(_unwrap(arguments[i])) for i, name in enumerate(source.held)}
            loss_node = None if loss is None else recorder.node(_unwrap(loss))
        finally:
            torch._disable_functionalization()  # type: ignore[attr-defined]
        count = len(source.held)
        joint = JointGraph(
            graph=recorder.graph,
            held={**held, **{node.name: node for node in recorder.constants}},
            inputs=tuple(inputs),
            tangents=tangent_nodes,
            constants={node.name: value for node, value in recorder.constants.items()},
            loss=loss_node,
            outputs=outputs,
            differentiable=tuple(differentiable),
            gradients={source.held[i]: _summands(node) for i, node in gradients.items() if i < count},
            input_gradients={i - count: node for i, node in gradients.items() if i >= count},
            writes={name: _own(recorder.graph, node) for name, node in writes.items() if node is not held[name]},
        )
        _erase_unused(joint)
        return joint

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            return super().run_node(n)
        number = n.args[1] if n.target is seeded else None
        first = self.recorder.begin(self.source.op_of_node.get(n.name), number)  # type: ignore[arg-type]
        try:
            return super().run_node(n)
        finally:
            self.recorder.end(first)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is seeded:
            target, args = args[0], args[2:]
            if self.kind == "cuda" and target is torch.ops.aten.dropout.default:
                # What its dropout calls there: the same masks as any other engine.
                return torch.ops.aten.native_dropout.default(*args)[0]
        return super().call_function(target, args, kwargs)


@contextlib.contextmanager
def _without_mkldnn() -> Iterator[None]:
    before: Any = torch.backends.mkldnn.enabled
    torch._C._set_mkldnn_enabled(False)  # its public counterpart warns about settings of other hardware
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _fake(value: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return fake.requires_grad_(value.requires_grad)


def _wrap(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    functional = torch._to_functional_tensor(value.detach())  # type: ignore[attr-defined]
    return functional.requires_grad_(value.requires_grad)


def _unwrap(value: torch.Tensor) -> torch.Tensor:
    if not torch._is_functional_tensor(value):  # type: ignore[attr-defined]
        return value
    torch._sync(value)  # type: ignore[attr-defined]
    return torch._from_functional_tensor(value)  # type: ignore[attr-defined]


def _own(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A node that makes the value itself."""
    if not is_view_node(node) and node.op != "placeholder":
        return node
    copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta.update(val=node.meta["val"], owner=node.meta.get("owner"), backward=False)
    return copy


def _made(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A node of a value that some op makes, be it as a view."""
    return _own(graph, node) if base_of(node).op == "placeholder" else node


def _summands(node: fx.Node) -> tuple[fx.Node, ...]:
    """What a last sum adds: each part is collected where it is made, and sent once per step."""
    parts, waiting = [], [node]
    while waiting:
        part = waiting.pop()
        read_elsewhere = len(part.users) > (part is not node)
        if part.target is torch.ops.aten.add.Tensor and not read_elsewhere and not part.kwargs and part.meta["backward"]:
            both = part.args[:2]
            if all(isinstance(a, fx.Node) and a.meta["val"].shape == part.meta["val"].shape for a in both):
                waiting += both  # type: ignore[arg-type]
                continue
        parts.append(part)
    return tuple(parts)


def _erase_unused(joint: JointGraph) -> None:
    """Drops the nodes that no result needs."""
    summands = [node for parts in joint.gradients.values() for node in parts]
    results = [joint.loss, *joint.outputs, *summands, *joint.input_gradients.values(), *joint.writes.values()]
    needed: set[fx.Node] = {node for node in results if isinstance(node, fx.Node)}
    for node in reversed(list(joint.graph.nodes)):
        if node in needed:
            needed.update(node.all_input_nodes)
        elif node.op != "placeholder":
            joint.graph.erase_node(node)
