"""The compiled part of `rlplace.cost.allocator`: blocks, pools and segments of torch's caching allocator as flat arrays.

Everything numba compiles for the allocator lives in this one file, because numba's on-disk cache only notices changes of the
file that holds the compiled function. Names of functions follow c10/cuda/CUDACachingAllocator.cpp, so that the two can be read
side by side. A pool's cached blocks are a sorted array (by size, then address) instead of a tree: they are few.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from rlplace.compiled import entry, inner

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20
SMALL_SEGMENT = 2 << 20
MIN_LARGE_ALLOC = 10 << 20
ROUND_LARGE = 2 << 20

UNUSED, FREE, USED, UNMAPPED = -1, 0, 1, 2
"""State of a block slot; UNMAPPED: address range of an expandable segment without memory behind it."""

DONE, OUT_OF_MEMORY, ALREADY_LIVE, NOT_LIVE = range(4)
"""How a replay ended."""

ALLOCATED, RESERVED, SEGMENTS, RETRIES, NEXT_ADDRESS, NEXT_SLOT, SPARE_SLOTS = range(7)
"""Entries of `Heap.tally`."""

LARGE_SEGMENT, MAX_SPLIT, NON_SPLIT_ROUNDING, EXPANDABLE, CAPACITY = range(5)
"""Entries of `Heap.option`; CAPACITY is -1 without a limit."""

_ADDRESS_SPACE = 1 << 54


class Heap(NamedTuple):
    """State of one device's allocator; pool 0 is the small one, pool 1 the large one."""

    address: Any  # int64 [B]
    size: Any  # int64 [B]
    previous: Any  # int32 [B], neighbour in the same segment, -1 without one
    next: Any  # int32 [B]
    state: Any  # int8 [B]
    pool: Any  # int8 [B]
    born: Any  # int64 [B], searches of the pool when the block was cached
    spare: Any  # int32 [B], stack of slots to use again
    cached: Any  # int32 [2, B], free blocks by (size, address)
    cached_count: Any  # int64 [2]
    unmapped: Any  # int32 [2, B], unmapped blocks by address
    unmapped_count: Any  # int64 [2]
    searches: Any  # int64 [2]
    tally: Any  # int64 [8]
    option: Any  # int64 [5]


@inner
def _new_block(heap, address, size, pool, state):
    if heap.tally[SPARE_SLOTS] > 0:
        heap.tally[SPARE_SLOTS] -= 1
        slot = heap.spare[heap.tally[SPARE_SLOTS]]
    else:
        slot = np.int32(heap.tally[NEXT_SLOT])
        heap.tally[NEXT_SLOT] += 1
    heap.address[slot] = address
    heap.size[slot] = size
    heap.previous[slot] = -1
    heap.next[slot] = -1
    heap.state[slot] = state
    heap.pool[slot] = pool
    return slot


@inner
def _drop_slot(heap, block):
    heap.state[block] = UNUSED
    heap.spare[heap.tally[SPARE_SLOTS]] = block
    heap.tally[SPARE_SLOTS] += 1


@inner
def _lower_bound(heap, pool, size, address):
    """Position of the first cached block that is not smaller than (size, address)."""
    low, high = 0, heap.cached_count[pool]
    row = heap.cached[pool]
    while low < high:
        middle = (low + high) >> 1
        block = row[middle]
        if heap.size[block] < size or (heap.size[block] == size and heap.address[block] < address):
            low = middle + 1
        else:
            high = middle
    return low


@inner
def _insert(heap, block):
    pool = heap.pool[block]
    at = _lower_bound(heap, pool, heap.size[block], heap.address[block])
    row = heap.cached[pool]
    for i in range(heap.cached_count[pool], at, -1):
        row[i] = row[i - 1]
    row[at] = block
    heap.cached_count[pool] += 1
    heap.state[block] = FREE
    heap.born[block] = heap.searches[pool]


@inner
def _remove_at(heap, pool, at):
    row = heap.cached[pool]
    heap.cached_count[pool] -= 1
    for i in range(at, heap.cached_count[pool]):
        row[i] = row[i + 1]


@inner
def _remove(heap, block):
    pool = heap.pool[block]
    _remove_at(heap, pool, _lower_bound(heap, pool, heap.size[block], heap.address[block]))


@inner
def _insert_unmapped(heap, block):
    pool = heap.pool[block]
    row = heap.unmapped[pool]
    at = heap.unmapped_count[pool]
    while at > 0 and heap.address[row[at - 1]] > heap.address[block]:
        row[at] = row[at - 1]
        at -= 1
    row[at] = block
    heap.unmapped_count[pool] += 1
    heap.state[block] = UNMAPPED


@inner
def _remove_unmapped(heap, block):
    pool = heap.pool[block]
    row = heap.unmapped[pool]
    at = 0
    while row[at] != block:
        at += 1
    heap.unmapped_count[pool] -= 1
    for i in range(at, heap.unmapped_count[pool]):
        row[i] = row[i + 1]


@inner
def _splice(heap, block, before, after):
    if before >= 0:
        heap.next[before] = block
    if after >= 0:
        heap.previous[after] = block
    heap.previous[block] = before
    heap.next[block] = after


@inner
def _try_merge(heap, block, other, state):
    """Swallows a neighbour that is free (or unmapped, as `state` says)."""
    if other < 0 or heap.state[other] != state:
        return
    if heap.state[other] == FREE:
        _remove(heap, other)
    else:
        _remove_unmapped(heap, other)
    if heap.previous[block] == other:
        heap.address[block] = heap.address[other]
        _splice(heap, block, heap.previous[other], heap.next[block])
    else:
        _splice(heap, block, heap.previous[block], heap.next[other])
    heap.size[block] += heap.size[other]
    _drop_slot(heap, other)


@inner
def _expandable_size(heap, block):
    after = heap.next[block]
    return heap.size[block] + (heap.size[after] if after >= 0 and heap.state[after] == UNMAPPED else 0)


@inner
def _get_free_block(heap, pool, size):
    heap.searches[pool] += 1
    at = _lower_bound(heap, pool, size, 0)
    last = heap.cached_count[pool]
    if at == last:
        return -1
    row = heap.cached[pool]
    if heap.option[EXPANDABLE]:
        while at + 1 < last and _expandable_size(heap, row[at + 1]) < _expandable_size(heap, row[at]):
            at += 1
    block = row[at]
    limit = heap.option[MAX_SPLIT]
    if size < limit and heap.size[block] >= limit:
        return -1
    if size >= limit and heap.size[block] >= size + heap.option[NON_SPLIT_ROUNDING]:
        return -1
    _remove_at(heap, pool, at)
    return block


@inner
def _fits(heap, size):
    return heap.option[CAPACITY] < 0 or heap.tally[RESERVED] + size <= heap.option[CAPACITY]


@inner
def _page(heap, pool):
    return SMALL_SEGMENT if pool == 0 else heap.option[LARGE_SEGMENT]


@inner
def _map_block(heap, block, size):
    """Puts whole pages behind the front of an unmapped block; it takes in its free neighbours. False: out of memory."""
    page = _page(heap, heap.pool[block])
    mapped = -(-size // page) * page
    if not _fits(heap, mapped):
        return False
    _remove_unmapped(heap, block)
    if mapped < heap.size[block]:
        rest = _new_block(heap, heap.address[block] + mapped, heap.size[block] - mapped, heap.pool[block], UNMAPPED)
        _splice(heap, rest, block, heap.next[block])
        _insert_unmapped(heap, rest)
        heap.size[block] = mapped
    heap.state[block] = FREE
    _try_merge(heap, block, heap.previous[block], FREE)
    _try_merge(heap, block, heap.next[block], FREE)
    _insert(heap, block)
    heap.tally[RESERVED] += mapped
    return True


@inner
def _find_expandable_block(heap, pool, size):
    """Lowest place in the segment where free and unmapped neighbours add up to `size`."""
    if heap.unmapped_count[pool] == 0:
        block = _new_block(heap, (pool + 1) * (_page(heap, pool) << 34), _ADDRESS_SPACE, pool, UNMAPPED)  # whole pages
        _insert_unmapped(heap, block)
        heap.tally[SEGMENTS] += 1
    for at in range(heap.unmapped_count[pool]):
        candidate = heap.unmapped[pool, at]
        before = heap.previous[candidate]
        if before >= 0 and heap.state[before] == FREE:
            candidate = before
        found, block = 0, candidate
        while found < size and block >= 0 and heap.state[block] != USED:
            found += heap.size[block]
            block = heap.next[block]
        if found >= size:
            return candidate
    return -1


@inner
def _try_allocate_expandable_block(heap, pool, size):
    candidate = _find_expandable_block(heap, pool, size)
    if candidate < 0:
        return -1
    if heap.state[candidate] == UNMAPPED and not _map_block(heap, candidate, min(heap.size[candidate], size)):
        return -1
    while heap.size[candidate] < size:
        following = heap.next[candidate]
        if not _map_block(heap, following, min(size - heap.size[candidate], heap.size[following])):
            return -1
        candidate = following
    _remove(heap, candidate)
    return candidate


@inner
def _allocation_size(heap, size):
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_LARGE_ALLOC:
        return heap.option[LARGE_SEGMENT]
    return -(-size // ROUND_LARGE) * ROUND_LARGE


@inner
def _alloc_block(heap, pool, size):
    if heap.option[EXPANDABLE]:
        return _try_allocate_expandable_block(heap, pool, size)
    segment = _allocation_size(heap, size)
    if not _fits(heap, segment):
        return -1
    block = _new_block(heap, heap.tally[NEXT_ADDRESS], segment, pool, FREE)
    heap.tally[NEXT_ADDRESS] += segment
    heap.tally[RESERVED] += segment
    heap.tally[SEGMENTS] += 1
    return block


@inner
def _release_block(heap, block):
    _remove(heap, block)
    heap.tally[RESERVED] -= heap.size[block]
    heap.tally[SEGMENTS] -= 1
    _drop_slot(heap, block)


@inner
def _release_available_cached_blocks(heap, pool, size):
    """With a split limit: gives back oversize blocks, but only enough of them for `size`."""
    limit = heap.option[MAX_SPLIT]
    if limit == np.iinfo(np.int64).max or heap.option[EXPANDABLE]:
        return False
    wanted = max(size, limit)
    at = _lower_bound(heap, pool, wanted, 0)
    if at < heap.cached_count[pool]:
        _release_block(heap, heap.cached[pool, at])
        return True
    released = 0
    while heap.cached_count[pool] > 0 and released < wanted:
        block = heap.cached[pool, heap.cached_count[pool] - 1]
        if heap.size[block] < limit:
            break
        released += heap.size[block]
        _release_block(heap, block)
    return released >= wanted


@inner
def _unmap_block(heap, block):
    """Takes the memory from the whole pages inside a free block."""
    page = _page(heap, heap.pool[block])
    start, stop = heap.address[block], heap.address[block] + heap.size[block]
    begin, end = -(-start // page) * page, stop // page * page
    if begin >= end:
        return
    _remove(heap, block)
    if begin > start:
        before = _new_block(heap, start, begin - start, heap.pool[block], FREE)
        _splice(heap, before, heap.previous[block], block)
        _insert(heap, before)
    if stop > end:
        after = _new_block(heap, end, stop - end, heap.pool[block], FREE)
        _splice(heap, after, block, heap.next[block])
        _insert(heap, after)
    heap.address[block], heap.size[block] = begin, end - begin
    heap.tally[RESERVED] -= end - begin
    heap.state[block] = UNMAPPED
    _try_merge(heap, block, heap.previous[block], UNMAPPED)
    _try_merge(heap, block, heap.next[block], UNMAPPED)
    _insert_unmapped(heap, block)


@inner
def _release_cached_blocks(heap):
    """Gives back every cached block that is a whole segment, and every free page of expandable segments."""
    for pool in (1, 0):
        blocks = heap.cached[pool, : heap.cached_count[pool]].copy()
        for block in blocks:
            if heap.option[EXPANDABLE]:
                _unmap_block(heap, block)
            elif heap.previous[block] < 0 and heap.next[block] < 0:
                _release_block(heap, block)


@inner
def _garbage_collect_cached_blocks(heap, threshold):
    """Above the threshold: gives back cached large segments, those unused for longest first."""
    limit = np.int64(threshold * heap.option[CAPACITY])
    if heap.tally[RESERVED] <= limit or heap.option[EXPANDABLE]:
        return
    target, reclaimed, age, freeable = heap.tally[RESERVED] - limit, 0, 0, 0
    for at in range(heap.cached_count[1]):
        block = heap.cached[1, at]
        if heap.previous[block] < 0 and heap.next[block] < 0:
            age += heap.searches[1] - heap.born[block]
            freeable += 1
    freed = True
    while reclaimed < target and freed and freeable > 0:
        oldest, freed = age / freeable, False
        at = 0
        while at < heap.cached_count[1]:
            block = heap.cached[1, at]
            own = heap.searches[1] - heap.born[block]
            if heap.previous[block] < 0 and heap.next[block] < 0 and own >= oldest:
                freed = True
                reclaimed += heap.size[block]
                age -= own
                freeable -= 1
                _release_block(heap, block)
            else:
                at += 1


@inner
def _should_split(heap, block, size):
    remaining = heap.size[block] - size
    if heap.pool[block] == 0 or heap.option[EXPANDABLE]:
        return remaining >= MIN_BLOCK
    return size < heap.option[MAX_SPLIT] and remaining > SMALL_SIZE


@inner
def _malloc(heap, size, threshold):
    """A used block of at least `size` bytes; -1: out of memory."""
    pool = 0 if size <= SMALL_SIZE else 1
    block = _get_free_block(heap, pool, size)
    if block < 0:
        if threshold > 0.0 and heap.option[CAPACITY] >= 0:
            _garbage_collect_cached_blocks(heap, threshold)
        block = _alloc_block(heap, pool, size)
        if block < 0 and _release_available_cached_blocks(heap, pool, size):
            block = _alloc_block(heap, pool, size)
        if block < 0:
            heap.tally[RETRIES] += 1
            _release_cached_blocks(heap)
            block = _alloc_block(heap, pool, size)
            if block < 0:
                return -1
    if _should_split(heap, block, size):
        rest = block
        block = _new_block(heap, heap.address[rest], size, pool, USED)
        _splice(heap, block, heap.previous[rest], rest)
        heap.address[rest] += size
        heap.size[rest] -= size
        _insert(heap, rest)
    heap.state[block] = USED
    heap.tally[ALLOCATED] += heap.size[block]
    return block


@inner
def _free(heap, block):
    heap.tally[ALLOCATED] -= heap.size[block]
    heap.state[block] = FREE
    _try_merge(heap, block, heap.previous[block], FREE)
    _try_merge(heap, block, heap.next[block], FREE)
    _insert(heap, block)


@inner
def _floor_log2(value):
    result = 0
    while value > 1:
        value >>= 1
        result += 1
    return result


@inner
def _round_size(size, divisions):
    """`divisions` holds the number of steps between powers of two, by interval from 1 MiB to 64 GiB."""
    if size < MIN_BLOCK:
        return MIN_BLOCK
    log = _floor_log2(size)
    steps = divisions[min(max(log - 20, 0), len(divisions) - 1)]
    if steps > 1 and size > MIN_BLOCK * steps:
        step = (1 << log) >> _floor_log2(steps)
        return -(-size // step) * step
    return -(-size // MIN_BLOCK) * MIN_BLOCK


@entry
def run_events(heap, divisions, threshold, ids, sizes, block_of, allocated, reserved):
    """Replays events in order; see `rlplace.cost.allocator.replay`.

    Args:
        heap: Empty state with its options set.
        divisions: int64 [16].
        threshold: Share of the capacity above which unused segments are collected; 0: never.
        ids: int64 [E], allocations by dense number.
        sizes: int64 [E], bytes to allocate, or -1 to free.
        block_of: int32 [A], filled with -1.
        allocated: int64 [E], filled with the bytes in use after each event.
        reserved: int64 [E], filled with the bytes of all segments after each event.

    Returns:
        How it ended, and the number of the event at which it did.
    """
    for event in range(len(ids)):
        item, size = ids[event], sizes[event]
        block = block_of[item]
        if size < 0:
            if block == -1:
                return NOT_LIVE, event
            if block >= 0:
                _free(heap, block)
            block_of[item] = -1
        else:
            if block != -1:
                return ALREADY_LIVE, event
            if size == 0:
                block_of[item] = -2  # no memory is asked for
            else:
                block = _malloc(heap, _round_size(size, divisions), threshold)
                if block < 0:
                    return OUT_OF_MEMORY, event
                block_of[item] = block
        allocated[event] = heap.tally[ALLOCATED]
        reserved[event] = heap.tally[RESERVED]
    return DONE, len(ids)
