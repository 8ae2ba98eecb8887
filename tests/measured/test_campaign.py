"""Campaigns: what is measured, what is remembered, what it costs, and what a cluster that changes does to it."""

import numpy as np
import pytest
from simulated_cluster import Clock, SimulatedCluster, random_plans

from rlplace.errors import InputError
from rlplace.measured import campaign as campaign_module
from rlplace.measured.campaign import Campaign, PlanFailed
from rlplace.measured.site import Site
from rlplace.measured.store import TrialStore
from rlplace.measured.trial import FAILED, Budget, BudgetSpent, Spent
from rlplace.problem.generate import random_problem

PROBLEM = random_problem(1, 8, 2)
OTHER = random_problem(2, 8, 2)
PLANS = random_plans(PROBLEM, 60)
SITE, OTHER_SITE = Site("lab", {"device": "cpu"}), Site("attic", {"device": "cpu", "label": "slow"})


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(campaign_module, "time", clock)
    return clock


@pytest.fixture
def cluster(clock):
    return lambda truth=PROBLEM, **options: SimulatedCluster(truth, clock=clock, **options)


def open_store(path):
    store = TrialStore(path)
    for site in (SITE, OTHER_SITE):
        store.add_site(site)
    return store


def key(plan):
    return tuple(plan.tolist())


def measured(campaign):
    """Facts of a campaign's trials, in their order."""
    return [(t.device_of_group, t.status, t.step_s, t.anchor, t.began_at, t.run, t.places) for t in campaign.trials]


# What is measured


def test_a_known_plan_is_never_run_twice(cluster):
    timer = cluster()
    campaign = Campaign(PROBLEM, timer, retime_every=0)
    first = [campaign.measure(plan) for plan in PLANS[:5]]
    assert [campaign.measure(plan) for plan in PLANS[:5]] == first
    assert campaign.measure([int(device) for device in PLANS[0]]) == first[0] == campaign.known(PLANS[0])
    assert campaign.known(PLANS[9]) is None
    assert set(timer.runs.values()) == {1} and len(timer.runs) == 5
    assert campaign.spent.plans == 5 == len(campaign.trials)
    assert [len(trial.step_s) for trial in first if trial.status == "done"] == [5] * sum(t.status == "done" for t in first)


def test_what_the_timer_gets_and_what_becomes_of_it(cluster):
    timer = cluster()
    seen = []
    campaign = Campaign(PROBLEM, timer, run="a", repeats=3, on_trial=seen.append)
    trial = campaign.measure(PLANS[0])
    assert (trial.problem, trial.site, trial.run, trial.mode) == (PROBLEM.fingerprint, "", "a", "computed")
    assert (trial.engine, trial.anchor) == ("simulated", False)
    assert len(trial.step_s) == 3 and trial.setup_s == 0.5 and trial.places and seen == [trial]
    plan = campaign.plan(trial)
    assert key(plan.device_of_group) == key(PLANS[0])
    assert campaign.seconds(trial) == trial.median_s == pytest.approx(timer.true_s(PLANS[0]), rel=0.1)


def test_slow_plans_are_dropped_and_never_the_best(cluster):
    timer = cluster()
    campaign = Campaign(PROBLEM, timer)
    fast = min(PLANS, key=timer.true_s)
    slow = [plan for plan in PLANS if timer.true_s(plan) > 1.3 * timer.true_s(fast)]
    assert slow
    campaign.measure(fast)
    for plan in slow[:5]:
        trial = campaign.measure(plan)
        assert trial.status == "dropped" and 1 <= len(trial.step_s) < 5 and trial.places
    assert campaign.best().device_of_group == key(fast)


# Budgets


def test_a_budget_of_plans_counts_failures_but_no_repeated_timings(cluster):
    timer = cluster(fails=lambda plan: "crashed" if sum(plan) % 2 else None)
    campaign = Campaign(PROBLEM, timer, budget=Budget(plans=12), retime_every=3)
    for plan in PLANS[:12]:
        campaign.measure(plan)
    assert campaign.spent.plans == 12 and campaign.share == 1.0
    assert sum(trial.anchor for trial in campaign.trials) >= 2
    ran = sum(timer.runs.values())
    with pytest.raises(BudgetSpent):
        campaign.measure(PLANS[12])
    assert sum(timer.runs.values()) == ran and len(campaign.trials) == ran
    assert campaign.measure(PLANS[0]) == campaign.known(PLANS[0]), "what is known costs nothing"


def test_a_budget_of_steps(cluster):
    timer = cluster()
    campaign = Campaign(PROBLEM, timer, budget=Budget(plans=None, steps=40))
    with pytest.raises(BudgetSpent):
        for plan in PLANS:
            campaign.measure(plan)
    assert campaign.spent.steps == sum(len(trial.step_s) for trial in campaign.trials)
    assert 40 <= campaign.spent.steps < 40 + 2 * 5, "at most the last plan and its repeated timing go over"


def test_a_budget_of_minutes(cluster, clock):
    timer = cluster(setup_s=6.0)
    began_s = clock.now_s
    campaign = Campaign(PROBLEM, timer, budget=Budget(plans=None, minutes=1.0))
    with pytest.raises(BudgetSpent):
        for plan in PLANS:
            campaign.measure(plan)
    assert campaign.spent.minutes == pytest.approx((clock.now_s - began_s) / 60.0)
    assert 1.0 <= campaign.spent.minutes < 1.3


@pytest.mark.parametrize("status", FAILED)
def test_failures_cost_their_minutes(cluster, clock, status):
    timer = cluster(setup_s=6.0, fails=lambda plan: status)
    campaign = Campaign(PROBLEM, timer, budget=Budget(plans=None, minutes=1.0))
    with pytest.raises(BudgetSpent):
        for plan in PLANS:
            campaign.measure(plan)
    assert len(campaign.trials) == 10


def test_the_nearest_limit_counts():
    budget = Budget(plans=10, steps=100, minutes=5.0)
    assert Spent(plans=5, steps=10, minutes=1.0).share(budget) == 0.5
    assert Spent(plans=5, steps=90, minutes=1.0).share(budget) == 0.9
    assert Spent(plans=5, steps=90, minutes=50.0).share(budget) == 1.0
    assert Spent(plans=5, steps=90, minutes=50.0).share(Budget(plans=None)) == 0.0


@pytest.mark.parametrize(
    "wrong",
    [{name: value} for name in ("plans", "steps", "minutes") for value in (0, -1, True, float("nan"), "many", [])],
    ids=str,
)
def test_hostile_budgets(wrong):
    with pytest.raises(InputError, match="budget"):
        Budget(**wrong)


# Failures


@pytest.mark.parametrize("status", FAILED)
def test_a_failure_counts_and_is_not_tried_again(cluster, tmp_path, status):
    bad = key(PLANS[1])
    timer = cluster(fails=lambda plan: status if plan == bad else None)
    with open_store(tmp_path / "trials") as store:
        campaign = Campaign(PROBLEM, timer, store=store, site=SITE.fingerprint, run="a")
        for plan in PLANS[:3]:
            campaign.measure(plan)
        trial = campaign.known(PLANS[1])
        assert trial.status == status and "made to be" in trial.reason and not trial.timed
        assert campaign.seconds(trial) == float("inf") and campaign.best().device_of_group != bad
        assert campaign.measure(PLANS[1]) == trial and campaign.spent.plans == 3
    with open_store(tmp_path / "trials") as store:
        again = Campaign(PROBLEM, timer, store=store, site=SITE.fingerprint, run="a")
        assert again.measure(PLANS[1]).status == status and timer.runs[bad] == 1


def test_only_failures_leave_no_best_plan(cluster):
    campaign = Campaign(PROBLEM, cluster(fails=lambda plan: "out_of_memory"), retime_every=2)
    for plan in PLANS[:6]:
        campaign.measure(plan)
    assert campaign.best() is None and campaign.time_again() is None and campaign.spent.steps == 0
    assert campaign.drift_at(1e9) == 1.0


def test_a_best_plan_that_fails_when_timed_again_keeps_its_time(cluster):
    failing = []
    timer = cluster(fails=lambda plan: "crashed" if plan in failing else None)
    campaign = Campaign(PROBLEM, timer, retime_every=0)
    trial = campaign.measure(PLANS[0])
    failing.append(key(PLANS[0]))
    assert campaign.time_again().status == "crashed"
    assert campaign.best() == trial and campaign.seconds(trial) == trial.median_s and campaign.drift_at(2e6) == 1.0


def test_plan_failed_knows_its_statuses():
    with pytest.raises(ValueError):
        PlanFailed("done", "no failure")


class Died(BaseException):
    """The process is gone: nothing after the timer runs."""


def dies(plan, race):
    raise Died


def test_a_job_that_died_in_mid_plan_has_crashed(cluster, tmp_path):
    timer = cluster()
    with open_store(tmp_path / "trials") as store:
        campaign = Campaign(PROBLEM, timer, store=store, site=SITE.fingerprint, run="a")
        campaign.measure(PLANS[0])
        with pytest.raises(Died):
            Campaign(PROBLEM, dies, store=store, site=SITE.fingerprint, run="a").measure(PLANS[1])
    with open_store(tmp_path / "trials") as store:
        again = Campaign(PROBLEM, timer, store=store, site=SITE.fingerprint, run="a")
        trial = again.known(PLANS[1])
        assert trial is not None and trial.status == "crashed" and "ended" in trial.reason
        assert again.measure(PLANS[1]) == trial and timer.runs[key(PLANS[1])] == 0
        assert again.spent.plans == 2
    with open_store(tmp_path / "trials") as store:
        assert store.interrupted("a") == []


def test_opening_a_campaign_leaves_the_running_trials_of_others_alone(cluster, tmp_path):
    """Two clusters share a file: opening the campaign of one must not end what the other is measuring under the same name."""
    elsewhere = [
        {"problem": OTHER, "site": SITE.fingerprint},
        {"problem": PROBLEM, "site": OTHER_SITE.fingerprint},
        {"problem": PROBLEM, "site": SITE.fingerprint, "mode": "replayed"},
    ]
    for number, options in enumerate(elsewhere):
        with open_store(tmp_path / f"trials{number}") as store:
            inner = cluster(options["problem"])

            def timer(plan, race, store=store, inner=inner):
                Campaign(PROBLEM, cluster(), store=store, site=SITE.fingerprint, run="a")
                return inner(plan, race)

            other = Campaign(options.pop("problem"), timer, store=store, run="a", **options)
            assert other.measure(PLANS[0]).status == "done"


def test_an_interrupt_leaves_no_trial(cluster, tmp_path):
    with open_store(tmp_path / "trials") as store:

        def interrupted(plan, race):
            raise KeyboardInterrupt

        campaign = Campaign(PROBLEM, interrupted, store=store, site=SITE.fingerprint, run="a")
        with pytest.raises(KeyboardInterrupt):
            campaign.measure(PLANS[0])
        assert campaign.trials == [] and campaign.known(PLANS[0]) is None and campaign.spent == Spent()
        assert store.trials(include_running=True) == []
    timer = cluster()
    with open_store(tmp_path / "trials") as store:
        again = Campaign(PROBLEM, timer, store=store, site=SITE.fingerprint, run="a")
        assert again.measure(PLANS[0]).status == "done", "it may be tried again"


def test_a_plan_of_wrong_shape_leaves_no_trial(cluster, tmp_path):
    with open_store(tmp_path / "trials") as store:
        campaign = Campaign(PROBLEM, cluster(), store=store, site=SITE.fingerprint, run="a")
        for wrong in ([0] * 7, [0] * 9, [2] * 8, [-1] * 8, []):
            with pytest.raises(InputError):
                campaign.measure(wrong)
        assert campaign.trials == [] and store.trials(include_running=True) == []


# Resuming


def test_a_resumed_campaign_is_where_it_was(cluster, tmp_path):
    timer = cluster(fails=lambda plan: "crashed" if sum(plan) == 3 else None)
    options = {"site": SITE.fingerprint, "run": "a", "budget": Budget(plans=20), "retime_every": 5}
    with open_store(tmp_path / "trials") as store:
        campaign = Campaign(PROBLEM, timer, store=store, **options)
        for plan in PLANS[:14]:
            campaign.measure(plan)
        before = measured(campaign), campaign.spent, campaign.best(), campaign.share, campaign.noise
        times = [campaign.seconds(trial) for trial in campaign.trials]
    with open_store(tmp_path / "trials") as store:
        again = Campaign(PROBLEM, timer, store=store, **options)
        assert (measured(again), again.spent, again.best(), again.share, again.noise) == before
        assert [again.seconds(trial) for trial in again.trials] == times
        with pytest.raises(BudgetSpent):
            for plan in PLANS:
                again.measure(plan)
        assert again.spent.plans == 20
        anchors = [trial for trial in again.trials if trial.anchor]
        assert len(anchors) == 3, "after 5, 10 and 15 plans; the budget was spent after 20"
        assert all(timer.runs[key(plan)] - sum(t.device_of_group == key(plan) for t in anchors) == 1 for plan in PLANS[:20])


# Several campaigns in one file


def test_campaigns_learn_from_earlier_ones_at_no_cost(cluster, tmp_path):
    timer = cluster()
    with open_store(tmp_path / "trials") as store:
        first = Campaign(PROBLEM, timer, store=store, site=SITE.fingerprint, run="a")
        for plan in PLANS[:5]:
            first.measure(plan)
        second = Campaign(PROBLEM, timer, store=store, site=SITE.fingerprint, run="b")
        assert len(second.trials) == 5 and second.spent == Spent() and second.best() == first.best()
        second.measure(PLANS[0])
        assert second.spent.plans == 0
        second.measure(PLANS[7])
        assert second.spent.plans == 1 and set(timer.runs.values()) == {1}


def test_clusters_problems_and_modes_never_mix(cluster, tmp_path):
    kinds = [
        {"site": SITE.fingerprint},
        {"site": OTHER_SITE.fingerprint},
        {"site": ""},
        {"site": SITE.fingerprint, "mode": "replayed"},
        {"site": SITE.fingerprint, "problem": OTHER},
    ]
    with open_store(tmp_path / "trials") as store:
        campaigns = []
        for number, kind in enumerate(kinds):
            problem, options = kind.get("problem", PROBLEM), {k: v for k, v in kind.items() if k != "problem"}
            timer = cluster(problem, slowdown=lambda now_s, number=number: 1.0 + number)
            campaign = Campaign(problem, timer, store=store, run=f"run{number}", **options)
            assert campaign.trials == [] and campaign.known(PLANS[0]) is None
            trial = campaign.measure(PLANS[0])
            assert trial.median_s == pytest.approx((1 + number) * timer.true_s(PLANS[0]), rel=0.1)
            campaigns.append((campaign, timer, problem, options))
        for number, (campaign, timer, problem, options) in enumerate(campaigns):
            again = Campaign(problem, timer, store=store, run=f"run{number}", **options)
            assert measured(again) == measured(campaign) and len(again.trials) == 1 == sum(timer.runs.values())


def test_a_cluster_that_the_store_does_not_know(cluster, tmp_path):
    with TrialStore(tmp_path / "trials") as store:
        campaign = Campaign(PROBLEM, cluster(), store=store, site=SITE.fingerprint)
        with pytest.raises(InputError, match="cluster"):
            campaign.measure(PLANS[0])


# Drift


def play(campaign, plans, clock, wait_s=10.0):
    for plan in plans:
        campaign.measure(plan)
        clock.now_s += wait_s


def like_the_best(timer, count):
    """Plans in random order of which some are close to the best one."""
    ranked = sorted(PLANS, key=timer.true_s)
    rng = np.random.default_rng(0)
    return [ranked[k] for k in rng.permutation(count)]


@pytest.mark.parametrize("factor", [1.3, 0.7])
def test_a_cluster_that_changes_half_way_is_noticed(cluster, clock, factor):
    change_s = clock.now_s + 20 * 11.0
    timer = cluster(slowdown=lambda now_s: factor if now_s > change_s else 1.0, noise=0.02)
    campaign = Campaign(PROBLEM, timer, retime_every=5)
    plans = like_the_best(timer, 40)
    play(campaign, plans, clock)
    assert campaign.drift_at(clock.now_s) == pytest.approx(factor, rel=0.06)
    assert campaign.drift_at(change_s - 60.0) == pytest.approx(1.0, abs=0.05)
    anchors = sorted(t.began_at for t in campaign.trials if t.anchor)
    between = max(t for t in anchors if t <= change_s), min(t for t in anchors if t > change_s)
    wrong = {"before": [], "after": []}
    for trial in campaign.trials:
        if not trial.anchor and not between[0] <= trial.began_at <= between[1]:
            when = "after" if trial.began_at > change_s else "before"
            wrong[when].append(campaign.seconds(trial) / timer.true_s(trial.device_of_group))
    assert len(wrong["before"]) > 8 and len(wrong["after"]) > 8
    assert np.median(wrong["after"]) == pytest.approx(np.median(wrong["before"]), rel=0.04)
    assert np.abs(np.array(wrong["before"] + wrong["after"]) - 1.0).max() < 0.1


def test_the_best_plan_is_found_on_a_cluster_that_changes(cluster, clock):
    """Without the correction a mediocre plan from before would beat the best plan, which was measured afterwards."""
    change_s = clock.now_s + 20 * 11.0
    timer = cluster(slowdown=lambda now_s: 1.3 if now_s > change_s else 1.0, noise=0.01)
    ranked = sorted(PLANS, key=timer.true_s)
    campaign = Campaign(PROBLEM, timer, retime_every=5)
    play(campaign, [*ranked[5:45], ranked[0]], clock)
    assert timer.true_s(campaign.best().device_of_group) <= 1.01 * timer.true_s(ranked[0])


def test_a_steady_decline_is_followed(cluster, clock):
    began_s = clock.now_s
    timer = cluster(slowdown=lambda now_s: 1.0 + (now_s - began_s) / 1000.0, noise=0.01)
    campaign = Campaign(PROBLEM, timer, retime_every=5)
    play(campaign, like_the_best(timer, 50), clock)
    for trial in campaign.trials:
        if not trial.anchor:
            assert campaign.seconds(trial) == pytest.approx(timer.true_s(trial.device_of_group), rel=0.1)


def test_noise_is_no_drift(cluster, clock):
    moved = []
    for seed in range(20):
        timer = cluster(noise=0.05, seed=seed)
        campaign = Campaign(PROBLEM, timer, retime_every=5)
        play(campaign, like_the_best(timer, 30), clock)
        moved += [abs(campaign.drift_at(trial.began_at) - 1.0) for trial in campaign.trials if trial.anchor]
    assert np.mean(np.array(moved) > 0.0) < 0.03
    assert np.mean(moved) < 0.005


def test_a_lucky_time_is_no_drift(cluster, clock):
    """The best of many like plans was lucky: when it is timed again, its time is corrected and the cluster is not blamed."""
    lucky, corrected = [], []
    for seed in range(20):
        timer = cluster(noise=0.05, seed=seed)
        ranked = sorted(PLANS, key=timer.true_s)
        like = [plan for plan in ranked if timer.true_s(plan) < 1.1 * timer.true_s(ranked[0])]
        campaign = Campaign(PROBLEM, timer, retime_every=0, repeats=3)
        play(campaign, like, clock)
        best = campaign.best()
        lucky.append(campaign.seconds(best) / timer.true_s(best.device_of_group))
        for _ in range(4):
            campaign.time_again(best)
        assert campaign.drift_at(clock.now_s) == 1.0
        corrected.append(campaign.seconds(best) / timer.true_s(best.device_of_group))
    assert np.mean(lucky) < 0.97 and abs(np.mean(corrected) - 1.0) < 0.5 * abs(np.mean(lucky) - 1.0)
