"""Unlike pipelines side by side in a loop: they count targets, clip, evaluate, save and load as the plain model does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import Strategy
from rlplace.runtime.base.ranks import gather_objects
from rlplace.runtime.job.distribute import distribute
from rlplace.runtime.state.training_state import load_checkpoint, save_checkpoint
from rlplace.runtime.state.whole import whole_state_dict, whole_tensor
from rlplace.runtime.strategy import sums
from tests.runtime.job.launch import run
from tests.runtime.strategy.native_cases import beside, stage

BLOCKS, STEPS, SAMPLES = ("embed", "layers.0", "layers.1", "head"), 6, 8


class Layer(nn.Module):
    """A residual layer with a parameter that torch's wrappers leave out."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(10, 10), nn.Parameter(torch.ones(()))

    def forward(self, hidden):
        return hidden + self.scale * torch.tanh(self.inner(hidden))


class Tied(nn.Module):
    """Layers between a table and a head that share a weight; some targets are ignored."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 10), nn.Linear(10, 24)
        self.layers, self.head.weight = nn.ModuleList(Layer() for _ in range(2)), self.embed.weight

    def forward(self, ids, labels):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def make(seed=0):
    torch.manual_seed(seed)
    return Tied().double()


def batch_of(step):
    """Batches of eight samples, the last one of five; a sample ignores as many targets as it likes."""
    drawn = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(0, 24, (2, SAMPLES, 6), generator=drawn)
    labels[torch.rand(SAMPLES, 6, generator=drawn) < torch.rand(SAMPLES, 1, generator=drawn)] = -100
    labels[:, 0] = 1
    samples = 5 if step == STEPS - 1 else SAMPLES
    return {"ids": ids[:samples], "labels": labels[:samples]}


CHAIN = {
    "batch": 2, "microbatch": [1], "microbatches": [2], "schedule": "1f1b",
    "stages": [stage(BLOCKS[:2], [0], {}, 0), stage(BLOCKS[2:], [2], {}, 0)],
}  # fmt: skip
SHARES = {"batch": 6, "microbatch": [3], "microbatches": [1], "stages": [stage(BLOCKS, [1, 3], {"shard": 2}, 3)]}
OTHER = {"batch": 8, "microbatch": [2], "microbatches": [1], "stages": [stage(BLOCKS, [0, 1, 2, 3], {"shard": 4}, 2)]}


def go_on(model, optimizer, steps):
    """Loss, norm, and evaluated loss and logits of every step."""
    found = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(**batch_of(step))["loss"]
        loss.backward()
        clip = getattr(model, "clip_grad_norm_", lambda most: nn.utils.clip_grad_norm_(model.parameters(), most))
        found += [loss.item(), clip(0.1).item()]
        optimizer.step()
        model.eval()
        with torch.no_grad():
            made = model(**batch_of(step))
        found += [made["loss"].item(), *made["logits"].flatten().tolist()]
        model.train()
    return found


def placed(data, seed):
    plan = PlacementPlan("0" * 64, "mine", 0, [], strategy=Strategy.from_dict(data))
    size = plan.strategy.pipelines[0].microbatch[0]
    model = distribute(make(seed), plan, {key: value[:size] for key, value in batch_of(0).items()}, reduction="targets")
    return model, torch.optim.AdamW(model.parameter_groups(), lr=1e-2)


def work(folder):
    """What four processes find on their way from unlike pipelines to shares over all of them, and back."""
    sums.BUCKET_BYTES = 512  # larger parameters are summed in slices
    found = []
    for number, data in enumerate([beside(CHAIN, SHARES), OTHER, beside(SHARES, CHAIN)]):
        model, optimizer = placed(data, seed=number)
        if number:
            assert load_checkpoint(folder, model, optimizer).step == 2 * number
        found += go_on(model, optimizer, range(2 * number, 2 * number + 2))
        save_checkpoint(folder, model, optimizer, step=2 * number + 2, keep=3)
        copies = {name: whole_tensor(parameter.detach()) for name, parameter in model.trained()}
        for other in gather_objects(copies):
            assert all(torch.equal(value, copies[name]) for name, value in other.items() if name in copies)
        whole = whole_state_dict(model)
    return found, whole


@pytest.mark.slow
def test_a_loop_as_that_of_the_plain_model(tmp_path):
    results = run(4, work, str(tmp_path))
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wanted = go_on(model, optimizer, range(STEPS))
    for found, _ in results:
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(results[0][1], model.state_dict(), rtol=1e-9, atol=1e-9)
    again = make(5)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    assert load_checkpoint(tmp_path / "step-00000002", again, optimizer).step == 2  # which unlike pipelines have written
    own = go_on(again, optimizer, range(2, STEPS))
    assert own == pytest.approx(wanted[-len(own) :], rel=1e-9, abs=1e-9)
