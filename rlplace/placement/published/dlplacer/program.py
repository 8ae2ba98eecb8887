"""The placement program: devices and start times that minimise the step time, for CP-SAT.

Variables: a device for every group (so that ops of a group sit together), a start for every task, and for every tensor that
other devices may read a start of its transfer to each of them. Constraints: a device runs one task at a time; a task starts
when its inputs are there; a tensor goes at most once to a device; with `contention`, a channel carries one transfer at a time;
memory (`rlplace.placement.published.dlplacer.memory`). Objective: the end of the last task.

The executor obeys all of these and more: a device never idles while a task is ready (unless an order says so), and transfers
wait in the order in which they were asked for. So every simulated step is a solution of the program, and a proven bound of the
program bounds every plan. Without contention, or with less memory than a step needs, the program allows more and its bound is
weaker, but still a bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import MissingError
from rlplace.placement.common.groupgraph import group_graph
from rlplace.placement.published.dlplacer.instance import Instance
from rlplace.placement.published.dlplacer.symmetry import interchangeable


def solver_library() -> Any:
    """Returns the module `ortools.sat.python.cp_model`.

    Raises:
        MissingError: The extra is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise MissingError(
            "the exact planners need OR-tools, which is not installed; run: pip install 'rlplace[exact]', "
            "or use planner 'annealing'"
        ) from None
    return cp_model


@dataclass(eq=False)
class PlacementProgram:
    """The model and its variables.

    Attributes:
        instance: The problem in ticks.
        model: The `CpModel`.
        placed: For each group, by allowed device, the literal that it is placed there.
        start: Start of each task in ticks.
        duration: Duration of each task in ticks; an expression where devices differ.
        makespan: End of the last task in ticks.
        apart: Literal by pair of groups, low number first: they are on different devices.
        needed: Literal by (value, device): the value is sent there.
        sent: Start in ticks by (value, device) of that transfer.
        carried: Literal by (value, source, device): the transfer starts at that source.
        classes: Devices that may be permuted.
    """

    instance: Instance
    model: Any
    placed: list[dict[int, Any]]
    start: list[Any]
    duration: list[Any]
    makespan: Any
    classes: list[list[int]]
    apart: dict[tuple[int, int], Any] = field(default_factory=dict)
    needed: dict[tuple[int, int], Any] = field(default_factory=dict)
    sent: dict[tuple[int, int], Any] = field(default_factory=dict)
    carried: dict[tuple[int, int, int], Any] = field(default_factory=dict)

    def end(self, task: int) -> Any:
        """End of a task as an expression."""
        return self.start[task] + self.duration[task]

    def made(self, value: int) -> Any:
        """When a value is there, as an expression: the end of its maker; 0 for a parameter."""
        maker = int(self.instance.problem.tensor_producer[value])
        return self.end(maker) if maker >= 0 else 0

    def remote_readers(self, value: int) -> list[int]:
        """Returns readers of a value outside of the group that makes or owns it."""
        home = self.instance.problem.tensor_group[value]
        return [task for task in self.instance.readers[value] if self.instance.problem.op_group[task] != home]

    def needs(self, value: int, device: int) -> Any:
        """Returns the literal that a value is sent to a device, made on first use."""
        if (value, device) not in self.needed:
            home = self.placed[self.instance.problem.tensor_group[value]].get(device, False)
            groups = sorted({int(self.instance.problem.op_group[task]) for task in self.remote_readers(value)})
            there = [self.placed[group][device] for group in groups if device in self.placed[group]]
            literal = self.model.new_bool_var(f"needed_{value}_{device}")
            self.model.add_bool_or([*there, ~literal])
            if home is not False:
                self.model.add_implication(literal, ~home)
            for reader in there:
                self.model.add_bool_or([literal, ~reader] if home is False else [literal, home, ~reader])
            self.needed[value, device] = literal
        return self.needed[value, device]

    def apart_literal(self, first: int, second: int) -> Any:
        """Returns the literal that two groups sit on different devices, made on first use."""
        key = (min(first, second), max(first, second))
        if key not in self.apart:
            literal = self.model.new_bool_var(f"apart_{key[0]}_{key[1]}")
            left, right = self.placed[key[0]], self.placed[key[1]]
            for device in sorted(set(left) | set(right)):
                if device not in left:
                    self.model.add_implication(right[device], literal)
                elif device not in right:
                    self.model.add_implication(left[device], literal)
                else:
                    self.model.add_bool_or([~left[device], right[device], literal])
                    self.model.add_bool_or([left[device], ~right[device], literal])
                    self.model.add_bool_or([~left[device], ~right[device], ~literal])
            self.apart[key] = literal
        return self.apart[key]


def build_program(instance: Instance, *, contention: bool) -> PlacementProgram:
    """Builds the program without memory limits.

    Args:
        instance: Times in ticks.
        contention: Whether channels carry one transfer at a time; otherwise every transfer starts at once.

    Raises:
        MissingError: OR-tools is not installed.
    """
    model = solver_library().CpModel()
    allowed = instance.problem.group_allowed
    placed = [
        {d: model.new_bool_var(f"group_{g}_on_{d}") for d in np.flatnonzero(row).tolist()} for g, row in enumerate(allowed)
    ]
    for literals in placed:
        model.add_exactly_one(list(literals.values()))
    start, duration = _starts(instance, model, placed)
    least = max((h + int(t) + q for h, t, q in zip(instance.heads, instance.shortest, instance.tails, strict=True)), default=0)
    makespan = model.new_int_var(min(least, instance.horizon), instance.horizon, "makespan")
    program = PlacementProgram(instance, model, placed, start, duration, makespan, interchangeable(instance.problem))
    for task in range(instance.problem.num_ops):
        model.add(makespan >= program.end(task) + instance.tails[task])
    _one_task_at_a_time(program)
    _inputs(program)
    if contention:
        _channels(program)
    _symmetry(program)
    model.minimize(makespan)
    return program


def _starts(instance: Instance, model: Any, placed: list[dict[int, Any]]) -> tuple[list[Any], list[Any]]:
    start, duration = [], []
    for task in range(instance.problem.num_ops):
        latest = instance.horizon - instance.tails[task] - int(instance.shortest[task])
        first = min(instance.heads[task], latest)
        start.append(model.new_int_var(first, latest, f"start_{task}"))
        literals = placed[instance.problem.op_group[task]]
        ticks = {device: int(instance.duration[task, device]) for device in literals}
        if len(set(ticks.values())) == 1:
            duration.append(next(iter(ticks.values())))
        else:
            duration.append(sum(ticks[device] * literal for device, literal in literals.items()))
    return start, duration


def _one_task_at_a_time(program: PlacementProgram) -> None:
    instance, model = program.instance, program.model
    for device in range(instance.problem.num_devices):
        intervals, load, first, last = [], [], [], []
        for task in range(instance.problem.num_ops):
            literal = program.placed[instance.problem.op_group[task]].get(device)
            if literal is None or not instance.occupies[task]:
                continue
            ticks = int(instance.duration[task, device])
            run = model.new_optional_fixed_size_interval_var(program.start[task], ticks, literal, f"run_{task}_{device}")
            intervals.append(run)
            load.append(ticks * literal)
            first.append(instance.heads[task])
            last.append(instance.tails[task])
        model.add_no_overlap(intervals)
        if load:  # says nothing new, but the solver's linear relaxation sees it
            model.add(program.makespan >= sum(load) + min(first) + min(last))
    for collective in instance.problem.collectives:
        together = list(collective.ops)
        for task in together[1:]:
            model.add(program.start[task] == program.start[together[0]])


def _inputs(program: PlacementProgram) -> None:
    """Constrains tasks to start after their inputs are there, with transfers at their shortest."""
    instance, model = program.instance, program.model
    ordered: set[tuple[int, int]] = set()
    for value in range(instance.problem.num_tensors):
        maker, home = int(instance.problem.tensor_producer[value]), int(instance.problem.tensor_group[value])
        for reader in instance.readers[value]:
            group = int(instance.problem.op_group[reader])
            sources, devices = ({}, {}) if group == home else (program.placed[home], program.placed[group])
            table = {(s, d): int(instance.transfer[value, s, d]) for s in sources for d in devices if s != d}
            known = [ticks for ticks in table.values() if ticks >= 0]
            least = min(known, default=0)
            for (source, device), ticks in table.items():
                if ticks < 0:
                    model.add_bool_or([~program.placed[home][source], ~program.placed[group][device]])
            if least > 0:
                model.add(program.start[reader] >= program.made(value) + least * program.apart_literal(home, group))
            elif maker >= 0 and (maker, reader) not in ordered:
                ordered.add((maker, reader))
                model.add(program.start[reader] >= program.made(value))
            for (source, device), ticks in table.items():
                if ticks > least:
                    there = [program.placed[home][source], program.placed[group][device]]
                    model.add(program.start[reader] >= program.made(value) + ticks).only_enforce_if(there)


def _channels(program: PlacementProgram) -> None:
    """Transfers are intervals; a channel carries one at a time."""
    instance, model = program.instance, program.model
    channels = instance.problem.links.effective_channels
    held: dict[int, list[Any]] = {}
    for value in range(instance.problem.num_tensors):
        home = int(instance.problem.tensor_group[value])
        maker, readers = int(instance.problem.tensor_producer[value]), program.remote_readers(value)
        devices = sorted({d for task in readers for d in program.placed[instance.problem.op_group[task]]})
        for device in devices:
            sources = [s for s in program.placed[home] if s != device and instance.transfer[value, s, device] >= 0]
            if not sources:
                continue
            needed = program.needs(value, device)
            first = instance.heads[maker] + int(instance.shortest[maker]) if maker >= 0 else 0
            sent = model.new_int_var(min(first, instance.horizon), instance.horizon, f"sent_{value}_{device}")
            program.sent[value, device] = sent
            if maker >= 0:
                model.add(sent >= program.end(maker)).only_enforce_if(needed)
            for source in sources:
                ticks = int(instance.transfer[value, source, device])
                carried = needed
                if len(sources) > 1 or len(program.placed[home]) > 2:
                    carried = model.new_bool_var(f"carried_{value}_{source}_{device}")
                    at_source = program.placed[home][source]
                    model.add_implication(carried, needed)
                    model.add_implication(carried, at_source)
                    model.add_bool_or([carried, ~needed, ~at_source])
                program.carried[value, source, device] = carried
                interval = model.new_optional_fixed_size_interval_var(sent, ticks, carried, f"move_{value}_{source}_{device}")
                for channel in channels[source][device]:
                    held.setdefault(channel, []).append(interval)
                for reader in readers:
                    literal = program.placed[instance.problem.op_group[reader]].get(device)
                    if literal is not None:
                        model.add(program.start[reader] >= sent + ticks).only_enforce_if([carried, literal])
    for channel in sorted(held):
        model.add_no_overlap(held[channel])


def _symmetry(program: PlacementProgram) -> None:
    """Constrains devices that may be permuted: a later one is used only after the one before it, in order of groups."""
    order = group_graph(program.instance.problem).order.tolist()
    for members in program.classes:
        for earlier, later in pairwise(members):
            before: list[Any] = []
            for group in order:
                literals = program.placed[group]
                if later in literals:
                    program.model.add_bool_or([~literals[later], *before])
                if earlier in literals:
                    before.append(literals[earlier])


def relabel(program: PlacementProgram, device_of_group: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns int32 [D], new name of every device under which an assignment obeys the symmetry breaking."""
    order = group_graph(program.instance.problem).order
    names = np.arange(program.instance.problem.num_devices, dtype=np.int32)
    used = list(dict.fromkeys(device_of_group[order].tolist()))
    for members in program.classes:
        mine = [device for device in used if device in members]
        mine += [device for device in members if device not in mine]
        names[mine] = members
    return names
