"""Tensor-parallel layouts: Megatron's come out for the blocks of transformers, with its bytes, at any degree and batch size."""

import itertools
from collections import Counter
from functools import cache
from operator import attrgetter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rlplace.errors import InputError
from rlplace.model.capture.capture import capture
from rlplace.model.graph.opgraph import PARAMETER, UPDATE, with_causal_attention
from rlplace.model.graph.rescale import rescale
from rlplace.model.zoo import load_model
from rlplace.strategy.blocks.blocks import find_blocks
from rlplace.strategy.blocks.context import context_layout, why_no_context
from rlplace.strategy.blocks.folded import fold
from rlplace.strategy.blocks.price import PricedBlocks
from rlplace.strategy.costs import BACKWARD_PASS, COLLECTIVE_KINDS, FORWARD_PASS, Cut
from rlplace.strategy.layouts.cut_block import found_blocks
from rlplace.strategy.layouts.cut_moves import eliminate
from rlplace.strategy.layouts.tensor_layout import LayoutSearch

BATCH, SEQUENCE, HIDDEN, WIDTH, VOCABULARY = 3, 24, 64, 96, 128
STREAM_BYTES = 4 * BATCH * SEQUENCE * HIDDEN
SPECS = {
    "llama": f"hf:llama,num_hidden_layers=2,hidden_size={HIDDEN},intermediate_size={WIDTH},num_attention_heads=4",
    "grouped": f"hf:llama,num_hidden_layers=2,hidden_size={HIDDEN},intermediate_size={WIDTH},num_attention_heads=8,"
    "num_key_value_heads=4",
    "gpt2": f"hf:gpt2,n_layer=2,n_embd={HIDDEN},n_head=4,n_positions=64",
    "bert": f"hf:bert,num_hidden_layers=2,hidden_size={HIDDEN},intermediate_size={WIDTH},num_attention_heads=4",
    "vit": f"hf:vit,num_hidden_layers=2,hidden_size={HIDDEN},intermediate_size={WIDTH},num_attention_heads=4,image_size=32,"
    "patch_size=8",
    "gemma": f"hf:gemma2,num_hidden_layers=2,hidden_size={HIDDEN},intermediate_size={WIDTH},num_attention_heads=8,head_dim=8,"
    "num_key_value_heads=4",
    "parallel": f"hf:gptj,n_layer=2,n_embd={HIDDEN},n_head=4,rotary_dim=8",
    "t5": f"hf:t5,num_layers=2,d_model={HIDDEN},d_kv=16,num_heads=4,d_ff={WIDTH}",
}
MEGATRON = {
    "llama": {
        **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"), "column"),
        **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "row"),
    },
    "gpt2": {"attn.c_attn": "packed column", "attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row"},
    "bert": {
        **dict.fromkeys((*(f"attention.self.{name}" for name in ("query", "key", "value")), "intermediate.dense"), "column"),
        **dict.fromkeys(("attention.output.dense", "output.dense"), "row"),
    },
    "vit": {
        **dict.fromkeys((*(f"attention.{name}_proj" for name in "qkv"), "mlp.fc1"), "column"),
        **dict.fromkeys(("attention.o_proj", "mlp.fc2"), "row"),
    },
}
MEGATRON["grouped"] = MEGATRON["gemma"] = MEGATRON["llama"]
NORMS = {
    "llama": ("input_layernorm", "post_attention_layernorm"),
    "grouped": ("input_layernorm", "post_attention_layernorm"),
    "gemma": tuple(f"{name}_layernorm" for name in ("input", "post_attention", "pre_feedforward", "post_feedforward")),
    "gpt2": ("ln_1", "ln_2"),
    "bert": ("attention.output.LayerNorm", "output.LayerNorm"),
}


@cache
def captured(name, batch=BATCH):
    spec = SPECS[name] + ("" if name == "vit" else f",vocab_size={VOCABULARY}")
    model = load_model(spec, batch=batch, seq=SEQUENCE)
    return capture(model.module, model.example_inputs, loss=model.loss)


def blocks_of(graph):
    """Paths of blocks, and the block of every op."""
    blocks = find_blocks(graph)
    return blocks.names, blocks.of_op


def tensor_layouts(graph, block_of_op, degree, *, sequence_parallel=False):
    return LayoutSearch(graph, block_of_op).layout(degree, sequence_parallel=sequence_parallel)


def layers(paths):
    return [number for number, path in enumerate(paths) if path.rpartition(".")[2].isdigit()]


def sent(layout, graph, block):
    """(pass, kind, bytes) of a block's collectives with how often each stands."""
    return Counter(
        (c.when, COLLECTIVE_KINDS[c.kind], int(graph.tensor_bytes[c.tensor])) for c in layout.collectives if c.block == block
    )


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("name", MEGATRON)
def test_blocks_have_the_layout_of_megatron(name, degree):
    graph = captured(name)
    paths, blocks = blocks_of(graph)
    layout = tensor_layouts(graph, blocks, degree)
    stream_bytes = 4 * BATCH * 17 * HIDDEN if name == "vit" else STREAM_BYTES
    assert len(layers(paths)) == 2
    for block in layers(paths):
        prefix = f"{paths[block]}."
        found = {path.removeprefix(prefix): word for path, word in layout.modules.items() if path.startswith(prefix)}
        assert found == MEGATRON[name]
        # One all-reduce of the residual stream for each half of a block, in either direction.
        assert sent(layout, graph, block) == {
            (FORWARD_PASS, "all_reduce", stream_bytes): 2,
            (BACKWARD_PASS, "all_reduce", stream_bytes): 2,
        }


@pytest.mark.parametrize("name", NORMS)
def test_along_the_sequence_gathers_and_scatters_take_the_place_of_all_reduces(name):
    graph = captured(name)
    paths, blocks = blocks_of(graph)
    layout = tensor_layouts(graph, blocks, 2, sequence_parallel=True)
    for number, block in enumerate(layers(paths)):
        prefix = f"{paths[block]}."
        found = {path.removeprefix(prefix): word for path, word in layout.modules.items() if path.startswith(prefix)}
        assert found == MEGATRON[name] | dict.fromkeys(NORMS[name], "sequence")
        kinds = [
            (when, kind, STREAM_BYTES) for when in (FORWARD_PASS, BACKWARD_PASS) for kind in ("all_gather", "reduce_scatter")
        ]
        # The first slices the embeddings, whose gradient is gathered.
        sliced = Counter({(BACKWARD_PASS, "all_gather", STREAM_BYTES): int(number == 0)})
        assert sent(layout, graph, block) == Counter(dict.fromkeys(kinds, 2)) + sliced


def test_halves_that_read_one_norm_share_its_all_reduce():
    graph = captured("parallel")
    paths, blocks = blocks_of(graph)
    layout = tensor_layouts(graph, blocks, 2)
    for block in layers(paths):
        words = Counter(word for path, word in layout.modules.items() if path.startswith(f"{paths[block]}."))
        assert words == {"column": 4, "row": 2}
        assert sent(layout, graph, block) == {
            (FORWARD_PASS, "all_reduce", STREAM_BYTES): 2,
            (BACKWARD_PASS, "all_reduce", STREAM_BYTES): 1,
        }


@pytest.mark.slow
def test_of_t5_the_feed_forward_is_cut_and_attention_with_its_whole_position_bias_is_not():
    graph = captured("t5")
    paths, blocks = blocks_of(graph)
    layout = tensor_layouts(graph, blocks, 2)
    assert len(layers(paths)) == 4
    for block in layers(paths):
        words = {path: word for path, word in layout.modules.items() if path.startswith(f"{paths[block]}.")}
        assert {path.rpartition(".")[2]: word for path, word in words.items()} == {"wi": "column", "wo": "row"}
        assert sent(layout, graph, block) == {
            (FORWARD_PASS, "all_reduce", STREAM_BYTES): 1,
            (BACKWARD_PASS, "all_reduce", STREAM_BYTES): 1,
        }


@pytest.mark.parametrize("name", MEGATRON)
def test_parts_of_parameters_follow_megatron(name):
    graph = captured(name)
    _, blocks = blocks_of(graph)
    layout = tensor_layouts(graph, blocks, 2)
    owners = {path: word for path, word in layout.modules.items() if word != "embedding"}
    for index, item in enumerate(graph.parameters):
        path, _, kind = item.name.rpartition(".")
        word = owners.get(path, "")
        if kind == "weight" and word:
            assert layout.parameter_parts[index] == 2
        elif kind == "bias" and word:
            assert layout.parameter_parts[index] == (2 if word.endswith("column") else 1)


def test_work_and_what_stays_are_cut_as_megatron_does():
    graph = captured("llama")
    _, blocks = blocks_of(graph)
    layout = tensor_layouts(graph, blocks, 2)
    for op in range(graph.num_ops):
        kind, forward = graph.op_kind[op], int(graph.op_forward[op])
        if kind in ("gemm", "attention"):
            assert layout.op_parts[op] == 2 and layout.op_dims[op] in ("n", "k", "heads")
        elif graph.op_phase[op] == UPDATE:
            assert layout.op_parts[op] == layout.parameter_parts[graph.op_parameter[op]]
        elif "layernorm" in graph.op_module[op] or graph.op_module[op] == "model.norm":
            assert layout.op_parts[op] == 1
        assert graph.op_phase[op] == UPDATE or layout.op_parts[op] == layout.op_parts[forward]
    for tensor, parts in enumerate(layout.tensor_parts.tolist()):
        maker = int(graph.tensor_producer[tensor])
        if maker >= 0 and "mlp.act_fn" in graph.op_module[maker]:
            assert parts == 2  # silu(gate), forward and backward
        if maker >= 0 and graph.tensor_bytes[tensor] == STREAM_BYTES and "layernorm" in graph.op_module[maker]:
            assert parts == 1
        if graph.tensor_role[tensor] == PARAMETER:
            assert parts == layout.parameter_parts[graph.tensor_parameter[tensor]]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_table_and_head_are_cut_along_the_vocabulary_and_logits_gathered(sequence_parallel):
    graph = captured("gpt2")  # the table is the weight of the head, too
    paths, blocks = blocks_of(graph)
    layout = tensor_layouts(graph, blocks, 2, sequence_parallel=sequence_parallel)
    assert layout.modules["transformer.wte"] == "embedding" and layout.modules["lm_head"] == "gathered column"
    assert "transformer.wpe" not in layout.modules  # as long as the sequence: nothing to be gained
    table = next(index for index, item in enumerate(graph.parameters) if item.name == "transformer.wte.weight")
    assert layout.parameter_parts[table] == 2
    table_block, head_block = paths.index("transformer.wte"), paths.index("lm_head")
    found = sent(layout, graph, table_block) + sent(layout, graph, head_block)
    assert found[FORWARD_PASS, "all_gather", 4 * BATCH * SEQUENCE * VOCABULARY] == 1
    if not sequence_parallel:
        assert found[FORWARD_PASS, "all_reduce", STREAM_BYTES] == found[BACKWARD_PASS, "all_reduce", STREAM_BYTES] == 1


@pytest.mark.parametrize("autocast", [None, "bfloat16"])
def test_attention_of_torch_itself_is_cut_inside_its_module(autocast):
    layer = nn.TransformerEncoderLayer(HIDDEN, 4, WIDTH, dropout=0.0, batch_first=True)
    model = nn.Sequential(layer, nn.LayerNorm(HIDDEN))
    inputs = (torch.randn(BATCH, SEQUENCE, HIDDEN),)
    graph = capture(model, inputs, loss=lambda out: out.square().mean(), autocast=autocast)
    layout = tensor_layouts(graph, blocks_of(graph)[1], 2)
    expected = {"self_attn": "packed column", "self_attn.out_proj": "row", "linear1": "column", "linear2": "row"}
    assert {path.removeprefix("0."): word for path, word in layout.modules.items()} == expected


def test_a_norm_of_heads_works_on_what_others_have_cut():
    model = load_model(
        f"hf:qwen3,num_hidden_layers=1,hidden_size={HIDDEN},intermediate_size={WIDTH},num_attention_heads=4,head_dim=16,"
        f"num_key_value_heads=4,vocab_size={VOCABULARY}",
        batch=BATCH,
        seq=SEQUENCE,
    )
    graph = capture(model.module, model.example_inputs, loss=model.loss)
    layout = tensor_layouts(graph, blocks_of(graph)[1], 2)
    norms = {f"model.layers.0.self_attn.{name}_norm" for name in "qk"}
    assert {path for path, word in layout.modules.items() if word == "local"} == norms


@pytest.mark.slow
def test_a_layout_holds_at_any_batch_size():
    small, large = captured("llama", 2), captured("llama", 5)
    _, blocks = blocks_of(small)
    one, other = (tensor_layouts(graph, blocks, 2, sequence_parallel=True) for graph in (small, large))
    assert one.op_dims == other.op_dims and one.modules == other.modules and one.collectives == other.collectives
    for name in ("op_parts", "tensor_parts", "parameter_parts"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
    between = rescale(small, large, 4)
    assert between.traced is None
    assert {int(between.tensor_bytes[c.tensor]) for c in one.collectives if c.block == 1} == {4 * 4 * SEQUENCE * HIDDEN}


def test_only_modules_that_are_named_are_cut():
    graph = captured("llama")
    _, blocks = blocks_of(graph)
    everything = tensor_layouts(graph, blocks, 2).modules
    only = [path for path in everything if ".mlp." in path]
    search = LayoutSearch(graph, blocks, only)
    assert search.layout(2).modules == {path: everything[path] for path in only}
    assert search.layout(8).modules == search.layout(2).modules  # heads do not matter then
    with pytest.raises(InputError, match="no product"):
        LayoutSearch(graph, blocks, []).layout(2)


def test_what_the_degree_does_not_divide_is_refused_with_the_reason():
    graph = captured("llama")
    _, blocks = blocks_of(graph)
    assert tensor_layouts(graph, blocks, 4).modules
    with pytest.raises(InputError, match=r"8 does not divide the 4 .*heads"):
        tensor_layouts(graph, blocks, 8)
    vit = captured("vit")
    with pytest.raises(InputError, match="17 positions"):
        tensor_layouts(vit, blocks_of(vit)[1], 2, sequence_parallel=True)


def test_a_model_without_products_in_a_row_is_refused_and_a_pair_is_cut():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.LayerNorm(32))
    graph = capture(model, (torch.randn(4, 32),), loss=lambda out: out.square().mean())
    alone = np.array([int(module or 3) for module in graph.op_module], dtype=np.int32)
    with pytest.raises(InputError, match="no product"):
        tensor_layouts(graph, alone, 2)
    layout = tensor_layouts(graph, np.zeros_like(alone), 2)
    assert layout.modules == {"0": "column", "2": "row"}


def test_a_graph_that_has_lost_what_was_traced_is_refused():
    graph = rescale(captured("llama", 2), captured("llama", 5), 4)
    with pytest.raises(InputError, match="capture the model again"):
        tensor_layouts(graph, blocks_of(graph)[1], 2)


def brute_force(own, ends, between):
    """Cheapest of all combinations, each of them added up."""
    axes = np.ix_(*(range(len(costs)) for costs in own))
    total = sum(costs[axis] for costs, axis in zip(own, axes, strict=True))
    for (one, other), costs in zip(ends, between, strict=True):
        total = total + costs[axes[one], axes[other]]
    return float(np.asarray(total).min())


@st.composite
def random_case(draw):
    """A random graph, and a random cost for everything: whole numbers up to 8 make ties frequent and sums exact."""
    count = draw(st.integers(1, 7))
    ends = [pair for pair in itertools.combinations(range(count), 2) if draw(st.booleans())]
    ends += ends[: draw(st.integers(0, 2))]  # parallel edges
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    options = [int(k) for k in rng.integers(1, 6, count)]
    own = [rng.integers(0, 8, k).astype(float) for k in options]
    return own, ends, [rng.integers(0, 8, (options[u], options[v])).astype(float) for u, v in ends]


@given(random_case())
@settings(max_examples=120)
def test_elimination_equals_brute_force(case):
    own, ends, between = case
    chosen = eliminate(own, ends, between)
    total = sum(costs[option] for costs, option in zip(own, chosen, strict=True))
    total += sum(costs[chosen[one], chosen[other]] for (one, other), costs in zip(ends, between, strict=True))
    assert total == brute_force(own, ends, between)


def test_what_no_cut_fits_is_named_though_its_positions_divide():
    """Degree 1 stands for degrees that divide all positions of a block which cannot be cut for another reason."""
    graph = captured("llama", BATCH)
    search = LayoutSearch(graph, blocks_of(graph)[1])
    item = found_blocks(search.ops, sequence_parallel=True)[0]
    (reason,) = search._undivided(item, None, 1)
    assert f"the result of {graph.op_names[item.ops[-1]]} cannot be cut" in reason


DEEP = {
    "llama": "hf:llama,num_hidden_layers=8,hidden_size=64,intermediate_size=128,num_attention_heads=4,num_key_value_heads=2",
    "gpt2": "hf:gpt2,n_layer=8,n_embd=64,n_head=4",
    "gemma": "hf:gemma2,num_hidden_layers=12,hidden_size=64,intermediate_size=128,num_attention_heads=4,head_dim=16,"
    "num_key_value_heads=2",
    "t5": "hf:t5,num_layers=7,num_decoder_layers=7,d_model=64,d_kv=16,num_heads=4,d_ff=128",
    "mixtral": "hf:mixtral,num_hidden_layers=8,hidden_size=64,intermediate_size=128,num_attention_heads=4,"
    "num_key_value_heads=2,num_local_experts=4",
}


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in DEEP if name != "gpt2")])
def test_one_block_of_each_kind_stands_for_all(name):
    """The layout of a folded step, unfolded, is that of the step, of tensor groups and of parts of the sequence."""
    loaded = load_model(f"{DEEP[name]},vocab_size=64", batch=2, seq=16)
    graph = with_causal_attention(capture(loaded.module, loaded.example_inputs, loss=loaded.loss))
    blocks = PricedBlocks(graph, "h100:2")
    search, of_op = LayoutSearch(graph, blocks.blocks.of_op), blocks.blocks.of_op
    _, first, number = np.unique(blocks.classes, return_index=True, return_inverse=True)
    folded = fold(graph, of_op, first[number])
    few = LayoutSearch(folded.graph, of_op[folded.ops])
    assert len(folded.ops) < graph.num_ops
    layouts = [
        (search.layout(degree, sequence_parallel=sequence), few.layout(degree, sequence_parallel=sequence))
        for degree, sequence in ((2, False), (2, True), (4, False))
    ]
    routed = np.zeros(graph.num_ops, dtype=bool)
    for cut in (Cut(1, context=2), Cut(1, context=2, context_method="ring")):
        assert why_no_context(search.ops, cut) == why_no_context(few.ops, cut)
        if why_no_context(few.ops, cut) is None:
            layouts.append((context_layout(search.ops, cut, routed), context_layout(few.ops, cut, routed[folded.ops])))
    for whole, small in layouts:
        found = folded.unfold(small)
        for name in ("op_parts", "tensor_parts", "parameter_parts", "thin_ops"):
            assert np.array_equal(getattr(found, name), getattr(whole, name))
        assert dict(found.op_dims) == dict(whole.op_dims) and dict(found.modules) == dict(whole.modules)
        key = attrgetter("block", "op", "tensor", "when", "kind", "times")
        assert sorted(map(key, found.collectives)) == sorted(map(key, whole.collectives))


def test_a_block_that_reads_otherwise_stands_for_itself():
    """Blocks of the same ops, one of which adds its input where the others add what they made."""

    class Block(torch.nn.Module):
        def __init__(self, other):
            super().__init__()
            self.inner, self.outer, self.other = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), other

        def forward(self, x):
            made = self.inner(x)
            return self.outer(x if self.other else made) + made

    model = torch.nn.Sequential(*(Block(number == 4) for number in range(9)))
    graph = capture(model, torch.ones(4, 16), loss=torch.sum)
    names, of_op = blocks_of(graph)
    folded = fold(graph, of_op, np.zeros(len(names), dtype=np.int64))
    kept = set(of_op[folded.ops].tolist())
    assert {0, 4, 8} <= kept and len(kept) < 9
    whole = LayoutSearch(graph, of_op).layout(2)
    assert dict(folded.unfold(LayoutSearch(folded.graph, of_op[folded.ops]).layout(2)).modules) == dict(whole.modules)
