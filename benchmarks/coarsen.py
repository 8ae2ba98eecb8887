"""Times coarsening and pricing on synthetic transformers of growing size, single thread.

Usage: python benchmarks/coarsen.py [--target 200] [--sizes 1000,10000,100000]
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.papers.synthetic import transformer_graph
from rlplace.cluster import Cluster
from rlplace.cost import price
from rlplace.graph.coarsen import coarsen

FORWARD_TO_ALL = 49  # ops that a layer of the synthetic transformer adds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=int, default=200)
    parser.add_argument("--sizes", default="1000,10000,100000")
    options = parser.parse_args()
    cluster = Cluster.preset("a100-80g:8")
    print(f"{'ops':>8} {'tensors':>8} {'groups':>7} {'coarsen s':>10} {'price task s':>13} {'price op s':>11}")
    for size in (int(text) for text in options.sizes.split(",")):
        graph = transformer_graph(max(1, round(size / FORWARD_TO_ALL)))
        start = time.process_time()
        grouping = coarsen(graph, options.target)
        coarsened = time.process_time()
        price(graph, cluster, groups=grouping)
        task = time.process_time()
        price(graph, cluster, groups=grouping, level="op")
        op = time.process_time()
        print(
            f"{graph.num_ops:8d} {graph.num_tensors:8d} {grouping.num_groups:7d} {coarsened - start:10.2f} "
            f"{task - coarsened:13.2f} {op - task:11.2f}"
        )


if __name__ == "__main__":
    main()
