"""Planners, device kinds and cost models of other packages: the example package, and packages that are wrong."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

import rlplace
from rlplace import plugins as extensions
from rlplace.cli.main import main
from rlplace.cluster import device_kind, parse
from rlplace.cost import ModelledCosts, device_times
from rlplace.cost.foreign import own_costs
from rlplace.errors import InfeasibleError, InputError, RlplaceError
from rlplace.placement import get_planner, planner_names, run_planner
from rlplace.problem.generate import random_problem
from tests import plugin_site
from tests.graphs import transformer_graph

WRONG = """
import numpy as np
from rlplace.errors import InfeasibleError
from rlplace.plan import Prediction, make_plan

def best(problem, *, seed=0, time_limit_s=None):
    raise AssertionError("the built-in one is used")

def raises(problem, *, seed=0, time_limit_s=None):
    return {}["nothing"]

def gives_up(problem, *, seed=0, time_limit_s=None):
    raise InfeasibleError("no plan")

def too_short(problem, *, seed=0, time_limit_s=None):
    return np.zeros(problem.num_groups - 1, dtype=np.int32)

def no_such_device(problem, *, seed=0, time_limit_s=None):
    return np.full(problem.num_groups, problem.num_devices)

def all_on_last(problem, *, seed=0, time_limit_s=None):
    return np.full(problem.num_groups, problem.num_devices - 1)

def boasts(problem, *, seed=0, time_limit_s=None, turns=1):
    devices = np.arange(problem.num_groups) % problem.num_devices
    predicted = Prediction(1e-9, feasible=True, extra={"remark": f"mine {turns}"})
    return make_plan(problem, devices, planner="another", predicted=predicted)

def takes_nothing():
    pass

negative = lambda graph, kind: np.full(graph.num_ops, -1.0)
short = lambda graph, kind: np.zeros(3)
number = 3
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages; what is written to it before the first use is found."""
    monkeypatch.syspath_prepend(str(tmp_path))
    extensions.forget()
    yield tmp_path
    extensions.forget()
    for name in ("rlplace_example_plugin", "wrong_plugin", "other_plugin"):
        sys.modules.pop(name, None)


@pytest.fixture
def example(site):
    plugin_site.install_example(site)


@pytest.fixture
def wrong(site):
    names = ("best", "raises", "gives_up", "too_short", "no_such_device", "all_on_last", "boasts", "takes_nothing", "number")
    planners = {name: f"wrong_plugin:{name}" for name in names} | {"absent": "no_such_module:f"}
    costs = {name: f"wrong_plugin:{name}" for name in ("negative", "short", "number")}
    devices = {"h100": "wrong_plugin:number", "abacus": "wrong_plugin:number"}
    groups = {"rlplace.planners": planners, "rlplace.costs": costs, "rlplace.devices": devices}
    plugin_site.install(site, "wrong-plugin", "wrong_plugin", WRONG, groups)


def test_example_planner_is_used_like_a_built_in_one(example):
    problem = random_problem(0, 12, 3)
    run = run_planner("even_cut", problem, seed=4)
    plan = run.plan
    assert (plan.planner, plan.seed, plan.problem) == ("even_cut", 4, problem.fingerprint)
    assert (np.diff(plan.device_of_group) >= 0).all()
    line = rlplace.simulate(problem, plan)
    assert line.feasible and plan.predicted.step_time_s == line.step_time_s
    assert rlplace.place(problem, planner="even_cut", devices=1).device_of_group.max() == 0
    assert "even_cut" in planner_names()
    with pytest.raises(InputError, match="did you mean 'even_cut'"):
        get_planner("evn_cut")


def test_example_device_kind_in_clusters(example, tmp_path):
    cluster = parse("toy40:2+cpu:1")
    assert [kind.name for kind in cluster.kinds] == ["toy40", "toy40", "cpu"]
    assert device_kind("toy40").memory_bytes == 40_000_000_000
    file = tmp_path / "lab.toml"
    file.write_text('format = "rlplace.cluster"\nversion = 1\n[[device]]\nname = "a"\nkind = "toy40"\n')
    assert parse(str(file)).devices[0].memory_bytes == 40_000_000_000
    with pytest.raises(InputError, match="did you mean 'toy40'"):
        parse("toy4:2")


def test_example_cost_model_prices(example):
    graph = transformer_graph(2)
    cluster = parse("toy40:2")
    ours, theirs = (device_times(graph, cluster, costs=costs, host="compiled") for costs in ("roofline", None))
    dear = int(graph.op_flops.argmax())
    assert ours[dear, 0] == pytest.approx(max(graph.op_flops[dear] / 20e12, graph.op_bytes[dear] / 1e12), rel=0.05)
    free = graph.op_flops == 0
    np.testing.assert_allclose(ours[free], theirs[free])
    problem = rlplace.price(graph, cluster, costs="roofline")
    assert problem.source["costs"]["path"] == "roofline"
    assert problem.source["costs"]["fingerprint"] != rlplace.price(graph, cluster).source["costs"]["fingerprint"]
    assert rlplace.price(graph, cluster, costs="roofline").fingerprint == problem.fingerprint
    with pytest.raises(InputError, match="did you mean 'roofline'"):
        own_costs("rooflin")


def test_a_function_of_ones_own_prices_without_a_package():
    graph = transformer_graph(1)
    table = ModelledCosts({}, name="a second an op", model=lambda graph, kind: np.ones(graph.num_ops))
    assert (device_times(graph, parse("h100:1"), costs=table) >= 1.0).all()
    with pytest.raises(InputError, match=r"no installed package offers cost models|unknown cost model"):
        own_costs("nothing_like_that")


def test_command_line_knows_the_names(example, tmp_path, capsys):
    file = tmp_path / "p.problem.json"
    random_problem(1, 10, 2).save(file)
    assert main(["place", str(file), "--planner", "even_cut", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["planner"] == "even_cut"
    assert main(["compare", str(file), "--planners", "single,even_cut", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["planner"]: row["status"] for row in rows} == dict.fromkeys(("best", "single", "even_cut"), "ok")
    assert main(["place", str(file), "--planner", "evencut"]) == 2
    assert "even_cut" in capsys.readouterr().err


def test_what_a_planner_returns_is_not_believed(wrong):
    problem = random_problem(2, 9, 3)
    plan = get_planner("boasts")(problem, turns=2)
    assert plan.planner == "boasts"
    assert plan.predicted.step_time_s == rlplace.simulate(problem, plan).step_time_s > 1e-9
    assert plan.predicted.extra["remark"] == "mine 2"
    for name in ("too_short", "no_such_device"):
        with pytest.raises(InputError, match=rf"planner '{name}' of wrong-plugin 1.0: what it returned is no plan"):
            get_planner(name)(problem)
    with pytest.raises(RlplaceError, match=r"planner 'raises' of wrong-plugin 1.0 failed with KeyError"):
        get_planner("raises")(problem)
    with pytest.raises(InfeasibleError, match="no plan"):
        get_planner("gives_up")(problem)


def test_a_plan_that_does_not_fit_or_moves_what_is_fixed_is_refused(wrong):
    from tests.toys import memory_tight_pair

    with pytest.raises(InfeasibleError, match=r"planner 'all_on_last' of wrong-plugin 1.0: its plan is not feasible"):
        get_planner("all_on_last")(memory_tight_pair().problem)
    problem = random_problem(2, 9, 3)
    fixed = dataclasses.replace(problem, group_device=np.zeros(9, dtype=np.int32))
    with pytest.raises(InputError, match="may only sit on"):
        get_planner("all_on_last")(fixed)


def test_a_wrong_entry_breaks_only_its_own_name(wrong):
    problem = random_problem(0, 6, 2)
    for name, message in (
        ("absent", r"planner 'absent' of wrong-plugin 1.0 cannot be imported \(no_such_module:f\): ModuleNotFoundError"),
        ("takes_nothing", r"it must take \(problem, \*, seed, time_limit_s"),
        ("number", "expected a function, found 3"),
    ):
        with pytest.raises(InputError, match=message):
            get_planner(name)
    assert get_planner("single")(problem).planner == "single"
    with pytest.raises(InputError, match=r"device kind 'abacus' of wrong-plugin 1.0: expected a DeviceKind"):
        parse("abacus:2")
    with pytest.raises(InputError, match=r"cost model 'number' of wrong-plugin 1.0: expected a CostTable"):
        own_costs("number")
    graph = transformer_graph(1)
    with pytest.raises(InputError, match=r"cost model 'negative': -1.0 s for op"):
        device_times(graph, parse("h100:1"), costs="negative")
    with pytest.raises(InputError, match="one per op"):
        device_times(graph, parse("h100:1"), costs="short")


def test_built_in_names_win_and_the_claim_is_told(wrong, caplog):
    assert get_planner("best").__module__ == "rlplace.placement.search"
    assert device_kind("h100").memory_bytes == 80_000_000_000
    planner_names()
    assert "planner 'best' of wrong-plugin 1.0: rlplace has one of that name, which is used" in caplog.text


def test_two_packages_with_one_name(site):
    for name, module in (("one-plugin", "wrong_plugin"), ("two-plugin", "other_plugin")):
        plugin_site.install(site, name, module, WRONG, {"rlplace.planners": {"boasts": f"{module}:boasts"}})
    with pytest.raises(InputError, match=r"one-plugin 1.0 and two-plugin 1.0: several packages claim this name"):
        get_planner("boasts")


def test_broken_metadata_of_one_package_is_left_out(example, site, caplog):
    plugin_site.install(site, "broken-plugin", "other_plugin", "", {"rlplace.planners": {"x": "other_plugin:x"}})
    (site / "broken_plugin-1.0.dist-info" / "entry_points.txt").write_text("[rlplace.planners]\nno equals sign\n")
    assert "even_cut" in planner_names()
    assert "entry points of package broken-plugin cannot be read" in caplog.text


def test_info_lists_plug_ins_with_their_errors(example, wrong, capsys):
    assert main(["info", "--json"]) == 0
    found = {(item["what"], item["name"]): item for item in json.loads(capsys.readouterr().out)["plugins"]}
    good = found["planner", "even_cut"]
    assert (good["package"], good["error"]) == ("rlplace-example-plugin 1.0", None)
    assert found["device kind", "toy40"]["error"] is None and found["cost model", "roofline"]["error"] is None
    assert "cannot be imported" in found["planner", "absent"]["error"]
    assert "rename it in its package" in found["planner", "best"]["error"]
    assert found["device kind", "h100"]["package"] == "wrong-plugin 1.0"


def test_start_up_looks_for_no_entry_points():
    code = (
        "import importlib.metadata as m, sys\n"
        "seen = []\n"
        "real = m.entry_points\n"
        "m.entry_points = lambda **k: seen.append(k) or real(**k)\n"
        "import rlplace\n"
        "from rlplace.cli.main import build_parser; build_parser()\n"
        "from rlplace.placement import get_planner; get_planner('single')\n"
        "print([k for k in seen if str(k.get('group')).startswith('rlplace')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.strip() == "[]"
