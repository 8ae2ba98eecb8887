"""The page's data and its text: what goes in comes out, nothing is loaded, hostile names stay names."""

import base64
import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser

import msgspec
import numpy as np
import pytest

import rlplace
import rlplace.text
from rlplace.cost.timings import PlaceTiming, PlanTiming
from rlplace.errors import InputError
from rlplace.explanation.report.data import MAX_LINKS, PlannerRow, front_coded, report_data
from rlplace.explanation.report.report import json_text, planner_rows, render
from rlplace.plan.plan import make_plan
from rlplace.problem.build import TensorSpec, build_problem
from rlplace.problem.generate import random_problem

HOSTILE = '</script><img src=x onerror="alert(1)">&amp;\'\u2028\U0001f600\ud800{{script}}'


class Page(HTMLParser):
    """Elements with their attributes, and the text of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.raw, self.inside = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = tag if tag in ("script", "style") else None
        if self.inside == "script" and dict(attrs).get("type"):
            self.inside = "data"

    def handle_endtag(self, tag):
        self.inside = None

    def handle_data(self, text):
        if self.inside:
            self.raw[self.inside] = self.raw.get(self.inside, "") + text


@pytest.fixture(scope="module")
def piped():
    problem = random_problem(3, num_groups=32, num_devices=4, memory_factor=1.5, shape="chain")
    plan = make_plan(problem, np.arange(32) * 4 // 32, planner="hand")
    return report_data(problem, plan)


def boxes_of(data):
    """(row, start, end, op) of every box, decoded as the page does it."""
    found, at = [], 0
    for number, row in enumerate(data["rows"]):
        time = 0
        for _ in range(row["boxes"]):
            start = time + data["boxes"]["gap"][at]
            time = start + data["boxes"]["length"][at]
            found.append((number, start * data["tick_s"], time * data["tick_s"], data["boxes"]["op"][at]))
            at += 1
    return found


def test_boxes_come_back_to_a_tick(piped):
    data = json.loads(json_text(piped.to_dict()))
    found = boxes_of(data)
    lanes = piped.lanes
    assert len(found) == len(lanes.row)
    row, start, end, op = (np.array(column) for column in zip(*found, strict=True))
    assert (row == lanes.row).all() and (op == lanes.op).all()
    assert np.abs(start - lanes.start_s).max() <= 0.51 * data["tick_s"]
    assert np.abs(end - lanes.end_s).max() <= 0.51 * data["tick_s"]
    assert 1e7 <= data["step_s"] / data["tick_s"] <= 1e8


def test_memory_in_the_page_reaches_the_peak(piped):
    data = piped.to_dict()
    for device, curve, peak in zip(data["devices"], data["memory"], piped.timeline.peak_memory_bytes, strict=True):
        assert device["peak_bytes"] == peak
        assert abs(max(np.cumsum(curve["size"])) * data["memory_unit_bytes"] - peak) <= data["memory_unit_bytes"]


@pytest.mark.parametrize(
    "names", [[], ["a"], ["group1", "group12", "other", ""], ["x\U0001f600a", "x\U0001f600b", "\U0001f601"]]
)
def test_front_coded_names_come_back(names):
    shared, rest = front_coded(names)
    before, found = "", []
    for count, text in zip(shared, rest, strict=True):  # as a browser does it, in UTF-16 units
        before = before.encode("utf-16-le")[: 2 * count].decode("utf-16-le") + text
        found.append(before)
    assert found == names


def test_page_loads_nothing(piped):
    text = render(piped)
    page = Page(text)
    policies = [a["content"] for tag, a in page.elements if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"]
    (policy,) = policies
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(page.raw[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    attributes = [(tag, name, value) for tag, found in page.elements for name, value in found.items()]
    assert not [a for a in attributes if a[1] in ("src", "srcset", "style", "action", "data") or a[1].startswith("on")]
    assert all(value.startswith("#") for _, name, value in attributes if name == "href")
    assert not {"link", "img", "iframe", "object", "embed", "form"} & {tag for tag, _ in page.elements}
    assert "://" not in text and "@import" not in text and "url(" not in text
    assert "{{" not in re.sub(r"<script.*?</script>", "", text, flags=re.S)


def hostile_problem():
    problem = random_problem(0, num_groups=6, num_devices=2)
    return dataclasses.replace(
        problem,
        name=HOSTILE,
        group_names=tuple(f"{HOSTILE}.{i}" for i in range(6)),
        op_names=tuple(f"{HOSTILE}/{i}" for i in range(18)),
        devices=tuple(dataclasses.replace(d, name=f"{HOSTILE}{i}", kind=HOSTILE) for i, d in enumerate(problem.devices)),
        source={"model": HOSTILE, "graph": {"model": HOSTILE}, "cluster": HOSTILE},
    )


def test_hostile_names_stay_names():
    problem = hostile_problem()
    plan = make_plan(problem, [0, 1] * 3, planner=HOSTILE)
    rows = [PlannerRow(HOSTILE, False, None, False, None, 0, None, HOSTILE)]
    place = PlaceTiming(0, HOSTILE, 1.0, 0.0, 0.0, 0.0)
    timing = PlanTiming(HOSTILE, plan.fingerprint, problem.fingerprint, HOSTILE, HOSTILE, (1.0,), (place,), 0.0, 1.0)
    ordinary = render(report_data(random_problem(0, num_groups=6, num_devices=2), make_plan_like(plan)))
    text = render(report_data(problem, plan, planners=rows, measured=(timing, timing)))
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert "img" not in tags and tags.count("script") == 2 == [tag for tag, _ in Page(ordinary).elements].count("script")
    assert page.raw["script"] == Page(ordinary).raw["script"]
    data = json.loads(page.raw["data"])
    assert data["name"] == HOSTILE and data["devices"][1]["name"] == f"{HOSTILE}1"
    assert data["ops"]["rest"][0] == f"{HOSTILE}/0"


def make_plan_like(plan):
    return dataclasses.replace(plan, problem=random_problem(0, num_groups=6, num_devices=2).fingerprint, groups=None)


def test_infeasible_plans_have_a_page_that_says_why():
    problem = random_problem(3, num_groups=20, num_devices=4, memory_factor=0.6)
    plan = make_plan(problem, [0] * 20, planner="hand")
    data = report_data(problem, plan)
    text = render(data)
    assert not data.timeline.feasible
    assert '<span class="badge bad">infeasible</span>' in text and data.timeline.violations[0] in text
    assert len(boxes_of(data.to_dict())) == 60


def test_a_step_that_does_not_complete_has_a_page():
    problem = build_problem(
        "broken",
        time_s=[[1.0, np.nan], [1.0, 1.0]],
        tensors=[TensorSpec(0, 1, [1])],
        memory_bytes=[None, 5],
        resident_bytes=[3, 4],
    )
    data = report_data(problem, make_plan(problem, [1, 0], planner="hand"))
    assert data.timeline.step_time_s is None
    found = json.loads(json_text(data.to_dict()))
    assert found["step_s"] is None and found["boxes"] == {"gap": [], "length": [], "op": []}
    assert "cannot run, first" in render(data) and "does not complete" in render(data)


def test_only_the_busiest_links_are_in_the_page():
    problem = random_problem(1, num_groups=200, num_devices=12, width=12)
    data = report_data(problem, make_plan(problem, np.arange(200) % 12, planner="hand")).to_dict()
    shown = [row for row in data["rows"] if row["kind"] == "link"]
    assert len(shown) == MAX_LINKS < data["links"]
    assert len(data["transfers"]["bytes"]) == sum(row["boxes"] for row in shown) == len(data["transfers"]["group"])
    assert sum(row["boxes"] for row in data["rows"]) == len(data["boxes"]["gap"])


def test_planners_table_is_sorted_and_marks_this_plan():
    problem = random_problem(3, num_groups=16, num_devices=2, memory_factor=2.0)
    plan = make_plan(problem, [0] * 8 + [1] * 8, planner="hand")
    rows = planner_rows(problem, plan, report_data(problem, plan).timeline, ["round_robin", "heft", "round_robin"])
    assert sorted(row.planner for row in rows) == ["hand", "heft", "round_robin"]
    assert [row.planner for row in rows if row.this] == ["hand"]
    steps = [row.step_time_s for row in rows if row.feasible]
    assert steps == sorted(steps)
    assert planner_rows(problem, plan, report_data(problem, plan).timeline, []) == ()
    with pytest.raises(InputError, match="unknown planner 'hefd'; did you mean 'heft'"):
        planner_rows(problem, plan, report_data(problem, plan).timeline, ["hefd"])
    with pytest.raises(InputError, match="another kind of problem"):
        planner_rows(problem, plan, report_data(problem, plan).timeline, ["bipartition"])


def test_planners_that_find_no_plan_say_so():
    problem = random_problem(3, num_groups=16, num_devices=2, memory_factor=0.3)
    plan = make_plan(problem, [0] * 16, planner="hand")
    rows = planner_rows(problem, plan, report_data(problem, plan).timeline, ["single"])
    (row,) = (row for row in rows if not row.this)
    assert row.step_time_s is None and not row.feasible and row.note.startswith("no plan: ")


def test_predicted_against_measured():
    problem = random_problem(0, num_groups=6, num_devices=2)
    plan = make_plan(problem, [0, 1] * 3, planner="hand")
    places = (PlaceTiming(0, "host0", 0.8, 0.1, 0.05, 10**9, 0.7, 2 * 10**9),)
    mine = PlanTiming("mine", plan.fingerprint, problem.fingerprint, "hand", "joint", (1.0, 1.2, 1.1, 1.0), places, 2.0, 0.9)
    other = msgspec.structs.replace(mine, name="other", plan="0" * 64, predicted_s=None)
    assert [row.error is None for row in (mine, other)] == [False, True]
    text = render(report_data(problem, plan, measured=(mine, other)))
    assert re.findall(r'<tr( class="this")?><th scope="row">(mine|other)</th>', text) == [
        (' class="this"', "mine"),
        ("", "other"),
    ]
    assert text.count("This plan by process: mine") == 1
    assert "Predicted and measured" in text and "-14.3 %" in text and "host0" in text


def test_steps_of_too_many_ops_are_refused(monkeypatch):
    problem = random_problem(0, num_groups=6, num_devices=2)
    plan = make_plan(problem, [0] * 6, planner="hand")
    monkeypatch.setattr("rlplace.explanation.report.data.MAX_OPS", 18)
    report_data(problem, plan)
    monkeypatch.setattr("rlplace.explanation.report.data.MAX_OPS", 17)
    with pytest.raises(InputError, match="18 ops, a page holds 17"):
        report_data(problem, plan)


def test_report_writes_all_or_nothing(tmp_path):
    problem = random_problem(0, num_groups=6, num_devices=2)
    plan = make_plan(problem, [0, 1] * 3, planner="hand")
    path = tmp_path / "r.html"
    data = rlplace.report(problem, plan, path, planners=())
    assert path.read_text().startswith("<!doctype html>") and data.timeline.feasible
    path.write_text("kept")
    for wrong in ((problem, [0] * 6, path), ("x.problem.json", plan, path)):
        with pytest.raises(InputError, match="report: expected a P"):
            rlplace.report(*wrong)
    with pytest.raises(InputError, match="planners must be a list of names"):
        rlplace.report(problem, plan, path, planners="heft,best")
    with pytest.raises(InputError, match="no folder"):
        rlplace.report(problem, plan, tmp_path / "none" / "r.html", planners=())
    with pytest.raises(InputError, match="this problem is"):
        rlplace.report(random_problem(1, num_groups=6, num_devices=2), plan, path, planners=())
    assert path.read_text() == "kept" and sorted(p.name for p in tmp_path.iterdir()) == ["r.html"]


def filled(share):
    """A plan that fills its one device to a share, with room for ten digits."""
    limit = 10_000_000_000
    problem = build_problem("brim", time_s=[[1.0], [1.0]], tensors=[TensorSpec(0, 0, [1])], memory_bytes=[limit],
                            resident_bytes=[int(share * limit), 0])  # fmt: skip
    return render(report_data(problem, make_plan(problem, [0] * problem.num_groups, planner="hand")))


@pytest.mark.parametrize(
    ("share", "level", "words"),
    [(0.5, "good", "feasible"), (0.92, "tight", "feasible, 92.0 % of memory"), (0.999, "bad", "feasible, 99.9 % of memory")],
)
def test_a_plan_that_fills_its_memory_is_not_green(share, level, words):
    text = filled(share)
    assert f'<span class="badge {level}">{words}</span>' in text
    (kind,) = re.findall(r'<td class="([^"]*)" data-label="Peak of memory">', text)
    assert kind.split() == ["share"] + ([] if level == "good" else [level])
    assert re.search(
        rf'data-label="Peak of memory">{100 * share:.1f} %<svg class="meter{"" if level == "good" else f" {level}"}"', text
    )


def test_the_title_names_model_cluster_and_step(piped):
    source = {"graph": {"model": "hf:gpt2"}, "cluster": "a100-80g:4"}
    text = render(dataclasses.replace(piped, plan=dataclasses.replace(piped.plan, source=source)))
    step = rlplace.text.seconds_text(piped.timeline.step_time_s)
    assert (
        f"<title>hf:gpt2 on a100-80g:4, {step} a step</title>" in text and f"<h1>hf:gpt2 on a100-80g:4, {step} a step " in text
    )
    devices = tuple(dataclasses.replace(device, kind="l4") for device in piped.timeline.devices)
    plain = render(dataclasses.replace(piped, timeline=dataclasses.replace(piped.timeline, devices=devices, name="mine")))
    assert f"<title>mine on l4:4, {step} a step</title>" in plain


def test_columns_without_content_are_left_out(piped):
    rows = [PlannerRow("one", True, 0.3, True, None, 4, None), PlannerRow("two", False, None, False, None, 0, 1.5)]
    text = render(dataclasses.replace(piped, planners=tuple(rows)))
    table = text.split('aria-label="Planners"')[1].split("</table>")[0]
    heads = re.findall(r'<th scope="col">(.*?)</th>', table)
    assert heads == ["Planner", "Step time", "Samples/s", "Speed against this plan", "Devices", "Planning", ""]
    assert all(line.count("<td") == len(heads) - 1 for line in table.split("<tr")[2:])
    devices = text.split('aria-label="Devices"')[1].split("</table>")[0]
    assert "Kind" not in devices and "Peak of memory" in devices  # the problem names no kinds
