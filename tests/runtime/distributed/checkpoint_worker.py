"""What the processes of the checkpoint tests run."""

from __future__ import annotations

from pathlib import Path

import small_models
import torch
import torch.distributed as dist
from plans import plan_of
from torch.distributed.tensor import DTensor

from rlplace.runtime.distributed import checkpoint
from rlplace.runtime.distributed.distribute import distribute

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


def make(name, weights, **options):
    """A distributed model of a random plan."""
    model, inputs = build(name, weights)
    plan = plan_of(model, inputs, options.pop("devices", dist.get_world_size()), **options)
    distributed = distribute(model, plan, inputs)
    return distributed, inputs, *settings(distributed)


def save_run(folder, name, **options):
    """Trains, saves in the middle, and goes on."""
    model, inputs, optimizer, scheduler = make(name, 0, **options)
    losses = train(model, inputs, optimizer, scheduler, range(SAVED))
    path = checkpoint.save_checkpoint(
        Path(folder), model, optimizer, step=SAVED, scheduler=scheduler, extra={"note": [1, "two", None]}
    )
    kept = {key: value.clone() for key, value in model.state_dict().items()}
    return path, losses + train(model, inputs, optimizer, scheduler, range(SAVED, STEPS)), kept


def load_run(folder, name, **options):
    """Loads into a model with other weights and a new optimizer, and goes on."""
    model, inputs, optimizer, scheduler = make(name, 7, **options)
    optimizer.param_groups[0]["lr"] = 99.0
    found = checkpoint.load_checkpoint(Path(folder), model, optimizer, scheduler=scheduler)
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
    model, inputs, optimizer, _ = make("gpt2", 3, seed=6)
    found["plain"] = checkpoint.load_checkpoint(Path(folder) / "plain", model, optimizer).step
    found["values"] = {key: value.clone() for key, value in model.state_dict().items()}
    found["refused"] = refusals(folder, model, optimizer)
    del inputs
    return found


def refusals(folder, model, optimizer):
    """What is refused, as text."""
    found = []
    for path, scheduler in ((f"{folder}/none", None), (f"{folder}/resnet", None), (f"{folder}/plain", settings(model)[1])):
        try:
            checkpoint.load_checkpoint(path, model, optimizer, scheduler=scheduler)
        except ValueError as error:
            found.append(str(error))
    try:
        checkpoint.save_checkpoint(f"{folder}/bad", model, optimizer, step=1, extra={"a": {"b": object()}})
    except ValueError as error:
        found.append(str(error))
    return found


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value
