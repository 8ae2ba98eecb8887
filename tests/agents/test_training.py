"""Training: a run that is cut anywhere and resumed gives the weights of one that was not."""

import json
from dataclasses import replace

import pytest
import torch

from rlplace.agents import checkpoint, ppo
from rlplace.agents import train as training
from rlplace.agents.behaviour_cloning import Demonstration
from rlplace.agents.checkpoint import load_checkpoint, read_tensors
from rlplace.agents.config import TrainConfig
from rlplace.agents.move_ranking import PricedMoves
from rlplace.agents.problems.cases import ProblemCase
from rlplace.agents.problems.sources import CaseSource
from rlplace.agents.train import train
from rlplace.errors import InputError
from rlplace.problem.generate import random_problem


def given(*problems):
    cases = [ProblemCase(f"case-{n}", "x", problem) for n, problem in enumerate(problems)]
    return CaseSource("given", cases.__getitem__, len(cases))


def small(count=2, devices=2):
    return given(*(random_problem(seed, num_groups=8, num_devices=devices) for seed in range(count)))


def stream():
    return CaseSource(
        "stream", lambda n: ProblemCase(f"case-{n}", "x", random_problem(n % 997, num_groups=8, num_devices=2)), None
    )


def impossible():
    """Returns a problem whose devices hold no group."""
    problem = random_problem(1, num_groups=8, num_devices=2)
    return replace(problem, devices=tuple(replace(device, memory_bytes=1) for device in problem.devices))


def quiet(line):
    """Reports nothing."""


def weights(folder):
    return read_tensors(folder / "policy.safetensors")


def assert_equal_runs(one, two):
    for key, value in weights(one).items():
        assert torch.equal(value, weights(two)[key]), key
    moments = [run / "optimizer.safetensors" for run in (one, two)]
    assert moments[0].exists() == moments[1].exists()
    if moments[0].exists():
        first, second = map(read_tensors, moments)
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    done = [load_checkpoint(run).training for run in (one, two)]
    for key in ("steps_done", "fitted", "parts"):
        assert done[0][key] == done[1][key]


def cut_after(monkeypatch, module, name, calls):
    """Interrupts the call after some calls of a function."""
    whole, count = getattr(module, name), [0]

    def function(*args, **options):
        count[0] += 1
        if count[0] > calls:
            raise KeyboardInterrupt
        return whole(*args, **options)

    monkeypatch.setattr(module, name, function)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    monkeypatch.setattr("rlplace.agents.train._FIT_PART", 8)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["perceptron", pytest.param("graph", marks=pytest.mark.slow)])
def test_cut_anywhere_and_resumed(tmp_path, tiny, monkeypatch, policy):
    config, lines = tiny(steps=96, policy=policy), []
    assert train(stream(), config, tmp_path / "whole", report=lines.append) == 96
    told = "\n".join(lines)
    assert "labels" in told and "24/20" not in told and "20/20 steps" in told and "96/96 decisions" in told
    done = []
    for module, name, calls in (
        (PricedMoves if policy == "perceptron" else Demonstration, "save", 1),  # while labels are collected
        (training, "fit", 0),
        (training, "fit", 1),
        (ppo, "instances_of", 0),  # pre-trained, nothing practised
        (ppo, "run_part", 1),
        (ppo, "run_part", 1),
    ):
        with monkeypatch.context() as patch:
            cut_after(patch, module, name, calls)
            with pytest.raises(KeyboardInterrupt):
                train(stream(), config, tmp_path / "cut", resume=bool(done), report=lines.append)
        assert "--resume goes on" in lines[-1]
        load_checkpoint(tmp_path / "cut")
        done.append(name)
    assert train(stream(), config, tmp_path / "cut", resume=True, report=quiet) == 96
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")
    before = weights(tmp_path / "cut")
    assert train(stream(), config, tmp_path / "cut", resume=True, report=quiet) == 96  # nothing is left to do
    assert all(torch.equal(value, before[key]) for key, value in weights(tmp_path / "cut").items())


def cut_within_files(patch, calls):
    """Ends the process between two renames of the first save after so many."""
    whole, done = checkpoint.write_files, []

    def write(folder, payloads):
        done.append(1)
        whole(folder, payloads if len(done) <= calls else dict(list(payloads.items())[:1]))
        if len(done) > calls:
            raise KeyboardInterrupt

    patch.setattr(checkpoint, "write_files", write)


@pytest.mark.slow
@pytest.mark.parametrize("write", ["save_state", "save_checkpoint", "card_of"])
def test_cut_while_it_saves(tmp_path, tiny, monkeypatch, write):
    """Between two files of a run folder: one of the two is enough to go on from exactly."""
    config = tiny()
    train(stream(), config, tmp_path / "whole", report=quiet)
    cuts, resume = 0, False
    for calls in (1, 2, 2, 1):  # the first save of a run that is not resumed is that of its beginning
        with monkeypatch.context() as patch:
            cut_after(patch, training, write, calls)
            if write == "save_checkpoint":  # the weights are written, the rest is not
                cut_within_files(patch, calls)
                patch.setattr(training, "save_checkpoint", checkpoint.save_checkpoint)
            try:
                train(stream(), config, tmp_path / "cut", resume=resume, report=quiet)
            except KeyboardInterrupt:
                cuts += 1
        resume = True
    assert cuts >= 2
    train(stream(), config, tmp_path / "cut", resume=True, report=quiet)
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


def test_more_decisions_later(tmp_path, tiny):
    train(stream(), tiny(steps=64), tmp_path / "whole", report=quiet)
    train(stream(), tiny(steps=32), tmp_path / "more", report=quiet)
    first = weights(tmp_path / "more")
    assert train(stream(), tiny(steps=64), tmp_path / "more", resume=True, report=quiet) == 64
    assert_equal_runs(tmp_path / "whole", tmp_path / "more")
    assert any(not torch.equal(value, first[key]) for key, value in weights(tmp_path / "more").items())


def test_equal_for_a_seed_and_different_for_another(tmp_path, tiny):
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        train(stream(), tiny(steps=32, seed=seed), tmp_path / name, report=quiet)
    assert_equal_runs(tmp_path / "one", tmp_path / "two")
    assert not torch.equal(weights(tmp_path / "one")["first.weight"], weights(tmp_path / "other")["first.weight"])


@pytest.mark.parametrize("stage", ["fit_steps", "steps"])
def test_each_stage_alone(tmp_path, tiny, stage):
    config = tiny(**{stage: 0})
    assert train(small(), config, tmp_path, report=quiet) == config.steps
    training = load_checkpoint(tmp_path).training
    assert (training["fitted"], training["steps_done"]) == (config.fit_steps, config.steps)
    assert (tmp_path / "labels").exists() == bool(config.fit_steps)


def test_what_a_run_folder_holds(tmp_path, tiny):
    train(small(), tiny(cases=16), tmp_path, report=quiet)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["training"]["hyperparameters"]["steps"] == 64 and config["training"]["problem_set"] == "given"
    assert config["training"]["notes"]["held"].startswith("of the best gain ")
    assert "torch" in config["training"]["versions"]
    card = (tmp_path / "card.md").read_text()
    assert "64 decisions" in card and "20 steps" in card
    assert len(list((tmp_path / "labels").glob("*.safetensors"))) == 16
    assert list((tmp_path / "tensorboard").glob("part*/events.out.tfevents*"))
    assert str(tmp_path) not in (tmp_path / "config.json").read_text() + card


def test_problems_without_plans(tmp_path, tiny):
    """Cases of one device and those that fit nowhere are left out; the others train."""
    problems = (random_problem(0, num_groups=8, num_devices=1), impossible(), random_problem(2, num_groups=8, num_devices=3))
    source = given(*problems)
    assert train(source, tiny(), tmp_path, report=quiet) == 64
    assert len(list((tmp_path / "labels").glob("*.safetensors"))) == 1


def test_a_source_without_use(tmp_path, tiny):
    useless = impossible()
    with pytest.raises(InputError, match="no labels"):
        train(given(useless), tiny(), tmp_path, report=quiet)
    with pytest.raises(InputError, match="no problem to train on"):
        train(given(useless), tiny(fit_steps=0), tmp_path, report=quiet)
    calls = []
    endless = CaseSource("useless", lambda n: calls.append(n) or ProblemCase("x", "x", useless), None)
    with pytest.raises(InputError, match="no problem to train on"):
        train(endless, tiny(fit_steps=0), tmp_path, report=quiet)
    assert len(calls) == ppo.MOST_MISSES
    with pytest.raises(InputError, match="no problem"):
        train(given(), tiny(), tmp_path, report=quiet)


@pytest.mark.parametrize("change", [{"steps_done": "many"}, {"parts": -1}, {"notes": []}])
def test_a_run_that_does_not_say_where_it_stands(tmp_path, tiny, change):
    train(small(), tiny(steps=0, fit_steps=4), tmp_path, report=quiet)
    config = json.loads((tmp_path / "config.json").read_text())
    config["training"].update(change)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="cannot be resumed"):
        train(small(), tiny(steps=0), tmp_path, resume=True, report=quiet)
    with pytest.raises(InputError, match="cannot be read"):
        train(small(), tiny(steps=0), tmp_path / "nothing", resume=True, report=quiet)


def test_labels_of_other_problems_are_not_taken(tmp_path, tiny):
    """The same run folder again, for other problems, other moves or another seed."""
    one, two = small(), given(random_problem(50, num_groups=11, num_devices=3))
    train(one, tiny(steps=0), tmp_path, report=quiet)
    train(one, tiny(steps=0), tmp_path, report=quiet)  # the same once more
    for source, changes in ((two, {}), (one, {"seed": 1}), (one, {"moves": 12}), (one, {"states": 5})):
        with pytest.raises(InputError, match="another training"):
            train(source, tiny(steps=0, **changes), tmp_path, report=quiet)


def test_hyperparameters_are_checked():
    with pytest.raises(InputError, match="did you mean 'learning_rate'"):
        TrainConfig.load(learning_rat=1.0)
    with pytest.raises(InputError, match=r"hyperparameters: hidden: expected a whole number in 1\.\.4096, found True"):
        TrainConfig.load(hidden=True)
    with pytest.raises(InputError, match=r"hyperparameters: gamma: expected a number in 0\.\.1, found 1\.5"):
        TrainConfig.load(gamma=1.5)
    assert TrainConfig.load(steps=None) == TrainConfig.load()
    assert TrainConfig.load(hidden=7).settings_of()["hidden"] == 7
