import numpy as np

from rlplace.cost.memory import inner_temporary_bytes


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
