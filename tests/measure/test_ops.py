"""Ops and whole steps of a tiny model timed end to end, through the command line and through Python."""

import json
import math

import pytest
import torch

import rlplace
from rlplace.captured import Recipe
from rlplace.cli.main import main
from rlplace.cost.timings import Measurement
from rlplace.envs import MeasuredBackend, RefinementEnv
from rlplace.errors import CaptureError, InputError, MissingError
from rlplace.measure.ops import describe_ops, load_and_measure, measure_model
from rlplace.measure.walk import Marks, StepWalk
from rlplace.model.zoo.load import LoadedModel, load_model
from rlplace.records import plain
from rlplace.runtime.base.environment import own_device, time_run

MLP = "zoo:mlp,layers=2,width=16"


def unmeasured_ops(graph, measurement):
    """Ops of a graph that no record of a measurement of the same model stands for."""
    keys = {
        (o.target, o.kind, o.dtype, o.direction, o.flops, o.size_bytes, tuple(sorted(o.dims.items()))) for o in measurement.ops
    }
    return [key for key in describe_ops(graph) if key not in keys]


def test_marks_give_every_moment_to_a_key():
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0])
    marks = Marks(torch.device("cpu"), lambda: next(now))
    for key in ("a", "b", "a", None):
        marks.mark(key)
    seconds, issue = marks.finish()
    assert seconds == {"a": 4.0, "b": 2.0, None: 4.0} and issue is None
    assert marks.keys == [] and Marks(torch.device("cpu")).cost_s() > 0


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    paths = []
    for spec in (MLP, "zoo:mlp,layers=3,width=24"):
        path = folder / f"{len(paths)}.measure.json"
        options = ["--ops", "--step", "--batch", "4", "--repeats", "5", "--threads", "1", "--out", str(path)]
        assert main(["measure", spec, *options]) == 0
        paths.append(str(path))
    return paths


def test_every_op_of_the_graph_has_a_time(files):
    found = Measurement.load(files[0])
    model = load_model(MLP, batch=4)
    graph = rlplace.capture(model.module, model.example_inputs)
    assert unmeasured_ops(graph, found) == []
    by_direction = {d: sum(op.count for op in found.ops if op.direction == d) for d in ("forward", "backward", "update")}
    assert by_direction["update"] == 4 and by_direction["backward"] >= 4
    assert all(op.seconds > 0 for op in found.ops if op.kind == "gemm")
    assert all(op.p10_s <= op.p90_s and op.repeats == 5 for op in found.ops)
    assert found.cache == "step" and found.step.repeats >= 5 and found.environment.threads == 1
    assert plain(found.model) == {"model": MLP, "batch": 4, "seq": 512, "dtype": "fp32", "optimizer": "adam"}
    assert found.step.peak_memory_bytes is None and found.environment.details["allocator"] in ("keep", "default")


@pytest.mark.slow
def test_calibrate_and_place_with_the_result(files, tmp_path, capsys):
    table = str(tmp_path / "host.cost.json")
    assert main(["calibrate", *files, "--cluster", "cpu:1", "--json", "--out", table]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [error["label"] for error in report["by_model"]] == [MLP, "zoo:mlp,layers=3,width=24"]
    assert report["step_factor"] > 0
    place = ["place", MLP, "--batch", "4", "--cluster", "cpu:1", "--planner", "single", "--costs", table]
    assert main(place) == 0
    assert "measured" in capsys.readouterr().err


def test_unusable_requests_are_refused(files, tmp_path, capsys):
    out = str(tmp_path / "x.measure.json")
    assert main(["measure", MLP, "--out", out]) == 2
    assert main(["measure", "--ops", "--out", out]) == 2
    assert main(["measure", MLP, "--ops", "--device", "tpu", "--out", out]) == 2
    assert main(["calibrate", *files, "--cluster", "a100-80g:1", "--out", str(tmp_path / "c.cost.json")]) == 2
    message = capsys.readouterr().err
    assert "--ops, --step, --experts or --links" in message and "need a MODEL" in message and "measured on cpu" in message
    for extra in (["--autocast", "bf16"], ["--master-weights"], ["--host-mode", "compiled"], ["--costs", "c.cost.json"]):
        assert main(["measure", MLP, "--ops", *extra, "--out", out]) == 2
        assert extra[0] in capsys.readouterr().err
    assert not (tmp_path / "x.measure.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_missing_device_is_said():
    with pytest.raises(MissingError, match="CUDA devices"):
        own_device("cuda:0", "measure")


def test_loss_function_tied_weights_and_idle_parameters():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(20, 8)
            self.head = torch.nn.Linear(8, 20, bias=False)
            self.head.weight = self.embedding.weight
            self.idle = torch.nn.Parameter(torch.zeros(3))

        def forward(self, tokens):
            return self.head(self.embedding(tokens))

    def loss(logits):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.zeros(8, dtype=torch.int64))

    module, inputs = Tied(), {"tokens": torch.randint(0, 20, (2, 4))}
    graph = rlplace.capture(module, inputs, loss=loss)
    found = measure_model(LoadedModel(module, inputs, loss, "tied"), graph, optimizer="adam", repeats=5)
    assert unmeasured_ops(graph, found) == []
    assert [op.count for op in found.ops if op.direction == "update"] == [1]
    assert any(op.direction == "backward" and op.kind == "embedding" and op.seconds > 0 for op in found.ops)


class Branch(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).square().mean() if x.sum() > 0 else self.layer(x).abs().mean()


def test_steps_of_what_cannot_be_exported_are_timed():
    inputs = (torch.rand(2, 4),)
    graph = rlplace.capture(Branch(), inputs, method="module")
    found = measure_model(LoadedModel(Branch(), inputs, None, "branch"), graph, ops=False, repeats=5)
    assert found.ops == () and found.step.seconds > 0 and found.step.instrumented_s is None


@pytest.mark.parametrize(("stop", "kept"), [(12, 9), (7, None)])
def test_an_interrupt_keeps_what_was_timed(monkeypatch, tmp_path, capsys, stop, kept):
    runs, real = iter(range(1000)), StepWalk.step

    def run(walk):
        if next(runs) == stop:
            raise KeyboardInterrupt
        return real(walk)

    monkeypatch.setattr(StepWalk, "step", run)
    out = tmp_path / "x.measure.json"
    options = ["--ops", "--step", "--batch", "4", "--repeats", "30", "--threads", "1", "--out", str(out)]
    assert main(["measure", MLP, *options]) == 130
    said = capsys.readouterr().err
    if kept is None:  # too few steps to tell anything
        assert said.endswith("rlplace: interrupted\n") and not out.exists()
        return
    found = Measurement.load(out)
    assert "interrupted; wrote what was timed so far" in said
    assert found.ops[0].repeats == kept and found.environment.details["interrupted"] == "yes"


def test_what_cannot_be_measured_is_refused():
    inputs = (torch.rand(2, 4),)
    graph = rlplace.capture(Branch(), inputs, method="module")
    with pytest.raises(InputError, match="exported graphs"):
        measure_model(LoadedModel(Branch(), inputs, None, "branch"), graph, repeats=5)
    with pytest.raises(CaptureError, match="cannot be exported"):
        StepWalk(Branch(), inputs, None, "adam", Marks(torch.device("cpu")))
    with pytest.raises(InputError, match="nothing to measure"):
        load_and_measure(Recipe(MLP, 2, 512, "fp32", "adam"), ops=False, step=False)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))

    def forward(self, x):
        return self.layers(x).square().mean()


def test_refinement_on_measured_times():
    inputs = (torch.randn(4, 16),)
    graph = rlplace.capture(Model(), inputs)
    problem = rlplace.price(graph, rlplace.Cluster.preset("a100-80g:2"))
    runs = []

    def measure(plan):
        placed = rlplace.apply(Model(), plan, ["cpu", "cpu"], example_inputs=inputs)
        runs.append(time_run(lambda: placed(*inputs).backward(), torch.device("cpu")))
        return runs[-1]

    backend = MeasuredBackend(measure)
    env = RefinementEnv([problem], backend=backend, max_moves=2)
    env.reset(seed=0)
    _, reward, _, _, info = env.step(int(env.action_masks()[1:].argmax()) + 1)
    assert len(runs) == 2 and all(seconds > 0 for seconds in runs)
    assert reward == pytest.approx(max(0.0, math.log(runs[0] / runs[1])))  # what the best plan so far gained, measured
    env.reset(seed=1)
    *_, info = env.step(0)
    assert info["step_time_s"] == runs[0] and len(runs) == 2  # it is known
