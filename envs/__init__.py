"""The gymnasium environments, imported as `rlplace.envs`."""

from rlplace.envs.backends import Backend, Evaluation, MeasuredBackend, SimulatedBackend
from rlplace.envs.instance import Instance, make_instance
from rlplace.envs.placement import PlacementEnv
from rlplace.envs.refinement import RefinementEnv

__all__ = [
    "Backend",
    "Evaluation",
    "Instance",
    "MeasuredBackend",
    "PlacementEnv",
    "RefinementEnv",
    "SimulatedBackend",
    "make_instance",
]
