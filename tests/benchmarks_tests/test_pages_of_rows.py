"""Tables of the docs are those of the rows that stand beside their benchmarks."""

import gzip
import re
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import anytime, built, equality, faults, runs, runs_emulated, types, unlike, zoo
from benchmarks.agent import tables
from benchmarks.agent.records import Store
from benchmarks.harness import ROOT, read_rows
from benchmarks.papers import compiler
from benchmarks.papers.pardnn import __main__ as study
from benchmarks.papers.pardnn.real import MODELS


def types_page():
    known, version = re.search(r"tried the (\d+) types of transformers (\S+):", types.PAGE.read_text()).groups()
    return types.page(types.read(), int(known), version)


def trials_row():
    rows = read_rows(ROOT / "benchmarks/trials.rows.jsonl")
    count = Counter(row["status"] for row in rows)
    cells = [len({row["model"] for row in rows}), f"{len(rows):,}", *map(count.pop, ("equal", "noted", "random", "refused"))]
    assert not count  # none late, none WRONG
    return f"| {' | '.join(map(str, cells))} | 0 | 0 |"


LARGE = {
    "6,000": ("large.", ["64 calls", "256 calls", "1024 calls", "5 s"]),
    "20,000": ("larger.", ["5 s"]),
    "60,000": ("dear.", ["16 calls", "64 calls", "256 calls"]),
}
CALLS = ["64 calls", "256 calls", "1024 calls", "4096 calls"]


def agent_tables(rows, budgets, ops=""):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(gzip.decompress((ROOT / f"benchmarks/agent/{rows}rows.jsonl.gz").read_bytes()))
        found = tables.rival_tables(Store({}, path, report=True), budgets)
    return found[0].replace("all, 12 cases", f"{ops} ops, 12 cases") if ops else found


PAGES = {
    "types": ("docs/model-types.md", types_page),
    "trials": ("docs/testing.md", trials_row),
    "faults": ("docs/testing.md", lambda: faults.table(faults.read())),
    "runs": ("benchmarks/RESULTS.md", lambda: runs.table(runs.ROWS, "test")),
    "ratios of runs": ("benchmarks/RESULTS.md", lambda: runs.ratios(runs.ROWS, "test")),
    "emulated hosts": ("benchmarks/RESULTS.md", runs_emulated.table),
    "equality": ("benchmarks/EQUALITY.md", lambda: equality.page(equality.rows())),
    "unlike pipelines": ("docs/results.md", unlike.table),
    "baselines": ("docs/agent/baselines.md", zoo.table),
    "time limits": ("benchmarks/agent/BUILT.md", anytime.table),
    "built plans": ("benchmarks/agent/BUILT.md", built.table),
    "compiler": ("benchmarks/papers/compiler.md", compiler.table),
    **{f"pardnn {n}": ("benchmarks/papers/pardnn.md", lambda n=n: study.tables()[n]) for n in range(3)},
    "agent, by the clock": ("benchmarks/RESULTS.md", lambda: agent_tables("", ["1 s", "5 s"])[0]),
    "agent, by calls": ("benchmarks/RESULTS.md", lambda: agent_tables("", CALLS)[0]),
    **{f"agent, {n} ops": ("benchmarks/agent/BUILT.md", lambda n=n: agent_tables(*LARGE[n], n)) for n in LARGE},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_that_of_its_rows(name):
    page, made = PAGES[name]
    assert made() in (ROOT / page).read_text()


def test_rows_are_whole():
    """No row twice, and all that a table is about."""
    limits = [tuple(row[name] for name in anytime.KEY) for row in read_rows(anytime.ROWS)]
    assert len(set(limits)) == len(limits) == 36 * 2 * 7
    for row in read_rows(runs_emulated.ROWS):  # the least of a cell is that of a run
        assert min(row["over"]) >= 1 and row["over"] == sorted(row["over"], reverse=True)
        assert row["least_s"] <= min(np.median(run["step_s"]) for run in row["runs"] if run["step_s"]) + 1e-4  # rounded
    assert {row.what for row in faults.read()} == {fault.what for fault in faults.read_faults()}
    survivors = re.findall(r"^- (.*?): ", (ROOT / "docs/testing.md").read_text(), re.MULTILINE)
    assert {row.what for row in faults.read() if row.result == faults.SURVIVED} <= set(survivors)
    changed = types.read() | {"bert": types.read()["bert"] | {"runs": {"shares": "no", "stages": "no"}}}
    assert types.summary(changed.values()) != types.summary(types.read().values())


def test_parts_of_the_agents_table():
    page = (ROOT / "benchmarks/RESULTS.md").read_text()
    for part in agent_tables("", CALLS)[1:]:
        named = part.split(" | ")[0].removeprefix("| the agent over, ")
        lines = [line for line in part.splitlines() if re.match(r"\| (annealing|ablation: untrained|the best rival) \|", line)]
        assert len(lines) == 3 and all(f"| {named}: {line[2:]}\n" in page for line in lines)


@pytest.mark.slow
def test_the_rows_of_papers_are_whole():
    """Thirty-six graphs in one pass and in eight; one of them is planned again."""
    rows = {(row["model"], row["larger"]) for row in read_rows(study.ROWS)}
    assert rows == {(name, larger) for name in MODELS for larger in (False, True)}
    made, rows = dict(compiler.graphs()), {(row["graph"], row["passes"]): row for row in read_rows(compiler.ROWS)}
    assert len(made) >= 30 and set(rows) == {(name, passes) for name in made for passes in (1, 8)}
    name = "chain 100 groups, training"
    for passes in (1, 8):
        planned = compiler.plan(compiler.repeated(made[name](), passes) if passes > 1 else made[name]())
        assert planned == pytest.approx({key: rows[name, passes][key] for key in planned})


def test_a_step_of_several_passes_is_as_many_times_its_forward_and_backward():
    from rlplace.problem import UPDATE
    from rlplace.problem.generate import random_problem
    from rlplace.simulator import simulate

    problem = random_problem(5, 12, 2, shared_parameters=2)
    again, alone = compiler.repeated(problem, 3), [0] * 12
    update_s = problem.time_s[problem.op_phase == UPDATE, 0].sum()
    step_s = simulate(problem, alone).step_time_s
    assert simulate(again, alone).step_time_s == pytest.approx(3 * (step_s - update_s) + update_s)
    assert simulate(compiler.repeated(problem, 1), alone).step_time_s == step_s


@pytest.mark.slow
def test_a_policy_of_the_zoo_plays_again_as_its_row_says():
    from safetensors.torch import load_file

    from rlplace.agents.network import PlacerNetwork
    from rlplace.envs import PlacementEnv

    rows = {(row["env"], row["method"], row["seed"]): row for row in read_rows(zoo.ROWS)}
    assert len(rows) == len(read_rows(zoo.ROWS))
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


@pytest.mark.slow
def test_the_shipped_network_still_builds_the_plans_of_a_row():
    from rlplace.agents.checkpoint import load_checkpoint
    from rlplace.agents.problems.training import training_case
    from rlplace.envs import PlacementEnv, make_instance

    known = {(row["training"], row["case"], row["seed"]): row["over"] for row in built.rows()}
    shipped = min(row["training"] for row in built.rows() if row["agent"] == "graph")
    assert len(known) == len(built.rows()) and all(len(over) == built.PLANS for over in known.values())
    number = next(n for n in range(200) if (shipped, f"train-0-{built.FIRST_HELD + n}", 0) in known)
    case = training_case(0, built.FIRST_HELD + number, refresh=200)
    env = PlacementEnv([make_instance(case.problem)])
    plans = built.built(load_checkpoint("graph").network, env.instances[0], built.PLANS, seed=0)
    logs = np.array([-env.finish(0, plan, stuck=False)[1] for plan in plans])
    assert logs.mean() == pytest.approx(np.log(known[shipped, case.name, 0]).mean(), abs=0.02)  # other processors break ties
