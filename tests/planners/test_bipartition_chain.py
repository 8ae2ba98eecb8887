"""Bi-partition of chains: examples with proven optimum, brute force, gaps, communication and memory."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.papers.bipartition.chains import like_workers, make_chain
from rlplace.errors import InputError
from rlplace.planners.bipartition.chain import Workers, free_workers
from rlplace.planners.bipartition.solve import bi_partition, kernel_arrays, layer_wise, least_traffic, price_cuts


def chain_of(forward, factor=2.0):
    return make_chain(forward, factor * np.array(forward, dtype=float))


@pytest.mark.parametrize(
    ("forward", "workers", "by_gap"),
    [
        ([1, 1, 4, 1, 1], 2, {0: 18, 1: 14, 2: 13, 3: 12, 4: 12, None: 12}),
        ([1, 1, 4, 1, 1], 3, {0: 12, 1: 10, 2: 10, None: 10}),
        ([2, 1, 2, 1, 3], 2, {0: 15, None: 14}),
        ([3, 1, 1, 1], 2, {0: 9, 1: 9, None: 9}),
    ],
)
def test_examples_with_known_optimum(forward, workers, by_gap):
    chain = chain_of(forward)
    for gap, seconds in by_gap.items():
        cuts = bi_partition(chain, workers, gap)
        assert cuts.bottleneck_s == pytest.approx(seconds, abs=1e-12)
        assert gap is None or cuts.gap <= gap


def test_the_first_example_has_all_forward_on_the_first_worker():
    chain = chain_of([1, 1, 4, 1, 1])
    named = price_cuts((0, 5, 5), (0, 2, 5), kernel_arrays(chain, free_workers(2)))
    assert named.bottleneck_s == 12 and named.gap == 3 and named.displaced == (2, 3, 4)
    assert len(bi_partition(chain, 2).displaced) == 3  # no optimum displaces fewer layers


def plain_cost(chain, workers, i, forward, backward):
    """The cost model once more, layer by layer."""
    count = chain.num_layers
    ahead, back = set(range(*forward)), set(range(*backward))
    load = sum(chain.forward_s[layer] for layer in ahead) + sum(chain.backward_s[layer] for layer in back)
    share = workers.weight_share
    sent = sum(chain.stash_bytes[layer] for layer in ahead - back) + share * sum(chain.weight_bytes[x] for x in back - ahead)
    got = sum(chain.stash_bytes[layer] for layer in back - ahead) + share * sum(chain.weight_bytes[x] for x in ahead - back)
    if ahead:
        sent += chain.activation_bytes[forward[1] - 1] if forward[1] < count else 0
        got += chain.activation_bytes[forward[0] - 1] if forward[0] else 0
    if back:
        sent += chain.gradient_bytes[backward[0] - 1] if backward[0] else 0
        got += chain.gradient_bytes[backward[1] - 1] if backward[1] < count else 0
    held = sum(chain.resident_bytes[x] for x in back) + sum(chain.weight_bytes[x] for x in ahead - back)
    held += workers.in_flight[i] * sum(chain.stash_bytes[x] for x in ahead | back)
    if held > workers.memory_bytes[i]:
        return np.inf
    return max(load, max(sent, got) * workers.seconds_per_byte[i])


def brute_force(chain, workers, gap):
    best = np.inf
    inner = list(itertools.combinations_with_replacement(range(chain.num_layers + 1), workers.count - 1))
    for p, q in itertools.product(inner, inner):
        if max((abs(a - b) for a, b in zip(p, q, strict=True)), default=0) <= gap:
            f, b = (0, *p, chain.num_layers), (0, *q, chain.num_layers)
            best = min(best, max(plain_cost(chain, workers, i, f[i : i + 2], b[i : i + 2]) for i in range(workers.count)))
    return best


numbers = st.integers(0, 9)


@settings(max_examples=60, derandomize=True)
@given(st.data())
def test_equals_brute_force_with_traffic_and_memory(data):
    layers, count = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    column = st.lists(numbers, min_size=layers, max_size=layers)
    forward, backward, activation, gradient, stash, weight = (data.draw(column) for _ in range(6))
    chain = make_chain(
        forward, backward, activation_bytes=activation, gradient_bytes=gradient, stash_bytes=stash, weight_bytes=weight,
        resident_bytes=2 * np.array(weight),
    )  # fmt: skip
    per_worker = st.lists(numbers, min_size=count, max_size=count)
    limit = data.draw(st.sampled_from([np.inf, 120, 60]))
    workers = Workers(
        np.array(data.draw(per_worker)) / 4.0, np.full(count, float(limit)), np.arange(count, 0, -1),
        weight_share=data.draw(st.sampled_from([1.0, 0.25])),
    )  # fmt: skip
    gap = data.draw(st.integers(0, layers))
    optimum = brute_force(chain, workers, gap)
    cuts = bi_partition(chain, workers, gap)
    if cuts is None:
        assert optimum == np.inf
        return
    assert cuts.bottleneck_s == pytest.approx(optimum, rel=1e-12)
    named = price_cuts(cuts.forward, cuts.backward, kernel_arrays(chain, workers))
    assert named.worker_s == pytest.approx(
        [plain_cost(chain, workers, i, cuts.forward[i : i + 2], cuts.backward[i : i + 2]) for i in range(count)]
    )


@settings(max_examples=60, derandomize=True)
@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=8), st.integers(1, 4), st.integers(0, 8)
)  # fmt: skip
def test_compute_only_properties(times, workers, gap):
    forward, backward = np.array(times).T
    chain = make_chain(forward, backward)
    plain, limited, free = (bi_partition(chain, workers, g).bottleneck_s for g in (0, gap, None))
    assert free <= limited <= plain  # never below 1.0 before communication
    # gap 0 is the layer-wise optimum, found here by another programme
    total = np.concatenate([[0.0], np.cumsum(forward + backward)])
    best = total.copy()
    for _ in range(workers - 1):
        best = np.array([min(max(best[k], total[j] - total[k]) for k in range(j + 1)) for j in range(len(total))])
    assert plain == pytest.approx(best[-1], rel=1e-12, abs=1e-300)
    assert plain == layer_wise(chain, workers).bottleneck_s
    # what the gain cannot exceed
    work, most, unit = total[-1], (forward + backward).max(), max(forward.max(), backward.max())
    assert plain <= (work / workers + most) * (1 + 1e-9)
    assert free >= max(work / workers, unit) * (1 - 1e-9)


def test_the_gap_shrinks_on_slow_links():
    chain = make_chain([1, 1, 4, 1, 1], [2, 2, 8, 2, 2], activation_bytes=1e6, weight_bytes=4e6)
    gaps = []
    for bandwidth in (np.inf, 1e7, 1e6, 3e5, 1e5, 1e3):
        workers = like_workers(2, bandwidth_bytes_per_s=bandwidth)
        cuts, plain = bi_partition(chain, workers), layer_wise(chain, workers)
        assert cuts.bottleneck_s <= plain.bottleneck_s
        gaps.append(cuts.gap)
    assert gaps[0] == 3 and gaps[-1] == 0
    assert gaps == sorted(gaps, reverse=True)


def test_a_larger_bound_buys_less_traffic():
    chain = make_chain([4, 4, 4, 4], [4, 4, 4, 4], activation_bytes=[1, 9, 1, 1])
    workers = like_workers(2, bandwidth_bytes_per_s=10.0)
    tight = bi_partition(chain, workers, 0)
    assert tight.forward == (0, 2, 4)
    loose = least_traffic(chain, workers, 1.5 * tight.bottleneck_s, 0)
    assert loose.forward in ((0, 1, 4), (0, 3, 4)) and loose.bottleneck_s == 24


def test_unlike_workers_share_by_speed():
    chain = make_chain(np.tile([1.0, 3.0], (8, 1)), np.tile([1.0, 3.0], (8, 1)))
    assert bi_partition(chain, 2, 0).forward == (0, 6, 8)


def test_memory_limits_leave_no_cuts():
    chain = make_chain([1, 1], [1, 1], weight_bytes=[10, 10])
    assert bi_partition(chain, like_workers(2, memory_bytes=9)) is None
    assert bi_partition(chain, like_workers(2, memory_bytes=10)).bottleneck_s == 2


def test_wrong_arguments():
    chain = chain_of([1, 2])
    for gap in (-1, 1.5, True):
        with pytest.raises(InputError, match="gap"):
            bi_partition(chain, 2, gap)
    with pytest.raises(InputError, match="workers"):
        bi_partition(chain, 0)
    with pytest.raises(InputError, match="times are for 2 workers"):
        bi_partition(make_chain(np.ones((3, 2)), np.ones((3, 2))), 3)
