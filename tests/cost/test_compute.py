import dataclasses

import numpy as np
import pytest

from rlplace.cluster import KINDS
from rlplace.cost.compute import CLASSES, op_times, times
from rlplace.cost.links import mean_transfer_s, transfer_times
from rlplace.cost.memory import inner_temporary_bytes
from rlplace.graph.opgraph import OP_KINDS
from rlplace.graph.synthetic import transformer_graph
from rlplace.problem import Links

A100 = KINDS["a100-80g"]


def seconds(op_kind="gemm", *, flops=0.0, size_bytes=0.0, dtype="float32", backward=False, kind=A100):
    return float(
        times(
            op_kind=np.array([OP_KINDS.index(op_kind)]),
            op_dtype=(dtype,),
            backward=np.array([backward]),
            flops=np.array([float(flops)]),
            size_bytes=np.array([float(size_bytes)]),
            kind=kind,
        )[0]
    )


def test_every_op_kind_has_a_class():
    assert set(CLASSES) == set(OP_KINDS)


@pytest.mark.parametrize("name", sorted(KINDS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_times_are_above_the_roofline_and_grow(name, dtype):
    kind = KINDS[name]
    fastest = max(kind.peak_flops.values())
    for op_kind in OP_KINDS:
        if op_kind == "view":
            continue
        last = 0.0
        for flops in (1e3, 1e6, 1e9, 1e12):
            found = seconds(op_kind, flops=flops, size_bytes=1e4, dtype=dtype, kind=kind)
            assert found >= last
            assert found >= flops / fastest
            last = found
        assert seconds(op_kind, flops=1, size_bytes=1e9, dtype=dtype, kind=kind) >= 1e9 / kind.memory_bandwidth_bytes_per_s


def test_doubling_a_large_product_doubles_its_time_above_the_floor():
    floor = A100.launch_s
    one, two = seconds(flops=1e13) - floor, seconds(flops=2e13) - floor
    assert two / one == pytest.approx(2.0, rel=1e-3)
    one, two = seconds("elementwise", size_bytes=1e11) - floor, seconds("elementwise", size_bytes=2e11) - floor
    assert two / one == pytest.approx(2.0, rel=1e-3)


def test_large_products_reach_the_sustained_fraction():
    for name, fraction in (("l4", 0.28), ("t4", 0.40), ("a100-80g", 0.91), ("h100", 0.76), ("v100", 0.87)):
        kind = KINDS[name]
        reached = 1e15 / seconds(flops=1e15, kind=kind) / kind.peak_flops["float32"]
        assert reached == pytest.approx(fraction, rel=0.02)


@pytest.mark.parametrize(
    "name, flops, measured",
    [  # public fp32 medians of linear layers: fraction of peak by FLOPs of the call
        ("a100-40g", 3e9, 0.58), ("a100-40g", 2e10, 0.71), ("a100-40g", 5e10, 0.75), ("a100-40g", 5e11, 0.79),
        ("a100-80g", 3e9, 0.68), ("a100-80g", 2e10, 0.81), ("a100-80g", 5e11, 0.91),
        ("h100", 3e9, 0.44), ("h100", 2e10, 0.56), ("h100", 5e11, 0.74),
        ("v100", 3e9, 0.62), ("v100", 2e10, 0.80), ("v100", 5e11, 0.88),
        ("l4", 3e9, 0.25), ("l4", 2e10, 0.28), ("t4", 3e9, 0.41), ("t4", 5e10, 0.37),
    ],
)  # fmt: skip
def test_products_follow_the_public_medians(name, flops, measured):
    kind = KINDS[name]
    reached = flops / seconds(flops=flops, kind=kind) / kind.peak_flops["float32"]
    assert reached == pytest.approx(measured, rel=0.2 if name != "h100" else 0.25)


def test_tiny_ops_cost_the_floor_and_views_nothing():
    assert seconds("elementwise", flops=10, size_bytes=100) == pytest.approx(A100.launch_s, rel=0.02)
    assert seconds("view", flops=0, size_bytes=1e9) == 0.0
    assert seconds("elementwise", backward=True) == 0.0  # a backward that launches nothing


def test_float32_convolutions_run_at_the_tf32_rate_and_products_do_not():
    assert seconds("conv", flops=1e13) < seconds("gemm", flops=1e13) / 4
    without = dataclasses.replace(A100, peak_flops={"float32": 19.5e12})
    assert seconds("conv", flops=1e13, kind=without) > seconds("gemm", flops=1e13, kind=without)


def test_half_precision_is_faster_where_there_are_units_for_it():
    assert seconds(flops=1e13, dtype="bfloat16") < seconds(flops=1e13) / 10
    v100 = KINDS["v100"]
    assert seconds(flops=1e13, dtype="bfloat16", kind=v100) == seconds(flops=1e13, kind=v100)


def test_backward_products_are_two_calls():
    one = seconds(flops=1e9)
    assert seconds(flops=2e9, backward=True) == pytest.approx(2 * one, rel=1e-9)


def test_a_graph_is_priced_op_by_op():
    graph = transformer_graph(2)
    found = op_times(graph, A100)
    assert found.shape == (graph.num_ops,)
    assert np.isfinite(found).all() and (found >= 0).all()
    views = np.array(graph.op_kind) == "view"
    assert (found[views] == 0).all() and (found[~views & (graph.op_bytes > 0)] > 0).all()
    assert op_times(graph, KINDS["t4"]).sum() > found.sum()


def test_transfer_times():
    links = Links(np.array([[0, 1e9], [0, 0.0]]), np.full((2, 2), 1e-3))
    assert transfer_times(links, 1e6).tolist() == [[0.0, 2e-3], [np.inf, 0.0]]
    assert mean_transfer_s(links, 1e6) == 2e-3
    assert mean_transfer_s(Links(np.zeros((1, 1)), np.zeros((1, 1))), 1e6) == 0.0


def test_inner_peak_by_hand():
    # Task 0: ops 0, 2, 3; task 1: op 1. Op 0 makes 100 for op 3, op 2 makes 10 for itself and 50 that leaves the task.
    task = np.array([0, 1, 0, 0])
    temporary = np.array([0, 7, 5, 1])
    producer, last_use = np.array([0, 2, 2]), np.array([3, 2, -1])
    found = inner_temporary_bytes(task, 3, temporary, producer, last_use, np.array([100, 10, 50]))
    assert found.tolist() == [100 + 10 + 50 + 5 - 50, 7, 0]


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
