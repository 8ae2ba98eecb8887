import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from rlplace.cluster import KINDS
from rlplace.cost import CostTable, explain_times, price
from rlplace.cost.calls import calls_of, fused_traffic
from rlplace.cost.compute import fold_issue, issue_times
from rlplace.cost.curve import BASES, DIRECTIONS, Curve, MeasuredShape, Residual, kernel_seconds, roofline_seconds
from rlplace.cost.foreign import shipped_costs, with_host
from rlplace.cost.scaled import find_curve, peak_of, precision_of
from rlplace.cost.table import KindCosts
from rlplace.errors import InputError
from rlplace.model.capture.capture import capture
from rlplace.model.graph.opgraph import BACKWARD, OP_KINDS
from tests.graphs import GraphBuilder, transformer_graph

A100 = KINDS["a100-80g"]
FITTED = [(kind, op) for kind, costs in shipped_costs().kinds.items() for op, _, _ in costs.curves]


def product(m, n, k, batch=1, *, kind=A100, op=None, dtype="float32"):
    """Returns seconds of one product without its launch."""
    op = op or ("bmm" if batch > 1 else "gemm")
    precision = precision_of(kind, op, dtype)
    curve = find_curve(kind, shipped_costs(), op, precision, "forward")
    m, n, k, batch = (np.atleast_1d(np.asarray(v, dtype=np.float64)) for v in (m, n, k, batch))
    width = 4 if dtype == "float32" else 2
    flops, size = 2 * batch * m * n * k, width * batch * (m * k + k * n + m * n)
    device = {"peak_flops": peak_of(kind, precision), "bandwidth_bytes_per_s": kind.memory_bandwidth_bytes_per_s}
    one = np.ones_like(flops * 1.0)
    sizes = {"m": m * one, "n": n * one, "k": k * one, "batch": batch * one}
    found = kernel_seconds(curve, flops * one, size * one, sizes, processors=kind.processors, **device)
    return found, roofline_seconds(flops * one, size * one, **device)


def one_op(kind="elementwise", *, flops=0.0, size_bytes=400, dtype="float32", **dims):
    """Makes a graph of one op that reads and writes `size_bytes` in all."""
    builder = GraphBuilder()
    builder.op("a", [builder.input(size_bytes // 2)], size_bytes - size_bytes // 2, kind=kind, flops=flops, dtype=dtype)
    return dataclasses.replace(builder.build(), op_dims={0: dims} if dims else {})


def test_the_shipped_coefficients():
    table = shipped_costs()
    assert set(table.kinds) == {"v100", "a100-40g", "a100-80g", "h100", "h200", "l4", "t4"}
    assert set(FITTED) >= {(kind, op) for kind in table.kinds for op in ("gemm", "bmm")}
    assert set(FITTED) >= {(kind, op) for kind in table.kinds if kind != "h100" for op in ("elementwise", "norm", "softmax")}
    for kind, costs in table.kinds.items():
        for curve in costs.curves.values():
            assert curve.basis == "fitted" and ("benchmarks.gpu" if kind == "h200" else "NeuSight") in curve.source
            # The floor inside a step is never that of a lone, synchronised call.
            assert 1e-6 < curve.floor_s < 3e-5 if kind == "h200" else curve.floor_s is None
            assert curve.overhead_s < 1e-4
    gemm = table.kinds["a100-80g"].curves[("gemm", "float32", "forward")]
    assert 0.8 < gemm.compute_efficiency < 0.95
    assert 0.2 < table.kinds["l4"].curves[("gemm", "float32", "forward")].compute_efficiency < 0.4  # power-limited


@pytest.mark.parametrize(
    "name, size, measured",
    [  # public fp32 medians of linear layers: fraction of peak by FLOPs of the call
        ("a100-40g", 3e9, 0.58), ("a100-40g", 2e10, 0.71), ("a100-40g", 5e10, 0.75), ("a100-40g", 5e11, 0.79),
        ("a100-80g", 3e9, 0.68), ("a100-80g", 2e10, 0.81), ("a100-80g", 5e11, 0.91),
        ("h100", 3e9, 0.44), ("h100", 2e10, 0.56), ("h100", 5e11, 0.74),
        ("v100", 3e9, 0.62), ("v100", 2e10, 0.80), ("v100", 5e11, 0.88),
        ("l4", 3e9, 0.25), ("l4", 2e10, 0.28), ("t4", 3e9, 0.41), ("t4", 5e10, 0.37),
    ],
)  # fmt: skip
def test_products_follow_the_public_medians(name, size, measured):
    side = round((size / 2) ** (1 / 3) / 128) * 128
    kind = KINDS[name]
    found, _ = product(side, side, side, kind=kind)
    overhead_s = find_curve(kind, shipped_costs(), "gemm", "float32", "forward").overhead_s  # of timing a lone call
    reached = 2 * side**3 / (found[0] + kind.launch_s + overhead_s) / kind.peak_flops["float32"]
    assert reached == pytest.approx(measured, rel=0.4 if name == "t4" else 0.3)  # one shape against the median of many


@pytest.mark.parametrize("name", sorted(KINDS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_times_are_above_the_roofline(name, dtype):
    rng = np.random.default_rng(0)
    m, n, k, batch = (2 ** rng.uniform(0, 15, 500) for _ in range(4))
    for op, depth in (("gemm", np.ones(500)), ("bmm", batch)):
        found, least = product(np.ceil(m), np.ceil(n), np.ceil(k), np.ceil(depth), kind=KINDS[name], op=op, dtype=dtype)
        assert (found >= least * (1 - 1e-12)).all()
        assert np.isfinite(found).all()


@pytest.mark.parametrize("name", sorted(KINDS))
def test_doubling_a_size_of_a_product_never_makes_it_faster(name):
    rng = np.random.default_rng(1)
    m, n, k = (2.0 ** rng.integers(5, 14, 400) for _ in range(3))
    base, _ = product(m, n, k, kind=KINDS[name])
    for bigger in ((2 * m, n, k), (m, 2 * n, k), (m, n, 2 * k)):
        ratio = product(*bigger, kind=KINDS[name])[0] / base
        assert ratio.min() >= 1 - 1e-9


@pytest.mark.parametrize("name", sorted(KINDS))
def test_small_products_cost_little_beside_their_launch(name):
    """No timings hold them: a fit that charges each a fixed time would not show in its errors."""
    assert product(32, 32, 32, kind=KINDS[name])[0][0] < 15e-6
    assert product(64, 64, 64, 4, kind=KINDS[name])[0][0] < 25e-6


@pytest.mark.parametrize("op", [op for op in OP_KINDS if op not in ("view", "gemm", "bmm")])  # others timed an H100's
def test_more_bandwidth_on_the_same_chip_is_never_slower(op):
    for size in np.geomspace(1e3, 1e9, 13):
        graph = one_op(op, flops=10 * size, size_bytes=int(size))
        assert explain_times(graph, KINDS["h200"]).seconds[0] <= explain_times(graph, KINDS["h100"]).seconds[0] * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(KINDS))
def test_ops_grow_with_their_work(name):
    for op in OP_KINDS:
        if op == "view":
            continue
        works = (1e3, 400), (1e9, 10**7), (1e12, 10**9)
        grown = [explain_times(one_op(op, flops=f, size_bytes=s), KINDS[name]).seconds[0] for f, s in works]
        assert grown == sorted(grown) and grown[-1] > 10 * grown[0]


def test_tiny_ops_cost_the_launch_floor_and_views_nothing():
    found = explain_times(one_op(size_bytes=8), A100)
    assert found.device_s[0] == pytest.approx(A100.launch_s, rel=0.1)
    assert 4e-6 <= found.device_s[0] <= 8e-6
    view = GraphBuilder()
    view.op("b", [view.op("a", [view.input(10**9)], 10**9)], 0, kind="view")
    found = explain_times(view.build(), A100, host="compiled")
    assert found.device_s[1] == found.seconds[1] == 0.0
    assert found.basis[1] == -1


def test_float32_convolutions_run_at_the_tf32_rate_and_products_do_not():
    conv, gemm = one_op("conv", flops=1e13), one_op("gemm", flops=1e13)
    assert explain_times(conv, A100).seconds[0] < explain_times(gemm, A100).seconds[0] / 2
    without = msgspec.structs.replace(A100, peak_flops={"float32": 19.5e12})
    assert explain_times(conv, without).seconds[0] > explain_times(gemm, without).seconds[0]


def test_small_batches_of_tf32_convolutions_follow_published_latencies():
    """ResNet-50's forward in TF32 on one A100-40 (NVIDIA DeepLearningExamples) takes 1.19 times as long an image with 32 as
    with 256 images: its 3 x 3 convolutions of 14 x 14 pixels, half a millisecond of arithmetic at most."""

    def seconds(images):
        flops, pixels = 2.0 * 9 * 256 * 256 * 196 * images, 256 * 196 * images
        conv = one_op("conv", flops=flops, size_bytes=4 * (2 * pixels + 9 * 256 * 256))
        return explain_times(conv, KINDS["a100-40g"]).device_s[0] / images

    assert 1.1 < seconds(32) / seconds(256) < 1.3


@pytest.mark.slow
@pytest.mark.parametrize("on", [False, True])
def test_tf32_is_as_pytorch_is_set_when_the_model_is_captured(on):
    layers = torch.nn.Conv2d(256, 256, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(256 * 16 * 16, 4096)
    model, images = torch.nn.Sequential(*layers).to("meta"), (torch.empty(1024, 256, 16, 16, device="meta"),)

    def seconds(kind):
        graph = capture(model, images, loss=torch.sum)
        found = explain_times(graph, A100)
        return sum(s for s, op in zip(found.device_s, graph.op_kind, strict=True) if op == kind)

    before = {kind: seconds(kind) for kind in ("conv", "gemm")}
    try:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = on
        after = {kind: seconds(kind) for kind in ("conv", "gemm")}
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = True, False
    assert (after["conv"] == before["conv"]) if on else (after["conv"] > 1.3 * before["conv"])
    assert (after["gemm"] < 0.5 * before["gemm"]) if on else (after["gemm"] == before["gemm"])


@pytest.mark.parametrize(
    "m, n, k, measured",
    [  # microseconds of cuBLAS, bf16, on an H100 SXM (public): bound by memory, or a few waves of tiles
        (1, 576, 7168, 8.8), (1, 7168, 2048, 16.2), (128, 2112, 7168, 20.3), (128, 7168, 2048, 16.6), (128, 4096, 7168, 30.7),
        (4096, 7168, 256, 30.9), (256, 4096, 7168, 35.6), (2048, 2048, 2048, 31.8), (1, 7168, 16384, 91.1),
    ],
)  # fmt: skip
def test_half_precision_products_below_100_us_follow_public_timings(m, n, k, measured):
    h100 = KINDS["h100"]
    found, _ = product(m, n, k, kind=h100, op="gemm", dtype="bfloat16")
    assert 1e6 * (found[0] + h100.launch_s) == pytest.approx(measured, rel=0.25)


def test_what_a_time_rests_on():
    gemm, conv = one_op("gemm", flops=2.0 * 8192**3, m=8192, n=8192, k=8192), one_op("conv", flops=1e12)

    def basis(graph, kind, costs=None):
        found = explain_times(graph, kind, costs)
        return BASES[found.basis[0]]

    assert basis(gemm, A100) == "fitted"
    assert basis(one_op("gemm", flops=2.0 * 64**3, m=64, n=64, k=64), A100) == "extrapolated"  # only large ones were timed
    assert basis(one_op("gemm", flops=1e12), A100) == "extrapolated"  # nobody knows its sizes
    assert basis(conv, A100) == "scaled"
    assert basis(one_op("gemm", flops=1e12, dtype="bfloat16"), A100) == "scaled"
    assert basis(one_op("elementwise", size_bytes=10**8), A100) == "fitted"
    assert basis(one_op("elementwise", size_bytes=10**8, dtype="bfloat16"), A100) == "scaled"
    assert basis(gemm, KINDS["h200"]) == "fitted"
    assert basis(one_op("gemm", flops=1e12, dtype="bfloat16"), KINDS["h100"]) == "scaled"
    assert basis(gemm, KINDS["rtx4090"]) == "scaled"
    own = CostTable({"a100-80g": KindCosts({("conv", "tf32", "forward"): Curve(0.5, 0, 0.5, 0, 1e-5, basis="calibrated")})})
    assert basis(conv, A100, own) == "calibrated"
    assert basis(gemm, A100, own) == "fitted"  # what the table does not hold comes from the shipped one
    assert basis(conv, msgspec.structs.replace(A100, name="a100-80g/gpu3"), own) == "calibrated"
    assert explain_times(conv, A100, own).device_s[0] == pytest.approx(1e-5 + 1e12 / 78e12)
    assert "fractions of h200" in find_curve(KINDS["h100"], shipped_costs(), "gemm", "bfloat16", "forward").source


def test_a_measured_shape_overrides_the_curve():
    builder = GraphBuilder()
    for module in ("a", "b"):
        builder.op(module, [builder.input(4096)], 4096, kind="gemm", flops=2 * 32**3)
    graph = dataclasses.replace(builder.build(), op_dims={0: {"m": 32, "n": 32, "k": 32}, 1: {"m": 32, "n": 32, "k": 16}})
    key = ("gemm", "float32", "forward")
    shapes = (MeasuredShape({"m": 32, "n": 32, "k": 32}, 0.5), MeasuredShape({"m": 1, "n": 1, "k": 1}, 9.0))
    found = explain_times(graph, A100, CostTable({"a100-80g": KindCosts(measured={key: shapes}, step_factor=2.0)}))
    assert found.device_s[0] == 1.0  # twice the measured time: the step factor applies to every op
    assert [BASES[b] for b in found.basis[:2]] == ["measured", "extrapolated"]
    assert found.device_s[1] < 1e-3
    by_bytes = (MeasuredShape({"flops": 65536, "bytes": int(graph.op_bytes[1])}, 0.25),)
    found = explain_times(graph, A100, CostTable({"a100-80g": KindCosts(measured={key: by_bytes})}))
    assert found.device_s[:2].tolist() == [0.25, 0.25]


def test_a_residual_is_bounded_and_does_not_extrapolate():
    net = {"mean": (10.0,), "scale": (2.0,), "low": (5.0,), "high": (12.0,), "weights": (((1e5,),),), "bias": ((0.0,),)}
    curve = Curve(0.1, 0.0, 0.1, 0.0, residual=Residual(("log_m",), bound=3.0, **net))
    plain = msgspec.structs.replace(curve, residual=None)
    device = {"peak_flops": 1e12, "bandwidth_bytes_per_s": 1e30, "processors": 100}
    sizes = {"m": np.array([2.0**6, 2.0**11, 2.0**12, 2.0**40])}
    flops = np.full(4, 1e9)
    ratio = kernel_seconds(curve, flops, flops, sizes, **device) / kernel_seconds(plain, flops, flops, sizes, **device)
    assert ratio == pytest.approx([1 / 3, 3, 3, 3], rel=1e-6)
    fast = msgspec.structs.replace(curve, compute_efficiency=0.9)
    assert kernel_seconds(fast, flops, flops, sizes, **device)[0] == pytest.approx(1e-3)  # the roofline holds


def test_backward_products_are_two_products_of_their_own_shapes():
    graph = transformer_graph(1)
    gemm = graph.op_kind.index("gemm")
    m, n = 512, 256
    k = int(graph.op_flops[gemm] / (2 * m * n))
    backward = int(np.flatnonzero((graph.op_forward == gemm) & (graph.op_phase == BACKWARD))[0])
    graph = dataclasses.replace(graph, op_dims={gemm: {"m": m, "n": n, "k": k}})
    calls = calls_of(graph)
    rows = np.flatnonzero((calls.op == backward) & (calls.kind == OP_KINDS.index("gemm")))
    shapes = {tuple(int(calls.sizes[name][row]) for name in "mnk") for row in rows}
    assert shapes == {(m, k, n), (k, n, m)}
    assert calls.flops[rows].sum() == pytest.approx(graph.op_flops[backward], rel=1e-6)


def small_ops(count=50):
    builder = GraphBuilder()
    value = builder.input(8)
    for index in range(count):
        value = builder.op(f"m{index}", [value], 8, kind="gather")  # which no compiler fuses
    return builder.build()


def test_a_run_of_small_ops_takes_what_the_host_needs():
    graph = small_ops()
    costs = CostTable({"a100-80g": KindCosts(eager_issue_s=1e-4, compiled_issue_s=2e-5)})
    for host, issue in (("eager", 1e-4), ("compiled", 2e-5)):
        found = explain_times(graph, A100, costs, host=host)
        assert found.seconds.sum() == pytest.approx(graph.num_ops * issue, rel=0.02)
        assert (found.seconds >= found.device_s).all()
    slow = explain_times(graph, A100, CostTable({"a100-80g": KindCosts(eager_issue_s=0.0, eager_view_s=0.0)}))
    assert slow.seconds == pytest.approx(slow.device_s)
    cpu = explain_times(graph, KINDS["cpu"], host="eager")
    assert (cpu.seconds == cpu.device_s).all()
    assert (cpu.device_s >= KINDS["cpu"].launch_s).all()


def layered():
    """Makes two layers of three small ops, the second one of a nested list, an op before and one behind."""
    builder = GraphBuilder()
    value = builder.input(8)
    for module in ("first", *["stages.0"] * 3, *["stages.1.blocks.7"] * 3, "head2"):
        value = builder.op(module, [value], 8, kind="gather")
    return builder.build()


@pytest.mark.parametrize("host", ["eager", "compiled"])
def test_a_layer_takes_the_host_what_it_is_said_to_take(host, tmp_path):
    graph = layered()
    costs = with_host(None, ["a100-80g/mine"], op_s=1e-4, layer_s=6e-3)
    issue = issue_times(graph, costs.kinds["a100-80g"], host, A100)
    assert issue == pytest.approx([1e-4, *[2e-3] * 6, 1e-4])
    alone = with_host(None, ["a100-80g"], layer_s=6e-3)
    assert alone.kinds["a100-80g"].curves == shipped_costs().kinds["a100-80g"].curves
    assert issue_times(graph, alone.kinds["a100-80g"], host, A100)[1:7] == pytest.approx([2e-3] * 6)
    assert alone.kinds["h100"] == shipped_costs().kinds["h100"]
    alone.save(tmp_path / "slow.cost.json")
    assert CostTable.load(tmp_path / "slow.cost.json").fingerprint == alone.fingerprint != shipped_costs().fingerprint


def test_the_fold_equals_a_walk_along_the_two_timelines():
    rng = np.random.default_rng(0)
    for _ in range(100):
        device = rng.exponential(size=30) * rng.integers(0, 2, 30)
        issue = rng.exponential(size=30)
        host, end, expected = 0.0, 0.0, []
        for work, wait in zip(device, issue, strict=True):
            host += wait
            finish = max(end, host) + work if work > 0 else end
            expected.append(finish - end)
            end = finish
        expected[-1] += max(0.0, host - end)
        assert fold_issue(device, issue) == pytest.approx(expected)


def test_price_takes_costs_and_host_and_says_so(tmp_path):
    graph = transformer_graph(2)
    first = price(graph, "a100-80g:2")
    assert first.source["host"] == "eager"
    assert set(first.source["op_times"]["a100-80g"]) == {"fitted", "extrapolated", "scaled"}  # products without sizes
    own = CostTable({"a100-80g": KindCosts(step_factor=3.0)})
    own.save(tmp_path / "own.cost.json")
    by_path = price(graph, "a100-80g:2", costs=tmp_path / "own.cost.json", host="compiled")
    by_table = price(graph, "a100-80g:2", costs=own, host="compiled")
    assert by_path.fingerprint == by_table.fingerprint != first.fingerprint
    assert by_path.source["costs"]["path"].endswith("own.cost.json")
    assert by_path.source["costs"]["fingerprint"] != first.source["costs"]["fingerprint"]
    plain = price(graph, "a100-80g:2", host="compiled")
    assert by_path.time_s.sum() == pytest.approx(3 * plain.time_s.sum(), rel=0.05)
    with pytest.raises(InputError, match="host mode"):
        price(graph, "a100-80g:2", host="lazy")


def test_a_compiler_keeps_values_between_pointwise_ops_in_registers():
    builder = GraphBuilder()
    first = builder.op("gemm", [builder.input(1000)], 1000, kind="gemm", flops=1e6)
    cast = builder.op("cast", [first], 500, kind="copy")
    gelu = builder.op("gelu", [cast], 500)
    builder.op("norm", [gelu], 500, kind="norm")
    builder.op("out", [gelu], 100, kind="gemm", flops=1e6)
    graph = builder.build()
    size, launches = fused_traffic(graph)
    names = {name.split("/")[0]: op for op, name in enumerate(graph.op_names) if graph.op_phase[op] == 0}
    found = {name: (size[op], launches[op]) for name, op in names.items()}
    assert found["gemm"] == (graph.op_bytes[names["gemm"]], np.inf)
    assert found["cast"] == (1000.0, 0.0)  # reads the product's output, hands everything on
    assert found["gelu"] == (500.0, 1.0)  # reads registers, stores what the second product loads
    assert found["norm"] == (500.0, 1.0)
    assert found["out"] == (graph.op_bytes[names["out"]], np.inf)
    calls = calls_of(graph, "compiled")
    assert calls.launches[calls.op == names["cast"]].tolist() == [0.0]
    assert calls.size_bytes[calls.op == names["cast"]].tolist() == [1000.0]


def test_compiled_is_never_slower_than_eager():
    graph = transformer_graph(3)
    for kind in KINDS.values():
        eager, compiled = (explain_times(graph, kind, host=host) for host in ("eager", "compiled"))
        assert (compiled.device_s <= eager.device_s * (1 + 1e-12)).all()
        assert compiled.seconds.sum() < eager.seconds.sum()


def test_constants_of_a_cluster_file_win_over_published_fits():
    graph = one_op("gemm", flops=2.0 * 16384**3, size_bytes=12 * 16384**2, m=16384, n=16384, k=16384)
    by_hand = msgspec.structs.replace(A100, gemm_efficiency={**A100.gemm_efficiency, "float32": 0.5})
    found = explain_times(graph, by_hand)
    assert BASES[found.basis[0]] == "scaled"
    assert found.device_s[0] == pytest.approx(2.0 * 16384**3 / (0.5 * 19.5e12), rel=0.01)
    slower = msgspec.structs.replace(A100, peak_flops={**A100.peak_flops, "float32": 19.5e12 / 2})
    found = explain_times(graph, slower)  # other peaks keep the fitted fractions
    assert BASES[found.basis[0]] == "fitted"
    assert found.device_s[0] == pytest.approx(2 * explain_times(graph, A100).device_s[0], rel=0.05)
    slow_launch = msgspec.structs.replace(A100, launch_s=1e-3)
    assert explain_times(one_op(size_bytes=8), slow_launch).device_s[0] == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize(
    ("name", "columns", "more"),
    [("Softmax", 64, 1.5), ("LogSoftmax", 1024, 1.0), ("LogSoftmax", 1025, 4 / 3), ("LayerNorm", 64, 5 / 3)],
)
def test_backwards_read_what_their_kernels_read(name, columns, more):
    kind = "norm" if name == "LayerNorm" else "softmax"
    net = getattr(torch.nn, name)(columns if kind == "norm" else -1)
    graph = capture(net, torch.empty(512, columns, requires_grad=True), loss=lambda output: output.pow(2).sum())
    calls = calls_of(graph)
    for op in (op for op, found in enumerate(graph.op_kind) if found == kind):
        own = calls.size_bytes[(calls.op == op) & (calls.kind == OP_KINDS.index(kind))].sum()
        assert own == pytest.approx(graph.op_bytes[op] * (more if graph.op_phase[op] == BACKWARD else 1.0))


def test_convolutions_of_three_by_three_have_a_curve_of_their_own_where_tf32_is_off():
    def net(**options):
        return torch.nn.Sequential(torch.nn.Conv2d(64, 128, **options))

    plain, strided = (
        capture(net(kernel_size=3, padding=1, stride=stride), torch.empty(16, 64, 32, 32), loss=torch.sum) for stride in (1, 2)
    )
    assert plain.op_dims[0] == {"m": 16 * 32**2, "n": 128, "k": 576, "image": 32} and 0 not in strided.op_dims
    off = msgspec.structs.replace(A100, peak_flops={name: peak for name, peak in A100.peak_flops.items() if name != "tf32"})
    for graph, kind, basis in (
        (plain, KINDS["v100"], "fitted"),
        (plain, off, "fitted"),
        (plain, A100, "scaled"),
        (strided, off, "scaled"),
    ):
        found = explain_times(graph, kind)
        assert BASES[found.basis[0]] == basis
        assert found.device_s[0] > 0.25 * graph.op_flops[0] / peak_of(kind, precision_of(kind, "conv", "float32"))


def test_a_convolution_has_three_directions():
    graph = transformer_graph(1)
    gemm = graph.op_kind.index("gemm")
    backward = int(np.flatnonzero((graph.op_forward == gemm) & (graph.op_phase == BACKWARD))[0])
    kinds = tuple("conv" if op in (gemm, backward) else kind for op, kind in enumerate(graph.op_kind))
    graph = dataclasses.replace(graph, op_kind=kinds)
    calls = calls_of(graph)
    rows = np.flatnonzero(calls.op == backward)
    assert {DIRECTIONS[d] for d in calls.direction[rows]} == {"backward", "backward_weight"}
    assert calls.flops[rows].sum() == pytest.approx(graph.op_flops[backward])
    curves = {
        ("conv", "tf32", way): Curve(1.0, 0.0, 1.0, 0.0, floor_s=floor, basis="calibrated")
        for way, floor in (("forward", 0.001), ("backward", 0.01), ("backward_weight", 0.1))
    }
    found = explain_times(graph, A100, CostTable({"a100-80g": KindCosts(curves)}))
    assert found.device_s[[gemm, backward]] == pytest.approx([0.001, 0.11], rel=1e-2)
    assert BASES[found.basis[backward]] == "calibrated"
    del curves[("conv", "tf32", "backward_weight")]
    found = explain_times(graph, A100, CostTable({"a100-80g": KindCosts(curves)}))
    assert found.device_s[backward] == pytest.approx(0.02, rel=1e-2)


def test_half_precision_is_faster_where_there_are_units_for_it():
    assert product(8192, 8192, 8192, dtype="bfloat16")[0] < product(8192, 8192, 8192)[0] / 10
    v100 = KINDS["v100"]
    half, full = (product(4096, 4096, 4096, kind=v100, dtype=d)[1][0] for d in ("bfloat16", "float32"))
    assert half == full


@pytest.mark.parametrize("name, bf16, fp32", [("v100", 9.6, 14.0), ("t4", 2.46, 4.17), ("rtx2080ti", 5.14, 9.23)])
def test_bfloat16_without_units_is_slower_than_float32_as_published(name, bf16, fp32):
    size = dict.fromkeys("mnk", 8192)
    half, full = (
        explain_times(one_op("gemm", flops=2.0 * 8192**3, size_bytes=8 * 8192**2, dtype=dtype, **size), KINDS[name]).device_s[0]
        for dtype in ("bfloat16", "float32")
    )
    assert full / half == pytest.approx(bf16 / fp32, rel=0.2)
