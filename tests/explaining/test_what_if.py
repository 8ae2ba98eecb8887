"""What other hardware would bring: the questions change what they say, and answers are never worse than what is known."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import fork_join, memory_tight_pair, pipeline_chain, two_device_chain, unlike_pair

from rlplace.cluster import Cluster
from rlplace.explaining import changes
from rlplace.explaining.questions import AS_IS
from rlplace.explaining.simulated_plan import run_plan
from rlplace.explaining.what_if import what_if
from rlplace.plan import make_plan
from rlplace.problem import Device, Links
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


def asked(problem, devices, calls=32, at=None, **fields):
    found = what_if(run_plan(problem, make_plan(problem, devices, planner="test", **fields)), calls=calls, at=at)
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


def test_more_micro_batches():
    problem = pipeline_chain(4, 4)
    found = asked(problem, [0, 1, 2, 3])
    answer = found["4 micro-batches"]
    assert answer.same_s == (4 + 3) * 3.0 and answer.samples == 4
    assert answer.sample_s < found[AS_IS].sample_s


@settings(max_examples=2)
@given(seed=st.integers(0, 10**6))
def test_nothing_is_worse_than_what_is_known(seed):
    problem = random_problem(seed, 10, 3, hosts=3)
    rng = np.random.default_rng(seed)
    found = asked(problem, rng.integers(0, 3, 10), calls=8, microbatches=int(rng.integers(1, 3)), schedule="1f1b")
    base = found[AS_IS].replanned_s
    for answer in found.values():
        assert answer.replanned_s <= answer.same_s
    for name in ("double the memory", "one more device like gpu0", "one more device like gpu1", "one more device like gpu2"):
        if name in found:
            assert found[name].replanned_s <= base


def test_replicas_are_planned_anew_for_the_same_samples(layers):
    problem = layers(3, devices=2, weight=1000)
    found = asked(problem, [0, 0, 0], replicas=[[0], [1]], microbatches=2)
    assert "any number of replicas and micro-batches of the plan's size" in found[AS_IS].note
    assert all(answer.replanned_s <= answer.same_s for answer in found.values())
    assert all(answer.replanned_s <= found[AS_IS].replanned_s for answer in found.values() if answer.samples == 4)
    more = found["one more device, one more replica"]
    assert more.samples == 6 and more.same_feasible and more.sample_s < found[AS_IS].sample_s
    # Free links leave the slowdown of compute under collectives only.
    assert found["communication for free"].same_s <= found[AS_IS].same_s


def test_twice_the_devices_take_other_replicas(layers):
    """Of two replicas on one device each and two idle devices the better use is found, at other micro-batches too."""
    asked_for = []

    def at(samples):
        asked_for.append(samples)
        problem = layers(2, devices=4, weight=10)
        return dataclasses.replace(problem, time_s=samples * problem.time_s / 4, samples_per_microbatch=samples)

    found = asked(at(4), [0, 0], replicas=[[0], [1]], at=at, optimizer_sharding=True)
    assert found[AS_IS].note == "planned anew with any number of replicas and any micro-batch, without a shared optimizer"
    assert found[AS_IS].replanned_s < 0.75 * found[AS_IS].same_s and found[AS_IS].samples == 8
    assert {1, 2, 8} <= set(asked_for)


def test_recomputation_stays(layers):
    found = asked(layers(3), [0, 0, 0], calls=4, recompute=[[0], [1]])
    assert found[AS_IS].same_s == 3 * 3.5 + 2 and found[AS_IS].replanned_s == found[AS_IS].same_s


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
    links = cluster.links if source is None else dataclasses.replace(cluster.links)
    return dataclasses.replace(problem, devices=cluster.devices, links=links, source=source)


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
