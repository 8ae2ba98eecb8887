"""The tables of `benchmarks.finetune`: geometric means with 95 % bootstrap intervals over cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlplace.means import interval

_DRAWS = 4000


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the tables."""
    if not rows:
        print("no finished cells")
        return
    everybody = list(dict.fromkeys(name for row in rows for name in row["judged_s"]))
    methods = [name for name in everybody if name != "best_of"]
    clusters = list(dict.fromkeys(row["cluster"] for row in rows))
    seeds = {row["seed"] for row in rows}
    models = list(dict.fromkeys(row["model"] for row in rows))
    print(f"{len(rows)} cells: {len(clusters)} clusters, {', '.join(models)}, {len(seeds)} seeds\n")
    print("Step time over that of the un-tuned agent's plan, geometric mean over models and seeds [95 %]\n")
    print("| cluster | " + " | ".join(methods[1:]) + " |")
    print("|---|" + "---|" * len(methods[1:]))
    for cluster in [*clusters, "all"]:
        chosen = [row for row in rows if cluster in (row["cluster"], "all")]
        print(f"| {cluster} | " + " | ".join(_ratio(chosen, name, "untuned") for name in methods[1:]) + " |")
    own = "finetuned"
    if own in methods:
        print("\nStep time of the fine-tuned agent's plan over that of the others, all clusters\n")
        print("| over | ratio | better / equal / worse by 1 % | worst cell |\n|---|---|---|---|")
        for name in everybody:
            both = [row for row in rows if own in row["judged_s"] and name in row["judged_s"]]
            if name != own and both:
                values = _values(both, own, name)
                counts = (sum(values < 0.99), sum((values >= 0.99) & (values <= 1.01)), sum(values > 1.01))
                worst = both[int(np.argmax(values))]
                where = f"{values.max():.3f} ({worst['cluster']}, {worst['model']}, seed {worst['seed']})"
                print(f"| {name} | {_ratio(both, own, name)} | {' / '.join(map(str, counts))} | {where} |")
    print(
        "\n| method | plans | dropped | seconds of measuring | of all | prediction error before | after |\n"
        + "|---|"
        + "---|" * 6
    )
    for name in methods[1:]:
        facts = [row["facts"][name] for row in rows if name in row["facts"]]
        if facts:
            keys = ("plans", "dropped", "measuring_s", "seconds", "error_before", "error_after")
            plans, dropped, measuring, seconds, before, after = (float(np.mean([f[key] for f in facts])) for key in keys)
            print(
                f"| {name} | {plans:.0f} | {dropped:.0f} | {measuring:.0f} | {seconds:.0f} | {100 * before:.1f} % | "
                f"{100 * after:.1f} % |"
            )


def _values(rows: Sequence[dict[str, Any]], name: str, over: str) -> Any:
    both = [row["judged_s"] for row in rows if name in row["judged_s"] and over in row["judged_s"]]
    return np.array([float(np.median(steps[name]) / np.median(steps[over])) for steps in both])


def _ratio(rows: Sequence[dict[str, Any]], name: str, over: str) -> str:
    values = _values(rows, name, over)
    if not len(values):
        return "-"
    low, high = interval(np.log(values), resamples=_DRAWS, least=1)
    return f"{float(np.exp(np.log(values).mean())):.3f} [{low:.3f}, {high:.3f}]"
