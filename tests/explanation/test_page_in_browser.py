"""The page in a real browser, without a screen: Chromium from the system, driven over its own driver, nothing downloaded."""

import dataclasses
import json
import os
import shutil
import tempfile
import time

import numpy as np
import pytest

from rlplace.cost.timings import PlanTiming
from rlplace.explanation.report.data import PlannerRow, report_data
from rlplace.explanation.report.report import render
from rlplace.plan.plan import make_plan
from rlplace.problem.generate import random_problem
from rlplace.text import bytes_text

pytestmark = pytest.mark.slow

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1280,900",
)  # fmt: skip
HOSTILE = '</script><img src=x onerror="window.hacked=1">&lt;b>'
LEFT, AXIS = 132, 26  # of the timeline on a wide screen


@pytest.fixture(scope="module")
def browser():
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        if os.environ.get("CI") != "true":
            pytest.skip("there is no chromium with chromedriver on the PATH")
        pytest.fail("CI needs chromium and chromedriver on the PATH: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="CI installs it") if os.environ.get("CI") != "true" else None
    webdriver = webdriver or __import__("selenium.webdriver").webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = Options()
        options.binary_location = chromium
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        opened = webdriver.Chrome(options=options, service=Service(executable_path=driver))
        opened.set_page_load_timeout(120)
        try:
            yield opened
        finally:
            opened.quit()


@pytest.fixture(scope="module")
def piped():
    """Four devices in a pipeline, modules, hostile names, two tables."""
    problem = random_problem(3, num_groups=48, num_devices=4, memory_factor=1.4, shape="chain")
    names = [f"net.{i // 12}.block{i % 12 // 4}.{'abcd'[i % 4]}" for i in range(48)]
    names[5] = f"net.0.{HOSTILE}"
    problem = dataclasses.replace(
        problem,
        name=f"model {HOSTILE}",
        group_names=tuple(names),
        op_names=tuple(f"{name}/{phase}" for name in names for phase in ("forward", "backward", "update")),
    )
    plan = make_plan(problem, np.arange(48) * 4 // 48, planner="hand")
    planners = [
        PlannerRow("heft", False, 0.3, True, 0.8, 4, 0.1),
        PlannerRow(HOSTILE, True, 0.4, True, None, 4, None),
    ]
    measured = [
        PlanTiming(f"plan{i}", "" if i else plan.fingerprint, "", "", "joint", (0.3 + 0.1 * i,) * 10, (), 0.0, 0.33 + 0.08 * i)
        for i in range(3)
    ]
    return report_data(problem, plan, planners=planners, measured=measured)


@pytest.fixture(scope="module")
def page(piped, tmp_path_factory):
    return written(tmp_path_factory.mktemp("page"), piped)


def written(folder, data):
    path = folder / "report.html"
    path.write_text(render(data), encoding="utf-8")
    return path.as_uri()


def show(browser, address, *, scheme="light", width=1280, height=900, phone=False, scale=1):
    """Opens a page and returns what it logged."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
    browser.get(address)
    wait(lambda: browser.execute_script("return document.documentElement.dataset.ready") == "yes")
    settle(browser)
    return browser.get_log("browser")


def wait(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the page did not get there"
        time.sleep(0.05)


def settle(browser):
    """Waits until everything that was asked for is painted."""
    browser.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done()));")


def text_of(browser, name):
    return browser.execute_script("return document.getElementById(arguments[0]).textContent", name)


def click(browser, name):
    browser.execute_script("document.getElementById(arguments[0]).click()", name)
    settle(browser)


def colors_in(browser, name):
    """Colours of a canvas with how many pixels each has."""
    return browser.execute_script(
        """const canvas = document.getElementById(arguments[0]), found = {};
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        for (let i = 0; i < data.length; i += 4) {
          if (data[i + 3] < 255) continue;
          const key = "#" + [0, 1, 2].map((k) => data[i + k].toString(16).padStart(2, "0")).join("").toUpperCase();
          found[key] = (found[key] || 0) + 1;
        }
        return found;""",
        name,
    )


def point(browser, kind, x, y, *, name="lanes", pointer="mouse", **more):
    """A pointer event at a place of a canvas, in its own pixels."""
    browser.execute_script(
        "document.getElementById(arguments[0]).scrollIntoView({ block: 'center', behavior: 'instant' })", name
    )
    settle(browser)
    browser.execute_script(
        """const [name, kind, x, y, pointer, more] = arguments, canvas = document.getElementById(name);
        const box = canvas.getBoundingClientRect(), Kind = kind === "wheel" ? WheelEvent : PointerEvent;
        canvas.setPointerCapture = () => {};
        canvas.dispatchEvent(new Kind(kind, { clientX: box.left + x, clientY: box.top + y, pointerId: 1, pointerType: pointer,
          bubbles: true, cancelable: true, ...more }));""",
        name, kind, x, y, pointer, more,
    )  # fmt: skip
    settle(browser)


def tip(browser):
    return browser.execute_script(
        """const tip = document.getElementById("tip");
        return tip.hidden ? null : [...tip.children].map((line) => line.textContent);"""
    )


def test_nothing_is_loaded_and_nothing_goes_wrong(browser, page, piped):
    browser.get_log("performance")
    assert show(browser, page) == []
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [m["params"]["request"]["url"] for m in asked if m["method"] == "Network.requestWillBeSent"]
    assert [url for url in requests if url.startswith("file:")] == [page]
    inside = ("file:", "chrome:", "data:")  # the browser's own pages and icons; nothing of it leaves the machine
    assert not [url for url in requests if not url.startswith(inside)]
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    refused = browser.execute_async_script(
        """const done = arguments[0], refused = [];
        document.addEventListener("securitypolicyviolation", (event) => refused.push(event.effectiveDirective));
        const script = document.createElement("script");
        script.textContent = "window.ran = 1";
        document.body.append(script);
        new Image().src = "data:image/gif;base64,R0lGODlhAQABAAAAACw=";
        const answer = () => setTimeout(() => done([window.ran ?? 0, refused.sort()]), 100);
        fetch("file:///nothing").then(answer, answer);"""
    )
    assert refused == [0, ["connect-src", "img-src", "script-src-elem"]]
    browser.get_log("browser")


def test_timeline_is_painted_zooms_and_tells(browser, page, piped):
    show(browser, page)
    found = colors_in(browser, "lanes")
    data = piped.to_dict()
    expected = {data["colors"]["category"][block % 8].upper() for block in set(data["groups"]["block"][:40])}
    assert len(expected) >= 4 and all(found.get(color, 0) > 200 for color in expected)
    whole = text_of(browser, "range")
    click(browser, "in")
    closer = text_of(browser, "range")
    assert closer != whole and closer.endswith("50.0 %")
    point(browser, "wheel", 600, 60, deltaY=-100, ctrlKey=True)
    assert text_of(browser, "range") != closer
    click(browser, "fit")
    assert text_of(browser, "range") == whole
    point(browser, "wheel", 600, 60, deltaY=-100)
    assert text_of(browser, "range") == whole, "a plain wheel scrolls the page"

    width = browser.execute_script("return document.getElementById('lanes').clientWidth")
    lanes = piped.lanes
    here = np.flatnonzero(lanes.row == 1)
    box = here[np.argmax((lanes.end_s - lanes.start_s)[here])]
    middle = (lanes.start_s[box] + lanes.end_s[box]) / 2 / lanes.step_s
    point(browser, "pointermove", LEFT + middle * (width - LEFT - 8), AXIS + 30 + 12)
    lines = tip(browser)
    assert lines[0] == piped.timeline.op_names[lanes.op[box]]
    assert "gpu1" in lines[1]
    point(browser, "pointerleave", 0, 0)
    assert tip(browser) is None

    fingers = (("down", 300, 1), ("down", 500, 2), ("move", 520, 2), ("move", 720, 2), ("up", 720, 2), ("up", 300, 1))
    for name, x, number in fingers:
        point(browser, f"pointer{name}", x, 60, pointer="touch", pointerId=number)
    share = text_of(browser, "range").split()[-2]
    assert float(share) == pytest.approx(100 * (520 - 300) / (720 - 300), abs=0.1), "pinching zooms as fingers part"
    click(browser, "fit")
    point(browser, "dblclick", LEFT + 300, 60)
    before = text_of(browser, "range")
    for kind, x in (("pointerdown", 700), ("pointermove", 500), ("pointerup", 500)):
        point(browser, kind, x, 60)
    assert text_of(browser, "range") != before, "dragging moves the view"


def test_keys_walk_through_boxes(browser, page, piped):
    show(browser, page)
    script = """for (const key of arguments[0]) document.getElementById("lanes").dispatchEvent(
        new KeyboardEvent("keydown", { key, bubbles: true }));"""
    for keys in (["ArrowDown", ".", "."], ["+", "+"]):
        browser.execute_script(script, keys)
        settle(browser)
    third = np.flatnonzero(piped.lanes.row == 0)[2]
    assert tip(browser)[0] == piped.timeline.op_names[piped.lanes.op[third]]
    assert text_of(browser, "range").endswith("36.0 %")


def test_colors_links_and_search(browser, page, piped):
    show(browser, page)
    choose = """const [name, value, kind] = arguments, field = document.getElementById(name);
        field.value = value;
        field.dispatchEvent(new Event(kind));"""
    seen = set()
    for color in ("module", "phase", "device"):
        browser.execute_script(choose, "color", color, "change")
        settle(browser)
        seen.add(json.dumps(colors_in(browser, "lanes"), sort_keys=True))
    assert len(seen) == 3
    tall = browser.execute_script("return document.getElementById('lanes').clientHeight")
    click(browser, "links")
    assert browser.execute_script("return document.getElementById('lanes').clientHeight") < tall
    browser.execute_script(choose, "find", "net.1.block2.C/", "input")
    settle(browser)
    assert text_of(browser, "found") == "3 ops"
    enter = "document.getElementById('find').dispatchEvent(new KeyboardEvent('keydown', { key: 'Enter' }));"
    browser.execute_script(enter)
    settle(browser)
    assert "%" in text_of(browser, "range"), "Enter goes to a box"


def test_micro_batches_have_colours_and_numbers_and_transfers_arrows(browser, page, piped, tmp_path):
    show(browser, page)
    sent = int(np.count_nonzero(piped.lanes.size_bytes >= 0))
    assert 0 < sent <= 240
    assert browser.execute_script("return document.getElementById('lanes').dataset.arrows") == str(sent)
    plain = colors_in(browser, "lanes")
    click(browser, "links")
    assert browser.execute_script("return document.getElementById('lanes').dataset.arrows") == "0"
    numbered = dataclasses.replace(piped.lanes, microbatch=(np.arange(len(piped.lanes.row)) % 3).astype(np.int32))
    timeline = dataclasses.replace(piped.timeline, lanes=numbered)
    assert show(browser, written(tmp_path, dataclasses.replace(piped, timeline=timeline))) == []
    assert browser.execute_script("return document.getElementById('color').value") == "microbatch"
    assert [text_of(browser, "legend")[i] for i in range(3)] == ["0", "1", "2"] and "backward" in text_of(browser, "legend")
    found = colors_in(browser, "lanes")
    category = [color.upper() for color in piped.to_dict()["colors"]["category"]]
    assert all(found.get(color, 0) > 200 for color in category[:3]) and found != plain


def test_memory_follows_the_timeline(browser, page, piped):
    show(browser, page)
    assert sum(colors_in(browser, "memory").values()) > 1000
    width = browser.execute_script("return document.getElementById('memory').clientWidth")
    curve = piped.memory[2]
    at = 0.4 * piped.lanes.step_s
    used = int(curve.in_use_bytes[np.searchsorted(curve.time_s, at, side="right") - 1])
    point(browser, "pointermove", LEFT + 0.4 * (width - LEFT - 8), AXIS + 2 * 54 + 20, name="memory")
    name, amount, unit = tip(browser)[0].replace(":", "").split()[:3]
    assert (name, unit) == ("gpu2", bytes_text(used).split()[1])
    assert float(amount) == pytest.approx(float(bytes_text(used).split()[0]), rel=0.02)


def test_modules_open_and_close(browser, page):
    show(browser, page)

    def rows():
        return browser.execute_script("return document.querySelectorAll('#tree [data-node]').length")

    click(browser, "less")
    closed = rows()
    assert text_of(browser, "shown").startswith("4 boxes, 3 arrows")
    click(browser, "more")
    opened = rows()
    assert opened > closed and int(browser.execute_script("return document.getElementById('modules').dataset.arrows")) > 3
    for count in (False, True):
        browser.execute_script(
            "[...document.querySelectorAll('#tree [aria-expanded]')].find((row) => row.textContent.includes('net.2')).click();"
        )
        settle(browser)
        assert (rows() == opened) == count
    painted = colors_in(browser, "modules")
    assert all(painted.get(color, 0) > 50 for color in ("#0072B2", "#E69F00", "#009E73", "#CC79A7")), "colours of the devices"


def test_hostile_names_are_text(browser, page):
    show(browser, page)
    assert browser.execute_script("return document.querySelector('h1').textContent").startswith(f"model {HOSTILE}")
    for _ in range(4):
        click(browser, "more")
    names = browser.execute_script("return [...document.querySelectorAll('#tree .name')].map((r) => r.textContent)")
    assert HOSTILE.split(".")[0] in " ".join(names)
    assert HOSTILE in browser.execute_script("return document.querySelector('#planners table').textContent")
    assert browser.execute_script("return [window.hacked ?? 0, document.images.length]") == [0, 0]


@pytest.mark.parametrize("width", [360, 500])
def test_a_phone_shows_all_of_it(browser, page, piped, width):
    assert show(browser, page, width=width, height=700, phone=True) == []
    assert browser.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]") == [width, width]
    wide = browser.execute_script(
        """return [...document.querySelectorAll("main section, canvas, .tools > *")]
        .filter((element) => element.getBoundingClientRect().right > innerWidth + 0.5).length"""
    )
    assert wide == 0
    lanes = piped.lanes
    middle = float(lanes.start_s[lanes.row == 3].min() / lanes.step_s)
    canvas = browser.execute_script("return document.getElementById('lanes').clientWidth")
    for kind in ("pointerdown", "pointerup"):
        point(browser, kind, 84 + middle * (canvas - 92) + 2, AXIS + 3 * 30 + 12, pointer="touch")
    assert tip(browser) is not None and "gpu3" in tip(browser)[1]


def test_ten_thousand_tasks(browser, tmp_path):
    problem = random_problem(1, num_groups=3400, num_devices=8)
    data = report_data(problem, make_plan(problem, np.arange(3400) * 8 // 3400, planner="hand"))
    assert show(browser, written(tmp_path, data)) == []
    assert data.timeline.ops_run > 10_000 and (tmp_path / "report.html").stat().st_size < 2_000_000
    drawn = int(browser.execute_script("return document.getElementById('lanes').dataset.drawn"))
    assert 500 < drawn < 10_000, "boxes without a pixel of their own are left out"
    for _ in range(12):
        click(browser, "in")
    assert 0 < int(browser.execute_script("return document.getElementById('lanes').dataset.drawn")) < 100
    click(browser, "more")
    assert int(text_of(browser, "shown").split()[0]) <= 1500 and "open single modules" in text_of(browser, "shown")
    browser.execute_script("document.querySelectorAll('#tree [aria-expanded=false]')[3].click()")
    settle(browser)
    assert int(text_of(browser, "shown").split()[0]) > 100


def test_hundreds_of_devices_are_drawn_on_a_sharp_screen(browser, tmp_path):
    problem = random_problem(2, num_groups=400, num_devices=200, width=40)
    page = written(tmp_path, report_data(problem, make_plan(problem, np.arange(400) % 200, planner="hand")))
    show(browser, page, scale=3)
    sizes = browser.execute_script(
        "return ['lanes', 'memory'].map((n) => document.getElementById(n)).map((c) => [c.width, c.height])"
    )
    assert all(max(size) <= 16384 and size[0] * size[1] <= 1.65e7 for size in sizes)
    assert all(len(colors_in(browser, name)) > 8 for name in ("lanes", "memory"))


def test_where_all_devices_do_the_same_kinds_of_work_have_colours(browser, tmp_path):
    """As in a sharded plan: one colour for a device would paint everything alike."""
    problem = random_problem(3, num_groups=24, num_devices=2, shape="chain")
    data = report_data(problem, make_plan(problem, [0] * 24, planner="hand"))
    assert show(browser, written(tmp_path, data)) == []
    assert browser.execute_script("return document.getElementById('color').value") == "phase"
    legend = browser.execute_script("return [...document.querySelectorAll('#device-legend li')].map((e) => e.textContent)")
    assert legend == ["forward", "backward", "update"]
    painted, content = colors_in(browser, "modules"), data.to_dict()
    phases = [content["colors"]["phase"][content["phases"].index(name)] for name in legend]
    assert all(painted.get(color.upper(), 0) > 50 for color in phases)
