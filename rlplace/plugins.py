"""Planners, device kinds, cost models and policies of other packages, found by entry point.

A package that is installed beside rlplace offers them under the names of `GROUPS` in its own metadata (docs/plugins.md). Names
are listed without importing anything; the code behind a name runs when the name is first used. Built-in names cannot be taken.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distributions, entry_points, version
from types import MappingProxyType
from typing import Any

from rlplace.errors import InputError, show

PLANNERS = "rlplace.planners"
DEVICES = "rlplace.devices"
COSTS = "rlplace.costs"
POLICIES = "rlplace.policies"

GROUPS: Mapping[str, str] = MappingProxyType(
    {PLANNERS: "planner", DEVICES: "device kind", COSTS: "cost model", POLICIES: "policy"}
)
"""Entry point groups, each with the name of the kind of its entries."""


def version_of(package: str) -> str:
    """Returns the version of a package; empty where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True, eq=False)
class Extension:
    """One name that an installed package offers.

    Attributes:
        group: One of `GROUPS`.
        name: The name by which it is used.
        entries: Its entry points; more than one is a clash.
    """

    group: str
    name: str
    entries: tuple[EntryPoint, ...]

    @property
    def distribution(self) -> str:
        """Name and version of the package, of all of them when they clash."""
        return " and ".join(dict.fromkeys(_distribution(entry) for entry in self.entries))

    @property
    def label(self) -> str:
        """Kind, name and package, for messages."""
        return f"{GROUPS[self.group]} {self.name!r} of {self.distribution}"

    def load(self) -> Any:
        """Returns the object behind the name; its module is imported once.

        Raises:
            InputError: Two packages claim the name, or the import fails; names the package.
        """
        if len(self.entries) > 1:
            raise InputError(f"{self.label}: several packages claim this name; uninstall all but one")
        return _load(self.entries[0], self.label)


def extensions(group: str) -> Mapping[str, Extension]:
    """Returns the extensions of a group, by name, in alphabetical order; scanned once a process."""
    return _scan()[group]


def find(group: str, name: Any, taken: Collection[str]) -> Extension | None:
    """Returns the extension behind a name that is not built in; None: there is none."""
    if not isinstance(name, str) or name in taken:
        return None
    _warn_of_taken(group, frozenset(taken))
    return extensions(group).get(name)


def names(group: str, taken: Collection[str]) -> list[str]:
    """Names that extensions add to the built-in ones."""
    _warn_of_taken(group, frozenset(taken))
    return [name for name in extensions(group) if name not in taken]


def refusal(extension: Extension, taken: Collection[str]) -> str | None:
    """Explains why an installed extension cannot be used, as far as that is known without importing it; else None."""
    if extension.name in taken:
        return f"{extension.label}: rlplace has one of that name, which is used; rename it in its package"
    if len(extension.entries) > 1:
        return f"{extension.label}: several packages claim this name; uninstall all but one"
    return None


def forget() -> None:
    """Scans again at the next use, after a package was installed into the running process."""
    for cached in (_scan, _load, _warn_of_taken):
        cached.cache_clear()


def wrong(extension: Extension, what: str) -> InputError:
    """Returns the error for an extension that is not what its group asks for."""
    return InputError(f"{extension.label}: {what}; its package needs to be corrected (docs/plugins.md)")


@functools.cache
def _scan() -> Mapping[str, Mapping[str, Extension]]:
    entries_of: dict[str, dict[str, list[EntryPoint]]] = {group: {} for group in GROUPS}
    for group, entries in entries_of.items():
        for entry in _entries(group):
            same = entries.setdefault(entry.name, [])
            if all((other.value, _distribution(other)) != (entry.value, _distribution(entry)) for other in same):
                same.append(entry)
    return {
        group: {name: Extension(group, name, tuple(entries[name])) for name in sorted(entries)}
        for group, entries in entries_of.items()
    }


def _entries(group: str) -> Iterable[EntryPoint]:
    try:
        return entry_points(group=group)
    except Exception:  # one package with broken metadata is no reason to lose all others
        return [entry for package in distributions() for entry in _entries_of(package) if entry.group == group]


def _entries_of(package: Distribution) -> Iterable[EntryPoint]:
    try:
        return package.entry_points
    except Exception as error:
        name = package.metadata["Name"]
        logging.getLogger("rlplace").warning("entry points of package %s cannot be read (%s); they are left out", name, error)
        return ()


@functools.cache
def _load(entry: EntryPoint, label: str) -> Any:
    try:
        return entry.load()
    except Exception as error:  # another package's code may raise anything
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{label} cannot be imported ({entry.value}): {type(error).__name__}: {reason}; repair or uninstall that package"
        ) from error


@functools.cache
def _warn_of_taken(group: str, taken: frozenset[str]) -> None:
    for extension in extensions(group).values():
        if extension.name in taken:
            logging.getLogger("rlplace").warning("%s", refusal(extension, taken))


def _distribution(entry: EntryPoint) -> str:
    if entry.dist is None:
        return f"an unknown package ({show(entry.value)})"
    return f"{entry.dist.name} {entry.dist.version}"
