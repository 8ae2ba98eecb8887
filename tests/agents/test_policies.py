"""The seam for policies: one of another package is trained, saved, loaded, and places; what is no policy is refused."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import rlplace
from rlplace import plugins as extensions
from rlplace.agents.checkpoint import load_checkpoint
from rlplace.agents.network import PlacerNetwork
from rlplace.agents.policies import AnalysedPlan, Policy, columns_of, policy_class, policy_name, read_by
from rlplace.agents.policy import PolicyExtractor
from rlplace.agents.search import GuidedSearch
from rlplace.cli.main import main
from rlplace.envs import RefinementEnv, make_instance
from rlplace.envs.guide.features import FEATURES
from rlplace.envs.guide.guide import Guide
from rlplace.errors import InputError
from rlplace.problem.generate import random_problem
from tests import plugin_site


@pytest.fixture
def outside(tmp_path_factory, monkeypatch):
    """Installs examples/policy."""
    folder = tmp_path_factory.mktemp("site")
    monkeypatch.syspath_prepend(str(folder))
    extensions.forget()
    plugin_site.install_example(folder, "policy")
    yield importlib.import_module("rlplace_example_policy")
    extensions.forget()
    sys.modules.pop("rlplace_example_policy", None)


@pytest.mark.slow
def test_a_policy_from_outside_is_trained_saved_loaded_and_places(outside, tmp_path, capsys):
    policy = outside.train(str(tmp_path / "agent"), 256, envs=4)
    config = json.loads((tmp_path / "agent" / "config.json").read_text())
    assert (
        config["policy"] == "attention" and config["features"] == list(outside.FEATURES) and config["settings"]["width"] == 32
    )
    loaded = outside.AttentionPolicy.load(tmp_path / "agent")
    for name, value in policy.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
    problem = random_problem(3, num_groups=16, num_devices=3)
    problem.save(tmp_path / "one.problem.json")
    assert (
        main(["place", str(tmp_path / "one.problem.json"), "--agent", str(tmp_path / "agent"), "--calls", "60", "--json"]) == 0
    )
    placed = json.loads(capsys.readouterr().out)
    plan = rlplace.load_agent(tmp_path / "agent").place(problem, calls=60)
    assert placed["placement"]["device_of_group"] == plan.device_of_group.tolist()
    assert plan.predicted.step_time_s <= rlplace.place(problem, planner="best").predicted.step_time_s


@pytest.mark.slow
def test_its_command_trains_the_class_that_is_installed(outside, tmp_path):
    root = Path(outside.__file__).parent
    words = [sys.executable, "-m", "rlplace_example_policy", str(tmp_path / "agent"), "--decisions", "64"]
    done = subprocess.run(
        words, cwd=root, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert load_checkpoint(tmp_path / "agent").network.features == outside.FEATURES


def test_its_scores_are_what_the_search_follows(outside):
    """The observation that the base class makes of a look gives the logits of the environment's own."""
    instance = make_instance(random_problem(1, num_groups=14, num_devices=3))
    policy, guide, plan = outside.AttentionPolicy().eval(), Guide(instance, 40, 0), instance.floor.copy()
    guide.look(plan)
    count = guide.draw(plan)
    with torch.no_grad():
        scores = policy.scores(AnalysedPlan(guide, plan), read_by(policy, guide.table[:count]))
        turned = policy.scores(AnalysedPlan(guide, plan), read_by(policy, guide.table[:count]).flip(0)).flip(0)
    assert scores.shape == (count,) and torch.allclose(scores, turned, atol=1e-5)
    asked = []
    monkey = type(policy).scores
    policy.scores = lambda state, moves: asked.append(len(moves)) or monkey(policy, state, moves)
    search = GuidedSearch(instance, policy, plan, seed=0)
    search.run(calls=120)
    assert 3 <= len(asked) <= 60  # once a look, for many tries
    assert search.calls == 120


def test_without_its_package_a_checkpoint_says_what_is_missing(outside, tmp_path, monkeypatch):
    outside.AttentionPolicy().save(tmp_path / "agent")
    monkeypatch.setattr(extensions, "_entries", lambda group: [])
    extensions.forget()
    with pytest.raises(InputError, match="unknown policy 'attention'"):
        load_checkpoint(tmp_path / "agent")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 3}, "cannot be made of these settings.*depth"), ({"width": "wide"}, "cannot be made"),
        ([1], "must be an object"), ({"width": 16}, "has shape"),
    ],
)  # fmt: skip
def test_settings_that_lie(outside, tmp_path, settings, message):
    outside.AttentionPolicy().save(tmp_path / "agent")
    path = tmp_path / "agent" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "settings": settings}))
    with pytest.raises(InputError, match=message):
        load_checkpoint(tmp_path / "agent")


def test_names_lead_to_classes_and_back(outside):
    assert policy_class("perceptron") is PlacerNetwork and policy_name(PlacerNetwork(features=FEATURES)) == "perceptron"
    assert policy_class("attention") is outside.AttentionPolicy and policy_name(outside.AttentionPolicy()) == "attention"

    class Nameless(Policy):
        features = FEATURES

    with pytest.raises(
        InputError, match=r"Nameless is known by no name; offer it as an entry point of the group rlplace\.policies"
    ):
        policy_name(Nameless())
    with pytest.raises(InputError, match="cannot be pre-trained on priced moves"):
        Nameless().scores(None, torch.zeros(2, len(FEATURES)))
    with pytest.raises(InputError, match="holds a PlacerNetwork, not a AttentionPolicy"):
        outside.AttentionPolicy.load("default")


def test_a_policy_of_another_environment_is_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    extensions.forget()
    text = "from rlplace.agents.policies import Policy\n\nclass Lost(Policy):\n    environment = 'rlplace/Toy-v0'\n"
    plugin_site.install(tmp_path, "lost-policy", "lost_policy", text, {"rlplace.policies": {"lost": "lost_policy:Lost"}})
    with pytest.raises(InputError, match="names the environment 'rlplace/Toy-v0', not one of rlplace/Placement-v0"):
        policy_class("lost")
    extensions.forget()


def test_what_is_no_policy_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(tmp_path))
    extensions.forget()
    text = "from torch import nn\n\nclass Plain(nn.Module):\n    pass\n"
    plugin_site.install(tmp_path, "plain-policy", "plain_policy", text, {"rlplace.policies": {"plain": "plain_policy:Plain"}})
    with pytest.raises(InputError, match=r"not a class of rlplace\.agents\.policies\.Policy"):
        policy_class("plain")
    assert main(["info"]) == 0 and "plain, policy, plain-policy 1.0" in capsys.readouterr().out
    extensions.forget()
    sys.modules.pop("plain_policy", None)


def test_features_in_another_order_are_read_by_name_in_training_too():
    env = RefinementEnv([random_problem(1, num_groups=10, num_devices=3)])
    seen, turned = env.reset(seed=0)[0], tuple(reversed(FEATURES))
    found = PolicyExtractor(env.observation_space, turned, PlacerNetwork, {})
    asked = []
    found.network.look = lambda observation: asked.append(observation["candidates"]) or (torch.zeros(1, 32), torch.zeros(1, 1))
    found({name: torch.from_numpy(value)[None] for name, value in seen.items()})
    table = seen["candidates"].reshape(32, len(FEATURES))
    np.testing.assert_array_equal(asked[0].numpy().reshape(32, -1), table[:, ::-1])


def test_columns_are_found_by_name():
    table = np.arange(2 * len(FEATURES), dtype=np.float32).reshape(2, -1)
    policy = nn.Module()
    policy.features = (FEATURES[5], FEATURES[0])
    assert read_by(policy, table).tolist() == [[5.0, 0.0], [5.0 + len(FEATURES), float(len(FEATURES))]]
    assert columns_of(FEATURES, FEATURES) is None
    with pytest.raises(InputError, match=f"did you mean '{FEATURES[0]}'"):
        columns_of((FEATURES[0] + "s",), FEATURES)
