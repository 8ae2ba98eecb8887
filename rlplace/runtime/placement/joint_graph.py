"""The joint graph: forward and backward of one micro-batch as one functional graph, each op with its forward op.

torch's functionalization turns every write into an op that makes a new tensor; a dispatch mode below it records the functional
ops one by one, each with the op of the forward that caused it. A backward op belongs to the op that made its autograd node,
found by sequence number.

Views that keep all elements do no work: every device that reads one makes it from its base, so that only bases are transferred.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from rlplace.errors import InputError
from rlplace.model.capture.export import (
    OwnBackwardError,
    RecomputationError,
    RefuseLosses,
    is_random,
    refuse_functions,
    refuse_recomputation,
)
from rlplace.model.capture.fake import any_dtype_grouped_mm, fake_copy, fake_inputs, meta_copy, new_fake_mode
from rlplace.model.capture.inputs import split_inputs
from rlplace.model.torch_adapter import FakeTensor, TorchDispatchMode, backward_node, in_backward, pytree, sequence_number
from rlplace.runtime.placement.forward_graph import ForwardGraph, any_value, forward_graph, refuse_backward_hooks, seeded
from rlplace.runtime.torch_adapter import from_functional, functionalized, to_functional, without_mkldnn

_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default, _aten.lift_fresh.default, _aten.lift.default}
"""Ops that return their input; a functional graph needs no node for them."""

_MOST_TRACED = 1500
"""Forward ops of a model that is traced while it is planned; a larger one runs on fake tensors, which shows most reasons."""


@dataclass(frozen=True, eq=False)
class JointGraph:
    """Forward and backward of one micro-batch.

    Every node of `graph` is a placeholder or makes new tensors from its inputs. ``node.meta`` has ``val`` (a fake tensor; none
    for an op with several results, whose items are nodes of their own), ``owner`` (the op of the forward that it belongs to, as
    plans name it, or None) and ``backward``.
    """

    graph: fx.Graph  # only the nodes that outputs, gradients and writes need, in an order that runs
    held: Mapping[str, fx.Node]  # placeholder of every parameter, buffer and constant, by name
    inputs: tuple[fx.Node | None, ...]  # placeholders of the flat inputs; None for an input that is no tensor or is not read
    tangents: Mapping[int, fx.Node]  # placeholder of the gradient of an output, by output number
    # values of those held tensors that are no parameters or buffers of the model, by name
    constants: Mapping[str, torch.Tensor]
    outputs: tuple[Any, ...]  # per output of the forward graph its node, or a value that is no node
    differentiable: tuple[int, ...]  # numbers of the flat outputs that a gradient can flow from
    # nodes that add up to the gradient, for every trainable held parameter that has one
    gradients: Mapping[str, tuple[fx.Node, ...]]
    input_gradients: Mapping[int, fx.Node]  # likewise for flat inputs that require one, by index
    writes: Mapping[str, fx.Node]  # node of the new value of every held tensor that the forward writes to; never a view


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
        differentiate: Outputs whose gradients come in as tangents, if one can flow from them; None: the loss, where there is
            one. Without any the graph has no backward.
        kind: Type of the devices that run the graph, such as ``"cuda"``. Tracing takes the ops that these have: on the CPU its
            own kernel for attention, elsewhere matrix products and a softmax.
    """
    mode, recorder = new_fake_mode(), _JointRecorder()
    tracer = _Tracer(source, recorder, kind)
    with contextlib.ExitStack() as stack:
        for context in (any_dtype_grouped_mm(), torch.enable_grad(), without_mkldnn()):
            stack.enter_context(context)
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


class _JointRecorder(TorchDispatchMode):
    """A recorder of the functional ops that run inside, on fake tensors.

    Attributes:
        graph: The ops so far.
        constants: Real tensors that came up on the way, by placeholder.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[fx.Node, torch.Tensor] = {}
        self._node_of: dict[int, fx.Node] = {}
        self._alive: list[torch.Tensor] = []  # ids stay unique while their tensors exist
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
        """Runs a node of the forward inside: a plan's op or None, which draws from the stream of a number or from none."""
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
        node_args, node_kwargs = pytree.tree_map_only(torch.Tensor, self.node, (tuple(args), dict(kwargs)))
        written: list[torch.Tensor] = []
        if func is _aten.native_batch_norm.default and args[3] is not None and args[5]:
            # Its schema does not declare that it writes the running statistics.
            written = [args[3], args[4]]
            func = _aten._native_batch_norm_legit_functional.default
        elif func._schema.is_mutable:
            raise InputError(f"distribute: the model runs {func}, which writes in place and has no functional version")
        node = self.graph.call_function(func, node_args, node_kwargs)
        owner, backward = self._op, in_backward()
        if backward:
            autograd = backward_node()
            # None: autograd sums two gradients of one tensor, between its nodes.
            owner = None if autograd is None else self._owner.get(autograd._sequence_nr())
        node.meta.update(owner=owner, backward=backward)
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

    def _seed(self, node: fx.Node) -> None:
        if self._number is None:
            raise InputError(f"distribute: {node.target} draws random numbers outside of the forward; plan a strategy instead")
        op: Any = node.target
        self._draws.append((op, dict(node.kwargs), *node.args))
        if len(self._draws) == 1:
            node.args = (op, self._number, *node.args)
        else:
            last: Any = last_draw
            node.args, node.kwargs = (last, self._number, *self._draws), {}
        node.target = seeded

    def _name(self, value: torch.Tensor, node: fx.Node) -> None:
        self._node_of[id(value)] = node
        self._alive.append(value)
        node.meta.setdefault("val", value)

    def _constant(self, value: torch.Tensor) -> fx.Node:
        if isinstance(value, FakeTensor):
            raise InputError("distribute: a tensor of the model comes from outside of its graph; register it as a buffer")
        with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
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


class _Tracer(fx.Interpreter):
    def __init__(self, source: ForwardGraph, recorder: _JointRecorder, kind: str) -> None:
        super().__init__(source.module, garbage_collect_values=False)
        self.source, self.recorder, self.kind = source, recorder, kind

    def trace(self, values: Sequence[Any], differentiate: Sequence[int]) -> JointGraph:
        source, recorder = self.source, self.recorder
        count = len(source.held)
        names = [f"held_{name.replace('.', '_')}" for name in source.held]
        names += [f"input_{number}" for number in range(len(values) - count)]
        given = [
            recorder.input(name, value) if isinstance(value, torch.Tensor) else None
            for name, value in zip(names, values, strict=True)
        ]
        arguments = pytree.tree_map_only(torch.Tensor, _wrap, list(values))
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
        differentiated: Sequence[torch.Tensor | None] = ()
        if roots:
            differentiated = torch.autograd.grad([*roots.values()], [*wanted.values()], [*tangents.values()], allow_unused=True)
        gradients = {i: self._made(value) for i, value in zip(wanted, differentiated, strict=False) if value is not None}
        outputs = tuple(self._made(v) if isinstance(v, torch.Tensor) else v for v in wrapped)
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
            writes={name: self._own(node) for name, node in zip(source.held, written, strict=True) if node is not held[name]},
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
            if self.kind == "cuda" and target is _aten.dropout.default:
                # The op that its dropout calls there: the same masks as any other engine.
                return _aten.native_dropout.default(*args)[0]
        if target is _aten.view.default:
            target = _aten.reshape.default  # attention may lay its output out otherwise than where it was exported
        return super().call_function(target, args, kwargs)

    def _own(self, node: fx.Node) -> fx.Node:
        """Returns a node that makes the value itself."""
        if not is_view_node(node) and node.op != "placeholder":
            return node
        copy = self.recorder.graph.call_function(_aten.clone.default, (node,))
        copy.meta.update(val=node.meta["val"], owner=node.meta.get("owner"), backward=False)
        return copy

    def _made(self, value: torch.Tensor) -> fx.Node:
        """Returns a node of a value that some op makes, be it as a view."""
        node = self.recorder.node(from_functional(value))
        return self._own(node) if base_of(node).op == "placeholder" else node


def _wrap(value: torch.Tensor) -> torch.Tensor:
    return to_functional(value.detach()).requires_grad_(value.requires_grad)


def _summands(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the summands of a last sum: each part is collected where it is made, and sent once per step."""
    parts, waiting = [], [node]
    while waiting:
        part = waiting.pop()
        read_elsewhere = len(part.users) > (part is not node)
        if part.target is _aten.add.Tensor and not read_elsewhere and not part.kwargs and part.meta["backward"]:
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


def why_not_traced(model: nn.Module, inputs: Any, method: str, num_ops: int) -> str | None:
    """Explains why the engine of placements cannot trace a model with example inputs; None where it found no reason.

    `method` is the method that captured the model, `num_ops` the number of its forward ops.
    """
    if method != "export":
        return "torch.export does not follow its forward"
    args, kwargs = split_inputs(inputs)
    try:
        if num_ops <= _MOST_TRACED:
            joint_graph(forward_graph(meta_copy(model), args, kwargs, loss=any_value))
        else:  # on fake tensors, which raise where a graph would lose something
            refuse_backward_hooks(model)
            mode = new_fake_mode()
            fake = fake_copy(model, mode)
            fake_args, fake_kwargs = fake_inputs((args, kwargs), mode)
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with mode, any_dtype_grouped_mm(), refuse_functions(), refuse_recomputation(), RefuseLosses():
                    fake(*fake_args, **fake_kwargs)
    except (OwnBackwardError, RecomputationError) as error:
        return str(error)
    except InputError as error:
        return str(error).partition("; a placement of ops needs")[0]
    except Exception as error:  # the model's own code, or a trace of it
        return f"tracing it raised {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
    return None


def is_view_node(node: fx.Node) -> bool:
    """Returns whether every reader makes the node for itself: a view of all elements of its base, in any memory layout."""
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
    """Returns the op that makes a view of a base whose memory layout may be another than when it was traced."""
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
