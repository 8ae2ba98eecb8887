"""What NCCL needs that gloo does not, over gloo: groups and connections of all directions before the first message."""

import pytest
import torch
import torch.distributed as dist
from equal import train_both
from launch import run

from rlplace.runtime.distributed.execution import wire


def as_for_nccl():
    """Trains with a group for each direction, and says which directions were connected."""
    torch.set_num_threads(1)
    told = dist.get_backend
    dist.get_backend = lambda group=None: "no tags"
    try:
        options = {"deal": "random", "seed": 2, "microbatches": 2, "schedule": "1f1b"}
        found = {engine: train_both("awkward", 2, engine=engine, **options)[0] for engine in ("stage_graph", "joint_graph")}
        found["pipeline"] = train_both("t5", 2, engine="pipeline", **options | {"deal": "chain"})[0]
        return found, len(wire._connected)
    finally:
        dist.get_backend = told


@pytest.mark.slow
def test_every_direction_has_a_group_of_its_own():
    for worst, connected in run(2, as_for_nccl, timeout_s=120):
        assert connected == 2
        for found in worst.values():
            assert found["loss"] <= 2e-6 and found["gradient"] <= 1e-9 and found["parameter"] <= 1e-9
