"""What a step keeps while it differentiates."""

from __future__ import annotations

import weakref

import torch
from torch import nn

import rlplace
from tests.runtime.equality import strategy_plan


class Scored(nn.Module):
    """Hands out scores beside its loss, as models with heads do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scores: list[weakref.ref[torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        scores = x.relu()
        self.scores.append(weakref.ref(scores))
        return {"loss": scores.sum(), "scores": scores}


def test_what_a_model_returns_beside_its_loss_does_not_outlive_its_micro_batch(one_rank):
    torch.manual_seed(0)
    model = Scored()
    stage = {"blocks": ["layers.0", "layers.1"], "devices": [0]}
    plan = strategy_plan({"batch": 4, "microbatch": [2], "microbatches": [2], "stages": [stage]})
    placed = rlplace.distribute(model, plan, {"x": torch.ones(2, 4)})
    model.scores.clear()
    kept = []
    model.layers[0].weight.register_hook(lambda gradient: kept.append([ref() is not None for ref in model.scores]))
    output = placed(x=torch.randn(4, 4))
    assert kept == [[False], [False, False]]  # relu keeps its result, but no longer under this name
    output["loss"].backward()
    assert output["scores"] is None
    assert model.layers[0].weight.grad is not None
