"""Experts that are spread over processes, in a module of a user's own whose loop looks at values."""

import functools

import pytest
import torch
from torch import nn

from rlplace.plan.strategy import Strategy
from rlplace.runtime.state.training_state import load_checkpoint, save_checkpoint
from rlplace.runtime.state.whole import whole_tensor
from rlplace.runtime.strategy.mixtures import Form, common_experts, form_of, why_no_experts
from rlplace.runtime.strategy.run import prepare
from rlplace.runtime.strategy.why_not import minor_version
from tests.runtime.job.launch import run

EXPERTS, WIDTH, INNER, SAMPLES = 4, 6, 5, 8


class Mixture(nn.Module):
    """Stacked experts, one of whose widths is odd; it calls those that some token chooses."""

    def __init__(self):
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, tokens, chosen_experts, weights):
        out = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            rows, choice = (chosen_experts == number).nonzero(as_tuple=True)
            if len(rows):
                made = (tokens[rows] @ self.up[number]).tanh() @ self.down[number] + self.bias[number]
                out = out.index_add(0, rows, made * weights[rows, choice, None])
        return out


class Turned(Mixture):
    """The same with arguments in another order, and wrapped by what passes them by position, as transformers' are."""

    def forward(self, x, router_weights, indices):
        return super().forward(x, indices, router_weights)

    wrapped = forward

    @functools.wraps(wrapped)
    def forward(self, *args):
        return Turned.wrapped(self, *args)


class Layer(nn.Module):
    def __init__(self, turned=False):
        super().__init__()
        self.router, self.experts, self.turned = nn.Linear(WIDTH, 2), Turned() if turned else Mixture(), turned

    def forward(self, x, chosen):
        weights = self.router(x).softmax(-1)
        return x + (self.experts(x, weights, chosen) if self.turned else self.experts(x, chosen, weights))


class Rows(nn.Module):
    """Stacked experts that take rows of one after the other, as llama4's; gates and values are halves of one product."""

    def __init__(self, mixes=False):
        super().__init__()
        self.num_experts, self.mixes = EXPERTS, mixes
        self.up, self.down = (
            nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER)),
            nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH)),
        )

    def forward(self, rows):
        gate, value = torch.bmm(rows.view(len(self.up), -1, WIDTH), self.up).chunk(2, -1)
        made = torch.bmm(gate.tanh() * value, self.down)
        return (made + made.mean(0, keepdim=True) if self.mixes else made).view(-1, WIDTH)


class Dense(nn.Module):
    """A layer that sends every token to every expert, weighed before."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Rows()

    def forward(self, x):
        weighed = x.repeat(EXPERTS, 1) * self.router(x).softmax(-1).T.reshape(-1, 1)
        return x + self.experts(weighed).view(EXPERTS, -1, WIDTH).sum(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Layer(), Dense(), Layer(turned=True)]), nn.Linear(WIDTH, 1)

    def forward(self, x, chosen):
        x = self.layers[2](self.layers[1](self.layers[0](x, chosen)), chosen + 2)
        return self.head(x).square().mean()


# All tokens choose experts of one half of the processes in the first layer, and of the other in the last.
BATCH = {
    "x": torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0)).double(),
    "chosen": torch.tensor([[0, 1], [1, 0]] * (SAMPLES // 2)),
}
BLOCKS = ["layers.0", "layers.1", "layers.2", "head"]
AXES = {
    "shares of two": ({"shard": 4}, 3, 2, 2),
    "no shares": ({"shard": 4}, 2, 4, 1),
    "copies": ({"replicate": 2, "shard": 2}, 1, 2, 2),
    "without": ({"shard": 4}, 1, 1, 1),
    "stages of unlike degrees": ({"shard": 2}, 1, (2, 1), 2),
}


def strategy(mesh, sharding, expert, microbatches):
    parts = [(BLOCKS, [0, 1, 2, 3], expert)]
    if isinstance(expert, tuple):
        parts = [(BLOCKS[:1], [0, 1], expert[0]), (BLOCKS[1:], [2, 3], expert[1])]
    common = {"mesh": mesh, "sharding": sharding}
    stages = [common | {"blocks": blocks, "devices": devices, "expert": degree} for blocks, devices, degree in parts]
    size = SAMPLES // len(parts[0][1]) // microbatches
    sizes = {"batch": SAMPLES, "microbatch": [size], "microbatches": [microbatches]}
    return Strategy.from_dict(sizes | {"stages": stages} | ({"schedule": "1f1b"} if len(stages) > 1 else {}))


def plain():
    torch.manual_seed(0)
    return Model().double()


def advance(model, optimizer):
    optimizer.zero_grad()
    loss = model(**BATCH)
    loss.backward()
    norm = (
        model.clip_grad_norm_(0.5) if hasattr(model, "clip_grad_norm_") else nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    )
    optimizer.step()
    return {"loss": loss.detach(), "norm": norm} | {n: whole_tensor(p.detach()).clone() for n, p in model.named_parameters()}


def trained(folder):
    """By case the step after one, saved and resumed under the next case's plan."""
    found, before = {}, None
    for case, axes in AXES.items():
        plan, module = strategy(*axes), plain()
        model = prepare(module, plan, {name: value[: plan.pipelines[0].microbatch[0]] for name, value in BATCH.items()})
        optimizer = torch.optim.AdamW(model.parameter_groups(), lr=0.1)
        if case == "shares of two":  # gathered while the block after them computes
            before_it = [one._get_fsdp_state() for one in (module.layers[0], module.layers[0].experts)]
            assert module.layers[1]._get_fsdp_state()._states_to_backward_prefetch == before_it
        first = advance(model, optimizer)
        if before is not None:
            load_checkpoint(before, model, optimizer)
        before = save_checkpoint(f"{folder}/{case}", model, optimizer, step=1)
        found[case] = first, advance(model, optimizer)
    return found


@pytest.mark.slow
@pytest.mark.skipif(minor_version(torch.__version__) < (2, 13), reason="reduces unlike gradients since torch 2.13")
def test_own_experts_train_and_resume_as_the_plain_model(tmp_path):
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    wanted = advance(model, optimizer), advance(model, optimizer)
    for found in run(4, trained, str(tmp_path)):
        for case, steps in found.items():
            for own, expected in zip(steps, wanted, strict=True):
                assert own.keys() <= expected.keys() and (case == "stages of unlike degrees" or len(own) == len(expected))
                for name, value in own.items():
                    torch.testing.assert_close(value, expected[name], msg=lambda line, at=(case, name): f"{at}: {line}")
    again = plain()
    state = torch.optim.AdamW(again.parameters(), lr=0.1)
    load_checkpoint(tmp_path / "shares of two" / "step-00000001", again, state)
    torch.testing.assert_close(advance(again, state)["layers.0.experts.up"], wanted[1]["layers.0.experts.up"])


def test_modules_of_experts_are_known_by_their_weights_and_their_forward():
    class Other(Mixture):
        def forward(self, tokens, mask, weights):
            return tokens

    assert common_experts(Model()) == EXPERTS and form_of(Mixture()) == Form("tokens", "chosen_experts", "weights")
    assert form_of(Turned()) == Form("x", "indices", "router_weights")
    assert form_of(Rows()) == Form("rows") and form_of(Rows(mixes=True)) is None
    assert why_no_experts(Model(), {}) is None
    assert form_of(Other()) is None and form_of(Layer()) is None and common_experts(nn.Linear(2, 2)) == 0
