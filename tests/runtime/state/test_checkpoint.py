"""Checkpoints go from any plan to any other, to the plain model and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from rlplace.runtime.job.distribute import distribute
from rlplace.runtime.placement.forward_graph import Graphs
from rlplace.runtime.state.training_state import load_checkpoint, save_checkpoint
from rlplace.runtime.state.whole import gather_values
from tests.runtime import small_models
from tests.runtime.equality import plan_of
from tests.runtime.job.launch import run

STEPS = 5
SAVED = 2
RATE = 1e-3


def build(name, weights=0):
    """A model with random weights of a seed, and always the same inputs."""
    arguments = (0.1,) if name == "gpt2" else ()
    torch.manual_seed(weights)
    model, _, loss = small_models.MODELS[name](*arguments)
    assert loss is small_models._own_loss
    torch.manual_seed(0)
    return model, small_models.MODELS[name](*arguments)[1]


def batch_of(inputs, step):
    """The samples in another order at every step."""
    order = (torch.arange(4) + step) % 4
    return {key: value[order] if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}


def settings(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def train(model, inputs, optimizer, scheduler, steps):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(**batch_of(inputs, step)).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


TRACED = {}
"""By model its groups of ops and its graphs: tracing takes most of the time."""


def make(name, weights, devices=None, deal=None, seed=0, **options):
    """A distributed model of a plan: groups in a row, or dealt at random."""
    model, inputs = build(name, weights)
    if name not in TRACED:
        TRACED[name] = plan_of(model, inputs, 1), Graphs()
    groups, graphs = TRACED[name]
    devices, count = devices or dist.get_world_size(), len(groups.groups)
    row = np.arange(count) * devices // count if deal == "chain" else np.random.default_rng(seed).integers(0, devices, count)
    plan = dataclasses.replace(groups, device_of_group=row.astype(np.int32), **options)
    distributed = distribute(model, plan, inputs, graphs=graphs)
    return distributed, inputs, *settings(distributed)


def save_run(folder, name, **options):
    """Trains, saves in the middle, and goes on."""
    model, inputs, optimizer, scheduler = make(name, 0, **options)
    losses = train(model, inputs, optimizer, scheduler, range(SAVED))
    path = save_checkpoint(Path(folder), model, optimizer, step=SAVED, scheduler=scheduler, extra={"note": [1, "two", None]})
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    return path, losses + train(model, inputs, optimizer, scheduler, range(SAVED, STEPS)), kept


def load_run(folder, name, **options):
    """Loads into a model with other weights and a new optimizer, and goes on."""
    model, inputs, optimizer, scheduler = make(name, 7, **options)
    optimizer.param_groups[0]["lr"] = 99.0
    found = load_checkpoint(Path(folder), model, optimizer, scheduler=scheduler)
    assert found.step == SAVED and found.extra == {"note": [1, "two", None]}
    return train(model, inputs, optimizer, scheduler, range(found.step, STEPS))


def save_four(folder):
    """Everything that four processes do."""
    chain = {"deal": "chain"}
    found = {}
    found["gpt2"] = save_run(f"{folder}/gpt2", "gpt2", **chain)
    found["again"] = load_run(f"{folder}/gpt2", "gpt2", **chain)
    found["other plan"] = load_run(f"{folder}/gpt2", "gpt2", seed=3)
    found["resnet"] = save_run(f"{folder}/resnet", "resnet", seed=1)
    found["one"] = load_run(f"{folder}/resnet", "resnet", devices=1)
    return found


def two(folder):
    """Everything that two processes do with what four have saved."""
    found = {"gpt2": load_run(f"{folder}/gpt2", "gpt2", seed=5)}
    model, _, optimizer, _ = make("gpt2", 3, seed=6)
    found["plain"] = load_checkpoint(Path(folder) / "plain", model, optimizer).step
    found["values"] = {key: value.clone() for key, value in model.state_dict().items()}
    refusals(folder, model, optimizer)
    rank = dist.get_rank()
    own = {rank: [torch.full((), rank + 1, dtype=torch.int16), {"plain": rank}, torch.zeros(0, dtype=torch.float8_e4m3fn)]}
    found["gathered"] = gather_values(own, torch.device("cpu"), everywhere=True)
    return found


def refusals(folder, model, optimizer):
    """Checks messages on every rank."""
    for name, scheduler, message in (
        ("none", None, "no complete checkpoint"),
        ("resnet", None, "another model.*'"),
        ("plain", settings(model)[1], "without a learning rate schedule"),
    ):
        with pytest.raises(ValueError, match=message):
            load_checkpoint(f"{folder}/{name}", model, optimizer, scheduler=scheduler)
    with pytest.raises(ValueError, match=r"extra\.a\.b is a object"):
        save_checkpoint(f"{folder}/bad", model, optimizer, step=1, extra={"a": {"b": object()}})


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def four(folder):
    return run(4, save_four, str(folder))


def close(found, expected, tolerance=2e-6):
    assert len(found) == len(expected)
    assert all(abs(a - b) <= tolerance * abs(b) for a, b in zip(found, expected, strict=True)), (found, expected)


def plain_model(folder, name, path=None):
    """The undistributed model with a checkpoint in it."""
    model, inputs = build(name, weights=11)
    optimizer, scheduler = settings(model)
    load_checkpoint(path or folder / name, model, optimizer, scheduler=scheduler)
    return model, inputs, optimizer, scheduler


def test_training_continues_where_it_was_saved(four):
    _, losses, _ = four[0]["gpt2"]
    assert len(set(losses)) == STEPS
    assert four[0]["again"] == losses[SAVED:]  # dropout, optimizer and learning rate as if nothing had happened
    close(four[0]["other plan"], losses[SAVED:])
    close(four[0]["one"], four[0]["resnet"][1][SAVED:])


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_every_rank_saves_its_own_and_the_plain_model_loads_it(four, folder, name):
    path = four[0][name][0]
    assert sorted(p.name for p in path.parent.iterdir()) == ["step-00000002"]
    held = [found[name][2] for found in four]
    assert all(mine.keys() != held[0].keys() for mine in held[1:])
    model, _, optimizer, _ = plain_model(folder, name)
    saved = {key: value for mine in held for key, value in mine.items()}
    assert set(model.state_dict()) == set(saved)
    for key, value in model.state_dict().items():
        assert torch.equal(value, saved[key]), key
    assert optimizer.param_groups[0]["lr"] == RATE / 2
    assert all({"exp_avg", "exp_avg_sq", "step"} == set(optimizer.state[p]) for p in model.parameters())
    assert name != "gpt2" or model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_plain_torch_code_loads_it(four, folder, name):
    ours, _, our_optimizer, _ = plain_model(folder, name)
    model, _ = build(name, weights=12)
    optimizer, _ = settings(model)
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
    ranks = run(2, two, str(folder))
    for found in ranks:
        close(found["gpt2"], four[0]["gpt2"][1][SAVED:])
        assert found["plain"] == 9
        for key, value in found["values"].items():
            assert torch.equal(value, model.state_dict()[key]), key
        for rank, (number, plain, empty) in found["gathered"].items():  # types that gloo's broadcast does not know
            assert (number.dtype, int(number), plain, empty.shape) == (torch.int16, rank + 1, {"plain": rank}, (0,))
        assert list(found["gathered"]) == [0, 1]
    assert not (folder / "bad").exists()
