"""The block executor against closed forms, and against what must hold whatever the costs are."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.cluster.collectives import COMPUTE_SLOWDOWN, collective_s
from rlplace.cluster.links import Links
from rlplace.errors import InputError
from rlplace.plan.schedule import SCHEDULES
from rlplace.strategy.costs import Cut
from rlplace.strategy.drafts import Draft, Mesh, joined, plain_draft
from rlplace.strategy.executor.ahead import gather_ahead
from rlplace.strategy.executor.evaluate import DraftEvaluator, warm_up
from rlplace.strategy.executor.kernel import evaluate_packed
from rlplace.strategy.executor.meshes import Groups, copy_groups, lanes, room_bytes, share_groups, tensor_groups
from rlplace.strategy.executor.traffic import SIZES, ClusterTraffic, table_s
from tests.pipeline_theory import bubble_s, in_flight
from tests.strategy.random_costs import CLUSTERS, random_costs, random_draft

RNG = np.random.default_rng


def drawn(seed, cluster="a100-80g:4", blocks=8, **options):
    cluster = Cluster.preset(cluster) if isinstance(cluster, str) else cluster
    return random_costs(RNG(seed), cluster, blocks, **options), cluster


def plain(blocks, place, *, microbatch=2, microbatches=3, recompute=0, offload=0):
    return Draft(
        (0, blocks), (place,), (0,), bytes([recompute]) * blocks, bytes([offload]) * blocks, (microbatch,), (microbatches,)
    )


def equal_blocks(costs):
    """Every block like the first, no launches, nothing to send and nothing tied."""
    same = {name: np.full_like(getattr(costs, name), getattr(costs, name)[0]) for name in ("forward", "ratio", "activation")}
    return dataclasses.replace(costs, **same, border=costs.border * 0, fixed_s=0.0, ties=(), known={})


def free_links(cluster):
    """The same devices, infinitely well joined."""
    count = cluster.num_devices
    return dataclasses.replace(cluster, links=Links(np.full((count, count), 1e30), np.zeros((count, count))), text=None)


def test_one_device_takes_the_sum_of_its_blocks():
    costs, cluster = drawn(0)
    passes, held = costs.passes(0, Cut(2)), costs.held()
    result = DraftEvaluator(costs, cluster).evaluate(plain(8, Mesh((0,))))
    passed = 3 * float((passes.forward_s + passes.backward_s).sum())
    assert result.step_time_s == pytest.approx(passed + costs.update_s(0).sum(), rel=1e-12)
    assert result.parts["compute"] == pytest.approx(passed, rel=1e-12)
    at_rest = int((held.weight_bytes + held.gradient_bytes + held.optimizer_bytes).sum())
    kept = np.cumsum(passes.kept_bytes[0])
    most = int(max((kept + passes.working_bytes[1, 0]).max(), (kept + passes.working_bytes[0, 0]).max()))
    assert result.peak_memory_bytes == (cluster.devices[0].reserved_bytes + at_rest + most, 0, 0, 0)


def test_recomputation_adds_a_forward_and_keeps_less():
    costs, cluster = drawn(1)
    evaluator, passes = DraftEvaluator(costs, cluster), costs.passes(0, Cut(2))
    nothing, full = (evaluator.evaluate(plain(8, Mesh((0,)), recompute=how)) for how in (0, 2))
    assert full.step_time_s - nothing.step_time_s == pytest.approx(3 * passes.again_s[2].sum(), rel=1e-9)
    assert full.peak_memory_bytes[0] < nothing.peak_memory_bytes[0]
    kept = np.cumsum(passes.kept_bytes[2])
    most = max((kept + passes.working_bytes[1, 2]).max(), (kept + passes.working_bytes[0, 2]).max())
    assert full.peak_memory_bytes[0] == cluster.devices[0].reserved_bytes + most + 8 * costs.held().weight_bytes.sum()


@pytest.mark.parametrize(("schedule", "chunks"), [
    ("gpipe", 1), ("1f1b", 1), ("looped_bfs", 2), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 1),
    ("interleaved_zero_bubble", 2), ("zbv", 2), ("dualpipev", 2),
])  # fmt: skip
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_equal_stages_have_the_textbook_bubble_and_activations(schedule, chunks, devices):
    layout = SCHEDULES[schedule].layout
    costs, cluster = drawn(2, free_links(Cluster.preset("a100-80g:4")), 2 * devices * chunks)
    costs = dataclasses.replace(equal_blocks(costs), between=0.0, known={})
    if layout == "v":
        costs = dataclasses.replace(costs, ratio=costs.ratio * 0 + 2.0, weight_part=0.5)
    microbatches, stages = 2 * devices, devices * chunks
    order = [*range(devices), *reversed(range(devices))] if layout == "v" else list(range(devices)) * chunks
    draft = Draft(
        tuple(range(0, 2 * stages + 1, 2)), tuple(Mesh((device,)) for device in range(devices)), tuple(order),
        bytes(2 * stages), bytes(2 * stages), (2,), (microbatches,), schedule,
    )  # fmt: skip
    passes = costs.passes(0, Cut(2))
    forward, backward, weight = (2 * float(part[0]) for part in (passes.forward_s, passes.backward_s, passes.weight_s))
    bubble = bubble_s(schedule, devices, chunks, microbatches, forward_s=forward, input_s=backward - weight, weight_s=weight)
    result = DraftEvaluator(costs, cluster).evaluate(draft)
    work = microbatches * chunks * (forward + backward)
    update = [0.0] * devices
    for stage, place in enumerate(order):
        update[place] += costs.update_s(0)[2 * stage : 2 * stage + 2].sum()
    last = result.step_time_s - work - bubble  # the update of the place that ends last; all blocks weigh alike up to rounding
    assert min(update) * (1 - 1e-9) <= last <= max(update) * (1 + 1e-9)
    kept = int(passes.kept_bytes[0, 0])
    backward_peak = int(passes.working_bytes[1, 0, 0])
    for place in range(devices):
        inside = [b for stage, at in enumerate(order) if at == place for b in (2 * stage, 2 * stage + 1)]
        at_rest = 8 * int(costs.held().weight_bytes[inside].sum())
        flight = in_flight(schedule, devices, chunks, microbatches, place) * 2 * kept
        assert result.peak_memory_bytes[place] - at_rest - cluster.devices[place].reserved_bytes == flight + backward_peak


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_infinitely_fast_links_leave_compute_and_the_update(level):
    costs, cluster = drawn(3, free_links(Cluster.preset("a100-80g:4")))
    place = Mesh((0, 1, 2, 3), **({"shard": 4, "sharding": level} if level else {"replicate": 4}))
    evaluator = DraftEvaluator(costs, cluster)
    alone, together = evaluator.evaluate(plain(8, Mesh((0,)))), evaluator.evaluate(plain(8, place))
    assert together.parts["compute"] == pytest.approx(alone.parts["compute"], rel=1e-12)
    assert together.parts["update"] == pytest.approx(alone.parts["update"] / (4 if level else 1), rel=1e-12)
    assert together.step_time_s == pytest.approx(together.parts["compute"] + together.parts["update"], rel=1e-6)


def test_sharded_states_take_their_part_of_memory():
    costs, cluster = drawn(4, "a100-80g:8", 16)
    costs = dataclasses.replace(costs, activation=costs.activation * 0, border=costs.border * 0, known={})
    evaluator, held = DraftEvaluator(costs, cluster), costs.held()
    reserved = cluster.devices[0].reserved_bytes
    everything = held.weight_bytes + held.gradient_bytes + held.optimizer_bytes
    for degree in (2, 4, 8):
        peak = {
            level: evaluator.evaluate(
                plain(16, Mesh(tuple(range(degree)), shard=degree, sharding=level), microbatches=2)
            ).peak_memory_bytes[0]
            for level in (1, 2, 3)
        }
        rest = everything.sum() / degree
        w, g = held.weight_bytes, held.gradient_bytes
        largest = max(w[i] + max(w[max(i - 1, 0)], w[i]) + g[i] + costs.item * max(g[i], g[min(i + 1, 15)]) for i in range(16))
        assert 0 <= peak[3] - reserved - rest <= largest + 1
        assert peak[2] - reserved - rest - w.sum() <= g.max() * (1 + costs.item) + 1
        optimizer_and_weights = (held.optimizer_bytes + w).sum() / degree
        assert peak[1] == pytest.approx(reserved + optimizer_and_weights + w.sum() + g.sum() + costs.item * g.max(), abs=2)


def test_plain_copies_pay_what_of_the_buckets_outlasts_the_backward():
    costs, cluster = drawn(5, "a100-80g:4", 1)
    place, links = Mesh((0, 1, 2, 3), replicate=4), cluster.links
    result = DraftEvaluator(costs, cluster).evaluate(plain(1, place, microbatches=1))
    passes = costs.passes(0, Cut(2))
    size = float(costs.held().gradient_bytes[0]) * costs.item
    sizes = [1 << 20] * (size > 1 << 20)
    while size - sum(sizes) > 25 << 20:
        sizes.append(25 << 20)
    sizes.append(size - sum(sizes))
    times = [collective_s(links, "all_reduce", (0, 1, 2, 3), part) for part in sizes]
    backward = float(passes.backward_s[0])
    slowed = backward * (1 + (COMPUTE_SLOWDOWN - 1) * min(1.0, sum(times[:-1]) / backward))
    sent, filled = 0.0, 0.0
    for part, seconds in zip(sizes, times, strict=True):
        filled += part
        sent = max(sent, slowed * filled / size) + seconds
    expected = float(passes.forward_s[0]) + sent + costs.update_s(0)[0]
    assert result.step_time_s == pytest.approx(expected, rel=2e-3)


def test_gathers_hide_behind_the_block_before():
    costs, cluster = drawn(6, "a100-80g:4", 5)
    place = Mesh((0, 1, 2, 3), shard=4, sharding=1)
    passes, held = costs.passes(0, Cut(2)), costs.held()
    gathers = [collective_s(cluster.links, "all_gather", (0, 1, 2, 3), float(size)) for size in held.weight_bytes] + [0.0]
    seconds = gathers[0]
    for compute, gather in zip(passes.forward_s.tolist(), gathers[1:], strict=True):
        seconds += max(gather, compute + (COMPUTE_SLOWDOWN - 1) * min(compute, gather))
    result = DraftEvaluator(costs, cluster).evaluate(plain(5, place))
    assert result.parts["gather"] == pytest.approx(seconds - float(passes.forward_s.sum()), rel=2e-2)


SLOWER = COMPUTE_SLOWDOWN - 1


def test_gathers_of_all_chunks_begin_with_the_step():
    """Gathers of three seconds and forwards of one on two places with two chunks each: one after the other they would take 16.

    The first forward is beside the gather of the place's second chunk for its whole second, as is the next one on the other
    place; the third waits for that gather until 6, the fourth has its parameters.
    """
    draft = plain_draft((0, 1, 2, 3, 4), [Mesh((0,)), Mesh((1,))], (0, 1, 0, 1), schedule="looped_bfs")
    found = gather_ahead(draft, [[(3.0, 1.0, 0.0)] * 4] * 2, [0.0, 0.0])
    assert [one.ends_s for one in found] == [(3.0,), (3.0,), (6.0,), (6.0,)]
    assert [one.ready_s for one in found] == [3.0, 3.0, 6.0, 6.0]
    assert [one.left_s for one in found] == pytest.approx([3.0, 2.0 - SLOWER, 0.0, 0.0])
    assert [found[0].moving_s(number, 1.0) for number in range(5)] == [3.0, 2.0, 1.0, 0.0, 0.0]


def test_blocks_wait_for_their_own_gathers_which_collectives_inside_blocks_delay():
    """Two blocks of a second of ops and one of collectives, gathered in two seconds each; they share a channel.

    The second gather runs from 2 to 5. Three seconds of traffic over four of blocks hold collectives up by 1.5.
    """
    draft = plain_draft((0, 2, 4), [Mesh((0,)), Mesh((1,))], schedule="1f1b")
    first, second = gather_ahead(draft, [[(2.0, 1.0, 1.0)] * 4] * 2, [1.0, 1.0])
    assert first.ends_s == (2.0, 5.0) and first.left_s == 3.0
    assert first.ready_s == pytest.approx(5.0 - (1.0 + SLOWER + 1.0 * (2.0 + 1.5) / 2.0))
    assert second.ends_s == (2.0, 4.0) and second.left_s == 0.0  # which are there before anything comes


@pytest.mark.parametrize("name", CLUSTERS)
def test_parts_add_up_and_room_is_what_is_over(name):
    cluster = Cluster.preset(name)
    for seed in range(25):
        rng = RNG(seed)
        blocks = int(rng.integers(1, 16))
        costs = random_costs(rng, cluster, blocks, tied=bool(seed % 2))
        draft = random_draft(rng, cluster, blocks)
        draft.strategy(costs.names)  # says so where it contradicts itself
        evaluator = DraftEvaluator(costs, cluster)
        result = evaluator.evaluate(draft)
        assert evaluator.score(draft) == pytest.approx((result.step_time_s, result.over_bytes), rel=1e-12)
        assert sum(result.parts.values()) == pytest.approx(result.step_time_s, rel=1e-9)
        over = [max(0, p - d.memory_bytes) for p, d in zip(result.peak_memory_bytes, cluster.devices, strict=True)]
        assert result.over_bytes == pytest.approx(sum(over), abs=len(over))
        assert result.feasible == (result.over_bytes == 0)
        used = {device for device, peak in enumerate(result.peak_memory_bytes) if peak}
        assert used == set(draft.devices)
        assert draft.place_of_stage[result.bottleneck] in range(len(draft.places))


def test_devices_that_are_alike_may_change_places():
    cluster = Cluster.preset("a100-80g:8")
    for seed in range(30):
        rng = RNG(seed)
        costs, draft = random_costs(rng, cluster, 10), random_draft(rng, cluster, 10, wild=False)
        turned = rng.permutation(8)
        other = dataclasses.replace(
            draft, places=tuple(dataclasses.replace(p, devices=tuple(turned[list(p.devices)].tolist())) for p in draft.places)
        )
        one, two = (DraftEvaluator(costs, cluster).evaluate(item) for item in (draft, other))
        assert two.step_time_s == pytest.approx(one.step_time_s, rel=1e-12)
        assert [two.peak_memory_bytes[turned[d]] for d in range(8)] == list(one.peak_memory_bytes)


def test_twice_the_time_of_everything_is_twice_the_step():
    cluster = Cluster.preset("rtx4090:4")
    whole = cluster.links.whole
    links = dataclasses.replace(whole, bandwidth_bytes_per_s=whole.bandwidth_bytes_per_s / 2, latency_s=whole.latency_s * 2)
    slow = dataclasses.replace(cluster, links=links, text=None)
    for seed in range(30):
        rng = RNG(seed)
        costs, draft = random_costs(rng, cluster, 10), random_draft(rng, cluster, 10)
        draft = dataclasses.replace(draft, offload=bytes(10))
        late = dataclasses.replace(costs, speed=costs.speed / 2, fixed_s=costs.fixed_s * 2, known={})
        one, two = DraftEvaluator(costs, cluster).evaluate(draft), DraftEvaluator(late, slow).evaluate(draft)
        assert two.step_time_s == pytest.approx(2 * one.step_time_s, rel=1e-9)


def test_a_tie_over_stages_is_summed_and_inside_one_counted_once():
    costs, cluster = drawn(8, "a100-80g:4", 8, tied=True)
    evaluator, tie = DraftEvaluator(costs, cluster), costs.ties[0]
    apart = Draft((0, 4, 8), (Mesh((0,)), Mesh((1,))), (0, 1), bytes(8), bytes(8), (2,), (4,), "1f1b")
    untied = DraftEvaluator(dataclasses.replace(costs, ties=(), known={}), cluster)
    both = evaluator.evaluate(apart), untied.evaluate(apart)
    summed = collective_s(cluster.links, "all_reduce", (0, 1), tie.gradient_bytes * costs.item)
    assert both[0].peak_memory_bytes == both[1].peak_memory_bytes
    assert 0 < both[0].step_time_s - both[1].step_time_s <= summed * 1.01 + abs(np.diff(costs.update_s(0).reshape(2, 4).sum(1)))
    together = plain(8, Mesh((0,)))
    both = evaluator.evaluate(together), untied.evaluate(together)
    saved = tie.weight_bytes + tie.gradient_bytes + tie.optimizer_bytes
    assert both[1].peak_memory_bytes[0] - both[0].peak_memory_bytes[0] == saved
    assert both[0].step_time_s < both[1].step_time_s


def test_offload_moves_states_to_the_host():
    costs, cluster = drawn(9)
    evaluator, held = DraftEvaluator(costs, cluster), costs.held()
    here, optimizer, everything = (evaluator.evaluate(plain(8, Mesh((0,)), offload=how)) for how in range(3))
    assert optimizer.host_bytes == (held.optimizer_bytes.sum(),)
    assert here.peak_memory_bytes[0] - optimizer.peak_memory_bytes[0] == held.optimizer_bytes.sum()
    assert everything.host_bytes == ((held.weight_bytes + held.gradient_bytes + held.optimizer_bytes).sum(),)
    assert everything.peak_memory_bytes[0] < optimizer.peak_memory_bytes[0]
    assert here.step_time_s < optimizer.step_time_s < everything.step_time_s


def test_groups_of_a_mesh_are_row_major():
    place = Mesh(tuple(range(16)), replicate=2, shard=2, context=2, tensor=2, sharding=1)
    assert tensor_groups(place, 0).members[:2].tolist() == [[0, 1], [2, 3]]
    assert share_groups(place).members[:2].tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert copy_groups(place).members[:2].tolist() == [[0, 8], [1, 9]]
    level_0 = Mesh(tuple(range(8)), replicate=2, context=2, tensor=2)
    assert copy_groups(level_0).members.tolist() == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert share_groups(level_0).members[0].tolist() == [0]


def test_lanes_of_unlike_degrees_hold_the_same_samples():
    wide, narrow = Mesh((0, 1, 2, 3), replicate=4), Mesh((4, 5), replicate=2)
    draft = Draft((0, 1, 2), (wide, narrow), (0, 1), bytes(2), bytes(2), (1, 2, 3, 4), (2,), "1f1b")
    first, second = lanes(draft)
    assert first.replicas == (((1, (0,)), (2, (1,))), ((3, (4,)),))
    assert second.replicas == (((3, (2,)), (4, (3,))), ((7, (5,)),))


def test_tables_hold_the_times_of_collectives():
    for name in CLUSTERS:
        cluster = Cluster.preset(name)
        group = tuple(range(cluster.num_devices))
        for kind in ("all_reduce", "all_gather", "all_to_all"):
            table = ClusterTraffic(cluster).table(kind, Groups(group, len(group)))
            sizes = 2.0 ** RNG(0).uniform(8, 45, 500)
            times = collective_s(cluster.links, kind, group, sizes)
            assert [table_s(table, size) for size in SIZES.tolist()[1:]] == pytest.approx(table[1:].tolist(), rel=1e-12)
            assert np.array([table_s(table, size) for size in sizes.tolist()]) == pytest.approx(times, rel=0.01)
    assert table_s(table, 0.0) == 0.0
    assert table_s(np.full(len(SIZES), math.inf), 5.0) == math.inf


def test_groups_that_share_a_card_wait_for_each_other():
    cluster = Cluster.preset("h100:2x4,ib=400g")
    traffic = ClusterTraffic(cluster)
    alone = table_s(traffic.table("all_reduce", Groups((0, 4), 2)), 1e9)
    together = table_s(traffic.table("all_reduce", Groups(tuple(range(8)), 2, 4)), 1e9)
    assert together == pytest.approx(4 * alone, rel=2e-3)  # they start together, so the latency counts once
    one = table_s(traffic.table("all_reduce", Groups((0, 1), 2)), 1e9)
    assert table_s(traffic.table("all_reduce", Groups(tuple(range(8)), 2)), 1e9) == one


def test_the_devices_of_a_place_divide_what_pipelines_trade():
    """Two copies beside a chain of two: each copy trades half of every block, and then gives its sums to the other."""
    costs, cluster = drawn(3, "a100-80g:4x1,eth=25g", blocks=4)
    costs = dataclasses.replace(costs, ties=(), known={})
    copies = plain_draft((0, 4), [Mesh((0, 1), replicate=2)])
    chain = plain_draft((0, 2, 4), [Mesh((2,)), Mesh((3,))], microbatches=(2,), schedule="1f1b")
    evaluator = DraftEvaluator(costs, cluster)
    alone_s = max(evaluator.evaluate(one).passes_s for one in (copies, chain))
    held = costs.held()
    whole = (held.gradient_bytes * held.gradient_item).tolist()
    latency, rate = cluster.links.latency_s[0, 1], cluster.links.bandwidth_bytes_per_s[0, 1]  # of all pairs
    copy_s = sum(2 * (latency + size / 2 / rate) for size in whole)
    stages_s = [sum(latency + whole[block] / rate for block in blocks) for blocks in ((0, 1), (2, 3))]
    sum_s = evaluator.evaluate(joined((copies, chain))).passes_s - alone_s
    assert sum_s == pytest.approx(max(copy_s, *stages_s), rel=1e-9)


@pytest.mark.parametrize("mesh", [{"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2}], ids=["copies", "tensor groups"])
@pytest.mark.parametrize("seed", range(4))
def test_a_step_takes_what_the_only_network_card_of_a_device_takes(seed, mesh):
    costs, cluster = drawn(seed, "a100-80g:4x1,eth=25g")
    place, traffic = Mesh((0, 1, 2, 3), sharding=3, **mesh), ClusterTraffic(cluster)
    held, result = costs.held(place.tensor), DraftEvaluator(costs, cluster).evaluate(plain(8, place, microbatches=1))
    card_s = result.parts["tensor"]
    for weights, gradients in zip(held.weight_bytes.tolist(), (held.gradient_bytes * held.gradient_item).tolist(), strict=True):
        card_s += 2 * table_s(traffic.table("all_gather", share_groups(place)), weights)
        card_s += table_s(traffic.table("reduce_scatter", share_groups(place)), gradients)
        card_s += table_s(traffic.table("all_reduce", copy_groups(place)), gradients / 2)
    assert result.step_time_s > card_s > result.parts["compute"]


@pytest.mark.parametrize(("change", "words"), [
    ({"bounds": (0, 4)}, "bounds"),
    ({"recompute": b""}, "recompute"),
    ({"places": (Mesh((0, 0), replicate=2),)}, "distinct"),
    ({"places": (Mesh((0, 1), shard=2),)}, "sharding level"),
    ({"microbatch": (1, 2, 3)}, "microbatch"),
])  # fmt: skip
def test_what_contradicts_itself_is_refused(change, words):
    costs, cluster = drawn(10)
    with pytest.raises(InputError, match=words):
        DraftEvaluator(costs, cluster).score(dataclasses.replace(plain(8, Mesh((0,))), **change))


@pytest.mark.parametrize("text", ["a100-80g:2", "a100-80g:1+cpu:1"])
def test_kernels_are_compiled_once_whatever_memory_devices_have(text: str) -> None:
    """A search whose clock runs must not compile them again for other types of arrays."""
    warm_up()
    cluster = Cluster.preset(text)
    costs = random_costs(np.random.default_rng(1), cluster, 4)
    known = len(evaluate_packed.signatures)
    assert room_bytes(cluster).dtype == np.float64
    DraftEvaluator(costs, cluster).score(plain_draft((0, len(costs.names)), [Mesh((0,))]))
    assert len(evaluate_packed.signatures) == known
