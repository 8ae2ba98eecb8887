"""Sequences of unlike lengths while a step is captured: packing, and CTC, as if every sequence were as long as the longest.

How much they compute depends on lengths that are values, which fake tensors have none of. Full lengths are the most work and
memory that the step can take, so that a plan holds for every batch; the capture notes it as a guess. CTC is one op,
``rlplace::ctc_loss``, that exists as a shape rule only.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

from rlplace.model.torch_adapter import packed_sequence_functions


@functools.cache
def _library() -> Library:
    """Defines the op once; the library object must stay alive."""
    library = Library("rlplace", "FRAGMENT")
    library.define("ctc_loss(Tensor log_probs, Tensor targets, int samples, int labels) -> (Tensor loss, Tensor alpha)")
    library.define("ctc_loss_backward(Tensor gradient, Tensor log_probs, Tensor targets, Tensor loss, Tensor alpha) -> Tensor")
    library.impl("ctc_loss", _forward_rule, "Meta")
    library.impl("ctc_loss_backward", lambda gradient, log_probs, *rest: torch.empty_like(log_probs), "Meta")
    torch.library.register_autograd("rlplace::ctc_loss", _backward, setup_context=_save, lib=library)
    return library


def _forward_rule(log_probs: Any, targets: Any, samples: int, labels: int) -> tuple[Any, Any]:
    return log_probs.new_empty((samples,)), log_probs.new_empty((samples, log_probs.shape[0], 2 * labels + 1))


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], *output)


def _backward(ctx: Any, gradient: Any, alpha_gradient: Any) -> tuple[Any, ...]:
    return torch.ops.rlplace.ctc_loss_backward(gradient, *ctx.saved_tensors), None, None, None


def _ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Any:
    _library()
    samples = log_probs.shape[1] if log_probs.dim() == 3 else 1
    labels = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // samples)
    loss, _ = torch.ops.rlplace.ctc_loss(log_probs, targets, samples, labels)
    if reduction in ("none", 0):
        return loss if log_probs.dim() == 3 else loss[0]
    return loss.mean() if reduction in ("mean", 1) else loss.sum()


class FullLengths:
    """Calls of torch whose result depends on the lengths of sequences, replaced.

    Args:
        guesses: Counts the calls that were replaced.
    """

    def __init__(self, guesses: Counter[str]) -> None:
        self._guesses = guesses
        self._batch_sizes: list[Any] = []
        pack, unpack = packed_sequence_functions()
        self._replaced: dict[Any, Callable[..., Any]] = {
            torch.nn.functional.ctc_loss: self._guessed("ctc_loss", _ctc_loss),
            torch.ctc_loss: self._guessed("ctc_loss", _ctc_loss),
            pack: self._guessed("pack_padded_sequence", self._pack),
            unpack: self._unpack,
        }

    def replacement(self, func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
        """What is called in place of a function; None: itself."""
        if func is torch.Tensor.__getitem__ and self.packed(args[0]):
            return lambda sizes, index: self._samples(sizes) if isinstance(index, int) else sizes
        return self._replaced.get(func)

    def packed(self, value: Any) -> bool:
        """Returns whether a value is the batch sizes of a packed sequence that was made here."""
        return any(value is sizes for sizes, _ in self._batch_sizes)

    def whole(self, run: Callable[..., tuple[Any, ...]], args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns a recurrent layer over a packed sequence, as one over all its steps.

        Args:
            run: The layer, as `torch.lstm` is called with padded sequences.
            args: What `torch.lstm` is called with for packed ones.
        """
        data, sizes, states, parameters, *options = args
        steps = data.unflatten(0, (sizes.shape[0], self._samples(sizes)))
        output, *last = run(steps, states, parameters, *options, False)
        return output.flatten(0, 1), *last

    def _guessed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._guesses[name] += 1
            return call(*args, **kwargs)

        return counted

    def _samples(self, sizes: Any) -> int:
        return next(samples for known, samples in self._batch_sizes if sizes is known)

    def _pack(self, padded: Any, lengths: Any, batch_first: bool) -> tuple[Any, Any]:
        steps = padded.transpose(0, 1) if batch_first else padded
        sizes = lengths.new_empty((steps.shape[0],))
        self._batch_sizes.append((sizes, int(steps.shape[1])))
        return steps.flatten(0, 1), sizes

    def _unpack(self, data: Any, sizes: Any, batch_first: bool, value: float, total: int) -> tuple[Any, Any]:
        samples = self._samples(sizes)
        steps = data.unflatten(0, (sizes.shape[0], samples))
        if total > steps.shape[0]:
            steps = torch.cat([steps, steps.new_full((total - steps.shape[0], *steps.shape[1:]), value)])
        return steps.transpose(0, 1) if batch_first else steps, sizes.new_empty((samples,))
