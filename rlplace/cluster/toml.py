"""Cluster files: ``rlplace.cluster`` version 1, TOML (docs/formats.md, section Cluster)."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, structs

from rlplace.cluster.fabric import Fabric
from rlplace.cluster.interconnect import Host, build_links, parse_network
from rlplace.cluster.links import Device, Links
from rlplace.cluster.parse import MAX_DEVICES, Cluster, default_host
from rlplace.cluster.presets import DeviceKind, find_kind, kind_names
from rlplace.cluster.topology_file import TopologyTable, topology_links
from rlplace.errors import InputError, unknown_name
from rlplace.files import check_header, check_keys, read_text, write_text
from rlplace.limits import CLUSTER_BYTES
from rlplace.records import Bytes, Record, Text, build, plain

FORMAT = "rlplace.cluster"
VERSION = 1

_Matrix = list[list[Annotated[float, Meta(ge=0, le=1e300)]]]
_Channel = Annotated[int, Meta(ge=0, lt=1 << 20)]
_KIND_KEYS = {item.name for item in structs.fields(DeviceKind)}


class _Links(Record, frozen=True):
    """The table ``[links]``.

    Attributes:
        bandwidth_bytes_per_s: Devices by devices, a row per sender; 0: no link.
        latency_s: Devices by devices.
        channels: By ordered pair the numbers of the resources that a transfer holds; None: every pair has its own.
    """

    bandwidth_bytes_per_s: _Matrix
    latency_s: _Matrix
    channels: list[list[list[_Channel]]] | None = None


class _Interconnect(Record, frozen=True):
    """The table ``[interconnect]``: other links than the kinds' makers ship.

    Attributes:
        inside: Fabric of every host; None: what its kinds have.
        network: Network cards of every host, ``"eth=25g"``, ``"ib=200g"`` or ``"ib=8x200g"``; None: that of the kind.
    """

    inside: Literal["nvlink", "pcie"] | None = None
    network: Text | None = None


class _Device(Record, frozen=True):
    """A ``[[device]]``; any key of a kind replaces that number for this device alone.

    Attributes:
        name: Unique.
        kind: A preset or a ``[[kind]]`` of the file; None: the device has all numbers of a kind itself.
        host: Number of its host.
        memory_bytes: Capacity; None: that of the kind.
        reserved_bytes: Always in use; None: the kind's context, and communication buffers if there are several accelerators.
    """

    name: Text
    kind: Text | None = None
    host: Annotated[int, Meta(ge=0, lt=MAX_DEVICES)] = 0
    memory_bytes: Bytes | None = None
    reserved_bytes: Bytes | None = None


class _File(Record, frozen=True):
    """A cluster file; kinds and devices build on the kinds that they name, so they are read one after the other.

    Attributes:
        device: The devices, in the order of their numbers.
        name: For people; not part of the fingerprint.
        kind: Device kinds; those of presets are replaced for this file.
        links: Bandwidths and latencies of all pairs.
        interconnect: Changes of the links that kinds imply; excludes `links` and `topology`.
        topology: Resources and paths, from which links are computed; excludes `links`.
        fabric: Devices with one interconnect and the times of their collectives; None: those of the kinds.
    """

    device: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_DEVICES)]
    name: Text | None = None
    kind: tuple[dict[str, Any], ...] = ()
    links: _Links | None = None
    interconnect: _Interconnect | None = None
    topology: TopologyTable | None = None
    fabric: tuple[Fabric, ...] | None = None


def save_cluster(cluster: Cluster, path: str | Path) -> None:
    """Writes a cluster file, atomically; kinds and links are written out, so later changes of presets do not reach it."""
    text = _to_toml(cluster_to_dict(cluster))
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
    """Returns the cluster as plain data, in the order in which the file lists it."""
    kinds = {kind.name: kind for kind in cluster.kinds}
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": cluster.name,
        "kind": [
            {key: dict(value) if isinstance(value, Mapping) else value for key, value in fields if value is not None}
            for fields in (structs.asdict(kind).items() for kind in kinds.values())
        ],
        "device": [
            {
                "name": device.name,
                "kind": device.kind,
                "host": host,
                "memory_bytes": device.memory_bytes,
                "reserved_bytes": device.reserved_bytes,
            }
            for device, host in zip(cluster.devices, cluster.hosts, strict=True)
        ],
        "links": {
            "bandwidth_bytes_per_s": cluster.links.bandwidth_bytes_per_s.tolist(),
            "latency_s": cluster.links.latency_s.tolist(),
            "channels": [[list(held) for held in row] for row in cluster.links.effective_channels],
        },
        "fabric": plain(cluster.links.fabrics),
    }


def _parse(data: dict[str, Any], path: str) -> Cluster:
    file = build(_File, data, "cluster", whole_floats=True)
    kinds: dict[str, DeviceKind] = {}
    for index, item in enumerate(file.kind):
        kind = _kind(item, f"kind[{index}]", kinds, base_key="like")
        if kind.name in kinds:
            raise InputError(f"kind[{index}]: kind {kind.name[:80]!r} is defined twice")
        kinds[kind.name] = kind
    entries = [_device(item, f"device[{index}]", kinds) for index, item in enumerate(file.device)]
    several = sum(not kind.host_processor for _, kind in entries) > 1
    devices = tuple(
        Device(
            name=entry.name,
            memory_bytes=kind.memory_bytes if entry.memory_bytes is None else entry.memory_bytes,
            reserved_bytes=kind.reserved_bytes + (kind.communication_bytes if several and not kind.host_processor else 0)
            if entry.reserved_bytes is None
            else entry.reserved_bytes,
            kind=kind.name,
        )
        for entry, kind in entries
    )
    device_kinds, hosts = [kind for _, kind in entries], tuple(entry.host for entry, _ in entries)
    link_keys = [key for key in ("links", "interconnect", "topology") if key in data]
    if len(link_keys) > 1:
        raise InputError(f"cluster: give either [{link_keys[0]}] or [{link_keys[1]}], not both")
    if file.links is not None:
        links = _matrix_links(file.links, len(devices))
    elif file.topology is not None:
        links = topology_links(file.topology, [device.name for device in devices])
    else:
        links = _rule_links(device_kinds, hosts, file.interconnect or _Interconnect())
    if file.fabric is not None:
        links = dataclasses.replace(links, fabrics=file.fabric)
    return Cluster(file.name or Path(path).stem, devices, tuple(device_kinds), links, hosts, text=path)


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


def _device(item: Mapping[str, Any], where: str, kinds: Mapping[str, DeviceKind]) -> tuple[_Device, DeviceKind]:
    """Returns a device entry and its kind: the named kind, with the entry's own numbers in place of the kind's."""
    check_keys(item, {"name"}, {*_Device.__struct_fields__, *_KIND_KEYS}, where)
    entry = build(_Device, {k: v for k, v in item.items() if k in _Device.__struct_fields__}, where, whole_floats=True)
    if entry.kind is None:
        return entry, _kind({k: v for k, v in item.items() if k != "host"}, where, kinds, base_key="kind")
    own = {key: value for key, value in item.items() if key not in _Device.__struct_fields__}
    if not own:
        return entry, _lookup(entry.kind, kinds, f"{where}.kind")
    return entry, _kind({"name": f"{entry.kind}/{entry.name}", "kind": entry.kind, **own}, where, kinds, base_key="kind")


def _rule_links(kinds: list[DeviceKind], hosts: tuple[int, ...], chosen: _Interconnect) -> Links:
    by_host: dict[int, Host] = {}
    for kind, host in zip(kinds, hosts, strict=True):
        if host not in by_host or not kind.host_processor:
            by_host[host] = default_host(kind)
    network = None if chosen.network is None else parse_network(chosen.network)
    table = [by_host.get(number, Host("pcie", parse_network("eth=25g"))) for number in range(max(hosts) + 1)]
    return build_links(kinds, hosts, [Host(chosen.inside or host.fabric, network or host.network) for host in table])


def _matrix_links(table: _Links, count: int) -> Links:
    for key in table.__struct_fields__:
        rows = getattr(table, key)
        if rows is not None and (len(rows) != count or any(len(row) != count for row in rows)):
            raise InputError(f"links.{key}: expected a {count} x {count} matrix")
    for i, row in enumerate(table.channels or ()):
        if any(len(set(channels)) != len(channels) for channels in row):
            raise InputError(f"links.channels[{i}]: the numbers of a pair's channels must be distinct")
    channels = None if table.channels is None else tuple(tuple(map(tuple, row)) for row in table.channels)
    return Links(np.array(table.bandwidth_bytes_per_s), np.array(table.latency_s), channels)


def _to_toml(data: Mapping[str, Any]) -> str:
    """TOML text of a cluster: scalars, arrays of tables one level deep, and tables; all that the format needs."""
    lines = [f"{key} = {_value(value)}" for key, value in data.items() if not isinstance(value, (dict, list))]
    for key in ("kind", "device"):
        for item in data[key]:
            lines += ["", f"[[{key}]]"]
            lines += [f"{name} = {_value(value)}" for name, value in item.items()]
    lines += ["", "[links]"]
    for name, rows in data["links"].items():
        lines += [f"{name} = [", *(f"  {_value(row)}," for row in rows), "]"]
    for fabric in data["fabric"]:
        lines += ["", "[[fabric]]"]
        lines += [f"{name} = {_value(value)}" for name, value in fabric.items() if name != "curves"]
        for curve in fabric["curves"]:
            lines += ["", "[[fabric.curves]]", *(f"{name} = {_value(value)}" for name, value in curve.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=True).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + "}"
    return str(value)
