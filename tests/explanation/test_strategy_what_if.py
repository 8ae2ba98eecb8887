"""What other hardware would bring a whole strategy."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.explanation.strategy_what_if import strategy_what_if
from rlplace.explanation.what_if import AS_IS
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search.search import search
from rlplace.strategy.search.tries import SearchProblem
from tests.strategy.random_costs import random_costs


def question(memory: float) -> SearchProblem:
    cluster = Cluster.preset("a100-80g:2")
    devices = tuple(dataclasses.replace(d, memory_bytes=int(memory * d.memory_bytes)) for d in cluster.devices)
    cluster = dataclasses.replace(cluster, devices=devices)
    return SearchProblem(DraftEvaluator(random_costs(np.random.default_rng(3), cluster, 5), cluster), 8)


@pytest.mark.parametrize("memory", [1.0, 0.5])
def test_no_change_is_worse_than_what_is_known(memory: float) -> None:
    """The best known as things are is among the answers wherever it can run, and devices that may stay idle cost nothing."""
    asked = question(memory)
    best = search(asked, calls=60).ranked[0]
    answers = {
        answer.change: answer
        for answer in strategy_what_if(SimpleNamespace(question=asked, draft=lambda: best.draft), calls=60)
    }
    base = answers[AS_IS]
    assert base.same_s == best.step_s and base.replanned_s is not None and base.replanned_s <= best.step_s
    devices = answers["twice the devices (a100-80g:4)"]
    for name in ("double the memory", "all links twice as fast"):
        assert answers[name].same_feasible and answers[name].replanned_s <= base.replanned_s * (1 + 1e-9)
    assert devices.replanned_s <= devices.same_s
    twice = answers["twice the batch"]
    assert twice.samples == 16 and twice.replanned_s <= 2 * base.same_s * (1 + 1e-9)
    without = strategy_what_if(SimpleNamespace(question=asked, draft=lambda: best.draft), calls=0)
    assert all(answer.replanned_s is None and answer.same_s == answers[answer.change].same_s for answer in without)
