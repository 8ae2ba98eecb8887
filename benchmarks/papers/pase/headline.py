"""PaSE's headline, up to 1.85 and 4 times data parallelism on two clusters: measured ratios beside those of the paper's cost.

    python -m benchmarks.papers.pase.headline

Machines have the single-precision peak of the paper's cards and the rate of their links between cards: 11 GB/s over PCIe with
peer-to-peer transfers (GTX 1080 Ti), 5 GB/s through the host's memory without (RTX 2080 Ti). Measured ratios are read off the
paper's figure for 4, 8, 16, 32 and 64 cards. The cost sums work and traffic, as the paper's does. Where half of the traffic is
hidden behind the backward pass, data parallelism loses less: the second column takes its gradients off the bill as far as two
thirds of its work last.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.papers.pase.baselines import data_parallel
from benchmarks.papers.pase.layers import Machine
from benchmarks.papers.pase.search import least_cost_strategy
from benchmarks.papers.pase.tables import network
from rlplace.cost.timings import rank_correlation

COUNTS = (4, 8, 16, 32, 64)
MACHINES = {"GTX 1080 Ti": Machine(11.3e12, 11e9, 4), "RTX 2080 Ti": Machine(13.4e12, 5e9, 4)}

MEASURED = {
    ("GTX 1080 Ti", "alexnet"): (1.65, 1.75, 1.85, 1.44, 1.41),
    ("GTX 1080 Ti", "inception_v3"): (1.03, 1.08, 1.07, 1.09, 1.12),
    ("GTX 1080 Ti", "rnnlm"): (1.85, 1.76, 1.45, 1.41, 1.36),
    ("GTX 1080 Ti", "transformer"): (1.03, 1.02, 1.55, 1.50, 1.43),
    ("RTX 2080 Ti", "alexnet"): (3.54, 4.00, 4.00, 2.78, 1.76),
    ("RTX 2080 Ti", "inception_v3"): (1.01, 1.09, 1.10, 1.11, 1.18),
    ("RTX 2080 Ti", "rnnlm"): (2.03, 2.41, 1.68, 1.62, 1.33),
    ("RTX 2080 Ti", "transformer"): (1.00, 1.83, 1.75, 1.60, 2.70),
}
"""Speed-up over data parallelism."""

HIDDEN = 2 / 3
"""Part of a step's work behind which gradients travel: the backward's."""


def ratios(name: str, devices: int, machine: Machine) -> tuple[float, float]:
    """Cost of data parallelism over the optimum; and over it where gradients travel behind the backward."""
    graph = network(name)
    least, parallel = least_cost_strategy(graph, devices, machine=machine), data_parallel(graph, devices, machine=machine)
    work = data_parallel(graph, devices, machine=Machine(machine.flop_per_s, 1e30, machine.word_bytes)).cost_flop
    exposed = work + max(0.0, parallel.cost_flop - work - HIDDEN * work)
    return parallel.cost_flop / least.cost_flop, exposed / least.cost_flop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=COUNTS[:4], choices=COUNTS)
    counts = parser.parse_args().devices
    print("| cards, network | " + " | ".join(f"p = {p}" for p in counts) + " |\n|---" + "|---" * len(counts) + "|")
    said, seen = [], []
    for (card, name), measured in MEASURED.items():
        found = [ratios(name, p, MACHINES[card]) for p in counts]
        known = [measured[COUNTS.index(p)] for p in counts]
        row = [f"{wanted:.2f}: {whole:.2f}, {hidden:.2f}" for wanted, (whole, hidden) in zip(known, found, strict=True)]
        print(f"| {card}, {name} | {' | '.join(row)} |", flush=True)
        said += [whole for whole, _ in found]
        seen += known
    print(f"\nrank correlation of measured and predicted: {rank_correlation(said, seen):.2f}")
    apart = np.mean(np.log(said) - np.log(seen))
    print(f"largest: measured {max(seen):.2f}, predicted {max(said):.2f}; mean of logs off by {apart:.2f}")


if __name__ == "__main__":
    main()
