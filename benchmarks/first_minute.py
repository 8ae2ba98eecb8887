"""Wall time of whole commands as a person waits for them: first line, all, and until the prompt is back.

    python -m benchmarks.first_minute              every command five times, about ten minutes on idle cores
    python -m benchmarks.first_minute --runs 1

*First* runs have an empty cache of captures and no kernels compiled on the machine (those that came with the installation are
there); *again* is the same command once more.
"""

from __future__ import annotations

import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import arguments, markdown

LLAMA = "hf:llama,vocab_size=128256,num_key_value_heads=8,"
COMMANDS = {
    "python -c 'import rlplace'": "",
    "place hf:gpt2": "place hf:gpt2 --cluster a100-80g:4",
    "place hf:gpt2 --planner best": "place hf:gpt2 --cluster a100-80g:4 --planner best",
    "place Llama-8B on 8": f"place {LLAMA}hidden_size=4096,intermediate_size=14336,num_hidden_layers=32,num_attention_heads=32 "
    "--cluster h100:8 --batch 64 --seq 2048 --dtype bf16",
    "place Llama-70B on 64": f"place {LLAMA}hidden_size=8192,intermediate_size=28672,num_hidden_layers=80,"
    "num_attention_heads=64 --cluster h100:8x8,ib=400g --batch 256 --seq 2048 --dtype bf16",
}
"""By the name in the table, arguments of `rlplace`."""


def timed(command: list[str], environment: dict[str, str]) -> tuple[float, float, float]:
    """Measures seconds to the first line, to the end, and from the last line to the end."""
    begin = time.perf_counter()
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert job.stdout is not None
    first = last = None
    for _ in job.stdout:
        last = time.perf_counter()
        first = first or last
    status, end = job.wait(), time.perf_counter()
    if status:
        raise SystemExit(f"{shlex.join(command)} ended with {status}")
    return (first or end) - begin, end - begin, end - (last or end)


def row(name: str, words: str, runs: int) -> list[str]:
    """Times a command without and with what an earlier run of it kept."""
    script = str(Path(sys.executable).with_name("rlplace"))
    command = [script, *shlex.split(words)] if words else [sys.executable, "-c", "import rlplace"]
    found: tuple[list[tuple[float, float, float]], ...] = ([], [])
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            kept = {"RLPLACE_CACHE": f"{folder}/kept", "NUMBA_CACHE_DIR": f"{folder}/kernels", "OMP_NUM_THREADS": "1"}
            for times in found:
                times.append(timed(command, {**os.environ, **kept}))
    whole = [statistics.median(each[1] for each in times) for times in found]
    line, back = (max(statistics.median(each[at] for each in times) for times in found) for at in (0, 2))
    shown = [f"{line:.1f}", f"{back:.2f}"] if words else ["-", "-"]
    return [f"`{name}`", *(f"{seconds:.1f}" for seconds in whole), *shown]


if __name__ == "__main__":
    runs = arguments(__doc__, runs=(5, "of each command, whose median is shown (5)")).runs
    rows = [row(name, words, runs) for name, words in COMMANDS.items()]
    print(markdown(["command", "first s", "again s", "first line s", "prompt back s"], rows))
