"""`rlplace.export`: a whole strategy as a file that runs without rlplace; its training script of plain torch calls."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment
from torch import nn

from rlplace.errors import InputError, unknown_name
from rlplace.model.capture.optimizers import OPTIMIZERS
from rlplace.model.torch_adapter import pytree
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.schedule import SCHEDULES
from rlplace.plan.strategy import uniform_words
from rlplace.runtime.export.model_text import ExportedPlan, Wraps, build_exported, loss_text, model_text, numbered, tensor_wraps
from rlplace.runtime.export.torchtitan import torchtitan_job
from rlplace.runtime.job.distribute import refuse_release
from rlplace.runtime.strategy.blocks import tied_names
from rlplace.runtime.strategy.capture import capture
from rlplace.runtime.strategy.cut import StageGraph, cut
from rlplace.runtime.strategy.mesh import AXES
from rlplace.runtime.strategy.wrap import copies_of, keep, stands_alone

_TEMPLATE = Path(__file__).with_name("script.py.jinja")
"""A part is written only where the strategy needs it."""

_HEAD = '''\
"""Trains {{ exported.planned.recipe.model }}: {{ words }}.

Start it with: torchrun --nproc-per-node {{ exported.planned.plan.strategy.devices | length }} SCRIPT [STEPS]
Written by rlplace for plan {{ exported.planned.plan.fingerprint[:12] }}; plain torch{{ also }}.
"""

{{ imports }}
{{ model_import }}

'''

_IMPORTS = (
    ("import contextlib", "contextlib"),
    ("import os", "os"),
    ("import sys", "sys"),
    ("from functools import partial", "partial"),
    ("", ""),
    ("import torch", "torch"),
    ("import torch.distributed as dist", "dist"),
    ("from torch import nn", "nn"),
    ("from torch.distributed._composable.replicate_with_fsdp import {}", "replicate"),
    ("from torch.distributed.device_mesh import {}", "DeviceMesh init_device_mesh"),
    ("from torch.distributed.fsdp import {}", "CPUOffloadPolicy FSDPModule fully_shard"),
    ("from torch.distributed.pipelining import {}", "PipelineStage Schedule\\w+"),
    ("from torch.distributed.pipelining.schedules import {}", "RESHARD UNSHARD"),
    ("from torch.distributed.tensor import {}", "DTensor Replicate Shard"),
    (
        "from torch.distributed.tensor.parallel import {}",
        "ColwiseParallel PrepareModuleInput PrepareModuleOutput RowwiseParallel SequenceParallel parallelize_module",
    ),
    ("from torch.nn.parallel import {}", "DistributedDataParallel"),
    ("from torch.utils.checkpoint import {}", "CheckpointPolicy checkpoint create_selective_checkpoint_contexts"),
)

TARGETS = ("torchtitan", "script")


def export(plan: PlacementPlan, to: str) -> str:
    """Writes a plan for another tool.

    Args:
        plan: With a strategy, and a source that names its model.
        to: ``"script"``: a training script of plain torch calls, to be started with torchrun; ``"torchtitan"``: a job file
            (TOML) of torchtitan.

    Returns:
        The text of the file.

    Raises:
        InputError: The tool cannot express it, with the reason.
    """
    if to not in TARGETS:
        raise unknown_name("target of export", to, TARGETS)
    if plan.strategy is None:
        raise InputError(
            "export: the plan places groups of ops, which neither torchtitan nor plain torch calls express; plan a whole "
            "strategy with 'rlplace place MODEL', or run this one with rlplace.distribute"
        )
    refuse_release(plan, "export")
    return torchtitan_job(plan) if to == "torchtitan" else training_script(plan)


def training_script(plan: PlacementPlan) -> str:
    """Returns the text of a script for a plan with a strategy."""
    exported = build_exported(plan)
    strategy, pipeline, stage = exported.planned.strategy, exported.pipeline, exported.stage
    several, data, tensor = len(pipeline.stages) > 1, stage.data_degree, stage.axis("tensor")
    constants = {
        "SEED": "0",
        "LR": "1e-3",
        "BATCH": strategy.batch,
        "REPLICAS": data,
        "MICROBATCHES": pipeline.microbatches[0],
        "AUTOCAST": exported.planned.recipe.autocast is not None,
    }
    sources: list[Any] = [keep] if "selective" in {how for one in pipeline.stages for how in one.recompute.values()} else []
    if several:
        constants |= _stage_constants(exported, _cut(exported))
        sources.append(Elsewhere)
    first, hidden = _inputs(exported)
    wraps, whole = _wraps(exported)
    mesh, replica = _mesh(exported)
    parameters = "parameters" if several else "model.parameters()"
    if tensor > 1 and data == 1:  # one foreach operation takes plain tensors or DTensors
        parameters = f'[{{"params": [p for p in {parameters} if isinstance(p, DTensor) == kind]}} for kind in (False, True)]'
    schedule = SCHEDULES.get(pipeline.schedule or "")
    return _script_text(
        **model_text(exported),
        exported=exported,
        words=uniform_words(strategy),
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
        copies=_copies(exported),
        optimizer=_optimizer(exported.planned.recipe.optimizer, parameters),
        counted=data * tensor if several else "dist.get_world_size()",
    )


def _optimizer(name: str, parameters: str) -> str:
    rule = OPTIMIZERS[name]
    if not rule.path.startswith("torch.optim.") or rule.rest is not None:
        raise InputError(f"export: a script has optimizers of torch for all parameters, not {name}; plan with adamw")
    options = "".join(f", {key}={value}" for key, value in rule.options.items())
    return f"{rule.path.removeprefix('torch.optim.')}({parameters}, lr=LR{options})"


def _script_text(**values: Any) -> str:
    """Returns the script; `values` are those that the template names."""
    templates = Environment(trim_blocks=True, keep_trailing_newline=True)
    body = templates.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(values)
    lines = []
    for line, names in _IMPORTS:
        used = [match.group() for name in names.split() if (match := re.search(rf"(?<![\w.\"]){name}(?=[(.,)\]])", body))]
        if used or not names:
            lines.append(line.format(", ".join(used)))
    return templates.from_string(_HEAD).render(values, imports="\n".join(lines)) + body


def _source(code: Any) -> str:
    """Returns code of this package without annotations."""
    return re.sub(r": Any| -> [\w.]+|: torch\.Tensor", "", inspect.getsource(code))


def _cut(exported: ExportedPlan) -> list[StageGraph]:
    """Returns the stages, after a check that skipping the blocks of other stages makes them."""
    named = [list(stage.blocks) for stage in exported.pipeline.stages]
    with torch.autocast("cpu", torch.bfloat16, enabled=exported.planned.recipe.autocast is not None):
        stages = cut(capture(exported.model, exported.inputs, list(chain(*named))), named)
    first, hidden = _inputs(exported)
    one = loss_text(exported) != 'output["loss"]' and all(
        len(stage.taken) == 1 and stage.taken[0].is_floating_point() for stage in stages[1:]
    )
    whole = [exported.blocks_of(stage) for stage in exported.pipeline.stages]
    plain = {name: value for name, value in exported.inputs.items() if name != "labels"}
    if not one or not is_cut_by_skipping(exported.model, plain, whole, stages[1].taken[0].shape[-1], first, hidden):
        raise InputError(
            "export: leaving out the blocks of other stages does not make the stages of this model (several values between "
            "stages, or dropout between blocks); run it with rlplace.distribute"
        )
    return stages


def _inputs(exported: ExportedPlan) -> tuple[str, str]:
    """Returns the input that only the first stage reads, and the one that takes the output of the stage before."""
    first = next(iter(exported.inputs))
    return first, "inputs_embeds" if "inputs_embeds" in inspect.signature(exported.model.forward).parameters else first


def _stage_constants(exported: ExportedPlan, stages: list[StageGraph]) -> dict[str, Any]:
    pipeline = exported.pipeline
    rows = "".join(f"    {numbered(exported.blocks_of(stage))},\n" for stage in pipeline.stages)
    held = [[n for n, stage in enumerate(pipeline.stages) if stage.devices == place] for place in pipeline.device_sets]
    ties = [copies for names in tied_names(exported.model) if len(copies := copies_of(names, stages)) > 1]
    taken = stages[1].taken[0]
    constants = {
        "STAGES": f"[\n{rows}]",
        "HELD": f"{held}  # stages of each place of the pipeline",
        "HIDDEN": f'{{"size": {tuple(taken.shape)}, "dtype": {taken.dtype}}}  # activations between stages',
    }
    return constants | ({"TIED": repr(ties).replace("'", '"')} if ties else {})


def _copies(exported: ExportedPlan) -> bool:
    """Returns whether the strategy is data-parallel only, with whole copies of the model."""
    stage = exported.stage
    return len(exported.pipeline.stages) == 1 and stage.sharding == 0 and stage.data_degree > 1 and stage.axis("tensor") == 1


def _wraps(exported: ExportedPlan) -> tuple[Wraps, str]:
    """Returns the calls that wrap blocks, in their order, and the one that wraps the rest."""
    stage, stages = exported.stage, exported.pipeline.stages
    root = "root" if len(stages) > 1 else "model"
    wraps = tensor_wraps(exported) if stage.axis("tensor") > 1 else []
    for how, context in (("full", ""), ("selective", ", context_fn=partial(create_selective_checkpoint_contexts, keep)")):
        chosen = [block for one in stages for block, word in one.recompute.items() if word == how]
        wraps.append((chosen, f"block.forward = partial(checkpoint, block.forward, use_reentrant=False{context})"))
    policy, whole = ', offload_policy=CPUOffloadPolicy(pin_memory=device.type != "cpu")', root
    if _copies(exported):
        whole = "DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)"
    elif stage.data_degree > 1:
        call = 'replicate({}, mesh=mesh["replicate"]{})'
        if stage.sharding > 0:
            axes = '"replicate", "shard"' if stage.axis("replicate") > 1 else '"shard"'
            call = f"fully_shard({{}}, mesh=mesh[{axes}], reshard_after_forward={stage.sharding == 3}{{}})"
        for offloaded, extra in ((False, ""), (True, policy)):
            held = [(paths, nn.ModuleList(exported.units[path] for path in paths)) for paths in map(exported.blocks_of, stages)]
            alone = [path for paths, others in held for path in paths if stands_alone(others, exported.units[path])]
            alone = [path for path in alone if path not in exported.outside]
            wraps.append(([path for path in alone if (path in stage.offload) == offloaded], call.format("block", extra)))
        whole = call.format(root, policy if stage.offload and len(stage.offload) == len(stage.blocks) else "")
    return [(paths, call) for paths, call in wraps if paths], whole


def _mesh(exported: ExportedPlan) -> tuple[str, str]:
    """Returns expressions of the mesh, and of the number of this process's replica."""
    pipeline, stage = exported.pipeline, exported.stage
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


class Elsewhere(nn.Module):
    """A replacement of the blocks of other stages: returns activations as they are, and zeros for ids."""

    def forward(self, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return value if value.is_floating_point() else torch.zeros((), device=value.device)


class _Mark(nn.Module):
    """A replacement of a block without its weights, whose results differ between any two blocks and orders."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self._number, self._width = number, width

    def forward(self, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not value.is_floating_point():
            value = torch.cos(value.unsqueeze(-1) * torch.arange(1, self._width + 1))
        return torch.sin(value * 1.1 + self._number)


def is_cut_by_skipping(
    model: nn.Module, inputs: Mapping[str, Any], stages: Sequence[Sequence[str]], width: int, first: str, hidden: str
) -> bool:
    """Runs a model whose blocks are marks, whole and stage by stage, and compares the outputs.

    Args:
        model: On the meta device; it is not changed.
        inputs: Of one micro-batch, with values and without labels.
        stages: Blocks by stage.
        width: Last dimension of the activations between stages.
        first: The input that only the first stage reads.
        hidden: The input that takes the output of the stage before.
    """
    numbers = {path: number for number, path in enumerate(path for stage in stages for path in stage)}

    def run(held: Sequence[str], given: Mapping[str, Any]) -> torch.Tensor:
        marked = copy.deepcopy(model)
        for path, number in numbers.items():
            marked.set_submodule(path, _Mark(number, width) if path in held else Elsewhere())
        output = marked.to_empty(device="cpu")(**given)
        return next(leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor))

    try:
        with torch.no_grad():
            wanted = run(list(numbers), inputs)
            value = run(stages[0], inputs)
            for held in stages[1:]:
                value = run(held, {name: item for name, item in inputs.items() if name != first} | {hidden: value})
    except Exception:  # the model's own code runs on what it was not written for
        return False
    return torch.equal(wanted, value)
