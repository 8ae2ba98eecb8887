"""Clusters: device kinds, presets, cluster files and detection of this machine's devices."""

from rlplace.cluster.parse import Cluster, parse
from rlplace.cluster.presets import KINDS, DeviceKind, device_kind

__all__ = ["KINDS", "Cluster", "DeviceKind", "device_kind", "parse"]
