"""``rlplace place --memory``: a table whose parts add up, also as JSON."""

import json

import pytest
from command import run

from rlplace.cost.footprint import PARTS
from rlplace.plan import PlacementPlan

TINY = "hf:gpt2,n_layer=2,n_embd=32,n_head=2,vocab_size=64"
PLACE = ("place", TINY, "--cluster", "a100-80g:2", "--planner", "balanced", "--batch", "4", "--seq", "32")


def memory(capsys, *arguments):
    code, out, err = run(capsys, *PLACE, "--memory", "--json", *arguments)
    assert code == 0, err
    return json.loads(out)["predicted"]["memory"]


def test_the_table_has_a_row_per_device(capsys):
    code, out, _ = run(capsys, *PLACE, "--memory")
    assert code == 0
    header = next(line for line in out.splitlines() if line.startswith("GB"))
    assert header.split()[-3:] == ["total", "memory", "fits"] and "weights" in header and "buckets" not in header
    rows = [line.split() for line in out.splitlines() if line.startswith("gpu") and line.endswith("yes")]
    assert [row[0] for row in rows] == ["gpu0", "gpu1"]


def test_parts_add_up_and_the_plan_file_still_loads(capsys, tmp_path):
    path = tmp_path / "p.plan.json"
    found = memory(capsys, "--out", str(path))
    for item in found:
        assert list(item["parts"]) == list(PARTS)
        assert sum(item["parts"].values()) == item["total_bytes"]
        assert item["fits"] and item["capacity_bytes"] == 80_000_000_000
    assert PlacementPlan.load(path).predicted.memory == tuple(found)


def test_options_of_the_script_change_the_answer(capsys):
    plain = memory(capsys)
    wide = memory(capsys, "--alloc-conf", "large_segment_size_mb:40")
    assert plain[0]["parts"]["weights"] == wide[0]["parts"]["weights"] > 0
    assert wide[0]["reserved_peak_bytes"] - plain[0]["reserved_peak_bytes"] == 20 << 20


@pytest.mark.parametrize("options", [("--autocast", "bf16"), ("--dtype", "bf16", "--master-weights")])
def test_mixed_precision_options_reach_the_capture(capsys, options):
    code, out, err = run(capsys, *PLACE, "--json", *options)
    assert code == 0, err
    source = json.loads(out)["source"]
    wanted = {"autocast": "bfloat16"} if "--autocast" in options else {"master_weights": True}
    assert source["capture"] | wanted == source["capture"]
