"""Fits behind the shipped costs: the bounded residual, and the curves of one measured GPU."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.fit_residual import fit_residual
from benchmarks.gpu.fit import fit, in_steps, predict, published_attention, read, sustained, write_halves
from rlplace.cluster.presets import KINDS
from rlplace.cost.foreign import shipped_costs
from rlplace.measure.fit import fit_op_curve
from tests.cost.test_fit import DEVICE, TRUE, mape, timings

H200, ROWS = KINDS["h200"], Path(__file__).parents[2] / "benchmarks/gpu/h200"


def narrow(dims):
    """Products with a narrow output are slower."""
    return 1.0 + 1.5 / (1.0 + min(dims["m"], dims["n"]) / 64)


@pytest.mark.slow
def test_a_residual_learns_what_the_curve_cannot():
    rows, unseen = timings(TRUE, 300, factor=narrow, noise=0.02), timings(TRUE, 100, factor=narrow, seed=1)
    curve = fit_op_curve(rows, basis="calibrated", source="test", **DEVICE)
    better = fit_residual(curve, rows, op="gemm", processors=100, **DEVICE)
    assert mape(curve, unseen) > 0.09
    assert mape(better, unseen) < 0.05
    again = fit_residual(curve, rows, op="gemm", processors=100, **DEVICE)
    assert again == better  # nothing random in it


def test_no_residual_where_it_would_learn_noise():
    rows, unseen = timings(TRUE, 60, noise=0.05), timings(TRUE, 100, seed=1)
    curve = fit_op_curve(rows, basis="calibrated", source="test", **DEVICE)
    assert mape(fit_residual(curve, rows, op="gemm", processors=100, **DEVICE), unseen) < 0.05
    assert fit_residual(curve, rows[:8], op="gemm", processors=100, **DEVICE) is curve
    assert fit_residual(curve, rows, op="elementwise", processors=100, **DEVICE) is curve


def test_the_shipped_curves_are_those_of_the_rows():
    rows = read(ROWS / "kernels.jsonl") + in_steps(ROWS) + [row for row in sustained(ROWS) if row.key[1] != "half"]
    keys = {("gemm", "half", "forward"), ("norm", "float32", "backward"), ("optimizer", "float32", "update")}
    found = write_halves(fit([row for row in rows if row.key in keys], H200, "one H200"))
    shipped = shipped_costs().kinds["h200"].curves
    for key in (("norm", "float32", "backward"), ("optimizer", "float32", "update")):
        assert found[key].bandwidth_efficiency == pytest.approx(shipped[key].bandwidth_efficiency, rel=0.02)
    ours, theirs = found[("gemm", "bfloat16", "forward")], shipped[("gemm", "bfloat16", "forward")]
    assert theirs.compute_efficiency == pytest.approx(0.988 * ours.compute_efficiency, rel=0.02)  # at the power limit
    assert theirs.unaligned == pytest.approx(ours.unaligned, rel=0.1)
    products = [row for row in rows if row.key == ("gemm", "half", "forward") and row.timing.seconds > 30e-6]
    errors = [abs(predict(theirs, row, H200) / row.timing.seconds - 1) for row in products]
    assert len(products) > 30 and np.mean(errors) < 0.2


def test_attention_of_one_card_and_of_long_sequences_has_one_curve():
    own = [row for row in read(ROWS / "kernels.jsonl") if row.key[:2] == ("attention", "half")]
    assert len(own) > 20 and not any("causal=2" in row.name for row in own)  # under a mask another kernel runs
    rows = own + published_attention()
    found = write_halves(fit([row for row in rows if row.key[:2] == ("attention", "half")], H200, "one H200"))
    shipped = shipped_costs().kinds["h200"].curves
    for way, most in (("forward", 0.17), ("backward", 0.08)):
        key = ("attention", "bfloat16", way)
        assert found[key].compute_efficiency == pytest.approx(shipped[key].compute_efficiency, rel=0.02)
        published = [row for row in published_attention() if row.key[2] == way]
        errors = [predict(shipped[key], row, H200) / row.timing.seconds - 1 for row in published]
        assert np.mean(np.abs(errors)) < most and abs(np.mean(errors)) < 0.05
