"""The replay of a plan and its table: exact sums, the simulator's peak, kernels of the update, steps, inner peaks."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.cli.main import main
from rlplace.cluster import Cluster
from rlplace.cluster.links import Device, Links
from rlplace.cost import price
from rlplace.cost.allocator import AllocatorOptions
from rlplace.cost.contract import foreach_update_bytes, inner_temporary_bytes
from rlplace.cost.footprint import PARTS, WORKSPACE_BYTES, MemoryOptions, footprint
from rlplace.cost.lifetimes import GRADIENTS, OPTIMIZER, WEIGHTS, holdings, lifetimes
from rlplace.errors import InputError
from rlplace.plan import PlacementPlan, make_plan
from rlplace.problem import Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator.reference import simulate_reference
from rlplace.simulator.timeline import resident_by_device
from tests.graphs import random_graph, transformer_graph

MIB = 1 << 20
TWO = Cluster.preset("a100-80g:2")


def plan_of(problem, devices, **options):
    return PlacementPlan(problem.fingerprint, "test", 0, np.asarray(devices, dtype=np.int32), **options)


def with_ties(problem, seed):
    """Draws whole-number times, zero among them, so that much happens in one instant."""
    rng = np.random.default_rng(seed)
    count = problem.num_devices
    latency = rng.integers(0, 2, (count, count)).astype(float)
    np.fill_diagonal(latency, 0.0)
    links = Links(np.where(np.eye(count, dtype=bool), 0.0, 1e30), latency, problem.links.channels)
    time = np.repeat(rng.integers(0, 3, (problem.num_ops, 1)).astype(float), count, axis=1)
    return dataclasses.replace(problem, time_s=time, links=links)


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.booleans())
def test_the_list_of_allocations_has_the_simulators_peak(seed, synthetic):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 5))
    if synthetic:
        graph = random_graph(seed, int(rng.integers(1, 40)), tied=True, in_place=True)
        problem = price(graph, f"a100-80g:{count}", groups=12, level="op")
    else:
        problem = random_problem(seed, int(rng.integers(1, 25)), count)
    problem = with_ties(problem, seed)
    plan = plan_of(problem, rng.integers(0, count, problem.num_groups))
    line = simulate_reference(problem, plan.device_of_group)
    life = lifetimes(problem, plan)
    base = resident_by_device(problem, plan.device_of_group)
    for device in range(count):
        live = life.live_bytes(device)
        assert base[device] + int(live.max(initial=0)) == line.peak_memory_bytes[device]
        assert not len(live) or live[-1] == 0  # everything is given back
    assert np.array_equal(np.sort(life.item), np.sort(np.tile(np.arange(len(life.device)), 2)))


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from(["task", "op"]), st.booleans(), st.sampled_from(["foreach", "fused", "single"]))
def test_parts_add_up_and_kernels_and_pages_stay_above_what_is_live(seed, level, expandable, kernel):
    graph = random_graph(seed, 30, tied=seed % 2 == 0)
    problem = price(graph, TWO, groups=8, level=level)
    devices = np.random.default_rng(seed).integers(0, 2, problem.num_groups)
    options = MemoryOptions(allocator=AllocatorOptions(expandable_segments=expandable), optimizer_kernel=kernel)
    for item in footprint(problem, devices, graph=graph if level == "op" else None, options=options):
        assert set(item.parts) == set(PARTS) and min(item.parts.values()) >= 0
        assert sum(item.parts.values()) == item.total_bytes
        outside = item.parts["context"] + item.parts["communication"]
        assert item.total_bytes == item.reserved_peak_bytes + outside
        assert outside == 600_000_000 + 1_500_000_000
        assert item.first_step_bytes <= item.allocated_peak_bytes <= item.reserved_peak_bytes
        assert item.fits and item.capacity_bytes == 80_000_000_000


def chain(weight=40 * MIB, activation=30 * MIB, temporary=0, devices=1, memory=None):
    """Makes one group: forward makes an activation, backward reads it, an update follows."""
    return Problem(
        name="chain",
        devices=tuple(Device(f"d{i}", memory) for i in range(devices)),
        links=Links(np.where(np.eye(devices, dtype=bool), 0.0, 1e9), np.zeros((devices, devices))),
        group_names=("g",),
        resident_bytes=np.array([4 * weight]),
        weight_bytes=np.array([weight]),
        gradient_bytes=np.array([weight]),
        optimizer_bytes=np.array([2 * weight]),
        op_names=("f", "b", "u"),
        op_group=np.zeros(3, dtype=np.int32),
        op_phase=np.array([0, 1, 3]),
        time_s=np.ones((3, devices)),
        temporary_bytes=np.array([temporary, 0, 0]),
        tensor_producer=np.array([0, 1], dtype=np.int32),
        tensor_bytes=np.array([activation, 0]),
        consumer_ptr=np.array([0, 1, 2]),
        consumers=np.array([1, 2], dtype=np.int32),
        source={"capture": {"optimizer": "adam"}},
    )


def test_two_steps_by_hand():
    problem = chain()
    options = MemoryOptions(workspace_bytes=0, optimizer_kernel="fused")
    (item,) = footprint(problem, [0], options=options)
    # Backward of step 2: weight, gradient, state and the activation are all there; in step 1 there is no state in the backward,
    # but at its end weight, gradient and state.
    assert item.allocated_peak_bytes == (40 + 40 + 80 + 30) * MIB
    assert item.first_step_bytes == (40 + 40 + 80) * MIB
    parts = {name: size // MIB for name, size in item.parts.items() if size}
    assert parts == {"weights": 40, "gradients": 40, "optimizer": 80, "activations": 30}
    # The foreach kernel takes the roots of all second moments: one more copy of the weights, when the activation is gone.
    (item,) = footprint(problem, [0], options=dataclasses.replace(options, optimizer_kernel="foreach"))
    parts = {name: size // MIB for name, size in item.parts.items() if size}
    assert parts == {"weights": 40, "gradients": 40, "optimizer": 80, "temporaries": 40, "slack": 0} | parts
    assert parts["temporaries"] == 40 and "activations" not in parts
    assert item.first_step_bytes == item.allocated_peak_bytes == 200 * MIB
    (item,) = footprint(problem, [0], options=MemoryOptions(steps=1, optimizer_kernel="fused"))
    assert item.parts["workspace"] == 0  # a device of no kind is taken for a host processor


def test_what_does_not_fit_says_so_and_what_it_would_take():
    options = MemoryOptions(workspace_bytes=0, optimizer_kernel="fused")
    (item,) = footprint(chain(memory=190 * MIB), [0], options=options)
    assert item.fits and item.retries == 0
    (item,) = footprint(chain(memory=189 * MIB), [0], options=options)
    assert not item.fits and item.total_bytes == 190 * MIB
    # Cached segments of 30 and 20 MiB have to go before the state of 80 MiB comes.
    (item,) = footprint(chain(temporary=20 * MIB, memory=200 * MIB), [0], options=options)
    assert item.fits and item.retries > 0


def test_parameters_are_single_allocations_where_the_graph_is_known():
    graph = transformer_graph(2)
    problem = price(graph, TWO, groups=10, level="op")
    items = holdings(problem, graph)
    for part, field in ((WEIGHTS, "size_bytes"), (GRADIENTS, "gradient_bytes"), (OPTIMIZER, "optimizer_bytes")):
        sizes = [getattr(p, field) for p in graph.parameters if getattr(p, field)]
        found = [item.bytes for item in items if item.part == part]
        assert not set(map(int, sizes)) - set(found)
    sums = np.zeros((3, problem.num_groups), dtype=np.int64)
    for item in items:
        sums[item.part, item.group] += item.bytes
        assert item.part != GRADIENTS or item.makers
    assert np.array_equal(sums, [problem.weight_bytes, problem.gradient_bytes, problem.optimizer_bytes])
    with pytest.raises(InputError, match="op-level problem"):
        holdings(price(graph, TWO, groups=10), graph)
    whole = holdings(price(graph, TWO, groups=10))
    assert sum(item.bytes for item in whole) == sum(item.bytes for item in items)


def test_context_and_workspace_are_those_of_the_kind_and_can_be_replaced():
    graph = transformer_graph(1)
    for kind, workspace in (("a100-80g", WORKSPACE_BYTES), ("h100", 32 * MIB), ("cpu", 0)):
        (item,) = footprint(price(graph, f"{kind}:1", groups=4), [0] * price(graph, f"{kind}:1", groups=4).num_groups)
        assert item.parts["workspace"] == workspace and item.parts["communication"] == 0
    problem = price(graph, TWO, groups=4)
    options = MemoryOptions(context_bytes=1, communication_bytes=2, workspace_bytes=512)
    for item in footprint(problem, [0] * problem.num_groups, options=options):
        assert (item.parts["context"], item.parts["communication"]) == (1, 2)
    assert item.parts["workspace"] == 0  # nothing runs on the last device
    with pytest.raises(InputError, match="optimizer kernel"):
        MemoryOptions(optimizer_kernel="forach")


def test_unknown_resident_parts_are_refused():
    problem = dataclasses.replace(
        chain(), weight_bytes=np.array([-1]), gradient_bytes=np.array([-1]), optimizer_bytes=np.array([-1])
    )
    with pytest.raises(InputError, match="does not say what its resident bytes are"):
        footprint(problem, [0])


def test_inner_peak_agrees_with_a_plain_replay():
    rng = np.random.default_rng(0)
    for _ in range(50):
        count, tasks = 12, 3
        task = rng.integers(0, tasks, count)
        temporary = rng.integers(0, 50, count)
        producer = rng.integers(0, count, 15)
        size = rng.integers(0, 90, 15)
        last_use = np.empty(15, dtype=np.int64)
        for t in range(15):
            same = [op for op in range(producer[t], count) if task[op] == task[producer[t]]]
            last_use[t] = -1 if rng.random() < 0.4 else rng.choice(same)
        expected = []
        for number in range(tasks):
            leaving = sum(int(size[t]) for t in range(15) if task[producer[t]] == number and last_use[t] < 0)
            peak = 0
            for op in np.flatnonzero(task == number):
                live = sum(
                    int(size[t])
                    for t in range(15)
                    if task[producer[t]] == number and producer[t] <= op and (last_use[t] < 0 or last_use[t] >= op)
                )
                peak = max(peak, live + int(temporary[op]))
            expected.append(max(0, peak - leaving))
        assert inner_temporary_bytes(task, tasks, temporary, producer, last_use, size).tolist() == expected


def adam_problem():
    """Makes four groups with 10 bytes of weights, 10 of gradients and 20 of Adam's moments each."""
    part = np.full(4, 10, dtype=np.int64)
    return dataclasses.replace(
        random_problem(0, 4, 4), weight_bytes=part, gradient_bytes=part, optimizer_bytes=2 * part, resident_bytes=4 * part
    )


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("adam", [150, 50, 0, 0]),  # one more copy of the weights' size for each group
        ("momentum", [120, 40, 0, 0]),  # holds none
    ],
)
def test_by_hand(optimizer, expected):
    problem = adam_problem()
    plan = make_plan(problem, [0, 0, 0, 1], planner="hand")
    reserved = [d.reserved_bytes if want else 0 for d, want in zip(problem.devices, expected, strict=True)]
    found = foreach_update_bytes(problem, plan, optimizer)
    assert (found - reserved).tolist() == expected


@pytest.mark.slow
def test_place_says_when_only_the_update_does_not_fit(capsys, tmp_path):
    """134 M parameters in float32: 2.1 GB resident with Adam, 2.7 in a foreach update, on a card of 3 GB with 0.7 reserved."""
    path = tmp_path / "small.toml"
    text = """
        format = "rlplace.cluster"
        version = 1
        [[kind]]
        name = "small"
        like = "t4"
        memory_bytes = 3000000000
        reserved_bytes = 700000000
        [[device]]
        name = "gpu0"
        kind = "small"
        host = 0
    """
    path.write_text("\n".join(line.strip() for line in text.splitlines()))
    model = tmp_path / "wide.py"
    model.write_text(
        "import torch\n\ndef build(batch, **options):\n"
        "    net = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(8)])\n"
        "    return net, (torch.zeros(batch, 4096),), lambda y: y.sum()\n"
    )
    code = main(["place", f"{model}:build", "--cluster", str(path), "--planner", "single", "--batch", "2"])
    assert code == 0
    assert "foreach update needs" in capsys.readouterr().err
