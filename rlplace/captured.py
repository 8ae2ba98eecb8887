"""`Recipe`: the arguments of a capture. `CapturedModel`: a model that was captured, to plan."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from rlplace.errors import InputError, show
from rlplace.records import Count, plain

if TYPE_CHECKING:
    from rlplace.model.graph.opgraph import OpGraph
    from rlplace.model.graph.rescale import CaptureAt
    from rlplace.model.zoo import LoadedModel
    from rlplace.runtime.strategy.fact_records import ModelFacts


Cached = Callable[[str, str, Mapping[str, Any], Callable[[], Any]], Any]
"""Returns the result of a function, maybe of an earlier command: by its name, MODEL, and other values that decide it."""


def afresh(kind: str, model: str, asked: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """Returns the result of a function, of which none is kept."""
    return make()


class Recipe(msgspec.Struct, frozen=True):
    """The arguments of a capture.

    Attributes:
        model: MODEL text.
        batch: Samples of a micro-batch.
        seq: Sequence length.
        dtype: Name of the dtype of parameters and compute.
        optimizer: Name.
        autocast: dtype of mixed precision, None without.
        master_weights: Whether optimizer state is kept in fp32.
    """

    model: str
    batch: Count
    seq: Count
    dtype: str
    optimizer: str
    autocast: str | None = None
    master_weights: bool = False

    def build(self, device: str, seed: int, batch: int | None = None) -> LoadedModel:
        """Builds the model, with random weights that depend on `seed` only, and inputs of one micro-batch."""
        from rlplace.model.zoo.functions import runs_code

        if runs_code(self.model) and os.environ.get("RANK", "0") == "0":
            _note_code(self.model)
        return self.load(device, seed, batch)

    def load(self, device: str = "meta", seed: int = 0, batch: int | None = None) -> LoadedModel:
        """Builds the model, and does not say whose code runs: a person has just named it."""
        from rlplace.model.zoo import load_model

        with contextlib.redirect_stdout(sys.stderr), torch.random.fork_rng(devices=[]):  # what a model prints is no result
            torch.manual_seed(seed)
            samples = batch or self.batch
            return load_model(self.model, batch=samples, seq=self.seq, dtype=self.dtype, device=device, resize=True)

    def source(self, batch: int) -> dict[str, Any]:
        """Returns what the capture of so many samples says of its origin."""
        mixed = {"autocast": self.autocast, "master_weights": self.master_weights}
        return {**plain(self), "batch": batch, **(mixed if any(mixed.values()) else {})}

    def known(self, cached: Cached) -> Callable[[str, Callable[[], Any]], Any]:
        """Returns what `CapturedModel.of` asks for facts on the model."""

        def known(kind: str, make: Callable[[], Any]) -> Any:
            with contextlib.redirect_stdout(sys.stderr):  # output of a user's model is no result
                return cached(kind, self.model, {name: getattr(self, name) for name in ("batch", "seq", "dtype")}, make)

        return known

    def parts(self, weights: bool, graph: OpGraph) -> tuple[nn.Module, Any, Callable[..., Any] | None]:
        """Builds module, inputs and loss of a captured step; with weights where they are asked for and affordable."""
        from rlplace.runtime.strategy.rehearsal import affordable

        loaded, flops = self.load(), float(graph.op_flops.sum())
        if weights and self.model.startswith(("hf:", "zoo:")) and affordable(loaded.module, flops) is None:
            loaded = self.load("cpu")
        return loaded.module, loaded.example_inputs, loaded.loss

    def capture(self, loaded: LoadedModel, **how: Any) -> OpGraph:
        """Captures the training step of a model that was built, with further arguments of `rlplace.capture`."""
        from rlplace.model.capture.capture import capture

        own = {name: getattr(self, name) for name in ("optimizer", "autocast", "master_weights")}
        with contextlib.redirect_stdout(sys.stderr):
            return capture(loaded.module, loaded.example_inputs, loss=loaded.loss, name=loaded.name, **own, **how)


@cache
def _note_code(model: str) -> None:
    """Says once which function of the user runs."""
    print(f"running code of this machine that the plan names: {show(model)}", file=sys.stderr, flush=True)


@dataclass(frozen=True, eq=False)
class CapturedModel:
    """A model that was captured once and can be priced for any cluster.

    Attributes:
        graph: The captured training step.
        capture_at: Captures the model with a number of samples; None: it has this micro-batch size only.
        examine: Finds out what the runtime can execute of the model; None checks strategies alone.
        why_not_traced: Explains why the engine of placements cannot trace the model; None: not examined.
    """

    graph: OpGraph
    capture_at: CaptureAt | None = None
    examine: Callable[[], ModelFacts] | None = None
    why_not_traced: Callable[[], str | None] | None = None

    @staticmethod
    def of(
        graph: OpGraph,
        capture_at: CaptureAt,
        build: Callable[[bool], tuple[nn.Module, Any, Callable[..., Any] | None]],
        known: Callable[[str, Callable[[], Any]], Any] = lambda kind, make: make(),
    ) -> CapturedModel:
        """Returns a captured model that is examined when it is asked for, and once.

        Args:
            graph: The captured training step.
            capture_at: Captures it with a number of samples.
            build: Returns the module, its inputs and loss; for what only values tell with weights, where they are affordable.
            known: Returns the result of a function, maybe from an earlier command.
        """
        from rlplace.model.graph.opgraph import FORWARD

        def examine() -> ModelFacts:
            from rlplace.runtime.strategy.facts import facts_of

            return facts_of(*build(True), graph)

        def trace() -> str | None:
            from rlplace.runtime.placement.joint_graph import why_not_traced

            return why_not_traced(*build(False)[:2], graph.capture["method"], int((graph.op_phase == FORWARD).sum()))

        return CapturedModel(graph, capture_at, cache(lambda: known("facts", examine)), cache(lambda: known("traced", trace)))

    @property
    def facts(self) -> ModelFacts | None:
        """Facts on the model for the runtime; None where it was not examined."""
        return None if self.examine is None else self.examine()

    def why_no_placement(self) -> str | None:
        """Explains why the engine of placements cannot run this model; None where nothing is known against it."""
        if self.why_not_traced is None:
            return None
        facts = self.facts
        conduct = None if facts is None else facts.conduct
        if facts is not None and facts.sync_norm:
            return "SyncBatchNorm exchanges statistics between processes, which a placement does not"
        if conduct is not None and conduct.sparse:
            return f"the gradient of {conduct.sparse[0]} is sparse, which it does not add up"
        if conduct is not None and conduct.kept:
            return f"the forward writes {conduct.kept[0]}, a plain attribute, which no graph holds; register it as a buffer"
        return self.why_not_traced()

    def check_placed(self) -> None:
        """Refuses placements of a model that their engine cannot run.

        Raises:
            InputError: With the reason.
        """
        reason = self.why_no_placement()
        if reason is not None:
            raise InputError(f"a placement of ops cannot run this model: {reason}; leave --space out, which plans a strategy")
