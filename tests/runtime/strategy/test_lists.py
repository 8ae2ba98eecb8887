"""Mixtures of a user's own that keep a list of experts, and loop over those that some token chooses."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rlplace.model.capture.capture import capture
from rlplace.plan.strategy import Strategy
from rlplace.runtime.state.training_state import load_checkpoint, save_checkpoint
from rlplace.runtime.state.whole import whole_tensor
from rlplace.runtime.strategy.facts import facts_of
from rlplace.runtime.strategy.run import prepare
from rlplace.runtime.strategy.why_not import minor_version
from rlplace.strategy.blocks.price import PricedBlocks
from rlplace.strategy.costs import EXPERT_ALL_TO_ALL, Cut
from tests.runtime.job.launch import run

EXPERTS, WIDTH, SAMPLES, POSITIONS = 4, 8, 8, 4


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH, bias=False), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).tanh())


class Mixture(nn.Module):
    """Two experts a token, by the weights of a softmax; the last expert is never chosen."""

    def __init__(self, weighed=False):
        super().__init__()
        self.router, self.weighed = nn.Linear(WIDTH, EXPERTS, bias=False), weighed
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        logits = self.router(flat)[:, :-1]
        weights, chosen = logits.softmax(-1).topk(2)
        weights = F.dropout(weights, 0.5, training=False)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if not len(row):
                continue
            scale = weights[row, place, None]
            out.index_add_(0, row, expert(flat[row] * scale) if self.weighed else expert(flat[row]) * scale)
        return out.view_as(x), logits.logsumexp(-1).square().mean()


class Layer(nn.Module):
    """Attention and a mixture, whose router has a loss of its own."""

    def __init__(self, weighed=False):
        super().__init__()
        self.norm, self.qkv, self.mixture = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), Mixture(weighed)

    def forward(self, x):
        query, key, value = self.qkv(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).reshape(x.shape)
        made, loss = self.mixture(self.norm(x))
        return x + made, loss


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList([Layer(), Layer(weighed=True)]), nn.Linear(WIDTH, 1)

    def forward(self, x):
        losses = []
        for layer in self.layers:
            x, loss = layer(x)
            losses.append(loss)
        return self.head(x).square().mean() + 0.1 * sum(losses)


BATCH = {"x": torch.randn(SAMPLES, POSITIONS, WIDTH, generator=torch.Generator().manual_seed(1)).double()}
PLANS = {
    "shares of two": ({"shard": 4}, 3, 2, "selective"),
    "no shares": ({"shard": 4}, 1, 4, "none"),
    "parts of positions": ({"replicate": 2, "context": 2}, 0, 2, "full"),
}


def plain():
    torch.manual_seed(0)
    return Model().double()


def strategy(mesh, sharding, expert, recompute):
    blocks = ["layers.0", "layers.1", "head"]
    again = {} if recompute == "none" else dict.fromkeys(blocks[:2], recompute)
    stage = {"mesh": mesh, "sharding": sharding, "expert": expert, "blocks": blocks, "devices": [0, 1, 2, 3]}
    sizes = {"batch": SAMPLES, "microbatch": [SAMPLES // 8 * mesh.get("context", 1)], "microbatches": [2]}
    how = {"context_method": "gather"} if "context" in mesh else {}
    return Strategy.from_dict(sizes | {"stages": [stage | how | {"recompute": again}]})


def advance(model, optimizer):
    """Every parameter, after a step with clipped gradients, and the gradients before it; none of what no token reaches."""
    optimizer.zero_grad()
    loss = model(**BATCH)
    loss.backward()
    found = {"loss": loss.detach()}
    found |= {f"{n}.grad": p.grad if p.grad is None else whole_tensor(p.grad).clone() for n, p in model.named_parameters()}
    clip = getattr(model, "clip_grad_norm_", lambda most: nn.utils.clip_grad_norm_(model.parameters(), most))
    found["norm"] = clip(0.5)
    optimizer.step()
    return found | {n: whole_tensor(p.detach()).clone() for n, p in model.named_parameters()}


def trained(folder):
    """By plan a step, and that after the checkpoint of the plan before it."""
    found, before = {}, None
    for case, how in PLANS.items():
        module = plain()
        model = prepare(module, strategy(*how), {"x": BATCH["x"][:1]})
        optimizer = torch.optim.AdamW(model.parameter_groups(), lr=0.1)
        first = advance(model, optimizer)
        if before is not None:
            load_checkpoint(before, model, optimizer)
        before = save_checkpoint(f"{folder}/{case}", model, optimizer, step=1)
        found[case] = first, advance(model, optimizer)
    return found


@pytest.mark.slow
@pytest.mark.skipif(minor_version(torch.__version__) < (2, 13), reason="reduces unlike gradients since torch 2.13")
def test_listed_experts_train_and_resume_as_the_plain_model(tmp_path):
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    wanted = advance(model, optimizer), advance(model, optimizer)
    assert wanted[0]["layers.0.mixture.experts.3.up.weight.grad"] is None
    seen = set()
    for found in run(4, trained, str(tmp_path)):
        for case, steps in found.items():
            for own, expected in zip(steps, wanted, strict=True):
                seen |= {(case, name) for name in own}
                for name, value in own.items():
                    torch.testing.assert_close(value, expected[name], msg=lambda line, at=(case, name): f"{at}: {line}")
    assert seen == {(case, name) for case in PLANS for name in wanted[0]}
    again = plain()
    state = torch.optim.AdamW(again.parameters(), lr=0.1)
    load_checkpoint(tmp_path / "shares of two" / "step-00000001", again, state)
    torch.testing.assert_close(advance(again, state)["norm"], wanted[1]["norm"])


class Chained(Mixture):
    """Experts that take what others return."""

    def forward(self, x):
        for expert in self.experts:
            x = x + expert(x)
        return x, x.mean()


class Counted(Mixture):
    def __init__(self):
        super().__init__()
        self._calls = 0

    def forward(self, x):
        self._calls += 1
        return super().forward(x)


class Written(Mixture):
    def forward(self, x):
        return super().forward(x.mul_(2))


class Opened(Mixture):
    def forward(self, x):
        return sum(expert.down(expert.up(x)) for expert in self.experts), x.mean()


def mixed(expert):
    """A mixture whose experts are others."""
    made = Mixture()
    made.experts = nn.ModuleList(expert() for _ in range(EXPERTS))
    return made


class Centered(Expert):
    def forward(self, x):
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Mixture, None),
        (Chained, "is called with what others return"),
        (Counted, "changes _calls, a plain attribute"),
        (Written, "writes to what it is called with"),
        (Opened, "cannot be called apart from it (AttributeError"),
        (lambda: mixed(lambda: nn.Linear(WIDTH, WIDTH)), None),
        (lambda: mixed(lambda: nn.BatchNorm1d(WIDTH)), "they have buffers"),
        (lambda: mixed(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))), "draws numbers"),
        (lambda: mixed(Centered), "mixes rows"),
    ],
)
def test_lists_are_spread_where_the_forward_can_run_twice(make, words):
    model = Model()
    model.layers[1].mixture = make()
    facts = facts_of(model, {"x": BATCH["x"].float()})
    assert facts.experts == EXPERTS and facts.listed == "layers.0.mixture.experts"
    assert words is None if facts.no_experts is None else words in facts.no_experts and "layers.1" in facts.no_experts


def test_prices_of_lists_by_hand():
    """Weights fall by the degree; the rows of all experts go out and come back once a pass, twice each."""
    model = plain().float()
    graph = capture(model, {"x": BATCH["x"].float()})
    blocks = PricedBlocks(graph, "h100:8")
    assert blocks.experts == EXPERTS
    own = sum(p.numel() for p in model.layers[0].mixture.experts.parameters()) * 4
    layer = blocks.names.index("layers.0")
    for degree in (2, 4):
        assert blocks.held(1, degree).expert_bytes[0, layer] == own // degree
        passes = blocks.passes(0, Cut(SAMPLES, expert=degree))
        assert (passes.collective_calls[:, EXPERT_ALL_TO_ALL, layer] == 2).all()
    one = blocks.passes(0, Cut(SAMPLES))
    assert passes.forward_s[layer] > one.forward_s[layer] and passes.kept_bytes[0, layer] == one.kept_bytes[0, layer]
