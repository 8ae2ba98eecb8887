"""The table at the end of a training: the agent beside classical planners on given cases."""

import pytest

from rlplace.agents.problems.cases import ProblemCase
from rlplace.cli.compare import print_summaries
from rlplace.explanation.compare.run import compare_agent
from rlplace.problem.generate import random_problem
from tests.toys import memory_tight_pair


def cases():
    problems = [random_problem(seed, num_groups=12, num_devices=2 + seed) for seed in range(2)]
    tight = random_problem(1, num_groups=8, num_devices=2, memory_factor=0.5)
    return [
        ProblemCase("a", "x", problems[0], branchy=True),
        ProblemCase("b", "x", problems[1]),
        ProblemCase("c", "x", memory_tight_pair().problem),
        ProblemCase("none", "x", tight),
    ]


@pytest.mark.slow
def test_the_table(tmp_path, make_checkpoint, capsys):
    make_checkpoint(tmp_path / "mine")
    every, branchy = compare_agent(tmp_path / "mine", cases(), planners=("single", "best", "annealing"), calls=24, seeds=2)
    by_name = {line.planner: line for line in every.summaries}
    assert list(by_name) == ["single", "best", "annealing", "agent"]
    best, agent = by_name["best"], by_name["agent"]
    assert (best.ratio, best.feasible, best.problems, best.wins, best.losses) == (1.0, 3, 4, 0, 0)
    assert agent.ratio <= 1.0 and agent.losses == 0 and agent.feasible == 3
    assert by_name["single"].ratio >= 1.0 and by_name["single"].feasible == 2
    assert {line.problems for line in branchy.summaries} == {1}
    print_summaries(every, "title")
    text = capsys.readouterr().out
    assert "title, makespan of one step" in text and "3/4" in text and "nan" not in text
