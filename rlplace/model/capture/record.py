"""Records one fake training step: every ATen op with its label, the storages that it touched, and its cost.

A *label* is a forward op in the making: an FX node, a dispatched op or a module call, depending on the capture method. The
recorder attributes forward ATen ops to the label that runs, and backward ATen ops to the label during which their autograd
node was made (autograd numbers its nodes in sequence, and gives the number back while a node runs).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import msgspec
import torch

from rlplace.model.aten import count_flops, dims_of, kind_of
from rlplace.model.axes.access import access_of, tensors_in
from rlplace.model.graph.indices import Access, Use
from rlplace.model.graph.opgraph import Parameter
from rlplace.model.torch_adapter import TorchDispatchMode, backward_node, in_backward, sequence_number

FORWARD_OF, BACKWARD_OF, UPDATE_OF, UNOWNED, OUTSIDE = "forward", "backward", "update", "unowned", "outside"
"""Label that an ATen op ran for. Unowned: autograd, for no known node. Outside: between forward and backward."""

LOSS_LABEL = "loss_fn"
"""Forward op of a loss function given by the caller."""

_METADATA_ONLY = frozenset(
    {"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like", "new_zeros", "new_ones",
     "new_empty", "new_full", "new_empty_strided"}
)  # fmt: skip
_ALLOCATE_ONLY = frozenset({"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "empty_permuted"})
_READ_ROWS_ONLY = frozenset({"embedding", "index_select", "gather", "index", "_unsafe_index", "take"})
_ROWS = "rlplace_rows"
_HIDDEN_WRITES = {"native_batch_norm": (3, 4), "cudnn_batch_norm": (3, 4), "miopen_batch_norm": (3, 4)}
"""Ops whose schema hides that they update running statistics, with the positions of those arguments."""


@dataclass(slots=True)
class Label:
    """A forward op in the making.

    Attributes:
        name: Op name, ``module.path/node``.
        target: Op as torch knows it.
        module: Path of its module.
        whole: Whether it is a submodule kept as one op.
        dims: Sizes from its arguments that its ATen ops do not show, see `rlplace.model.aten.argument_dims`.
        access: Its iteration space, None where it is not known.
        parts: Iteration spaces of its ATen ops, where it has none of its own; None in the list is an unknown one.
    """

    name: str
    target: str
    module: str
    whole: bool = False
    dims: dict[str, int] = field(default_factory=dict)
    access: Access | None = None
    parts: list[Access | None] | None = None


@dataclass(slots=True)
class Event:
    """One dispatched ATen op. Storages are indices into `StepRecorder.storages`."""

    phase: str
    owner: int
    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    creates: tuple[int, ...]
    flops: float
    bytes: int
    dtype: str
    is_view: bool
    same_shape: bool = False
    dims: dict[str, int] | None = None


@dataclass(frozen=True)
class Leaf:
    """A parameter or buffer of the fake copy.

    Attributes:
        record: Its entry in the graph.
        storage: Its storage number.
        gradient_storage: Storage of its gradient after the step, None without one.
        idle: Whether it requires a gradient and receives none.
    """

    record: Parameter
    storage: int
    gradient_storage: int | None
    idle: bool = False


@dataclass
class Recording:
    """One recorded step, complete or forward only.

    Attributes:
        labels: Forward ops, in execution order.
        events: ATen ops, in execution order.
        storages: Every storage met, by its number.
        leaves: Parameters and buffers; leaf i has storage i.
        num_external: Number of storages of leaves and inputs, which come first.
        nodes: Names of all nodes of the exported graph; empty without one.
    """

    labels: list[Label]
    events: list[Event]
    storages: list[Any]
    leaves: list[Leaf]
    num_external: int
    nodes: frozenset[str] = frozenset()


Reference = tuple[str, int]
"""Kind of an item ("label", "leaf" or "storage") and its number."""


def parts_of(item: Any) -> tuple[Any, list[Reference]]:
    """Returns the fields that are equal in equal layers, and the references."""
    if isinstance(item, Event):
        owner = [("leaf" if item.phase == UPDATE_OF else "label", item.owner)] if item.owner >= 0 else []
        form = (
            item.phase, item.name, item.flops, item.bytes, item.dtype, item.is_view, item.same_shape, item.dims,
            len(item.reads), len(item.writes),
        )  # fmt: skip
        return form, owner + [("storage", s) for s in (*item.reads, *item.writes, *item.creates)]
    if isinstance(item, Leaf):
        record = msgspec.structs.replace(item.record, name="", aliases=())
        return (record, item.idle), [("storage", s) for s in (item.storage, item.gradient_storage) if s is not None]
    spaces = [space for space in (item.access, *(item.parts or ())) if space is not None]
    forms = [(space.dims, space.statistics, [(use.elements, use.runs) for use in space.uses]) for space in spaces]
    kept = [None if part is None else 0 for part in (item.access, *(item.parts or ()))], item.parts is None
    return (item.target, item.whole, item.dims, forms, kept), [("storage", use.storage) for s in spaces for use in s.uses]


def with_numbers(item: Any, numbers: Sequence[int]) -> Any:
    """Returns the item with these numbers in place of its references, in the order of `parts_of`."""
    rest = list(numbers)
    if isinstance(item, Event):
        owner = rest.pop(0) if item.owner >= 0 else -1
        reads, writes = len(item.reads), len(item.reads) + len(item.writes)
        return dataclasses.replace(
            item, owner=owner, reads=tuple(rest[:reads]), writes=tuple(rest[reads:writes]), creates=tuple(rest[writes:])
        )
    if isinstance(item, Leaf):
        return dataclasses.replace(item, storage=rest[0], gradient_storage=rest[1] if len(rest) > 1 else None)

    def moved(space: Access | None) -> Access | None:
        if space is None:
            return None
        return Access(space.dims, tuple(Use(rest.pop(0), u.elements, u.runs) for u in space.uses), space.statistics)

    access = moved(item.access)
    return dataclasses.replace(item, access=access, parts=None if item.parts is None else [moved(p) for p in item.parts])


class SparseStorage:
    """Storage of a sparse tensor, in place of the several that torch gives it; fake ones forget how many rows they have."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def rows(self) -> int:
        """The number of values, by the ids that an op made them of."""
        return int(getattr(self.tensor, _ROWS, 0))

    @staticmethod
    def note(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Notes the rows of what an op makes: those of a sparse input, or as many as the most ids that it reads."""
        for made in (tensor for tensor in outputs if tensor.layout != torch.strided):
            ids = (one.numel() for one in inputs if one.layout == torch.strided and not one.is_floating_point())
            setattr(made, _ROWS, max([*ids, *(getattr(one, _ROWS, 0) for one in inputs)], default=0))

    def nbytes(self) -> int:
        """Returns bytes of its values and their indices."""
        dense = self.tensor.dense_dim() if self.tensor.layout == torch.sparse_coo else 0
        width = prod(self.tensor.shape[self.tensor.dim() - dense :])
        return self.rows * (width * self.tensor.element_size() + 8 * (self.tensor.dim() - dense))


@dataclass
class StepRecorder(TorchDispatchMode):
    """Dispatch mode that fills `events`; enter it above a fake mode.

    Attributes:
        labels: Forward ops, in execution order.
        events: ATen ops, in execution order.
        storages: Every storage met, held so that none is confused with a later one (fake storages hold no memory).
        current: Label that runs, -1 outside of one.
    """

    labels: list[Label] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    storages: list[Any] = field(default_factory=list)
    current: int = -1

    def __post_init__(self) -> None:
        super().__init__()
        self._number: dict[int, int] = {}
        self._label_of_sequence: dict[int, int] = {}
        self._last_backward = -1
        self._last_sequence = sequence_number()
        self._writes_of: dict[Any, tuple[tuple[int, ...], tuple[str, ...]]] = {}
        self.parameter_of_storage: dict[int, int] = {}

    def storage(self, tensor: torch.Tensor) -> int:
        """Returns number of the tensor's storage; a storage that was not met before gets the next number."""
        if tensor.layout == torch.strided:
            storage: Any = tensor.untyped_storage()
            key = storage._cdata
        else:
            storage, key = SparseStorage(tensor), id(tensor)
        number = self._number.get(key)
        if number is None:
            number = self._number[key] = len(self.storages)
            self.storages.append(storage)
        return number

    def storages_of(self, tree: Any) -> tuple[int, ...]:
        """Returns storages of the tensors in nested lists, tuples and dicts, without repetition."""
        return tuple(dict.fromkeys(self.storage(t) for t in tensors_in(tree)))

    @contextlib.contextmanager
    def label(self, name: str, target: str, module: str) -> Iterator[Label]:
        """Attributes everything dispatched inside to a new forward op."""
        outer, number = self.current, len(self.labels)
        self.claim(outer)
        label = Label(name, target, module)
        self.labels.append(label)
        self.current = number
        try:
            yield label
        finally:
            self.claim(number)
            self.current = outer

    def claim(self, label: int, leave: int = 0) -> None:
        """Assigns the autograd nodes created since the last call, except the newest `leave` ones, to a label."""
        now = sequence_number() - leave
        if now > self._last_sequence and label >= 0:
            for number in range(self._last_sequence, now):
                self._label_of_sequence.setdefault(number, label)
        self._last_sequence = max(now, self._last_sequence)

    def note_silent(self, arguments: Any, result: Any) -> None:
        """Records a label that dispatched nothing but passes an argument on, as dropout does in evaluation: a view."""
        passed = tuple(set(self.storages_of(arguments)) & set(self.storages_of(result)))
        self.events.append(Event(FORWARD_OF, self.current, "alias", passed, (), (), 0.0, 0, "none", is_view=True))

    def before_dispatch(self, func: Any) -> None:
        """Opens a label before each forward op, in eager tracers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        if name.startswith("_assert") or name in ("sym_size", "sym_stride", "sym_numel", "sym_storage_offset"):
            return func(*args, **kwargs)
        backward = in_backward()
        if not backward:
            self.before_dispatch(func)
        inputs = list(tensors_in((args, kwargs)))
        reads = tuple(dict.fromkeys(map(self.storage, inputs)))
        known = len(self.storages)
        out = func(*args, **kwargs)
        outputs = list(tensors_in(out))
        SparseStorage.note(inputs, outputs)
        output_storages = tuple(dict.fromkeys(map(self.storage, outputs)))
        creates = tuple(s for s in output_storages if s >= known)
        writes = self._written(func, name, args, kwargs)
        is_view = not creates and not writes and bool(outputs)
        if name in _METADATA_ONLY:
            reads = ()
        flops, size = 0.0, 0
        if not is_view and name not in _ALLOCATE_ONLY:
            flops = count_flops(name, args, outputs)
            size = _traffic(name, inputs if reads or not inputs else [], outputs)
        phase, owner = self._owner(backward)
        parts = self.labels[owner].parts if phase == FORWARD_OF and not is_view else None
        if parts is not None and any(t.numel() > 1 for t in (*inputs, *outputs)):
            parts.append(access_of(func, args, kwargs, out, self.storage))
        first = next((t for t in outputs if t.is_floating_point()), outputs[0] if outputs else inputs[0] if inputs else None)
        dtype = "none" if first is None else str(first.dtype).removeprefix("torch.")
        alike = name == "add" and len(inputs) == 2 and inputs[0].shape == inputs[1].shape
        dims = dims_of(name, args)
        self.events.append(Event(phase, owner, name, reads, writes, creates, flops, size, dtype, is_view, alike, dims))
        return out

    def _written(self, func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
        positions = self._writes_of.get(func)
        if positions is None:
            marked = [
                (i, a) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
            ]
            indices = tuple(i for i, argument in marked if not argument.kwarg_only) + _HIDDEN_WRITES.get(name, ())
            positions = self._writes_of[func] = (indices, tuple(argument.name for _, argument in marked))
        indices, names = positions
        if not indices and not names:
            return ()
        written = [args[i] for i in indices if i < len(args)] + [kwargs[n] for n in names if n in kwargs]
        if name in _HIDDEN_WRITES and len(args) > 5 and not args[5]:
            return ()
        return self.storages_of(written)

    def _owner(self, backward: bool) -> tuple[str, int]:
        if not backward:
            return (FORWARD_OF, self.current) if self.current >= 0 else (OUTSIDE, -1)
        node = backward_node()
        if node is None:
            return UNOWNED, -1
        if node.name().endswith("AccumulateGrad"):
            parameter = self.parameter_of_storage.get(self.storage(node.variable), -1)  # type: ignore[attr-defined]
            return (UPDATE_OF, parameter) if parameter >= 0 else (UNOWNED, -1)
        label = self._label_of_sequence.get(node._sequence_nr(), -1)
        if label < 0:
            # Re-entrant backward of a recomputed forward: its nodes were made by the backward op that runs around it.
            label = self._last_backward
        if label < 0:
            return UNOWNED, -1
        self._last_backward = label
        self.claim(label)
        return BACKWARD_OF, label


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Returns bytes that a kernel touches: expanded dimensions are stored once."""
    if tensor.layout != torch.strided:
        return SparseStorage(tensor).nbytes()
    stored = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return stored * tensor.element_size() if tensor.numel() else 0


def _traffic(name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """Returns bytes read plus bytes written; an op that picks rows reads only those."""
    written = sum(map(tensor_bytes, outputs))
    if name in _READ_ROWS_ONLY and inputs:
        return 2 * written + sum(map(tensor_bytes, inputs[1:]))
    if name.startswith("_embedding_bag") and "backward" not in name:  # a row of every id, of which it writes sums
        return written + inputs[1].numel() * tensor_bytes(inputs[0][:1]) + sum(map(tensor_bytes, inputs[1:]))
    if kind_of(name) == "copy" and not inputs:
        return written
    return written + sum(map(tensor_bytes, inputs))
