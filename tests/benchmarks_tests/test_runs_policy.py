"""The graph policy of Cluster-v0: expected improvement at first, indifferent to order, and its messages arrive."""

import math

import numpy as np
import pytest
import torch

from benchmarks.runs_policy import RunsNetwork, load_runs, rule_of, train_runs
from rlplace.envs.cluster import STAGE_FEATURES, ClusterEnv, Scenario
from rlplace.measure.belief import Belief, expected_improvement
from rlplace.measure.world import Truth
from tests.measure.worlds import pool, question


def scenarios(count=6):
    found = [Scenario.of(pool(), Truth.drawn(question(), seed)) for seed in range(count)]
    return [scenario for scenario in found if math.isfinite(scenario.least_s)]


def seen():
    env = ClusterEnv(scenarios(2))
    observation, _ = env.reset(seed=0)
    return env, {name: torch.from_numpy(value[None]) for name, value in observation.items()}


@pytest.fixture
def network():
    torch.manual_seed(0)
    made = RunsNetwork()
    torch.nn.init.normal_(made.residual.weight)
    return made


def logits_of(network, observation):
    with torch.no_grad():
        return network.look(observation)[0][0]


def test_an_untrained_policy_takes_the_largest_expected_improvement():
    belief = Belief(pool())
    assert rule_of(RunsNetwork())(belief, np.random.default_rng(0)) == int(expected_improvement(belief).argmax())


def test_logits_follow_the_order_of_candidates(network):
    env, observation = seen()
    order = torch.randperm(env.candidates, generator=torch.Generator().manual_seed(1))
    order = torch.cat([order, torch.tensor([env.candidates])])
    rows = len(order)
    changed = {"context": observation["context"], "candidate_group": observation["candidate_group"][:, order]}
    for name in ("candidates", "stages", "place"):
        changed[name] = observation[name].reshape(1, rows, -1)[:, order].reshape(1, -1)
    changed["alike"] = observation["alike"].reshape(1, rows, rows)[:, order][:, :, order].reshape(1, -1)
    torch.testing.assert_close(logits_of(network, observation)[order], logits_of(network, changed), atol=1e-4, rtol=1e-4)


def test_stages_and_other_candidates_are_heard(network):
    env, observation = seen()
    before = logits_of(network, observation)
    counts = (observation["place"].reshape(env.candidates + 1, -1) >= 0).sum(dim=1)
    chain = int(counts.argmax())
    assert counts[chain] > 1
    changed = {name: value.clone() for name, value in observation.items()}
    changed["stages"].reshape(env.candidates + 1, env.stages, len(STAGE_FEATURES))[chain, 0, 0] += 1.0
    moved = (logits_of(network, changed) - before).abs()
    assert moved[chain] > 1e-4  # its own stage
    others = [n for n in range(env.candidates) if n != chain]
    assert moved[others].max() > 1e-6  # and what other candidates hear of it
    alone = {**changed, "alike": torch.eye(env.candidates + 1).reshape(1, -1)}
    apart = {**observation, "alike": alone["alike"]}
    quiet = (logits_of(network, alone) - logits_of(network, apart)).abs()
    assert quiet[others].max() == 0 < quiet[chain]


@pytest.mark.slow
def test_ppo_trains_and_its_policy_is_saved_and_loaded(tmp_path):
    from safetensors.torch import save_file

    trained = train_runs(scenarios(), decisions=2048, seed=0)
    start = RunsNetwork()
    assert any(not torch.equal(a, b) for a, b in zip(trained.residual.parameters(), start.residual.parameters(), strict=True))
    save_file(trained.state_dict(), tmp_path / "a.safetensors")
    rule, again = rule_of(trained), rule_of(load_runs(tmp_path / "a.safetensors"))
    belief, rng = Belief(pool()), np.random.default_rng(0)
    assert rule(belief, rng) == again(belief, rng)
