"""Adapters by PEFT on models of transformers: options, what is trained, and checkpoints that PEFT loads."""

import pytest
import torch

from rlplace.cli.main import build_parser
from rlplace.cli.place import PlaceOptions
from rlplace.errors import InputError
from rlplace.model.zoo import load_model
from rlplace.model.zoo.adapters import with_options
from rlplace.runtime.state.training_state import save_checkpoint

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

SIZES = "num_hidden_layers=2,hidden_size=64,intermediate_size=128,num_attention_heads=4,num_key_value_heads=2,vocab_size=100"
BASE = f"hf:llama,{SIZES}"
ADAPTED = f"{BASE},lora.r=4,lora.targets=q_proj+v_proj"


def load(text, device="cpu"):
    torch.manual_seed(0)
    return load_model(text, batch=2, seq=8, device=device)


def test_adapters_alone_are_trained():
    for device in ("cpu", "meta"):
        module = load(ADAPTED, device).module
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        assert sum(p.numel() for p in trained.values()) == 2 * 4 * ((64 + 64) + (64 + 32))  # r x (in + out), layer by layer
        assert {p.device.type for p in module.parameters()} == {device}
    packed = load(f"{ADAPTED},quantize=int8").module
    assert type(packed.base_model.model.lm_head) is torch.nn.Linear
    names = {name.rpartition(".")[2] for name, p in packed.named_parameters() if p.dtype == torch.int8}
    assert names == {"packed"}


def test_options_become_a_part_of_the_model_that_plans_record():
    words = f"place {BASE} --lora r=4,targets=q_proj+v_proj --quantize nf4 --cluster cpu:2"
    options = PlaceOptions.of(build_parser().parse_args(words.split()))
    assert options.model == f"{ADAPTED},quantize=nf4"
    assert load(options.model, "meta").name == options.model


def test_checkpoints_load_in_peft(tmp_path):
    loaded = load(ADAPTED)
    with torch.no_grad():
        for parameter in (p for p in loaded.module.parameters() if p.requires_grad):
            parameter.add_(0.1)
    folder = save_checkpoint(tmp_path, loaded.module, step=3)
    again = peft.PeftModel.from_pretrained(load(BASE).module, folder)
    inputs = loaded.example_inputs
    assert torch.equal(again(**inputs).logits, loaded.module.eval()(**inputs).logits)
    assert not torch.equal(again(**inputs).logits, load(BASE).module.eval()(**inputs).logits)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora.r=4,lora.targets=nothing", r"hf:llama: lora: .*nothing.*name layers by their last name"),
        ("lora.rank=4", "lora"),
        ("quantize=nf4", "no frozen linear layer to quantize"),
    ],
)
def test_refusals(text, message):
    with pytest.raises(InputError, match=message):
        load(f"{BASE},{text}", "meta")


def test_other_models_are_told_what_to_do():
    with pytest.raises(InputError, match=r"--lora is for hf: models, .* return peft.get_peft_model"):
        with_options("mine.py:make", "r=4", None)
