"""Symptoms that users of other tools have reported: each name says what they saw, and none may be seen here."""

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor

import rlplace
from rlplace.plan.strategy import TARGETS
from rlplace.runtime.state.whole import whole_tensor
from tests.runtime.equality import strategy_plan
from tests.runtime.job import launch
from tests.runtime.strategy.native_cases import SHORT, SHORT_LLAMA, flat, stage

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

BATCH, LENGTH, WORDS = 8, 12, 48
SIZES = {"hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": WORDS}


POWERS = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
"""None of them a multiple of 3."""


def rope(kind, **sizes):
    """A decoder with rotary positions."""
    import transformers

    options = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": LENGTH, "pad_token_id": 0, **sizes}
    if kind == "Gemma3":
        options |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    config = getattr(transformers, f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config")
    return getattr(transformers, f"{kind}ForCausalLM")(config(**options, use_cache=False))


def gpt2():
    from tests.runtime import small_models

    return small_models.gpt2(n_head=4, vocab_size=WORDS, n_positions=LENGTH)[0]


def words(samples=BATCH, ragged=True):
    """Padded texts; of the last only two words count."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, WORDS, (samples, LENGTH), generator=generator)
    ends = torch.arange(samples) % 3 * 4 + 4 if ragged else torch.full((samples,), LENGTH)
    mask = (torch.arange(LENGTH) < ends[:, None]).long()
    labels = torch.where(mask == 1, ids, -100)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def pair(build, strategy, prepared=lambda model: None, **options):
    """The plain model, and the same one distributed."""
    torch.manual_seed(0)
    plain = build().double().train()
    prepared(plain)
    size = strategy["microbatch"][0]
    example = {name: value[:size] for name, value in words().items()}
    return plain, rlplace.distribute(copy.deepcopy(plain), strategy_plan(strategy), example, **options)


def step(plain, placed, *batches):
    """Largest differences of the gradients of all batches, relative to the largest of each parameter, and of their norms."""
    for batch in batches:
        (plain(**batch).loss / len(batches)).backward()
        (placed(**batch).loss / len(batches)).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False)}
    worst = 0.0
    for name, parameter in placed.named_parameters():
        assert (parameter.grad is None) == (wanted[name] is None), name
        if parameter.grad is not None:
            difference = whole_tensor(parameter.grad) - wanted[name]
            worst = max(worst, float(difference.abs().max() / wanted[name].abs().max().clamp_min(1e-12)))
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3))
    return worst, abs(float(placed.clip_grad_norm_(1e-3)) / norm - 1)


def chain(blocks, cut, mesh, sharding, microbatch=1):
    devices = [0, 1], [2, 3]
    stages = [stage(part, own, mesh, sharding) for part, own in zip((blocks[:cut], blocks[cut:]), devices, strict=True)]
    parts = {"batch": BATCH, "microbatch": [microbatch], "microbatches": [BATCH // 2 // microbatch], "schedule": "1f1b"}
    return parts | {"stages": stages}


def held(model):
    """Elements of the parameters that this process keeps between steps."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


def train_norms_alone(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)


NORMS = {
    "four replicas": {"replicate": 4},
    "replicas of shards": {"replicate": 2, "shard": 2},
    "shards of tensor pairs": {"shard": 2, "tensor": 2},
}


def four():
    """By thread what four processes find."""
    found, by_targets = {}, {"reduction": TARGETS}
    shared = {"shard": 2}
    for kind in ("Llama", "Gemma3"):
        placed = pair(lambda kind=kind: rope(kind), chain(SHORT_LLAMA, 2, shared, 1), **by_targets)
        found[kind] = step(*placed, words())
    found["tied"] = step(*pair(gpt2, chain(SHORT, 3, shared, 1)), words(ragged=False))
    found["tokens"] = step(*pair(gpt2, chain(SHORT, 3, shared, 1), **by_targets), words(), words(4))
    for name, mesh in NORMS.items():
        strategy = flat("short llama", mesh, int("shard" in mesh))
        found[name] = step(*pair(lambda: rope("Llama"), strategy), words(ragged=False))
    plain, placed = pair(lambda: rope("Llama"), flat("short llama", {"shard": 4}, 3), train_norms_alone)
    before = held(placed)
    found["frozen"] = *step(plain, placed, words(ragged=False)), before, held(placed), held(plain)
    return found


def three():
    strategy = flat("short llama", {"shard": 3}, 3, batch=9, devices=(0, 1, 2))
    plain, placed = pair(lambda: rope("Llama", **POWERS), strategy)
    return *step(plain, placed, words(9, ragged=False)), held(placed), held(plain)


@pytest.fixture(scope="module")
def found():
    return launch.run(4, four)[0]


@pytest.mark.parametrize("kind", ["Llama", "Gemma3"])
def test_a_model_with_rotary_positions_and_a_mask_runs_in_two_stages(found, kind):
    """pytorch #184361: any transformers model with RoPE fails in a pipeline, where gpt2 works."""
    assert max(found[kind]) < 1e-5


def test_a_tied_embedding_has_its_whole_gradient_in_two_stages_of_two_shards(found):
    """Megatron-LM #844: embedding and head are reduced to other replicas before they are added."""
    assert max(found["tied"]) < 1e-5


def test_gradients_of_stages_are_not_larger_by_the_number_of_tokens(found):
    """torchtitan #2972, #1733: undivided in a pipeline, and with accumulation an average of averages."""
    assert max(found["tokens"]) < 1e-5


@pytest.mark.parametrize("name", NORMS)
def test_the_norm_of_gradients_does_not_depend_on_the_number_of_processes(found, name):
    """torchtitan #2318, torchtune #2420: off by a factor of eight, of the tensor degree, of a root."""
    assert max(found[name]) < 1e-5


def test_frozen_weights_are_cut_like_those_that_are_trained(found):
    """litgpt #1262, pytorch #91165: a model whose adapters fit on one card is out of memory on two."""
    gradient, norm, before, after, whole = found["frozen"]
    assert max(gradient, norm) < 1e-5
    assert before == after <= 1.1 * whole / 4


def test_three_cards_share_a_model_that_three_does_not_divide():
    """LMOps #65, marin #1934: no width of the model is a multiple of 3."""
    gradient, norm, own, whole = launch.run(3, three)[0]
    assert max(gradient, norm) < 1e-5
    assert own <= 1.2 * whole / 3
