"""Which strategy to run next on a cluster whose truth is hidden: rules compared after 1, 2, 3 and 5 runs.

    python -m benchmarks.runs                       all test instances, rows that stand there are not run again
    python -m benchmarks.runs --split tune --seeds 2
    python -m benchmarks.runs --table

An instance is a captured model on a preset cluster; a truth (`rlplace.measure.world`) is drawn for each seed. A rule chooses
among what the planner proposes, and sees step times and memory of what it has run. After every run the corrected model is asked
for better strategies, which join the candidates, for all rules alike. The figure is the step time of the quickest run over the
least that is known for the truth: of all candidates, and of a search that knows it. Before anything has run it counts 3.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.random import Generator

from benchmarks.harness import add_row, arguments, markdown, missing, one_thread, read_rows
from rlplace.cluster.parse import parse
from rlplace.errors import RlplaceError
from rlplace.measure.belief import RULES, Belief, Observation, expected, least
from rlplace.measure.pool import Pool, candidates, first_pool
from rlplace.measure.session import replan
from rlplace.measure.world import Truth
from rlplace.model.zoo import load_model
from rlplace.strategy.search.plan import ask
from rlplace.strategy.search.tries import SearchProblem

Rule = Callable[[Belief, Generator], int | None]
ROWS = Path(__file__).with_suffix(".rows.jsonl")
RUNS, NEVER = 5, 3.0
SHOWN = (1, 2, 3, 5)

_SMALL = "vocab_size=32000,num_hidden_layers=16"
MODELS = {
    "tune": {
        "gpt2-medium": ("hf:gpt2,n_layer=24,n_embd=1024,n_head=16", 512),
        "llama-1b": (f"hf:llama,hidden_size=2048,intermediate_size=5504,num_attention_heads=16,{_SMALL}", 1024),
        "bert-large": ("hf:bert,num_hidden_layers=24,hidden_size=1024,intermediate_size=4096,num_attention_heads=16", 512),
        "vit-large": ("hf:vit,num_hidden_layers=24,hidden_size=1024,intermediate_size=4096,num_attention_heads=16", 1),
    },
    "test": {
        "gpt2-xl": ("hf:gpt2,n_layer=48,n_embd=1600,n_head=25", 512),
        "qwen2-3b": (
            "hf:qwen2,hidden_size=2048,intermediate_size=11008,num_hidden_layers=24,num_attention_heads=16,"
            "num_key_value_heads=2,vocab_size=32000", 1024,
        ),
        "t5-large": ("hf:t5,d_model=1024,d_ff=4096,num_layers=24,num_heads=16", 256),
        "opt-1b": ("hf:opt,hidden_size=2048,ffn_dim=8192,num_hidden_layers=24,num_attention_heads=32", 512),
        "gpt_neox-1b": ("hf:gpt_neox,hidden_size=2048,intermediate_size=8192,num_hidden_layers=16,num_attention_heads=16", 512),
    },
}  # fmt: skip
"""By split and name: MODEL text and sequence."""

CLUSTERS = {
    "tune": ("a100-40g:4", "v100:8", "l4:4", "h100:2x4,ib=400g"),
    "test": ("a100-80g:8", "rtx3090:4", "t4:2x4,eth=25g", "a100-40g:4x2,ib=100g", "a100-40g:2+v100:4", "rtx4090:8"),
}
BATCH, CAPTURED = 64, (2, 4)


def instances(split: str) -> Iterator[tuple[str, SearchProblem]]:
    """Names and questions; models that fit a cluster in no way are left out."""
    for name, (text, seq) in MODELS[split].items():
        graphs = []
        for batch in CAPTURED:
            loaded = load_model(text, batch=batch, seq=seq, dtype="fp16")
            from rlplace.model.capture.capture import capture

            graphs.append(capture(loaded.module, loaded.example_inputs, loss=loaded.loss))
        for cluster in CLUSTERS[split]:
            yield f"{name} on {cluster}", ask(graphs[0], parse(cluster), BATCH, other=graphs[1])


def thompson(belief: Belief, rng: Generator) -> int | None:
    """Returns the best of one draw of all step times, among what fits in it."""
    if belief.best is None:
        return expected(belief)
    drawn = rng.multivariate_normal(belief.mean, belief.covariance, method="eigh")
    fits = rng.random(len(drawn)) < belief.fits
    return least(belief, np.where(fits, drawn, drawn + 10.0))


def anyhow(belief: Belief, rng: Generator) -> int | None:
    """Returns at random among what is likely to fit."""
    likely = np.where(belief.fits >= 0.8, 0.0, 10.0)
    return least(belief, rng.random(len(likely)) + likely)


def rules_by_name() -> dict[str, Rule]:
    """Returns those of the package, and draws."""
    own: dict[str, Rule] = {name: lambda belief, rng, rule=rule: rule(belief) for name, rule in RULES.items()}  # type: ignore[misc]
    return {**own, "thompson": thompson, "random": anyhow}


def play(rule: Rule, pool: Pool, truth: Truth, seed: int) -> tuple[list[float], list[str]]:
    """Returns step time of the quickest run after each, inf before anything ran; and what became of each run."""
    rng, belief = np.random.default_rng([seed, 1]), Belief(pool)
    best, said = [], []
    for _ in range(RUNS):
        chosen = rule(belief, rng)
        if chosen is not None:
            ended = truth.run(belief.pool.drafts[chosen], rng)
            step_s, shown = ended.step_s[0] if ended.step_s else None, (ended.pace_s, ended.stage_busy_s)
            belief = belief.update(Observation(chosen, step_s, ended.share, step_s is None, *shown))
            said.append("out of memory" if step_s is None else "ran")
            belief = Belief(replan(belief, truth.question), belief.observations)
        done = [truth.step_s(belief.pool.drafts[ran.candidate]) for ran in belief.observations if ran.step_s is not None]
        best.append(min(done, default=math.inf))
    return best, said


def optimum(pool: Pool, truth: Truth) -> float:
    """Returns the least step time that is known for a truth."""
    drafts = list(pool.drafts)
    try:
        drafts += candidates(truth.true_problem, 600, 8)
    except RlplaceError:
        pass
    return min((truth.step_s(draft) for draft in drafts if truth.share(draft) <= 1.0), default=math.inf)


def run(split: str, seeds: int, path: Path, rules: list[str]) -> None:
    """Adds the rows that are missing."""
    known_rules = rules_by_name()
    for name, question in instances(split):
        try:
            pool = first_pool(question)
        except RlplaceError as error:
            print(name, error)
            continue
        for seed in range(seeds):
            todo = missing(path, [(name, seed, rule) for rule in rules], "instance", "seed", "rule")
            truth = Truth.drawn(question, zlib.crc32(f"{split} {name} {seed}".encode()))
            if not todo or math.isinf(least_s := optimum(pool, truth)):
                continue
            for *_, rule in todo:
                best, said = play(known_rules[rule], pool, truth, seed)
                over = [round(min(value / least_s, NEVER), 4) for value in best]
                row = {"split": split, "instance": name, "seed": seed, "rule": rule, "candidates": len(pool.drafts)}
                add_row(path, {**row, "over": over, "said": said})


def table(path: Path, split: str) -> str:
    """Makes the table of geometric means by rule and number of runs, and the share of runs that did not fit."""
    over: dict[str, list[list[float]]] = defaultdict(list)
    lost: dict[str, list[bool]] = defaultdict(list)
    for row in read_rows(path):
        if row["split"] == split:
            over[row["rule"]].append(row["over"])
            lost[row["rule"]] += [said != "ran" for said in row["said"]]
    lines = []
    for rule, values in over.items():
        means = np.exp(np.log(np.maximum(np.array(values), 1.0)).mean(axis=0))
        lines.append([f"{rule} ({len(values)})", *(f"{means[n - 1]:.3f}" for n in SHOWN), f"{np.mean(lost[rule]):.1%}"])
    return markdown(["rule", *map(str, SHOWN), "did not fit"], lines)


def ratios(path: Path, split: str) -> str:
    """Makes the table of rules over the first after 2 and 3 runs, with the 95 % interval of bootstrap draws of instances."""
    over: dict[str, dict[tuple[str, int], list[float]]] = defaultdict(dict)
    for row in read_rows(path):
        if row["split"] == split:
            over[row["rule"]][row["instance"], row["seed"]] = row["over"]
    first, *others = over
    lines = []
    for rule in others:
        shared = [key for key in over[first] if key in over[rule]]
        names, figures = sorted({name for name, _ in shared}), []
        for runs in (2, 3):
            log: dict[str, list[float]] = {name: [] for name in names}
            for key in shared:
                log[key[0]].append(math.log(max(1.0, over[first][key][runs - 1]) / max(1.0, over[rule][key][runs - 1])))
            picks = np.random.default_rng(0).integers(len(names), size=(2000, len(names)))
            drawn = [np.mean(np.concatenate([log[names[n]] for n in pick])) for pick in picks]
            low, high = np.exp(np.quantile(drawn, [0.025, 0.975]))
            mean = math.exp(np.mean(np.concatenate([log[name] for name in names])))
            figures.append(f"{mean:.3f} [{low:.3f}, {high:.3f}]")
        lines.append([rule, *figures])
    return markdown([f"{first} over", "after 2 runs", "after 3 runs"], lines)


if __name__ == "__main__":
    options = arguments(
        __doc__,
        split=("test", "instances", MODELS),
        seeds=(3, "truths of an instance"),
        rules=((), "default: all"),
        table="only the tables",
    )
    one_thread()
    if not options.table:
        run(options.split, options.seeds, ROWS, list(options.rules) or [*rules_by_name()])
    print(table(ROWS, options.split), ratios(ROWS, options.split), sep="\n")
