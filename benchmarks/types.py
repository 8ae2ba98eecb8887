"""Every model type of transformers: which of them train, are captured, placed, and run their plan with equal gradients.

    python -m benchmarks.types                  all types that have no row yet
    python -m benchmarks.types bert clip        these types, again
    python -m benchmarks.types --table          the page of the docs from the rows

A type is shrunk to a few layers of little width, built with random weights and trained one step (dropout off). If its loss and
gradients are finite, it is captured and planned for two A100s; then a placement that spreads its ops over two CPU devices is
applied, whose loss and gradients must be those of the plain model. Each type runs in a process of its own with a limit of time.
"""

from __future__ import annotations

import copy
import logging
import math
import re
import resource
import signal
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import rlplace
from benchmarks import equality
from benchmarks.harness import ROOT, Row, add_row, apart, arguments, one_thread, read_rows, replaced
from rlplace.errors import MissingError, RlplaceError
from rlplace.model.capture.capture import capture
from rlplace.model.zoo import LoadedModel, load_model

ROWS = Path(__file__).with_suffix(".rows.jsonl")
STEPS = ("trained", "captured", "placed", "equal")
PAGE = ROOT / "docs/model-types.md"
LIMIT_S, TRY_S, BATCH, LONG, MOST = 60, 8, 2, 16, 100_000_000
"""Seconds of a type; samples and positions; parameters that are still built with values."""

CLUSTER, SAMPLES, CALLS = "a100-80g:2", 4, 100
FINAL = ("function of yours", "no head", f"more than {TRY_S} s")
"""Reasons that hold for larger models of a type as well."""

CLOSE = 1e-4
"""Difference of gradients that counts as equal, relative to the largest element of each."""

LAYERS = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers",
     "num_encoder_layers", "num_blocks", "depth", "num_attention_layers"), 2,
)  # fmt: skip
HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4
) | {"num_key_value_heads": 2}  # fmt: skip
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4) | dict.fromkeys(
    ("num_experts_per_tok", "top_k", "moe_topk", "moe_k", "num_experts_per_token", "top_k_experts"), 2
) | {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}  # fmt: skip
REST = {"vocab_size": 512, "image_size": 64, "num_frames": 4, "projection_dim": 32}
OWN = {
    "mamba2": "num_hidden_layers=2,hidden_size=64,num_heads=8,head_dim=16,vocab_size=512",
    "perceiver": "max_position_embeddings=16,num_latents=16,d_latents=64,d_model=64,num_self_attends_per_block=2",
    "reformer": "axial_pos_shape=4/4,axial_pos_embds_dim=32/32,hidden_size=64,vocab_size=512,num_attention_heads=4,"
    "attention_head_size=16,lsh_attn_chunk_length=8,local_attn_chunk_length=8",
    "sam": "vision_config.image_size=64,vision_config.hidden_size=64,vision_config.num_hidden_layers=2,"
    "vision_config.num_attention_heads=4,vision_config.mlp_dim=64,prompt_encoder_config.image_size=64,"
    "prompt_encoder_config.image_embedding_size=4,vision_config.global_attn_indexes=1",
    "wav2vec2-bert": "vocab_size=512,hidden_size=64,num_hidden_layers=2,num_attention_heads=4,intermediate_size=64",
    "detr": "backbone_config.model_type=resnet,d_model=64,encoder_layers=2,decoder_layers=2",
}
"""Types whose sizes depend on each other."""


WIDE = (
    "hidden_size", "d_model", "n_embd", "embed_dim", "dim", "embedding_size", "encoder_hidden_size", "intermediate_size",
    "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim",
)  # fmt: skip


def widths(width: int) -> dict[str, int]:
    """Makes options that set widths; four heads of a quarter each."""
    return dict.fromkeys(WIDE, width) | {"head_dim": width // 4, "d_kv": width // 4}


def sizes(config: Any, less: dict[str, int], prefix: str = "") -> Iterator[str]:
    """Yields options that make a configuration, and those inside it, smaller."""
    from rlplace.model.zoo.transformers import _parts

    most, every = less.get("vocab_size"), config.to_dict()
    heads = every.get("num_attention_heads")
    if type(heads) is int and every.get("num_key_value_heads") == heads:  # none is shared, as in latent attention
        less = less | {"num_key_value_heads": less.get("num_attention_heads", heads)}
    for name, value in every.items():
        if name == "apply_spec_augment" and value:
            yield f"{prefix}{name}=false"  # random spans, drawn anew in each step
        elif type(value) is not int:
            continue
        elif most is not None and name.endswith(("_token_id", "_token_index")) and value >= most:
            yield f"{prefix}{name}={SPECIAL.setdefault(name, most - 1 - len(SPECIAL))}"
        elif value > less.get(name, value):
            yield f"{prefix}{name}={less[name]}"
    for name, part in _parts(config).items():
        yield from sizes(part, less, f"{prefix}{name}.")


SPECIAL: dict[str, int] = {}
"""Special tokens of a shrunk vocabulary; one number each."""


def models(kind: str) -> Iterator[str]:
    """Yields MODEL texts of a type, the smallest first."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if kind in OWN:
        yield f"hf:{kind},{OWN[kind]}"
    try:
        config = CONFIG_MAPPING[kind]()
    except Exception:
        yield f"hf:{kind}"
        return
    tried = set()
    few = LAYERS | EXPERTS | REST
    wide = {name: 512 for name in WIDE}
    eight = dict.fromkeys(HEADS, 8) | wide | {"head_dim": 64}
    shrunk = (few | HEADS | widths(64), few | HEADS | widths(512), few | eight, few | wide, few)
    for less in (*shrunk, LAYERS | {"image_size": 64}, LAYERS, {}):
        text = ",".join([f"hf:{kind}", *sizes(config, less)])
        if text not in tried:
            yield text
        tried.add(text)


RANDOM = ("mask_time_prob", "mask_feature_prob", "pos_embed_shift", "pos_embed_rescale")
"""Other options that draw: shares of a sound that are hidden, by numpy, and moves of positions (None: none), beside jitter."""


def without_dropout(module: nn.Module) -> None:
    """Sets every probability of dropping something to zero."""
    for part in module.modules():
        for holder in (part, getattr(part, "config", None)):
            for name, value in vars(holder).items() if holder is not None else ():
                if ("drop" in name or "jitter" in name or name in RANDOM) and isinstance(value, float):
                    setattr(holder, name, None if name.startswith("pos_embed_") else 0.0)
        if isinstance(part, nn.Dropout):
            part.p = 0.0


def step(module: nn.Module, model: LoadedModel, seed: int = 0) -> tuple[float, dict[str, torch.Tensor]]:
    """Computes loss and gradients; what the forward draws comes from a seed."""
    torch.manual_seed(seed)
    output = module(**model.example_inputs)
    loss = output.loss if model.loss is None else model.loss(output)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def trained(kind: str) -> tuple[LoadedModel, tuple[float, dict[str, torch.Tensor]]]:
    """Finds the smallest model of a type that trains a step, and its loss and gradients."""
    first: Exception | None = None
    signal.signal(signal.SIGPROF, _too_long)
    for text in models(kind):
        try:
            signal.setitimer(signal.ITIMER_PROF, TRY_S)
            count = sum(p.numel() for p in load_model(text, batch=BATCH, seq=LONG).module.parameters())
            if count > MOST:
                raise RlplaceError(f"{count / 1e6:.0f} million parameters even with few layers")
            torch.manual_seed(0)
            model = load_model(text, batch=BATCH, seq=LONG, device="cpu")
            without_dropout(model.module)
            found = step(copy.deepcopy(model.module), model)
            if not math.isfinite(found[0]) or not all(g.isfinite().all() for g in found[1].values()):
                raise RlplaceError("the loss or a gradient of its random weights is not finite")
            signal.setitimer(signal.ITIMER_PROF, 0)
            return model, found
        except Exception as error:
            first = first or error
            if isinstance(error, MissingError) or any(words in str(error) for words in FINAL):
                break
    signal.setitimer(signal.ITIMER_PROF, 0)
    assert first is not None
    raise first


def _too_long(number: int, frame: Any) -> None:
    raise RlplaceError(f"one step of its smallest configuration takes more than {TRY_S} s")


def difference(found: Any, wanted: Any) -> float:
    """Finds the largest difference of loss and gradients, relative to the largest element of each."""
    if found[1].keys() != wanted[1].keys():
        raise AssertionError(f"gradients of {len(found[1])} parameters, not of {len(wanted[1])}")
    floor = 1e-6 * max(float(g.abs().max()) for g in wanted[1].values() if g.numel())
    return max(abs(found[0] - wanted[0]) / max(abs(wanted[0]), 1e-6), equality.difference(found[1], wanted[1], floor))


def look(kind: str, steps: int) -> Row:
    """Finds how far a type gets, and what ended it."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    row: Row = {"type": kind, "reached": ""}
    begin = time.process_time()
    try:
        model, wanted = trained(kind)
        row |= {"reached": "trained", "model": model.name, "class": type(model.module).__name__}
        if steps > 1:
            follow(model, wanted, row)
    except Exception as error:
        row["why"] = reason(error)
    return {**row, "cpu_s": round(time.process_time() - begin, 1)}


def follow(model: LoadedModel, wanted: Any, row: dict[str, Any]) -> None:
    """Runs the later steps, each entered into the row."""
    graph = capture(model.module, model.example_inputs, loss=model.loss)
    row |= {"reached": "captured", "method": graph.capture["method"], "ops": graph.num_ops}
    rlplace.place(graph, CLUSTER, batch=SAMPLES, calls=CALLS, time_limit_s=None)
    row["reached"] = "placed"
    problem = rlplace.price(graph, CLUSTER, groups=20)
    spread = rlplace.place(problem, planner="round_robin")
    placed = rlplace.apply(model.module, spread, ["cpu", "cpu"], example_inputs=model.example_inputs)
    apart = difference(step(placed, model), wanted)
    row["difference"] = float(f"{apart:.1e}")
    if apart > CLOSE:
        raise AssertionError(f"gradients differ by {apart:.1e}")
    row["reached"] = "equal"


def reason(error: BaseException) -> str:
    """Makes one line of an error."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = re.sub(r"/\S*/site-packages/", "", text)  # no paths of this machine
    return (text if isinstance(error, RlplaceError) else f"{type(error).__name__}: {text}")[:300]


def read() -> dict[str, Row]:
    """Reads the newest row of each type."""
    return {row["type"]: row for row in read_rows(ROWS)}


WAYS = {"replicas": "as replicas", "shares": "that share parameters", "stages": "as two stages"}
"""Of `benchmarks/types_runs.py`, by their names."""


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """Counts how many types get how far."""
    rows = list(rows)
    counts = [sum(row["reached"] in STEPS[at:] for row in rows) for at in range(len(STEPS))]
    names = ("train", "are captured", "are placed", "run their placement with equal loss and gradients")
    counts += [sum(_equal(row, way) for row in rows) for way in WAYS]
    names += tuple(f"run over two processes {text} with equal loss and gradients" for text in WAYS.values())
    low = sum(row.get("runs", {}).get("level") == 1 and _equal(row, "shares") for row in rows)
    names = tuple(name.replace("parameters", f"parameters (at level 3; {low} at level 1)") for name in names)
    counts.append(sum(any(_equal(row, way) for way in WAYS) for row in rows))
    names += ("in one of these ways",)
    shares = (f"{n} {name} ({n / max(1, counts[0]):.1%})" for name, n in zip(names[1:], counts[1:], strict=True))
    return f"Of {len(rows)} types that were tried {counts[0]} train; of these " + ", ".join(shares) + "."


def _equal(row: Mapping[str, Any], way: str) -> bool:
    """Says whether a type ran over two processes like this; a reason is a text."""
    return isinstance(row.get("runs", {}).get(way), float)


_COMMON = (
    r"no strategy can run: |the model cannot be cut into stages: |native: |space: it leaves .*?Of what it leaves: |\(.*?\)"
)
_NAMES = r"'[^']*'|\b\w+[.]\w[\w.]*|\b[A-Z]\w*[a-z][A-Z]\w*|[\d.]+(e[-+]\d+)?"


def reasons(rows: Iterable[Mapping[str, Any]]) -> str:
    """Makes a table of why types do not run in some way, the most frequent reason first; names and numbers are left out."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        for way, why in row.get("runs", {}).items():
            if isinstance(why, str):
                text = re.sub(_NAMES, "...", re.sub(_COMMON, "", why.partition(";")[0])).strip()
                found.setdefault(text[:110], {}).setdefault(row["type"], []).append(way)
    lines = ["| reason | types |", "|---|---|"]
    for text, types in sorted(found.items(), key=lambda item: -len(item[1])):
        names = ", ".join(name if ways == ["stages"] else f"{name} ({', '.join(ways)})" for name, ways in types.items())
        lines.append(f"| {text.replace('|', '/')} | {names} |")
    return "\n".join(lines)


def page(rows: Mapping[str, Mapping[str, Any]], known: int, version: str) -> str:
    """Makes the page: its text, with what was tried and what was reached."""
    tried = (r"tried the \d+ types of transformers \S+:", f"tried the {known} types of transformers {version}:")
    text = replaced(PAGE.read_text(), *tried)
    text = replaced(text, r"(?m)^Of \d+ types that were tried .*$", summary(rows.values()))
    table = f"<!-- reasons -->\n{reasons(rows.values())}\n<!-- end of reasons -->"
    return replaced(text, r"(?s)<!-- reasons -->.*<!-- end of reasons -->", table)


def main() -> None:
    """Tries types, each in a process of its own, or writes the page."""
    options = arguments(
        __doc__, "types", steps=(len(STEPS), "1: only whether it trains"), table="only write the page of the docs"
    )
    import transformers
    from transformers.models.auto import modeling_auto  # noqa: F401
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    rows = read()
    if options.table:
        PAGE.write_text(page(rows, len(CONFIG_MAPPING_NAMES), transformers.__version__))
        return
    load_model("hf:gpt2,n_layer=1")  # imports take longer than a step may
    warm, _ = trained("gpt2")  # what it loads, all others find loaded
    follow(warm, step(copy.deepcopy(warm.module), warm), {})
    one_thread()
    for kind in options.types or [kind for kind in CONFIG_MAPPING_NAMES if kind not in rows]:
        lost = {"type": kind, "reached": ""}
        row = apart(look, kind, options.steps, limit_s=LIMIT_S, lost=lambda why, lost=lost: {**lost, "why": why})
        rows[kind] = add_row(ROWS, row)
    print(summary(rows.values()))


if __name__ == "__main__":
    main()
