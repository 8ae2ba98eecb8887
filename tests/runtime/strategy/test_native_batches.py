"""Micro-batches of replicas from a batch, and one output from theirs: by hand."""

import pytest
import torch

from rlplace.errors import InputError
from rlplace.plan.strategy import Strategy
from rlplace.runtime.base.batches import join_leaves, passes_of, repeated, share_of
from tests.runtime.strategy.native_cases import beside, chain, flat, stage

CPU = torch.device("cpu")


def rows(count):
    return {"x": torch.arange(count), "scale": torch.tensor(2.0), "mask": torch.ones(3, 3)}


def seen(strategy, samples, **options):
    """For each replica the rows and weight of each of its passes."""
    shares = [share_of(strategy, replica, samples, **options) for replica in range(strategy.pipelines[0].data_degree)]
    passes = [passes_of(rows(samples), share, ("x",), (), CPU) for share in shares]
    return [[(one.inputs["x"].tolist(), pytest.approx(one.weight)) for one in own] for own in passes]


def test_replicas_take_their_rows_in_order():
    """Three passes of a sample on the first replica, two on the second: each of five samples counts a fifth of both sums."""
    strategy = Strategy.from_dict(flat("short", {"shard": 2}, 1, batch=5, devices=(0, 1)) | {"microbatches": [3, 2]})
    assert seen(strategy, 5) == [[([0], 0.4), ([1], 0.4), ([2], 0.4)], [([3], 0.4), ([4], 0.4)]]
    # seven samples over two replicas, in the most passes that both can run
    assert seen(strategy, 7) == [[([0, 1], 4 / 7), ([2], 2 / 7), ([3], 2 / 7)], [([4], 2 / 7), ([5], 2 / 7), ([6], 2 / 7)]]


def test_batches_of_other_sizes_are_split_evenly_or_refused():
    four = Strategy.from_dict(flat("llama", {"shard": 4}, 3))  # two passes of one sample on each of four replicas
    assert [share_of(four, replica, 11).sizes for replica in range(4)] == [(2, 1), (2, 1), (2, 1), (1, 1)]
    staged = Strategy.from_dict(chain("gpt2", [(0,), (1,)], "1f1b", mesh={}, sharding=0, batch=8, microbatch=2))
    assert share_of(staged, 0, 6).sizes == (2, 2, 2) and share_of(staged, 0, 5).sizes == (5,)
    with pytest.raises(InputError, match="3 samples for 4 replicas"):
        share_of(four, 0, 3)
    with pytest.raises(InputError, match=r"drop a short last batch \(drop_last=True\)"):
        passes_of({"input_ids": torch.zeros(1, 6)}, share_of(four, 1), (), (), CPU)


def test_a_narrow_stage_computes_a_pass_of_each_replica_together():
    """Four replicas of two samples on the wide stage, two of which the narrow one has in each pass."""
    stages = [stage(("a",), (0, 1, 2, 3), {"replicate": 4}, 0), stage(("b",), (4, 5), {"replicate": 2}, 0)]
    chain = {"batch": 8, "microbatch": [1], "microbatches": [2], "schedule": "1f1b", "stages": stages}
    strategy = Strategy.from_dict(chain)
    narrow = [share_of(strategy, replica, own_degree=2) for replica in range(2)]
    found = [[one.inputs["x"].tolist() for one in passes_of(rows(8), share, ("x",), (), CPU)] for share in narrow]
    assert found == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
    assert [share.weights for share in narrow] == [(pytest.approx(0.5),) * 2] * 2


def test_a_batch_that_one_pipeline_cannot_split_is_refused_by_all():
    """Beside the chain, whose four replicas of a pass join in twos, two replicas could run any samples."""
    stages = [stage(("a",), (0, 1, 2, 3), {"replicate": 4}, 0), stage(("b",), (4, 5), {"replicate": 2}, 0)]
    uneven = {"batch": 8, "microbatch": [1], "microbatches": [2], "schedule": "1f1b", "stages": stages}
    even = {"batch": 4, "microbatch": [1], "microbatches": [2], "stages": [stage(("a", "b"), (6, 7), {"shard": 2}, 1)]}
    both, refused = Strategy.from_dict(beside(uneven, even)), "stages of unlike degrees need as many samples in every replica"
    degrees = [(number, replica) for number, one in enumerate(both.pipelines) for replica in range(one.data_degree)]
    for samples in (8, 10, 11):  # of which the chain would take 5, 6 and 7
        for number, replica in degrees:
            with pytest.raises(InputError, match=refused):
                share_of(both, replica, samples, number=number)
    shares = [share_of(both, replica, 6, number=number) for number, replica in degrees]
    assert [(share.first, share.samples) for share in shares] == [(n, 1) for n in range(6)]


def test_what_is_no_row_is_kept_whole():
    strategy = Strategy.from_dict(flat("short", {"shard": 2}, 1, batch=4, devices=(0, 1)))
    (first, _), kept = passes_of(rows(4), share_of(strategy, 0), ("x", "mask"), (), CPU), rows(4)
    assert first.part["mask"].equal(kept["mask"]) and first.part["scale"].item() == 2.0 and first.samples == 1
    whole = passes_of(rows(4) | {"table": torch.arange(4)}, share_of(strategy, 1), ("x",), ("table",), CPU)
    assert [(one.inputs["x"].tolist(), one.part["table"].tolist()) for one in whole] == [
        ([2], [0, 1, 2, 3]),
        ([3], [0, 1, 2, 3]),
    ]
    shown = repeated(rows(3), 2, 3)
    assert shown["x"].tolist() == [0, 1, 2, 0, 1, 2] and shown["mask"].shape == (6, 3) and shown["scale"].dim() == 0


def test_outputs_are_joined_by_what_they_are():
    """A loss of 1 over two samples and of 4 over one; rows; a mask that is the same for every sample; words."""
    mask = torch.eye(2)
    parts = [
        [torch.tensor(loss), torch.full((n, 3), float(n)), torch.arange(2 * n) + n, mask, "words", torch.tensor(n)]
        for loss, n in ((1.0, 2), (4.0, 1))
    ]
    parts[1][3] = mask.clone()
    loss, values, pairs, shared, words, last = join_leaves(parts, [2, 1], [2 / 3, 1 / 3])
    assert loss.item() == pytest.approx(2.0) and words == "words" and last.item() == 1
    assert values.tolist() == [[2.0] * 3, [2.0] * 3, [1.0] * 3] and pairs.tolist() == [2, 3, 4, 5, 1, 2]
    assert shared.equal(mask)
    same = [[torch.ones(10, 10)], [torch.ones(10, 10)]]
    assert join_leaves(same, [1, 1], [0.5, 0.5])[0].shape == (10, 10)
