"""Worlds: the neutral one is the cost model bit for bit, and each axis changes what it says and nothing else."""

import dataclasses

import numpy as np
import pytest

from rlplace.errors import InputError
from rlplace.measure.world import LAUNCH_S, SPREAD, World, axes, evaluator_in, world_of
from rlplace.strategy.drafts import Mesh, plain_draft
from rlplace.strategy.executor.evaluate import PARTS
from tests.measure.worlds import CLUSTERS, question
from tests.strategy.random_costs import random_draft


def neutral(cluster):
    return world_of(cluster, np.zeros(len(axes(cluster))))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_neutral_world_is_the_cost_model(cluster):
    asked = question(1, cluster)
    there, rng, compared = evaluator_in(neutral(asked.cluster), asked.costs, asked.cluster), np.random.default_rng(0), 0
    for _ in range(60):
        draft = random_draft(rng, asked.cluster, len(asked.costs.names))
        try:
            said = asked.scores.evaluate(draft)
        except InputError:
            continue
        assert there.evaluate(draft) == said
        assert neutral(asked.cluster).seconds(said) == pytest.approx(said.step_time_s, rel=1e-12)
        compared += 1
    assert compared > 20


def alone(asked, microbatches=4):
    blocks = len(asked.costs.names)
    return plain_draft((0, blocks), [Mesh((0,))], microbatch=(asked.batch // microbatches,), microbatches=(microbatches,))


def test_a_kind_twice_as_slow_computes_twice_as_long():
    asked = question()
    slow = dataclasses.replace(neutral(asked.cluster), kind={"a100-80g": 2.0})
    assert evaluator_in(slow, asked.costs, asked.cluster).evaluate(alone(asked)).step_time_s == pytest.approx(
        2.0 * asked.scores.evaluate(alone(asked)).step_time_s, rel=1e-9
    )


def test_every_pass_of_a_block_waits_for_the_host():
    asked = question()
    waits = dataclasses.replace(neutral(asked.cluster), launch_s=1e-3)
    there = evaluator_in(waits, asked.costs, asked.cluster)
    for microbatches in (1, 4):
        more = (
            there.evaluate(alone(asked, microbatches)).step_time_s
            - asked.scores.evaluate(alone(asked, microbatches)).step_time_s
        )
        assert more == pytest.approx(2e-3 * microbatches * len(asked.costs.names), rel=1e-6)


def test_slow_links_slow_what_is_sent_over_them_and_nothing_else():
    asked = question(2, "h100:2x4,ib=400g")
    blocks = len(asked.costs.names)

    def copies(devices):
        return plain_draft((0, blocks), [Mesh(devices, replicate=len(devices))], microbatch=(asked.batch // len(devices),))

    slow = evaluator_in(dataclasses.replace(neutral(asked.cluster), between=3.0), asked.costs, asked.cluster)
    inside, across = copies((0, 1, 2, 3)), copies((0, 4))
    assert slow.evaluate(inside) == asked.scores.evaluate(inside)
    before, after = asked.scores.evaluate(across).parts, slow.evaluate(across).parts
    assert after["exchange"] > 2.5 * before["exchange"] > 0 and after["compute"] == pytest.approx(before["compute"])
    one_card = evaluator_in(dataclasses.replace(neutral(asked.cluster), network=(1.0, 3.0)), asked.costs, asked.cluster)
    assert one_card.evaluate(across).step_time_s == pytest.approx(slow.evaluate(across).step_time_s, rel=1e-9)


def test_parts_and_slack():
    asked = question()
    said = asked.scores.evaluate(alone(asked))
    world = World({}, (1.0,), parts={"compute": 1.5}, slack=2.0)
    assert world.seconds(said) == pytest.approx(said.step_time_s + 0.5 * said.parts["compute"])
    there = evaluator_in(world, asked.costs, asked.cluster)
    for device, less in zip(asked.cluster.devices, there.cluster.devices, strict=True):
        assert less.memory_bytes - less.reserved_bytes == (device.memory_bytes - device.reserved_bytes) // 2


def test_a_vector_says_each_axis_once():
    cluster = question(0, "h100:2x4,ib=400g").cluster
    names = axes(cluster)
    assert len(set(names)) == len(names) and {name.partition(" ")[0] for name in names} == set(SPREAD)
    assert {name for name in names if name in PARTS} == set(PARTS) & set(SPREAD)
    for number, name in enumerate(names):
        values = np.zeros(len(names))
        values[number] = 1.0
        world, plain = world_of(cluster, values), neutral(cluster)
        changed = [key for key, value in vars(world).items() if value != vars(plain)[key]]
        word = name.partition(" ")[0]
        assert changed == [{"launch": "launch_s"}.get(word, "parts" if word in PARTS else word)]
    assert world_of(cluster, [0.0 if name != "launch" else 1.0 for name in names]).launch_s == pytest.approx(
        LAUNCH_S * np.expm1(SPREAD["launch"])
    )
