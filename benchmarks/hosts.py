"""Shaped against measured rates of emulated hosts: messages, all-reduce, rates by pair, processor time, and what making costs.

    sudo python benchmarks/hosts.py            three rates and one matrix, two to four hosts; about two minutes
    sudo python benchmarks/hosts.py --quick    one rate

Rates are of TCP payload, which reaches 95.6 % of what is shaped. Medians; quiet machines only, since whoever else computes
delays the small messages.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

from rlplace.errors import RlplaceError
from tools.hosts import HostsSpec, emulated_hosts, launch
from tools.hosts.cluster import PAYLOAD_FRACTION

SIZES = (4 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20)
PAIRS_MBIT = ((0, 1000, 50), (200, 0, 100), (1000, 500, 0))


def worker() -> None:
    """One rank: every ordered pair alone, then all-reduce; rank 0 prints the seconds."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    answer, found = torch.zeros(1), torch.zeros(world, world, len(SIZES), dtype=torch.float64)
    for sender in range(world):
        for receiver in range(world):
            dist.barrier()
            if sender == receiver or rank not in (sender, receiver):
                continue
            for number, size in enumerate(SIZES):
                message, samples = torch.zeros(size // 4), []
                for _ in range(11 if size < 1 << 20 else 3):
                    begin = time.perf_counter()
                    if rank == sender:
                        dist.send(message, receiver)
                        dist.recv(answer, receiver)
                    else:
                        dist.recv(message, sender)
                        dist.send(answer, sender)
                    samples.append(time.perf_counter() - begin)
                if rank == sender:
                    found[sender, receiver, number] = statistics.median(samples)
    reduced = []
    for size in SIZES:
        message, samples = torch.zeros(size // 4), []
        for _ in range(4):
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(message)
            samples.append(time.perf_counter() - begin)
        reduced.append(statistics.median(samples[1:]))
    dist.all_reduce(found)
    if rank == 0:
        print(json.dumps({"pairs": found.tolist(), "reduced": reduced}), flush=True)
    dist.destroy_process_group()


def run(spec: HostsSpec) -> dict[str, Any]:
    """What rank 0 printed, and what making, starting and removing took."""
    said: list[str] = []

    def keep(rank: int, host: int, stream: int, line: str) -> None:
        if rank == 0 and stream == 1:
            said.append(line)

    begin = time.perf_counter()
    with emulated_hosts(spec) as hosts:
        made = time.perf_counter()
        with launch(hosts, [sys.executable, os.path.abspath(__file__), "--worker"], sink=keep) as job:
            job.wait(600)
            job.check()
        done = time.perf_counter()
    return {**json.loads(said[-1]), "make_s": made - begin, "remove_s": time.perf_counter() - done}


def report(title: str, spec: HostsSpec) -> None:
    facts, count = run(spec), spec.hosts
    print(f"\n{title}: made in {facts['make_s'] * 1e3:.0f} ms, removed in {facts['remove_s'] * 1e3:.0f} ms")
    print(
        "  " + f"{'pair':>10s} {'shaped':>8s}" + "".join(f"{size >> 10:>9d}K" for size in SIZES) + "   Mbit/s; last: of payload"
    )
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    for i, j in pairs if spec.per_pair else pairs[:1]:
        rate, seconds = spec.rate_between(i, j), facts["pairs"][i][j]
        found = [size * 8 / s for size, s in zip(SIZES, seconds, strict=True)]
        cells = "".join(f"{value / 1e6:10.1f}" for value in found)
        print(f"  {f'{i} -> {j}':>10s} {rate / 1e6:8.0f}{cells}   {100 * found[-1] / rate / PAYLOAD_FRACTION:.1f} %")
    if not spec.per_pair:
        rate = spec.rate_between(0, 1)
        bus = [2 * (count - 1) / count * size * 8 / s for size, s in zip(SIZES, facts["reduced"], strict=True)]
        cells = "".join(f"{value / 1e6:10.1f}" for value in bus)
        print(f"  {'all-reduce':>10s} {rate / 1e6:8.0f}{cells}   {100 * bus[-1] / rate / PAYLOAD_FRACTION:.1f} %")


def processor() -> None:
    """Processor time that a loop on each of two hosts gets, against the share."""
    code = "import time\nb=time.perf_counter()\nfor _ in range(20_000_000): pass\n"
    code += "print(time.process_time()/(time.perf_counter()-b))"
    print("\nprocessor time of a busy loop on each of two hosts, cores")
    cores = sorted(os.sched_getaffinity(0))
    for share in (None, 0.9, 0.45, 0.2):
        said: list[str] = []
        with emulated_hosts(HostsSpec(2, cpu_share=share, cpus=(cores[0], cores[-1]))) as hosts:
            launch(hosts, [sys.executable, "-I", "-S", "-c", code], sink=lambda *line, said=said: said.append(line[3])).wait(
                120
            )
        print(f"  share {share if share is not None else 'none':>5} {' '.join(f'{float(text):6.3f}' for text in said)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one rate")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker()
        return 0
    try:
        for mbit in (1000,) if options.quick else (100, 1000, 10_000):
            report(f"2 hosts, {mbit} Mbit/s cards", HostsSpec(2, mbit * 1e6))
        if not options.quick:
            report("4 hosts, 1000 Mbit/s cards", HostsSpec(4, 1e9))
            report("3 hosts, rates by pair", HostsSpec(3, tuple(tuple(1e6 * v for v in row) for row in PAIRS_MBIT)))
            processor()
    except RlplaceError as error:
        print(f"hosts: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
