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

_TINY = "num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64,vocab_size=100"
_LLAMA = f"{_TINY},num_key_value_heads=1"
SMALL = {
    "gpt2": "hf:gpt2,n_layer=2,n_embd=32,n_head=2,vocab_size=100",
    "bert": f"hf:bert,{_TINY}",
    "llama": f"hf:llama,{_LLAMA}",
    "mixtral": f"hf:mixtral,{_LLAMA},num_local_experts=4",
    "t5": "hf:t5,num_layers=2,d_model=32,d_kv=16,num_heads=2,d_ff=64,vocab_size=100",
    "bart": "hf:bart,encoder_layers=2,decoder_layers=2,d_model=32,encoder_attention_heads=2,decoder_attention_heads=2,"
    "encoder_ffn_dim=64,decoder_ffn_dim=64,vocab_size=100",
    "whisper": "hf:whisper,encoder_layers=2,decoder_layers=2,d_model=32,encoder_attention_heads=2,decoder_attention_heads=2,"
    "encoder_ffn_dim=64,decoder_ffn_dim=64,max_source_positions=32,num_mel_bins=16",
    "vit": f"hf:vit,{_TINY.rpartition(',')[0]},image_size=32,patch_size=8",
    "swin": "hf:swin,embed_dim=16,depths=1/1,num_heads=2/2,image_size=32,patch_size=4,window_size=4",
    "convnext": "hf:convnext,depths=1/1,hidden_sizes=16/32,num_stages=2,image_size=32",
    "resnet": "hf:resnet,depths=1/1,hidden_sizes=16/32,embedding_size=16,layer_type=basic",
    "mamba": "hf:mamba,num_hidden_layers=1,hidden_size=32,state_size=4,vocab_size=100",
    "deberta-v2": f"hf:deberta-v2,{_TINY},relative_attention=true,pos_att_type=c2p|p2c",
    "lstm": "zoo:lstm,width=32,layers=2,vocab=100",
    "transformer": "zoo:transformer,width=32,heads=2,layers=1,feedforward=64,vocab=100",
    "inception": "zoo:inception,blocks=2,width=8,image=32,classes=10",
    "dlrm": "zoo:dlrm,tables=4,rows=100,width=8,hidden=16",
    "moe_toy": "zoo:moe_toy,layers=1,experts=3,width=16",
    "mlp": "zoo:mlp,layers=2,width=16",
    "nasnet": "zoo:nasnet,cells=2,width=8,image=16",
    "unet": "zoo:unet,depth=2,width=4,image=16",
}
"""One or two layers of everything."""


@cache
def graph_of(name: str) -> OpGraph:
    """A training step of one of `SMALL`, of two samples."""
    model = load_model(SMALL[name], batch=2, seq=16)
    return capture(model.module, model.example_inputs, loss=model.loss)


@cache
def captured(name: str, samples: int = 4) -> OpGraph:
    """A training step of one of `MODELS`, as strategies are priced: what is causal is marked."""
    model = load_model(MODELS[name], batch=samples, seq=32)
    return with_causal_attention(capture(model.module, model.example_inputs, loss=model.loss))
