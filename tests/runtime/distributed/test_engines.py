"""Which engine runs which plan, and what a refusal says."""

import gc
import weakref

import numpy as np
import pytest
import torch
from equal import build
from launch import run
from loops import train
from plans import plan_of

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.distributed.distribute import distribute
from rlplace.runtime.distributed.execution.batches import check_inputs
from rlplace.runtime.distributed.execution.engines import ENGINES, engine_module
from rlplace.runtime.distributed.graph.forward_graph import forward_graph


@pytest.fixture(scope="module")
def gpt2():
    model, inputs, _ = build("gpt2", double=False)
    return model, inputs, forward_graph(model, (), inputs)


def changed(plan, **fields):
    return PlacementPlan(**{**vars(plan), **fields})


def why_not(name, plan, graph, processes):
    return engine_module(name).why_not(plan, graph, processes)


def runs(plan, graph, processes=2):
    return [name for name in ENGINES if why_not(name, plan, graph, processes) is None]


def test_every_kind_of_plan_has_its_engine(gpt2):
    model, inputs, graph = gpt2
    chain = plan_of(model, inputs, 2, deal="chain")
    assert runs(chain, graph) == ["stage_graph", "joint_graph", "replay"]
    piped = changed(chain, microbatches=4, schedule="1f1b")
    assert runs(piped, graph)[0] == "pipeline"
    back_and_forth = changed(piped, device_of_group=np.array([0, 1, 0, 1, 0, 1], dtype=np.int32))
    assert runs(back_and_forth, graph)[0] == "stage_graph"
    assert runs(changed(chain, schedule="interleaved_zero_bubble", microbatches=4), graph) == ["pipeline"]


def test_backward_elsewhere_is_for_the_joint_graph(gpt2):
    model, inputs, graph = gpt2
    plan = plan_of(model, inputs, 2, deal="chain")
    groups = [row for g in plan.groups for row in (g, {"name": f"{g['name']}.backward", "modules": [], "ops": []})]
    devices = np.array([d for i, d in enumerate(plan.device_of_group) for d in (d, 1 - d if i == 0 else d)], dtype=np.int32)
    split = changed(plan, groups=groups, device_of_group=devices)
    assert runs(split, graph) == ["joint_graph"]
    assert "g0.backward" in why_not("stage_graph", split, graph, 2)


def test_a_refusal_says_what_would_run(gpt2):
    model, inputs, graph = gpt2
    plan = plan_of(model, inputs, 2, deal=[0, 1, 0, 1, 0, 1], microbatches=2, schedule="interleaved_zero_bubble")
    assert runs(plan, graph) == []
    assert "use list, gpipe or 1f1b" in why_not("stage_graph", plan, graph, 2)


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
    plan = plan_of(model, inputs, 2, deal=[0, 1, 0, 1, 0, 1], microbatches=2, schedule="interleaved_zero_bubble")
    found = []
    for options, change in (
        ({}, {}),
        ({"engine": "nobody"}, {"schedule": "list"}),
        ({"engine": "pipeline"}, {"schedule": "list"}),
        ({"engine": "replay"}, {"schedule": "list"}),
        ({"share": "mine"}, {"schedule": "list"}),
        ({}, {"schedule": "list", "device_of_group": np.array([0, 1, 2, 1, 0, 1], dtype=np.int32)}),
    ):
        with pytest.raises(InputError) as caught:
            distribute(model, changed(plan, **change), inputs, **options)
        found.append(str(caught.value))
    with pytest.raises(InputError) as caught:
        distribute(model, changed(plan, schedule="list", microbatches=1 + torch.distributed.get_rank()), inputs)
    found.append(str(caught.value))
    wrong, _, _ = build("bert", double=False)
    with pytest.raises(InputError) as caught:
        distribute(wrong, changed(plan, schedule="list"), inputs)
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
    plan = plan_of(model, inputs, 2, deal="chain", microbatches=2, schedule="1f1b")
    found = {}
    for engine in ("stage_graph", "joint_graph", "pipeline"):
        model, _, _ = build("gpt2", double=False)
        watched = weakref.ref(model)
        total = sum(p.numel() for p in model.parameters())
        placed = distribute(model, plan, inputs, engine=engine)
        del model
        gc.collect()
        placed(**inputs).loss.backward()
        found[engine] = watched() is None, sum(p.numel() for p in placed.parameters()) < total
    return found


def everything():
    chosen = [train("gpt2", 2, steps=1, **fields)["engine"] for fields in ({}, {"microbatches": 2, "schedule": "1f1b"})]
    return chosen, refusals(), freed()


@pytest.fixture(scope="module")
def found():
    """What two processes saw."""
    return list(zip(*run(2, everything, timeout_s=300), strict=True))


@pytest.mark.slow
def test_the_first_engine_that_fits_is_taken(found):
    assert found[0] == (["stage_graph", "pipeline"],) * 2


@pytest.mark.slow
def test_refusals_on_a_job(found):
    (first, other), (second, another) = found[1]
    assert first == second
    for text, rank, op in ((other, 0, "linear_1 = "), (another, 1, "relu = ")):
        assert "ranks 0 and 1 traced different forwards" in text and f"(rank {rank} has there: {op}" in text, text
    expected = (
        "no engine can run this plan",
        "unknown engine",
        "no pipeline schedule",
        "give problem=",
        "'mine'",
        "3 devices",
        "different plans",
        "another model",
    )
    for text, part in zip(first, expected, strict=True):
        assert part in text and "\n" not in text, text


@pytest.mark.slow
def test_weights_of_others_are_freed(found):
    for engines in found[2]:
        assert all(gone and fewer for gone, fewer in engines.values()), engines


def test_a_plan_that_cuts_ops_is_refused_with_what_to_plan(gpt2):
    model, inputs, graph = gpt2
    cut = plan_of(model, inputs, 1, groups=1, shards={"lm_head/linear": {"n": 2}})
    assert runs(cut, graph) == []
    assert "plan a strategy with a tensor axis" in why_not("stage_graph", cut, graph, 2)


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
