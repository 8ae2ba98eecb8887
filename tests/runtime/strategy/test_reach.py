"""Replicas whose samples reach unlike parameters and blocks."""

import pytest
import torch
from torch import nn

from rlplace.plan.strategy import Strategy
from rlplace.runtime.strategy.facts import examine
from rlplace.runtime.strategy.run import prepare
from rlplace.runtime.strategy.why_not import minor_version, why_not
from tests.runtime.job.launch import run

EXPERTS, WIDTH = 4, 6


class Mixture(nn.Module):
    """A layer whose experts are modules of their own, each with a scale; it calls those that some token chooses."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.scales = nn.ParameterList(torch.tensor(1.0 + n) for n in range(EXPERTS))

    def forward(self, x, chosen):
        out = torch.zeros_like(x)
        for number, (expert, scale) in enumerate(zip(self.experts, self.scales, strict=True)):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]).tanh() * scale)
        return x + out


class Model(nn.Module):
    """Two layers of experts; a sample with a flag calls a block more, between them."""

    def __init__(self, flagged):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Mixture() for _ in range(2))
        self.extra, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.flagged = flagged

    def forward(self, x, chosen, flag):
        x = self.layers[0](self.body(x), chosen)
        if not self.flagged or flag.any():
            x = self.extra(x)
        return self.head(self.layers[1](x, chosen)).square().mean()


BATCH = {
    "x": torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    "chosen": torch.tensor([0, 0, 1, 1, 1, 0, 0, 2]),  # by replica other experts, and the last by none
    "flag": torch.tensor([0, 0, 0, 0, 1, 0, 0, 0]),
}
BLOCKS = ["body", "layers.0", "extra", "layers.1", "head"]


def strategy(mesh, sharding, microbatches, halves=False):
    parts = [BLOCKS[:2], BLOCKS[2:]] if halves else [BLOCKS]
    devices = [[0, 1], [2, 3]] if halves else [[0, 1, 2, 3]]
    stages = [
        {"blocks": own, "devices": held, "mesh": mesh, "sharding": sharding} for own, held in zip(parts, devices, strict=True)
    ]
    degree = mesh.get("shard", 1) * mesh.get("replicate", 1)
    made = {"batch": 8, "microbatch": [8 // degree // microbatches], "microbatches": [microbatches], "stages": stages}
    return Strategy.from_dict(made | ({"schedule": "1f1b"} if halves else {}))


CASES = {
    "shares": (False, strategy({"shard": 4}, 3, 2)),
    "shares of replicas": (False, strategy({"replicate": 2, "shard": 2}, 2, 1)),
    "stages of replicas": (False, strategy({"replicate": 2}, 0, 2, halves=True)),
    "unlike blocks": (True, strategy({"shard": 4}, 1, 2)),
}


def trained():
    found = {}
    for case, (flagged, plan) in CASES.items():
        size = plan.pipelines[0].microbatch[0]
        model = prepare(Model(flagged).double(), plan, {name: value[:size] for name, value in BATCH.items()})
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            model(**BATCH).backward()
        own = {name: p.grad for name, p in model.named_parameters()}
        found[case] = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in own.items()}
    return found


@pytest.mark.slow
@pytest.mark.skipif(minor_version(torch.__version__) < (2, 13), reason="reduces unlike gradients since torch 2.13")
def test_replicas_that_reach_unlike_parameters_train_as_the_plain_model():
    wanted = {}
    for flagged in (False, True):
        plain = Model(flagged).double()
        for n in range(8):  # one sample after the other, as no replica sees the flags of others
            (plain(**{name: value[n : n + 1] for name, value in BATCH.items()}) / 8).backward()
        wanted[flagged] = {name: p.grad for name, p in plain.named_parameters()}
        assert wanted[flagged]["layers.0.experts.3.weight"] is None and wanted[flagged]["layers.1.scales.2"] is not None
    for found in run(4, trained):
        for case, gradients in found.items():
            for name, gradient in gradients.items():
                expected = wanted[CASES[case][0]][name]
                assert (gradient is None) == (expected is None), (case, name)
                if gradient is not None:
                    torch.testing.assert_close(gradient, expected, msg=lambda line, at=(case, name): f"{at}: {line}")


@pytest.mark.parametrize("flagged", [False, True])
def test_facts_say_whether_blocks_or_only_parameters_depend_on_values(flagged):
    facts = examine(Model(flagged).double(), {name: value[:2] for name, value in BATCH.items()})
    assert facts.skips and facts.branches == flagged
    shares, unlike = CASES["shares"][1], CASES["unlike blocks"][1]
    assert why_not(unlike, facts, "2.13.0") is None
    assert ("sharding=1" in (why_not(shares, facts, "2.13.0") or "")) == flagged
    assert "since torch 2.13" in (why_not(unlike, facts, "2.12.0") or "")
    assert "released gradients" in (why_not(unlike, facts, "2.13.0", release=True) or "")
