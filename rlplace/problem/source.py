"""The free-form `source` of problem and plan files, with the types of the entries that other rooms read."""

from __future__ import annotations

from typing import Any

import msgspec

from rlplace.records import Count, build


class Costs(msgspec.Struct, frozen=True):
    """The cost table of a problem: where it was read, and its fingerprint."""

    path: str | None = None
    fingerprint: str | None = None


class Source(msgspec.Struct, frozen=True):
    """The entries of a source that are read, out of possibly more: how the problem was made."""

    graph: dict[str, Any] | None = None
    costs: Costs | None = None
    capture: dict[str, Any] | None = None
    op_times: dict[str, dict[str, float]] | None = None
    cluster: str | None = None
    cluster_fingerprint: str | None = None
    graph_fingerprint: str | None = None
    groups: Count | None = None
    split_backward: bool | None = None
    level: str | None = None
    host: str | None = None

    @property
    def table(self) -> Costs:
        """What is known of the cost table."""
        return self.costs or Costs()


def check_source(source: Any, where: str) -> None:
    """Checks the `source` of a parsed file.

    Raises:
        InputError: It is no object, or one of these entries has another type than rlplace writes.
    """
    build(Source, source, f"{where}: source")
