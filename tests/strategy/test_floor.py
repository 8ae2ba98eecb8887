"""The default answer against every planner that can answer at once, on models, clusters and batches drawn at random."""

from __future__ import annotations

import random

import pytest

import rlplace
from rlplace.errors import RlplaceError
from rlplace.model.zoo import load_model
from rlplace.placement import NEEDS_SPLIT, OF_STRATEGIES, ONE_SHOT

MODELS = (
    "hf:gpt2,n_layer=3,n_embd=128,n_head=4,vocab_size=512",
    "hf:t5,num_layers=2,num_decoder_layers=2,d_model=64,d_ff=128,vocab_size=256",
    "zoo:inception",
    "zoo:lstm",
    "zoo:mlp",
    "zoo:moe_toy",
    "zoo:nasnet",
)
CLUSTERS = ("a100-80g:4", "a100-80g:2+t4:2", "rtx4090:2", "v100:4", "h100:2x2,ib=400g")


MORE = [pytest.mark.long]  # a minute each


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=MORE) for seed in (0, 2, 3))])
def test_the_default_answer_is_never_behind_a_planner_that_answers_at_once(seed: int) -> None:
    rng = random.Random(seed)
    model, cluster, batch = rng.choice(MODELS), rng.choice(CLUSTERS), rng.choice((4, 8))
    loaded = load_model(model, batch=batch, seq=32)

    module = {"target": loaded.module, "example_inputs": loaded.example_inputs, "loss": loaded.loss}
    graph = {"target": rlplace.capture(loaded.module, loaded.example_inputs, loss=loaded.loss)}

    def step_s(model: dict[str, object], **options: object) -> float:
        try:
            plan = rlplace.place(cluster=cluster, batch=batch, time_limit_s=None, **model, **options)
        except RlplaceError:
            return float("inf")
        figures = plan.predicted if plan.strategy is not None else plan.predicted.op_level or plan.predicted
        return figures.step_s

    answer_s = step_s(module, calls=300)
    asked = dict.fromkeys((*ONE_SHOT, *NEEDS_SPLIT), graph) | {name: {**module, "calls": 300} for name in OF_STRATEGIES}
    behind = {name: answer_s / found for name, given in asked.items() if (found := step_s(given, planner=name)) < answer_s}
    assert answer_s < float("inf") and all(ratio < 1 + 1e-9 for ratio in behind.values()), (model, cluster, batch, behind)
