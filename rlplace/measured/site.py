"""`Site`: the hardware and software that trials ran on, so that times of unlike clusters are never mixed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from msgspec import Meta

from rlplace.errors import InputError, show
from rlplace.files import canonical_json, fingerprint, finite_number
from rlplace.measured.trial import Name
from rlplace.records import check

MAX_FACTS = 256
MAX_FACTS_TEXT = 1 << 20
"""Limit for all facts as JSON."""

Fact = str | float | int
_Text = Annotated[str, Meta(max_length=1 << 16)]
_Key = Annotated[Name, Meta(min_length=1)]


def _check_text(kind: Any, value: Any, where: str) -> str:
    check(kind, value, where)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: {show(value)} cannot be written as UTF-8") from None
    return str(value)


@dataclass(frozen=True)
class Site:
    """A cluster as trials see it.

    Attributes:
        name: For people; not part of the fingerprint.
        facts: What step times depend on, by name: text, or finite numbers. Kept in alphabetical order, whole numbers as int.

    Raises:
        InputError: On construction, when a fact is not of that kind.
    """

    name: str
    facts: Mapping[str, Fact]

    def __post_init__(self) -> None:
        _check_text(Name, self.name, "site: name")
        if not isinstance(self.facts, Mapping) or not len(self.facts) <= MAX_FACTS:
            raise InputError(f"site: facts: expected at most {MAX_FACTS} values by name")
        for key in self.facts:
            _check_text(_Key, key, "site: name of a fact")
        object.__setattr__(self, "facts", {key: _fact(self.facts[key], key) for key in sorted(self.facts)})
        if len(canonical_json(dict(self.facts))) > MAX_FACTS_TEXT:
            raise InputError(f"site: facts: more than {MAX_FACTS_TEXT} characters as JSON")

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the canonical JSON of the facts."""
        return fingerprint({"facts": dict(self.facts)})


def site_of(
    ranks_facts: Sequence[Mapping[str, Any]], *, name: str = "", label: str = "", details: Mapping[str, Fact] | None = None
) -> Site:
    """The site of a job, from what its processes say about themselves.

    A fact that all processes agree on stands as it is; one that differs becomes the JSON text of ``[count, value]`` pairs in
    the order of the ranks, because plans number devices by rank. The facts `host` only say which processes share a machine:
    hosts get renamed.

    Args:
        ranks_facts: Per rank, such as `rlplace.runtime.environment.local_facts` gives.
        name: For people.
        label: Tells clusters apart whose facts are the same, such as two of a kind of which one has a slow link.
        details: More facts, of the job as a whole, such as its backend.
    """
    hosts = [str(facts.get("host", "")) for facts in ranks_facts]
    number = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
    merged: dict[str, Fact] = {"processes": len(hosts), "hosts": len(number)}
    if len(number) > 1:
        merged["host_of_process"] = _runs([number[host] for host in hosts])
    for key in dict.fromkeys(key for facts in ranks_facts for key in facts if key != "host"):
        values = [None if key not in facts else _fact(facts[key], f"rank {r}: {key}") for r, facts in enumerate(ranks_facts)]
        merged[key] = _runs(values) if len(set(values)) > 1 else values[0]  # type: ignore[assignment]
    return Site(name, {**merged, **(details or {}), **({"label": label} if label else {})})


def _runs(values: Sequence[Fact | None]) -> str:
    return canonical_json([[len(list(same)), value] for value, same in itertools.groupby(values)])


def _fact(value: Any, key: str) -> Fact:
    if isinstance(value, str):
        return _check_text(_Text, value, f"site: {show(key)}")
    number = finite_number(value, f"site: {show(key)}")
    if abs(number) >= 1 << 53:
        raise InputError(f"site: {show(key)}: {show(value)} is too large to be kept exactly")
    return int(number) if number == int(number) else number
