"""Small configurations of models that transformers has."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.bert.modeling_bert import BertForMaskedLM
from transformers.models.clip.modeling_clip import CLIPModel
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralForCausalLM
from transformers.models.roberta.modeling_roberta import RobertaForSequenceClassification
from transformers.models.t5.modeling_t5 import T5ForConditionalGeneration
from transformers.models.vit.modeling_vit import ViTForImageClassification

from benchmarks.trials.parts import Made

SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _tokens(batch: int, length: int = 10) -> Any:
    ids = torch.randint(3, 50, (batch, length))
    return {"input_ids": ids, "labels": ids.clone()}


def hf_gpt2(batch: int = 8) -> Made:
    config = AutoConfig.for_model(
        "gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=50, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return GPT2LMHeadModel(config), _tokens(batch)


def hf_llama(batch: int = 8) -> Made:
    return LlamaForCausalLM(AutoConfig.for_model("llama", num_key_value_heads=2, **SMALL)), _tokens(batch)


def hf_bert_padded(batch: int = 8) -> Made:
    """Returns some labels are ignored, some positions padded."""
    inputs = _tokens(batch)
    inputs["attention_mask"] = (torch.arange(10) < torch.randint(4, 11, (batch, 1))).long()
    inputs["labels"][torch.rand(batch, 10) < 0.7] = -100
    inputs["labels"][:, 0] = 4
    return BertForMaskedLM(AutoConfig.for_model("bert", **SMALL, **QUIET)), inputs


def hf_roberta_classes(batch: int = 8) -> Made:
    config = AutoConfig.for_model("roberta", num_labels=3, max_position_embeddings=40, **SMALL, **QUIET, classifier_dropout=0.0)
    return RobertaForSequenceClassification(config), {
        "input_ids": _tokens(batch)["input_ids"],
        "labels": torch.randint(0, 3, (batch,)),
    }


def hf_t5(batch: int = 8) -> Made:
    config = AutoConfig.for_model("t5", d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=50, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config), _tokens(batch)


def hf_vit(batch: int = 8) -> Made:
    config = AutoConfig.for_model("vit", image_size=16, patch_size=4, num_labels=5, **SMALL, **QUIET)
    inputs = {"pixel_values": torch.randn(batch, 3, 16, 16), "labels": torch.randint(0, 5, (batch,))}
    return ViTForImageClassification(config), inputs


def hf_mixtral(batch: int = 8) -> Made:
    config = AutoConfig.for_model("mixtral", num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **SMALL)
    return MixtralForCausalLM(config), _tokens(batch)


def hf_clip(batch: int = 8) -> Made:
    small = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    text, vision = {**small, "vocab_size": 50, "eos_token_id": 49}, {**small, "image_size": 16, "patch_size": 8}
    model = CLIPModel(AutoConfig.for_model("clip", text_config=text, vision_config=vision, projection_dim=16))
    return model, {
        "input_ids": torch.randint(0, 49, (batch, 6)),
        "pixel_values": torch.randn(batch, 3, 16, 16),
        "return_loss": True,
    }
