"""PaSE's search on the paper's networks: seconds of the processor, costs against measured ones; its headline.

    python -m benchmarks.papers.pase [--devices 4 8] [--networks alexnet rnnlm]
    python -m benchmarks.papers.pase --headline [--devices 4 8 16 32]

Costs are FLOP units of the paper's model at 10 TFLOPS and 16 GB/s. ``golden`` compares with the authors' public code (seven
digits); the paper's seconds are those of its search, on its machine; data parallelism's cost is over the optimum.

The headline is up to 1.85 and 4 times data parallelism on two clusters: measured ratios, read off the paper's figure, beside
those of its cost. Machines have the single-precision peak of the paper's cards and the rate of their links between cards: 11
GB/s over PCIe with peer-to-peer transfers (GTX 1080 Ti), 5 GB/s through the host's memory without (RTX 2080 Ti). The cost
sums work and traffic, as the paper's does. Where half of the traffic is hidden behind the backward pass, data parallelism
loses less: the second figure takes its gradients off the bill as far as two thirds of its work last.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.harness import arguments, markdown, one_thread
from benchmarks.papers.pase.graph import Machine
from benchmarks.papers.pase.networks import NETWORKS
from benchmarks.papers.pase.search import data_parallel, least_cost_strategy, statistics
from rlplace.cost.timings import rank_correlation

COUNTS = (4, 8, 16, 32, 64)
PAPER_SECONDS = {
    "alexnet": (0.226, 0.253, 0.295, 0.361, 0.475),
    "inception_v3": (14.4, 20.0, 39.8, 86.0, 196.3),
    "rnnlm": (0.057, 0.086, 0.069, 0.131, 0.215),
    "transformer": (9.8, 28.8, 130.9, 553.0, 1883.2),
}
"""Seconds of the paper's search for 4 to 64 devices."""

GOLDEN = {
    ("alexnet", 4): 1.482157e11, ("alexnet", 8): 9.709830e10, ("alexnet", 16): 7.032071e10, ("alexnet", 32): 5.313635e10,
    ("rnnlm", 4): 6.866838e12, ("rnnlm", 8): 4.024963e12, ("rnnlm", 16): 2.476067e12, ("rnnlm", 32): 1.491938e12,
    ("rnnlm", 64): 9.358186e11, ("inception_v3", 4): 9.867570e11, ("inception_v3", 8): 7.821406e11,
    ("inception_v3", 16): 6.730459e11, ("transformer", 4): 2.189181e12, ("resnet101", 8): 1.425263e12,
}  # fmt: skip
"""Optimal costs measured with the authors' code."""

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
"""Measured speed-up over data parallelism, on `COUNTS` cards."""

HIDDEN = 2 / 3
"""Part of a step's work behind which gradients travel: the backward's."""


def compared(name: str, devices: int) -> list[str]:
    """Searches a network: one row of the table."""
    graph = NETWORKS[name]()
    begin_s = time.process_time()
    found = least_cost_strategy(graph, devices)
    seconds = time.process_time() - begin_s
    golden, known = GOLDEN.get((name, devices)), devices in COUNTS and name in PAPER_SECONDS
    same = "-" if golden is None else "equal" if f"{golden:.6e}" == f"{found.cost_flop:.6e}" else f"{golden:.6e}"
    paper = str(PAPER_SECONDS[name][COUNTS.index(devices)]) if known else "-"
    ratio = f"{data_parallel(graph, devices).cost_flop / found.cost_flop:.3f}"
    sizes = map(str, statistics(graph, devices))
    return [name, str(devices), f"{found.cost_flop:.6e}", same, *sizes, f"{seconds:.3f}", paper, ratio]


def ratios(name: str, devices: int, machine: Machine) -> tuple[float, float]:
    """Divides data parallelism's cost by the optimum, whole, and where gradients travel behind the backward."""
    graph = NETWORKS[name]()
    least, parallel = least_cost_strategy(graph, devices, machine=machine), data_parallel(graph, devices, machine=machine)
    work = data_parallel(graph, devices, machine=Machine(machine.flop_per_s, 1e30, machine.word_bytes)).cost_flop
    exposed = work + max(0.0, parallel.cost_flop - work - HIDDEN * work)
    return parallel.cost_flop / least.cost_flop, exposed / least.cost_flop


def headline(counts: list[int]) -> str:
    """Makes the table of the headline, and how measured and predicted ratios go together."""
    rows, said, seen = [], [], []
    for (card, name), measured in MEASURED.items():
        found = [ratios(name, p, MACHINES[card]) for p in counts]
        known = [measured[COUNTS.index(p)] for p in counts]
        shown = [f"{wanted:.2f}: {whole:.2f}, {hidden:.2f}" for wanted, (whole, hidden) in zip(known, found, strict=True)]
        rows.append([f"{card}, {name}", *shown])
        said += [whole for whole, _ in found]
        seen += known
    apart = np.mean(np.log(said) - np.log(seen))
    return (
        markdown(["cards, network", *(f"p = {p}" for p in counts)], rows)
        + f"\n\nrank correlation of measured and predicted: {rank_correlation(said, seen):.2f}\n"
        f"largest: measured {max(seen):.2f}, predicted {max(said):.2f}; mean of logs off by {apart:.2f}"
    )


if __name__ == "__main__":
    options = arguments(
        __doc__,
        devices=(COUNTS, "numbers of devices", COUNTS),
        networks=(tuple(NETWORKS), "names", NETWORKS),
        headline="the paper's headline instead",
    )
    one_thread()
    if options.headline:
        print(headline([p for p in options.devices if options.devices != COUNTS or p < 64]))
    else:
        heads = ["network", "p", "cost", "golden", "K", "M", "largest sum", "s", "paper s", "data parallel"]
        print(markdown(heads, []))
        for name in options.networks:
            for devices in options.devices:
                print(f"| {' | '.join(compared(name, devices))} |", flush=True)
