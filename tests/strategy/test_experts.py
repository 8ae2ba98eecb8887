"""Expert and context parallelism: layouts and costs of captured models, and the search over their degrees."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.cluster.collectives import collective_s
from rlplace.cost.table import IMBALANCE, CostTable
from rlplace.errors import InputError
from rlplace.model.capture.capture import capture
from rlplace.model.graph.opgraph import UPDATE
from rlplace.model.zoo import load_model
from rlplace.plan.strategy import CONTEXT_METHODS, uniform_words
from rlplace.strategy.blocks.price import PricedBlocks
from rlplace.strategy.costs import CONTEXT_ALL_TO_ALL, CONTEXT_GATHER, CONTEXT_SCATTER, EXPERT_ALL_TO_ALL, RINGS, Cut
from rlplace.strategy.drafts import Draft, Mesh, draft_of, kind_of
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.executor.meshes import lanes
from rlplace.strategy.executor.packing import Packer, placed_blocks
from rlplace.strategy.executor.traffic import ClusterTraffic
from rlplace.strategy.search.search import search
from rlplace.strategy.search.space import Space
from rlplace.strategy.search.tries import SearchProblem
from tests.captured import captured
from tests.strategy.random_costs import random_costs

CLUSTER = Cluster.preset("h100:8")
EIGHT, LAYER = tuple(range(8)), 1


@pytest.fixture(scope="module")
def mixtral() -> PricedBlocks:
    """Two layers with four experts, two a token."""
    return PricedBlocks(captured("mixtral"), CLUSTER, captured("mixtral", 8))


def draft(place: Mesh, blocks: int = 5, samples: int = 4) -> Draft:
    return Draft((0, blocks), (place,), (0,), bytes(blocks), bytes(blocks), (samples,), (1,))


def test_a_dense_model_has_none() -> None:
    dense = PricedBlocks(captured("llama"), CLUSTER)
    assert dense.experts == 1 and "no experts" in str(dense.why_not(Cut(4, expert=2)))


@pytest.mark.slow
def test_by_hand(mixtral: PricedBlocks) -> None:
    """Weights fall by the degree; tokens go out and come back once a pass, twice each: 4 x 32 tokens, 2 experts, 32 floats."""
    assert mixtral.experts == 4 and mixtral.why_not(Cut(4, expert=4)) is None
    assert "does not divide 4 experts" in str(mixtral.why_not(Cut(4, expert=3)))
    whole, own = mixtral.held(), 4 * (4 * (128 * 32 + 64 * 32))  # floats of gate and up, and down
    for degree in (2, 4):
        held = mixtral.held(1, degree)
        assert held.expert_bytes[:, LAYER].tolist() == [own // degree, own // degree, 2 * own // degree]
        assert held.weight_bytes[LAYER] == whole.weight_bytes[LAYER] - own + own // degree
        assert held.weight_bytes[0] == whole.weight_bytes[0] and not held.expert_bytes[:, 0].any()
        for tensor in (1, 2):
            passes = mixtral.passes(0, Cut(4, tensor, expert=degree))
            tokens = 2 * round(IMBALANCE * (4 * 32 * 2 * 32 * 4 // tensor))  # of the busiest device
            assert passes.collective_bytes[:, EXPERT_ALL_TO_ALL].tolist() == [[0, tokens, tokens, 0, 0]] * 2
            assert passes.collective_calls[:, EXPERT_ALL_TO_ALL].tolist() == [[0, 2, 2, 0, 0]] * 2


def test_routed_ops_wait_for_the_busiest_device(mixtral: PricedBlocks) -> None:
    """They take as long as before, less what they need not read, and sort rows, times the imbalance; others do not change.

    A forward reads and writes the 4 x 32 tokens for 2 experts of 32 floats out, and twice as much back, at half the bandwidth.
    """
    cut, routed = Cut(4, expert=4), mixtral._experts.routed
    layer = (mixtral.blocks.of_op == LAYER) & (mixtral.graph.op_phase == 0)
    seconds = mixtral._seconds(0, cut)
    sorting = 6 * 4 * 32 * 2 * 32 * 4 / (0.5 * CLUSTER.kinds[0].memory_bandwidth_bytes_per_s)
    expected = seconds[layer].sum() + (IMBALANCE - 1) * seconds[layer & routed].sum() + IMBALANCE * sorting
    assert mixtral.passes(0, cut).forward_s[LAYER] == pytest.approx(expected, rel=1e-12)
    counted = PricedBlocks(captured("mixtral"), CLUSTER, captured("mixtral", 8), costs=CostTable({}, imbalance=((4, 1.5),)))
    more = (1.5 - IMBALANCE) * (seconds[layer & routed].sum() + sorting)
    assert counted.passes(0, cut).forward_s[LAYER] == pytest.approx(expected + more, rel=1e-12)
    assert mixtral.passes(0, cut).forward_s[0] == pytest.approx(mixtral.passes(0, Cut(4)).forward_s[0], rel=1e-12)
    assert (mixtral.passes(0, cut).kept_bytes == mixtral.passes(0, Cut(4)).kept_bytes).all()


@pytest.mark.parametrize("level", [1, 2, 3])
def test_shares_of_experts_do_not_depend_on_the_degree(mixtral: PricedBlocks, level: int) -> None:
    """Shares in the host's memory add up to the model whatever the degree; what is gathered on a device falls with it."""
    evaluator = DraftEvaluator(mixtral, CLUSTER)
    held = mixtral.held()
    total = int(held.weight_bytes.sum() + held.gradient_bytes.sum() + held.optimizer_bytes.sum())
    peaks = []
    for degree in (1, 2, 4):
        resting = draft(Mesh(EIGHT, shard=8, expert=degree, sharding=level), samples=1)
        peaks.append(evaluator.evaluate(resting).peak_memory_bytes[0])
        outside = dataclasses.replace(resting, offload=bytes([2] * 5))
        assert evaluator.evaluate(outside).host_bytes == (total,)
    assert peaks[0] > peaks[1] > peaks[2]


def test_experts_of_one_device_each_are_not_gathered(mixtral: PricedBlocks) -> None:
    """Over the whole group nothing is left to share: a step of level 1 gathers and reduces what is not experts'."""
    place = Mesh((0, 1, 2, 3), shard=4, expert=4, sharding=1)
    held, links = mixtral.held(1, 4), CLUSTER.links
    dense = (held.weight_bytes - held.expert_bytes[0]).astype(float)
    first = collective_s(links, "all_gather", place.devices, float(dense[0]))
    found = placed_blocks(draft(place), lanes(draft(place))[0], Packer(mixtral, CLUSTER, ClusterTraffic(CLUSTER)))[0]
    assert found[0].gather_s == pytest.approx(first, rel=0.01)
    assert found[LAYER].gather_s == pytest.approx(collective_s(links, "all_gather", place.devices, float(dense[1])), rel=0.01)


def test_drafts_that_spread_experts_wrongly_are_refused(mixtral: PricedBlocks) -> None:
    evaluator = DraftEvaluator(mixtral, CLUSTER)
    for place in (Mesh(EIGHT, shard=8, expert=3, sharding=1), Mesh(EIGHT, replicate=4, tensor=2, expert=4)):
        with pytest.raises(InputError, match="expert"):
            evaluator.score(draft(place))


def test_an_expert_degree_is_searched_where_memory_asks_for_it() -> None:
    """Words, plan and draft say the same."""
    costs = dataclasses.replace(random_costs(np.random.default_rng(3), CLUSTER, 5), experts=8)
    question = SearchProblem(DraftEvaluator(costs, CLUSTER), 16, Space.parse("expert=8 shard=8 pipeline=1"))
    best = search(question, calls=200).ranked[0].draft
    assert {place.expert for place in best.places} == {8}
    strategy = best.strategy(costs.names)
    assert "expert 8" in uniform_words(strategy) and draft_of(strategy.pipelines[0], costs.names) == best
    free = search(dataclasses.replace(question, space=Space()), calls=400)
    assert any("expert parallel" in kind for kind in free.of_kinds)


MIDDLE = 2
HIDDEN = 4 * 32 * 64 * 4
"""Bytes: samples, positions, features, floats."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "packed"), [("bert", 2 * HIDDEN, 0), ("gpt2", 2 * HIDDEN, 1), ("llama", HIDDEN, 0)])
def test_context_by_hand(name: str, size: int, packed: int) -> None:
    """Everything along the sequence is halved; keys and values are gathered, kept, and their gradients summed once a pass.

    GPT-2 has both in one tensor with the queries, whose part stays, too; of Llama's two heads both read one of keys and values.
    """
    blocks = PricedBlocks(captured(name), "h100:8", captured(name, 8))
    whole, half, quarter = (blocks.passes(0, Cut(4, context=degree)) for degree in (1, 2, 4))
    for degree, cut in ((2, half), (4, quarter)):
        assert cut.returned_bytes[MIDDLE] == HIDDEN / degree
        gathered = size if packed else size - size / degree
        kept = whole.kept_bytes[:, MIDDLE] / degree + [gathered, gathered, 0]  # by recomputation
        assert cut.kept_bytes[:, MIDDLE] == pytest.approx(kept, rel=0.01)
        assert cut.collective_bytes[:, CONTEXT_GATHER, MIDDLE].tolist() == [size, 0]
        assert cut.collective_bytes[:, CONTEXT_SCATTER, MIDDLE].tolist() == [0, size]
        assert cut.collective_calls[:, CONTEXT_GATHER, MIDDLE].tolist() == [2, 0]
    work = [blocks._at(Cut(4, context=degree)).whole[0] for degree in (1, 2)]
    passes = work[0].op_phase != UPDATE
    assert work[1].op_flops[passes].sum() == pytest.approx(work[0].op_flops[passes].sum() / 2, rel=0.01)
    assert (work[1].op_flops[~passes] == work[0].op_flops[~passes]).all()


@pytest.mark.parametrize(("name", "keys", "packed"), [("bert", 2, 0), ("gpt2", 2, 1), ("llama", 1, 0)])
def test_other_methods_of_the_context_by_hand(name: str, keys: float, packed: int) -> None:
    """`heads` sends a part of queries, keys, values and results both ways; `ring` sends keys and values, and their gradients.

    Both keep the part of keys and values alone, `heads` another copy of the result. Of Llama's one head of keys every process
    takes all of it, repeated.
    """
    blocks = PricedBlocks(captured(name), "h100:8", captured(name, 8))
    plain, heads, ring = (blocks.passes(0, Cut(4, context=2, context_method=way)) for way in CONTEXT_METHODS)
    part = HIDDEN / 2
    assert (heads.collective_calls[:, CONTEXT_ALL_TO_ALL, MIDDLE] == 4).all()
    assert (heads.collective_bytes[:, CONTEXT_ALL_TO_ALL, MIDDLE] == 4 * part).all()
    assert not heads.collective_calls[:, RINGS].any() and not heads.hidden_s.any()
    assert ring.collective_bytes[:, RINGS, MIDDLE].tolist() == [[keys * HIDDEN, 0], [keys * HIDDEN, keys * HIDDEN]]
    more = plain.kept_bytes[:, MIDDLE] - (keys * HIDDEN if packed else keys * part) * np.array([1, 1, 0])
    assert ring.kept_bytes[:, MIDDLE] == pytest.approx(more, rel=0.01)
    copies = (4 if packed else 1) * part * np.array([1, 1, 0])
    assert heads.kept_bytes[:, MIDDLE] - ring.kept_bytes[:, MIDDLE] == pytest.approx(copies, rel=0.01)
    assert (ring.forward_s == plain.forward_s).all() and (ring.hidden_s[:, MIDDLE] > 0).all()
    traffic = ClusterTraffic(CLUSTER)
    tables = traffic.tables_inside(Mesh((0, 1), context=2, context_method="ring"), False)
    bare, hidden = (
        traffic.moved_s(tables, ring.collective_bytes, ring.collective_calls, beside) for beside in (None, ring.hidden_s)
    )
    assert (hidden >= 0).all() and hidden == pytest.approx(np.maximum(bare - ring.hidden_s, 0))
    assert "cannot be dealt to 4" in str(blocks.why_not(Cut(4, 2, context=2, context_method="heads")))


def test_keys_that_queries_share_travel_once() -> None:
    """Attention does not repeat two heads for four; a device of four has one head of keys, and half the width of values."""
    loaded = load_model(
        "hf:llama,num_hidden_layers=1,hidden_size=32,num_attention_heads=4,num_key_value_heads=2", batch=2, seq=16
    )
    blocks = PricedBlocks(capture(loaded.module, loaded.example_inputs, loss=loaded.loss), "h100:8")
    head = 2 * 16 * 8 * 4  # samples, positions, width, floats
    for tensor, both in ((1, 4 * head), (2, 2 * head), (4, 2 * (head / 2 + head / 4))):
        cut = Cut(2, tensor, context=2)
        assert blocks.passes(0, cut).collective_bytes[:, RINGS, LAYER].tolist() == [[both, 0], [0, both]]
    for tensor in (1, 2):  # half the positions of queries and results; of keys and values of two heads, one of them repeated
        heads = blocks.passes(0, Cut(2, tensor, context=2, context_method="heads"))
        assert (heads.collective_bytes[:, CONTEXT_ALL_TO_ALL, LAYER] == 2 * 4 / tensor * head / 2 + 2 * head).all()


def test_keys_and_values_of_unlike_widths_travel_by_theirs() -> None:
    """Of latent attention one tensor holds the values and parts of the keys, which are written into another in place."""
    sizes = "num_hidden_layers=1,hidden_size=32,intermediate_size=64,num_attention_heads=4,num_key_value_heads=4"
    latent = "first_k_dense_replace=1,kv_lora_rank=8,q_lora_rank=8,qk_nope_head_dim=16,qk_rope_head_dim=8,v_head_dim=16"
    loaded = load_model(f"hf:deepseek_v3,{sizes},{latent}", batch=2, seq=16)
    blocks = PricedBlocks(capture(loaded.module, loaded.example_inputs, loss=loaded.loss), "h100:8")
    width = 2 * 16 * 4 * 4  # samples, positions, heads, floats
    for tensor in (1, 2):
        ring, heads = (blocks.passes(0, Cut(2, tensor, context=2, context_method=way)) for way in ("ring", "heads"))
        both = (24 + 16) * width / tensor
        assert ring.collective_bytes[:, RINGS, LAYER].tolist() == [[both, 0], [both, both]]
        assert (heads.collective_bytes[:, CONTEXT_ALL_TO_ALL, LAYER] == 2 * both / 2).all()


def test_context_groups_on_hopper_run_other_kernels_than_cudnn() -> None:
    """Where a device attends over all positions with a part of the heads, the usual kernel runs."""
    loaded = load_model(
        "hf:llama,num_hidden_layers=1,hidden_size=512,num_attention_heads=4,num_key_value_heads=4", batch=2, seq=2048
    )
    blocks = PricedBlocks(capture(loaded.module, loaded.example_inputs, loss=loaded.loss, dtype="bf16"), "h100:8")
    gather, heads, ring = (
        blocks.passes(0, Cut(2, context=2, context_method=way)).forward_s[LAYER] for way in ("gather", "heads", "ring")
    )
    assert gather == ring > heads


def test_both_groups_divide_what_both_cut() -> None:
    blocks = PricedBlocks(captured("bert"), "h100:8", captured("bert", 8))
    both, tensor = blocks.passes(0, Cut(4, 2, True, 2)), blocks.passes(0, Cut(4, 2, True))
    gathered = both.collective_bytes[0, CONTEXT_GATHER, MIDDLE]
    assert both.kept_bytes[0, MIDDLE] == pytest.approx(tensor.kept_bytes[0, MIDDLE] / 2 + gathered / 2, rel=0.01)
    assert (both.collective_bytes[:, :3] * 2 == tensor.collective_bytes[:, :3]).all()
    assert gathered == 2 * HIDDEN / 2  # heads are cut


@pytest.mark.parametrize(
    ("name", "words"),
    [("resnet", "no fused attention"), ("vit", "17 positions cannot be cut into 4 parts"), ("mlp", "no fused")],
)
def test_what_cannot_be_divided(name: str, words: str) -> None:
    assert words in str(PricedBlocks(captured(name), "h100:8").why_not(Cut(4, context=2)))


def test_one_sample_is_divided_where_that_is_all_there_is() -> None:
    """One long sample on four devices, which share updates; with four of them replicas exchange less than its parts."""
    cluster = Cluster.preset("a100-80g:4")
    costs = random_costs(np.random.default_rng(1), cluster, 5)
    space = Space.parse("tensor=1 pipeline=1 recompute=none offload=none")
    one = search(SearchProblem(DraftEvaluator(costs, cluster), 1, space), calls=100)
    drafts = {kind_of(tried.draft): tried.draft for tried in reversed(one.ranked)}
    assert kind_of(one.ranked[0].draft) == "context parallel x fully sharded" and "context parallel" in drafts
    assert {place.context for draft in drafts.values() for place in draft.places} == {1, 4}
    words = {kind: uniform_words(draft.strategy(costs.names)) for kind, draft in drafts.items()}
    assert "level" in words["context parallel x fully sharded"] and "level" not in words["context parallel"]
    four = search(SearchProblem(DraftEvaluator(costs, cluster), 4, space), calls=100)
    assert {place.context for place in four.ranked[0].draft.places} == {1}
    asked = search(SearchProblem(DraftEvaluator(costs, cluster), 4, Space.parse("context=2 tensor=1 pipeline=1")), calls=100)
    assert {place.context for place in asked.ranked[0].draft.places} == {2}
