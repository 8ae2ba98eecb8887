"""Which attention ops are found to be causal."""

import pytest

from rlplace.model.capture.capture import capture
from rlplace.model.graph.opgraph import with_causal_attention
from rlplace.model.zoo import load_model

BERT = "num_hidden_layers=2,hidden_size=64,num_attention_heads=2,intermediate_size=128,vocab_size=512"
BART = "d_model=64,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,decoder_attention_heads=2,vocab_size=512"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "causal"),
    [
        (f"hf:llama,{BERT},num_key_value_heads=1", {"model.layers.0.self_attn", "model.layers.1.self_attn"}),
        ("hf:gpt2,n_layer=1,n_embd=64,n_head=2,vocab_size=512", {"transformer.h.0.attn"}),
        (f"hf:bert,{BERT}", set()),
        (f"hf:bart,{BART}", {"model.decoder.layers.0.self_attn"}),
    ],
)
def test_only_masks_of_earlier_positions_are_causal(spec, causal):
    model = load_model(spec, batch=2, seq=16)
    graph = with_causal_attention(capture(model.module, model.example_inputs, loss=model.loss))
    marked = {op for op, sizes in graph.op_dims.items() if sizes.get("causal")}
    forward = {graph.op_forward[op] for op in marked}
    assert {graph.op_module[op] for op in forward} == causal
    assert len(marked) == 2 * len(forward)  # their backward ops, too
    assert with_causal_attention(graph).op_dims == graph.op_dims
