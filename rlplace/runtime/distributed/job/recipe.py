"""The model and the problem that a plan was made from, built again from the plan's `source`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rlplace.errors import InputError, show
from rlplace.plan.plan import PlacementPlan
from rlplace.problem.source import check_source

if TYPE_CHECKING:
    from rlplace.cluster.spec import Cluster
    from rlplace.graph.opgraph import OpGraph
    from rlplace.problem import Problem
    from rlplace.zoo import LoadedModel


@dataclass(frozen=True)
class Recipe:
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
    batch: int
    seq: int
    dtype: str
    optimizer: str
    autocast: str | None
    master_weights: bool

    def build(self, device: str, seed: int, batch: int | None = None) -> LoadedModel:
        """Builds the model, with random weights that depend on `seed` only, and inputs of one micro-batch."""
        from rlplace.zoo import load_model
        from rlplace.zoo.load import runs_code

        if runs_code(self.model) and os.environ.get("RANK", "0") == "0":
            print(f"running code of this machine that the plan names: {show(self.model)}", file=sys.stderr, flush=True)
        with contextlib.redirect_stdout(sys.stderr), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return load_model(self.model, batch=batch or self.batch, seq=self.seq, dtype=self.dtype, device=device)


def recipe_of(plan: PlacementPlan) -> Recipe:
    """Reads a plan's `source`. `Recipe.build` runs code where the model is a function of a module, and says so.

    Raises:
        InputError: The plan was not made from a MODEL text.
    """
    source = _source(plan).get("graph") or {}
    if not isinstance(source.get("model"), str):
        raise InputError(
            "plan: its source does not name a MODEL, so it cannot be built again; plan with 'rlplace place MODEL', or call "
            "rlplace.distribute(model, plan) in a script of your own"
        )
    try:
        return Recipe(
            model=source["model"],
            batch=int(source["batch"]),
            seq=int(source["seq"]),
            dtype=str(source["dtype"]),
            optimizer=str(source["optimizer"]),
            autocast=None if source.get("autocast") is None else str(source["autocast"]),
            master_weights=bool(source.get("master_weights", False)),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise InputError(
            "plan: its source lacks batch, seq, dtype or optimizer; plan again with 'rlplace place MODEL'"
        ) from None


_KINDS: dict[str, type] = {"groups": int, "weight_gradients": bool, "sharding": bool, "split_backward": bool}


def _source(plan: PlacementPlan) -> Mapping[str, Any]:
    """A plan's `source`, which may come from a file: what is read of it here is of the right type, or null."""
    source: Mapping[str, Any] = plan.source or {}
    check_source(source, "plan")
    for key, kind in _KINDS.items():
        value = source.get(key)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise InputError(f"plan: source.{key}: {show(value)} is no {kind.__name__}; plan again with 'rlplace place MODEL'")
    path = (source.get("costs") or {}).get("path")
    if path is not None and not isinstance(path, str):
        raise InputError(f"plan: source.costs.path: {show(path)} is no file name")
    return source


def cluster_of_plan(plan: PlacementPlan, given: str | None = None) -> Cluster:
    """The cluster that a plan was made for, or the one that is given when it is the same.

    Raises:
        InputError: It cannot be found again, or has another fingerprint than the plan was made for.
    """
    from rlplace.cluster.parse import parse

    source = _source(plan)
    text, wanted = source.get("cluster"), source.get("cluster_fingerprint")
    if given is None and text is None:
        raise InputError("plan: it does not say for which cluster it was made; name it with --cluster")
    name = given if given is not None else str(text)
    try:
        cluster = parse(name)
    except InputError as error:
        raise InputError(f"the plan's cluster {show(name)} cannot be read ({error}); name it with --cluster") from None
    if wanted is not None and cluster.fingerprint != wanted:
        raise InputError(
            f"the plan is for cluster {str(wanted)[:12]} ({text or 'no name'}), {show(name)} is "
            f"{cluster.fingerprint[:12]}; plan again for this cluster, or name the one that it was made for with --cluster"
        )
    return cluster


def problem_of_plan(plan: PlacementPlan, cluster: str | None = None) -> Problem:
    """The plan's problem, captured and priced again and found to be the same; see `cluster_of_plan` for `cluster`."""
    problem = rebuild_problem(plan, cluster_of_plan(plan, cluster))
    check_problem(plan, problem)
    return problem


def rebuild_problem(plan: PlacementPlan, cluster: Cluster) -> Problem:
    """Captures and prices the plan's problem again.

    Args:
        plan: Its `source` says how.
        cluster: See `cluster_of_plan`.
    """
    from rlplace.cost.price import price
    from rlplace.cost.split import split_backward

    source = _source(plan)
    problem = price(
        _graph(plan),
        cluster,
        groups=int(source.get("groups", 200)),
        level=str(source.get("level", "task")),
        weight_gradients=bool(source.get("weight_gradients", False)),
        sharding=bool(source.get("sharding", False)),
        costs=(source.get("costs") or {}).get("path"),
        host=str(source.get("host", "eager")),
    )
    return split_backward(problem) if source.get("split_backward") else problem


def check_problem(plan: PlacementPlan, problem: Problem) -> None:
    """Refuses a plan whose problem is not what its source gives today.

    Raises:
        InputError: With both fingerprints, and what most likely changed.
    """
    if plan.problem == problem.fingerprint:
        return
    then, now = plan.source or {}, problem.source or {}
    made_with = (then.get("capture") or {}).get("torch")
    if then.get("graph_fingerprint") != now.get("graph_fingerprint"):
        reason = "its graph is another"
        if made_with is not None and made_with != torch.__version__:
            reason += f", maybe because it was captured with torch {made_with} and this is {torch.__version__}"
    elif (then.get("costs") or {}).get("fingerprint") != (now.get("costs") or {}).get("fingerprint"):
        reason = "its op times are others"
    else:
        reason = "the plan's file was edited, or its groups were given by hand"
    raise InputError(
        f"the plan is for problem {plan.problem[:12]}, its model and cluster give {problem.fingerprint[:12]}: {reason}; "
        "plan again with 'rlplace place'"
    )


def _graph(plan: PlacementPlan) -> OpGraph:
    source: Mapping[str, Any] = _source(plan).get("graph") or {}
    recipe = recipe_of(plan)
    if "rescaled_from" not in source:
        return _captured(recipe, recipe.batch, source)
    from rlplace.graph.rescale import rescale

    sizes = source["rescaled_from"]
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(samples) is int and samples > 0 for samples in sizes):
        raise InputError(f"plan: source.graph.rescaled_from: expected two numbers of samples, found {show(sizes)}")
    small, large = sizes
    return rescale(_captured(recipe, small, source), _captured(recipe, large, source), recipe.batch)


def _captured(recipe: Recipe, batch: int, source: Mapping[str, Any]) -> OpGraph:
    from rlplace.graph.capture import capture

    loaded = recipe.build("meta", seed=0, batch=batch)
    return capture(
        loaded.module,
        loaded.example_inputs,
        loss=loaded.loss,
        optimizer=recipe.optimizer,
        autocast=recipe.autocast,
        master_weights=recipe.master_weights,
        name=loaded.name,
        source={key: value for key, value in source.items() if key != "rescaled_from"} | {"batch": batch},
    )
