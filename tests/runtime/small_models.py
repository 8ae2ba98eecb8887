"""Small training steps of many kinds: (module, keyword inputs, loss of its output)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def _own_loss(output):
    return output.loss


def _text(batch=4, length=8):
    ids = torch.randint(0, 64, (batch, length))
    return {"input_ids": ids, "labels": ids.clone()}


def _images(batch=4, size=32):
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.arange(batch) % 2}


def _of_transformers(name, model, inputs, **options):
    import transformers

    return getattr(transformers, name + model)(getattr(transformers, f"{name}Config")(**options)), inputs(), _own_loss


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_WIDTH = {"hidden_size": 32, "intermediate_size": 64}


def gpt2(dropout=0.0, **sizes):
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 64, **sizes}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return _of_transformers("GPT2", "LMHeadModel", _text, **sizes, **rates, bos_token_id=0, eos_token_id=0)


def bert(layers=1):
    sizes = {**_WIDTH, "num_hidden_layers": layers, "num_attention_heads": 4, "vocab_size": 64, **_NO_DROPOUT}
    masked = lambda: {**_text(), "attention_mask": torch.ones(4, 8, dtype=torch.long)}  # noqa: E731
    return _of_transformers("Bert", "ForMaskedLM", masked, **sizes)


def llama(layers=1, kv_heads=2):
    heads = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": kv_heads}
    return _of_transformers("Llama", "ForCausalLM", _text, **_WIDTH, **heads, vocab_size=64)


def mixtral():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    return _of_transformers("Mixtral", "ForCausalLM", _text, **_WIDTH, **sizes, vocab_size=64)


def t5(layers=1, heads=2):
    sizes = {"d_model": 32, "d_ff": 64, "num_layers": layers, "num_heads": heads, "d_kv": 32 // heads, "vocab_size": 64}
    options = {"dropout_rate": 0.0, "decoder_start_token_id": 0}
    return _of_transformers("T5", "ForConditionalGeneration", _text, **sizes, **options)


def vit():
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    return _of_transformers("ViT", "ForImageClassification", _images, **_WIDTH, **sizes, **_NO_DROPOUT)


def swin():
    sizes = {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "image_size": 32, "patch_size": 4, "window_size": 4}
    return _of_transformers("Swin", "ForImageClassification", _images, **sizes, drop_path_rate=0.0, **_NO_DROPOUT)


def resnet():
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic"}
    return _of_transformers("ResNet", "ForImageClassification", _images, **sizes)


class _Branch(nn.Sequential):
    def __init__(self, inputs, outputs, kernel):
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        )


class Inception(nn.Module):
    """Parallel branches, batch norm, in-place activations."""

    def __init__(self):
        super().__init__()
        self.stem = _Branch(3, 8, 3)
        self.blocks = nn.ModuleList([nn.ModuleList([_Branch(8, 4, k) for k in (1, 3)] + [_Branch(8, 8, 5)]) for _ in range(2)])
        self.mix = nn.ModuleList([_Branch(16, 8, 1) for _ in range(2)])
        self.head = nn.Linear(8, 2)

    def forward(self, pixel_values):
        x = F.max_pool2d(self.stem(pixel_values), 2)
        for branches, mix in zip(self.blocks, self.mix, strict=True):
            x = mix(torch.cat([branch(x) for branch in branches], 1)) + x
        return self.head(x.mean((2, 3)))


def inception():
    return Inception(), {"pixel_values": torch.randn(4, 3, 16, 16)}, lambda logits: logits.square().mean()


def transformer():
    model = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)
    inputs = {"src": torch.randn(4, 6, 16), "tgt": torch.randn(4, 5, 16)}
    inputs["tgt_mask"] = nn.Transformer.generate_square_subsequent_mask(5)
    inputs["tgt_is_causal"] = True  # otherwise the forward compares the mask's values, which export cannot follow
    return model, inputs, lambda y: y[..., ::3].exp().mean()


class LSTMStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 12)
        self.layers = nn.ModuleList([nn.LSTM(12, 12, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(12, 32)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)[0] + x
        return self.head(x)


def lstm():
    return LSTMStack(), {"tokens": torch.randint(0, 32, (4, 5))}, lambda y: y.logsumexp(-1).mean()


class DLRM(nn.Module):
    """Embedding tables, two perceptrons and their interaction; takes nested inputs."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(20, 8, mode="sum") for _ in range(4)])
        self.bottom = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(8 + 10, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch, scale=1.0):
        vectors = [self.bottom(batch["dense"])] + [table(ids) for table, ids in zip(self.tables, batch["sparse"], strict=True)]
        stacked = torch.stack(vectors, 1)
        pairs = torch.triu_indices(5, 5, offset=1, device=stacked.device)
        products = torch.bmm(stacked, stacked.transpose(1, 2))[:, pairs[0], pairs[1]]
        return {"score": self.top(torch.cat([vectors[0], products], 1)) * scale}


def dlrm():
    batch = {"dense": torch.randn(4, 5), "sparse": [torch.randint(0, 20, (4, 3)) for _ in range(4)]}
    return DLRM(), {"batch": batch, "scale": 2.0}, lambda out: out["score"].sigmoid().mean()


class Awkward(nn.Module):
    """What trips placement up: ties, a shared submodule, views of parameters, writes through views, counters, constants."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.shared = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
        self.qkv = nn.Parameter(torch.randn(24, 8) * 0.3)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.unused = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(8), persistent=False)
        self.scale = torch.tensor([0.5, 2.0] * 4)

    def forward(self, tokens, labels=None):
        x = self.embed(tokens)
        if self.training:
            self.seen += 1
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
        x = self.shared(x) + self.shared(x * self.scale) + self.frozen
        q, k, v = (F.linear(x, w) for w in self.qkv.chunk(3))
        mask = torch.zeros(x.shape[1], x.shape[1], device=x.device)
        mask[torch.arange(x.shape[1], device=x.device)[:, None] < torch.arange(x.shape[1], device=x.device)] = -1e4
        x = x + (q @ k.transpose(1, 2) + mask).softmax(-1) @ v
        flat = x.reshape(-1, 8).clone()
        flat.view(-1)[::2].mul_(1.5)
        flat[0] = self.average
        logits = self.head(self.norm(flat)).view(*tokens.shape, 32)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return logits, {"loss": loss, "steps": [self.seen]}


def awkward():
    tokens = torch.randint(0, 32, (4, 6))
    return Awkward(), {"tokens": tokens, "labels": tokens.flip(0)}, lambda out: out[1]["loss"]


MODELS = {
    f.__name__: f for f in (gpt2, bert, llama, mixtral, t5, vit, swin, resnet, inception, transformer, lstm, dlrm, awkward)
}
