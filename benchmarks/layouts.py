"""Tensor groups of the model types that people train: cut by 2 and 4, whole and along the sequence, equal to the plain model.

    python -m benchmarks.layouts                all types that have no row yet
    python -m benchmarks.layouts llama bert     these types, again
    python -m benchmarks.layouts --table        the table of the docs from the rows

A type has two layers of eight heads, with two heads of keys and values where the type can: a group of four has more processes
than those. What is priced for one stage over the group runs on gloo processes in double precision, every vector of its weights
moved from the zeros and ones that it starts with. A figure is the largest difference of the loss or a gradient, relative to the
largest element of its tensor; a text is why planning refuses. Products of blocks that every process computes whole are listed.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.equality import difference, gradients
from benchmarks.groups import run_jobs
from benchmarks.harness import ROOT, Row, apart, arguments, markdown, one_thread, read_rows, write_between, write_rows
from benchmarks.types import reason, step, without_dropout
from rlplace.model.capture.capture import capture
from rlplace.model.capture.export import lies_in
from rlplace.model.zoo import LoadedModel, load_model
from rlplace.plan.strategy import Strategy
from rlplace.runtime.strategy.facts import facts_of
from rlplace.runtime.strategy.run import prepare
from rlplace.runtime.strategy.why_not import judge, why_not
from rlplace.strategy.blocks.price import PricedBlocks
from rlplace.strategy.costs import Cut

ROWS, PAGE = Path(__file__).with_suffix(".rows.jsonl"), ROOT / "docs/model-types.md"
BATCH, LONG, LIMIT_S, CLOSE = 2, 16, 300.0, 1e-6
WAYS = {"2": (2, False), "2, sequence": (2, True), "4": (4, False), "4, sequence": (4, True)}
"""Columns of the table: degree, and whether activations are split along the sequence."""

DEEP = "num_hidden_layers=2,hidden_size=64,intermediate_size=128,num_attention_heads=8,vocab_size=512"
SHARED = f"{DEEP},num_key_value_heads=2,bos_token_id=1,eos_token_id=2,pad_token_id=0"
HEADS = f"{SHARED},head_dim=8"
TOWERS = ",".join(
    f"{tower}_config.{size}"
    for tower in ("vision", "text")
    for size in ("hidden_size=64", "intermediate_size=128", "num_hidden_layers=2", "num_attention_heads=8")
)
SIZES = ("layers=2", "ffn_dim=128", "attention_heads=8")
PAIR = ",".join(f"{part}_{size}" for part in ("encoder", "decoder") for size in SIZES)
KINDS = {
    **dict.fromkeys(("llama", "qwen2", "olmo2", "phi3", "smollm3", "starcoder2", "cohere", "granite"), SHARED),
    **dict.fromkeys(("qwen3", "mistral", "gemma2", "gemma3_text", "glm4"), HEADS),
    "qwen3_moe": f"{SHARED},moe_intermediate_size=32,num_experts_per_tok=2,num_local_experts=4",
    "mixtral": f"{SHARED},num_local_experts=4",
    "gpt_oss": f"{HEADS},num_local_experts=4,num_experts_per_tok=2",
    "llama4_text": f"{HEADS},num_local_experts=4,intermediate_size_mlp=128,no_rope_layers=1/0",
    "deepseek_v3": f"{DEEP},num_key_value_heads=8,moe_intermediate_size=32,n_routed_experts=4,n_group=1,topk_group=1,"
    "num_experts_per_tok=2,first_k_dense_replace=1,kv_lora_rank=16,q_lora_rank=24,qk_rope_head_dim=8,v_head_dim=8,"
    "qk_nope_head_dim=8",
    "falcon": "vocab_size=512,hidden_size=64,num_hidden_layers=2,num_attention_heads=8",
    "opt": "vocab_size=512,num_hidden_layers=2,hidden_size=64,ffn_dim=128,num_attention_heads=8,word_embed_proj_dim=64",
    "gpt_neox": DEEP,
    "bloom": "vocab_size=512,hidden_size=64,n_layer=2,n_head=8",
    "t5": "vocab_size=512,d_model=64,d_kv=8,d_ff=128,num_layers=2,num_decoder_layers=2,num_heads=8",
    "bart": f"vocab_size=512,d_model=64,{PAIR}",
    "whisper": f"vocab_size=512,d_model=64,{PAIR},decoder_start_token_id=3,pad_token_id=0,bos_token_id=1,eos_token_id=2",
    "vit": "hidden_size=64,num_hidden_layers=2,num_attention_heads=8,intermediate_size=128,image_size=64",
    "clip": f"{TOWERS},projection_dim=32,vision_config.image_size=64,text_config.vocab_size=512",
    "siglip": f"{TOWERS},vision_config.image_size=64,text_config.vocab_size=512,text_config.projection_size=64,"
    "text_config.bos_token_id=1,text_config.eos_token_id=2",
}
"""Sizes of each type, as MODEL texts have them."""


def built(kind: str) -> LoadedModel:
    """Makes a type's model in double precision; vectors of weights get values of their own."""
    torch.manual_seed(0)
    model = load_model(f"hf:{kind},{KINDS[kind]}", batch=BATCH, seq=LONG, device="cpu")
    without_dropout(model.module)
    model.module.double()
    if hasattr(model.module, "set_experts_implementation"):
        model.module.set_experts_implementation("batched_mm")  # grouped products have no double precision
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    for name, value in model.example_inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            model.example_inputs[name] = value.double()
    return model


def planned(model: LoadedModel) -> tuple[dict[str, Strategy | str], list[str]]:
    """Makes the strategy of each column as planning does, or says why there is none; and names products that stay whole."""
    graph = capture(model.module, model.example_inputs, loss=model.loss)
    facts = facts_of(model.module, model.example_inputs, model.loss, graph)
    runs = judge(facts)[1]
    blocks, found = PricedBlocks(graph, "cpu:4", only=runs), dict[str, Strategy | str]()
    for column, (degree, along) in WAYS.items():
        way, mesh = Cut(graph.samples, degree, along), {"tensor": degree}
        stage = {"blocks": list(facts.blocks), "devices": list(range(degree)), "mesh": mesh, "sequence_parallel": along}
        why = why_not(_strategy(stage), facts) or blocks.why_not(way)
        if why is None:
            stage["tensor"] = {path: word for own in blocks.modules(way).values() for path, word in own.items()}
            why = why_not(_strategy(stage), facts)
        found[column] = _strategy(stage) if why is None else why
    parts = dict(model.module.named_modules())
    inside = {
        path for path, part in parts.items() if isinstance(part, nn.Linear) and any(lies_in(path, f) for f in facts.blocks)
    }
    return found, sorted({path for path in inside if path not in facts.tensor.words and path not in facts.blocks})


def _strategy(stage: Mapping[str, Any]) -> Strategy:
    counts = {"batch": BATCH, "microbatch": [BATCH], "microbatches": [1]}
    return Strategy.from_dict({**counts, "stages": [{**stage, "sharding": 0}]})


def look(kind: str) -> Row:
    """Runs the columns of a type."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    row: Row = {"type": kind, "model": f"hf:{kind},{KINDS[kind]}"}
    try:
        model = built(kind)
        (strategies, row["whole"]), plain = planned(model), copy.deepcopy(model.module)
        loss, wanted = step(plain, model)[0], gradients(plain)
    except Exception as error:
        return row | dict.fromkeys(WAYS, reason(error))
    for degree in sorted({degree for degree, _ in WAYS.values()}):
        columns = [column for column, (own, _) in WAYS.items() if own == degree]
        row |= {column: str(strategies[column]) for column in columns if isinstance(strategies[column], str)}
        todo = [column for column in columns if column not in row]

        def run(column: str) -> dict[str, Any]:
            native = prepare(copy.deepcopy(model.module), strategies[column], model.example_inputs)  # type: ignore[arg-type]
            torch.manual_seed(0)
            value = native.step(model.example_inputs, lambda output, part: (model.loss or attrgetter("loss"))(output))
            own, most = gradients(native), max(float(gradient.abs().max()) for gradient in wanted.values())
            if missing := {name for name, gradient in wanted.items() if gradient.any()} - own.keys():
                raise AssertionError(f"no gradient: {sorted(missing)[:3]}")
            return {"apart": max(abs(value.item() - loss) / abs(loss), difference(own, wanted, 1e-6 * most))}

        for column, found in zip(todo, run_jobs(run, todo, degree, LIMIT_S), strict=True):
            failed = next((one for one in found if "error" in one), None)
            largest = max(one.get("apart", 0.0) for one in found)
            if failed is not None:
                row[column] = f"FAILS: {failed['error']}: {failed['line']}"
            else:
                row[column] = float(f"{largest:.1e}") if largest <= CLOSE else f"FAILS: gradients differ by {largest:.1e}"
    return row


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Makes the table, and the reasons below it."""
    rows, reasons = sorted(rows, key=lambda row: list(KINDS).index(row["type"])), dict[str, int]()

    def cell(value: Any) -> str:
        return "equal" if isinstance(value, float) else f"[{reasons.setdefault(str(value), len(reasons) + 1)}]"

    def whole(row: Mapping[str, Any]) -> str:
        names = (re.sub(r"\.\d+\.", ".*.", path).rpartition("*.")[2] or path for path in row.get("whole", ()))
        return ", ".join(f"`{name}`" for name in dict.fromkeys(names))

    shown = [(row["type"], *(cell(row[column]) for column in WAYS), whole(row)) for row in rows]
    below = "\n".join(f"{number}. {text}" for text, number in reasons.items())
    return f"{markdown(('type', *WAYS, 'stays whole'), shown)}\n\n{below}\n"


def main() -> None:
    """Tries types, each in a process of its own, or writes the table."""
    options = arguments(__doc__, "types", table="only write the table of the docs")
    rows = {row["type"]: row for row in read_rows(ROWS)}
    if options.table:
        write_between(PAGE, "layouts", table(rows.values()))
        return
    one_thread()
    load_model("hf:gpt2,n_layer=1")  # what it imports, all others find in memory
    for kind in options.types or [kind for kind in KINDS if kind not in rows]:
        lost = partial(lambda kind, why: {"type": kind, **dict.fromkeys(WAYS, f"FAILS: {why}")}, kind)
        rows[kind] = apart(look, kind, limit_s=4 * LIMIT_S, lost=lost)
        write_rows(ROWS, rows.values())
        print(kind, *(f"| {column}: {rows[kind][column]}" for column in WAYS), flush=True)


if __name__ == "__main__":
    main()
