"""Transfers in the order in which they were asked for, as the executor sends them.

Of two transfers that want a channel, the executor starts the one first whose tensor was finished first. The placement program
lets them pass each other; with `keep_request_order` it does not, and its optimum comes closer to what a step can take. Tensors
finished at the same instant may still go either way.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

from rlplace.planners.dlplacer.program import Program

MAX_PAIRS = 4000
"""With more pairs of transfers than this the program is left as it is."""

_Route = tuple[int, int, int]


def keep_request_order(program: Program) -> bool:
    """Adds the order to a program with contention; says whether it did, which depends on the number of pairs."""
    instance = program.instance
    channels = instance.problem.links.effective_channels
    held: dict[int, list[_Route]] = {}
    for route in program.carried:
        for channel in channels[route[1]][route[2]]:
            held.setdefault(channel, []).append(route)
    pairs = sorted({pair for routes in held.values() for pair in combinations(sorted(routes), 2)})
    pairs = [(a, b) for a, b in pairs if a[0] != b[0] or a[1] == b[1]]  # one tensor has one source
    if len(pairs) > MAX_PAIRS:
        return False
    for first, second in pairs:
        _order_pair(program, first, second)
    return True


def _order_pair(program: Program, first: _Route, second: _Route) -> None:
    instance, model = program.instance, program.model
    both = [program.carried[first], program.carried[second]]
    before = program.sent[first[0], first[2]] + int(instance.transfer[first]) <= program.sent[second[0], second[2]]
    if first[0] == second[0]:  # the same tensor goes to the lower device first
        model.add(before).only_enforce_if(both)
        return
    makers = instance.producers[first[0]], instance.producers[second[0]]
    if max(len(makers[0]), len(makers[1])) > 1:
        return  # what several tasks accumulate is finished with the last of them, which no expression names
    made: list[Any] = [program.end(row[0]) if row else 0 for row in makers]
    after = program.sent[second[0], second[2]] + int(instance.transfer[second]) <= program.sent[first[0], first[2]]
    ahead = model.new_bool_var(f"ahead_{first}_{second}")
    model.add(before).only_enforce_if([*both, ahead])
    model.add(after).only_enforce_if([*both, ~ahead])
    if makers[0] or makers[1]:
        model.add(made[0] <= made[1]).only_enforce_if([*both, ahead])
        model.add(made[1] <= made[0]).only_enforce_if([*both, ~ahead])
