"""The ``[topology]`` table of cluster files: resources and paths by name (docs/formats.md, section Cluster).

``each`` lists devices for which a resource exists once, ``{device}`` standing for the name in its own; a path's ``from`` and
``to`` may be lists, with ``{from}`` and ``{to}`` in the names it crosses. Later paths replace earlier ones of the same pair.
"""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta, field

from rlplace.cluster.links import Links
from rlplace.cluster.topology import Path, Resource, Topology, lower
from rlplace.errors import InputError, unknown_name
from rlplace.records import Record, Text

_MAX_RESOURCES = 100_000
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class _Resources(Record, frozen=True):
    """A ``[[topology.resource]]``: one, or one for each of the devices in `each`.

    Attributes:
        name: Unique; ``{device}`` stands for the names in `each`.
        bytes_per_s: Capacity; inf never limits (a non-blocking switch).
        latency_s: Added to every transfer that crosses it.
        each: ``"*"`` for all devices, or a list of names; None: a single resource.
    """

    name: Text
    bytes_per_s: Annotated[float, Meta(ge=1e-3, le=1e18)] = math.inf
    latency_s: _Seconds = 0.0
    each: str | list[str] | None = None


class _Paths(Record, frozen=True):
    """A ``[[topology.path]]``: those of all pairs of the senders and receivers; later ones replace earlier ones of a pair.

    Attributes:
        senders: A name, a list of names, or ``"*"``.
        receivers: Likewise.
        over: Resources in order, with ``{from}`` and ``{to}`` for the names; one that is named twice is crossed twice.
        latency_s: Launch and handshake.
        efficiency: Fraction of the slowest resource that is reached; 0.5 where data is stored in between.
    """

    senders: str | list[str] = field(name="from")
    receivers: str | list[str] = field(name="to")
    over: Annotated[list[str], Meta(min_length=1)]
    latency_s: _Seconds = 0.0
    efficiency: Annotated[float, Meta(gt=0, le=1)] = 1.0


class TopologyTable(Record, frozen=True):
    """The table ``[topology]``.

    Attributes:
        resource: Ports, buses, switches and cards.
        path: What a transfer of each pair crosses; a pair without a path has no link.
    """

    resource: list[_Resources]
    path: list[_Paths]


def topology_links(table: TopologyTable, names: list[str]) -> Links:
    """Lowers a topology table.

    Args:
        table: The table as read from the file.
        names: Names of the D devices.

    Raises:
        InputError: Names the first entry that is wrong.
    """
    resources: list[Resource] = []
    for index, entry in enumerate(table.resource):
        resources += _resources(entry, names, f"topology.resource[{index}]")
        if len(resources) > _MAX_RESOURCES:
            raise InputError(f"topology: more than {_MAX_RESOURCES} resources")
    numbers = {resource.name: number for number, resource in enumerate(resources)}
    if len(numbers) < len(resources):
        twice = next(resource.name for number, resource in enumerate(resources) if numbers[resource.name] != number)
        raise InputError(f"topology: resource {twice[:80]!r}: names must be unique")
    position = {name: number for number, name in enumerate(names)}
    paths: dict[tuple[int, int], Path] = {}
    for index, line in enumerate(table.path):
        where = f"topology.path[{index}]"
        receivers = _devices(line.receivers, names, f"{where}.to")
        for sender in _devices(line.senders, names, f"{where}.from"):
            for receiver in receivers:
                if sender == receiver:
                    continue
                crossed = [name.replace("{from}", sender).replace("{to}", receiver) for name in line.over]
                missing = next((name for name in crossed if name not in numbers), None)
                if missing is not None:
                    raise InputError(f"{where}.over: {unknown_name('resource', missing, list(numbers)[:200])}")
                over = tuple(numbers[name] for name in crossed)
                if all(resources[number].bytes_per_s == math.inf for number in over):
                    raise InputError(f"{where}.over: crosses nothing with a capacity; give one of its resources bytes_per_s")
                paths[position[sender], position[receiver]] = Path(over, line.latency_s, line.efficiency)
    return lower(Topology(len(names), tuple(resources), paths))


def _resources(entry: _Resources, names: list[str], where: str) -> list[Resource]:
    if entry.each is None:
        return [Resource(entry.name, entry.bytes_per_s, entry.latency_s)]
    if "{device}" not in entry.name:
        raise InputError(f"{where}.name: needs {{device}} where the resource exists for each of several devices")
    return [
        Resource(entry.name.replace("{device}", device), entry.bytes_per_s, entry.latency_s)
        for device in _devices(entry.each, names, f"{where}.each")
    ]


def _devices(value: str | list[str], names: list[str], where: str) -> list[str]:
    """Names of devices: one, a list, or ``"*"`` for all."""
    if value == "*":
        return names
    chosen = [value] if isinstance(value, str) else value
    for name in chosen:
        if name not in names:
            raise InputError(f"{where}: {unknown_name('device', name, names)}")
    return chosen
