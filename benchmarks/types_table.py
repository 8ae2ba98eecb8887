"""The page of the docs from the rows of `benchmarks/types.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

STEPS = ("trained", "captured", "placed", "equal")
WAYS = {"shares": "that share parameters", "stages": "as two stages"}
"""Of `benchmarks/types_runs.py`, by their names."""

_HEAD = """# Model types of transformers

After this page you know which `hf:` models can be planned as they come, and on what data they are trained.

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

`python -m benchmarks.types` tried the {known} types of transformers {version}: each shrunk to two layers of little width,
trained a step on a CPU with dropout off, captured, planned as a whole strategy for two A100s; a placement that spreads its ops
over two devices was applied. `python -m benchmarks.types_runs` ran plans over two processes: parameters in shares (FSDP), and a
pipeline of two stages. {summary}

Each type with its class, its MODEL text, what it reached and the reason where it stopped is a line of
`benchmarks/types.rows.jsonl`; `python -m benchmarks.types --table` writes this page from them.
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
    return _HEAD.format(known=known, version=version, summary=summary(rows.values()))
