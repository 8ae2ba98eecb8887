"""The placement problem: record, checks, file format, networkx exchange."""

from rlplace.cluster.links import Device, Links
from rlplace.problem.io import problem_from_dict, problem_to_dict
from rlplace.problem.problem import BACKWARD, BACKWARD_WEIGHT, FORWARD, PHASES, UPDATE, Collective, Problem

__all__ = [
    "BACKWARD",
    "BACKWARD_WEIGHT",
    "Collective",
    "FORWARD",
    "PHASES",
    "UPDATE",
    "Device",
    "Links",
    "Problem",
    "problem_from_dict",
    "problem_to_dict",
]
