"""Plans of a model that a file of the user's holds: the file is named relative to the plan, wherever the plan is read from."""

import json

import numpy as np
import pytest

from rlplace.errors import InputError
from rlplace.plan import PlacementPlan
from rlplace.planned import Planned

MODEL = (
    "import torch\n\ndef build(batch):\n    return torch.nn.Linear(4, 2), torch.zeros(batch, 4), lambda output: output.sum()\n"
)
SIZES = {"batch": 3, "seq": 8, "dtype": "fp32", "optimizer": "adam"}


def plan_of(text):
    return PlacementPlan("p" * 64, "balanced", 0, np.zeros(1, dtype=np.int32), source={"graph": {"model": text, **SIZES}})


def named(path):
    return json.loads(path.read_text())["source"]["graph"]["model"]


@pytest.fixture
def folders(tmp_path, monkeypatch):
    for name in ("code", "plans", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "code" / "mine.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_file_is_found_from_another_folder(folders, monkeypatch):
    path = folders / "plans" / "one.plan.json"
    plan_of("code/mine.py:build").save("plans/one.plan.json")
    assert named(path) == "../code/mine.py:build"
    assert PlacementPlan.load("plans/one.plan.json").source["graph"]["model"] == "code/mine.py:build"
    monkeypatch.chdir(folders / "elsewhere")
    again = PlacementPlan.load(path)
    assert again.source["graph"]["model"] == "../code/mine.py:build"
    assert Planned(again).recipe.build("cpu", 0).example_inputs[0].shape == (3, 4)


def test_both_may_move_together(folders, monkeypatch):
    plan_of("code/mine.py:build").save("plans/one.plan.json")
    (folders / "moved").mkdir()
    for name in ("code", "plans"):
        (folders / name).rename(folders / "moved" / name)
    assert PlacementPlan.load("moved/plans/one.plan.json").source["graph"]["model"] == "moved/code/mine.py:build"


def test_file_that_is_gone_is_named(folders):
    plan_of("code/mine.py:build").save("plans/one.plan.json")
    (folders / "code" / "mine.py").unlink()
    with pytest.raises(InputError, match=r"mine.py'?: file not found"):
        Planned(PlacementPlan.load("plans/one.plan.json")).recipe.build("cpu", 0)


@pytest.mark.parametrize("text", ["hf:gpt2,n_layer=2", "package.module:build", "/far/away/mine.py:build"])
def test_other_models_stay(folders, text):
    plan_of(text).save("plans/one.plan.json")
    assert named(folders / "plans" / "one.plan.json") == text
    assert PlacementPlan.load("plans/one.plan.json").source["graph"]["model"] == text
