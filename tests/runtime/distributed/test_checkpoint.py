"""Checkpoints go from any plan to any other, to the plain model and back."""

import io
import os
import shutil

import checkpoint_worker as worker
import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import run
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from rlplace.errors import InputError
from rlplace.runtime.distributed.state.training_index import _Unpickler
from rlplace.runtime.distributed.state.training_state import latest_checkpoint, load_checkpoint, save_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def four(folder):
    return run(4, worker.four, str(folder), timeout_s=300)


def close(found, expected, tolerance=2e-6):
    assert len(found) == len(expected)
    assert all(abs(a - b) <= tolerance * abs(b) for a, b in zip(found, expected, strict=True)), (found, expected)


def plain_model(folder, name, path=None):
    """The undistributed model with a checkpoint in it."""
    model, inputs = worker.build(name, weights=11)
    optimizer, scheduler = worker.settings(model)
    load_checkpoint(path or folder / name, model, optimizer, scheduler=scheduler)
    return model, inputs, optimizer, scheduler


def test_training_continues_where_it_was_saved(four):
    _, losses, _ = four[0]["gpt2"]
    assert len(set(losses)) == worker.STEPS
    assert four[0]["again"] == losses[worker.SAVED :]  # dropout, optimizer and learning rate as if nothing had happened
    close(four[0]["other plan"], losses[worker.SAVED :])


def test_optimizer_sharded_over_replicas(four):
    _, losses, _ = four[0]["resnet"]
    assert four[0]["sharded again"] == losses[worker.SAVED :]
    close(four[0]["one"], losses[worker.SAVED :])


def test_every_rank_saves_its_own(four):
    path = four[0]["gpt2"][0]
    assert sorted(p.name for p in path.parent.iterdir()) == ["step-00000002"]
    held = [set(found["gpt2"][2]) for found in four]
    assert all(mine != held[0] for mine in held[1:])


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_the_plain_model_loads_it(four, folder, name):
    model, _, optimizer, _ = plain_model(folder, name)
    saved = {key: value for found in four for key, value in found[name][2].items()}
    state = model.state_dict()
    assert set(state) == set(saved)
    for key, value in state.items():
        assert torch.equal(value, saved[key]), key
    assert optimizer.param_groups[0]["lr"] == worker.RATE / 2
    assert all({"exp_avg", "exp_avg_sq", "step"} == set(optimizer.state[p]) for p in model.parameters())
    if name == "gpt2":
        assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_plain_torch_code_loads_it(four, folder, name):
    ours, _, our_optimizer, _ = plain_model(folder, name)
    model, _ = worker.build(name, weights=12)
    optimizer, _ = worker.settings(model)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=four[0][name][0], no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state, options=options)
    for key, value in model.state_dict().items():
        assert torch.equal(value, ours.state_dict()[key]), key
    for (key, mine), (_, other) in zip(model.named_parameters(), ours.named_parameters(), strict=True):
        for item, value in optimizer.state[mine].items():
            assert torch.equal(value, our_optimizer.state[other][item]), (key, item)
    assert optimizer.param_groups[0]["lr"] == our_optimizer.param_groups[0]["lr"]


def test_fewer_processes_and_back(four, folder):
    model, _, optimizer, _ = plain_model(folder, "gpt2")
    save_checkpoint(folder / "plain", model, optimizer, step=9)
    ranks = run(2, worker.two, str(folder), timeout_s=300)
    for found in ranks:
        close(found["gpt2"], four[0]["gpt2"][1][worker.SAVED :])
        assert found["plain"] == 9
        for key, value in found["values"].items():
            assert torch.equal(value, model.state_dict()[key]), key
        none, other, schedule, data = found["refused"]
        assert "no complete checkpoint" in none
        assert "another model" in other and "'" in other
        assert "without a learning rate schedule" in schedule
        assert "extra.a.b is a object" in data
        through, resumed = found["cut"]
        assert resumed == through[2:]
    assert not (folder / "bad").exists()
    cut = worker.Cut()
    cut_optimizer = torch.optim.AdamW(cut.parameters())
    load_checkpoint(folder / "cut", cut, cut_optimizer)
    x = torch.linspace(-1, 1, 64).reshape(8, 8)
    close([cut(x).item()], ranks[0]["cut"][0][2:3])
    assert cut_optimizer.state[cut.up.weight]["exp_avg"].shape == cut.up.weight.shape


def test_a_crash_while_saving_leaves_the_last_one(tmp_path):
    model = torch.nn.Linear(2, 2)
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, model, step=step)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    (tmp_path / ".step-00000004.partial").mkdir()
    shutil.copytree(tmp_path / "step-00000003", tmp_path / "step-00000009")
    os.remove(tmp_path / "step-00000009" / "rlplace.json")
    assert latest_checkpoint(tmp_path).name == "step-00000003"
    assert load_checkpoint(tmp_path, model).step == 3
    save_checkpoint(tmp_path, model, step=4)
    assert not list(tmp_path.glob(".step*"))


class ByName:
    """Pickles as the getattr of something, as Python 3.11.0 to 3.11.3 pickle members of enums."""

    def __init__(self, owner, name):
        self.pair = owner, name

    def __reduce__(self):
        return getattr, self.pair


def test_an_index_may_name_members_of_enums_and_nothing_else():
    import pickle

    def load(found):
        return _Unpickler(io.BytesIO(pickle.dumps(found))).load()

    encoding = _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    assert load(ByName(_MEM_FORMAT_ENCODING, "TORCH_CHANNELS_LAST")) is encoding
    for owner, name in ((_MEM_FORMAT_ENCODING, "__init__"), (torch.Size, "__init__"), (dict, "fromkeys")):
        with pytest.raises(InputError, match="getattr"):
            load(ByName(owner, name))


class Harm:
    """Unpickling it would run code."""

    def __reduce__(self):
        return os.system, ("touch /tmp/rlplace-harm",)


def test_an_index_with_code_is_refused(tmp_path):
    import pickle

    model = torch.nn.Linear(2, 2)
    path = save_checkpoint(tmp_path, model, step=1)
    good = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(InputError, match=r"names (posix|nt)\.system"):
        load_checkpoint(path, model)
    (path / ".metadata").write_bytes(good[: len(good) // 2])
    with pytest.raises(InputError, match="damaged"):
        load_checkpoint(path, model)


def test_a_model_of_another_shape_is_refused(tmp_path):
    save_checkpoint(tmp_path, torch.nn.Linear(2, 2), step=1)
    with pytest.raises(InputError, match=r"'weight' is \[2, 2\] there and \[2, 3\] in the model"):
        load_checkpoint(tmp_path, torch.nn.Linear(3, 2))
    with pytest.raises(InputError, match="saved without an optimizer"):
        model = torch.nn.Linear(2, 2)
        load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters()))
