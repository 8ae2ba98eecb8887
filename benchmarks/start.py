"""Times `rlplace place` as a person meets it: right after an installation (nothing compiled yet) and from then on.

    python benchmarks/start.py [--model hf:gpt2] [--planner best] [--time-limit 2] [--agent NAME] [--cluster C]

User seconds compare between runs on a shared machine, wall seconds only on an idle one. One thread.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hf:gpt2")
    parser.add_argument("--cluster", default="a100-80g:4")
    parser.add_argument("--planner", default="best")
    parser.add_argument("--agent", default="default")
    parser.add_argument("--time-limit", default="2")
    args = parser.parse_args()
    command = [sys.executable, "-m", "rlplace.cli.main", "place", args.model, "--cluster", args.cluster]
    command += ["--planner", args.planner, "--agent", args.agent, "--time-limit", args.time_limit]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
        for label in ("cold", "warm", "warm"):
            before, begin = os.times(), time.perf_counter()
            subprocess.run(command, env=environment, check=True, capture_output=True)
            wall, after = time.perf_counter() - begin, os.times()
            print(f"{label}: {wall:.1f} s wall, {after.children_user - before.children_user:.1f} s user", flush=True)


if __name__ == "__main__":
    main()
