"""What runs tell: regression against conditioning written out, and memory by Bayes' rule."""

import dataclasses
import math

import msgspec
import numpy as np
import pytest

from rlplace.measure.belief import (
    ELSEWHERE,
    LEAST_CHANCE,
    NOISE,
    OWN,
    PACE_NOISE,
    RULES,
    Belief,
    Observation,
    expected_improvement,
)
from rlplace.measure.pool import first_pool, pool_of
from rlplace.measure.session import replan, run_of
from rlplace.measure.world import BENDS, SPREAD, Truth, World, Worlds, axes, linear, problem_in
from rlplace.strategy.drafts import Mesh, plain_draft
from tests.measure.worlds import pool, question


def tight():
    """The candidates on devices with hardly more memory than the fullest takes."""
    here = pool()
    return dataclasses.replace(here, share=here.share * (0.95 / here.share.max()))


def test_conditioning_is_that_of_a_joint_normal():
    belief = Belief(pool())
    mean, cover = belief.mean, belief.covariance
    runs = [(0, -0.1), (3, 0.2)]
    told = belief
    for number, shift in runs:
        told = told.update(Observation(number, math.exp(mean[number] + shift), 0.5))
    at = [number for number, _ in runs]
    precision = np.linalg.inv(cover)
    # The density of all step times times that of both measurements: precisions add up.
    for number in at:
        precision[number, number] += NOISE**-2
    shifts = np.zeros(len(mean))
    shifts[at] = [shift / NOISE**2 for _, shift in runs]
    np.testing.assert_allclose(told.mean, mean + np.linalg.solve(precision, shifts), atol=1e-5)
    np.testing.assert_allclose(told.covariance, np.linalg.inv(precision), atol=1e-5)
    assert (told.std <= belief.std + 1e-9).all() and told.std[at].max() < 1.1 * NOISE


def test_a_world_on_its_axes_is_found():
    """Truths that are worlds and nothing else: after all candidates ran, the least expected is the least."""
    asked, here = question(), pool()
    for seed in range(3):
        truth = dataclasses.replace(Truth.drawn(asked, seed))
        belief = Belief(here)
        seconds = [truth.world.seconds(truth.scores.evaluate(draft)) for draft in here.drafts]
        for number in range(0, len(seconds), 2):
            belief = belief.update(Observation(number, seconds[number], 0.5))
        unseen = np.arange(1, len(seconds), 2)
        error = np.abs(belief.mean - np.log(seconds))[unseen]
        before = np.abs(Belief(here).mean - np.log(seconds))[unseen]
        assert error.mean() < 0.5 * before.mean()
        assert (error / belief.std[unseen] < 4).all()


def test_memory_only_says_more_than_that():
    belief = Belief(tight())
    order = np.argsort(belief.pool.share)
    assert (np.diff(belief.fits[order]) <= 1e-9).all()  # what is fuller is less likely to fit
    fullest = int(order[-1])
    lost, fine = belief.update(Observation(fullest, None, out_of_memory=True)), belief.update(Observation(fullest, 1.0, None))
    others = order[:-1]
    assert (lost.fits[others] <= belief.fits[others] + 1e-9).all() and (fine.fits[others] >= belief.fits[others] - 1e-9).all()
    assert lost.fits[fullest] == 0 and fine.fits[fullest] == 1
    assert lost.world().slack > 1.01 * belief.world().slack >= fine.world().slack  # so steps take more than is predicted
    known = belief.update(Observation(fullest, 1.0, share=float(belief.pool.share[fullest]) * 1.3))
    assert known.world().slack == pytest.approx(1.3, rel=0.02)


def test_the_quickest_run_is_the_best():
    belief = Belief(pool()).update(Observation(3, None, out_of_memory=True))
    assert belief.best is None
    for number, step_s in enumerate((2.0, 1.0, 3.0)):
        belief = belief.update(Observation(number, step_s))
    assert belief.best.candidate == 1 and belief.untried.sum() == len(belief.untried) - 4


@pytest.mark.parametrize("rule", RULES)
def test_rules_run_nothing_twice_and_end(rule):
    rng, belief = np.random.default_rng(0), Belief(pool())
    truth = Truth.drawn(question(), 1)
    for _ in range(len(belief.pool.drafts)):
        number = RULES[rule](belief)
        assert belief.untried[number]
        outcome = truth.run(belief.pool.drafts[number], rng)
        step_s = outcome.step_s[0] if outcome.step_s else None
        belief = belief.update(Observation(number, step_s, outcome.share, outcome.status == "out_of_memory"))
    assert RULES[rule](belief) is None


def test_calibrating_after_one_run_beats_the_list_where_a_link_is_slow():
    """Copies are quickest by the cost model and slow in truth; one run tells, and what exchanges less is run next."""
    belief = Belief(pool())
    exchange = np.array([said.parts["exchange"] / said.step_time_s for said in belief.pool.steps])
    first = int(exchange.argmax())
    slow = belief.update(Observation(first, math.exp(belief.mean[first] + 1.0), 0.3))
    gained = slow.mean - belief.mean
    assert np.corrcoef(gained, exchange)[0, 1] > 0.5
    chosen = RULES["calibrate"](slow)
    assert exchange[chosen] < exchange[first] and slow.fits[chosen] > LEAST_CHANCE


def test_expected_improvement_of_a_normal():
    belief = Belief(tight()).update(Observation(0, 1.0))
    assert belief.fits.min() < 0.9
    even = dataclasses.replace(pool(), share=np.full(len(pool().drafts), 0.97))
    full, roomy = (Belief(one).update(Observation(0, 1.0)) for one in (even, pool()))
    assert roomy.fits.min() > 0.999 and full.fits[1:].max() < 0.95 and expected_improvement(roomy).max() > 0.01
    np.testing.assert_allclose(expected_improvement(full), expected_improvement(roomy) * full.fits, rtol=1e-3, atol=1e-9)
    rng = np.random.default_rng(1)
    drawn = rng.normal(belief.mean, belief.std, (200_000, len(belief.mean)))
    by_draws = np.maximum(0.0 - drawn, 0.0).mean(axis=0) * belief.fits
    np.testing.assert_allclose(expected_improvement(belief), by_draws, rtol=0.05, atol=2e-3)


@pytest.mark.slow
def test_a_slow_host_is_told_by_the_same_product_on_all():
    """Before any step time: the axes of the hosts, by Bayes' rule for one contrast."""
    asked, here = question(0, "h100:2x2,ib=400g"), pool(0, "h100:2x2,ib=400g")
    belief = Belief(here)
    slow = belief.update(Observation(0, None, pace_s=(1.2e-3,) * 2 + (1e-3,) * 2))
    names = axes(asked.cluster)
    first, second = (float(slow.axes[names.index(f"host {host}")]) for host in range(2))
    assert first == pytest.approx(-second) and first > 0
    before, heard = 2 * SPREAD["host"] ** 2, 2 * PACE_NOISE**2  # variances: of the contrast, and of it by both hosts' words
    assert SPREAD["host"] * (first - second) == pytest.approx(math.log(1.2) * before / (before + heard))
    assert slow.world().host[0] > 1.05 and slow.world().host[1] < 0.95
    twice = belief.update(Observation(0, None, pace_s=(2.4e-3,) * 2 + (2e-3,) * 2))  # both slower: nothing is known of that
    np.testing.assert_allclose(twice.axes, slow.axes, atol=1e-9)
    assert (slow.std <= belief.std + 1e-9).all()
    alone = Belief(pool())
    np.testing.assert_array_equal(alone.update(Observation(0, None, pace_s=(1.0, 2.0, 1.0, 1.0))).mean, alone.mean)


def two_stages():
    """A chain over two hosts of one device each, and a belief about it."""
    asked = question(0, "h100:2x1,ib=400g")
    blocks = len(asked.costs.names)
    draft = plain_draft((0, blocks // 2, blocks), [Mesh((0,)), Mesh((1,))], microbatch=(2,), microbatches=(8,), schedule="1f1b")
    return asked, draft, Belief(pool_of([draft], asked, Worlds.of(asked.costs, asked.cluster)))


def test_busy_stages_tell_hosts_apart():
    asked, draft, belief = two_stages()
    busy_s = np.array(asked.scores.evaluate(draft).stage_busy_s)
    names = axes(asked.cluster)

    def hosts(told):
        return [float(told.axes[names.index(f"host {host}")]) for host in range(2)]

    as_priced = belief.update(Observation(0, None, stage_busy_s=tuple(busy_s)))
    np.testing.assert_allclose(hosts(as_priced), 0.0, atol=0.1)
    slow = belief.update(Observation(0, None, stage_busy_s=tuple(busy_s * [1.0, 1.2])))
    first, second = hosts(slow)
    assert second > 0.5 and first == pytest.approx(-second, abs=0.1)
    both = belief.update(Observation(0, None, stage_busy_s=tuple(2 * busy_s)))
    np.testing.assert_allclose(both.axes, as_priced.axes, atol=1e-9)  # all blocks may be mispriced by as much
    known = belief.update(Observation(0, None, pace_s=(1e-3, 1.2e-3)))
    assert 0.5 < (second - first) / (hosts(known)[1] - hosts(known)[0]) < 1.2


@pytest.mark.slow
def test_what_spares_a_slow_host_is_seen_as_quick_once_it_is_known():
    """Slopes around like hosts say that every strategy suffers from a slow one; around the known world they do not."""
    asked = question(1, "h100:4x1,ib=400g", 32)
    truth = problem_in(World({}, (1.0, 1.0, 1.0, 2.0)), asked)
    belief = Belief(first_pool(asked, calls=120))
    for _ in range(2):
        number = RULES["calibrate"](belief)
        said = truth.scores.evaluate(belief.pool.drafts[number])
        belief = belief.update(Observation(number, said.step_time_s, 0.5, pace_s=(1e-3, 1e-3, 1e-3, 2e-3)))
        belief = Belief(replan(belief, asked), belief.observations)
    seconds = np.array([truth.scores.evaluate(draft).step_time_s for draft in belief.pool.drafts])
    quick = seconds.argsort()[:5]
    far = Belief(belief.pool.around(np.zeros_like(belief.axes), asked), belief.observations)
    error = np.abs(belief.mean - np.log(seconds))[quick].mean()
    assert error < 0.15 and error < 0.6 * np.abs(far.mean - np.log(seconds))[quick].mean()
    assert seconds[int(belief.mean.argmin())] < 1.05 * seconds.min()


def test_sigma_points_have_mean_and_spread_of_a_square():
    """A linear function with squares along the axes: mean, slopes and what is left over are known, and met by draws."""
    rng = np.random.default_rng(0)
    center, slope, bend = rng.normal(size=(3, 4))

    def figure(values):
        return (values @ slope + (values - center) ** 2 @ bend)[:, None]

    away = np.eye(4)
    at_zero, slopes, left = linear(center, figure(center + np.concatenate([np.zeros((1, 4)), away, -away])))
    np.testing.assert_allclose(slopes[0], slope)
    drawn = center + rng.normal(size=(400_000, 4))
    assert at_zero[0] + center @ slope == pytest.approx(figure(drawn).mean() - (1 - BENDS) * bend.sum(), abs=0.02)
    assert left[0] == pytest.approx((figure(drawn)[:, 0] - drawn @ slope).std(), rel=0.02)


def elsewhere(seed, numbers, seconds):
    """Runs of candidates of a model, by number, that took so long."""
    asked, here = question(seed), pool(seed)
    return tuple(
        run_of(
            here.drafts[number], here.steps[number], asked.costs.names, asked.cluster, status="done",
            step_s=(seconds(here.drafts[number], here.steps[number]),),
        )
        for number in numbers
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_elsewhere_is_one_whose_axes_are_off():
    """The same strategies of the same model ran on another cluster: conditioning by precisions, as for runs here."""
    plain, at = Belief(pool()), [0, 3]
    runs = elsewhere(0, at, lambda draft, said: 1.5 * said.step_time_s)
    told = dataclasses.replace(plain, elsewhere=runs)
    worlds = plain.pool.worlds
    slopes = linear(worlds.center, plain.pool.log_s)[1][at]
    noise = ELSEWHERE**2 * slopes @ slopes.T + (OWN**2 + NOISE**2) * np.eye(2)
    precision = np.linalg.inv(plain.covariance)
    precision[np.ix_(at, at)] += np.linalg.inv(noise)
    shifts = np.zeros(len(plain.mean))
    shifts[at] = np.linalg.solve(noise, math.log(1.5) + np.log(plain.pool.by_model_s[at]) - plain.mean[at])
    np.testing.assert_allclose(told.mean, plain.mean + np.linalg.solve(precision, shifts), atol=1e-5)
    np.testing.assert_allclose(told.covariance, np.linalg.inv(precision), atol=1e-5)
    assert told.untried.all() and told.best is None  # nothing ran here


@pytest.mark.slow
def test_runs_of_other_models_tell_of_this_one_where_the_cluster_is_alike():
    before, after = [], []
    for seed in range(4):
        truth = Truth.drawn(question(), seed)
        other = Truth.drawn(question(1), seed)
        runs = elsewhere(1, range(0, 12, 2), lambda draft, _, other=other: other.step_s(draft))
        log_s = np.log([truth.step_s(draft) for draft in pool().drafts])
        for errors, belief in ((before, Belief(pool())), (after, Belief(pool(), elsewhere=runs))):
            errors.append(np.abs(belief.mean - log_s).mean())
            assert (np.abs(belief.mean - log_s) / belief.std < 4).all()
    assert np.mean(after) < 0.75 * np.mean(before)


def test_what_runs_here_weighs_more_than_any_run_elsewhere():
    slow = elsewhere(1, range(8), lambda draft, said: 2 * said.step_time_s)
    belief = Belief(pool(), elsewhere=slow)
    assert (belief.mean > Belief(pool()).mean + 0.1).all()
    step_s = float(belief.pool.by_model_s[2])
    belief = belief.update(Observation(2, step_s, 0.5))
    assert belief.mean[2] == pytest.approx(math.log(step_s), abs=0.02) and belief.std[2] < 1.1 * NOISE
    assert (belief.mean < dataclasses.replace(belief, observations=()).mean).all()


def test_a_run_elsewhere_tells_of_the_candidate_that_is_most_like_it_however_far():
    plain, (run,) = Belief(pool()), elsewhere(0, [5], lambda draft, said: 3 * said.step_time_s)
    same = int(plain.pool.features.std(axis=0).argmin())
    assert len(set(plain.pool.features[:, same])) == 1  # no candidate differs by it, so a run that does is far from all
    features = tuple(value + float(number == same) for number, value in enumerate(run.features))
    both = run, msgspec.structs.replace(run, features=features)
    like, far = (dataclasses.replace(plain, elsewhere=(one,)).mean - plain.mean for one in both)
    assert like.argmax() == far.argmax() == 5 and 0 < far[5] < 0.8 * like[5]
