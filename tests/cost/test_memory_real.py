"""Replayed memory against real training steps on the CPU, every storage counted as it comes and goes, and textbook formulas."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from rlplace.cost import price
from rlplace.cost.footprint import MemoryOptions, footprint
from rlplace.model.capture.capture import capture
from rlplace.model.zoo import load_model
from rlplace.plan import PlacementPlan
from tests.cost.live_bytes import LiveBytes, layer_bytes, step

EXACT = MemoryOptions(workspace_bytes=0, steps=1)
OUTSIDE = ("slack", "context", "communication")

MODELS = {
    "hf:gpt2,n_layer=2,n_embd=128,n_head=4,vocab_size=1000,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0": (4, 128),
    "hf:bert,num_hidden_layers=2,hidden_size=128,num_attention_heads=4,intermediate_size=512,vocab_size=1000,"
    "hidden_dropout_prob=0,attention_probs_dropout_prob=0": (4, 128),
    "hf:t5,num_layers=2,d_model=128,d_ff=512,num_heads=4,d_kv=32,vocab_size=1000,dropout_rate=0": (4, 64),
    "hf:resnet,depths=1/1/1/1": (2, 1),
    "zoo:inception": (2, 64),
}


def build(spec, batch, seq, device="cpu"):
    torch.manual_seed(0)
    loaded = load_model(spec, batch=batch, seq=seq, device=device)
    return loaded.module, loaded.example_inputs


def real_peak(module, inputs, autocast=None):
    """Returns the peak of forward and backward."""
    live = LiveBytes()
    for tensor in [*module.parameters(), *module.buffers(), *(leaf for leaf in tree_leaves(inputs) if torch.is_tensor(leaf))]:
        live.add(tensor)
    with live:
        step(module, inputs, autocast)
    return live.peak


def replayed(module, inputs, **options):
    """Returns the peak by capture and replay, in the order of the program; and the graph."""
    graph = capture(module, inputs, optimizer="sgd", **options)
    problem = price(graph, "cpu:1", level="op")
    plan = PlacementPlan(
        problem.fingerprint, "test", 0, np.zeros(problem.num_groups, dtype=np.int32), order=[list(range(problem.num_ops))]
    )
    (item,) = footprint(problem, plan, graph=graph, options=EXACT)
    return sum(size for part, size in item.parts.items() if part not in OUTSIDE), graph


@pytest.mark.slow
@pytest.mark.parametrize("spec", MODELS, ids=lambda spec: spec.partition(",")[0])
def test_peak_of_a_step(spec):
    """Exact, but for a few small tensors of transformers, and for buffers of convolutions."""
    batch, seq = MODELS[spec]
    real = real_peak(*build(spec, batch, seq))
    found, _ = replayed(*build(spec, batch, seq, "meta"))
    assert found == pytest.approx(real, rel=0.03 if "resnet" in spec else 0.01)
    assert found >= real * 0.999
    if spec.startswith("zoo"):
        assert found == pytest.approx(real, abs=16)


@pytest.mark.slow
def test_peak_under_autocast():
    spec, (batch, seq) = next(iter(MODELS.items()))
    real = real_peak(*build(spec, batch, seq), autocast=torch.bfloat16)
    plain = real_peak(*build(spec, batch, seq))
    found, graph = replayed(*build(spec, batch, seq, "meta"), autocast="bf16", autocast_device="cpu")
    assert real < 0.8 * plain
    assert found == pytest.approx(real, abs=1 << 14)  # a scalar or two of the loss
    assert graph.capture["autocast"] == "bfloat16" and graph.capture["dtype"] == "float32"
    kinds = dict(zip(graph.op_names, graph.op_dtype, strict=True))
    assert kinds["lm_head/linear"] == "bfloat16"


class Net(nn.Module):
    """A product, a norm, a softmax and a loss."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(64, 64, bias=False), nn.LayerNorm(64)

    def forward(self, x):
        return (self.norm(self.linear(x)).softmax(-1) @ self.linear.weight).pow(2).sum()


@pytest.mark.parametrize("method", ["export", "dispatch"])
def test_autocast_follows_the_list_of_the_device(method):
    inputs = (torch.zeros(128, 64),)
    dtypes = {}
    for device in ("cuda", "cpu"):
        graph = capture(Net(), inputs, autocast="bf16", autocast_device=device, method=method)
        dtypes[device] = {
            t.split(".")[1]: d for t, d, p in zip(graph.op_target, graph.op_dtype, graph.op_phase, strict=True) if p == 0
        }
        assert all(p.dtype == "float32" and p.optimizer_bytes == 2 * p.size_bytes for p in graph.parameters)
    # CUDA runs norms, softmax and powers in float32; the CPU leaves them in bfloat16.
    norm = "layer_norm" if method == "export" else "native_layer_norm"
    softmax = "softmax" if method == "export" else "_softmax"
    assert (dtypes["cuda"][norm], dtypes["cuda"][softmax]) == ("float32", "float32")
    assert (dtypes["cpu"][norm], dtypes["cpu"][softmax]) == ("bfloat16", "bfloat16")
    # Afterwards autocast on the CPU is torch's own again.
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.zeros(2, 2, dtype=torch.bfloat16).softmax(-1).dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_checkpoints_itself(reentrant):
    spec = "hf:gpt2,n_layer=4,n_embd=128,n_head=4,vocab_size=1000"  # with dropout: the second forward must be like the first

    def checkpointed(device):
        module, inputs = build(spec.replace("1000", "1000,resid_pdrop=0,embd_pdrop=0,attn_pdrop=0"), 4, 128, device)
        enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
        enable({"use_reentrant": reentrant})
        return module, inputs

    real = real_peak(*checkpointed("cpu"))
    found, graph = replayed(*checkpointed("meta"))
    plain, whole = replayed(*build(spec, 4, 128, "meta"))
    assert found == pytest.approx(real, rel=0.03)
    assert found < 0.5 * plain
    assert graph.capture["method"] == "dispatch" and "checkpoints activations" in graph.capture["notes"][0]
    # One more forward of the four layers: about a third of a step's work on them.
    assert 1.15 < graph.op_flops.sum() / whole.op_flops.sum() < 1.34


@pytest.mark.parametrize(("kernel", "arguments"), [("foreach", {"foreach": True}), ("single", {"foreach": False})])
@pytest.mark.parametrize(
    ("name", "optimizer"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)]
)
def test_what_an_update_holds_for_a_moment(kernel, arguments, name, optimizer):
    module = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    loss = module(torch.ones(1, 256)).sum()
    loss.backward()
    stepper = optimizer(module.parameters(), lr=0.1, **arguments)
    stepper.step()  # state is there now
    live = LiveBytes()
    for weight in module.parameters():
        for tensor in (weight, weight.grad, *stepper.state[weight].values()):
            if tensor is not None:
                live.add(tensor)
    held = live.now
    with live:
        stepper.step()
    problem = price(capture(module, (torch.ones(1, 256),), loss=lambda y: y.sum(), optimizer=name), "cpu:1")
    options = MemoryOptions(optimizer_kernel=kernel, workspace_bytes=0)
    (item,) = footprint(problem, [0] * problem.num_groups, options=options)
    assert item.parts["temporaries"] == pytest.approx(live.peak - held, rel=0.02, abs=2048)


S, B, H, A = 256, 2, 96, 6
GPT2 = f"hf:gpt2,vocab_size=500,n_embd={H},n_head={A},activation_function=gelu"


@pytest.mark.slow
def test_activations_of_a_layer_with_unfused_attention():
    """Korthikanti et al. (2022): s b h (34 + 5 a s / h); the norms' statistics (2 x 2 x 4 bytes a token) are not in it."""
    found = layer_bytes(f"{GPT2},attn_implementation=eager", B, S, "n_layer", dtype="bf16") / (S * B * H)
    assert found == pytest.approx(34 + 5 * A * S / H, abs=16 / H + 0.01)


@pytest.mark.slow
def test_activations_of_a_layer_with_fused_attention():
    """No scores and masks; instead the log-sum-exp."""
    found = layer_bytes(GPT2, B, S, "n_layer", dtype="bf16") / (S * B * H)
    assert found == pytest.approx(34 + 4 * A / H, abs=16 / H + 0.01)


def test_activations_of_a_checkpointed_layer():
    """Full recomputation: the layer's input, 2 s b h; plus what the library hands to every layer."""
    found = layer_bytes(f"{GPT2},gradient_checkpointing=true", B, S, "n_layer", dtype="bf16") / (S * B * H)
    assert 2.0 <= found <= 2.0 + 2 * S / H


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))

    def forward(self, x):
        return self.layers(x)


def states(**options):
    """Returns bytes per parameter of weights, gradients and optimizer state."""
    graph = capture(Weights(), (torch.zeros(1, 512),), loss=lambda y: y.float().sum(), **options)
    problem = price(graph, "a100-80g:1", groups=4)
    whole = PlacementPlan(problem.fingerprint, "test", 0, np.zeros(problem.num_groups, dtype=np.int32))
    settings = MemoryOptions(optimizer_kernel="foreach")
    item = footprint(problem, whole, options=settings)[0]
    count = sum(int(np.prod(p.shape)) for p in graph.parameters)
    return [item.parts[part] / count for part in ("weights", "gradients", "optimizer")]


def test_model_states():
    """16 bytes a parameter, however they are divided (Rajbhandari et al. 2020)."""
    slack = {"rel": 2e-3}
    assert states() == pytest.approx([4, 4, 8], **slack)  # fp32 Adam
    assert states(autocast="bf16") == pytest.approx([4, 4, 8], **slack)
    assert states(dtype="bf16", master_weights=True) == pytest.approx([2, 2, 12], **slack)
    assert states(dtype="bf16") == pytest.approx([2, 2, 4], **slack)  # torch.optim on bfloat16 parameters
