"""Plans that a graph network builds, beside `best`: one training each, whole and without one of its parts.

    python -m benchmarks.built --agents graph,imitation=runs/imitation,silent=runs/silent
    python -m benchmarks.built                                                                the table again

`imitation` had `rlplace train --policy graph --steps 0`, `silent` (no messages) ``rounds = 0`` in the policy's settings. Cases:
the validation split, whose families are in no training, and held-out numbers of the training stream. Plans that do not fit are
mended as the environment mends them. The committed rows are of checkpoints that are not, but for the shipped one.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from numpy.typing import NDArray

from rlplace.agents.checkpoint import load_checkpoint
from rlplace.agents.constructing import built
from rlplace.agents.graph_network import GraphNetwork
from rlplace.agents.problems import validation_cases
from rlplace.agents.problems.training import training_case
from rlplace.envs import Instance, PlacementEnv, make_instance
from rlplace.envs.construction import CONSTRUCTION_FEATURES

ROWS = Path(__file__).with_suffix(".rows.jsonl")
HELD, FIRST_HELD = 256, 2_000_000  # cases of the training stream, from a number that no training reaches
PLANS, SEEDS, RESAMPLES = 16, (0, 1), 4000
COLUMNS = ("likeliest plan of either order", "best of 16", "best of 16 and `best`")


def instances() -> Iterator[tuple[str, str, Instance]]:
    """Set, name and instance of every case that has a floor and two devices."""
    for case in validation_cases():
        yield "validation", case.name, make_instance(case.problem)
    number = found = 0
    while found < HELD:
        case = training_case(0, FIRST_HELD + number, refresh=200)
        number += 1
        instance = make_instance(case.problem)
        if instance.floor is not None and instance.problem.num_devices > 1:
            found += 1
            yield "held out", case.name, instance


def make(agents: list[str]) -> None:
    """Adds rows of these agents, LABEL=CHECKPOINT or CHECKPOINT, and of an untrained one, to the file."""
    torch.set_num_threads(1)
    networks = {"untrained": GraphNetwork(features=CONSTRUCTION_FEATURES).eval()}
    for text in agents:
        label, _, where = text.rpartition("=")
        networks[label or where] = load_checkpoint(where).network
    kept = [row for row in rows() if row["agent"] not in networks] if ROWS.exists() else []
    for which, name, instance in instances():
        env = PlacementEnv([instance])
        for agent, network in networks.items():
            for seed in SEEDS:
                plans = built(network, instance, PLANS, seed=seed)
                over = [round(float(np.exp(-env.finish(0, plan, stuck=False)[1])), 6) for plan in plans]
                kept.append({"set": which, "case": name, "agent": agent, "seed": seed, "over": over})
    ROWS.write_text("".join(json.dumps(row) + "\n" for row in kept))


def rows() -> list[dict[str, Any]]:
    """All rows: `over` is the step time of every plan over that of `best`; the first two are the likeliest of either order."""
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


def figures(which: str, agent: str) -> NDArray[np.float64]:
    """float64 [cases, 3], logarithms of the columns of the table, means over seeds."""
    over = np.array([row["over"] for row in rows() if (row["set"], row["agent"]) == (which, agent)])
    columns = np.log([over[:, :2].min(1), over.min(1), np.minimum(over.min(1), 1.0)])
    return columns.reshape(3, -1, len(SEEDS)).mean(2).T


def table() -> str:
    """Markdown: every agent over `best`, and the shipped one over the others with intervals of 95 % over cases."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---|---|---|---|"]
    agents = sorted({row["agent"] for row in rows()})
    for which in ("validation", "held out"):
        cases = len(figures(which, "graph"))
        for agent in agents:
            lines.append(
                f"| {which}, {cases} cases: {agent} | "
                + " | ".join(f"{v:.4f}" for v in np.exp(figures(which, agent).mean(0)))
                + " |"
            )
        for agent in agents:
            if agent != "graph":
                cells = map(interval, (figures(which, "graph") - figures(which, agent)).T)
                lines.append(f"| {which}: graph over {agent} | {' | '.join(cells)} |")
    return "\n".join(lines)


def interval(logs: NDArray[np.float64]) -> str:
    """The geometric mean with its interval."""
    rng = np.random.default_rng(0)
    means = [logs[rng.integers(len(logs), size=len(logs))].mean() for _ in range(RESAMPLES)]
    low, high = np.exp(np.percentile(means, [2.5, 97.5]))
    return f"{np.exp(logs.mean()):.4f} [{low:.4f}, {high:.4f}]"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default="", help="checkpoints, NAME or LABEL=FOLDER, with commas")
    if asked := parser.parse_args().agents:
        make(asked.split(","))
    print(table())
