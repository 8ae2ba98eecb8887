"""What blocks cost adds up to what the op level says: times by phase, held bytes, and the peak of a whole step."""

from dataclasses import fields, replace
from itertools import chain, product

import numpy as np
import pytest
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlplace.cluster.collectives import collective_s
from rlplace.cluster.parse import as_cluster
from rlplace.cost import device_times, price
from rlplace.errors import InputError
from rlplace.model.capture.capture import capture
from rlplace.model.capture.weight_gradients import part_times, split_weight_gradients
from rlplace.model.graph.coarsen import Grouping
from rlplace.model.graph.opgraph import with_causal_attention
from rlplace.model.zoo import load_model
from rlplace.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD, UPDATE
from rlplace.simulator import simulate
from rlplace.strategy.blocks.price import PricedBlocks
from rlplace.strategy.blocks.rows import every_op
from rlplace.strategy.costs import FULL, NONE, SELECTIVE, STATISTICS, BlockPassCosts, Cut
from rlplace.strategy.drafts import Draft, Mesh
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.layouts.tensor_layout import LayoutSearch, divided, tensor_parts
from rlplace.strategy.search.op_level import evaluate_ops
from tests.captured import MODELS as SPECS
from tests.captured import captured

CLUSTER = "a100-80g:1 + l4:1"
MODELS = ("llama", "gpt2", "gpt2-untied", "bert", "vit", "t5", "resnet")
FOUR = Cut(4)


@pytest.fixture(scope="module")
def priced():
    return {name: PricedBlocks(captured(name), CLUSTER) for name in MODELS}


def grouped(graph, of_op, names):
    number = np.arange(len(names), dtype=np.int32)
    return Grouping(np.array(of_op, dtype=np.int32), number, tuple(names), tuple(() for _ in names))


def tied_once(held, ties, blocks):
    """Bytes of weights, gradients and optimizer state of consecutive blocks on one device, a tied weight counted once."""
    parts = (held.weight_bytes, held.gradient_bytes, held.optimizer_bytes)
    totals = [int(part[blocks.start : blocks.stop].sum()) for part in parts]
    for tie in ties:
        again = max(0, sum(block in blocks for block in tie.blocks) - 1)
        for index, size in enumerate((tie.weight_bytes, tie.gradient_bytes, tie.optimizer_bytes)):
            totals[index] -= again * size
    return tuple(totals)


def peak_bytes(blocks, how):
    """Of a step of one micro-batch on one device; `how` is one choice of recomputation, or one a block."""
    costs, held, every = blocks.passes(0, FOUR), blocks.held(), np.arange(len(blocks.names))
    before = np.cumsum(costs.kept_bytes[how, every])
    working = (before + costs.working_bytes[:2, how, every]).max()
    return sum(tied_once(held, blocks.ties, range(len(every)))) + int(working)


def simulated_peak(problem, order=None):
    timeline = simulate(problem, [0] * problem.num_groups, order=order)
    assert np.isfinite(timeline.step_time_s)
    return int(timeline.peak_memory_bytes[0]) - problem.devices[0].reserved_bytes


def op_level(name, blocks):
    """Ops in their blocks; gradients of tied weights add up where the other gradient is."""
    graph = captured(name)
    problem = price(graph, CLUSTER, level="op", groups=grouped(graph, blocks.blocks.of_op, blocks.names))
    summed = problem.edge_tensor[problem.op_phase[problem.consumers] == UPDATE]
    return replace(problem, tensor_bytes=np.where(np.isin(np.arange(problem.num_tensors), summed), 0, problem.tensor_bytes))


def one_by_one(problem):
    """Ops in the order of blocks: forward, backward in reverse, updates."""

    def position(op):
        phase = int(problem.op_phase[op])
        block = int(problem.op_group[op]) * (1 if phase == FORWARD else -1)
        return phase, block if phase != UPDATE else 0, op

    return [sorted(range(problem.num_ops), key=position), []]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5"])
def test_blocks_that_are_alike_are_priced_once(name, monkeypatch):
    """Against prices of all ops: the host's lead, which no two blocks share, included."""
    cuts = [Cut(4), Cut(4, 2), Cut(4, 2, True), Cut(4, context=2)]
    once = PricedBlocks(captured(name), CLUSTER)
    assert len(once._rows(False, FOUR, once._at(FOUR).first).ops) < captured(name).num_ops
    monkeypatch.setattr(PricedBlocks, "_rows", lambda blocks, halves, *_: every_op(len(blocks._ops(halves)[1])))
    each = PricedBlocks(captured(name), CLUSTER)
    cuts = [cut for cut in cuts if each.why_not(cut) is None]
    assert len(cuts) > 1
    for kind, cut in product(range(2), cuts):
        for field in fields(BlockPassCosts):
            found, wanted = (getattr(blocks.passes(kind, cut), field.name) for blocks in (once, each))
            np.testing.assert_allclose(found, wanted, rtol=1e-14, err_msg=f"{cut} {field.name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_times_add_up(priced, name):
    graph, blocks = captured(name), priced[name]
    assert blocks.kinds == ("a100-80g", "l4")
    problem = price(graph, CLUSTER, level="op")
    for kind in range(2):
        costs = blocks.passes(kind, FOUR)
        updates = np.flatnonzero(graph.op_phase == UPDATE)
        holders = [len(blocks.blocks.of_parameter[parameter]) for parameter in graph.op_parameter[updates]]
        tied = problem.time_s[updates, kind] @ (np.array(holders) - 1)  # a tied weight counts in every block
        found = [costs.forward_s.sum(), costs.backward_s.sum(), blocks.update_s(kind).sum() - tied]
        wanted = [problem.time_s[problem.op_phase == phase, kind].sum() for phase in (FORWARD, BACKWARD, UPDATE)]
        np.testing.assert_allclose(found, wanted, rtol=1e-9)
        split, origin = split_weight_gradients(graph)
        parts_s = part_times(*(device_times(g, as_cluster(CLUSTER))[:, [kind]] for g in (graph, split)), origin)
        weight = parts_s[split.op_phase == BACKWARD_WEIGHT].sum()
        np.testing.assert_allclose(costs.weight_s.sum(), weight, rtol=1e-9)
        assert (costs.weight_s <= costs.backward_s).all()


def test_times_of_compiled_blocks_add_up():
    graph = captured("bert")
    costs = PricedBlocks(graph, CLUSTER, host="compiled").passes(0, FOUR)
    problem = price(graph, CLUSTER, level="op", host="compiled")
    found = [costs.forward_s.sum(), costs.backward_s.sum()]
    wanted = [problem.time_s[problem.op_phase == phase, 0].sum() for phase in (FORWARD, BACKWARD)]
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_held_bytes_add_up(priced, name):
    graph, blocks = captured(name), priced[name]
    held = tied_once(blocks.held(), blocks.ties, range(len(blocks.names)))
    assert held == tuple(
        sum(getattr(p, f) for p in graph.parameters) for f in ("size_bytes", "gradient_bytes", "optimizer_bytes")
    )
    assert bool(blocks.ties) == (name in ("gpt2", "t5"))


@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_the_executor_on_one_device_is_the_op_level(priced, name):
    """Of either kind: the same step time, and the same peak."""
    graph, blocks, cluster = captured(name), priced[name], as_cluster(CLUSTER)
    problem = price(graph, CLUSTER, level="op", groups=grouped(graph, np.zeros(graph.num_ops), ["model"]))
    executor, count = DraftEvaluator(blocks, cluster), len(blocks.names)
    for device in range(2):
        draft = Draft((0, count), (Mesh((device,)),), (0,), bytes(count), bytes(count), (4,), (1,))
        found, wanted = executor.evaluate(draft), simulate(problem, [device])
        for said in (found, evaluate_ops(draft, blocks, cluster, found)):  # block by block, and as ops of the draft
            assert said.step_time_s == pytest.approx(wanted.step_time_s, rel=1e-9)
            assert said.peak_memory_bytes[device] == pytest.approx(wanted.peak_memory_bytes[device], rel=1e-6)


def run_again(graph, of_op):
    """Forward ops that the backward of their own block reads, directly or through one another."""
    inputs = [[] for _ in range(graph.num_ops)]
    for tensor, producer in enumerate(graph.tensor_producer.tolist()):
        for op in graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]].tolist():
            if producer >= 0 and graph.op_phase[producer] == FORWARD and of_op[producer] == of_op[op]:
                inputs[op].append(producer)
    waiting, found = [op for op in range(graph.num_ops) if graph.op_phase[op] == BACKWARD], set()
    while waiting:
        fresh = set(inputs[waiting.pop()]) - found
        found |= fresh
        waiting += fresh
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_recomputation_of_layers_holds_what_torch_checkpoints_hold(priced, name, every):
    """All layers, or every second one: the peak of the step that is captured with torch's own checkpoints."""
    loaded, blocks = load_model(f"{SPECS[name]},gradient_checkpointing=true", batch=4, seq=32), priced[name]
    layers = {path: layer for path, layer in loaded.module.named_modules() if isinstance(layer, GradientCheckpointingLayer)}
    again = list(layers)[every - 1 :: every]
    for path, layer in layers.items():
        layer.gradient_checkpointing = path in again
    graph = with_causal_attention(capture(loaded.module, loaded.example_inputs, loss=loaded.loss))
    problem = price(graph, CLUSTER, level="op", groups=grouped(graph, np.zeros(graph.num_ops), ["model"]))
    how = [FULL if block in again else NONE for block in blocks.names]
    peak = simulated_peak(problem)
    assert peak_bytes(blocks, how) == pytest.approx(peak, rel=0.006) and peak < 0.97 * peak_bytes(blocks, NONE)
    count, cluster = len(blocks.names), as_cluster(CLUSTER)
    draft = Draft((0, count), (Mesh((0,)),), (0,), bytes(how), bytes(count), (4,), (1,))
    ops = evaluate_ops(draft, blocks, cluster, DraftEvaluator(blocks, cluster).evaluate(draft))
    assert ops.peak_memory_bytes[0] - cluster.devices[0].reserved_bytes == pytest.approx(peak, rel=0.006)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, "swin", "nasnet", "mixtral"])
def test_peak_of_blocks_one_after_another(name):
    """In the order of blocks, which the op level's priorities leave where branches run side by side."""
    blocks = PricedBlocks(captured(name), CLUSTER)
    problem = op_level(name, blocks)
    assert peak_bytes(blocks, NONE) == pytest.approx(simulated_peak(problem, one_by_one(problem)), rel=0.001)


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_peaks_of_two_stages(priced, name):
    """The later stage holds what it was sent on top of its own."""
    graph, blocks = captured(name), priced[name]
    problem = price(graph, "a100-80g:2", level="op", groups=grouped(graph, blocks.blocks.of_op, blocks.names))
    costs, held, count = blocks.passes(0, FOUR), blocks.held(), len(blocks.names)
    for border in range(1, count):
        device = [int(block >= border) for block in range(count)]
        order = [[op for op in one_by_one(problem)[0] if device[problem.op_group[op]] == stage] for stage in range(2)]
        peaks = simulate(problem, device, order=order).peak_memory_bytes - problem.devices[0].reserved_bytes
        for stage, inside in enumerate((range(border), range(border, count))):
            own = slice(inside.start, inside.stop)
            working = (np.cumsum(costs.kept_bytes[NONE, own]) + costs.working_bytes[:2, NONE, own]).max()
            received = costs.sent_bytes[border - 1] if stage else 0
            assert sum(tied_once(held, (), inside)) + working + received == pytest.approx(peaks[stage], rel=0.005)


@pytest.mark.parametrize("name", MODELS)
def test_recomputed_ops(priced, name):
    """Those that the backward of a block reads; selective recomputation lies between none and full."""
    graph, costs = captured(name), priced[name].passes(0, FOUR)
    seconds = price(graph, CLUSTER, level="op").time_s[run_again(graph, priced[name].blocks.of_op), 0].sum()
    assert costs.again_s[FULL].sum() == pytest.approx(seconds, rel=1e-9)
    assert not costs.again_s[NONE].any()
    assert (costs.again_s[SELECTIVE] <= costs.again_s[FULL]).all() and costs.again_s[SELECTIVE].sum() > 0
    kept = costs.kept_bytes.sum(axis=1)
    assert kept[NONE] > kept[SELECTIVE] > kept[FULL] > 0


def test_selective_keeps_products_and_attention(priced):
    """Of a layer of llama: what it is given, seven products and what attention made."""
    graph, blocks = captured("llama"), priced["llama"]
    layer = blocks.names.index("model.layers.2")
    makers = graph.tensor_producer
    kept = [
        int(graph.tensor_bytes[t])
        for t in np.flatnonzero((makers >= 0) & (graph.op_phase[makers] == 0))
        if blocks.blocks.of_op[makers[t]] == layer and graph.op_kind[makers[t]] in ("gemm", "attention")
    ]
    hidden = 4 * 32 * 64 * 4
    assert len(kept) >= 8
    assert blocks.passes(0, FOUR).kept_bytes[SELECTIVE, layer] == sum(kept) + hidden  # and what it hands on


def test_selective_keeps_products_of_experts():
    """They are batched, as are the products inside of attention, which are not kept on their own."""
    graph, blocks = captured("mixtral"), PricedBlocks(captured("mixtral"), CLUSTER)
    batched = [op for op in range(graph.num_ops) if graph.op_kind[op] == "bmm" and graph.op_phase[op] == FORWARD]
    costs = blocks.passes(0, FOUR)
    assert len(batched) == 2 * 2  # layers, packed gate and up, down
    again = blocks._lives.again
    assert set(batched) & set(again[FULL].tolist()) and not set(batched) & set(again[SELECTIVE].tolist())
    assert costs.kept_bytes[SELECTIVE].sum() > sum(int(graph.tensor_bytes[graph.tensor_producer == op].sum()) for op in batched)


def test_equal_blocks_are_of_one_class(priced):
    llama = priced["llama"]
    layers = [llama.names.index(f"model.layers.{index}") for index in range(4)]
    assert llama.classes[layers[1]] == llama.classes[layers[2]]
    assert len(set(llama.classes.tolist())) == 6  # the first layer makes the mask, the last sends nothing of it on
    costs = llama.passes(1, FOUR)
    for values in (costs.forward_s, costs.backward_s, costs.kept_bytes[NONE], costs.working_bytes[1, FULL]):
        assert values[layers[1]] == values[layers[2]]


def test_borders(priced):
    """Between layers of BERT only hidden states and their gradients cross; the output of T5's encoder crosses later borders."""
    hidden, chain, t5 = 4 * 32 * 64 * 4, priced["bert"].passes(0, FOUR), priced["t5"]
    assert chain.returned_bytes.tolist() == [hidden] * (len(priced["bert"].names) - 1) + [0]
    assert chain.sent_bytes[-1] == 0 and chain.sent_bytes[-2] == hidden
    decoder = [t5.names.index(name) for name in ("decoder.embed_tokens", "decoder.block.0")]
    assert (t5.passes(0, FOUR).sent_bytes[decoder] >= 2 * hidden).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "resnet"])
def test_other_batch_sizes(name):
    """A price at a third size is that of the model captured at it."""
    blocks = PricedBlocks(captured(name), CLUSTER, captured(name, 2))
    direct = PricedBlocks(captured(name, 6), CLUSTER)
    for field in "forward_s backward_s weight_s again_s kept_bytes working_bytes sent_bytes returned_bytes".split():
        found, wanted = (getattr(item.passes(0, Cut(6)), field) for item in (blocks, direct))
        np.testing.assert_allclose(found, wanted, rtol=1e-6, err_msg=field)
    assert blocks.passes(0, Cut(6)) is blocks.passes(0, Cut(6))


@pytest.fixture(scope="module")
def gpt2(priced):
    """GPT-2, whole and as one device of a tensor group of two runs it, with and without sequence parallelism."""
    blocks = priced["gpt2"]
    return blocks, [blocks.passes(0, cut) for cut in (FOUR, Cut(4, 2), Cut(4, 2, sequence_parallel=True))]


def test_a_tensor_group_shares_work_and_weights(gpt2):
    blocks, (whole, half, _) = gpt2
    layer = blocks.names.index("transformer.h.1")
    graph = captured("gpt2")
    layout = LayoutSearch(graph, blocks.blocks.of_op).layout(2)
    cut = divided(graph, layout, np.arange(graph.num_ops), tensor_parts(graph, layout))
    products = [op for op in range(graph.num_ops) if graph.op_kind[op] == "gemm" and blocks.blocks.of_op[op] == layer]
    assert len(products) == 8
    np.testing.assert_array_equal(cut.op_flops[products], graph.op_flops[products] / 2)
    wide = next(op for op in products if "c_fc" in graph.op_names[op] and graph.op_phase[op] == FORWARD)
    rows, width = 4 * 32, 64
    assert graph.op_bytes[wide] == 4 * (rows * width + width * 4 * width + 4 * width + rows * 4 * width)
    assert cut.op_bytes[wide] == 4 * (rows * width + (width * 4 * width + 4 * width + rows * 4 * width) / 2)
    assert cut.op_dims[wide]["n"] * 2 == graph.op_dims[wide]["n"]
    held, part = (blocks.held(degree) for degree in (1, 2))
    norms_and_biases = 4 * (4 * width + 2 * width)  # of two norms, and of two products that are cut by rows
    for field in ("weight_bytes", "gradient_bytes"):
        sizes = [int(getattr(item, field)[layer]) for item in (held, part)]
        assert sizes[1] == (sizes[0] + norms_and_biases) / 2
    assert half.kept_bytes[NONE, layer] < 0.75 * whole.kept_bytes[NONE, layer]
    assert (half.kept_bytes[FULL] == whole.kept_bytes[FULL]).all()
    assert (half.sent_bytes == whole.sent_bytes).all()
    assert blocks.update_s(0, 2)[layer] <= (1 + 1e-12) * blocks.update_s(0)[layer]
    assert half.weight_s[layer] <= half.backward_s[layer] <= whole.backward_s[layer] * (1 + 1e-9)


def test_a_tensor_group_sends_hidden_states(gpt2):
    """Megatron's collectives: two all-reduces a pass of a layer; with sequence parallelism an all-gather and a scatter each."""
    blocks, (whole, half, sequence) = gpt2
    layer = blocks.names.index("transformer.h.1")
    hidden = 4 * 32 * 64 * 4
    assert not whole.collective_calls.any()
    assert half.collective_calls[:, :, layer].tolist() == [[2, *[0] * 8]] * 2
    assert half.collective_bytes[:, :, layer].tolist() == [[2 * hidden, *[0] * 8]] * 2
    assert sequence.collective_bytes[:, :, layer].tolist() == [[0, 2 * hidden, 2 * hidden, *[0] * 6]] * 2
    assert half.sent_bytes[layer] - sequence.sent_bytes[layer] == hidden / 2
    assert (sequence.kept_bytes[NONE] <= half.kept_bytes[NONE]).all()


def test_what_has_no_price(priced):
    blocks = priced["vit"]
    for cut in (Cut(4, context=2), Cut(4, expert=2), Cut(8), Cut(4, tensor=2, sequence_parallel=True)):
        reason = blocks.why_not(cut)
        assert reason is not None
        with pytest.raises(InputError, match="blocks: "):
            blocks.passes(0, cut)
    assert "captured with 4 samples only, asked for 8" in blocks.why_not(Cut(8))
    assert "the sequence of 17 positions cannot be cut" in blocks.why_not(Cut(4, tensor=2, sequence_parallel=True))
    assert blocks.why_not(FOUR) is None
    loaded = PricedBlocks(replace(captured("vit"), traced=None), CLUSTER)
    assert "does not say how its ops can be cut" in loaded.why_not(Cut(4, tensor=2))


def test_captures_of_unlike_ops_are_refused():
    """A capture of one sample may have fewer ops than others, which do not follow from it."""
    first = captured("llama")
    ops = len(first.op_names)
    with pytest.raises(InputError, match=rf"have {ops} and \d+ ops; capture the same model .* of two and more"):
        PricedBlocks(first, CLUSTER, captured("llama", 1))


def test_statistics_of_all_replicas_are_summed_in_every_pass():
    loaded = load_model(SPECS["resnet"], batch=4, seq=64)
    channels = [module.num_features for module in loaded.module.modules() if isinstance(module, nn.BatchNorm2d)]
    graph, cluster = captured("resnet"), as_cluster("a100-80g:4")
    alone, joined = (PricedBlocks(graph, cluster, statistics=statistics) for statistics in ("replica", "batch"))
    passes = joined.passes(0, FOUR)
    assert passes.collective_calls[:, STATISTICS].sum(axis=1).tolist() == [len(channels)] * 2
    sizes = [[8 * c + 4 for c in channels], [8 * c for c in channels]]
    assert passes.collective_bytes[:, STATISTICS].sum(axis=1).tolist() == [*map(sum, sizes)]
    assert not alone.passes(0, FOUR).collective_calls.any()
    group = tuple(range(4))
    wanted = sum(collective_s(cluster.links, "all_reduce", group, size) for size in chain(*sizes))
    blocks = len(alone.names)
    for devices, mesh, seconds in (
        ((0,), {}, 0.0),
        (group, {"replicate": 4}, wanted),
        (group, {"shard": 4, "sharding": 3}, wanted),
    ):
        draft = Draft((0, blocks), (Mesh(devices, **mesh),), (0,), bytes(blocks), bytes(blocks), (4,), (1,))
        by_block = [DraftEvaluator(costs, cluster).evaluate(draft) for costs in (alone, joined)]
        assert by_block[0].parts["tensor"] == 0.0
        assert by_block[1].parts["tensor"] == pytest.approx(seconds, rel=0.02)
        pairs = zip((alone, joined), by_block, strict=True)
        before, after = (evaluate_ops(draft, costs, cluster, one).step_time_s for costs, one in pairs)
        assert before + 0.5 * seconds <= after <= before + 1.02 * seconds
