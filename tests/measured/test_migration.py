"""What a change of plan costs, by hand."""

import math

import numpy as np
import pytest

from rlplace.errors import InputError
from rlplace.measured.migration import migration
from rlplace.plan.plan import make_plan
from rlplace.problem.problem import Links
from rlplace.problem.toys import build_problem

WEIGHTS, STATES = [100, 40, 60], [200, 80, 120]


def three_groups(devices=3, *, links=None, known=True, **fields):
    problem = build_problem(
        "three",
        time_s=[[1.0] * devices] * 3,
        tensors=[],
        memory_bytes=[None] * devices,
        resident_bytes=[2 * w + s for w, s in zip(WEIGHTS, STATES, strict=True)],
        bandwidth_bytes_per_s=10.0,
        latency_s=0.5,
        links=links,
        **fields,
    )
    if not known:
        return problem
    import dataclasses

    parts = {"weight_bytes": WEIGHTS, "gradient_bytes": WEIGHTS, "optimizer_bytes": STATES}
    return dataclasses.replace(problem, **{key: np.array(value, dtype=np.int64) for key, value in parts.items()})


def plan_of(problem, devices, **fields):
    return make_plan(problem, devices, planner="hand", **fields)


def test_the_same_plan_costs_nothing():
    problem = three_groups()
    plan = plan_of(problem, [0, 1, 2])
    found = migration(problem, plan, plan)
    assert (found.moved_groups, found.size_bytes, found.seconds, found.loads) == (0, 0, 0.0, ())
    assert found.break_even_steps(1.0) == 0


def test_one_group_over_one_link():
    problem = three_groups()
    found = migration(problem, plan_of(problem, [0, 1, 2]), plan_of(problem, [1, 1, 2]), restart_s=7.0)
    load = found.loads[0]
    assert (load.source, load.destination, load.size_bytes, load.messages) == (0, 1, 300, 2)
    assert found.transfer_s == pytest.approx(300 / 10 + 2 * 0.5)  # weights, then optimizer state
    assert found.seconds == pytest.approx(found.transfer_s + 7.0)
    assert found.moved_groups == 1
    assert found.break_even_steps(2.0) == math.ceil(38 / 2)
    assert found.break_even_steps(0.0) is None
    assert found.break_even_steps(-1.0) is None


def test_private_links_work_side_by_side_and_a_shared_one_does_not():
    problem = three_groups()
    old, new = plan_of(problem, [0, 1, 2]), plan_of(problem, [1, 2, 0])
    apart = migration(problem, old, new)
    alone = [30 + 1, 12 + 1, 18 + 1]
    assert apart.transfer_s == pytest.approx(max(alone))
    bandwidth, latency = np.full((3, 3), 10.0), np.full((3, 3), 0.5)
    bus = tuple(tuple((0,) if i != j else () for j in range(3)) for i in range(3))
    problem = three_groups(links=Links(bandwidth, latency, bus))
    shared = migration(problem, plan_of(problem, [0, 1, 2]), plan_of(problem, [1, 2, 0]))
    assert shared.transfer_s == pytest.approx(sum(alone))
    assert shared.size_bytes == apart.size_bytes == 600


def test_where_parts_are_not_told_apart_all_resident_bytes_move():
    problem = three_groups(known=False)
    found = migration(problem, plan_of(problem, [0, 0, 0]), plan_of(problem, [1, 0, 0]))
    assert (found.size_bytes, found.loads[0].messages) == (400, 1)


def test_a_missing_link_makes_the_move_impossible_over_links():
    bandwidth = np.full((3, 3), 10.0)
    bandwidth[0, 1] = 0.0
    problem = three_groups(links=Links(bandwidth, np.full((3, 3), 0.5)))
    found = migration(problem, plan_of(problem, [0, 1, 2]), plan_of(problem, [1, 1, 2]))
    assert found.transfer_s == math.inf
    assert found.break_even_steps(100.0) is None


def test_replicas_send_from_the_nearest_copy():
    bandwidth = np.full((4, 4), 1.0)
    bandwidth[2, 3] = 10.0
    problem = three_groups(4, links=Links(bandwidth, np.zeros((4, 4))))
    old = plan_of(problem, [0, 0, 0], replicas=[[0, 1], [2, 3]])
    new = plan_of(problem, [1, 0, 0], replicas=[[0, 1], [2, 3]])
    found = migration(problem, old, new)
    assert [(load.source, load.destination, load.size_bytes) for load in found.loads] == [(0, 1, 300), (2, 3, 300)]
    assert found.transfer_s == pytest.approx(300)
    # One replica more gets a copy of everything.
    single = plan_of(problem, [0, 0, 0])
    twice = plan_of(problem, [0, 0, 0], replicas=[[0], [1]])
    assert migration(problem, single, twice).size_bytes == sum(WEIGHTS) + sum(STATES)
    assert migration(problem, twice, single).size_bytes == 0


def test_shares_of_optimizer_state():
    problem = three_groups(2)
    whole = plan_of(problem, [0, 0, 0], replicas=[[0], [1]])
    shared = plan_of(problem, [0, 0, 0], replicas=[[0], [1]], optimizer_sharding=True)
    assert migration(problem, whole, shared).size_bytes == 0  # each keeps its share of what it has
    back = migration(problem, shared, whole)
    assert back.size_bytes == sum(STATES)  # each gets the other's half
    assert {(load.source, load.destination) for load in back.loads} == {(0, 1), (1, 0)}


def test_a_plan_with_another_order_moves_nothing_but_needs_a_restart():
    problem = three_groups()
    old = plan_of(problem, [0, 1, 2])
    new = plan_of(problem, [0, 1, 2], priority=[3.0, 2.0, 1.0])
    found = migration(problem, old, new, restart_s=5.0)
    assert (found.size_bytes, found.seconds) == (0, 5.0)


def test_refusals():
    problem, other = three_groups(), three_groups(2)
    with pytest.raises(InputError, match="restart_s"):
        migration(problem, plan_of(problem, [0, 1, 2]), plan_of(problem, [0, 1, 2]), restart_s=-1)
    with pytest.raises(InputError, match="other groups or devices"):
        migration(other, plan_of(problem, [0, 1, 2]), plan_of(problem, [0, 1, 2]))
