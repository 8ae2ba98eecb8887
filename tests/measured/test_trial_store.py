"""The store of trials: what goes in comes out, what is looked up, what is refused, and how stores are merged."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trial_store_helpers import OTHER_PROBLEM, OTHER_SITE, PLACE, PROBLEM, SITE, begun, done, new_store, plan_number

from rlplace.cost.timings import Mode, PlaceTiming
from rlplace.errors import InputError
from rlplace.measured import database
from rlplace.measured import store as store_module
from rlplace.measured.rows import MAX_REASON
from rlplace.measured.site import Site
from rlplace.measured.store import TrialStore
from rlplace.measured.trial import FAILED, Status, Trial
from rlplace.problem import problem_to_dict

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LINE = st.text("abc ;:é√", max_size=20).map(lambda text: " ".join(text.split()))
SECONDS = st.floats(0, 1e17, allow_nan=False)
STEP = st.floats(1e-12, 1e9, exclude_min=True)
SIZE = st.none() | st.integers(0, 1 << 50)
PLACES = st.builds(PlaceTiming, st.integers(0, 4000), TEXT, SECONDS, SECONDS, SECONDS, SECONDS, SIZE, st.none() | SECONDS, SIZE)


@st.composite
def trials(draw):
    status = draw(st.sampled_from(get_args(Status)))
    timed = status in ("done", "dropped")
    return Trial(
        problem=PROBLEM.fingerprint,
        site=draw(st.sampled_from([SITE.fingerprint, OTHER_SITE.fingerprint, ""])),
        device_of_group=tuple(draw(st.lists(st.integers(0, 1), min_size=PROBLEM.num_groups, max_size=PROBLEM.num_groups))),
        status=status,
        step_s=tuple(draw(st.lists(STEP, min_size=1, max_size=5))) if timed else (),
        places=tuple(draw(st.lists(PLACES, max_size=3))),
        predicted_s=draw(st.none() | SECONDS),
        engine=draw(LINE),
        mode=draw(st.sampled_from(get_args(Mode))),
        setup_s=draw(SECONDS),
        began_at=draw(SECONDS),
        reason=draw(LINE),
        run=draw(TEXT),
        anchor=draw(st.booleans()),
    )


@settings(max_examples=60)
@given(st.lists(trials(), min_size=1, max_size=4))
def test_what_goes_in_comes_out(given_trials):
    with new_store() as store:
        for trial in given_trials:
            (store.begin if trial.status == "running" else store.add)(trial)
        assert store.trials(include_running=True) == given_trials
        assert store.trials() == [trial for trial in given_trials if trial.status != "running"]


def test_a_file_keeps_everything(tmp_path):
    with new_store(tmp_path / "t.sqlite") as store:
        store.add(done(0))
        number = store.begin(begun(1))
    with TrialStore(tmp_path / "t.sqlite") as store:
        assert store.trials() == [done(0)]
        assert store.interrupted("first") == [(number, begun(1))]
        assert store.problems() == {p.fingerprint: p.name for p in (PROBLEM, OTHER_PROBLEM)}
        for problem in (PROBLEM, OTHER_PROBLEM):
            assert problem_to_dict(store.problem(problem.fingerprint)) == problem_to_dict(problem)
    assert [path.name for path in tmp_path.iterdir()] == ["t.sqlite"]


def test_known_sites_and_problems_are_kept_as_they_are():
    with new_store() as store:
        assert store.add_site(Site("renamed", SITE.facts)) == SITE.fingerprint
        assert store.add_problem(dataclasses.replace(PROBLEM, name="renamed")) == PROBLEM.fingerprint
        names = store._database.execute("SELECT name FROM sites ORDER BY rowid").fetchall()
        assert names == [("lab",), ("attic",)]
        assert store.problem(PROBLEM.fingerprint).name == PROBLEM.name


def test_begin_and_finish():
    with new_store() as store:
        first, second = store.begin(begun(0)), store.begin(begun(1))
        assert [number for number, _ in store.interrupted("first")] == [first, second]
        store.finish(second, done(1))
        store.finish(first, done(0, status="crashed", step_s=(), places=(), reason="it\n fell  over"))
        assert store.interrupted("first") == []
        assert [trial.status for trial in store.trials()] == ["crashed", "done"]
        assert store.trials()[0].reason == "it fell over"


def test_a_trial_is_finished_once_as_what_it_began():
    with new_store() as store:
        number = store.begin(begun(0))
        with pytest.raises(InputError, match="another plan"):
            store.finish(number, done(1))
        with pytest.raises(InputError, match="another plan"):
            store.finish(number, done(0, mode="replayed"))
        with pytest.raises(InputError, match="has not ended"):
            store.finish(number, begun(0))
        with pytest.raises(InputError, match="not known"):
            store.finish(number + 1, done(0))
        store.finish(number, done(0))
        with pytest.raises(InputError, match="'done'"):
            store.finish(number, done(0))
        assert store.trials() == [done(0)]


def test_discarded_trials_are_gone_and_their_numbers_stay_free():
    with new_store() as store:
        number = store.begin(begun(0))
        store.discard(number)
        assert store.trials(include_running=True) == []
        assert store.begin(begun(0)) > number
        for wrong in (number, store.add(done(1)), "x", 1 << 70):
            with pytest.raises(InputError):
                store.discard(wrong)
        assert len(store.trials(include_running=True)) == 2


def test_filters():
    with new_store() as store:
        other = done(0, problem=OTHER_PROBLEM.fingerprint, device_of_group=(0,) * OTHER_PROBLEM.num_groups)
        given_trials = [done(0), done(1, site=OTHER_SITE.fingerprint), done(2, run="second"), other, done(3, site="")]
        for trial in given_trials:
            store.add(trial)
        assert store.trials() == given_trials
        assert store.trials(problem=OTHER_PROBLEM.fingerprint) == [other]
        assert store.trials(problem=PROBLEM.fingerprint, site=SITE.fingerprint) == [given_trials[0], given_trials[2]]
        assert store.trials(site="") == [given_trials[4]]
        assert store.trials(run="second") == [given_trials[2]]
        assert store.trials(run="third") == []
        for wrong in (PROBLEM, 3, b"x", "\ud800"):
            with pytest.raises(InputError):
                store.trials(problem=wrong)


@pytest.mark.parametrize(
    "change", [{"site": ""}, {"site": OTHER_SITE.fingerprint}, {"device_of_group": plan_number(5)}, {"mode": "replayed"}]
)
def test_a_trial_ends_under_the_conditions_that_it_began_under(change):
    with new_store() as store:
        number = store.begin(begun(0))
        with pytest.raises(InputError, match="under other conditions"):
            store.finish(number, done(0, **change))


def test_conditions_do_not_mind_the_type_of_numbers():
    with new_store() as store:
        devices = np.array(plan_number(3), dtype=np.int32)
        number = store.begin(msgspec.structs.replace(begun(3), device_of_group=tuple(devices)))
        store.finish(number, done(3, device_of_group=devices.astype(np.int8)))
        [found] = store.trials()
        assert found == done(3)
        assert all(type(device) is int for device in found.device_of_group)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_s": (math.nan,)}, "not JSON compliant|not right|right type"),
        ({"step_s": (math.inf,)}, "right type"),
        ({"step_s": (0.0,)}, r"step_s\[0\]: expected a number above 0"),
        ({"step_s": (-1.0,)}, "above 0"),
        ({"step_s": (1e18,)}, r"up to 1e\+18"),
        ({"step_s": ("1",)}, r"step_s\[0\]: expected a number above 0"),
        ({"step_s": ()}, "is done has no step times|is done has"),
        ({"step_s": None}, "step_s: expected a list"),
        ({"status": "crashed"}, "crashed has no step times"),
        ({"status": "finished"}, "unknown status"),
        ({"status": "running"}, "running has no step times"),
        ({"mode": "guessed"}, "unknown mode"),
        ({"setup_s": math.nan}, r"setup_s: expected a number in 0..1e\+18"),
        ({"setup_s": -1.0}, r"in 0..1e\+18"),
        ({"began_at": math.inf}, r"in 0..1e\+18"),
        ({"began_at": "now"}, "began_at: expected a number"),
        ({"predicted_s": math.inf}, "predicted_s: expected"),
        ({"device_of_group": ()}, "is not for its problem"),
        ({"device_of_group": (2,) * PROBLEM.num_groups}, "is not for its problem"),
        ({"device_of_group": (-1,) * PROBLEM.num_groups}, r"device_of_group\[0\]: expected a whole number in 0..4095"),
        ({"device_of_group": (0.5,) * PROBLEM.num_groups}, "expected a whole number"),
        ({"device_of_group": "0000"}, "device_of_group: expected a list"),
        ({"places": (msgspec.structs.replace(PLACE, busy_s=-1.0),)}, "busy_s"),
        ({"places": (msgspec.structs.replace(PLACE, wait_s=math.nan),)}, "right type"),
        ({"places": (3,)}, r"places\[0\]: expected an object, found 3"),
        ({"problem": "x"}, "problem: expected text of the form"),
        ({"problem": "0" * 64}, "not in the store"),
        ({"site": "0" * 64}, "not in the store"),
        ({"site": None}, "site: expected text of the form"),
        ({"run": "\ud800"}, "UTF-8"),
        ({"run": "x" * 2000}, "at most 1000 characters"),
        ({"run": None}, "expected text"),
        ({"anchor": "yes"}, "right type"),
        ({"reason": None}, "right type"),
    ],
)
def test_refused_trials(change, message):
    with new_store() as store:
        with pytest.raises(InputError, match=message) as caught:
            store.add(done(0, **change))
        assert "\n" not in str(caught.value)
        assert store.trials(include_running=True) == []


def test_what_is_no_trial_is_refused():
    with new_store() as store:
        for wrong in (None, 3, {"status": "done"}):
            for call in (store.add, store.begin, lambda trial: store.finish(1, trial)):
                with pytest.raises(InputError, match="expected a Trial"):
                    call(wrong)
        with pytest.raises(InputError, match="use `add`"):
            store.begin(done(0))
        with pytest.raises(InputError, match="use `begin`"):
            store.add(begun(0))


def test_a_measurement_is_not_lost_for_its_message():
    with new_store() as store:
        store.add(done(0, status=FAILED[0], step_s=(), reason="out\nof \x1b\ud800 memory " + "x" * 10_000, engine="a\nb"))
        (found,) = store.trials()
        assert found.reason.startswith("out of memory xxx")
        assert len(found.reason) == MAX_REASON
        assert found.engine == "a b"


def test_numbers_of_numpy_are_kept():
    with new_store() as store:
        place = msgspec.structs.replace(PLACE, busy_s=np.float32(0.5), predicted_peak_bytes=np.int64(7))
        steps = tuple(np.array([0.5, 0.25], dtype=np.float32))
        store.add(done(0, places=(place,), step_s=steps, anchor=np.bool_(True)))
        place = msgspec.structs.replace(PLACE, busy_s=0.5, predicted_peak_bytes=7)
        assert store.trials() == [done(0, places=(place,), step_s=(0.5, 0.25), anchor=True)]


def test_unknown_fingerprints_are_named():
    with new_store() as store:
        with pytest.raises(InputError, match="'aaa': not known"):
            store.problem("aaa")
        with pytest.raises(InputError):
            store.problem(object())


def test_more_trials_than_one_call_reads(monkeypatch):
    monkeypatch.setattr(store_module, "MAX_TRIALS", 7)
    monkeypatch.setattr(store_module, "_CHUNK", 2)
    with new_store() as store:
        for number in range(7):
            store.add(done(number))
        assert store.trials() == [done(number) for number in range(7)]
        store.add(done(8, run="second"))
        with pytest.raises(InputError, match="8 trials, the limit is 7"):
            store.trials()
        assert store.trials(run="second") == [done(8, run="second")]


def test_a_problem_that_is_too_large(monkeypatch):
    monkeypatch.setattr(store_module, "MAX_PROBLEM_BYTES", 100)
    with TrialStore(None) as store, pytest.raises(InputError, match="the limits are 100"):
        store.add_problem(PROBLEM)


def test_a_problem_with_a_long_name(tmp_path):
    with TrialStore(tmp_path / "t.sqlite") as store:
        name = store.add_problem(dataclasses.replace(PROBLEM, name="n" * 5000))
        assert store.problems() == {name: "n" * 1000}
        assert store.problem(name).name == "n" * 5000


def test_a_closed_store_says_so(tmp_path):
    store = new_store(tmp_path / "t.sqlite")
    store.close()
    store.close()
    for call in (store.trials, store.problems, lambda: store.add(done(0))):
        with pytest.raises(InputError, match="the store is closed"):
            call()


def test_threads_share_a_store(tmp_path):
    with new_store(tmp_path / "t.sqlite") as store:

        def work(first):
            for number in range(first, first + 10):
                store.finish(store.begin(begun(number)), done(number))

        threads = [threading.Thread(target=work, args=(10 * index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(trial.began_at for trial in store.trials()) == [1000.0 + number for number in range(40)]


def test_another_process_that_holds_the_file_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    with new_store(tmp_path / "t.sqlite") as store, TrialStore(tmp_path / "t.sqlite") as other:
        with database.writing(other._database), pytest.raises(InputError, match="locked"):
            store.add(done(0))
        store.add(done(0))
        assert other.trials() == [done(0)]
