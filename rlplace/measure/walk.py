"""One real training step with a mark at every op: the exported forward node by node, autograd node by node, the optimizer.

Ops have the names of the captured op graph, so that each time can be put beside what the graph knows of the op.

Marks on the time line of a device: each mark ends the interval of what ran before and begins that of its own key.

Every moment of a step so belongs to some key, and the times of all keys add up to the step. On a processor that does the work
itself a mark is a clock reading, see `own_clock`. On an accelerator it is an event in the stream; work is queued behind a
sleeping kernel, so that the device never waits for the host and the intervals are device time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from rlplace.errors import CaptureError, InputError
from rlplace.model.capture.export import export_training_graph, flatten_inputs
from rlplace.model.capture.inputs import split_inputs
from rlplace.model.capture.optimizers import apart
from rlplace.model.capture.record import LOSS_LABEL
from rlplace.model.torch_adapter import pytree, sequence_number, sleep_on_gpu
from rlplace.runtime.base.environment import own_clock, read_clock
from rlplace.runtime.base.optimizers import optimizer_of_groups
from rlplace.runtime.base.steps import loss_of

Key = Hashable

_QUEUED_MARKS = 100  # the launch queue holds about 1,000 entries; a mark stands for an event and a few kernels
_CLOCK_HZ = 2e9  # of a sleeping kernel; slower clocks sleep longer
_LEAST_SLEEP_S, _SLEEP_FACTOR, _MOST_SLEEP_S = 0.01, 1.5, 0.2  # longer than the host took to issue as much, the step before
_PAUSE = ("rlplace", "pause")


class Marks:
    """Marks by the host's clock, and on a CUDA device by events in its current stream.

    Attributes:
        device: The device.
        clock: The host's, seconds; default `own_clock`.
        keys: Of the marks so far.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] | None = None) -> None:
        self.device = device
        self.clock = clock or own_clock(device)
        self.keys: list[Key] = []
        self._cuda = device.type == "cuda"
        self._times: list[float] = []
        self._events: list[Any] = []
        self._spare: list[Any] = []
        self._queued = 0
        self._issuing_s, self._longest_s, self._sleep_s = 0.0, 0.0, _LEAST_SLEEP_S

    def mark(self, key: Key) -> None:
        """Begins the interval of `key`; now and then lets a GPU drain and sleep first, which belongs to no key."""
        if self._cuda and (self._queued >= _QUEUED_MARKS or not self._events):
            if self._events:
                self._note(_PAUSE)
                self._longest_s = max(self._longest_s, self._times[-1] - self._issuing_s)
            read_clock(self.device)
            with torch.cuda.device(self.device):
                sleep_on_gpu(int(self._sleep_s * _CLOCK_HZ))
            self._queued, self._issuing_s = 0, self.clock()
        self._note(key)

    def _note(self, key: Key) -> None:
        if self._cuda:
            event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self._events.append(event)
            self._queued += 1
        self.keys.append(key)
        self._times.append(self.clock())

    def finish(self) -> tuple[dict[Key, float], dict[Key, float] | None]:
        """Ends the last interval, waits for the device and forgets all marks.

        Returns:
            Device seconds by key, and the host's seconds to issue each; None where the host does the work itself.
        """
        self._note(None)
        self._longest_s = max(self._longest_s, self._times[-1] - self._issuing_s)
        self._sleep_s = min(max(_LEAST_SLEEP_S, _SLEEP_FACTOR * self._longest_s), _MOST_SLEEP_S)
        read_clock(self.device)
        sums = [_sums(self.keys, self._times)]
        if self._cuda:
            gaps = (before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(self._events))
            sums.insert(0, _sums(self.keys, list(itertools.accumulate(gaps, initial=0.0))))
        self._spare += self._events
        self.keys, self._times, self._events, self._queued, self._longest_s = [], [], [], 0, 0.0
        for seconds in sums:
            seconds.pop(_PAUSE, None)
        return sums[0], sums[1] if self._cuda else None

    def cost_s(self) -> float:
        """Times a mark on the host's clock, which the interval that it ends includes; 0 for events, free on the device."""
        if self._cuda:
            return 0.0
        count = 2000
        for _ in range(count):
            self.mark("cost")
        return self.finish()[0]["cost"] / count


def _sums(keys: Sequence[Key], times: Sequence[float]) -> dict[Key, float]:
    sums: dict[Key, float] = {}
    for key, (begin, end) in zip(keys, itertools.pairwise(times), strict=False):
        sums[key] = sums.get(key, 0.0) + (end - begin)
    return sums


_RATE = 1e-6
"""Keeps random weights random."""


class StepWalk(fx.Interpreter):
    """A module's training steps with marks.

    Args:
        module: Real module on its device.
        inputs: Inputs on the same device, dict or tuple.
        loss: As for `rlplace.capture`.
        optimizer: Name in `rlplace.model.capture.optimizers.OPTIMIZERS`.
        marks: Where the marks go.

    Attributes:
        optimizer: The real one. On a processor it updates parameters one after the other, so a group for each shape changes
            nothing and lets shapes be timed; elsewhere it has a single group.
        group_of: Update op to its group.

    Raises:
        CaptureError: The module cannot be exported.
    """

    def __init__(
        self, module: nn.Module, inputs: Any, loss: Callable[[Any], Tensor] | None, optimizer: str, marks: Marks
    ) -> None:
        args, kwargs = split_inputs(inputs)
        try:
            exported = export_training_graph(module, args, kwargs)
        except Exception as error:
            text = " ".join(str(error).split())[:200]
            raise CaptureError(f"cannot time single ops of {type(module).__name__}: it cannot be exported: {text}") from error
        super().__init__(exported.module)
        self._op_name_of_node, self._out_spec = exported.op_name_of_node, exported.program.call_spec.out_spec
        self.leaves = flatten_inputs(args, kwargs)
        self.loss, self.marks = loss, marks
        self.parameters = trainable(module)
        self._update_of = {id(parameter): f"{name}/update" for name, parameter in self.parameters.items()}
        self.optimizer, self.group_of = make_optimizer(optimizer, self.parameters, module)
        self._owner_of_sequence: dict[int, str] = {}
        self.mark_cost_s = marks.cost_s()

    def step(self) -> tuple[dict[Any, float], dict[Any, float] | None]:
        """Returns one step.

        Returns:
            Seconds by op name, None for what belongs to no op; and the host's issue seconds likewise, None on a processor.
        """
        marks = self.marks
        marks.mark(None)
        self.optimizer.zero_grad(set_to_none=True)
        self._owner_of_sequence = {}
        value = self._forward()
        handles = self._hook(value)
        marks.mark(None)
        value.backward()  # type: ignore[no-untyped-call]
        marks.mark(None)
        for handle in handles:
            handle.remove()
        del value
        self._update()
        return marks.finish()

    def _forward(self) -> Tensor:
        flat = self.run(*self.leaves, enable_io_processing=False)
        self.env = {}  # the output is not kept
        self.marks.mark(None)
        output = pytree.tree_unflatten(list(flat), self._out_spec)
        begin = sequence_number()
        if self.loss is not None:
            self.marks.mark(LOSS_LABEL)
        value = loss_of(output, self.loss)
        self.marks.mark(None)
        self._claim(begin, LOSS_LABEL)
        return value

    def run_node(self, n: fx.Node) -> Any:
        """Returns one node, with a mark before an op."""
        name = self._op_name_of_node.get(n.name)
        if name is None:
            return super().run_node(n)
        begin = sequence_number()
        self.marks.mark(name)
        out = super().run_node(n)
        self._claim(begin, name)
        return out

    def _claim(self, begin: int, name: str) -> None:
        """Gives the autograd nodes made since `begin` to an op."""
        for number in range(begin, sequence_number()):
            self._owner_of_sequence[number] = name

    def _hook(self, value: Tensor) -> list[Any]:
        """Returns a mark before every autograd node. Sums of gradients from several readers count for the node before them."""
        handles, seen, pending = [], set(), [value.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            pending += [following for following, _ in node.next_functions]
            if node.name().endswith("AccumulateGrad"):
                key = self._update_of.get(id(node.variable))  # type: ignore[attr-defined]
            else:
                owner = self._owner_of_sequence.get(node._sequence_nr())
                key = None if owner is None else f"{owner}.backward"
            handles.append(node.register_prehook(lambda gradients, key=key: self.marks.mark(key)))
        return handles

    def _update(self) -> None:
        """Runs the optimizer group by group on a processor, as a whole where it joins parameters into shared kernels."""
        groups = self.optimizer.param_groups
        try:
            for index, group in enumerate(groups):
                self.optimizer.param_groups = [group]
                self.marks.mark((UPDATE, index))
                self.optimizer.step()
            if self.marks.device.type == "cpu":
                self.optimizer.param_groups = [{**groups[0], "params": []}]
                self.marks.mark((UPDATE, None))
                self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        self.marks.mark(None)


UPDATE = "optimizer"
"""First part of the keys of updates; the second is the number of the group, or None for a step without parameters."""


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """Returns parameters that take a gradient, by name; a module without any is refused."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not parameters:
        raise InputError(f"{type(module).__name__} has no trainable parameter; unfreeze one")
    return dict(parameters)


def make_optimizer(
    name: str, parameters: Mapping[str, Tensor], module: nn.Module
) -> tuple[torch.optim.Optimizer, dict[str, int]]:
    """Returns the optimizer, with a group for each dtype and shape on a processor, and the group of each update op."""
    chosen = {id(parameters[known]) for known in apart(module, name) if known in parameters}
    groups: dict[Any, list[str]] = {}
    for parameter, tensor in parameters.items():
        alone = (tensor.dtype, tensor.shape, id(tensor) in chosen) if tensor.device.type == "cpu" else None
        groups.setdefault(alone, []).append(parameter)
    group_of = {f"{parameter}/update": index for index, group in enumerate(groups.values()) for parameter in group}
    listed = [{"params": [parameters[p] for p in group]} for group in groups.values()]
    return optimizer_of_groups(name, listed, chosen, _RATE), group_of
