"""Which plans the pipeline engine runs, what its stages hand to each other, and its split backward."""

import numpy as np
import pytest
import torch
from equal import build, keywords, parts_of
from plans import stage_plan

from rlplace.runtime.distributed.graph.assign import assign, planned_groups, planned_placements
from rlplace.runtime.distributed.graph.cut import cut_graph
from rlplace.runtime.distributed.graph.forward_graph import forward_graph
from rlplace.runtime.distributed.pipeline import engine as support
from rlplace.runtime.distributed.pipeline import torch_schedules as versions
from rlplace.runtime.distributed.pipeline.chain import chain_of
from rlplace.runtime.distributed.pipeline.engine import pipeline_order
from rlplace.runtime.distributed.pipeline.split_backward import input_backward, whole_backward
from rlplace.runtime.distributed.pipeline.stage import asides_of
from rlplace.runtime.held import meta_copy


@pytest.fixture(scope="module")
def graphs():
    made = {}

    def graph_of(name):
        if name not in made:
            model, inputs, loss = build(name, double=False)
            part = parts_of(inputs, 1, 4).parts[0]
            made[name] = forward_graph(meta_copy(model), (), keywords(inputs, part.leaves), loss=loss)
        return made[name]

    return graph_of


def cut_of(graph, places, schedule="1f1b", **fields):
    plan = stage_plan(graph, places, schedule=schedule, **{"microbatches": 4, **fields})
    return cut_graph(graph, assign(graph, planned_placements(plan), None, planned_groups(plan))), plan


def chain_with(graph, places):
    return chain_of(cut_of(graph, places)[0])


@pytest.mark.parametrize(
    ("places", "schedule"),
    [
        ([0, 1], "gpipe"),
        ([1, 0], "1f1b"),
        ([0, 1, 2, 1, 0], "1f1b"),
        ([0, 0, 1], "gpipe"),
        ([0, 1, 0, 1], "looped_bfs"),
        ([0, 1, 0, 1], "interleaved_1f1b"),
        ([0, 1, 0, 1], "interleaved_zero_bubble"),
        ([0, 1, 1, 0], "zbv"),
        ([0, 1, 1, 0], "dualpipev"),
    ],
)
@pytest.mark.parametrize("name", ["t5", "resnet", "gpt2"])
def test_chains_of_stages_can_run(graphs, name, places, schedule):
    cut, plan = cut_of(graphs(name), places, schedule)
    assert support.unsupported(cut, plan) is None


@pytest.mark.parametrize(
    ("places", "schedule", "fields", "reason"),
    [
        ([0, 1], "list", {}, "schedule list is no pipeline schedule; the stage-graph engine runs it"),
        ([1, 1], "1f1b", {}, "nothing is piped"),
        ([0, 1, 1, 0], "interleaved_1f1b", {}, r"it needs a loop \(0 1 2 0 1 2\)"),
        ([0, 1, 1], "zbv", {}, "cannot run stages on devices 0 1 1"),
        ([0, 1, 0, 1], "interleaved_1f1b", {"microbatches": 5}, "5 micro-batches on 2 devices do not make 2 equal rounds; use"),
        ([0, 1, 1, 0], "dualpipev", {"microbatches": 3}, "at least as many micro-batches as stages, found 3 for 4; use 4"),
        ([0, 1, 1, 0], "zbv", {"recompute": [[0]]}, "interleaved_1f1b, looped_bfs, 1f1b or gpipe, or no recompute"),
        ([0, 1], "1f1b", {"order": [[0], [1]]}, "the plan fixes the order of every op"),
    ],
)
def test_others_are_refused_with_what_can(graphs, places, schedule, fields, reason):
    cut, plan = cut_of(graphs("gpt2"), places, schedule, **fields)
    found = support.unsupported(cut, plan)
    assert found is not None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found)


def test_a_stage_that_comes_back_is_refused(graphs):
    graph = graphs("gpt2")
    _, plan = cut_of(graph, [0, 1, 0])
    plan.stage_of_group[:] = [0, 1, 0]
    cut = cut_graph(graph, assign(graph, planned_placements(plan)))
    assert "stage 0 needs to run in 2 parts, because other stages lie between" in support.unsupported(cut, plan)
    assert "stage-graph engine" in support.unsupported(cut, plan)


def test_unknown_versions_of_torch_are_refused(graphs, monkeypatch):
    cut, plan = cut_of(graphs("gpt2"), [0, 1])
    for version, fine in (("2.11.0", True), ("2.13.1+cu130", True), ("2.10.2", False), ("2.14.0a0", False), ("3.0", False)):
        monkeypatch.setattr(versions.torch, "__version__", version)
        assert (support.unsupported(cut, plan) is None) == fine


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "vit", "resnet", "mixtral", "lstm"])
@pytest.mark.parametrize("stages", [2, 5])
def test_every_value_reaches_its_readers(graphs, name, stages):
    graph = graphs(name)
    chain = chain_with(graph, [number % 2 for number in range(stages)])
    for number, segment in enumerate(chain.stages):
        for value in segment.reads:
            if graph.layout[value].requires_grad:
                assert value in chain.taken(number)
                assert chain.taken(number).count(value) == 1
            else:
                assert number in chain.aside[value][1]
        for value in chain.carried[number]:  # made here or taken from the stage before
            assert value in segment.makes or value in chain.taken(number)
            assert graph.layout[value].dtype.is_floating_point
    assert chain.carried[-1] == ()


def test_skips_are_carried_once_and_no_further_than_needed(graphs):
    chain = chain_with(graphs("t5"), [0, 1, 0, 1, 0])
    for value, maker in chain.cut.maker.items():
        stages = [number for number, names in enumerate(chain.carried) if value in names]
        if stages:
            position = [segment.index for segment in chain.stages]
            readers = [position.index(reader) for reader in chain.cut.readers.get(value, ())]
            assert stages == list(range(position.index(maker), max(readers)))
    assert any(
        value in a and value in b for a, b in zip(chain.carried, chain.carried[1:], strict=False) for value in a
    )  # the encoder's output


def test_messages_past_the_pipeline_have_tags_of_their_own(graphs):
    chain = chain_with(graphs("bert"), [0, 1, 2, 1, 0])
    forwards = {device: [(s, m) for m in range(3) for s, p in enumerate(chain.devices) if p == device] for device in range(3)}
    messages = asides_of(chain, forwards)
    assert messages
    assert sorted(m.tag for m in messages) == list(range(1, len(messages) + 1))
    wanted = {
        (value, m, chain.devices[maker], chain.devices[reader])
        for value, (maker, readers) in chain.aside.items()
        for reader in readers
        for m in range(3)
        if chain.devices[maker] != chain.devices[reader]
    }
    assert {(m.value, m.microbatch, m.source, m.destination) for m in messages} == wanted
    assert len(messages) == len(wanted)


@pytest.mark.parametrize("places", [[0, 1, 0, 1], [0, 1, 2, 1, 0], [2, 0, 0, 1]])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_orders_for_any_places_keep_what_1f1b_promises(graphs, places, microbatches):
    chain = chain_with(graphs("lstm"), places)
    order = pipeline_order(chain, "1f1b", microbatches)
    for device, actions in order.items():
        flying, seen = {}, set()
        for action in actions:
            assert places[action.stage] == device
            flying[action.stage] = flying.get(action.stage, 0) + (1 if action.kind == "F" else -1)
            assert 0 <= flying[action.stage] <= len(places) - action.stage
            seen.add(action)
        assert len(seen) == len(actions) == 2 * microbatches * places.count(device)


def test_gpipe_on_any_places_runs_all_forwards_of_a_stage_first(graphs):
    order = pipeline_order(chain_with(graphs("lstm"), [0, 1, 0]), "gpipe", 3)
    for actions in order.values():
        for stage in {action.stage for action in actions}:
            assert "".join(a.kind for a in actions if a.stage == stage) == "FFFBBB"


def small(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def split_cases():
    torch.manual_seed(0)
    mix, other, bias, table = small(4, 4), small(4, 4), small(4), small(3, 4)
    lstm, norm = torch.nn.LSTM(4, 4, 2).double(), torch.nn.BatchNorm1d(4).double()

    def tied(x, y):  # a parameter used twice, an op with two outputs, a value passed through, an output of parameters only
        h = torch.tanh(torch.tanh(x @ mix + bias) @ other) @ mix.t()
        a, b = (h + table).chunk(2, 1)
        return [(a * b).sum(1), y, table.exp(), h.sum()]

    def beside(x, y):  # parameters that meet the inputs late, or at one of two outputs only
        both = torch.tanh(mix @ other)
        return [(x @ both).relu() @ mix, (x + y) @ other]

    return {
        "tied": (tied, [mix, other, bias, table], 2),
        "beside": (beside, [mix, other, bias], 2),
        "no inputs": (lambda: [torch.tanh(mix @ other), (mix * 2).sum()], [mix, other], 0),
        "no parameters": (lambda x, y: [x * y, x], [mix], 2),
        "nothing": (lambda x, y: [x.detach()], [mix], 2),
        "lstm": (lambda x, y: [lstm(x)[0] + lstm(y)[0]], list(lstm.parameters()), 2),
        "norm": (lambda x, y: [norm(x @ mix) @ mix, y], [mix, *norm.parameters()], 2),
    }


@pytest.mark.parametrize("case", list(split_cases()))
def test_both_halves_of_a_backward_make_the_whole(case):
    build, parameters, count = split_cases()[case]
    inputs = [small(3, 4) for _ in range(count)]
    gradients = [torch.randn_like(value) if value.dim() else None for value in build(*inputs)]
    wanted_inputs = whole_backward(build(*inputs), gradients, inputs)
    wanted = [None if p.grad is None else p.grad.clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    found, later = input_backward(build(*inputs), gradients, inputs)
    assert all(parameter.grad is None for parameter in parameters)
    later.run()
    for a, b in zip(found, wanted_inputs, strict=True):
        torch.testing.assert_close(a, b)
    for parameter, gradient in zip(parameters, wanted, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(parameter.grad, gradient)
    assert all(value.grad is None for value in inputs)


def test_gradients_on_their_way_are_nobody_elses():
    x, bias = small(1, 4), small(2, 2)  # the gradients of both are views of one tensor
    (sent,) = whole_backward([(x.view(4) + bias.view(4)) * 2], [torch.full((4,), 0.5, dtype=torch.float64)], [x])
    bias.grad.add_(1.0)  # as the next micro-batch does
    assert np.array_equal(sent.numpy(), np.ones((1, 4)))
