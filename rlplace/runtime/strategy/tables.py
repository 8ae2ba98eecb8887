"""Embedding tables that replicas divide: by rows, by columns, or each whole on one of them.

A part is a plain parameter, so that optimizers of sparse gradients take it; checkpoints see it as a DTensor
(`rlplace.runtime.state.whole.seen`). Lookups exchange ids and rows (`rlplace.runtime.strategy.lookups`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rlplace.model.capture.fake import replaced_forward
from rlplace.plan.strategy import COLUMNS, TABLE
from rlplace.runtime.state.values import Stored, Values, read_stored
from rlplace.runtime.strategy.lookups import DividedTable, TableLayout

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
        first, held = (0, len(whole)) if axis else (sizes.index(max(sizes)), max(sizes))
        widths = tuple(sizes) if axis else (whole.shape[1],) * mesh.size()
        layout = TableLayout(word, len(whole), first, held, widths, whole.requires_grad, dtype or whole.dtype)
        vars(module)["forward"] = DividedTable(path, module, layout, mesh, device)


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
    later = getattr(whole, "deferred", None)
    if isinstance(source, Stored):
        read_stored({source: seen})
    elif later is not None and source == later.make:
        made.copy_(later.make_part(*span))
    else:
        made.copy_((whole if source is None else source()).detach().narrow(*span))
    return part
