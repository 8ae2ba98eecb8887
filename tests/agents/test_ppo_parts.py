"""State that passes from part to part of a PPO training, and instances with their graphs; hardly anything is trained."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from rlplace.agents import ppo
from rlplace.agents import train as training
from rlplace.agents.graph_network import GraphNetwork
from rlplace.agents.problems.cases import ProblemCase
from rlplace.agents.problems.sources import CaseSource
from rlplace.envs import make_instance
from rlplace.envs.construction import CONSTRUCTION_FEATURES
from rlplace.envs.observation import graph_arrays
from rlplace.problem.generate import random_problem

DECISIONS = 32  # one rollout of two environments


def source(count=None):
    return CaseSource(
        "source", lambda n: ProblemCase(f"case-{n}", "x", random_problem(n % 97, num_groups=6, num_devices=2)), count
    )


@pytest.fixture
def instances():
    return [make_instance(random_problem(seed, num_groups=6 + seed, num_devices=2)) for seed in range(2)]


def one_part(network, moments, instances, config, tmp_path, number=0):
    options = {"number": number, "decisions": DECISIONS, "logs": tmp_path, "tick": lambda _: None}
    return ppo.run_part(network, moments, instances, config, **options)


def test_a_part_trains_the_network_and_goes_on_with_its_moments(tiny, make_network, instances, tmp_path):
    """Adam counts its steps: two mini-batches of 16 in a part of 32 decisions, and as many in the next."""
    network = make_network(hidden=8, second=4)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    first = one_part(network, None, instances, tiny(), tmp_path)
    assert first.decisions == DECISIONS
    after = network.state_dict()
    assert any(not torch.equal(value, before[name]) for name, value in after.items())
    assert {int(state["step"]) for state in first.moments["state"].values()} == {2}
    kept = {number: state["exp_avg"].clone() for number, state in first.moments["state"].items()}
    then = one_part(network, first.moments, instances, tiny(), tmp_path, number=1).moments
    assert {int(state["step"]) for state in then["state"].values()} == {4}
    assert any(not torch.equal(state["exp_avg"], kept[number]) for number, state in then["state"].items())


@pytest.fixture
def recorded(monkeypatch):
    """Records the arguments of parts that train nothing; the moments are those of an optimizer of its own."""
    parts = []

    def run_part(network, moments, instances, config, **options):
        made = torch.optim.Adam(network.parameters()).state_dict()
        parts.append({"rate": config.learning_rate, "given": moments, "made": made, "instances": instances, **options})
        return ppo.PartResult(options["decisions"], 1.0, made)

    monkeypatch.setattr(ppo, "run_part", run_part)
    monkeypatch.setattr(ppo, "instances_of", lambda source, first, count, environment: (first, count))
    monkeypatch.setattr(training, "save_state", lambda *given: None)
    return parts


@pytest.mark.parametrize("count", [None, 9])
def test_parts_follow_on_one_another(tiny, recorded, tmp_path, count):
    """Ten parts: the rate falls by a tenth a part, to a tenth; cases, numbers and moments go on; the last part is short."""
    config = tiny(fit_steps=0, steps=39, part=4, part_cases=3, learning_rate=0.01)
    assert training.train(source(count), config, tmp_path, report=lambda line: None) == 39
    assert [part["decisions"] for part in recorded] == [4] * 9 + [3]
    assert [part["rate"] for part in recorded] == pytest.approx([0.01 * max(0.1, 1 - 4 * n / 39) for n in range(10)])
    assert recorded[-1]["rate"] == pytest.approx(0.001) and recorded[0]["rate"] == 0.01
    assert recorded[0]["given"] is None
    assert all(part["given"] is before["made"] for before, part in pairwise(recorded))
    assert [part["number"] for part in recorded] == list(range(10))
    firsts = [part["instances"][0] for part in recorded]
    assert [first - firsts[0] for first in firsts] == [3 * n for n in range(10)]
    assert firsts[0] == (0 if count else 1_000_000)


def test_every_part_and_every_seed_has_random_numbers_of_its_own(tiny, make_network, instances, tmp_path, monkeypatch):
    seeds = []

    class Enough(Exception):
        pass

    def make_model(network, instances, config, seed):
        seeds.append(seed)
        raise Enough

    monkeypatch.setattr(ppo, "make_model", make_model)
    for seed in range(3):
        for number in range(3):
            with pytest.raises(Enough):
                one_part(make_network(), None, instances, tiny(seed=seed), tmp_path, number=number)
    assert len(set(seeds)) == 9


def test_every_instance_is_seen_with_its_own_graph(tiny, instances):
    """In both orders of its groups: what the network says of it is what it says where it knows this graph alone."""
    torch.manual_seed(0)
    network = GraphNetwork(features=CONSTRUCTION_FEATURES, hidden=8, second=4).eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_()
    model = ppo.make_model(network, instances, tiny(policy="graph"), 0)
    games = model.get_env().unwrapped.envs
    assert len(games.instances) == 2 * len(instances)
    seen = {}
    for number, instance in enumerate(games.instances):
        observation, _ = games.reset(options={"problem": number})
        row = {name: torch.as_tensor(values[:1]) for name, values in observation.items()}
        assert row["graph"].item() == number
        policy = model.policy.network
        with torch.no_grad():
            seen[number] = policy.look(row)
            network.know([graph_arrays(instance)])
            alone = network.look({**row, "graph": torch.zeros(1, 1)})
        torch.testing.assert_close(seen[number], alone)
    assert not torch.allclose(seen[0][1], seen[1][1])
