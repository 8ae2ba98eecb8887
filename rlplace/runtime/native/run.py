"""A model run as a strategy says: the one thing that a training loop holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlplace.errors import InputError
from rlplace.plan.strategy import Stage, Strategy
from rlplace.runtime.native.accumulate import Accumulation, Loss
from rlplace.runtime.native.batches import Batch, Signature, micro_batches, own_samples, share_of
from rlplace.runtime.native.blocks import tied_names, units
from rlplace.runtime.native.capture import Captured, capture, observe
from rlplace.runtime.native.clip import clip_grad_norm_
from rlplace.runtime.native.cut import cut, stage_module
from rlplace.runtime.native.facts import model_facts
from rlplace.runtime.native.mesh import Place, check_same, find_place
from rlplace.runtime.native.model_layouts import ModelLayouts, find_layouts, lay_out, split_sequence
from rlplace.runtime.native.pipeline import PipelineRun, StageModule
from rlplace.runtime.native.tensor import Layouts
from rlplace.runtime.native.ties import Ties
from rlplace.runtime.native.why_not import minor_version, why_not
from rlplace.runtime.native.wrap import wrap_stage


class Runner(Protocol):
    """What runs the passes of a step: one stage by itself, or torch's schedules."""

    def step(self, parts: list[dict[str, Any]], loss: Loss) -> torch.Tensor:
        """Forward and backward of all micro-batches; returns the weighted sum of their losses."""


class NativeModel:
    """This process's part of a model under a strategy.

    Attributes:
        strategy: What is run.
        place: Where this process stands.
        share: What its replica computes of a step.
        bodies: By number of the stage, the modules that this process holds; the whole model where there is one stage.
    """

    def __init__(
        self,
        strategy: Strategy,
        place: Place,
        bodies: Mapping[int, nn.Module],
        runner: Runner,
        ties: Ties | None = None,
        tied: Sequence[Sequence[str]] = (),
    ) -> None:
        self.strategy, self.place, self.bodies = strategy, place, dict(bodies)
        self.share = share_of(strategy, place.replica)
        self._runner, self._ties, self._tied = runner, ties, tied

    def own_samples(self, batch: Batch) -> dict[str, Any]:
        """The samples of this process's replica out of a whole batch, the same on all processes."""
        return own_samples(batch, self.share, self.strategy.batch)

    def step(self, batch: Batch, loss: Loss) -> torch.Tensor:
        """Forward and backward of one batch; gradients are added to ``.grad`` of the parameters.

        Args:
            batch: Keyword inputs of the model, and what the loss needs: the samples of this process's replica (`own_samples`).
            loss: Called with the model's output and a micro-batch; returns the mean over its samples.

        Returns:
            The mean loss over all samples of the batch, the same on every process.

        Raises:
            InputError: The batch has another number of samples than the strategy.
        """
        parts = micro_batches(batch, self.share)
        if self._ties is not None:
            self._ties.begin(self.bodies)
        total = self._runner.step(parts, loss)
        _sum_parts(self.parameters())
        if self._ties is not None:
            self._ties.sum_gradients(self.bodies)
        total = total.double() if self.place.device.type == "cpu" else total.float()
        dist.all_reduce(total)
        return total / (self.strategy.pipelines[0].data_degree * self.place.mesh["tensor"].size())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This process's parameters under the model's names; `DTensor` where they are shared or laid out."""
        for body in self.bodies.values():
            yield from body.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """All of them, as `named_parameters` gives them."""
        return (parameter for _, parameter in self.named_parameters())

    def first_name(self, name: str) -> str:
        """The first of the names that the plain model has for a parameter, which is tied where there are several."""
        return next((names[0] for names in self._tied if name in names), name)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What an optimizer gets: plain tensors and `DTensor` apart, which one foreach or fused operation cannot take."""
        parameters = list(self.parameters())
        groups = ([p for p in parameters if isinstance(p, DTensor) == kind] for kind in (False, True))
        return [{"params": group} for group in groups if group]

    def state_dict(self) -> dict[str, Any]:
        """This process's parameters and buffers under the model's names, for `torch.distributed.checkpoint`."""
        state = {name: value for body in self.bodies.values() for name, value in body.state_dict().items()}
        for names in self._tied:
            held = next((name for name in names if name in state), None)
            state |= {} if held is None else {name: state[held] for name in names}
        return state

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scales all gradients down to a norm, over all processes; returns the norm that they had."""
        copies = {} if self._ties is None else self._ties.copies(self.bodies)
        return clip_grad_norm_([(p, copies.get(p, 1)) for p in self.parameters()], self.place, max_norm)

    def train(self, mode: bool = True) -> None:
        """Sets the mode of the blocks; ops between them stay as they were recorded."""
        for body in self.bodies.values():
            body.train(mode)


def _sum_parts(parameters: Iterator[nn.Parameter]) -> None:
    """Gradients that are partial sums over the tensor axis are summed, as their parameters are held."""
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor) and isinstance(parameter, DTensor):
            if parameter.grad.placements != parameter.placements:
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def prepare(model: nn.Module, strategy: Strategy, example_inputs: Batch, device_type: str = "cpu") -> NativeModel:
    """Makes this process run its part of a model as a strategy says.

    Every process of the job calls it with the same model, values included, after `torch.distributed.init_process_group`.

    Args:
        model: Its modules are changed in place, and keep their names; what only other processes run loses its values.
        strategy: Stages on meshes; its lowest device number is the first process.
        example_inputs: Keyword inputs of one micro-batch of this process; only shapes and dtypes matter.
        device_type: ``"cpu"`` or an accelerator's, such as ``"cuda"``.

    Raises:
        InputError: It cannot be run, with the reason (`why_not`).
    """
    named = [block for stage in strategy.stages for block in stage.blocks]
    found = dict(units(model, named))
    laid_out = strategy.stages[0].axis("tensor") > 1
    layouts = find_layouts(found, observe(model, example_inputs, found)[1]) if laid_out else None
    reason = why_not(strategy, model_facts(model, layouts), torch.__version__)
    if reason is not None:
        raise InputError(f"native: {reason}")
    degree = strategy.stages[0].axis("tensor")
    length = 0 if layouts is None else layouts.length
    if length % degree and any(stage.sequence_parallel for stage in strategy.stages):
        raise InputError(f"native: {length} positions cannot be split over {degree} processes; pad them to a multiple")
    place = find_place(strategy, device_type)
    check_same(model)
    if len(strategy.stages) > 1:
        return _pipelined(model, strategy, example_inputs, place, layouts)
    stage = strategy.stages[0]
    captured = capture(model, example_inputs, named) if stage.sequence_parallel else None
    model.to(place.device)
    if layouts is not None:
        _lay_out(layouts, captured, found, stage, place)
    root = wrap_stage(model, found, stage, place, pipelined=False)
    share, level = share_of(strategy, place.replica), stage.sharding
    return NativeModel(
        strategy, place, {0: model}, Accumulation(root, Signature.of(example_inputs), share.weight, every_pass=level > 1)
    )


def _lay_out(
    layouts: ModelLayouts, captured: Captured | None, found: Mapping[str, nn.Module], stage: Stage, place: Place
) -> None:
    put = Layouts(place.mesh["tensor"], stage.sequence_parallel)
    lay_out(put, layouts, found, stage.axis("tensor"))
    if stage.sequence_parallel:
        assert captured is not None
        split_sequence(put, layouts, captured, found)


def _pipelined(
    model: nn.Module, strategy: Strategy, example_inputs: Batch, place: Place, layouts: ModelLayouts | None
) -> NativeModel:
    pipeline, share = strategy.pipelines[0], share_of(strategy, place.replica)
    names = tied_names(model)
    captured = capture(model, example_inputs, [block for stage in pipeline.stages for block in stage.blocks])
    stages = cut(captured, [stage.blocks for stage in pipeline.stages])
    if minor_version(torch.__version__) < (2, 13) and any(not value.requires_grad for stage in stages for value in stage.taken):
        raise InputError("native: a value without a gradient crosses from stage to stage, which needs torch 2.13; upgrade it")
    ties = Ties(names, pipeline, stages, place)
    bodies = {number: stage_module(captured, stages[number], place.device) for number in place.stages}
    ties.part(bodies)
    held = {id(module) for body in bodies.values() for module in body.modules()}
    for module in captured.units.values():
        if id(module) not in held:
            module.to("meta")
    roots = {}
    for number, body in bodies.items():
        root = StageModule(body, stages[number], captured.out_spec, share.weight)
        own = {id(module) for module in body.modules()}
        inside = {path: module for path, module in captured.units.items() if id(module) in own}
        if layouts is not None:
            _lay_out(layouts, captured, inside, pipeline.stages[number], place)
        wrap_stage(root, inside, pipeline.stages[number], place, pipelined=True)
        roots[number] = root
    runner = PipelineRun(pipeline, place, roots, stages, Signature.of(example_inputs), share.microbatches)
    return NativeModel(strategy, place, bodies, runner, ties, names)
