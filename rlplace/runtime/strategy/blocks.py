"""The blocks of a model, which are the units of strategies and stay its own modules, and observations of them in a forward.

A block is an element of an outermost module list, a module that reads parameters of its own, or a leaf module with parameters
or buffers. Containers between the root and its blocks are no blocks; neither are leaf modules without any state outside of
lists, which are recorded as ops. A strategy may name larger modules: a named module stays whole.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from rlplace.errors import InputError, show
from rlplace.model.capture.caches import caches_off
from rlplace.model.capture.export import TOGGLES, lies_in, loses
from rlplace.model.capture.fake import any_dtype_grouped_mm, autocast_region, fake_copy, fake_inputs, new_fake_mode
from rlplace.model.capture.masks import masks_of_runs
from rlplace.model.capture.outputs import own_loss, register_dataclasses
from rlplace.model.torch_adapter import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, pytree
from rlplace.runtime.base.batches import Batch
from rlplace.runtime.strategy.lists import Lists, watch_lists
from rlplace.runtime.torch_adapter import BatchNorm, DropoutNd, NormBase

Seen = TypeVar("Seen")

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_KEPT = (DropoutNd, NormBase)
"""Leaf modules that draw random numbers or keep statistics, with parameters or without."""


def block_names(model: nn.Module) -> tuple[str, ...]:
    """Returns paths of a model's blocks, in the order of its modules."""
    return tuple(path for path, module in units(model) if any(True for _ in module.parameters()))


def units(model: nn.Module, named: Iterable[str] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yields path and module of everything that stays whole when the model is cut: its blocks, and random leaf modules.

    Args:
        model: The model.
        named: Paths that a strategy names as blocks; modules inside of them are no units of their own. Of a list of modules its
            elements are units.

    Raises:
        InputError: A named path is no module.
    """
    chosen = set(named)
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in chosen:
        if not path or path not in modules:
            raise InputError(f"strategy: block {show(path)} is no module of {type(model).__name__}; see block_names(model)")
    chosen = {inner for path in chosen for inner in _callable(path, modules[path])}
    seen: set[int] = set()
    for path, module in _inside(model, "", chosen, isinstance(model, _LISTS)):
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module


def _callable(path: str, module: nn.Module) -> Iterator[str]:
    """Yields the path of a module, or those of the modules in a list, which has no forward of its own."""
    if type(module) not in (nn.ModuleList, nn.ModuleDict):
        yield path
        return
    for name, child in module.named_children():
        yield from _callable(f"{path}.{name}", child)


def _inside(module: nn.Module, path: str, chosen: set[str], listed: bool) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        container, around = isinstance(child, _LISTS), any(one.startswith(f"{inner}.") for one in chosen)
        whole = isinstance(child, _KEPT) or any(True for _ in child.parameters(recurse=False))
        if inner in chosen or (not container and not around and (listed or whole)):
            yield inner, child
        else:
            yield from _inside(child, inner, chosen, container)


def owner(path: str, blocks: Iterable[str]) -> str | None:
    """Returns the block that a module or parameter path lies in; the innermost where blocks are nested."""
    return max((block for block in blocks if lies_in(path, block)), key=len, default=None)


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Returns names of parameters that are one tensor, for every such tensor."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(same) for same in names.values() if len(same) > 1)


def has_batch_norm(model: nn.Module) -> bool:
    """Returns whether a module computes statistics over the samples of its process; frozen norms, in evaluation, do not."""
    norms = (module for module in model.modules() if isinstance(module, NormBase) and not isinstance(module, nn.SyncBatchNorm))
    trained = (module for module in norms if module.training or not model.training or module.running_mean is None)
    return any(isinstance(module, BatchNorm) or module.track_running_stats for module in trained)


def has_sync_norm(model: nn.Module) -> bool:
    """Returns whether a module computes statistics over all processes of the job."""
    return any(isinstance(module, nn.SyncBatchNorm) and module.process_group is None for module in model.modules())


class Observed(NamedTuple):
    """Observations of one run of a forward."""

    results: dict[str, Any]  # by unit its results, by the shapes of its arguments
    calls: dict[str, Any]  # by unit the arguments of its first call
    # units whose parameters are read while they do not run, as those are that a unit returns a view of, or whose results are
    # written in place: hooks on a unit see neither
    outside: set[str]
    lost: str | None  # something that the forward does outside of units and that a record of it cannot hold; None without it
    reentrant: bool  # whether the forward calls reentrant checkpoints
    # whether parameters may get no gradient, as those of an expert without tokens or of a teacher under `no_grad`
    unreached: bool
    varies: bool = False  # whether the forward reads values, by which it may reach other parameters
    skips: bool = False  # whether it does so, and parameters got no gradient on zeros or on ones
    branches: bool = False  # whether it reads them outside of units, and may call others
    reused: str | None = None  # a parameter that ops of one unit read several times, with or without others between
    lists: Lists | None = None  # findings about lists of experts


def observe(model: nn.Module, inputs: Batch, found: Mapping[str, nn.Module]) -> Observed:
    """Runs the forward on fake tensors and observes its units; where a unit reads values, runs the model itself on zeros."""
    mode = new_fake_mode()
    try:
        return _observe(fake_copy(model, mode), fake_inputs(dict(inputs), mode), found, mode)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        if any(isinstance(parameter, FakeTensor) or parameter.is_meta for parameter in model.parameters()):
            raise
        branches = getattr(error, "outside", False)
    runs = with_values(model, inputs, lambda plain: _observe(model, plain, found, contextlib.nullcontext()))
    if runs:  # other values go other ways
        skips, branches = any(seen.unreached for seen in runs), branches or any(seen.branches for seen in runs)
        return runs[0]._replace(unreached=True, varies=True, skips=skips, branches=branches)
    raise InputError(
        f"native: the forward of {type(model).__name__} looks at values, and runs neither with zeros nor with ones; plan with "
        "replicas, or on one device"
    )


def with_values(model: nn.Module, inputs: Batch, run: Callable[[Batch], Seen]) -> list[Seen]:
    """Runs something on a model itself, on zeros and on ones; returns what came of runs without errors."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    where = next(model.parameters()).device
    runs = list[Seen]()
    try:
        for fill in (torch.zeros_like, torch.ones_like):  # lengths are 1 at least
            plain = pytree.tree_map_only(torch.Tensor, partial(fill, device=where), dict(inputs))
            with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):  # the model's own code runs
                runs.append(run(plain))
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    return runs


_LOOKS = frozenset(("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique", "masked_select"))
"""Names of functions that give Python a value of a tensor, or a shape that depends on values."""


class _Reads(TorchFunctionMode):
    """Reads of parameters of units that do not run, and of values outside of units.

    Attributes:
        running: Units whose forward runs, the innermost last.
        outside: Units whose parameters were read.
        uses: How often ops of a unit read a parameter, by both.
        lost: A hook on an activation outside of units, or a change of what is trained.
        looks: Whether values were read while no unit ran.
    """

    def __init__(self, units_of: dict[int, str]) -> None:
        super().__init__()
        self._units_of, self.running, self.outside = units_of, list[str](), set[str]()
        self.uses = Counter[tuple[str, int]]()
        self.lost: str | None = None
        self.looks = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.looks |= function.__name__ in _LOOKS and not self.running
        if function.__name__ != "__get__":  # its dtype, say
            leaves = pytree.tree_leaves((args, kwargs))
            read = {id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)} & self._units_of.keys()
            self.uses.update((self.running[-1] if self.running else "", parameter) for parameter in read)
            self.outside |= {self._units_of[parameter] for parameter in read} - set(self.running)
        changed = loses(function, args, kwargs)
        if changed is not None and (not self.running or changed == TOGGLES):
            self.lost = self.lost or changed
        return function(*args, **(kwargs or {}))


def _observe(model: nn.Module, inputs: Any, found: Mapping[str, nn.Module], mode: Any) -> Observed:
    results: dict[str, Any] = {name: {} for name in found}
    calls: dict[str, Any] = {}
    returned: list[tuple[str, torch.Tensor, int]] = []
    reads = _Reads({id(p): name for name in found for p in model.get_submodule(name).parameters()})
    held = {p.untyped_storage()._cdata: name for name in found for p in model.get_submodule(name).parameters()}

    def enter(name: str, module: nn.Module, args: Any) -> None:
        reads.running.append(name)

    def note(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        reads.running.pop()
        results[name][shapes_of((args, kwargs))] = pytree.tree_map(_meta, output)
        calls.setdefault(name, pytree.tree_map(_meta, (args, kwargs)))
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        returned.extend((name, leaf, leaf._version) for leaf in leaves)

    hooks = [model.get_submodule(name).register_forward_hook(partial(note, name), with_kwargs=True) for name in found]
    hooks += [model.get_submodule(name).register_forward_pre_hook(partial(enter, name)) for name in found]
    # On fake processor tensors, which CUDA's autocast does not reach, the run follows its rules by another way.
    cuda = torch.is_autocast_enabled("cuda")
    region = autocast_region(torch.get_autocast_dtype("cuda") if cuda else None, "cuda")
    checkpoints = mock.Mock(wraps=CheckpointFunction.apply)
    watched = mock.patch.object(CheckpointFunction, "apply", checkpoints)
    try:
        with (
            any_dtype_grouped_mm(),
            caches_off(model),
            masks_of_runs(model, (), inputs),
            torch.enable_grad(),
            region,
            mode,
            reads,
            watched,
            watch_lists(model) as lists,
        ):
            output = model(**inputs)
            register_dataclasses(output)
    except Exception as error:
        vars(error)["outside"] = not reads.running
        raise
    finally:
        for hook in hooks:
            hook.remove()
    trained = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    several = {parameter for (_, parameter), times in reads.uses.items() if times > 1}
    reused = next((name for parameter, name in trained.items() if parameter in several), None)
    unreached = not trained.keys() <= _reached(output)
    outside = reads.outside | {name for name, leaf, version in returned if leaf._version != version}
    outside |= {name for name, leaf, _ in returned if held.get(leaf.untyped_storage()._cdata) == name}
    for path in (path for path in lists if owner(path, found) is None):
        lists[path] = "the module around it is part of no block; put it into a list of layers"
    seen = Observed(results, calls, outside, reads.lost, checkpoints.called, unreached, branches=reads.looks, reused=reused)
    return seen._replace(lists=lists)


def reads(model: nn.Module, inputs: Batch, name: str) -> bool:
    """Returns whether the loss of a forward depends on a number among its inputs, such as the one that it is divided by.

    Raises:
        InputError: The forward does not run on fake tensors.
    """
    mode = new_fake_mode()
    fake = fake_inputs({**inputs, name: torch.ones((), requires_grad=True)}, mode)
    try:
        with any_dtype_grouped_mm(), torch.enable_grad(), torch.autocast("cpu", enabled=False), mode:
            output = fake_copy(model, mode)(**fake)
            register_dataclasses(output)
    except Exception as error:  # the model's own code runs
        raise InputError(
            f"native: whether the loss divides by {name} is not known, since the forward does not run on fake tensors "
            f"({type(error).__name__}); leave it out, or give distribute(reduction='sum') where it does"
        ) from None
    return id(fake[name]) in _reached(output)


def _reached(output: Any) -> set[int]:
    """Returns ids of the leaves of autograd behind the loss, or behind all results of a forward without one."""
    loss = own_loss(output)
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


def shapes_of(value: Any) -> tuple[Any, ...]:
    """Returns shape and dtype of every tensor in a value."""
    return tuple((tuple(leaf.shape), leaf.dtype) for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
