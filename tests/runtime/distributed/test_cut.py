"""Cuts of real graphs, the order in which segments run, layouts of values, and graphs that processes compare."""

import contextlib

import pytest
import small_models
import torch
from plans import plan_of
from small_models import MODELS

from rlplace.errors import InputError
from rlplace.runtime.distributed.execution.turns import segment_turns
from rlplace.runtime.distributed.graph.assign import assign, check_same_ops, planned_groups, planned_placements
from rlplace.runtime.distributed.graph.cut import cut_graph
from rlplace.runtime.distributed.graph.forward_graph import flat_inputs, forward_graph
from rlplace.runtime.distributed.graph.order import step_order
from rlplace.runtime.distributed.graph.same_graph import graph_lines
from rlplace.runtime.distributed.graph.segment import segment_module

NAMES = ("gpt2", "t5", "resnet", "awkward", "lstm")


@pytest.fixture(scope="module")
def graphs():
    made = {}

    def get(name):
        if name not in made:
            torch.manual_seed(0)
            model, inputs, _ = MODELS[name]()
            made[name] = model, inputs, forward_graph(model, (), inputs)
        return made[name]

    return get


def cut_of(graphs, name, **options):
    model, inputs, graph = graphs(name)
    plan = plan_of(model, inputs, **options)
    return cut_graph(graph, assign(graph, planned_placements(plan), None, planned_groups(plan)))


@pytest.mark.parametrize("name", NAMES)
def test_segments_hold_every_node_once_and_follow_what_they_read(graphs, name):
    for seed in range(3):
        cut = cut_of(graphs, name, devices=3, groups=None, seed=seed)
        nodes = [node for segment in cut.segments for node in segment.nodes]
        assert len(nodes) == len(set(nodes))
        for segment in cut.segments:
            assert all(cut.maker[value] < segment.index for value in segment.reads)
            assert sum(segment.groups.values()) > 0 or not any(n in cut.graph.op_of_node for n in segment.nodes)
        per_group = {}
        for segment in cut.segments:
            for group, share in segment.groups.items():
                per_group[group] = per_group.get(group, 0.0) + share
        assert all(total == pytest.approx(1.0) for total in per_group.values())


@pytest.mark.parametrize("name", NAMES)
def test_segments_one_after_the_other_compute_what_the_model_computes(graphs, name):
    model, inputs, graph = graphs(name)
    cut = cut_of(graphs, name, devices=3, groups=None, seed=5)
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    expected = torch.utils._pytree.tree_leaves(model(**inputs))
    for key, value in model.named_buffers():
        value.data.copy_(buffers[key])
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers()), **graph.constants}
    leaves, values = flat_inputs((), inputs), {}
    for segment in cut.segments:
        code = segment_module(cut, segment, torch.device("cpu"))
        made = code(
            *(held[n] for n in segment.held), *(leaves[i] for i in segment.inputs), *(values[n].detach() for n in segment.reads)
        )
        values.update(zip(segment.makes, made, strict=True))
    found = [values[n] if isinstance(n, str) and n in values else n for n in graph.outputs]
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-6)  # kernels differ where no gradient is needed


def test_joining_groups_in_a_row_never_delays_another_device(graphs):
    coarse = cut_of(graphs, "gpt2", devices=2, groups=12, deal="chain")
    fine = cut_of(graphs, "gpt2", devices=2, groups=12, deal=[0, 1] * 6)
    assert len(coarse.segments) < 12 <= len(fine.segments)
    alone = cut_of(graphs, "gpt2", devices=1, groups=12, deal="chain")
    assert len(alone.segments) == 1  # nobody waits for anything


@pytest.mark.parametrize("schedule", ["list", "gpipe", "1f1b"])
@pytest.mark.parametrize("name", ["t5", "awkward", "lstm"])
def test_order_puts_producers_first_and_every_message_has_two_ends(graphs, name, schedule):
    deal = "random" if schedule == "list" else "chain"
    cut = cut_of(graphs, name, devices=3, groups=8, deal=deal, seed=2)
    order = step_order(cut, 3, schedule)
    assert len(set(order)) == len(order)
    position = {step: index for index, step in enumerate(order)}
    assert sum(not step.backward for step in order) == 3 * len(cut.segments)
    for step in order:
        segment = cut.segments[step.segment]
        if step.backward:
            assert position[step] > position[type(step)(step.segment, step.microbatch, False)]
            continue
        for value in segment.reads:
            assert position[type(step)(cut.maker[value], step.microbatch, False)] < position[step]
    sent, needed = [], []
    for device in range(3):
        turns = segment_turns(cut, order, device)
        posted = [m for turn in turns for m in turn.posts]
        assert sorted(m.tag for m in posted) == sorted(m.tag for turn in turns for m in turn.needs)
        assert all(m.destination == device for m in posted)
        sent += [m for turn in turns for m in turn.sends]
        needed += posted
        assert all(m.source == device for turn in turns for m in turn.sends)
        started, freed = set(), set()
        for turn in turns:
            segment = cut.segments[turn.run.segment]
            used = {(value, turn.run.microbatch) for value in (*segment.makes, *segment.reads)}
            assert not freed & used or turn.run.backward
            assert not any(cut.graph.layout[value].requires_grad for value, _ in turn.frees)
            freed.update(turn.frees)
            started.update(turn.posts)
            assert started.issuperset(turn.needs)
        # NCCL has no tags: both ends of a direction must issue its messages in one order.
        for source in range(3):
            tags = [m.tag for m in posted if m.source == source]
            assert tags == sorted(tags)
        assert [m.tag for turn in turns for m in turn.sends] == sorted(m.tag for turn in turns for m in turn.sends)
    assert sorted(sent, key=lambda m: m.tag) == sorted(needed, key=lambda m: m.tag)
    assert len({m.tag for m in sent}) == len(sent)


def test_without_a_backward_only_outputs_are_kept(graphs):
    cut = cut_of(graphs, "t5", devices=2, groups=8, deal="random", seed=2)
    order = step_order(cut, 2, "list", training=False)
    for device in range(2):
        turns = segment_turns(cut, order, device)
        here = [cut.segments[turn.run.segment] for turn in turns]
        touched = {value for segment in here for value in (*segment.makes, *segment.reads)}
        freed = {value for turn in turns for value, _ in turn.frees}
        assert touched - freed == touched & {*filter(lambda item: isinstance(item, str), cut.graph.outputs), cut.graph.loss}
        assert freed


def test_gpipe_runs_all_forwards_of_a_stage_first(graphs):
    cut = cut_of(graphs, "gpt2", devices=2, groups=6, deal="chain")
    order = step_order(cut, 4, "gpipe")
    for device in range(2):
        kinds = [step.backward for step in order if cut.segments[step.segment].placement.device == device]
        assert kinds == sorted(kinds)


def test_a_plan_of_another_model_is_refused(graphs):
    model, inputs, _ = graphs("gpt2")
    plan = plan_of(model, inputs, 2)
    with pytest.raises(InputError, match=r"it is for another model.*the plan names"):
        check_same_ops(graphs("lstm")[2], planned_placements(plan))


def test_a_plan_without_ops_is_refused(graphs):
    model, inputs, _ = graphs("gpt2")
    plan = plan_of(model, inputs, 2)
    empty = type(plan)(**{**vars(plan), "groups": [{"name": g["name"], "modules": ["m"], "ops": []} for g in plan.groups]})
    with pytest.raises(InputError, match="name no ops"):
        planned_placements(empty)


def values_of(graph, model, inputs):
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers()), **graph.constants}
    seen = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n):
            value = super().run_node(n)
            if isinstance(value, torch.Tensor) and n.op != "output":
                seen[n.name] = value
            return value

    Recorder(graph.module).run(*(held[name] for name in graph.held), *flat_inputs((), inputs))
    return seen


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "bf16"])
@pytest.mark.parametrize("name", ["gpt2", "t5", "resnet", "lstm", "awkward", "swin"])
def test_layouts_are_those_of_the_run(name, autocast):
    torch.manual_seed(0)
    model, inputs, _ = MODELS[name]()
    region = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with region:
        graph = forward_graph(model, (), inputs)
        values = values_of(graph, model, inputs)
    assert set(values) == set(graph.layout)
    for key, value in values.items():
        layout = graph.layout[key]
        assert (tuple(value.shape), value.dtype, value.requires_grad) == (layout.shape, layout.dtype, layout.requires_grad), key
    assert any(value.dtype == torch.bfloat16 for value in values.values()) == autocast


def test_autocast_of_a_gpu_is_followed_without_one():
    torch.manual_seed(0)
    model, inputs, _ = MODELS["gpt2"]()
    with torch.autocast("cuda", torch.bfloat16, enabled=True) if torch.cuda.is_available() else _pretend_cuda_autocast():
        graph = forward_graph(model, (), inputs)
    kinds = {str(graph.node(name).target): graph.layout[name].dtype for name in graph.layout}
    assert kinds["aten.layer_norm.default"] == torch.float32  # the processor's own rules would keep bfloat16
    assert torch.bfloat16 in kinds.values()


@contextlib.contextmanager
def _pretend_cuda_autocast():
    """Switches CUDA's autocast on in a build without CUDA, where `torch.autocast` refuses."""
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


class Scaled(torch.nn.Module):
    def __init__(self, factor=2.0, device="cpu", literal=1.0):
        super().__init__()
        self.layer, self.factor, self.device, self.literal = torch.nn.Linear(4, 4), factor, device, literal

    def forward(self, x):
        mask = torch.ones(4, device=self.device).to(x.device)
        return (self.layer(x * mask) * self.factor + torch.tensor([self.literal, 3.0, 0.0, 0.0])).square().mean()


def lines(model, inputs):
    return graph_lines(forward_graph(model, (), inputs))


def test_the_same_model_gives_the_same_lines():
    for name in ("gpt2", "t5", "mixtral"):
        both = []
        for seed in (0, 1):  # the values of the parameters do not matter
            torch.manual_seed(seed)
            model, inputs, _ = small_models.MODELS[name]()
            both.append(lines(model, inputs))
        assert both[0] == both[1]
        assert len(both[0]) > 20


def test_arguments_and_constants_are_told_apart():
    x = {"x": torch.ones(2, 4)}
    first = lines(Scaled(), x)
    assert lines(Scaled(), x) == first
    other = lines(Scaled(factor=3.0), x)
    assert [(a.split()[0], b.split()[0]) for a, b in zip(first, other, strict=True) if a != b] == [("%mul_1", "%mul_1")]
    other = lines(Scaled(literal=5.0), x)
    assert [number for number, (a, b) in enumerate(zip(first, other, strict=True)) if a != b] == [len(first) - 1]


def test_the_number_of_a_device_is_left_out():
    x = {"x": torch.ones(2, 4)}
    on_first, on_second = (lines(Scaled(device=f"cuda:{number}"), x) for number in (0, 1))
    assert on_first == on_second != lines(Scaled(), x)


def test_graphs_inside_the_graph_count():
    class Branching(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return (x * self.factor).square().mean()

    x = {"x": torch.ones(2, 4)}
    assert lines(Branching(2.0), x) == lines(Branching(2.0), x) != lines(Branching(3.0), x)
