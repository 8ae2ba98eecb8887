"""Features of construction by hand; devices have no numbers that count."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlplace.envs import PlacementEnv, make_instance
from rlplace.envs.construction import CONSTRUCTION_FEATURES
from rlplace.envs.guide.features import CLIP, move_features
from rlplace.envs.guide.guide import Guide
from rlplace.envs.instance import side_by_side
from rlplace.errors import InputError
from rlplace.placement.common.oparrays import by_rank, upward_rank
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from tests.drawn import renumbered


def fork(**options):
    """Returns a (1 s) feeding b (2 s) and c (3 s); device 1 is half as fast, a transfer takes 4 s, edges count both ways."""
    return build_problem(
        "fork", time_s=[[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]], bandwidth_bytes_per_s=1.0,
        tensors=[TensorSpec(0, 4, [1]), TensorSpec(0, 4, [2])], **{"memory_bytes": [None, None], **options},
    )  # fmt: skip


class Building:
    """An episode of `PlacementEnv`."""

    def __init__(self, instance):
        self.env, self.done = PlacementEnv([instance]), False
        self.seen, _ = self.env.reset(seed=0)

    @property
    def group(self):
        return self.env.current_group

    @property
    def load_s(self):
        return self.env.state.load_s[0]

    def table(self):
        return self.seen["candidates"].reshape(-1, len(CONSTRUCTION_FEATURES))

    def place(self, device):
        self.seen, _, self.done, _, _ = self.env.step(device)


def rows(state):
    return [dict(zip(CONSTRUCTION_FEATURES, row.tolist(), strict=True)) for row in state.table()]


def check(row, **expected):
    assert {name: row[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_by_hand():
    instance = make_instance(fork(), compute_floor=False)
    unit = instance.ideal_s
    assert unit == (1.5 + 3.0 + 4.5) / 2
    state = Building(instance)
    first, second = rows(state)
    assert state.group == 0
    check(first, finish_delay=0.0, load_after=1 / unit, imbalance_change=1 / unit, work=1.5 / unit, slowdown=np.log(1 / 1.5))
    check(second, finish_delay=1 / unit, load_after=2 / unit, slowdown=np.log(2 / 1.5), affinity=0.0, memory_after=0.0)
    check(first, criticality=1.0, depth=0.0, plan_progress=0.0, plan_load=0.0, plan_devices=0.25, plan_pressure=0.0)
    assert first["plan_groups"] == pytest.approx(np.log2(3) / 8)
    state.place(0)
    group = state.group
    seconds = {1: (2.0, 4.0), 2: (3.0, 6.0)}[group]
    # Ready at 1 on the first device; half of the edge's 4 bytes hold up the second until 3.
    first, second = rows(state)
    check(first, finish_delay=0.0, load_after=(1 + seconds[0]) / unit, imbalance_change=seconds[0] / unit)
    check(first, communication_after=0.0, affinity=1.0, plan_progress=1 / 3, plan_load=1 / unit)
    check(second, finish_delay=(3 + seconds[1] - 1 - seconds[0]) / unit, imbalance_change=(seconds[1] - 1) / unit)
    check(second, communication_after=4 / unit, affinity=0.0, depth=1.5 / 6)
    state.place(1)
    assert state.load_s.tolist() == [1.0, seconds[1]]
    first, _ = rows(state)
    other = {1: 3.0, 2: 2.0}[group]
    check(first, load_after=(1 + other) / unit, imbalance_change=max(1 + other - seconds[1], 0) / unit)
    state.place(0)
    assert state.done and max(state.load_s) / unit == pytest.approx(max(1 + other, seconds[1]) / unit)


def test_memory_is_that_of_the_mask():
    for seed in range(6):
        problem = random_problem(seed, num_groups=16, num_devices=3, memory_factor=1.2, unlike=True)
        state, column = Building(make_instance(problem, compute_floor=False)), CONSTRUCTION_FEATURES.index("memory_after")
        for _ in range(16):
            masks = state.env.action_masks()
            if masks.any(where=state.table()[:, column] <= 1.0):  # else the allowed ones are shown
                np.testing.assert_array_equal(state.table()[:, column] <= 1.0, masks)
            legal = np.flatnonzero(masks)
            state.place(int(legal[seed % len(legal)]))
            if state.done:
                break


def test_bytes_of_tensors_by_hand():
    """Each of two tensors of 4 bytes is made by `a`, which holds 2; `b` and `c` hold 1 and 3; devices have 20 and 40 bytes."""
    instance = make_instance(fork(memory_bytes=[20, 40], resident_bytes=[2, 1, 3]), compute_floor=False)
    assert instance.made_bytes.tolist() == [10, 1, 3]
    state = Building(instance)
    first, second = rows(state)
    check(first, tensors_after=10 / 20, tensors_over_even=10 / 20 - 10 / 60, plan_tensors=14 / 60, plan_side_by_side=0.0)
    check(second, tensors_after=10 / 40, tensors_over_even=10 / 40 - 10 / 60)
    state.place(0)
    own = {1: 1, 2: 3}[state.group]
    first, second = rows(state)
    check(first, tensors_after=(10 + own) / 20, tensors_over_even=(10 + own) / 20 - (10 + own) / 60)
    check(second, tensors_after=own / 40, tensors_over_even=own / 40 - (10 + own) / 60)
    (free, _) = rows(Building(make_instance(fork(), compute_floor=False)))
    check(free, tensors_after=0.0, tensors_over_even=0.0, plan_tensors=0.0)


def test_branches_side_by_side():
    """Two chains of three behind a source: one is placed after the other, or both step by step."""
    tensors = [TensorSpec(0, 1, [1, 4]), *(TensorSpec(i, 1, [i + 1]) for i in (1, 2, 4, 5))]
    problem = build_problem("chains", time_s=[[1.0, 1.0]] * 7, tensors=tensors, memory_bytes=[None, None])
    one = make_instance(problem, compute_floor=False)
    for instance, beside in ((one, False), (side_by_side(one), True)):
        state, order = Building(instance), []
        while not state.done:
            order.append(state.group)
            assert rows(state)[0]["plan_side_by_side"] == beside
            state.place(0)
        chains = [group > 3 for group in order[1:]]
        assert order[0] == 0 and sorted(order) == list(range(7))
        assert (chains in ([True] * 3 + [False] * 3, [False] * 3 + [True] * 3)) is not beside


def test_the_longest_way_to_the_end_goes_first():
    """Behind a source a chain of 1 + 5 s and an op of 3 s: the order is that of the seconds to the end, 9, 6, 5, 3."""
    tensors = [TensorSpec(0, 0, [1, 2]), TensorSpec(2, 0, [3])]
    time_s = [[seconds] * 2 for seconds in (3.0, 3.0, 1.0, 5.0)]
    problem = build_problem("fork", time_s=time_s, tensors=tensors, memory_bytes=[None, None])
    assert side_by_side(make_instance(problem, compute_floor=False)).order.tolist() == [0, 2, 3, 1]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_side_by_side_is_the_order_of_heft(seed):
    problem = random_problem(seed, 24, 3, shape=("layered", "branchy", "towers")[seed % 3], hosts=1 + seed % 2)
    taken = problem.op_group[by_rank(problem, upward_rank(problem, communication=True))]
    assert side_by_side(make_instance(problem, compute_floor=False)).order.tolist() == list(dict.fromkeys(taken.tolist()))


def test_the_best_device_is_an_allowed_one():
    instance = make_instance(fork(group_device=[1, -1, -1]), compute_floor=False)
    first, second = rows(Building(instance))
    assert (first["finish_delay"], second["finish_delay"]) == (CLIP, 0.0)
    env = PlacementEnv([instance])
    env.reset(seed=0)
    assert env.action_masks().tolist() == [False, True]


@pytest.mark.slow
def test_least_finish_delay_is_list_scheduling():
    """Following the feature alone is near the classical planners: the network starts there."""
    ratios = []
    for seed in range(8):
        env = PlacementEnv([random_problem(seed, num_groups=24, num_devices=3)])
        observation, _ = env.reset(seed=0)
        done = False
        while not done:
            delay = observation["candidates"].reshape(-1, len(env.FEATURES))[:, env.FEATURES.index("finish_delay")]
            observation, _, done, _, info = env.step(int(np.where(env.action_masks(), delay, np.inf).argmin()))
        ratios.append(info["vs_best_baseline"])
    assert np.exp(np.mean(np.log(ratios))) < 1.3


def test_a_policy_with_other_features_is_refused():
    from sb3_contrib import MaskablePPO

    from rlplace.agents.policy import PlacerPolicy
    from rlplace.envs import RefinementEnv

    with pytest.raises(InputError, match="FEATURES"):
        MaskablePPO(PlacerPolicy, PlacementEnv(), policy_kwargs={"features": RefinementEnv.FEATURES})


@st.composite
def cases(draw, hosts=(1,)):
    """Draws an instance, its renumbered twin, the new numbers, a random plan of the first, and a source of random numbers."""
    seed, devices = draw(st.integers(0, 10**6)), draw(st.integers(2, 5))
    problem = random_problem(
        seed,
        num_groups=draw(st.integers(devices, 24)),
        num_devices=devices,
        shape=draw(st.sampled_from(["layered", "branchy", "towers"])),
        unlike=draw(st.booleans()),
        hosts=draw(st.sampled_from(hosts)),
        memory_factor=draw(st.sampled_from([None, 1.5, 3.0])),
        null_fraction=draw(st.sampled_from([0.0, 0.2])),
    )
    rng = np.random.default_rng(seed)
    new = rng.permutation(devices)
    one, two = (make_instance(p, compute_floor=False) for p in (problem, renumbered(problem, new)))
    plan = np.array([rng.choice(np.flatnonzero(allowed)) for allowed in one.allowed], dtype=np.int32)
    return one, two, new.astype(np.int32), plan, rng


@pytest.mark.slow
@settings(max_examples=60, derandomize=True)
@given(cases())  # one host: where transfers meet at network cards, which of two equals goes first depends on device numbers
def test_moves(case):
    one, two, new, plan, _ = case
    first, second = Guide(one, 64, 7), Guide(two, 64, 0)
    step = first.look(plan)[0]
    # Of devices that are equally idle, a remedy names the first two.
    assume(len(set(first.view.load)) == len(new))
    count = first.draw(plan)
    assert abs(second.look(new[plan])[0] - step) <= 1e-9 * step
    second.moves.targets[:] = new[np.minimum(first.moves.targets, len(new) - 1)]
    for name in ("ptr", "groups", "kinds"):
        getattr(second.moves, name)[:] = getattr(first.moves, name)
    move_features(*second.arguments, new[plan], tuple(second.moves), count, new[plan], second.table)
    np.testing.assert_allclose(second.table[:count], first.table[:count], rtol=1e-4, atol=1e-5)
    for a, b in zip(first.price(plan, np.arange(count)), second.price(new[plan], np.arange(count)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)


@pytest.mark.slow
@settings(max_examples=60, derandomize=True)
@given(cases(hosts=(1, 2)))
def test_construction(case):
    one, two, new, _, rng = case
    first, second = Building(one), Building(two)
    while not first.done:
        assert first.group == second.group
        np.testing.assert_allclose(second.table()[new], first.table(), rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(second.env.action_masks()[new], first.env.action_masks())
        device = int(rng.choice(np.flatnonzero(first.env.action_masks())))
        first.place(device)
        second.place(int(new[device]))
    assert second.done
