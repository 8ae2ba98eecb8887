"""The page of the docs from the rows of `equality`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.equality_models import KINDS

_HEAD = """# Equal to the plain model

{kinds} kinds of models of four blocks run under strategies of every kind on eight processes with gloo, in double precision,
and are compared with the plain model: loss and gradients of the first step, parameters and buffers after three steps of AdamW.
In {clipped} cells the third step also accumulates two gradients and clips them. `python -m benchmarks.equality` runs it
(`--missing` runs the cells left, `--table` writes this page); rows are in `benchmarks/equality.jsonl`.

A figure is the largest difference of a gradient / a trained parameter or buffer, relative to the largest element of its tensor;
gradients that are nothing but rounding are compared with 1e-8 of the model's largest, what they train with the learning rate.
Losses and norms differ by {least:.0e} at most. bert, gpt2, opt, qwen2, distilbert and t5 have tied weights; resnet has
GroupNorm ([why](../docs/runtime.md#what-is-refused)); there is no dropout; a batch is eight samples of eight positions.

{summary}

Strategies: `replicate` 8 copies; `FSDP` 8 shares, by level; `hybrid` 2 copies of 4 shares, level 1 plain, else 3; `TP` groups
of 4, 2 copies; `TP+SP` groups of 2, 4 copies; `TP+SP+FSDP` groups of 2, 4 shares, level 3; `PP gpipe`, `PP 1f1b` 4 stages, 2
copies; `PP zbv`, `PP interleaved` 4 stages on 2 places, 4 copies; `PP+FSDP` 4 stages of 2 shares; `PP zbv+FSDP` 4 stages on 2
places of 4 shares; `PP+TP+FSDP` 2 stages, groups of 2, 2 shares; `PP zbv+TP+SP` 4 stages on 2 places, groups of 2, 2 copies. An
empty cell has not been run.
"""


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The page."""
    refused = [row for row in rows if "refused" in row]
    wrong = [f"{row['kind']} {row['cell']}" for row in rows if "failed" in row]
    run = [row for row in rows if "loss" in row]
    summary = (
        f"{len(rows)} cells: {len(run)} equal, {len(refused)} refused ({len(refused) / len(rows):.0%}), {len(wrong)} failed. "
        f"Largest difference of a gradient {max(row['gradient'] for row in run):.0e}, "
        f"of what was trained {max(row['trained'] for row in run):.0e}. torch {rows[0]['torch'].partition('+')[0]}."
    )
    least, clipped = max(max(row["loss"], row.get("norm", 0.0)) for row in run), sum("norm" in row for row in run)
    parts = [_HEAD.format(least=least, clipped=clipped, kinds=len({row["kind"] for row in rows}), summary=summary)]
    reasons = list(dict.fromkeys(_short(row["refused"]) for row in refused))
    for title, hows in (("Plain", ("",)), ("Recomputed: full", ("full",)), ("Recomputed: selective", ("selective",)),
                        ("In host memory", ("offload",))):  # fmt: skip
        if shown := [row for row in rows if row["cell"].rpartition("|")[2] in hows]:
            parts.append(_table(title, shown, reasons))
    parts.append("## Refused\n\n" + "\n".join(f"{n}. {reason}." for n, reason in enumerate(reasons, 1)) + "\n")
    return "\n".join(parts)


def _table(title: str, rows: Sequence[Mapping[str, Any]], reasons: Sequence[str]) -> str:
    columns = list(dict.fromkeys(row["cell"].partition("|")[0] for row in rows))
    found = {(row["kind"], row["cell"].partition("|")[0]): row for row in rows}
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    lines = ["| | " + " | ".join(kinds) + " |", "|---|" + "---:|" * len(kinds)]
    lines += [f"| {c} | " + " | ".join(_cell(found.get((kind, c)), reasons) for kind in kinds) + " |" for c in columns]
    return f"## {title}\n\n" + "\n".join(lines) + "\n"


def _cell(row: Mapping[str, Any] | None, reasons: Sequence[str]) -> str:
    if row is None:
        return ""
    if "refused" in row:
        return f"refused ({reasons.index(_short(row['refused'])) + 1})"
    return "failed" if "failed" in row else f"{row['gradient']:.0e} / {row['trained']:.0e}"


def _short(reason: str) -> str:
    return reason.replace("model.decoder.layers.0", "0").replace("model.layers.0", "0").replace("encoder.block.0", "0")
