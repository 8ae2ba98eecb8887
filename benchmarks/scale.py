"""Wall time and memory of `rlplace place` as clusters grow; the table of docs/results.md.

    python -m benchmarks.scale                     all rows, each in a process of its own, half an hour of two cores
    python -m benchmarks.scale --devices 8 4096    some of them; rows of others stay
    python -m benchmarks.scale --table             the table again

The command is warm: its kernels are compiled. *Search* is from the captured model to the answer, and has `--time-limit 5`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import ROOT, Row, add_row, arguments, markdown, read_rows, write_between, write_rows
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import uniform_words

ROWS, PAGE, LIMIT_S = Path(__file__).with_suffix(".rows.jsonl"), ROOT / "docs/results.md", 5.0
LLAMA = "num_key_value_heads=8,vocab_size=128256"
MODELS = {
    "Llama 3 8B": f"hf:llama,{LLAMA},intermediate_size=14336,max_position_embeddings=4096",
    "Llama 3 405B": f"hf:llama,{LLAMA},hidden_size=16384,intermediate_size=53248,num_hidden_layers=126,num_attention_heads=128,"
    "max_position_embeddings=8192",
}
CASES = [
    ("Llama 3 8B", "h100:8", 64), ("Llama 3 8B", "h100:8x8", 256), ("Llama 3 8B", "h100:64x8", 1024),
    ("Llama 3 8B", "h100:512x8", 4096), ("Llama 3 8B", "h100:4096x8", 32768), ("Llama 3 8B", "h100:16384x8", 131072),
    ("Llama 3 8B", "a100-80g:256x8+h100:256x8", 4096), ("Llama 3 405B", "h100:2048x8", 2048),
]  # fmt: skip
"""Model, cluster and samples a step."""

RUN = """
import json, resource, sys, time
import rlplace.strategy.search.plan as plan
from rlplace.cli.main import main
whole = plan.plan_strategy
spent = {}
def watched(*args, **options):
    begun = time.perf_counter()
    found = whole(*args, **options)
    spent["search_s"] = time.perf_counter() - begun
    return found
plan.plan_strategy = watched
code = main(sys.argv[2:])
usage = resource.getrusage(resource.RUSAGE_SELF)
spent |= {"peak_bytes": 1024 * usage.ru_maxrss, "cpu_s": usage.ru_utime + usage.ru_stime, "code": code}
open(sys.argv[1], "w").write(json.dumps(spent))
"""


def devices_of(cluster: str) -> int:
    """Returns the devices of a cluster's text."""
    return sum(int(hosts or 1) * int(count) for hosts, count in re.findall(r":(?:(\d+)x)?(\d+)", cluster))


def row(model: str, cluster: str, batch: int) -> Row:
    """Runs the command once, in a fresh process."""
    seq = 8192 if "405B" in model else 4096
    words = ["place", MODELS[model], "--cluster", cluster, "--batch", batch, "--seq", seq, "--dtype", "bf16"]
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder) / "x.plan.json", Path(folder) / "spent.json"
        words += ["--master-weights", "--time-limit", LIMIT_S, "--out", out]
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", RUN, said, *map(str, words)], stdout=subprocess.DEVNULL, check=True)
        found = {"wall_s": time.perf_counter() - begun} | json.loads(said.read_text())
        plan = PlacementPlan.load(out)
        assert plan.strategy is not None
        found |= {"words": uniform_words(plan.strategy), "step_s": plan.predicted.step_s, "calls": plan.predicted.search_calls}
        found |= {"plan_bytes": out.stat().st_size, "load": os.getloadavg()[0]}
    return {"model": model, "cluster": cluster, "devices": devices_of(cluster), "batch": batch} | found


def rows() -> list[Row]:
    """Reads what was found last, in the order of the cases."""
    found = {(one["model"], one["cluster"]): one for one in read_rows(ROWS)}
    return [found[model, cluster] for model, cluster, _ in CASES if (model, cluster) in found]


def table() -> str:
    """Makes the table of the page."""
    lines = [
        [
            one["model"], one["cluster"], f"{one['devices']:,}", f"{one['wall_s']:.1f}", f"{one['search_s']:.1f}",
            f"{one['calls']:,}", f"{one['peak_bytes'] / 1e9:.2f}", f"{one['plan_bytes'] / 1e3:,.0f}", f"{one['step_s']:.3f}",
        ]
        for one in rows()
    ]  # fmt: skip
    head = ["model", "cluster", "devices", "wall s", "search s", "tries", "peak GB", "plan kB", "step s"]
    return markdown(head, lines)


def main() -> int:
    """Makes rows and the table; the exit code."""
    chosen = arguments(__doc__, devices=((0,), "sizes of clusters"), table="write the table of the page from the rows")
    for model, cluster, batch in [] if chosen.table else CASES:
        if list(chosen.devices) == [0] or devices_of(cluster) in chosen.devices:
            add_row(ROWS, row(model, cluster, batch))
    write_rows(ROWS, rows())
    write_between(PAGE, "scale", table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
