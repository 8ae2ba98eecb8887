"""Processes that run on parts of the positions give the loss, the gradients and the trained parameters of the plain model."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import TARGETS, Strategy
from rlplace.runtime.base.model import Batching
from rlplace.runtime.job.distribute import parallelize
from rlplace.runtime.state.whole import whole_tensor
from rlplace.runtime.strategy.attention import NO_RING
from rlplace.runtime.strategy.blocks import block_names
from rlplace.runtime.strategy.capture import capture
from rlplace.runtime.strategy.context_facts import context_facts
from rlplace.runtime.strategy.fact_records import Conduct
from rlplace.runtime.strategy.run import prepare
from tests.runtime import small_models
from tests.runtime.job.launch import run
from tests.runtime.strategy.native_worker import decoder, difference, mixture

pytest.importorskip("transformers")

BATCH, LENGTH = 8, 16


def double_loss(logits, labels, vocab_size, shifts=True, **_):
    """The loss of transformers, which is computed in single precision there."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:] if shifts else labels
    return F.cross_entropy(logits.view(-1, vocab_size), labels.reshape(-1))


def causal(module):
    module.loss_function = double_loss
    return module


LATENT = {
    "first_k_dense_replace": 2, "q_lora_rank": 8, "kv_lora_rank": 8,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip

MODELS = {
    "llama": lambda: causal(small_models.llama(layers=2)[0]),
    "gpt2": lambda: causal(small_models.gpt2(n_head=4)[0]),
    "mixtral": lambda: causal(mixture("mixtral", num_local_experts=4)),
    "bert": lambda: small_models.bert(layers=2)[0],
    "bare bert": lambda: small_models.bert(layers=2)[0],
    "bare qwen3": lambda: causal(decoder("qwen3", 2, head_dim=8)),
    "bare latent": lambda: causal(decoder("deepseek_v3", **LATENT)),
    "bare llama": lambda: causal(small_models.llama(layers=2)[0]),
}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().double().train()


def batch(name):
    draws = torch.Generator().manual_seed(1)
    ids, lengths = (
        torch.randint(1, 64, (BATCH, LENGTH), generator=draws),
        torch.randint(3, LENGTH + 1, (BATCH, 1), generator=draws),
    )
    held = torch.arange(LENGTH) < lengths
    made = {"input_ids": ids, "labels": torch.where(held, ids, -100)}
    return made if name == "gpt2" or "bare" in name else made | {"attention_mask": held.long()}


def plan(mesh, sharding=0, microbatches=1, recompute=None, expert=1, method="gather", schedule=None):
    degree = mesh.get("replicate", 1) * mesh.get("shard", 1)
    return {
        "mesh": mesh,
        "sharding": sharding,
        "microbatches": microbatches,
        "recompute": recompute,
        "degree": degree,
        "expert": expert,
        "method": method,
        "schedule": schedule,
    }


CASES = {
    "copies of four parts": ("gpt2", plan({"context": 4})),
    "shares of parts of the same samples, recomputed": ("gpt2", plan({"context": 4}, 3, recompute="full", method="heads")),
    "copies of shares of parts, padded": ("bert", plan({"replicate": 2, "context": 2}, 2, microbatches=2)),
    "copies, recomputed": ("llama", plan({"replicate": 2, "context": 2}, microbatches=2, recompute="full")),
    "shares, padded": ("llama", plan({"shard": 2, "context": 2}, 3, recompute="selective")),
    "shares, full attention, padded": ("bert", plan({"shard": 2, "context": 2}, 1, microbatches=2)),
    "experts of parts": ("mixtral", plan({"shard": 2, "context": 2}, 3, recompute="full", expert=4)),
    "experts of parts of all": ("mixtral", plan({"shard": 2, "context": 2}, 1, microbatches=2, expert=2)),
    "experts of parts of a tensor group": ("mixtral", plan({"context": 2, "tensor": 2}, expert=4)),
    "experts of parts, copied": ("mixtral", plan({"replicate": 2, "context": 2}, expert=2)),
    "tensor groups": ("llama", plan({"context": 2, "tensor": 2})),
    "heads of four parts, recomputed": ("gpt2", plan({"context": 4}, recompute="full", method="heads")),
    "heads of shares, padded, shared": ("llama", plan({"shard": 2, "context": 2}, 3, recompute="selective", method="heads")),
    "heads of more parts than there are keys": ("bare llama", plan({"context": 4}, method="heads")),
    "heads, full attention, padded": ("bert", plan({"context": 2, "tensor": 2}, microbatches=2, method="heads")),
    "a ring of four, recomputed": ("gpt2", plan({"context": 4}, recompute="selective", method="ring")),
    "a ring of shares, full attention": ("bare bert", plan({"shard": 2, "context": 2}, 1, microbatches=2, method="ring")),
    "a ring of tensor groups": ("bare llama", plan({"context": 2, "tensor": 2}, recompute="full", method="ring")),
    "a ring, shared keys": ("bare llama", plan({"replicate": 2, "context": 2}, method="ring")),
    "a ring of values narrower than queries": ("bare latent", plan({"context": 4}, recompute="full", method="ring")),
    "stages, padded": ("llama", plan({"context": 2}, microbatches=4, schedule="1f1b")),
    "stages, shares of parts beside copies": ("gpt2", plan({"context": 2}, (1, 0), microbatches=4, schedule="1f1b")),
    "stages, recomputed": ("gpt2", plan({"context": 2}, microbatches=4, recompute="full", schedule="gpipe")),
    "stages, heads, full attention, padded": (
        "bert",
        plan({"context": 2}, microbatches=4, method="heads", schedule="interleaved_zero_bubble"),
    ),
    "stages in a v, a ring": ("bare qwen3", plan({"context": 2}, microbatches=4, method="ring", schedule="zbv")),
}


def strategy(name, mesh, sharding, microbatches, recompute, degree, expert, method, schedule):
    blocks = block_names(make(name))
    layers = [block for block in blocks if block[-1].isdigit()]
    common = {"mesh": mesh, "expert": expert, "context_method": method}
    bounds, devices = [], [[0, 1, 2, 3]]
    if schedule:
        bounds, devices = [blocks.index(layers[1])], [[0, 1], [2, 3]]
    if schedule == "zbv":  # tables, a layer, a layer, the head
        bounds, devices = [bounds[0] - 1, *bounds, bounds[0] + 1], [*devices, *devices[::-1]]
    parts = [blocks[a:b] for a, b in pairwise([0, *bounds, len(blocks)])]
    levels = sharding if isinstance(sharding, tuple) else [sharding] * len(parts)
    own = zip(parts, devices, levels, strict=True)
    stages = [common | {"blocks": list(part), "devices": place, "sharding": level} for part, place, level in own]
    for stage in stages:
        stage["recompute"] = {block: recompute for block in stage["blocks"] if block in layers} if recompute else {}
    sizes = {"batch": BATCH, "microbatch": [BATCH // degree // microbatches], "microbatches": [microbatches]}
    return Strategy.from_dict({**sizes, "schedule": schedule, "stages": stages, "reduction": TARGETS})


def steps_of(model, inputs):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # no state that enlarges gradients of rounding
    for step in range(3):
        optimizer.zero_grad()
        value = model(**inputs).loss
        value.backward()
        if not step:
            gradients = {name: whole_tensor(p.grad) for name, p in model.named_parameters(remove_duplicate=False)}
            first = value.item()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        logits = model(**inputs).logits
    return (
        first,
        gradients,
        {name: whole_tensor(p.detach()) for name, p in model.named_parameters(remove_duplicate=False)},
        logits,
    )


def parts():
    found = {}
    for case, (name, options) in CASES.items():
        made = strategy(name, **options)
        inputs = {key: value[: made.pipelines[0].microbatch[0]] for key, value in batch(name).items()}
        model = prepare(make(name), made, inputs, batching=Batching("global", (), TARGETS))
        found[case] = steps_of(model, batch(name))
    return found


@pytest.mark.slow
def test_parts_of_the_positions_train_as_the_plain_model():
    wanted = {name: steps_of(make(name), batch(name)) for name in MODELS}
    for found in run(4, parts):
        for case, (loss, gradients, parameters, logits) in found.items():
            expected = wanted[CASES[case][0]]
            figures = {
                "loss": abs(loss - expected[0]), "gradients": difference(gradients, expected[1]),
                "parameters": difference(parameters, expected[2]), "logits": float((logits - expected[3]).abs().max()),
            }  # fmt: skip
            # Norms of llama compute in single precision, and gradients that counts of targets scale round otherwise there.
            limit = 1e-5 if CASES[case][0] in ("llama", "mixtral", "bare llama", "bare qwen3", "bare latent") else 1e-8
            assert max(figures.values()) < limit, (case, figures)


class Block(nn.Module):
    """Attention of one head, with something besides."""

    def __init__(self, besides):
        super().__init__()
        self.products, self.besides = nn.Linear(8, 24), besides

    def forward(self, x):
        if self.besides == "positions":
            x = x + torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10
        if self.besides == "mean":
            x = x + x.mean(1, keepdim=True)
        if self.besides == "neighbours":
            x = x + x.roll(1, 1)
        return x + F.scaled_dot_product_attention(*self.products(x).chunk(3, -1), is_causal=True)


class Own(nn.Module):
    """A model whose loss is over positions, or over samples."""

    def __init__(self, besides=""):
        super().__init__()
        self.embed, self.places, self.layers = nn.Embedding(9, 8), nn.Embedding(8, 8), nn.ModuleList([Block(besides)])
        self.head, self.besides = nn.Linear(8, 9), besides

    def forward(self, input_ids):
        x = self.head(self.layers[0](self.embed(input_ids) + self.places(torch.arange(input_ids.shape[1]))))
        if self.besides == "first":
            return F.cross_entropy(x[:, 0], input_ids[:, 0])
        if self.besides == "counts":  # a record has the number of all
            x = x.flatten(0, 1)
            return F.cross_entropy(x, input_ids.roll(-1, 1).flatten(), reduction="sum") / len(x)
        return F.cross_entropy(x.flatten(0, 1), input_ids.roll(-1, 1).flatten())


@pytest.mark.parametrize("unseen", [None, "too large"])
@pytest.mark.parametrize("besides", ["", "positions", "mean", "neighbours", "first"])
def test_what_mixes_positions_is_refused_by_values_and_by_ops(besides, unseen):
    torch.manual_seed(0)
    inputs = {"input_ids": torch.randint(0, 9, (2, 8))}
    facts = context_facts(Own(besides), inputs, Conduct(reduction=TARGETS, unseen=unseen))
    assert (facts.no_context is None) == (besides == ""), facts
    assert besides or facts.positions == 8


def test_a_million_positions_are_planned_without_a_mask_of_all():
    model, _, _ = small_models.llama()
    inputs = {name: torch.zeros(1, 1 << 20, dtype=torch.long, device="meta") for name in ("input_ids", "labels")}
    facts = context_facts(model.to("meta"), inputs, Conduct(reduction=TARGETS, unseen="too large"))
    assert (facts.no_context, facts.positions) == (None, 1 << 20)


@pytest.mark.parametrize("unseen", [None, "too large"])
def test_several_sequences_are_refused_as_such_where_they_are_as_long(unseen):
    model, inputs, _ = small_models.t5()
    facts = context_facts(model, inputs, Conduct(reduction=TARGETS, unseen=unseen))
    assert inputs["input_ids"].shape == inputs["labels"].shape
    assert facts.no_context == "its attention is over several sequences: decoder.block.0 attends to another than its own"


@pytest.mark.parametrize("besides", ["", "counts"])
def test_a_record_that_holds_numbers_of_whole_sequences_is_refused_in_pipelines(besides):
    torch.manual_seed(0)
    model, inputs = Own(besides), {"input_ids": torch.randint(0, 9, (2, 8))}
    facts = context_facts(model, inputs, Conduct(), capture(model, inputs))
    assert facts.no_context is None
    assert ("loss of two parts" in str(facts.no_stages)) == bool(besides), facts


def test_loops_of_others_are_refused():
    made = strategy("gpt2", **CASES["copies of four parts"][1])
    with pytest.raises(InputError, match="unlike numbers of targets"):
        parallelize(make("gpt2"), PlacementPlan("0" * 64, "mine", 0, [], strategy=made), batch("gpt2"))


def test_packed_documents_and_positions_are_those_of_the_whole():
    torch.manual_seed(0)
    ids, places = torch.randint(1, 64, (2, 8)), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 0, 1]])
    inputs = {"input_ids": ids, "labels": ids, "position_ids": places}
    facts = context_facts(small_models.llama(layers=2)[0], inputs, Conduct(reduction=TARGETS))
    assert (facts.no_context, facts.positions, facts.no_ring) == (None, 8, NO_RING)


@pytest.mark.parametrize("unseen", [None, "too large"])
def test_as_many_positions_as_the_width_of_a_mixture_are_told_apart(unseen):
    """A mixture flattens its tokens to rows of the model's width, which names no positions."""
    torch.manual_seed(0)
    model, _, _ = small_models.mixtral()
    ids = torch.randint(1, 64, (2, model.config.hidden_size))
    facts = context_facts(model, {"input_ids": ids, "labels": ids}, Conduct(reduction=TARGETS, unseen=unseen))
    assert (facts.no_context, facts.positions) == (None, model.config.hidden_size)
