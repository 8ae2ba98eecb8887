"""rlplace: a reinforcement-learning device placer for PyTorch.

Public names are loaded on first use, so that ``import rlplace`` stays quick; importing the package registers the gymnasium
environments, ``rlplace/Placement-v0`` and others (docs/agent/environments.md).
"""

from __future__ import annotations

import importlib
from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlplace.agents.planner import Agent as Agent
    from rlplace.agents.planner import load_agent as load_agent
    from rlplace.api import place as place
    from rlplace.cluster.parse import Cluster as Cluster
    from rlplace.cost.price import price as price
    from rlplace.cost.price import split_backward as split_backward
    from rlplace.errors import CaptureError as CaptureError
    from rlplace.errors import InfeasibleError as InfeasibleError
    from rlplace.errors import InputError as InputError
    from rlplace.errors import MissingError as MissingError
    from rlplace.errors import RlplaceError as RlplaceError
    from rlplace.explanation.explain import diff as diff
    from rlplace.explanation.explain import explain as explain
    from rlplace.explanation.report.report import report as report
    from rlplace.model.capture.capture import capture as capture
    from rlplace.model.graph.opgraph import OpGraph as OpGraph
    from rlplace.plan.plan import PlacementPlan as PlacementPlan
    from rlplace.plan.strategy import Strategy as Strategy
    from rlplace.problem import Problem as Problem
    from rlplace.runtime.export.device_maps import complete_device_map as complete_device_map
    from rlplace.runtime.export.device_maps import plan_from_device_map as plan_from_device_map
    from rlplace.runtime.export.script import export as export
    from rlplace.runtime.export.trainer import distribute_accelerator as distribute_accelerator
    from rlplace.runtime.export.trainer import distribute_trainer as distribute_trainer
    from rlplace.runtime.job.distribute import distribute as distribute
    from rlplace.runtime.job.distribute import parallelize as parallelize
    from rlplace.runtime.placement.apply import apply as apply
    from rlplace.runtime.state.deferred import deferred_weights as deferred_weights
    from rlplace.runtime.state.training_state import load_checkpoint as load_checkpoint
    from rlplace.runtime.state.training_state import save_checkpoint as save_checkpoint
    from rlplace.simulator import simulate as simulate
    from rlplace.simulator import simulate_many as simulate_many
    from rlplace.strategy.search.space import Space as Space

__version__ = "0.1.0"

# A plain checkout keeps envs/, agents/ and checkpoints/ beside this package; an installed wheel holds them inside it, and
# there this changes nothing.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "envs" / "__init__.py").is_file():
    __path__.append(str(_root))

_PUBLIC = {
    "Agent": "rlplace.agents.planner",
    "CaptureError": "rlplace.errors",
    "Cluster": "rlplace.cluster.parse",
    "InfeasibleError": "rlplace.errors",
    "InputError": "rlplace.errors",
    "MissingError": "rlplace.errors",
    "OpGraph": "rlplace.model.graph.opgraph",
    "PlacementPlan": "rlplace.plan.plan",
    "Problem": "rlplace.problem",
    "RlplaceError": "rlplace.errors",
    "Space": "rlplace.strategy.search.space",
    "Strategy": "rlplace.plan.strategy",
    "apply": "rlplace.runtime.placement.apply",
    "complete_device_map": "rlplace.runtime.export.device_maps",
    "capture": "rlplace.model.capture.capture",
    "deferred_weights": "rlplace.runtime.state.deferred",
    "diff": "rlplace.explanation.explain",
    "distribute": "rlplace.runtime.job.distribute",
    "distribute_accelerator": "rlplace.runtime.export.trainer",
    "distribute_trainer": "rlplace.runtime.export.trainer",
    "explain": "rlplace.explanation.explain",
    "export": "rlplace.runtime.export.script",
    "load_agent": "rlplace.agents.planner",
    "load_checkpoint": "rlplace.runtime.state.training_state",
    "parallelize": "rlplace.runtime.job.distribute",
    "plan_from_device_map": "rlplace.runtime.export.device_maps",
    "place": "rlplace.api",
    "price": "rlplace.cost.price",
    "report": "rlplace.explanation.report.report",
    "save_checkpoint": "rlplace.runtime.state.training_state",
    "simulate": "rlplace.simulator",
    "simulate_many": "rlplace.simulator",
    "split_backward": "rlplace.cost.price",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rlplace' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


def _register_environments() -> None:
    """Registers the environments once; their entry points are strings, so that nothing heavy is imported."""
    import gymnasium

    registered: dict[str, tuple[Any, ...]] = {  # most steps, reward at which it counts as solved, makers, arguments
        "Placement": (4096, 0.0, "envs.placement:PlacementEnv", "envs.vector:PlacementVectorEnv"),
        "Refinement": (1024, 0.01, "envs.refinement:RefinementEnv", "envs.vector:RefinementVectorEnv"),
        "Cluster": (64, None, "envs.cluster:ClusterEnv", None),
        "Strategy": (1024, 0.15, "envs.strategy:StrategyEnv", None),
        "Toy": (64, -0.05, "envs.toy:toy_env", "envs.toy:toy_vector"),
    }
    for name in ("Placement", "Refinement", "Strategy"):
        most, mark, _, vector = registered[name]
        makers = "agents.problems.ids:single", vector and "agents.problems.ids:vector"
        for split in ("train", "val", "test", "branchy"):
            registered[f"{name}-{split}"] = most, min(mark, 0.01), *makers, {"kind": name, "split": split}
    for name, (most, mark, maker, vector, *rest) in registered.items():
        if f"rlplace/{name}-v0" not in gymnasium.registry:
            gymnasium.register(
                f"rlplace/{name}-v0",
                entry_point=f"rlplace.{maker}",
                vector_entry_point=vector and f"rlplace.{vector}",
                max_episode_steps=most,
                reward_threshold=mark,
                kwargs=rest[0] if rest else {},
            )


_register_environments()
