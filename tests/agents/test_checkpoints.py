"""Checkpoints: what is written is read; what is damaged, hostile or of another version is refused with one line."""

import json

import pytest
import torch
from safetensors.torch import load, save_file

from rlplace.agents import checkpoint
from rlplace.agents.checkpoint import fill, load_checkpoint, load_state, read_tensors, save_checkpoint, save_state
from rlplace.agents.network import PlacerNetwork
from rlplace.envs.guide.features import FEATURES
from rlplace.errors import InputError


def test_round_trip(tmp_path, make_checkpoint):
    network = make_checkpoint(tmp_path / "mine")
    loaded = load_checkpoint(tmp_path / "mine")
    assert loaded.name == "mine" and loaded.environment == "rlplace/Refinement-v0"
    assert loaded.network.settings() == network.settings() and loaded.network.features == network.features
    assert not loaded.network.training
    for key, value in network.state_dict().items():
        assert torch.equal(value, loaded.network.state_dict()[key]), key
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["card.md", "config.json", "policy.safetensors"]


def test_saving_again_replaces_everything(tmp_path, make_checkpoint, make_network):
    make_checkpoint(tmp_path)
    network = make_network(hidden=8)
    save_checkpoint(tmp_path, network, training={"steps_done": 9}, card="# new\n")
    loaded = load_checkpoint(tmp_path)
    assert loaded.network.settings()["hidden"] == 8 and loaded.training["steps_done"] == 9
    assert (tmp_path / "card.md").read_text() == "# new\n"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"residual.weight": torch.full((1, 8), float("nan"))}, "not finite"),
        ({"mean": torch.full((len(FEATURES),), float("inf"))}, "not finite"),
        ({"residual.weight": torch.zeros(1, 9)}, "has shape"),
        ({"residual.weight": torch.zeros(1, 8, dtype=torch.float64)}, "of torch.float64, not of torch.float32"),
        ({"residual.weight": torch.zeros(1, 8, dtype=torch.bfloat16)}, "of torch.bfloat16, not of torch.float32"),
        ({"residual.weight": None}, "is missing"),
        ({"encoder.input.weight": torch.zeros(2, 2)}, "not expected"),
        ({"scale": torch.zeros(len(FEATURES))}, "scale"),
        ({"scale": -torch.ones(len(FEATURES))}, "scale"),
    ],
)
def test_weights_that_lie(tmp_path, make_checkpoint, change, message):
    make_checkpoint(tmp_path)
    weights = {**load((tmp_path / "policy.safetensors").read_bytes()), **change}
    save_file({key: value for key, value in weights.items() if value is not None}, tmp_path / "policy.safetensors")
    with pytest.raises(InputError, match=message) as caught:
        load_checkpoint(tmp_path)
    assert "\n" not in str(caught.value) and "policy.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"network": {"hidden": 10**9, "second": 8}}, "must be a whole number from [01] to"),
        ({"network": {"hidden": 16, "second": 0}}, "must be a whole number from [01] to"),
        ({"network": {"hidden": 16.0, "second": 8}}, "must be a whole number from [01] to"),
        ({"network": {"hidden": 16}}, "'second' is missing"),
        ({"network": {"hidden": 24, "second": 8}}, "has shape"),
        ({"network": {"hidden": 16, "second": 8, "layers": 2}}, "unknown key 'layers'"),
        ({"features": ["other"]}, "other features"),
        ({"features": [*FEATURES, FEATURES[0]]}, "other features"),
        ({"policy": "forest"}, "unknown policy 'forest'"),
        ({"settings": [16, 8]}, "settings must be an object"),
        ({"settings": {"hidden": 24, "second": 8}}, "has shape"),
        ({"features": None}, "other features"),
        ({"environment": "CartPole-v1"}, "where agents are trained"),
        ({"environment": ["rlplace/Refinement-v0"]}, "where agents are trained"),
        ({"environment": "rlplace/Placement-v0"}, "other features"),
        ({"training": "long"}, "training must be"),
        ({"training": None}, "training"),
        ({"weights": "0" * 64}, "not the weights that config.json was written with"),
        ({"weights": None}, "not the weights that config.json was written with"),
    ],
)
def test_configs_that_lie(tmp_path, make_checkpoint, change, message):
    make_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(InputError, match=message) as caught:
        load_checkpoint(tmp_path)
    assert ("\n" not in str(caught.value) and "config.json" in str(caught.value)) or "policy" in str(caught.value)


def test_missing_files(tmp_path, make_checkpoint):
    with pytest.raises(InputError, match="unknown agent"):
        load_checkpoint("no-such-agent")
    with pytest.raises(InputError, match=r"config\.json"):
        load_checkpoint(tmp_path)
    make_checkpoint(tmp_path)
    for name, words in (("policy.safetensors", "cannot be read"), ("card.md", "is missing; a checkpoint is a folder of")):
        (tmp_path / name).unlink()
        with pytest.raises(InputError, match=f"{name}: {words}"):
            load_checkpoint(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be created"):
        save_checkpoint(tmp_path / "file", PlacerNetwork(features=FEATURES), training={}, card="")


def test_the_state_of_a_training(tmp_path, make_network):
    """Round trip, and what does not belong there."""
    network, path = make_network(), tmp_path / "state.safetensors"
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    sum(value.sum() for value in network.parameters()).backward()
    optimizer.step()
    save_state(path, network, optimizer.state_dict(), (3, 4, 5))
    other = make_network(seed=9)
    fresh = torch.optim.Adam(other.parameters(), lr=0.7)
    moments, progress = load_state(path, other, fresh)
    assert progress == [3, 4, 5] and moments["param_groups"][0]["lr"] == 0.7
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in network.state_dict().items())
    fresh.load_state_dict(moments)
    for one, two in zip(network.parameters(), other.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], fresh.state[two]["exp_avg"])
        assert torch.equal(optimizer.state[one]["step"], fresh.state[two]["step"])
    whole = load(path.read_bytes())
    for change, message in (
        ({"progress": None}, "how far"),
        ({"progress": torch.zeros(2)}, "how far"),
        ({"weight.mean": None}, "is missing"),
        ({"colour": torch.zeros(1)}, "not optimizer state"),
    ):
        changed = {**whole, **change}
        save_file({key: value for key, value in changed.items() if value is not None}, path)
        with pytest.raises(InputError, match=message):
            load_state(path, other, fresh)


def test_loading_checks_before_it_changes_anything(tmp_path, make_checkpoint, make_network):
    make_checkpoint(tmp_path, seed=1)
    weights = load((tmp_path / "policy.safetensors").read_bytes())
    save_file({**weights, "value.2.bias": torch.tensor([float("nan")])}, tmp_path / "policy.safetensors")
    network = make_network(seed=2)
    before = network.first.weight.clone()
    with pytest.raises(InputError):
        path = tmp_path / "policy.safetensors"
        fill(network, read_tensors(path), path)
    assert torch.equal(network.first.weight, before)


def test_the_index_names_folders():
    for name in checkpoint.shipped_checkpoints():
        assert (checkpoint._find(name) / "config.json").is_file()
