"""The strategy record: what a file says comes back, and what contradicts itself is refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from rlplace.errors import InputError
from rlplace.plan.strategy import Pipeline, Stage, Strategy, uniform_words

BOTH = list(range(8)), list(range(8, 16))


def interleaved() -> dict[str, Any]:
    """Four chunks on two places, each 4 x 2 devices."""
    chunks = (["embed", "layers.0"], ["layers.1"], ["layers.2"], ["norm", "head"])
    stages: list[dict[str, Any]] = [
        {"blocks": blocks, "devices": BOTH[index % 2], "mesh": {"shard": 4, "tensor": 2}, "sharding": 1}
        for index, blocks in enumerate(chunks)
    ]
    stages[0] |= {"sequence_parallel": True, "recompute": {"layers.0": "full"}, "offload": {"layers.0": "optimizer"}}
    return {"batch": 64, "microbatch": [2], "microbatches": [8], "schedule": "interleaved_1f1b", "stages": stages}


def one_stage(**changed: Any) -> dict[str, Any]:
    stage = {"blocks": ["a", "b"], "devices": [0, 1, 2, 3], "mesh": {"replicate": 2, "shard": 2}, "sharding": 3}
    return {"batch": 16, "microbatch": [4], "microbatches": [1], "stages": [{**stage, **changed}]}


def test_a_file_comes_back_as_it_was() -> None:
    for data in (interleaved(), one_stage()):
        assert Strategy.from_dict(data).to_dict() == data


def test_unlike_pipelines_come_back_as_they_were() -> None:
    left = {"stages": [{"blocks": ["a", "b"], "devices": [0]}], "microbatch": [3], "microbatches": [2]}
    chain = [{"blocks": ["a"], "devices": [1]}, {"blocks": ["b"], "devices": [2]}]
    right = {"stages": chain, "microbatch": [1], "microbatches": [2], "schedule": "1f1b"}
    data = {"batch": 8, "pipelines": [left, right]}
    strategy = Strategy.from_dict(data)
    assert strategy.to_dict() == data
    assert strategy.devices == (0, 1, 2)
    assert [pipeline.samples for pipeline in strategy.pipelines] == [6, 2]


def test_replicas_count_their_own_samples() -> None:
    assert Stage(("a",), tuple(range(8)), {"replicate": 2, "shard": 2, "tensor": 2}, sharding=1).data_degree == 4
    stage = Stage(("a",), (0, 1), {"replicate": 2})
    assert Pipeline((stage,), (2,), (3,)).samples == 12
    assert Pipeline((stage,), (2, 1), (3, 5)).samples == 11
    assert Strategy(11, (Pipeline((stage,), (2, 1), (3, 5)),)).batch == 11


def test_one_line_says_it_aloud() -> None:
    said = uniform_words(Strategy.from_dict(interleaved()))
    assert said == (
        "2 pipeline stages (4 chunks), interleaved_1f1b, tensor parallel 2, fully sharded over 4 (level 1), full recompute "
        "of 1 of 6 blocks, optimizer offload of 1 of 6 blocks, 8 micro-batches of 2 on 16 devices"
    )
    assert uniform_words(Strategy(4, (Pipeline((Stage(("a",), (0,)),), (4,), (1,)),))) == "one device, 1 micro-batch of 4"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"blocks": ["a", "a"]}, r"stages\[0\]: a block stands twice"),
        ({"devices": [0, 1, 2, 2]}, r"stages\[0\]: a device stands twice"),
        ({"devices": [0, 1]}, "a mesh of replicate 2 x shard 2 has 4 devices, found 2"),
        ({"mesh": {"replicate": 4}}, "sharding level 3 with shard 1"),
        ({"sharding": 0}, "sharding level 0 with shard 2"),
        ({"sharding": 4}, r"stages\[0\].sharding: expected a whole number in 0..3, found 4"),
        ({"mesh": {"shards": 4}}, "unknown key 'shards'; did you mean 'shard'"),
        ({"mesh": {"shard": 0}}, r"mesh\['shard'\]: expected a whole number from 1 up"),
        ({"sequence_parallel": True}, "sequence_parallel splits activations over the tensor axis, which is 1"),
        ({"tensor": {"a.q": "column"}}, "it gives tensor layouts, but the tensor axis is 1"),
        ({"expert": 3}, "expert 3 does not divide shard x context x tensor = 2"),
        ({"recompute": {"c": "full"}}, "recompute: 'c' is no block of the stage"),
        ({"offload": {"c": "all"}}, "offload: 'c' is no block of the stage"),
        ({"offload": {"a": "disk"}}, "unknown .*'disk'"),
        ({"devices": []}, "devices: expected a list of 1 or more"),
        ({"devices": [1 << 40]}, "devices"),
    ],
)
def test_a_stage_that_contradicts_itself_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Strategy.from_dict(one_stage(**changed))


def chain(*stages: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {"batch": 8, "microbatch": [1], "microbatches": [4], "schedule": "1f1b", "stages": list(stages), **changed}


A, B = (
    {"blocks": ["a"], "devices": [0, 1], "mesh": {"replicate": 2}},
    {"blocks": ["b"], "devices": [2, 3], "mesh": {"replicate": 2}},
)
SHARDED = {"blocks": ["b"], "devices": [2, 3], "mesh": {"shard": 2}, "sharding": 3}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (chain(A, B, batch=9), "batch is 9, but its replicas process 8 samples"),
        (chain(A, {**B, "blocks": ["a"]}), "block 'a' is in two stages"),
        (chain(A, {**B, "blocks": []}), r"stages\[1\] has no blocks"),
        (chain(A, {**B, "devices": [1, 2]}), r"stages\[1\] shares device 1 with another stage, but not its devices"),
        (chain(A, {"blocks": ["b"], "devices": [2, 3, 4], "mesh": {"replicate": 3}}), "does not divide the largest, 3"),
        (chain(A, SHARDED), "a pipeline has sharding level 0 or 1"),
        (chain(A, B, schedule=None), "2 stages need a schedule for chains: "),
        (chain(A, B, schedule="list"), "unknown schedule .list."),
        (chain(A, schedule="1f1b"), "schedule 1f1b is for several stages, found one"),
        (chain(A, B, schedule="2f2b"), "unknown schedule '2f2b'; did you mean '1f1b'"),
        (chain(A, B, microbatches=[1], batch=2), "schedule 1f1b needs at least as many micro-batches as stages"),
        (chain(A, B, {**A, "blocks": ["c"]}), "schedule 1f1b cannot run stages on devices 0 1 0"),
        (chain(A, B, microbatch=[1, 1, 1]), "microbatch has 3 entries; give one, or one for each of 2 replicas"),
        (
            one_stage() | {"microbatches": [1, 1, 1, 2], "batch": 20},
            "unlike numbers of micro-batches need sharding level 0 or 1",
        ),
        ({"batch": 2, "pipelines": [chain(A, B) | {"batch": 1}]}, "unknown key 'batch'"),
        ({"batch": 2}, "stages"),
        ({"stages": [A]}, "batch"),
        ([], "expected an object"),
    ],
)
def test_stages_that_make_no_pipeline_are_refused(data: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        Strategy.from_dict(data)


def test_pipelines_that_do_not_go_together_are_refused() -> None:
    def two(**changed: Any) -> dict[str, Any]:
        left = {"stages": [{"blocks": ["a"], "devices": [0]}]}
        right = {"stages": [{"blocks": ["a"], "devices": [1], **changed}]}
        return {"batch": 2, "pipelines": [left, right]}

    assert len(Strategy.from_dict(two()).pipelines) == 2
    with pytest.raises(InputError, match=r"pipelines\[1\] shares device 0 with another pipeline"):
        Strategy.from_dict(two(devices=[0]))
    third = {"batch": 3, "pipelines": [*two()["pipelines"], *two(devices=[0])["pipelines"][1:]]}
    with pytest.raises(InputError, match=r"pipelines\[2\] shares device 0 with another pipeline"):
        Strategy.from_dict(third)
    with pytest.raises(InputError, match="every pipeline runs all blocks, in the same order"):
        Strategy.from_dict(two(blocks=["b"]))
