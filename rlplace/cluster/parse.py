"""The CLUSTER syntax of the command line.

``KIND:COUNT`` is one host with COUNT devices, ``KIND:HOSTSxCOUNT`` several such hosts; terms joined by ``+`` are further
hosts. Options follow a term after commas: ``pcie`` or ``nvlink`` choose the links inside its hosts, ``eth=25g`` or ``ib=400g``
their network card, ``mem=512g`` the memory of each host, which offload may fill, ``pod=8@1600g`` an uplink that every 8 hosts
share (`rlplace.cluster.tiers`). A ``cpu`` term beside accelerators adds processors to their hosts, in order, and no hosts of
its own. ``host`` is what this machine has; a name ending in ``.toml`` is a cluster file.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from rlplace.cluster.host_links import HostLinks
from rlplace.cluster.interconnect import NETWORK_EFFICIENCY, Host, parse_network
from rlplace.cluster.links import Device, Links, Wires
from rlplace.cluster.presets import DeviceKind, find_kind, kind_names
from rlplace.cluster.tiers import Tier, parse_tier
from rlplace.errors import InputError, show, unknown_name
from rlplace.files import fingerprint, without_collections
from rlplace.limits import DEVICES, MAX_BYTES
from rlplace.records import check
from rlplace.text import bytes_text


@dataclass(frozen=True, eq=False)
class Cluster:
    """A set of devices with their links.

    Attributes:
        name: For display: the preset text or the name in the file; not part of the fingerprint.
        devices: D devices.
        kinds: D kinds, speeds and sizes of each device; their names are the devices' `kind`.
        links: Communication between the devices.
        hosts: D host numbers; devices of one host share its sockets' buses and its network card.
        text: Text that `parse` reads as this cluster (preset or file path), or None.
        host_memory_bytes: Memory by host number, 0 where it is not known; empty: of no host.
    """

    name: str
    devices: tuple[Device, ...]
    kinds: tuple[DeviceKind, ...]
    links: Wires
    hosts: tuple[int, ...]
    text: str | None = None
    host_memory_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_cluster(self)

    @staticmethod
    def preset(text: str) -> Cluster:
        """Builds a cluster from preset text such as ``"a100-80g:4"`` or ``"h100:2x8,ib=400g"``; see `rlplace.cluster.parse`."""
        return preset(text)

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Reads and checks a cluster file (TOML); see docs/formats.md."""
        from rlplace.cluster.file import load_cluster

        return load_cluster(path)

    @staticmethod
    def detect() -> Cluster:
        """Returns the devices of this machine: its accelerators, else its processor; see `rlplace.cluster.machines`."""
        from rlplace.cluster.machines import detect

        return detect()

    def save(self, path: str | Path) -> None:
        """Writes the cluster as TOML, atomically, with every link written out."""
        from rlplace.cluster.file import save_cluster

        save_cluster(self, path)

    def to_problem_devices(self) -> tuple[tuple[Device, ...], Links]:
        """Returns devices and links as a `Problem` takes them."""
        return self.devices, self.links.whole

    def host_over_bytes(self, used_bytes: Sequence[float]) -> float:
        """Returns bytes over the memory of hosts, summed over them, of what each holds."""
        known = zip(used_bytes, self.host_memory_bytes, strict=False)
        return sum(max(0.0, used - memory) for used, memory in known if memory)

    def short_host(self, devices: Iterable[int], size_bytes: int) -> str | None:
        """Returns which host has no room for so many bytes by a process for each of these devices; None: all have."""
        for host, processes in sorted(Counter(self.hosts[device] for device in devices).items()):
            memory = self.host_memory_bytes[host] if self.host_memory_bytes else 0
            if 0 < memory < processes * size_bytes:
                each, many = bytes_text(size_bytes), f"{processes} process{'es' if processes > 1 else ''}"
                return f"host {host} has {bytes_text(memory)} of memory, and {many} of it would hold {each} each"
        return None

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Groups of hosts that share an uplink, inner ones first."""
        return self.links.tiers if isinstance(self.links, HostLinks) else ()

    @cached_property
    def seats(self) -> NDArray[np.int64]:
        """int64 [D, L + 1], the groups of hosts in which each device lies, outermost first, -1 past the last; then its host."""
        return self.links.seats if isinstance(self.links, HostLinks) else np.array(self.hosts)[:, None]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON of all that matters for pricing; `name` and `text` do not."""
        from rlplace.cluster.file import cluster_to_dict

        return fingerprint(cluster_to_dict(self))


def check_cluster(cluster: Cluster) -> None:
    """Checks every number of a cluster.

    Raises:
        InputError: Names the first device, kind or link that is wrong.
    """
    count = len(cluster.devices)
    if not 1 <= count <= DEVICES:
        raise InputError(f"cluster: {count} devices; a cluster has 1 to {DEVICES}")
    if len(cluster.kinds) != count or len(cluster.hosts) != count:
        raise InputError("cluster: kinds and hosts must be given for every device")
    names = set(map(attrgetter("name"), cluster.devices))
    if len(names) < count or "" in names:
        often = Counter(device.name for device in cluster.devices).most_common(1)[0][0] if len(names) < count else ""
        raise InputError(f"cluster: device {often[:80]!r}: names must be unique and not empty")
    looks = map(attrgetter("kind", "memory_bytes", "reserved_bytes"), cluster.devices)
    alike = dict(
        zip(zip(looks, map(id, cluster.kinds), strict=True), zip(cluster.devices, cluster.kinds, strict=True), strict=True)
    )
    for device, kind in alike.values():
        where = f"cluster: device {device.name[:80]!r}"
        if device.kind != kind.name:
            raise InputError(f"{where}: kind {device.kind!r} does not match {kind.name!r}")
        if device.memory_bytes is None or not 0 < device.memory_bytes <= MAX_BYTES:
            raise InputError(f"{where}: memory_bytes must be positive, found {device.memory_bytes}; a device needs memory")
        if not 0 <= device.reserved_bytes < device.memory_bytes:
            raise InputError(f"{where}: reserved_bytes {device.reserved_bytes} is outside 0..{device.memory_bytes}")
    for kind in {id(kind): kind for kind in cluster.kinds}.values():
        check(DeviceKind, kind, f"cluster: kind {kind.name[:80]!r}")
    if not 0 <= min(cluster.hosts) <= max(cluster.hosts) < DEVICES:
        raise InputError(f"cluster: host numbers must be in 0..{DEVICES - 1}")
    if cluster.host_memory_bytes and len(cluster.host_memory_bytes) != max(cluster.hosts) + 1:
        given = len(cluster.host_memory_bytes)
        raise InputError(
            f"cluster: host_memory_bytes has {given} entries for {max(cluster.hosts) + 1} hosts; give one each, 0 where it is "
            "not known"
        )
    if cluster.links.num_devices != count:
        raise InputError(f"cluster: links are of {cluster.links.num_devices} devices, the cluster has {count}")


_COUNT = re.compile(r"(?:(\d{1,6})x)?(\d{1,6})", re.IGNORECASE)
_MEMORY = re.compile(r"mem=(\d{1,6})g")
_OPTIONS = ("pcie", "nvlink", "eth=25g", "ib=400g", "mem=512g", "pod=8@1600g")


def parse(text: str) -> Cluster:
    """Reads a CLUSTER argument: preset text, ``host`` or a ``*.toml`` path.

    Raises:
        InputError: Malformed text, an unknown kind or a broken file.
        MissingError: ``host`` on a machine without a usable device.
    """
    text = text.strip()
    if text == "host":
        return Cluster.detect()
    if text.endswith(".toml"):
        return Cluster.load(text)
    return preset(text)


def as_cluster(value: Cluster | str) -> Cluster:
    """Returns the cluster itself, or the one that a text names.

    Raises:
        InputError: It is neither.
    """
    if isinstance(value, Cluster):
        return value
    if isinstance(value, str):
        return parse(value)
    raise InputError(f"cluster: expected a Cluster or its text such as 'a100-80g:4', found {show(value)}")


def preset(text: str) -> Cluster:
    """Builds a cluster from preset text; see the module docstring."""
    if not isinstance(text, str):
        raise InputError(f"cluster: expected text such as 'a100-80g:4', found {show(text)}")
    return _preset(text.strip())


@lru_cache(maxsize=8)
def _preset(text: str) -> Cluster:
    terms = [_parse_term(term) for term in text.split("+")]
    total = sum(hosts * count for _, hosts, count, *_ in terms)
    if total > DEVICES:
        raise InputError(f"cluster {text[:60]!r}: {total} devices, the limit is {DEVICES}")
    kinds: list[DeviceKind] = []
    host_of: list[int] = []
    hosts: list[Host] = []
    tiers: list[Tier] = []
    apart = [kind.host_processor and len(terms) > 1 for kind, *_ in terms]  # these belong to the hosts of the accelerators
    for processors in (False, True):
        chosen = [term for term, own in zip(terms, apart, strict=True) if own == processors]
        several = [(kind, count, host) for kind, num_hosts, count, host, _ in chosen for _ in range(num_hosts)]
        starts = itertools.accumulate((term.hosts for term in chosen), initial=0)
        if processors and any(term.tiers for term in chosen):
            raise InputError("cluster: processors beside accelerators add no hosts; give tiers with the accelerators")
        for start, term in zip(starts, chosen, strict=False):
            tiers += [structs.replace(tier, host=start) for tier in term.tiers]
        for number, (kind, count, host) in enumerate(several):
            if number == len(hosts):
                hosts.append(host)
            kinds += [kind] * count
            host_of += [number] * count
    with without_collections():
        return assemble(kinds, host_of, hosts, tiers, name=text, text=text)


def assemble(
    kinds: Sequence[DeviceKind],
    host_of: Sequence[int],
    hosts: Sequence[Host],
    tiers: Sequence[Tier] = (),
    *,
    name: str,
    text: str | None = None,
) -> Cluster:
    """Builds a cluster with the default devices and links of its kinds.

    Accelerators are named ``gpu0``, ``gpu1``, ... and processors ``cpu0``, ...; communication buffers are reserved on every
    accelerator as soon as there are two.
    """
    devices, links = tuple(default_devices(kinds)), HostLinks(kinds, host_of, hosts, tiers)
    memory = tuple(host.memory_bytes for host in hosts[: max(host_of) + 1])
    return Cluster(name, devices, tuple(kinds), links, tuple(host_of), text, memory if any(memory) else ())


def default_devices(kinds: Sequence[DeviceKind]) -> list[Device]:
    """Returns devices of these kinds, with names by number and the memory that their kinds reserve."""
    several = sum(not kind.host_processor for kind in kinds) > 1
    numbers = {"gpu": itertools.count(), "cpu": itertools.count()}
    devices: list[Device] = []
    for _, run in itertools.groupby(kinds, key=id):
        alike = list(run)
        kind, prefix = alike[0], "cpu" if alike[0].host_processor else "gpu"
        memory, name = kind.memory_bytes, kind.name
        reserved = kind.reserved_bytes + (kind.communication_bytes if several and not kind.host_processor else 0)
        names = map(prefix.__add__, map(str, itertools.islice(numbers[prefix], len(alike))))
        devices += map(Device, names, itertools.repeat(memory), itertools.repeat(reserved), itertools.repeat(name))
    return devices


def default_host(kind: DeviceKind) -> Host:
    """Returns a host with the default interconnect of its kind."""
    return Host("nvlink" if kind.nvlink is not None else "pcie", parse_network(kind.network))


class _Term(NamedTuple):
    kind: DeviceKind
    hosts: int
    each: int
    host: Host
    tiers: tuple[Tier, ...]


def _parse_term(term: str) -> _Term:
    head, *options = (part.strip() for part in term.split(","))
    name, colon, count_text = head.partition(":")
    name = name.strip().lower()
    if name == "host":
        raise InputError("cluster: 'host' stands alone; write it without a count, options or further terms")
    kind = find_kind(name)
    if kind is None:
        raise unknown_name("cluster preset", name, [*kind_names(), "host"])
    match = _COUNT.fullmatch(count_text.strip()) if colon else None
    if match is None:
        raise InputError(f"cluster {term[:60]!r}: expected KIND:COUNT or KIND:HOSTSxCOUNT, for example {name}:4 or {name}:2x4")
    hosts, count = int(match[1] or 1), int(match[2])
    if hosts < 1 or count < 1:
        raise InputError(f"cluster {term[:60]!r}: needs at least one host and one device")
    host, groups = default_host(kind), []
    for option in options:
        if "@" in option:
            groups.append(option.lower())
        else:
            host = _apply_option(host, option.lower(), kind)
    tiers = tuple(parse_tier(option, hosts, NETWORK_EFFICIENCY[host.network.technology]) for option in groups)
    return _Term(kind, hosts, count, host, tiers)


def _apply_option(host: Host, option: str, kind: DeviceKind) -> Host:
    if option == "nvlink" and kind.nvlink is None:
        raise InputError(f"cluster: {kind.name} has no NVLink; leave the option out")
    if option in ("pcie", "nvlink"):
        return replace(host, fabric=option)
    if option.startswith(("eth=", "ib=")):
        return replace(host, network=parse_network(option))
    if (size := _MEMORY.fullmatch(option)) is not None:
        return replace(host, memory_bytes=int(size[1]) * 10**9)
    raise unknown_name("cluster option", option, _OPTIONS)
