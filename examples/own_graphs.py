"""Trains a placer on graphs of your own: here map-reduce jobs, made with networkx, that are no neural networks at all.

    python examples/own_graphs.py [FOLDER]

Nodes carry seconds and bytes, edges carry bytes; any directed acyclic graph will do. Every graph becomes a problem file,
`train` learns from the files of the first part, and the agent is then compared on graphs that it has not seen. On the command
line: `rlplace train --problems FOLDER/train --test FOLDER/test --out FOLDER/agent`. Takes half a minute; a placer worth
keeping wants hundreds of graphs and the default settings.
"""

import sys
import tempfile
from pathlib import Path

import networkx as nx
import numpy as np

import rlplace
from rlplace.agents.config import TrainConfig
from rlplace.agents.problems import cases_of
from rlplace.agents.train import train
from rlplace.cli.compare import print_summaries
from rlplace.explanation.compare.run import compare_agent

TRAIN, TEST = 12, 4


def job(seed: int) -> nx.DiGraph:
    """Splits feed mappers, every reducer reads all mappers, a last node joins."""
    rng = np.random.default_rng(seed)
    graph = nx.DiGraph()
    mappers, reducers = int(rng.integers(6, 16)), int(rng.integers(2, 6))
    for m in range(mappers):
        graph.add_node(f"split{m}", time_s=float(rng.uniform(0.1, 0.3)), resident_bytes=int(1e8))
        graph.add_node(f"map{m}", time_s=float(rng.lognormal(0.0, 0.6)), temporary_bytes=int(5e7))
        graph.add_edge(f"split{m}", f"map{m}", bytes=int(1e8))
    for r in range(reducers):
        graph.add_node(f"reduce{r}", time_s=float(rng.lognormal(0.5, 0.5)))
        for m in range(mappers):
            graph.add_edge(f"map{m}", f"reduce{r}", bytes=int(rng.uniform(1e6, 4e7)))
        graph.add_edge(f"reduce{r}", "join", bytes=int(1e6))
    graph.nodes["join"]["time_s"] = 0.05
    return graph


folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
for part, seeds in (("train", range(TRAIN)), ("test", range(TRAIN, TRAIN + TEST))):
    (folder / part).mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        cluster = rlplace.Cluster.preset(f"cpu:{2 + seed % 3},eth=10g")
        problem = rlplace.Problem.from_networkx(job(seed), cluster, name=f"job{seed}")
        problem.save(folder / part / f"job{seed}.problem.json")

settings = TrainConfig.load(cases=TRAIN, states=12, moves=24, fit_steps=300, steps=512, processes=1)
train(cases_of([str(folder / "train")]), settings, folder / "agent", report=print)
compared, _ = compare_agent(folder / "agent", list(cases_of([str(folder / "test")])), calls=128)
print_summaries(compared, "graphs that it has not seen")
