"""Corrections: what each of their parts does to a problem, and what is refused."""

import dataclasses

import numpy as np
import pytest

from rlplace.measured.calibrate import group_seconds, predict
from rlplace.measured.correction import corrected, no_correction, num_channels
from rlplace.problem import Links
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate

CARDS = tuple(tuple(() if i == j else (i, 3 + j) for j in range(3)) for i in range(3))
"""Channels 0..2 send, 3..5 receive."""


def with_cards(problem):
    return dataclasses.replace(problem, links=dataclasses.replace(problem.links, channels=CARDS))


RANDOM = with_cards(random_problem(4, 12, 3, comm_ratio=1.0, null_fraction=0.2, shared_parameters=2))


def by_hand(*, time_s=(2.0, 3.0, 5.0), bandwidth=10.0, latency_s=0.25, table_s=None, channels=CARDS):
    """Three ops in a chain, one a group, 20 bytes between the first two and 40 between the last two, on three devices."""
    times = np.tile(np.array(time_s)[:, None], 3) if np.ndim(time_s) == 1 else time_s
    links = Links(np.broadcast_to(bandwidth, (3, 3)).copy(), np.broadcast_to(latency_s, (3, 3)).copy(), channels)
    problem = build_problem(
        "by hand", time_s=np.asarray(times).tolist(), memory_bytes=[None] * 3, links=links,
        tensors=[TensorSpec(0, 20, [1]), TensorSpec(1, 40, [2])],
    )  # fmt: skip
    return problem if table_s is None else dataclasses.replace(problem, tensor_transfer_s={0: table_s})


def change(problem, **parts):
    """The correction that only changes what is given."""
    return dataclasses.replace(no_correction(problem), **parts)


def step_s(problem, plan):
    return simulate(problem, np.array(plan, dtype=np.int32)).step_time_s


CHAIN = [0, 1, 2]
PLANS = [[0, 0, 0], [0, 1, 1], [0, 1, 2], [0, 1, 0], [2, 1, 0], [1, 1, 2]]


def test_the_chain_by_hand():
    assert step_s(by_hand(), CHAIN) == pytest.approx(2 + (0.25 + 2) + 3 + (0.25 + 4) + 5)


# Identity


def test_the_identity_changes_no_step_time():
    rng = np.random.default_rng(0)
    same = corrected(RANDOM, no_correction(RANDOM))
    for _ in range(20):
        plan = np.array([rng.choice(np.flatnonzero(allowed)) for allowed in RANDOM.group_allowed], dtype=np.int32)
        before, after = (simulate(p, plan) for p in (RANDOM, same))
        assert before.step_time_s == after.step_time_s is not None
        assert np.array_equal(before.peak_memory_bytes, after.peak_memory_bytes)
    assert same.fingerprint == RANDOM.fingerprint, "what is priced alike is the same problem"
    assert same.name != RANDOM.name


def test_only_prices_change():
    changed = corrected(RANDOM, change(RANDOM, device_factor=np.array([1.0, 2.0, 3.0])))
    assert changed.fingerprint != RANDOM.fingerprint and changed.source is None
    for name in ("resident_bytes", "temporary_bytes", "tensor_bytes", "consumers", "op_group", "group_device"):
        assert np.array_equal(getattr(changed, name), getattr(RANDOM, name))
    assert np.array_equal(np.isnan(changed.time_s), np.isnan(RANDOM.time_s)), "where an op cannot run stays so"
    assert (changed.devices, changed.links.effective_channels) == (RANDOM.devices, RANDOM.links.effective_channels)


# Each part does what it says


def test_device_factor():
    problem = by_hand()
    changed = corrected(problem, change(problem, device_factor=np.array([1.0, 2.0, 0.5])))
    expected = by_hand(time_s=np.array([[2.0, 4.0, 1.0], [3.0, 6.0, 1.5], [5.0, 10.0, 2.5]]))
    assert changed.fingerprint == expected.fingerprint != problem.fingerprint
    assert step_s(changed, CHAIN) == pytest.approx(2 + 2.25 + 6 + 4.25 + 2.5)


def test_group_factor_holds_for_all_ops_of_a_group():
    rng = np.random.default_rng(1)
    factor = rng.uniform(0.5, 2.0, (RANDOM.num_groups, 3))
    correction = change(RANDOM, group_factor=factor, device_factor=np.array([1.0, 2.0, 3.0]))
    expected = RANDOM.time_s * factor[RANDOM.op_group] * [1.0, 2.0, 3.0]
    assert np.allclose(corrected(RANDOM, correction).time_s, expected, equal_nan=True)
    seconds = group_seconds(corrected(RANDOM, correction))
    assert np.allclose(seconds, group_seconds(RANDOM) * factor * [1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("slow", "chain_s"),
    [
        ({0: 3.0}, 2 + 3 * 2.25 + 3 + 4.25 + 5),  # device 0 sends
        ({4: 3.0}, 2 + 3 * 2.25 + 3 + 4.25 + 5),  # device 1 receives
        ({0: 3.0, 4: 2.0}, 2 + 3 * 2.25 + 3 + 4.25 + 5),  # the slower of both
        ({0: 0.5, 4: 0.25}, 2 + 0.5 * 2.25 + 3 + 4.25 + 5),  # faster ones too
        ({5: 2.0, 1: 1.5}, 2 + 2.25 + 3 + 2 * 4.25 + 5),
        ({2: 9.0, 3: 9.0}, 2 + 2.25 + 3 + 4.25 + 5),  # not on the way
    ],
)
def test_channel_slowdown_is_that_of_the_slowest_channel(slow, chain_s):
    problem = by_hand()
    factors = np.ones(6)
    factors[list(slow)] = list(slow.values())
    changed = corrected(problem, change(problem, channel_slowdown=factors))
    assert step_s(changed, CHAIN) == pytest.approx(chain_s)
    assert step_s(changed, [1, 1, 1]) == pytest.approx(10.0)


def test_pair_slowdown_is_ordered_and_multiplies():
    problem = by_hand()
    pair = np.ones((3, 3))
    pair[0, 1] = 4.0
    correction = change(problem, pair_slowdown=pair)
    changed = corrected(problem, correction)
    assert step_s(changed, CHAIN) == pytest.approx(2 + 4 * 2.25 + 3 + 4.25 + 5)
    assert step_s(changed, [1, 0, 2]) == pytest.approx(2 + 2.25 + 3 + 4.25 + 5), "the other direction stays"
    factors = np.ones(6)
    factors[0] = 3.0
    both = dataclasses.replace(correction, channel_slowdown=factors)
    assert step_s(corrected(problem, both), CHAIN) == pytest.approx(2 + 12 * 2.25 + 3 + 4.25 + 5)
    assert both.link_slowdown(problem).tolist() == [[1, 12, 3], [1, 1, 1], [1, 1, 1]]


def test_the_diagonal_means_nothing():
    problem = by_hand()
    wild = change(problem, pair_slowdown=np.where(np.eye(3, dtype=bool), 50.0, 1.0), latency_s=7.0 * np.eye(3))
    assert corrected(problem, wild).fingerprint == problem.fingerprint


def test_latency_is_added_to_every_transfer():
    problem = by_hand()
    latency = np.full((3, 3), 0.5)
    assert step_s(corrected(problem, change(problem, latency_s=latency)), CHAIN) == pytest.approx(2 + 2.75 + 3 + 4.75 + 5)
    slow = change(problem, latency_s=latency, pair_slowdown=np.full((3, 3), 2.0))
    assert step_s(corrected(problem, slow), CHAIN) == pytest.approx(2 + 5.0 + 3 + 9.0 + 5), "it is not slowed down itself"


def test_transfers_with_times_of_their_own_are_changed_like_others():
    table = np.where(np.eye(3, dtype=bool), 0.0, 1.5)
    problem = by_hand(table_s=table)
    assert step_s(problem, CHAIN) == pytest.approx(2 + 1.5 + 3 + 4.25 + 5)
    slow = change(problem, pair_slowdown=np.full((3, 3), 2.0))
    assert step_s(corrected(problem, slow), CHAIN) == pytest.approx(2 + 3.0 + 3 + 8.5 + 5)
    late = change(problem, latency_s=np.full((3, 3), 0.5))
    assert step_s(corrected(problem, late), CHAIN) == pytest.approx(2 + 2.0 + 3 + 4.75 + 5)


def test_missing_links_stay_missing():
    bandwidth = np.full((3, 3), 10.0)
    bandwidth[0, 1] = 0.0
    problem = by_hand(bandwidth=bandwidth)
    changed = corrected(problem, change(problem, pair_slowdown=np.full((3, 3), 0.5), latency_s=np.full((3, 3), 0.1)))
    assert not np.isfinite(predict(problem, no_correction(problem), np.array([CHAIN], dtype=np.int32)))[0]
    assert changed.links.bandwidth_bytes_per_s[0, 1] == 0.0
    assert np.isfinite(step_s(changed, [1, 0, 2]))


def test_private_channels_are_those_of_pairs():
    problem = by_hand(channels=None)
    assert num_channels(problem) == 8  # 3 * 2 + 1 is the last pair
    factors = np.ones(8)
    factors[0 * 3 + 1] = 5.0
    changed = corrected(problem, change(problem, channel_slowdown=factors))
    assert step_s(changed, CHAIN) == pytest.approx(2 + 5 * 2.25 + 3 + 4.25 + 5)


def test_step_factor_is_on_predicted_step_times_alone():
    problem = by_hand()
    correction = change(problem, step_factor=1.5)
    assert corrected(problem, correction).fingerprint == problem.fingerprint
    plans = np.array(PLANS, dtype=np.int32)
    assert np.allclose(predict(problem, correction, plans), [1.5 * step_s(problem, plan) for plan in PLANS])


def test_a_correction_of_one_device_and_no_channel():
    problem = random_problem(1, 4, 1)
    assert corrected(problem, no_correction(problem)).fingerprint == problem.fingerprint
