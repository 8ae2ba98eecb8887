"""Tables of the docs are those of the rows that stand beside their benchmarks."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import runs, types_table

ROOT = Path(__file__).resolve().parents[2]


def test_types_of_transformers():
    lines = (ROOT / "benchmarks/types.rows.jsonl").read_text().splitlines()
    rows = {row["type"]: row for row in map(json.loads, lines)}
    page = (ROOT / "docs/model-types.md").read_text()
    known, version = re.search(r"tries the (\d+) types of transformers (\S+):", page).groups()
    assert page == types_table.page(rows, int(known), version)
    changed = {**rows, "bert": {**rows["bert"], "runs": {"shares": "no", "stages": "no"}}}
    assert page != types_table.page(changed, int(known), version)


@pytest.mark.parametrize("made", [runs.table, runs.ratios])
def test_rules_for_the_next_run(made):
    page = (ROOT / "docs/results.md").read_text()
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
    page = (ROOT / "docs/planners/compiler.md").read_text()
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
    assert runs_emulated.table() in (ROOT / "docs/results.md").read_text()
    for row in rows:  # the least of a cell is that of a run
        assert min(row["over"]) >= 1 and row["over"] == sorted(row["over"], reverse=True)
        assert row["least_s"] <= min(np.median(run["step_s"]) for run in row["runs"] if run["step_s"]) + 1e-4  # rounded
