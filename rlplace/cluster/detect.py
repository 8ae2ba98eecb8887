"""Finds the devices of this machine."""

from __future__ import annotations

import os
import platform

import numpy as np
from msgspec import structs

from rlplace.cluster.interconnect import Host, parse_network
from rlplace.cluster.parse import Cluster, assemble, default_host
from rlplace.cluster.presets import KINDS, DeviceKind, cpu_kind
from rlplace.errors import MissingError

# Fragments of device names as drivers report them, the more specific first.
_NAMES = (
    ("h200", "h200"), ("h100", "h100"), ("a100", "a100-80g"), ("v100", "v100"), ("mi300x", "mi300x"), ("rtx 4090", "rtx4090"),
    ("rtx 3090", "rtx3090"), ("titan rtx", "titan-rtx"), ("tesla t4", "t4"), ("nvidia t4", "t4"), ("nvidia l4", "l4"),
)  # fmt: skip
_A100_SMALL_BYTES = 60_000_000_000


def detect() -> Cluster:
    """Returns the accelerators that torch sees, with the memory it reports; without any, the processor.

    Raises:
        MissingError: An accelerator of an unknown kind, or no usable device at all.
    """
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() > 0:
        kinds = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            kinds.append(kind_from_name(properties.name, int(properties.total_memory)))
        return _one_host(kinds)
    cores, memory = host_processor()
    if memory <= 0:
        raise MissingError("no accelerator found and the size of host memory is unknown; describe the cluster in a TOML file")
    kind = cpu_kind(cores, memory)
    return assemble([kind], [0], [default_host(kind)], name=f"{platform.node() or 'host'}: cpu", text="host")


def host_processor() -> tuple[int, int]:
    """Returns cores that this process may use, and bytes of host memory (0 where unknown)."""
    return usable_cores(), _host_memory_bytes()


def kind_from_name(name: str, memory_bytes: int) -> DeviceKind:
    """Returns the preset kind of a device name as the driver reports it, with the memory of the card at hand.

    Raises:
        MissingError: No preset describes the device.
    """
    low = name.lower()
    preset = next((kind for fragment, kind in _NAMES if fragment in low), None)
    if preset is None or (preset == "l4" and "l4" not in low.replace("-", " ").split()):
        raise MissingError(
            f"device {name[:80]!r} has no preset (known: {', '.join(sorted(KINDS))}); "
            "describe it in a cluster TOML file as a [[kind]]"
        )
    if preset == "a100-80g" and memory_bytes < _A100_SMALL_BYTES:
        preset = "a100-40g"
    return structs.replace(KINDS[preset], memory_bytes=memory_bytes)


def _one_host(kinds: list[DeviceKind]) -> Cluster:
    import torch

    fabric = "nvlink" if all(kind.nvlink is not None for kind in kinds) else "pcie"
    count = len(kinds)
    if any("pcie" in torch.cuda.get_device_properties(i).name.lower() for i in range(count)):
        fabric = "pcie"
    peers = all(torch.cuda.can_device_access_peer(i, j) for i in range(count) for j in range(count) if i != j)
    if count > 1 and not peers:
        kinds = [structs.replace(kind, pcie_peer=False) for kind in kinds]
        fabric = "pcie"
    name = f"{platform.node() or 'host'}: " + "+".join(
        f"{kind}:{number}" for kind, number in zip(*np.unique([k.name for k in kinds], return_counts=True), strict=True)
    )
    host = Host(fabric, parse_network(kinds[0].network))
    return assemble(kinds, [0] * count, [host], name=name, text="host")


def usable_cores() -> int:
    """Processor cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def _host_memory_bytes() -> int:
    try:
        return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError, AttributeError):
        return 0
