"""Constraints of the placement program beyond devices and times: rules of the executor, and memory limits.

The program lets transfers pass each other and lets devices and links stand idle, for example to let another tensor go first.
`keep_request_order` and `start_at_once` forbid that. Every simulated step obeys both, whatever its order or priorities, so
bounds stay bounds, and the program's optimum becomes what a step can take. Where times are rounded to ticks, two events of the
same instant may be a tick apart, and that much is allowed.

`limit_timeline` is the executor's own account of memory (resident bytes always; outputs from the start of their producer,
received copies from the start of their transfer, both until the last reader or send ends; temporaries while their op runs) as
one cumulative constraint per device, for small problems. Where bytes are too many for the solver they are rounded so that the
program allows more, never less; frees and allocations of one instant may come in either order. So its bound stays a bound.

`limit_static` needs no times: resident bytes, tensors that forward ops keep for backward ops, received copies of those, and the
largest temporary need of one group. It is an estimate of the peak for coarse programs, whose plans are simulated and repaired
anyway. All but `limit_static` need a program with contention.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np

from rlplace.placement.common.groupgraph import group_graph, kept_for_backward
from rlplace.placement.published.dlplacer.program import PlacementProgram
from rlplace.problem import Problem

MAX_PAIRS = 4_000
"""With more pairs of transfers than this, the program lets them pass each other."""

MAX_REASONS = 20_000
"""With more pairs of tasks, or of transfers, than this, the program lets them wait."""

_MAX_UNITS = 1 << 24

_Route = tuple[int, int, int]


def keep_request_order(program: PlacementProgram) -> bool:
    """Constrains transfers that want one channel to go in the order in which their tensors were produced.

    Transfers of one tensor follow the numbers of the devices, where exchanging like devices cannot change that.

    Returns:
        Whether the program has few enough pairs of transfers; with more, nothing is added.
    """
    pairs = [(a, b) for a, b in _sharing(program) if a[0] != b[0] or (a[1] == b[1] and _named_in_order(program, a[2], b[2]))]
    if len(pairs) > MAX_PAIRS:
        return False
    for first, second in pairs:
        _order_pair(program, first, second)
    return True


def start_at_once(program: PlacementProgram) -> bool:
    """Constrains tasks to start when an input arrives or their device is freed, transfers when a tensor or channel is ready.

    Returns:
        Whether the program is small enough; otherwise nothing is added.
    """
    sharing = _sharing(program)
    if max(len(sharing), program.problem.num_ops**2) > MAX_REASONS:
        return False
    for task in range(program.problem.num_ops):
        if program.instance.occupies[task]:
            _start_task(program, task)
    rivals: dict[tuple[int, int], list[_Route]] = {}
    for first, second in sharing:
        rivals.setdefault((first[0], first[2]), []).append(second)
        rivals.setdefault((second[0], second[2]), []).append(first)
    for key in program.sent:
        _start_transfer(program, key, sorted(set(rivals.get(key, []))))
    return True


def _sharing(program: PlacementProgram) -> list[tuple[_Route, _Route]]:
    """Returns pairs of transfers that want a channel in common."""
    channels = program.problem.links.effective_channels
    held: dict[int, list[_Route]] = {}
    for route in program.carried:
        for channel in channels[route[1]][route[2]]:
            held.setdefault(channel, []).append(route)
    return sorted({pair for routes in held.values() for pair in combinations(sorted(routes), 2)})


def _named_in_order(program: PlacementProgram, first: int, second: int) -> bool:
    """Returns whether the first device has the lower number under every name that symmetry breaking may give the two.

    A tensor goes to the device with the lower number first. One solution represents all plans that differ in the names of like
    devices, whose orders may differ.
    """
    near = next((members for members in program.classes if first in members), [first])
    far = next((members for members in program.classes if second in members), [second])
    return max(near) < min(far)


def _slack(program: PlacementProgram) -> int:
    return 0 if program.instance.ticks.exact else 1


def _order_pair(program: PlacementProgram, first: _Route, second: _Route) -> None:
    """Constrains the order of two transfers; `first` is that of the lower tensor, or of the same one to the lower device."""
    instance, model = program.instance, program.model
    both = [program.carried[first], program.carried[second]]
    before = program.sent[first[0], first[2]] + int(instance.transfer[first]) <= program.sent[second[0], second[2]]
    after = program.sent[second[0], second[2]] + int(instance.transfer[second]) <= program.sent[first[0], first[2]]
    one, other = (int(program.problem.tensor_producer[route[0]]) for route in (first, second))
    if one < 0 or one == other:  # parameters are asked for at once; what one task makes, by number
        model.add(before).only_enforce_if(both)
        return
    if other < 0:
        model.add(after).only_enforce_if(both)
        return
    ahead = model.new_bool_var(f"ahead_{first}_{second}")
    model.add(before).only_enforce_if([*both, ahead])
    model.add(after).only_enforce_if([*both, ~ahead])
    # Tasks that end in the same instant do so by number, unless one of them began in it.
    strict = instance.ticks.exact and min(instance.shortest[one], instance.shortest[other]) > 0
    early = -1 if strict and other < one else _slack(program)
    late = -1 if strict and one < other else _slack(program)
    model.add(program.end(one) <= program.end(other) + early).only_enforce_if([*both, ahead])
    model.add(program.end(other) <= program.end(one) + late).only_enforce_if([*both, ~ahead])


def _start_task(program: PlacementProgram, task: int) -> None:
    instance, model, slack = program.instance, program.model, _slack(program)
    group = int(program.problem.op_group[task])
    reasons = []
    if instance.heads[task] == 0:
        first = model.new_bool_var(f"first_{task}")
        model.add(program.start[task] <= 0).only_enforce_if(first)
        reasons.append(first)
    for other in range(program.problem.num_ops):
        shared = program.problem.op_group[other] == group or set(program.placed[group]) & set(program.where(other))
        if other != task and instance.occupies[other] and shared:
            follows = _reason(program, program.start[task], program.end(other), slack, f"follows_{task}_{other}")
            if program.problem.op_group[other] != group:
                model.add_implication(follows, ~program.apart_literal(group, int(program.problem.op_group[other])))
            reasons.append(follows)
    for value, source, device in program.carried:
        if task in program.remote_readers(value) and device in program.placed[group]:
            arrival = program.sent[value, device] + int(instance.transfer[value, source, device])
            reads = _reason(program, program.start[task], arrival, slack, f"reads_{task}_{value}_{source}_{device}")
            model.add_implication(reads, program.carried[value, source, device])
            model.add_implication(reads, program.placed[group][device])
            reasons.append(reads)
    model.add_bool_or(reasons)


def _start_transfer(program: PlacementProgram, key: tuple[int, int], rivals: list[_Route]) -> None:
    instance, model, slack = program.instance, program.model, _slack(program)
    sent, reasons = program.sent[key], []
    if program.problem.tensor_producer[key[0]] >= 0:
        reasons.append(_reason(program, sent, program.made(key[0]), slack, f"made_{key}"))
    else:
        at_zero = model.new_bool_var(f"at_zero_{key}")
        model.add(sent <= 0).only_enforce_if(at_zero)
        reasons.append(at_zero)
    for route in rivals:
        ends = program.sent[route[0], route[2]] + int(instance.transfer[route])
        freed = _reason(program, sent, ends, slack, f"freed_{key}_{route}")
        model.add_implication(freed, program.carried[route])
        reasons.append(freed)
    model.add_bool_or([*reasons, ~program.needed[key]])


def _reason(program: PlacementProgram, start: Any, end: Any, slack: int, name: str) -> Any:
    """Returns a literal that `start` comes right after `end`."""
    literal = program.model.new_bool_var(name)
    program.model.add(start >= end).only_enforce_if(literal)
    program.model.add(start <= end + slack).only_enforce_if(literal)
    return literal


def limited_devices(problem: Problem) -> list[int]:
    """Returns devices whose limit could bind: all groups together would not fit."""
    everything = int(problem.resident_bytes.sum() + problem.tensor_bytes.sum() + problem.temporary_bytes.max(initial=0))
    return [device for device, limit in enumerate(problem.memory_limit_bytes.tolist()) if limit < everything]


def limit_timeline(program: PlacementProgram) -> None:
    """Adds the executor's memory account."""
    instance, model, problem = program.instance, program.model, program.problem
    limits = problem.memory_limit_bytes
    devices = limited_devices(problem)
    if not devices:
        return
    freed = [_freed_at_home(program, value) for value in range(program.problem.num_tensors)]
    for device in devices:
        unit = max(1, -(-int(limits[device]) // _MAX_UNITS))
        capacity = int(limits[device]) // unit
        intervals: list[Any] = []
        demands: list[int] = []
        for task in range(program.problem.num_ops):
            literal = program.where(task).get(device)
            size = int(problem.temporary_bytes[task]) // unit
            if literal is not None and size > 0:
                ticks = int(instance.duration[task, device])
                name = f"temporary_{task}_{device}"
                intervals.append(model.new_optional_fixed_size_interval_var(program.start[task], ticks, literal, name))
                demands.append(size)
        for value in range(program.problem.num_tensors):
            size = int(problem.tensor_bytes[value]) // unit
            if size == 0:
                continue
            literal = program.placed[program.problem.tensor_group[value]].get(device)
            if literal is not None and problem.tensor_producer[value] >= 0:
                born, end, length = freed[value]
                intervals.append(model.new_optional_interval_var(born, length, end, literal, f"live_{value}_{device}"))
                demands.append(size)
            if (value, device) in program.sent:
                intervals.append(_copy(program, value, device))
                demands.append(size)
        resident = [
            (int(problem.resident_bytes[group]) // unit) * literals[device]
            for group, literals in enumerate(program.placed)
            if device in literals and problem.resident_bytes[group] >= unit
        ]
        room = model.new_int_var(0, max(capacity, 0), f"room_{device}")
        model.add(room <= capacity - sum(resident))
        model.add_cumulative(intervals, demands, room)


def _freed_at_home(program: PlacementProgram, value: int) -> tuple[Any, Any, Any]:
    """Returns when a value takes memory where it is made, when it is freed there, and the ticks between."""
    instance, model = program.instance, program.model
    top = instance.horizon
    maker, home = int(program.problem.tensor_producer[value]), int(program.problem.tensor_group[value])
    end, length = model.new_int_var(0, top, f"freed_{value}"), model.new_int_var(0, top, f"life_{value}")
    born = program.start[maker] if maker >= 0 else 0
    if maker >= 0:
        model.add(end >= program.end(maker))
    for reader in instance.readers[value]:
        group = int(program.problem.op_group[reader])
        if group == home:
            model.add(end >= program.end(reader))
        else:
            model.add(end >= program.end(reader)).only_enforce_if(~program.apart_literal(home, group))
    for device in range(program.problem.num_devices):
        for source in program.placed[home]:
            carried = program.carried.get((value, source, device))
            if carried is not None:
                ticks = int(instance.transfer[value, source, device])
                model.add(end >= program.sent[value, device] + ticks).only_enforce_if(carried)
    return born, end, length


def _copy(program: PlacementProgram, value: int, device: int) -> Any:
    instance, model = program.instance, program.model
    end = model.new_int_var(0, instance.horizon, f"dropped_{value}_{device}")
    length = model.new_int_var(0, instance.horizon, f"held_{value}_{device}")
    needed = program.needed[value, device]
    for reader in program.remote_readers(value):
        literal = program.where(reader).get(device)
        if literal is not None:
            model.add(end >= program.end(reader)).only_enforce_if([needed, literal])
    return model.new_optional_interval_var(program.sent[value, device], length, end, needed, f"copy_{value}_{device}")


def limit_static(program: PlacementProgram) -> None:
    """Adds the estimate of the peak that needs no times."""
    model, problem = program.model, program.problem
    devices = limited_devices(problem)
    if not devices:
        return
    footprint = group_graph(problem).footprint_bytes.tolist()
    saved = kept_for_backward(problem)
    saved[problem.edge_tensor[problem.tensor_producer[problem.edge_tensor] < 0]] = True  # and parameters that ops read
    brief = problem.temporary_bytes.copy()
    for tensor in np.flatnonzero(~saved & (problem.tensor_producer >= 0)).tolist():
        brief[problem.tensor_producer[tensor]] += problem.tensor_bytes[tensor]
    largest = np.zeros(problem.num_groups, dtype=np.int64)
    np.maximum.at(largest, problem.op_group, brief)
    for device in devices:
        terms = [size * program.placed[g][device] for g, size in enumerate(footprint) if device in program.placed[g]]
        for value in np.flatnonzero(saved).tolist():
            size = int(problem.tensor_bytes[value])
            if size and any(device in program.where(task) for task in program.remote_readers(value)):
                terms.append(size * program.needs(value, device))
        limit = int(problem.memory_limit_bytes[device])
        base = model.new_int_var(0, max(limit, 0), f"base_{device}")
        model.add(base >= sum(terms))
        for group, size in enumerate(largest.tolist()):
            if device in program.placed[group]:
                model.add(base + size * program.placed[group][device] <= limit)
