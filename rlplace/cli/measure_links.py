"""``rlplace measure --links``: under torchrun; rank 0 prints and writes, the others stay silent."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from rlplace.cli.output import print_json, print_table, say

if TYPE_CHECKING:
    from rlplace.cli.measure import MeasureOptions
    from rlplace.cluster.machines import LinkTimes


def run(options: MeasureOptions) -> int:
    """Runs the verb on this rank."""
    from rlplace.files import check_output
    from rlplace.measure.links import measure_links

    if os.environ.get("RANK", "0") == "0":  # other hosts may not have the folder
        check_output(options.out)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # closing sockets is no news
    times = measure_links(repeats=options.repeats, time_limit_s=options.time_limit, progress=say)
    if times is None:
        return 0
    from rlplace.cluster.machines import cluster_from

    cluster = cluster_from(times)
    cluster.save(options.out)
    say(f"wrote {options.out}; use it with: rlplace place MODEL --cluster {options.out}")
    facts = _facts(times, [device.name for device in cluster.devices])
    if options.json:
        print_json(facts)
    else:
        _show(facts)
    return 0


def _facts(times: LinkTimes, names: list[str]) -> dict[str, Any]:
    """Returns the measurements, and the fits, as plain data."""
    from rlplace.cluster.machines import TIMED_COLLECTIVES, fit_pairs

    latency, bandwidth, error = fit_pairs(times)
    pairs = [
        {
            "from": names[i],
            "to": names[j],
            "latency_s": float(latency[i, j]),
            "bandwidth_bytes_per_s": float(bandwidth[i, j]),
            "fit_error": float(error[i, j]),
            "seconds": [float(value) for value in times.pair_s[i, j]],
        }
        for i in range(len(names))
        for j in range(len(names))
        if i != j
    ]
    groups: dict[str, Any] = {
        kind: [
            {"devices": [names[rank] for rank in ranks], "seconds": seconds}
            for ranks, seconds in zip(times.groups, by_group.tolist(), strict=True)
        ]
        for kind, by_group in zip(TIMED_COLLECTIVES, times.group_s, strict=True)
    }
    devices = [
        {"name": name, "host": host, "driver": driver}
        for name, host, driver in zip(names, times.hosts, times.drivers, strict=True)
    ]
    return {
        "backend": times.backend,
        "devices": devices,
        "pair_bytes": list(times.pair_bytes),
        "pairs": pairs,
        "collective_bytes": list(times.group_bytes),
        **groups,
    }


def _show(facts: dict[str, Any]) -> None:
    from rlplace.cluster.machines import TIMED_COLLECTIVES

    rows = [
        [
            f"{pair['from']} -> {pair['to']}",
            f"{pair['latency_s'] * 1e6:.1f}",
            f"{pair['bandwidth_bytes_per_s'] / 1e9:.2f}",
            f"{pair['fit_error'] * 100:.0f}",
        ]
        for pair in facts["pairs"]
    ]
    print_table(["pair", "latency us", "GB/s", "fit error %"], rows)
    print()
    rows = [
        [
            kind.replace("_", "-"),
            f"{len(group['devices'])}: {', '.join(group['devices'][:4])}{', ...' if len(group['devices']) > 4 else ''}",
        ]
        + [f"{value * 1e3:.3f}" for value in group["seconds"]]
        for kind in TIMED_COLLECTIVES
        for group in facts[kind]
    ]
    sizes = [f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" for size in facts["collective_bytes"]]
    print_table(["collective, ms", "devices", *sizes], rows)
