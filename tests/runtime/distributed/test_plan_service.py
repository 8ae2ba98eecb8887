"""Plans timed on demand: rank 0 asks, the others serve; a plan that takes the job down is not tried again."""

from __future__ import annotations

import campaign_worker
import pytest
from launch import run, torchrun

from rlplace.measured.store import TrialStore


def test_rank_0_asks_and_the_others_serve(tmp_path):
    first, second = run(2, campaign_worker.serve_all, str(tmp_path / "m.sqlite"))
    assert first["site"] == second
    placed, whole, refused = first["own target"]
    assert placed == pytest.approx(whole, rel=1e-6) and "an input of the model" in refused
    assert len(first["computed"].step_s) == 3 and first["computed"].mode == "computed"
    assert first["computed"].predicted_s > 0 and len(first["computed"].places) == 2
    assert len(first["lost"].step_s) == 1  # it is given up after one step
    status, reason = first["refused"]
    assert status == "refused" and "pipeline" in reason
    assert len(first["after"].step_s) == 1  # the ranks are still together
    # The sleeping takes as long as the slower problem says, not as long as the plan's own.
    replayed = first["replayed"]
    assert replayed.mode == "replayed" and min(replayed.step_s) > 10 * replayed.predicted_s
    busy = sum(place.busy_s + place.update_s for place in replayed.places)
    assert busy == pytest.approx(campaign_worker.SLEPT_S, rel=0.5)
    assert first["trials"][0] == "done" and set(first["trials"]) <= {"done", "dropped"}
    with TrialStore(tmp_path / "m.sqlite") as store:
        assert [trial.status for trial in store.trials()] == first["trials"]


@pytest.mark.slow
def test_a_plan_that_kills_the_job_is_known_when_the_job_comes_back(tmp_path):
    path = tmp_path / "m.sqlite"
    code, _, err = torchrun(2, campaign_worker.__file__, path, restarts=2)
    assert code == 0, err
    assert "rank 1" in err and "killed" in err
    with TrialStore(path) as store:
        trials = store.trials(include_running=True)
    assert [trial.status for trial in trials[:2]] == ["done", "crashed"] and len(trials) == 4
    assert all(trial.timed for trial in trials[2:])
    assert set(trials[1].device_of_group) == {campaign_worker.DEADLY} and trials[1].reason
    assert len({trial.device_of_group for trial in trials}) == 4  # none was run twice
