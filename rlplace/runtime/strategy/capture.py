"""The forward of a model as a graph whose nodes are whole modules, and the few ops between them.

While `torch.export` runs, every unit (`blocks.units`) is replaced by one op that only knows the shapes of what the unit
returns; in the graph each such op then becomes a call of the unit itself. So a unit may do what export cannot follow (branches
on values, autograd functions of its own), and it keeps its parameters, hooks and names.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from rlplace.errors import InputError, show
from rlplace.model.capture.export import TOGGLES, export_training_graph, loses
from rlplace.model.capture.fake import any_dtype_grouped_mm, autocast_region, fake_copy, fake_inputs, new_fake_mode
from rlplace.model.torch_adapter import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, pytree
from rlplace.runtime.base.batches import Batch
from rlplace.runtime.strategy.blocks import units

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True, eq=False)
class Captured:
    """A forward for inputs of one signature.

    Attributes:
        model: What was captured.
        graph: ``placeholder`` for every flat input, ``get_attr`` for parameters, buffers and constants, ``call_module`` for
            units, ``call_function`` for what is between them, without writes but for the new values of buffers at the end; one
            flat tuple as output.
        module: What the ``get_attr`` nodes look their values up in.
        units: Modules by path.
        out_spec: pytree spec of the model's output.
        calls: Call arguments of the first call of every unit, values on the meta device.
    """

    model: nn.Module
    graph: fx.Graph
    module: fx.GraphModule
    units: dict[str, nn.Module]
    out_spec: Any
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]]

    @property
    def output(self) -> Any:
        """What the model returns, with stand-ins for its tensors."""
        returned: Any = list(self.graph.nodes)[-1].args[0]
        flat = [node.meta.get("val") if isinstance(node, fx.Node) else node for node in returned]
        return pytree.tree_unflatten(flat, self.out_spec)


@dataclass
class _Call:
    """One call of a unit: structure of its arguments and results, and what of them are no tensors."""

    unit: str
    leaves: list[Any]
    in_spec: Any
    results: list[Any]
    out_spec: Any


_calls: list[_Call] = []


@torch.library.custom_op("rlplace::unit", mutates_args=())
def _unit(call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    raise RuntimeError("the op stands for a module and is never run")


@_unit.register_fake
def _(call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    noted = (value for value in _calls[call].results if isinstance(value, torch.Tensor))
    return [torch.empty_strided(value.shape, value.stride(), dtype=value.dtype) for value in noted]


def capture(model: nn.Module, inputs: Batch, blocks: Iterable[str] = (), seen: Observed | None = None) -> Captured:
    """Records a forward.

    Args:
        model: Real or meta module, in the mode that is to be run. It is called on fake tensors; nothing is allocated.
        inputs: Keyword inputs of one micro-batch; only shapes and dtypes matter.
        blocks: Paths that stay whole besides the model's blocks: what a strategy names.
        seen: What a run has shown for these units; None: it is run.

    Raises:
        InputError: The forward cannot be recorded, with the reason.
    """
    found = dict(units(model, blocks))
    try:
        seen = seen or observe(model, inputs, found)
        calls, source = seen.calls, model
        if seen.reentrant:
            raise InputError(
                "native: the model calls reentrant checkpoints, which torch's pipelines do not run; give use_reentrant=False"
            )
        if seen.lost is not None:
            raise InputError(f"native: {seen.lost}, which a pipeline would lose; plan with pipeline=1")
        if any(type(parameter) is nn.Parameter and parameter.is_meta for parameter in model.parameters()):
            mode = new_fake_mode()  # what stands for a unit is on the processor, what is read between units would not be
            source, inputs = fake_copy(model, mode), fake_inputs(dict(inputs), mode)
        region = torch.autocast("cpu", enabled=False)
        with _opaque(dict(units(source, blocks)), seen.results), torch.enable_grad(), region, warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch copies what it tells others not to use
            program = export_training_graph(source, (), inputs).program
            if _writes(program.graph_module):  # then what writes in place makes a new value, which any stage may read
                program = program.run_decompositions({})
        recorded = program.module(check_guards=False)
        _open_regions(recorded)
        for name, module in found.items():
            recorded.add_submodule(name, module)
        _call_units(recorded.graph)
    except InputError:
        raise
    except Exception as error:  # it is the model's own code that runs
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise InputError(
            f"native: the forward of {type(model).__name__} cannot be recorded ({type(error).__name__}: {reason}); "
            "strategies without a pipeline run it as it is"
        ) from error
    finally:
        _calls.clear()
    return Captured(model, recorded.graph, recorded, found, program.call_spec.out_spec, calls)


def _writes(module: fx.GraphModule) -> bool:
    """Returns whether an op of a graph, or of a graph in it, writes in place."""
    graphs = [inner.graph for inner in module.modules() if isinstance(inner, fx.GraphModule)]
    schemas = (getattr(node.target, "_schema", None) for graph in graphs for node in graph.nodes)
    return any(schema is not None and schema.is_mutable for schema in schemas)


def _open_regions(module: fx.GraphModule) -> None:
    """Puts the ops of regions without gradients where the regions stand, and refuses other regions around units.

    Raises:
        InputError: Units run under autocast, say, which a graph without the region would lose.
    """
    graph = module.graph
    for node in [node for node in graph.nodes if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled]:
        enabled, inner, *operands = node.args
        region = attrgetter(str(inner.target))(module)
        _open_regions(region)
        values = dict(zip((one for one in region.graph.nodes if one.op == "placeholder"), operands, strict=True))
        with graph.inserting_before(node):
            made: Any = ()
            for one in region.graph.nodes:
                if one.op == "output":
                    made = pytree.tree_map_only(fx.Node, values.__getitem__, one.args[0])
                elif one.op == "get_attr":
                    setattr(module, f"{inner.target}_{one.target}", attrgetter(str(one.target))(region))
                    values[one] = graph.get_attr(f"{inner.target}_{one.target}")
                elif one.op != "placeholder":
                    values[one] = graph.node_copy(one, values.__getitem__)
            if not enabled:
                for at, value in enumerate(made):
                    if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor):
                        detached = graph.call_function(torch.ops.aten.detach.default, (value,))
                        detached.meta.update(value.meta)
                        made = (*made[:at], detached, *made[at + 1 :])
        for user in list(node.users):
            user.replace_all_uses_with(made[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not inner.users:
            graph.erase_node(inner)
    read = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    regions = [inner for path, inner in module.named_modules() if path in read and isinstance(inner, fx.GraphModule)]
    if any(node.target is torch.ops.rlplace.unit.default for region in regions for node in region.graph.nodes):
        raise InputError(
            "native: blocks run inside of a region, such as autocast, that a record of the forward cannot hold; put the region "
            "inside of the blocks, or plan with pipeline=1"
        )


def _shapes(value: Any) -> tuple[Any, ...]:
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def uncalled(captured: Captured, blocks: Iterable[str]) -> list[str]:
    """Those of the blocks that the forward does not call, such as the tower of images of a step with words alone."""
    called = {str(node.target) for node in captured.graph.nodes if node.op == "call_module"}
    return [path for path in blocks if path in captured.units and path not in called]


class Observed(NamedTuple):
    """What a run of a forward showed.

    Attributes:
        results: By unit what it returns, by the shapes of its arguments.
        calls: By unit what it is first called with.
        outside: Units whose parameters are read while they do not run.
        lost: What the forward does outside of units that a record of it cannot hold; None where it does nothing such.
        reentrant: The forward calls reentrant checkpoints.
        branches: The forward looks at values outside of units.
        unreached: Parameters that may get no gradient, as those of an expert without tokens or of a teacher under `no_grad`.
    """

    results: dict[str, Any]
    calls: dict[str, Any]
    outside: set[str]
    lost: str | None
    reentrant: bool
    unreached: bool
    branches: bool = False


def observe(model: nn.Module, inputs: Batch, found: dict[str, nn.Module]) -> Observed:
    """Runs the forward on fake tensors, and looks at its units; where a unit looks at values, the model itself on zeros."""
    mode = new_fake_mode()
    try:
        return _observe(fake_copy(model, mode), fake_inputs(dict(inputs), mode), found, mode)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        if any(isinstance(parameter, FakeTensor) or parameter.is_meta for parameter in model.parameters()):
            raise
        branches = getattr(error, "outside", False)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    where = next(model.parameters()).device
    try:
        for fill in (torch.zeros_like, torch.ones_like):  # lengths are 1 at least
            plain = pytree.tree_map_only(torch.Tensor, partial(fill, device=where), dict(inputs))
            with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):  # the model's own code runs
                seen = _observe(model, plain, found, contextlib.nullcontext())
                return seen._replace(unreached=True, branches=branches)  # other values, other ways
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    raise InputError(
        f"native: the forward of {type(model).__name__} looks at values, and runs neither with zeros nor with ones; plan with "
        "replicas, or on one device"
    )


class _Reads(TorchFunctionMode):
    """Notes units whose parameters are read while they do not run.

    Attributes:
        running: Units whose forward runs, the innermost last.
        outside: What was found.
        lost: A hook on an activation outside of units, or a change of what is trained.
    """

    def __init__(self, units_of: dict[int, str]) -> None:
        super().__init__()
        self._units_of, self.running, self.outside = units_of, list[str](), set[str]()
        self.lost: str | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ != "__get__":  # its dtype, say
            read = {
                self._units_of.get(id(leaf)) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
            }
            self.outside |= {unit for unit in read if unit is not None and unit not in self.running}
        changed = loses(function, args, kwargs)
        if changed is not None and (not self.running or changed == TOGGLES):
            self.lost = self.lost or changed
        return function(*args, **(kwargs or {}))


def _observe(model: nn.Module, inputs: Any, found: dict[str, nn.Module], mode: Any) -> Observed:
    results: dict[str, Any] = {name: {} for name in found}
    calls: dict[str, Any] = {}
    reads = _Reads({id(p): name for name in found for p in model.get_submodule(name).parameters()})

    def enter(name: str) -> Any:
        return lambda module, args: reads.running.append(name)

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            reads.running.pop()
            results[name][_shapes((args, kwargs))] = pytree.tree_map(_meta, output)
            calls.setdefault(name, pytree.tree_map(_meta, (args, kwargs)))

        return hook

    hooks = [model.get_submodule(name).register_forward_hook(note(name), with_kwargs=True) for name in found]
    hooks += [model.get_submodule(name).register_forward_pre_hook(enter(name)) for name in found]
    # On fake processor tensors, which CUDA's autocast does not reach, the run follows its rules by another way.
    cuda = torch.is_autocast_enabled("cuda")
    region = autocast_region(torch.get_autocast_dtype("cuda") if cuda else None, "cuda")
    original, reentrant = CheckpointFunction.apply, list[bool]()

    def noted(*args: Any, **kwargs: Any) -> Any:
        reentrant.append(True)
        return original(*args, **kwargs)

    watched = mock.patch.object(CheckpointFunction, "apply", noted)
    try:
        with any_dtype_grouped_mm(), torch.enable_grad(), region, mode, reads, watched:
            output = model(**inputs)
    except Exception as error:
        vars(error)["outside"] = not reads.running
        raise
    finally:
        for hook in hooks:
            hook.remove()
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    return Observed(results, calls, reads.outside, reads.lost, bool(reentrant), not trained <= _reached(output))


def _reached(output: Any) -> set[int]:
    """Returns ids of the parameters that a gradient of the loss, or of all that a forward returned without one, flows
    back to.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    waiting = [leaf.grad_fn for leaf in pytree.tree_leaves(output if loss is None else loss) if isinstance(leaf, torch.Tensor)]
    seen, found = set[Any](), set[int]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.add(id(getattr(node, "variable", None)))
            waiting.extend(before for before, _ in node.next_functions)
    return found


def _meta(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta", requires_grad=leaf.requires_grad)


@contextlib.contextmanager
def _opaque(found: dict[str, nn.Module], results: dict[str, Any]) -> Iterator[None]:
    """Inside, calling a unit makes one op of it."""

    def stand_in(name: str) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, in_spec = pytree.tree_flatten((args, kwargs))
            strange = strange_in(leaves)
            if strange is not None:
                raise InputError(
                    f"native: block {show(name)} is handed a {type(strange).__name__}, which is no tensor that could cross "
                    "from stage to stage; for a cache of keys and values, set model.config.use_cache = False"
                )
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            wanted, out_spec = pytree.tree_flatten(_noted(name, results[name], _shapes(leaves)))
            _calls.append(_Call(name, leaves, in_spec, wanted, out_spec))
            made = iter(_unit(len(_calls) - 1, tensors))
            return pytree.tree_unflatten([next(made) if isinstance(v, torch.Tensor) else v for v in wanted], out_spec)

        return forward

    kept = {name: vars(module).get("forward") for name, module in found.items()}
    hooks = {name: {key: vars(module)[key] for key in _HOOKS} for name, module in found.items()}
    try:
        for name, module in found.items():
            module.forward = stand_in(name)
            vars(module).update({key: OrderedDict() for key in _HOOKS})  # they run when the unit itself is called
        yield
    finally:
        for name, module in found.items():
            vars(module).update(hooks[name])
            del module.forward
            if kept[name] is not None:
                module.forward = kept[name]  # type: ignore[assignment]


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def strange_in(call: Any) -> Any:
    """Returns the first of the arguments of a call that is neither a tensor nor a plain value, such as a cache; None without
    one.
    """
    return next((leaf for leaf in pytree.tree_leaves(call) if not isinstance(leaf, (*_PLAIN, torch.Tensor))), None)


def _noted(name: str, results: dict[Any, Any], shapes: tuple[Any, ...]) -> Any:
    """What a unit returns for arguments of these shapes; export may hand over a mask that a run leaves out."""
    if shapes in results:
        return results[shapes]
    if len({_shapes(result) for result in results.values()}) != 1:
        raise InputError(f"native: block {show(name)} gets other arguments when it is exported than when it runs")
    return next(iter(results.values()))


def _leaf(output: Any, number: int) -> torch.Tensor:
    """Returns the n-th tensor of what a unit returned."""
    tensor: torch.Tensor = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)][number]
    return tensor


def _call_units(graph: fx.Graph) -> None:
    """Puts calls of the units where their ops stand."""
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.rlplace.unit.default:
            continue
        call = _calls[node.args[0]]
        tensors = iter(node.args[1])
        leaves = [next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, call.in_spec)
        with graph.inserting_before(node):
            new = graph.create_node("call_module", call.unit, args, kwargs)
            new.meta["val"] = node.meta.get("val")
            alone = call.out_spec.is_leaf()
            for user in list(node.users):
                value = new if alone else graph.call_function(_leaf, (new, user.args[1]))
                value.meta["val"] = user.meta.get("val")
                user.replace_all_uses_with(value)
                graph.erase_node(user)
        graph.erase_node(node)
    graph.eliminate_dead_code(
        lambda node: node.op in ("placeholder", "output", "call_module") or written_buffer(node) is not None
    )


def written_buffer(node: fx.Node) -> fx.Node | None:
    """Returns the buffer that a node gives a new value."""
    written = node.args[0] if node.target is torch.ops.aten.copy_.default else None
    return written if isinstance(written, fx.Node) and written.op == "get_attr" else None
