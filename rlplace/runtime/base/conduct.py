"""The findings of a rehearsal, as planners read them: how a training step treats samples, buffers and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MEAN, SUM, TARGETS = "mean", "sum", "targets"
"""Reductions: a mean over samples, a sum, or a mean over the targets of cross-entropies that are not ignored. Other reductions
weight parts by an input, such as ``"sum:mask"`` (`counting`)."""

COUPLES = "the loss couples samples"


@dataclass(frozen=True)
class Conduct:
    """The findings of a rehearsal: how a training step of a model treats samples, buffers and parameters.

    Attributes:
        reduction: How the loss of a batch comes from those of its parts; "" where no way gives it: the loss couples samples.
        whole: Loss of the example batch.
        parts: Mean of the losses of two parts of it, by their samples.
        samples: Of the example batch.
        where: The first module whose result for a sample depends on others, "" for the model's own forward or its loss; None
            where samples are independent.
        mixing: All such modules, those that read the result of the first among them.
        counters: Buffers that a forward writes, alike whatever the samples are.
        written: Buffers that a forward writes, with values that depend on the samples.
        kept: Buffers of both kinds that are plain attributes of modules, which no graph of the forward holds.
        toggles: Parameters whose `requires_grad` the forward changes.
        hooked: The forward registers hooks on activations.
        differentiates: The forward computes gradients itself.
        sparse: Parameters with sparse gradients.
        incomparable: A random op whose results cannot be made alike for all samples; None without one.
        indivisible: The error of a step with a part of the batch; None where it ran.
        unseen: Why the model was not rehearsed; None where it was.
    """

    reduction: str = MEAN
    whole: float = 0.0
    parts: float = 0.0
    samples: int = 0
    where: str | None = None
    mixing: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    toggles: tuple[str, ...] = ()
    hooked: bool = False
    differentiates: bool = False
    sparse: tuple[str, ...] = ()
    incomparable: str | None = None
    indivisible: str | None = None
    unseen: str | None = None

    @property
    def couples(self) -> bool:
        """True where the loss of a batch is no weighted mean of those of its parts."""
        return not self.reduction and self.incomparable is None

    def settings(self, couple: str, buffers: str) -> dict[str, Any]:
        """Returns fields of a `Strategy` by which its parts make up the result of the model.

        Args:
            couple: The request for a loss that couples samples; where it is known not to, there is nothing to gather.
            buffers: See `Strategy`.
        """
        gathers = couple == "gather" and (self.couples or self.unseen is not None)
        return {
            "reduction": self.reduction or MEAN,
            "couple": couple if gathers else "replica",
            "mixing": self.mixing if gathers else (),
            "buffers": buffers,
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
