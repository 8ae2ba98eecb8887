"""PaSE's search on the paper's networks: seconds, memory, costs against measured ones, and its rivals under the same cost.

Usage: python -m benchmarks.papers.pase.tables [--devices 4,8] [--networks alexnet,rnnlm] [--proposals 250000] [--seeds 3]

Each search runs in a process of its own, once to load the compiled loops (for another network) and once timed. Costs are FLOP
units of the paper's model at 10 TFLOPS and 16 GB/s. ``golden`` compares with the authors' public code (seven digits); the
paper's seconds are those of its search, on its machine. Ratios are to the optimum; the chain starts from the expert or from
data parallelism, whichever ends better, and the best of all seeds counts.
"""

import argparse
import multiprocessing
import resource
import time

NETWORKS = {
    "alexnet": "cnns",
    "inception_v3": "inception",
    "resnet101": "cnns",
    "rnnlm": "rnnlm",
    "transformer": "transformer",
    "transformer_large": "transformer",
}

PAPER_SECONDS = {
    "alexnet": (0.226, 0.253, 0.295, 0.361, 0.475),
    "inception_v3": (14.4, 20.0, 39.8, 86.0, 196.3),
    "rnnlm": (0.057, 0.086, 0.069, 0.131, 0.215),
    "transformer": (9.8, 28.8, 130.9, 553.0, 1883.2),
}
"""Seconds of the paper's search for 4, 8, 16, 32 and 64 devices."""

GOLDEN = {
    ("alexnet", 4): 1.482157e11,
    ("alexnet", 8): 9.709830e10,
    ("alexnet", 16): 7.032071e10,
    ("alexnet", 32): 5.313635e10,
    ("rnnlm", 4): 6.866838e12,
    ("rnnlm", 8): 4.024963e12,
    ("rnnlm", 16): 2.476067e12,
    ("rnnlm", 32): 1.491938e12,
    ("rnnlm", 64): 9.358186e11,
    ("inception_v3", 4): 9.867570e11,
    ("inception_v3", 8): 7.821406e11,
    ("inception_v3", 16): 6.730459e11,
    ("transformer", 4): 2.189181e12,
    ("resnet101", 8): 1.425263e12,
}
"""Optimal costs measured with the authors' code."""


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", default="4,8,16,32,64")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--proposals", type=int, default=250_000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    counts = [int(p) for p in options.devices.split(",")]
    names = options.networks.split(",")
    print("| network | p | cost | golden | K | M | largest product | s | paper s | tables MB | peak RSS MB |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    rivals = []
    # A process each: the peak of the resident set is that of one search.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in names:
            for devices in counts:
                cost, largest, dependent, product, seconds, tables, rss = pool.apply(search, (name, devices))
                golden = GOLDEN.get((name, devices))
                same = "-" if golden is None else "equal" if f"{golden:.6e}" == f"{cost:.6e}" else f"{golden:.6e}"
                known = devices in (4, 8, 16, 32, 64) and name in PAPER_SECONDS
                paper = PAPER_SECONDS[name][(4, 8, 16, 32, 64).index(devices)] if known else "-"
                size = f"{largest} | {dependent} | {product} | {seconds:.3f} | {paper} | {tables / 1e6:.1f} | {rss / 1e6:.0f}"
                print(f"| {name} | {devices} | {cost:.6e} | {same} | {size} |", flush=True)
                rivals.append(
                    (name, devices, cost, *pool.apply(rival_costs, (name, devices, options.proposals, options.seeds)))
                )
    print("\n| network | p | data parallel | expert | MCMC | MCMC s |\n|---|---|---|---|---|---|")
    for name, devices, cost, parallel, expert_cost, chain, seconds in rivals:
        print(f"| {name} | {devices} | {parallel / cost:.3f} | {expert_cost / cost:.3f} | {chain / cost:.3f} | {seconds:.2f} |")


def network(name):
    """A network's layer graph with the paper's batch."""
    from importlib import import_module

    return getattr(import_module(f"benchmarks.papers.pase.{NETWORKS[name]}"), name)()


def search(name, devices):
    """Cost, K, M, largest product, seconds, bytes of tables and of the process at its peak."""
    from benchmarks.papers.pase.orders import search_statistics
    from benchmarks.papers.pase.search import least_cost_strategy

    least_cost_strategy(network("alexnet"), 2)
    graph = network(name)
    start_s = time.perf_counter()
    found = least_cost_strategy(graph, devices)
    seconds = time.perf_counter() - start_s
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    s = search_statistics(graph, devices)
    return found.cost_flop, s.largest_configurations, s.largest_dependent_set, s.largest_product, seconds, s.tables_bytes, rss


def rival_costs(name, devices, proposals, seeds):
    """Costs of data parallelism, the expert and the best chain, and seconds of one chain."""
    from benchmarks.papers.pase.baselines import data_parallel, expert
    from benchmarks.papers.pase.mcmc import mcmc

    graph = network(name)
    starts = [expert(graph, devices), data_parallel(graph, devices)]
    mcmc(graph, devices, proposals=10)
    start_s = time.perf_counter()
    chains = [mcmc(graph, devices, start=s, seed=seed, proposals=proposals) for s in starts for seed in range(seeds)]
    seconds = (time.perf_counter() - start_s) / len(chains)
    return starts[1].cost_flop, starts[0].cost_flop, min(chain.cost_flop for chain in chains), seconds


if __name__ == "__main__":
    main()
