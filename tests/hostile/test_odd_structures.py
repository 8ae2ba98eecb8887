"""Problems and plans that are well-formed JSON and wrong in their structure: sizes, indices and numbers of any value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import fork_join

from rlplace.errors import InputError, RlplaceError
from rlplace.plan.parse import plan_from_dict
from rlplace.plan.plan import check_plan
from rlplace.planners import get_planner
from rlplace.problem import problem_from_dict, problem_to_dict
from rlplace.simulator import expand, simulate

quick = settings(max_examples=60, derandomize=True, database=None)

numbers = st.one_of(
    st.integers(-2, 5), st.sampled_from([0, 1, 1e-9, 0.5, 1e9, 1e18, -1.0, 1 << 60, 1 << 62, 1 << 63, 1e300, math.nan])
)
times = st.one_of(st.floats(0, 10), st.floats(0, 10), st.sampled_from([0, 1e9, 1e9 + 1, None, -1, math.nan, math.inf]))
sizes = st.one_of(
    st.integers(0, 100), st.integers(0, 100), st.sampled_from([1 << 59, 1 << 60, (1 << 60) + 1, -1, 0.5, 2.0, True])
)
names = st.one_of(st.text(min_size=1, max_size=3), st.sampled_from(["a", "a", "", "\n", "\x1b[2J", "\ud800", "x" * 5000]))


@st.composite
def problems(draw: Any) -> dict[str, Any]:
    """Problem files whose parts mostly fit each other."""
    devices, groups, ops = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    near = st.one_of(st.integers(0, ops - 1), st.integers(0, ops - 1), st.integers(-1, ops))
    matrix = st.lists(
        st.lists(st.one_of(st.floats(1, 1e12), numbers), min_size=devices, max_size=devices), min_size=devices, max_size=devices
    )
    wrong = st.lists(st.lists(numbers, max_size=3), max_size=3)
    group = {"name": names, "resident_bytes": sizes}
    fixed = st.fixed_dictionaries(group, optional={"device": st.one_of(st.integers(0, devices), st.none())})
    op = st.fixed_dictionaries(
        {
            "name": names,
            "group": st.integers(0, groups - 1),
            "phase": st.sampled_from(["forward", "backward", "update", "forward"]),
            "time_s": st.one_of(times, st.lists(times, min_size=devices, max_size=devices)),
        },
        optional={
            "temporary_bytes": sizes,
            "kind": st.sampled_from(["", "gemm", "collective"]),
            "dims": st.dictionaries(names, numbers, max_size=2),
        },
    )
    tensor = st.one_of(
        st.fixed_dictionaries({"producer": near, "bytes": sizes, "consumers": st.lists(near, max_size=3, unique=True)}),
        st.fixed_dictionaries({"owner": st.integers(0, groups), "bytes": sizes, "consumers": st.lists(near, max_size=3)}),
    )
    return {
        "format": "rlplace.problem",
        "version": 1,
        "devices": draw(
            st.lists(
                st.fixed_dictionaries(
                    {"name": names, "memory_bytes": st.one_of(st.none(), sizes, st.integers(0, 1000))},
                    optional={"reserved_bytes": sizes},
                ),
                min_size=devices,
                max_size=devices,
            )
        ),
        "links": {"bandwidth_bytes_per_s": draw(st.one_of(matrix, matrix, wrong)), "latency_s": draw(st.one_of(matrix, wrong))},
        "groups": [draw(fixed) for _ in range(groups)],
        "ops": [draw(op) for _ in range(ops)],
        "tensors": draw(st.lists(tensor, max_size=4)),
    }


def renamed(data: dict[str, Any]) -> dict[str, Any]:
    """With names that differ, so that what comes after the names is looked at too."""
    for part in ("devices", "groups", "ops"):
        for index, item in enumerate(data[part]):
            item["name"] = f"{part}{index}"
    return data


def placed(data: dict[str, Any]) -> None:
    """Loads a problem, writes it, plans it and simulates the plan."""
    problem = problem_from_dict(data)
    assert problem_from_dict(problem_to_dict(problem)).fingerprint == problem.fingerprint
    for planner in ("single", "heft"):
        try:
            plan = get_planner(planner)(problem)
        except RlplaceError:
            continue
        found = simulate(problem, plan)
        assert found.step_time_s is None or (math.isfinite(found.step_time_s) and found.step_time_s >= 0)
        assert (found.peak_memory_bytes >= 0).all() and np.isfinite(found.busy_s).all()


def one_line(call: Any, data: dict[str, Any]) -> None:
    try:
        call(data)
    except RlplaceError as error:
        assert 0 < len(str(error)) < 600 and str(error).isprintable()


@quick
@given(problems())
def test_problems(data):
    one_line(placed, data)


@quick
@given(problems().map(renamed))
def test_problems_with_names_that_differ(data):
    one_line(placed, data)


PROBLEM = fork_join(width=2, num_devices=2).problem
G, N = PROBLEM.num_groups, PROBLEM.num_ops
indices = st.one_of(
    st.integers(0, 1), st.integers(0, 1), st.integers(0, 1), st.sampled_from([-1, 2, 1 << 40, 0.5, None, "0", True])
)
ids = st.one_of(st.integers(0, N - 1), numbers)

plans = st.fixed_dictionaries(
    {
        "problem": st.just(PROBLEM.fingerprint),
        "planner": names,
        "seed": st.one_of(st.just(0), numbers),
        "device_of_group": st.one_of(
            st.lists(st.integers(0, 1), min_size=G, max_size=G), st.lists(indices, min_size=G - 1, max_size=G + 1)
        ),
    },
    optional={
        "priority": st.lists(numbers, min_size=N, max_size=N),
        "order": st.lists(
            st.permutations(range(N)).flatmap(lambda row: st.lists(st.sampled_from(row), max_size=N)), min_size=2, max_size=2
        ),
        "microbatches": st.one_of(st.integers(1, 4), numbers),
        "schedule": st.sampled_from(["list", "gpipe", "1f1b", "interleaved", "zero_bubble", "x"]),
        "stage_of_group": st.lists(st.integers(0, 3), min_size=G, max_size=G),
        "replicas": st.lists(st.lists(indices, min_size=1, max_size=2), max_size=3),
        "recompute": st.lists(st.lists(st.integers(-1, G), max_size=2), max_size=3),
        "shards": st.dictionaries(
            st.sampled_from(list(PROBLEM.op_names[:3])), st.dictionaries(names, numbers, max_size=2), max_size=2
        ),
        "optimizer_sharding": st.booleans(),
        "predicted": st.dictionaries(names, numbers, max_size=2),
        "groups": st.lists(
            st.fixed_dictionaries({"name": names}, optional={"modules": st.lists(names, max_size=2)}), max_size=2
        ),
    },
)


def run_plan(data: dict[str, Any]) -> None:
    plan = plan_from_dict(data)
    check_plan(plan, PROBLEM)
    found = simulate(*expand(PROBLEM, plan))
    assert found.step_time_s is None or (math.isfinite(found.step_time_s) and found.step_time_s >= 0)
    assert (found.peak_memory_bytes >= 0).all()


@quick
@given(plans)
def test_plans(data):
    one_line(run_plan, data)


def test_the_strategies_give_good_ones_too():
    """A strategy of which everything is refused at the first check would look at nothing behind it."""
    counts = {"problem": 0, "plan": 0}

    @settings(max_examples=60, derandomize=True, database=None)
    @given(problems().map(renamed), plans)
    def count(problem, plan):
        for name, call, data in (("problem", problem_from_dict, problem), ("plan", run_plan, plan)):
            try:
                call(data)
                counts[name] += 1
            except InputError:
                pass

    count()
    assert counts["problem"] >= 1 and counts["plan"] >= 3, counts
