"""Tuning on measured plans: the loop on simulated clusters, what it proposes, what it learns, and what it saves."""

import copy
import dataclasses
import hashlib
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from simulated_cluster import SimulatedCluster, random_plans

from rlplace.agents.card import save_tuned, weights_sha256
from rlplace.agents.cases import Case
from rlplace.agents.checkpoint import load_checkpoint
from rlplace.agents.planner import load_agent
from rlplace.agents.tuning.belief import Pool, believe
from rlplace.agents.tuning.learn import Lesson, fit_moves, price_moves
from rlplace.agents.tuning.offline import finetune_offline, measurements_of
from rlplace.agents.tuning.proposer import AgentProposer, Residual
from rlplace.agents.tuning.tune import first_plans, tune
from rlplace.comparing.closing import compare_skills
from rlplace.envs import MeasuredBackend, RefinementEnv
from rlplace.envs.instance import make_instance
from rlplace.errors import InfeasibleError, InputError
from rlplace.measured.campaign import Campaign
from rlplace.measured.correction import corrected, no_correction
from rlplace.measured.store import TrialStore
from rlplace.measured.trial import Budget, BudgetSpent
from rlplace.problem.generate import random_problem
from rlplace.simulator import simulate


def make_problem(seed=5, groups=14, devices=3, *, shape="layered", **options):
    """With a sending and a receiving channel for each device."""
    problem = random_problem(seed, groups, devices, shape=shape, comm_ratio=0.7, **options)
    cards = tuple(tuple(() if i == j else (i, devices + j) for j in range(devices)) for i in range(devices))
    return dataclasses.replace(problem, links=dataclasses.replace(problem.links, channels=cards))


PROBLEM = make_problem()


def change(problem, **parts):
    return corrected(problem, dataclasses.replace(no_correction(problem), **parts))


def slow_device(problem, factor=2.0):
    return change(problem, device_factor=np.where(np.arange(problem.num_devices) == 1, factor, 1.0))


def slow_card(problem):
    factors = np.ones(2 * problem.num_devices)
    factors[[2, 2 + problem.num_devices]] = 5.0
    return change(problem, channel_slowdown=factors)


@pytest.fixture(scope="module")
def agent():
    return load_agent("default")


class Recording:
    """A proposer that remembers what it has proposed, and whether it was known."""

    def __init__(self, inner):
        self.inner, self.proposed, self.known = inner, [], []

    def propose(self, belief, *, calls, number):
        plan = self.inner.propose(belief, calls=calls, number=number)
        if plan is not None:
            self.proposed.append(plan)
            self.known.append(tuple(plan.tolist()) in belief.known)
        return plan


def run_tuning(agent, problem, truth, *, plans=11, fails=lambda plan: None, noise=0.01):
    """The result, its proposals, its cluster, and the plan of the agent as it was."""
    cluster = SimulatedCluster(truth, noise=noise, fails=fails)
    before = agent.place(problem, calls=256).device_of_group
    campaign = Campaign(problem, cluster, budget=Budget(plans=plans), repeats=3)
    proposer = Recording(AgentProposer(agent.checkpoint))
    tuned = tune(campaign, proposer, first_plans(problem, 6, first=before), calls=192)
    return tuned, proposer, cluster, campaign, before


def test_tuning_finds_faster_plans(agent):
    gains = []
    for problem, truth in (
        (PROBLEM, slow_device),
        (make_problem(shape="wavefront", memory_factor=1.8), slow_card),
        (make_problem(groups=10, shape="branchy"), slow_device),
    ):
        tuned, proposer, cluster, campaign, before = run_tuning(agent, problem, truth(problem))
        best = np.array(tuned.best.device_of_group, dtype=np.int32)
        gains.append(cluster.true_s(best) / cluster.true_s(before))
        assert tuned.seconds == pytest.approx(cluster.true_s(best), rel=0.05)
        assert tuned.finished and tuned.proposed == len(proposer.proposed) == 5 and campaign.spent.plans == 11
        assert tuned.belief.fit.error_after < tuned.belief.fit.error_before
        assert not any(proposer.known) and len({tuple(plan.tolist()) for plan in proposer.proposed}) == 5
        for plan in proposer.proposed:
            assert plan.dtype == np.int32 and simulate(problem, plan).feasible
        ran = [trial.device_of_group for trial in campaign.trials if not trial.anchor]
        assert len(set(ran)) == len(ran) == 11
    assert max(gains) <= 1.01 and min(gains) < 0.85


def test_tuning_goes_on_when_plans_fail(agent):
    def fails(plan):
        return ("crashed", "out_of_memory", "refused")[sum(plan) % 3] if plan[3] == plan[4] else None

    tuned, proposer, cluster, campaign, _ = run_tuning(agent, PROBLEM, slow_device(PROBLEM), plans=9, fails=fails)
    statuses = {trial.status for trial in campaign.trials}
    assert statuses & {"crashed", "out_of_memory", "refused"} and fails(tuned.best.device_of_group) is None
    assert tuned.best.status == "done" and not any(proposer.known)
    assert all(count == 1 for plan, count in cluster.runs.items() if fails(plan)), "failures are not tried again"


def test_nothing_works(agent):
    with pytest.raises(InfeasibleError, match=r"none of \d+ measured plans worked.*made to be refused"):
        run_tuning(agent, PROBLEM, PROBLEM, fails=lambda plan: "refused")
    with pytest.raises(InfeasibleError, match="none of 3 measured plans worked"):
        run_tuning(agent, PROBLEM, PROBLEM, fails=lambda plan: "crashed", plans=3)


def test_small_problems_are_measured_to_the_end(agent):
    problem = random_problem(1, 3, 2)
    everything = set(itertools.product(range(2), repeat=3))
    cluster = SimulatedCluster(problem)
    campaign = Campaign(problem, cluster, budget=Budget(plans=50))
    tuned = tune(campaign, AgentProposer(agent.checkpoint, learn=False), first_plans(problem, 2), calls=32)
    assert not tuned.finished and set(cluster.runs) == everything
    assert cluster.true_s(tuned.best.device_of_group) <= 1.03 * min(map(cluster.true_s, everything))


# First plans and the pool


@pytest.mark.parametrize("options", [{}, {"memory_factor": 1.5}, {"null_fraction": 0.3}], ids=str)
def test_first_plans(options):
    problem = make_problem(groups=16, **options)
    plans = first_plans(problem, 8)
    assert len(plans) == 8 == len({tuple(plan.tolist()) for plan in plans})
    lines = [simulate(problem, plan) for plan in plans]
    assert all(line.feasible for line in lines) and all(plan.dtype == np.int32 for plan in plans)
    assert (
        max(line.step_time_s for line in lines) <= 4.001 * lines[0].step_time_s == 4.001 * min(one.step_time_s for one in lines)
    )
    devices, pairs = set(), set()
    producer = problem.tensor_producer[problem.edge_tensor]
    for plan in plans:
        devices |= set(plan.tolist())
        source = np.where(producer >= 0, problem.op_group[np.maximum(producer, 0)], problem.tensor_owner[problem.edge_tensor])
        pairs |= set(zip(plan[source].tolist(), plan[problem.op_group[problem.consumers]].tolist(), strict=True))
    assert devices == {0, 1, 2}
    assert len({(i, j) for i, j in pairs if i != j}) == 6, "every link is used by some plan"


def test_first_plans_begin_with_a_given_one():
    given = random_plans(PROBLEM, 1, seed=7)[0]
    plans = first_plans(PROBLEM, 5, first=given)
    assert np.array_equal(plans[0], given) and len({tuple(plan.tolist()) for plan in plans}) == 5
    assert first_plans(PROBLEM, 1, first=given)[0] is not None
    again = first_plans(PROBLEM, 5, first=given)
    assert all(np.array_equal(a, b) for a, b in zip(plans, again, strict=True))


def some_belief(problem=PROBLEM, count=6, **options):
    campaign = Campaign(problem, SimulatedCluster(problem, **options), retime_every=0)
    for plan in first_plans(problem, count):
        campaign.measure(plan)
    return believe(campaign)


def test_a_belief_knows_all_trials():
    belief = some_belief()
    assert belief.plans.shape == (6, 14) and len(belief.known) == 6 == len(belief.seconds) == len(belief.noise)
    assert np.array_equal(belief.incumbent, belief.plans[belief.seconds.argmin()])
    assert simulate(belief.problem, belief.floor).feasible
    store, cluster = TrialStore(None), SimulatedCluster(PROBLEM)
    campaign = Campaign(PROBLEM, cluster, store=store, run="a")
    for plan in random_plans(PROBLEM, 3):
        campaign.measure(plan)
    assert campaign.time_again() is not None and len(campaign.trials) == 4
    assert len(believe(Campaign(PROBLEM, cluster, store=store, run="b")).plans) == 3, "plans are distinct"
    failing = Campaign(PROBLEM, SimulatedCluster(PROBLEM, fails=lambda plan: "crashed"))
    failing.measure(random_plans(PROBLEM, 1)[0])
    assert believe(failing) is None


def test_the_pool_holds_new_plans_that_fit():
    problem = make_problem(memory_factor=1.5)
    belief = some_belief(problem)
    pool = Pool(belief)
    pool.add(belief.plans)
    assert len(pool) == 0 and pool.calls == 0
    plans = np.array(random_plans(problem, 60))
    pool.add(np.concatenate([plans, plans]))
    table, step_s = pool.table()
    fits = [plan for plan in plans if simulate(problem, plan).feasible]
    assert len(pool) == len(fits) == len({tuple(plan.tolist()) for plan in table}) > 0 and len(fits) < 60
    assert step_s.tolist() == [simulate(belief.problem, plan).step_time_s for plan in table]


def test_the_pool_is_filled_with_at_least_one_plan():
    belief = some_belief()
    for seed in range(5):
        pool = Pool(belief)
        pool.fill(np.random.default_rng(seed), 0)
        assert len(pool) == 1
    pool.fill(np.random.default_rng(9), 20)
    assert 1 < len(pool) <= 21


def test_residuals_are_remembered_near_and_forgotten_far():
    rng = np.random.default_rng(0)
    base = rng.integers(0, 3, 20)
    plans = np.array(random_plans(make_problem(groups=20), 30, around=base))
    effect = 0.1 * rng.normal(size=(20, 3)) / np.sqrt(20) * 3
    truth = lambda table: np.array([effect[np.arange(20), plan].sum() for plan in table])  # noqa: E731
    target = truth(plans) - truth(plans[:1])
    residual = Residual(plans, target, np.full(30, 0.002))
    mean, spread = residual.at(plans)
    assert mean == pytest.approx(target, abs=0.02) and (spread < residual.amplitude).all()
    near = plans.copy()
    near[np.arange(30), rng.integers(0, 20, 30)] += 1
    near %= 3
    guess = residual.at(near)[0]
    assert np.abs(guess - truth(near) + truth(plans[:1])).mean() < np.abs(truth(near) - truth(plans[:1])).mean()
    still = Residual(plans, 0.001 * rng.normal(size=30), np.full(30, 0.01))
    assert np.abs(still.at(near)[0]).max() < 0.005


# Learning in the simulator


def lesson_at(problem=PROBLEM, seed=0):
    instance = make_instance(problem)
    return price_moves(instance, [instance.floor], states=12, seed=seed)


def distance(network, start):
    with torch.no_grad():
        pairs = zip(network.parameters(), start.parameters(), strict=True)
        return math.sqrt(sum(float(((a - b) ** 2).sum()) for a, b in pairs))


def test_fitting_moves_lowers_the_loss_and_keeping_holds_weights(make_network):
    start = make_network()
    lesson = lesson_at()
    assert len(lesson.rows) == 12 and lesson.calls > 12
    moved, losses = {}, {}
    for keep in (0.0, 10.0):
        network = copy.deepcopy(start)
        losses[keep] = fit_moves(network, [lesson], steps=60, keep=keep, rate=1e-2)
        moved[keep] = distance(network, start)
        assert all(torch.isfinite(p).all() for p in network.parameters()) and not network.training
    assert 0.0 < moved[10.0] < 0.5 * moved[0.0]
    assert losses[0.0] < fit_moves(copy.deepcopy(start), [lesson], steps=4, rate=1e-9)
    assert losses[0.0] < losses[10.0]


def test_rehearsed_moves_are_not_unlearned(make_network):
    start = make_network()
    new, old = lesson_at(), lesson_at(make_problem(seed=11, shape="branchy"), seed=3)

    def loss_on(network, lesson):
        return fit_moves(copy.deepcopy(network), [lesson], steps=8, rate=1e-9)

    alone, along = copy.deepcopy(start), copy.deepcopy(start)
    fit_moves(alone, [new], steps=80, rate=1e-2)
    fit_moves(along, [new], rehearsed=[old], steps=80, rate=1e-2)
    assert loss_on(along, old) < loss_on(alone, old)
    assert loss_on(along, new) < loss_on(start, new)


def test_nothing_to_learn_changes_nothing(make_network):
    start = make_network()
    network = copy.deepcopy(start)
    assert math.isnan(fit_moves(network, [Lesson([], 0)], steps=10))
    assert distance(network, start) == 0.0


# Fine-tuning from a file


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A file of measurements of two problems."""
    path = tmp_path_factory.mktemp("log") / "trials"
    with TrialStore(path) as store:
        for problem, count in ((PROBLEM, 12), (make_problem(seed=6, groups=9), 10)):
            cluster = SimulatedCluster(
                slow_device(problem), fails=lambda plan, n=problem.num_groups: "crashed" if sum(plan) == n else None
            )
            campaign = Campaign(problem, cluster, store=store, run="a", repeats=3, retime_every=5)
            for plan in random_plans(problem, count, around=np.zeros(problem.num_groups, dtype=np.int32)):
                campaign.measure(plan)
    return path


def test_measurements_of_a_file(log):
    with TrialStore(log) as store:
        sets = measurements_of(store)
        trials = store.trials()
        with pytest.raises(InputError, match="no plan with times"):
            measurements_of(TrialStore(None))
    assert {found.problem.fingerprint for found in sets} == {trial.problem for trial in trials} and len(sets) == 2
    for found in sets:
        timed = [t for t in trials if t.problem == found.problem.fingerprint and t.timed]
        assert len(found.trials) == len({t.device_of_group for t in timed})
        assert sum(len(t.step_s) for t in found.trials) == sum(len(t.step_s) for t in timed), "repeated timings count"
        assert not any(trial.device_of_group for trial in found.trials if trial.status == "crashed")


def test_finetuning_from_a_file(log, agents):
    parent = agents["refinement"].checkpoint
    before = weights_sha256(parent.network)
    with TrialStore(log) as store:
        sets = measurements_of(store)
    lines = []
    learned = finetune_offline(parent, sets, steps=30, rehearse=0, report=lines.append)
    weights = list(learned.network.parameters())
    assert all(torch.isfinite(weight).all() for weight in weights) and distance(learned.network, parent.network) > 0.0
    assert weights_sha256(parent.network) == before, "the parent stays as it was"
    assert len(learned.fits) == 2 and learned.facts["plans"] == sum(len(found.trials) for found in sets)
    assert learned.facts["rehearsed_cases"] == 0 and learned.facts["loss"] is not None and lines
    assert all(
        after < before
        for before, after in zip(learned.facts["prediction_error_before"], learned.facts["prediction_error_after"], strict=True)
    )
    again = finetune_offline(parent, sets, steps=30, rehearse=0)
    assert weights_sha256(again.network) == weights_sha256(learned.network)


def files_of(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(Path(folder).iterdir())}


def test_saved_agents_know_where_they_come_from(make_checkpoint, make_network, tmp_path):
    make_checkpoint(tmp_path / "parent")
    parent = load_checkpoint(tmp_path / "parent")
    before = files_of(tmp_path / "parent")
    facts = {"plans": 12, "problems": ["a", "b"], "error": 0.25}
    save_tuned(tmp_path / "child", make_network(seed=1), parent, learned=facts)
    child = load_checkpoint(tmp_path / "child")
    save_tuned(tmp_path / "grandchild", make_network(seed=2), child, learned={"plans": 3})
    grandchild = load_checkpoint(tmp_path / "grandchild")
    assert files_of(tmp_path / "parent") == before
    assert weights_sha256(child.network) == weights_sha256(make_network(seed=1))
    assert child.environment == parent.environment == grandchild.environment
    ancestors = [(line["name"], line["weights_sha256"]) for line in grandchild.training["lineage"]]
    assert ancestors == [("parent", weights_sha256(parent.network)), ("child", weights_sha256(child.network))]
    assert child.training["tuned"] == facts
    assert grandchild.training["tuned"] == {"plans": 3}, "what the parent learned is in its own config"
    card = (tmp_path / "grandchild" / "card.md").read_text()
    assert card.startswith("# Agent grandchild") and "parent -> child" in card and weights_sha256(child.network) in card
    plan = load_agent(tmp_path / "child").place(PROBLEM, calls=32)
    assert plan.predicted.agent == "child" and plan.predicted.feasible


def test_an_agent_is_as_skilled_as_itself(agents):
    checkpoint = agents["refinement"].checkpoint
    hopeless = random_problem(1, 6, 2)
    hopeless = dataclasses.replace(hopeless, devices=tuple(dataclasses.replace(d, memory_bytes=1) for d in hopeless.devices))
    cases = [Case(f"case{k}", "test", random_problem(k, 10, 2)) for k in range(3)]
    done = []
    skills = compare_skills(
        checkpoint, checkpoint, [*cases, Case("hopeless", "test", hopeless)], calls=40, progress=done.append
    )
    assert (skills.before, skills.worse, skills.better, skills.worst) == (skills.after, 0, 0, 1.0)
    assert skills.cases == 3 and done == [1, 2, 3, 4] and 0.0 < skills.after <= 1.0 and skills.calls == 40
    assert compare_skills(checkpoint, checkpoint, []).after is None


# Environments on measured times


def legal_moves(env, rng):
    return int(rng.choice(np.flatnonzero(env.action_masks()[1:]) + 1))


@pytest.mark.parametrize("failing", [0.0, 0.5, 1.0])
def test_environments_on_a_campaign(failing):
    def fails(plan):
        return "out_of_memory" if hash(plan) % 100 < 100 * failing else None

    cluster = SimulatedCluster(slow_device(PROBLEM), fails=fails)
    campaign = Campaign(PROBLEM, cluster, budget=Budget(plans=30), repeats=2, retime_every=0)
    env = RefinementEnv([PROBLEM], backend=MeasuredBackend(campaign), max_moves=4)
    rng = np.random.default_rng(0)
    with pytest.raises(BudgetSpent):
        for episode in range(100):
            env.reset(seed=episode)
            over, total = False, 0.0
            while not over:
                _, reward, over, _, info = env.step(legal_moves(env, rng))
                assert math.isfinite(reward) and reward >= 0.0
                total += reward
            assert math.isfinite(info["step_time_s"]) and info["feasible"] == (info["relative_overflow"] == 0.0)
            plan = tuple(info["device_of_group"][: PROBLEM.num_groups].tolist())
            assert info["feasible"] == (fails(plan) is None)
            if info["feasible"]:
                assert info["step_time_s"] == campaign.seconds(campaign.known(plan))
    assert campaign.spent.plans == 30 and set(cluster.runs.values()) == {1}


def test_a_failed_plan_is_worse_than_any_that_works():
    bad = tuple(random_plans(PROBLEM, 1)[0].tolist())
    campaign = Campaign(PROBLEM, SimulatedCluster(PROBLEM, fails=lambda plan: "crashed" if plan == bad else None))
    env = RefinementEnv([PROBLEM], backend=MeasuredBackend(campaign), max_moves=2)
    env.reset(seed=0, options={"plan": np.array(bad, dtype=np.int32)})
    _, reward, *_ = env.step(legal_moves(env, np.random.default_rng(0)))
    assert 0.5 < reward < 10.0, "leaving a plan that crashed is worth more than any speed-up"


def test_a_campaign_for_each_problem():
    other = make_problem(seed=6, groups=9)
    campaigns = [Campaign(problem, SimulatedCluster(problem)) for problem in (PROBLEM, other)]
    env = RefinementEnv([PROBLEM, other], backend=MeasuredBackend(campaigns), max_moves=2)
    for number, campaign in enumerate(campaigns):
        env.reset(seed=0, options={"problem": number})
        assert len(campaign.trials) == 1
    backend = MeasuredBackend(campaigns[0])
    with pytest.raises(InputError, match="no campaign measures"):
        RefinementEnv([other], backend=backend).reset(seed=0)
