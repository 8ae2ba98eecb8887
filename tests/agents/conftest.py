"""Builders that several tests of the agent share: networks whose layers all count, checkpoints of them, tiny trainings."""

import pytest
import torch

from rlplace.agents.checkpoint import save_checkpoint
from rlplace.agents.config import TrainConfig
from rlplace.agents.graph_network import GraphNetwork
from rlplace.agents.network import PlacerNetwork
from rlplace.agents.planner import load_agent
from rlplace.envs.construction import CONSTRUCTION_FEATURES
from rlplace.envs.guide.features import FEATURES


def make_network(*, hidden=16, second=8, seed=0, features=FEATURES):
    """Returns a network far from the heuristic, with features standardised."""
    torch.manual_seed(seed)
    network = PlacerNetwork(hidden=hidden, second=second, features=features)
    torch.nn.init.normal_(network.residual.weight)
    torch.nn.init.normal_(network.stop.weight)
    network.standardise(torch.randn(len(features)) * 0.1, torch.rand(len(features)) + 0.2)
    return network.eval()


def make_checkpoint(folder, **sizes):
    """Writes a checkpoint of such a network and returns the network."""
    network = make_network(**sizes)
    save_checkpoint(folder, network, training={"steps_done": 0}, card="# test\n")
    return network


@pytest.fixture(scope="session", name="make_network")
def _make_network():
    return make_network


@pytest.fixture(scope="session", name="make_checkpoint")
def _make_checkpoint():
    return make_checkpoint


@pytest.fixture(scope="session")
def agents(tmp_path_factory):
    """Agents by name."""
    folder = tmp_path_factory.mktemp("refinement")
    make_checkpoint(folder)
    torch.manual_seed(0)
    builder = tmp_path_factory.mktemp("placement")
    GraphNetwork(features=CONSTRUCTION_FEATURES, hidden=8, second=4).save(builder)
    return {"refinement": load_agent(folder), "placement": load_agent(builder)}


@pytest.fixture
def tiny():
    """Returns a maker of settings for a training of a few seconds: `tiny(**changes)`."""

    def make(**changes):
        small = {
            "cases": 3, "states": 10, "moves": 24, "fit_steps": 20, "steps": 64, "part": 32, "part_cases": 2, "envs": 2,
            "rollout": 16, "batch_size": 16, "epochs": 1, "hidden": 8, "second": 4, "processes": 1,
            "device": "cpu",
        }  # fmt: skip
        return TrainConfig.load(**{**small, **changes})

    return make
