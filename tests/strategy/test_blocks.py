"""Blocks of captured models: their names, and that values flow to later blocks alone."""

from dataclasses import replace

import pytest

from rlplace.errors import InputError
from rlplace.model.graph.opgraph import BACKWARD, FORWARD, UPDATE
from rlplace.strategy.blocks.blocks import find_blocks
from tests.captured import captured


def numbered(pattern, count):
    return [pattern.format(index) for index in range(count)]


NAMES = {
    "llama": ["model.embed_tokens", *numbered("model.layers.{}", 4), "model.norm", "lm_head"],
    "gpt2": ["transformer.wte", "transformer.wpe", *numbered("transformer.h.{}", 4), "transformer.ln_f", "lm_head"],
    "bert": ["bert.embeddings", *numbered("bert.encoder.layer.{}", 4), "cls"],
    "vit": ["vit.embeddings", *numbered("vit.layers.{}", 4), "vit.layernorm", "classifier"],
    "t5": [
        "encoder.embed_tokens", *numbered("encoder.block.{}", 2), "encoder.final_layer_norm",
        "decoder.embed_tokens", *numbered("decoder.block.{}", 2), "decoder.final_layer_norm", "lm_head",
    ],
    "mixtral": ["model.embed_tokens", *numbered("model.layers.{}", 2), "model.norm", "lm_head"],
    "resnet": [
        "resnet.embedder", *numbered("resnet.encoder.stages.0.layers.{}", 2), *numbered("resnet.encoder.stages.1.layers.{}", 2),
        "classifier.1",
    ],
    "swin": [
        "swin.embeddings", *numbered("swin.encoder.layers.0.blocks.{}", 2), "swin.encoder.layers.0.downsample",
        *numbered("swin.encoder.layers.1.blocks.{}", 2), "swin.layernorm", "classifier",
    ],
    "convnext": [
        "convnext.embeddings", *numbered("convnext.encoder.stages.0.layers.{}", 2),
        *numbered("convnext.encoder.stages.1.downsampling_layer.{}", 2), *numbered("convnext.encoder.stages.1.layers.{}", 2),
        "convnext.layernorm", "classifier",
    ],
    "mlp": ["layers.0", "layers.2", "layers.4", "layers.6"],
    "moe_toy": ["layers.0", "layers.1", "head"],
    "nasnet": ["stem.0", "stem.1", "cells.0", "cells.1", "head"],
}  # fmt: skip
"""Elements of nested lists stay together where they run side by side (experts) or differ (operations of a cell)."""


@pytest.mark.parametrize("name", NAMES)
def test_names_in_model_order(name):
    assert list(find_blocks(captured(name)).names) == NAMES[name]


@pytest.mark.parametrize("name", NAMES)
def test_values_flow_forward_and_gradients_back(name):
    graph = captured(name)
    blocks = find_blocks(graph)
    made = graph.tensor_producer[graph.edge_tensor] >= 0
    maker, reader = graph.tensor_producer[graph.edge_tensor][made], graph.consumers[made]
    for phase, sign in ((FORWARD, 1), (BACKWARD, -1)):
        both = (graph.op_phase[maker] == phase) & (graph.op_phase[reader] == phase)
        assert (sign * (blocks.of_op[reader][both] - blocks.of_op[maker][both]) >= 0).all()
    behind = graph.op_phase == BACKWARD
    assert (blocks.of_op[behind] == blocks.of_op[graph.op_forward[behind]]).all()


@pytest.mark.parametrize("name", NAMES)
def test_ops_of_a_module_lie_in_its_block(name):
    graph = captured(name)
    blocks = find_blocks(graph)
    for block, path in enumerate(blocks.names):
        inside = [op for op in range(graph.num_ops) if f"{graph.op_module[op]}.".startswith(f"{path}.")]
        inside = [op for op in inside if graph.op_phase[op] != UPDATE]
        assert inside and set(blocks.of_op[inside].tolist()) == {block}


def test_what_runs_outside_of_blocks():
    """The rotation of positions goes with the first layer, labels and loss with the head."""
    graph = captured("llama")
    blocks = find_blocks(graph)
    number = {name: int(blocks.of_op[op]) for op, name in enumerate(graph.op_names)}
    rotation = [op for op in range(graph.num_ops) if graph.op_names[op] == "model.rotary_emb/cos"]
    assert [blocks.names[blocks.of_op[op]] for op in rotation] == ["model.layers.0"]
    loss = [name for name in number if name.startswith("cross_entropy")]
    assert loss and {blocks.names[number[name]] for name in loss} == {"lm_head"}
    assert blocks.names[number["pad"]] == "lm_head"


@pytest.mark.parametrize(("name", "holders"), [("gpt2", (0, 7)), ("t5", (0, 4, 8))])
def test_a_tied_weight_belongs_to_all_that_read_it(name, holders):
    graph = captured(name)
    blocks = find_blocks(graph)
    shared = {p.name: held for p, held in zip(graph.parameters, blocks.of_parameter, strict=True) if len(held) > 1}
    assert list(shared.values()) == [holders]
    update = [op for op in range(graph.num_ops) if graph.op_names[op] == f"{next(iter(shared))}/update"]
    assert blocks.of_op[update].tolist() == [holders[0]]


def test_every_parameter_has_a_block():
    graph = captured("bert")
    blocks = find_blocks(graph)
    for parameter, holders in zip(graph.parameters, blocks.of_parameter, strict=True):
        owners = {b for b, path in enumerate(blocks.names) if parameter.name.startswith(f"{path}.")}
        assert set(holders) == owners
    assert min(map(len, blocks.of_parameter)) == 1


def test_a_model_without_modules_has_no_blocks():
    graph = captured("mlp")
    with pytest.raises(InputError, match="no captured op lies in a module with parameters; put its layers into"):
        find_blocks(replace(graph, op_module=("",) * graph.num_ops))
