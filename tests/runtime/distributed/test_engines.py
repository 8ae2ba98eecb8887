"""Which engine runs which plan, and what a refusal says."""

import gc
import weakref

import numpy as np
import pytest
import torch
from equal import build
from launch import run
from plans import plan_of

from rlplace.errors import InputError
from rlplace.plan.plan import Older, PlacementPlan
from rlplace.runtime.distributed.as_strategy import strategy_of_plan
from rlplace.runtime.distributed.distribute import distribute
from rlplace.runtime.distributed.execution.batches import check_inputs
from rlplace.runtime.distributed.graph.forward_graph import forward_graph
from rlplace.runtime.native.blocks import block_names, owner


@pytest.fixture(scope="module")
def gpt2():
    model, inputs, _ = build("gpt2", double=False)
    return model, inputs, forward_graph(model, (), inputs)


def changed(plan, **fields):
    return PlacementPlan(**{**vars(plan), **fields})


def test_what_only_strategies_have_runs_as_one_where_stages_are_whole_blocks(gpt2):
    model, inputs, graph = gpt2
    blocks, ops = block_names(model), list(graph.op_of_node.values())
    of_block = {block: [op for op in ops if owner(op.rpartition("/")[0], blocks) == block] for block in blocks}
    rows = [{"name": block, "modules": [block], "ops": found} for block, found in of_block.items() if found]
    half = len(rows) // 2
    plan = changed(
        plan_of(model, inputs, 2, groups=1), groups=rows, device_of_group=np.array([0] * half + [1] * (len(rows) - half)),
        older=Older(4, "1f1b", (), ((0, 2), (1, 3)), ((1,), (2,))),
    )  # fmt: skip
    found = strategy_of_plan(plan, model, 2)
    assert (found.batch, found.pipelines[0].microbatch, found.pipelines[0].microbatches) == (16, (2,), (4,))
    assert [stage.devices for stage in found.stages] == [(0, 1), (2, 3)] and found.pipelines[0].schedule == "1f1b"
    assert [stage.mesh for stage in found.stages] == [{"replicate": 2}] * 2
    assert sorted(block for stage in found.stages for block in stage.blocks) == sorted(blocks)
    assert set(found.stages[0].recompute) == {rows[1]["name"], rows[2]["name"]}
    shared = strategy_of_plan(changed(plan, older=Older(4, None, (), ((0, 2), (1, 3)), (), True)), model, 2)
    assert [(stage.mesh, stage.sharding) for stage in shared.stages] == [({"shard": 2}, 1)] * 2
    torn = next(row for row in rows if len(row["ops"]) > 3)
    split = [{**torn, "ops": torn["ops"][:2]}, {**torn, "name": "rest", "ops": torn["ops"][2:]}]
    others = [row for row in rows if row is not torn]
    devices = np.array([0, 1, *(0 for _ in others)])
    with pytest.raises(InputError, match="lies in stages 0 and 1"):
        strategy_of_plan(changed(plan, groups=[*split, *others], device_of_group=devices, older=None), model, 2)
    with pytest.raises(InputError, match="blocks are recomputed whole"):
        strategy_of_plan(
            changed(plan, groups=[*split, *others], device_of_group=devices * 0, older=Older(recompute=((0,),))), model, 2
        )


class ByRank(torch.nn.Module):
    """A forward that may differ between processes."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.late = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), False

    def forward(self, x):
        x = self.up(x)
        return self.down(x.relu() if self.late else x).square().mean()


def refusals():
    model, inputs, _ = build("gpt2", double=False)
    plan = plan_of(model, inputs, 2, deal=[0, 1, 0, 1, 0, 1])
    found = []
    apart = np.array([0, 1, 0, 1, torch.distributed.get_rank(), 1], dtype=np.int32)
    for options, change in (
        ({}, {"older": Older(2, "interleaved_zero_bubble")}),
        ({"share": "mine"}, {}),
        ({}, {"device_of_group": np.array([0, 1, 2, 1, 0, 1], dtype=np.int32)}),
    ):
        with pytest.raises(InputError) as caught:
            distribute(model, changed(plan, **change), inputs, **options)
        found.append(str(caught.value))
    with pytest.raises(InputError) as caught:
        distribute(model, changed(plan, device_of_group=apart), inputs)
    found.append(str(caught.value))
    wrong, _, _ = build("bert", double=False)
    with pytest.raises(InputError) as caught:
        distribute(wrong, plan, inputs)
    found.append(str(caught.value))
    uneven, x = ByRank(), {"x": torch.ones(2, 4)}
    of_one = plan_of(uneven, x, 2, deal="chain", groups=2)
    assert float(distribute(uneven, of_one, x)(**x).detach()) > 0
    uneven.late = torch.distributed.get_rank() == 1
    with pytest.raises(InputError) as caught:
        distribute(uneven, of_one, x)
    return found, str(caught.value)


def freed():
    model, inputs, _ = build("gpt2", double=False)
    plan = plan_of(model, inputs, 2, deal="chain")
    watched = weakref.ref(model)
    total = sum(p.numel() for p in model.parameters())
    placed = distribute(model, plan, inputs)
    del model
    gc.collect()
    placed(**inputs).loss.backward()
    return watched() is None, sum(p.numel() for p in placed.parameters()) < total


def everything():
    return refusals(), freed()


@pytest.fixture(scope="module")
def found():
    """What two processes saw."""
    return list(zip(*run(2, everything), strict=True))


@pytest.mark.slow
def test_refusals_on_a_job(found):
    (first, other), (second, another) = found[0]
    assert first == second
    for text, rank, op in ((other, 0, "%linear_1 :"), (another, 1, "%relu :")):
        assert "ranks 0 and 1 traced different forwards" in text and f"(rank {rank} has there: {op}" in text, text
    expected = ("must be whole blocks of the model", "'mine'", "3 devices", "different plans", "another model")
    for text, part in zip(first, expected, strict=True):
        assert part in text and "\n" not in text, text


@pytest.mark.slow
def test_weights_of_others_are_freed(found):
    for gone, fewer in found[1]:
        assert gone and fewer


def test_nothing_runs_without_a_process_group():
    model, inputs, _ = build("lstm", double=False)
    plan = plan_of(model, inputs, 2, deal="chain")
    assert not torch.distributed.is_initialized()
    with pytest.raises(InputError, match="torchrun"):
        distribute(model, plan, inputs)


def test_inputs_that_require_a_gradient_are_refused():
    check_inputs((((torch.ones(2),), {"scale": 2.0}),))
    with pytest.raises(InputError, match="an input requires a gradient"):
        check_inputs((((), {"input": torch.ones(2, requires_grad=True)}),))
