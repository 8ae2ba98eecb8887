"""The ``[topology]`` table of cluster files: resources and paths by name (docs/formats.md, section Cluster).

``each`` lists devices for which a resource exists once, ``{device}`` standing for the name in its own; a path's ``from`` and
``to`` may be lists, with ``{from}`` and ``{to}`` in the names it crosses. Later paths replace earlier ones of the same pair.
"""

from __future__ import annotations

import math
from typing import Any

from rlplace.cluster.topology import Path, Resource, Topology, check_topology, lower
from rlplace.errors import InputError, show, unknown_name
from rlplace.files import check_keys, finite_number
from rlplace.problem import Links

_MAX_RESOURCES = 100_000


def parse_topology(item: Any, names: list[str]) -> Links:
    """Lowers a topology table.

    Args:
        item: The parsed table.
        names: The D devices' names.

    Raises:
        InputError: Names the first entry that is wrong.
    """
    check_keys(item, {"resource", "path"}, set(), "topology")
    resources: list[Resource] = []
    for index, data in enumerate(_tables(item["resource"], "topology.resource")):
        resources += _resources(data, names, f"topology.resource[{index}]")
        if len(resources) > _MAX_RESOURCES:
            raise InputError(f"topology: more than {_MAX_RESOURCES} resources")
    numbers = {resource.name: number for number, resource in enumerate(resources)}
    position = {name: number for number, name in enumerate(names)}
    paths: dict[tuple[int, int], Path] = {}
    for index, data in enumerate(_tables(item["path"], "topology.path")):
        where = f"topology.path[{index}]"
        check_keys(data, {"from", "to", "over"}, {"latency_s", "efficiency"}, where)
        latency, efficiency = (
            finite_number(data.get("latency_s", 0.0), where),
            finite_number(data.get("efficiency", 1.0), where),
        )
        over = data["over"]
        if not isinstance(over, list) or not over or not all(isinstance(name, str) for name in over):
            raise InputError(f"{where}.over: expected a list of names of resources")
        receivers = _devices(data["to"], names, f"{where}.to")
        for sender in _devices(data["from"], names, f"{where}.from"):
            for receiver in receivers:
                if sender == receiver:
                    continue
                crossed = [name.replace("{from}", sender).replace("{to}", receiver) for name in over]
                missing = next((name for name in crossed if name not in numbers), None)
                if missing is not None:
                    raise InputError(f"{where}.over: {unknown_name('resource', missing, list(numbers)[:200])}")
                paths[position[sender], position[receiver]] = Path(tuple(numbers[n] for n in crossed), latency, efficiency)
    topology = Topology(len(names), tuple(resources), paths)
    check_topology(topology)
    return lower(topology)


def _resources(data: Any, names: list[str], where: str) -> list[Resource]:
    check_keys(data, {"name"}, {"bytes_per_s", "latency_s", "each"}, where)
    name = data["name"]
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}.name: expected a non-empty string")
    rate = finite_number(data["bytes_per_s"], f"{where}.bytes_per_s") if "bytes_per_s" in data else math.inf
    latency = finite_number(data.get("latency_s", 0.0), f"{where}.latency_s")
    if "each" not in data:
        return [Resource(name, rate, latency)]
    if "{device}" not in name:
        raise InputError(f"{where}.name: needs {{device}} where the resource exists for each of several devices")
    return [Resource(name.replace("{device}", d), rate, latency) for d in _devices(data["each"], names, f"{where}.each")]


def _devices(value: Any, names: list[str], where: str) -> list[str]:
    """Names of devices: one, a list, or ``"*"`` for all."""
    if value == "*":
        return names
    chosen = value if isinstance(value, list) else [value]
    for name in chosen:
        if not isinstance(name, str) or name not in names:
            raise InputError(f"{where}: {unknown_name('device', name, names)}")
    return list(chosen)


def _tables(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(f"{where}: expected [[{where}]] tables, found {show(value)}")
    return value
