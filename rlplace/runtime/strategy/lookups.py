"""Lookups in divided embedding tables: ids and rows of several tables travel together, by all-to-all.

A process sends the ids that its samples have, each once, to the processes that hold their rows, and runs the module's own op on
the rows that come back, so that sums, means and paddings are as they were. Whatever the number of tables, one exchange tells
how many ids follow, one has the ids, one the rows, and one the gradients of the rows. The gradient of a part is the sum over
all replicas of what each has for its samples, scaled as their average is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from rlplace.errors import InputError
from rlplace.plan.strategy import COLUMNS
from rlplace.runtime.torch_adapter import all_to_all


class FoundRows(NamedTuple):
    """The rows of a lookup."""

    ids: torch.Tensor  # int64 [N]
    rows: torch.Tensor  # float [M, width], each once
    at: torch.Tensor  # int64 [N], the row of each id
    padding: int | None  # the row of the padding


class TableLayout(NamedTuple):
    """The parts of a table that the processes of a mesh hold."""

    word: str
    rows: int  # of the whole
    first: int  # process with its first row, where it is not divided by columns
    held: int  # rows of a full process, likewise
    widths: tuple[int, ...]  # columns that a row has on each process
    trained: bool
    dtype: torch.dtype  # of the rows that travel


class DividedTable:
    """A table over processes, called in place of the forward of its module.

    Args:
        path: Of the module.
        module: With this process's part as its weight, or None.
        layout: Of the table.
        mesh: The replicas.
        device: Of this process.

    Attributes:
        ahead: What was looked up before the forward, in the order of its calls; those are repeated where it is recomputed.
    """

    def __init__(self, path: str, module: Any, layout: TableLayout, mesh: DeviceMesh, device: torch.device) -> None:
        self.path, self.module, self.layout, self.mesh, self.device = path, module, layout, mesh, device
        self.begin()

    def begin(self) -> None:
        """Forgets what was looked up before."""
        self.ahead, self._calls = list[FoundRows](), 0

    def __call__(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.ahead:
            found = self.ahead[self._calls % len(self.ahead)]
            self._calls += 1
            torch.ops.aten._assert_async.msg(
                (input.flatten() == found.ids).all(), f"native: the forward looks up other ids in {self.path} than its record"
            )
        else:
            found = self._alone.fetch([input.flatten()])[0]
        at = found.at.view(input.shape)
        if isinstance(self.module, nn.Embedding):
            return functional.embedding(at, found.rows, found.padding)
        return self._bags(at, found, *args, **kwargs)

    def _bags(
        self,
        at: torch.Tensor,
        found: FoundRows,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        how: dict[str, Any] = {"mode": self.module.mode, "include_last_offset": self.module.include_last_offset}
        how |= {"per_sample_weights": per_sample_weights, "padding_idx": found.padding}
        return functional.embedding_bag(at, found.rows, offsets, **how)

    @cached_property
    def _alone(self) -> RowExchange:
        return RowExchange([self])


class RowExchange:
    """An exchange of the rows of lookups, of one mesh and dtype.

    Args:
        tables: The table of every lookup, those divided by columns last; one may be looked up several times.
    """

    def __init__(self, tables: Sequence[DividedTable]) -> None:
        self._tables, mesh = tables, tables[0].mesh
        self._narrow = sum(one.layout.word != COLUMNS for one in tables)
        self._group, self._degree, self._own = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        held = [one.layout[1:4] for one in tables]
        self._rows, self._first, self._held = torch.tensor(held, device=tables[0].device).T.contiguous()
        self._firsts = [*accumulate((one.layout.rows for one in tables), initial=0)]  # as if all were one long table
        self._base = torch.tensor(self._firsts, device=tables[0].device)
        self._last = self._base[:-1] + torch.tensor([one.module.padding_idx or 0 for one in tables], device=tables[0].device)

    def fetch(self, ids: Sequence[torch.Tensor]) -> list[FoundRows]:
        """Returns the rows of ids, int [N] each; every process of the mesh calls it with lookups of the same tables.

        Raises:
            InputError: An id is no row of its table.
        """
        tables, degree, count = self._tables, self._degree, len(self._tables)
        paddings, each = [one.module.padding_idx for one in tables], [own.long() for own in ids]
        padded = [own if p is None else torch.cat([own, own.new_full((1,), p)]) for own, p in zip(each, paddings, strict=True)]
        values, lengths = torch.cat(padded), [len(own) for own in padded]
        of_value = torch.arange(count, device=values.device)
        of_value = of_value.repeat_interleave(torch.tensor(lengths, device=values.device), output_size=len(values))
        strange = (values < 0) | (values >= self._rows[of_value])
        wanted, at = (values.masked_fill(strange, 0) + self._base[of_value]).unique(return_inverse=True)
        of_wanted = torch.bucketize(wanted, self._base[1:], right=True)
        holder = self._first[of_wanted] + (wanted - self._base[of_wanted]) // self._held[of_wanted]
        edges = torch.searchsorted(wanted, self._base)
        sent = _counted(holder * count + of_wanted, degree * count).view(degree, count)
        sent[:, self._narrow :] = edges.diff()[self._narrow :]
        came = all_to_all(sent.flatten(), None, None, self._group)
        wrong, last = _counted(of_value, count, strange.long()), torch.searchsorted(wanted, self._last)
        known = iter(torch.cat([wrong, edges, last, sent.flatten(), came]).tolist())
        counts = count, count + 1, count, sent.numel(), sent.numel()
        bad, edge, last_at, out, back = ([next(known) for _ in range(n)] for n in counts)
        if (number := next((n for n, times in enumerate(bad) if times), None)) is not None:
            raise InputError(f"native: an id is no row of the table {tables[number].path}, which has {int(self._rows[number])}")
        flat = self._rows_of(wanted, holder, edge[self._narrow], out, back)
        pieces, found, ats = flat.split([*self._items(out)]), list[FoundRows](), at.split(lengths)
        for n, (one, own) in enumerate(zip(tables, each, strict=True)):
            parts = [
                piece.view(rows, width)
                for piece, rows, width in zip(pieces[n::count], out[n::count], one.layout.widths, strict=True)
            ]
            padding = None if paddings[n] is None else last_at[n] - edge[n]
            whole = torch.cat(parts, int(one.layout.word == COLUMNS))
            found.append(FoundRows(own, whole, ats[n][: len(own)] - edge[n], padding))
        return found

    def _rows_of(
        self, wanted: torch.Tensor, holder: torch.Tensor, narrow: int, out: Sequence[int], back: Sequence[int]
    ) -> torch.Tensor:
        """Returns flat the rows that came, by process and table; `out` and `back` are ids sent and given, likewise."""
        count, split, own = len(self._tables), self._narrow, self._own
        message = wanted[:narrow][holder[:narrow].sort(stable=True).indices]
        if split < count:
            sizes = [sum(out[n : n + split]) for n in range(0, len(out), count)]
            message = torch.cat([part for one in message.split(sizes) for part in (one, wanted[narrow:])])
        came, went = ([sum(each[n : n + count]) for n in range(0, len(each), count)] for each in (back, out))
        asked = all_to_all(message, came, went, self._group).split([*back])
        made: dict[int, torch.Tensor] = {}
        for n, one in enumerate(self._tables):
            weight, size = one.module.weight, one.layout
            if weight is not None:
                before = self._firsts[n] + (0 if size.word == COLUMNS else max(own - size.first, 0) * size.held)
                rows = functional.embedding(torch.cat(asked[n::count]) - before, weight, sparse=one.module.sparse)
                made |= zip(range(n, len(back), count), rows.to(size.dtype).split(back[n::count]), strict=True)
        trained = any(one.layout.trained for one in self._tables)  # a backward runs on all processes, or on none
        start = torch.zeros(0, dtype=self._tables[0].layout.dtype, device=wanted.device, requires_grad=trained)
        found = torch.cat([start, *(made[n].flatten() for n in range(len(back)) if n in made)])
        taken, given = (
            [sum(items[n : n + count]) for n in range(0, len(items), count)]
            for items in ([*self._items(out)], [*self._items(back, own)])
        )
        flat: torch.Tensor = all_to_all(found, taken, given, self._group)
        if flat.requires_grad:
            flat.register_hook(lambda gradient: gradient / self._degree)
        return flat

    def _items(self, counts: Sequence[int], holder: int | None = None) -> Iterator[int]:
        """Yields elements of rows by process and table, of those that each process holds, or that one holds for each."""
        for n, rows in enumerate(counts):
            process, table = divmod(n, len(self._tables))
            yield rows * self._tables[table].layout.widths[process if holder is None else holder]


def _counted(places: torch.Tensor, count: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Returns int64 [count], how often each place is named; on no device it waits, as `torch.bincount` does."""
    return places.new_zeros(count).index_add_(0, places, torch.ones_like(places) if weights is None else weights)
