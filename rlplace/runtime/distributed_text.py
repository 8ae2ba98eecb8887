"""Small texts between the processes of a job, as tensors; nothing is unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def gather_texts(data: dict[str, Any], device: torch.device, group: dist.ProcessGroup | None = None) -> list[dict[str, Any]]:
    """The JSON objects of all ranks, in order, on every rank.

    Args:
        data: What this rank tells.
        device: Where the backend wants its tensors.
        group: The ranks; None: all of the job.
    """
    payload = torch.tensor(list(json.dumps(data).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(payload)], dtype=torch.int64, device=device), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(payload)] = payload
    texts = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(texts, padded.to(device), group=group)
    return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes, strict=True)]


def one_line(error: BaseException, limit: int = 200) -> str:
    """The first sentence of a torch.distributed error, without its stack of native frames."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."


def broadcast_text(text: str | None, device: torch.device) -> str:
    """What rank 0 says, on every rank.

    Args:
        text: On rank 0; not looked at elsewhere.
        device: Where the backend wants its tensors.
    """
    payload = torch.tensor(list((text or "").encode()) if dist.get_rank() == 0 else [], dtype=torch.uint8, device=device)
    size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
    dist.broadcast(size, 0)
    if dist.get_rank() != 0:
        payload = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(payload, 0)
    return bytes(payload.tolist()).decode()
