"""What holds for every step that is simulated: memory comes back, devices are not shared, schedules keep their word."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import numpy as np
import pytest
from drawn import training_problem

from rlplace.problem import BACKWARD, FORWARD, UPDATE, Problem
from rlplace.problem.generate import random_problem
from rlplace.simulator import reference, simulate
from rlplace.simulator.reference import simulate_reference
from rlplace.simulator.stages import forward_stage_links, stage_numbers, stages_to_sink
from rlplace.simulator.timeline import resident_by_device

SEEDS = range(1200)


def draw(seed: int) -> tuple[Problem, np.ndarray, dict]:
    rng = np.random.default_rng([seed, 17])
    problem = training_problem(rng)
    plan = rng.integers(0, problem.num_devices, problem.num_groups).astype(np.int32)
    options: dict = {"microbatches": int(rng.integers(1, 6)), "schedule": ("list", "gpipe", "1f1b")[seed % 3]}
    if rng.random() < 0.4:
        options["stage_of_group"] = rng.integers(0, rng.integers(1, 9), problem.num_groups).astype(np.int32)
    if rng.random() < 0.3:
        options["priority"] = rng.integers(0, 3, problem.num_ops).astype(np.float64)
    return problem, plan, options


def test_at_the_end_only_resident_bytes_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output, copy, temporary and accumulated gradient is freed exactly once, whatever the schedule."""
    runs: list[reference.ReferenceRun] = []

    class Watched(reference.ReferenceRun):
        def run(self) -> None:
            runs.append(self)
            super().run()

        def release(self, value: int, device: int) -> None:
            super().release(value, device)
            assert self.memory[device] >= self.least[device]

        @property
        def least(self) -> list[int]:
            return resident_by_device(problem, plan).tolist()

    monkeypatch.setattr(reference, "ReferenceRun", Watched)
    kinds: Counter[tuple[str, bool]] = Counter()
    for seed in SEEDS:
        problem, plan, options = draw(seed)
        runs.clear()
        if simulate_reference(problem, plan, **options).step_time_s is None:
            continue
        (run,) = runs
        assert run.memory == resident_by_device(problem, plan).tolist(), seed
        assert not run.waiting and not run.busy_channels and not any(run.uses.values()), seed
        kinds[options["schedule"], options["microbatches"] > 1] += 1
    assert len(kinds) == 6 and min(kinds.values()) > 20, kinds


def test_devices_and_dependencies_are_respected() -> None:
    """No two tasks share a device; a task starts after all tasks that its inputs come from."""
    checked = 0
    for seed in SEEDS:
        problem, plan, options = draw(seed)
        line = simulate_reference(problem, plan, **options)
        if line.step_time_s is None:
            continue
        member = {op for collective in problem.collectives for op in collective.ops}
        spans = defaultdict(list)
        task_of = {}
        for task, (op, m) in enumerate(zip(line.task_op.tolist(), line.task_microbatch.tolist(), strict=True)):
            task_of[op, m] = task
            if op not in member:
                spans[line.device_of_op[op]].append((line.start_s[task], line.end_s[task]))
        for row in spans.values():
            row.sort()
            assert all(first[1] <= second[0] for first, second in itertools.pairwise(row)), seed
        last, once = options["microbatches"] - 1, problem.op_phase == UPDATE
        # Every task runs, once.
        assert len(task_of) == len(line.task_op) == options["microbatches"] * int((~once).sum()) + int(once.sum())
        for tensor, reader in zip(problem.edge_tensor.tolist(), problem.consumers.tolist(), strict=True):
            maker = int(problem.tensor_producer[tensor])
            if maker < 0:
                continue
            checked += 1
            for m in [last] if once[reader] else range(last + 1):
                makers = [last] if once[maker] else range(last + 1) if once[reader] else [m]
                assert line.start_s[task_of[reader, m]] >= max(line.end_s[task_of[maker, n]] for n in makers), seed
    assert checked > 500


def test_schedules_keep_their_word() -> None:
    """gpipe: in a stage no backward before the last forward. 1f1b: never more micro-batches in flight than the limit."""
    full = late = 0
    for seed in range(60):
        rng = np.random.default_rng([seed, 23])
        shape = ("layered", "branchy", "chain")[seed % 3]
        problem = random_problem(seed, int(rng.integers(3, 12)), int(rng.integers(1, 5)), shape=shape)
        blocks = np.sort(rng.integers(0, problem.num_devices, problem.num_groups)).astype(np.int32)
        plan = blocks if seed % 2 else rng.permutation(blocks)
        stages = None if seed % 4 else rng.integers(0, 5, problem.num_groups).astype(np.int32)
        stage, count = stage_numbers(plan, stages), int(rng.integers(1, 8))
        for schedule in ("gpipe", "1f1b"):
            line = simulate(problem, plan, microbatches=count, schedule=schedule, stage_of_group=stages)
            phase, at = problem.op_phase[line.task_op], stage[problem.op_group[line.task_op]]
            limit = stages_to_sink(forward_stage_links(problem, stage))
            for s in range(int(stage.max()) + 1):
                forward, backward = (phase == FORWARD) & (at == s), (phase == BACKWARD) & (at == s)
                if schedule == "gpipe":
                    late += 1
                    assert line.start_s[backward].min() >= line.end_s[forward].max(), (seed, s)
                    continue
                batches = [line.task_microbatch == m for m in range(count)]
                span = [(line.start_s[forward & of].min(), line.end_s[backward & of].max()) for of in batches]
                flying = [sum(begin <= start < end for begin, end in span) for start, _ in span]
                full += max(flying) == limit[s] > 1
                assert max(flying) <= limit[s], (seed, s)
    assert full > 20 and late > 20
