"""What a search has chosen is checked op by op before a plan announces it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from rlplace.cluster import Cluster
from rlplace.errors import InfeasibleError
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search import op_level
from rlplace.strategy.search.op_level import LEADERS, OpLevel, evaluate_ops
from rlplace.strategy.search.search import search
from rlplace.strategy.search.tries import SearchProblem
from tests.strategy.random_costs import random_costs
from tests.strategy.random_ops import RandomOps


@pytest.fixture(scope="module")
def asked():
    cluster = Cluster.preset("a100-80g:4")
    costs = RandomOps.of(random_costs(np.random.default_rng(3), cluster, 6))
    question = SearchProblem(DraftEvaluator(costs, cluster), 16)
    return question, costs, search(question, calls=300)


def forbidding(drafts, monkeypatch):
    """Drafts of which the op-level simulator says that they are a gigabyte too large."""

    def said(draft, costs, cluster, said, traffic=None):
        found = evaluate_ops(draft, costs, cluster, said, traffic)
        if draft not in drafts:
            return found
        peaks = tuple(2 * peak for peak in found.peak_memory_bytes)
        return dataclasses.replace(found, feasible=False, over_bytes=1e9, peak_memory_bytes=peaks)

    monkeypatch.setattr(op_level, "evaluate_ops", said)


def test_the_figures_are_those_of_the_ops(asked):
    question, costs, answer = asked
    finer = OpLevel(question)
    checked = finer.checked(answer)
    others = [tried.step_s for tried in checked.ranked[1:]]
    assert others == sorted(others) and checked.ranked[0].step_s <= 1.01 * others[0]
    assert set(checked.of_kinds) == set(answer.of_kinds)
    blocks = {tried.draft: tried.step_s for tried in answer.ranked}
    by_ops = [tried for tried in checked.ranked if tried.step_s != blocks[tried.draft]]
    assert len(by_ops) >= LEADERS and by_ops[0] == checked.ranked[0]
    for tried in (*by_ops, *checked.of_kinds.values()):
        said = question.scores.evaluate(tried.draft)
        if tried.fits:
            ops = evaluate_ops(tried.draft, costs, question.cluster, said)
            assert tried.step_s == ops.step_time_s == finer.evaluate(tried.draft).step_time_s
            assert ops.executor == "list" and said.executor == "blocks"
            assert sum(ops.parts.values()) == pytest.approx(ops.step_time_s)


def test_what_does_not_fit_op_by_op_is_not_announced(asked, monkeypatch):
    question, _, answer = asked
    best = OpLevel(question).checked(answer).ranked[0]
    forbidding({best.draft}, monkeypatch)
    checked = OpLevel(question).checked(answer)
    assert checked.ranked[0].draft != best.draft and best.draft not in {tried.draft for tried in checked.ranked}
    assert all(tried.draft != best.draft or not tried.fits for tried in checked.of_kinds.values())
    forbidding({tried.draft for tried in answer.ranked}, monkeypatch)
    with pytest.raises(InfeasibleError, match=r"op by op: the nearest is too large by 1 GB on \d devices together, though"):
        OpLevel(question).checked(answer)


def test_drafts_of_too_many_ops_keep_the_figures_of_blocks(asked, monkeypatch):
    question, _, answer = asked
    monkeypatch.setattr(op_level, "MOST_TASKS", 0)
    finer = OpLevel(question)
    checked = finer.checked(answer)
    assert sorted(checked.ranked, key=lambda tried: tried.key) == list(answer.ranked) and math.isfinite(answer.ranked[0].step_s)
    assert finer.evaluate(answer.ranked[0].draft).executor == "blocks"
