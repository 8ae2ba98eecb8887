"""The blocks, pools and segments behind `rlplace.cost.allocator`.

Names of methods follow c10/cuda/CUDACachingAllocator.cpp, so that the two can be read side by side. A pool's cached blocks are
a sorted list (by size, then address) instead of a tree: they are few.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlplace.cost.allocator import AllocatorOptions

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20
SMALL_SEGMENT = 2 << 20
MIN_LARGE_ALLOC = 10 << 20
ROUND_LARGE = 2 << 20

FREE, USED, UNMAPPED = range(3)
"""State of a block; UNMAPPED: address range of an expandable segment without memory behind it."""

_ADDRESS_SPACE = 1 << 54


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A range of addresses.

    Attributes:
        address, size: First byte and number of bytes.
        pool: 0 the small one, 1 the large one.
        state: `FREE`, `USED` or `UNMAPPED`.
        previous, next: Neighbours in the same segment.
        born: Number of searches of the pool before it was cached.
    """

    address: int
    size: int
    pool: int
    state: int = FREE
    previous: MemoryBlock | None = None
    next: MemoryBlock | None = None
    born: int = 0

    @property
    def whole(self) -> bool:
        """True where the block is a segment of its own."""
        return self.previous is None and self.next is None

    def splice(self, previous: MemoryBlock | None, next: MemoryBlock | None) -> None:
        """Puts it between two neighbours."""
        if previous is not None:
            previous.next = self
        if next is not None:
            next.previous = self
        self.previous, self.next = previous, next


_place = attrgetter("size", "address")
_address = attrgetter("address")


class Heap:
    """State of one device's allocator.

    Attributes:
        allocated: Bytes of used blocks.
        reserved: Bytes of all segments.
        segments: Number of segments.
        retries: How often everything cached was given back.
        cached: Free blocks of the small and of the large pool, by size and address.
    """

    def __init__(self, options: AllocatorOptions, capacity_bytes: int | None) -> None:
        self.allocated = self.reserved = self.segments = self.retries = self._next_address = 0
        self.cached: tuple[list[MemoryBlock], list[MemoryBlock]] = ([], [])
        self._unmapped: tuple[list[MemoryBlock], list[MemoryBlock]] = ([], [])  # by address
        self._searches = [0, 0]
        self._options, self._divisions, self._expandable = options, options.divisions, options.expandable_segments
        self._max_split = math.inf if options.max_split_size_bytes is None else options.max_split_size_bytes
        self._capacity = math.inf if capacity_bytes is None else max(0, capacity_bytes)

    def malloc(self, requested: int) -> MemoryBlock | None:
        """Returns a used block of at least `size` bytes; None: out of memory."""
        size = self._round_size(requested)
        pool = 0 if size <= SMALL_SIZE else 1
        block = self._get_free_block(pool, size)
        if block is None:
            self._garbage_collect_cached_blocks()
            block = self._alloc_block(pool, size)
        if block is None and self._release_available_cached_blocks(pool, size):
            block = self._alloc_block(pool, size)
        if block is None:
            self.retries += 1
            self._release_cached_blocks()
            block = self._alloc_block(pool, size)
        if block is None:
            return None
        if self._should_split(block, size):
            rest, block = block, MemoryBlock(block.address, size, pool)
            block.splice(rest.previous, rest)
            rest.address += size
            rest.size -= size
            self._insert(rest)
        block.state = USED
        self.allocated += block.size
        return block

    def free(self, block: MemoryBlock) -> None:
        """Caches a used block."""
        self.allocated -= block.size
        block.state = FREE
        self._try_merge(block, block.previous, FREE)
        self._try_merge(block, block.next, FREE)
        self._insert(block)

    def _round_size(self, size: int) -> int:
        if size < MIN_BLOCK:
            return MIN_BLOCK
        log = size.bit_length() - 1
        steps = self._divisions[min(max(log - 20, 0), len(self._divisions) - 1)]
        unit = (1 << log) // steps if steps > 1 and size > MIN_BLOCK * steps else MIN_BLOCK
        return -(-size // unit) * unit

    def _lower_bound(self, pool: int, size: float) -> int:
        """Returns position of the first cached block that is not smaller."""
        return bisect_left(self.cached[pool], (size, 0), key=_place)

    def _insert(self, block: MemoryBlock) -> None:
        insort(self.cached[block.pool], block, key=_place)
        block.state, block.born = FREE, self._searches[block.pool]

    def _remove(self, block: MemoryBlock) -> None:
        row = self.cached[block.pool]
        del row[bisect_left(row, _place(block), key=_place)]

    def _try_merge(self, block: MemoryBlock, other: MemoryBlock | None, state: int) -> None:
        """Swallows a neighbour that is free (or unmapped, as `state` says)."""
        if other is None or other.state != state:
            return
        if state == FREE:
            self._remove(other)
        else:
            self._unmapped[other.pool].remove(other)
        if block.previous is other:
            block.address = other.address
            block.splice(other.previous, block.next)
        else:
            block.splice(block.previous, other.next)
        block.size += other.size

    def _get_free_block(self, pool: int, size: int) -> MemoryBlock | None:
        self._searches[pool] += 1
        row, at = self.cached[pool], self._lower_bound(pool, size)
        if at == len(row):
            return None
        if self._expandable:
            while at + 1 < len(row) and _expandable_size(row[at + 1]) < _expandable_size(row[at]):
                at += 1
        block, limit = row[at], self._max_split
        if size < limit <= block.size or (size >= limit and block.size >= size + self._options.max_non_split_rounding_bytes):
            return None
        return row.pop(at)

    def _should_split(self, block: MemoryBlock, size: int) -> bool:
        remaining = block.size - size
        if block.pool == 0 or self._expandable:
            return remaining >= MIN_BLOCK
        return size < self._max_split and remaining > SMALL_SIZE

    def _alloc_block(self, pool: int, size: int) -> MemoryBlock | None:
        if self._expandable:
            return self._try_allocate_expandable_block(pool, size)
        segment = -(-size // ROUND_LARGE) * ROUND_LARGE if size >= MIN_LARGE_ALLOC else self._page(pool)
        if self.reserved + segment > self._capacity:
            return None
        block = MemoryBlock(self._next_address, segment, pool)
        self._next_address += segment
        self.reserved += segment
        self.segments += 1
        return block

    def _page(self, pool: int) -> int:
        return SMALL_SEGMENT if pool == 0 else self._options.large_segment_bytes

    def _release_block(self, block: MemoryBlock) -> None:
        self._remove(block)
        self.reserved -= block.size
        self.segments -= 1

    def _release_available_cached_blocks(self, pool: int, size: int) -> bool:
        """Gives back oversize blocks, but only enough of them for `size`; needs a split limit."""
        limit, row = self._max_split, self.cached[pool]
        if limit == math.inf or self._expandable:
            return False
        wanted = max(size, limit)
        at = self._lower_bound(pool, wanted)
        if at < len(row):
            self._release_block(row[at])
            return True
        released = 0
        while row and released < wanted and row[-1].size >= limit:
            released += row[-1].size
            self._release_block(row[-1])
        return released >= wanted

    def _release_cached_blocks(self) -> None:
        """Gives back every cached block that is a whole segment, and every free page of expandable segments."""
        for pool in (1, 0):
            for block in list(self.cached[pool]):
                if self._expandable:
                    self._unmap_block(block)
                elif block.whole:
                    self._release_block(block)

    def _garbage_collect_cached_blocks(self) -> None:
        """Gives back cached large segments above the threshold, those unused for longest first."""
        threshold = self._options.garbage_collection_threshold
        if threshold == 0.0 or self._capacity == math.inf or self._expandable:
            return
        target = self.reserved - int(threshold * self._capacity)
        reclaimed, now = 0, self._searches[1]
        left = [block for block in self.cached[1] if block.whole]
        age = sum(now - block.born for block in left)
        while reclaimed < target and left:
            oldest = age / len(left)
            due = [block for block in left if now - block.born >= oldest]
            if not due:
                return
            for block in due:
                reclaimed += block.size
                age -= now - block.born
                self._release_block(block)
            left = [block for block in left if now - block.born < oldest]

    def _map_block(self, block: MemoryBlock, size: int) -> bool:
        """Puts whole pages behind the front of an unmapped block; it takes in its free neighbours. False: out of memory."""
        page = self._page(block.pool)
        mapped = -(-size // page) * page
        if self.reserved + mapped > self._capacity:
            return False
        self._unmapped[block.pool].remove(block)
        if mapped < block.size:
            rest = MemoryBlock(block.address + mapped, block.size - mapped, block.pool, UNMAPPED)
            rest.splice(block, block.next)
            insort(self._unmapped[block.pool], rest, key=_address)
            block.size = mapped
        block.state = FREE
        self._try_merge(block, block.previous, FREE)
        self._try_merge(block, block.next, FREE)
        self._insert(block)
        self.reserved += mapped
        return True

    def _unmap_block(self, block: MemoryBlock) -> None:
        """Takes the memory from the whole pages inside a free block."""
        page = self._page(block.pool)
        start, stop = block.address, block.address + block.size
        begin, end = -(-start // page) * page, stop // page * page
        if begin >= end:
            return
        self._remove(block)
        if begin > start:
            before = MemoryBlock(start, begin - start, block.pool)
            before.splice(block.previous, block)
            self._insert(before)
        if stop > end:
            after = MemoryBlock(end, stop - end, block.pool)
            after.splice(block, block.next)
            self._insert(after)
        block.address, block.size, block.state = begin, end - begin, UNMAPPED
        self.reserved -= end - begin
        self._try_merge(block, block.previous, UNMAPPED)
        self._try_merge(block, block.next, UNMAPPED)
        insort(self._unmapped[block.pool], block, key=_address)

    def _find_expandable_block(self, pool: int, size: int) -> MemoryBlock | None:
        """Finds the lowest place in the segment where free and unmapped neighbours add up to `size`."""
        if not self._unmapped[pool]:  # it begins at a whole page
            self._unmapped[pool].append(MemoryBlock((pool + 1) * (self._page(pool) << 34), _ADDRESS_SPACE, pool, UNMAPPED))
            self.segments += 1
        for candidate in self._unmapped[pool]:
            first = candidate
            if candidate.previous is not None and candidate.previous.state == FREE:
                first = candidate.previous
            room = 0
            block: MemoryBlock | None = first
            while room < size and block is not None and block.state != USED:
                room += block.size
                block = block.next
            if room >= size:
                return first
        return None

    def _try_allocate_expandable_block(self, pool: int, size: int) -> MemoryBlock | None:
        block = self._find_expandable_block(pool, size)
        if block is None:
            return None
        if block.state == UNMAPPED and not self._map_block(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            assert following is not None
            if not self._map_block(following, min(size - block.size, following.size)):
                return None
            block = following
        self._remove(block)
        return block


def _expandable_size(block: MemoryBlock) -> int:
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)
