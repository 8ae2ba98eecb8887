"""Records what the program answers, so that a refactoring can be held to it bit for bit.

``python tests/freeze.py write|check|speed [PART]``: plans of 20 cases with their predictions and pages, traces of environments,
help and errors of the command line, signatures of public names, weights of a training. ``speed`` prints three times instead.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import inspect
import io
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(
    OMP_NUM_THREADS="1", RLPLACE_CACHE="0", HF_HUB_OFFLINE="1", COLUMNS="100", NO_COLOR="1", TORCH_CPP_LOG_LEVEL="ERROR"
)
import numpy as np

FOLDER = Path(__file__).resolve().parent / "golden" / "freeze"
_SMALL = "hidden_size=256,intermediate_size=512,num_attention_heads=8"
STRATEGIES = {
    "mlp": "zoo:mlp --cluster cpu:2 --batch 16",
    "gpt2": "hf:gpt2,n_layer=4 --cluster a100-80g:2 --seq 128",
    "gpt2 on hosts": "hf:gpt2,n_layer=4 --cluster h100:2x4 --seq 128 --batch 64 --dtype bf16",
    "llama": f"hf:llama,num_hidden_layers=4,{_SMALL} --cluster a100-80g:8 --seq 256",
    "bert": "hf:bert,num_hidden_layers=4 --cluster a100-80g:4 --seq 128 --autocast bf16",
    "t5": "hf:t5,num_layers=3 --cluster a100-80g:4 --seq 64",
    "vit": "hf:vit,num_hidden_layers=4 --cluster v100:4",
    "mixture": f"hf:mixtral,num_hidden_layers=2,{_SMALL} --cluster h100:8 --seq 64",
    "unet": "zoo:unet --cluster a100-80g:2",
    "unlike": "hf:gpt2,n_layer=4 --cluster a100-80g:2+v100:2 --seq 128",
    "tight": "hf:gpt2,n_layer=12,n_embd=1536,n_head=24 --cluster t4:4 --seq 512 --batch 16 --memory",
    "tensor": "hf:gpt2,n_layer=4 --cluster a100-80g:4 --seq 128 --space tensor=2,4",
    "pipeline": "hf:gpt2,n_layer=4 --cluster a100-80g:4 --seq 128 --space pipeline=4 --schedule zbv",
}
PLACEMENTS = {
    "agent": "zoo:inception --cluster a100-80g:4 --space placement",
    "annealing": "zoo:inception --cluster a100-80g:4 --planner annealing",
    "heft": "hf:gpt2,n_layer=2 --cluster a100-80g:2 --planner heft --seq 64",
    "pardnn": "zoo:moe_toy --cluster a100-80g:2 --planner pardnn",
    "dlplacer": "zoo:mlp --cluster a100-80g:2 --planner dlplacer",
    "compiler": "zoo:inception --cluster a100-80g:2 --planner compiler",
    "bipartition": "hf:gpt2,n_layer=4 --cluster a100-80g:2 --planner bipartition --seq 64",
}
SEARCHES = ("agent", "annealing")
VERBS = "place capture measure calibrate simulate compare explain diff report run export finetune train info measure-links"
ERRORS = """place
place zoo:nothing --cluster cpu:2
place zoo:mlp --cluster nothing:2
place zoo:mlp --cluster cpu:0
place zoo:mlp --cluster cpu:2 --space nonsense=1
place zoo:mlp --cluster cpu:2 --space tensor=64
place zoo:mlp --cluster cpu:2 --batch 0
place zoo:mlp --cluster cpu:2 --planner nobody
place zoo:mlp --cluster cpu:2 --planner heft --space tensor=2
place zoo:mlp --cluster cpu:2 --couple gather --planner heft
place zoo:mlp,depth=nothing --cluster cpu:2
place zoo:mlp,colour=3 --cluster cpu:2
place hf:nothing --cluster cpu:2
place hf:gpt2/small --cluster cpu:2
place missing.py:model --cluster cpu:2
place missing.problem.json
place zoo:mlp --cluster missing.toml
place zoo:mlp --cluster t4:2 --dtype fp64
place zoo:mlp --cluster cpu:2 --calls -1
place zoo:mlp --cluster cpu:2 --agent nothing --space placement
place zoo:mlp --cluster cpu:2 --alloc-conf x
simulate missing.plan.json
explain missing.plan.json
diff missing.plan.json other.plan.json
report missing.plan.json --out x.html
run --plan missing.plan.json
export missing.plan.json --to nothing
export missing.plan.json --to script --out x.py
compare zoo:mlp --cluster cpu:2 --planners nobody
compare zoo:mlp --planners best
capture zoo:nothing --out x.problem.json
calibrate missing.json --out x.cost.json
measure zoo:nothing --out x.json
finetune zoo:nothing --cluster cpu:2
train --policy nothing
train --steps -1
info nothing
nothing"""
ENVIRONMENTS = ("Placement-v0", "Refinement-v0", "Strategy-v0", "Cluster-v0", "Toy-v0")


def command(words: list[str]) -> str:
    """Runs a command in this process; gives its exit status, output and errors as text."""
    from rlplace.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code
    return f"status {status}\n{out.getvalue()}{err.getvalue()}"


def plain(text: str) -> str:
    """Text without durations, versions and folders."""
    text = re.sub(r"\S*/freeze-\w+", "FOLDER", text)
    text = re.sub(r"\b\d+(\.\d+)? (ms|s|us|min) (in all|planning|of planning|ago)", "TIME", text)
    return re.sub(r"(rlplace|torch|numpy|transformers) \d+\.\S+", r"\1 VERSION", text)


VOLATILE = {"created", "rlplace", "versions", "took_s", "planning_s", "seconds", "search_s", "duration_s", "fingerprint"}


def steady(value: Any) -> Any:
    """A JSON value without what differs from run to run."""
    if isinstance(value, dict):
        return {key: steady(entry) for key, entry in value.items() if key not in VOLATILE}
    return [steady(entry) for entry in value] if isinstance(value, list) else value


def digest(*values: Any) -> str:
    """Short hash of arrays, records of arrays and numbers, with their types and shapes."""
    hashed = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                hashed.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (tuple, list)):
            for entry in value:
                add(entry)
        elif hasattr(value, "nodes") and hasattr(value, "edge_links"):  # gymnasium's graphs
            add((value.nodes, value.edges, value.edge_links))
        elif value is None or isinstance(value, (str, bool)):
            hashed.update(repr(value).encode())
        else:
            array = np.asarray(value)
            hashed.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())

    add(values)
    return hashed.hexdigest()[:16]


def plans() -> dict[str, str]:
    """Plans, what is printed of them, their simulations, explanations and pages."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="freeze-") as folder:
        for kind, cases in (("strategy", STRATEGIES), ("placement", PLACEMENTS)):
            for name, words in cases.items():
                path = Path(folder) / f"{kind}.{name.replace(' ', '_')}.plan.json"
                calls = ["--calls", "200"] if kind == "strategy" or name in SEARCHES else []
                text = command(["place", *words.split(), *calls, "--seed", "0", "--out", str(path)])
                key = f"{kind} {name}"
                found[f"{key}.place"] = plain(text)
                if not path.exists():
                    continue
                plan = steady(json.loads(path.read_text()))
                brief = {k: v for k, v in plan.items() if len(json.dumps(v)) < 3000}
                rest = {k: digest(json.dumps(v, sort_keys=True)) for k, v in plan.items() if k not in brief}
                found[f"{key}.plan"] = json.dumps({**brief, **rest}, indent=1, sort_keys=True)
                found[f"{key}.simulate"] = plain(command(["simulate", str(path)]))
                if name in ("gpt2", "unlike", "agent", "pipeline", "bipartition"):
                    found[f"{key}.explain"] = plain(command(["explain", str(path), "--seed", "0"]))
                    page = path.with_suffix(".html")
                    found[f"{key}.report"] = plain(command(["report", str(path), "--out", str(page)]))
        pair = [str(Path(folder) / f"strategy.{name}.plan.json") for name in ("gpt2", "pipeline")]
        found["diff"] = plain(command(["diff", *pair]))
    return found


def environments() -> dict[str, str]:
    """Observations, rewards and ends of random episodes, one line a step; also of two environments in a vector."""
    import gymnasium

    import rlplace  # registers them

    assert rlplace.__all__
    found = {}
    for name in ENVIRONMENTS:
        lines = []
        env = gymnasium.make(f"rlplace/{name}")
        draw = np.random.default_rng(0)
        for seed in range(2):
            observation, info = env.reset(seed=seed)
            lines.append(f"reset {seed} {digest(observation)} {sorted(info)}")
            for _ in range(15):
                mask = getattr(env.unwrapped, "action_masks", None)
                legal = np.flatnonzero(mask()) if mask is not None else None
                space: Any = env.action_space
                action = int(draw.choice(legal)) if legal is not None and len(legal) else int(draw.integers(space.n))
                observation, reward, terminated, truncated, info = env.step(action)
                lines.append(f"{action} {digest(observation)} {reward!r} {terminated} {truncated}")
                if terminated or truncated:
                    break
        env.close()
        with contextlib.suppress(gymnasium.error.Error):
            vector = gymnasium.make_vec(f"rlplace/{name}", num_envs=2, vectorization_mode="vector_entry_point")
            observations, _ = vector.reset(seed=0)
            lines.append(f"vector {digest(observations)}")
            for _ in range(5):
                actions = vector.unwrapped.action_masks()[:, ::-1].argmax(axis=1)
                actions = vector.single_action_space.n - 1 - actions  # the last legal one
                observations, rewards, *_ = vector.step(actions)
                lines.append(f"{actions} {digest(observations)} {rewards!r}")
            vector.close()
        found[name] = "\n".join(lines)
    return found


def lines() -> dict[str, str]:
    """Help of every verb, and errors."""
    found = {f"help {verb}": command([*verb.split("-"), "--help"]) for verb in VERBS.split()}
    return {**found, **{f"error {words}": plain(command(words.split())) for words in ERRORS.split("\n")}}


def names() -> dict[str, str]:
    """Signatures of the public names."""
    import rlplace

    def signature(value: Any) -> str:
        try:
            return re.sub(r"rlplace\.[\w.]+\.", "", str(inspect.signature(value)))
        except (TypeError, ValueError):
            return type(value).__name__

    return {name: signature(getattr(rlplace, name)) for name in sorted(rlplace.__all__) if name != "__version__"}


def agents() -> dict[str, str]:
    """Logits and plans of the shipped agent."""
    import rlplace
    from rlplace.problem.generate import random_problem

    agent = rlplace.load_agent()
    found = {}
    for seed in range(2):
        problem = random_problem(seed, num_groups=12, num_devices=3)
        plan = agent.place(problem, calls=64, seed=0)
        found[f"agent {seed}"] = f"{list(map(int, plan.device_of_group))} {plan.predicted.step_s!r}"
    return found


PARTS: dict[str, Callable[[], dict[str, str]]] = {
    "names": names,
    "lines": lines,
    "environments": environments,
    "agents": agents,
    "plans": plans,
}


def speed() -> None:
    """Prints seconds of `place` and decisions a second of two environments."""
    import gymnasium

    import rlplace

    for words in (STRATEGIES["gpt2 on hosts"], STRATEGIES["unlike"], PLACEMENTS["agent"]):
        began_s = time.perf_counter()
        command(["place", *words.split(), "--calls", "400", "--seed", "1"])
        print(f"{time.perf_counter() - began_s:8.2f} s  place {words}")
    for name in ("Placement-v0", "Refinement-v0"):
        for count in (1, 64):
            env: Any = gymnasium.make_vec(f"rlplace/{name}", num_envs=count, vectorization_mode="vector_entry_point")
            env.reset(seed=0)
            began_s, steps = time.perf_counter(), 0
            while time.perf_counter() - began_s < 2:
                legal = env.unwrapped.action_masks()
                legal[:, 0] &= name == "Placement-v0" or ~legal[:, 1:].any(axis=1)  # 0 stops a refinement
                env.step(legal.argmax(axis=1))
                steps += count
            print(f"{steps / (time.perf_counter() - began_s):8.0f} decisions a second, {count} of {name}")
    assert rlplace.__all__


def main(words: list[str]) -> int:
    """Writes or checks the parts that are named, all by default."""
    verb, *only = words or ["check"]
    if verb == "speed":
        speed()
        return 0
    wrong = 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for part in only or PARTS:
        path, found = FOLDER / f"{part}.json", PARTS[part]()
        if verb == "write":
            path.write_text(json.dumps(found, indent=1) + "\n")
            continue
        known = json.loads(path.read_text())
        for key in [*known, *(key for key in found if key not in known)]:
            old, new = known.get(key, "").split("\n"), found.get(key, "").split("\n")
            if old != new:
                wrong += 1
                print(f"--- {part}: {key}")
                print("\n".join(list(difflib.unified_diff(old, new, lineterm="", n=0))[2:40]))
    print(f"{wrong} differences")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
