"""Weights that pack several, such as those of queries, keys and values, in checkpoints.

The tensor axis cuts each of them for itself, so that a process's part lies in several places of the whole;
`torch.distributed.checkpoint` takes it for one piece. They are written and read whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rlplace.runtime.distributed.state.whole_state import is_packed, own_part, whole_tensor


def with_whole(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same, packed ones whole; all processes that have a part of one call it."""
    return {name: whole_tensor(value) if is_packed(value) else value for name, value in tensors.items()}


@torch.no_grad()
def load_whole(tensors: Mapping[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
    """Fills tensors in place, packed ones by way of the whole.

    Args:
        tensors: By name.
        load: Fills what `torch.distributed.checkpoint` can.
    """
    packed = {name: value for name, value in tensors.items() if is_packed(value)}
    whole = {name: torch.empty(value.shape, dtype=value.dtype, device=value.device) for name, value in packed.items()}
    load({**tensors, **whole})
    for name, value in packed.items():
        value.to_local().copy_(own_part(whole[name], value).to_local())
