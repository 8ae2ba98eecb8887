"""What runs in the processes of the tests: small models under a strategy, compared with the plain model on the whole batch."""

from __future__ import annotations

import contextlib
import time
import traceback
from unittest import mock

import torch
import torch.distributed as dist

from rlplace.plan.strategy import Strategy
from rlplace.runtime.state.whole import whole_tensor
from rlplace.runtime.strategy.pipeline import StageModule
from rlplace.runtime.strategy.run import prepare
from tests.runtime import small_models

BATCH, LENGTH, VOCABULARY = 8, 6, 64
LARGEST_NORM = 0.5


class Doubled(torch.autograd.Function):
    """Has a gradient of its own, which export would lose."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Branching(torch.nn.Linear):
    """Looks at values, which export cannot follow, and has a parameter without dimensions."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.gain = torch.nn.Parameter(torch.tensor(0.9))

    def forward(self, x):
        x = super().forward(x) * self.gain
        return Doubled.apply(x) if x.abs().max() > 0 else x.relu()


class Table(torch.nn.Module):
    """Returns a view of its parameter."""

    def __init__(self, *sizes):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(*sizes))

    def forward(self, samples):
        return self.weight.expand(samples, -1, -1)


class Lent(torch.nn.Module):
    """Calls one of its blocks, reads the weight of another that it never calls, and writes on what a third one returns."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 8)
        self.queries = torch.nn.Embedding(LENGTH, 8)
        self.places, self.layers = Table(LENGTH, 8), torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.spare = torch.nn.Parameter(torch.zeros(0, 8))
        self.head = torch.nn.Linear(8, VOCABULARY)

    def forward(self, input_ids):
        from transformers.modeling_outputs import CausalLMOutput

        x = self.embed(input_ids)
        x[:, 0] = 0.1
        x = x + self.queries.weight.unsqueeze(0) + self.spare.sum() + self.places(len(x))
        for layer in self.layers:
            x = layer(x).tanh() + x @ self.layers[0].weight
        return CausalLMOutput(logits=self.head(x))


class Own(torch.nn.Module):
    """A model as users write them; a parameter is read between blocks."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 8)
        self.layers = torch.nn.ModuleList(Branching(8, 8) for _ in range(4))
        self.scale = torch.nn.Parameter(torch.full((8,), 0.1))
        self.temperature = torch.nn.Parameter(torch.tensor(1.3))
        self.head = torch.nn.Linear(8, VOCABULARY)

    def forward(self, input_ids):
        from transformers.modeling_outputs import CausalLMOutput

        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x) + x
        return CausalLMOutput(logits=self.head(x * self.scale) * self.temperature)


def decoder(kind, kv_heads=4, **sizes):
    """Two layers of four heads."""
    from rlplace.model.zoo import load_model

    text = f"hf:{kind},num_hidden_layers=2,hidden_size=32,intermediate_size=64,num_attention_heads=4"
    named = "".join(f",{key}={value}" for key, value in {"num_key_value_heads": kv_heads, **sizes}.items())
    return load_model(f"{text}{named},vocab_size={VOCABULARY}", batch=1, seq=LENGTH, device="cpu").module


def frozen_ends():
    """A llama of which a tower at the front, a half of a block and the head are frozen."""
    model = small_models.llama(layers=4, kv_heads=4)[0]
    frozen = (model.model.embed_tokens, *model.model.layers[:2], model.model.layers[2].mlp, model.lm_head)
    for module in frozen:
        module.requires_grad_(False)
    return model


def with_adapters(*targets):
    """A frozen llama with adapters beside products."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False)
    return get_peft_model(small_models.llama(layers=4, kv_heads=4)[0], config)


def with_packed_weights():
    """The same with frozen weights of 8 bits."""
    from rlplace.model.quantize import quantize

    model = with_adapters("q_proj", "down_proj")
    return quantize(model, "int8", [model.get_output_embeddings()])


def mixture(kind, **sizes):
    """Two layers of a decoder with four experts; products of groups of them have no kernel in double precision."""
    model = decoder(kind, 2, num_experts_per_tok=2, **sizes)
    model.config._experts_implementation = "batched_mm"
    return model


MODELS = {
    "mixtral": lambda: mixture("mixtral", num_local_experts=4),
    "qwen2_moe": lambda: mixture("qwen2_moe", num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16),
    "qwen3_moe": lambda: mixture("qwen3_moe", num_experts=4, moe_intermediate_size=16),
    "packed": with_packed_weights,
    "frozen ends": frozen_ends,
    "adapters": lambda: with_adapters("q_proj", "v_proj", "o_proj", "down_proj"),
    "adapters of columns": lambda: with_adapters("q_proj", "up_proj"),
    "qwen3": lambda: decoder("qwen3", head_dim=8),
    "grouped": lambda: decoder("llama", kv_heads=2),
    "phi": lambda: decoder("phi", resid_pdrop=0.0, embd_pdrop=0.0),
    "llama": lambda: small_models.llama(layers=4, kv_heads=4)[0],
    "eight": lambda: small_models.llama(layers=8, kv_heads=4)[0],
    "gpt2": lambda: small_models.gpt2(n_layer=4, n_head=4)[0],
    "short": lambda: small_models.gpt2(n_head=4)[0],
    "t5": lambda: small_models.t5(layers=2, heads=4)[0],
    "own": Own,
    "lent": Lent,
}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().double().train()


def batch(name):
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "decoder_input_ids": ids.flip(0)} if name == "t5" else {"input_ids": ids}


def loss(output, part):
    # The model's own loss computes in float32.
    return torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), part["input_ids"][:, 1:].flatten())


def plain_run(name, steps=3):
    """Loss and gradients of the first step, parameters after `steps`."""
    model = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(model(**batch(name)), batch(name))
        value.backward()
        if step == 0:
            named = model.named_parameters(remove_duplicate=False)
            first = value.item(), {n: p.grad.clone() for n, p in named if p.requires_grad}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
    return *first, norm, {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}


def difference(own, wanted, times=1):
    """Largest relative difference over tensors."""
    largest = 0.0
    for name, value in own.items():
        other = times * wanted[name]
        if value.numel():
            largest = max(largest, ((value - other).abs().max() / other.abs().max().clamp_min(1e-12)).item())
    return largest


def own_gradients(native):
    return {n: whole_tensor(p.grad) for n, p in native.named_parameters() if p.grad is not None}


@contextlib.contextmanager
def gathering():
    """A list of what runs inside, in order: gathers of parameters, and forwards of stages."""
    name, ran = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor", []
    gather = getattr(dist, name)
    hook = torch.nn.modules.module.register_module_forward_pre_hook(
        lambda module, _: ran.append("stage") if isinstance(module, StageModule) else None
    )
    with mock.patch.object(dist, name, lambda *args, **kwargs: ran.append("gather") or gather(*args, **kwargs)):
        yield ran
    hook.remove()


def run_case(name, strategy, plain, steps=3):
    strategy = Strategy.from_dict(strategy)
    native = prepare(make(name), strategy, {k: v[: strategy.pipelines[0].microbatch[0]] for k, v in batch(name).items()})
    optimizer = torch.optim.AdamW(native.parameter_groups(), lr=1e-2, foreach=name != "own", fused=name == "own")
    value, gradients, last_norm, parameters = plain
    result = {}
    for step in range(steps):
        optimizer.zero_grad()
        own = native.step(batch(name), loss)
        if step == 0:
            result["loss"] = abs(own.item() - value) / abs(value)
            result["missing"] = [n for n, p in native.named_parameters() if (p.grad is None) == p.requires_grad]
            result["grad"] = difference(own_gradients(native), gradients)
            with gathering() as result["ran"]:
                native.step(batch(name), loss)
            result["twice"] = difference(own_gradients(native), gradients, 2)
            for parameter in filter(lambda parameter: parameter.requires_grad, native.parameters()):
                parameter.grad.mul_(0.5)
            result["state"] = sorted(native.state_dict())
            result["names"] = sorted(n for n, _ in native.named_parameters())
        norm = native.clip_grad_norm_(LARGEST_NORM)
        optimizer.step()
    result["norm"] = abs(norm.item() - last_norm.item()) / last_norm.item()
    result["param"] = difference({n: whole_tensor(p.detach()) for n, p in native.named_parameters()}, parameters)
    return result


def run_cases(cases):
    """Results by case, or the traceback of the first that failed: a failed case leaves the others waiting."""
    plain, results = {}, {}
    for key, (name, strategy) in cases.items():
        if name not in plain:
            plain[name] = plain_run(name)
        try:
            start = time.process_time()
            results[key] = run_case(name, strategy, plain[name])
            results[key]["s"] = time.process_time() - start
        except Exception:
            results[key] = traceback.format_exc()
            if dist.get_rank() == 0:
                print(key, results[key], flush=True)
            raise
    return results
