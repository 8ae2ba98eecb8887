"""Features of moves against numbers worked out by hand, on a fork of four ops."""

import numpy as np
import pytest

from rlplace.cluster.links import Channels, Links
from rlplace.envs import make_instance
from rlplace.envs.guide.analysis import SHARPNESS
from rlplace.envs.guide.draw import CLUSTER, EMPTY, EXCHANGE, RUN, SINGLE, SWAP
from rlplace.envs.guide.features import FEATURES, move_features
from rlplace.envs.guide.guide import Guide
from rlplace.envs.guide.records import STRICT, TIGHT
from rlplace.problem.build import TensorSpec, build_problem

A, B, C, D = range(4)  # a feeds b and c, both feed d
TENSORS = [TensorSpec(A, 1, [B]), TensorSpec(A, 1, [C]), TensorSpec(B, 1, [D]), TensorSpec(C, 1, [D])]


def fork(*, memory_bytes=(None, None), resident_bytes=None, slow=1.0, links=None):
    """Times of 1, 2, 3 and 1 s, longer on the second device by `slow`; every transfer takes 1 s on a channel of its own."""
    devices = len(memory_bytes)
    time_s = [[t, *[t * slow] * (devices - 1)] for t in (1.0, 2.0, 3.0, 1.0)]
    return build_problem(
        "fork", time_s=time_s, tensors=TENSORS, memory_bytes=memory_bytes, resident_bytes=resident_bytes, links=links
    )  # fmt: skip


def guide_of(problem):
    return Guide(make_instance(problem, compute_floor=False), 8, 0)


def describe(guide, plan, *moves, kinds=None):
    """Returns the features of chosen moves, each a list of (group, device), of a plan that is analysed first."""
    plan = np.array(plan, dtype=np.int32)
    looked = guide.look(plan)
    guide.moves.ptr[: len(moves) + 1] = np.cumsum([0, *(len(move) for move in moves)])
    flat = [pair for move in moves for pair in move]
    guide.moves.groups[: len(flat)], guide.moves.targets[: len(flat)] = np.array(flat).T
    guide.moves.kinds[: len(moves)] = 0 if kinds is None else kinds
    move_features(
        *guide.arguments, plan, tuple(guide.moves), len(moves), plan.copy(),
        guide.table,
    )  # fmt: skip
    return looked, [dict(zip(FEATURES, row.tolist(), strict=True)) for row in guide.table[: len(moves)]]


def check(row, **expected):
    found = {name: row[name] for name in expected}
    assert found == pytest.approx(expected, abs=1e-5)


def test_everything_on_one_device():
    # a 0-1, c 1-4 (it has the longer way to the end), b 4-6, d 6-7.
    (step, overflow), (row,) = describe(guide_of(fork()), [0, 0, 0, 0], [(C, 1)])
    assert (step, overflow) == (7.0, 0.0)
    check(
        row,
        busiest_change=-3 / 7,  # 7 before, 4 on the first device after
        congested_load=-3 * 7 / 49,
        work_change=0.0,
        work=3 / 7,
        load_source=7 / 7,
        load_target=3 / 7,
        sent_change=2 / 7,  # to c and from c
        congested_sent=0.0,
        busiest_channel_change=1 / 7,
        near=0.0,
        near_change=-1.0,
        chain_work=3 / 7,
        chain_joined=0.0,
        saved=3 / 7,  # b waits while c runs, though a is done
        delay_worst=1 / 7,  # c starts when a ends; between c and d there are 2 s, more than a transfer
        delay_sum=1 / 7,
        gap_won=0.0,
        tightness=1.0,
        wait=0.0,
        idle_target=1.0,
        slowdown=0.0,
        moved=0.0,
        depth=1 / 5,
        criticality=1.0,
        is_run=0.0,
        peak_target=0.0,
        pinned_target=0.0,
        relief=0.0,
        plan_busy=1.0,
        plan_used=0.5,
        plan_channel=0.0,
        plan_chain_work=1.0,
        plan_chain_wait=3 / 7,
        plan_chain_sent=0.0,
        plan_overflow=0.0,
        plan_pressure=0.0,
        plan_devices=2 / 8,
        plan_groups=2 / 8,
    )


def test_two_devices():
    # a 0-1, b 1-3, d 6-7 on the first device; c 2-5 on the second, with a transfer of 1 s before and after.
    guide = guide_of(fork())
    (step, _), (back, other, swap, both) = describe(guide, [0, 0, 1, 0], [(C, 0)], [(B, 1)], [(B, 1), (C, 0)], [(A, 1), (B, 1)])
    assert step == 7.0
    check(
        back,
        busiest_change=3 / 7,  # 4 before, 7 after
        sent_change=-2 / 7,
        congested_sent=-2 / 49,
        busiest_channel_change=-1 / 7,
        near=1.0,
        near_change=1.0,
        chain_work=3 / 7,
        chain_joined=2 / 7,  # both transfers are on the chain that ends the step
        saved=2 / 7,
        delay_worst=0.0,
        delay_sum=0.0,
        gap_won=1 / 7,
        plan_busy=4 / 7,
        plan_channel=1 / 7,
        plan_chain_work=5 / 7,
        plan_chain_wait=0.0,
        plan_chain_sent=2 / 7,
    )
    assert back["idle_target"] == pytest.approx(2 / 3, abs=0.05)  # 3 to 5 of 2 to 5, in bins
    check(
        other,
        busiest_change=1 / 7,  # 4 before, 5 on the second device after
        sent_change=2 / 7,
        delay_worst=1 / 7,  # b starts when a ends, and ends 3 s before d starts
        delay_sum=1 / 7,
        chain_joined=0.0,
        chain_work=0.0,
        criticality=4 / 5,
        near=0.0,
        load_source=4 / 7,
        load_target=5 / 7,
        tightness=1 / (1 + 20 * 3 / 7),  # it could end at 6
    )
    check(
        swap,
        busiest_change=1 / 7,
        work=5 / 7,
        sent_change=0.0,
        delay_sum=1 / 7,  # a to b alone: between b and d there is room, the transfers of c go
        chain_joined=2 / 7,
        near=0.5,
        near_change=0.0,
        moved=1 / 8,
    )
    check(
        both,
        busiest_change=(6 - 4) / 7,
        near=2 / 3,  # a to b and a to c, not b to d
        near_change=0.0,  # before it was a to b and b to d
        chain_joined=1 / 7,
        sent_change=0.0,
        depth=0.0,
    )


def test_a_slower_device():
    _, (row,) = describe(guide_of(fork(slow=2.0)), [0, 0, 0, 0], [(B, 1)])
    check(row, slowdown=np.log(2), work_change=2 / 7, busiest_change=-2 / 7, work=3 / 7, load_target=4 / 7)


def test_channels_that_are_shared():
    one: Channels = (((), (0,)), ((0,), ()))
    links = Links(np.ones((2, 2)), np.zeros((2, 2)), one)
    _, (row,) = describe(guide_of(fork(links=links)), [0, 0, 1, 0], [(C, 0)])
    check(row, plan_channel=2 / 7, busiest_channel_change=-2 / 7, congested_sent=-4 / 49)


def test_memory():
    problem = fork(memory_bytes=(100, 50), resident_bytes=[30, 30, 30, 30])
    guide = guide_of(problem)
    pinned = guide.instance.pinned_bytes
    (_, overflow), (one, two) = describe(guide, [0, 0, 0, 0], [(A, 1), (B, 1)], [(C, 1)])
    peak = guide.simulator.peak_memory_bytes[0]
    assert peak > 120 and overflow == pytest.approx((peak - 100) / 100)
    check(one, pinned_target=pinned[:2].sum() / 50, plan_overflow=overflow, plan_pressure=pinned.sum() / 150)
    check(one, relief=(peak - 100) / 100)  # all that overflows
    assert 60 / 50 <= one["peak_target"] and 30 / 50 <= two["peak_target"]
    assert two["relief"] == pytest.approx((peak - 100) / 100)


def test_kinds_of_moves():
    kinds = [SINGLE, RUN, CLUSTER, SWAP, EMPTY, EXCHANGE]
    _, rows = describe(guide_of(fork()), [0, 0, 0, 0], *[[(C, 1)]] * 6, kinds=kinds)
    marks = [[name for name in ("is_run", "is_cluster", "is_swap", "is_device") if row[name] == 1.0] for row in rows]
    assert marks == [[], ["is_run"], ["is_cluster"], ["is_swap"], ["is_device"], ["is_device"]]


def test_moves_do_what_their_kind_says():
    from rlplace.problem.generate import random_problem

    problem = random_problem(5, num_groups=40, num_devices=3)
    guide = Guide(make_instance(problem, compute_floor=False), 256, 3)
    plan = (np.arange(40) * 3 // 40).astype(np.int32)[np.argsort(guide.instance.graph.depth_first_order)]
    guide.look(plan)
    seen = set()
    for k in range(guide.draw(plan)):
        (groups, targets), kind = guide.move(k), int(guide.moves.kinds[k])
        seen.add(kind)
        assert len(set(groups.tolist())) == len(groups) > 0
        assert (plan[groups] != targets).all()
        if kind in (SINGLE, RUN, CLUSTER, EMPTY):
            assert len(set(targets.tolist())) == len(set(plan[groups].tolist())) == 1
        if kind == SINGLE:
            assert len(groups) == 1
        if kind == RUN:
            places = np.sort(guide.facts.position[groups])
            assert (np.diff(places) == 1).all()
        if kind == SWAP:
            assert len(groups) == 2 and (plan[groups] == targets[::-1]).all()
        if kind == EMPTY:
            assert len(groups) == (plan == plan[groups[0]]).sum()
        if kind == EXCHANGE:
            assert len(groups) == np.isin(plan, targets).sum()
    assert seen == {SINGLE, RUN, CLUSTER, SWAP, EMPTY, EXCHANGE}


def test_a_queue_on_one_device():
    # a 0-1, c 1-4, b 4-6, d 6-7 on the first device: nothing has slack.
    _, (row,) = describe(guide_of(fork()), [0, 0, 0, 0], [(C, 1)])
    check(
        row,
        blocked=3 / 7,  # b, which is ready at 1
        queue=3 / 7,
        urgent=3 / 7,
        overdue_worst=1 / 7,  # from a; the value for d may take 2 s
        overdue_sum=1 / 7,
        excess=1 / 7,
        hurried_joined=0.0,
        clash_target=0.0,
        crowd=0.0,
    )


def test_slack_absorbs_a_transfer():
    # a 0-1, b 1-3, d 6-7 on the first device, c 2-5 on the second: b may end at 6.
    guide = guide_of(fork())
    _, (back, other) = describe(guide, [0, 0, 1, 0], [(C, 0)], [(B, 1)])
    check(
        other,
        delay_worst=1 / 7,  # b starts when a ends
        overdue_worst=0.0,
        overdue_sum=0.0,
        excess=(1 - 3) / 7,
        urgent=2 / 7 / (1 + SHARPNESS[STRICT] * 3 / 7),
        queue=0.0,
        blocked=0.0,
    )
    # c runs in the second half of b's time, and b in a third of c's; the step is divided into bins.
    assert other["clash_target"] == other["crowd"] == pytest.approx(1 / 2, abs=0.02)
    assert other["strict_clash_target"] == other["strict_crowd"] == pytest.approx(1 / 2, abs=0.02)
    assert back["clash_target"] == pytest.approx(1 / 3 / (1 + SHARPNESS[TIGHT] * 3 / 7), abs=0.005)
    assert back["strict_crowd"] == pytest.approx(1 / 3 / (1 + SHARPNESS[STRICT] * 3 / 7), abs=0.001)
    check(back, hurried_joined=2 / 7, excess=0.0, urgent=3 / 7)


@pytest.mark.parametrize(
    "plan, move, change_s",
    [
        ([0, 0, 1, 0], (B, 1), 1.0),  # what b reads is there already, for c
        ([0, 1, 1, 0], (B, 0), -1.0),  # c reads it further on
        ([0, 1, 1, 0], (A, 1), -1.0),  # one transfer for both
        ([0, 1, 1, 1], (B, 0), 1.0),
        ([0, 0, 0, 0], (B, 1), 2.0),
        ([0, 0, 1, 0], (C, 0), -2.0),
    ],
)
def test_a_value_is_sent_once_to_a_device(plan, move, change_s):
    hub = [TensorSpec(A, 1, [B, C]), TensorSpec(B, 1, [D]), TensorSpec(C, 1, [D])]
    problem = build_problem("hub", time_s=[[t, t] for t in (1.0, 2.0, 3.0, 1.0)], tensors=hub, memory_bytes=[None, None])
    (step, _), (row,) = describe(guide_of(problem), plan, [move])
    check(row, sent_change=change_s / step)
