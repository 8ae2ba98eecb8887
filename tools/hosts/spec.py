"""The description of emulated hosts: how many, how fast their links, which cores each has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from rlplace.errors import InputError, show, whole_number
from rlplace.files import finite_number

MAX_HOSTS = 32
"""Hosts of one emulation; every host costs a namespace and every pair a traffic class."""

RATE_RANGE_BITS_PER_S = (1e5, 1e11)
BURST_RANGE_BYTES = (2_000, 1 << 26)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)bit(?:/s)?", re.IGNORECASE)

Rates = float | tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class HostsSpec:
    """Hosts on one machine, joined by shaped links.

    One number as `rate_bits_per_s` is the rate of every host's network card, in each direction: all that a host sends shares
    its card, and all that it receives. A matrix gives every ordered pair a link of its own instead, and cards do not limit.

    Attributes:
        hosts: H, 1 to `MAX_HOSTS`.
        rate_bits_per_s: Rate of every card, or H x H by sender and receiver with 0 on the diagonal. Ethernet frames count; TCP
            payload reaches about 95.6 % of it.
        burst_bytes: What may pass at once after a pause; None takes what the rate moves in a millisecond, at least 8 KiB.
            Messages shorter than it are faster than the rate.
        cpus: Processor cores that each host may run on, one core or several for each host; None: any.
    """

    hosts: int
    rate_bits_per_s: Rates = 1e9
    burst_bytes: int | None = None
    cpus: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        count = whole_number(self.hosts, "hosts: hosts", 1, MAX_HOSTS)
        object.__setattr__(self, "rate_bits_per_s", _rates(self.rate_bits_per_s, count))
        if self.burst_bytes is not None:
            whole_number(self.burst_bytes, "hosts: burst_bytes", *BURST_RANGE_BYTES)
        object.__setattr__(self, "cpus", _cores(self.cpus, count))

    @property
    def per_pair(self) -> bool:
        """True where every ordered pair has a link of its own."""
        return isinstance(self.rate_bits_per_s, tuple)

    def rate_between(self, sender: int, receiver: int) -> float:
        """Bits per second from one host to another."""
        rates = self.rate_bits_per_s
        return rates[sender][receiver] if isinstance(rates, tuple) else rates

    def burst_of(self, rate_bits_per_s: float) -> int:
        """Returns bytes of the token bucket of a link of this rate."""
        return self.burst_bytes if self.burst_bytes is not None else max(8 << 10, int(rate_bits_per_s / 8 * 1e-3))


def parse_rate(text: str) -> float:
    """Bits per second of text such as ``"1gbit"``, ``"100 Mbit/s"`` or ``"50kbit"`` (powers of ten).

    Raises:
        InputError: The text is no such rate.
    """
    match = _RATE.fullmatch(text.strip()) if isinstance(text, str) and len(text) < 40 else None
    if match is None:
        raise InputError(f"hosts: rate {show(text)} is not of the form 1gbit, 100mbit or 50kbit")
    return _number(float(match[1]) * _UNITS[match[2].lower()], "rate_bits_per_s", *RATE_RANGE_BITS_PER_S)


def parse_rates(text: str) -> Rates:
    """Returns one rate, or a matrix with rows separated by ``;`` and a ``0`` for a host to itself: ``"0,50mbit;200mbit,0"``.

    Raises:
        InputError: The text is neither.
    """
    if not isinstance(text, str) or not ("," in text or ";" in text):
        return parse_rate(text)
    rows = [row.split(",") for row in text.split(";")]
    return tuple(tuple(0.0 if cell.strip() == "0" else parse_rate(cell) for cell in row) for row in rows)


def parse_cores(text: str) -> tuple[tuple[int, ...], ...]:
    """Returns cores by host: ``"0,1"`` gives host 0 core 0 and host 1 core 1, ``"0-1,2-3"`` gives each two.

    Raises:
        InputError: The text is no such list.
    """
    cores = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise InputError(f"hosts: cores {show(text)} are not of the form 0,1 or 0-1,2-3 (one entry a host)")
        cores.append(tuple(range(int(match[1]), int(match[2] or match[1]) + 1)))
    return tuple(cores)


def _rates(value: Any, count: int) -> Rates:
    if not isinstance(value, (tuple, list)):
        return _number(value, "rate_bits_per_s", *RATE_RANGE_BITS_PER_S)
    if len(value) != count or any(not isinstance(row, (tuple, list)) or len(row) != count for row in value):
        raise InputError(f"hosts: rate_bits_per_s: expected a number or a {count} x {count} matrix, found {show(value)}")
    rows = []
    for i, row in enumerate(value):
        cells = []
        for j, cell in enumerate(row):
            at = f"rate_bits_per_s[{i}][{j}]"
            cells.append(_number(cell, at, *RATE_RANGE_BITS_PER_S) if i != j else _number(cell, at, 0.0, 0.0))
        rows.append(tuple(cells))
    return tuple(rows)


def _cores(value: Any, count: int) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != count:
        raise InputError(f"hosts: cpus: expected one entry for each of {count} hosts, found {show(value)}")
    by_host = []
    for i, item in enumerate(value):
        cores = item if isinstance(item, (tuple, list)) else (item,)
        if not cores:
            raise InputError(f"hosts: cpus[{i}]: a host needs at least one core")
        by_host.append(tuple(sorted({whole_number(core, f"hosts: cpus[{i}]", 0, 4095) for core in cores})))
    return tuple(by_host)


def _number(value: Any, where: str, low: float, high: float) -> float:
    number = finite_number(value, f"hosts: {where}")
    if not low <= number <= high:
        raise InputError(f"hosts: {where}: {number:g} is outside {low:g}..{high:g}")
    return number
