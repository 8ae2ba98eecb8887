"""`capture`: one training step of a module as an `OpGraph`, without allocating its weights.

The module is copied onto fake CPU tensors and never touched. Three methods are tried in order:

* ``export``: the graph of `torch.export` (non-strict, training IR), interpreted once with backward. One forward op per node;
  the names carry a plan back to the module.
* ``dispatch``: the module runs eagerly; one forward op per ATen op.
* ``module``: the module runs eagerly; one forward op per call of a module without children. Values that the forward reads
  out of tensors are guessed.

The first that succeeds is used; ``capture["notes"]`` has the errors of the earlier ones.
"""

from __future__ import annotations

import inspect
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlplace.errors import CaptureError, InputError, show, unknown_name
from rlplace.files import without_collections
from rlplace.model.capture.inputs import describe_inputs, rows_of, split_inputs
from rlplace.model.capture.optimizers import OPTIMIZERS, apart
from rlplace.model.graph.opgraph import OpGraph

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rlplace.model.capture.record import Leaf
    from rlplace.model.capture.step import TrainingStep

METHODS = ("export", "dispatch", "module")

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}

Loss = Callable[[Any], "torch.Tensor"]


def capture(
    model: nn.Module,
    example_inputs: Mapping[str, Any] | tuple[Any, ...] | list[Any] | torch.Tensor,
    *,
    loss: Loss | None = None,
    optimizer: str = "adam",
    dtype: str | torch.dtype | None = None,
    autocast: str | torch.dtype | None = None,
    autocast_device: str = "cuda",
    master_weights: bool = False,
    method: str | None = None,
    name: str | None = None,
    source: Mapping[str, Any] | None = None,
    like: OpGraph | None = None,
) -> OpGraph:
    """Records one training step: forward, loss, backward and optimizer update.

    Args:
        model: Any module, with real weights or on the meta device, in the mode (`train()` or `eval()`) it trains in.
        example_inputs: Keyword inputs as a dict, positional inputs as a tuple or list (tensors may be nested), or one tensor.
            Only shapes and dtypes matter. The batch is the first dimension of the first tensor.
        loss: Called with the model's output, returns a scalar tensor. None: the output's `loss` (attribute or key), or the
            output itself if it is a scalar tensor.
        optimizer: "adam", "adamw" and others of `rlplace.model.capture.optimizers.OPTIMIZERS`. State has the dtype of its
            weight, as in torch.
        dtype: Floating-point weights and inputs are cast to it, for example ``"bf16"``; None leaves them.
        autocast: Forward and loss run under `torch.autocast` in this dtype, "bfloat16" or "float16": weights, gradients and
            optimizer state keep their dtype, matrix products cast what they read.
        autocast_device: Device whose list of ops autocast follows, "cuda" or "cpu".
        master_weights: The optimizer keeps a float32 copy of every weight, and its state in float32.
        method: "export", "dispatch" or "module" to allow only that one; None tries them in this order.
        name: Name of the graph; default the class name of the module.
        source: Origin of the graph, kept for later verbs; a description of the inputs is added as ``inputs``.
        like: A capture of the same model at another batch: its equal layers are not compared again where the ops come out the
            same.

    Returns:
        The graph; its `capture` states the method and has notes.

    Raises:
        InputError: An argument cannot be used, or there is no loss.
        CaptureError: No method could record the step; the message has the model's own error and where it was raised.
    """
    if optimizer not in OPTIMIZERS:
        raise unknown_name("optimizer", optimizer, OPTIMIZERS)
    if method is not None and method not in METHODS:
        raise unknown_name("capture method", method, METHODS)
    from torch import nn

    from rlplace.model.capture.fake import DEVICES
    from rlplace.model.capture.step import TrainingStep

    if not isinstance(model, nn.Module):
        raise InputError(f"model: expected a torch.nn.Module, found {show(model)}")
    if loss is not None and not callable(loss):
        raise InputError(f"loss: expected a function of the model's output, found {show(loss)}")
    args, kwargs = _split_inputs(example_inputs)
    kept_dtype = _dtype(dtype)
    if autocast_device not in DEVICES:
        raise unknown_name("autocast device", autocast_device, DEVICES)
    low = _dtype(autocast, "autocast dtype", ("fp16", "bf16"))
    step = TrainingStep(model, args, kwargs, loss, optimizer, kept_dtype, low, autocast_device, bool(master_weights))
    weights = {step.dtype or p.dtype for p in model.parameters() if p.is_floating_point()}
    if step.master_weights and not any(item.itemsize < 4 for item in weights):
        raise InputError("master_weights: the weights are float32 already; leave it out, or capture with dtype='bf16'")
    if (reason := OPTIMIZERS[optimizer].why_not(weights, step.master_weights)) is not None:
        raise InputError(f"optimizer {optimizer}: {reason}")
    notes: list[str] = []
    failures: dict[str, Exception] = {}
    for attempt in METHODS if method is None else (method,):
        try:
            with without_collections():
                graph = _capture_with(attempt, step, name, source, notes, equal_known=like is not None)
                if like is None or graph.op_names == like.op_names:
                    return graph
                return _capture_with(attempt, step, name, source, notes)
        except InputError as error:
            if not str(error).startswith("no gradient") or attempt == (method or METHODS[-1]):
                raise InputError(f"{error}{_hint(model)}") from None
            failures[attempt] = error  # a function with a backward of its own has one in the other methods alone
        except Exception as error:
            failures[attempt] = error
            notes.append(f"{attempt} failed: {_one_line(error)}")
    shown = failures.get("dispatch") or next(iter(failures.values()))
    where = _user_frame(shown)
    reason = f"{_one_line(shown)}{f' ({where})' if where else ''}"
    raise CaptureError(f"cannot capture {type(model).__name__}: {reason}{_advice(shown, step)}{_hint(model)}") from shown


def _advice(error: BaseException, step: TrainingStep) -> str:
    """Suggests a change where a call does not fit, or where a forward needs values, which a capture has none of."""
    from rlplace.model.torch_adapter import DataDependentOutputException, DynamicOutputShapeException

    if isinstance(error, TypeError):
        if not _fits(step.model.forward, *step.args, **step.kwargs):
            return f"; example_inputs must fit its forward{inspect.signature(step.model.forward)}"
        if step.loss is not None and not _fits(getattr(step.loss, "forward", step.loss), None):
            return "; a loss is called with the output alone: compute it in the forward, which gets targets as inputs"
    if isinstance(error, DataDependentOutputException):
        return "; the forward reads a value there: take sizes from shapes, or give it as a plain number beside the tensors"
    if isinstance(error, DynamicOutputShapeException):
        return "; how large a result is depends on values there: compute on all positions, with a mask as a factor"
    if ".numpy()" in str(error):
        return "; the forward leaves torch there: compute with tensors, or give the result as an input"
    return ""


def _fits(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Returns whether a function can be called with these arguments."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    return True


def _hint(model: nn.Module) -> str:
    if not callable(getattr(model, "training_step", None)):
        return ""
    return "; its loss is in training_step, as in Lightning: give a module whose forward(batch) calls training_step(batch, 0)"


def _capture_with(
    method: str,
    step: TrainingStep,
    name: str | None,
    source: Mapping[str, Any] | None,
    earlier: list[str],
    equal_known: bool = False,
) -> OpGraph:
    import torch

    from rlplace.model.capture.assemble import Assembly
    from rlplace.model.capture.build import build_graph
    from rlplace.model.capture.fake import fake_inputs, new_fake_mode
    from rlplace.model.capture.step import record

    recording, guesses = record(method, step, equal_known)
    assembly = Assembly(recording, apart(step.model, step.optimizer), OPTIMIZERS[step.optimizer])
    described = describe_inputs(*fake_inputs((step.args, step.kwargs), new_fake_mode(), step.dtype))
    sizes: Counter[str] = Counter()
    for parameter in (leaf.record for leaf in recording.leaves if not leaf.record.is_buffer):
        if "float" in parameter.dtype:  # not packed ones
            sizes[parameter.dtype] += parameter.size_bytes
    tf32 = ["conv", "recurrent"] if torch.backends.cudnn.allow_tf32 else []
    tf32 += ["gemm", "bmm"] if torch.backends.cuda.matmul.allow_tf32 else []
    return build_graph(
        assembly,
        name=name or type(step.model).__name__,
        samples=rows_of((step.args, step.kwargs)),
        capture={
            "method": method,
            "optimizer": step.optimizer,
            "dtype": max(sizes, key=sizes.__getitem__, default="float32"),
            "autocast": None if step.autocast is None else str(step.autocast).removeprefix("torch."),
            "master_weights": step.master_weights,
            "training": step.model.training,
            "torch": str(torch.__version__),
            "notes": [*earlier, *_notes(recording.leaves, assembly.unattributed, guesses)],
            **({} if tf32 == ["conv", "recurrent"] else {"tf32": tf32}),  # where it is not as PyTorch is set by itself
        },
        source=source if described is None else {**(source or {}), "inputs": described},
    )


def _notes(leaves: Sequence[Leaf], unattributed: int, guesses: Mapping[str, int]) -> list[str]:
    notes = []
    idle = [leaf.record.name for leaf in leaves if leaf.idle]
    if idle:
        notes.append(f"{len(idle)} parameters that require a gradient receive none, first {idle[0]}; they count as frozen")
    if unattributed:
        notes.append(f"{unattributed} ops without an owner were given to the op that made their input")
    if guesses:
        counts = ", ".join(f"{op} x{count}" for op, count in sorted(guesses.items()))
        notes.append(f"the forward depends on tensor values; guessed: {counts}")
    return notes


def _split_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from rlplace.model.axes.access import tensors_in

    args, kwargs = split_inputs(inputs)
    if not all(isinstance(key, str) for key in kwargs):
        raise InputError("example_inputs: the keys of a dict must be argument names of the model's forward")
    if next(tensors_in((args, kwargs)), None) is None:
        raise InputError("example_inputs: holds no tensor; give the inputs of one training step")
    return args, kwargs


def _dtype(dtype: str | torch.dtype | None, what: str = "dtype", short: Sequence[str] = tuple(DTYPES)) -> torch.dtype | None:
    """Returns the dtype of an option, by one of these short names or its long name."""
    import torch

    if dtype is None:
        return None
    known = {name: DTYPES[key] for key in short for name in (key, DTYPES[key])}
    name = str(dtype).removeprefix("torch.")
    if name not in known:
        raise unknown_name(what, name, known)
    return getattr(torch, known[name])


def _one_line(error: BaseException, limit: int = 300) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:limit] if text else type(error).__name__


def _user_frame(error: BaseException) -> str | None:
    """Returns file and line of the innermost frame that is neither torch's nor ours."""
    import torch

    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(inside)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
