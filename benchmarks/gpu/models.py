"""Models whose ops are timed, and models whose whole steps and memory are measured, all built from a configuration."""

from __future__ import annotations

from dataclasses import dataclass

_QWEN = "hf:qwen2,hidden_size=896,intermediate_size=4864,num_hidden_layers=24,num_attention_heads=14,num_key_value_heads=2"
_LLAMA = (
    "hf:llama,hidden_size=2048,intermediate_size=8192,num_hidden_layers=8,num_attention_heads=32,num_key_value_heads=8,"
    "vocab_size=32000"
)
_VIT = "hf:vit,hidden_size=1024,num_hidden_layers=24,num_attention_heads=16,intermediate_size=4096"
_SMALL_GPT2 = "hf:gpt2,n_layer=2,n_embd=128,n_head=2,vocab_size=1000"
_SMALL = "hidden_size=128,intermediate_size=256,num_hidden_layers=2,num_attention_heads=2"
_SMALL_DECODER = f"{_SMALL},num_key_value_heads=2,vocab_size=1000"


@dataclass(frozen=True)
class Model:
    """A model and its batch.

    Attributes:
        spec: MODEL text.
        batch: Samples.
        seq: Tokens a sample.
        small: The same kind of model for a processor.
    """

    spec: str
    batch: int
    seq: int
    small: str


FIT = {
    "gpt2": Model("hf:gpt2", 8, 512, _SMALL_GPT2),
    "bert": Model("hf:bert", 16, 512, "hf:bert,num_hidden_layers=2,hidden_size=128,num_attention_heads=2,vocab_size=1000"),
    "resnet": Model("hf:resnet", 64, 1, "hf:resnet"),
    "llama-8-layers": Model(_LLAMA, 2, 1024, f"hf:llama,{_SMALL_DECODER}"),
    "t5": Model("hf:t5", 16, 256, "hf:t5,num_layers=2,d_model=128,num_heads=2,d_kv=64,vocab_size=1000"),
}  # fmt: skip
"""Ops are timed inside the steps of these."""

PREDICT = {
    "gpt2-medium": Model("hf:gpt2,n_layer=24,n_embd=1024,n_head=16", 4, 1024, _SMALL_GPT2),
    "gpt2-small-batch": Model("hf:gpt2", 1, 128, "hf:gpt2,n_layer=2,n_embd=64,n_head=2,vocab_size=1000"),
    "distilbert": Model("hf:distilbert", 32, 256, "hf:distilbert,n_layers=2,dim=128,n_heads=2,hidden_dim=256,vocab_size=1000"),
    "regnet": Model("hf:regnet", 64, 1, "hf:regnet"),
    "qwen2-0.5b": Model(_QWEN, 4, 1024, f"hf:qwen2,{_SMALL_DECODER}"),
    "vit-large": Model(_VIT, 32, 1, f"hf:vit,{_SMALL}"),
    "unet": Model("zoo:unet,image=256", 8, 1, "zoo:unet,image=32"),
    "lstm": Model("zoo:lstm,vocab=10000,width=1024,layers=2", 32, 128, "zoo:lstm,vocab=1000,width=64,layers=2"),
}  # fmt: skip
"""Whole steps and peak memory of these are predicted."""

VARIANTS = ("fp32", "bf16", "autocast", "bf16 checkpointing")
"""How a step is run: dtype of weights, autocast in bf16 over fp32 weights, every block recomputed."""
