"""The model of an exported plan, and its parts of a script: how it is built, batches, loss, tensor-parallel styles."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError, show
from rlplace.model.capture.caches import caching
from rlplace.model.capture.capture import DTYPES
from rlplace.model.zoo.functions import config_file, function_and_options, runs_code, split_spec
from rlplace.model.zoo.transformers import read_config
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import MEAN, TARGETS, Pipeline, Stage
from rlplace.planned import Planned
from rlplace.runtime.strategy.blocks import observe, owner, tied_names, units
from rlplace.runtime.strategy.facts import model_facts
from rlplace.runtime.strategy.model_layouts import BlockLayout, ModelLayouts, find_layouts
from rlplace.runtime.strategy.strategy_model import keyword_inputs
from rlplace.runtime.strategy.why_not import why_not


@dataclass(frozen=True, eq=False)
class ExportedPlan:
    """A plan to export, with its model without weights."""

    planned: Planned
    model: nn.Module  # the model on the meta device
    inputs: Mapping[str, Any]  # keyword inputs of one micro-batch
    output: Any  # output of the model for them, on the meta device
    loss: bool  # whether the loss is a function of the output that came with the model
    units: Mapping[str, nn.Module]  # modules that stay whole, by path
    layouts: ModelLayouts | None  # of its blocks over the tensor axis; None without one
    outside: Collection[str]  # see `rlplace.runtime.strategy.blocks.Observed`

    @property
    def pipeline(self) -> Pipeline:
        """The one pipeline of the strategy."""
        return self.planned.strategy.pipelines[0]

    @property
    def stage(self) -> Stage:
        """The first stage; degrees and level are those of all."""
        return self.pipeline.stages[0]

    def blocks_of(self, stage: Stage) -> list[str]:
        """Returns the blocks of a stage in the order of the strategy; of the whole model where there is one stage."""
        held = [path for path, unit in self.units.items() if any(True for _ in unit.parameters())]
        if len(self.pipeline.stages) == 1:
            return held
        return [path for block in stage.blocks for path in held if owner(path, [block]) is not None]


def build_exported(plan: PlacementPlan) -> ExportedPlan:
    """Builds a plan's model without weights, and refuses a strategy that a script cannot express."""
    planned = Planned(plan)
    strategy, recipe = planned.strategy, planned.recipe
    pipeline = strategy.pipelines[0]
    if recipe.model.startswith("zoo:"):
        raise InputError(f"export: {recipe.model} is a model of rlplace's own, which a script without rlplace cannot build")
    loaded = recipe.build("meta", seed=0, batch=pipeline.microbatch[0])
    inputs = keyword_inputs(loaded.module, loaded.example_inputs)
    found = dict(units(loaded.module, [block for stage in strategy.stages for block in stage.blocks]))
    with torch.autocast("cpu", torch.bfloat16, enabled=recipe.autocast is not None):
        seen = observe(loaded.module, inputs, {"": loaded.module, **found})
    layouts = find_layouts(found, seen.calls) if strategy.stages[0].axis("tensor") > 1 else None
    if (reason := why_not(strategy, model_facts(loaded.module, layouts))) is not None:
        raise InputError(f"export: {reason}")
    if (reason := next(_lacks(planned, loaded.module), None)) is not None:
        raise InputError(f"export: {reason}; run it with rlplace.distribute")
    output = next(iter(seen.results[""].values()))
    return ExportedPlan(planned, loaded.module, inputs, output, loaded.loss is not None, found, layouts, seen.outside)


def _lacks(planned: Planned, model: nn.Module) -> Iterator[str]:
    """Yields the features of a plan that a script does not have."""
    strategy, pipeline, recipe = planned.strategy, planned.strategy.pipelines[0], planned.recipe
    gathers = strategy.couple == "gather"
    if len(strategy.pipelines) > 1:
        yield "unlike pipelines side by side sum their gradients after the backward, for which the script has no part"
    if pipeline.data_degree * max(pipeline.microbatches) > 1 and (strategy.reduction not in (MEAN, TARGETS) or gathers):
        what = "gathers the inputs of the loss" if gathers else f"weights losses by {strategy.reduction}"
        yield f"the plan {what}, and the script averages replicas by samples"
    whole = next((name for name, p in model.named_parameters() if not p.dim() or not p.numel()), None)
    first, several = strategy.stages[0], len(strategy.stages) > 1
    if whole is not None and first.data_degree > 1 and (first.sharding or several or first.axis("tensor") > 1):
        yield (
            f"fully_shard takes no parameter without dimensions or elements, such as {whole}, and the script has no part that "
            "averages its gradients"
        )
    if first.tables:
        yield "tables are divided by an all-to-all of rlplace's, which the script has not: plan with tables=1"
    if first.expert > 1:
        yield "experts are spread by an all-to-all of rlplace's, which the script has not: plan with expert=1"
    if first.axis("context") > 1:
        yield "processes divide positions (context), which the script does not"
    if pipeline.unlike_meshes:
        yield "stages have unlike meshes, which torch's stages do not connect: place with --space pipeline=1"
    if len(set(pipeline.microbatch)) > 1 or len(set(pipeline.microbatches)) > 1:
        yield "replicas have unlike micro-batches, which need one loop each"
    if recipe.master_weights or recipe.autocast not in (None, "bf16"):
        yield "copies of the weights in fp32 and losses scaled for fp16 are not written: plan in fp32 or bf16"


def model_text(exported: ExportedPlan) -> dict[str, Any]:
    """Returns values of the template: import line of the model, lines of `build_model` and of `whole_batch`, and the loss."""
    _, _, rest = exported.planned.recipe.model.partition(":")
    cast = "" if exported.planned.recipe.dtype == "fp32" else f".to(torch.{DTYPES[exported.planned.recipe.dtype]})"
    made = _of_function(exported, cast) if runs_code(exported.planned.recipe.model) else _of_configuration(exported, rest, cast)
    return {**made, "loss": loss_text(exported)}


def _of_configuration(exported: ExportedPlan, rest: str, cast: str) -> dict[str, Any]:
    own: Any = exported.model.config
    model, config, options = type(exported.model).__name__, type(own).__name__, split_spec(rest)[1]
    if "gradient_checkpointing" in options:
        raise InputError("export: the MODEL text recomputes (gradient_checkpointing); leave that to the plan")
    if exported.loss or any("." in key for key in options):
        what = "computes no loss of its own" if exported.loss else "sets options of configurations inside its own"
        raise InputError(
            f"export: {exported.planned.recipe.model[:80]} {what}, which a script cannot express; use rlplace.distribute"
        )
    values = {key: own._attn_implementation if key == "attn_implementation" else getattr(own, key) for key in options}
    if config_file(exported.planned.recipe.model) is not None:
        named, plain = read_config(split_spec(rest)[0], ())[1], type(own)().to_dict()
        values = {key: value for key, value in named.items() if plain.get(key) != value and key != "architectures"} | values
    fresh = type(own)(**values)
    lines = [f"config = {config}({_arguments(values)})"]
    for key in ("use_cache", "decoder_start_token_id"):
        if getattr(own, key, None) != getattr(fresh, key, None):
            lines.append(f"config.{key} = {getattr(own, key)!r}")
    text = own.get_text_config(decoder=True) if hasattr(own, "get_text_config") else own
    return {
        "also": " and transformers",
        "model_import": f"from transformers import {config}, {model}",
        "build": [*lines, f"return {model}(config){cast}.train()"],
        "what": "Random samples",
        "batch": _random_batch(exported.inputs, text),
    }


def _random_batch(inputs: Mapping[str, Any], config: Any) -> list[str]:
    lines, seen = ["random = torch.Generator().manual_seed(step)"], dict[int, str]()
    for name, value in inputs.items():
        if seen.setdefault(id(value), name) != name:
            continue
        shape = f"(BATCH, {', '.join(map(str, value.shape[1:]))})" if value.dim() > 1 else "(BATCH,)"
        if value.is_floating_point():
            made = f"torch.rand({shape}, generator=random, dtype={value.dtype})"
        else:
            bound = config.num_labels if value.dim() == 1 else config.vocab_size
            made = f"torch.randint({bound}, {shape}, generator=random)"
        lines.append(f"{name} = {made}")
    returned = ", ".join(f'"{name}": {seen[id(value)]}' for name, value in inputs.items())
    return [*lines, f"return {{{returned}}}"]


_CACHES_OFF = (
    "for part in model.modules():",
    '    if getattr(getattr(part, "config", None), "use_cache", False):',
    "        part.config.use_cache = False  # a cache crosses no border between stages, and recomputation fills it twice",
)


def _of_function(exported: ExportedPlan, cast: str) -> dict[str, Any]:
    source, _, rest = exported.planned.recipe.model.partition(":")
    function, values = function_and_options(source, rest, exported.pipeline.microbatch[0], exported.planned.recipe.seq)
    call = f"{function.__name__}({_arguments(values)})"
    samples = {len(value) if isinstance(value, torch.Tensor) and value.dim() else None for value in exported.inputs.values()}
    if len(samples) > 1 or None in samples:
        raise InputError(
            "export: not every input of the model is a tensor with one row a sample; run the plan with rlplace.distribute"
        )
    model, made = function(**values)[:2]
    cached = bool(caching(model))
    listed = "inputs" if isinstance(made, (tuple, list)) else "[inputs]"
    given = "inputs" if isinstance(made, Mapping) else f"dict(zip({json.dumps(list(exported.inputs))}, {listed}))"
    value = f"(value{cast} if value.is_floating_point() else value)" if cast else "value"
    module, folder = source, ""
    if source.endswith(".py"):
        module, folder = Path(source).stem, f'sys.path.insert(0, "{Path(source).parent}")\n'
    return {
        "model_import": f"\n{folder}from {module} import {function.__name__}",
        "own_loss": f"{call}[2]" if exported.loss else None,
        "build": [f"model = {call}[0]{cast}", *_CACHES_OFF, "return model"] if cached else [f"return {call}[0]{cast}"],
        "what": "Samples of the example inputs",
        "batch": [
            "with torch.random.fork_rng(devices=[]):",
            "    torch.manual_seed(SEED)",
            f"    inputs = {call}[1]",
            f"rows = torch.randint({samples.pop()}, (BATCH,), generator=torch.Generator().manual_seed(step))",
            f"return {{name: {value}[rows] for name, value in {given}.items()}}",
        ],
    }


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in values.items())


def loss_text(exported: ExportedPlan) -> str:
    """Returns the loss as an expression of `output`."""
    if exported.loss:
        return "loss_of(output)"
    if isinstance(exported.output, torch.Tensor):
        return "output"
    return 'output["loss"]' if isinstance(exported.output, dict) and not hasattr(exported.output, "loss") else "output.loss"


Wraps = list[tuple[list[str], str]]
"""Paths of blocks, and what is to be called for each of them as `block`."""


def tensor_wraps(exported: ExportedPlan) -> Wraps:
    """Returns the tensor-parallel styles of blocks, which `parallelize` applies first; refuses layouts without a style."""
    assert exported.layouts is not None
    sequence, degree = exported.stage.sequence_parallel, exported.stage.axis("tensor")
    blocks: dict[str, list[str]] = {}
    entries = [
        f"{path}.{name}" for path, b in exported.layouts.blocks.items() for region in b.regions for name in region.entries
    ]
    watched = {name: exported.model.get_submodule(name) for name in (*exported.layouts.blocks, *entries)}
    calls = observe(exported.model, exported.inputs, watched).calls if sequence else {}
    for path, layout in exported.layouts.blocks.items():
        _check(exported, path, layout)
        blocks.setdefault(_styles(path, layout, calls, sequence), []).append(path)
    styled = [(paths, style) for style, paths in blocks.items()]
    for path in exported.layouts.vocabulary:
        unit: Any = exported.units[path]
        ids = isinstance(unit, nn.Embedding)
        if unit.weight.shape[0] % degree == 0:
            style = "RowwiseParallel(input_layouts=Replicate())" if ids else "ColwiseParallel(output_layouts=Replicate())"
            styled.append(([path], style))
    styled += _run_of_blocks(exported, calls) if sequence else []
    return [(paths, f'parallelize_module(block, mesh["tensor"], {style})') for paths, style in styled]


def numbered(paths: Sequence[str]) -> str:
    """Returns paths as a list of Python; neighbours that count up are one range."""

    def run(item: tuple[int, str]) -> tuple[Any, ...]:
        stem, _, number = item[1].rpartition(".")
        return (stem, int(number) - item[0]) if number.isdigit() else item

    texts = []
    for _, neighbours in groupby(enumerate(paths), run):
        names = [path for _, path in neighbours]
        stem, dot, first = names[0].rpartition(".")
        if len(names) > 1:
            texts.append(f'*(f"{stem}{dot}{{n}}" for n in range({first}, {int(first) + len(names)}))')
        else:
            texts.append(f'"{names[0]}"')
    return f"[{', '.join(texts)}]"


def _check(exported: ExportedPlan, path: str, layout: BlockLayout) -> None:
    if layout.draws:
        raise InputError(f"export: {path} draws random numbers, and torch's tensor-parallel styles draw the same for each part")
    for region in layout.regions:
        products = [product.module for product in (*region.columns, *region.rows)]
        strange = [name for name in products if type(exported.model.get_submodule(f"{path}.{name}")) is not nn.Linear]
        if strange or region.packed or region.stored or region.local or 0 < region.heads < exported.stage.axis("tensor"):
            name = f"{path}.{(strange or [region.columns[0].module])[0]}"
            raise InputError(
                f"export: {show(name)} is no plain nn.Linear, packs several weights, or repeats heads, and torch's "
                "tensor-parallel styles cut nothing else; run the plan with rlplace.distribute, or plan with --space tensor=1"
            )
    held = [names for names in tied_names(exported.model) if any(name.startswith(f"{path}.") for name in names)]
    if held:
        raise InputError(f"export: {held[0][0]} is tied, and parallelize_module unties it")


def _styles(path: str, layout: BlockLayout, calls: dict[str, Any], sequence: bool) -> str:
    styles: dict[str, str] = {name: "SequenceParallel()" for name in layout.positions if sequence}
    for region in layout.regions:
        alone = {product.module for product in region.columns} & set(region.entries if sequence else ())
        for name in region.entries if sequence else ():
            if name not in alone:
                styles[name] = _entry(calls[f"{path}.{name}"], "Shard(1)", "Replicate()")
        for product in region.columns:
            styles[product.module] = (
                "ColwiseParallel(input_layouts=Shard(1))" if product.module in alone else "ColwiseParallel()"
            )
        for product in region.rows:
            styles[product.module] = "RowwiseParallel(output_layouts=Shard(1))" if sequence else "RowwiseParallel()"
    lines = (f'            "{name}": {style},' for name, style in styles.items())
    return "\n".join(["{", *lines, "        }"])


def _entry(call: tuple[tuple[Any, ...], dict[str, Any]], before: str, after: str, local: str = "") -> str:
    """Returns the style that changes the one activation of a call, by position or by name."""
    args, kwargs = call
    if any(_is_activation(value) for value in args):
        given, wanted = (", ".join(to if _is_activation(v) else "None" for v in args) for to in (before, after))
        return f"PrepareModuleInput(input_layouts=({given},), desired_input_layouts=({wanted},){local})"
    name = next(name for name, value in kwargs.items() if _is_activation(value))
    given, wanted = f'{{"{name}": {before}}}', f'{{"{name}": {after}}}'
    return f"PrepareModuleInput(input_kwarg_layouts={given}, desired_input_kwarg_layouts={wanted}{local})"


def _is_activation(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _run_of_blocks(exported: ExportedPlan, calls: dict[str, Any]) -> Wraps:
    """Returns the styles of the ends of a stage: its first block takes a part of the sequence, its last returns the whole."""
    assert exported.layouts is not None
    firsts, lasts = [], []
    for stage in exported.pipeline.stages:
        held = exported.blocks_of(stage)
        inside = [path for path in held if path in exported.layouts.blocks]
        if not inside:
            continue
        if inside != held[held.index(inside[0]) : held.index(inside[-1]) + 1]:
            raise InputError("export: blocks without a layout stand between those that split the sequence")
        firsts.append(inside[0])
        lasts.append(inside[-1])
    parts = _entry(calls[firsts[0]], "Replicate()", "Shard(1)", ", use_local_output=True")
    whole = "PrepareModuleOutput(output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),))"
    return [(firsts, parts), (lasts, whole)]
