"""Steps of a pipeline by `torch.distributed.pipelining`: a process's stages, and the schedule that drives them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed import pipelining
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import RESHARD, UNSHARD, PipelineScheduleSingle

from rlplace.errors import InputError
from rlplace.model.torch_adapter import pytree
from rlplace.plan.actions import check_chain
from rlplace.plan.schedule import LOOPED_BFS, PLAINEST, SCHEDULES
from rlplace.plan.strategy import Pipeline
from rlplace.runtime.base import activity
from rlplace.runtime.base.batches import Batch, Pass, autocast_state, cast, counting_alone, signature_of
from rlplace.runtime.strategy.buffers import Loss, Region, StepBuffers, check_same_writes, forward_autocast
from rlplace.runtime.strategy.capture import UnitGraph
from rlplace.runtime.strategy.cut import StageGraph
from rlplace.runtime.strategy.mesh import MeshPlace
from rlplace.runtime.torch_adapter import joined_parameter_groups


class Recorded(NamedTuple):
    """The stages for inputs of one signature."""

    captured: UnitGraph  # the forward
    stages: Sequence[StageGraph]  # the stages of its cut
    bodies: dict[int, fx.GraphModule]  # by number, the modules of this process's stages


class StageModule(nn.Module):
    """The module of torch's stage.

    Torch splits and sends tensors only; so each process has all micro-batches, and `at` says which one is to run.

    Attributes:
        body: The stage's graph of the model's own modules.
        at: Number of the micro-batch that runs.
        run: Called with its number and the tensors of the stage before.
    """

    run: Callable[[int, tuple[torch.Tensor, ...]], Any]

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.at = body, 0

    def forward(self, *taken: torch.Tensor) -> Any:
        """Returns the tensors for the next stage; on the last stage the weighted loss, in one dimension."""
        return self.run(self.at, taken)


class _Sent(torch.autograd.Function):
    """The tensor that a stage sends: it shares the storage of a value and can be detached in place.

    A split backward detaches what was sent before it computes the gradients of weights, which may need the value, and it has no
    gradients for weights behind values without inputs: those get an input as `anchor`.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor | None) -> torch.Tensor:
        return value.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient, None


_sent: Callable[..., torch.Tensor] = _Sent.apply


def _stands_alone(value: torch.Tensor, taken: Sequence[torch.Tensor]) -> bool:
    """Returns whether a gradient flows back from a value, and to nothing that was taken."""
    nodes, seen = [value.grad_fn], set[Any]()
    while nodes:
        node = nodes.pop()
        if any(getattr(node, "variable", None) is leaf for leaf in taken):
            return False
        if node is not None and node not in seen:
            seen.add(node)
            nodes.extend(before for before, _ in node.next_functions)
    return value.grad_fn is not None


class _TorchStage(pipelining.PipelineStage):
    """A stage that says which micro-batch runs, records when passes run, and sends contiguous gradients."""

    submod: StageModule

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.submod.at = fwd_chunk_id
        with activity.marked(f"stage {self.stage_index}"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with activity.marked(f"stage {self.stage_index}"):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with activity.marked(f"stage {self.stage_index}"):
            return super().backward_weight_one_chunk(*args, **kwargs)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        for op in ops:
            op.tensor = op.tensor.contiguous()
        return ops


class _UnlikeTorchStage(_TorchStage):
    """A stage whose neighbours have other meshes: it exchanges rows with every process that has some of its own.

    Torch's stage knows one process of each neighbour; its messages are sent in parts instead. Gradients are averaged over the
    replicas of a stage, so those of a stage with fewer replicas are scaled by the ratio.
    """

    def connect(self, pipeline: Pipeline, place: MeshPlace) -> None:
        """Sets its neighbours among stages that have no process group in common."""
        self.group, self.group_rank, self.group_size = None, place.index["pipeline"], len(pipeline.device_sets)
        self.stage_index_to_group_rank = {number: number % self.group_size for number in range(self.num_stages)}
        degrees, own = [stage.data_degree for stage in pipeline.stages], self.stage_index
        self.scale = degrees[own - 1] / degrees[own]
        self.peers = {
            (other, sends): place.peers(pipeline, own, other, sends=sends)
            for other in (own - 1, own + 1)
            if 0 <= other < self.num_stages
            for sends in (False, True)
        }

    def _parts(self, ops: list[dist.P2POp], other: int, sends: bool) -> list[dist.P2POp]:
        peers = self.peers.get((other, sends), ())
        return [dist.P2POp(op.op, peer.part(op.tensor), peer.rank) for op in ops for peer in peers]

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._parts(super().get_fwd_recv_ops(fwd_chunk_id), self.stage_index - 1, False)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._parts(super().get_fwd_send_ops(fwd_chunk_id), self.stage_index + 1, True)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._parts(super().get_bwd_recv_ops(bwd_chunk_id), self.stage_index + 1, False)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        for op in ops:
            op.tensor = op.tensor * self.scale
        return self._parts(ops, self.stage_index - 1, True)

    def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)  # torch's vote for the given shapes, which pairs of processes hold

    def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []


class PipelineRun:
    """The stages of this process under torch's schedule.

    A forward is recorded, and a schedule made, for every signature of micro-batches that comes.

    Args:
        pipeline: The pipeline of the strategy.
        place: Coordinates of this process.
        roots: Stage modules by number, with torch's wrappers on.
        record: Records the forward for keyword inputs, in the mode and under the autocast of the moment.
        first: Inputs that it was recorded for, and that record.
        dtype: Dtype of floating-point inputs, as `fully_shard` casts those of a whole model.
        by_replica: See `StepBuffers`.
    """

    keeps_gradients = False

    def __init__(
        self,
        pipeline: Pipeline,
        place: MeshPlace,
        roots: dict[int, StageModule],
        record: Callable[[Batch], Recorded],
        first: tuple[Batch, Recorded],
        dtype: torch.dtype | None = None,
        *,
        by_replica: bool = False,
    ) -> None:
        self._pipeline, self._place, self._roots, self._record = pipeline, place, roots, record
        self._recorded: dict[Any, Recorded] = {self._key(signature_of(dict(first[0]))): first[1]}
        self._schedules: dict[Any, Any] = {}
        self._dtype, self._first_step = dtype, True
        self._buffers = {number: StepBuffers([body], by_replica=by_replica) for number, body in first[1].bodies.items()}

    def recorded(self, passes: Sequence[Pass]) -> tuple[Any, Recorded]:
        """Returns the stages for these micro-batches, and their key.

        Raises:
            InputError: The micro-batches are unlike.
        """
        kinds = [signature_of(one.inputs) for one in passes]
        other = next((kind for kind in kinds if kind != kinds[0]), None)
        if other is not None:
            raise InputError(
                f"native: a micro-batch of {other[1]} beside one of {kinds[0][1]}; those of a step in a pipeline are alike: "
                "pad to one shape"
            )
        key = self._key(kinds[0])
        if key not in self._recorded:
            self._recorded[key] = self._record(passes[0].inputs)
        return key, self._recorded[key]

    def _key(self, kind: Any) -> Any:
        parts = self._place.context > 1 and torch.is_grad_enabled()
        return kind, next(iter(self._roots.values())).training, parts, autocast_state()

    def step(self, passes: Sequence[Pass], loss: Loss) -> torch.Tensor:
        """Runs forward and backward of all micro-batches.

        Returns:
            float [2], the weighted sum of their losses, and the sum of the weights; zeros without the last stage.
        """
        key, recorded = self.recorded(passes)
        if (key, len(passes)) not in self._schedules:
            self._schedules[key, len(passes)] = self._schedule(recorded, len(passes), passes[0].samples)
        losses, weights = list[torch.Tensor](), list[torch.Tensor]()
        target = torch.arange(len(passes))
        joined = joined_parameter_groups()
        with forward_autocast(self._place.device) as region, joined, self._running(recorded, passes, loss, region, weights):
            for buffers in self._buffers.values():
                buffers.begin()
            self._gather()
            self._schedules[key, len(passes)].step(target=target, losses=losses, return_outputs=False)
            for buffers in self._buffers.values():
                buffers.end()
        if self._first_step:
            check_same_writes(self._buffers.values())
            self._first_step = False
        total = torch.stack(losses).detach().sum() if losses else torch.zeros((), device=self._place.device)
        return torch.stack([total, torch.stack(weights).sum() if weights else torch.zeros_like(total)])

    def _gather(self) -> None:
        """Begins to gather the parameters of all stages of this process, which are there until their gradients are reduced."""
        for module in chain(*(root.modules() for _, root in sorted(self._roots.items()))):
            if isinstance(module, FSDPModule):
                module.unshard(async_op=True)

    def evaluate(self, passes: Sequence[Pass]) -> list[tuple[Any, float]] | None:
        """Returns output and weight of every micro-batch on the process of the last stage; None elsewhere."""
        _, recorded = self.recorded(passes)
        group = None if self._pipeline.unlike_meshes else self._place.mesh["pipeline"].get_group()
        outputs, weights, last = list[Any](), list[torch.Tensor](), len(recorded.stages) - 1
        with self._running(recorded, passes, None, contextlib.nullcontext, weights):
            for at in range(len(passes)):
                values = self._pass(recorded, at, group)
                if last in self._roots:
                    outputs.append((pytree.tree_unflatten(values, recorded.captured.out_spec), float(weights[-1])))
        return outputs if last in self._roots else None

    def _pass(self, recorded: Recorded, at: int, group: Any) -> tuple[torch.Tensor, ...]:
        """Runs the forward of one micro-batch through the stages of this process; returns the last one's tensors."""
        values: tuple[torch.Tensor, ...] = ()
        for number, root in sorted(self._roots.items()):
            if number and number - 1 not in self._roots:
                taken = recorded.stages[number].taken
                values = tuple(torch.empty(v.shape, dtype=v.dtype, device=self._place.device) for v in taken)
                for peer in self._place.peers(self._pipeline, number, number - 1, sends=False):
                    for value in values:
                        dist.recv(peer.part(value), peer.rank, group=group)
            root.at = at
            values = root(*values)
            if number + 1 < len(recorded.stages) and number + 1 not in self._roots:
                for peer in self._place.peers(self._pipeline, number, number + 1, sends=True):
                    for value in values:
                        dist.send(peer.part(value), peer.rank, group=group)
        return values

    @contextlib.contextmanager
    def _running(
        self, recorded: Recorded, passes: Sequence[Pass], loss: Loss | None, region: Region, weights: list[torch.Tensor]
    ) -> Iterator[None]:
        """Lets stages run these micro-batches inside, forwards in `region`; without a loss the last one makes flat outputs.

        The last stage appends the weight of each pass to `weights`.
        """
        leaves = [pytree.tree_leaves(cast(one.inputs, self._dtype)) for one in passes]

        def run(number: int, at: int, taken: tuple[torch.Tensor, ...]) -> Any:
            one, stage, buffers = passes[at], recorded.stages[number], self._buffers[number]
            if loss is not None:
                buffers.begin_pass()
            value = None
            with region(), one.counting() as targets:
                values = recorded.bodies[number](*taken, *(leaves[at][position] for position in stage.inputs))
                if not stage.given and loss is not None:
                    with counting_alone(targets):
                        value = loss(pytree.tree_unflatten(values, recorded.captured.out_spec), one.part)
            if loss is not None:
                buffers.end_pass()
            if not stage.given:
                weights.append(one.counted(targets, self._place.device, trains=loss is not None))
                return values if value is None else value.reshape(1).to(weights[-1]) * weights[-1]
            if targets is not None and float(targets.count):
                raise InputError(
                    f"native: stage {number} of {len(recorded.stages)} computes a cross-entropy, and targets are counted on "
                    "the last; cut elsewhere, or plan with pipeline=1"
                )
            trained = [value for value in taken if value.requires_grad]
            anchors = (trained[0] if trained and _stands_alone(value, trained) else None for value in values)
            return tuple(_sent(value.contiguous(), anchor) for value, anchor in zip(values, anchors, strict=True))

        for number, root in self._roots.items():
            root.body, root.run = recorded.bodies[number], partial(run, number)
        yield
        for root in self._roots.values():
            del root.run  # and with it what the step had

    def _schedule(self, recorded: Recorded, microbatches: int, samples: int) -> Any:
        """Returns torch's schedule; it gets shapes, or else would run a forward and a backward of its own to find them."""
        made, schedule = [], SCHEDULES[self._name(microbatches)]
        for number, root in self._roots.items():
            cut = recorded.stages[number]
            if schedule.splits_backward and number and not any(value.requires_grad for value in cut.taken):
                raise InputError(
                    f"native: no gradient flows back from stage {number}, and torch then makes none of its weights in a split "
                    f"backward; take a schedule that does not split it, such as {LOOPED_BFS}"
                )
            degrees = {stage.data_degree for stage in self._pipeline.stages[max(number - 1, 0) : number + 2]}
            shapes = [tuple(value.shape) for value in (*cut.taken, *cut.given)]
            if strange := [shape for shape in shapes if len(degrees) > 1 and shape[:1] != (samples,)]:
                raise InputError(
                    f"native: a value of shape {strange[0]} crosses between stages of unlike degrees and has not the {samples} "
                    "samples first; give these stages one degree, or cut elsewhere"
                )
            loss = torch.empty(1, dtype=torch.float64, device="meta", requires_grad=True)
            stage = (_UnlikeTorchStage if self._pipeline.unlike_meshes else _TorchStage)(
                root,
                number,
                len(recorded.stages),
                self._place.device,
                input_args=cut.taken,
                output_args=cut.given or (loss,),
                group=self._place.mesh["pipeline"].get_group(),
            )
            if isinstance(stage, _UnlikeTorchStage):
                stage.connect(self._pipeline, self._place)
            made.append(stage)
        kind = getattr(pipelining, schedule.torch_class)
        single = issubclass(kind, PipelineScheduleSingle)
        # The last stage returns the loss itself.
        stages = made[0] if single else made
        runs = kind(stages, microbatches, loss_fn=lambda loss, target: loss.sum(), scale_grads=False)
        if not single:
            send_at_once(runs)
            keep_gathered(runs)
        return runs

    def _name(self, microbatches: int) -> str:
        """Returns the strategy's schedule, or for fewer micro-batches than it can run the plainest of its layout."""
        name = self._pipeline.schedule or ""
        with contextlib.suppress(InputError):
            check_chain(name, [stage.devices for stage in self._pipeline.stages], microbatches, "")
            return name
        return PLAINEST[SCHEDULES[name].layout]


def send_at_once(schedule: Any) -> None:
    """Takes pairs of a forward and a backward apart: torch runs their parts in turn, but sends what either made after both."""
    order = {
        rank: [part for action in actions for part in ((action and action.sub_actions) or (action,))]
        for rank, actions in schedule.pipeline_order.items()
    }
    if order != schedule.pipeline_order:
        schedule._prepare_schedule_with_comms(order)


def keep_gathered(schedule: Any) -> None:
    """Leaves gathering to `PipelineRun`: torch has parameters of three stages at a time, and gathers others again (#193972)."""
    schedule.register_custom_function(UNSHARD, lambda action, _: schedule.unsharded_stages.add(action.stage_index))
    schedule.register_custom_function(RESHARD, lambda *_: None)
