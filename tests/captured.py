"""Small models of four blocks or so, captured once a session."""

from functools import cache

from rlplace.model.capture.capture import capture
from rlplace.model.graph.opgraph import OpGraph, with_causal_attention
from rlplace.model.zoo import load_model

_BERT = "num_hidden_layers=4,hidden_size=64,num_attention_heads=2,intermediate_size=128"
MODELS = {
    "llama": f"hf:llama,{_BERT},num_key_value_heads=1,vocab_size=512",
    "gpt2": "hf:gpt2,n_layer=4,n_embd=64,n_head=2,vocab_size=512",
    "gpt2-untied": "hf:gpt2,n_layer=4,n_embd=64,n_head=2,vocab_size=512,tie_word_embeddings=false",
    "bert": f"hf:bert,{_BERT},vocab_size=512,tie_word_embeddings=false",
    "vit": f"hf:vit,{_BERT},image_size=32,patch_size=8",
    "t5": "hf:t5,num_layers=2,d_model=64,d_kv=32,num_heads=2,d_ff=128,vocab_size=512",
    "mixtral": "hf:mixtral,num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64,num_key_value_heads=1,"
    "num_local_experts=4,vocab_size=128",
    "resnet": "hf:resnet,depths=2/2,hidden_sizes=16/32,embedding_size=16,layer_type=basic",
    "swin": "hf:swin,embed_dim=16,depths=2/2,num_heads=2/2,image_size=32,patch_size=4,window_size=4",
    "convnext": "hf:convnext,depths=2/2,hidden_sizes=16/32,num_stages=2,image_size=32",
    "mlp": "zoo:mlp,layers=4,width=16",
    "moe_toy": "zoo:moe_toy,layers=2,experts=3,width=16",
    "nasnet": "zoo:nasnet,cells=2,width=8,image=16",
}


@cache
def captured(name: str, samples: int = 4) -> OpGraph:
    """A training step of one of `MODELS`, as strategies are priced: what is causal is marked."""
    model = load_model(MODELS[name], batch=samples, seq=32)
    return with_causal_attention(capture(model.module, model.example_inputs, loss=model.loss))
