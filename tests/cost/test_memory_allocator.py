"""The allocator simulation against sequences worked by hand, invariants, and a slow model written as lists of intervals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.cost.allocator import MIB, AllocatorOptions, replay
from rlplace.errors import InputError

KIB = 1024


def run(text, **options):
    """Replays ``"a=3M b=512K -a"``: allocations and frees by name; the rest are options and the capacity."""
    capacity = options.pop("capacity", None)
    names: dict[str, int] = {}
    ids, sizes = [], []
    for word in text.split():
        name, _, size = word.lstrip("-").partition("=")
        ids.append(names.setdefault(name, len(names)))
        scale = {"K": KIB, "M": MIB}.get(size[-1:], 1)
        sizes.append(-1 if word[0] == "-" else int(size.rstrip("KM")) * scale)
    return replay(ids, sizes, options=AllocatorOptions(**options), capacity_bytes=capacity)


def test_best_fit_takes_the_smallest_block_and_the_lowest_address():
    # Holes of 4, 3 and 3 MiB between used blocks of one 20 MiB segment; the next 3 MiB go to the first hole of 3 MiB.
    result = run("a=4M x=2M b=3M y=2M c=3M z=2M -a -b -c d=3M")
    used = result.blocks[result.blocks[:, 3] == 1]
    start = result.blocks[:, 1].min()
    assert [(row[1] - start) // MIB for row in used.tolist()] == [4, 6, 9, 14]


def test_blocks_above_the_split_limit_stay_whole():
    options = {"max_split_size_bytes": 32 * MIB}
    # A cached block of 100 MiB serves neither a small request nor one that is more than 20 MiB smaller.
    assert run("a=100M -a b=10M", **options).reserved_peak_bytes == 110 * MIB
    assert run("a=100M -a b=60M", **options).reserved_peak_bytes == 160 * MIB
    assert run("a=100M -a b=81M", **options).allocated_bytes[-1] == 100 * MIB
    # Out of room, the oversize block goes first, without giving back the rest.
    result = run("s=12M -s a=100M -a b=60M", capacity=120 * MIB, **options)
    assert result.retries == 0 and result.reserved_bytes[-1] == 72 * MIB


def test_expandable_segments_grow_by_pages():
    result = run("a=5M b=30M -a c=6M", expandable_segments=True)
    # 20 MiB for a; b takes the 15 MiB behind it and one page more; c finds no hole of 6 MiB and takes the end and a page.
    assert result.reserved_bytes.tolist() == [20 * MIB, 40 * MIB, 40 * MIB, 60 * MIB]
    assert run("a=1K b=3M", expandable_segments=True).reserved_peak_bytes == 22 * MIB
    # Free pages are taken back and mapped elsewhere.
    result = run("a=40M b=20M -a c=60M", expandable_segments=True, capacity=80 * MIB)
    assert result.out_of_memory is None and result.retries == 1 and result.reserved_bytes[-1] == 80 * MIB


def test_rounding_to_divisions_of_a_power_of_two():
    assert run("a=1200K", roundup_power2_divisions=4).allocated_bytes[0] == 1280 * KIB
    assert run("a=1024K", roundup_power2_divisions=4).allocated_bytes[0] == 1024 * KIB
    assert run("a=1200K").allocated_bytes[0] == 1200 * KIB


def test_garbage_is_collected_above_the_threshold():
    text = "a=30M -a b=40M -b c=60M"
    plain = run(text, capacity=150 * MIB)
    collected = run(text, capacity=150 * MIB, garbage_collection_threshold=0.4)
    assert plain.reserved_bytes[-1] == 130 * MIB
    assert collected.reserved_bytes[-1] == 100 * MIB and collected.retries == 0  # a, cached for longest, went


def test_options_read_the_text_of_the_environment_variable():
    found = AllocatorOptions.parse("max_split_size_mb:64, expandable_segments:True,garbage_collection_threshold:0.8")
    assert found == AllocatorOptions(max_split_size_bytes=64 * MIB, expandable_segments=True, garbage_collection_threshold=0.8)
    # torch's own test of this option (test/cpp/core/AllocatorConfig).
    table = AllocatorOptions.parse("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]").divisions
    assert [table[n] for n in (5, 6, 7, 8, 9, 10, 11, 12)] == [8, 8, 2, 4, 2, 4, 1, 1]
    for bad in (
        "max_split_size:3",
        "max_split_size_mb:x",
        "expandable_segments",
        "max_split_size_mb:8",
        "roundup_power2_divisions:3",
    ):
        with pytest.raises(InputError):
            AllocatorOptions.parse(bad)


def test_wrong_sequences_are_refused():
    with pytest.raises(InputError, match="event 1 allocates 0, which is live"):
        replay([0, 0], [1, 1])
    with pytest.raises(InputError, match="event 0 frees 7, which is not live"):
        replay([7], [-1])
    with pytest.raises(InputError):
        replay([0, 1], [5])


class Slow:
    """The same rules over plain Python lists: segments are lists of [size, id or None]; no options but the capacity."""

    def __init__(self, capacity):
        self.segments, self.capacity = [], capacity  # (small, blocks)
        self.order = 0

    def reserved(self):
        return sum(size for _, blocks in self.segments for size, _ in blocks)

    def allocated(self):
        return sum(size for _, blocks in self.segments for size, owner in blocks if owner is not None)

    def fit(self, small, size):
        free = [
            (block[0], s, b)
            for s, (kind, blocks) in enumerate(self.segments)
            for b, block in enumerate(blocks)
            if kind == small and block[1] is None and block[0] >= size
        ]
        return min(free)[1:] if free else None

    def malloc(self, owner, size):
        size = max(512, -(-size // 512) * 512)
        small = size <= MIB
        place = self.fit(small, size)
        if place is None:
            segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            if self.reserved() + segment > self.capacity:
                self.segments = [row for row in self.segments if len(row[1]) > 1 or row[1][0][1] is not None]
            if self.reserved() + segment > self.capacity:
                return False
            self.segments.append((small, [[segment, None]]))
            place = len(self.segments) - 1, 0
        blocks = self.segments[place[0]][1]
        left = blocks[place[1]][0] - size
        if left >= 512 if small else left > MIB:
            blocks[place[1] : place[1] + 1] = [[size, owner], [left, None]]
        else:
            blocks[place[1]][1] = owner
        return True

    def free(self, owner):
        for _, blocks in self.segments:
            for block in blocks:
                if block[1] == owner:
                    block[1] = None
            for index in range(len(blocks) - 1, 0, -1):
                if blocks[index][1] is None and blocks[index - 1][1] is None:
                    blocks[index - 1][0] += blocks.pop(index)[0]


SIZES = st.one_of(
    st.integers(0, 2000), st.integers(MIB - 600, MIB + 600), st.integers(MIB, 12 * MIB), st.integers(10 * MIB, 60 * MIB)
)


@st.composite
def sequences(draw):
    """Draws sizes to allocate; some allocations are freed in between, in any order."""
    ids, sizes, live = [], [], []
    for number in range(draw(st.integers(1, 40))):
        ids.append(number)
        sizes.append(draw(SIZES))
        live.append(number)
        for _ in range(draw(st.integers(0, 2))):
            if live:
                ids.append(live.pop(draw(st.integers(0, len(live) - 1))))
                sizes.append(-1)
    return ids, sizes


@pytest.mark.slow
@settings(max_examples=300)
@given(sequences(), st.sampled_from([1 << 40, 64 * MIB, 150 * MIB]))
def test_agrees_with_the_slow_model(sequence, capacity):
    ids, sizes = sequence
    slow = Slow(capacity)
    allocated, reserved, failed = [], [], None
    for event, (number, size) in enumerate(zip(ids, sizes, strict=True)):
        if size < 0:
            slow.free(number)
        elif size and not slow.malloc(number, size):
            failed = event
            break
        allocated.append(slow.allocated())
        reserved.append(slow.reserved())
    result = replay(ids, sizes, capacity_bytes=capacity)
    assert result.out_of_memory == failed
    assert result.allocated_bytes.tolist() == allocated
    assert result.reserved_bytes.tolist() == reserved


OPTIONS = st.builds(
    AllocatorOptions,
    roundup_power2_divisions=st.sampled_from([0, 2, 8]),
    max_split_size_bytes=st.sampled_from([None, 24 * MIB, 40 * MIB]),
    expandable_segments=st.booleans(),
    garbage_collection_threshold=st.sampled_from([0.0, 0.5]),
)


@pytest.mark.slow
@settings(max_examples=300)
@given(sequences(), OPTIONS, st.sampled_from([None, 80 * MIB, 200 * MIB]))
def test_invariants(sequence, options, capacity):
    ids, sizes = sequence
    result = replay(ids, sizes, options=options, capacity_bytes=capacity)
    done = len(result.allocated_bytes)
    live = {}
    for event in range(done):
        if sizes[event] < 0:
            live.pop(ids[event], None)
        elif sizes[event]:
            live[ids[event]] = sizes[event]
        assert sum(live.values()) <= result.allocated_bytes[event] <= result.reserved_bytes[event]
    if capacity is not None:
        assert result.reserved_peak_bytes <= capacity
    used = result.blocks[:, 3] == 1
    assert used.sum() == len(live)
    assert result.blocks[used, 2].sum() == (result.allocated_bytes[-1] if done else 0)
    assert result.blocks[:, 2].sum() == (result.reserved_bytes[-1] if done else 0) or result.out_of_memory is not None
    assert (result.blocks[:, 2] % 512 == 0).all() or options.roundup_power2_divisions
    ends = result.blocks[:-1, 1] + result.blocks[:-1, 2]
    assert (ends <= result.blocks[1:, 1]).all()  # no two blocks overlap
    if result.out_of_memory is None:
        emptied = replay([*ids, *live], [*sizes, *[-1] * len(live)], options=options, capacity_bytes=capacity)
        assert emptied.allocated_bytes[-1] == 0
        if not options.expandable_segments:
            assert len(emptied.blocks) == emptied.segments  # every segment is one block again


def test_numbers_may_be_used_again_and_need_not_be_dense():
    first = replay([10**12, 5, 10**12, 10**12], [600, 600, -1, 700])
    second = replay([0, 1, 0, 0], [600, 600, -1, 700])
    assert np.array_equal(first.allocated_bytes, second.allocated_bytes)


def test_cached_segments_are_given_back_before_memory_runs_out():
    result = run("a=30M -a b=40M", capacity=60 * MIB)
    assert result.out_of_memory is None and result.retries == 1
    assert result.reserved_bytes.tolist() == [30 * MIB, 30 * MIB, 40 * MIB]
    # A segment that is partly in use cannot go back.
    result = run("a=5M b=5M -a c=50M", capacity=60 * MIB)
    assert result.out_of_memory == 3 and len(result.reserved_bytes) == 3
