"""Sessions on clusters whose truth is made up: what they end with, and that they go on where they ended."""

import math
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from rlplace.errors import InfeasibleError, InputError
from rlplace.measure.log import Ended, RunLog
from rlplace.measure.pool import first_pool
from rlplace.measure.session import Session, run_of, transferable
from rlplace.measure.world import Truth
from rlplace.plan.plan import PlacementPlan
from rlplace.planned import Planned
from rlplace.strategy.drafts import draft_of_strategy
from rlplace.strategy.search.plan import prediction
from rlplace.strategy.search.search import search
from tests.measure.worlds import question


def planned(asked):
    draft = search(asked, calls=120).ranked[0].draft
    plan = PlacementPlan(
        "1" * 64, "strategy", 0, np.zeros(0, dtype=np.int32), strategy=draft.strategy(asked.costs.names),
        predicted=prediction(asked.scores.evaluate(draft), asked.batch, asked.cluster),
    )  # fmt: skip
    return Planned(plan, asked.cluster, search_problem=asked)


def cluster_of(truth, seed=0):
    """Runs plans as a truth says, and counts them."""
    rng, counts = np.random.default_rng(seed), SimpleNamespace(runs=0)

    def run(plan):
        counts.runs += 1
        return truth.run(draft_of_strategy(plan.strategy, truth.question.costs.names), rng)

    return run, counts


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_five_runs_end_near_the_best_of_the_truth(seed):
    asked = question(seed, "a100-80g:2+t4:2")
    truth = Truth.drawn(asked, seed)
    run, counts = cluster_of(truth)
    session = Session(planned(asked), run)
    ran = list(session.runs(5))
    assert len(ran) == counts.runs == 5 and len({repr(one.strategy) for _, one in ran}) == 5
    drafts = [*session.belief.pool.drafts, *(tried.draft for tried in search(truth.true_problem, calls=300).ranked[:20])]
    least_s = min(truth.step_s(draft) for draft in drafts if truth.share(draft) <= 1)
    plan, best = session.best()
    assert best.step_s == min(one.median_s for _, one in ran if one.median_s)
    assert truth.step_s(draft_of_strategy(plan.strategy, asked.costs.names)) < 1.1 * least_s
    left, expected_s = session.left_to_gain()
    assert left.strategy != plan.strategy and expected_s > 0


@pytest.mark.slow
def test_a_session_goes_on_where_it_ended(tmp_path):
    asked, path = question(), tmp_path / "a.runs.jsonl"
    plan, truth = planned(asked), Truth.drawn(asked, 5)
    run, _ = cluster_of(truth)
    first = list(Session(plan, run, log=RunLog(path)).runs(2))
    again, counts = cluster_of(truth, 1)
    session = Session(plan, again, log=RunLog(path))
    assert len(session.belief.observations) == 2
    more = list(session.runs(2))
    assert counts.runs == 2 and not {repr(one.strategy) for _, one in first} & {repr(one.strategy) for _, one in more}
    elsewhere = Session(plan, again, log=RunLog(path), site="another")
    assert not elsewhere.belief.observations


def runs_elsewhere(asked, factor):
    """Every candidate, so many times as long as predicted."""
    here = first_pool(asked, calls=120)
    return [
        run_of(draft, said, asked.costs.names, asked.cluster, status="done", step_s=(factor * said.step_time_s,))
        for draft, said in zip(here.drafts, here.steps, strict=True)
    ]


@pytest.mark.slow
def test_a_session_begins_with_what_runs_elsewhere_tell():
    asked = question()
    plan, (run, _) = planned(asked), cluster_of(Truth.drawn(asked, 5))
    others = transferable(runs_elsewhere(question(3), 2.0), asked.cluster)
    _, plain = next(Session(plan, run).runs(1))
    session = Session(plan, run, elsewhere=others)
    _, first = next(session.runs(1))
    assert first.expected_s / first.predicted_s > 1.3 * plain.expected_s / plain.predicted_s
    assert session.belief.elsewhere == others and len(session.belief.observations) == 1


@pytest.mark.slow
def test_runs_that_tell_nothing_of_a_cluster_are_refused():
    asked, mixed = question(), question(0, "a100-80g:2+t4:2")
    runs = runs_elsewhere(asked, 1.2)
    lost = msgspec.structs.replace(runs[0], status="crashed", step_s=())
    elsewhere = runs_elsewhere(mixed, 1.2)
    assert transferable([*runs, lost, *elsewhere], asked.cluster) == tuple(runs)
    with pytest.raises(InputError, match=r"nothing of a100-80g: they hold a100-80g\+t4; leave them out"):
        transferable([lost, *elsewhere], asked.cluster)
    with pytest.raises(InputError, match="nothing that worked"):
        transferable([lost], asked.cluster)
    with pytest.raises(InputError, match="1 features of its strategy, this version 21"):
        transferable([msgspec.structs.replace(runs[0], features=(1.0,))], asked.cluster)


@pytest.mark.slow
def test_where_nothing_works_it_says_so():
    asked = question()
    session = Session(planned(asked), lambda plan: Ended(status="crashed", reason="no such network"))
    for _, one in session.runs(3):
        assert one.status == "crashed"
    with pytest.raises(InfeasibleError, match="none of 3"):
        session.best()
    with pytest.raises(InputError, match="calibrate"):
        Session(planned(asked), lambda plan: Ended(status="crashed"), rule="nonsense")


def test_candidates_hold_the_answer_and_what_needs_less_memory():
    asked = question(0)
    pool = first_pool(asked, calls=120)
    assert math.isclose(pool.by_model_s.min(), min(asked.scores.evaluate(d).step_time_s for d in pool.drafts), rel_tol=1e-9)
    assert len(set(pool.drafts)) == len(pool.drafts) > 4
    assert pool.with_drafts(pool.drafts, asked).drafts == pool.drafts
