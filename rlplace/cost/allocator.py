"""torch's CUDA caching allocator as a pure function of a sequence of allocations and frees.

A process reserves more than its tensors need: the allocator rounds requests, cuts them out of segments, keeps
segments when tensors die, and can only reuse what is free in one piece. `replay` follows c10/cuda/CUDACachingAllocator.cpp of
torch 2.11 to 2.13 on one stream:

1. A request is rounded up to 512 bytes (or to a fraction of the next power of two, `roundup_power2_divisions`).
2. Up to 1 MiB it belongs to the small pool (segments of 2 MiB), else to the large one (20 MiB segments below 10 MiB, from there
   its size rounded up to 2 MiB).
3. The smallest cached block that fits is taken, the lowest address among equals. The rest is split off if it has 512
   bytes (small pool) or more than 1 MiB (large pool). A freed block merges with free neighbours of its segment.
4. Without a fitting block a segment is made. If the device has no room: cached oversize blocks go first (with a split limit),
   then all cached whole segments, then it is out of memory.
5. `max_split_size` and `max_non_split_rounding` keep big blocks whole; `expandable_segments` grows one segment per pool by
   pages (2 MiB small, 20 MiB large); `garbage_collection_threshold` gives back segments that were not used for long.

Departures: one stream (no events, no private pools of CUDA graphs); a new segment's address is above all earlier ones; an
expandable segment's address space has no end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.cost.allocator_heap import USED, Heap, MemoryBlock
from rlplace.errors import InputError, show, unknown_name

MIB = 1 << 20
_MAX_BYTES = 1 << 50
_INTERVALS = 16  # powers of two from 1 MiB to 64 GiB


@dataclass(frozen=True)
class AllocatorOptions:
    """The settings of ``PYTORCH_CUDA_ALLOC_CONF`` that change what is reserved.

    Attributes:
        roundup_power2_divisions: Steps between powers of two that requests are rounded up to; 0 or 1: round to 512 bytes. One
            number, or one per power of two from 1 MiB to 64 GiB.
        max_split_size_bytes: Blocks of this size or more are not split; None: all are.
        max_non_split_rounding_bytes: How much larger than the request a block that may not be split can be.
        large_segment_bytes: Segment for requests from 1 to 10 MiB, and page of the large expandable segment.
        expandable_segments: One growing segment per pool.
        garbage_collection_threshold: Share of the capacity above which unused segments are given back; 0: never.
    """

    roundup_power2_divisions: int | tuple[int, ...] = 0
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    large_segment_bytes: int = 20 * MIB
    expandable_segments: bool = False
    garbage_collection_threshold: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_split_size", "max_non_split_rounding", "large_segment"):
            if (getattr(self, f"{name}_bytes") or 0) > _MAX_BYTES:
                raise InputError(f"{name}: must be at most 2^50 bytes, found {show(getattr(self, f'{name}_bytes'))}")
        divisions = self.divisions
        if len(divisions) != _INTERVALS or any(n < 0 or n & (n - 1) or n > _MAX_BYTES for n in divisions):
            raise InputError(
                f"roundup_power2_divisions: expected a power of two, or {_INTERVALS} of them, "
                f"found {show(self.roundup_power2_divisions)}"
            )
        if self.max_split_size_bytes is not None and self.max_split_size_bytes <= 20 * MIB:
            raise InputError(f"max_split_size: must be above 20 MiB, found {self.max_split_size_bytes} bytes")
        if self.max_non_split_rounding_bytes < 20 * MIB:
            raise InputError(f"max_non_split_rounding: must be 20 MiB or more, found {self.max_non_split_rounding_bytes} bytes")
        if self.large_segment_bytes < 20 * MIB or self.large_segment_bytes % (2 * MIB):
            raise InputError(
                f"large_segment_size: must be a multiple of 2 MiB from 20 MiB up, found {self.large_segment_bytes} bytes"
            )
        if not 0.0 <= self.garbage_collection_threshold < 1.0:
            raise InputError(f"garbage_collection_threshold: must be in 0..1, found {self.garbage_collection_threshold}")

    @property
    def divisions(self) -> tuple[int, ...]:
        """`roundup_power2_divisions`, one number per interval."""
        value = self.roundup_power2_divisions
        return (value,) * _INTERVALS if isinstance(value, int) else tuple(value)

    @staticmethod
    def parse(text: str) -> AllocatorOptions:
        """Reads the text of ``PYTORCH_CUDA_ALLOC_CONF``, for example ``"expandable_segments:True,max_split_size_mb:128"``."""
        values: dict[str, Any] = {}
        for part in filter(str.strip, re.split(r",(?![^\[]*\])", text)):  # commas outside of brackets
            key, colon, value = part.partition(":")
            key, value = key.strip(), value.strip()
            if not colon or not value:
                raise InputError(f"allocator options: expected key:value, found {show(part)}")
            if key not in _PARSERS:
                raise unknown_name("allocator option", key, _PARSERS)
            name, read = _PARSERS[key]
            try:
                values[name] = read(value)
            except ValueError:
                raise InputError(f"allocator option {key}: cannot read {show(value)}") from None
        return AllocatorOptions(**values)


def _truth(text: str) -> bool:
    if text not in ("True", "False", "true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _divisions(text: str) -> int | tuple[int, ...]:
    """Parses ``4`` or ``[64:8,128:2,>:1]``: sizes in MiB, ``>`` for all above the last."""
    if not text.startswith("["):
        return int(text)
    table, last = [0] * _INTERVALS, -1
    for part in text.strip("[]").split(","):
        bound, _, value = part.partition(":")
        if bound.strip() == ">":
            table[last + 1 :] = [int(value)] * (_INTERVALS - last - 1)
            continue
        index = min(int(bound).bit_length() - 1, _INTERVALS - 1)
        if index < 0 or int(bound) & (int(bound) - 1):
            raise ValueError(part)
        if last < 0:
            table[:index] = [int(value)] * index
        table[index], last = int(value), index
    return tuple(table)


_PARSERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "max_split_size_mb": ("max_split_size_bytes", lambda text: int(text) * MIB),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", lambda text: int(text) * MIB),
    "large_segment_size_mb": ("large_segment_bytes", lambda text: int(text) * MIB),
    "expandable_segments": ("expandable_segments", _truth),
    "garbage_collection_threshold": ("garbage_collection_threshold", float),
}


@dataclass(frozen=True, eq=False)
class Replay:
    """The state of the allocator along a sequence of E events.

    Attributes:
        allocated_bytes: int64 [E], bytes of all used blocks after each event (``torch.cuda.memory_allocated``); up to the event
            that ran out of memory.
        reserved_bytes: int64 [E], bytes of all segments (``torch.cuda.memory_reserved``).
        segments: Segments at the end.
        retries: Number of times that all cached blocks were released to make room (``num_alloc_retries``).
        out_of_memory: Number of the event that failed, None when all succeeded.
        blocks: int64 [B, 4] at the end: pool (0 small, 1 large), address, bytes, and 1 where in use; by address.
    """

    allocated_bytes: NDArray[np.int64]
    reserved_bytes: NDArray[np.int64]
    segments: int
    retries: int
    out_of_memory: int | None
    blocks: NDArray[np.int64] = field(repr=False)

    @property
    def allocated_peak_bytes(self) -> int:
        """``torch.cuda.max_memory_allocated``."""
        return int(self.allocated_bytes.max(initial=0))

    @property
    def reserved_peak_bytes(self) -> int:
        """``torch.cuda.max_memory_reserved``."""
        return int(self.reserved_bytes.max(initial=0))


def replay(
    ids: ArrayLike, sizes: ArrayLike, *, options: AllocatorOptions | None = None, capacity_bytes: int | None = None
) -> Replay:
    """Runs allocations and frees through the allocator.

    Args:
        ids: int [E], allocation of each event; a number may be used again after its free.
        sizes: int [E], requested bytes, -1 for a free. Zero bytes take no memory, as in torch.
        options: Settings of the allocator.
        capacity_bytes: Limit on all segments together; None: no limit.

    Raises:
        InputError: An event allocates a live allocation, or frees one that is not live.
    """
    heap = Heap(options or AllocatorOptions(), capacity_bytes)
    number, size = np.asarray(ids), np.asarray(sizes, dtype=np.int64)
    if number.ndim != 1 or number.shape != size.shape:
        raise InputError(f"replay: expected as many ids as sizes, found shapes {number.shape} and {size.shape}")
    if len(size) and (size.min() < -1 or size.max() > _MAX_BYTES):
        raise InputError("replay: sizes must be -1 (free) or from 0 to 2^50 bytes")
    live: dict[int, MemoryBlock | None] = {}  # no block where no memory was asked for
    history, failed = [], None
    for event, (key, wanted) in enumerate(zip(number.tolist(), size.tolist(), strict=True)):
        if (key in live) == (wanted >= 0):
            what = "allocates {}, which is live" if key in live else "frees {}, which is not live"
            raise InputError(f"replay: event {event} {what.format(key)}")
        if wanted < 0:
            block = live.pop(key)
            if block is not None:
                heap.free(block)
        else:
            live[key] = block = heap.malloc(wanted) if wanted else None
            if wanted and block is None:
                failed = event
                break
        history.append((heap.allocated, heap.reserved))
    used = [block for block in live.values() if block is not None]
    rows = [(block.pool, block.address, block.size, block.state == USED) for block in [*heap.cached[0], *heap.cached[1], *used]]
    allocated, reserved = np.array(history, dtype=np.int64).reshape(-1, 2).T
    return Replay(
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        segments=heap.segments,
        retries=heap.retries,
        out_of_memory=failed,
        blocks=np.array(sorted(rows, key=lambda row: row[1]), dtype=np.int64).reshape(-1, 4),
    )
