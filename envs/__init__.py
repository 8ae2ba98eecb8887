"""The gymnasium environments, imported as `rlplace.envs`."""

from typing import TYPE_CHECKING, Any

from rlplace.envs.backends import Backend, Evaluation, MeasuredBackend, SimulatedBackend
from rlplace.envs.instance import PlacementInstance, make_instance
from rlplace.envs.observation import EDGE_FEATURES, NODE_FEATURES
from rlplace.envs.placement import PlacementEnv
from rlplace.envs.refinement import RefinementEnv

if TYPE_CHECKING:
    from rlplace.envs.cluster import ClusterEnv
    from rlplace.envs.strategy import StrategyEnv

__all__ = [
    "EDGE_FEATURES",
    "NODE_FEATURES",
    "Backend",
    "ClusterEnv",
    "Evaluation",
    "PlacementInstance",
    "MeasuredBackend",
    "PlacementEnv",
    "RefinementEnv",
    "SimulatedBackend",
    "StrategyEnv",
    "make_instance",
]


def __getattr__(name: str) -> Any:
    """`ClusterEnv` and `StrategyEnv` load the planner of whole strategies, which the others do without."""
    if name == "ClusterEnv":
        from rlplace.envs import cluster as module
    elif name == "StrategyEnv":
        from rlplace.envs import strategy as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
