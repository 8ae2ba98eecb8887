"""Models whose weights are made later: parameters on the meta device that know how their values come about.

A constructor runs as it is, except that every parameter goes to the meta device when a module registers it. What then writes
to it is recorded with the state of the random numbers, which go on as if it had been written: `make` repeats that for one
parameter alone and returns the bits that the plain model has. Beside what is kept, a process holds one parameter at a time, or
a piece of it, where it keeps a part of a matrix of normal or uniform numbers, which torch draws in order.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rlplace.errors import InputError
from rlplace.model.torch_adapter import TorchDispatchMode, pytree
from rlplace.runtime.base.ranks import bytes_of
from rlplace.runtime.torch_adapter import truncated_normal

_PIECE = 1 << 22
"""Elements that are drawn at once."""

_IN_ORDER = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
_BY_ELEMENT = (*_IN_ORDER, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)

_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class _PartOfStorage(NamedTuple):
    """A part of the storage of a parameter that a call was given."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(whole, self.size, self.stride, self.offset)


class _Written(NamedTuple):
    """One call that wrote a parameter."""

    func: Any
    args: tuple[Any, ...]  # the parameter and its views as `_PartOfStorage`
    kwargs: dict[str, Any]
    dtype: torch.dtype  # of the parameter then
    random: torch.Tensor | None  # state of the generator before it


class _Scratch:
    """One piece of memory for values of a moment: freed pieces of many sizes would not all return to the system."""

    def __init__(self) -> None:
        self._held = torch.empty(0, dtype=torch.uint8)

    def like(self, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor with undefined values, which the next one overwrites."""
        need = (
            (1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))) * dtype.itemsize
            if min(size, default=1)
            else 0
        )
        if need > self._held.numel():
            self._held = torch.empty(0, dtype=torch.uint8)  # frees before it allocates
            self._held = torch.empty(need, dtype=torch.uint8, device="cpu")
        flat = self._held[:need].view(dtype)
        return torch.as_strided(flat, size, stride)


class Deferred:
    """The origin of the values of one parameter.

    Args:
        scratch: Where values are made.
        like: The parameter, which may be on the meta device.
        value: What it was registered with: a tensor, a function that makes its storage again, or None for undefined values.
        offset: Of the parameter in that storage.
    """

    def __init__(
        self, scratch: _Scratch, like: torch.Tensor, value: torch.Tensor | Callable[[], torch.Tensor] | None, offset: int = 0
    ) -> None:
        self._scratch = scratch
        self._size, self._stride, self._dtype, self._value = like.size(), like.stride(), like.dtype, value
        self._offset = offset
        self.calls: list[_Written] = []

    def make(self) -> torch.Tensor:
        """Makes the values that the plain model has, on the processor, in memory that the next parameter made takes."""
        whole = self._scratch.like(self._size, self._stride, self._dtype)
        if callable(self._value):
            whole.copy_(torch.as_strided(self._value(), self._size, self._stride, self._offset))
        elif self._value is not None:
            whole.copy_(self._value)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for func, args, kwargs, dtype, random in self.calls:
                whole = whole.to(dtype)
                if random is not None:
                    torch.set_rng_state(random)
                args, kwargs = _filled((args, kwargs), whole)
                func(*args, **kwargs)
        return whole

    def make_part(self, axis: int, start: int, count: int) -> torch.Tensor:
        """Makes some rows (axis 0) or columns (axis 1) of a matrix as `make` does."""
        spans = [range(size) for size in self._size]
        spans[axis] = range(start, start + count)
        written = [self._rows_of(call) for call in self.calls]
        if len(spans) != 2 or self._value is not None or not all(written):
            return self.make().narrow(axis, start, count)
        own, columns = spans
        part = torch.empty(len(own), len(columns), dtype=self._dtype)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for (func, args, kwargs, _, random), rows in zip(self.calls, written, strict=True):
                if random is not None:
                    torch.set_rng_state(random)
                for piece in _pieces(rows, self._size[1]):
                    first, last = max(piece.start, own.start), min(piece.stop, own.stop)
                    if random is not None or first < last:
                        drawn = self._scratch.like((len(piece), self._size[1]), (self._size[1], 1), self._dtype)
                        func(drawn, *args[1:], **kwargs)
                    if first < last:
                        found = drawn[first - piece.start : last - piece.start, columns.start : columns.stop]
                        part[first - own.start : last - own.start] = found
                    if piece.stop >= own.stop:
                        break
        return part

    def _rows_of(self, call: _Written) -> range:
        """Returns the rows of a matrix that a call wrote; empty where it wrote parts of them, or not in order."""
        view, width = call.args[0], self._size[-1]
        if call.func not in _BY_ELEMENT or call.dtype != self._dtype or not isinstance(view, _PartOfStorage):
            return range(0)
        count, dense = math.prod(view.size), torch.empty(view.size, device="meta").stride()
        whole = view.stride == dense and self._stride == (width, 1) and not view.offset % width and not count % width
        return range(view.offset // width, (view.offset + count) // width) if whole else range(0)

    def digest(self) -> str:
        """Computes a text that differs where values do."""
        seen = hashlib.blake2b(digest_size=16)
        start = self._value() if callable(self._value) else self._value
        calls = ((call.func.__name__, call.args[1:], call.random) for call in self.calls)
        for part in pytree.tree_leaves((start, *calls)):
            seen.update(bytes_of(part) if isinstance(part, torch.Tensor) else str(part).encode())
        return seen.hexdigest()


def _pieces(rows: range, width: int) -> Iterator[range]:
    """Yields parts of rows whose numbers are those of all: torch makes 16 normal ones at a time, and the last 16 again."""
    step = 16 * max(1, _PIECE // (16 * width))
    edges = [*range(rows.start, max(rows.stop - step, rows.start + 1), step), rows.stop]
    for start, stop in itertools.pairwise(edges):
        yield range(start, stop)


def _filled(tree: Any, whole: torch.Tensor) -> Any:
    return pytree.tree_map_only(
        _PartOfStorage, lambda view: view.of(whole), tree, is_leaf=lambda leaf: isinstance(leaf, _PartOfStorage)
    )


class _WriteRecorder(TorchDispatchMode):
    """Records what writes parameters on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = _Scratch()
        self._parameters: list[nn.Parameter] = []
        self._by_storage: dict[int, Deferred] = {}
        self._origins: dict[int, Callable[[], torch.Tensor] | None] = {}  # by storage: of tensors that nothing has changed

    def register(self, parameter: nn.Parameter) -> None:
        """Moves a parameter to the meta device, in place."""
        if _meta(parameter) or type(parameter) is not nn.Parameter:
            return
        data = parameter.detach()
        origin = self._origins.get(data.untyped_storage()._cdata, data)
        empty = torch.empty_strided(data.size(), data.stride(), dtype=data.dtype, device="meta")
        made = nn.Parameter(empty, parameter.requires_grad)
        vars(made).update(vars(parameter))
        torch.utils.swap_tensors(parameter, made)
        parameter.deferred = Deferred(self._scratch, parameter, origin, int(data.storage_offset()))  # type: ignore[attr-defined]
        self._parameters.append(parameter)
        self._by_storage[parameter.untyped_storage()._cdata] = parameter.deferred  # type: ignore[attr-defined]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        random = torch.Tag.nondeterministic_seeded in func.tags
        written = tensors[0] if tensors and func._schema.is_mutable else None
        own = None if written is None or not _meta(written) else self.find(written)
        if own is not None and written is not None:
            return self.write(own, written, func, args, kwargs, random)
        state = torch.get_rng_state() if random and not tensors else None
        result = func(*args, **kwargs)
        if written is not None:
            self._origins.pop(written.untyped_storage()._cdata, None)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not _meta(leaf) and not any(leaf is one for one in tensors):
                key = leaf.untyped_storage()._cdata
                if func.overloadpacket.__name__ in _EMPTY:
                    self._origins[key] = None
                elif not tensors and kwargs.get("generator") is None:
                    self._origins[key] = _again(func, args, kwargs, state)
                elif all(key != one.untyped_storage()._cdata for one in tensors):  # no view
                    self._origins.pop(key, None)
        return result

    def find(self, tensor: torch.Tensor) -> Deferred | None:
        key = tensor.untyped_storage()._cdata
        if key not in self._by_storage:  # a cast gave parameters new storages
            self._by_storage = {p.untyped_storage()._cdata: p.deferred for p in self._parameters}  # type: ignore[attr-defined]
        return self._by_storage.get(key)

    def write(self, own: Deferred, written: torch.Tensor, func: Any, args: Any, kwargs: Any, random: bool) -> torch.Tensor:
        def kept(leaf: torch.Tensor) -> Any:
            if not _meta(leaf):
                return leaf.detach().clone()
            if self.find(leaf) is not own:
                raise InputError(
                    f"deferred_weights: {func} gives a parameter values computed from others that are not made yet; build this "
                    "model without it"
                )
            return _PartOfStorage(tuple(leaf.size()), leaf.stride(), int(leaf.storage_offset()))

        generator = kwargs.get("generator")
        state = (torch.get_rng_state() if generator is None else generator.get_state()) if random else None
        held, named = pytree.tree_map_only(torch.Tensor, kept, (args, {k: v for k, v in kwargs.items() if k != "generator"}))
        own.calls.append(_Written(func, held, named, written.dtype, state))
        if random:  # the numbers go on as if it had been written
            flat = func in _IN_ORDER and written.is_contiguous()
            for piece in _pieces(range(written.numel()), 1) if flat else ():
                func(self._scratch.like((len(piece),), (1,), written.dtype), *args[1:], **kwargs)
            if not flat:
                func(self._scratch.like(written.size(), written.stride(), written.dtype), *args[1:], **kwargs)
        return written


_IS_META = inspect.getattr_static(torch.Tensor, "is_meta").__get__


def _meta(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is on the meta device; `_WithValues` changes `is_meta`."""
    return tensor.device.type == "meta"


class _WithValues(TorchFunctionMode):
    """Recorded parameters as if they were not on the meta device, where functions of `torch.nn.init` do nothing."""

    def __init__(self, recorder: _WriteRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META and _meta(args[0]) and self._recorder.find(args[0]) is not None:
            return False
        return func(*args, **(kwargs or {}))


def _again(func: Any, args: Any, kwargs: Any, state: torch.Tensor | None) -> Callable[[], torch.Tensor]:
    """Returns a function that repeats a call without tensors."""

    def make() -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            if state is not None:
                torch.set_rng_state(state)
            made: torch.Tensor = func(*args, **kwargs)
        return made

    return make


@contextlib.contextmanager
def deferred_weights() -> Iterator[None]:
    """Builds models whose weights are made later, by `rlplace.distribute` and only where a process keeps them.

    Parameters of modules that are constructed inside are on the meta device; buffers have values. Each parameter is made with
    exactly the values that the plain model has for the same seed, unless weights are loaded instead.

    Raises:
        InputError: A parameter is computed from values of others while the model is built.
    """
    recorder, register = _WriteRecorder(), nn.Module.register_parameter

    def deferring(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None:
            recorder.register(param)
        register(module, name, param)

    def drawing(draw: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        own = recorder.find(tensor) if _meta(tensor) else None
        if own is None:
            return draw(tensor, *args, **kwargs)
        return recorder.write(own, tensor, draw, (tensor, *args), kwargs, True)

    with contextlib.ExitStack() as patches:
        for draw in (truncated_normal, nn.init.orthogonal_):  # which look at what they have drawn
            patches.enter_context(mock.patch.object(nn.init, draw.__name__, partial(drawing, draw)))
        patches.enter_context(mock.patch.object(nn.Module, "register_parameter", deferring))
        patches.enter_context(recorder)
        patches.enter_context(_WithValues(recorder))
        yield
