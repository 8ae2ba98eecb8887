"""m-ETF: earliest task first, with memory.

Problem: makespan on devices of limited memory. Of all ready ops and all devices with room for the op's group, the pair that
can start earliest goes next; ties go to the op with the longest path to the end.

Paper: Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020, algorithm m-ETF; the memory-free
rule is Hwang, Chow, Anger, Lee, "Scheduling precedence graphs in systems with interprocessor communication times", SIAM
Journal on Computing 18(2), 1989.

Departures: a whole group (forward, backward and update) is placed when its first op is; room is counted by footprint
(resident bytes plus saved activations) instead of Baechi's replay of allocations, the exact peak is checked by simulation;
transfers queue for the problem's channels instead of one channel per device; when inputs can be on a device is estimated when
an op becomes ready, and again only when it is taken, while Baechi renews the estimate with every transfer; ties go by priority
instead of topological order; candidates differ in the number of devices and in the share of memory that may be planned (all of
it, or 85 %).
"""

from __future__ import annotations

from collections.abc import Iterator

from rlplace.planners.common.evaluate import Assignment
from rlplace.planners.common.oparrays import earliest_assignments
from rlplace.problem import Problem


def candidates(problem: Problem, seed: int) -> Iterator[Assignment]:
    """Assignments for every number of devices and share of memory."""
    return earliest_assignments(problem)
