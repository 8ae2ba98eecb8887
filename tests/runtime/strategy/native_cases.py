"""Strategies of the tests, as they stand in files, for models of four layers or, where it is enough, of two."""

from itertools import pairwise

LLAMA = ("model.embed_tokens", *(f"model.layers.{n}" for n in range(4)), "model.norm", "lm_head")
GPT2 = ("transformer.wte", "transformer.wpe", *(f"transformer.h.{n}" for n in range(4)), "transformer.ln_f", "lm_head")
EIGHT = (LLAMA[0], *(f"model.layers.{n}" for n in range(8)), *LLAMA[5:])
SHORT, SHORT_LLAMA = (*GPT2[:4], *GPT2[6:]), (*LLAMA[:3], *LLAMA[5:])
T5 = (
    *("encoder.embed_tokens", "encoder.block.0", "encoder.block.1", "encoder.final_layer_norm"),
    *("decoder.embed_tokens", "decoder.block.0", "decoder.block.1", "decoder.final_layer_norm", "lm_head"),
)
DEEP = tuple(f"layers.{n}" for n in range(8))
OWN = ("embed", *(f"layers.{n}" for n in range(4)), "head")
LENT = ("embed", "queries", "places", "layers.0", "layers.1", "head")
BLOCKS = {
    "own": OWN,
    "lent": LENT,
    "llama": LLAMA,
    "eight": EIGHT,
    "frozen ends": LLAMA,
    **dict.fromkeys(("adapters", "adapters of columns", "packed"), tuple(f"base_model.model.{block}" for block in LLAMA)),
    "short llama": SHORT_LLAMA,
    "gpt2": GPT2,
    "short": SHORT,
    "t5": T5,
    **dict.fromkeys(("qwen3", "mixtral", "qwen2_moe", "qwen3_moe"), SHORT_LLAMA),
    "grouped": SHORT_LLAMA,
    "phi": (*SHORT_LLAMA[:3], "model.final_layernorm", "lm_head"),
    "deep": DEEP,
}


def layers(blocks):
    return [block for block in blocks if block.rpartition(".")[2].isdigit()]


def stage(blocks, devices, mesh, sharding, **options):
    for key in ("recompute", "offload"):
        if isinstance(options.get(key), str):
            options[key] = dict.fromkeys(layers(blocks), options[key])
    return {"blocks": list(blocks), "devices": list(devices), "mesh": mesh, "sharding": sharding, **options}


def flat(model, mesh, sharding, *, batch=8, microbatch=1, devices=(0, 1, 2, 3), **options):
    """One stage on all devices."""
    degree = mesh.get("replicate", 1) * mesh.get("shard", 1)
    parts = {"batch": batch, "microbatch": [microbatch], "microbatches": [batch // degree // microbatch]}
    return parts | {"stages": [stage(BLOCKS[model], devices, mesh, sharding, **options)]}


def chain(model, places, schedule, *, mesh, sharding, batch=8, microbatch=1, microbatches=None, **options):
    """Stages on places, in model order: layers in equal runs as far as they go, what comes before and after at the ends.

    `mesh` and `sharding` are those of all stages, or lists with those of each.
    """
    meshes, levels = mesh if isinstance(mesh, list) else [mesh] * len(places), sharding
    levels = levels if isinstance(levels, list) else [levels] * len(places)
    blocks = BLOCKS[model]
    starts = [blocks.index(block) for block in layers(blocks)]
    bounds = [round(n * len(starts) / len(places)) for n in range(1, len(places))]
    bounds = [0, *(starts[bound] for bound in bounds), len(blocks)]
    parts = [blocks[a:b] for a, b in pairwise(bounds)]
    degree = max(one.get("replicate", 1) * one.get("shard", 1) for one in meshes)
    microbatches = microbatches or batch // degree // microbatch
    each = zip(parts, places, meshes, levels, strict=True)
    stages = [stage(part, devices, own, level, **options) for part, devices, own, level in each]
    return {
        "batch": microbatch * microbatches * degree, "microbatch": [microbatch], "microbatches": [microbatches],
        "schedule": schedule, "stages": stages,
    }  # fmt: skip


def beside(*parts):
    """Unlike pipelines side by side, of strategies of one on devices of their own; each has the samples of its own batch."""
    pipelines = [{key: value for key, value in part.items() if key != "batch"} for part in parts]
    return {"batch": sum(part["batch"] for part in parts), "pipelines": pipelines}
