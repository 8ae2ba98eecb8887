"""What the verbs refuse: one line that says why, exit code 2, nothing on stdout, no file written."""

from __future__ import annotations

import shlex

import pytest

from tests.cli.command import run

TINY = "hf:gpt2,n_layer=2,n_embd=32,n_head=2,vocab_size=64"
PLACE = f"place {TINY} --cluster a100-80g:2 --planner balanced --batch 4 --seq 32"
TUNE = "finetune zoo:moe_toy,width=64,layers=2,experts=4"
REPORT = "report one.plan.json --problem x.problem.json --out r.html"
EXPLAIN = "explain one.plan.json --problem x.problem.json"
COMPARE = "compare x.problem.json"
SIZES = ("--batch 16", "--seq 64", "--dtype bf16", "--optimizer sgd", "--granularity 20")
PRICES = ("--autocast bf16", "--master-weights", "--costs c", "--host-mode compiled", "--host-us-per-op 9")
COSTS = [f"capture {TINY} --cluster cpu:2 --out y.problem.json --costs {name}" for name in ("no.cost.json", "one.plan.json")]
CASES = [
    ("plce", "did you mean place?"),
    ("help plac", "did you mean place?"),
    ("--versoin", "did you mean --version?"),
    ("place x --clster a", "did you mean --cluster?"),
    ("place x --planer=best", "did you mean --planner?"),
    ("place x --dtype fp31", "did you mean fp32?"),
    ("place", "required"),
    ("place x --bogus", "--bogus"),
    ("place x --seed -1", "--seed"),
    ("place x --seed x", "--seed"),
    ("place x --batch 0", "--batch"),
    (f"place x --batch {'9' * 30}", "--batch"),
    (f"place x --batch {'9' * 5000}", "--batch"),
    ("place x --time-limit nan", "--time-limit"),
    ("place x --time-limit 1e400", "--time-limit"),
    ("place x --time-limit soon", "--time-limit"),
    ("place x --planner heft --batch 9 --microbatches 2", "--microbatches is for whole strategies"),
    ("place x --planner heft --calls 3", "planner heft is no search"),
    ("place x --planner heft --couple gather", "--couple gather is for replicas"),
    ("place x --planner heft --space auto", "places groups one by one"),
    ("place x --space tensor=0", "tensor"),
    ("place x --space tensor", "expected KEY=VALUE"),
    ("place x --memory --optimizer-kernel fused", "add --space placement"),
    ("place x --space microbatch=2 --microbatch 4", "microbatch stands twice"),
    ("place hf:gpt3", "did you mean"),
    ("place zoo:incepton", "did you mean 'inception'"),
    (f"place {TINY} --cluster a100-8g:4", "did you mean"),
    (f"place {TINY} --cluster a100:4", "did you mean 'a100-40g' or 'a100-80g'?"),
    (f"place {TINY} --planner metiss", "did you mean 'metis'"),
    (f"place {TINY} --agent defalt --cluster v100:2 --seq 8", "unknown agent"),
    ("place nothing.problem.json", "cannot be read"),
    (f"{PLACE} --memory --alloc-conf expandable:True", "expandable_segments"),
    (f"{PLACE} --memory --alloc-conf max_split_size_mb:{10**20}", "2^50"),
    (f"{PLACE} --memory --alloc-conf roundup_power2_divisions:{1 << 80}", "a power of two"),
    (f"{PLACE} --alloc-conf expandable_segments:True", "add --memory"),
    (f"{PLACE} --optimizer-kernel fused", "add --memory"),
    (f"{PLACE} --master-weights", "float32 already"),
    *((f"place x.problem.json --planner single {o}", f"has its own sizes; leave {o.split()[0]} out") for o in SIZES),
    *((f"place x.problem.json --planner single {o}", f"is priced already; leave {o.split()[0]} out") for o in PRICES),
    ("simulate a.problem.json b.plan.json", "cannot be read"),
    ("simulate x.problem.json foreign.plan.json", "plan is for problem"),
    ("compare x --seeds 0", "--seeds"),
    ("compare x --planners ,", "--planners"),
    (f"compare {TINY} --planners best,worst", "unknown planner"),
    (f"{COMPARE} --planners best,hefd", "did you mean 'heft'"),
    (f"{COMPARE} --resume", "name it with --out"),
    (f"{COMPARE} --cluster a100-80g:2", "their own devices"),
    (f"{COMPARE} --out rows.txt", "rows are written as *.jsonl"),
    (f"{COMPARE} --csv /nowhere/rows.csv", "no folder"),
    *((line, line.partition("--costs ")[2]) for line in COSTS),
    ("train --fit-steps -3", "--fit-steps"),
    ("train --device foo --out /nowhere", "foo"),
    ("train --problems nowhere", "unknown problem set"),
    ("train --problems synthetic --test all", "has no end"),
    ("train --resume nowhere", "cannot be read"),
    ("finetune", "name a MODEL whose strategies are run"),
    (f"{TUNE} --cluster cpu:2 --launch run", "does not say {plan}"),
    (f"{TUNE} --cluster cpu:2x1", "the cluster has several hosts"),
    (f"{TUNE} --out none/x.plan.json", "there is no folder"),
    ("finetune --export-runs x.runs.jsonl", "name it with --log"),
    ("finetune --log one.plan.json --export-runs y.runs.jsonl", "expected format 'rlplace.runs'"),
    ("report one.plan.json --problem x.problem.json --out none/r.html", "there is no folder"),
    ("report one.plan.json --out r.html", "name the problem file with --problem"),
    (f"{REPORT} --planners hef", "unknown planner 'hef'; did you mean 'heft'?"),
    (f"{REPORT} --cluster a100-80g:2", "leave --cluster or --problem out"),
    (f"{REPORT} --measurements none.json", "cannot be read"),
    (f"{REPORT} --measurements one.plan.json", "expected format 'rlplace.plan_timings'"),
    ("explain one.plan.json", "says nothing of where its problem came from"),
    (f"{EXPLAIN} --cluster cpu:2", "has its own devices"),
    (f"{EXPLAIN} --group group33", "did you mean 'group3'"),
    (f"{EXPLAIN} --batch 4", "leave --batch=4 out"),
    ("explain x.problem.json --group group3", "--group goes with a plan file"),
    ("explain x.problem.json --problem x.problem.json", "--problem goes with a plan file"),
    ("explain x.problem.json --batch 8", "leave --batch out"),
    ("diff one.plan.json two.plan.json" + 3 * " --problem x.problem.json", "at most twice"),
    ("diff one.plan.json foreign.plan.json --problem x.problem.json", "give --problem twice"),
]
LATE = (*COSTS, "place hf:gpt3", "place zoo:incepton", f"{PLACE} --master-weights", f"{EXPLAIN} --group group33")
"""Refused when the model or the step is looked at, which is announced."""


@pytest.mark.parametrize(("line", "words"), CASES, ids=[line[:80] for line, _ in CASES])
def test_refusals_are_one_line(capsys, monkeypatch, folder, line, words):
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    code, out, err = run(capsys, *shlex.split(line))
    assert code == 2 and out == ""
    *progress, last = err.splitlines()
    assert last.startswith("rlplace: ") and words in last and len(last) < 300, err
    progress = [text for text in progress if not text.startswith("first use on this machine")]
    assert line in LATE or not progress, "nothing is begun first"
    announced = ("no --batch", "no --cluster", "building ", "captur", "op times ", "planning ", "simulating ")
    assert all(text.startswith(announced) for text in progress)
    assert sorted(folder.iterdir()) == before
