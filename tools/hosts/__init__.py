"""Emulated hosts: real processes on one machine, joined by real links of a chosen speed; tools/hosts/README.md."""

from tools.hosts.cluster import cluster_of, measure_cluster
from tools.hosts.emulate import Host, Hosts, cleanup, emulated_hosts
from tools.hosts.launch import Job, Process, launch
from tools.hosts.spec import HostsSpec, parse_cores, parse_rate, parse_rates

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
