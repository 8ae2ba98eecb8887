"""Costs of captured ops against formulas, and captures of models by all methods."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from rlplace.model.capture.capture import capture
from rlplace.model.capture.export import export_training_graph
from rlplace.model.graph.opgraph import BACKWARD, FORWARD, UPDATE
from rlplace.model.zoo import load_model
from tests.captured import SMALL


def flops(graph, kind=None, phase=None):
    return sum(
        graph.op_flops[i]
        for i in range(graph.num_ops)
        if (kind is None or graph.op_kind[i] == kind) and (phase is None or graph.op_phase[i] == phase)
    )


@pytest.mark.slow
def test_gpt2_against_six_times_parameters_times_tokens():
    model = load_model("hf:gpt2,n_layer=4", batch=2, seq=128)
    graph = capture(model.module, model.example_inputs)
    tokens = 2 * 128
    # The position table is looked up, never multiplied; the tied token table is multiplied once, as the head.
    weights = sum(p.numel() for name, p in model.module.named_parameters() if "wpe" not in name)
    attention_forward = 4 * 2 * 2 * 2 * 12 * 128 * 128 * 64
    # Turning the boolean mask into numbers adds a little.
    assert flops(graph, "attention", FORWARD) == pytest.approx(attention_forward, rel=1e-3)
    assert flops(graph, "attention", BACKWARD) == pytest.approx(2.5 * attention_forward, rel=1e-3)
    assert flops(graph, "gemm") == pytest.approx(6 * weights * tokens, rel=0.01)
    assert flops(graph, phase=BACKWARD) / flops(graph, phase=FORWARD) == pytest.approx(2.0, abs=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_dropless_experts_count_only_their_tokens(kind):
    sizes = "hidden_size=64,intermediate_size=128,num_attention_heads=2,num_key_value_heads=2,vocab_size=50"
    model = load_model(f"hf:{kind},num_hidden_layers=1,{sizes}", batch=2, seq=32)
    graph = capture(model.module, model.example_inputs)
    mlp = 2 * 64 * (3 * 64 * 128)  # FLOPs of 64 tokens through gate, up and down projection
    if kind == "mixtral":
        assert flops(graph, "bmm", FORWARD) == 2 * mlp  # two of eight experts per token
        assert flops(graph, "bmm", BACKWARD) == 4 * mlp
    else:
        products = 2 * 64 * (4 * 64 * 64 + 64 * 50) + mlp
        assert flops(graph, "gemm", FORWARD) == products


@pytest.mark.parametrize("groups", [1, 8, 64])
def test_grouped_convolution_backward(groups):
    net = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.Conv2d(64, 64, 3, padding=1, groups=groups, bias=False))
    graph = capture(net, torch.empty(2, 64, 8, 8), loss=torch.sum)
    forward = 2 * 2 * 64 * 64 * (64 // groups) * 9
    second = graph.op_names.index("1/conv2d_1")
    assert graph.op_kind[second] == "conv"
    assert graph.op_flops[second] == forward
    assert graph.op_flops[graph.op_names.index("1/conv2d_1.backward")] == 2 * forward
    # The first convolution needs no gradient of its input.
    assert graph.op_flops[graph.op_names.index("0/conv2d.backward")] == 2 * 2 * 64 * 64 * 64 * 9


def test_transposed_convolution():
    graph = capture(nn.ConvTranspose2d(8, 4, 2, 2, bias=False), torch.empty(2, 8, 5, 5), loss=torch.sum)
    assert flops(graph, "conv", FORWARD) == 2 * 2 * 25 * 8 * 4 * 4


@pytest.mark.parametrize(
    ("kind", "gates", "options"),
    [("LSTM", 4, {}), ("LSTM", 4, {"bidirectional": True}), ("GRU", 3, {"batch_first": True}), ("RNN", 1, {"bias": False})],
)
@pytest.mark.parametrize("method", ["export", "dispatch"])
def test_recurrent_layers_are_whole(kind, gates, options, method):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = getattr(nn, kind)(24, 32, num_layers=2, **options)

        def forward(self, x):
            return self.layers(x)[0].sum()

    graph = capture(Net(), torch.empty(10, 10, 24), method=method)
    directions = 2 if options.get("bidirectional") else 1
    expected = 2 * 10 * 10 * gates * 32 * directions * (24 + 32 + 32 * directions + 32)
    assert flops(graph, "recurrent", FORWARD) == expected
    # The backward of both directions adds their input gradients up, an addition per element.
    assert flops(graph, "recurrent", BACKWARD) == pytest.approx(2 * expected, rel=1e-3)
    if method == "export":
        assert graph.op_kind.count("recurrent") == 2


def test_lstm_shapes_and_gradients_match_torch():
    """What stands in for a layer while capturing returns and differentiates into the shapes of the real one."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.LSTM(24, 32, num_layers=2, proj_size=16, bidirectional=True, batch_first=True)

        def forward(self, x):
            out, (hidden, cell) = self.layers(x)
            assert out.shape == (3, 5, 32) and hidden.shape == (4, 3, 16) and cell.shape == (4, 3, 32)
            return out.sum() + hidden.sum() + cell.sum()

    for method in ("export", "dispatch", "module"):
        graph = capture(Net(), torch.empty(3, 5, 24), method=method)
        assert all(p.trainable for p in graph.parameters)


def test_attention_with_dropout_and_mask_stays_fused():
    class Net(nn.Module):
        def __init__(self, dropout):
            super().__init__()
            self.dropout = dropout
            self.project = nn.Linear(64, 192)

        def forward(self, x, mask):
            query, key, value = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in self.project(x).chunk(3, -1))
            return functional.scaled_dot_product_attention(query, key, value, mask, self.dropout).sum()

    inputs = (torch.empty(2, 128, 64), torch.ones(128, 128, dtype=torch.bool))
    for method in ("export", "dispatch"):
        plain, dropped = (capture(Net(p), inputs, method=method) for p in (0.0, 0.1))
        for graph in (plain, dropped):
            assert flops(graph, "attention", FORWARD) == pytest.approx(2 * 2 * 2 * 4 * 128 * 128 * 16, rel=0.01)
            # No score matrix (2 x 4 x 128 x 128 x 4 bytes) is ever stored.
            assert graph.tensor_bytes.max() < 2 * 4 * 128 * 128 * 4
            assert graph.op_temporary_bytes.max() < 2 * 4 * 128 * 128 * 4
        assert plain.op_flops.sum() == dropped.op_flops.sum()


class Latent(nn.Module):
    """Attention of 4 heads whose queries are wider than their values, with as many or half as many heads of keys and values."""

    def __init__(self, causal, shared):
        super().__init__()
        self.causal, self.shared = causal, shared
        self.query, self.rest = nn.Linear(64, 4 * 24), nn.Linear(64, (4 // shared) * (24 + 16))

    def forward(self, x, mask=None):
        query = self.query(x).unflatten(-1, (4, 24)).transpose(1, 2)
        key, value = self.rest(x).unflatten(-1, (4 // self.shared, 40)).transpose(1, 2).split((24, 16), -1)
        out = functional.scaled_dot_product_attention(query, key, value, mask, 0.1, self.causal, enable_gqa=self.shared > 1)
        return out.square().sum()


@pytest.mark.parametrize("method", ["export", "dispatch"])
@pytest.mark.parametrize("causal, shared, masked", [(True, 1, False), (False, 2, False), (False, 1, True)])
def test_attention_with_narrower_values_is_one_op_each_way(method, causal, shared, masked):
    inputs = (torch.empty(2, 128, 64), *([torch.ones(128, 128, dtype=torch.bool)] if masked else []))
    graph = capture(Latent(causal, shared), inputs, method=method)
    shapes = [(2, 4, 128, width) for width in (24, 24, 16)]
    counted = {FORWARD: sdpa_flop_count(*shapes), BACKWARD: sdpa_backward_flop_count(shapes[2], *shapes)}
    for phase, wanted in counted.items():
        ops = [i for i, kind in enumerate(graph.op_kind) if kind == "attention" and graph.op_phase[i] == phase]
        assert len(ops) == 1 and graph.op_flops[ops[0]] == pytest.approx(wanted, rel=0.01 if masked else 0)
        assert not any(graph.op_flops[i] for i, kind in enumerate(graph.op_kind) if kind in ("bmm", "softmax"))
        found = graph.op_dims[ops[0]]
        assert (found["width"], found["value_width"], "causal" in found) == (24, 16, causal)
    scores = 2 * 4 * 128 * 128 * 4
    assert max(graph.tensor_bytes.max(), graph.op_temporary_bytes.max()) < scores


def test_attention_with_narrower_values_is_cast_by_autocast():
    graph = capture(Latent(True, 1), torch.empty(2, 128, 64), autocast="bf16")
    assert {graph.op_dtype[i] for i, kind in enumerate(graph.op_kind) if kind == "attention"} == {"bfloat16"}


def test_dropout_saves_a_byte_per_element():
    for method in ("export", "dispatch"):
        graph = capture(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)), torch.empty(16, 32), loss=torch.sum, method=method)
        op = next(i for i in range(graph.num_ops) if graph.op_kind[i] == "random" and graph.op_phase[i] == FORWARD)
        made = sorted(graph.tensor_bytes[graph.tensor_producer == op].tolist())
        assert made == [16 * 32, 16 * 32 * 4]


def test_bytes_of_a_product_and_of_a_lookup():
    graph = capture(nn.Linear(64, 32, bias=False), torch.empty(16, 64), loss=torch.sum)
    assert graph.op_bytes[0] == 4 * (16 * 64 + 64 * 32 + 16 * 32)
    graph = capture(nn.Embedding(1000, 8), torch.zeros(4, dtype=torch.long), loss=torch.sum)
    # A lookup reads the rows that it returns, not the table.
    assert graph.op_bytes[0] == 2 * 4 * 8 * 4 + 4 * 8


def test_mixed_length_products_with_no_batch():
    graph = capture(nn.Bilinear(6, 7, 5, bias=False), (torch.empty(4, 6), torch.empty(4, 7)), loss=torch.sum)
    assert flops(graph, "bmm", FORWARD) == 2 * 4 * 6 * 7 * 5


QUICK = ("gpt2", "t5", "swin", "resnet", "mamba", "lstm", "moe_toy", "mlp")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k not in QUICK)) for k in SMALL])
def test_captures_by_export(kind):
    model = load_model(SMALL[kind], batch=2, seq=4 if kind == "mamba" else 16)
    graph = capture(model.module, model.example_inputs, loss=model.loss)
    assert graph.capture["method"] == "export", graph.capture["notes"]
    assert graph.capture["notes"] == []
    assert graph.samples == 2
    named = dict(model.module.named_parameters())
    assert {p.name for p in graph.parameters if not p.is_buffer} == set(named)
    # Whisper's sinusoidal positions are frozen; everything else of every model trains.
    assert all(p.trainable == named[p.name].requires_grad for p in graph.parameters if not p.is_buffer)
    assert sum(p.size_bytes for p in graph.parameters if not p.is_buffer) == 4 * sum(p.numel() for p in named.values())
    assert (graph.op_phase == UPDATE).sum() == sum(p.requires_grad for p in named.values())
    modules = {name for name, _ in model.module.named_modules()}
    assert set(graph.op_module[i] for i in range(graph.num_ops) if graph.op_phase[i] == FORWARD) <= modules
    forward, backward = (graph.op_flops[graph.op_phase == phase].sum() for phase in (FORWARD, BACKWARD))
    assert 1.4 <= backward / forward <= 2.6


@pytest.mark.parametrize("kind", ["gpt2", "lstm", *(pytest.param(k, marks=pytest.mark.slow) for k in ("mixtral", "resnet"))])
def test_methods_agree(kind):
    """The same work, weights and gradients, whatever the granularity."""
    model = load_model(SMALL[kind], batch=2, seq=16)
    graphs = [capture(model.module, model.example_inputs, method=method) for method in ("export", "dispatch", "module")]
    first = graphs[0]
    for graph in graphs[1:]:
        assert graph.parameters == first.parameters
        for phase in (FORWARD, BACKWARD, UPDATE):
            # Eager code builds a few masks and index tensors in another way than exported code.
            ours, theirs = (g.op_flops[g.op_phase == phase].sum() for g in (graph, first))
            assert ours == pytest.approx(theirs, rel=0.02)
    assert first.num_ops > graphs[2].num_ops


@pytest.mark.parametrize("kind", ["gpt2", "lstm", *(pytest.param(k, marks=pytest.mark.slow) for k in ("mixtral", "resnet"))])
def test_export_of_the_real_module_has_the_same_op_names(kind):
    meta = load_model(SMALL[kind], batch=2, seq=16)
    graph = capture(meta.module, meta.example_inputs)
    real = load_model(SMALL[kind], batch=2, seq=16, device="cpu")
    exported = export_training_graph(real.module, (), real.example_inputs)
    names = tuple(exported.op_name_of_node.values())
    assert names == tuple(np.array(graph.op_names)[graph.op_phase == FORWARD])
    held = dict(exported.module.named_parameters(remove_duplicate=False))
    assert all(held[name] is p for name, p in real.module.named_parameters(remove_duplicate=False) if name in held)


@pytest.mark.parametrize("method", ["export", "dispatch"])
def test_scan_is_kept_whole(method):
    model = load_model("hf:mamba,num_hidden_layers=2,hidden_size=16,state_size=2,vocab_size=50", batch=2, seq=256)
    assert model.example_inputs["input_ids"].shape == (2, 256)
    graph = capture(model.module, model.example_inputs, method=method)
    scans = [i for i in range(graph.num_ops) if graph.op_kind[i] == "scan"]
    assert [graph.op_module[i] for i in scans] == [f"backbone.layers.{layer}.mixer" for layer in (0, 1, 1, 0)]
    forward = 9 * 2 * 256 * 32 * 2
    assert graph.op_flops[scans].tolist() == [forward, forward, 3 * forward, 3 * forward]


def test_whole_scan_computes_what_the_loop_computes():
    model = load_model("hf:mamba,num_hidden_layers=2,hidden_size=16,state_size=4,vocab_size=50", batch=2, seq=9, device="cpu")
    exported = export_training_graph(model.module, (), model.example_inputs)
    assert any("selective_scan" in node.name for node in exported.module.graph.nodes)
    losses, gradients = [], []
    for module in (model.module, exported.module):
        loss = module(**model.example_inputs)["loss"]
        loss.backward()
        losses.append(loss.item())
        gradients.append([p.grad.clone() for p in model.module.parameters()])
        model.module.zero_grad()
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)
