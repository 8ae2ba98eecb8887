"""Rows and boxes of a timeline, and the picture that environments render."""

import numpy as np
import pytest

from rlplace.plan.plan import make_plan
from rlplace.problem import Links
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem
from rlplace.reporting.lanes import COLLECTIVE, DEVICE, LINK, empty_image, lanes_of, pack, paint
from rlplace.reporting.palette import COLORS, rgb
from rlplace.simulator import expand, simulate


def overlaps(lanes):
    same = lanes.row[1:] == lanes.row[:-1]
    return (same & (lanes.start_s[1:] < lanes.end_s[:-1])).any()


@pytest.mark.parametrize("microbatches", [1, 3])
def test_every_task_and_transfer_has_a_box(microbatches):
    problem = random_problem(2, num_groups=30, num_devices=4, hosts=2)
    line = simulate(problem, np.arange(30) % 4, microbatches=microbatches)
    lanes = lanes_of(problem, line)
    assert [row.name for row in lanes.rows[:4]] == [device.name for device in problem.devices]
    assert {row.kind for row in lanes.rows[4:]} == {LINK}
    tasks, sent = lanes.size_bytes < 0, lanes.size_bytes >= 0
    assert tasks.sum() == len(line.task_op) and sent.sum() == len(line.transfer_tensor)
    assert not overlaps(lanes) and (np.diff(lanes.row) >= 0).all()
    for device in range(4):
        here = lanes.row == device
        assert lanes.end_s[here].sum() - lanes.start_s[here].sum() == pytest.approx(line.busy_s[device])
        assert (line.device_of_op[lanes.op[here]] == device).all()
    assert lanes.size_bytes[sent].sum() == problem.tensor_bytes[line.transfer_tensor].sum()
    assert set(lanes.microbatch[tasks].tolist()) == ({-1} if microbatches == 1 else {0, 1, 2})


def test_collectives_have_rows_of_their_own():
    problem = random_problem(5, num_groups=24, num_devices=4)
    plan = make_plan(problem, np.arange(24) * 2 // 24, planner="hand", replicas=[[0, 1], [2, 3]])
    drawn, plain = expand(problem, plan)
    lanes = lanes_of(drawn, simulate(drawn, plain))
    rows = [i for i, row in enumerate(lanes.rows) if row.kind == COLLECTIVE]
    assert [lanes.rows[i].name for i in rows] == ["collective gpu0, gpu2", "collective gpu1, gpu3"]
    assert np.isin(lanes.row, rows).sum() == len(drawn.collectives)
    assert not overlaps(lanes)


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
