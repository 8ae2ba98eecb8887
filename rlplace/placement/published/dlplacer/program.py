"""The placement program: devices and start times that minimise the step time, for CP-SAT.

Variables: a device for every group (so that ops of a group sit together), a start for every task, and for every tensor that
other devices may read a start of its transfer to each of them. Constraints: a device runs one task at a time; a task starts
when its inputs are there; a tensor goes at most once to a device; with `contention`, a channel carries one transfer at a time;
memory and rules of the executor (`rlplace.placement.published.dlplacer.constraints`). Objective: the end of the last task.

The executor obeys all of these and more: a device never idles while a task is ready (unless an order says so), and transfers
wait in the order in which they were asked for. So every simulated step is a solution of the program, and a proven bound of the
program bounds every plan. Without contention, or with less memory than a step needs, the program allows more and its bound is
weaker, but still a bound.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import MissingError
from rlplace.placement.common.groupgraph import group_graph
from rlplace.placement.published.dlplacer.instance import TickedProblem, interchangeable


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


class PlacementProgram:
    """The model and its variables, without memory limits.

    Attributes:
        instance: The problem in ticks.
        problem: The problem.
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

    def __init__(self, instance: TickedProblem, *, contention: bool) -> None:
        """Builds the program.

        Args:
            instance: Times in ticks.
            contention: Whether channels carry one transfer at a time; otherwise every transfer starts at once.

        Raises:
            MissingError: OR-tools is not installed.
        """
        self.instance, self.problem = instance, instance.problem
        self.model = model = solver_library().CpModel()
        self.placed: list[dict[int, Any]] = [
            {d: model.new_bool_var(f"group_{g}_on_{d}") for d in np.flatnonzero(row).tolist()}
            for g, row in enumerate(self.problem.group_allowed)
        ]
        for literals in self.placed:
            model.add_exactly_one(list(literals.values()))
        self.start: list[Any] = []
        self.duration: list[Any] = []
        self.apart: dict[tuple[int, int], Any] = {}
        self.needed: dict[tuple[int, int], Any] = {}
        self.sent: dict[tuple[int, int], Any] = {}
        self.carried: dict[tuple[int, int, int], Any] = {}
        self._add_tasks()
        ways = zip(instance.heads, instance.shortest.tolist(), instance.tails, strict=True)
        least = min(max(map(sum, ways), default=0), instance.horizon)
        self.makespan = model.new_int_var(least, instance.horizon, "makespan")
        self.classes = interchangeable(self.problem)
        for task in range(self.problem.num_ops):
            model.add(self.makespan >= self.end(task) + instance.tails[task])
        self._run_one_task_at_a_time()
        self._wait_for_inputs()
        if contention:
            self._share_channels()
        self._break_symmetry()
        model.minimize(self.makespan)

    def end(self, task: int) -> Any:
        """Returns the end of a task as an expression."""
        return self.start[task] + self.duration[task]

    def made(self, value: int) -> Any:
        """Returns the time at which a value is there, as an expression: the end of its maker; 0 for a parameter."""
        maker = int(self.problem.tensor_producer[value])
        return self.end(maker) if maker >= 0 else 0

    def where(self, task: int) -> dict[int, Any]:
        """Returns the literals of the devices of a task."""
        return self.placed[self.problem.op_group[task]]

    def remote_readers(self, value: int) -> list[int]:
        """Returns readers of a value outside of the group that makes or owns it."""
        home = self.problem.tensor_group[value]
        return [task for task in self.instance.readers[value] if self.problem.op_group[task] != home]

    def needs(self, value: int, device: int) -> Any:
        """Returns the literal that a value is sent to a device, made on first use."""
        if (value, device) not in self.needed:
            home = self.placed[self.problem.tensor_group[value]].get(device, False)
            groups = sorted({int(self.problem.op_group[task]) for task in self.remote_readers(value)})
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

    def _add_tasks(self) -> None:
        for task in range(self.problem.num_ops):
            latest = self.instance.horizon - self.instance.tails[task] - int(self.instance.shortest[task])
            first = min(self.instance.heads[task], latest)
            self.start.append(self.model.new_int_var(first, latest, f"start_{task}"))
            ticks = {device: int(self.instance.duration[task, device]) for device in self.where(task)}
            alike = len(set(ticks.values())) == 1
            terms = (ticks[device] * literal for device, literal in self.where(task).items())
            self.duration.append(next(iter(ticks.values())) if alike else sum(terms))

    def _run_one_task_at_a_time(self) -> None:
        instance, model = self.instance, self.model
        for device in range(self.problem.num_devices):
            intervals, load, first, last = [], [], [], []
            for task in range(self.problem.num_ops):
                literal = self.where(task).get(device)
                if literal is None or not instance.occupies[task]:
                    continue
                ticks = int(instance.duration[task, device])
                run = model.new_optional_fixed_size_interval_var(self.start[task], ticks, literal, f"run_{task}_{device}")
                intervals.append(run)
                load.append(ticks * literal)
                first.append(instance.heads[task])
                last.append(instance.tails[task])
            model.add_no_overlap(intervals)
            if load:  # says nothing new, but the solver's linear relaxation sees it
                model.add(self.makespan >= sum(load) + min(first) + min(last))
        for collective in self.problem.collectives:
            for task in collective.ops[1:]:
                model.add(self.start[task] == self.start[collective.ops[0]])

    def _wait_for_inputs(self) -> None:
        """Constrains tasks to start after their inputs are there, with transfers at their shortest."""
        model = self.model
        ordered: set[tuple[int, int]] = set()
        for value in range(self.problem.num_tensors):
            maker, home = int(self.problem.tensor_producer[value]), int(self.problem.tensor_group[value])
            for reader in self.instance.readers[value]:
                group = int(self.problem.op_group[reader])
                sources, devices = ({}, {}) if group == home else (self.placed[home], self.placed[group])
                table = {(s, d): int(self.instance.transfer[value, s, d]) for s in sources for d in devices if s != d}
                least = min((ticks for ticks in table.values() if ticks >= 0), default=0)
                for (source, device), ticks in table.items():
                    if ticks < 0:
                        model.add_bool_or([~sources[source], ~devices[device]])
                if least > 0:
                    model.add(self.start[reader] >= self.made(value) + least * self.apart_literal(home, group))
                elif maker >= 0 and (maker, reader) not in ordered:
                    ordered.add((maker, reader))
                    model.add(self.start[reader] >= self.made(value))
                for (source, device), ticks in table.items():
                    if ticks > least:
                        there = [sources[source], devices[device]]
                        model.add(self.start[reader] >= self.made(value) + ticks).only_enforce_if(there)

    def _share_channels(self) -> None:
        """Makes transfers intervals, of which a channel carries one at a time."""
        instance, model, held = self.instance, self.model, dict[int, list[Any]]()
        for value in range(self.problem.num_tensors):
            home = self.placed[self.problem.tensor_group[value]]
            maker, readers = int(self.problem.tensor_producer[value]), self.remote_readers(value)
            for device in sorted({d for task in readers for d in self.where(task)}):
                sources = [s for s in home if s != device and instance.transfer[value, s, device] >= 0]
                if not sources:
                    continue
                needed = self.needs(value, device)
                first = instance.heads[maker] + int(instance.shortest[maker]) if maker >= 0 else 0
                sent = model.new_int_var(min(first, instance.horizon), instance.horizon, f"sent_{value}_{device}")
                self.sent[value, device] = sent
                if maker >= 0:
                    model.add(sent >= self.end(maker)).only_enforce_if(needed)
                for source in sources:
                    ticks = int(instance.transfer[value, source, device])
                    carried = needed
                    if len(sources) > 1 or len(home) > 2:
                        carried = model.new_bool_var(f"carried_{value}_{source}_{device}")
                        model.add_implication(carried, needed)
                        model.add_implication(carried, home[source])
                        model.add_bool_or([carried, ~needed, ~home[source]])
                    self.carried[value, source, device] = carried
                    name = f"move_{value}_{source}_{device}"
                    interval = model.new_optional_fixed_size_interval_var(sent, ticks, carried, name)
                    for channel in self.problem.links.effective_channels[source][device]:
                        held.setdefault(channel, []).append(interval)
                    for reader in readers:
                        if device in self.where(reader):
                            there = [carried, self.where(reader)[device]]
                            model.add(self.start[reader] >= sent + ticks).only_enforce_if(there)
        for channel in sorted(held):
            model.add_no_overlap(held[channel])

    def _break_symmetry(self) -> None:
        """Constrains devices that may be permuted: a later one is used only after the one before it, in order of groups."""
        for members in self.classes:
            for earlier, later in pairwise(members):
                before: list[Any] = []
                for group in group_graph(self.problem).order.tolist():
                    literals = self.placed[group]
                    if later in literals:
                        self.model.add_bool_or([~literals[later], *before])
                    if earlier in literals:
                        before.append(literals[earlier])


def relabel(program: PlacementProgram, device_of_group: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns int32 [D], new name of every device under which an assignment obeys the symmetry breaking."""
    names = np.arange(program.problem.num_devices, dtype=np.int32)
    used = list(dict.fromkeys(device_of_group[group_graph(program.problem).order].tolist()))
    for members in program.classes:
        mine = [device for device in used if device in members]
        names[mine + [device for device in members if device not in mine]] = members
    return names
