"""A distributed model under a strategy, by torch's own parts (`rlplace.runtime.strategy`)."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from rlplace.errors import InputError
from rlplace.model.capture.export import lies_in
from rlplace.model.capture.outputs import register_dataclasses, with_loss
from rlplace.model.torch_adapter import pytree
from rlplace.plan.strategy import MEAN, SUM, Strategy
from rlplace.runtime.base.batches import COUNT, Batch, Pass, Share, join_leaves, map_rows, passes_of, share_of
from rlplace.runtime.base.model import Batching, DistributedModel, Stash
from rlplace.runtime.base.ranks import Ranks
from rlplace.runtime.base.steps import Loss, check_inputs, loss_of, samples_of, takes_target
from rlplace.runtime.state.whole import ParameterHooks, gather_values, own_part, seen
from rlplace.runtime.strategy.blocks import reads, tied_names
from rlplace.runtime.strategy.buffers import Accumulation
from rlplace.runtime.strategy.buffers import Loss as PartLoss
from rlplace.runtime.strategy.capture import strange_in
from rlplace.runtime.strategy.gather import gather_output
from rlplace.runtime.strategy.lists import expert_lists
from rlplace.runtime.strategy.mesh import MeshPlace
from rlplace.runtime.strategy.reach import Reached
from rlplace.runtime.strategy.release import GradientRelease
from rlplace.runtime.strategy.statistics import statistics_of, take_from_first_replica
from rlplace.runtime.strategy.sums import GradientSums
from rlplace.runtime.strategy.tables import WEIGHT
from rlplace.runtime.strategy.tensor import step_stream
from rlplace.runtime.strategy.wrap import average_left_out, left_out, sum_parts

if TYPE_CHECKING:
    from rlplace.runtime.strategy.pipeline import PipelineRun

NATIVE = "native"
TARGET = "target"


class StrategyModel(DistributedModel):
    """A `DistributedModel` whose `step` also runs forward and backward of a batch with any loss, as torch's pipelines do.

    Args:
        meta: The model without its values.
        strategy: The strategy.
        place: Coordinates of this process.
        bodies: By number of the stage, the modules that this process holds; the whole model where there is one stage.
        runner: Runs passes.
        names: Keyword inputs that `step` calls the model with.
        roots: Modules that are set to training or evaluation besides.
        batching: How a batch becomes micro-batches.
        loss: See `rlplace.distribute`.
        seed: Seed of the model's draws.
        hooks: Hooks of the parameters.
        reached: Of the stages whose forwards read values.
    """

    def __init__(
        self,
        meta: nn.Module,
        strategy: Strategy,
        place: MeshPlace,
        bodies: Mapping[int, nn.Module],
        runner: Accumulation | PipelineRun,
        names: Sequence[str],
        roots: Sequence[nn.Module],
        *,
        batching: Batching,
        loss: Loss | None,
        seed: int,
        hooks: ParameterHooks,
        reached: Sequence[Reached] = (),
    ) -> None:
        self._pipeline, several = place.pipeline, len(strategy.pipelines) > 1
        if several or self._pipeline.unlike_meshes:  # no process belongs to one replica alone, so all take whole batches
            rows, batching = [list(range(dist.get_world_size()))], replace(batching, share="global")
        else:
            rows = place.mesh.mesh.permute(1, 2, 0, 3).reshape(place.data_degree, -1).tolist()
        ranks = Ranks(dist.get_rank(), place.device, tuple(map(tuple, rows)))
        super().__init__(meta, ranks, batching, seed, NATIVE)
        self.strategy, self.place, self.runner, self._loss = strategy, place, runner, loss
        self._bodies, self._roots, self._names = dict(bodies), list(roots), tuple(names)
        self._hooks, self._reached, tied = hooks, reached, tied_names(meta)
        self._tied = tied if len(self._pipeline.stages) > 1 else ()
        self._sums = GradientSums(self._bodies, place, tied) if several or self._tied else None
        self._tables = {f"{path}.{WEIGHT}" for stage in self._pipeline.stages for path in stage.tables}
        if hooked := self._tables.intersection(hooks.names):
            raise InputError(f"native: the parameter {min(hooked)} has hooks, which read whole gradients; plan with tables=1")
        # By path of every list of experts that is spread, over how many processes.
        self._spread = {
            path: stage.expert
            for stage in self._pipeline.stages
            for path, _, _ in expert_lists(meta)
            if any(lies_in(path, block) for block in stage.blocks)
        }
        self._release = GradientRelease() if strategy.release_gradients else None
        if self.releases and hooks.names:
            raise InputError(
                f"native: the parameter {hooks.names[0]} has hooks, which read gradients of whole batches, and the plan "
                "releases them; plan without --release-gradients"
            )
        self._statistics = statistics_of(self._bodies.values())
        self._latest: weakref.ref[Stash] | None = None
        self._divides: dict[frozenset[str], bool] = {}  # by names of inputs, whether the loss is divided by `COUNT`
        self._reduction = batching.reduction  # of the latest batch

    @property
    def writes(self) -> bool:
        """True where this process has a part in checkpoints: one pipeline holds the whole model."""
        return self.place.number == 0

    @property
    def releases(self) -> bool:
        """True where a parameter is updated in the backward, and has no gradient after it."""
        return self._release is not None

    def release_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the backward update every parameter by an optimizer as soon as its gradient is there, and free that.

        Call it once, on every process, where a plan releases gradients; ``optimizer.step()`` still ends every step.

        Raises:
            InputError: The plan does not release gradients.
        """
        if self._release is None:
            super().release_gradients(optimizer)
        else:
            late = [p for p in self.parameters() if left_out(p) and self.place.columns > 1]
            self._release.use(optimizer, late)

    def step(self, batch: Batch, loss: PartLoss) -> torch.Tensor:
        """Runs forward and backward of one batch in one call; gradients are added to ``.grad`` of the parameters.

        Args:
            batch: The whole batch, the same on every rank: keyword inputs of the model, and further inputs of the loss.
            loss: Called with the model's output and a micro-batch; returns the mean over its samples.

        Returns:
            The mean loss over the batch, the same on every rank.
        """
        if any(stage.axis("context") > 1 for stage in self.strategy.stages):
            raise InputError("native: step takes a loss of the output, which is of a part of the positions; call the model")
        self._reduction = self.batching.reduction
        value, stash = self._run(self._passes(batch, self._names), loss)
        stash.deliver(torch.ones(()))
        self.random_state = self.random_state[0], self.random_state[1] + 1
        return value

    def _run(self, passes: Sequence[Pass], loss: PartLoss) -> tuple[torch.Tensor, Stash]:
        """Runs forward and backward of this replica's micro-batches; returns the mean loss over the batch and the gradients."""
        earlier = self._latest() if self._latest is not None and self.runner.keeps_gradients else None
        if earlier is not None:
            earlier.keep()
        how: dict[str, Any] = {"copy": self.runner.keeps_gradients, "after": self._hooks.run_after, "released": self.releases}
        with Stash(dict(self.named_parameters()), **how) as stash:
            with step_stream(self.random_state, self.place):
                if self._release is None:
                    sums = self.runner.step(passes, loss)
                else:
                    counted = None if self._counts is None else self._over_replicas
                    with self._release.step():
                        sums = self.runner.step(passes, loss, counted)  # type: ignore[call-arg]
            for stage in self._reached:
                stage.fill()
            for name, parameter in self.named_parameters():
                if name not in self._tables:
                    average_left_out(parameter, self.place)
                    sum_parts(parameter)
            for stage in self._reached:
                stage.settle()
            if self._sums is not None:
                self._sums.sum_gradients()
            total, count = self._over_replicas(sums)
            if self._counts is not None:
                total = total / count
                for parameter in () if self.releases else self.parameters():  # released ones had their share before
                    if parameter.grad is not None:
                        parameter.grad.mul_(float(1.0 / count))
            self._hooks.run(dict(self.trained()))
            if self.strategy.statistics == "replica":
                take_from_first_replica(self._statistics, self.place)
        self._latest = weakref.ref(stash)
        return total, stash

    def _over_replicas(self, sums: torch.Tensor) -> torch.Tensor:
        """Returns the mean over the replicas of a pipeline of what each has, summed over pipelines."""
        sums = sums.double() if self.place.device.type == "cpu" else sums.float()
        last = self._pipeline.stages[-1]
        sums /= last.data_degree * last.axis("context") * last.axis("tensor")
        dist.all_reduce(sums)
        return sums

    @property
    def _gathers(self) -> bool:
        """True where replicas compute the loss of the whole batch."""
        return self.strategy.couple == "gather" and self.place.data_degree > 1

    @property
    def _counts(self) -> str | None:
        """The count that weights losses in place of samples; None: samples do."""
        return None if self._reduction in (MEAN, SUM) else self._reduction

    def train(self, mode: bool = True) -> StrategyModel:
        """Sets the mode of all modules; a pipeline records its forward again for it."""
        for module in (self.meta_model, *self._roots):
            module.train(mode)
        self.training = mode
        return self

    def _train(self, args: Any, kwargs: Any, target: Any) -> tuple[Any, torch.Tensor, Stash]:
        check_inputs((args, kwargs))
        _, passes = self._called(args, kwargs, target)
        made: list[Callable[[torch.Tensor], Any]] = []

        def loss(output: Any, part: Batch) -> torch.Tensor:
            made[:] = [self._output_like(output)]
            target = part.get(TARGET)
            if self._gathers and self._loss is not None:
                output, target = gather_output((output, target), passes[0].samples, self.place)
            return self._loss_of(output, target)

        value, stash = self._run(passes, loss)
        if not made:  # another process has the last stage
            made.append(self._output_like(self.runner.recorded(passes)[1].captured.output))  # type: ignore[union-attr]
        return made[0], value, stash

    def _output_like(self, output: Any) -> Callable[[torch.Tensor], Any]:
        """Returns a function from the loss to the model's output; keeps no logits, which take memory in the backward."""
        register_dataclasses(output)
        return with_loss(output) if self._loss is None else lambda total: total

    def _evaluate(self, args: Any, kwargs: Any, target: Any) -> Any:
        batch, passes = self._called(args, kwargs, target)
        replicas = [
            self._share(batch, replica, number=number)
            for number, pipeline in enumerate(self.strategy.pipelines)
            for replica in range(pipeline.data_degree)
        ]
        own, together = (self.place.number, self.place.replica), self._pipeline.data_degree // self.place.data_degree
        with torch.no_grad(), step_stream(self.random_state, self.place):
            outputs = self.runner.evaluate(passes)
            register_dataclasses(outputs)
            each = list(zip(outputs or (), passes, strict=outputs is not None))
            if outputs is not None and self._gathers and self._loss is not None:
                outputs = [(gather_output(output, one.samples, self.place), n) for (output, n), one in each]
            if outputs is not None and self._loss is not None and (target is not None or not takes_target(self._loss)):
                outputs = [self._loss_and_count(output, one) for (output, _), (_, one) in zip(outputs, each, strict=True)]
        for module in {id(m): m for root in self._roots for m in root.modules() if isinstance(m, FSDPModule)}.values():
            module.reshard()  # without a backward nothing else does
        if outputs is not None and together > 1:
            outputs = [
                (map_rows(output, one.samples, partial(_chunk, parts=together, number=n)), count / together)
                for n in range(together)
                for (output, count), one in zip(outputs, passes, strict=True)
            ]
        again = self.place.index["tensor"] or self.place.column % self.place.context  # another process has the same
        mine = (
            {} if outputs is None or again else {own: [(output, count / self.place.data_degree) for output, count in outputs]}
        )
        gathered = gather_values(mine, self.place.device, everywhere=True)
        alone = self.batching.share == "replica" or (self._gathers and self._loss is None)
        wanted = [self.place.replica] if alone else [*range(len(replicas))]
        parts = [output for made in (gathered.values() if len(wanted) > 1 else [gathered[own]]) for output in made]
        sizes = [size for replica in wanted for size in replicas[replica].sizes]
        strange = strange_in(parts[0][0])
        if strange is not None and len(parts) > 1:
            raise InputError(
                f"the model returns a {type(strange).__name__}, whose parts of a batch cannot be joined; return a tuple, a "
                "dict or a dataclass"
            )
        lists = (isinstance(output, list) and len(output) == size for (output, _), size in zip(parts, sizes, strict=True))
        if self.batching.items and all(lists):
            return [item for output, _ in parts for item in output]  # one a sample, such as the boxes of an image
        spec = pytree.tree_structure(parts[0][0])
        if not any(count for _, count in parts):  # no loss, as without labels
            parts = [(output, size) for (output, _), size in zip(parts, sizes, strict=True)]
        counted = sum(count for _, count in parts)
        weights = [1.0 if self._reduction == SUM else count / counted for _, count in parts]
        joined = join_leaves([pytree.tree_leaves(output) for output, _ in parts], sizes, weights)
        return pytree.tree_unflatten(joined, spec)

    def _loss_and_count(self, output: Any, one: Pass) -> tuple[torch.Tensor, float]:
        with one.counting() as targets:
            value = self._loss_of(output, one.part.get(TARGET))
        return value, float(one.counted(targets, self.ranks.device))

    def _called(self, args: Any, kwargs: Any, target: Any) -> tuple[Batch, list[Pass]]:
        """Returns all arguments of a call by name, and this replica's micro-batches of them."""
        inputs = keyword_inputs(self.meta_model, args) | dict(kwargs)
        self._reduction = self.batching.reduction
        if inputs.get(COUNT) is not None:
            inputs[COUNT], names = torch.as_tensor(inputs[COUNT]), frozenset(inputs)
            if names not in self._divides:
                self._divides[names] = self._reduction == SUM or reads(self.meta_model, inputs, COUNT)
            self._reduction = SUM if self._divides[names] else self._reduction
        batch = inputs if target is None else {**inputs, TARGET: target}
        return batch, self._passes(batch, inputs)

    def _share(self, batch: Batch, replica: int, degree: int | None = None, *, number: int) -> Share:
        samples, owners = samples_of(dict(batch), self.batching.items), len(self.ranks.replicas)
        samples *= owners if self.batching.share == "replica" else 1
        return share_of(self.strategy, replica, samples, degree, number=number)

    def _passes(self, batch: Batch, names: Any) -> list[Pass]:
        """Returns this replica's micro-batches of a batch, on its device."""
        share = self._share(batch, self.place.replica, self.place.data_degree, number=self.place.number)
        if self._reduction == SUM:
            share = replace(share, weights=(float(self.place.columns),) * len(share.sizes))
        elif self._counts is not None:  # of one count; the step divides by the sum of all
            share = replace(share, weights=(self._pipeline.data_degree / share.joined / share.whole,) * len(share.sizes))
        if self.batching.share == "replica":
            share = replace(share, first=0, whole=share.samples)
        return passes_of(batch, share, names, self.batching.whole, self.ranks.device, self._counts, self.batching.items)

    def _loss_of(self, output: Any, target: Any) -> torch.Tensor:
        if self._loss is None:
            return loss_of(output, None)
        return self._loss(output) if target is None else self._loss(output, target)  # type: ignore[call-arg]

    def trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that this rank trains, each with the first of its names in the model."""
        for name, parameter in self.named_parameters():
            yield next((names[0] for names in self._tied if name in names), name), parameter

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields the modules of this rank, whose parameters are DTensors where they are sharded, under the model's names."""
        for body in self._bodies.values():
            yield from body.named_modules(memo, prefix, remove_duplicate)

    def state_dict(  # type: ignore[override]
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Returns this rank's parameters and buffers, under the names that they have in the model."""
        own = {name: value for body in self._bodies.values() for name, value in body.state_dict().items()}
        own |= {name: seen(parameter).detach() for name, parameter in self.named_parameters() if name in self._tables}
        for names in self._tied:
            held = next((name for name in names if name in own), None)
            own |= {} if held is None else {name: own[held] for name in names}
        destination = {} if destination is None else destination  # of a module around this one
        destination.update({f"{prefix}{name}": value for name, value in own.items()})
        return destination

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:  # type: ignore[override]
        """Overwrites this rank's tensors by name; values are whole, or cut as its own are.

        Raises:
            InputError: With `strict`, one is missing.
        """
        for name, own in self.state_dict().items():
            value = state_dict.get(name)
            if value is None and strict and isinstance(own, torch.Tensor):
                raise InputError(f"load_state_dict: there is no {name}; give all tensors of this rank, or strict=False")
            if not isinstance(own, torch.Tensor) or value is None or value is own:
                continue
            if isinstance(own, DTensor):
                part = value if isinstance(value, DTensor) else own_part(value, own)
                own, value = own.to_local(), part.to_local()
            own.copy_(value)
        held = dict(self.named_parameters())
        for names in self._tied:  # copies of one parameter in several stages of this process follow
            copies = [held[name] for name in names if name in held]
            for copied in copies[1:]:
                copied.copy_(copies[0])

    def _holders(self, name: str, parameter: nn.Parameter) -> int:
        if name in self._tables:
            return 1
        copies = {} if self._sums is None else self._sums.copies()
        processes = self.place.mesh.size() // self.place.mesh["pipeline"].size()
        return copies.get(parameter, 1) * processes // next((n for path, n in self._spread.items() if lies_in(name, path)), 1)


def keyword_inputs(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Returns example inputs under the names that the model's forward gives them.

    Raises:
        InputError: It has no names for them.
    """
    if isinstance(inputs, Mapping):
        return dict(inputs)
    signature = inspect.signature(model.forward)
    strange = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
    names = [name for name, parameter in signature.parameters.items() if parameter.kind not in strange]
    if len(names) < len(inputs):
        raise InputError(
            f"a strategy is run with keyword inputs, but forward{signature} names {len(names)} of its {len(inputs)} inputs"
        )
    return dict(zip(names, inputs, strict=False))


def _chunk(leaf: torch.Tensor, parts: int, number: int) -> torch.Tensor:
    """Returns one of so many equal parts of the rows."""
    return leaf.chunk(parts)[number]
