"""A job file of torchtitan (pytorch/torchtitan at commit 6404b932, ``torchtitan/config/job_config.py``) for a strategy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from rlplace.errors import InputError
from rlplace.model.zoo.functions import split_spec
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.schedule import SCHEDULES
from rlplace.plan.strategy import HEADS, RING, Pipeline
from rlplace.planned import Planned

_FLAVORS = {
    "debugmodel": (256, 6, 16, 16, 768),
    "8B": (4096, 32, 32, 8, 14336),
    "70B": (8192, 80, 64, 8, 28672),
    "405B": (16384, 126, 128, 8, 53248),
}
"""Width, layers, heads, heads of keys and values, and width between the products of its Llama 3."""

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW"}
_NAMES = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}


def torchtitan_job(plan: PlacementPlan) -> str:
    """Returns the text of a job file for a plan with a strategy; see `rlplace.export`."""
    planned = Planned(plan)
    strategy, recipe = planned.strategy, planned.recipe
    pipeline = strategy.pipelines[0]
    reason = next(chain(_model_lacks(recipe.model), _lacks(planned)), None)
    if reason is not None:
        raise InputError(f"export: torchtitan {reason}; --to script, or run the plan with rlplace.distribute")
    stage, count = pipeline.stages[0], pipeline.microbatches[0]
    several = len(pipeline.stages) > 1
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": "llama3", "flavor": _flavor(recipe.model)},
        "training": {
            "local_batch_size": pipeline.microbatch[0] * (count if several else 1),
            "global_batch_size": strategy.batch,
            "seq_len": recipe.seq,
            "enable_cpu_offload": bool(stage.offload),
            "mixed_precision_param": "bfloat16" if recipe.autocast else "float32",
        },
        "parallelism": {
            "data_parallel_replicate_degree": stage.axis("replicate"),
            "data_parallel_shard_degree": stage.axis("shard"),
            "fsdp_reshard_after_forward": "always" if stage.sharding == 3 else "never",
            "tensor_parallel_degree": stage.axis("tensor"),
            "context_parallel_degree": stage.axis("context"),
            "pipeline_parallel_degree": len(pipeline.device_sets),
        },
        "activation_checkpoint": _recomputed(pipeline) or {},
        "optimizer": {"name": _OPTIMIZERS[recipe.optimizer]},
    }
    if stage.context_method == RING:
        sections["parallelism"]["context_parallel_rotate_method"] = "alltoall"
    if several:
        sections["parallelism"] |= {
            "pipeline_parallel_schedule": SCHEDULES[pipeline.schedule or ""].torch_class.removeprefix("Schedule"),
            "pipeline_parallel_microbatch_size": pipeline.microbatch[0],
            "module_fqns_per_model_part": [
                [_NAMES.get(block, block.removeprefix("model.")) for block in stage.blocks] for stage in pipeline.stages
            ],
        }
    lines = [f"# {recipe.model}, {len(strategy.devices)} processes; plan {plan.fingerprint[:12]}"]
    for name, values in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _model_lacks(model: str) -> Iterator[str]:
    kind, _, rest = model.partition(":")
    if kind != "hf" or split_spec(rest)[0] != "llama":
        yield f"has no model like {model.partition(',')[0]}: this writes jobs for its llama3, from plans for hf:llama"
    elif _flavor(model) is None:
        yield "names its models by flavor, and none has these sizes: " + "; ".join(
            f"{name} is {','.join(f'{key}={size}' for key, size in zip(_SIZES, sizes, strict=True))}"
            for name, sizes in _FLAVORS.items()
        )


def _flavor(model: str) -> str | None:
    from rlplace.model.zoo import load_model

    config: Any = load_model(model, batch=1, seq=1).module.config
    sizes = tuple(getattr(config, key) for key in _SIZES)
    return None if config.tie_word_embeddings else next((name for name, own in _FLAVORS.items() if own == sizes), None)


def _lacks(planned: Planned) -> Iterator[str]:
    """Yields the features of a plan that torchtitan lacks, or reads in another way."""
    recipe, pipeline = planned.recipe, planned.strategy.pipelines[0]
    first, several = pipeline.stages[0], len(pipeline.stages) > 1
    if len(planned.strategy.pipelines) > 1:
        yield "has one pipeline, the plan several"
    if len(set(pipeline.microbatch)) > 1 or len(set(pipeline.microbatches)) > 1:
        yield "gives all replicas the same micro-batches"
    if any(
        (s.mesh, s.sharding, s.sequence_parallel) != (first.mesh, first.sharding, first.sequence_parallel)
        for s in pipeline.stages
    ):
        yield "gives all stages the same degrees and level"
    if first.axis("branch") > 1 or first.expert > 1:
        yield "has no branches of a layer on several devices, and its llama3 no experts"
    if first.axis("replicate") > 1 and first.axis("shard") == 1 and (several or first.axis("tensor") > 1):
        yield "combines whole copies (replicate without shard) with nothing else"
    if first.context_method == HEADS:
        yield "divides positions by gathering keys and values, or by a ring (context_method)"
    if first.axis("tensor") > 1 and not first.sequence_parallel:
        yield "splits the sequence wherever it is tensor-parallel (sequence_parallel)"
    if first.sharding == 1 and not several and pipeline.microbatches[0] > 1:
        yield "reduces gradients after every micro-batch (level 2 or 3, or one micro-batch)"
    if any(word == "local" or "packed" in word for s in pipeline.stages for word in s.tensor.values()):
        yield "has tensor layouts of its own"
    devices = list(chain(*pipeline.device_sets))
    if devices != sorted(devices):
        yield "numbers processes along the pipeline, then along the mesh, and these devices are in another order"
    offloaded = {block: how for s in pipeline.stages for block, how in s.offload.items()}
    if offloaded and (set(offloaded.values()) != {"all"} or len(offloaded) < sum(len(s.blocks) for s in pipeline.stages)):
        yield "offloads everything or nothing"
    if recipe.dtype != "fp32" or recipe.master_weights or recipe.autocast not in (None, "bf16"):
        yield "keeps weights in float32, and computes in bfloat16 or float32"
    if recipe.optimizer not in _OPTIMIZERS:
        yield f"has Adam and AdamW, not {recipe.optimizer}"
    if _recomputed(pipeline) is None:
        yield "recomputes all layers, every n-th, or each in part (level of ops), and nothing beside layers"


def _recomputed(pipeline: Pipeline) -> dict[str, str] | None:
    """Returns its settings of recomputation; None where it has none. It counts layers from 1 in every process."""
    layers = [block for stage in pipeline.stages for block in stage.blocks if block.startswith("model.layers.")]
    how = {block: word for stage in pipeline.stages for block, word in stage.recompute.items()}
    words = set(how.values())
    if not how:
        return {"mode": "none"}
    if set(how) == set(layers) and len(words) == 1:
        return {"mode": "full"} if words == {"full"} else {"mode": "selective", "selective_ac_option": "op"}
    for every in range(2, len(layers) + 1):
        if len(pipeline.stages) == 1 and words == {"full"} and set(how) == set(layers[every - 1 :: every]):
            return {"mode": "selective", "selective_ac_option": str(every)}
    return None
