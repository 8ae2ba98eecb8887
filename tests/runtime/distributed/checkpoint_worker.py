"""What the processes of the checkpoint tests run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import small_models
import torch
import torch.distributed as dist
from plans import plan_of
from torch.distributed.tensor import DTensor

from rlplace.runtime.distributed.distribute import distribute
from rlplace.runtime.distributed.graph.forward_graph import Graphs
from rlplace.runtime.distributed.state import training_state

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
    path = training_state.save_checkpoint(
        Path(folder), model, optimizer, step=SAVED, scheduler=scheduler, extra={"note": [1, "two", None]}
    )
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    return path, losses + train(model, inputs, optimizer, scheduler, range(SAVED, STEPS)), kept


def load_run(folder, name, **options):
    """Loads into a model with other weights and a new optimizer, and goes on."""
    model, inputs, optimizer, scheduler = make(name, 7, **options)
    optimizer.param_groups[0]["lr"] = 99.0
    found = training_state.load_checkpoint(Path(folder), model, optimizer, scheduler=scheduler)
    assert found.step == SAVED and found.extra == {"note": [1, "two", None]}
    return train(model, inputs, optimizer, scheduler, range(found.step, STEPS))


def four(folder):
    """Everything that four processes do."""
    chain = {"deal": "chain", "microbatches": 2, "schedule": "1f1b"}
    found = {}
    found["gpt2"] = save_run(f"{folder}/gpt2", "gpt2", **chain)
    found["again"] = load_run(f"{folder}/gpt2", "gpt2", **chain)
    found["other plan"] = load_run(f"{folder}/gpt2", "gpt2", seed=3, microbatches=2)
    halves = {"devices": 2, "replicas": [[0, 1], [2, 3]], "optimizer_sharding": True, "seed": 1}
    found["resnet"] = save_run(f"{folder}/resnet", "resnet", **halves)
    found["sharded again"] = load_run(f"{folder}/resnet", "resnet", **halves)
    found["one"] = load_run(f"{folder}/resnet", "resnet", devices=1, replicas=[[0], [3]])
    return found


def two(folder):
    """Everything that two processes do with what four have saved."""
    found = {"gpt2": load_run(f"{folder}/gpt2", "gpt2", microbatches=2, seed=5)}
    model, _, optimizer, _ = make("gpt2", 3, seed=6)
    found["plain"] = training_state.load_checkpoint(Path(folder) / "plain", model, optimizer).step
    found["values"] = {key: value.clone() for key, value in model.state_dict().items()}
    found["refused"] = refusals(folder, model, optimizer)
    found["cut"] = [cut_steps(f"{folder}/cut", weights, load) for weights, load in ((0, False), (1, True))]
    return found


def refusals(folder, model, optimizer):
    """What is refused, as text."""
    found = []
    for path, scheduler in ((f"{folder}/none", None), (f"{folder}/resnet", None), (f"{folder}/plain", settings(model)[1])):
        try:
            training_state.load_checkpoint(path, model, optimizer, scheduler=scheduler)
        except ValueError as error:
            found.append(str(error))
    try:
        training_state.save_checkpoint(f"{folder}/bad", model, optimizer, step=1, extra={"a": {"b": object()}})
    except ValueError as error:
        found.append(str(error))
    return found


class Cut(torch.nn.Module):
    """Two layers and their loss."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x):
        return (self.down(torch.relu(self.up(x))) ** 2).mean()


def cut_steps(folder, weights, load):
    """Trains a model whose layers are DTensors over two processes, saves it, goes on; or loads it and goes on."""
    torch.manual_seed(weights)
    net = Cut()
    x = torch.linspace(-1, 1, 64).reshape(8, 8)
    shards = {"up/linear": {"n": 2}, "down/linear_1": {"k": 2}}
    model = distribute(net, plan_of(net, {"x": x}, 1, groups=1, shards=shards), {"x": x})
    assert isinstance(dict(model.named_parameters())["up.weight"], DTensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    if load:
        training_state.load_checkpoint(folder, model, optimizer)
    for step in range(2 if load else 4):
        optimizer.zero_grad()
        loss = model(x=x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1 and not load:
            training_state.save_checkpoint(folder, model, optimizer, step=2)
    return losses
