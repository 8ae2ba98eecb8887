"""``rlplace capture``: write the priced problem of a model and a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from rlplace.cli.models import load
from rlplace.cli.options import MODEL, ModelOptions, argument, option
from rlplace.cli.output import print_json
from rlplace.errors import InputError

HELP = "capture a model and write its problem file"
EXAMPLE = "example: rlplace capture hf:bert --cluster v100:4 --out bert.problem.json"

_LEVELS = {"task": "best", "op": "best", "split": "bipartition"}
"""Level to a planner that takes such a problem."""


@dataclass(frozen=True, kw_only=True)
class CaptureOptions(ModelOptions):
    """Options of the verb."""

    model: str = argument("MODEL", MODEL)
    cluster: str | None = option("cluster to price for (this machine)", None, "C")
    out: str = option("file to write", None, "X.problem.json", required=True)
    level: str = option(
        "task: one op per group and phase (default); op: every op; split: every backward in a group of its own, as "
        "bipartition plans",
        choices=tuple(_LEVELS),
        default="task",
    )

    def check(self) -> None:
        """Refuses options that contradict each other."""
        from rlplace.files import check_output

        check_output(self.out)
        if self.model.endswith(".problem.json"):
            raise InputError(f"{self.model} is a problem already; capture takes a model")


def run(options: CaptureOptions) -> int:
    """Runs the verb."""
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
