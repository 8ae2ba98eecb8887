"""Twelve kinds of small models for `equality`: four blocks, no dropout, losses in double precision."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

BATCH, LENGTH, VOCABULARY, WIDTH, LAYERS = 8, 8, 64, 32, 4

Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        make: Builds it.
        batch: Makes its inputs from a generator.
        loss: Mean over the samples; transformers' own losses compute in single precision.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict[str, torch.Tensor]]
    loss: Callable[[Any, Batch], torch.Tensor]


def _ids(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)}


def _labels(generator: torch.Generator, masked: bool = False, packed: bool = False) -> dict[str, torch.Tensor]:
    # 32 targets: scaling by a power of two rounds nothing where a model computes in single precision, as norms and routers do
    ids, lengths = _ids(generator)["input_ids"], torch.tensor([3, 7, 5, 5, 2, 8, 4, 6])[:, None]
    held = torch.arange(LENGTH) < lengths
    made = {"input_ids": ids, "labels": torch.where(held, ids, -100)}
    if packed:  # a second document begins where the first ends
        made["position_ids"] = torch.where(held, torch.arange(LENGTH), torch.arange(LENGTH) - lengths)
    return made | ({"attention_mask": held.long()} if masked else {})


def _two_ids(generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = _ids(generator)["input_ids"]
    return {"input_ids": ids, "decoder_input_ids": ids.flip(0)}


def _images(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(BATCH, 3, 12, 12, generator=generator, dtype=torch.float64)}


def _vectors(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input": torch.randn(BATCH, LENGTH, WIDTH, generator=generator, dtype=torch.float64)}


def _next_token(output: Any, part: Batch) -> torch.Tensor:
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), part["input_ids"][:, 1:].flatten())


def causal_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    """Returns the mean over targets, as transformers' models do in single precision."""
    return F.cross_entropy(logits.view(-1, vocab_size), F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1))


def _own(output: Any, part: Batch) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def _square(output: Any, part: Batch) -> torch.Tensor:
    values = output if isinstance(output, torch.Tensor) else output.logits
    return (values - 0.5).square().mean()


class _Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _mlp() -> nn.Module:
    blocks = nn.Sequential(*(_Perceptron() for _ in range(LAYERS)))
    return nn.Sequential(OrderedDict(stem=nn.Linear(WIDTH, WIDTH), blocks=blocks, head=nn.Linear(WIDTH, 4)))


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.last = nn.GroupNorm(2, 8), nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.last(self.second(F.relu(self.norm(self.first(x))))))


class _ResNet(nn.Module):
    """A residual net; BatchNorm over replicas is another model than the plain one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)
        self.blocks = nn.ModuleList([_Convolutions() for _ in range(LAYERS)])

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class _Recommender(nn.Module):
    """Tables of few rows, and of rows that do not divide; means with a padding, sums, single ids."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            [
                nn.EmbeddingBag(50, 6, mode="mean", padding_idx=1),
                nn.Embedding(61, 6, padding_idx=0),
                nn.EmbeddingBag(41, 6, mode="sum"),
                nn.EmbeddingBag(3, 6, mode="sum"),
            ]
        )
        self.bottom, self.top = nn.ModuleList([nn.Linear(4, 6)]), nn.ModuleList([nn.Linear(5 * 6, 8), nn.Linear(8, 4)])

    def forward(self, dense: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        mean, one, total, few = self.tables
        looked_up = [mean(ids % 50), one(ids[:, 0]), total(ids % 41), few(ids % 3), self.bottom[0](dense)]
        return self.top[1](self.top[0](torch.cat(looked_up, 1)).tanh())


def _clicks(generator: torch.Generator) -> dict[str, torch.Tensor]:
    dense = torch.randn(BATCH, 4, generator=generator, dtype=torch.float64)
    return {"dense": dense, "ids": torch.randint(0, 61, (BATCH, 5), generator=generator)}


def _causal(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, use_cache=False, **options)
        return getattr(transformers, f"{name}For{'MaskedLM' if 'Bert' in name else 'CausalLM'}")(config)  # type: ignore[no-any-return]

    return make


def _of(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))  # type: ignore[no-any-return]

    return make


SIZES: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
DRY: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TEXT = (_ids, _next_token)
KINDS = {
    "llama": Kind(_causal("Llama", **SIZES, num_key_value_heads=4, intermediate_size=64), *TEXT),
    "gpt2": Kind(
        _of(
            "GPT2LMHeadModel", "GPT2Config", n_layer=LAYERS, n_embd=WIDTH, n_head=4, n_positions=32, vocab_size=VOCABULARY,
            bos_token_id=0, eos_token_id=0, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ),
        *TEXT,
    ),
    "bert": Kind(_causal("Bert", **SIZES, intermediate_size=64, max_position_embeddings=32, **DRY), *TEXT),
    "t5": Kind(
        _of(
            "T5ForConditionalGeneration", "T5Config", d_model=WIDTH, d_ff=64, num_layers=2, num_heads=4, d_kv=8,
            vocab_size=VOCABULARY, dropout_rate=0.0, use_cache=False, decoder_start_token_id=0,
        ),
        _two_ids, _next_token,
    ),
    "vit": Kind(
        _of(
            "ViTForImageClassification", "ViTConfig", **SIZES, intermediate_size=64, image_size=12, patch_size=4, num_labels=4,
            **DRY,
        ),
        _images, _square,
    ),
    "mixtral": Kind(_causal("Mixtral", **SIZES, num_key_value_heads=4, intermediate_size=64, **EXPERTS), *TEXT),
    "qwen3_moe": Kind(
        _causal(
            "Qwen3Moe", **SIZES, num_key_value_heads=4, head_dim=8, num_experts=4, moe_intermediate_size=16,
            num_experts_per_tok=2, experts_implementation="batched_mm",
        ),
        *TEXT,
    ),
    "gpt_oss": Kind(
        _causal("GptOss", **SIZES, num_key_value_heads=4, head_dim=8, intermediate_size=16, **EXPERTS), *TEXT
    ),
    "mlp": Kind(_mlp, _vectors, _square),
    "recommender": Kind(_Recommender, _clicks, _square),
    "resnet": Kind(_ResNet, _images, _square),
    "opt": Kind(
        _causal(
            "OPT", **SIZES, ffn_dim=64, word_embed_proj_dim=WIDTH, max_position_embeddings=32, dropout=0.0,
            attention_dropout=0.0,
        ),
        *TEXT,
    ),
    "gpt_neox": Kind(_causal("GPTNeoX", **SIZES, intermediate_size=64, max_position_embeddings=32), *TEXT),
    "qwen2": Kind(_causal("Qwen2", **SIZES, num_key_value_heads=4, intermediate_size=64, tie_word_embeddings=True), *TEXT),
    "distilbert": Kind(
        _causal(
            "DistilBert", dim=WIDTH, n_layers=LAYERS, n_heads=4, hidden_dim=64, max_position_embeddings=32, dropout=0.0,
            attention_dropout=0.0,
        ),
        *TEXT,
    ),
}  # fmt: skip


LABELLED = "+labels"
"""Ends the names of kinds that compute their own loss, over targets of unlike number by sample."""

MASKED, PACKED = ("bert", "llama", "qwen3_moe", "opt", "distilbert"), ("qwen2",)
"""Kinds whose labelled batches are padded, and those whose samples are two documents."""


def kind_of(name: str) -> Kind:
    """Returns a kind, or the labelled one that is made of it."""
    kind, labelled, _ = name.partition(LABELLED)
    if not labelled:
        return KINDS[kind]
    return replace(KINDS[kind], batch=partial(_labels, masked=kind in MASKED, packed=kind in PACKED), loss=_own)


def build(name: str) -> nn.Module:
    """Returns a model of a kind, with the same values on every call."""
    torch.manual_seed(0)
    model = kind_of(name).make().double().train()
    if name.endswith(LABELLED):
        model.loss_function = causal_loss
    return model


def batch_of(name: str) -> dict[str, torch.Tensor]:
    """Returns its batch."""
    return kind_of(name).batch(torch.Generator().manual_seed(1))
