import copy
import dataclasses
import json

import msgspec
import pytest

from rlplace.cost import CostTable
from rlplace.cost.curve import Curve, MeasuredShape, Residual
from rlplace.cost.foreign import SHIPPED, as_costs, shipped_costs
from rlplace.cost.table import KindCosts, TargetCosts
from rlplace.errors import InputError

KEY = ("gemm", "float32", "forward")
RESIDUAL = Residual(
    features=("log_m", "log_k"), mean=(1.0, 2.0), scale=(1.0, 1.0), low=(0.0, 0.0), high=(9.0, 9.0),
    weights=(((0.1, 0.2), (0.3, 0.4)), ((1.0, 1.0),)), bias=((0.0, 0.0), (0.0,)), bound=2.0,
)  # fmt: skip
CURVE = Curve(
    0.8, 1e9, 0.7, 1e6, floor_s=4e-6, saturation=0.5, overhead_s=1e-5, basis="calibrated", source="x", residual=RESIDUAL
)
TABLE = CostTable(
    {
        "a100-80g": KindCosts(
            {KEY: CURVE}, {KEY: (MeasuredShape({"m": 8, "n": 8, "k": 8}, 1e-5),)}, eager_issue_s=9e-6, step_factor=1.1
        ),
        "cpu": KindCosts(),
    },
    name="lab",
    source="here",
)


def test_a_table_survives_its_file(tmp_path):
    TABLE.save(tmp_path / "lab.cost.json")
    again = CostTable.load(tmp_path / "lab.cost.json")
    assert again == TABLE
    assert again.fingerprint == TABLE.fingerprint
    renamed = dataclasses.replace(TABLE, name="other", source="there")
    assert renamed.fingerprint == TABLE.fingerprint != shipped_costs().fingerprint


def test_the_shipped_file_is_canonical():
    assert CostTable.load(SHIPPED).to_dict() == json.loads(SHIPPED.read_text())
    assert as_costs(None) is shipped_costs()


def test_a_table_over_another():
    other = Curve(0.5, 0, 0.5, 0)
    merged = CostTable({"a100-80g": KindCosts({("bmm", "float32", "forward"): other}, step_factor=2.0)}).over(TABLE)
    assert merged.kinds["a100-80g"].curves == {KEY: CURVE, ("bmm", "float32", "forward"): other}
    assert merged.kinds["a100-80g"].step_factor == 2.0
    assert merged.kinds["a100-80g"].measured[KEY][0].seconds == 1e-5
    assert "cpu" in merged.kinds
    assert as_costs(TABLE).kinds["v100"] == shipped_costs().kinds["v100"]


def test_what_was_measured_again_counts():
    """Of a target and of a class the upper table's entry, whose numbers the fingerprint covers."""
    old, new = (TargetCosts(CURVE, (MeasuredShape({"bytes": 8}, seconds),)) for seconds in (1e-3, 2e-3))
    other = ("aten.add.Tensor", "float32", "forward")
    below, above = (
        CostTable({"cpu": KindCosts(measured={KEY: one.measured}, targets=targets)})
        for one, targets in ((old, {KEY: old, other: old}), (new, {KEY: new}))
    )
    merged = above.over(below).kinds["cpu"]
    assert merged.targets == {KEY: new, other: old} and merged.measured == {KEY: new.measured}
    assert len({table.fingerprint for table in (below, above, CostTable({"cpu": KindCosts(targets={KEY: old})}))}) == 3
    changed = CostTable({"cpu": KindCosts(measured={KEY: old.measured}, targets={KEY: old, other: new})})
    assert changed.fingerprint != below.fingerprint


def edited(path, value):
    data = copy.deepcopy(TABLE.to_dict())
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return data


CURVES = ("kinds", "a100-80g", "curves")


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("kinds", ""), {"curves": []}, "kinds: '' is not a key"),
        ((*CURVES[:2], "step_factor"), 0, "step_factor"),
        ((*CURVES[:2], "eager_issue_s"), -1.0, "eager_issue_s"),
        ((*CURVES, 0, "op"), "gem", "did you mean 'gemm'"),
        ((*CURVES, 0, "dtype"), "fp32", "dtype"),
        ((*CURVES, 0, "direction"), "forwards", "did you mean 'forward'"),
        ((*CURVES, 0, "basis"), "guess", "basis"),
        ((*CURVES, 0, "compute_efficiency"), 1.5, "compute_efficiency"),
        ((*CURVES, 0, "compute_efficiency"), 0.0, "compute_efficiency"),
        ((*CURVES, 0, "bandwidth_half_bytes"), -1, "bandwidth_half_bytes"),
        ((*CURVES, 0, "saturation"), 2, "saturation"),
        ((*CURVES, 0, "overhead_s"), -1e-9, "overhead_s"),
        ((*CURVES, 0, "residual", "features"), ["log_m", "log_q"], "did you mean"),
        ((*CURVES, 0, "residual", "mean"), [1.0], "one number per feature"),
        ((*CURVES, 0, "residual", "scale"), [0.0, 1.0], "scale"),
        ((*CURVES, 0, "residual", "low"), [10.0, 1.0], "above its high"),
        ((*CURVES, 0, "residual", "weights"), [[[1.0]]], "bias per layer"),
        ((*CURVES, 0, "residual", "weights"), [[[1.0], [1.0]], [[1.0, 1.0]]], "does not fit"),
        ((*CURVES, 0, "residual", "bias"), [[0.0, 0.0], [1e9]], r"bias\[1\]\[0\]: expected a number in"),
        ((*CURVES, 0, "residual", "bound"), 0.5, "bound"),
        (("kinds", "a100-80g", "measured", 0, "shapes"), [{"dims": {"m": 8}, "seconds": -1}], "seconds"),
        (("kinds", "a100-80g", "measured", 0, "shapes"), [{"dims": {}, "seconds": 1}], "dims: expected an object of 1 or more"),
        (("kinds", "a100-80g", "measured", 0, "shapes"), [{"dims": {"q": 1}, "seconds": 1}], "unknown dim 'q'"),
    ],
)
def test_a_wrong_file_is_refused_with_one_line(path, value, message):
    with pytest.raises(InputError, match=message) as caught:
        CostTable.from_dict(edited(path, value))
    assert "\n" not in str(caught.value)


def test_a_curve_given_twice_is_refused():
    data = TABLE.to_dict()
    curves = data["kinds"]["a100-80g"]["curves"]
    with pytest.raises(InputError, match="given twice"):
        CostTable.from_dict({**data, "kinds": {"a100-80g": {"curves": curves * 2}}})


def test_a_table_in_memory_is_checked_too():
    with pytest.raises(InputError, match="compute_efficiency"):
        CostTable({"cpu": KindCosts({KEY: msgspec.structs.replace(CURVE, compute_efficiency=float("inf"))})})
    with pytest.raises(InputError, match="unknown op"):
        CostTable({"cpu": KindCosts({("conv2", "float32", "forward"): CURVE})})
