"""What an export looks at: a plan's model without weights, its blocks and layouts, and its stages."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.plan.strategy import Pipeline, Stage
from rlplace.planned import Planned, Recipe
from rlplace.runtime.base.conduct import MEAN, TARGETS
from rlplace.runtime.strategy.blocks import owner, units
from rlplace.runtime.strategy.capture import observe
from rlplace.runtime.strategy.facts import model_facts
from rlplace.runtime.strategy.model_layouts import ModelLayouts, find_layouts
from rlplace.runtime.strategy.strategy_model import keyword_inputs
from rlplace.runtime.strategy.why_not import why_not


@dataclass(frozen=True, eq=False)
class Asked:
    """A plan that is to be written.

    Attributes:
        plan: The plan.
        recipe: How its model is built.
        model: The model on the meta device.
        inputs: Keyword inputs of one micro-batch.
        output: What the model returns for them, on the meta device.
        loss: Whether the loss is a function of the output that came with the model.
        units: What stays whole, by path.
        layouts: Of its blocks over the tensor axis; None without one.
        outside: Blocks whose parameters are read while they do not run.
    """

    plan: PlacementPlan
    recipe: Recipe
    model: nn.Module
    inputs: Mapping[str, Any]
    output: Any
    loss: bool
    units: Mapping[str, nn.Module]
    layouts: ModelLayouts | None
    outside: Collection[str]

    @property
    def pipeline(self) -> Pipeline:
        """The one pipeline of the strategy."""
        assert self.plan.strategy is not None
        return self.plan.strategy.pipelines[0]

    @property
    def stage(self) -> Stage:
        """The first stage; degrees and level are those of all."""
        return self.pipeline.stages[0]

    def blocks_of(self, stage: Stage) -> list[str]:
        """Blocks of a stage in the order of the strategy; of the whole model where there is one stage."""
        held = [path for path, unit in self.units.items() if any(True for _ in unit.parameters())]
        if len(self.pipeline.stages) == 1:
            return held
        return [path for block in stage.blocks for path in held if owner(path, [block]) is not None]


def ask(plan: PlacementPlan) -> Asked:
    """Builds a plan's model without weights.

    Raises:
        InputError: The plan does not name its model, or torch's parts cannot run its strategy.
    """
    strategy, recipe = plan.strategy, Planned(plan).recipe
    assert strategy is not None
    pipeline = strategy.pipelines[0]
    if recipe.model.startswith("zoo:"):
        raise InputError(f"export: {recipe.model} is a model of rlplace's own, which a script without rlplace cannot build")
    loaded = recipe.build("meta", seed=0, batch=pipeline.microbatch[0])
    inputs = keyword_inputs(loaded.module, loaded.example_inputs)
    found = dict(units(loaded.module, [block for stage in strategy.stages for block in stage.blocks]))
    with torch.autocast("cpu", torch.bfloat16, enabled=recipe.autocast is not None):
        seen = observe(loaded.module, inputs, {"": loaded.module, **found})
    results, calls, outside = seen.results, seen.calls, seen.outside
    layouts = find_layouts(found, calls) if strategy.stages[0].axis("tensor") > 1 else None
    if (reason := why_not(strategy, model_facts(loaded.module, layouts))) is not None:
        raise InputError(f"export: {reason}")
    parts = pipeline.data_degree * max(pipeline.microbatches)
    if parts > 1 and (strategy.reduction not in (MEAN, TARGETS) or strategy.couple == "gather"):
        what = "gathers what the loss reads" if strategy.couple == "gather" else f"weights losses by {strategy.reduction}"
        raise InputError(
            f"export: the plan {what}, and the script averages replicas by samples; run it with rlplace.distribute"
        )
    whole = next((name for name, p in loaded.module.named_parameters() if not p.dim() or not p.numel()), None)
    first, several = strategy.stages[0], len(strategy.stages) > 1
    if whole is not None and first.data_degree > 1 and (first.sharding or several or first.axis("tensor") > 1):
        raise InputError(
            f"export: fully_shard takes no parameter without dimensions or elements, such as {whole}, and the script has no "
            "part that averages its gradients; run it with rlplace.distribute"
        )
    if pipeline.unlike_meshes:
        raise InputError(
            "export: stages have unlike meshes, which torch's stages do not connect; run it with rlplace.distribute, or place "
            "with --space pipeline=1"
        )
    if len(set(pipeline.microbatch)) > 1 or len(set(pipeline.microbatches)) > 1:
        raise InputError(
            "export: replicas have unlike micro-batches, which one loop does not say; run it with rlplace.distribute"
        )
    if recipe.master_weights or recipe.autocast not in (None, "bf16"):
        raise InputError(
            "export: copies of the weights in fp32 and losses scaled for fp16 are not written; plan in fp32 or bf16"
        )
    output = next(iter(results[""].values()))
    return Asked(plan, recipe, loaded.module, inputs, output, loaded.loss is not None, found, layouts, outside)
