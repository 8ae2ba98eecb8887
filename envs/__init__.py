"""The gymnasium environments, imported as `rlplace.envs`."""

from typing import TYPE_CHECKING, Any

from rlplace.envs.backends import Backend, Evaluation, MeasuredBackend, SimulatedBackend
from rlplace.envs.instance import Instance, make_instance
from rlplace.envs.observation import EDGE_FEATURES, NODE_FEATURES
from rlplace.envs.placement import PlacementEnv
from rlplace.envs.refinement import RefinementEnv

if TYPE_CHECKING:
    from rlplace.envs.cluster import ClusterEnv

__all__ = [
    "EDGE_FEATURES",
    "NODE_FEATURES",
    "Backend",
    "ClusterEnv",
    "Evaluation",
    "Instance",
    "MeasuredBackend",
    "PlacementEnv",
    "RefinementEnv",
    "SimulatedBackend",
    "make_instance",
]


def __getattr__(name: str) -> Any:
    """`ClusterEnv` loads the planner of whole strategies, which the others do without."""
    if name != "ClusterEnv":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlplace.envs.cluster import ClusterEnv

    return ClusterEnv
