"""Trains the residual that is shipped, and says what it is worth on clusters, models and sources that it has not seen.

    python -m benchmarks.residual STEPS.csv [--graphs DIR] [--runs LOG ...] [--out FOLDER]

STEPS.csv is the table of published steps of `benchmarks/truth.py`, no part of this repository. Sources that the cost model was
fitted on train it, the other half is for testing. `--runs` adds logs of runs (`rlplace finetune --log`), for training. Made-up
truths (`rlplace.measured.truths`) of small models on preset clusters teach how far off a step may be.

Printed are errors of step times with the cost model alone and corrected, and how often measured steps lie in intervals of 50
and 90 %: of the half for testing, and of every row stated in full with its cluster, its model or its source left out; the
rows that the correction made worse; and the share of the best strategy after 1, 3 and 5 runs of a group whose source was left
out, in the order of either.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.published.price import cluster_of, draft_of_row, evaluator, say
from benchmarks.published.rows import Row, read
from benchmarks.truth import half_of
from rlplace.agents.residual import train_residual
from rlplace.cluster.parse import parse
from rlplace.errors import RlplaceError
from rlplace.graph.capture import capture
from rlplace.measured.corrected import run_of
from rlplace.measured.log import Run, read_runs
from rlplace.measured.pool import first_pool
from rlplace.measured.residual import Residual
from rlplace.measured.truths import Truth
from rlplace.strategy.plan import ask
from rlplace.zoo import load_model

OUT = Path(__file__).parents[1] / "checkpoints" / "residual"
ROWS = Path(__file__).with_suffix(".json")

MODELS = {
    "hf:gpt2,n_layer=24,n_embd=1024,n_head=16": 512,
    "hf:llama,hidden_size=2048,intermediate_size=5504,num_attention_heads=16,vocab_size=32000,num_hidden_layers=16": 1024,
    "hf:bert,num_hidden_layers=24,hidden_size=1024,intermediate_size=4096,num_attention_heads=16": 512,
}
CLUSTERS = ("a100-40g:4", "a100-80g:2x8,ib=200g", "h100:2x8", "v100:8", "l4:4", "rtx4090:4")
TRUTHS = 4
"""Of every model and cluster."""

STEPS, MEMBERS = 300, 5


@dataclass(frozen=True)
class Known:
    """A published step, and as a run."""

    row: Row
    run: Run
    model: str

    @property
    def wrong(self) -> float:
        """log(measured / predicted)."""
        assert self.row.taken_s is not None
        return math.log(self.row.taken_s / self.run.predicted_s)

    @property
    def cluster(self) -> str:
        """Kind of devices and how many."""
        return f"{self.row.gpus} x {self.row.gpu}"

    @property
    def source(self) -> str:
        """Who published it."""
        return self.row.source.split()[0]


def published(path: Path, graphs: Path | None) -> list[Known]:
    """Every step of the table that was timed and is priced, in 16 bits or more."""
    found = []
    for row in read(path)[0]:
        if row.taken_s is None or row.precision == "fp8":
            continue
        said = say(row, graphs)
        if said.step_s is None:
            continue
        scores, cluster = evaluator(row, graphs), cluster_of(row.gpu, row.gpus)
        draft = draft_of_row(row, scores.costs.names)
        evaluation = dataclasses.replace(scores.evaluate(draft), step_time_s=said.step_s)
        run = run_of(
            draft, evaluation, scores.costs.names, cluster, question=" ".join(row.group), status="done", step_s=(row.taken_s,),
            stack={row.software.name or "torch": ""},
        )  # fmt: skip
        found.append(Known(row, run, row.model))
    return found


def made_up(seed: int = 0) -> list[Run]:
    """Runs of all candidates on truths at random."""
    found = []
    for text, seq in MODELS.items():
        loaded = [load_model(text, batch=batch, seq=seq, dtype="fp16") for batch in (2, 4)]
        graphs = [capture(one.module, one.example_inputs, loss=one.loss) for one in loaded]
        for name in CLUSTERS:
            question = ask(graphs[0], parse(name), 64, other=graphs[1])
            try:
                pool = first_pool(question, calls=200)
            except RlplaceError:
                continue
            for number in range(TRUTHS):
                truth = Truth.drawn(question, zlib.crc32(f"{text} {name} {seed} {number}".encode()))
                names, machine = question.costs.names, question.cluster
                found += [
                    run_of(draft, said, names, machine, question=text, status="done", step_s=(truth.step_s(draft),))
                    for draft, said in zip(pool.drafts, pool.said, strict=True)
                ]
    return found


def left_out(known: Sequence[Known], keys: Sequence[str], train: Callable[[list[Run]], Residual]) -> tuple[Any, Any]:
    """Mean and spread for every row of a residual that has seen no row of the same key."""
    mean, spread = np.zeros(len(known)), np.ones(len(known))
    for held in dict.fromkeys(keys):
        at = [number for number, name in enumerate(keys) if name == held]
        residual = train([one.run for one, name in zip(known, keys, strict=True) if name != held])
        mean[at], spread[at] = residual.of([known[number].run for number in at])
    return mean, spread


def believed(known: Sequence[Known], mean: Any) -> float:
    """The part of a mean that makes the least error of rows that its residuals have not seen."""
    wrong = np.array([one.wrong for one in known])
    return min((0.0, 0.25, 0.5, 0.75, 1.0), key=lambda part: float(np.abs(np.expm1(part * mean - wrong)).mean()))


def figures(known: Sequence[Known], keys: Sequence[str], mean: Any, spread: Any) -> dict[str, Any]:
    """Errors and coverage; intervals of a key are widened by what the rows of all other keys ask for."""
    wrong = np.array([one.wrong for one in known])
    z = np.abs(wrong - mean) / spread
    inside = {"50": 0.0, "90": 0.0}
    for held in dict.fromkeys(keys):
        own = np.array([name == held for name in keys])
        others = z[~own] if (~own).any() else z
        for level, bound in (("50", np.quantile(others, 0.5)), ("90", np.quantile(others, 0.9))):
            inside[level] += float((z[own] <= bound).sum())
    return {
        "rows": len(known), "keys": len(set(keys)),
        "alone": errors(np.expm1(-wrong)), "corrected": errors(np.expm1(mean - wrong)),
        "inside": {level: round(count / len(known), 3) for level, count in inside.items()},
        "as stated": {"50": round(float((z <= 0.674).mean()), 3), "90": round(float((z <= 1.645).mean()), 3)},
        "worse": _worse(known, wrong, mean),
    }  # fmt: skip


def _worse(known: Sequence[Known], wrong: Any, mean: Any) -> list[list[Any]]:
    """Rows whose error the correction made larger by two points or more: what they are, and both errors in %."""
    found = []
    for one, w, m in zip(known, wrong, mean, strict=True):
        before, after = 100 * math.expm1(-w), 100 * math.expm1(m - w)
        if abs(after) > abs(before) + 2.0:
            found.append([one.source, one.model, one.cluster, one.row.words, round(before, 1), round(after, 1)])
    return sorted(found, key=lambda row: abs(row[4]) - abs(row[5]))


def errors(off: Any) -> dict[str, float]:
    """Mean and 90th percentile of absolute errors in %."""
    size = 100 * np.abs(off)
    return {"mean": round(float(size.mean()), 1), "p90": round(float(np.quantile(size, 0.9)), 1)}


def order(known: Sequence[Known], mean: Any) -> dict[str, Any]:
    """Share of the best measured strategy after 1, 3 and 5 runs in the order of predictions, geometric mean over groups."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, one in enumerate(known):
        groups.setdefault(one.row.group, []).append(number)
    shares: dict[str, list[list[float]]] = {"alone": [], "corrected": []}
    for members in groups.values():
        if len({known[number].row.words + known[number].row.recompute for number in members}) < 2:
            continue
        taken = [float(known[number].row.taken_s or 0.0) for number in members]
        for name, shift in (("alone", np.zeros(len(known))), ("corrected", mean)):
            said = [math.log(known[number].run.predicted_s) + shift[number] for number in members]
            ranked = [taken[index] for index in np.argsort(said)]
            shares[name].append([min(taken) / min(ranked[:runs]) for runs in (1, 3, 5)])
    return {
        name: {"groups": len(rows), "after": np.exp(np.log(rows).mean(axis=0)).round(3).tolist()}
        for name, rows in shares.items()
    }


def card(found: dict[str, Any], training: dict[str, Any]) -> str:
    """The card of the shipped residual."""
    lines = [f"- {name}: {json.dumps(value)}" for name, value in training.items()]
    for name, one in found.items():
        if "alone" in one and "inside" in one:
            lines.append(
                f"- {name}, {one['rows']} steps: mean error {one['alone']['mean']} % by the cost model, "
                f"{one['corrected']['mean']} % corrected; 50 and 90 % intervals hold {one['inside']['50']:.0%} and "
                f"{one['inside']['90']:.0%}"
            )
    ends = ["- reproduce: `python -m benchmarks.residual STEPS.csv`", "- license: Apache-2.0", ""]
    return "\n".join(["# Residual", "", *lines, *ends])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=Path)
    parser.add_argument("--graphs", type=Path)
    parser.add_argument("--runs", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not options.steps.exists():
        sys.exit(f"{options.steps}: not there; the published steps are no part of this repository, nothing to train on")
    torch.set_num_threads(1)
    everything = published(options.steps, options.graphs)
    known = [one for one in everything if one.row.strict]
    more = [run for path in options.runs for run in read_runs(path)]
    truths = made_up(options.seed)
    print(f"{len(known)} steps stated in full, {len(more)} runs, {len(truths)} runs on made-up truths", flush=True)

    def train(runs: list[Run]) -> Residual:
        return train_residual([*runs, *more], truths, members=MEMBERS, steps=STEPS, seed=options.seed)

    fit = np.array([half_of(one.row) == "fit" for one in known])
    by: dict[str, list[str]] = {
        "cluster": [one.cluster for one in known],
        "model": [one.model for one in known],
        "source": [one.source for one in known],
    }
    found: dict[str, Any] = {}
    weight, z = 1.0, np.zeros(0)
    for name, keys in by.items():
        mean, spread = left_out(known, keys, train)
        if name == "cluster":
            weight = believed([one for one, own in zip(known, fit, strict=True) if own], mean[fit])
            z = np.abs(np.array([one.wrong for one in known]) - weight * mean) / spread
        found[f"{name} left out"] = figures(known, keys, weight * mean, spread)
        show(name, found[f"{name} left out"])
    mean, _ = left_out(everything, [one.source for one in everything], train)
    found["order, source left out"] = order(everything, weight * mean)
    print(json.dumps(found["order, source left out"]))
    widen = round(float(np.quantile(z[fit], 0.68)), 3)
    half = [one.run for one, own in zip(known, fit, strict=True) if own]
    shipped = dataclasses.replace(train(half), widen=widen, weight=weight)
    test = [one for one, own in zip(known, fit, strict=True) if not own]
    mean, spread = shipped.of([one.run for one in test])
    found["half for testing"] = figures(test, [one.source for one in test], mean, spread)
    show("half for testing", found["half for testing"])
    training = {
        "published steps": len(half), "runs": len(more), "made up": len(truths), "members": MEMBERS, "steps": STEPS,
        "seed": options.seed, "weight": weight, "widen": widen,
    }  # fmt: skip
    shipped.save(options.out, training=training, card=card(found, training))
    ROWS.write_text(json.dumps(found, indent=1) + "\n")


def show(name: str, found: dict[str, Any]) -> None:
    """A line."""
    facts = {key: value for key, value in found.items() if key != "worse"}
    print(f"{name}: {json.dumps(facts)}, {len(found['worse'])} rows worse by 2 points", flush=True)


if __name__ == "__main__":
    main()
