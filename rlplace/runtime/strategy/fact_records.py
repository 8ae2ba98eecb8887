"""Records of facts about a model, which planning reads in place of the model; nothing here loads torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlplace.plan.strategy import MEAN

COUPLES = "the loss couples samples"


@dataclass(frozen=True)
class TensorFacts:
    """Facts about a model's tensor-parallel layouts; the defaults say that the model was not examined."""

    no_tensor: str | None = None  # why its blocks have no layout; None where they have
    # divisor of the tensor degree: heads, key and value heads and widths in common; 0 where nothing has a layout
    parts: int = 0
    heads: tuple[int, ...] = ()  # of keys and values that groups of heads share; a larger degree, their multiple, repeats them
    no_sequence: str | None = None  # why activations between products cannot be split along the sequence; None where they can
    # ``column``, ``row`` or ``local`` by module path, for all modules with a layout inside of blocks
    layouts: Mapping[str, str] = field(default_factory=dict)
    # paths of embeddings and products with logits that are cut along the vocabulary where the degree divides it
    vocabulary: tuple[str, ...] = ()
    positions: int = 0  # of the activations that blocks read; 0 where they cannot be split

    @property
    def words(self) -> Mapping[str, str]:
        """Layouts by module path: those of `layouts`, and ``vocabulary``."""
        return {**self.layouts, **dict.fromkeys(self.vocabulary, "vocabulary")}


@dataclass(frozen=True)
class ContextFacts:
    """Facts about a model's attention; the defaults say that it was not examined."""

    no_context: str | None = None  # why processes cannot run on parts of the positions
    positions: int = 0  # of a sample that attention runs over
    heads: int = 0  # of queries, what all attention has in common
    shared: tuple[int, ...] = ()  # of keys and values
    no_ring: str | None = None  # why keys and values cannot go around
    no_stages: str | None = None  # why stages of a pipeline cannot run on parts of the positions, where one process can


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

    def settings(self, couple: str, buffers: str, **others: Any) -> dict[str, Any]:
        """Returns fields of a `Strategy` by which its parts make up the result of the model.

        Args:
            couple: The request for a loss that couples samples; where it is known not to, there is nothing to gather.
            buffers: See `Strategy`.
            **others: Further fields of a `Strategy`.
        """
        gathers = couple == "gather" and (self.couples or self.unseen is not None)
        return {
            "reduction": self.reduction or MEAN,
            "couple": couple if gathers else "replica",
            "mixing": self.mixing if gathers else (),
            "buffers": buffers,
            **others,
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


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model that `why_not` reads; the defaults say that nothing is wrong, or that it was not examined."""

    blocks: tuple[str, ...] = ()  # paths of the blocks that a strategy has to name
    batch_norm: bool = False  # a module computes statistics over the samples of its process
    no_single: str | None = None  # the error of a forward with one sample, which BatchNorm may raise; None where it runs
    sync_norm: bool = False  # a module computes statistics over all processes of the job
    no_cut: str | None = None  # why it cannot be cut into stages
    no_samples: str | None = None  # why values between stages cannot be split by samples
    tensor: TensorFacts = TensorFacts()
    hooked: tuple[str, ...] = ()  # modules with hooks of the user's
    hooked_outside: tuple[str, ...] = ()  # those of them that lie outside of blocks, where a pipeline does not call them
    backward_hooks: tuple[str, ...] = ()  # those with hooks on gradients
    subclass: str | None = None  # name and type of a parameter that is no plain tensor, such as a quantized one
    # blocks that no gradient flows back from, such as the first that is trained behind frozen ones
    untrained: tuple[str, ...] = ()
    recurrent: str | None = None  # path of a recurrent layer
    reused: str | None = None  # a parameter that ops of one block read several times
    skips: bool = False  # the forward reads values, by which it reaches some of its parameters and not others
    branches: bool = False  # it reads them outside of blocks, and may call other blocks
    handed: str | None = None  # a block that gets an object with a state, such as a cache
    no_gather: str | None = None  # why replicas cannot gather the values that a loss reads
    context: ContextFacts = ContextFacts()
    conduct: Conduct | None = None  # how a step treats samples, buffers and parameters; None when it was not rehearsed
    experts: int = 0  # expert degrees divide it
    no_experts: str | None = None  # why no module's experts can be spread; None where they can
    listed: str | None = None  # path of a list of experts that the forward calls one by one
    # by path of embedding module why its table cannot be divided, None where it can; None: the model was not examined
    tables: Mapping[str, str | None] | None = None
