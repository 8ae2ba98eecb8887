"""``rlplace info``: versions, devices, planners, presets, checkpoints, environments."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from rlplace.cli.options import Options, print_json
from rlplace.plugins import version_of

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


@dataclass(frozen=True, kw_only=True)
class InfoOptions(Options):
    """Options of the verb."""

    HELP = "show versions, devices, planners, presets, checkpoints, environments and plug-ins"
    EXAMPLE = "example: rlplace info --json"

    def run(self) -> int:
        """Runs the verb."""
        facts = _facts()
        if self.json:
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
    from rlplace.cluster.parse import Cluster
    from rlplace.cluster.presets import KINDS
    from rlplace.placement import OF_STRATEGIES, PLANNERS

    host = Cluster.detect()
    return {
        "versions": {package: version_of(package) or None for package in _PACKAGES},
        "devices": [{"name": d.name, "kind": d.kind, "memory_bytes": d.memory_bytes} for d in host.devices],
        "planners": sorted([*PLANNERS, *OF_STRATEGIES]),
        "presets": sorted(KINDS),
        "checkpoints": shipped_checkpoints(),
        "environments": sorted(name for name in gymnasium.registry if name.startswith("rlplace/")),
        "plugins": _plug_ins(),
    }


def _plug_ins() -> list[dict[str, str | None]]:
    """Lists the plug-ins of installed packages, each tried, with the reason where it cannot be used."""
    from rlplace import plugins as extensions
    from rlplace.agents.policies import BUILT_IN, policy_class
    from rlplace.cluster.presets import KINDS, RESERVED, device_kind
    from rlplace.cost.foreign import own_costs
    from rlplace.errors import RlplaceError
    from rlplace.placement import PLANNERS, get_planner

    groups: dict[str, tuple[Collection[str], Callable[[str], Any]]] = {
        extensions.PLANNERS: (PLANNERS, get_planner),
        extensions.DEVICES: ({*KINDS, *RESERVED}, device_kind),
        extensions.COSTS: ((), own_costs),
        extensions.POLICIES: (BUILT_IN, policy_class),
    }
    plug_ins = []
    for group, what in extensions.GROUPS.items():
        taken, use = groups[group]
        for extension in extensions.extensions(group).values():
            problem = extensions.refusal(extension, taken)
            if problem is None:
                try:
                    use(extension.name)
                except RlplaceError as error:
                    problem = str(error)
            plug_ins.append({"name": extension.name, "what": what, "package": extension.distribution, "error": problem})
    return plug_ins


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [f"{key:20s} {item if item is not None else 'not installed'}" for key, item in value.items()]
    return [
        ", ".join(str(v) for v in item.values() if v is not None) if isinstance(item, dict) else str(item) for item in value
    ]
