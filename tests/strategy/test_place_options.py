"""`rlplace.place` takes what the command line takes, and refuses what it does not know by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import rlplace
from rlplace.cli.main import main
from rlplace.errors import InputError
from rlplace.model.zoo import load_model
from rlplace.placement import PLANNERS, get_planner, planner_options
from rlplace.problem.generate import random_problem

GPT2 = "hf:gpt2,n_layer=2,n_embd=64,n_head=2,vocab_size=256"
WORDS = ["place", GPT2, "--cluster", "a100-80g:4", "--seq", "32", "--batch", "16", "--calls", "30"]


@pytest.fixture(scope="module")
def gpt2() -> tuple[nn.Module, dict]:
    loaded = load_model(GPT2, batch=8, seq=32, dtype="fp32")
    return loaded.module, loaded.example_inputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "how"),
    [
        (["--dtype", "bf16", "--master-weights"], {"dtype": "bf16", "master_weights": True}),
        (["--autocast", "fp16"], {"autocast": torch.float16}),
        (["--dtype", "fp16"], {"dtype": torch.float16}),
    ],
)
def test_precision_is_that_of_the_command_line(
    words: list[str], how: dict, gpt2: tuple[nn.Module, dict], tmp_path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same graph, question, strategy and times; float32 weights are planned as if they were converted."""
    out = tmp_path / "x.plan.json"
    assert main([*WORDS, *words, "--out", str(out)]) == 0
    said = rlplace.PlacementPlan.load(out)
    module, inputs = gpt2
    plan = rlplace.place(module, "a100-80g:4", example_inputs=inputs, batch=16, calls=30, time_limit_s=None, **how)
    assert plan.source is not None and said.source is not None
    for key in ("capture", "graph_fingerprint", "cluster_fingerprint", "costs", "host", "op_times"):
        assert plan.source[key] == said.source[key], key
    assert plan.strategy is not None and said.strategy is not None
    assert plan.problem == said.problem and plan.strategy.pipelines == said.strategy.pipelines
    assert plan.predicted.step_time_s == said.predicted.step_time_s
    assert next(module.parameters()).dtype == torch.float32  # the model itself stays as it is


def test_precision_is_for_modules(gpt2: tuple[nn.Module, dict]) -> None:
    graph = rlplace.capture(*gpt2)
    for target, why in (
        (graph, "a graph was captured as it is"),
        (random_problem(0, 6, 2), "a problem was captured and priced"),
    ):
        for how in ({"dtype": "bf16"}, {"autocast": "bf16"}, {"master_weights": True}):
            with pytest.raises(InputError, match=f"place: {next(iter(how))} decides how a module is captured, {why}"):
                rlplace.place(target, "a100-80g:2" if target is graph else None, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"btach": 8}, "unknown option of place 'btach'; did you mean 'batch'"),
        ({"micro_batches": 8}, "unknown option of place 'micro_batches'; did you mean 'microbatches'"),
        ({"planner": "annealing", "coolings": 1.0}, "unknown option of place 'coolings'; did you mean 'cooling'"),
        ({"planner": "heft", "cooling": 1.0}, "unknown option of place 'cooling'"),
        ({"planner": "heft", "calls": 9}, "planner heft is no search"),
        ({"planner": "heft", "couple": "gather"}, "computes the loss of the whole batch in one pass .*; leave couple out"),
        ({"planner": "strategy", "mesh": (2, 2)}, "unknown option of place 'mesh'; known: "),
    ],
)
def test_unknown_options_are_refused_by_name(how: dict, said: str, gpt2: tuple[nn.Module, dict]) -> None:
    """Before anything is captured, with the nearest known name."""
    module, inputs = gpt2
    with pytest.raises(InputError, match=said):
        rlplace.place(module, "a100-80g:2", example_inputs=inputs, **how)


@pytest.mark.parametrize("name", PLANNERS)
def test_planners_name_their_options(name: str) -> None:
    """What the signature names is taken, anything else is no option."""
    own = planner_options(name)
    assert own is not None
    with pytest.raises(TypeError, match="strange"):
        get_planner(name)(random_problem(0, 6, 2), seed=0, time_limit_s=1.0, strange=1)
