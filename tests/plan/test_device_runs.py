"""Device numbers of plans in files: runs come back as they were, and texts that are no runs are refused."""

import json
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.plan.device_runs import SHORTEST, lengthened, shortened
from rlplace.plan.prediction import Prediction
from rlplace.plan.strategy import Pipeline, Stage, Strategy


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 80)), max_size=6))
def test_runs_come_back_as_they_were(runs):
    devices = [number for first, count in runs for number in range(first, first + count)]
    found = shortened(devices)
    assert lengthened(found, "devices") == devices
    texts = [item for item in found if isinstance(item, str)]
    assert all(int(text.split("-")[1]) - int(text.split("-")[0]) + 1 >= SHORTEST for text in texts)


def test_a_strategy_on_thousands_of_devices_is_short():
    halves = [tuple(range(start, start + 8192)) for start in (0, 8192)]
    stages = tuple(
        Stage(devices=own, blocks=(name,), mesh={"replicate": 8192}) for own, name in zip(halves, ("a", "b"), strict=True)
    )
    strategy = Strategy(batch=8192, pipelines=(Pipeline(stages, microbatch=(1,), microbatches=(1,), schedule="gpipe"),))
    data = strategy.to_dict()
    assert [stage["devices"] for stage in data["stages"]] == [["0-8191"], ["8192-16383"]]
    assert Strategy.from_dict(data) == strategy
    both = {**data, "pipelines": [{key: data[key] for key in ("stages", "microbatch", "microbatches", "schedule")}]}
    for key in ("stages", "microbatch", "microbatches", "schedule"):
        del both[key]
    assert Strategy.from_dict(both) == strategy


@pytest.mark.parametrize("text", ["", "0", "5-4", "7-7", "-1-4", "0-131072", "0-9999999", "0-3,5", "a-b", "0 - 3"])
def test_other_texts_are_refused_with_their_place(text):
    with pytest.raises(InputError, match=r"stages\[0\].devices: .* is not a run of device numbers"):
        lengthened([1, text], "stages[0].devices")
    with pytest.raises(InputError, match="names more than 131072 devices"):
        lengthened(["0-131071", 3], "devices")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2 * SHORTEST)), max_size=6), st.booleans())
def test_figures_by_device_come_back_and_long_runs_of_equal_ones_are_short(runs, nested):
    peaks = tuple(value for value, count in runs for _ in range(count))
    plain = Prediction(peak_memory_bytes=peaks, host_bytes=peaks)
    given = Prediction(op_level=plain) if nested else plain
    data = given.to_dict()
    assert Prediction.from_dict(json.loads(json.dumps(data))) == given
    written = data["op_level"] if nested else data
    equal = [len(list(run)) for _, run in groupby(peaks)]
    assert len(written.get("peak_memory_bytes", [])) == sum(1 if count >= SHORTEST else count for count in equal)
    for text, says in (("1x5", "is not a run of an equal number"), ("999999 x 5", "more than 131072 numbers")):
        with pytest.raises(InputError, match=says):
            Prediction.from_dict({"peak_memory_bytes": [1, text]})
