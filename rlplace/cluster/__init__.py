"""Clusters: device kinds, presets, links, fabrics and their collectives, cluster files, detection of devices."""

from rlplace.cluster.parse import Cluster, parse
from rlplace.cluster.presets import KINDS, DeviceKind, device_kind

__all__ = ["KINDS", "Cluster", "DeviceKind", "device_kind", "parse"]
