"""Records a model of many equal layers from a few of them.

Exporting a step takes time in proportion to its layers, which are mostly alike. So a copy of the model whose lists of modules
are shortened to `SHORT` elements is recorded, and the labels, events and storages of its middle layer are repeated. The first
and the last layer may differ. The three in the middle must be equal item by item, and each of their references must reach
equally far: into the same layer, the one before, the one after, or always to the same item. The middle one's items are inserted
once for every missing layer: references of layers are shifted, references to other items stay, and the numbers in names are
counted on as `torch.fx` counts them.

This is done only where it can be checked (`UnlikeError` elsewhere): the three middle layers must have done the same step for
step; and the forward of the whole model, run eagerly, must be the forward of the short one, run eagerly and repeated in the
same way, event by event with its tensors. The backward follows from the forward.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from copy import copy as shallow_copy
from itertools import groupby
from typing import Any

import msgspec
from torch import nn

from rlplace.model.capture.export import op_name
from rlplace.model.capture.record import (
    BACKWARD_OF,
    FORWARD_OF,
    LOSS_LABEL,
    UNOWNED,
    UPDATE_OF,
    Label,
    Leaf,
    Recording,
    Reference,
    parts_of,
    with_numbers,
)
from rlplace.model.capture.trace import EagerRecorder

SHORT = 5
"""Layers that are recorded: a first, three middle ones to compare, a last."""

_MIDDLE = 2
_BEFORE, _AFTER = -1, SHORT


class UnlikeError(RuntimeError):
    """The layers of a list are not alike, or the tensors between them cannot be repeated."""


class Repeated:
    """Repeats the middle layer of one list of a recording."""

    def __init__(self, recording: Recording, path: str, copies: int, gapless: frozenset[str]) -> None:
        self.old, self.path, self.copies, self.gapless = recording, path, copies, gapless
        self.element = re.compile(re.escape(path) + r"\.(\d+)(?=\.|$)")
        leaf_layers = [self._element(leaf.record.name) for leaf in recording.leaves]
        self.layer = {"leaf": leaf_layers, "label": self._label_layers()}
        self.event_layer, self.turned = self._event_layers()
        self.layer["storage"], storage_turned = self._storage_layers()
        forwards = {kind: [False] * len(layers) for kind, layers in self.layer.items()}
        self.order = {
            kind: self._emitted(layers, storage_turned if kind == "storage" else forwards[kind])
            for kind, layers in self.layer.items()
        }
        self.new = {kind: {pair: number for number, pair in enumerate(order)} for kind, order in self.order.items()}
        self.members = {kind: _members(layers) for kind, layers in self.layer.items()}
        self.position = {
            kind: {number: position for numbers in members.values() for position, number in enumerate(numbers)}
            for kind, members in self.members.items()
        }

    def result(self) -> Recording:
        """Returns the recording with all layers."""
        old = self.old
        sizes = [item.nbytes() for item in old.storages]
        if len({tuple(sizes[s] for s in self.members["storage"].get(layer, ())) for layer in (1, 2, 3)}) > 1:
            raise UnlikeError(f"the layers of {self.path} make tensors of other sizes")
        steps = self._steps()
        labels = self._repeated(old.labels, self.layer["label"], self.order["label"])
        leaves = self._repeated(old.leaves, self.layer["leaf"], self.order["leaf"])
        for label, (number, copy) in zip(labels, self.order["label"], strict=True):
            layer = self.layer["label"][number]
            label.module = self._renamed(label.module, layer, copy)
            label.name = self._label_name(label, layer, copy, steps)
        leaves = [
            self._named_leaf(leaf, self.layer["leaf"][number], copy)
            for leaf, (number, copy) in zip(leaves, self.order["leaf"], strict=True)
        ]
        events = self._repeated(old.events, self.event_layer, self._emitted(self.event_layer, self.turned))
        num_external = sum(number < old.num_external for number, _ in self.order["storage"])
        storages = [old.storages[number] for number, _ in self.order["storage"]]
        if [leaf.storage for leaf in leaves] != list(range(len(leaves))):
            raise UnlikeError(f"the parameters of {self.path} are not in the order of its layers")
        return Recording(labels, events, storages, leaves, num_external, old.nodes)

    def _element(self, path: str) -> int:
        match = self.element.match(path)
        return _BEFORE if match is None else int(match[1])

    def _label_layers(self) -> list[int]:
        """Returns the layer of each label; labels between two layers belong to the one before them."""
        own = [self._element(label.module) for label in self.old.labels]
        inside = [index for index, layer in enumerate(own) if layer != _BEFORE]
        if sorted(set(own) - {_BEFORE}) != list(range(SHORT)):
            raise UnlikeError(f"not every layer of {self.path} runs")
        layers, current = [], _BEFORE
        for index, layer in enumerate(own):
            if layer != _BEFORE and layer < current:
                raise UnlikeError(f"the layers of {self.path} do not run one after another")
            current = _AFTER if index > inside[-1] else layer if layer != _BEFORE else current
            layers.append(current)
        return layers

    def _event_layers(self) -> tuple[list[int], list[bool]]:
        """Returns the layer of each event, without an owner that of the event before, and whether it is in the backward."""
        events, labels, leaves = self.old.events, self.layer["label"], self.layer["leaf"]
        start = next((i for i, e in enumerate(events) if e.phase in (BACKWARD_OF, UPDATE_OF, UNOWNED)), len(events))
        own: list[int | None] = []
        for event in events:
            known = event.owner >= 0 and event.phase in (FORWARD_OF, BACKWARD_OF, UPDATE_OF)
            layer = (leaves if event.phase == UPDATE_OF else labels)[event.owner] if known else None
            own.append(None if event.phase == UPDATE_OF and layer == _BEFORE else layer)
        layers: list[int] = []
        current = _BEFORE
        for index, layer in enumerate(own):
            if index == start:
                current = _AFTER
            current = current if layer is None else layer
            layers.append(current)
        if layers[:start] != sorted(layers[:start]) or layers[start:] != sorted(layers[start:], reverse=True):
            raise UnlikeError(f"the layers of {self.path} do not run one after another")
        return layers, [index >= start for index in range(len(events))]

    def _storage_layers(self) -> tuple[list[int], list[bool]]:
        """Returns the layer in which each storage was met first, and whether that was in the backward."""
        old = self.old
        first: dict[int, tuple[int, bool]] = {leaf.storage: (self.layer["leaf"][i], False) for i, leaf in enumerate(old.leaves)}
        first |= {number: (_BEFORE, False) for number in range(old.num_external) if number not in first}
        for event, layer, turned in zip(old.events, self.event_layer, self.turned, strict=True):
            for number in (*event.reads, *event.writes, *event.creates):
                first.setdefault(number, (layer, turned))
        for label, layer in zip(old.labels, self.layer["label"], strict=True):
            for _, number in parts_of(label)[1]:
                first.setdefault(number, (layer, False))
        layers, last = [], (_BEFORE, False)
        for number in range(len(old.storages)):
            last = first.get(number, last)
            layers.append(last)
        met = [3 * SHORT - layer if turned else layer for layer, turned in layers[old.num_external :]]
        if met != sorted(met):
            raise UnlikeError(f"tensors of the layers of {self.path} are not met in order")
        return [layer for layer, _ in layers], [turned for _, turned in layers]

    def _emitted(self, layers: Sequence[int], turned: Sequence[bool]) -> list[tuple[int, int]]:
        """Returns (old number, copy) in the new order; in the backward the copies come before the layer that they copy."""
        result: list[tuple[int, int]] = []
        for (layer, back), run in groupby(range(len(layers)), key=lambda index: (layers[index], turned[index])):
            numbers = list(run)
            copies = range(self.copies + 1) if layer == _MIDDLE else range(1)
            for copy in reversed(copies) if back else copies:
                result += [(number, copy) for number in numbers]
        return result

    def _repeated(self, items: Sequence[Any], layers: Sequence[int], order: Sequence[tuple[int, int]]) -> list[Any]:
        """Returns the items in the new order with new numbers in them."""
        members = _members(layers)
        if not len(members.get(1, ())) == len(members.get(2, ())) == len(members.get(3, ())):
            raise UnlikeError(f"the layers of {self.path} do not do the same")
        shifts = dict(zip(members.get(2, ()), self._shifts(items, members), strict=True))
        shifts |= {number: shifts[like] for number, like in zip(members.get(3, ()), members.get(2, ()), strict=True)}
        result = []
        for number, copy in order:
            item, layer = items[number], layers[number]
            references = parts_of(item)[1]
            if number in shifts:
                here = _MIDDLE + copy if layer == _MIDDLE else layer + self.copies
                numbers = [self._number(*at, here, shift) for at, shift in zip(references, shifts[number], strict=True)]
            else:
                numbers = [self.new[kind][old, 0] for kind, old in references]
                if layer != 1 and any(self.layer[kind][old] == _MIDDLE for kind, old in references):
                    raise UnlikeError(f"a middle layer of {self.path} is used by what is not next to it")
            result.append(with_numbers(item, numbers))
        return result

    def _shifts(self, items: Sequence[Any], members: dict[int, list[int]]) -> Iterable[list[int | None]]:
        """Yields, by item of the middle layer, how many layers away each reference is; None: always the same item."""
        for trio in zip(*(members.get(layer, ()) for layer in (1, 2, 3)), strict=True):
            forms, references = zip(*(parts_of(items[number]) for number in trio), strict=True)
            if not forms[0] == forms[1] == forms[2] or len({len(own) for own in references}) > 1:
                raise UnlikeError(f"the layers of {self.path} do not do the same")
            yield [self._shift(same) for same in zip(*references, strict=True)]

    def _shift(self, references: Sequence[Reference]) -> int | None:
        """Returns the distance between layers 1, 2 and 3 and the layers of the items that they refer to; None: one item."""
        kind = references[0][0]
        numbers = [number for _, number in references]
        if len({kind for kind, _ in references}) > 1:
            raise UnlikeError(f"the layers of {self.path} do not do the same")
        if numbers[0] == numbers[1] == numbers[2]:
            return None
        layers = [self.layer[kind][number] for number in numbers]
        shift = layers[1] - _MIDDLE
        known = [self.position[kind][number] for number, layer in zip(numbers, layers, strict=True) if 1 <= layer <= 3]
        if layers != [1 + shift, 2 + shift, 3 + shift] or shift not in (-1, 0, 1) or len(set(known)) > 1:
            raise UnlikeError(f"the layers of {self.path} are not joined alike")
        return shift

    def _number(self, kind: str, old: int, here: int, shift: int | None) -> int:
        """Returns the new number of the item that a layer at position `here` refers to."""
        if shift is None:
            return self.new[kind][old, 0]
        layer, position = here + shift, self.position[kind][old]
        if layer in (1, 2):
            return self.new[kind][self.members[kind][layer][position], 0]
        if layer <= _MIDDLE + self.copies:
            return self.new[kind][self.members[kind][_MIDDLE][position], layer - _MIDDLE]
        return self.new[kind][self.members[kind][layer - self.copies][position], 0]

    def _renamed(self, path: str, layer: int, copy: int) -> str:
        """Returns the path with the new position of its element of the list."""
        if not self.element.match(path):
            return path
        moved = copy if layer == _MIDDLE else self.copies if layer > _MIDDLE else 0
        return self.element.sub(f"{self.path}.{self._element(path) + moved}", path, count=1)

    def _named_leaf(self, leaf: Leaf, layer: int, copy: int) -> Leaf:
        name, *aliases = (self._renamed(name, layer, copy) for name in (leaf.record.name, *leaf.record.aliases))
        return dataclasses.replace(leaf, record=msgspec.structs.replace(leaf.record, name=name, aliases=tuple(aliases)))

    def _steps(self) -> dict[str, int]:
        """Returns by kind of node the increment of the number in its names from layer to layer."""
        steps: dict[str, int] = {}
        members = _members(self.layer["label"])
        if not self.old.nodes:
            return steps
        for trio in zip(*(members[layer] for layer in (1, 2, 3)), strict=True):
            (base, low), (same, middle), (again, high) = (_counted(_node(self.old.labels[number])) for number in trio)
            step = middle - low
            if not base == same == again or high - middle != step or steps.setdefault(base, step) != step:
                raise UnlikeError(f"names in the layers of {self.path} do not count on")
        return steps

    def _label_name(self, label: Label, layer: int, copy: int, steps: dict[str, int]) -> str:
        """Returns the name of an op of the exported graph; others are not used."""
        if label.name == LOSS_LABEL or not self.old.nodes:
            return label.name
        base, number = _counted(_node(label))
        if layer >= _MIDDLE:
            if base not in steps and base not in self.gapless:
                raise UnlikeError(f"nodes like {base} vanish from the graph; their names cannot be counted")
            number += steps.get(base, 0) * (copy if layer == _MIDDLE else self.copies)
        return op_name(label.module, f"{base}_{number}" if number else base)


def _members(layers: Sequence[int]) -> dict[int, list[int]]:
    members: dict[int, list[int]] = {}
    for number, layer in enumerate(layers):
        members.setdefault(layer, []).append(number)
    return members


def _node(label: Label) -> str:
    return label.name.rpartition("/")[2]


def _counted(node: str) -> tuple[str, int]:
    """Returns a node's name without its number, and the number: ("linear", 3) for ``linear_3``; 0 for a name without one."""
    base, _, digits = node.rpartition("_")
    return (base, int(digits)) if base and digits.isdecimal() and digits != "0" else (node, 0)


def gapless_kinds(nodes: Iterable[str]) -> frozenset[str]:
    """Returns kinds of nodes whose numbers have no gap: none of them was made and removed again."""
    numbers: dict[str, set[int]] = {}
    for node in nodes:
        base, number = _counted(node)
        numbers.setdefault(base, set()).add(number)
    return frozenset(base for base, seen in numbers.items() if max(seen) - min(seen) + 1 == len(seen) and min(seen) <= 1)


LEAST = 8
"""Elements of a list that may be shortened."""

WORTH = 5
"""Layers that must be saved in all, or recording the whole model is as quick."""


class ForwardRecorder(EagerRecorder):
    """Records events of the forward with their modules and how many autograd nodes they made, and no iteration spaces."""

    def __init__(self) -> None:
        super().__init__(by_module=False)

    def _new_label(self, name: str, target: str, leave: int) -> None:
        super()._new_label(name, target, leave)
        self.labels[-1].parts = None

    def claim(self, label: int, leave: int = 0) -> None:
        before = self._last_sequence
        super().claim(label, leave)
        if label >= 0:
            dims = self.labels[label].dims
            dims["autograd"] = dims.get("autograd", 0) + self._last_sequence - before


def repeated_lists(model: nn.Module) -> dict[str, int]:
    """Returns outermost lists of modules, alike except the first and the last: length by path; none where it saves little."""
    lengths: dict[str, int] = {}
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < LEAST:
            continue
        inside = path.startswith(tuple(f"{outer}." for outer in lengths))
        if path and not inside and len({_looks(item) for item in list(module)[1:-1]}) == 1:
            lengths[path] = len(module)
    return lengths if sum(lengths.values()) - SHORT * len(lengths) >= WORTH else {}


def _looks(module: nn.Module) -> tuple[Any, ...]:
    return type(module), *((name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters())


def shortened(model: nn.Module, lists: Iterable[str]) -> nn.Module:
    """Returns the model with the first `SHORT` elements of these lists; it shares all other modules with the model."""
    for path in lists:
        model = _shortened(model, path.split("."))
    return model


def _shortened(module: nn.Module, path: Sequence[str]) -> nn.Module:
    short = shallow_copy(module)
    children = dict(list(module._modules.items())[: None if path else SHORT])
    if path:
        children[path[0]] = _shortened(module.get_submodule(path[0]), path[1:])
    short._modules = children
    return short


def unroll(recording: Recording, lists: dict[str, int]) -> Recording:
    """Returns the recording of the model whose lists have these lengths, from that of the model that `shortened` made.

    Raises:
        UnlikeError: The middle layers of a list are not alike.
    """
    gapless = gapless_kinds(recording.nodes)
    for path, length in lists.items():
        recording = Repeated(recording, path, length - SHORT, gapless).result()
    return recording


def check_equal(repeated: Recording, whole: Recording) -> None:
    """Raises `UnlikeError` where two recordings of the forward differ in an event, autograd node, tensor or parameter."""
    same = repeated.events == whole.events and all(
        [row(item) for item in one] == [row(item) for item in other]
        for one, other, row in (
            (repeated.labels, whole.labels, lambda label: (label.module, label.target, label.dims)),
            (repeated.leaves, whole.leaves, lambda leaf: (leaf.record, leaf.idle)),
            (repeated.storages, whole.storages, lambda storage: storage.nbytes()),
        )
    )
    if not same:
        raise UnlikeError("the forward of the whole model is not that of its repeated layers")
