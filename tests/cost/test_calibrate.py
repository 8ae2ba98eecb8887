"""Calibration on measurements that are made up from known coefficients."""

import msgspec
import numpy as np
import pytest

import rlplace
from rlplace.cluster.presets import cpu_kind
from rlplace.cost.compute import explain_times, target_names
from rlplace.cost.curve import work_seconds
from rlplace.cost.timings import ControlTiming, Environment, MeasuredModel, MeasuredOp, Measurement, StepTiming
from rlplace.errors import InputError
from rlplace.measure.calibrate import calibrate, step_factor
from rlplace.measure.ops import describe_ops
from rlplace.model.zoo import load_model

KIND = cpu_kind(2, 16_000_000_000)
FLOOR_S, COMPUTE, BANDWIDTH = 4e-6, 0.6, 0.5


def true_seconds(flops, size):
    compute = flops / (COMPUTE * KIND.peak_flops["float32"])
    return FLOOR_S + max(compute, size / (BANDWIDTH * KIND.memory_bandwidth_bytes_per_s))


def op(target, kind, flops, size, seconds, direction="forward", count=1, dims=None):
    return MeasuredOp(
        target, kind, "float32", direction, float(flops), int(size), count, seconds, seconds, seconds, 25, dims or {}
    )


def measurement(ops, name="zoo:mlp", step_s=None, **environment):
    known = {"device": "a processor", "device_kind": "cpu", "device_type": "cpu", "torch": "2.13", "threads": 1, **environment}
    total = sum(o.seconds * o.count for o in ops)
    step = None if step_s is None else StepTiming(step_s * total, step_s * total, step_s * total, step_s * total, 20, 20)
    return Measurement(
        name=name,
        model=MeasuredModel(name, 1, 1, "fp32", "adam"),
        environment=Environment(**known),
        cache="step",
        ops=tuple(ops),
        step=step,
        control=ControlTiming("mm", 1e-3, 1e-3),
    )


def sweep(target, kind, intensity, sizes):
    return [op(target, kind, intensity * size, size, true_seconds(intensity * size, size)) for size in sizes]


SIZES = np.geomspace(1e4, 1e8, 24).astype(int).tolist()


@pytest.fixture(scope="module")
def recovered():
    ops = sweep("aten.linear.default", "gemm", 200.0, SIZES) + sweep("aten.add.Tensor", "elementwise", 0.1, SIZES)
    return calibrate([measurement(ops)], KIND, by_model=False, holdout=0.25)


def test_known_coefficients_come_back(recovered):
    targets = recovered.table.kinds["cpu"].targets
    product = targets[("aten.linear.default", "float32", "forward")].curve
    assert product.compute_efficiency == pytest.approx(COMPUTE, rel=0.05)
    addition = targets[("aten.add.Tensor", "float32", "forward")].curve
    assert addition.bandwidth_efficiency == pytest.approx(BANDWIDTH, rel=0.05)
    rates = {"peak_flops": KIND.peak_flops["float32"], "bandwidth_bytes_per_s": KIND.memory_bandwidth_bytes_per_s}
    between = np.geomspace(1.5e4, 9e7, 17)
    for curve, intensity in ((product, 200.0), (addition, 0.1)):
        assert curve.basis == "calibrated"
        predicted = curve.floor_s + work_seconds(curve, intensity * between, between, **rates)
        np.testing.assert_allclose(predicted, [true_seconds(intensity * size, size) for size in between], rtol=0.05)


def test_held_out_shapes_are_predicted(recovered):
    assert {error.label for error in recovered.by_shape} == {"gemm forward", "elementwise forward"}
    assert all(error.ops == 6 and error.mean < 0.05 and abs(error.total) < 0.05 for error in recovered.by_shape)


def test_models_are_predicted_by_the_others():
    first = measurement(sweep("aten.add.Tensor", "elementwise", 0.1, SIZES[::2]), "zoo:a")
    second = measurement(sweep("aten.mul.Tensor", "elementwise", 0.1, SIZES[1::2]), "zoo:b")
    errors = calibrate([first, second], KIND, holdout=0.0).by_model
    assert [error.label for error in errors] == ["zoo:a", "zoo:b"]
    for error in errors:  # neither target is known to the other model, so the op class lends its curve
        assert error.loaned == 1.0 and error.mean < 0.1


def test_faster_than_the_preset_is_expressed_by_the_step_factor():
    ops = [msgspec.structs.replace(o, seconds=o.seconds / 10) for o in sweep("aten.linear.default", "gemm", 200.0, SIZES)]
    costs = calibrate([measurement(ops)], KIND, by_model=False, holdout=0.0).table.kinds["cpu"]
    entry = costs.targets[("aten.linear.default", "float32", "forward")]
    assert costs.step_factor < 0.2 and entry.curve.compute_efficiency <= 1.0
    slowest = max(entry.measured, key=lambda shape: shape.dims["bytes"])
    assert slowest.seconds * costs.step_factor == pytest.approx(max(o.seconds for o in ops), rel=1e-6)


def test_step_factor_is_the_median_of_the_steps():
    ops = sweep("aten.add.Tensor", "elementwise", 0.1, SIZES[:4])
    assert step_factor([measurement(ops)]) == 1.0
    found = [measurement(ops, step_s=factor) for factor in (1.05, 1.1, 1.9)]
    assert step_factor(found) == pytest.approx(1.1)


def test_means_count_every_op():
    """Three ops of 1 ms and one of 5 ms take 2 ms in the mean, both without work and in shapes that look alike."""
    ready = sweep("aten.add.Tensor", "elementwise", 0.1, SIZES[:4])
    idle = [op("aten.item", "elementwise", 0, 0, s, count=n, dims={"x": n}) for s, n in ((1e-3, 3), (5e-3, 1))]
    alike = [op("aten.mul.Tensor", "elementwise", 10, 100, s, count=n, dims={"x": n}) for s, n in ((1e-3, 3), (5e-3, 1))]
    targets = calibrate([measurement([*ready, *idle, *alike])], KIND, by_model=False, holdout=0.0).table.kinds["cpu"].targets
    assert targets["aten.item", "float32", "forward"].curve.floor_s == pytest.approx(2e-3)
    (shape,) = targets["aten.mul.Tensor", "float32", "forward"].measured
    assert shape.dims == {"flops": 10, "bytes": 100} and shape.seconds == pytest.approx(2e-3)


def test_a_view_pays_the_host_time_of_its_backward():
    """2 us of its own and 3 us of its backward, in its curve where it moves nothing and in its shapes where it does."""
    views = [
        op(target, "view", 0, size, seconds, direction)
        for target, forward_bytes in (("aten.view", 0), ("aten.reshape", 1000))
        for direction, size, seconds in (("forward", forward_bytes, 2e-6), ("backward", 0, 3e-6))
    ]
    targets = calibrate([measurement(views)], KIND, by_model=False, holdout=0.0).table.kinds["cpu"].targets
    assert set(targets) == {(name, "float32", "forward") for name in ("aten.view", "aten.reshape")}
    assert targets["aten.view", "float32", "forward"].curve.floor_s == pytest.approx(5e-6)
    assert [shape.seconds for shape in targets["aten.reshape", "float32", "forward"].measured] == pytest.approx([5e-6])


def issued(name, launches, step_s):
    """Makes four ops of 1 us of work, each of which the host took 30 us to issue between marks."""
    ops = [
        msgspec.structs.replace(o, seconds=1e-6, issue_s=3e-5) for o in sweep("aten.add.Tensor", "elementwise", 0.1, SIZES[:4])
    ]
    step = StepTiming(step_s, step_s, step_s, step_s, 20, 20)
    return msgspec.structs.replace(measurement(ops, name), step=step, launches=launches)


def test_a_whole_step_bounds_what_the_host_takes():
    """Ten kernels in 200 us are issued in 20 us each at most, whatever was seen between marks; a long step says nothing."""
    bound, long = issued("zoo:a", 10.0, 2e-4), issued("zoo:b", 10.0, 1.0)
    for found, issue_s in (([bound, long], 2e-5), ([long], 3e-5)):
        costs = calibrate(found, KIND, by_model=False, holdout=0.0).table.kinds["cpu"]
        assert costs.eager_issue_s == pytest.approx(issue_s)
    assert step_factor([bound]) == pytest.approx(1.0)  # the host explains the step, not its ops


def test_held_out_shapes_are_not_fitted():
    """One of four shapes is held out: its own time changes its error and not what is predicted for it."""
    ops = sweep("aten.add.Tensor", "elementwise", 0.1, SIZES[::6])

    def error_of(found):
        (error,) = calibrate([measurement(found)], KIND, by_model=False, holdout=0.25).by_shape
        assert error.ops == 1
        return error

    plain = error_of(ops)
    slowed = [msgspec.structs.replace(o, seconds=(3 if o.seconds == plain.measured_s else 1) * o.seconds) for o in ops]
    held = error_of(slowed)
    assert held.measured_s == pytest.approx(3.0 * plain.measured_s) and held.predicted_s == plain.predicted_s


@pytest.mark.slow
def test_a_model_at_another_batch_size_is_not_another():
    first, second, third = (
        measurement(sweep(f"aten.{name}.Tensor", "elementwise", 0.1, SIZES[::3]), model)
        for name, model in (("add", "zoo:a"), ("add", "zoo:a"), ("mul", "zoo:b"))
    )
    second = msgspec.structs.replace(second, model=msgspec.structs.replace(second.model, batch=2))
    errors = calibrate([first, second, third], KIND, holdout=0.0).by_model
    assert [(error.label, error.loaned) for error in errors] == [("zoo:a", 1.0), ("zoo:a", 1.0), ("zoo:b", 1.0)]


def test_measurements_that_do_not_belong_together_are_refused():
    ops = sweep("aten.add.Tensor", "elementwise", 0.1, SIZES[:4])
    with pytest.raises(InputError, match="no timed ops"):
        calibrate([measurement([])], KIND)
    with pytest.raises(InputError, match="threads"):
        calibrate([measurement(ops), measurement(ops, threads=2)], KIND)
    with pytest.raises(InputError, match="measured on h100"):
        calibrate([measurement(ops, device_kind="h100")], KIND)
    with pytest.raises(InputError, match="held-out share"):
        calibrate([measurement(ops)], KIND, holdout=1.0)


@pytest.fixture(scope="module")
def graph():
    model = load_model("zoo:mlp,layers=2,width=32", batch=4)
    return rlplace.capture(model.module, model.example_inputs)


def timed(graph):
    """Times of every op of a graph that no curve would give."""
    rows = {}
    for index, key in enumerate(describe_ops(graph)):
        rows.setdefault(key, []).append(index)
    found = []
    for number, ((target, kind, dtype, direction, flops, size, dims), ops) in enumerate(rows.items()):
        seconds = 1e-3 * (1 + number % 7)
        record = op(target, kind, flops, size, seconds, direction, len(ops), dict(dims))
        found.append(msgspec.structs.replace(record, dtype=dtype))
    return found


@pytest.mark.slow
def test_prediction_uses_measured_shapes_exactly(graph):
    found = timed(graph)
    table = calibrate([measurement(found)], KIND, by_model=False, holdout=0.0).table
    times = explain_times(graph, KIND, table)
    wanted = {(o.target, o.direction, o.flops, o.size_bytes): o.seconds for o in found}
    keys = [(key[0], key[3], key[4], key[5]) for key in describe_ops(graph)]
    work = np.flatnonzero(graph.op_bytes > 0)
    assert len(work) > 10
    np.testing.assert_allclose(times.seconds[work], [wanted[keys[op]] for op in work.tolist()], rtol=1e-9)
    assert times.shares().keys() <= {"measured", "calibrated"}
    assert "measured" not in explain_times(graph, KIND, table, host="compiled").shares()  # it runs other kernels


def test_a_model_that_was_measured_twice_does_not_predict_itself():
    one = measurement(sweep("aten.linear.default", "gemm", 200.0, SIZES), name="zoo:a")
    other = measurement(sweep("aten.add.Tensor", "elementwise", 0.1, SIZES), name="zoo:b")
    assert calibrate([one, one], KIND, holdout=0.0).by_model == ()
    apart, twice = (calibrate(found, KIND, holdout=0.0).by_model for found in ([one, other], [one, one, other]))
    assert twice == (apart[0], *apart)


def test_attention_with_dropout_and_grouped_convolutions_have_names_of_their_own():
    import torch
    from torch.nn import functional

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Conv1d(8, 8, 3, padding=1, groups=2)
            self.each = torch.nn.Conv1d(8, 8, 3, padding=1, groups=8)

        def forward(self, x):
            x = self.each(self.mix(x))
            heads = x.view(2, 2, 4, 16).transpose(2, 3)
            plain = functional.scaled_dot_product_attention(heads, heads, heads)
            return (plain + functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)).square().mean()

    names = set(target_names(rlplace.capture(Model(), (torch.rand(2, 8, 16),))))
    attention = "aten.scaled_dot_product_attention.default"
    assert {attention, f"{attention}+dropout", "aten.conv1d.default+groups", "aten.conv1d.default+groups+depthwise"} <= names
