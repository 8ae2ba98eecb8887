"""``rlplace info``: versions, devices, planners, presets, checkpoints, environments."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rlplace.cli.common import print_json

HELP = "show versions, devices, planners, presets, checkpoints and environments"
EXAMPLE = "example: rlplace info --json"
_PACKAGES = (
    "rlplace",
    "torch",
    "gymnasium",
    "stable-baselines3",
    "sb3-contrib",
    "networkx",
    "numpy",
    "numba",
    "pymetis",
    "transformers",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Runs the verb."""
    facts = _facts()
    if options.json:
        print_json(facts)
        return 0
    for title, value in facts.items():
        print(f"{title}:")
        for line in _lines(value):
            print(f"  {line}")
    return 0


def _facts() -> dict[str, Any]:
    import gymnasium

    from rlplace.agents.checkpoint import shipped_checkpoints
    from rlplace.cluster.presets import KINDS
    from rlplace.cluster.spec import Cluster
    from rlplace.planners import PLANNERS

    host = Cluster.detect()
    return {
        "versions": {package: _version(package) for package in _PACKAGES},
        "devices": [{"name": d.name, "kind": d.kind, "memory_bytes": d.memory_bytes} for d in host.devices],
        "planners": sorted(PLANNERS),
        "presets": sorted(KINDS),
        "checkpoints": shipped_checkpoints(),
        "environments": sorted(name for name in gymnasium.registry if name.startswith("rlplace/")),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{key:20s} {item if item is not None else 'not installed'}" for key, item in value.items()]
    return [", ".join(f"{v}" for v in item.values()) if isinstance(item, dict) else str(item) for item in value]
