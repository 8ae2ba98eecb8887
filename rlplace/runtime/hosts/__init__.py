"""Emulated hosts: real processes on one machine, joined by real links of a chosen speed; docs/runtime/hosts.md."""

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
    "emulated_hosts",
    "launch",
    "parse_cores",
    "parse_rate",
    "parse_rates",
]
