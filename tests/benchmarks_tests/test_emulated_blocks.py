"""The sleep of blocks on emulated hosts."""

from types import SimpleNamespace

import numpy as np

from benchmarks.emulated import sleeps_of
from rlplace.strategy.drafts import Mesh


class Costs:
    """A block takes a second a sample forward and two backward."""

    names = ("a", "b", "c")

    def passes(self, kind, cut):
        seconds = np.full(3, float(cut.samples))
        return SimpleNamespace(forward_s=seconds, backward_s=2 * seconds, weight_s=seconds, again_s=np.zeros((3, 3)))

    def update_s(self, kind, tensor):
        return np.full(3, 0.5)


def test_a_narrow_stage_computes_what_all_replicas_of_a_wide_one_hand_it():
    """Three devices, the middle stage twice over: a pass of either of its replicas has two samples, of the others four."""
    draft = SimpleNamespace(
        places=[Mesh((0,)), Mesh((1, 2), replicate=2), Mesh((3,))], place_of_stage=[0, 1, 2], bounds=[0, 1, 2, 3],
        microbatch=(2,), recompute=bytes(3), data_degree=2,
    )  # fmt: skip
    found = [sleeps_of(Costs(), draft, stage)["blocks"] for stage in range(3)]
    assert found == [{"a": [4.0, 8.0, 4.0]}, {"b": [2.0, 4.0, 2.0]}, {"c": [4.0, 8.0, 4.0]}]
