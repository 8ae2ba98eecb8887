"""Cluster files: ``rlplace.cluster`` version 1, TOML (docs/formats.md, section Cluster)."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.cluster.interconnect import Host, build_links, parse_network
from rlplace.cluster.parse import default_host
from rlplace.cluster.presets import KINDS, DeviceKind, find_kind, kind_names
from rlplace.cluster.spec import MAX_DEVICES, Cluster, check_kind
from rlplace.cluster.topology_file import parse_topology
from rlplace.errors import InputError, show, unknown_name
from rlplace.files import check_header, check_keys, finite_number, read_text, write_text
from rlplace.limits import CLUSTER_BYTES
from rlplace.problem import Device, Links
from rlplace.problem.fabric import fabrics_from_list
from rlplace.records import plain

FORMAT = "rlplace.cluster"
VERSION = 1

_KIND_FIELDS = {item.name for item in dataclasses.fields(DeviceKind)}
_KIND_REQUIRED = {"name", "peak_flops", "memory_bandwidth_bytes_per_s", "memory_bytes"}
_TABLES = ("peak_flops", "gemm_efficiency")
_INTEGERS = ("memory_bytes", "reserved_bytes", "communication_bytes", "pcie_generation", "pcie_per_switch", "processors")
_FLAGS = ("pcie_peer", "host_processor")
_TEXTS = ("name", "nvlink", "fabric", "network")
_FABRICS = ("switch", "cube", "mesh")
_DEVICE_KEYS = {"name", "kind", "host", "memory_bytes", "reserved_bytes", *_KIND_FIELDS}


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
    """The cluster as plain data, in the order in which the file lists it."""
    kinds = {kind.name: kind for kind in cluster.kinds}
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": cluster.name,
        "kind": [_kind_to_dict(kind) for kind in kinds.values()],
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


def _kind_to_dict(kind: DeviceKind) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for item in dataclasses.fields(kind):
        value = getattr(kind, item.name)
        if value is not None:
            data[item.name] = dict(value) if isinstance(value, Mapping) else value
    return data


def _parse(data: dict[str, Any], path: str) -> Cluster:
    check_keys(data, {"device"}, {"name", "kind", "links", "interconnect", "topology", "fabric"}, "cluster")
    name = _text(data.get("name", Path(path).stem), "name")
    kinds = _parse_kinds(data.get("kind", []))
    items = data["device"]
    if not isinstance(items, list) or not items:
        raise InputError("cluster: needs at least one [[device]]")
    if len(items) > MAX_DEVICES:
        raise InputError(f"cluster: {len(items)} devices, the limit is {MAX_DEVICES}")
    devices, device_kinds, hosts = [], [], []
    accelerators = sum(1 for item in items if not _find_kind(item, kinds).host_processor)
    for index, item in enumerate(items):
        device, kind, host = _parse_device(item, index, kinds, several=accelerators > 1)
        devices.append(device)
        device_kinds.append(kind)
        hosts.append(host)
    given = [key for key in ("links", "interconnect", "topology") if key in data]
    if len(given) > 1:
        raise InputError(f"cluster: give either [{given[0]}] or [{given[1]}], not both")
    if "links" in data:
        links = _parse_links(data["links"], len(devices))
    elif "topology" in data:
        links = parse_topology(data["topology"], [device.name for device in devices])
    else:
        links = _rule_links(device_kinds, hosts, data.get("interconnect", {}))
    if "fabric" in data:
        links = dataclasses.replace(links, fabrics=fabrics_from_list(data["fabric"], len(devices)))
    return Cluster(name, tuple(devices), tuple(device_kinds), links, tuple(hosts), text=path)


def _parse_kinds(items: Any) -> dict[str, DeviceKind]:
    if not isinstance(items, list):
        raise InputError("cluster: kind: expected [[kind]] tables")
    kinds: dict[str, DeviceKind] = {}
    for index, item in enumerate(items):
        where = f"kind[{index}]"
        check_keys(item, {"name"}, {"like", *_KIND_FIELDS}, where)
        name = _text(item["name"], f"{where}.name")
        if name in kinds:
            raise InputError(f"{where}: kind {name[:80]!r} is defined twice")
        base = _lookup(item["like"], kinds, f"{where}.like") if "like" in item else None
        kinds[name] = _make_kind({k: v for k, v in item.items() if k != "like"}, base, where)
    return kinds


def _lookup(name: Any, kinds: Mapping[str, DeviceKind], where: str) -> DeviceKind:
    name = _text(name, where)
    if name in kinds:
        return kinds[name]
    kind = find_kind(name)
    if kind is None:
        raise unknown_name("device kind", name, [*kinds, *kind_names()])
    return kind


def _find_kind(item: Any, kinds: Mapping[str, DeviceKind]) -> DeviceKind:
    """Base kind of a device entry, for counting accelerators; a device with numbers of its own counts as one."""
    if isinstance(item, dict) and "kind" in item:
        return _lookup(item["kind"], kinds, "device.kind")
    flag = isinstance(item, dict) and item.get("host_processor") is True
    return KINDS["cpu"] if flag else KINDS["a100-80g"]


def _make_kind(values: dict[str, Any], base: DeviceKind | None, where: str) -> DeviceKind:
    """A kind from file values, over `base` where given."""
    checked: dict[str, Any] = {}
    for key, value in values.items():
        at = f"{where}.{key}"
        if key in _TABLES:
            if not isinstance(value, dict):
                raise InputError(f"{at}: expected a table of numbers by dtype")
            checked[key] = MappingProxyType({dtype: finite_number(number, f"{at}.{dtype}") for dtype, number in value.items()})
        elif key in _TEXTS:
            checked[key] = _text(value, at)
            if key == "nvlink" and value not in _FABRICS:
                raise InputError(f"{at}: {unknown_name('fabric', value, _FABRICS)}")
        elif key in _FLAGS:
            if not isinstance(value, bool):
                raise InputError(f"{at}: expected true or false")
            checked[key] = value
        else:
            checked[key] = _whole(value, at) if key in _INTEGERS else finite_number(value, at)
    if base is not None:
        kind = dataclasses.replace(base, **checked)
    else:
        missing = sorted(_KIND_REQUIRED - checked.keys())
        if missing:
            raise InputError(f"{where}: key {missing[0]!r} is missing; give it, or name a preset that the kind is like")
        kind = DeviceKind(**checked)
    parse_network(kind.network)
    if kind.pcie_generation not in (3, 4, 5):
        raise InputError(f"{where}.pcie_generation: {kind.pcie_generation} is not 3, 4 or 5")
    check_kind(kind)
    return kind


def _parse_device(item: Any, index: int, kinds: Mapping[str, DeviceKind], *, several: bool) -> tuple[Device, DeviceKind, int]:
    where = f"device[{index}]"
    check_keys(item, {"name"}, _DEVICE_KEYS, where)
    name = _text(item["name"], f"{where}.name")
    base = _lookup(item["kind"], kinds, f"{where}.kind") if "kind" in item else None
    numbers = {key: value for key, value in item.items() if key in _KIND_FIELDS - {"name"}}
    own = {key: value for key, value in numbers.items() if key not in ("memory_bytes", "reserved_bytes")}
    if base is None:
        kind = _make_kind({"name": name, **numbers}, None, where)
    elif own:
        kind = _make_kind({"name": f"{base.name}/{name}", **own}, base, where)
    else:
        kind = base
    reserved = kind.reserved_bytes + (kind.communication_bytes if several and not kind.host_processor else 0)
    device = Device(
        name=name,
        memory_bytes=_whole(item.get("memory_bytes", kind.memory_bytes), f"{where}.memory_bytes"),
        reserved_bytes=_whole(item.get("reserved_bytes", reserved), f"{where}.reserved_bytes"),
        kind=kind.name,
    )
    return device, kind, _whole(item.get("host", 0), f"{where}.host")


def _rule_links(kinds: list[DeviceKind], hosts: list[int], item: Any) -> Links:
    check_keys(item, set(), {"inside", "network"}, "interconnect")
    inside, network = item.get("inside"), item.get("network")
    if inside not in (None, "nvlink", "pcie"):
        raise InputError(f"interconnect.inside: {unknown_name('fabric', inside, ['nvlink', 'pcie'])}")
    if any(not 0 <= host < MAX_DEVICES for host in hosts):
        raise InputError(f"device.host: must be in 0..{MAX_DEVICES - 1}")
    by_host: dict[int, Host] = {}
    for kind, host in zip(kinds, hosts, strict=True):
        if host not in by_host or not kind.host_processor:
            by_host[host] = default_host(kind)
    chosen = None if network is None else parse_network(_text(network, "interconnect.network"))
    table = [by_host.get(number, Host("pcie", parse_network("eth=25g"))) for number in range(max(hosts) + 1)]
    return build_links(kinds, hosts, [Host(inside or host.fabric, chosen or host.network) for host in table])


def _parse_links(item: Any, count: int) -> Links:
    check_keys(item, {"bandwidth_bytes_per_s", "latency_s"}, {"channels"}, "links")
    matrices: list[NDArray[np.float64]] = []
    for key in ("bandwidth_bytes_per_s", "latency_s"):
        rows = item[key]
        if not isinstance(rows, list) or len(rows) != count or any(not isinstance(r, list) or len(r) != count for r in rows):
            raise InputError(f"links.{key}: expected a {count} x {count} matrix")
        values = [[finite_number(value, f"links.{key}[{i}][{j}]") for j, value in enumerate(row)] for i, row in enumerate(rows)]
        if any(value < 0 for row in values for value in row):
            raise InputError(f"links.{key}: numbers must not be negative")
        matrices.append(np.array(values, dtype=np.float64))
    rows = item.get("channels")
    if rows is None:
        return Links(matrices[0], matrices[1])
    if not isinstance(rows, list) or len(rows) != count or any(not isinstance(r, list) or len(r) != count for r in rows):
        raise InputError(f"links.channels: expected a {count} x {count} matrix of lists")
    channels = []
    for i, row in enumerate(rows):
        if any(not isinstance(held, list) for held in row):
            raise InputError(f"links.channels[{i}]: expected lists of channel numbers")
        held_row = tuple(tuple(_whole(c, f"links.channels[{i}]") for c in held) for held in row)
        if any(c < 0 or c >= 1 << 20 for held in held_row for c in held) or any(len(set(h)) != len(h) for h in held_row):
            raise InputError(f"links.channels[{i}]: channel numbers must be distinct and in 0..{(1 << 20) - 1}")
        channels.append(held_row)
    return Links(matrices[0], matrices[1], tuple(channels))


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise InputError(f"{where}: expected a non-empty string")
    return value


def _whole(value: Any, where: str) -> int:
    number = value if isinstance(value, int) and not isinstance(value, bool) else finite_number(value, where)
    if number != int(number) or abs(number) > 1 << 62:
        raise InputError(f"{where}: {show(value)} is not a whole number in range")
    return int(number)


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
