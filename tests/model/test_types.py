"""Model types of transformers: the head that each is built with, and a step of it from made-up inputs."""

import math

import pytest
import torch

from rlplace.errors import InputError
from rlplace.model.capture.capture import capture
from rlplace.model.zoo import load_model

SMALL = "hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"
TEXT, VISION = (",".join(f"{part}_config.{option}" for option in SMALL.split(",")) for part in ("text", "vision"))
IMAGE = f"{SMALL},image_size=32"
MODELS = {
    f"deit,{IMAGE}": "DeiTForImageClassification",
    "levit,image_size=32,hidden_sizes=16/16/16,num_attention_heads=2/2/2,depths=1/1/1,"
    "key_dim=8/8/8": "LevitForImageClassification",
    "perceiver,max_position_embeddings=16,num_latents=4,d_latents=16,d_model=16,"
    "num_self_attends_per_block=1": "PerceiverForMaskedLM",
    f"llama4,{TEXT},text_config.num_key_value_heads=1,text_config.head_dim=8,text_config.vocab_size=32,"
    "text_config.num_local_experts=2": "Llama4ForCausalLM",
    f"llava,{TEXT},text_config.vocab_size=32,text_config.num_key_value_heads=2,{VISION},image_token_index=31": (
        "LlavaForConditionalGeneration"
    ),
    f"longformer,{SMALL},attention_window=8,vocab_size=32": "LongformerForMaskedLM",
    "led,encoder_layers=1,decoder_layers=1,d_model=16,encoder_attention_heads=2,decoder_attention_heads=2,vocab_size=32,"
    "attention_window=8": "LEDForConditionalGeneration",
    "reformer,axial_pos_shape=4/4,axial_pos_embds_dim=8/8,hidden_size=16,attention_head_size=8,num_attention_heads=2,vocab_size=32,"
    "lsh_attn_chunk_length=4,local_attn_chunk_length=4,attn_layers=local/lsh": "ReformerForMaskedLM",
    f"videomae,{IMAGE},num_frames=2": "VideoMAEForVideoClassification",
    "detr,backbone_config.model_type=resnet,backbone_config.depths=1/1/1/1,backbone_config.layer_type=basic,"
    "backbone_config.hidden_sizes=8/8/8/8,backbone_config.embedding_size=8,d_model=16,encoder_layers=1,decoder_layers=1,"
    "num_queries=4": "DetrForObjectDetection",
    "segformer,hidden_sizes=8/8/8/8,depths=1/1/1/1,num_attention_heads=1/1/1/1": "SegformerForImageClassification",
    f"wav2vec2,{SMALL},apply_spec_augment=false,conv_dim=8/8,conv_stride=5/2,conv_kernel=10/3,num_feat_extract_layers=2,"
    "num_conv_pos_embeddings=4,num_conv_pos_embedding_groups=2,vocab_size=32": "Wav2Vec2ForCTC",
    f"blip,{TEXT},text_config.vocab_size=32,text_config.bos_token_id=1,text_config.encoder_hidden_size=16,"
    f"{VISION},vision_config.image_size=32": "BlipForConditionalGeneration",
    f"clip,projection_dim=8,{TEXT},text_config.vocab_size=32,{VISION},vision_config.image_size=32": "CLIPModel",
    "sam,vision_config.image_size=32,vision_config.hidden_size=16,vision_config.num_hidden_layers=1,"
    "vision_config.num_attention_heads=2,vision_config.mlp_dim=16,vision_config.global_attn_indexes=0,"
    "prompt_encoder_config.image_size=32,prompt_encoder_config.image_embedding_size=2": "SamModel",
}  # fmt: skip


@pytest.mark.parametrize("text", MODELS, ids=[text.partition(",")[0] for text in MODELS])
def test_a_step_of(text):
    torch.manual_seed(0)
    model = load_model(f"hf:{text}", batch=2, seq=16, device="cpu")
    assert type(model.module).__name__ == MODELS[text]
    output = model.module(**model.example_inputs)
    loss = output.loss if model.loss is None else model.loss(output)
    loss.backward()
    assert math.isfinite(loss.item()) and loss.item() != 0
    assert any(p.grad is not None and p.grad.abs().max() > 0 for p in model.module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "asked", "method"),
    [
        ("longformer", None, "module"),
        ("led", "module", "module"),
        ("detr", "module", "module"),
        ("reformer", None, "dispatch"),
        ("clip", "export", "export"),
    ],
)
def test_captured_as_it_runs(kind, asked, method):
    text = next(text for text in MODELS if text.startswith(kind))
    model = load_model(f"hf:{text}", batch=2, seq=16)
    graph = capture(model.module, model.example_inputs, loss=model.loss, method=asked)
    assert graph.capture["method"] == method
    assert any("guessed" in note for note in graph.capture["notes"]) == (method == "module")
    assert sum(p.trainable for p in graph.parameters) > len(graph.parameters) // 3


def test_options_of_a_part_leave_the_others():
    text = "hf:llava,text_config.num_hidden_layers=1,text_config.hidden_size=64,text_config.num_attention_heads=2"
    plain, few = (
        load_model(f"{text}{more}", batch=1, seq=8).module.config for more in ("", ",vision_config.num_hidden_layers=1")
    )
    assert few.vision_config.num_hidden_layers == 1 != plain.vision_config.num_hidden_layers
    assert few.vision_config.intermediate_size == plain.vision_config.intermediate_size
    assert few.text_config.num_hidden_layers == 1 and few.text_config.hidden_size == 64


def test_lists_with_an_element_a_layer_are_cut():
    config = load_model(
        "hf:qwen2_5_vl,text_config.num_hidden_layers=2,text_config.hidden_size=512,vision_config.depth=1"
    ).module.config
    assert config.text_config.num_hidden_layers == len(config.text_config.layer_types) == 2


@pytest.mark.parametrize(
    ("text", "seq", "words"),
    [
        ("reformer", 100, r"trains on exactly 4096 positions, seq is 100; use --seq 4096 or set axial_pos_shape=A/B"),
        ("perceiver", 100, r"trains on exactly 2048 positions, seq is 100; use --seq 2048 or set max_position_embeddings"),
        ("clip_text_model,text_config.hidden_size=8", 16, "unknown option"),
        ("blip_text_model", 16, "has no head that the library trains, only its configuration, as a part of other types"),
        ("glm4v_vision", 16, r"its forward needs hidden_states, for which nothing is made up; give .* file.py:function"),
    ],
)
def test_refused(text, seq, words):
    with pytest.raises(InputError, match=words) as caught:
        load_model(f"hf:{text}", seq=seq)
    assert "\n" not in str(caught.value)


def test_no_configuration_inside_another_caches():
    text = "hf:colpali,vlm_config.text_config.num_hidden_layers=1,vlm_config.vision_config.num_hidden_layers=1"
    config = load_model(text).module.config
    assert config.vlm_config.text_config.use_cache is False and config.vlm_config.text_config.num_hidden_layers == 1
