"""MODEL texts: what they build, how options are read, what is refused."""

import json
import sys
import textwrap

import pytest
import torch

from rlplace.cli.capture_cache import cached
from rlplace.errors import InputError, MissingError
from rlplace.model.capture.capture import capture
from rlplace.model.zoo import LoadedModel, load_model
from tests import captured


def test_transformers_type_with_options():
    model = load_model("hf:gpt2,n_layer=3,hidden_size=48,n_head=2,scale_attn_weights=false,resid_pdrop=0.25", batch=3, seq=20)
    assert isinstance(model, LoadedModel)
    config = model.module.config
    assert (config.n_layer, config.n_embd, config.scale_attn_weights, config.resid_pdrop) == (3, 48, False, 0.25)
    assert config.use_cache is False
    assert type(model.module).__name__ == "GPT2LMHeadModel"
    assert model.example_inputs["input_ids"].shape == (3, 20)
    assert model.example_inputs["input_ids"].device.type == "cpu"
    assert all(p.device.type == "meta" for p in model.module.parameters())
    assert model.module.training and model.loss is None


def test_a_width_of_heads_that_only_the_code_of_a_type_reads():
    """Qwen3-30B-A3B has heads of 128 at a width of 2048 over 32 heads; a type whose code reads no such width refuses it."""
    sizes = "num_hidden_layers=1,hidden_size=64,num_attention_heads=4,num_key_value_heads=2,head_dim=32,vocab_size=64"
    model = load_model(f"hf:qwen3_moe,{sizes},num_experts=4,moe_intermediate_size=16", batch=1, seq=8)
    assert tuple(model.module.get_parameter("model.layers.0.self_attn.q_proj.weight").shape) == (4 * 32, 64)
    with pytest.raises(InputError, match="unknown option of hf:bert 'head_dim'"):
        load_model("hf:bert,head_dim=32", batch=1, seq=8)


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("bert", "BertForMaskedLM"),
        ("llama,num_hidden_layers=1", "LlamaForCausalLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("vit", "ViTForImageClassification"),
        ("resnet", "ResNetForImageClassification"),
    ],
)
def test_heads(kind, head):
    assert type(load_model(f"hf:{kind}").module).__name__ == head


def test_dtype_and_device():
    model = load_model("hf:vit,num_hidden_layers=1,hidden_size=16,num_attention_heads=2,intermediate_size=16", dtype="bf16")
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
    assert model.example_inputs["pixel_values"].dtype == torch.bfloat16
    assert model.example_inputs["labels"].dtype == torch.int64
    real = load_model("zoo:mlp,layers=1,width=4", device="cpu")
    assert torch.isfinite(real.module(**real.example_inputs)["loss"])


@pytest.mark.parametrize("name", [name for name, spec in captured.SMALL.items() if spec.startswith("zoo:")])
def test_zoo_models_are_seeded_and_run(name):
    models = [load_model(captured.SMALL[name], batch=2, seq=6, device="cpu") for _ in range(2)]
    for key, value in models[0].example_inputs.items():
        assert torch.equal(value, models[1].example_inputs[key])
    loss = models[0].module(**models[0].example_inputs)["loss"]
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None for p in models[0].module.parameters())


def test_random_cells_follow_the_seed():
    first, same, other = (
        [type(m).__name__ for m in load_model(f"zoo:nasnet,seed={seed}").module.modules()] for seed in (0, 0, 1)
    )
    assert first == same != other


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("gpt2", "expected hf:TYPE"),
        ("hf:", "expected hf:TYPE"),
        ("hf:gtp2", "did you mean 'gpt2'"),
        ("hf:gpt2,n_layers=3", "did you mean 'n_layer'"),
        ("hf:gpt2,n_layer=three", "not a whole number"),
        ("hf:gpt2,n_layer=-1", "must not be negative"),
        ("hf:gpt2,resid_pdrop=much", "not a number"),
        ("hf:gpt2,resid_pdrop=nan", "not finite"),
        ("hf:gpt2,scale_attn_weights=maybe", "not true or false"),
        ("hf:gpt2,n_layer", "expected key=value"),
        ("hf:gpt2,n_layer=1,n_layer=2", "appears twice"),
        ("hf:gpt2,n_embd=10,n_head=3", "hf:gpt2"),
        ("hf:speecht5_hifigan", "has no head that the library trains"),
        ("zoo:lsmt", "did you mean 'lstm'"),
        ("zoo:lstm,widht=3", "did you mean 'width'"),
        ("zoo:lstm,width=0", "must be from 1"),
        ("zoo:lstm,width=-3", "must be from 1"),
        ("zoo:unet,image=30", "multiple of 16"),
        ("zoo:transformer,width=10,heads=3", "cannot be built"),
        ("no.such.module:build", "no module of this name"),
        ("missing_file.py:build", "file not found"),
        ("rlplace.errors:nothing", "unknown function of rlplace.errors 'nothing'"),
        ("json:dumps", "holds no function that returns a model"),
    ],
)
def test_refused(spec, words):
    with pytest.raises(InputError, match=words) as caught:
        load_model(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch": 0}, "batch"),
        ({"seq": True}, "seq"),
        ({"dtype": "fp31"}, "did you mean 'fp32'"),
        ({"device": "cuda"}, "device"),
    ],
)
def test_refused_arguments(arguments, words):
    with pytest.raises(InputError, match=words):
        load_model("zoo:mlp", **arguments)


def test_length_beyond_the_positions():
    with pytest.raises(InputError, match=r"512 positions, seq is 600; use --seq 512 or max_position_embeddings=600"):
        load_model("hf:bert,num_hidden_layers=1", seq=600)
    longer = load_model("hf:bert,num_hidden_layers=1,max_position_embeddings=600", seq=600)
    assert longer.example_inputs["labels"].shape == (8, 600)
    assert load_model("hf:t5,num_layers=1", seq=600).example_inputs["labels"].shape == (8, 600)
    assert load_model("hf:whisper", seq=600).example_inputs["labels"].shape == (8, 448)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 90}
LLAMA = {"model_type": "llama", "num_key_value_heads": 1, "max_position_embeddings": 64, "torch_dtype": "bfloat16", **SMALL}


@pytest.fixture
def config(tmp_path):
    """Makes a folder with the configuration of a small Llama, as published models have."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **LLAMA}))
    return tmp_path


def test_a_configuration_in_a_file_is_that_type_with_those_options(config):
    options = ",".join(f"{key}={LLAMA[key]}" for key in (*SMALL, "num_key_value_heads", "max_position_embeddings"))
    plain = load_model(f"hf:llama,{options}", batch=2, seq=8)
    shapes = {name: tuple(p.shape) for name, p in plain.module.named_parameters()}
    for where in (config, config / "config.json"):
        loaded = load_model(f"hf:{where}", batch=2, seq=8)
        assert type(loaded.module) is type(plain.module)
        assert {name: tuple(p.shape) for name, p in loaded.module.named_parameters()} == shapes
        assert {p.dtype for p in loaded.module.parameters()} == {torch.float32}  # --dtype decides, not the file
    deeper = load_model(f"hf:{config},num_hidden_layers=3", batch=2, seq=8).module.config
    assert (deeper.num_hidden_layers, deeper.hidden_size) == (3, 32)


def test_a_configuration_names_its_head(config):
    named = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **SMALL}
    (config / "bert.json").write_text(json.dumps(named))
    assert type(load_model(f"hf:{config / 'bert.json'}", batch=2, seq=8).module).__name__ == "BertForSequenceClassification"


def test_what_is_kept_of_a_configuration_goes_by_its_content(config, monkeypatch):
    monkeypatch.setenv("RLPLACE_CACHE", str(config / "cache"))
    made = iter(range(9))
    model = f"hf:{config}"
    assert [cached("graph", model, {}, lambda: next(made)) for _ in range(2)] == [0, 0]
    (config / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 3}))
    assert cached("graph", model, {}, lambda: next(made)) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("meta-llama/Llama-3.1-8B", r"no such file, and nothing is downloaded: take a type with options, such as hf:llama, or"),
        ("openai-community/gpt2", r"such as hf:gpt2, or the model's configuration, hf:path/to/config.json"),
        ("{folder}/torn.json", r"torn.json: no JSON: "),
        ("{folder}/other.json", r"other.json: says no model_type, so it is no configuration of transformers"),
        ("{folder}/config.json,layers=3", r"unknown option"),
    ],
)
def test_configurations_refused(config, name, words):
    (config / "torn.json").write_text("{")
    (config / "other.json").write_text('{"a": 1}')
    with pytest.raises(InputError, match=words):
        load_model(f"hf:{name.format(folder=config)}", batch=2, seq=8)


def test_missing_extra(monkeypatch):
    for name in ("transformers", "transformers.models.auto"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingError, match=r"rlplace\[transformers\]"):
        load_model("hf:gpt2")


MODEL_FILE = """
    import torch

    def build(batch, width=4):
        return torch.nn.Linear(width, 2), torch.zeros(batch, width), lambda output: output.sum()

    def sized(width=4, batch_size=2, seq_length=3):
        return torch.nn.Linear(width, 2), torch.zeros(batch_size, width), lambda output: output.sum()

    class Lightning(torch.nn.Linear):
        def training_step(self, batch, index):
            return self(batch).sum()

    def lightning(batch):
        return Lightning(4, 2), torch.zeros(batch, 4)

    def pair():
        return torch.nn.Linear(4, 2), {"input": torch.zeros(3, 4)}

    def wrong():
        return 3

    def raises():
        raise ValueError("first line\\nsecond line")
"""


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "my_model_file.py"
    path.write_text(textwrap.dedent(MODEL_FILE))
    return path


def test_function_of_a_file(model_file):
    model = load_model(f"{model_file}:build,width=6", batch=5)
    assert model.module.in_features == 6
    graph = capture(model.module, model.example_inputs, loss=model.loss)
    assert graph.samples == 5
    pair = load_model(f"{model_file}:pair", dtype="bf16")
    assert pair.loss is None and pair.example_inputs["input"].dtype == torch.bfloat16


def test_function_of_a_module_in_the_current_folder(model_file, monkeypatch):
    monkeypatch.chdir(model_file.parent)
    before = list(sys.path)
    assert load_model("my_model_file:pair").module.in_features == 4
    assert sys.path == [str(model_file.parent), *before]  # its code may import more when it runs
    sys.path[:] = before
    sys.modules.pop("my_model_file")


def test_sizes_of_other_names_are_refused_until_they_are_fixed(model_file):
    with pytest.raises(
        InputError, match=r"parameter batch_size gets no --batch, .* named batch; rename it, .*sized,batch_size=8"
    ):
        load_model(f"{model_file}:sized,seq_length=3", batch=5)
    with pytest.raises(InputError, match=r"parameter seq_length gets no --seq"):
        load_model(f"{model_file}:sized,batch_size=3", batch=5)
    assert load_model(f"{model_file}:sized,batch_size=3,seq_length=3").example_inputs[0].shape == (3, 4)


def test_lightning_modules_are_told_what_to_wrap(model_file):
    model = load_model(f"{model_file}:lightning", batch=5)
    with pytest.raises(InputError, match=r"its loss is in training_step.*forward\(batch\) calls training_step\(batch, 0\)"):
        capture(model.module, model.example_inputs)
    assert capture(model.module, model.example_inputs, loss=torch.sum).samples == 5


@pytest.mark.parametrize(
    ("name", "words"),
    [("wrong", "must return"), ("raises", "raised ValueError: first line$"), ("build,depth=3", "unknown option")],
)
def test_functions_refused(model_file, name, words):
    with pytest.raises(InputError, match=words):
        load_model(f"{model_file}:{name}")


def test_file_that_does_not_import(tmp_path):
    path = tmp_path / "broken_model_file.py"
    path.write_text("import no_such_package_here\n")
    with pytest.raises(InputError, match="import fails: No module named 'no_such_package_here'"):
        load_model(f"{path}:build")
