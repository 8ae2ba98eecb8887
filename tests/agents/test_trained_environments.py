"""Policies are trained in every environment of the package: shipped ones and a toy of another package, cut and resumed."""

import pytest
import torch

from rlplace import plugins
from rlplace.agents import ppo
from rlplace.agents.checkpoint import load_checkpoint, read_tensors
from rlplace.agents.config import TrainConfig
from rlplace.agents.planner import load_agent
from rlplace.agents.policies import candidate_columns
from rlplace.agents.problems import cases_of
from rlplace.agents.train import train
from rlplace.cli.main import main
from rlplace.envs.base import CLUSTER, ENVIRONMENTS, PLACEMENT, REFINEMENT, STRATEGY
from rlplace.errors import InputError
from tests import plugin_site

TOY = """
import torch
from torch import nn

from rlplace.agents.policies import Policy
from rlplace.envs.base import ENVIRONMENTS, STRATEGY


class Toy(Policy):
    environment, environments = STRATEGY, ENVIRONMENTS

    def __init__(self, *, features, width=4):
        super().__init__()
        self.features, self.width = tuple(features), width
        self.score = nn.Sequential(nn.Linear(len(self.features), width), nn.Tanh(), nn.Linear(width, 1))
        self.state = nn.Linear(8, 2)

    def settings(self):
        return {"width": self.width}

    def look(self, observation):
        named = observation["candidate_group"] >= 0
        scores = self.score(observation["candidates"].reshape(*named.shape, -1)).squeeze(2)
        stop, value = self.state(observation["context"]).split(1, dim=1)
        return torch.where(named, scores, stop.expand_as(named)), value
"""


@pytest.fixture
def toy(tmp_path_factory, monkeypatch):
    """Installs the toy policy."""
    folder = tmp_path_factory.mktemp("site")
    monkeypatch.syspath_prepend(str(folder))
    plugins.forget()
    plugin_site.install(folder, "toy-policy", "toy_policy", TOY, {"rlplace.policies": {"toy": "toy_policy:Toy"}})
    yield
    plugins.forget()


def trained(folder, tiny, environment, **changes):
    config = tiny(environment=environment, fit_steps=0, **changes)
    names = ["synthetic"] if config.environment in (PLACEMENT, REFINEMENT) else ["small"]
    source = cases_of(names, environment=config.environment)
    return train(source, config, folder, resume=folder.exists(), report=lambda line: None)


IN_CI = (STRATEGY,)


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment", [pytest.param(name, marks=[pytest.mark.long] * (name not in IN_CI)) for name in ENVIRONMENTS]
)
def test_a_policy_is_trained_cut_and_resumed(toy, tiny, tmp_path, monkeypatch, environment):
    options = {"policy": "toy", "settings": {"width": 3}}
    assert trained(tmp_path / "whole", tiny, environment, **options) == 64
    part = ppo.run_part

    def cut(*args, number, **kwargs):
        if number:
            raise KeyboardInterrupt
        return part(*args, number=number, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ppo, "run_part", cut)
        trained(tmp_path / "cut", tiny, environment, **options)
    first = read_tensors(tmp_path / "cut" / "policy.safetensors")
    assert trained(tmp_path / "cut", tiny, environment, **options) == 64
    for name in ("policy", "optimizer"):
        whole, again = (read_tensors(tmp_path / run / f"{name}.safetensors") for run in ("whole", "cut"))
        assert whole.keys() == again.keys() and all(torch.equal(whole[key], again[key]) for key in whole)
    loaded = load_checkpoint(tmp_path / "cut")
    assert loaded.environment == loaded.network.environment == environment and loaded.network.width == 3
    assert loaded.network.features == candidate_columns(environment)
    assert not torch.equal(loaded.network.score[0].weight, first["score.0.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("environment", [STRATEGY, CLUSTER])
def test_the_shipped_policy_is_trained_and_places_nothing(tiny, tmp_path, environment):
    assert trained(tmp_path / "run", tiny, environment.removeprefix("rlplace/"), steps=32) == 32
    assert load_checkpoint(tmp_path / "run").network.environment == environment
    with pytest.raises(InputError, match=f"was trained in {environment}; agents that place are of"):
        load_agent(tmp_path / "run")


@pytest.mark.slow
def test_the_command_trains_in_cluster_v0(tmp_path, capsys):
    words = ["train", "--environment", "Cluster-v0", "--problems", "small", "--steps", "16", "--device", "cpu", "--json"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    assert '"steps": 2048' in capsys.readouterr().out  # a whole rollout
    assert main(["train", "--resume", str(tmp_path / "run"), "--test", "x"]) == 2
    assert "policies of rlplace/Cluster-v0 place nothing" in capsys.readouterr().err


def test_settings_that_do_not_belong_together(tiny, tmp_path):
    with pytest.raises(
        InputError, match=r"graph is trained in rlplace/Placement-v0, not in rlplace/Strategy-v0; .* perceptron, or name"
    ):
        TrainConfig.load(policy="graph", environment="Strategy-v0")
    with pytest.raises(InputError, match="unknown environment 'rlplace/Toy-v0'"):
        TrainConfig.load(environment="Toy-v0")
    assert [TrainConfig.load(environment=name).policy for name in ENVIRONMENTS] == ["graph", *["perceptron"] * 3]
    with pytest.raises(InputError, match="no pre-training in rlplace/Strategy-v0; use --fit-steps 0"):
        train(cases_of(["small"], environment=STRATEGY), tiny(environment=STRATEGY), tmp_path, report=lambda line: None)
    with pytest.raises(InputError, match="unknown split 'other'"):
        cases_of(["other"], environment=CLUSTER)
    with pytest.raises(InputError, match="takes one split of its questions"):
        cases_of(["small"], environment=STRATEGY, cluster="t4:2")
