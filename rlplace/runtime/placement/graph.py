"""The joint graph: forward and backward of one micro-batch as one functional graph, each op with its forward op."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rlplace.model.capture.fake import any_dtype_grouped_mm, fake_inputs, new_fake_mode
from rlplace.runtime.base.forward_graph import ForwardGraph, seeded
from rlplace.runtime.placement.record import Recorder, base_of, is_view_node
from rlplace.runtime.torch_adapter import from_functional, functionalized, to_functional, without_mkldnn


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
        tangents: Placeholder of the gradient of an output, by output number.
        constants: Values of those held tensors that are no parameters or buffers of the model, by name.
        outputs: Per output of the forward graph its node; other values stand for themselves.
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
    outputs: tuple[Any, ...]
    differentiable: tuple[int, ...]
    gradients: Mapping[str, tuple[fx.Node, ...]]
    input_gradients: Mapping[int, fx.Node]
    writes: Mapping[str, fx.Node]


def joint_graph(
    source: ForwardGraph,
    held: Mapping[str, torch.Tensor] | None = None,
    leaves: Sequence[Any] = (),
    *,
    differentiate: Sequence[int] | None = None,
    kind: str = "cpu",
) -> JointGraph:
    """Traces the joint graph on fake CPU tensors, under the autocast state of the caller.

    Args:
        source: The forward.
        held: Parameters and buffers by name, real, meta or fake; only shape, dtype and ``requires_grad`` matter. None: all is
            as it was exported.
        leaves: Flat inputs of one micro-batch, likewise.
        differentiate: Outputs whose gradients come in as tangents, if one can flow back from them; None: the loss, where there
            is one. Without any the graph has no backward.
        kind: Type of the devices that run the graph, such as ``"cuda"``. Tracing takes the ops that these have: on the CPU its
            own kernel for attention, elsewhere matrix products and a softmax.
    """
    mode = new_fake_mode()
    recorder = Recorder()
    tracer = _Tracer(source, recorder, kind)
    with contextlib.ExitStack() as stack:
        stack.enter_context(any_dtype_grouped_mm())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(without_mkldnn())
        if kind != "cpu":
            stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
        if kind == "cuda":
            # Tracing casts where autocast casts on the CPU.
            enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            stack.enter_context(torch.autocast("cpu", dtype=dtype, enabled=enabled))
        stack.enter_context(mode)
        examples = source.examples
        if held is not None:
            held = {**source.constants, **held}
            examples = (*(held[name] for name in source.held), *leaves)
        values = fake_inputs(list(examples), mode)
        if differentiate is None:
            differentiate = () if source.loss is None else (source.loss,)
        stack.enter_context(recorder)
        stack.enter_context(functionalized())
        return tracer.trace(values, differentiate)


class _Tracer(fx.Interpreter):
    def __init__(self, source: ForwardGraph, recorder: Recorder, kind: str) -> None:
        super().__init__(source.module, garbage_collect_values=False)
        self.source = source
        self.recorder = recorder
        self.kind = kind

    def trace(self, values: Sequence[Any], differentiate: Sequence[int]) -> JointGraph:
        source, recorder = self.source, self.recorder
        count = len(source.held)
        names = [f"held_{name.replace('.', '_')}" for name in source.held]
        names += [f"input_{number}" for number in range(len(values) - count)]
        given = [
            recorder.input(name, value) if isinstance(value, torch.Tensor) else None
            for name, value in zip(names, values, strict=True)
        ]
        arguments = [_wrap(value) for value in values]
        with torch.fx.traceback.preserve_node_meta(False):
            self.run(*arguments, enable_io_processing=False)
        wrapped = [self.env[item] if isinstance(item, fx.Node) else item for item in source.outputs]
        differentiable = [i for i, v in enumerate(wrapped) if isinstance(v, torch.Tensor) and v.requires_grad]
        roots = {i: wrapped[i] for i in differentiate if i in differentiable}
        tangents = {i: torch.empty_strided(root.shape, root.stride(), dtype=root.dtype) for i, root in roots.items()}
        tangent_nodes = {i: recorder.input(f"tangent_{i}", from_functional(value)) for i, value in tangents.items()}
        wanted = {
            i: value
            for i, value in enumerate(arguments)
            if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
        }
        differentiated: Sequence[torch.Tensor | None] = [None] * len(wanted)
        if roots:
            differentiated = torch.autograd.grad([*roots.values()], [*wanted.values()], [*tangents.values()], allow_unused=True)
        gradients = {
            i: _made(recorder.graph, recorder.node(from_functional(value)))
            for i, value in zip(wanted, differentiated, strict=True)
            if value is not None
        }
        outputs = tuple(
            _made(recorder.graph, recorder.node(from_functional(v))) if isinstance(v, torch.Tensor) else v for v in wrapped
        )
        written = [recorder.node(from_functional(value)) for value in arguments[:count]]
        held: dict[str, Any] = dict(zip(source.held, given, strict=False))
        joint = JointGraph(
            graph=recorder.graph,
            held={**held, **{node.name: node for node in recorder.constants}},
            inputs=tuple(given[count:]),
            tangents=tangent_nodes,
            constants={**source.constants, **{node.name: value for node, value in recorder.constants.items()}},
            outputs=outputs,
            differentiable=tuple(differentiable),
            gradients={source.held[i]: _summands(node) for i, node in gradients.items() if i < count},
            input_gradients={i - count: node for i, node in gradients.items() if i >= count},
            writes={
                name: _own(recorder.graph, node)
                for name, node in zip(source.held, written, strict=True)
                if node is not held[name]
            },
        )
        _erase_unused(joint)
        return joint

    def run_node(self, n: fx.Node) -> Any:
        number = n.args[1] if n.target is seeded else None
        with self.recorder.running(self.source.op_of_node.get(n.name), number):  # type: ignore[arg-type]
            return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is seeded:
            target, args = args[0], args[2:]
            if self.kind == "cuda" and target is torch.ops.aten.dropout.default:
                # What its dropout calls there: the same masks as any other engine.
                return torch.ops.aten.native_dropout.default(*args)[0]
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default  # attention may lay its output out otherwise than where it was exported
        return super().call_function(target, args, kwargs)


def _wrap(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    functional = to_functional(value.detach())
    return functional.requires_grad_(value.requires_grad)


def _own(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Returns a node that makes the value itself."""
    if not is_view_node(node) and node.op != "placeholder":
        return node
    copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta.update(val=node.meta["val"], owner=node.meta.get("owner"), backward=False)
    return copy


def _made(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Returns a node of a value that some op makes, be it as a view."""
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
    results = [*joint.outputs, *summands, *joint.input_gradients.values(), *joint.writes.values()]
    output = joint.graph.output(tuple(node for node in results if isinstance(node, fx.Node)))
    joint.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    joint.graph.erase_node(output)
