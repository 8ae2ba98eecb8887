"""A stand-alone training script of plain torch calls that does what a strategy says."""

from __future__ import annotations

import inspect
import re
from itertools import chain
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.schedule import SCHEDULES
from rlplace.plan.strategy import uniform_words
from rlplace.runtime.export.asked import Asked, ask
from rlplace.runtime.export.model_text import Wraps, loss_text, model_text, numbered, tensor_wraps
from rlplace.runtime.export.parts import script_text
from rlplace.runtime.export.torchtitan import Elsewhere, is_cut_by_skipping
from rlplace.runtime.strategy.blocks import tied_names
from rlplace.runtime.strategy.capture import capture
from rlplace.runtime.strategy.cut import StageGraph, cut
from rlplace.runtime.strategy.mesh import AXES
from rlplace.runtime.strategy.wrap import copies_of, keep, stands_alone

_OPTIMIZERS = {"sgd": "SGD({}, lr=LR)", "momentum": "SGD({}, lr=LR, momentum=0.9)", "adam": "Adam({}, lr=LR)"}
_OPTIMIZERS["adamw"] = "AdamW({}, lr=LR)"


def training_script(plan: PlacementPlan) -> str:
    """Returns the text of a script for a plan with a strategy; see `rlplace.export`."""
    asked = ask(plan)
    pipeline, stage = asked.pipeline, asked.stage
    assert plan.strategy is not None
    several, data, tensor = len(pipeline.stages) > 1, stage.data_degree, stage.axis("tensor")
    constants = {
        "SEED": "0",
        "LR": "1e-3",
        "BATCH": plan.strategy.batch,
        "REPLICAS": data,
        "MICROBATCHES": pipeline.microbatches[0],
        "AUTOCAST": asked.recipe.autocast is not None,
    }
    sources: list[Any] = [keep] if "selective" in {how for one in pipeline.stages for how in one.recompute.values()} else []
    if several:
        constants |= _stage_constants(asked, _cut(asked))
        sources.append(Elsewhere)
    first, hidden = _inputs(asked)
    wraps, whole = _wraps(asked)
    mesh, replica = _mesh(asked)
    parameters = "parameters" if several else "model.parameters()"
    if tensor > 1 and data == 1:  # one foreach operation takes plain tensors or DTensors
        parameters = f'[{{"params": [p for p in {parameters} if isinstance(p, DTensor) == kind]}} for kind in (False, True)]'
    schedule = SCHEDULES.get(pipeline.schedule or "")
    return script_text(
        **model_text(asked),
        asked=asked,
        words=uniform_words(plan.strategy),
        constants=constants,
        sources=[_source(code) for code in sources],
        several=several,
        first=first,
        hidden=hidden,
        tied="TIED" in constants,
        wraps=[(numbered(paths), call) for paths, call in wraps],
        whole=whole,
        mesh=mesh,
        replica=replica,
        schedule=schedule,
        copies=_copies(asked),
        optimizer=_OPTIMIZERS[asked.recipe.optimizer].format(parameters),
        counted=data * tensor if several else "dist.get_world_size()",
    )


def _source(code: Any) -> str:
    """Code of this package as a script has it: without annotations."""
    return re.sub(r": Any| -> [\w.]+|: torch\.Tensor", "", inspect.getsource(code))


def _cut(asked: Asked) -> list[StageGraph]:
    """Returns the stages, found to be what skipping the blocks of others makes."""
    named = [list(stage.blocks) for stage in asked.pipeline.stages]
    with torch.autocast("cpu", torch.bfloat16, enabled=asked.recipe.autocast is not None):
        stages = cut(capture(asked.model, asked.inputs, list(chain(*named))), named)
    first, hidden = _inputs(asked)
    one = loss_text(asked) != 'output["loss"]' and all(
        len(stage.taken) == 1 and stage.taken[0].is_floating_point() for stage in stages[1:]
    )
    whole = [asked.blocks_of(stage) for stage in asked.pipeline.stages]
    plain = {name: value for name, value in asked.inputs.items() if name != "labels"}
    if not one or not is_cut_by_skipping(asked.model, plain, whole, stages[1].taken[0].shape[-1], first, hidden):
        raise InputError(
            "export: the model is no chain that computes the same when a stage leaves out the blocks of others (several values "
            "between stages, or dropout between blocks), so plain calls cannot cut it; run it with rlplace.distribute"
        )
    return stages


def _inputs(asked: Asked) -> tuple[str, str]:
    """Returns the input that later stages do without, and the one that takes what the stage before made."""
    first = next(iter(asked.inputs))
    return first, "inputs_embeds" if "inputs_embeds" in inspect.signature(asked.model.forward).parameters else first


def _stage_constants(asked: Asked, stages: list[StageGraph]) -> dict[str, Any]:
    pipeline = asked.pipeline
    rows = "".join(f"    {numbered(asked.blocks_of(stage))},\n" for stage in pipeline.stages)
    held = [[n for n, stage in enumerate(pipeline.stages) if stage.devices == place] for place in pipeline.device_sets]
    ties = [copies for names in tied_names(asked.model) if len(copies := copies_of(names, stages)) > 1]
    taken = stages[1].taken[0]
    constants = {
        "STAGES": f"[\n{rows}]",
        "HELD": f"{held}  # stages of each place of the pipeline",
        "HIDDEN": f'{{"size": {tuple(taken.shape)}, "dtype": {taken.dtype}}}  # what stages hand on',
    }
    return constants | ({"TIED": repr(ties).replace("'", '"')} if ties else {})


def _copies(asked: Asked) -> bool:
    """Returns whether whole copies of the model are all that there is."""
    stage = asked.stage
    return len(asked.pipeline.stages) == 1 and stage.sharding == 0 and stage.data_degree > 1 and stage.axis("tensor") == 1


def _wraps(asked: Asked) -> tuple[Wraps, str]:
    """What is put on blocks in turn, and on what is left."""
    stage, stages = asked.stage, asked.pipeline.stages
    root = "root" if len(stages) > 1 else "model"
    wraps = tensor_wraps(asked) if stage.axis("tensor") > 1 else []
    for how, context in (("full", ""), ("selective", ", context_fn=partial(create_selective_checkpoint_contexts, keep)")):
        chosen = [block for one in stages for block, word in one.recompute.items() if word == how]
        wraps.append((chosen, f"block.forward = partial(checkpoint, block.forward, use_reentrant=False{context})"))
    policy, whole = ', offload_policy=CPUOffloadPolicy(pin_memory=device.type != "cpu")', root
    if _copies(asked):
        whole = "DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)"
    elif stage.data_degree > 1:
        call = 'replicate({}, mesh=mesh["replicate"]{})'
        if stage.sharding > 0:
            axes = '"replicate", "shard"' if stage.axis("replicate") > 1 else '"shard"'
            call = f"fully_shard({{}}, mesh=mesh[{axes}], reshard_after_forward={stage.sharding == 3}{{}})"
        for offloaded, extra in ((False, ""), (True, policy)):
            held = [(paths, nn.ModuleList(asked.units[path] for path in paths)) for paths in map(asked.blocks_of, stages)]
            alone = [path for paths, others in held for path in paths if stands_alone(others, asked.units[path])]
            alone = [path for path in alone if path not in asked.outside]
            wraps.append(([path for path in alone if (path in stage.offload) == offloaded], call.format("block", extra)))
        whole = call.format(root, policy if stage.offload and len(stage.offload) == len(stage.blocks) else "")
    return [(paths, call) for paths, call in wraps if paths], whole


def _mesh(asked: Asked) -> tuple[str, str]:
    """What makes the mesh, and the number of this process's replica."""
    pipeline, stage = asked.pipeline, asked.stage
    sizes = {"pipeline": len(pipeline.device_sets)} | {axis: stage.axis(axis) for axis in AXES[1:]}
    used = {axis: size for axis, size in sizes.items() if size > 1}
    if not used:
        return "None", "0"
    devices = list(chain(*pipeline.device_sets))
    rank = {device: number for number, device in enumerate(sorted(devices))}
    ranks, shape = [rank[device] for device in devices], tuple(used.values())
    names = f"mesh_dim_names={tuple(used)}".replace("'", '"')
    if ranks == sorted(ranks):
        mesh = f"init_device_mesh(device.type, {shape}, {names})"
    else:
        mesh = f"DeviceMesh(device.type, {torch.tensor(ranks).view(shape).tolist()}, {names})"
    local = [f'mesh["{axis}"].get_local_rank()' for axis in ("replicate", "shard") if stage.axis(axis) > 1]
    return mesh, f" * {stage.axis('shard')} + ".join(local) or "0"
