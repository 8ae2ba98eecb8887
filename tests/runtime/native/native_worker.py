"""What runs in the processes of the tests: small models under a strategy, compared with the plain model on the whole batch."""

from __future__ import annotations

import time
import traceback

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rlplace.plan.strategy import Strategy
from rlplace.runtime.native.run import prepare

BATCH, LENGTH, VOCABULARY = 8, 6, 64


def llama(layers=4):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=VOCABULARY, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2(layers=4):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=32, n_head=4, n_positions=32, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0,
        use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


MODELS = {"llama": llama, "gpt2": gpt2}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().double().train()


def batch():
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids}


def loss(output, part):
    # The model's own loss computes in float32.
    return torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), part["input_ids"][:, 1:].flatten())


def plain_run(name, steps=3):
    """Loss and gradients of the first step, parameters after `steps`."""
    model = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(model(**batch()), batch())
        value.backward()
        if step == 0:
            first = value.item(), {n: p.grad.clone() for n, p in model.named_parameters(remove_duplicate=False)}
        optimizer.step()
    return *first, {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def difference(own, wanted):
    """Largest relative difference over tensors."""
    largest = 0.0
    for name, value in own.items():
        other = wanted[name]
        largest = max(largest, ((value - other).abs().max() / other.abs().max().clamp_min(1e-12)).item())
    return largest


def run_case(name, strategy, plain, steps=3):
    strategy = Strategy.from_dict(strategy)
    native = prepare(make(name), strategy, {k: v[: strategy.pipelines[0].microbatch[0]] for k, v in batch().items()})
    optimizer = torch.optim.AdamW(native.parameter_groups(), lr=1e-2, foreach=True)
    value, gradients, parameters = plain
    result = {}
    for step in range(steps):
        optimizer.zero_grad()
        own = native.step(native.own_samples(batch()), loss)
        if step == 0:
            result["loss"] = abs(own.item() - value) / abs(value)
            result["missing"] = [n for n, p in native.named_parameters() if p.grad is None]
            result["grad"] = difference(
                {n: whole(p.grad) for n, p in native.named_parameters() if p.grad is not None}, gradients
            )
            result["names"] = sorted(n for n, _ in native.named_parameters())
        optimizer.step()
    result["param"] = difference({n: whole(p.detach()) for n, p in native.named_parameters()}, parameters)
    return result


def run_cases(cases):
    """Results by case, or the traceback of the first that failed: a failed case leaves the others waiting."""
    plain, results = {}, {}
    for key, (name, strategy) in cases.items():
        if name not in plain:
            plain[name] = plain_run(name)
        try:
            start = time.monotonic()
            results[key] = run_case(name, strategy, plain[name])
            results[key]["s"] = time.monotonic() - start
        except Exception:
            results[key] = traceback.format_exc()
            if dist.get_rank() == 0:
                print(key, results[key], flush=True)
            raise
    return results
