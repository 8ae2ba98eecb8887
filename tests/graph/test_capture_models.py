"""Every supported model type captures with the expected method, at a tiny size."""

import numpy as np
import pytest
import torch

from rlplace.graph.capture import capture
from rlplace.graph.export import export_training_graph
from rlplace.graph.opgraph import BACKWARD, FORWARD, UPDATE
from rlplace.zoo import load_model

_BERT = "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64,vocab_size=100"
_LLAMA = f"{_BERT},num_key_value_heads=1"
SPECS = {
    "gpt2": "hf:gpt2,n_layer=2,n_embd=32,n_head=2,vocab_size=100",
    "bert": f"hf:bert,{_BERT}",
    "distilbert": "hf:distilbert,n_layers=2,dim=32,n_heads=2,hidden_dim=64,vocab_size=100",
    "llama": f"hf:llama,{_LLAMA}",
    "mistral": f"hf:mistral,{_LLAMA}",
    "qwen2": f"hf:qwen2,{_LLAMA}",
    "mixtral": f"hf:mixtral,{_LLAMA},num_local_experts=4",
    "t5": "hf:t5,num_layers=2,d_model=32,d_kv=16,num_heads=2,d_ff=64,vocab_size=100",
    "bart": "hf:bart,encoder_layers=2,decoder_layers=2,d_model=32,encoder_attention_heads=2,decoder_attention_heads=2,"
    "encoder_ffn_dim=64,decoder_ffn_dim=64,vocab_size=100",
    "whisper": "hf:whisper,encoder_layers=2,decoder_layers=2,d_model=32,encoder_attention_heads=2,decoder_attention_heads=2,"
    "encoder_ffn_dim=64,decoder_ffn_dim=64,max_source_positions=32,num_mel_bins=16",
    "vit": f"hf:vit,{_BERT.rpartition(',')[0]},image_size=32,patch_size=8",
    "swin": "hf:swin,embed_dim=16,depths=1/1,num_heads=2/2,image_size=32,patch_size=4,window_size=4",
    "convnext": "hf:convnext,depths=1/1,hidden_sizes=16/32,num_stages=2,image_size=32",
    "resnet": "hf:resnet,depths=1/1,hidden_sizes=16/32,embedding_size=16,layer_type=basic",
    "mamba": "hf:mamba,num_hidden_layers=1,hidden_size=32,state_size=4,vocab_size=100",
    "deberta-v2": f"hf:deberta-v2,{_BERT},relative_attention=true,pos_att_type=c2p|p2c",
    "lstm": "zoo:lstm,width=32,layers=2,vocab=100",
    "transformer": "zoo:transformer,width=32,heads=2,layers=1,feedforward=64,vocab=100",
    "inception": "zoo:inception,blocks=2,width=8,image=32,classes=10",
    "dlrm": "zoo:dlrm,tables=4,rows=100,width=8,hidden=16",
    "moe_toy": "zoo:moe_toy,layers=1,experts=3,width=16",
    "mlp": "zoo:mlp,layers=2,width=16",
    "nasnet": "zoo:nasnet,cells=2,width=8,image=16",
    "unet": "zoo:unet,depth=2,width=4,image=16",
}


@pytest.mark.parametrize("kind", SPECS)
def test_captures_by_export(kind):
    model = load_model(SPECS[kind], batch=2, seq=4 if kind == "mamba" else 16)
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


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "resnet", "lstm", "swin", "whisper"])
def test_methods_agree(kind):
    """The same work, weights and gradients, whatever the granularity."""
    model = load_model(SPECS[kind], batch=2, seq=16)
    graphs = [capture(model.module, model.example_inputs, method=method) for method in ("export", "dispatch", "module")]
    first = graphs[0]
    for graph in graphs[1:]:
        assert graph.parameters == first.parameters
        for phase in (FORWARD, BACKWARD, UPDATE):
            # Eager code builds a few masks and index tensors in another way than exported code.
            ours, theirs = (g.op_flops[g.op_phase == phase].sum() for g in (graph, first))
            assert ours == pytest.approx(theirs, rel=0.02)
    assert first.num_ops > graphs[2].num_ops


@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "t5", "resnet", "lstm", "swin"])
def test_export_of_the_real_module_has_the_same_op_names(kind):
    meta = load_model(SPECS[kind], batch=2, seq=16)
    graph = capture(meta.module, meta.example_inputs)
    real = load_model(SPECS[kind], batch=2, seq=16, device="cpu")
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
