"""Embedding tables that replicas divide: by rows, by columns, or each whole on one of them.

A module sends the ids that its samples have, each once, to the processes that hold their rows, by all-to-all, and runs its own
op on the rows that come back, so that sums, means and paddings are as they were. The gradient of a part is the sum over all
replicas of what each has for its samples, scaled as their average is. A part is a plain parameter, so that optimizers of sparse
gradients take it; checkpoints see it as a DTensor (`rlplace.runtime.state.whole.seen`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from rlplace.model.capture.fake import replaced_forward
from rlplace.plan.strategy import COLUMNS, TABLE
from rlplace.runtime.state.values import Stored, Values, read_stored
from rlplace.runtime.torch_adapter import all_to_all

WEIGHT = "weight"
_TABLES = (nn.Embedding, nn.EmbeddingBag)


def table_reasons(model: nn.Module) -> Iterator[tuple[str, str | None]]:
    """Yields path of every embedding module of a model, and why its table cannot be divided; None where it can."""
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    for path, module in model.named_modules():
        if isinstance(module, _TABLES):
            yield path, _why_whole(module, users)


def _why_whole(module: nn.Embedding | nn.EmbeddingBag, users: Mapping[int, int]) -> str | None:
    if not any(type(module).forward is kind.forward for kind in _TABLES) or replaced_forward(module):
        return "has a forward of its own"
    if module.max_norm is not None or module.scale_grad_by_freq:
        return "has max_norm or scale_grad_by_freq, which count the ids of a whole batch"
    if type(module.weight) is not nn.Parameter or [*module._parameters] != [WEIGHT]:
        return "holds no plain weight, or more than one"
    return "shares its weight with another module" if users[id(module.weight)] > 1 else None


@dataclass(frozen=True)
class _Divided:
    """A table over processes, called in place of the forward of its module."""

    module: Any
    mesh: DeviceMesh
    word: str
    sizes: tuple[int, ...]  # rows of each process; columns of each where these are divided
    width: int  # columns of the whole
    trained: bool
    dtype: torch.dtype  # of the rows that travel

    def __call__(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        pad, ids = self.module.padding_idx, input.flatten()
        wanted, at = (ids if pad is None else torch.cat([ids, ids.new_full((1,), pad)])).unique(return_inverse=True)
        rows = self._rows(wanted)
        if pad is not None:
            at, pad = at[:-1], int(at[-1])
        at = at.view(input.shape)
        if isinstance(self.module, nn.Embedding):
            return functional.embedding(at, rows, pad)
        return self._bags(at, rows, pad, *args, **kwargs)

    def _bags(
        self,
        at: torch.Tensor,
        rows: torch.Tensor,
        pad: int | None,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        how: dict[str, Any] = {"mode": self.module.mode, "include_last_offset": self.module.include_last_offset}
        return functional.embedding_bag(at, rows, offsets, per_sample_weights=per_sample_weights, padding_idx=pad, **how)

    def _rows(self, wanted: torch.Tensor) -> torch.Tensor:
        """Returns the rows of ids, which rise: [ids, width]."""
        group, degree, own = self.mesh.get_group(), self.mesh.size(), self.mesh.get_local_rank()
        count, first, widths = len(wanted), 0, [self.width] * degree
        if self.word == COLUMNS:
            sent, widths = wanted.new_full((degree,), count), [*self.sizes]
            ids = wanted.repeat(degree)
        else:  # every process holds at least as many rows as those behind it
            ids, most = wanted, max(self.sizes)
            holder = wanted.div(most, rounding_mode="floor").clamp(0, degree - 1)  # strange ids raise where they are looked up
            if self.word.startswith(TABLE):
                holder = torch.full_like(wanted, self.sizes.index(most))
            else:
                first = own * most
            sent = torch.bincount(holder, minlength=degree)
        out, back = sent.tolist(), all_to_all(sent, None, None, group).tolist()
        came = all_to_all(ids, back, out, group) - first
        weight = self.module.weight
        if weight is None:  # its backward has to run as that of all others
            found = torch.zeros(0, dtype=self.dtype, device=wanted.device, requires_grad=self.trained)
        else:
            found = functional.embedding(came, weight, sparse=self.module.sparse).to(self.dtype).flatten()
        sizes = [number * width for number, width in zip(out, widths, strict=True)]
        flat = all_to_all(found, sizes, [number * widths[own] for number in back], group)
        if flat.requires_grad:
            flat.register_hook(lambda gradient: gradient / degree)
        if self.word != COLUMNS:
            return flat.view(count, self.width)
        parts = flat.split(sizes)
        return torch.cat([part.view(count, width) for part, width in zip(parts, widths, strict=True)], 1)


def divide_tables(
    root: nn.Module,
    words: Mapping[str, str],
    mesh: DeviceMesh,
    values: Values,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> None:
    """Makes processes hold parts of embedding tables, and exchange ids and rows.

    Args:
        root: The model; its tables, real or on the meta device, are changed in place.
        words: By path of module how its table is divided, see `rlplace.plan.strategy.Stage`.
        mesh: The replicas.
        values: Of tables that have none yet, or other ones.
        device: Where the parts go.
        dtype: Of the rows that travel; None: the table's.
    """
    for path, word in words.items():
        module: Any = root.get_submodule(path)
        whole, own = module.weight, mesh.get_local_rank()
        axis = int(word == COLUMNS)
        if word.startswith(TABLE):
            sizes = [len(whole) * (number == int(word.split()[1])) for number in range(mesh.size())]
        else:
            chunks = [len(part) for part in torch.arange(whole.shape[axis]).chunk(mesh.size())]
            sizes = chunks + [0] * (mesh.size() - len(chunks))
        source = values.get(f"{path}.{WEIGHT}")
        module._parameters[WEIGHT] = None
        if sizes[own] or not word.startswith(TABLE):
            module.register_parameter(WEIGHT, _part(whole, axis, sizes, mesh, source, device))
        held = _Divided(module, mesh, word, tuple(sizes), whole.shape[1], whole.requires_grad, dtype or whole.dtype)
        vars(module)["forward"] = held


def _part(
    whole: nn.Parameter, axis: int, sizes: list[int], mesh: DeviceMesh, source: Any, device: torch.device
) -> nn.Parameter:
    """Returns this process's part of a table, with its values."""
    own = mesh.get_local_rank()
    span = axis, sum(sizes[:own]), sizes[own]
    shape = [*whole.shape]
    shape[axis] = sizes[own]
    made = torch.empty(shape, dtype=whole.dtype, device=device)
    part = nn.Parameter(made, requires_grad=whole.requires_grad)
    seen: torch.Tensor = made
    if sizes[own] < whole.shape[axis]:
        seen = DTensor.from_local(made, mesh, [Shard(axis)], run_check=False, shape=whole.shape, stride=whole.stride())
        part.seen = seen  # type: ignore[attr-defined]
    if isinstance(source, Stored):
        read_stored({source: seen})
    else:
        made.copy_((whole if source is None else source()).detach().narrow(*span))
    return part
