"""``rlplace capture``: write the priced problem of a model and a cluster."""

from __future__ import annotations

import argparse

from rlplace.cli.common import add_model_options, load, print_json
from rlplace.errors import InputError

HELP = "capture a model and write its problem file"
EXAMPLE = "example: rlplace capture hf:bert --cluster v100:4 --out bert.problem.json"

_LEVELS = {"task": "best", "op": "best", "split": "bipartition"}
"""Level to a planner that takes such a problem."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "model", metavar="MODEL", help="hf:TYPE, zoo:NAME, package.module:function or file.py:function (runs that code)"
    )
    parser.add_argument("--cluster", metavar="C", help="cluster to price for (this machine)")
    parser.add_argument("--out", required=True, metavar="X.problem.json", help="file to write")
    parser.add_argument(
        "--level",
        choices=tuple(_LEVELS),
        default="task",
        help="task: one op per group and phase (default); op: every op; split: every backward in a group of its own, as "
        "bipartition plans",
    )
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Runs the verb."""
    from rlplace.files import check_output

    check_output(options.out)
    if options.model.endswith(".problem.json"):
        raise InputError(f"{options.model} is a problem already; capture takes a model")
    loaded = load(options.model, options.cluster, options)
    assert loaded.graph is not None and loaded.build is not None
    if options.level == "op":
        problem = loaded.build(loaded.graph, level="op")
    else:
        problem = loaded.prepared_for(_LEVELS[options.level]).first
    problem.save(options.out)
    summary = {
        "problem": options.out,
        "fingerprint": problem.fingerprint,
        "method": loaded.graph.capture["method"],
        "graph_ops": loaded.graph.num_ops,
        "flops": float(loaded.graph.op_flops.sum()),
        "parameters_bytes": sum(p.size_bytes for p in loaded.graph.parameters if not p.is_buffer),
        "ops": problem.num_ops,
        "groups": problem.num_groups,
        "devices": problem.num_devices,
        "host": options.host_mode,
        "op_times": (problem.source or {}).get("op_times", {}),
        "notes": list(loaded.graph.capture.get("notes", [])),
    }
    if options.json:
        print_json(summary)
    else:
        for key, value in summary.items():
            print(f"{key:17s} {value}")
    return 0
