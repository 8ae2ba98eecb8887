"""Mixtures that keep a list of experts and call them one by one, such as a loop over `nn.ModuleList`.

Their forward runs twice. In the first run something stands in for every expert, notes the rows that it is handed, and returns
zeros. The rows travel, every process works on those of its experts, and in the second run the stand-ins return the results.
Gradients of rows go back through the first run, those of the router through both. `watch_lists` finds out whether this is what
the plain forward computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from rlplace.errors import InputError
from rlplace.model.torch_adapter import pytree
from rlplace.runtime.torch_adapter import with_parameters, without_functions, without_modes

CALLED = "called"
"""Attribute of a spread expert: whether a process of its group has called it since a step has begun."""

Lists = Mapping[str, str | int]
"""By path of every list of experts the width of the rows that they are called with, or why they cannot be spread."""

_OF_MODULES = frozenset(vars(nn.Module()))
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def expert_lists(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yields path of every list of experts, the module that has it, and its name there; shared experts are no such list."""
    for path, mixture in model.named_modules():
        for name, held in mixture._modules.items():
            named = "expert" in name and "shared" not in name
            if named and type(held) is nn.ModuleList and any(True for _ in held.parameters()):
                yield f"{path}.{name}" if path else name, mixture, name


@contextlib.contextmanager
def watch_lists(model: nn.Module) -> Iterator[dict[str, str | int]]:
    """Watches how a forward calls its lists of experts; what it finds is complete once the forward has run."""
    found: dict[str, str | int] = {}
    with contextlib.ExitStack() as inside:
        for path, mixture, name in [*expert_lists(model)]:
            found[path] = "no forward of the module around it was seen"
            watched = partial(_watched, found, path, mixture, name, mixture.forward)
            inside.enter_context(mock.patch.object(mixture, "forward", watched))
        yield found


class _StandIn(nn.Module):
    def __init__(self, number: int, answer: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.number, self._answer = number, answer

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
            raise InputError("an expert is called with other than one tensor of rows")
        return self._answer(self.number, args[0])


@contextlib.contextmanager
def _stand_ins(mixture: nn.Module, name: str, answer: Callable[[int, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    held: Any = mixture._modules[name]
    mixture._modules[name] = nn.ModuleList(_StandIn(number, answer) for number in range(len(held)))
    try:
        yield
    finally:
        mixture._modules[name] = held


def _own_buffers(mixture: nn.Module) -> Any:
    """Makes a forward write to copies of the buffers of a mixture."""
    return with_parameters(mixture, {name: buffer.clone() for name, buffer in mixture.named_buffers()})


def _watched(
    found: dict[str, str | int],
    path: str,
    mixture: nn.Module,
    name: str,
    forward: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Runs a forward with and without stand-ins, whose results have a gradient that no rows may have."""
    held: Any = mixture._modules[name]
    given: list[torch.Tensor] = []

    def answer(number: int, rows: torch.Tensor) -> torch.Tensor:
        given.append(rows)
        made: torch.Tensor = held[number](rows)
        return made.detach() + mark

    before, versions = _plain_state(mixture), _versions((args, kwargs))
    try:
        with without_functions(), torch.enable_grad(), _own_buffers(mixture), _stand_ins(mixture, name, answer):
            mark = torch.zeros((), requires_grad=True)
            forward(*args, **kwargs)
            live = [rows.sum() for rows in given if rows.requires_grad]
            depends = bool(live) and torch.autograd.grad(live, mark, allow_unused=True)[0] is not None
    except Exception as error:  # the model's own code runs
        found[path] = f"its experts cannot be called apart from it ({type(error).__name__}: {error})"
    else:
        changed = next((key for key, value in _plain_state(mixture).items() if before.get(key, value) != value), None)
        widths = {rows.shape[-1] for rows in given}
        if depends:
            found[path] = "an expert is called with what others return, so that their rows cannot be exchanged at once"
        elif changed is not None:
            found[path] = f"the forward changes {changed}, a plain attribute, and it would run twice"
        elif _versions((args, kwargs)) != versions:
            found[path] = "the forward writes to what it is called with, and it would run twice"
        elif len(widths) > 1:
            found[path] = "its experts are called with rows of unlike widths"
        elif widths:
            found[path] = widths.pop()
    return forward(*args, **kwargs)


def _plain_state(mixture: nn.Module) -> dict[str, Any]:
    """Returns numbers, words, and lengths of collections among the attributes of a mixture's modules."""
    found: dict[str, Any] = {}
    for path, module in mixture.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
        kept = {name: value for name, value in own.items() if isinstance(value, (int, float, str))}
        kept |= {name: len(value) for name, value in own.items() if isinstance(value, (list, dict, set))}
        found |= {f"{path}.{name}".lstrip("."): value for name, value in kept.items()}
    return found


def _versions(values: Any) -> list[int]:
    return [leaf._version for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class ListedExperts:
    """The forward of a mixture whose experts are spread.

    Args:
        mixture: Has the list; of other processes' experts it holds none.
        name: Of the list.
        mesh: The expert group.
        experts: This process's.
        one: An expert on the meta device.

    Attributes:
        exchange: Has processes run their experts: takes rows [n, width], the expert of each [n, 1], and ones [n, 1].
    """

    exchange: Callable[..., torch.Tensor]

    def __init__(self, mixture: nn.Module, name: str, mesh: DeviceMesh, experts: Sequence[nn.Module], one: nn.Module) -> None:
        self._mixture, self._name, self._forward, self._one = mixture, name, mixture.forward, one
        self._mesh, self._experts, self._widths = mesh, experts, dict[int, int]()
        self._called: Sequence[int] = ()  # experts of this pass
        for expert in experts:
            vars(expert)[CALLED] = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward."""
        calls: list[tuple[int, torch.Tensor]] = []

        def note(number: int, rows: torch.Tensor) -> torch.Tensor:
            calls.append((number, rows))
            kind = rows.device.type
            dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype
            return rows.new_zeros(*rows.shape[:-1], self.width(rows.shape[-1]), dtype=dtype)

        kind = self._mesh.device_type
        devices = [] if kind == "cpu" else [torch.accelerator.current_device_index()]
        with torch.random.fork_rng(devices, device_type="cuda" if kind == "cpu" else kind), _own_buffers(self._mixture):
            with _stand_ins(self._mixture, self._name, note):
                self._forward(*args, **kwargs)
        made, end = self._exchanged(calls)
        given = iter(zip(calls, made, strict=True))

        def give(number: int, rows: torch.Tensor) -> torch.Tensor:
            (before, its), result = next(given, ((-1, rows), rows))
            if before != number or its.shape != rows.shape:
                raise InputError(
                    f"native: the experts of {type(self._mixture).__name__} are called otherwise once others have returned "
                    "their results; plan with expert=1"
                )
            return result.view(*rows.shape[:-1], -1)

        with _stand_ins(self._mixture, self._name, give):
            output = self._forward(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, lambda leaf: _behind(leaf, end), output)

    def width(self, width: int) -> int:
        """Returns the width of what experts return for rows of a width."""
        if width not in self._widths:
            first = next(self._one.parameters())
            with torch.no_grad(), without_modes():  # selective recomputation would keep the results
                self._widths[width] = self._one(torch.empty(1, width, dtype=first.dtype, device="meta")).shape[-1]
        return self._widths[width]

    def _exchanged(self, calls: list[tuple[int, torch.Tensor]]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Returns results of the calls, and no rows of them, by which every process takes part in the backward."""
        held: Any = self._mixture._modules[self._name]
        order = sorted(range(len(calls)), key=lambda place: calls[place][0])
        flat = [calls[place][1].reshape(-1, calls[place][1].shape[-1]) for place in order]
        told = torch.zeros(len(held) + 2, dtype=torch.int64)
        for number, rows in calls:
            told[number] = 1
            told[-2], told[-1] = rows.shape[-1], _DTYPES.index(rows.dtype)
        told = told.to(self._mesh.device_type)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._mesh.get_group())
        *called, width, dtype = told.tolist()
        if not width:
            raise InputError("native: no process of an expert group has rows for any expert; plan with expert=1")
        self._called = [reached for expert, reached in zip(held, called, strict=True) if CALLED in vars(expert)]
        for expert, reached in zip(self._experts, self._called, strict=True):
            vars(expert)[CALLED] |= bool(reached and torch.is_grad_enabled())
        rows = torch.cat(flat) if flat else torch.empty(0, width, dtype=_DTYPES[dtype], device=told.device)
        if torch.is_grad_enabled() and not rows.requires_grad:
            rows.requires_grad_()  # of all processes or of none, since the backward exchanges gradients
        lengths = [len(each) for each in flat]
        numbers = torch.tensor([calls[place][0] for place in order], dtype=torch.int64)
        chosen = numbers.repeat_interleave(torch.tensor(lengths, dtype=torch.int64)).to(rows.device).unsqueeze(1)
        made = self.exchange(rows, chosen, rows.new_ones(len(rows), 1))
        *parts, end = torch.unsafe_split_with_sizes(made, [*lengths, 0])  # which a forward may write to
        results = dict(zip(order, parts, strict=True))
        return [results[place] for place in range(len(calls))], end

    def run_own(self, rows: torch.Tensor, chosen: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """Runs this process's experts on their rows; those that no process calls get no gradient.

        Args:
            rows: [n, width].
            chosen: int64 [n, 1], numbers of this process's experts.
        """
        order = chosen.flatten().argsort(stable=True)
        came = rows[order]
        parts = came.split(torch.bincount(chosen.flatten(), minlength=len(self._experts)).tolist())
        made: list[torch.Tensor] = []
        for expert, part, called in zip(self._experts, parts, self._called, strict=True):
            if called or isinstance(expert, FSDPModule):  # whose processes gather its parameters together
                made.append(expert(part))
            elif len(part):  # a row that stands for none, by which the backward goes on
                with torch.no_grad():
                    result = expert(part)
                made.append(result + (0 * part.sum(1, keepdim=True)).to(result.dtype))
        results = torch.cat(made)
        if torch.is_grad_enabled():  # gradients of experts are means over the processes of the group: pytorch #160285
            came.register_hook(lambda gradient: gradient * self._mesh.size())
            results.register_hook(lambda gradient: gradient / self._mesh.size())
        return results[order.argsort()]


class _Behind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(end)  # so that recomputation comes as far
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, torch.zeros_like(ctx.saved_tensors[0])


def _behind(value: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """Returns a value whose backward runs that of what has made `end`, too."""
    if not value.is_floating_point():
        return value
    made: torch.Tensor = _Behind.apply(value, end)  # type: ignore[no-untyped-call]
    return made
