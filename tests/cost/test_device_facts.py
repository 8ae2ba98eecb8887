"""Facts of one measured GPU in prices: products whose rows do not fit tensor cores, passes of an update, the host's time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from rlplace import capture
from rlplace.cluster.presets import KINDS
from rlplace.cost.calls import calls_of
from rlplace.cost.compute import explain_times
from rlplace.cost.curve import Curve
from rlplace.cost.timings import Measurement
from rlplace.errors import InputError
from rlplace.measure.calibrate import calibrate

H200, ROWS = KINDS["h200"], Path(__file__).parents[2] / "benchmarks/gpu/h200"


def head(words, optimizer="adam", dtype=torch.bfloat16):
    """Captures a step of a linear layer from 768 to so many words, on 4,096 positions."""
    with torch.device("meta"):
        layer = nn.Linear(768, words, bias=False, dtype=dtype)
    return capture(layer, (torch.zeros(4096, 768, dtype=dtype, device="meta"),), loss=lambda y: y.sum(), optimizer=optimizer)


def products_s(graph):
    return explain_times(graph, H200).device_s[[kind == "gemm" for kind in graph.op_kind]].sum()


def test_rows_that_are_no_multiples_of_eight_take_tensor_cores_longer():
    even, four, two, odd = (products_s(head(words)) for words in (50304, 50260, 50258, 50257))
    assert 4 * even < odd < 9 * even  # measured in a step of gpt2: 95 to 138 TFLOP/s beside 715 to 798
    assert even < four <= two * (1 + 1e-4) < odd
    single = [products_s(head(words, dtype=torch.float32)) for words in (50304, 50257)]
    assert single[1] < 1.01 * single[0]  # no tensor cores


def test_only_rows_of_matrices_must_be_aligned_and_not_their_number():
    with torch.device("meta"):
        layer = nn.Linear(768, 1024, bias=False, dtype=torch.bfloat16)
    inputs = torch.zeros(4097, 768, dtype=torch.bfloat16, device="meta")
    align = calls_of(capture(layer, (inputs,), loss=lambda y: y.sum())).sizes["align"]
    assert set(align) == {8.0}


@pytest.mark.parametrize("factors", [(2.0,), (1.0, 2.0, 0.5)])
def test_factors_of_unaligned_rows_are_three_and_at_least_one(factors):
    with pytest.raises((InputError, msgspec.ValidationError)):
        msgspec.convert(msgspec.to_builtins(Curve(0.5, 1.0, 0.5, 1.0)) | {"unaligned": factors}, Curve)


def test_an_update_passes_over_memory_once_for_each_line_of_its_formula():
    def moved(optimizer):
        graph = head(1024, optimizer, torch.float32)
        calls = calls_of(graph)
        return calls.size_bytes[[graph.op_kind[op] == "optimizer" for op in calls.op]].sum() / (4 * 768 * 1024)

    assert moved("adam") == pytest.approx(18)
    assert moved("adamw") == pytest.approx(20)
    assert moved("momentum") == pytest.approx(8)
    assert moved("sgd") == pytest.approx(3)


@pytest.mark.slow
def test_issuing_a_kernel_takes_no_longer_than_measured_steps_leave():
    """The times between marks are longer than whole steps without marks."""
    measurements = [Measurement.load(path) for path in sorted(ROWS.glob("*.measure.json"))]
    costs = calibrate(measurements, H200, holdout=0.0, by_model=False).table.kinds["h200"]
    least = min(m.step.quiet_s / m.launches for m in measurements)
    assert costs.eager_issue_s == pytest.approx(least)
    assert 0.9 < costs.step_factor < 1.2
    unknown = [msgspec.structs.replace(m, launches=0.0) for m in measurements]  # of an older version
    assert calibrate(unknown, H200, holdout=0.0, by_model=False).table.kinds["h200"].eager_issue_s > 1.5 * least
