"""Lookups of divided tables before the forward: what a forward looks up is computed from its inputs, for all tables at once.

The forward is recorded for every signature of inputs; of the record only what leads to ids is kept, and runs first. So the rows
of all tables are there in one exchange, as in torchrec, where each lookup on its own would wait for its own. Ids that follow
from trained parameters, random numbers or another lookup are not known before; these lookups stay where they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx, nn

from rlplace.errors import InputError
from rlplace.model.capture.export import is_random, rewrite_devices
from rlplace.model.torch_adapter import FakeTensor, pytree
from rlplace.plan.strategy import COLUMNS
from rlplace.runtime.base.batches import Batch, signature_of
from rlplace.runtime.strategy.capture import UnitGraph, capture
from rlplace.runtime.strategy.cut import needed_for
from rlplace.runtime.strategy.lookups import DividedTable, RowExchange


class _RecordedIds(NamedTuple):
    """The lookups of a forward for inputs of one signature."""

    ids: fx.GraphModule  # returns the ids of all, from the flat inputs
    tables: Sequence[DividedTable]  # of each
    exchanges: Sequence[tuple[Sequence[int], RowExchange]]  # numbers of lookups, and what fetches their rows together


class LookupsAhead:
    """A hook before the forward of a model, which looks up the rows of its tables.

    Args:
        model: With divided tables.
        meta: The model without its values and with whole tables.
        tables: By path, those that are divided.
        inputs: Keyword inputs of one micro-batch.
    """

    def __init__(self, model: nn.Module, meta: nn.Module, tables: Mapping[str, DividedTable], inputs: Batch) -> None:
        self._model, self._meta, self._tables = model, meta, tables
        try:
            self._recorded = {self._key(inputs): self._record(inputs)}
        except InputError as error:
            if dist.get_rank() == 0:
                warnings.warn(f"{error}; each divided table exchanges its rows apart", stacklevel=2)
            return
        model.register_forward_pre_hook(self._look_up, with_kwargs=True)

    def _look_up(self, module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        key = self._key(inputs)
        if key not in self._recorded:
            self._recorded[key] = self._record(inputs)
        made, tables, exchanges = self._recorded[key]
        ids = [own.flatten() for own in made(*pytree.tree_leaves(((), inputs)))]
        for table in self._tables.values():
            table.begin()
        for numbers, exchange in exchanges:
            for number, found in zip(numbers, exchange.fetch([ids[number] for number in numbers]), strict=True):
                tables[number].ahead.append(found)

    def _key(self, inputs: Batch) -> Any:
        return signature_of(dict(inputs)), self._model.training

    def _record(self, inputs: Batch) -> _RecordedIds:
        captured = capture(self._meta, inputs, self._tables)
        calls = [node for node in captured.graph.nodes if node.op == "call_module" and node.target in self._tables]
        sources = [node.args[0] if node.args else node.kwargs["input"] for node in calls]
        known = [number for number, source in enumerate(sources) if _known_before(captured, source)]
        late = {calls[number].target for number in range(len(calls)) if number not in known}
        known = [number for number in known if calls[number].target not in late]
        tables, exchanges = [self._tables[calls[number].target] for number in known], dict[torch.dtype, list[int]]()
        for number in sorted(range(len(tables)), key=lambda number: tables[number].layout.word == COLUMNS):
            exchanges.setdefault(tables[number].layout.dtype, []).append(number)
        made = [(own, RowExchange([tables[number] for number in own])) for own in exchanges.values()]
        return _RecordedIds(self._ids(captured, [sources[number] for number in known]), tables, made)

    def _ids(self, captured: UnitGraph, sources: Sequence[fx.Node]) -> fx.GraphModule:
        """Returns what computes these values from flat inputs."""
        graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
        wanted = needed_for(sources, set())
        for node in captured.graph.nodes:
            if node.op == "placeholder" or node in wanted:
                copied[node] = graph.node_copy(node, copied.__getitem__)
        graph.output(tuple(copied[source] for source in sources))
        made, device = fx.GraphModule(captured.module, graph), next(iter(self._tables.values())).device
        for node in made.graph.nodes:
            rewrite_devices(node, device)
            if node.op == "get_attr":
                place, _, name = str(node.target).rpartition(".")
                held = dict(self._model.named_buffers()).get(str(node.target))
                value = attrgetter(str(node.target))(captured.module) if held is None else held
                setattr(made.get_submodule(place), name, value.to(device))
        made.recompile()
        return made


def _known_before(captured: UnitGraph, source: fx.Node) -> bool:
    """Returns whether a value follows from inputs, buffers and constants alone."""
    for node in needed_for([source], set()):
        value = attrgetter(str(node.target))(captured.module) if node.op == "get_attr" else None
        if node.op == "call_module" or is_random(node) or isinstance(value, (nn.Parameter, FakeTensor)):
            return False
    return True
