"""Limits on the size of input. Larger input is refused with one line, before memory is allocated for it.

Chosen so that the largest inputs that are worth planning fit with room to spare: op graphs of a million ops, problems of
204,000 ops, clusters of a hundred thousand devices. docs/testing.md (Files from others) says what readers promise beside
these limits.
"""

from __future__ import annotations

FILE_BYTES = 1 << 30
"""Bytes of a file of any format that is not named below."""

FORMAT_BYTES = {
    "rlplace.agent_benchmark": 1 << 28,
    "rlplace.batch_curve": 1 << 24,
    "rlplace.cases": 1 << 26,
    "rlplace.checkpoint": 1 << 24,
    "rlplace.comparison": 1 << 28,
    "rlplace.cost": 1 << 26,
    "rlplace.labels": 1 << 24,
    "rlplace.measurement": 1 << 28,
    "rlplace.plan": 1 << 29,
    "rlplace.plan_timings": 1 << 28,
    "rlplace.training": 1 << 28,
}
"""Bytes of a JSON file by its format."""

CLUSTER_BYTES = 1 << 27
"""Bytes of a cluster file: TOML is read by plain Python, a few megabytes a second; 1,024 devices with all links fit."""

CONFIG_BYTES = 1 << 24
"""Bytes of a model's ``config.json``."""

BYTES_PER_VALUE = 16
"""Bytes of the limit of a JSON format per value that a text may hold: values take far more memory than text."""

DEVICES = 131_072
"""Devices of a cluster, and numbers of those of a strategy."""

PROBLEM_DEVICES = 4096
"""Devices of a problem, whose links are matrices."""

OPS = 1 << 22
TENSORS = 1 << 23
EDGES = 1 << 25
"""Consumers of all tensors together."""

OP_TIMES = 1 << 27
"""Ops times devices: every pair has a time."""

MICROBATCHES = 1 << 16
MODULES = 1 << 12
"""Layers, blocks, experts or tables of a zoo model, each kind."""

NAME_LENGTH = 4096
"""Characters of the name of a device, group, op or parameter."""

MAX_BYTES = 1 << 60
"""Bytes of any size in a problem or cluster."""
