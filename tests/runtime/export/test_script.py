"""Exported scripts train as the plan does by rlplace: the same losses, on four processes."""

import contextlib
import importlib.util
import io
import json
import re
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch

import rlplace
from rlplace.cli.main import main
from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.strategy.why_not import minor_version
from tests.runtime.equality import strategy_plan
from tests.runtime.job.launch import run, torchrun
from tests.runtime.strategy.native_cases import chain, flat

pytest.importorskip("transformers")

GPT2 = "hf:gpt2,n_layer=2,n_embd=32,n_head=4,vocab_size=64,n_positions=32,attn_pdrop=0.0,embd_pdrop=0.0,resid_pdrop=0.0"
DEEPER = GPT2.replace("n_layer=2", "n_layer=4")
WIDTHS = "hidden_size=32,intermediate_size=64,num_attention_heads=4,num_key_value_heads=4,vocab_size=64"
LLAMA = f"hf:llama,num_hidden_layers=2,{WIDTHS}"
EIGHT = LLAMA.replace("layers=2", "layers=8")
HALVES, QUARTERS = [(0, 1), (2, 3)], [(0,), (1,), (2,), (3,)]
BOTH, SHARED = {"shard": 2, "tensor": 2}, {"mesh": {"shard": 2}, "sharding": 1}

CASES = {
    "copies": (GPT2, flat("short", {"replicate": 4}, 0)),
    "gathered again, recomputed": (GPT2, flat("short", {"shard": 4}, 3, recompute="full", offload="all")),
    "hybrid, gathered once": (LLAMA, flat("short llama", {"replicate": 2, "shard": 2}, 1, recompute="selective")),
    "tensor, sequence": (LLAMA, flat("short llama", BOTH, 3, sequence_parallel=True, recompute="full")),
    "tensor alone": (LLAMA, flat("short llama", {"tensor": 4}, 0)),
    "mixed precision": (LLAMA, flat("short llama", {"shard": 4}, 2), {"autocast": "bf16"}),
    "stages, tied": (DEEPER, chain("gpt2", QUARTERS, "1f1b", mesh={}, sharding=0, recompute="full")),
    "stages, shared": (LLAMA, chain("short llama", HALVES, "1f1b", **SHARED)),
    "four stages each, shared": (EIGHT, chain("eight", HALVES * 4, "interleaved_1f1b", **SHARED)),
    "v, tied in one process": (DEEPER, chain("gpt2", [*HALVES, *reversed(HALVES)], "zbv", mesh={"replicate": 2}, sharding=0)),
    "stages, tensor": (LLAMA, chain("short llama", HALVES, "1f1b", mesh={"tensor": 2}, sharding=0, sequence_parallel=True)),
}

if minor_version(torch.__version__) < (2, 13):  # refused before
    del CASES["v, tied in one process"]


def plan_of(model, strategy, graph=None):
    asked = {"model": model, "batch": strategy["microbatch"][0], "seq": 8, "dtype": "fp32", "optimizer": "sgd"}
    return strategy_plan(strategy, source={"graph": asked | (graph or {})})


STEPS = 3


def load(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script_losses(script):
    """What `main` prints; the process group is there already."""
    printed = io.StringIO()
    with (
        mock.patch.object(script.dist, "init_process_group"),
        mock.patch.object(script.dist, "destroy_process_group"),
        mock.patch.object(script.sys, "argv", ["script", str(STEPS)]),
        contextlib.redirect_stdout(printed),
    ):
        script.main()
    return [float(text) for text in re.findall(r"loss (\S+)", printed.getvalue())]


def losses_of(path):
    """Of a script alone."""
    return script_losses(load(path))


def plan_losses(script, plan):
    strategy = PlacementPlan.load(plan)
    size = strategy.strategy.pipelines[0].microbatch[0]
    inputs = {name: value[:size] for name, value in script.whole_batch(0).items()}
    model = rlplace.distribute(script.build_model(), strategy, inputs, loss=getattr(script, "loss_of", None))
    optimizer = torch.optim.SGD(model.parameter_groups(), lr=script.LR)
    losses = []
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=strategy.source["graph"].get("autocast") == "bf16"):
            output = model(**script.whole_batch(step))
        loss = getattr(output, "loss", output)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(paths):
    scripts = {name: load(script) for name, (script, _) in paths.items()}
    return {name: (script_losses(scripts[name]), plan_losses(scripts[name], plan)) for name, (_, plan) in paths.items()}


MORE = [pytest.mark.slow, pytest.mark.long]
QUICK = ("copies", "hybrid, gathered once", "stages, tensor")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What all processes found of the quick cases, or of the others."""

    @cache
    def run_cases(quick):
        folder, paths = tmp_path_factory.mktemp("scripts"), {}
        for number, name in enumerate(name for name in CASES if (name in QUICK) == quick):
            script, path = folder / f"script_{number}.py", folder / f"{number}.plan.json"
            plan = plan_of(*CASES[name])
            plan.save(path)
            script.write_text(rlplace.export(plan, "script").replace("LR = 1e-3", "LR = 1.0"))
            paths[name] = str(script), str(path)
        return run(4, compare, paths)

    return run_cases


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=MORE) for name in CASES])
@pytest.mark.slow
def test_a_script_trains_as_its_plan(name, results):
    (printed, own), *others = (result[name] for result in results(name in QUICK))
    assert [losses for losses, _ in others] == [[]] * 3
    assert len(set(printed)) == 3
    assert printed == pytest.approx(own, rel=2e-6)


OWN = """import torch

def net(batch=2, width=4):
    layers = [torch.nn.Linear(width, width) for _ in range(2)]
    return torch.nn.Sequential(*layers), torch.randn(batch, width), lambda y: y.square().mean()
"""


def test_copies_train_as_one_process_on_the_whole_batch(tmp_path):
    """Two copies with two micro-batches each: the losses of steps on whole batches, so the gradients behind them, too."""
    (tmp_path / "own.py").write_text(OWN)
    stages = [{"blocks": ["0", "1"], "devices": [0, 1], "mesh": {"replicate": 2}}]
    plan = plan_of(f"{tmp_path}/own.py:net", {"batch": 8, "microbatch": [2], "microbatches": [2], "stages": stages})
    path = tmp_path / "train.py"
    path.write_text(rlplace.export(plan, "script").replace("LR = 1e-3", "LR = 1.0"))
    losses, others = run(2, losses_of, str(path), timeout_s=120)
    script = load(path)
    model, wanted = script.build_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(STEPS):
        loss = script.loss_of(model(**script.whole_batch(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(loss.item())
    assert losses == pytest.approx(wanted, rel=1e-5) and others == []


CACHING = f"""import torch
from transformers import LlamaConfig, LlamaForCausalLM

def net(batch=2):
    config = LlamaConfig({WIDTHS.replace(",", ", ")}, num_hidden_layers=2)
    ids = torch.arange(batch * 8).reshape(batch, 8) % 60
    return LlamaForCausalLM(config), {{"input_ids": ids, "labels": ids}}
"""


def test_a_model_that_caches_by_default_trains_in_recomputed_stages(tmp_path):
    (tmp_path / "caching.py").write_text(CACHING)
    halves = [["model.embed_tokens", "model.layers.0"], ["model.layers.1", "model.norm", "lm_head"]]
    again = [{block: "full" for block in held if "layers" in block} for held in halves]
    stages = [{"blocks": b, "devices": [n], "recompute": r} for n, (b, r) in enumerate(zip(halves, again, strict=True))]
    strategy = {"batch": 4, "microbatch": [2], "microbatches": [2], "schedule": "1f1b", "stages": stages}
    path = tmp_path / "train.py"
    path.write_text(rlplace.export(plan_of(f"{tmp_path}/caching.py:net", strategy), "script"))
    losses = next(losses for losses in run(2, losses_of, str(path), timeout_s=120) if losses)
    script = load(path)
    loss = script.build_model()(**script.whole_batch(0)).loss
    assert losses[0] == pytest.approx(loss.item(), rel=1e-5)


def test_only_the_parts_that_are_needed_are_written():
    text = rlplace.export(plan_of(*CASES["copies"]), "script")
    assert "rlplace" not in re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
    assert not re.search(r"Shard|shard|Pipeline|Tensor\b|checkpoint", text)
    assert len(text.splitlines()) < 85


SMALL = "hidden_size=32,intermediate_size=64,num_hidden_layers=2,num_attention_heads=4"
PATHS = ["embeddings", "encoder.layers.0", "encoder.layers.1", "final_layer_norm"]
TOWER = {
    "batch": 4, "microbatch": [2], "microbatches": [1],
    "stages": [{"blocks": PATHS, "devices": [0, 1], "mesh": {"replicate": 2}}],
}  # fmt: skip
REFUSED = {
    "a model of the zoo": (("zoo:mlp", flat("short", {"replicate": 4}, 0)), "zoo"),
    "a loss of its outputs": ((f"hf:clip_text_model,{SMALL},vocab_size=64", TOWER), "computes no loss of its own"),
    "packed weights": ((GPT2, flat("short", {"tensor": 4}, 0)), "c_attn' is no plain nn.Linear"),
    "unlike micro-batches": (
        (LLAMA, flat("short llama", {"shard": 4}, 1) | {"microbatches": [1, 3, 2, 2]}),
        "unlike micro-batches",
    ),
    "dropout between blocks": (
        (DEEPER.replace("embd_pdrop=0.0", "embd_pdrop=0.1"), chain("gpt2", QUARTERS, "1f1b", mesh={}, sharding=0)),
        "dropout between blocks",
    ),
    "what nothing runs": ((LLAMA, flat("short llama", {"branch": 4}, 0, microbatch=8)), "branch is not run"),
    "parts of the positions": ((LLAMA, flat("short llama", {"context": 4}, 0, microbatch=8)), "context"),
}


def test_a_configuration_in_a_file_is_written_out(tmp_path):
    options = dict(part.split("=") for part in f"num_hidden_layers=2,{WIDTHS}".split(","))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **{key: int(value) for key, value in options.items()}}))
    strategy = flat("short llama", {"replicate": 4}, 0)
    texts = [rlplace.export(plan_of(model, strategy), "script") for model in (LLAMA, f"hf:{path}")]
    first, second = (next(line for line in text.splitlines() if "LlamaConfig(" in line) for text in texts)
    assert all(f"{key}={value}" in first and f"{key}={value}" in second for key, value in options.items())


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_script_cannot_say_is_refused(name):
    case, reason = REFUSED[name]
    with pytest.raises(InputError, match=reason):
        rlplace.export(plan_of(*case), "script")


@pytest.mark.long
@pytest.mark.slow
def test_the_verb_writes_what_torchrun_starts(tmp_path, capsys):
    (tmp_path / "own.py").write_text(
        "import torch\n\ndef net(batch=2, width=8):\n"
        "    layers = [torch.nn.Linear(width, width) for _ in range(4)]\n"
        "    return torch.nn.Sequential(*layers), torch.randn(batch, width), lambda y: y.square().mean()\n"
    )
    blocks = [["0", "1"], ["2", "3"]]
    stages = [{"blocks": held, "devices": [number]} for number, held in enumerate(blocks)]
    strategy = {"batch": 4, "microbatch": [2], "microbatches": [2], "schedule": "gpipe", "stages": stages}
    plan_of(f"{tmp_path}/own.py:net,width=4", strategy).save(tmp_path / "own.plan.json")
    assert main(["export", f"{tmp_path}/own.plan.json", "--to", "script", "--out", f"{tmp_path}/train.py", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == (tmp_path / "train.py").read_text()
    code, out, err = torchrun(2, tmp_path / "train.py", "3")
    assert code == 0, err
    script, losses = load(tmp_path / "train.py"), re.findall(r"loss (\S+)", out)
    model = script.build_model()
    assert float(losses[0]) == pytest.approx(script.loss_of(model(**script.whole_batch(0))).item(), rel=1e-6)
    assert len(losses) == 3
