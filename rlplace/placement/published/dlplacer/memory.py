"""Memory limits of the placement program, in two strengths.

`limit_timeline` is the executor's own account (resident bytes always; outputs from the start of their producer, received copies
from the start of their transfer, both until the last reader or send ends; temporaries while their op runs) as one cumulative
constraint per device. It needs a program with contention and is meant for small problems. Where bytes are too many for the
solver they are rounded so that the program allows more, never less; frees and allocations of one instant may come in either
order. So its bound stays a bound.

`limit_static` needs no times: resident bytes, tensors that forward ops keep for backward ops, received copies of those, and the
largest temporary need of one group. It is an estimate of the peak and meant for coarse programs, whose plans are simulated and
repaired anyway.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlplace.placement.common.groupgraph import group_graph, kept_for_backward
from rlplace.placement.published.dlplacer.program import PlacementProgram
from rlplace.problem import Problem

_MAX_UNITS = 1 << 24


def limited_devices(problem: Problem) -> list[int]:
    """Returns devices whose limit could bind: all groups together would not fit."""
    everything = int(problem.resident_bytes.sum() + problem.tensor_bytes.sum() + problem.temporary_bytes.max(initial=0))
    return [device for device, limit in enumerate(problem.memory_limit_bytes.tolist()) if limit < everything]


def limit_timeline(program: PlacementProgram) -> None:
    """Adds the executor's memory account; the program must have been built with contention."""
    instance, model = program.instance, program.model
    problem = instance.problem
    limits = problem.memory_limit_bytes
    devices = limited_devices(problem)
    if not devices:
        return
    freed = [_freed_at_home(program, value) for value in range(instance.problem.num_tensors)]
    for device in devices:
        unit = max(1, -(-int(limits[device]) // _MAX_UNITS))
        capacity = int(limits[device]) // unit
        intervals: list[Any] = []
        demands: list[int] = []
        for task in range(instance.problem.num_ops):
            literal = program.placed[instance.problem.op_group[task]].get(device)
            size = int(problem.temporary_bytes[task]) // unit
            if literal is not None and size > 0:
                ticks = int(instance.duration[task, device])
                intervals.append(
                    model.new_optional_fixed_size_interval_var(
                        program.start[task], ticks, literal, f"temporary_{task}_{device}"
                    )
                )
                demands.append(size)
        for value in range(instance.problem.num_tensors):
            size = int(problem.tensor_bytes[value]) // unit
            if size == 0:
                continue
            literal = program.placed[instance.problem.tensor_group[value]].get(device)
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
    """When a value takes memory where it is made, when it is freed there, and the ticks between."""
    instance, model = program.instance, program.model
    top = instance.horizon
    maker, home = int(instance.problem.tensor_producer[value]), int(instance.problem.tensor_group[value])
    end, length = model.new_int_var(0, top, f"freed_{value}"), model.new_int_var(0, top, f"life_{value}")
    born = program.start[maker] if maker >= 0 else 0
    if maker >= 0:
        model.add(end >= program.end(maker))
    for reader in instance.readers[value]:
        group = int(instance.problem.op_group[reader])
        if group == home:
            model.add(end >= program.end(reader))
        else:
            model.add(end >= program.end(reader)).only_enforce_if(~program.apart_literal(home, group))
    for device in range(instance.problem.num_devices):
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
        literal = program.placed[instance.problem.op_group[reader]].get(device)
        if literal is not None:
            model.add(end >= program.end(reader)).only_enforce_if([needed, literal])
    return model.new_optional_interval_var(program.sent[value, device], length, end, needed, f"copy_{value}_{device}")


def limit_static(program: PlacementProgram) -> None:
    """Adds the estimate of the peak that needs no times."""
    instance, model = program.instance, program.model
    problem = instance.problem
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
            if size and any(
                device in program.placed[instance.problem.op_group[task]] for task in program.remote_readers(value)
            ):
                terms.append(size * program.needs(value, device))
        limit = int(problem.memory_limit_bytes[device])
        base = model.new_int_var(0, max(limit, 0), f"base_{device}")
        model.add(base >= sum(terms))
        for group, size in enumerate(largest.tolist()):
            if device in program.placed[group]:
                model.add(base + size * program.placed[group][device] <= limit)
