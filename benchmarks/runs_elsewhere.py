"""The use of runs of other models (`rlplace finetune --from`), on a cluster like this one and on one unlike it.

    python -m benchmarks.runs_elsewhere [--truths 8]

Two models have four runs each on a made-up truth (`rlplace.measure.world`) of a preset cluster. Three other models are
planned for on the same truth, and on one that has nothing in common with it but the kinds of devices. Printed are, without and
with those runs: the mean absolute error of the log of expected step times of all candidates before anything ran here, the mean
square of errors over stated standard deviations (1 where they are honest), and the step time of the quickest run over the least
of all candidates after 1 and 2 runs, geometric means, before the first that works 3.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache

import numpy as np

from benchmarks.harness import arguments, markdown
from benchmarks.runs import BATCH, CAPTURED, MODELS, NEVER
from rlplace.cluster.parse import parse
from rlplace.errors import RlplaceError
from rlplace.measure.belief import Belief, Observation, improvement
from rlplace.measure.log import Run
from rlplace.measure.pool import Pool, first_pool
from rlplace.measure.session import run_of
from rlplace.measure.world import Truth
from rlplace.model.capture.capture import capture
from rlplace.model.graph.opgraph import OpGraph
from rlplace.model.zoo import load_model
from rlplace.strategy.search.plan import ask
from rlplace.strategy.search.tries import SearchProblem

THERE, HERE = ("gpt2-medium", "bert-large"), ("t5-large", "opt-1b", "gpt_neox-1b")
CLUSTERS = ("a100-80g:8", "t4:2x4,eth=25g", "a100-40g:4x2,ib=100g", "a100-40g:2+v100:4")
RUNS = 4
"""Of every model elsewhere."""


@cache
def graphs_of(name: str) -> tuple[OpGraph, OpGraph]:
    """Returns a model, captured at two batches."""
    text, seq = (MODELS["tune"] | MODELS["test"])[name]
    loaded = [load_model(text, batch=batch, seq=seq, dtype="fp16") for batch in CAPTURED]
    first, second = (capture(one.module, one.example_inputs, loss=one.loss) for one in loaded)
    return first, second


@cache
def asked(name: str, cluster: str) -> tuple[SearchProblem, Pool] | None:
    """Returns a question and its candidates; None where nothing fits."""
    first, second = graphs_of(name)
    question = ask(first, parse(cluster), BATCH, other=second)
    try:
        return question, first_pool(question)
    except RlplaceError:
        return None


def runs_there(cluster: str, seed: int) -> tuple[Run, ...]:
    """Runs of candidates at random of the models elsewhere, on the truth of a seed."""
    rng, found = np.random.default_rng(seed), []
    for name in THERE:
        if (known := asked(name, cluster)) is None:
            continue
        question, pool = known
        truth, names = Truth.drawn(question, seed), question.costs.names
        ran = [(number, truth.run(pool.drafts[number], rng)) for number in rng.permutation(len(pool.drafts))]
        done = [(number, ended.step_s) for number, ended in ran if ended.status == "done"][:RUNS]
        found += [
            run_of(pool.drafts[number], pool.steps[number], names, question.cluster, status="done", step_s=step_s)
            for number, step_s in done
        ]
    return tuple(found)


def figures(question: SearchProblem, pool: Pool, seed: int, elsewhere: tuple[Run, ...]) -> list[float]:
    """Returns error, square of errors over deviations, and logs of the quickest run over the least after 1 and 2 runs."""
    truth, belief = Truth.drawn(question, seed), Belief(pool, elsewhere=elsewhere)
    log_s = np.log([truth.step_s(draft) for draft in pool.drafts])
    fits = np.array([truth.share(draft) <= 1.0 for draft in pool.drafts])
    wrong, spread, least = belief.mean - log_s, belief.std, log_s[fits].min(initial=math.inf)
    rng, best, over = np.random.default_rng(seed), math.log(NEVER), []
    for _ in range(2):
        if (chosen := improvement(belief)) is not None:
            ended = truth.run(pool.drafts[chosen], rng)
            step_s = ended.step_s[0] if ended.step_s else None
            belief = belief.update(Observation(chosen, step_s, ended.share, step_s is None, ended.pace_s, ended.stage_busy_s))
            best = best if step_s is None else min(best, log_s[chosen] - least)
        over.append(best)
    return [float(np.abs(wrong).mean()), float(((wrong / spread) ** 2).mean()), *over]


def main() -> None:
    """Prints the table."""
    truths = arguments(__doc__, truths=(8, "of every cluster")).truths
    rows = defaultdict(list)
    for cluster in CLUSTERS:
        for seed in range(truths):
            alike, unlike = runs_there(cluster, seed), runs_there(cluster, seed + 1000)
            for name in HERE:
                known = asked(name, cluster)
                if known is None or not any(Truth.drawn(known[0], seed).share(draft) <= 1.0 for draft in known[1].drafts):
                    continue
                for what, runs in (("without", ()), ("a cluster like this", alike), ("one unlike this", unlike)):
                    if runs or what == "without":
                        rows[what].append(figures(*known, seed, runs))
        print(cluster, len(rows["without"]), flush=True)
    lines = []
    for what, found in rows.items():
        error, square, *over = np.mean(found, axis=0)
        lines.append([what, len(found), f"{error:.3f}", f"{square:.2f}", *(f"{math.exp(one):.3f}" for one in over)])
    heads = ["runs on", "cases", "mean error of log step time", "squares over variances", "after 1 run", "after 2"]
    print(markdown(heads, lines))


if __name__ == "__main__":
    main()
