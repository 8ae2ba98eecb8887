"""The graph network: what it starts as, what it reads, and that building, imitating and training agree with the environment."""

import dataclasses
import unittest.mock
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.agents import graph_network as constructing
from rlplace.agents import ppo
from rlplace.agents.behaviour_cloning import Demonstration, cloning_loss, collect_demonstration, demonstration_of
from rlplace.agents.checkpoint import load_checkpoint
from rlplace.agents.graph_network import GraphNetwork, built
from rlplace.agents.policy import PolicyExtractor
from rlplace.agents.ppo import EpisodeBuffer
from rlplace.agents.pretraining import PRETRAINING, fit
from rlplace.agents.problems.cases import ProblemCase
from rlplace.envs import PlacementEnv, make_instance
from rlplace.envs.base import PLACEMENT
from rlplace.envs.construction import CONSTRUCTION_FEATURES
from rlplace.envs.instance import side_by_side
from rlplace.envs.observation import graph_arrays
from rlplace.errors import InputError
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


def network(seed=0, **sizes):
    """Returns a network whose layers all count."""
    torch.manual_seed(seed)
    made = GraphNetwork(features=CONSTRUCTION_FEATURES, **{"hidden": 12, "second": 8, **sizes})
    for layer in (made.score, made.chosen):
        torch.nn.init.normal_(layer.weight, std=0.3)
    return made.eval()


def instance_of(seed, groups=14, devices=3, **options):
    return make_instance(random_problem(seed, groups, devices, **options), compute_floor=False)


def observed(env, seen, number=0):
    batch = {name: torch.as_tensor(value)[None] for name, value in seen.items()}
    return {**batch, "graph": torch.tensor([[number]])}


def played(policy, instance):
    """Returns the plan of one episode of the environment, where the likeliest legal device is taken."""
    env = PlacementEnv([instance])
    policy.know([graph_arrays(instance)])
    seen, _ = env.reset(options={"problem": 0})
    for _ in range(instance.problem.num_groups):
        with torch.no_grad():
            logits = policy.look(observed(env, seen))[0][0].masked_fill(~torch.from_numpy(env.action_masks()), -torch.inf)
        plan = env.current_plan().copy()
        group = env.current_group
        seen, _, done, _, _ = env.step(int(logits.argmax()))
        plan[group] = int(logits.argmax())
        if done:
            break
    return plan


def test_untrained_it_is_earliest_finish():
    for seed in range(4):
        instance, policy = instance_of(seed, unlike=True), GraphNetwork(features=CONSTRUCTION_FEATURES).eval()
        env = PlacementEnv([instance])
        policy.know([graph_arrays(instance)])
        seen, _ = env.reset(options={"problem": 0})
        done = False
        while not done:
            with torch.no_grad():
                logits = policy.look(observed(env, seen))[0][0].numpy()
            delay = seen["candidates"].reshape(env.max_devices, -1)[:, CONSTRUCTION_FEATURES.index("finish_delay")]
            order = np.argsort(delay, kind="stable")
            assert (np.diff(logits[order]) <= 1e-6).all()
            seen, _, done, _, _ = env.step(int(np.flatnonzero(env.action_masks())[0]))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6), st.permutations(range(4)))
def test_devices_have_no_numbers(seed, order):
    instance, policy = instance_of(seed % 50, devices=4), network(seed)
    env = PlacementEnv([instance])
    policy.know([graph_arrays(instance)])
    seen, _ = env.reset(seed=seed)
    for device in range(3):
        seen = env.step(int(np.flatnonzero(env.action_masks())[device % 2 - 1]))[0]
    turned = {**seen, "candidates": seen["candidates"].reshape(4, -1)[list(order)].ravel()}
    with torch.no_grad():
        logits, value = policy.look(observed(env, seen))
        others, same = policy.look(observed(env, turned))
    torch.testing.assert_close(others[0], logits[0][list(order)], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(same, value, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("rounds", "heard"), [(0, False), (1, False), (2, True)])
def test_a_round_carries_news_one_edge_far(rounds, heard):
    chain = graph_arrays(instance_of(3, groups=9, shape="chain"))
    policy = network(rounds=rounds)
    edges = {(int(a), int(b)) for a, b in zip(chain.source, chain.target, strict=True)}
    near = {b for a, b in edges if a == 0} | {a for a, b in edges if b == 0}
    two = next(b for a, b in edges if a in near and b not in near and b != 0)
    nodes = chain.nodes.copy()
    nodes[two] += 1.0
    vectors = []
    for changed in (chain.nodes, nodes):
        policy.know([chain._replace(nodes=changed)])
        for messages in policy.rounds:  # the mean of the graph tells everybody at once
            messages.forward = lambda groups, graph, one=messages: type(one).forward(
                one, groups, SimpleNamespace(**{**vars(graph), "mean": lambda g: torch.zeros(1, g.shape[1])})
            )
        with torch.no_grad():
            vectors.append(policy._groups()[1][0])
    assert bool((vectors[0] != vectors[1]).any()) is heard


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([None, 1.3, 2.0]))
def test_what_is_built_is_what_the_environment_plays(seed, memory):
    instance, policy = instance_of(seed % 40, memory_factor=memory), network(seed)
    plans = built(policy, instance, 6, seed=seed)
    assert plans.shape == (6, instance.problem.num_groups) and plans.dtype == np.int32
    for plan, one in zip(plans, (instance, side_by_side(instance)), strict=False):
        expected = played(policy, one)
        if (expected >= 0).all():  # like devices tie, so that plans may be each other's with devices renumbered
            steps_s = [simulate(instance.problem, devices).step_time_s for devices in (plan, expected)]
            assert steps_s[0] == pytest.approx(steps_s[1], rel=1e-9)
    assert instance.allowed[np.arange(plans.shape[1]), plans].all()
    np.testing.assert_array_equal(plans, built(policy, instance, 6, seed=seed))
    assert built(policy, instance, 2, seed=seed + (1 << 80)).shape == (2, plans.shape[1])  # as large as other seeds may be
    assert built(policy, instance, 6, seed=seed, deadline_s=0.0).shape == (0, instance.problem.num_groups)


@pytest.mark.parametrize(("deadline_s", "plans", "decisions"), [(600.0, 4, 100), (280.0, 2, 100), (200.0, 0, 44), (-1.0, 0, 0)])
def test_building_makes_the_plans_that_are_in_time(monkeypatch, deadline_s, plans, decisions):
    """By a clock that goes on by a second for each plan that is asked about."""
    monkeypatch.setattr(constructing, "_PROBE", 16)
    instance, policy, seen, now_s = instance_of(1, groups=100), network(), [], [0.0]
    decide = policy.decide

    def slowly(shown):
        now_s[0] += len(shown["candidates"])
        seen.append(len(shown["candidates"]))
        return decide(shown)

    monkeypatch.setattr(constructing, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(policy, "decide", slowly)
    found = built(policy, instance, 4, deadline_s=deadline_s)
    assert (len(found), len(seen)) == (plans, decisions)
    if plans == 2:
        assert sorted(set(seen)) == [2, 4]
        np.testing.assert_array_equal(found, built(policy, instance, 2))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(0, 3), st.booleans())
def test_building_asks_for_the_logits_of_looks(seed, devices, rounds, unlike):
    instance, policy, steps = instance_of(seed % 60, devices=devices, unlike=unlike), network(seed, rounds=rounds), []
    decide = policy.decide

    def checked(shown):
        logits = decide(shown)
        torch.testing.assert_close(logits, policy.look(shown)[0], atol=1e-5, rtol=1e-4)
        steps.append(len(logits))
        return logits

    with unittest.mock.patch.object(policy, "decide", checked):
        built(policy, instance, 3, seed=seed)
    assert steps == [3] * instance.problem.num_groups


def test_columns_are_read_by_name_where_it_builds_imitates_and_trains(tmp_path):
    """Other columns in another order, with the weights of the same names, decide the same."""
    instance, policy = instance_of(5, groups=20, devices=3), network(1)
    unread = [CONSTRUCTION_FEATURES.index(name) for name in ("depth", "affinity")]
    kept = [column for column in reversed(range(len(CONSTRUCTION_FEATURES))) if column not in unread]
    times = range(len(CONSTRUCTION_FEATURES), len(CONSTRUCTION_FEATURES) + 4)
    fewer = GraphNetwork(features=[CONSTRUCTION_FEATURES[column] for column in kept], hidden=12, second=8).eval()
    weights = policy.state_dict()
    with torch.no_grad():
        for name in ("own.weight", "others.weight", "linear.weight"):
            weights[name][:, unread] = 0.0
        weights["chosen.weight"][unread] = weights["chosen.bias"][unread] = 0.0
        weights["value.0.weight"][:, [12 + column for column in unread]] = 0.0
    policy.load_state_dict(weights)
    columns = [*kept, *times]
    for name in ("own.weight", "others.weight", "linear.weight"):
        weights[name] = weights[name][:, columns]
    weights["chosen.weight"], weights["chosen.bias"] = weights["chosen.weight"][columns], weights["chosen.bias"][columns]
    weights["value.0.weight"] = weights["value.0.weight"][:, [*range(12), *(12 + column for column in columns)]]
    fewer.load_state_dict(weights)
    np.testing.assert_array_equal(built(fewer, instance, 4), built(policy, instance, 4))
    demonstration_of(instance, built(policy, instance, 1)[0]).save(tmp_path / "one")
    losses = [cloning_loss(each, [tmp_path / "one"], np.random.default_rng(0)).item() for each in (policy, fewer)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    env, found = PlacementEnv([instance]), []
    seen = {name: torch.as_tensor(value)[None] for name, value in env.reset(seed=0)[0].items()}
    for each in (policy, fewer):
        extractor = PolicyExtractor(env.observation_space, each.features, GraphNetwork, each.settings())
        extractor.network.load_state_dict(each.state_dict())
        extractor.network.know([graph_arrays(instance)])
        found.append(extractor({**seen, "graph": torch.zeros(1, 1)}).detach())
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)


def test_building_follows_the_weights():
    instance, policy = instance_of(3, groups=30, devices=4), network()
    before = built(policy, instance, 2)
    with torch.no_grad():
        policy.linear.weight.neg_()
        policy.score.weight.neg_()
    assert (built(policy, instance, 2) != before).any()


def test_graphs_beside_one_another_change_nothing():
    policy, instances = network(), [instance_of(seed, groups=8 + seed) for seed in range(3)]
    env = PlacementEnv(instances)
    for number in range(3):
        seen, _ = env.reset(options={"problem": number})
        with torch.no_grad():
            policy.know([graph_arrays(one) for one in instances])
            among = policy.look(observed(env, seen, number))
            policy.know([graph_arrays(instances[number])])
            alone = policy.look(observed(env, seen))
        torch.testing.assert_close(among, alone, atol=1e-6, rtol=1e-5)


def test_a_graph_of_two_orders_is_encoded_once():
    policy, graphs = network(), [graph_arrays(instance_of(seed)) for seed in range(2)]
    policy.know(graphs * 2)
    assert len(policy._groups()[1]) == sum(len(graph.nodes) for graph in graphs)
    assert policy._places.tolist() == [0, 1, 0, 1]


@pytest.mark.slow
def test_imitation_ends_at_the_plan(tmp_path):
    instance = instance_of(5, groups=10, devices=2, unlike=True)
    plan = np.arange(10, dtype=np.int32) % 2
    made = demonstration_of(instance, plan)
    assert len(made.device) == 20 and all(plan[group] == device for group, device in zip(made.group, made.device, strict=True))
    made.save(tmp_path / "a")
    for field in dataclasses.fields(Demonstration):
        assert torch.equal(getattr(Demonstration.load(tmp_path / "a"), field.name), getattr(made, field.name))
    policy = network(hidden=16)
    optimizer = torch.optim.Adam(policy.parameters())
    before = cloning_loss(policy, [tmp_path / "a"], np.random.default_rng(0)).item()
    fit(policy, optimizer, [tmp_path / "a"], PRETRAINING[PLACEMENT], first=0, last=300, steps=300, seed=0)
    assert cloning_loss(policy, [tmp_path / "a"], np.random.default_rng(0)).item() < 0.1 * before
    np.testing.assert_array_equal(built(policy, instance, 2), [plan, plan])


def test_cases_without_a_plan_have_no_decisions():
    case = ProblemCase("a", "a", random_problem(1, 8, 1), branchy=False)
    assert collect_demonstration(case, states=2, moves=2, seed=0) is None
    case = ProblemCase("a", "a", random_problem(1, 8, 3), branchy=False)
    found = collect_demonstration(case, states=2, moves=8, seed=0)
    assert len(found.device) == 16 and found.legal[torch.arange(16), found.device].all()


def test_a_damaged_file_of_decisions(tmp_path):
    demonstration_of(instance_of(1), np.zeros(14, dtype=np.int32)).save(tmp_path / "a")
    whole = (tmp_path / "a").read_bytes()
    (tmp_path / "b").write_bytes(whole[:-9])
    with pytest.raises(InputError, match="safetensors"):
        Demonstration.load(tmp_path / "b")
    from safetensors.torch import save_file

    save_file({"legal": torch.ones(3, 2)}, tmp_path / "c")
    with pytest.raises(InputError, match="remove it to have it made anew"):
        Demonstration.load(tmp_path / "c")


def test_advantages_of_episodes_by_hand():
    """Two environments; graph 0 ends with 1 and 3 (mean 2, spread 1), graph 1 with -9, which counts as -3; the rest goes on."""
    boxes = spaces.Dict({"graph": spaces.Box(0, 9, (1,), np.int32)})
    buffer = EpisodeBuffer(4, boxes, spaces.Discrete(2), device="cpu", n_envs=2)
    graph, starts = [[0, 1], [0, 1], [0, 0], [0, 0]], [[1, 1], [0, 0], [1, 1], [0, 0]]
    rewards = [[0, 0], [1, -9], [0, 3], [0, 0]]
    starts[3][1] = 1  # the second environment begins anew after its reward of 3
    for row in range(4):
        buffer.add(
            {"graph": np.array(graph[row])[:, None]}, np.zeros((2, 1)), np.array(rewards[row], dtype=np.float32),
            np.array(starts[row], dtype=np.float32), torch.full((2, 1), 0.5), torch.zeros(2), action_masks=np.ones((2, 2)),
        )  # fmt: skip
    buffer.compute_returns_and_advantage(torch.zeros(2), np.zeros(2))
    spread = 1.0 / 1.01
    np.testing.assert_allclose(buffer.advantages, [[-spread, 0], [-spread, 0], [0, spread], [0, 0]], atol=1e-6)
    np.testing.assert_allclose(buffer.returns, [[1, -3], [1, -3], [0.5, 3], [0.5, 0.5]])


def mean_step_s(policy, instance):
    return float(np.mean([simulate(instance.problem, plan).step_time_s for plan in built(policy, instance, 16, seed=1)]))


@pytest.mark.slow
def test_stock_ppo_learns_to_build(tiny, tmp_path):
    instance, policy = make_instance(random_problem(11, 12, 3, shape="branchy")), network(3, hidden=16)
    sizes = {"envs": 32, "rollout": 48, "batch_size": 512, "epochs": 4, "learning_rate": 3e-3}
    config, before_s = tiny(policy="graph", **sizes), mean_step_s(policy, instance)
    ppo.run_part(policy, None, [instance], config, number=0, decisions=32 * 48 * 12, logs=tmp_path, tick=lambda _: None)
    assert mean_step_s(policy, instance) < 0.9 * before_s


def test_the_shipped_one():
    shipped = load_checkpoint("graph")
    assert isinstance(shipped.network, GraphNetwork) and shipped.environment == shipped.network.environment == PLACEMENT
