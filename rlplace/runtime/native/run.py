"""A model run as a strategy says: the one thing that a training loop holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.graph.fake import fake_copy, fake_inputs, new_fake_mode
from rlplace.plan.strategy import Pipeline, Stage, Strategy
from rlplace.runtime.held import meta_copy
from rlplace.runtime.native.accumulate import Accumulation, Loss
from rlplace.runtime.native.batches import Batch, Pass, micro_batches, own_samples, passes_of, share_of
from rlplace.runtime.native.blocks import tied_names, units
from rlplace.runtime.native.capture import Captured, capture, observe
from rlplace.runtime.native.clip import clip_grad_norm_
from rlplace.runtime.native.cut import StageGraph, cut, same_held, stage_module
from rlplace.runtime.native.facts import model_facts
from rlplace.runtime.native.mesh import Place, check_same, find_place
from rlplace.runtime.native.model_layouts import ModelLayouts, find_layouts, lay_out, split_sequence
from rlplace.runtime.native.pipeline import PipelineRun, Recorded, StageModule
from rlplace.runtime.native.streams import step_stream
from rlplace.runtime.native.tensor import Layouts
from rlplace.runtime.native.ties import Ties
from rlplace.runtime.native.why_not import minor_version, why_not
from rlplace.runtime.native.wrap import wrap_stage


class Runner(Protocol):
    """What runs the passes of a step: one stage by itself, or torch's schedules.

    Attributes:
        keeps_gradients: The next step writes into the memory of the gradients that this one made.
    """

    keeps_gradients: bool

    def step(self, passes: Sequence[Pass], loss: Loss) -> torch.Tensor:
        """Forward and backward of all micro-batches; returns the weighted sum of their losses."""

    def evaluate(self, passes: Sequence[Pass]) -> list[Any] | None:
        """What the model returns for every micro-batch; None where another process of the replica has it."""


class NativeModel:
    """This process's part of a model under a strategy.

    Attributes:
        strategy: What is run.
        place: Where this process stands.
        share: What its replica computes of a step.
        bodies: By number of the stage, the modules that this process holds; the whole model where there is one stage.
        names: Keyword inputs that `step` calls the model with.
        runner: What runs passes.
        random_state: Seed of what the model draws, and number of the next step.
    """

    def __init__(
        self,
        strategy: Strategy,
        place: Place,
        bodies: Mapping[int, nn.Module],
        runner: Runner,
        names: Sequence[str],
        modes: Sequence[nn.Module],
        ties: Ties | None = None,
        tied: Sequence[Sequence[str]] = (),
    ) -> None:
        self.strategy, self.place, self.bodies = strategy, place, dict(bodies)
        self.share, self.names, self.runner = share_of(strategy, place.replica), tuple(names), runner
        self._modes, self._ties, self._tied = modes, ties, tied
        self.random_state = 0, 0

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
        return self.run(passes_of(micro_batches(batch, self.share), self.share, self.names), loss)

    def run(self, passes: Sequence[Pass], loss: Loss) -> torch.Tensor:
        """Forward and backward of this replica's micro-batches; see `step`."""
        if self._ties is not None:
            self._ties.begin(self.bodies)
        with step_stream(self.random_state, self.place):
            total = self.runner.step(passes, loss)
        self.random_state = self.random_state[0], self.random_state[1] + 1
        _sum_parts(self.parameters())
        if self._ties is not None:
            self._ties.sum_gradients(self.bodies)
        total = total.double() if self.place.device.type == "cpu" else total.float()
        dist.all_reduce(total)
        return total / (self.strategy.pipelines[0].data_degree * self.place.mesh["tensor"].size())

    @torch.no_grad()
    def evaluate(self, passes: Sequence[Pass]) -> list[Any] | None:
        """What the model returns for this replica's micro-batches; None where another process of the replica has it."""
        with step_stream(self.random_state, self.place):
            outputs = self.runner.evaluate(passes)
        for module in {id(m): m for root in self._modes for m in root.modules() if isinstance(m, FSDPModule)}.values():
            module.reshard()  # without a backward nothing else does
        return outputs

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

    @torch.no_grad()
    def loaded(self) -> None:
        """What `state_dict` gave was overwritten: copies of one parameter in several stages of this process follow."""
        own = dict(self.named_parameters())
        for names in self._tied:
            held = [own[name] for name in names if name in own]
            for other in held[1:]:
                other.copy_(held[0])

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This process's buffers under the model's names."""
        for body in self.bodies.values():
            yield from body.named_buffers()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scales all gradients down to a norm, over all processes; returns the norm that they had."""
        copies = {} if self._ties is None else self._ties.copies(self.bodies)
        counted = [(p, copies.get(p, 1)) for p in self.parameters()]
        processes = self.place.mesh.size() // self.place.mesh["pipeline"].size()
        return clip_grad_norm_(counted, processes, self.place.device, max_norm, norm_type, error_if_nonfinite)

    def train(self, mode: bool = True) -> None:
        """Sets the mode; a pipeline records its forward again for it."""
        for module in self._modes:
            module.train(mode)


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
    runner = Accumulation(root, place.device, every_pass=stage.sharding > 1)
    return NativeModel(strategy, place, {0: model}, runner, tuple(example_inputs), [model])


def _lay_out(
    layouts: ModelLayouts, captured: Captured | None, found: Mapping[str, nn.Module], stage: Stage, place: Place
) -> None:
    put = Layouts(place.mesh["tensor"], stage.sequence_parallel, place.device)
    lay_out(put, layouts, found, stage.axis("tensor"))
    if stage.sequence_parallel:
        assert captured is not None
        split_sequence(put, layouts, captured, found)


def _pipelined(
    model: nn.Module, strategy: Strategy, example_inputs: Batch, place: Place, layouts: ModelLayouts | None
) -> NativeModel:
    pipeline, names = strategy.pipelines[0], tied_names(model)
    blocks = [block for stage in pipeline.stages for block in stage.blocks]
    captured = capture(model, example_inputs, blocks)
    stages = _cut(captured, pipeline)
    ties = Ties(names, pipeline, stages, place)
    plain = meta_copy(model)
    bodies = {number: stage_module(captured, stages[number], place.device).to(place.device) for number in place.stages}
    ties.part(bodies)
    held = {id(module) for body in bodies.values() for module in body.modules()}
    for module in captured.units.values():
        if id(module) not in held:
            module.to("meta")
    roots = {number: StageModule(body) for number, body in bodies.items()}
    for number, root in roots.items():
        root.training = model.training
        own = {id(module) for module in root.modules()}
        inside = {path: module for path, module in captured.units.items() if id(module) in own}
        if layouts is not None:
            _lay_out(layouts, captured, inside, pipeline.stages[number], place)
        wrap_stage(root, inside, pipeline.stages[number], place, pipelined=True)

    def record(inputs: Batch) -> Recorded:
        mode = new_fake_mode()
        again = capture(fake_copy(plain, mode), fake_inputs(dict(inputs), mode), blocks)
        recut = _cut(again, pipeline)
        same_held(again, captured, place.device)
        return _recorded(again, recut, {number: stage_module(again, recut[number], place.device) for number in place.stages})

    runner = PipelineRun(pipeline, place, roots, record, (example_inputs, _recorded(captured, stages, bodies)))
    return NativeModel(strategy, place, bodies, runner, tuple(example_inputs), [plain, *roots.values()], ties, names)


def _recorded(captured: Captured, stages: Sequence[StageGraph], bodies: Mapping[int, nn.Module]) -> Recorded:
    returned: Any = list(captured.graph.nodes)[-1].args[0]
    flat = [node.meta.get("val") if isinstance(node, fx.Node) else node for node in returned]
    return Recorded(stages, dict(bodies), pytree.tree_unflatten(flat, captured.out_spec), captured.out_spec)


def _cut(captured: Captured, pipeline: Pipeline) -> list[StageGraph]:
    stages = cut(captured, [stage.blocks for stage in pipeline.stages])
    if minor_version(torch.__version__) < (2, 13) and any(not value.requires_grad for stage in stages for value in stage.taken):
        raise InputError("native: a value without a gradient crosses from stage to stage, which needs torch 2.13; upgrade it")
    return stages
