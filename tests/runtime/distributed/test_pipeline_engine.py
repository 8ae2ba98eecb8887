"""Chains of stages under torch's pipeline schedules train like the plain model, over several processes."""

import launch
import pipeline_worker
import pytest
from equal import SINGLE_PRECISION
from pipeline_theory import in_flight

SEVEN = ["gpt2", "bert", "t5", "vit", "resnet", "mixtral", "lstm"]


def quick(world):
    """Several short checks in one start of processes."""
    return (
        pipeline_worker.train(
            [
                ("t5", [0, 1], "1f1b", {}),
                ("gpt2", [1, 0, 1, 0], "zero_bubble", {"given": {"dropout": 0.3}, "weights": [0.1, 0.2, 0.3, 0.4]}),
                ("shared", [0, 1, 1, 0], "zero_bubble", {}),
                ("frozen", [0, 1, 0, 1], "interleaved", {}),
                ("early", [0, 1], "gpipe", {"cuts": [0.3]}),
            ]
        ),
        pipeline_worker.other_counts("lstm", [0, 1, 0, 1], "interleaved"),
        pipeline_worker.evaluated("vit", [0, 1], "1f1b"),
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
        ]
        assert [case.schedule for case in seen] == kinds
        assert seen[0].most_in_flight == {rank: 2 - rank}


def test_values_without_a_gradient_go_past_the_pipeline(quick_results):
    t5, _, _, frozen, early = quick_results[0][0]
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
        ([0, 1, 0, 1], "interleaved", {"cuts": [0.1, 0.45, 0.6]}),
        ([0, 1, 0, 1], "zero_bubble", {}),
        ([0, 1, 1, 0], "zero_bubble", {"cuts": [0.3, 0.4, 0.9]}),
        ([0, 1, 0, 1], "1f1b", {}),
        ([0, 1, 0, 1], "gpipe", {}),
    ],
    4: [
        ([0, 1, 2, 3], "gpipe", {"cuts": [0.1, 0.5, 0.7]}),
        ([0, 1, 2, 3], "1f1b", {}),
        ([2, 0, 3, 1], "1f1b", {}),
        ([0, 1, 2, 3, 0, 1, 2, 3], "interleaved", {}),
        ([0, 1, 2, 3, 3, 2, 1, 0], "zero_bubble", {}),
        ([0, 1, 2, 1, 0], "1f1b", {}),  # rank 3 has nothing to do
        ([0, 1], "1f1b", {"replicas": [[1, 0], [2, 3]], "microbatches": 2}),
        ([0, 1, 0, 1], "zero_bubble", {"replicas": [[0, 1], [3, 2]], "microbatches": 2}),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", LAYOUTS)
def test_models_and_layouts(world):
    """Every layout with three or four models, every model with four layouts."""
    cases = []
    for number, name in enumerate(SEVEN):
        precision = {"double": False, "tolerance": 2e-5} if name in SINGLE_PRECISION else {}
        cases += [(name, *layout, {**options, **precision}) for *layout, options in LAYOUTS[world][number % 2 :: 2]]
    launch.run(world, pipeline_worker.train, cases, timeout_s=500)


def flights(world):
    layouts = [
        ([*range(world)], "gpipe", 1, "loop"),
        ([*range(world)], "1f1b", 1, "loop"),
        ([*range(world)] * 2, "interleaved", 2, "loop"),
        ([*range(world)] * 2, "zero_bubble", 2, "loop"),
        ([*range(world), *reversed(range(world))], "zero_bubble", 2, "v"),
    ]
    return [
        (seen.most_held, schedule, laps, kind)
        for places, schedule, laps, kind in layouts
        for seen in pipeline_worker.train([("lstm", places, schedule, {"microbatches": 4})])
    ]


@pytest.mark.slow
def test_micro_batches_in_flight_are_those_of_the_theory():
    for rank, rows in enumerate(launch.run(2, flights, 2)):
        for held, schedule, laps, kind in rows:
            assert held == in_flight(schedule, 2, laps, 4, rank, layout=kind), (rank, schedule, kind)


def against_stage_graph(world):
    dropout = {"given": {"dropout": 0.3}}
    return [
        pipeline_worker.same_as_stage_graph("gpt2", [0, 1], "1f1b", dropout),
        pipeline_worker.same_as_stage_graph("gpt2", [0, 1, 0, 1], "interleaved", dropout),
        pipeline_worker.same_as_stage_graph("gpt2", [0, 1, 1, 0], "zero_bubble", dropout),
        pipeline_worker.same_as_stage_graph("gpt2", [1, 0, 1, 0], "1f1b", {**dropout, "recompute": [[0, 1], [2]]}),
    ]


@pytest.mark.slow
def test_dropout_draws_what_the_stage_graph_engine_draws():
    assert max(max(row) for row in launch.run(2, against_stage_graph, 2)) < 1e-6
