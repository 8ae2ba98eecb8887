"""A cut as a chain of stages: what each hands to the next, and what goes past the stages between.

Values with a gradient travel from stage to stage, as `torch.distributed.pipelining` has it: one that skips stages is carried
through those between, once for all that read it, and its gradient comes back the same way, added up on the way. Values without
a gradient (masks, positions, counts; of any dtype) need no way back, and torch 2.11 cannot carry them: they go straight from
the stage that makes them to each process that reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlplace.errors import InputError
from rlplace.runtime.distributed.graph.acyclic import topological
from rlplace.runtime.distributed.graph.cut import Cut, Segment


@dataclass(frozen=True, eq=False)
class Chain:
    """The stages of a cut in a row.

    Attributes:
        cut: One segment per stage.
        stages: In the order in which values pass them.
        devices: Per stage its device of the plan.
        carried: Per stage the values that it hands to the next, by node name; the loss is read by the last stage.
        aside: Per value without a gradient that another stage reads: the stage that makes it and those that read it.
    """

    cut: Cut
    stages: tuple[Segment, ...]
    devices: tuple[int, ...]
    carried: tuple[tuple[str, ...], ...]
    aside: Mapping[str, tuple[int, tuple[int, ...]]]

    @property
    def last(self) -> int:
        """Number of the last stage."""
        return len(self.stages) - 1

    def taken(self, stage: int) -> tuple[str, ...]:
        """The values that a stage gets from the one before it."""
        return self.carried[stage - 1] if stage > 0 else ()


def chain_of(cut: Cut) -> Chain:
    """Puts the stages of a cut in a row: earlier ones feed later ones, and of two that could come next the lower number does.

    Raises:
        InputError: A stage is not one segment.
    """
    parts: dict[int, int] = {}
    for segment in cut.segments:
        parts[segment.placement.stage] = parts.get(segment.placement.stage, 0) + 1
    apart = [stage for stage, count in parts.items() if count > 1]
    if apart:
        where = sorted({segment.placement.device for segment in cut.segments if segment.placement.stage == apart[0]})
        reason = (
            f"sits on devices {', '.join(map(str, where))}" if len(where) > 1 else f"needs to run in {parts[apart[0]]} parts"
        )
        raise InputError(
            f"pipeline: stage {apart[0]} {reason}, because other stages lie between; give those ops a stage of their own "
            "(stage_of_group), or use the schedule list, which the stage-graph engine runs"
        )
    waits = {segment.index: cut.predecessors(segment) for segment in cut.segments}
    numbers = topological(waits, {segment.index: (segment.placement.stage, segment.index) for segment in cut.segments})
    order = [cut.segments[number] for number in numbers]
    position = {segment.index: number for number, segment in enumerate(order)}
    carried: list[list[str]] = [[] for _ in order]
    aside: dict[str, tuple[int, tuple[int, ...]]] = {}
    for name, maker in cut.maker.items():
        source = position[maker]
        readers = {position[reader] for reader in cut.readers.get(name, ())}
        if name == cut.graph.loss:
            readers.add(len(order) - 1)
        readers.discard(source)
        if not readers:
            continue
        if cut.graph.layout[name].requires_grad:
            for stage in range(source, max(readers)):
                carried[stage].append(name)
        else:
            aside[name] = (source, tuple(sorted(readers)))
    return Chain(
        cut=cut,
        stages=tuple(order),
        devices=tuple(segment.placement.device for segment in order),
        carried=tuple(tuple(names) for names in carried),
        aside=aside,
    )
