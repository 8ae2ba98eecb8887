"""Rows and boxes of a timeline, its picture, the tree of modules, and the curve of memory."""

import dataclasses

import numpy as np
import pytest

from rlplace.cluster.links import Links
from rlplace.explanation.report.lanes import COLLECTIVE, COLORS, DEVICE, LINK, empty_image, lanes_of, pack, paint, rgb
from rlplace.explanation.report.modules import MAX_CHILDREN, OWN, forward_order, group_edges, module_tree
from rlplace.explanation.report.step_timeline import MemoryCurve, memory_curves
from rlplace.plan.plan import make_plan
from rlplace.problem import BACKWARD, UPDATE
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import SHAPES, random_problem
from rlplace.simulator import simulate


def overlaps(lanes):
    same = lanes.row[1:] == lanes.row[:-1]
    return (same & (lanes.start_s[1:] < lanes.end_s[:-1])).any()


def test_every_op_and_transfer_has_a_box():
    problem = random_problem(2, num_groups=30, num_devices=4, hosts=2)
    line = simulate(problem, np.arange(30) % 4)
    lanes = lanes_of(problem, line)
    assert [row.name for row in lanes.rows[:4]] == [device.name for device in problem.devices]
    assert {row.kind for row in lanes.rows[4:]} == {LINK}
    tasks, sent = lanes.size_bytes < 0, lanes.size_bytes >= 0
    assert tasks.sum() == problem.num_ops and sent.sum() == len(line.transfer_tensor)
    assert not overlaps(lanes) and (np.diff(lanes.row) >= 0).all()
    for device in range(4):
        here = lanes.row == device
        assert lanes.end_s[here].sum() - lanes.start_s[here].sum() == pytest.approx(line.busy_s[device])
        assert (line.device_of_op[lanes.op[here]] == device).all()
    assert lanes.size_bytes[sent].sum() == problem.tensor_bytes[line.transfer_tensor].sum()
    assert (lanes.microbatch == -1).all()


def test_collectives_have_rows_of_their_own():
    problem = build_problem(
        "reduced",
        time_s=[[1.0] * 4] * 4 + [[3.0] * 4] * 4,
        tensors=[TensorSpec(op, 0, [op + 4]) for op in range(4)],
        memory_bytes=[None] * 4,
        group=[0, 1, 2, 3] * 2,
        phase=[BACKWARD] * 4 + [UPDATE] * 4,
        collectives=[([4, 6], [0]), ([5, 7], [1])],
    )
    plan = make_plan(problem, [0, 1, 2, 3], planner="hand")
    line = simulate(problem, plan)
    lanes = lanes_of(problem, line)
    rows = [i for i, row in enumerate(lanes.rows) if row.kind == COLLECTIVE]
    assert [lanes.rows[i].name for i in rows] == ["collective gpu0, gpu2", "collective gpu1, gpu3"]
    assert np.isin(lanes.row, rows).sum() == len(problem.collectives)
    assert not overlaps(lanes)
    curves_of(problem, plan, line)


def test_transfers_of_one_link_that_overlap_get_lanes():
    zero = np.zeros((2, 2))
    links = Links(np.ones((2, 2)), zero, channels=(((), ()), ((), ())))  # nothing holds anything
    problem = build_problem(
        "wide",
        time_s=[[1.0, 1.0]] * 3,
        tensors=[TensorSpec(0, 5, [2]), TensorSpec(1, 5, [2])],
        memory_bytes=[None, None],
        links=links,
    )
    lanes = lanes_of(problem, simulate(problem, [0, 0, 1]))
    assert [row.name for row in lanes.rows if row.kind == LINK] == ["gpu0 → gpu1", "gpu0 → gpu1, 2"]
    assert not overlaps(lanes)


def test_pack_uses_as_few_lanes_as_can_be():
    start, end = np.array([0.0, 1.0, 2.0, 2.0]), np.array([2.0, 3.0, 4.0, 2.0])
    assert pack(start, end).tolist() == [0, 1, 0, 0]
    assert pack(np.zeros(0), np.zeros(0)).tolist() == []


def test_a_step_that_does_not_complete_has_devices_only():
    problem = build_problem("broken", time_s=[[1.0, np.nan]], tensors=[], memory_bytes=[None, None])
    lanes = lanes_of(problem, simulate(problem, [1]))
    assert [row.kind for row in lanes.rows] == [DEVICE, DEVICE] and len(lanes.row) == 0 and lanes.step_s == 0.0
    assert (paint(lanes) == 255).all()


def test_painted_picture_shows_each_group_where_it_runs():
    problem = build_problem("two", time_s=[[1.0, 1.0], [1.0, 1.0]], tensors=[TensorSpec(0, 0, [1])], memory_bytes=[None, None])
    image = paint(lanes_of(problem, simulate(problem, [0, 1])), width=201, row_height=10, gap=2)
    colors = rgb(COLORS)
    assert image.shape == (26, 201, 3) == empty_image(2, width=201, row_height=10, gap=2).shape
    assert (image[2:12, :100] == colors[0]).all() and (image[2:12, 101:] == 255).all()
    assert (image[14:24, 100:200] == colors[1]).all() and (image[14:24, :100] == 255).all()


def chain(names, modules=None):
    count = len(names)
    problem = build_problem(
        "model",
        time_s=[[1.0, 1.0]] * count,
        tensors=[TensorSpec(i, 10 + i, [i + 1]) for i in range(count - 1)],
        memory_bytes=[None, None],
    )
    problem = dataclasses.replace(problem, group_names=tuple(names))
    plan = make_plan(problem, [0] * count, planner="hand")
    if modules is not None:
        groups = [{"name": n, "modules": list(m), "ops": [f"{n}/mm", f"{n}/add"]} for n, m in zip(names, modules, strict=True)]
        plan = dataclasses.replace(plan, groups=groups)
    return problem, plan


def paths(tree):
    """The labels from the root to every group."""
    found = []
    for node in tree.node_of_group:
        labels = []
        while node > 0:
            labels.append(tree.label[node])
            node = tree.parent[node]
        found.append("/".join(reversed(labels)))
    return found


def test_tree_by_names():
    names = ["emb.tok", "net.h.0.attn", "net.h.0.mlp", "net.h.1.attn", "net.h.1.mlp", "net.h.1.mlp#2", "head"]
    problem, plan = chain(names)
    tree = module_tree(problem, plan, forward_order(problem))
    assert paths(tree) == [
        "emb.tok", "net.h/h.0/attn", "net.h/h.0/mlp", "net.h/h.1/attn", "net.h/h.1/mlp/mlp", "net.h/h.1/mlp/mlp#2", "head",
    ]  # fmt: skip
    assert all(parent < node for node, parent in enumerate(tree.parent)) and tree.parent[0] == -1
    assert tree.block_names == ("emb.tok", "net.h.0.attn", "net.h.0.mlp", "net.h.1.attn", "net.h.1.mlp", "several modules")
    assert tree.block[4] == tree.block[5]


def test_modules_of_the_plan_come_first():
    problem, plan = chain(["a", "b", "c"], [["m.x"], ["m.y"], ["m.x", "m.y"]])
    tree = module_tree(problem, plan, forward_order(problem))
    assert paths(tree) == ["m/x", "m/y", "m/mm + 1"]


def test_many_own_groups_of_a_module_are_kept_together():
    problem, plan = chain([f"net.act#{i}" for i in range(5)] + ["net.act.inner"])
    tree = module_tree(problem, plan, forward_order(problem))
    assert [tree.label[node] for node in tree.own] == [OWN]
    assert paths(tree)[0] == f"net.act/{OWN}/act#0" and paths(tree)[5] == "net.act/inner"


@pytest.mark.parametrize("groups", [1, MAX_CHILDREN, MAX_CHILDREN + 1, 5000])
def test_no_level_is_too_wide(groups):
    problem = random_problem(0, num_groups=groups, num_devices=2, shape="chain")
    tree = module_tree(problem, make_plan(problem, [0] * groups, planner="hand"), forward_order(problem))
    children = np.bincount(np.array(tree.parent[1:]), minlength=1)
    assert children.max() <= MAX_CHILDREN
    assert len(set(tree.node_of_group)) == groups
    assert set(range(len(tree.block_names))) == set(tree.block)


def test_edges_add_up_both_directions():
    problem = build_problem(
        "edges",
        time_s=[[1.0]] * 5,
        group=[0, 1, 1, 0, 0],
        phase=[0, 0, 1, 1, 3],
        tensors=[TensorSpec(0, 7, [1, 2]), TensorSpec(2, 5, [3]), TensorSpec(3, 2, [4]), TensorSpec(None, 11, [1], owner=0)],
        memory_bytes=[None],
    )
    edges = group_edges(problem)
    assert (edges.source.tolist(), edges.target.tolist()) == ([0], [1])
    assert edges.forward_bytes.tolist() == [7 + 7 + 11] and edges.backward_bytes.tolist() == [5]


def curves_of(problem, plan, line):
    curves = memory_curves(problem, plan, line)
    assert [curve.peak_bytes for curve in curves] == line.peak_memory_bytes.tolist()
    return curves


@pytest.mark.parametrize("seed", range(12))
def test_the_largest_value_is_the_peak(seed):
    problem = random_problem(
        seed,
        num_groups=14 + seed,
        num_devices=2 + seed % 3,
        shape=SHAPES[seed % 5],
        hosts=1 + seed % 2,
        shared_parameters=seed % 4,
        memory_factor=(None, 1.2)[seed % 2],
    )
    devices = np.random.default_rng(seed).integers(0, problem.num_devices, problem.num_groups).astype(np.int32)
    plan = make_plan(problem, devices, planner="hand")
    line = simulate(problem, plan)
    curves = curves_of(problem, plan, line)
    for curve in curves:
        assert (np.diff(curve.time_s) >= 0).all() and curve.time_s[-1] == line.step_time_s
        assert curve.in_use_bytes[-1] == curve.in_use_bytes[0], "everything but resident bytes is free at the end"


def test_plans_with_an_order():
    problem = random_problem(4, num_groups=16, num_devices=4, shape="chain")
    devices = np.arange(16, dtype=np.int32) // 4
    free = simulate(problem, devices)
    order = [sorted(np.flatnonzero(free.device_of_op == d).tolist(), key=lambda op: free.start_s[op]) for d in range(4)]
    plan = make_plan(problem, devices, planner="hand", order=order)
    line = simulate(problem, plan)
    assert line.step_time_s is not None
    curves_of(problem, plan, line)


def test_a_peak_that_lasts_no_time_is_kept():
    """Op 1 takes 70 bytes and no time; while it runs, 170 are in use."""
    problem = build_problem(
        "instant",
        time_s=[[1.0], [0.0], [1.0]],
        tensors=[TensorSpec(0, 100, [2]), TensorSpec(0, 0, [1]), TensorSpec(1, 0, [2])],
        memory_bytes=[None],
        temporary_bytes=[0, 70, 0],
    )
    plan = make_plan(problem, [0, 0, 0], planner="hand")
    (curve,) = curves_of(problem, plan, simulate(problem, plan))
    assert curve.peak_bytes == 170
    assert [(t, v) for t, v in zip(curve.time_s, curve.in_use_bytes, strict=True) if t == 1.0] == [(1.0, 170), (1.0, 100)]


def test_a_step_that_does_not_complete_shows_resident_bytes():
    problem = build_problem("broken", time_s=[[1.0, np.nan]], tensors=[], memory_bytes=[None, 50], resident_bytes=[30])
    plan = make_plan(problem, [1], planner="hand")
    line = simulate(problem, plan)
    assert line.step_time_s is None
    curves = curves_of(problem, plan, line)
    assert [curve.in_use_bytes.tolist() for curve in curves] == [[0], [30]]


@pytest.mark.parametrize("points", [8, 100, 999])
def test_thinning_keeps_peak_ends_and_order(points):
    rng = np.random.default_rng(0)
    time = np.sort(rng.random(1000))
    curve = MemoryCurve(time, rng.integers(0, 10**12, 1000))
    thin = curve.thinned(points)
    assert len(thin.time_s) <= points
    assert thin.peak_bytes == curve.peak_bytes
    assert thin.time_s[0] == time[0] and thin.time_s[-1] == time[-1]
    pairs = set(zip(curve.time_s.tolist(), curve.in_use_bytes.tolist(), strict=True))
    assert set(zip(thin.time_s.tolist(), thin.in_use_bytes.tolist(), strict=True)) <= pairs
    assert curve.thinned(1000) is curve
    assert dataclasses.is_dataclass(thin)
