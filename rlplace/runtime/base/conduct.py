"""The findings of a rehearsal, as planners read them: how a training step treats samples, buffers and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MEAN, SUM, TARGETS = "mean", "sum", "targets"
"""Reductions: a mean over samples, a sum, or a mean over the targets of cross-entropies that are not ignored. Other reductions
weight parts by an input, such as ``"sum:mask"`` (`batches`)."""

COUPLES = "the loss couples samples"


@dataclass(frozen=True)
class Conduct:
    """The findings of a rehearsal: how a training step of a model treats samples, buffers and parameters."""

    # how the loss of a batch comes from those of its parts; "" where no way gives it: the loss couples samples
    reduction: str = MEAN
    whole: float = 0.0  # loss of the example batch
    parts: float = 0.0  # mean of the losses of two parts of it, by their samples
    samples: int = 0  # of the example batch
    # the first module whose result for a sample depends on others, "" for the model's own forward or its loss; None where
    # samples are independent
    where: str | None = None
    mixing: tuple[str, ...] = ()  # all such modules, those that read the result of the first among them
    counters: tuple[str, ...] = ()  # buffers that a forward writes, alike whatever the samples are
    written: tuple[str, ...] = ()  # buffers that a forward writes, with values that depend on the samples
    # buffers of both kinds that are plain attributes of modules, which no graph of the forward holds
    kept: tuple[str, ...] = ()
    toggles: tuple[str, ...] = ()  # parameters whose `requires_grad` the forward changes
    differentiates: bool = False  # the forward computes gradients itself
    sparse: tuple[str, ...] = ()  # parameters with sparse gradients
    incomparable: str | None = None  # a random op whose results cannot be made alike for all samples; None without one
    indivisible: str | None = None  # the error of a step with a part of the batch; None where it ran
    unseen: str | None = None  # why the model was not rehearsed; None where it was

    @property
    def couples(self) -> bool:
        """True where the loss of a batch is no weighted mean of those of its parts."""
        return not self.reduction and self.incomparable is None

    def settings(self, couple: str, buffers: str, statistics: str) -> dict[str, Any]:
        """Returns fields of a `Strategy` by which its parts make up the result of the model.

        Args:
            couple: The request for a loss that couples samples; where it is known not to, there is nothing to gather.
            buffers: See `Strategy`.
            statistics: See `Strategy`.
        """
        gathers = couple == "gather" and (self.couples or self.unseen is not None)
        return {
            "reduction": self.reduction or MEAN,
            "couple": couple if gathers else "replica",
            "mixing": self.mixing if gathers else (),
            "buffers": buffers,
            "statistics": statistics,
        }

    def reason(self) -> str:
        """Explains why a batch in parts is not the batch in one piece, in words; empty where a rehearsal shows no reason."""
        if self.indivisible is not None:
            return f"the batch cannot be divided, a part of it raised {self.indivisible}"
        if self.written:
            return f"the forward writes {self.written[0]} by the samples that it gets"
        if self.couples:
            return f"{COUPLES}{f', first in {self.where}' if self.where else ''}"
        if self.reduction not in (MEAN, ""):
            return f"the loss is no mean over samples, but weighted by {self.reduction}"
        return ""
