"""Rules of the executor beyond the placement program: it sends in the order of request and never waits without a reason.

The program lets transfers pass each other and lets devices and links stand idle, for example to let another tensor go first.
`keep_request_order` and `start_at_once` take that away. Every simulated step obeys both, whatever its order or priorities, so
bounds stay bounds, and the program's optimum becomes what a step can take. Where times are rounded to ticks, two events of the
same instant may be a tick apart, and that much is allowed.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

from rlplace.placement.published.dlplacer.program import PlacementProgram

MAX_PAIRS = 4_000
"""With more pairs of transfers than this, the program lets them pass each other."""

MAX_REASONS = 20_000
"""With more pairs of tasks, or of transfers, than this, the program lets them wait."""

_Route = tuple[int, int, int]


def keep_request_order(program: PlacementProgram) -> bool:
    """Constrains transfers that want one channel to go in the order in which their tensors were produced.

    Transfers of one tensor go by the numbers of the devices, where exchanging like devices cannot change that.

    Returns:
        Whether the program, which must have contention, has few enough pairs of transfers.
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
        Whether the program, which must have contention, is small enough.
    """
    sharing = _sharing(program)
    if max(len(sharing), program.instance.problem.num_ops**2) > MAX_REASONS:
        return False
    for task in range(program.instance.problem.num_ops):
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
    """Pairs of transfers that want a channel in common."""
    channels = program.instance.problem.links.effective_channels
    held: dict[int, list[_Route]] = {}
    for route in program.carried:
        for channel in channels[route[1]][route[2]]:
            held.setdefault(channel, []).append(route)
    return sorted({pair for routes in held.values() for pair in combinations(sorted(routes), 2)})


def _named_in_order(program: PlacementProgram, first: int, second: int) -> bool:
    """Returns whether the first device has the lower number under every name that symmetry breaking may give the two.

    A tensor goes to the device with the lower number first. The program stands for all plans that differ in the names of like
    devices, and among these the order may be another one.
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
    one, other = (int(instance.problem.tensor_producer[route[0]]) for route in (first, second))
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
    group = int(instance.problem.op_group[task])
    reasons = []
    if instance.heads[task] == 0:
        first = model.new_bool_var(f"first_{task}")
        model.add(program.start[task] <= 0).only_enforce_if(first)
        reasons.append(first)
    for other in range(instance.problem.num_ops):
        shared = instance.problem.op_group[other] == group or set(program.placed[group]) & set(
            program.placed[instance.problem.op_group[other]]
        )
        if other != task and instance.occupies[other] and shared:
            follows = _reason(program, program.start[task], program.end(other), slack, f"follows_{task}_{other}")
            if instance.problem.op_group[other] != group:
                model.add_implication(follows, ~program.apart_literal(group, int(instance.problem.op_group[other])))
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
    if instance.problem.tensor_producer[key[0]] >= 0:
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
