"""Which block every captured op belongs to.

A *block* is a module that strategies speak of: an element of a module list whose elements repeat, or a largest module with
parameters outside of such lists (embedding, final norm, head). Blocks are found by module paths: a numeric part of a path is a
place in a list. They are listed in the order in which they first run, and values flow from a block to itself and later ones
alone, so that cutting between any two of them makes a pipeline. What runs outside of blocks (masks, positions, the loss)
belongs to the block that reads it first, else to the last block that it reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError
from rlplace.model.graph.atoms import ModuleHierarchy
from rlplace.model.graph.opgraph import BUFFER, FORWARD, PARAMETER, UPDATE, OpGraph

_ALIKE = 0.5
"""Elements of a list repeat when they have this share of their parameters (names and shapes) in common."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a graph of N ops and P parameters and buffers.

    Attributes:
        names: B module paths in model order.
        of_op: int32 [N]; a backward op lies in the block of its forward op, an update in the first block of its parameter.
        of_parameter: P ascending tuples of blocks that read it, never empty.
    """

    names: tuple[str, ...]
    of_op: NDArray[np.int32]
    of_parameter: tuple[tuple[int, ...], ...]


def find_blocks(graph: OpGraph) -> Blocks:
    """Blocks of a captured step.

    Raises:
        InputError: No op lies in a module that has parameters.
    """
    forward = np.flatnonzero(graph.op_phase == FORWARD).tolist()
    module = _Module()
    for parameter in (parameter for parameter in graph.parameters if not parameter.is_buffer):
        for full in (parameter.name, *parameter.aliases):
            path, _, own = full.rpartition(".")
            module.add(path).own.append((own, parameter.shape))
    for op in forward:
        module.add(graph.op_module[op])
    inputs = graph.forward_inputs()
    wanted = set(_chosen(module, "", graph, forward, inputs))
    inside = {op: found for op in forward if (found := _owner(graph.op_module[op], wanted)) is not None}
    names = tuple(dict.fromkeys(inside.values()))
    if not names:
        raise InputError(
            "blocks: no captured op lies in a module with parameters; put its layers into modules of it, as "
            "torch.nn.Sequential(model) does"
        )
    number = {name: index for index, name in enumerate(names)}
    own_block = [number[inside[op]] if op in inside else -1 for op in range(graph.num_ops)]
    of_op = _assign(graph, forward, inputs, own_block, len(names))
    # What is used again later follows its inputs there; a block that loses all its ops is none.
    used, places = np.unique(of_op, return_inverse=True)
    of_op = places.astype(np.int32)
    names = tuple(names[block] for block in used.tolist())
    of_parameter = _readers(graph, forward, of_op)
    updates = np.flatnonzero(graph.op_phase == UPDATE)
    whole = of_op[np.maximum(graph.op_forward, 0)]
    whole[updates] = [of_parameter[parameter][0] for parameter in graph.op_parameter[updates].tolist()]
    return Blocks(names, whole, of_parameter)


@dataclass
class _Module:
    """A module as paths show it."""

    own: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    children: dict[str, _Module] = field(default_factory=dict)

    def add(self, path: str) -> _Module:
        module = self
        for part in path.split(".") if path else ():
            module = module.children.setdefault(part, _Module())
        return module

    def parameters(self, prefix: str = "") -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names below this module, and shapes."""
        for name, shape in self.own:
            yield prefix + name, shape
        for name, child in self.children.items():
            yield from child.parameters(f"{prefix}{name}.")

    def elements(self) -> dict[str, _Module]:
        """Returns the elements of a list of modules that hold parameters."""
        return {name: child for name, child in self.children.items() if name.isdigit() and any(child.parameters())}

    def has_list(self) -> bool:
        return bool(self.elements()) or any(child.has_list() for child in self.children.values())


def _chosen(module: _Module, path: str, graph: OpGraph, forward: list[int], inputs: list[list[int]]) -> Iterator[str]:
    """Yields paths of the blocks inside a module that is none itself."""
    elements = module.elements()
    opened = bool(elements) and not _repeats(elements) and _opens(elements, path, graph, forward, inputs)
    inner = {name: child for name, child in module.children.items() if any(child.parameters())}
    for name, child in inner.items():
        below = f"{path}.{name}" if path else name
        only = len(inner) == 1 and bool(child.children) and not elements and any(c.children for c in child.children.values())
        if (opened or name not in elements) and (child.has_list() or only):
            yield from _chosen(child, below, graph, forward, inputs)
        else:
            yield below


def _repeats(elements: dict[str, _Module]) -> bool:
    """Returns whether at least half of the elements, and two, have one like them."""
    held = [set(child.parameters()) for child in elements.values()]

    def alike(a: int, b: int) -> bool:
        return a != b and len(held[a] & held[b]) >= _ALIKE * len(held[a] | held[b])

    like = sum(any(alike(a, b) for b in range(len(held))) for a in range(len(held)))
    return like >= max(2, len(held) / 2)


def _opens(elements: dict[str, _Module], path: str, graph: OpGraph, forward: list[int], inputs: list[list[int]]) -> bool:
    """Returns whether unlike elements are stages of layers that repeat in sequence, as in convolutional nets."""
    for name, element in elements.items():
        pending = [(f"{path}.{name}" if path else name, element)]
        while pending:
            below, module = pending.pop()
            inner = module.elements()
            if inner:
                if _repeats(inner) and _in_a_row([f"{below}.{number}" for number in inner], graph, forward, inputs):
                    return True
            else:
                pending += [(f"{below}.{name}", child) for name, child in module.children.items()]
    return False


def _in_a_row(paths: list[str], graph: OpGraph, forward: list[int], inputs: list[list[int]]) -> bool:
    """Returns whether every module waits for the one before it."""
    number = {path: index for index, path in enumerate(paths)}
    before: dict[int, int] = {}  # op to a bit for every module that it waits for
    waits = [0] * len(paths)
    for op in forward:
        seen = 0
        for maker in inputs[op]:
            seen |= before.get(maker, 0)
        own = _owner(graph.op_module[op], number)
        if own is not None:
            waits[number[own]] |= seen
            seen |= 1 << number[own]
        before[op] = seen
    return all(waits[index] >> (index - 1) & 1 for index in range(1, len(paths)))


def _owner(path: str, blocks: Iterable[str]) -> str | None:
    """Returns the block that a module path lies in; blocks are not nested."""
    while path:
        if path in blocks:
            return path
        path = path.rpartition(".")[0]
    return "" if "" in blocks else None


def _assign(graph: OpGraph, forward: list[int], inputs: list[list[int]], own: list[int], count: int) -> NDArray[np.int32]:
    """Returns int32 [N], the block of every forward op; 0 for others."""
    block = [-1] * graph.num_ops
    for op in forward:  # no op lies before what it reads
        block[op] = max([own[op], *(block[maker] for maker in inputs[op])])
    settled = [number >= 0 for number in own]
    for late in (False, True):
        first_reader = [count] * graph.num_ops
        for op in reversed(forward):
            if not settled[op] and first_reader[op] < count:
                block[op], settled[op] = first_reader[op], True
            for maker in inputs[op] if settled[op] else ():
                first_reader[maker] = min(first_reader[maker], block[op])
        for op in forward if not late else ():  # what no block reads: the loss, and what nothing reads
            if not settled[op] and inputs[op]:
                block[op] = max(block[maker] for maker in inputs[op])
                settled[op] = block[op] >= 0
    for op in forward:
        if not settled[op]:
            block[op] = max([0, *(block[maker] for maker in inputs[op])])
    return np.maximum(np.array(block, dtype=np.int32), 0)


def _readers(graph: OpGraph, forward: list[int], of_op: NDArray[np.int32]) -> tuple[tuple[int, ...], ...]:
    """Returns per parameter the blocks whose forward reads it; of one that nothing reads the block nearest to its module."""
    blocks: list[set[int]] = [set() for _ in graph.parameters]
    for tensor in np.flatnonzero(np.isin(graph.tensor_role, (PARAMETER, BUFFER))).tolist():
        readers = graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]]
        readers = readers[graph.op_phase[readers] == FORWARD]
        looks = np.array([graph.op_kind[op] == "view" for op in readers.tolist()], dtype=bool)
        readers = readers[~looks] if not looks.all() else readers
        blocks[int(graph.tensor_parameter[tensor])] |= set(of_op[readers].tolist())
    tree: ModuleHierarchy | None = None
    for index, found in enumerate(blocks):
        if not found:
            tree = tree or ModuleHierarchy(graph.op_module[op] for op in forward)
            found.add(int(of_op[forward[tree.nearest(graph.parameters[index].name.rpartition(".")[0])]]))
    return tuple(tuple(sorted(found)) for found in blocks)
