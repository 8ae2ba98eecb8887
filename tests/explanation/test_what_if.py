"""What other hardware and settings would bring, and how two plans differ."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlplace
from rlplace.cluster import Cluster
from rlplace.cluster.links import Device, Links
from rlplace.errors import InputError
from rlplace.explanation import changes
from rlplace.explanation.comparison import AS_IS
from rlplace.explanation.placements import PlacementStep
from rlplace.plan import make_plan
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate
from rlplace.simulator.simulated_plan import run_plan
from tests.toys import fork_join, memory_tight_pair, two_device_chain, unlike_pair


def asked(problem, devices, calls=32, **fields):
    found = PlacementStep(run_plan(problem, make_plan(problem, devices, planner="test", **fields))).what_if(calls=calls)
    return {answer.change: answer for answer in found}


def test_double_memory_lets_a_pair_meet():
    toy = memory_tight_pair()
    found = asked(toy.problem, toy.optimal_device_of_group)
    assert found[AS_IS].replanned_s == 5.0
    assert (found["double the memory"].same_s, found["double the memory"].replanned_s) == (5.0, 2.0)


def test_one_more_device_takes_some_of_the_branches():
    toy = fork_join(6, 2)
    found = asked(toy.problem, toy.optimal_device_of_group)
    answer = found["one more device like gpu0"]
    assert (answer.same_s, answer.replanned_s) == (5.0, 4.0)


def test_links_that_cost_nothing():
    toy = two_device_chain(4)
    found = asked(toy.problem, [0, 1, 0, 1])
    assert found[AS_IS].same_s == 4 + 3 * 2 and found[AS_IS].replanned_s == 4.0
    assert found["communication for free"].same_s == 4.0
    assert found["all links twice as fast"].same_s == 4 + 3 * 1.5  # a second of latency stays
    hottest = next(name for name in found if name.startswith("link "))
    assert hottest == "link gpu0->gpu1 twice as fast" and found[hottest].same_s == 4 + 2 * 1.5 + 2


def test_a_quicker_device():
    toy = unlike_pair()
    found = asked(toy.problem, toy.optimal_device_of_group)
    assert found["gpu0 twice as fast"].same_s == 6.0  # the other one is busy for six seconds, too
    assert found["gpu0 twice as fast"].replanned_s == 6.0


@pytest.mark.slow
@settings(max_examples=2)
@given(seed=st.integers(0, 10**6))
def test_nothing_is_worse_than_what_is_known(seed):
    problem = random_problem(seed, 10, 3, hosts=3)
    rng = np.random.default_rng(seed)
    found = asked(problem, rng.integers(0, 3, 10), calls=8)
    base = found[AS_IS].replanned_s
    for answer in found.values():
        assert answer.replanned_s <= answer.same_s
    for name in ("double the memory", "one more device like gpu0", "one more device like gpu1", "one more device like gpu2"):
        if name in found:
            assert found[name].replanned_s <= base


def test_without_search_the_plan_alone_is_simulated():
    toy = unlike_pair()
    assert all(answer.replanned_s is None for answer in asked(toy.problem, [1, 1, 1], calls=0).values())


def conflicts(links):
    """Pairs of pairs that cannot transfer at the same time."""
    channels = links.effective_channels
    pairs = [(i, j) for i in range(len(channels)) for j in range(len(channels)) if i != j]
    return {(p, q) for p in pairs for q in pairs if p < q and set(channels[p[0]][p[1]]) & set(channels[q[0]][q[1]])}


def on_cluster(text, source=None):
    cluster = Cluster.preset(text)
    problem = random_problem(0, 4, cluster.num_devices)
    return dataclasses.replace(problem, devices=cluster.devices, links=cluster.links, source=source)


@pytest.mark.parametrize("text", ["a100-80g:2", "a100-80g:3", "h100:4", "cpu:2"])
def test_copied_links_are_those_of_a_switch_with_one_port_more(text):
    kind, count = text.split(":")
    wanted = Cluster.preset(f"{kind}:{int(count) + 1}").links
    found = changes.with_device(on_cluster(text), 1)
    assert found.devices[-1].name not in {d.name for d in found.devices[:-1]} and found.devices[-1].kind == kind
    np.testing.assert_array_equal(found.links.bandwidth_bytes_per_s, wanted.bandwidth_bytes_per_s)
    np.testing.assert_array_equal(found.links.latency_s, wanted.latency_s)
    assert conflicts(found.links) == conflicts(wanted)
    assert [len(f.devices) for f in found.links.fabrics] == [len(f.devices) for f in wanted.fabrics]


@pytest.mark.parametrize("text", ["rtx4090:3", "a100-80g:4,pcie", "v100:2", "l4:1"])
def test_a_preset_is_known_with_one_device_more(text):
    found = changes.with_device(on_cluster(text, {"cluster": text}), 0)
    kind, _, rest = text.partition(":")
    count, comma, options = rest.partition(",")
    wanted = Cluster.preset(f"{kind}:{int(count) + 1}{comma}{options}").links
    assert found.links.channels == wanted.channels
    np.testing.assert_array_equal(found.links.bandwidth_bytes_per_s, wanted.bandwidth_bytes_per_s)


def test_a_lone_device_of_no_kind_cannot_be_linked():
    assert changes.with_device(random_problem(0, 4, 1), 0) is None


def test_transfer_tables_grow_and_shrink():
    problem = random_problem(0, 4, 2)
    table = np.array([[0.0, 3.0], [5.0, 0.0]])
    own = dataclasses.replace(
        problem, tensor_transfer_s={0: table}, links=Links(np.ones((2, 2)), np.array([[0.0, 1.0], [1.0, 0.0]]))
    )
    grown = changes.with_device(own, 0)
    np.testing.assert_array_equal(grown.tensor_transfer_s[0], [[0, 3, 3], [5, 0, 5], [5, 3, 0]])
    np.testing.assert_array_equal(changes.with_links(own, 2.0).tensor_transfer_s[0], [[0, 2], [3, 0]])
    assert not changes.with_free_links(own).tensor_transfer_s[0].any()


def test_memory_without_limit_stays():
    problem = dataclasses.replace(random_problem(0, 4, 2), devices=(Device("a", 10), Device("b")))
    assert [d.memory_bytes for d in changes.with_memory(problem, 2.0).devices] == [20, None]
    assert simulate(changes.with_speed(problem, 1, 2.0), [1] * 4).step_time_s == pytest.approx(
        simulate(problem, [1] * 4).step_time_s / 2
    )


def plan(problem, devices, **fields):
    return make_plan(problem, devices, planner=fields.pop("planner", "test"), **fields)


def test_blocks_are_moved_one_by_one():
    problem = dataclasses.replace(
        two_device_chain(4).problem, group_names=("a.0.x", "a.0.y", "a.1.x", "b")
    )  # fmt: skip
    first, second = plan(problem, [0, 0, 0, 0]), plan(problem, [0, 0, 1, 1])
    found = rlplace.diff(problem, first, second)
    assert found.change_s == 2.0 and found.same_groups == 2
    effects = {block.module: (block.source, block.destination, block.groups, block.effect_s) for block in found.blocks}
    assert effects == {"a.1": ("gpu0", "gpu1", ("a.1.x",), 4.0), "b": ("gpu0", "gpu1", ("b",), 2.0)}
    assert [block.module for block in found.blocks] == ["a.1", "b"]  # the largest effect first
    assert found.first.path == {"compute": 4.0} and found.second.path == {"compute": 4.0, "transfer": 2.0}


def test_like_devices_may_have_other_names():
    problem = random_problem(1, 12, 3, shape="chain")
    devices = np.repeat([0, 1, 2], 4)
    found = rlplace.diff(problem, plan(problem, devices), plan(problem, np.array([2, 0, 1])[devices]))
    assert found.blocks == () and found.same_groups == 12 and found.change_s == 0.0
    assert found.renamed == {"gpu0": "gpu1", "gpu1": "gpu2", "gpu2": "gpu0"} and found.settings == {}
    assert "12 groups sit alike, 0 differ" in found.text()
    assert found.first.peak_bytes == found.second.peak_bytes
    one_apart = np.array([2, 0, 1])[devices]
    one_apart[0] = 0
    other = rlplace.diff(problem, plan(problem, devices), plan(problem, one_apart))
    assert [len(block.groups) for block in other.blocks] == [1] and other.blocks[0].destination == "gpu1"


def test_unlike_devices_keep_their_names():
    toy = unlike_pair()
    found = rlplace.diff(toy.problem, plan(toy.problem, [0, 1, 1]), plan(toy.problem, [1, 0, 0]))
    assert found.renamed == {} and found.same_groups == 0 and found.change_s == 6.0


def test_an_infeasible_side(layers):
    problem = layers(3, devices=2, memory=60)
    found = rlplace.diff(problem, plan(problem, [0, 0, 1]), plan(problem, [0, 0, 0]))
    assert (found.first.feasible, found.second.feasible) == (True, False)
    assert not found.blocks[0].feasible and "does not fit alone" in found.text()
    assert found.blocks[0].effect_s == simulate(problem, [0, 0, 0]).step_time_s - found.first.step_time_s


def test_plans_of_two_problems(layers):
    problem, larger = layers(3, devices=2), layers(3, devices=2, inside=20, samples=2)
    first, second = plan(problem, [0, 0, 1]), plan(larger, [0, 1, 1])
    found = rlplace.diff(problem, first, second, other=larger)
    assert any("different problems" in note for note in found.notes) and len(found.blocks) == 1
    assert found.second.samples == 2
    with pytest.raises(InputError, match="plan is for problem"):
        rlplace.diff(problem, first, second)
    with pytest.raises(InputError, match=r"groups differ \(3 and 4, 3 names in common\)"):
        rlplace.diff(problem, first, plan(layers(4, devices=2), [0] * 4), other=layers(4, devices=2))
    with pytest.raises(InputError, match="uses gpu2, which the first's problem does not have"):
        rlplace.diff(problem, first, plan(layers(3, devices=3), [0, 1, 2]), other=layers(3, devices=3))


def test_a_fixed_order_is_said(layers):
    problem = layers(2, devices=2)
    found = rlplace.diff(problem, plan(problem, [0, 1], order=[[0, 2, 4], [1, 3, 5]]), plan(problem, [0, 0]))
    assert found.settings == {"order given": (True, False)} and any("run by priority" in note for note in found.notes)
    assert "order given: True in the first, False in the second" in found.text()
    json.dumps(found.to_dict(), allow_nan=False)
    assert found.blocks[0].effect_s == simulate(problem, [0, 0]).step_time_s - simulate(problem, [0, 1]).step_time_s
