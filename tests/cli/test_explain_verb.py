"""``rlplace explain`` and ``rlplace diff``: tables, JSON, exit codes, and the way there from a plan that does not exist."""

import json

import pytest
from command import run
from toys import memory_tight_chain

from rlplace.cluster import Cluster
from rlplace.plan import make_plan
from rlplace.problem.generate import random_problem

TINY = "hf:gpt2,n_layer=2,n_embd=32,n_head=2,vocab_size=64"


@pytest.fixture
def files(tmp_path):
    problem = random_problem(0, num_groups=8, num_devices=2)
    paths = [str(tmp_path / name) for name in ("x.problem.json", "a.plan.json", "b.plan.json")]
    problem.save(paths[0])
    make_plan(problem, [0, 0, 0, 0, 1, 1, 1, 1], planner="one").save(paths[1])
    make_plan(problem, [0, 0, 1, 1, 1, 1, 1, 1], planner="two").save(paths[2])
    return paths


def test_explain_a_plan(capsys, files):
    problem, plan, _ = files
    code, out, _ = run(capsys, "explain", plan, "--problem", problem, "--calls", "4")
    assert code == 0
    for word in ("critical path", "busiest device", "no plan takes less than", "what if", "all links twice as fast"):
        assert word in out
    code, out, _ = run(capsys, "explain", plan, "--problem", problem, "--no-what-if", "--group", "group3", "--json")
    data = json.loads(out)
    assert code == 0 and data["feasible"] and data["what_if"] == []
    assert [group["name"] for group in data["groups"]] == ["group3"]
    assert data["bounds"]["step_time_s"] == pytest.approx(sum(part["seconds"] for part in data["bounds"]["path"]))


def test_diff_two_plans(capsys, files):
    problem, first, second = files
    code, out, _ = run(capsys, "diff", first, second, "--problem", problem)
    assert code == 0 and "6 groups sit alike, 2 differ" in out
    code, out, _ = run(capsys, "diff", first, second, "--problem", problem, "--json")
    data = json.loads(out)
    assert code == 0 and data["change_s"] == data["second"]["step_time_s"] - data["first"]["step_time_s"]


def test_a_problem_file_that_fits_is_planned_and_explained(capsys, files):
    code, out, err = run(capsys, "explain", files[0], "--no-what-if", "--groups", "1")
    assert code == 0 and "planner best" in out and "planning with best" in err


def test_place_names_the_command(capsys, tmp_path):
    path = str(tmp_path / "tight.problem.json")
    random_problem(0, 8, 2, memory_factor=0.5).save(path)
    code, _, err = run(capsys, "place", path, "--planner", "best")
    assert code == 3 and f"'rlplace explain {path}' says what would make it fit" in err
    code, out, _ = run(capsys, "explain", path, "--calls", "8")
    assert code == 0 and "makes it fit" in out and "fewer samples a micro-batch, which needs the model" in out


@pytest.mark.slow
def test_from_place_to_what_makes_it_fit(capsys, tmp_path):
    """An infeasible place names the command, which tests relaxations on the model itself."""
    arguments = ["--batch=4", "--seq=16", "--granularity=12"]
    cluster = tmp_path / "small.toml"
    Cluster.preset("cpu:1").save(cluster)
    text = cluster.read_text().splitlines()
    lines = ["memory_bytes = 800_000" if line.startswith("memory_bytes") else line for line in text]
    lines = ["reserved_bytes = 0" if line.startswith("reserved_bytes") else line for line in lines]
    cluster.write_text("\n".join(lines) + "\n")
    code, out, err = run(capsys, "place", TINY, "--cluster", str(cluster), "--planner", "best", *arguments)
    command = f"rlplace explain {TINY} --cluster {cluster} {' '.join(arguments)}"
    assert code == 3 and out == "" and f"'{command}' says what would make it fit" in err
    code, out, _ = run(capsys, *command.split()[1:], "--json", "--calls", "4")
    data = json.loads(out)
    assert code == 0 and not data["feasible"]
    found = data["relaxations"]
    assert found["shortage"]["short_bytes"] > 0 and found["shortage"]["constraint"] == "total memory"
    names = {trial["relaxation"]: trial for trial in found["trials"]}
    assert {"2 micro-batches of 2", "optimizer momentum, half the state"} <= names.keys()
    assert all(trial["fits"] == (trial["step_time_s"] is not None) for trial in found["trials"])


def test_a_plan_that_does_not_fit(capsys, tmp_path):
    problem, plan = str(tmp_path / "x.problem.json"), str(tmp_path / "p.plan.json")
    toy = memory_tight_chain().problem
    toy.save(problem)
    make_plan(toy, [0, 0, 0, 0, 0, 1], planner="test").save(plan)
    code, out, _ = run(capsys, "explain", plan, "--problem", problem)
    assert code == 0 and "infeasible: gpu0 needs " in out and "another plan" in out
