"""The sleep of blocks on emulated hosts."""

from types import SimpleNamespace

import numpy as np

from benchmarks.emulated import sleeps_of
from rlplace.strategy.drafts import Mesh


class Costs:
    """A block takes a second a sample forward and two backward, and half of it are experts."""

    names = ("a", "b", "c")

    def passes(self, kind, cut):
        seconds = np.full(3, float(cut.samples))
        return SimpleNamespace(forward_s=seconds, backward_s=2 * seconds, weight_s=seconds, again_s=np.zeros((3, 3)))

    def held(self, tensor, expert):
        experts = 4 if expert > 1 else 0
        return SimpleNamespace(weight_bytes=np.full(3, 4 + 4 / expert), expert_bytes=np.full((3, 3), experts / expert))

    def update_s(self, kind, tensor, expert):
        return (4 + 4 / expert) * np.ones(3)


def test_a_narrow_stage_computes_what_all_replicas_of_a_wide_one_hand_it():
    """Three devices, the middle stage twice over: a pass of either of its replicas has two samples, of the others four."""
    draft = SimpleNamespace(
        places=[Mesh((0,)), Mesh((1, 2), replicate=2), Mesh((3,))], place_of_stage=[0, 1, 2], bounds=[0, 1, 2, 3],
        microbatch=(2,), recompute=bytes(3), data_degree=2,
    )  # fmt: skip
    found = [sleeps_of(Costs(), draft, stage, [0] * 4)["blocks"] for stage in range(3)]
    assert found == [{"a": [4.0, 8.0, 4.0]}, {"b": [2.0, 4.0, 2.0]}, {"c": [4.0, 8.0, 4.0]}]


def test_an_update_takes_the_time_of_what_a_device_has_of_dense_weights_and_of_experts():
    def update_s(**mesh):
        draft = SimpleNamespace(
            places=[Mesh((0, 1, 2, 3), **mesh)], place_of_stage=[0], bounds=[0, 3], microbatch=(1,), recompute=bytes(3),
            data_degree=1,
        )  # fmt: skip
        return sleeps_of(Costs(), draft, 0, [0] * 4)["update_s"]

    assert update_s(tensor=4, expert=4) == 3 * (4 + 1)  # a tensor group that has cut nothing dense here
    assert update_s(shard=2, context=2, sharding=1) == 3 * (8 / 4)
    assert update_s(shard=4, sharding=3, expert=2) == 3 * (4 / 4 + 2 / 2)
