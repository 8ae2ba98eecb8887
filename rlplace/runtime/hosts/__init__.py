"""Emulated hosts: real processes on one machine, joined by real links of a chosen speed; docs/runtime/hosts.md."""

from rlplace.runtime.hosts.cluster import cluster_of, measure_cluster
from rlplace.runtime.hosts.emulate import Host, Hosts, cleanup, emulated_hosts
from rlplace.runtime.hosts.launch import Job, Process, launch
from rlplace.runtime.hosts.spec import HostsSpec, parse_cores, parse_rate, parse_rates

__all__ = [
    "Host",
    "Hosts",
    "HostsSpec",
    "Job",
    "Process",
    "cleanup",
    "cluster_of",
    "emulated_hosts",
    "launch",
    "measure_cluster",
    "parse_cores",
    "parse_rate",
    "parse_rates",
]
