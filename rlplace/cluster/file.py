"""Cluster files: ``rlplace.cluster`` version 1, TOML (docs/formats.md, section Cluster).

In ``[[topology.resource]]``, ``each`` lists devices for which a resource exists once, with ``{device}`` in its name replaced by
theirs; a path's ``from`` and ``to`` may be lists, with ``{from}`` and ``{to}`` in the names it crosses. Later paths replace
earlier ones of the same pair.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, field, structs

from rlplace.cluster.fabric import Fabric
from rlplace.cluster.file_devices import device_runs, expanded
from rlplace.cluster.host_links import HostLinks
from rlplace.cluster.interconnect import Host, parse_network
from rlplace.cluster.links import Device, Links, LinksTable, Wires
from rlplace.cluster.parse import Cluster, default_devices, default_host
from rlplace.cluster.presets import DeviceKind, find_kind, kind_names
from rlplace.cluster.tiers import Tier
from rlplace.cluster.topology import Resource, Topology, TransferPath, lower
from rlplace.errors import InputError, unknown_name
from rlplace.files import check_header, check_keys, read_text, write_text
from rlplace.limits import CLUSTER_BYTES, DEVICES
from rlplace.records import Bytes, Record, Text, build, plain

_MAX_RESOURCES = 100_000
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]


class _Resources(Resource, frozen=True):
    """A ``[[topology.resource]]``: one, or one for each of the devices in `each`.

    Attributes:
        name: Unique; ``{device}`` is replaced by the names in `each`.
        each: ``"*"`` for all devices, or a list of names; None: a single resource.
    """

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
        path: The resources that a transfer of each pair crosses; a pair without a path has no link.
    """

    resource: list[_Resources]
    path: list[_Paths]


def topology_links(table: TopologyTable, names: list[str]) -> Links:
    """Lowers the topology table of a file to links.

    Args:
        table: The table as read from the file.
        names: Names of the D devices.

    Raises:
        InputError: Names the first entry that is wrong.
    """
    resources: list[Resource] = []
    for index, entry in enumerate(table.resource):
        where = f"topology.resource[{index}]"
        devices = [""] if entry.each is None else _devices(entry.each, names, f"{where}.each")
        if entry.each is not None and "{device}" not in entry.name:
            raise InputError(f"{where}.name: needs {{device}} where the resource exists for each of several devices")
        names_of = [entry.name.replace("{device}", device) if device else entry.name for device in devices]
        resources += [Resource(name, entry.bytes_per_s, entry.latency_s) for name in names_of]
        if len(resources) > _MAX_RESOURCES:
            raise InputError(f"topology: more than {_MAX_RESOURCES} resources")
    numbers = {resource.name: number for number, resource in enumerate(resources)}
    if len(numbers) < len(resources):
        twice = next(resource.name for number, resource in enumerate(resources) if numbers[resource.name] != number)
        raise InputError(f"topology: resource {twice[:80]!r}: names must be unique")
    position = {name: number for number, name in enumerate(names)}
    paths: dict[tuple[int, int], TransferPath] = {}
    for index, line in enumerate(table.path):
        where = f"topology.path[{index}]"
        receivers = _devices(line.receivers, names, f"{where}.to")
        for sender, receiver in product(_devices(line.senders, names, f"{where}.from"), receivers):
            if sender == receiver:
                continue
            crossed = [name.replace("{from}", sender).replace("{to}", receiver) for name in line.over]
            missing = next((name for name in crossed if name not in numbers), None)
            if missing is not None:
                raise InputError(f"{where}.over: {unknown_name('resource', missing, list(numbers)[:200])}")
            over = tuple(numbers[name] for name in crossed)
            if all(resources[number].bytes_per_s == math.inf for number in over):
                raise InputError(f"{where}.over: crosses nothing with a capacity; give one of its resources bytes_per_s")
            paths[position[sender], position[receiver]] = TransferPath(over, line.latency_s, line.efficiency)
    return lower(Topology(len(names), tuple(resources), paths))


def _devices(value: str | list[str], names: list[str], where: str) -> list[str]:
    """Returns the device names of an entry: one, a list, or all for ``"*"``."""
    if value == "*":
        return names
    chosen = [value] if isinstance(value, str) else value
    for name in chosen:
        if name not in names:
            raise InputError(f"{where}: {unknown_name('device', name, names)}")
    return chosen


FORMAT = "rlplace.cluster"
VERSION = 1

_KIND_KEYS = {item.name for item in structs.fields(DeviceKind)}


class _Interconnect(Record, frozen=True):
    """The table ``[interconnect]``: other links than the kinds' makers ship.

    Attributes:
        inside: Fabric of every host; None: that of its kinds.
        network: Network cards of every host, ``"eth=25g"``, ``"ib=200g"`` or ``"ib=8x200g"``; None: that of the kind.
    """

    inside: Literal["nvlink", "pcie"] | None = None
    network: Text | None = None


class _DeviceTable(Record, frozen=True):
    """A ``[[device]]``; any key of a kind replaces that number for this device alone.

    Attributes:
        name: Unique.
        kind: A preset or a ``[[kind]]`` of the file; None: the device has all numbers of a kind itself.
        host: Number of its host.
        count: So many devices that are alike; the number at the end of the name counts on.
        each_host: Of several devices: how many are on a host before the next host has the others; None: all.
        memory_bytes: Capacity; None: that of the kind.
        reserved_bytes: Always in use; None: the kind's context, and communication buffers if there are several accelerators.
    """

    name: Text
    kind: Text | None = None
    host: Annotated[int, Meta(ge=0, lt=DEVICES)] = 0
    memory_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None
    count: Annotated[int, Meta(ge=1, le=DEVICES)] = 1
    each_host: Annotated[int, Meta(ge=1, le=DEVICES)] | None = None


class _HostTable(Record, frozen=True):
    """A ``[[host]]``: links of a host, or of several that are alike, in the order of their numbers.

    Attributes:
        inside: Fabric of the host.
        network: Its network cards, as in `_Interconnect`.
        count: So many hosts.
    """

    inside: Literal["nvlink", "pcie"]
    network: Text
    count: Annotated[int, Meta(ge=1, le=DEVICES)] = 1


class _ClusterFile(Record, frozen=True):
    """A cluster file; kinds and devices build on the kinds that they name, so they are read one after the other.

    Attributes:
        device: The devices, in the order of their numbers.
        name: For people; not part of the fingerprint.
        kind: Device kinds; those of presets are replaced for this file.
        links: Bandwidths and latencies of all pairs.
        interconnect: Changes of the links that kinds imply; excludes `links` and `topology`.
        host: Links inside and between hosts, host by host; excludes the three above and below.
        tier: Groups of hosts that share an uplink, inner ones first; excludes `links` and `topology`.
        topology: Resources and paths, from which links are computed; excludes `links`.
        fabric: Devices with one interconnect and the times of their collectives; None: those of the kinds.
        host_memory_bytes: Memory of each host, which offload may fill, by its number; 0: not known.
    """

    device: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=DEVICES)]
    name: Text | None = None
    kind: tuple[dict[str, Any], ...] = ()
    links: LinksTable | None = None
    interconnect: _Interconnect | None = None
    host: Annotated[tuple[_HostTable, ...], Meta(max_length=DEVICES)] | None = None
    tier: Annotated[tuple[Tier, ...], Meta(max_length=DEVICES)] = ()
    topology: TopologyTable | None = None
    fabric: tuple[Fabric, ...] | None = None
    host_memory_bytes: tuple[Bytes, ...] = ()


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Writes a cluster file, atomically; kinds and links are written out, so later changes of presets do not reach it."""
    text = "\n".join(_lines(cluster_to_dict(cluster))) + "\n"
    if len(text) > CLUSTER_BYTES:
        raise InputError(
            f"{path}: the links of {len(cluster.devices)} devices take {len(text)} bytes, a cluster file may have "
            f"{CLUSTER_BYTES}; name the cluster by its text, or write a file with [interconnect] or [topology]"
        )
    write_text(path, text)


def load_cluster(path: str | Path) -> Cluster:
    """Reads a cluster file.

    Raises:
        InputError: The file is missing, malformed, newer than this code, or describes an impossible cluster.
    """
    text = read_text(path, CLUSTER_BYTES)
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{path}: TOML is nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not valid TOML: {error}") from None
    except ValueError as error:  # an integer beyond Python's digit limit
        raise InputError(f"{path}: not valid TOML: {str(error)[:120]}") from None
    data = check_header(data, FORMAT, VERSION, where=str(path))
    try:
        return _parse(data, str(path))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Returns the cluster as plain data, in the order in which the file lists it; links by host where hosts imply them."""
    kinds = {kind.name: kind for kind in cluster.kinds}
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": cluster.name,
        **({"host_memory_bytes": list(cluster.host_memory_bytes)} if cluster.host_memory_bytes else {}),
        "kind": [
            {key: dict(value) if isinstance(value, Mapping) else value for key, value in fields if value is not None}
            for fields in (structs.asdict(kind).items() for kind in kinds.values())
        ],
        "device": device_runs(cluster),
        **_links_data(cluster.links),
    }


def _links_data(wires: Wires) -> dict[str, Any]:
    if isinstance(wires, HostLinks) and wires.of_presets:
        runs = [(host, len(list(alike))) for host, alike in groupby((host.fabric, str(host.network)) for host in wires.hosts)]
        hosts = [{"inside": inside, "network": network, "count": count} for (inside, network), count in runs]
        return {"host": hosts, **({"tier": plain(wires.tiers)} if wires.tiers else {})}
    links = wires.whole
    matrices = {
        "bandwidth_bytes_per_s": links.bandwidth_bytes_per_s.tolist(),
        "latency_s": links.latency_s.tolist(),
        "channels": [[list(held) for held in row] for row in links.effective_channels],
    }
    return {"links": matrices, "fabric": plain(links.fabrics)}


def _parse(data: dict[str, Any], path: str) -> Cluster:
    file = build(_ClusterFile, data, "cluster", whole_floats=True)
    kinds: dict[str, DeviceKind] = {}
    for index, item in enumerate(file.kind):
        kind = _kind(item, f"kind[{index}]", kinds, base_key="like")
        if kind.name in kinds:
            raise InputError(f"kind[{index}]: kind {kind.name[:80]!r} is defined twice")
        kinds[kind.name] = kind
    given = [(index, one) for index, item in enumerate(file.device) for one in expanded(item, f"device[{index}]")]
    if len(given) > DEVICES:
        raise InputError(f"device: {len(given)} devices; a cluster has 1 to {DEVICES}")
    entries = [_device(item, f"device[{index}]", kinds) for index, item in given]
    device_kinds, hosts = [kind for _, kind in entries], tuple(entry.host for entry, _ in entries)
    devices = tuple(
        Device(
            entry.name,
            device.memory_bytes if entry.memory_bytes is None else entry.memory_bytes,
            device.reserved_bytes if entry.reserved_bytes is None else entry.reserved_bytes,
            device.kind,
        )
        for (entry, _), device in zip(entries, default_devices(device_kinds), strict=True)
    )
    link_keys = [key for key in ("links", "interconnect", "host", "topology") if key in data]
    if len(link_keys) > 1:
        raise InputError(f"cluster: give either [{link_keys[0]}] or [{link_keys[1]}], not both")
    if file.tier and (file.links is not None or file.topology is not None):
        raise InputError("tier: [links] and [topology] give every pair of devices its links; leave one of them out")
    links: Wires
    if file.links is not None:
        links = file.links.links()
    elif file.topology is not None:
        links = topology_links(file.topology, [device.name for device in devices])
    elif file.host is not None:
        links = _host_links(device_kinds, hosts, file.host, file.tier)
    else:
        links = _rule_links(device_kinds, hosts, file.interconnect or _Interconnect(), file.tier)
    if file.fabric is not None:
        links = dataclasses.replace(links.whole, fabrics=file.fabric)
    return Cluster(file.name or Path(path).stem, devices, tuple(device_kinds), links, hosts, path, file.host_memory_bytes)


def _kind(values: Mapping[str, Any], where: str, kinds: Mapping[str, DeviceKind], base_key: str) -> DeviceKind:
    """Returns a kind from file values, over the preset or the kind of the file that the key `base_key` names."""
    check_keys(values, {"name"}, _KIND_KEYS | {base_key}, where)
    own = {key: value for key, value in values.items() if key != base_key}
    base = _lookup(values[base_key], kinds, f"{where}.{base_key}") if base_key in values else None
    if base is None:
        missing = [item.name for item in structs.fields(DeviceKind) if item.required and item.name not in own]
        if missing:
            raise InputError(f"{where}: key {missing[0]!r} is missing; give it, or name a preset that the kind is like")
    kind = build(DeviceKind, {**(plain(base) if base else {}), **own}, where, whole_floats=True)
    parse_network(kind.network)
    return kind


def _lookup(name: Any, kinds: Mapping[str, DeviceKind], where: str) -> DeviceKind:
    kind = kinds.get(build(Text, name, where)) or find_kind(name)
    if kind is None:
        raise unknown_name("device kind", name, [*kinds, *kind_names()])
    return kind


def _device(item: Mapping[str, Any], where: str, kinds: Mapping[str, DeviceKind]) -> tuple[_DeviceTable, DeviceKind]:
    """Returns a device entry and its kind: the named kind, with the entry's own numbers in place of the kind's."""
    check_keys(item, {"name"}, {*_DeviceTable.__struct_fields__, *_KIND_KEYS}, where)
    entry = build(
        _DeviceTable, {k: v for k, v in item.items() if k in _DeviceTable.__struct_fields__}, where, whole_floats=True
    )
    if entry.kind is None:
        return entry, _kind({k: v for k, v in item.items() if k != "host"}, where, kinds, base_key="kind")
    own = {key: value for key, value in item.items() if key not in _DeviceTable.__struct_fields__}
    if not own:
        return entry, _lookup(entry.kind, kinds, f"{where}.kind")
    return entry, _kind({"name": f"{entry.kind}/{entry.name}", "kind": entry.kind, **own}, where, kinds, base_key="kind")


def _host_links(
    kinds: list[DeviceKind], hosts: tuple[int, ...], tables: Sequence[_HostTable], tiers: Sequence[Tier]
) -> HostLinks:
    given = [Host(table.inside, parse_network(table.network)) for table in tables for _ in range(table.count)]
    if len(given) != max(hosts) + 1:
        raise InputError(f"host: links of {len(given)} hosts for devices on {max(hosts) + 1}; give those of each, in order")
    return HostLinks(kinds, hosts, given, tiers)


def _rule_links(kinds: list[DeviceKind], hosts: tuple[int, ...], chosen: _Interconnect, tiers: Sequence[Tier]) -> HostLinks:
    by_host: dict[int, Host] = {}
    for kind, host in zip(kinds, hosts, strict=True):
        if host not in by_host or not kind.host_processor:
            by_host[host] = default_host(kind)
    network = None if chosen.network is None else parse_network(chosen.network)
    table = [by_host.get(number, Host("pcie", parse_network("eth=25g"))) for number in range(max(hosts) + 1)]
    return HostLinks(kinds, hosts, [Host(chosen.inside or host.fabric, network or host.network) for host in table], tiers)


def _lines(table: Mapping[str, Any], path: str = "", *, row_by_row: bool = False) -> Iterator[str]:
    """Yields the lines of a TOML table: its values, then its tables, which below the top level are lists of tables alone."""
    inner = {key: value for key, value in table.items() if _is_table(value, top=not path)}
    for key, value in table.items():
        if row_by_row:
            yield from (f"{key} = [", *(f"  {_value(row)}," for row in value), "]")
        elif key not in inner:
            yield f"{key} = {_value(value)}"
    for key, value in inner.items():
        single = isinstance(value, dict)
        for item in [value] if single else value:
            yield from ("", f"[{path}{key}]" if single else f"[[{path}{key}]]")
            yield from _lines(item, f"{path}{key}.", row_by_row=single)


def _is_table(value: Any, top: bool) -> bool:
    if isinstance(value, list):
        return isinstance(value[0], dict) if value else top
    return top and isinstance(value, dict)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + "}"
    return json.dumps(value).replace("\x7f", "\\u007f")  # JSON's text of numbers, strings and lists is TOML's as well
