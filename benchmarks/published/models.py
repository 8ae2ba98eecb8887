"""The models of published steps by name, built from configurations, and their captures at two batch sizes."""

from __future__ import annotations

import functools
from typing import Any

import torch

from rlplace.model.capture.capture import capture
from rlplace.model.graph.opgraph import OpGraph
from rlplace.model.zoo import load_model

GPT = (
    "hf:gpt2,resid_pdrop=0.0,embd_pdrop=0.0,attn_pdrop=0.0,activation_function=gelu,n_positions={seq},vocab_size=50304,"
    "n_embd=%d,n_head=%d,n_layer=%d"
)
LLAMA = (
    "hf:llama,max_position_embeddings={seq},hidden_size=%d,intermediate_size=%d,num_hidden_layers=%d,num_attention_heads=%d,"
    "num_key_value_heads=%d,vocab_size=%d"
)
MODELS = {
    "MPT-125m": GPT % (768, 12, 12), "MPT-350m": GPT % (1024, 16, 24), "MPT-760m": GPT % (1536, 12, 24),
    "MPT-1b": GPT % (2048, 16, 24), "MPT-3b": GPT % (2560, 20, 32), "MPT-7b": GPT % (4096, 32, 32),
    "MPT-13b": GPT % (5120, 40, 40), "MPT-30b": GPT % (7168, 56, 48), "MPT-70b": GPT % (8192, 64, 80),
    "Llama3.1-8B": LLAMA % (4096, 14336, 32, 32, 8, 128256), "Llama3.1-70B": LLAMA % (8192, 28672, 80, 64, 8, 128256),
    "Llama3.1-405B": LLAMA % (16384, 53248, 126, 128, 8, 128256), "Llama2-7B": LLAMA % (4096, 11008, 32, 32, 32, 32000),
    "Llama2-13B": LLAMA % (5120, 13824, 40, 40, 40, 32000), "Llama2-34B": LLAMA % (8192, 22016, 48, 64, 8, 32000),
    "TinyLlama-1.1B": LLAMA % (2048, 5632, 22, 32, 4, 32000), "GPT 7B GQA h4096 L32": LLAMA % (4096, 14336, 32, 32, 8, 50304),
    "GPT 12L h512 a8": GPT % (512, 8, 12), "GPT-3 175B": GPT % (12288, 96, 96), "GPT-1.3B": GPT % (2048, 32, 24),
    "GPT-2.7B": GPT % (2560, 32, 32), "GPT-Neo-2.7B": GPT % (2560, 20, 32), "OPT-350M": GPT % (1024, 16, 24),
    "GPT-2 124M": GPT % (768, 12, 12), "GPT-2 1558M": GPT % (1600, 25, 48), "1.7B": LLAMA % (2048, 8192, 24, 32, 32, 49152),
    "MT-NLG 530B": (GPT % (20480, 128, 105)).replace("50304", "51200"), "DeepSeek-V3": "hf:deepseek_v3",
    "Qwen2.5-7B": LLAMA % (3584, 18944, 28, 28, 4, 152064), "Qwen2.5-1.5B": LLAMA % (1536, 8960, 28, 12, 2, 151936),
    "Nemotron-4-15B": "hf:nemotron,max_position_embeddings={seq},hidden_size=6144,intermediate_size=24576,num_hidden_layers=32,"
    "num_attention_heads=48,num_key_value_heads=8,vocab_size=256000",
    "BERT-large": "hf:bert,hidden_size=1024,num_hidden_layers=24,num_attention_heads=16,intermediate_size=4096,"
    "vocab_size=30528,hidden_dropout_prob=0.1,attention_probs_dropout_prob=0.1",
    "ResNet-50": "hf:resnet,num_labels=1000",
}  # fmt: skip
ALIASES = {
    "Llama3-8B": "Llama3.1-8B", "Llama-3-8B": "Llama3.1-8B", "Llama-3.1-8B": "Llama3.1-8B", "Llama3-70B": "Llama3.1-70B",
    "Llama-3-70B": "Llama3.1-70B", "Llama-3.1-70B": "Llama3.1-70B", "Llama3-405B": "Llama3.1-405B",
    "Llama-3.1-405B": "Llama3.1-405B", "Llama-2-7B": "Llama2-7B", "Llama-7B": "Llama2-7B", "Llama-2-13B": "Llama2-13B",
    "GPT 12L h512 a8 TE": "GPT 12L h512 a8",
}  # fmt: skip


def fuse_norms(module: torch.nn.Module) -> None:
    """Makes a norm that saves its input alone, as fused RMSNorm does, in place of transformers' with its float32 copies."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                weight = child.weight
                fused = torch.nn.LayerNorm(weight.shape, bias=False, device=weight.device, dtype=weight.dtype)
                setattr(parent, name, fused)


def _half_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    """Returns next tokens' cross entropy over logits as they are; a fused kernel casts inside."""
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    return torch.nn.functional.cross_entropy(logits.reshape(-1, vocab_size), shifted)


@functools.lru_cache(maxsize=2)
def captures(
    model: str, seq: int, dtype: str, master_weights: bool, fused_loss: bool, fused_norms: bool, optimizer: str
) -> tuple[OpGraph, OpGraph]:
    """Returns a model at two batch sizes, which give all."""
    spec = MODELS[ALIASES.get(model, model)].format(seq=seq)

    def graph(batch: int) -> OpGraph:
        loaded = load_model(spec, batch=batch, seq=seq, dtype=dtype)
        module: Any = loaded.module
        if fused_norms:
            fuse_norms(module)
        if fused_loss and "labels" in loaded.example_inputs:
            module.loss_function = _half_loss
        return capture(module, loaded.example_inputs, loss=loaded.loss, optimizer=optimizer, master_weights=master_weights)

    return graph(2), graph(4)
