"""A plan's whole strategy evaluated again, on its own cluster or on another of as many devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, show
from rlplace.explanation.report.lanes import COLLECTIVE, DEVICE, LINK, LaneRow, among, packed_rows
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import Strategy
from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD, UPDATE
from rlplace.simulator import Timeline
from rlplace.strategy.drafts import Draft
from rlplace.strategy.op_level.expand import ExpandedDraft
from rlplace.strategy.op_level.step_build import GATHER, SEND, TIE, UPDATE_RUN, DeviceRun

if TYPE_CHECKING:
    from rlplace.cluster import Cluster
    from rlplace.strategy.executor.evaluate import StepEvaluation
    from rlplace.strategy.search.op_level import OpLevel
    from rlplace.strategy.search.tries import SearchProblem


@dataclass(frozen=True, eq=False)
class Asked:
    """A plan, and the question that it answers, built again.

    Attributes:
        plan: A plan with a strategy.
        question: Model, batch and cluster; it allows every strategy that the runtime can execute.
    """

    plan: PlacementPlan
    question: SearchProblem

    def draft(self, strategy: Strategy | None = None) -> Draft:
        """Returns the draft of a strategy; None: of the plan's.

        Raises:
            InputError: It cannot be evaluated; the message says why.
        """
        from rlplace.strategy.drafts import draft_of_strategy

        strategy = strategy or self.strategy
        names = self.question.costs.names
        named = [block for stage in strategy.pipelines[0].stages for block in stage.blocks]
        strange = next((block for block in named if block not in names), None)
        if strange is not None:
            raise InputError(f"strategy: the model has no block {show(strange)}; its blocks are {', '.join(names)}")
        if tuple(named) != names:
            raise InputError(f"strategy: it must name the model's blocks once each, in this order: {', '.join(names)}")
        draft = draft_of_strategy(strategy, names)
        priced = [stage.tensor for stage in self.question.strategy(draft).stages]
        if any(stage.tensor and stage.tensor != own for stage, own in zip(strategy.stages, priced, strict=True)):
            raise InputError("strategy: its tensor layouts are not those that are priced; leave them out, or plan again")
        return draft

    def evaluate(self, strategy: Strategy | None = None) -> StepEvaluation:
        """Returns step time and memory of a strategy (None: the plan's), op by op where the number of ops allows it."""
        return self.finer.evaluate(self.draft(strategy))

    @cached_property
    def finer(self) -> OpLevel:
        """The finest executor of drafts that the number of ops allows."""
        from rlplace.strategy.search.op_level import OpLevel

        return OpLevel(self.question)

    @property
    def model(self) -> str:
        """The model's name, for display."""
        return str(((self.plan.source or {}).get("graph") or {}).get("model", "model"))

    @property
    def strategy(self) -> Strategy:
        """The strategy of the plan."""
        assert self.plan.strategy is not None
        return self.plan.strategy


def ask_again(plan: PlacementPlan, machine: Cluster) -> Asked:
    """Captures a plan's model again and prices its blocks.

    Args:
        plan: A plan with a strategy; its `source` says how to build the model.
        machine: The plan's cluster, or another of as many devices.

    Raises:
        InputError: It cannot be built again, or is another model or another cost table today.
    """
    from rlplace.cost.foreign import as_costs
    from rlplace.model.graph.rescale import two_captures
    from rlplace.planned import capture_recipe, check_graph, recipe_of, source_of
    from rlplace.runtime.strategy.facts import facts_of
    from rlplace.runtime.strategy.why_not import judge
    from rlplace.strategy.search.plan import ask

    strategy = plan.strategy
    if strategy is None:
        raise InputError("plan: it places groups of a problem and has no strategy; simulate it on its problem")
    recipe, source = recipe_of(plan), source_of(plan)
    costs = source.table.path
    if source.table.fingerprint is not None and as_costs(costs).fingerprint != source.table.fingerprint:
        raise InputError(f"plan: the op times it was made with ({show(costs)}) are others today; plan again")
    model = recipe.build("meta", seed=0)
    why_not, only = judge(facts_of(model.module, model.example_inputs))
    if why_not(strategy) is not None:
        only = None  # planned for what cannot run yet
    graph, other = two_captures(check_graph(plan), lambda batch, method=None: capture_recipe(recipe, batch, source, method))
    pricing: dict[str, Any] = {"other": other, "only": only, "costs": costs, "host": source.host or "eager"}
    return Asked(plan, ask(graph, machine, strategy.batch, why_not=why_not, **pricing))


def same_model(one: PlacementPlan, other: PlacementPlan) -> bool:
    """Returns whether two plans are for one model, cluster and cost table, whatever their batch."""
    keys = ("graph_fingerprint", "cluster_fingerprint", "costs", "host", "cost_version")
    a, b = one.source or {}, other.source or {}
    return all(a.get(key) == b.get(key) and key in a for key in keys)


def other_cluster(plan: PlacementPlan, cluster: str) -> Cluster:
    """Returns another cluster for a plan with a strategy.

    Raises:
        InputError: It has another number of devices.
    """
    from rlplace.cluster.parse import parse

    assert plan.strategy is not None
    machine, wanted = parse(cluster), len(plan.predicted.peak_memory_bytes) or 1 + max(plan.strategy.devices)
    if machine.num_devices != wanted:
        raise InputError(
            f"the plan is for {wanted} devices, {show(cluster)} has {machine.num_devices}; name a cluster of as many, or plan "
            "for this one with 'rlplace place'"
        )
    return machine


OPS = {FORWARD: "forward", BACKWARD: "backward", BACKWARD_WEIGHT: "gradients of weights", UPDATE: "update"}
"""What every block does; ops are numbered block by block."""

_PHASES = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD, "W": BACKWARD_WEIGHT, UPDATE_RUN: UPDATE}


class Box(NamedTuple):
    """A span of time in a row.

    Attributes:
        row: Number of the row.
        start_s, end_s: Seconds from the beginning of the step.
        op: Block times the number of `OPS`, plus the phase.
        microbatch: Its number; -1 for what runs once a step.
        size_bytes: Bytes sent; -1 where nothing is.
    """

    row: int
    start_s: float
    end_s: float
    op: int
    microbatch: int
    size_bytes: int = -1


class Picture:
    """Rows, devices first, and boxes; `add` draws one pipeline after the other.

    Attributes:
        rows: Rows so far.
        boxes: Their boxes.

    Args:
        names: Names of the cluster's devices.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.rows = [LaneRow(name, DEVICE, number) for number, name in enumerate(names)]
        self.boxes: list[Box] = []

    def add(self, draft: Draft, expanded: ExpandedDraft, line: Timeline, update_after_s: float = 0.0) -> None:
        """Draws a pipeline.

        Args:
            draft: The strategy that was run.
            expanded: The ops of the strategy.
            line: Their start and end times.
            update_after_s: Seconds by which updates run later than in `line`, because they wait for other pipelines.
        """
        start, end = line.start_s, line.end_s
        inside: dict[int, list[Box]] = {}
        for run in expanded.runs:
            if run.part is None:
                own = draft.blocks_of(run.device % len(draft.places))
                span = slice(run.first, run.first + len(own))
                times = zip((start[span] + update_after_s).tolist(), (end[span] + update_after_s).tolist(), own, strict=True)
                spans = [(begin, stop, block, False) for begin, stop, block in times]
            else:
                spans = list(_spans(run, start, end))
            for begin, stop, block, moves in spans:
                box = Box(-1, begin, stop, len(OPS) * int(block) + _PHASES[run.kind], run.microbatch)
                if moves:
                    inside.setdefault(run.device, []).append(box)
                elif stop > begin:
                    self.boxes += [box._replace(row=device) for device in expanded.stands_for[run.device]]
        for device, boxes in inside.items():
            self._collectives(expanded.stands_for[device], boxes)
        self._exchanged(draft, expanded, start, end)

    def _exchanged(self, draft: Draft, expanded: ExpandedDraft, start: NDArray[np.float64], end: NDArray[np.float64]) -> None:
        """Communication: a row for the collectives of each channel, and for each direction between stages."""
        shared: dict[tuple[int, ...], tuple[list[int], list[Box]]] = {}
        ways: dict[tuple[int, int], list[Box]] = {}
        for key, collective in zip(expanded.exchanges, expanded.problem.collectives, strict=True):
            first = collective.ops[0]
            begin, stop = float(start[first]), float(end[first])
            if key[0] == SEND:
                _, lane, source, target, microbatch, size = key
                block, phase = (draft.bounds[target] - 1, FORWARD) if target > source else (draft.bounds[source], BACKWARD)
                places = (lane * len(draft.places) + draft.place_of_stage[stage] for stage in (source, target))
                here, there = (expanded.stands_for[place][0] for place in places)
                box = Box(-1, begin, stop, len(OPS) * block + phase, microbatch, size)
                ways.setdefault((here, there), []).append(box)
            elif stop > begin:
                place = 0 if key[0] == TIE else key[1]
                of_block = isinstance(key[2], int) and len(key) == 4 if key[0] != TIE else False
                block = key[2] if of_block else draft.blocks_of(place)[0]
                phase = FORWARD if key[0] == GATHER and key[3].startswith("F") else BACKWARD
                devices, boxes = shared.setdefault(collective.channels, ([], []))
                members = [d for op in collective.ops for d in expanded.stands_for[expanded.problem.op_group[op]]]
                devices[:] = sorted({*devices, *members})
                boxes.append(Box(-1, begin, stop, len(OPS) * block + phase, -1))
        for devices, boxes in shared.values():
            self._collectives(devices, boxes)
        for (here, there), boxes in ways.items():
            self._packed(LaneRow(f"{self._names[here]} → {self._names[there]}", LINK, here, there), boxes)

    def sum_gradients(self, devices: Sequence[int], start_s: float, end_s: float) -> None:
        """Draws the sums of gradients that parallel pipelines wait for together."""
        self._collectives(devices, [Box(-1, start_s, end_s, BACKWARD, -1)])

    def _collectives(self, devices: Sequence[int], boxes: list[Box]) -> None:
        name = f"collective {among([self._names[device] for device in devices])}"
        self._packed(LaneRow(name, COLLECTIVE, devices[0]), [box for box in boxes if box.end_s > box.start_s])

    def _packed(self, row: LaneRow, boxes: list[Box]) -> None:
        """The fewest rows like one that hold the boxes without overlap."""
        if boxes:
            start, end = np.array([box.start_s for box in boxes]), np.array([box.end_s for box in boxes])
            rows = packed_rows(self.rows, row, start, end).tolist()
            self.boxes += [box._replace(row=row) for box, row in zip(boxes, rows, strict=True)]


def _spans(run: DeviceRun, start: NDArray[np.float64], end: NDArray[np.float64]) -> Iterator[tuple[float, float, int, bool]]:
    """Start, end and block of what a block computes without a pause, and of its collectives, which are marked."""
    part = run.part
    assert part is not None
    rows = np.flatnonzero((part.op >= 0) | (part.collective >= 0))
    moves, block = part.collective[rows] >= 0, part.block[rows]
    begins = np.ones(len(rows), dtype=bool)
    begins[1:] = (block[1:] != block[:-1]) | moves[1:] | moves[:-1]
    first = np.flatnonzero(begins)
    last = np.append(first, len(rows))[1:] - 1
    at = rows + run.first
    return zip(start[at[first]].tolist(), end[at[last]].tolist(), block[first].tolist(), moves[first].tolist(), strict=True)
