"""The network of emulated hosts: a namespace for each host and one for the switch, virtual cards, shaped links.

Nothing is made in the machine's own network namespace, so removing the namespaces removes everything. Names tell what a dead
process left behind: ``rlplace-PID-START-SPACE-SERIAL`` and a part are process id, its start in clock ticks since boot (ids are
used again), the process-id namespace that the id counts in, and a number for each emulation of the process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from pathlib import Path

from rlplace.errors import MissingError, RlplaceError
from tools.hosts.commands import ip, ip_batch, tc_batch
from tools.hosts.spec import HostsSpec

CARD = "eth0"
"""The network card inside every host."""

QUEUE_S = 0.05
"""What a link queues before it drops, in seconds of its rate."""

_KILL_S = 5.0


def address_of(host: int) -> str:
    """Address of a host; the same in every emulation, as namespaces do not see each other."""
    return f"10.77.0.{host + 1}"


def make_network(spec: HostsSpec, prefix: str) -> None:
    """Makes namespaces, cards and links; on an error the caller removes what there is.

    Raises:
        MissingError: The kernel lacks what the emulation needs.
    """
    switch = f"{prefix}-switch"
    names = [f"{prefix}-host{host}" for host in range(spec.hosts)]
    try:
        ip_batch([f"netns add {name}" for name in (switch, *names)])
        ip_batch(["link add br0 type bridge", "link set br0 addrgenmode none", "link set br0 up"], switch)
        for host, name in enumerate(names):
            ip_batch(
                [
                    f"link add {CARD} type veth peer name p{host} netns {switch}",
                    "link set lo up",
                    f"link set {CARD} addrgenmode none",
                    f"addr add {address_of(host)}/24 dev {CARD}",
                    f"link set {CARD} up",
                    f"route replace 10.77.0.0/24 dev {CARD} src {address_of(host)} congctl reno",  # bbr stalls on token buckets
                ],
                name,
            )
        ip_batch([f"link set p{host} addrgenmode none master br0 up" for host in range(spec.hosts)], switch)
    except RlplaceError as error:
        raise MissingError(
            f"{error}; emulated hosts need network namespaces, veth and bridge in the kernel, and the right to make them"
        ) from None
    try:
        for host, name in enumerate(names):
            if spec.hosts > 1:
                tc_batch(_pair_links(spec, host) if spec.per_pair else [_card(spec, CARD)], name)
        if spec.hosts > 1 and not spec.per_pair:
            tc_batch([_card(spec, f"p{host}") for host in range(spec.hosts)], switch)
    except RlplaceError as error:
        raise MissingError(f"{error}; links need the queueing disciplines tbf, htb and bfifo in the kernel") from None


def _card(spec: HostsSpec, card: str) -> str:
    """Returns one direction of a card, for all that goes through it."""
    rate = spec.rate_between(0, 1)
    burst = spec.burst_of(rate)
    queue = burst + int(max(QUEUE_S * rate / 8, 128 << 10))
    return f"qdisc add dev {card} root handle 1: tbf rate {rate:.0f}bit burst {burst}b limit {queue}"


def _pair_links(spec: HostsSpec, sender: int) -> list[str]:
    """Returns a link of its own to every other host."""
    lines = [f"qdisc add dev {CARD} root handle 1: htb default 0"]  # 0: address resolution is not shaped
    for receiver in range(spec.hosts):
        if receiver == sender:
            continue
        rate, minor = spec.rate_between(sender, receiver), f"{receiver + 1:x}"
        burst = spec.burst_of(rate)
        queue = int(max(QUEUE_S * rate / 8, 128 << 10))
        lines += [
            f"class add dev {CARD} parent 1: classid 1:{minor} htb rate {rate:.0f}bit ceil {rate:.0f}bit "
            f"burst {burst}b cburst {burst}b quantum 60000",
            f"qdisc add dev {CARD} parent 1:{minor} handle {receiver + 16:x}: bfifo limit {queue}",
            f"filter add dev {CARD} parent 1: protocol ip u32 match ip dst {address_of(receiver)}/32 flowid 1:{minor}",
        ]
    return lines


def remove_network(prefix: str) -> None:
    """Ends every process inside and removes all namespaces of this prefix; those that are gone already are no error."""
    for name in namespaces():
        if name.startswith(prefix + "-"):
            _remove(name)


def remove_stale() -> list[str]:
    """Removes namespaces whose owner is dead and returns their names."""
    stale = [name for name in namespaces() if is_stale(name)]
    for name in stale:
        _remove(name)
    return stale


def namespaces() -> list[str]:
    """Names of all network namespaces."""
    try:
        return os.listdir("/run/netns")
    except OSError:
        return []


def _remove(name: str) -> None:
    """Ends what runs in a namespace and removes it; somebody else may be doing the same."""
    end = time.monotonic() + _KILL_S
    while pids := _pids(name):
        if time.monotonic() > end:
            break
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    try:
        ip("netns", "del", name)
    except RlplaceError:
        if name in namespaces():
            raise


def _pids(name: str) -> list[int]:
    try:
        return [int(word) for word in ip("netns", "pids", name).split()]
    except RlplaceError:
        if name in namespaces():
            raise
        return []


_NAME = re.compile(r"rlplace-(\d+)-(\d+)-([0-9a-f]+)-(\d+)-(?:switch|host\d+)")
_serial = itertools.count()


def new_prefix() -> str:
    """Returns a prefix that no other emulation on this machine uses; parts are ``PREFIX-switch`` and ``PREFIX-hostN``."""
    return f"rlplace-{os.getpid()}-{_start_ticks(os.getpid())}-{_space():x}-{next(_serial)}"


def is_stale(name: str) -> bool:
    """Says whether the name is one of ours whose process is gone; names of other process-id namespaces cannot be told."""
    match = _NAME.fullmatch(name)
    if match is None or int(match[3], 16) != _space():
        return False
    return _start_ticks(int(match[1])) != int(match[2])


def _space() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_ticks(pid: int) -> int | None:
    """Returns field 22 of /proc/PID/stat; None where the process does not exist or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold spaces and brackets
    return None if fields[0] in ("Z", "X") else int(fields[19])
