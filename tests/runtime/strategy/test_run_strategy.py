"""``rlplace run`` and other verbs with plans that hold a whole strategy."""

from __future__ import annotations

import json

import pytest

from rlplace.cli.main import main
from rlplace.cluster.parse import parse
from rlplace.cost.timings import PlanTimings
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.prediction import Prediction
from rlplace.planned import Planned
from tests.runtime import equality
from tests.runtime.job.launch import forked
from tests.runtime.strategy.native_cases import beside, chain, flat

pytest.importorskip("transformers")

SIZES = "n_layer=2,n_embd=32,n_head=4,vocab_size=64,n_positions=32"
PLAIN = ",attn_pdrop=0.0,embd_pdrop=0.0,resid_pdrop=0.0"
HALVES = [(0, 1), (2, 3)]
TWO_LAYERS = "hf:gpt2," + SIZES + PLAIN


def strategy_plan(path, strategy, model=TWO_LAYERS, captured=False, **graph):
    """Writes a plan for a strategy without a search; `captured`: with the fingerprint of its model."""
    source = {
        "graph": {"model": model, "batch": 2, "seq": 8, "dtype": "fp32", "optimizer": "adam", **graph},
        "cluster": "cpu:4",
        "cluster_fingerprint": parse("cpu:4").fingerprint,
    }
    predicted = Prediction(step_time_s=0.001, peak_memory_bytes=(1000, 1001, 1002, 1003), feasible=True)
    plan = equality.strategy_plan(strategy, source=source, predicted=predicted)
    if captured:
        source["graph_fingerprint"] = Planned(plan)._graph.fingerprint
        plan = equality.strategy_plan(strategy, source=source, predicted=predicted)
    plan.save(path)
    return plan


def run_verified(path, *options, within=1e-6):
    code, out, err = forked(4, "-m", "rlplace", "run", "--plan", path, "--device", "cpu", "--verify", "--json", *options)
    assert code == 0, err
    found = json.loads("".join(out))
    assert found["verified"]["equal"] and found["verified"]["why"] is None
    assert max(found["verified"]["losses"]) < within
    return found


def test_a_pipeline_of_shared_stages_equals_the_plain_model(tmp_path):
    path = tmp_path / "p.plan.json"
    strategy_plan(path, chain("short", HALVES, "1f1b", mesh={"shard": 2}, sharding=1), captured=True)
    found = run_verified(path, "--steps", 3, "--clip", 0.5)
    assert found["losses"][-1] < found["losses"][0]
    assert found["engine"] == "native" and len(found["losses"]) == 3 and found["predicted_step_time_s"] == 0.001
    assert [rank["stage"] for rank in found["ranks"]] == [0, 1, 2, 3]
    assert [rank["predicted_memory_bytes"] for rank in found["ranks"]] == [1000, 1001, 1002, 1003]
    assert all(rank["peak_memory_bytes"] > 10_000 for rank in found["ranks"])


@pytest.mark.long
@pytest.mark.slow
def test_another_strategy_goes_on_from_a_checkpoint(tmp_path):
    first, second, folder = tmp_path / "p.plan.json", tmp_path / "t.plan.json", tmp_path / "checkpoints"
    shares, group = {"batch": 6, "devices": (0, 3)}, {"batch": 2, "devices": (1, 2)}
    unlike = beside(flat("short", {"shard": 2}, 3, **shares), flat("short", {"tensor": 2}, 0, **group))
    strategies = chain("short", HALVES, "1f1b", mesh={"shard": 2}, sharding=1), unlike
    for path, strategy in zip((first, second), strategies, strict=True):
        strategy_plan(path, strategy, captured=True)
    whole = run_verified(first, "--steps", 4, "--clip", 0.5)
    run_verified(first, "--steps", 2, "--clip", 0.5, "--checkpoint", folder)
    rest = run_verified(second, "--steps", 3, "--clip", 0.5, "--checkpoint", folder, "--resume")  # the reference goes on, too
    assert rest["first_step"] == 2 and rest["losses"] == pytest.approx(whole["losses"][2:3], rel=1e-6)
    last = run_verified(first, "--steps", 4, "--clip", 0.5, "--checkpoint", folder, "--resume")
    assert last["first_step"] == 3 and last["losses"] == pytest.approx(whole["losses"][3:], rel=1e-6)


@pytest.mark.slow
def test_what_place_chose_equals_the_plain_model(tmp_path):
    path = tmp_path / "t.plan.json"
    arguments = ["place", TWO_LAYERS, "--cluster", "cpu:4", "--batch", "8", "--seq", "8"]
    arguments += ["--dtype", "bf16", "--master-weights"]  # which is FSDP2's mixed precision
    assert main([*arguments, "--space", "tensor=1 replicate=2 pipeline=1 shard=2", "--out", str(path)]) == 0
    assert PlacementPlan.load(path).strategy.stages[0].mesh == {"replicate": 2, "shard": 2}
    run_verified(path, "--steps", 3, within=1e-4)  # gradients are reduced in bf16


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch, alone):
    """The line that a verb refuses a strategy with."""

    def line(strategy, *arguments, world=4):
        path = tmp_path / "x.plan.json"
        strategy_plan(path, strategy)
        if arguments[0] == "run" and world > 1:
            monkeypatch.setenv("RANK", "0")
            monkeypatch.setenv("WORLD_SIZE", str(world))
        words = [str(path) if word == "PLAN" else word for word in arguments]
        assert main(words) == 2
        (found,) = [row for row in capsys.readouterr().err.splitlines() if row.startswith("rlplace:")]
        return found

    return line


WHOLE = flat("short", {"shard": 4}, 1)


def test_what_cannot_be_run(refused):
    run, outside = ("run", "--plan", "PLAN"), flat("short", {"shard": 4}, 1, devices=(0, 1, 3, 4))
    wrong = refused(WHOLE, *run, world=3)
    assert "uses 4 devices, but there are 3 processes; start it with: torchrun --nproc-per-node 4 -m rlplace run" in wrong
    assert "torchrun --nproc-per-node 4" in refused(WHOLE, *run, world=1)
    assert "the axis branch is not run" in refused(flat("short", {"branch": 4}, 0, microbatch=8), *run)
    assert "plan for a cluster of these devices alone" in refused(outside, *run)


OTHERS = [
    (("report", "PLAN", "--out", "x.html"), "plan again with 'rlplace place'"),
    (("diff", "PLAN", "PLAN"), "plan again with 'rlplace place'"),
    (("simulate", "PLAN"), "plan again with 'rlplace place'"),
    (("explain", "PLAN", "--group", "transformer.h.0"), "leave --group out"),
    (("explain", "PLAN"), "does not say what its step and its rivals take"),
    (("measure", "--plans", "PLAN", "--device", "cpu", "--out", "x.timings.json"), "needs 4 processes, the job has 1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "reason"), OTHERS)
def test_what_other_verbs_cannot_do(refused, tmp_path, monkeypatch, words, reason):
    monkeypatch.chdir(tmp_path)
    assert reason in refused(WHOLE, *words, world=1)


@pytest.mark.slow
def test_measure_times_strategies_beside_each_other(tmp_path):
    paths = [tmp_path / f"{name}.plan.json" for name in ("chain", "sharded")]
    strategies = chain("short", HALVES, "1f1b", mesh={"shard": 2}, sharding=1), flat("short", {"shard": 4}, 3)
    for path, strategy in zip(paths, strategies, strict=True):
        strategy_plan(path, strategy, captured=True)
    words = ["--device", "cpu", "--repeats", 3, "--out", tmp_path / "x.timings.json", "--trace", tmp_path / "t.json", "--json"]
    code, out, err = forked(4, "-m", "rlplace", "measure", "--plans", *paths, *words)
    assert code == 0, err
    timings = PlanTimings.load(tmp_path / "x.timings.json")
    assert json.loads("".join(out))["plans"][1]["name"] == "sharded"
    for name in ("t.json", "t.rank1.json", "t.rank2.json", "t.rank3.json"):
        assert any("mm" in str(event["name"]) for event in json.loads((tmp_path / name).read_text())["traceEvents"])
    assert [(plan.engine, len(plan.step_s), plan.predicted_s) for plan in timings.plans] == [("native", 3, 0.001)] * 2
    assert [plan.plan for plan in timings.plans] == [PlacementPlan.load(path).fingerprint for path in paths]


@pytest.mark.slow
def test_explain_shows_a_strategy(tmp_path, capsys):
    path = tmp_path / "s.plan.json"
    plan = strategy_plan(path, WHOLE)
    times = {"step_time_s": 0.001, "samples_per_s": 8000.0, "over_bytes": 0}
    rival = {"kind": "fully sharded", "words": "fully sharded over 4", "devices": 4, **times}
    plan.with_predicted(plan.predicted.replace(samples_per_s=8000.0, strategies=(rival,), search_calls=7)).save(path)
    assert main(["explain", str(path), "--no-what-if"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("fully sharded over 4 (level 1), 2 micro-batches of 1 on 4 devices\n")
    assert "step time 1.000 ms, 8000.00 samples/s" in shown and "7 strategies simulated" in shown and "cpu3" in shown


def test_what_places_groups_names_what_runs_a_strategy(tmp_path):
    import rlplace
    from rlplace.errors import InputError
    from rlplace.plan.device_map import to_device_map

    plan = strategy_plan(tmp_path / "s.plan.json", WHOLE)
    for call in (lambda: rlplace.apply(None, plan, ["cpu"]), lambda: to_device_map(plan)):
        with pytest.raises(InputError, match=r"whole strategy, .*rlplace\.distribute"):
            call()
