"""The forward of a model as a graph whose nodes are whole modules, and the few ops between them.

While `torch.export` runs, every unit (`blocks.units`) is replaced by one op that only knows the shapes of the unit's results;
in the graph each such op then becomes a call of the unit itself. So a unit may do what export cannot follow (branches on
values, autograd functions of its own), and it keeps its parameters, hooks and names.
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

import torch
from torch import fx, nn

from rlplace.errors import InputError, show
from rlplace.model.capture.caches import caches_off
from rlplace.model.capture.export import export_training_graph
from rlplace.model.capture.fake import fake_copy, fake_inputs, new_fake_mode
from rlplace.model.torch_adapter import pytree
from rlplace.runtime.base.batches import Batch
from rlplace.runtime.strategy.blocks import Observed, observe, owner, shapes_of, units

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True, eq=False)
class UnitGraph:
    """The graph of a forward for inputs of one signature."""

    model: nn.Module  # the captured model
    # ``placeholder`` for every flat input, ``get_attr`` for parameters, buffers and constants, ``call_module`` for units,
    # ``call_function`` for ops between them, without writes but for the new values of buffers at the end; one flat tuple as
    # output
    graph: fx.Graph
    module: fx.GraphModule  # owner of the values of ``get_attr`` nodes
    units: dict[str, nn.Module]  # modules by path
    out_spec: Any  # pytree spec of the model's output
    # call arguments of the first call of every unit, values on the meta device
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]]

    @property
    def output(self) -> Any:
        """The model's output on fake tensors."""
        returned: Any = list(self.graph.nodes)[-1].args[0]
        flat = [node.meta.get("val") if isinstance(node, fx.Node) else node for node in returned]
        return pytree.tree_unflatten(flat, self.out_spec)


class _Call(NamedTuple):
    """One call of a unit: leaves and structure of its arguments and results."""

    unit: str
    leaves: list[Any]
    in_spec: Any
    results: list[Any]
    out_spec: Any


_calls: list[_Call] = []


@torch.library.custom_op("rlplace::unit", mutates_args=())
def _unit(call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    raise RuntimeError("the op represents a module and is never run")


@_unit.register_fake
def _(call: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    noted = (value for value in _calls[call].results if isinstance(value, torch.Tensor))
    return [torch.empty_strided(value.shape, value.stride(), dtype=value.dtype) for value in noted]


def capture(model: nn.Module, inputs: Batch, blocks: Iterable[str] = (), seen: Observed | None = None) -> UnitGraph:
    """Records a forward.

    Args:
        model: Real or meta module, in the mode that is to be run. It is called on fake tensors; nothing is allocated.
        inputs: Keyword inputs of one micro-batch; only shapes and dtypes matter.
        blocks: Paths that stay whole besides the model's blocks: those that a strategy names.
        seen: Observations of a run for these units; None: it is run.

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
            mode = new_fake_mode()  # results of units are on the processor, parameters between units would not be
            source, inputs = fake_copy(model, mode), fake_inputs(dict(inputs), mode)
        region, quiet = torch.autocast("cpu", enabled=False), warnings.catch_warnings()
        opaque = _opaque(dict(units(source, blocks)), seen.results)
        with caches_off(source), opaque, torch.enable_grad(), region, quiet:
            warnings.simplefilter("ignore", FutureWarning)  # torch copies what it tells others not to use
            program = export_training_graph(source, (), inputs).program
            if _writes(program.graph_module):  # then what writes in place makes a new value, which any stage may read
                program = program.run_decompositions({})
        recorded = program.module(check_guards=False)
        _open_regions(recorded)
        for name, module in found.items():
            recorded.add_submodule(name, module)
        _call_units(recorded.graph)
        for path in _read_alone(recorded, found):  # then its parameters are like those of the root
            del found[path]
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
    return UnitGraph(model, recorded.graph, recorded, found, program.call_spec.out_spec, calls)


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

    def detached(value: fx.Node) -> fx.Node:
        if not isinstance(value.meta.get("val"), torch.Tensor):
            return value
        made = graph.call_function(torch.ops.aten.detach.default, (value,))
        made.meta.update(value.meta)
        return made

    for node in [node for node in graph.nodes if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled]:
        enabled, inner, *operands = node.args
        region = attrgetter(str(inner.target))(module)
        _open_regions(region)
        values = dict(zip((one for one in region.graph.nodes if one.op == "placeholder"), operands, strict=True))
        with graph.inserting_before(node):
            for one in [one for one in region.graph.nodes if one.op == "get_attr"]:
                setattr(module, f"{inner.target}_{one.target}", attrgetter(str(one.target))(region))
                values[one] = graph.get_attr(f"{inner.target}_{one.target}")
            made: Any = graph.graph_copy(region.graph, values)
            made = made if enabled else pytree.tree_map_only(fx.Node, detached, made)
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


def _read_alone(recorded: fx.GraphModule, found: Mapping[str, nn.Module]) -> set[str]:
    """Returns units that are never called and whose parameters are read, such as a table of positions by its weight."""
    called = {str(node.target) for node in recorded.graph.nodes if node.op == "call_module"}
    read = [str(node.target) for node in recorded.graph.nodes if node.op == "get_attr"]
    owners = {owner(target, found) for target in read if isinstance(attrgetter(target)(recorded), nn.Parameter)}
    return {path for path in owners if path is not None and path not in called}


def uncalled(captured: UnitGraph, blocks: Iterable[str]) -> list[str]:
    """Returns blocks that the forward does not call, such as the tower of images of a step with words alone."""
    called = {str(node.target) for node in captured.graph.nodes if node.op == "call_module"}
    return [path for path in blocks if path in captured.units and path not in called]


@contextlib.contextmanager
def _opaque(found: dict[str, nn.Module], results: dict[str, Any]) -> Iterator[None]:
    """Makes one op of every call of a unit inside."""

    def stand_in(name: str, *args: Any, **kwargs: Any) -> Any:
        leaves, in_spec = pytree.tree_flatten((args, kwargs))
        if (strange := strange_in(leaves)) is not None:
            raise InputError(
                f"native: block {show(name)} gets a {type(strange).__name__}, which is no tensor that could cross from stage "
                "to stage; for a cache of keys and values, set model.config.use_cache = False"
            )
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        wanted, out_spec = pytree.tree_flatten(_noted(name, results[name], shapes_of(leaves)))
        _calls.append(_Call(name, leaves, in_spec, wanted, out_spec))
        made = iter(_unit(len(_calls) - 1, tensors))
        return pytree.tree_unflatten([next(made) if isinstance(v, torch.Tensor) else v for v in wanted], out_spec)

    before = {name: dict(vars(module)) for name, module in found.items()}
    try:
        # Hooks run when the unit itself is called; those that collect the model's own output run here, too.
        for name, module in found.items():
            noting = {key: hook for key, hook in module._forward_hooks.items() if _notes_outputs(hook)}
            vars(module).update({key: OrderedDict() for key in _HOOKS} | {"forward": partial(stand_in, name)})
            module._forward_hooks.update(noting)
        yield
    finally:
        for name, module in found.items():
            for key in _HOOKS:  # the model may have added some, once for all its calls
                before[name][key].update(vars(module)[key])
            vars(module).pop("forward")
            vars(module).update(before[name])


def _notes_outputs(hook: Any) -> bool:
    """Returns whether a hook collects hidden states for the model's own output, as transformers' do."""
    return str(getattr(hook, "__module__", "")).startswith("transformers.utils.")


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def strange_in(call: Any) -> Any:
    """Returns the first argument of a call that is neither a tensor nor a plain value, such as a cache; None without one."""
    return next((leaf for leaf in pytree.tree_leaves(call) if not isinstance(leaf, (*_PLAIN, torch.Tensor))), None)


def _noted(name: str, results: dict[Any, Any], shapes: tuple[Any, ...]) -> Any:
    """Returns a unit's results for arguments of these shapes; export may add a mask that a run leaves out."""
    if shapes in results:
        return results[shapes]
    if len({shapes_of(result) for result in results.values()}) != 1:
        raise InputError(f"native: block {show(name)} gets other arguments when it is exported than when it runs")
    return next(iter(results.values()))


def _leaf(output: Any, number: int) -> torch.Tensor:
    """Returns the n-th tensor of a unit's output."""
    tensors: list[torch.Tensor] = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return tensors[number]


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
