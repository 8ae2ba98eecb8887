"""Stages of a cut, run one after the other, make what the model makes, of the model's own modules."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.runtime.strategy.blocks import block_names, observe, units
from rlplace.runtime.strategy.capture import capture
from rlplace.runtime.strategy.cut import cut, stage_module
from tests.runtime import small_models
from tests.runtime.strategy import native_worker

CPU = torch.device("cpu")


def thirds(captured):
    called = dict.fromkeys(node.target for node in captured.graph.nodes if node.op == "call_module")
    blocks = [path for path in called if path in block_names(captured.model)]
    bounds = [0, len(blocks) // 3 or 1, max(2, 2 * len(blocks) // 3), len(blocks)]
    return [list(blocks[a:b]) for a, b in pairwise(bounds)]


def staged(captured, stages, inputs):
    leaves, values = pytree.tree_leaves(((), dict(inputs))), ()
    for stage in stages:
        values = stage_module(captured, stage, CPU)(*values, *(leaves[position] for position in stage.inputs))
    return pytree.tree_unflatten(values, captured.out_spec)


FOREIGN = ("gpt2", "bert", "llama", "mixtral", "t5", "vit", "swin")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FOREIGN, "inception", "transformer", "lstm", "dlrm"])
def test_stages_make_what_the_model_makes(name):
    if name in FOREIGN:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, inputs, loss = small_models.MODELS[name]()
    captured = capture(model, inputs)
    stages = cut(captured, thirds(captured))
    wanted, made = loss(model(**inputs)), loss(staged(captured, stages, inputs))
    torch.testing.assert_close(made, wanted, rtol=2e-5, atol=1e-5)
    saved = {name: value for stage in stages for name, value in stage_module(captured, stage, CPU).state_dict().items()}
    whole = model.state_dict()
    assert set(saved) <= set(whole)
    assert {value.data_ptr() for value in saved.values()} == {value.data_ptr() for value in whole.values()}


class Branching(nn.Module):
    """A block that export cannot follow: it looks at values, and has a gradient of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        x = self.linear(x)
        return native_worker.Doubled.apply(x) if x.sum() > 0 else x.relu()


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Branching() for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) + x
        return x * self.scale


@pytest.mark.parametrize("sign", [-1, 1])
def test_blocks_that_look_at_values_run_as_themselves(sign):
    torch.manual_seed(0)
    model, x = Own(), sign * torch.rand(2, 4)
    captured = capture(model, {"x": torch.empty(2, 4)})
    stages = cut(captured, [["layers.0"], ["layers.1", "layers.2"]])
    staged(captured, stages, {"x": x}).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    made = model(x)
    torch.testing.assert_close(staged(captured, stages, {"x": x}), made)
    made.sum().backward()
    torch.testing.assert_close(gradients, [parameter.grad for parameter in model.parameters()])


def chain_of_three():
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def test_a_list_of_modules_names_its_elements():
    model, x = Own(), {"x": torch.ones(2, 4)}
    assert set(capture(model, x, ["layers"]).units) == set(capture(model, x, [f"layers.{n}" for n in range(2)]).units)


class Reading(nn.Module):
    """Its head reads the weight of the embedding, which lies in another block."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.middle = nn.Linear(4, 4)

    def forward(self, tokens):
        return self.middle(self.embed(tokens)) @ self.embed.weight.T


class Adding(nn.Module):
    """Adds to a value of an earlier block; with a view of it at hand, others see what was added."""

    def __init__(self, viewed):
        super().__init__()
        self.layers, self.viewed = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), viewed
        self.register_buffer("bias", torch.rand(4))

    def forward(self, x):
        total = self.layers[0](x) * 2
        before = total.view(-1) if self.viewed else total + 0
        for layer in self.layers[1:]:
            total += layer(x)
        return total * before.view(2, 4) + self.bias


@pytest.mark.slow
@pytest.mark.parametrize("viewed", [False, True])
def test_what_is_added_in_another_stage_is_a_new_value(viewed):
    inputs, each = {"x": torch.rand(2, 4)}, [[f"layers.{number}"] for number in range(3)]
    model = Adding(viewed)
    captured = capture(model, inputs)
    torch.testing.assert_close(staged(captured, cut(captured, each), inputs), model(**inputs))
    assert len(cut(capture(Adding(viewed).to("meta"), inputs), each)) == 3


class Counting(nn.Module):
    """Keeps a buffer of its own between blocks."""

    def __init__(self, reader):
        super().__init__()
        self.layers, self.reader = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), reader
        self.register_buffer("calls", torch.zeros(4))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == self.reader:
                self.calls += x.mean().detach()
                x = x * self.calls
        return x


@pytest.mark.parametrize("reader", [0, 1])
def test_a_buffer_is_written_where_it_is_read(reader):
    inputs, each = {"x": torch.rand(2, 4)}, [["layers.0"], ["layers.1"]]
    torch.manual_seed(0)
    model, plain = Counting(reader), Counting(reader)
    plain.load_state_dict(model.state_dict())
    captured = capture(model, inputs)
    for _ in range(2):
        torch.testing.assert_close(staged(captured, cut(captured, each), inputs), plain(**inputs))
    assert plain.calls.any() and torch.equal(model.calls, plain.calls)


def test_hidden_states_that_hooks_collect_are_recorded():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    torch.manual_seed(0)
    model = transformers.ViTModel(config).eval()
    inputs = {"pixel_values": torch.rand(2, 3, 8, 8), "output_hidden_states": True}
    captured = capture(model, inputs)
    found, wanted = staged(captured, cut(captured, thirds(captured)), inputs), model(**inputs)
    assert len(found.hidden_states) == len(wanted.hidden_states) == 3
    torch.testing.assert_close(found.hidden_states, wanted.hidden_states)


class Tabled(nn.Module):
    """Reads a table by its weight, and never calls it."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(8, 4), nn.Embedding(3, 4)
        self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, tokens):
        return self.head(self.middle(self.embed(tokens)).tanh() + self.places.weight)


def test_a_table_that_is_read_by_its_weight_goes_with_its_reader():
    model, inputs = Tabled(), {"tokens": torch.tensor([[1, 2, 3], [4, 5, 6]])}
    captured = capture(model, inputs)
    first, second = stages = cut(captured, [["embed"], ["middle", "head"]])
    assert first.parameters == {"embed.weight"} and "places.weight" in second.parameters
    torch.testing.assert_close(staged(captured, stages, inputs), model(**inputs))
    assert stage_module(captured, second, CPU).get_parameter("places.weight") is model.places.weight


class Moving(nn.Module):
    """Writes a buffer after the first block, of which the second block gets the value from before."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        x, before = self.layers[0](x), self.seen + 0
        self.seen.copy_(x[0].detach())
        return self.layers[1](x + before) * before


@pytest.mark.parametrize(
    ("make", "inputs", "stages", "reason"),
    [
        (lambda: Own().to("meta"), {"x": torch.ones(2, 4)}, [], "strategies without a pipeline run it as it is"),
        (chain_of_three, {"input": torch.ones(2, 4)}, [["1", "2"], ["0"]], "block '1' of stage 0 reads what stage 1 makes"),
        (chain_of_three, {"input": torch.ones(2, 4)}, [["0"], ["1"]], "no stage names the block '2'"),
        (
            Reading, {"tokens": torch.zeros(2, 3, dtype=torch.long)}, [["embed"], ["middle"]],
            "parameter 'embed.weight' is read outside of the block",
        ),
        (Moving, {"x": torch.rand(2, 4)}, [["layers.0"], ["layers.1"]], "buffer 'seen' is written in stage 0 and read in 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut(make, inputs, stages, reason):
    with pytest.raises(InputError, match=reason):
        cut(capture(make(), inputs), stages)


def test_blocks_that_hooks_do_not_see_are_known():
    """Its calls of `layers.1` and `head` are all that reads them; hooks on the others see too little."""
    model = native_worker.Lent()
    tokens = torch.zeros(2, native_worker.LENGTH, dtype=torch.long)
    seen = observe(model, {"input_ids": tokens}, dict(units(model)))
    assert seen.outside == {"embed", "queries", "places", "layers.0"}
