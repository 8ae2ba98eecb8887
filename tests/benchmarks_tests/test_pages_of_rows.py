"""Tables of the docs are those of the rows that stand beside their benchmarks."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import runs, types

ROOT = Path(__file__).resolve().parents[2]


def test_types_of_transformers():
    lines = (ROOT / "benchmarks/types.rows.jsonl").read_text().splitlines()
    rows = {row["type"]: row for row in map(json.loads, lines)}
    page = (ROOT / "docs/model-types.md").read_text()
    known, version = re.search(r"tried the (\d+) types of transformers (\S+):", page).groups()
    assert page == types.page(rows, int(known), version)
    changed = {**rows, "bert": {**rows["bert"], "runs": {"shares": "no", "stages": "no"}}}
    assert page != types.page(changed, int(known), version)


def test_trials():
    rows = [json.loads(line) for line in (ROOT / "benchmarks/trials.rows.jsonl").read_text().splitlines()]
    count = Counter(row["status"] for row in rows)
    cells = [len({row["model"] for row in rows}), f"{len(rows):,}", *map(count.pop, ("equal", "noted", "random", "refused"))]
    assert not count  # none late, none WRONG
    assert f"| {' | '.join(map(str, cells))} | 0 | 0 |" in (ROOT / "docs/testing.md").read_text()


@pytest.mark.parametrize("made", [runs.table, runs.ratios])
def test_rules_for_the_next_run(made):
    page = (ROOT / "benchmarks/RESULTS.md").read_text()
    assert made(runs.ROWS, "test") in page


def test_the_page_of_the_compiler_partition_is_that_of_its_rows(capsys):
    """Thirty-six graphs in one pass and in eight; one of them is planned again."""
    from benchmarks.papers.compiler import unseen

    rows = [json.loads(line) for line in unseen.ROWS.read_text().splitlines()]
    names = [name for name, _ in unseen.graphs()]
    assert len(names) >= 30 and {(row["graph"], row["passes"]) for row in rows} == {(n, p) for n in names for p in (1, 8)}
    unseen.table()
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    table = [words[1:] for words in said if words and words[0] in ("one", "metis", "cut", "balance")]
    page = (ROOT / "benchmarks/papers/compiler.md").read_text()
    cells = [line.strip("| ").split(" | ")[2:] for line in page.splitlines() if re.match(r"\| [18] \| ", line)]
    assert table == cells
    make = dict(unseen.graphs())["chain 100 groups, training"]
    for passes in (1, 8):
        problem = make() if passes == 1 else unseen.repeated(make(), passes)
        row = next(row for row in rows if row["graph"] == "chain 100 groups, training" and row["passes"] == passes)
        assert unseen.plan(problem) == pytest.approx({key: row[key] for key in unseen.plan(problem)})


def test_a_step_of_several_passes_is_as_many_times_its_forward_and_backward():
    from benchmarks.papers.compiler.unseen import repeated
    from rlplace.problem import UPDATE
    from rlplace.problem.generate import random_problem
    from rlplace.simulator import simulate

    problem = random_problem(5, 12, 2, shared_parameters=2)
    again, alone = repeated(problem, 3), [0] * 12
    update_s = problem.time_s[problem.op_phase == UPDATE, 0].sum()
    step_s = simulate(problem, alone).step_time_s
    assert simulate(again, alone).step_time_s == pytest.approx(3 * (step_s - update_s) + update_s)
    assert simulate(repeated(problem, 1), alone).step_time_s == step_s


def test_rules_on_emulated_hosts():
    from benchmarks import runs_emulated

    rows = [json.loads(line) for line in runs_emulated.ROWS.read_text().splitlines()]
    assert runs_emulated.table() in (ROOT / "benchmarks/RESULTS.md").read_text()
    for row in rows:  # the least of a cell is that of a run
        assert min(row["over"]) >= 1 and row["over"] == sorted(row["over"], reverse=True)
        assert row["least_s"] <= min(np.median(run["step_s"]) for run in row["runs"] if run["step_s"]) + 1e-4  # rounded


def test_the_page_of_baselines_is_that_of_its_rows():
    """Three seeds of everything; a policy of agents/zoo plays again as its row says."""
    from safetensors.torch import load_file

    from benchmarks import zoo
    from rlplace.agents.network import PlacerNetwork
    from rlplace.envs import PlacementEnv

    rows = {(row["env"], row["method"], row["seed"]): row for row in zoo.rows()}
    assert zoo.PAGE.read_text() == zoo.table() and len(rows) == len(zoo.rows())
    for env, methods in zoo.CLASSICAL.items():
        trained = {method for of, method, _ in rows if of == env} - set(methods)
        assert trained == {path.parent.name for path in zoo.ZOO.glob(f"*/{env}")}
        for method in trained:
            assert {seed for of, name, seed in rows if (of, name) == (env, method)} == set(zoo.SEEDS)
        assert set(methods) <= {method for of, method, _ in rows if of == env}
    policy = PlacerNetwork(features=PlacementEnv.FEATURES)
    policy.load_state_dict(load_file(zoo.ZOO / "maskable_ppo/Toy/seed0/policy.safetensors"))

    def choose(seen, mask):
        with torch.no_grad():
            logits = policy.look({name: torch.from_numpy(value)[None] for name, value in seen.items()})[0][0]
        return int(logits.masked_fill(~torch.from_numpy(mask), -torch.inf).argmax())

    over = [None if value == np.inf else value for value in zoo.played("Toy", choose)]
    assert over == pytest.approx(rows["Toy", "maskable_ppo", 0]["over"], abs=1e-6)


def test_answers_within_a_time_limit():
    from benchmarks import anytime

    rows = {anytime.key_of(row): row for row in anytime.rows()}
    assert len(rows) == len(anytime.rows()) == 36 * 2 * 7
    assert anytime.table() in (ROOT / "benchmarks/agent/BUILT.md").read_text()


def test_what_the_graph_network_builds():
    """The table is that of the rows, and the shipped network still builds the plans of one of them."""
    from benchmarks import built
    from rlplace.agents.checkpoint import load_checkpoint
    from rlplace.agents.problems.training import training_case
    from rlplace.envs import PlacementEnv, make_instance

    assert built.table() in (ROOT / "benchmarks/agent/BUILT.md").read_text()
    known = {(row["training"], row["case"], row["seed"]): row["over"] for row in built.rows()}
    shipped = min(row["training"] for row in built.rows() if row["agent"] == "graph")
    assert len(known) == len(built.rows()) and all(len(over) == built.PLANS for over in known.values())
    number = next(n for n in range(200) if (shipped, f"train-0-{built.FIRST_HELD + n}", 0) in known)
    case = training_case(0, built.FIRST_HELD + number, refresh=200)
    env = PlacementEnv([make_instance(case.problem)])
    plans = built.built(load_checkpoint("graph").network, env.instances[0], built.PLANS, seed=0)
    logs = np.array([-env.finish(0, plan, stuck=False)[1] for plan in plans])
    assert logs.mean() == pytest.approx(np.log(known[shipped, case.name, 0]).mean(), abs=0.02)  # other processors break ties
