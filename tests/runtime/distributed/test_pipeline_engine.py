"""Chains of stages under torch's pipeline schedules train like the plain model, over several processes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import joint_worker
import launch
import pytest
import small_models
import torch
from equal import SINGLE_PRECISION, build, keywords, parts_of
from joint_worker import relative, train_and_compare
from pipeline_theory import in_flight
from plans import stage_plan
from torch import nn

from rlplace.plan import PlacementPlan
from rlplace.runtime.distributed.execution.batches import Split
from rlplace.runtime.distributed.execution.engine import Setup
from rlplace.runtime.distributed.execution.make import make as make_stage_graph
from rlplace.runtime.distributed.graph.forward_graph import forward_graph
from rlplace.runtime.distributed.pipeline.engine import make as make_pipeline
from rlplace.runtime.distributed.ranks import ranks_of
from rlplace.runtime.held import meta_copy


class EarlyLoss(nn.Module):
    """The loss is there before the last stage is, which makes another output."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.head = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x):
        y = self.body(x)
        return {"loss": y.square().mean(), "more": self.head(y.detach())}


class Frozen(nn.Module):
    """Nothing before the last quarter needs a gradient; a mask of booleans goes all the way."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)]).requires_grad_(False)
        self.last = nn.Sequential(*[nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x):
        keep = x > 0
        y = self.last(self.first(x))
        return torch.where(keep, y, y.tanh()).square().mean()


class Shared(nn.Module):
    """Parameters used twice within a stage and in several, ops with several outputs, a branch that starts at a parameter."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(6, 6) * 0.4)
        self.bias = nn.Parameter(torch.randn(6))
        self.table = nn.Parameter(torch.randn(3, 6))
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        for _ in range(8):
            a, b = (x @ self.mix + self.bias).chunk(2, -1)
            x = torch.cat([torch.tanh(a) @ self.mix[:3], b], -1) @ torch.cat([self.mix, self.table]) + x
            x = self.norm(x) + self.table.exp().mean(0)
        return x.square().mean()


OWN = {"early": EarlyLoss, "frozen": Frozen, "shared": Shared}
for _name, _kind in OWN.items():
    small_models.MODELS.setdefault(
        _name, lambda kind=_kind: (kind(), {"x": torch.randn(4, 6)}, lambda out: out["loss"] if isinstance(out, dict) else out)
    )


@dataclass
class Built:
    """What `joint_worker.train_and_compare` looks at."""

    inputs: dict
    loss: object
    split: Split
    graph: object
    plan: PlacementPlan


_graphs = {}  # traced once in a process


class Running(joint_worker.Job):
    """A model with the pipeline engine of this process, or another."""

    def __init__(
        self, name, places, schedule, *, microbatches=4, cuts=None, double=True, train=True, given=None, weights=None,
        replicas=None, make=make_pipeline, **fields,
    ):  # fmt: skip
        super().__init__(name, double, train, given)
        model, inputs, loss = build(name, double, **self.given)
        model.train(train)
        split = parts_of(inputs, len(replicas or [0]), microbatches)
        if weights is not None:
            split = replace(split, parts=tuple(replace(p, weight=w) for p, w in zip(split.parts, weights, strict=True)))
        key = (name, str(given), double, train, len(split.parts))
        if key not in _graphs:
            _graphs[key] = forward_graph(meta_copy(model), (), keywords(inputs, split.parts[0].leaves), loss=loss)
        graph = _graphs[key]
        plan = stage_plan(graph, places, cuts=cuts, microbatches=microbatches, schedule=schedule, replicas=replicas, **fields)
        self.built = Built(inputs, loss, split, graph, plan)
        self.ranks = ranks_of(plan, torch.device("cpu"))
        made = make(Setup(model, plan, graph, self.ranks, None))
        self.own = made.own
        self.engine = made.engine_for(graph)


@dataclass
class Seen:
    """How a case ran on one process."""

    worst: tuple
    most_in_flight: dict
    most_held: int
    schedule: str
    carried: list
    asides: int


def train(cases):
    """Trains each case, (name, places, schedule, options), for 3 steps beside the plain model."""
    return [_train(*case) for case in cases]


def _train(name, places, schedule, options):
    options = dict(options)
    tolerance = options.pop("tolerance", None)
    running = Running(name, places, schedule, **options)
    worst = train_and_compare(running, "adamw", tolerance=tolerance)
    engine = running.engine
    program = next(iter(engine._programs.values()), None)
    return Seen(
        worst, engine.most_in_flight, engine.most_held, type(program.schedule).__name__ if program else "",
        list(engine.chain.carried), len(engine.chain.aside),
    )  # fmt: skip


def same_as_stage_graph(name, places, schedule, options):
    """Largest relative difference between the pipeline and the stage-graph engine: loss and gradients of two steps."""
    ours = Running(name, places, schedule, **options)
    theirs = Running(name, places, "list", make=make_stage_graph, **options)
    worst = 0.0
    for step in range(2):
        for own in (ours.own, theirs.own):
            for parameter in own.parameters.values():
                parameter.grad = None
        worst = max(worst, relative(ours.engine.train(ours.parts, 3, step), theirs.engine.train(theirs.parts, 3, step)))
        for key, parameter in ours.own.parameters.items():
            if parameter.grad is not None:
                worst = max(worst, relative(parameter.grad, theirs.own.parameters[key].grad))
    return worst


def other_counts(name, places, schedule):
    """One engine with 4 micro-batches, then 3, 1 and none: its gradients and those of the plain model."""
    running = Running(name, places, schedule)
    worst = 0.0
    for count in (4, 3, 1, 0, 4):
        parts = running.parts[:count]
        model, _ = running.reference()
        for part in parts:
            (joint_worker.plain_loss(running, model, part, 0) * part.weight).backward()
        for parameter in running.own.parameters.values():
            parameter.grad = None
        running.engine.train(parts, 7, 0)
        plain = dict(model.named_parameters())
        for key, parameter in running.own.parameters.items():
            assert (parameter.grad is None) == (plain[key].grad is None), (count, key)
            if parameter.grad is not None:
                worst = max(worst, relative(parameter.grad, plain[key].grad))
    return worst


def evaluated(name, places, schedule):
    """Outputs of all micro-batches, those of the plain model, and whether training goes on as before."""
    running = Running(name, places, schedule, train=False)
    running.engine.train(running.parts, 0, 0)
    found = running.engine.evaluate(running.parts)
    running.engine.train(running.parts, 0, 1)
    model, _ = running.reference()
    with torch.no_grad():
        plain = [model(**keywords(running.built.inputs, part.leaves)) for part in running.parts]
    return max(
        relative(a, b) for ours, theirs in zip(found, plain, strict=True) for a, b in zip(ours, theirs.values(), strict=True)
    )


SEVEN = ["gpt2", "bert", "t5", "vit", "resnet", "mixtral", "lstm"]


def quick(world):
    """Several short checks in one start of processes."""
    return (
        train(
            [
                ("t5", [0, 1], "1f1b", {}),
                ("gpt2", [1, 0, 1, 0], "interleaved_zero_bubble", {"given": {"dropout": 0.3}, "weights": [0.1, 0.2, 0.3, 0.4]}),
                ("shared", [0, 1, 1, 0], "zbv", {}),
                ("frozen", [0, 1, 0, 1], "interleaved_1f1b", {}),
                ("early", [0, 1], "gpipe", {"cuts": [0.3]}),
                ("gpt2", [0, 1, 0, 1], "looped_bfs", {"given": {"dropout": 0.3}, "weights": [0.1, 0.2, 0.3, 0.4]}),
                ("shared", [0, 1, 1, 0], "dualpipev", {}),
                ("shared", [1, 0, 0, 1], "dualpipev", {}),
            ]
        ),
        other_counts("lstm", [0, 1, 0, 1], "interleaved_1f1b"),
        evaluated("vit", [0, 1], "1f1b"),
    )


@pytest.fixture(scope="module")
def quick_results():
    return launch.run(2, quick, 2)


def test_short_cases_train_like_the_plain_model(quick_results):
    for rank, (seen, _, _) in enumerate(quick_results):
        assert max(case.worst for case in seen)[0] < 1e-6
        kinds = [
            "Schedule1F1B",
            "_PipelineScheduleRuntime",
            "ScheduleZBVZeroBubble",
            "ScheduleInterleaved1F1B",
            "ScheduleGPipe",
            "ScheduleLoopedBFS",
            "ScheduleDualPipeV",
            "_PipelineScheduleRuntime",
        ]
        assert [case.schedule for case in seen] == kinds
        assert seen[0].most_in_flight == {rank: 2 - rank}


def test_values_without_a_gradient_go_past_the_pipeline(quick_results):
    t5, _, _, frozen, early, *_ = quick_results[0][0]
    assert len(t5.carried[0]) > 1  # the encoder's output for the decoder, and what the encoder has still to do
    assert frozen.carried[:2] == [(), ()]
    assert frozen.asides > 0
    assert [len(names) for names in early.carried] == [1, 0]  # the loss


def test_the_number_of_microbatches_may_change(quick_results):
    assert max(worst for _, worst, _ in quick_results) < 1e-6


def test_evaluation_between_steps(quick_results):
    assert max(worst for _, _, worst in quick_results) < 1e-6


LAYOUTS = {
    2: [
        ([0, 1], "gpipe", {}),
        ([0, 1], "1f1b", {"cuts": [0.2]}),
        ([1, 0], "1f1b", {"cuts": [0.85], "microbatches": 2}),
        ([0, 1, 0, 1], "interleaved_1f1b", {"cuts": [0.1, 0.45, 0.6]}),
        ([0, 1, 0, 1], "interleaved_zero_bubble", {}),
        ([0, 1, 1, 0], "zbv", {"cuts": [0.3, 0.4, 0.9]}),
        ([0, 1, 0, 1], "1f1b", {}),
        ([0, 1, 0, 1], "gpipe", {}),
    ],
    4: [
        ([0, 1, 2, 3], "gpipe", {"cuts": [0.1, 0.5, 0.7]}),
        ([0, 1, 2, 3], "1f1b", {}),
        ([2, 0, 3, 1], "1f1b", {}),
        ([0, 1, 2, 3, 0, 1, 2, 3], "interleaved_1f1b", {}),
        ([0, 1, 2, 3, 3, 2, 1, 0], "zbv", {}),
        ([0, 1, 2, 1, 0], "1f1b", {}),  # rank 3 has nothing to do
        ([0, 1], "1f1b", {"replicas": [[1, 0], [2, 3]], "microbatches": 2}),
        ([0, 1, 0, 1], "interleaved_zero_bubble", {"replicas": [[0, 1], [3, 2]], "microbatches": 2}),
        ([0, 1, 2, 3, 0, 1, 2, 3], "looped_bfs", {}),
        ([2, 0, 0, 2], "dualpipev", {"replicas": [[0, 3, 1, 2]]}),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_models_and_layouts(world):
    """Every layout with one or two models, every model with two layouts."""
    cases = []
    for number, name in enumerate(SEVEN):
        precision = {"double": False, "tolerance": 2e-5} if name in SINGLE_PRECISION else {}
        cases += [(name, *layout, {**options, **precision}) for *layout, options in LAYOUTS[world][number % 4 :: 4]]
    launch.run(world, train, cases, timeout_s=500)


def flights(world):
    layouts = [
        ([*range(world)], "gpipe", 1),
        ([*range(world)], "1f1b", 1),
        ([*range(world)] * 2, "looped_bfs", 2),
        ([*range(world)] * 2, "interleaved_1f1b", 2),
        ([*range(world)] * 2, "interleaved_zero_bubble", 2),
        ([*range(world), *reversed(range(world))], "zbv", 2),
        ([*range(world), *reversed(range(world))], "dualpipev", 2),
    ]
    return [
        (seen.most_held, schedule, laps)
        for places, schedule, laps in layouts
        for seen in train([("lstm", places, schedule, {"microbatches": 4})])
    ]


@pytest.mark.slow
def test_micro_batches_in_flight_are_those_of_the_theory():
    for rank, rows in enumerate(launch.run(2, flights, 2)):
        for held, schedule, laps in rows:
            assert held == in_flight(schedule, 2, laps, 4, rank), (rank, schedule)


def against_stage_graph(world):
    dropout = {"given": {"dropout": 0.3}}
    return [
        same_as_stage_graph("gpt2", [0, 1, 1, 0], "zbv", dropout),
        same_as_stage_graph("gpt2", [1, 0, 1, 0], "1f1b", {**dropout, "recompute": [[0, 1], [2]]}),
    ]


@pytest.mark.slow
def test_dropout_draws_what_the_stage_graph_engine_draws():
    assert max(max(row) for row in launch.run(2, against_stage_graph, 2)) < 1e-6
