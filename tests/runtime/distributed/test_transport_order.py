"""What NCCL needs that gloo does not, over gloo: groups and connections of all directions before the first message."""

import pytest
import torch
import torch.distributed as dist
from launch import run
from loops import DOUBLE, train

from rlplace.runtime.distributed.execution import wire


def as_for_nccl():
    """Trains with a group for each direction, and says which directions were connected."""
    torch.set_num_threads(1)
    told = dist.get_backend
    dist.get_backend = lambda group=None: "no tags"
    try:
        options = {"deal": "random", "seed": 2, "microbatches": 2, "schedule": "1f1b"}
        found = {engine: train("awkward", 2, steps=2, engine=engine, **options) for engine in ("stage_graph", "joint_graph")}
        found["pipeline"] = train("t5", 2, steps=2, engine="pipeline", **options | {"deal": "chain"})
        return found, len(wire._connected)
    finally:
        dist.get_backend = told


@pytest.mark.slow
def test_every_direction_has_a_group_of_its_own():
    for worst, connected in run(2, as_for_nccl, timeout_s=120):
        assert connected == 2
        for found in worst.values():
            assert all(found["worst"][what] <= limit for what, limit in DOUBLE.items()), found
