"""Reasons against a strategy that only the model or the batch shows are given in one line."""

import copy

import pytest
import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.plan.strategy import Strategy
from rlplace.runtime.strategy.facts import examine
from rlplace.runtime.strategy.run import prepare
from rlplace.runtime.strategy.why_not import why_not
from tests.runtime.strategy import native_worker
from tests.runtime.strategy.native_cases import flat

IDS = {"input_ids": torch.zeros(2, 6, dtype=torch.long)}


def strategy(*args, **options):
    return Strategy.from_dict(flat(*args, **options))


def processes(count):
    stage = {"blocks": ["0"], "devices": list(range(count)), "mesh": {"replicate": count}}
    return Strategy.from_dict({"batch": 4 * count, "microbatch": [2], "microbatches": [2], "stages": [stage]})


def test_facts_of_a_model():
    pytest.importorskip("transformers")
    facts = examine(native_worker.make("gpt2"), IDS)
    assert facts.no_cut is facts.reused is facts.tensor.no_tensor is facts.tensor.no_sequence is None
    assert facts.tensor.parts == 4
    assert facts.tensor.layouts["transformer.h.0.attn.c_attn"] == "column"
    assert facts.tensor.layouts["transformer.h.3.mlp.c_proj"] == "row"
    layouts = dict(facts.tensor.layouts)
    assert why_not(strategy("gpt2", {"tensor": 4}, 0, tensor=layouts), facts) is None
    turned = {**layouts, "transformer.h.0.mlp.c_fc": "row"}
    assert "out as 'row', this runtime as column" in why_not(strategy("gpt2", {"tensor": 4}, 0, tensor=turned), facts)
    del layouts["transformer.h.0.mlp.c_fc"]
    assert "leaves transformer.h.0.mlp.c_fc whole" in why_not(strategy("gpt2", {"tensor": 4}, 0, tensor=layouts), facts)


def test_blocks_stand_in_the_order_of_the_forward():
    from tests.runtime import small_models

    model, inputs, _ = small_models.inception()
    facts = examine(model, inputs)
    assert facts.no_cut is None
    assert facts.batch_norm
    assert facts.blocks.index("mix.0.0") < facts.blocks.index("blocks.1.0.0")


@pytest.mark.slow
def test_position_bias_leaves_attention_whole():
    pytest.importorskip("transformers")
    facts = examine(native_worker.make("t5"), IDS | {"decoder_input_ids": IDS["input_ids"]})
    assert facts.tensor.no_tensor is None
    assert {path.rpartition(".")[2] for path in facts.tensor.layouts} == {"wi", "wo"}
    assert "may mix positions" in facts.tensor.no_sequence


class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.outer(self.inner(self.outer(x).tanh()).tanh())


def test_what_a_block_calls_again_is_no_split_backward():
    """As ALBERT's only layer: torch frees what the first gradient of a weight used, and the second needs."""
    facts = examine(nn.Sequential(nn.Linear(8, 8), Again()), {"input": torch.zeros(2, 8)})
    assert facts.reused == "1.outer.weight"
    chain = [{"blocks": [name], "devices": [device]} for device, name in enumerate(facts.blocks)]
    data = {"batch": 4, "microbatch": [1], "microbatches": [4], "stages": chain}
    assert why_not(Strategy.from_dict({**data, "schedule": "1f1b"}), facts) is None
    split = Strategy.from_dict({**data, "schedule": "interleaved_zero_bubble"})
    assert "goes through 1.outer.weight twice" in why_not(split, facts)


class Traced(nn.Module):
    """Does something else while it is recorded, as masks of transformers do."""

    def __init__(self, factor):
        super().__init__()
        self.factor, self.layers, self.norm = factor, nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.norm(self.layers[0](x)) * (self.factor if torch.compiler.is_compiling() else 1.0)
        return {"loss": self.layers[1](self.drop(x)).square().mean(), "mask": x > 0}


@pytest.mark.parametrize(("factor", "reason"), [(1.0, None), (1.001, "other results than the model"), (-1.0, "other results")])
def test_a_record_computes_what_the_model_computes(factor, reason):
    model = Traced(factor)
    before = copy.deepcopy(model.state_dict())
    no_cut = examine(model, {"x": torch.randn(4, 4)}).no_cut
    assert no_cut is None if reason is None else reason in no_cut and "pipeline=1" in no_cut
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert examine(model, {"x": torch.randn(4, 4, device="meta")}).no_cut is None  # without values nothing is compared


class Alternating(nn.Module):
    """Draws numbers for a whole value while it works on parts that it draws numbers for, too."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        inner = self.up(x)
        noise = nn.functional.dropout(torch.ones_like(x), 0.5, self.training)
        return noise * self.down(nn.functional.dropout(inner, 0.5, self.training))


def test_numbers_drawn_for_a_whole_value_inside_of_a_region_leave_it_whole():
    facts = examine(nn.Sequential(Alternating(), nn.Linear(8, 8)).eval(), {"input": torch.zeros(2, 8)})
    assert "where parts and whole values are worked on by turns" in facts.tensor.no_tensor


def test_positions_that_do_not_divide_are_refused():
    pytest.importorskip("transformers")
    inputs = {"input_ids": torch.zeros(2, 7, dtype=torch.long)}
    with pytest.raises(InputError, match="7 positions cannot be split over 2"):
        prepare(native_worker.make("gpt2"), strategy("gpt2", {"tensor": 2, "replicate": 2}, 0, sequence_parallel=True), inputs)


def test_a_job_of_another_size_is_refused(one_rank):
    with pytest.raises(InputError, match="4 devices, the job 1 processes"):
        prepare(nn.Sequential(nn.Linear(4, 4)), processes(4), {"input": torch.ones(1, 4)})


def test_a_model_without_values_is_refused(one_rank):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(InputError, match="on the meta device"):
        prepare(model, processes(1), {"input": torch.ones(1, 4)})


def test_one_process_runs_micro_batches(one_rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    batch = {"input": torch.randn(4, 4), "target": torch.randn(4, 4)}
    wanted = (model(batch["input"]) - batch["target"]).square().mean()
    gradient = torch.autograd.grad(wanted, model[0].weight)[0]
    native = prepare(model, processes(1), {"input": torch.ones(2, 4)})
    made = native.step(batch, lambda output, part: (output - part["target"]).square().mean())
    torch.testing.assert_close(made.item(), wanted.item())
    torch.testing.assert_close(model[0].weight.grad, gradient)
    with pytest.raises(InputError, match="no input, which example_inputs had"):
        native.step({"target": batch["target"]}, lambda output, part: output.mean())
