"""A stand-alone training script of plain torch calls that does what a strategy says."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from itertools import chain

import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.exporting.asked import Asked, ask
from rlplace.exporting.model_text import loss_text, model_text
from rlplace.exporting.parts import END, HEAD, KEEP, MICRO_BATCHES, STAGE, START, TIES, imports_of
from rlplace.exporting.skipping import Elsewhere, is_cut_by_skipping
from rlplace.exporting.tensor_text import numbered, tensor_lines
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import uniform_words
from rlplace.runtime.native.blocks import tied_names
from rlplace.runtime.native.capture import capture
from rlplace.runtime.native.cut import StageGraph, cut
from rlplace.runtime.native.mesh import AXES
from rlplace.runtime.native.ties import copies_of
from rlplace.runtime.native.wrap import stands_alone
from rlplace.schedule import ONE, SCHEDULES

_OPTIMIZERS = {"sgd": "SGD({}, lr=LR)", "momentum": "SGD({}, lr=LR, momentum=0.9)", "adam": "Adam({}, lr=LR)"}
_SEED = "torch.manual_seed(SEED + 1 + replica)  # dropout is unlike on replicas"
_OPTIMIZERS["adamw"] = "AdamW({}, lr=LR)"


def training_script(plan: PlacementPlan) -> str:
    """The text of a script for a plan with a strategy; see `rlplace.export`."""
    asked = ask(plan)
    pipeline, stage = asked.pipeline, asked.stage
    assert plan.strategy is not None
    several, data = len(pipeline.stages) > 1, stage.data_degree
    model_import, model = model_text(asked)
    constants = {
        "SEED": "0",
        "LR": "1e-3",
        "BATCH": str(plan.strategy.batch),
        "REPLICAS": str(data),
        "MICROBATCHES": str(pipeline.microbatches[0]),
    }
    body = [model]
    if not several:
        body.append(MICRO_BATCHES + "\n")
    if "selective" in {how for stage in pipeline.stages for how in stage.recompute.values()}:
        body.append(KEEP + "\n")
    if several:
        stages = _cut(asked)
        constants |= _stage_constants(asked, stages)
        body += [_stage_class(asked), "\n"]
        if "TIED" in constants:
            body.append(TIES + "\n")
    wrapping = _parallelize(asked)
    body += [wrapping, _pipeline_main(asked, stages, constants) if several else _main(asked, bool(wrapping))]
    text = "\n".join(f"{name} = {value}" for name, value in constants.items()) + "\n\n" + "".join(body)
    also = " and transformers" if model_import.startswith("from transformers") else ""
    head = HEAD.format(
        model=asked.recipe.model, words=uniform_words(plan.strategy), processes=len(plan.strategy.devices), also=also,
        plan=plan.fingerprint[:12],
    )  # fmt: skip
    return re.sub(r"\n{4,}", "\n\n\n", f"{head}\n{imports_of(text)}{model_import}\n\n{text}")


def _cut(asked: Asked) -> list[StageGraph]:
    """The stages, found to be what skipping the blocks of others makes."""
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
    """The input that later stages do without, and the one that takes what the stage before made."""
    first = next(iter(asked.inputs))
    return first, "inputs_embeds" if "inputs_embeds" in inspect.signature(asked.model.forward).parameters else first


def _stage_constants(asked: Asked, stages: list[StageGraph]) -> dict[str, str]:
    pipeline = asked.pipeline
    rows = "".join(f"    {numbered(asked.blocks_of(stage))},\n" for stage in pipeline.stages)
    held = [[n for n, stage in enumerate(pipeline.stages) if stage.devices == place] for place in pipeline.device_sets]
    ties = [copies for names in tied_names(asked.model) if len(copies := copies_of(names, stages)) > 1]
    taken = stages[1].taken[0]
    constants = {"STAGES": f"[\n{rows}]", "HELD": f"{held}  # stages of each place of the pipeline"}
    constants["HIDDEN"] = f"{{'size': {tuple(taken.shape)}, 'dtype': {taken.dtype}}}  # what stages hand on".replace("'", '"')
    return constants | ({"TIED": repr(ties).replace("'", '"')} if ties else {})


def _stage_class(asked: Asked) -> str:
    source = re.sub(r": Any| -> torch\.Tensor|: torch\.Tensor", "", inspect.getsource(Elsewhere))
    first, hidden = _inputs(asked)
    loss = loss_text(asked)
    value = ".logits" if loss == "output.loss" else ""
    drop = '        if not self.last:\n            del inputs["labels"]\n' if "labels" in asked.inputs else ""
    text = STAGE
    for key, word in (("{first}", first), ("{hidden}", hidden), ("{drop}", drop), ("{loss}", loss), ("{value}", value)):
        text = text.replace(key, word)
    if asked.recipe.autocast is not None:
        text = text.replace(
            "        output = self.model(**inputs)",
            f"        {_autocast('inputs[next(iter(inputs))].device')}:\n            output = self.model(**inputs)",
        )
    return f"\n{source}\n{text}\n"


def _autocast(device: str) -> str:
    return f"with torch.autocast({device}.type, torch.bfloat16, cache_enabled=False)"


def _parallelize(asked: Asked) -> str:
    """The function that puts tensor layouts, recomputation and data axes on a model, or on one stage of it."""
    stage, pipeline = asked.stage, asked.pipeline
    several = len(pipeline.stages) > 1
    names = "(name for name in {} if name in blocks)" if several else "{}"
    lines = tensor_lines(asked, names) if stage.axis("tensor") > 1 else []
    for how in ("full", "selective"):
        chosen = [block for one in pipeline.stages for block, word in one.recompute.items() if word == how]
        if chosen:
            context = ", context_fn=partial(create_selective_checkpoint_contexts, keep)" if how == "selective" else ""
            lines += [f"for name in {names.format(numbered(chosen))}:", "    block = model.get_submodule(name)"]
            lines.append(f"    block.forward = partial(checkpoint, block.forward, use_reentrant=False{context})")
    lines += _data_axes(asked, names)
    if not lines:
        return ""
    arguments = "root, model, blocks, mesh, device" if several else "model, mesh, device"
    text = '    """Torch\'s order: tensor layouts, recomputation, then the data axes, block by block."""'
    return "\n".join(["", f"def parallelize({arguments}):", text, *(f"    {line}" for line in lines)]) + "\n\n"


def _data_axes(asked: Asked, names: str) -> list[str]:
    stage, several = asked.stage, len(asked.pipeline.stages) > 1
    if stage.data_degree == 1 or (stage.sharding == 0 and not several and stage.axis("tensor") == 1):
        return []
    root = "root" if several else "model"
    if stage.sharding == 0:
        call = 'replicate({}, mesh=mesh["replicate"])'
    else:
        axes = '"replicate", "shard"' if stage.axis("replicate") > 1 else '"shard"'
        call = f"fully_shard({{}}, mesh=mesh[{axes}], reshard_after_forward={stage.sharding == 3}{{}})"
    held = {
        path: nn.ModuleList(asked.units[p] for p in paths)
        for paths in map(asked.blocks_of, asked.pipeline.stages)
        for path in paths
    }
    alone = [path for path, others in held.items() if stands_alone(others, asked.units[path])]
    offloaded = set(stage.offload)
    lines = []
    policy = ', offload_policy=CPUOffloadPolicy(pin_memory=device.type != "cpu")'
    for chosen, extra in ((set(alone) - offloaded, ""), (set(alone) & offloaded, policy)):
        if chosen:
            lines.append(f"for name in {names.format(numbered([path for path in alone if path in chosen]))}:")
            lines.append(f"    {call.format('model.get_submodule(name)', extra)}")
    everything = offloaded and len(offloaded) == len(stage.blocks)
    return [*lines, call.format(root, policy if everything else "")]


def _mesh(asked: Asked) -> tuple[list[str], str]:
    """The lines that make the mesh, and the number of this process's replica."""
    pipeline, stage = asked.pipeline, asked.stage
    sizes = {"pipeline": len(pipeline.device_sets)} | {axis: stage.axis(axis) for axis in AXES[1:]}
    used = {axis: size for axis, size in sizes.items() if size > 1}
    if not used:
        return [], "0"
    devices = list(chain(*pipeline.device_sets))
    rank = {device: number for number, device in enumerate(sorted(devices))}
    ranks, shape = [rank[device] for device in devices], tuple(used.values())
    names = f"mesh_dim_names=({', '.join(f'{chr(34)}{axis}{chr(34)}' for axis in used)},)".replace(
        ",)", ")" if len(used) > 1 else ",)"
    )
    if ranks == sorted(ranks):
        line = f"mesh = init_device_mesh(device.type, {shape}, {names})"
    else:
        line = f"mesh = DeviceMesh(device.type, {torch.tensor(ranks).view(shape).tolist()}, {names})"
    both = stage.axis("replicate") > 1 and stage.axis("shard") > 1
    local = 'mesh["{}"].get_local_rank()'
    if both:
        return [line], f"{local.format('replicate')} * {stage.axis('shard')} + {local.format('shard')}"
    data = next((axis for axis in ("replicate", "shard") if stage.axis(axis) > 1), None)
    return [line], "0" if data is None else local.format(data)


def _main(asked: Asked, wrapped: bool) -> str:
    stage, count = asked.stage, asked.pipeline.microbatches[0]
    mesh, replica = _mesh(asked)
    lines = [*mesh, f"replica = {replica}", "model = build_model().to(device)", _SEED]
    copies = stage.sharding == 0 and stage.data_degree > 1 and stage.axis("tensor") == 1
    if wrapped:
        lines.append(f"parallelize(model, {'mesh' if mesh else 'None'}, device)")
    if copies:
        lines.append("model = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)")
    lines.append(_optimizer(asked, "model.parameters()"))
    lines += ["for step in range(steps):", "    loss = torch.zeros((), dtype=torch.float64, device=device)"]
    numbered_parts = "for number, part in enumerate(micro_batches(whole_batch(step), replica, device)):"
    lines += [f"    {numbered_parts}", f"        last = number == {count} - 1"] if count > 1 else [
        "    for part in micro_batches(whole_batch(step), replica, device):"
    ]  # fmt: skip
    inner, pad = [], ""
    if count > 1 and copies:
        inner.append("with contextlib.nullcontext() if last else model.no_sync():  # gradients are reduced once a step")
        pad = "    "
    elif count > 1 and stage.data_degree > 1:
        inner.append("model.set_is_last_backward(last)")
        if stage.sharding < 2:
            inner += ["model.set_requires_gradient_sync(last)  # gradients are reduced once a step"]
            inner += ["model.set_reshard_after_backward(last)"]
    cast = asked.recipe.autocast is not None
    if cast:
        inner.append(f"{pad}{_autocast('device')}:")
    deep = f"{pad}    " if cast else pad
    share = " / MICROBATCHES" if count > 1 else ""
    inner += [f"{deep}output = model(**part)", f"{deep}value = {loss_text(asked)}{share}"]
    inner += [f"{pad}value.backward()", "loss += value.detach()"]
    lines += [f"        {line}" for line in inner]
    lines += [
        "    optimizer.step()",
        "    optimizer.zero_grad()",
        "    dist.all_reduce(loss)",
        "    loss /= dist.get_world_size()",
    ]
    return START + "\n".join(f"    {line}" for line in [*lines, "    if dist.get_rank() == 0:"]) + "\n" + END


def _optimizer(asked: Asked, parameters: str) -> str:
    groups = parameters
    if asked.stage.axis("tensor") > 1 and asked.stage.data_degree == 1:  # one foreach operation takes plain tensors or DTensors
        groups = f'[{{"params": [p for p in {parameters} if isinstance(p, DTensor) == kind]}} for kind in (False, True)]'
    return f"optimizer = torch.optim.{_OPTIMIZERS[asked.recipe.optimizer].format(groups)}"


def _pipeline_main(asked: Asked, stages: list[StageGraph], constants: Mapping[str, str]) -> str:
    pipeline, wrapped = asked.pipeline, bool(_parallelize(asked))
    schedule = SCHEDULES[pipeline.schedule or ""]
    mesh, replica = _mesh(asked)
    make = [
        "",
        "def make_stage(number, mesh, device):",
        '    """The model with the blocks of one stage, and torch\'s wrappers on it."""',
        "    model = build_model()",
        "    for other, blocks in enumerate(STAGES):",
        "        for name in blocks if other != number else ():",
        "            model.set_submodule(name, Elsewhere())",
        "    stage = Stage(model.to(device), number == len(STAGES) - 1)",
        *(["    parallelize(stage, model, STAGES[number], mesh, device)"] if wrapped else []),
        "    return stage",
        "",
        "",
        "def torch_stage(module, number, mesh, device):",
        '    """Torch\'s stage; examples of what is handed on, so that no forward has to be run to know it."""',
        "    hidden = torch.empty(**HIDDEN, device=device, requires_grad=True)",
        "    taken = (hidden,) if number else ()",
        "    loss = torch.empty(1, dtype=torch.float64, device=device, requires_grad=True)",
        "    given = hidden if number < len(STAGES) - 1 else loss",
        '    group = mesh["pipeline"].get_group()',
        "    return PipelineStage(module, number, len(STAGES), device, input_args=taken, output_args=(given,), group=group)",
        "",
    ]
    lines = [
        *mesh,
        f"replica = {replica}",
        'held = {n: make_stage(n, mesh, device) for n in HELD[mesh["pipeline"].get_local_rank()]}',
        _SEED,
        "stages = [torch_stage(module, n, mesh, device) for n, module in held.items()]",
        f"schedule = {schedule.torch_class}(",
        f"    stages{'[0]' if schedule.layout == ONE else ''}, MICROBATCHES, "
        "loss_fn=lambda loss, target: loss.sum() / MICROBATCHES, scale_grads=False",
        ")",
        *(["groups = groups_of_ties(mesh)"] if "TIED" in constants else []),
        "parameters = [p for module in held.values() for p in module.parameters()]",
        _optimizer(asked, "parameters"),
        "for step in range(steps):",
        "    mine = {name: value.chunk(REPLICAS)[replica].to(device) for name, value in whole_batch(step).items()}",
        "    losses = []",
        "    schedule.step(**mine, target=torch.arange(MICROBATCHES), losses=losses, return_outputs=False)",
        *(["    sum_tied_gradients(held, groups)"] if "TIED" in constants else []),
        "    optimizer.step()",
        "    optimizer.zero_grad()",
        "    loss = sum(losses, torch.zeros((), dtype=torch.float64, device=device)).detach()  # of the last stage",
        "    dist.all_reduce(loss)",
        f"    loss /= {asked.stage.data_degree * asked.stage.axis('tensor')}",
        "    if dist.get_rank() == 0:",
    ]
    text = "\n".join(make) + "\n" + START + "\n".join(f"    {line}" for line in lines) + "\n" + END
    return text
