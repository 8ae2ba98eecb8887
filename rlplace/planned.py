"""The model and the problem that a plan was made from, built again from the plan's `source`."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import TYPE_CHECKING

import msgspec
import torch

from rlplace.errors import InputError, show
from rlplace.plan.plan import PlacementPlan
from rlplace.problem.io import Source
from rlplace.records import Count, build, plain

if TYPE_CHECKING:
    from rlplace.cluster.parse import Cluster
    from rlplace.model.graph.opgraph import OpGraph
    from rlplace.model.zoo import LoadedModel
    from rlplace.problem import Problem


class Recipe(msgspec.Struct, frozen=True):
    """What was captured.

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
        from rlplace.model.zoo import load_model
        from rlplace.model.zoo.functions import runs_code

        if runs_code(self.model) and os.environ.get("RANK", "0") == "0":
            _note_code(self.model)
        with contextlib.redirect_stdout(sys.stderr), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            samples = batch or self.batch
            return load_model(self.model, batch=samples, seq=self.seq, dtype=self.dtype, device=device, resize=True)


@functools.cache
def _note_code(model: str) -> None:
    """Says once which function of the user runs."""
    print(f"running code of this machine that the plan names: {show(model)}", file=sys.stderr, flush=True)


def recipe_of(plan: PlacementPlan) -> Recipe:
    """Reads a plan's `source`. `Recipe.build` runs code where the model is a function of a module, and says so.

    Raises:
        InputError: The plan was not made from a MODEL text.
    """
    source = source_of(plan).graph or {}
    if not isinstance(source.get("model"), str):
        raise InputError(
            "plan: its source does not name a MODEL, so it cannot be built again; plan with 'rlplace place MODEL', or call "
            "rlplace.distribute(model, plan) in a script of your own"
        )
    try:
        return build(Recipe, source, "plan: source.graph")
    except InputError as error:
        raise InputError(f"{error}; plan again with 'rlplace place MODEL'") from None


def source_of(made: PlacementPlan | Problem) -> Source:
    """Returns the `source` of a plan or problem."""
    return build(Source, plain(made.source or {}), "plan: source")


def cluster_of_plan(plan: PlacementPlan, given: str | None = None) -> Cluster:
    """Returns the cluster that a plan was made for, or the one that is given when it is the same.

    Raises:
        InputError: It cannot be found again, or has another fingerprint than the plan was made for.
    """
    from rlplace.cluster.parse import parse

    source = source_of(plan)
    text, wanted = source.cluster, source.cluster_fingerprint
    name = text if given is None else given
    if name is None:
        raise InputError("plan: it does not say for which cluster it was made; name it with --cluster")
    try:
        cluster = parse(name)
    except InputError as error:
        raise InputError(f"the plan's cluster {show(name)} cannot be read ({error}); name it with --cluster") from None
    if wanted is not None and cluster.fingerprint != wanted:
        raise InputError(
            f"the plan is for cluster {wanted[:12]} ({text or 'no name'}), {show(name)} is "
            f"{cluster.fingerprint[:12]}; plan again for this cluster, or name the one that it was made for with --cluster"
        )
    return cluster


def problem_of_plan(plan: PlacementPlan, cluster: str | None = None) -> Problem:
    """Returns the plan's problem, captured and priced again and found to be the same; see `cluster_of_plan` for `cluster`.

    Raises:
        InputError: It is not what the plan's source gives today; with both fingerprints, and what most likely changed.
    """
    problem = rebuild_problem(plan, cluster_of_plan(plan, cluster))
    then, now = source_of(plan), source_of(problem)
    if then.graph_fingerprint != now.graph_fingerprint:
        reason = _another_graph(then)
    elif then.table.fingerprint != now.table.fingerprint:
        reason = "its op times are others"
    else:
        reason = "the plan's file was edited, or its groups were given by hand"
    _check_same("problem", plan.problem, "model and cluster give", problem.fingerprint, reason)
    return problem


def rebuild_problem(plan: PlacementPlan, cluster: Cluster) -> Problem:
    """Captures and prices the plan's problem again.

    Args:
        plan: Its `source` says how.
        cluster: See `cluster_of_plan`.
    """
    from rlplace.cost.contract import split_backward
    from rlplace.cost.price import price

    source = source_of(plan)
    problem = price(
        _graph(plan),
        cluster,
        groups=source.groups or 200,
        level=source.level or "task",
        costs=source.table.path,
        host=source.host or "eager",
    )
    return split_backward(problem) if source.split_backward else problem


def _check_same(kind: str, then: str, from_what: str, now: str, reason: str) -> None:
    if then != now:
        raise InputError(
            f"the plan is for {kind} {then[:12]}, its {from_what} {now[:12]}: {reason}; plan again with 'rlplace place'"
        )


def _another_graph(source: Source) -> str:
    """Explains why a graph has another fingerprint than a plan's source says."""
    made_with = (source.capture or {}).get("torch")
    if made_with is None or made_with == torch.__version__:
        return "its graph is another"
    return f"its graph is another, maybe because it was captured with torch {made_with} and this is {torch.__version__}"


def check_graph(plan: PlacementPlan) -> OpGraph:
    """Captures the model of a strategy's plan again, and refuses the plan when it is another today.

    Raises:
        InputError: With both fingerprints, and what most likely changed.
    """
    source, graph = source_of(plan), _graph(plan)
    _check_same("graph", str(source.graph_fingerprint), "model gives", graph.fingerprint, _another_graph(source))
    return graph


def _graph(plan: PlacementPlan) -> OpGraph:
    recipe = recipe_of(plan)
    return capture_recipe(recipe, recipe.batch, source_of(plan))


def capture_recipe(recipe: Recipe, batch: int, source: Source, method: str | None = None) -> OpGraph:
    """Captures a recipe's model with so many samples, as a plan's source says, or by another method."""
    from rlplace.model.capture.capture import capture

    loaded = recipe.build("meta", seed=0, batch=batch)
    return capture(
        loaded.module,
        loaded.example_inputs,
        loss=loaded.loss,
        optimizer=recipe.optimizer,
        autocast=recipe.autocast,
        master_weights=recipe.master_weights,
        name=loaded.name,
        source={**(source.graph or {}), "batch": batch},
        method=method or ("module" if (source.capture or {}).get("method") == "module" else None),
    )
