"""The page of the docs from the rows of `benchmarks/types.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

STEPS = ("trained", "captured", "placed", "equal")
WAYS = {"shares": "that share parameters", "stages": "as two stages"}
"""Of `benchmarks/types_runs.py`, by their names."""

_HEAD = """# Model types of transformers

`hf:TYPE` builds every model type of the transformers library that has a head or a base model in its tables, from its
configuration with random weights, with inputs that are made up:

| its head | what it is trained towards |
|---|---|
| speech to text, sequence to sequence, masked words, next word, image and text | random words |
| images, videos, sounds, single words, pixels | random classes |
| two towers (clip, siglip, ...) | its own contrastive loss |
| all others: frames of speech, boxes, masks, depth, base models and their parts | outputs of zero (a mean square) |

Losses that match by value, as those of boxes do, run on the processor beside the step and are left out. Image-and-text models
are given words alone unless their forward demands images, so that the tower of images has no gradient. Options reach into the
configurations that one holds: `hf:llava,text_config.num_hidden_layers=2`; `hf:detr,backbone_config.model_type=resnet` makes one
another type (detr's own backbone needs timm). Other batches come from a function of yours, `file.py:function`.

`python -m benchmarks.types` tries the {known} types of transformers {version}: {text}
`python -m benchmarks.types --table` writes this page; rows, with the MODEL text of each type, are in
`benchmarks/types.rows.jsonl`.

{summary}

*export* and *dispatch* look at each op, *module* at each module where the forward looks at values
([how](cost-model.md)). A placement of single ops needs a graph that exports; whole strategies run without one.
"""


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """How many types get how far."""
    rows = list(rows)
    counts = [sum(row["reached"] in STEPS[at:] for row in rows) for at in range(len(STEPS))]
    names = ("train", "are captured", "are placed", "run their placement with equal loss and gradients")
    counts += [sum(_equal(row, way) for row in rows) for way in WAYS]
    names += tuple(f"run over two processes {text} with equal loss and gradients" for text in WAYS.values())
    counts.append(sum(any(_equal(row, way) for way in WAYS) for row in rows))
    names += ("in one of these ways",)
    shares = (f"{n} {name} ({n / max(1, counts[0]):.1%})" for name, n in zip(names[1:], counts[1:], strict=True))
    return f"Of {len(rows)} types that were tried {counts[0]} train; of these " + ", ".join(shares) + "."


def _equal(row: Mapping[str, Any], way: str) -> bool:
    """Whether a type ran over two processes like this; a reason is a text."""
    return isinstance(row.get("runs", {}).get(way), float)


def page(rows: Mapping[str, Mapping[str, Any]], known: int, version: str) -> str:
    """The page."""
    text = (
        "each is shrunk to two layers of little width, trained a step on a CPU with dropout off, captured, planned as a whole "
        "strategy for two A100s, and a placement that spreads its ops over two devices is applied. `python -m "
        "benchmarks.types_runs` runs plans over two processes: parameters in shares (FSDP), and a pipeline of two stages."
    )
    head = _HEAD.format(known=known, version=version, text=text, summary=summary(rows.values()))
    if len(rows) < known:
        head += (
            f"\n{known - len(rows)} types have no row yet: those with rows were drawn by a hash of their names, but for those "
            "of\n`tests/zoo/test_types.py`. The command goes on with the others.\n"
        )
    trained = [rows[kind] for kind in sorted(rows) if rows[kind]["reached"]]
    names = ("type", "class", "captured by", "placed", "applied", *WAYS)
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|", *map(_line, trained)]
    reasons: dict[str, list[str]] = {}
    for kind in sorted(rows):
        if not rows[kind]["reached"]:
            reasons.setdefault(_short(rows[kind]["why"], kind), []).append(f"`{kind}`")
    others = [f"- {why}: {', '.join(kinds)}" for why, kinds in sorted(reasons.items(), key=lambda item: -len(item[1]))]
    return "\n".join([head, "## Types that train", "", *lines, "", "## Types that do not", "", *others, ""])


def _line(row: Mapping[str, Any]) -> str:
    reached, why = row["reached"], _short(row.get("why", ""), row["type"]).replace("|", "/")
    applied = "equal" if reached == "equal" else why if reached == "placed" else ""
    placed = "yes" if reached in STEPS[2:] else why if reached == "captured" else ""
    method = row.get("method") or why
    said = (_short(str(row.get("runs", {}).get(way, "")), row["type"]).replace("|", "/") for way in WAYS)
    runs = ["equal" if _equal(row, way) else why for way, why in zip(WAYS, said, strict=True)]
    return f"| {row['type']} | {row['class']} | {method} | {placed} | {applied} | {' | '.join(runs)} |"


def _short(why: str, kind: str) -> str:
    """A reason without what differs from type to type."""
    why = why.removeprefix(f"hf:{kind}: ").split("; give the model and its")[0].split("; a placement of ops")[0]
    why = re.sub(r"torch.export fails on \w+ with ", "export: ", why)
    why = re.sub(r"(data-dependent) expression .*", "condition", why) if "data-dependent" in why else why
    why = re.sub(r"^export: .*condition$", "export: a condition on values", why)
    why = re.sub(r"/\S*/site-packages/", "", why)
    return re.sub(r"[<>`*_\[\]{}$]", lambda found: "\\" + found.group(), why[:160].rstrip(". "))
