"""The search for a strategy: parts against exhaustive ones, what fits, what is refused, and the same answer every time."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.budget import Budget
from rlplace.cluster import Cluster
from rlplace.errors import InfeasibleError, InputError
from rlplace.strategy.blocks.price import PricedBlocks
from rlplace.strategy.drafts import Devices, Draft, Mesh, kind_of
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.by_kind import starts_by_kind
from rlplace.strategy.search.cuts import balanced_bounds
from rlplace.strategy.search.fit import fitted, steps
from rlplace.strategy.search.listing import Listed, _Queue, listed
from rlplace.strategy.search.moves import Moves
from rlplace.strategy.search.search import search
from rlplace.strategy.search.shapes import Degrees, divisions
from rlplace.strategy.search.space import Space
from rlplace.strategy.search.tries import OutOfBudgetError, SearchProblem, Tries
from rlplace.strategy.search.uniform import Option, UniformOptions
from tests.captured import captured
from tests.strategy.brute_force import quicker, small_question
from tests.strategy.random_costs import random_costs


def with_memory(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with so much of its memory."""
    devices = tuple(
        dataclasses.replace(d, memory_bytes=int((d.memory_bytes or 0) * factor), reserved_bytes=0) for d in cluster.devices
    )
    return dataclasses.replace(cluster, devices=devices)


@cache
def question(seed: int, text: str = "a100-80g:4", factor: float = 1.0, batch: int = 8, space: str = "") -> SearchProblem:
    cluster = with_memory(Cluster.preset(text), factor)
    costs = random_costs(np.random.default_rng(seed), cluster, 5)
    return SearchProblem(DraftEvaluator(costs, cluster), batch, Space.parse(space))


@settings(max_examples=200)
@given(st.data())
def test_balanced_stages_are_the_best_of_all_cuts(data: st.DataObject) -> None:
    blocks, rows = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 3))
    parts = data.draw(st.integers(1, min(blocks, 4)))
    row = data.draw(st.lists(st.integers(0, rows - 1), min_size=parts, max_size=parts))
    seconds = np.array(
        data.draw(st.lists(st.lists(st.integers(1, 30), min_size=blocks, max_size=blocks), min_size=rows, max_size=rows))
    )

    def slowest(bounds: tuple[int, ...]) -> float:
        return max(float(seconds[r, a:b].sum()) for r, a, b in zip(row, bounds, bounds[1:], strict=False))

    found = balanced_bounds(seconds.astype(np.float64), row)
    assert found[0] == 0 and found[-1] == blocks and all(a < b for a, b in itertools.pairwise(found))
    every = [(0, *inner, blocks) for inner in itertools.combinations(range(1, blocks), parts - 1)]
    assert slowest(found) == min(map(slowest, every))


def all_drafts(asked: SearchProblem) -> list[Draft]:
    balance = asked.balance
    return [option.draft(balance) for option in UniformOptions(asked).every()]


@pytest.mark.parametrize("text", ["a100-80g:4", "a100-80g:2+t4:2", "h100:2x4,ib=400g"])
def test_bounds_of_uniform_strategies_hold(text: str) -> None:
    asked = question(1, text)
    balance = asked.balance
    checked = 0
    for option in list(UniformOptions(asked).every())[::4]:
        draft = option.draft(balance)
        assert draft.batch == asked.batch and kind_of(draft) == option.shape.kind
        tried = Tries(asked).score(draft)
        assert tried.step_s >= option.bound_s * (1 - 1e-9)
        checked += np.isfinite(tried.step_s)
    assert checked > 50


@pytest.mark.parametrize("text", ["h100:16x2", "h100:16x2,region=8@20g@1ms"])
def test_estimates_of_uniform_strategies_are_near(text: str) -> None:
    cluster = with_memory(Cluster.preset(text), 1.0)
    costs = random_costs(np.random.default_rng(0), cluster, 24)
    asked = SearchProblem(DraftEvaluator(costs, cluster), 64, Space.parse("tensor=1 context=1 pipeline=4,8,16"))
    options = [one for one in UniformOptions(asked).every() if len(one.shape.devices) == 32 and one.short_bytes <= 0.0]
    options = [options[number] for number in np.random.default_rng(0).permutation(len(options))[:60]]
    taken_s = [Tries(asked).score(one.draft(asked.balance)).step_s for one in options]
    errors = np.log([one.expected_s / step_s for one, step_s in zip(options, taken_s, strict=True)])
    assert np.median(np.abs(errors)) < 0.15


def test_starts_by_kind_have_places_of_one_kind() -> None:
    asked = question(1, "a100-80g:2x4+t4:2x4,ib=400g", batch=32)
    kinds = [kind.name for kind in asked.cluster.kinds]
    drafts = list(starts_by_kind(asked))
    shapes = set()
    for draft in drafts:
        own = [{kinds[device] for device in place.devices} for place in draft.places]
        assert draft.batch == 32 and all(len(one) == 1 for one in own)
        assert len({place.data_degree for place in draft.places}) == 1
        assert np.isfinite(Tries(asked).score(draft).step_s)
        shapes.add(tuple(len(place.devices) for place in draft.places))
    assert any(len(set(widths)) > 1 for widths in shapes)  # the kinds differ in their tensor degree
    assert len(shapes) > 4
    assert not list(starts_by_kind(question(1, "a100-80g:4")))
    only = question(1, "a100-80g:2x4+t4:2x4,ib=400g", batch=32, space="tensor=2 schedule=1f1b")
    assert {place.tensor for draft in starts_by_kind(only) for place in draft.places} == {2}
    assert {draft.schedule for draft in starts_by_kind(only)} == {"1f1b"}


def test_a_listing_that_time_cuts_is_listed_later() -> None:
    """What cuts no layer on all devices comes first, at any rate, and where that does not fit the largest tensor groups."""
    asked = question(1, "a100-80g:2+t4:2")
    whole, cut = listed(asked), listed(asked, seconds=0.0)
    assert whole.complete and not cut.complete
    assert {option.shape.axes.tensor for option in cut.first} == {1}
    assert {len(option.shape.devices) for option in cut.first} == {4}
    tight = listed(question(1, "a100-80g:2+t4:2", factor=1e-4), seconds=0.0)
    assert {option.shape.axes.tensor for option in tight.first} == {1, 2}
    alone = listed(question(1, "a100-80g:2+t4:2", factor=1e-4), seconds=0.0, in_time=True).first
    assert len({(option.shape.places, option.shape.axes.tensor) for option in alone}) == 1

    def every(found: Listed) -> set[Option]:
        return {*found.first, *itertools.chain.from_iterable(found.rest())}

    assert every(whole) == every(cut) == set(UniformOptions(asked).every())


def test_groups_wait_where_others_of_their_devices_took_longer_than_promised() -> None:
    """The first set promises 1 s and takes 4, the second promises 2 s and keeps it."""
    promised_s, taken_s = {0: 1.0, 1: 2.0}, {0: 4.0, 1: 2.0}

    class Fixed:
        def step_s(self, devices: tuple[int, ...], degrees: Degrees, *, free: bool = False) -> float:
            return promised_s[devices[0]] * (1.0 + 0.01 * degrees.places)

    forms = {Degrees(places, 1, 1, 1, 1): ((Mesh(()),),) for places in (2, 3, 4, 5)}
    sets = {Devices([number]): forms for number in (0, 1)}
    queue, order = _Queue(sets, Fixed(), Budget()), list[int]()  # type: ignore[arg-type]
    for number in queue:
        own = queue.groups[number].devices[0]
        order.append(own)
        queue.learn(number, taken_s[own] * (1.0 + 0.01 * queue.groups[number].degrees.places))
    assert order[0] == 0 and sorted(order) == [0] * 4 + [1] * 4
    assert order.index(1) == 1, order  # (1 + 3 / 2) s are expected of the first set after one group, 2 s of the other
    assert order[1:5] == [1] * 4


def test_searches_inside_a_search_end_with_their_clock() -> None:
    """The search itself goes on where nothing fits so far; one for a part of the devices does not."""
    asked = question(1, "a100-80g:4", factor=1e-6)
    tries = Tries(asked, time_limit_s=0.0)
    assert tries.left() and not tries.within(asked, 0.5).left()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["a100-80g:4", "a100-80g:2+t4:2"])
@pytest.mark.parametrize("seed", range(3))
def test_the_answer_is_no_worse_than_any_uniform_strategy(text: str, seed: int) -> None:
    asked = question(seed, text, factor=0.5)
    tries = Tries(asked)
    best = min((t.step_s for draft in all_drafts(asked) if (t := fitted(tries, draft)) is not None), default=np.inf)
    answer = search(asked)
    assert answer.complete
    assert answer.ranked[0].step_s <= best
    assert [tried.step_s for tried in answer.ranked] == sorted(tried.step_s for tried in answer.ranked)
    for tried in answer.ranked[:20]:
        said = asked.scores.evaluate(tried.draft)
        assert said.feasible and said.step_time_s == pytest.approx(tried.step_s, rel=1e-12)
        assert tried.draft.strategy(asked.costs.names).batch == asked.batch  # a strategy that contradicts itself is refused


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flat", "tiered", "seed"), [("h100:8x2", "h100:8x2,pod=2@25g", 2), ("h100:4x4", "h100:4x4,pod=2@50g@1ms", 1)]
)
def test_on_tiers_the_answer_is_no_worse_than_that_for_one_network(flat: str, tiered: str, seed: int) -> None:
    asked = question(seed, tiered, 0.05, batch=32)
    other = search(question(seed, flat, 0.05, batch=32), calls=300).ranked[0]
    answer = search(asked, calls=300).ranked[0]
    assert other.step_s < answer.step_s <= Tries(asked).score(other.draft).step_s


def test_parameters_may_be_shared_over_the_hosts_of_a_group() -> None:
    def shared(text: str) -> set[int]:
        found = divisions(question(1, text), tuple(range(32)))
        plain = (forms for degrees, forms in found.items() if degrees[:3] == (1, 1, 1))
        return {mesh.shard for forms in plain for form in forms for mesh in form}

    assert shared("h100:16x2") == {1, 2, 32} and shared("h100:16x2,pod=4@25g,region=8@9g") == {1, 2, 8, 16, 32}


def test_a_few_of_every_family_come_first() -> None:
    """Tensor and pipeline parallelism together on 64 devices, though thousands of others have lower bounds."""
    asked = question(1, "h100:8x8,ib=400g", batch=128)
    assert "pipeline x tensor parallel x fully sharded" in search(asked, calls=150).of_kinds


def test_an_engine_is_asked_once_for_what_it_cannot_tell_apart() -> None:
    """Which blocks of a stage recompute makes no difference to it; whether some do, does."""
    seen: list[Draft] = []
    tries = Tries(dataclasses.replace(question(1), why_not=lambda draft: seen.append(draft)))
    bare = next(draft for draft in all_drafts(tries.problem) if draft.stages == 1)
    seen.clear()
    for recompute in ((0, 0, 0, 0, 0), (2, 0, 0, 0, 0), (0, 2, 0, 0, 0), (2, 2, 2, 2, 2)):
        tries.refused(dataclasses.replace(bare, recompute=bytes(recompute)))
    assert [draft.recompute.count(2) for draft in seen] == [0, 1, 5]


def test_calls_make_the_answer_exact() -> None:
    one, other = (search(question(2), calls=30) for _ in range(2))
    assert one == other
    assert one.calls == 30 and not one.complete
    assert search(question(2)).ranked[0].step_s <= one.ranked[0].step_s


@pytest.mark.parametrize("seed", range(4))
def test_no_single_step_less_would_fit(seed: int) -> None:
    roomy = question(seed, space="pipeline=1 tensor=1 offload=none")
    draft = next(draft for draft in all_drafts(roomy) if len(draft.devices) == 4)
    need = max(roomy.scores.evaluate(draft).peak_memory_bytes)
    least = max(roomy.scores.evaluate(dataclasses.replace(draft, recompute=b"\2" * 5)).peak_memory_bytes)
    memory = roomy.cluster.devices[0].memory_bytes
    assert memory is not None and least < need
    tight = question(seed, factor=(least + 0.4 * (need - least)) / memory, space="pipeline=1 tensor=1 offload=none")
    tries = Tries(tight)
    tried = fitted(tries, draft)
    assert tried is not None and tried.fits
    ladder = steps(tight, draft, 0, [(0, 0), (1, 0), (2, 0)])
    fewer = list(itertools.accumulate(ladder, lambda now, step: {**now, step.block: step.choice[0]}, initial={}))
    drafts = [dataclasses.replace(draft, recompute=bytes(now.get(block, 0) for block in range(5))) for now in fewer]
    at = [one.recompute for one in drafts].index(tried.draft.recompute)
    assert at > 0 and not any(tries.score(one).fits for one in drafts[:at])


def between(part: float, low: Draft, high: Draft) -> SearchProblem:
    """The question with memory between the peaks of two drafts, this part of the way from the lower one."""
    asked = question(0)
    peaks = [max(asked.scores.evaluate(one).peak_memory_bytes) for one in (low, high)]
    memory = asked.cluster.devices[0].memory_bytes
    assert memory is not None and peaks[0] < peaks[1]
    return question(0, factor=(peaks[0] + part * (peaks[1] - peaks[0])) / memory)


def test_what_cannot_be_offloaded_is_recomputed_all_the_same() -> None:
    draft = next(draft for draft in all_drafts(question(0)) if len(draft.devices) == 4 and draft.stages == 1)
    tight = between(0.5, dataclasses.replace(draft, recompute=b"\2" * 5), draft)
    no_offload = dataclasses.replace(tight, why_not=lambda draft: "no offload" if any(draft.offload) else None)
    tried = fitted(Tries(no_offload), draft)
    assert tried is not None and any(tried.draft.recompute) and not any(tried.draft.offload)


def test_a_rung_that_cannot_run_is_left_out_of_the_ladder() -> None:
    draft = next(draft for draft in all_drafts(question(0)) if draft.stages == 1 and draft.places[0].shard == 4)
    full = dataclasses.replace(draft, recompute=b"\2" * 5)
    tight = between(0.7, dataclasses.replace(full, offload=b"\2" * 5), full)
    no_state = dataclasses.replace(tight, why_not=lambda draft: "no optimizer offload" if 1 in draft.offload else None)
    tried = fitted(Tries(no_state), draft)
    assert tried is not None and tried.fits
    assert 0 < sum(how == 2 for how in tried.draft.offload) < 5  # some blocks, not all of them


def test_neighbours_are_strategies_of_the_same_batch() -> None:
    asked = dataclasses.replace(
        question(0, "a100-80g:2+t4:2", batch=16), why_not=lambda draft: "one only" if draft.beside else None
    )
    moves = Moves(asked)
    start = next(tried.draft for tried in search(asked, calls=40).ranked if tried.draft.stages > 1)
    near = list(moves.neighbours(start, asked.scores.evaluate(start)))
    assert len(set(near)) > 20
    for draft in near:
        assert draft.strategy(asked.costs.names).batch == 16  # one that contradicts itself is refused


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    with pytest.raises(
        InfeasibleError, match=r"no strategy fits: the nearest \(.*\) is too large by .* on 4 devices together"
    ) as info:
        search(question(0, factor=1e-5, space="offload=none"))
    assert info.value.short_bytes > 0


@pytest.mark.parametrize(
    ("space", "batch", "reason"),
    [
        ("pipeline=7", 8, "it leaves no strategy for a batch of 8; relax pipeline=7 first"),
        ("tensor=16", 8, "relax tensor=16 first"),
        ("microbatch=3", 8, "relax microbatch=3 first"),
        ("recompute=full tensor=3 shard=1", 8, "relax shard=1 tensor=3 recompute=full"),
        ("replicate=4 shard=1 tensor=1 pipeline=1", 3, "relax replicate=4 first"),
        ("replicate=2 shard=2 pipeline=1", 3, "batch of 3; relax replicate=2 first, or use a batch of 4"),
    ],
)
def test_a_space_that_leaves_nothing_says_what_to_relax(space: str, batch: int, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        search(question(0, batch=batch, space=space))


def test_one_captured_size_names_the_batches_that_there_are() -> None:
    cluster = Cluster.preset("cpu:2")
    scores = DraftEvaluator(PricedBlocks(captured("vit", 6), cluster), cluster)
    for batch, space in ((8, ""), (7, "tensor=1"), (4, "microbatch=4")):
        with pytest.raises(InputError, match=r"captured with 6 samples only, .* a batch of 6 or a multiple of it, or place"):
            search(SearchProblem(scores, batch, Space.parse(space)))
    assert search(SearchProblem(scores, 12), calls=20).ranked


def test_what_cannot_run_is_left_out() -> None:
    asked = dataclasses.replace(question(0), why_not=lambda draft: "no pipelines here" if draft.stages > 1 else None)
    answer = search(asked)
    assert all(tried.draft.stages == 1 for tried in answer.ranked)
    assert answer.reasons["no pipelines here"] > 0
    with pytest.raises(InputError, match="no strategy can run: nothing runs here"):
        search(dataclasses.replace(asked, why_not=lambda draft: "nothing runs here"))


def test_kinds_are_named_after_what_they_have() -> None:
    answer = search(question(0))
    assert {"one device", "data parallel", "fully sharded", "tensor parallel", "pipeline"} <= set(answer.of_kinds)
    for kind, tried in answer.of_kinds.items():
        assert kind_of(tried.draft) == kind
        same = [other.step_s for other in answer.ranked if kind_of(other.draft) == kind]
        assert not same or tried.step_s == min(same)


def test_the_budget_ends_it() -> None:
    tries = Tries(question(0), calls=1)
    first, second = all_drafts(question(0))[:2]
    tries.score(first)
    tries.score(first)  # known: costs nothing
    with pytest.raises(OutOfBudgetError):
        tries.score(second)


@pytest.mark.parametrize("seed", range(4))
def test_few_calls_find_what_fits_a_tight_cluster(seed: int) -> None:
    """Room for little more than level 3 with everything recomputed and in the host: the first calls go there."""
    roomy = question(seed, "a100-80g:8")
    costs, everywhere = roomy.costs, Mesh(tuple(range(8)), shard=8, sharding=3)
    draft = Draft((0, 5), (everywhere,), (0,), bytes([2] * 5), bytes([2] * 5), (1,), (1,))
    least = max(roomy.scores.evaluate(draft).peak_memory_bytes)
    devices = tuple(dataclasses.replace(d, memory_bytes=int(1.02 * least)) for d in roomy.cluster.devices)
    cluster = dataclasses.replace(roomy.cluster, devices=devices)
    asked = SearchProblem(DraftEvaluator(costs, cluster), 8, Space())
    assert search(asked, calls=5).ranked[0].fits


# The first seven need exchanges of three blocks' choices, choices kept over a move, chunks where places merge, wider tensor
# groups, a kind of device between two halves of another.
@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 4, 97, 100, 143, 152, 197, *range(5, 13)])
def test_no_strategy_is_quicker_than_the_answer(seed: int) -> None:
    asked = small_question(seed)
    found_s = search(asked).ranked[0].step_s
    assert quicker(asked, found_s * (1 - 1e-9)) is None
