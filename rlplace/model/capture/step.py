"""One training step of a fake copy of a model under a recorder: forward, loss and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlplace.errors import InputError
from rlplace.model.capture import layers
from rlplace.model.capture.export import quiet_logs
from rlplace.model.capture.fake import any_dtype_grouped_mm, autocast_region, fake_copy, fake_inputs, new_fake_mode
from rlplace.model.capture.masks import masks_of_runs
from rlplace.model.capture.optimizers import OPTIMIZERS, apart
from rlplace.model.capture.outputs import WHERE, add_losses, is_losses, no_loss, own_loss
from rlplace.model.capture.record import LOSS_LABEL, Leaf, Recording, StepRecorder
from rlplace.model.capture.trace import EagerRecorder, trace_eager, trace_export
from rlplace.model.graph.opgraph import Parameter
from rlplace.model.torch_adapter import run_backward
from rlplace.text import either

Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class TrainingStep:
    """A step that is to be captured; fields as in `rlplace.model.capture.capture.capture`."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Loss | None
    optimizer: str
    dtype: torch.dtype | None
    autocast: torch.dtype | None
    autocast_device: str
    master_weights: bool


def record(method: str, step: TrainingStep, equal_known: bool) -> tuple[Recording, Mapping[str, int]]:
    """Records a step by one method.

    Args:
        method: "export", "dispatch" or "module".
        step: The step.
        equal_known: The layers of the model are known to be equal where they look equal; this is not checked then.

    Returns:
        The recording, exported from a few of the model's equal layers where they are equal; and guessed values by op.
    """
    if method != "export":
        recorder = EagerRecorder(by_module=method == "module")
        try:
            return run(step, recorder), recorder.guesses
        except Exception:
            if not recorder.guesses:
                raise
        recorder = EagerRecorder(by_module=True, truth=False)  # take the opposite branch of a guessed condition
        return run(step, recorder), recorder.guesses
    lists = layers.repeated_lists(step.model)
    if lists:
        with contextlib.suppress(Exception):  # the short model is not the user's: whatever it raises, the whole one decides
            if not equal_known:
                short = layers.unroll(run(step, layers.ForwardRecorder(), lists), lists)
                layers.check_equal(short, run(step, layers.ForwardRecorder()))
            return layers.unroll(run(step, StepRecorder(), lists), lists), {}
    return run(step, StepRecorder()), {}


def run(step: TrainingStep, recorder: StepRecorder, lists: Iterable[str] = ()) -> Recording:
    """Runs the step of a fake copy, with these lists shortened, under the recorder; a `ForwardRecorder` stops at the loss."""
    mode = new_fake_mode()
    fake = fake_copy(layers.shortened(step.model, lists), mode, step.dtype)
    fake_args, fake_kwargs = fake_inputs((step.args, step.kwargs), mode, step.dtype)
    tensors = _state(fake)
    for index, (tensor, _, _) in enumerate(tensors):
        recorder.parameter_of_storage[recorder.storage(tensor)] = index
    recorder.storages_of((fake_args, fake_kwargs))  # inputs are numbered after the state, before all that the step makes
    num_external = len(recorder.storages)
    region = contextlib.ExitStack()

    def finish(output: Any) -> None:
        value = loss_of_output(output, step.loss, recorder)
        region.close()  # the backward runs outside of autocast
        if not isinstance(recorder, layers.ForwardRecorder):
            run_backward(value)

    nodes: frozenset[str] = frozenset()
    masks = masks_of_runs(fake, fake_args, fake_kwargs)
    with mode, any_dtype_grouped_mm(), masks, torch.enable_grad(), quiet_logs(), region:
        region.enter_context(autocast_region(step.autocast, step.autocast_device))
        if isinstance(recorder, EagerRecorder):
            trace_eager(fake, fake_args, fake_kwargs, recorder, finish)
        else:
            nodes = trace_export(fake, fake_args, fake_kwargs, recorder, finish)
    leaves = _leaves(tensors, recorder, step)
    return Recording(recorder.labels, recorder.events, recorder.storages, leaves, num_external, nodes)


def _state(fake: nn.Module) -> list[tuple[torch.Tensor, list[str], bool]]:
    """Returns parameters and buffers as (tensor, names, is buffer); names of one storage belong together."""
    by_storage: dict[int, tuple[torch.Tensor, list[str], bool]] = {}
    for is_buffer, items in (
        (False, fake.named_parameters(remove_duplicate=False)),
        (True, fake.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in items:
            key = tensor.untyped_storage()._cdata
            if key in by_storage:
                by_storage[key][1].append(name)
            else:
                by_storage[key] = (tensor, [name], is_buffer)
    return list(by_storage.values())


def _leaves(tensors: list[tuple[torch.Tensor, list[str], bool]], recorder: StepRecorder, step: TrainingStep) -> list[Leaf]:
    known, leaves = apart(step.model, step.optimizer), []
    for tensor, names, is_buffer in tensors:
        size = tensor.numel() * tensor.element_size()
        gradient, rule = None if is_buffer else tensor.grad, OPTIMIZERS[step.optimizer].of(names[0] in known)
        sparse = gradient is not None and gradient.layout != torch.strided
        if sparse and not rule.sparse:
            raise InputError(
                f"optimizer {step.optimizer}: the gradient of {names[0]} is sparse, which it was not compared with; take "
                f"{either(name for name, one in OPTIMIZERS.items() if one.sparse)}, or build the table with sparse=False"
            )
        state = 0 if gradient is None else rule.state_bytes(tensor.shape, tensor.element_size(), step.master_weights)
        record = Parameter(
            name=names[0],
            aliases=tuple(names[1:]),
            shape=tuple(int(s) for s in tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            size_bytes=size,
            trainable=gradient is not None,
            gradient_bytes=0 if gradient is None or sparse else size,
            optimizer_bytes=state,
            is_buffer=is_buffer,
        )
        idle = not is_buffer and tensor.requires_grad and gradient is None
        leaves.append(Leaf(record, recorder.storage(tensor), None if gradient is None else recorder.storage(gradient), idle))
    return leaves


def loss_of_output(output: Any, loss: Callable[[Any], torch.Tensor] | None, recorder: StepRecorder) -> torch.Tensor:
    """Returns the scalar to differentiate.

    Args:
        output: Of the model.
        loss: Function of it; None: it has a loss, or is one.
        recorder: Records the function as an op of its own.

    Raises:
        InputError: There is none, or it depends on no parameter.
    """
    if loss is not None or is_losses(output):
        with recorder.label(LOSS_LABEL, "loss", "") as label:
            label.parts = []
            value: Any = (loss or add_losses)(output)
        origin = "loss(output)"
    else:
        value, origin = own_loss(output), "the model's output" if isinstance(output, torch.Tensor) else "output.loss"
        if value is None:
            raise InputError(no_loss(output))
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise InputError(f"no loss: {origin} is {what}, expected a scalar tensor; give loss=a function of the output, {WHERE}")
    if not value.requires_grad:
        raise InputError(f"no gradient: {origin} does not depend on any trainable parameter; unfreeze one")
    return value
