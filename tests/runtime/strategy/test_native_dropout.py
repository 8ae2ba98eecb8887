"""Dropout over the tensor axis: the plain model, handed the masks that the processes drew, computes the same."""

from itertools import groupby

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from rlplace.runtime.strategy.tensor import PartStream
from rlplace.runtime.strategy.wrap import keep, recompute
from tests.runtime.strategy import dropout_worker, native_worker
from tests.runtime.strategy.native_cases import chain, flat

pytest.importorskip("transformers")

HALVES = [(0, 1), (2, 3)]
CASES = {
    "tensor": flat("short", {"tensor": 4}, 0, microbatch=4),
    "replicas, recomputed": flat("short", {"replicate": 2, "tensor": 2}, 0, microbatch=4, recompute="full"),
    "sequence": flat("short", {"tensor": 2, "shard": 2}, 1, sequence_parallel=True),
    "sequence, recomputed in part": flat("short", {"tensor": 2, "shard": 2}, 3, sequence_parallel=True, recompute="selective"),
    "pipeline": chain("short", HALVES, "1f1b", mesh={"tensor": 2}, sharding=0, microbatch=2, recompute="full"),
}
AGAIN = ("replicas, recomputed", "pipeline")
SAME = {"plain": flat("short", {"tensor": 4}, 0), "kept in part": flat("short", {"tensor": 4}, 0, recompute="selective")}


@pytest.fixture(scope="module")
def results():
    from tests.runtime.job.launch import run

    return run(4, dropout_worker.run, CASES, AGAIN, SAME)


def joined(results):
    """Masks in the plain model's order: parts put together where a group has parts, over passes, replicas and stages."""

    def replica(result):
        return result["place"]["replicate"], result["place"]["shard"]

    stages = []
    key = lambda result: result["place"]["pipeline"]  # noqa: E731
    for _, stage in groupby(sorted(results, key=key), key):
        rows = []
        for _, group in groupby(sorted(stage, key=replica), replica):
            group = sorted(group, key=lambda result: result["place"]["tensor"])
            calls = [_whole(masks) for masks in zip(*(result["masks"] for result in group), strict=True)]
            count = len(calls) // group[0]["passes"]
            rows += [calls[start : start + count] for start in range(0, len(calls), count)]
        stages += [torch.cat(masks) for masks in zip(*rows, strict=True)]
    return stages


def _whole(masks):
    if all(mask.equal(masks[0]) for mask in masks):
        return masks[0]
    return torch.cat(masks, 1)  # of heads or positions


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_the_plain_model_with_these_masks(case, results):
    own = [result[case] for result in results]
    masks = joined(own)
    model = dropout_worker.make()
    with dropout_worker.Masks(masks) as used:
        wanted = native_worker.loss(model(**native_worker.batch("gpt2")), native_worker.batch("gpt2"))
    assert len(used) == len(masks)
    wanted.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for result in own:
        assert result["loss"] == pytest.approx(wanted.item(), rel=1e-12)
        assert native_worker.difference(result["gradients"], gradients) < 1e-9
        assert case not in AGAIN or result["again"] == result["loss"] != result["other"]


def test_masks_are_those_of_dropout(results):
    for case in CASES:
        masks = joined([result[case] for result in results])
        drawn = torch.cat([mask.flatten() for mask in masks])
        assert set(drawn.unique().tolist()) == {0.0, 1 / (1 - dropout_worker.P)}
        kept = (drawn > 0).double()
        spread = (dropout_worker.P * (1 - dropout_worker.P) / len(kept)) ** 0.5
        assert abs(kept.mean() - (1 - dropout_worker.P)) < 5 * spread
        for mask in masks:  # no two samples, heads or positions are alike
            rows = mask.flatten(0, 1).flatten(1)
            assert len(rows.unique(dim=0)) > 0.9 * len(rows)


def test_what_is_kept_does_not_move_what_is_drawn_after(results):
    for result in results:
        assert result["plain"]["loss"] == result["kept in part"]["loss"]
        assert native_worker.difference(result["kept in part"]["gradients"], result["plain"]["gradients"]) < 1e-12


def drawn_between_passes(again):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    PartStream(0, torch.device("cpu")).around(block)
    if again:
        recompute(block, "full")
    drawn = []
    for _ in range(3):
        block(torch.ones(2, 4, requires_grad=True)).sum().backward()
        drawn.append(torch.rand(()).item())
    return drawn


def test_a_recomputation_that_torch_ends_early_leaves_the_stream_of_the_group_where_it_was():
    assert drawn_between_passes(True) == drawn_between_passes(False)


@pytest.mark.parametrize("name", ["_scaled_dot_product_cudnn_attention", "_efficient_attention_forward"])
def test_selective_recomputation_keeps_what_any_kernel_of_attention_makes_without_dropout(name):
    op = getattr(torch.ops.aten, name).default
    before = [argument.name for argument in op._schema.arguments].index("dropout_p")
    policies = [keep(None, op, *[None] * before, dropout) for dropout in (0.0, 0.1)]
    assert policies == [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE]
