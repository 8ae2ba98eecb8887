"""Plans that graph networks build, beside `best`: several trainings of the whole one and of those without a part.

    python -m benchmarks.built --agents graph=runs/0 graph=runs/1 imitation=runs/0-fit silent=runs/silent-0
    python -m benchmarks.built                                                                the table again

`imitation` had `rlplace train --policy graph --steps 0`, `untaught` had ``--fit-steps 0``, `silent` (no messages)
``rounds = 0`` in the policy's settings, `fewer` the features `FEWER` in `TrainConfig`. Cases: the validation split, whose
families are in no training, held-out numbers of the training stream, and random graphs of 6,000 ops, ten times what it was
trained on. Plans that do not fit are mended as the environment mends them. The committed rows are of checkpoints that are
not, but for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.agent.measure import large_cases
from benchmarks.harness import Row, arguments, markdown, one_thread, read_rows, with_interval, write_rows
from rlplace.agents.checkpoint import load_checkpoint
from rlplace.agents.graph_network import GraphNetwork, built
from rlplace.agents.policies import Policy
from rlplace.agents.problems import split_cases
from rlplace.agents.problems.training import training_case
from rlplace.envs import PlacementEnv, PlacementInstance, make_instance
from rlplace.envs.construction import CONSTRUCTION_FEATURES

ROWS = Path(__file__).with_suffix(".rows.jsonl.gz")
HELD, FIRST_HELD = 128, 2_000_000  # cases of the training stream, from a number that no training reaches
PLANS, SEEDS = 16, (0, 1)
FEWER = (
    "finish_delay", "load_after", "imbalance_change", "work", "slowdown", "communication_after", "plan_devices", "plan_groups",
    "plan_side_by_side",
)  # fmt: skip
SETS = {"validation": "unseen families", "held out": "known families", "large": "6,000 ops"}
COLUMNS = ("likeliest plan of either order", "best of 16", "best of 16 and `best`")


def instances() -> Iterator[tuple[str, str, PlacementInstance]]:
    """Yields set, name and instance of every case that has a floor and two devices."""
    for case in split_cases("validation"):
        yield "validation", case.name, make_instance(case.problem)
    number = found = 0
    while found < HELD:
        case = training_case(0, FIRST_HELD + number, refresh=200)
        number += 1
        instance = make_instance(case.problem)
        if instance.floor is not None and instance.problem.num_devices > 1:
            found += 1
            yield "held out", case.name, instance
    for case in large_cases("large", 2_000):
        yield "large", case.name, make_instance(case.problem)


def make(agents: list[str]) -> Iterator[Row]:
    """Makes the rows of these agents, LABEL=CHECKPOINT, and of an untrained one."""
    networks: list[tuple[str, Policy]] = [("untrained", GraphNetwork(features=CONSTRUCTION_FEATURES).eval())]
    for label, _, where in (text.rpartition("=") for text in agents):
        networks.append((label, load_checkpoint(where).network))
    for which, name, instance in instances():
        env = PlacementEnv([instance])
        for number, (agent, network) in enumerate(networks):
            for seed in SEEDS:
                plans = built(network, instance, PLANS, seed=seed)
                over = [round(float(np.exp(-env.finish(0, plan, stuck=False)[1])), 4) for plan in plans]
                yield {"set": which, "case": name, "agent": agent, "training": number, "seed": seed, "over": over}


@cache
def rows() -> list[Row]:
    """Reads the rows: `over` has step times of plans over that of `best`, the likeliest of either order first."""
    return read_rows(ROWS)


def figures(which: str, agent: str) -> NDArray[np.float64]:
    """Computes float64 [trainings, cases, 3], logarithms of the columns of the table, means over draws."""
    found: dict[int, dict[str, list[list[float]]]] = {}
    for row in rows():
        if (row["set"], row["agent"]) == (which, agent):
            found.setdefault(row["training"], {}).setdefault(row["case"], []).append(row["over"])
    over = np.array([list(cases.values()) for cases in found.values()])  # [trainings, cases, draws, plans]
    columns = [over[..., :2].min(-1), over.min(-1), np.minimum(over.min(-1), 1.0)]
    logs: NDArray[np.float64] = np.log(columns).mean(-1)
    return logs.transpose(1, 2, 0)


def table() -> str:
    """Makes the table: every agent over `best` with the least and the largest training, and the whole one over the others."""
    lines, agents = [], sorted({row["agent"] for row in rows()})
    for which, known in SETS.items():
        for agent in agents:
            logs = figures(which, agent)
            ends = np.exp([logs.mean((0, 1)), *np.sort(logs.mean(1), axis=0)[[0, -1]]]).T
            cells = [f"{mean:.3f} ({least:.3f} to {most:.3f})" for mean, least, most in ends]
            lines.append([f"{known}, {logs.shape[1]} cases: {agent}", *cells])
        for agent in [agent for agent in agents if agent != "graph"]:
            ratios = figures(which, "graph").mean(0) - figures(which, agent).mean(0)
            lines.append([f"{known}: graph over {agent}", *map(with_interval, ratios.T)])
    return markdown(["", *COLUMNS], lines).replace("|  |", "| |", 1)


if __name__ == "__main__":
    if asked := arguments(__doc__, agents=((), "LABEL=CHECKPOINT each; a label stands once for every training")).agents:
        one_thread()
        write_rows(ROWS, make(asked))
    print(table())
