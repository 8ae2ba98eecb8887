"""Which model types of transformers are captured, and which of those can be cut into stages of their own blocks.

    python -m benchmarks.cut_types [TYPE ...] [--out FILE]

Every type that `hf:TYPE` builds, on the meta device, with two layers where its configuration has a word for them. Each type is
looked at in a process of its own, so that one that runs on or out of memory ends alone. FILE gets one JSON line a type.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, add_row, apart, arguments, write_rows
from rlplace.errors import RlplaceError

DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
LIMIT_S = 40
REACHED = ("built", "captured", "cut")


def build(kind: str) -> Any:
    """Builds the type with two layers a tower, or as it is where it refuses that."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from rlplace.model.zoo import load_model

    known = CONFIG_MAPPING[kind]().to_dict()
    few = "".join(f",{name}=2" for name in DEPTHS if isinstance(known.get(name), int))
    try:
        return load_model(f"hf:{kind}{few}", batch=2, seq=16)
    except RlplaceError:
        return load_model(f"hf:{kind}", batch=2, seq=16)


def look(kind: str) -> Row:
    """Finds how far a type gets, and what ended it."""
    from rlplace.model.capture.capture import capture
    from rlplace.runtime.strategy.blocks import block_names
    from rlplace.runtime.strategy.capture import capture as record
    from rlplace.runtime.strategy.cut import cut

    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    row, begin = {"type": kind, "reached": "nothing"}, time.process_time()
    try:
        model = build(kind)
        row["reached"] = "built"
        row["ops"] = capture(model.module, model.example_inputs, loss=model.loss).num_ops
        row["reached"] = "captured"
        recorded, known = record(model.module, model.example_inputs), set(block_names(model.module))
        called = dict.fromkeys(str(node.target) for node in recorded.graph.nodes if node.op == "call_module")
        row["stages"] = len(cut(recorded, [[block] for block in called if block in known]))
        row["reached"] = "cut"
    except Exception as error:
        row["why"] = f"{type(error).__name__}: {error}"
    return {**row, "cpu_s": round(time.process_time() - begin, 1)}


def main() -> None:
    """Looks at the types, each in a process of its own."""
    options = arguments(__doc__, "types", out=(Path("cut_types.jsonl"), "file of rows, written anew"))
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    import rlplace.model.capture.capture
    import rlplace.runtime.strategy.cut  # noqa: F401

    rows: list[Row] = []
    write_rows(options.out, rows)
    for kind in options.types or CONFIG_MAPPING_NAMES:
        row = apart(
            look, kind, limit_s=4 * LIMIT_S, lost=lambda why, kind=kind: {"type": kind, "reached": "nothing", "why": why}
        )
        rows.append(add_row(options.out, row))
    counts = [sum(row["reached"] in REACHED[at:] for row in rows) for at in range(len(REACHED))]
    print(f"{len(rows)} types:", ", ".join(f"{count} {name}" for name, count in zip(REACHED, counts, strict=True)))


if __name__ == "__main__":
    main()
