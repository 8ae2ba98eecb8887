"""What a plan says of itself: a sentence when printed, key figures in a notebook, both from the plan alone."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from rlplace.cluster.links import fullness
from rlplace.placement import get_planner
from rlplace.plan import PlacementPlan
from rlplace.plan.prediction import Prediction
from rlplace.plan.strategy import Pipeline, Stage, Strategy
from rlplace.plan.words import verdict
from rlplace.problem.generate import random_problem

STRATEGY = Strategy(
    batch=64,
    pipelines=(Pipeline((Stage(("a", "b"), (0, 1, 2, 3), mesh={"replicate": 4}),), microbatch=(16,), microbatches=(1,)),),
)


def plan(share: float | None = 0.224, **predicted: object) -> PlacementPlan:
    figures: dict = {
        "step_time_s": 0.47942,
        "samples_per_s": 133.49,
        "feasible": True,
        "peak_memory_bytes": (17_900_000_000,) * 4,
    }
    return PlacementPlan(
        "question",
        "strategy",
        0,
        np.zeros(0, dtype=np.int32),
        strategy=STRATEGY,
        source={"graph": {"model": "hf:gpt2"}, "cluster": "a100-80g:4"},
        predicted=Prediction(fullest_share=share, **{**figures, **predicted}),
    )


class Text(HTMLParser):
    """The visible text of a page, by element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.found: list[tuple[str, str]] = []
        self.feed(page)
        assert not self.inside  # all elements are closed

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.inside.pop() == tag

    def handle_data(self, data: str) -> None:
        self.found.append((self.inside[-1] if self.inside else "", data.strip()))


def test_a_printed_plan_is_a_sentence() -> None:
    assert str(plan()) == (
        "hf:gpt2 on a100-80g:4: 4 replicas, 1 micro-batch of 16 on 4 devices. A step of 64 samples takes 479.4 ms, "
        "133.49 samples/s, with a peak of 17.9 GB, at most 22.4 % of a device's memory."
    )
    assert str(plan(step_time_s=None, feasible=False)).endswith("A step of 64 samples does not fit.")
    assert str(plan(share=None)).endswith("with a peak of 17.9 GB.")


def test_a_placement_says_where_its_groups_are() -> None:
    problem = random_problem(3, num_groups=12, num_devices=2)
    placed = get_planner("round_robin")(problem)
    said = str(placed)
    assert "12 groups of ops on 2 devices" in said and f"{problem.samples_per_microbatch} samples takes" in said
    limits = [device.memory_bytes for device in problem.devices]
    peaks = placed.predicted.peak_memory_bytes
    if all(limits):
        fullest = max(peak / limit for peak, limit in zip(peaks, limits, strict=True) if limit)
        assert placed.predicted.fullest_share == pytest.approx(fullest)


def test_a_notebook_shows_the_key_figures() -> None:
    text = Text(plan()._repr_html_())
    shown = dict(zip(*[[words for tag, words in text.found if tag == one] for one in ("dt", "dd")], strict=False))
    assert ("h1", "hf:gpt2 on a100-80g:4, 479.4 ms a step") in text.found and ("span", "feasible") in text.found
    assert shown["Step time"] == "479.4 ms" and shown["Throughput"] == "133.5" and shown["Largest peak"] == "17.9 GB"
    hostile = plan()
    object.__setattr__(hostile, "source", {"name": "<img src=x>"})
    assert "<img" not in hostile._repr_html_()


@pytest.mark.parametrize(
    ("share", "level", "badge"),
    [
        (None, "roomy", "good"),
        (0.899, "roomy", "good"),
        (0.9, "tight", "tight"),
        (0.969, "tight", "tight"),
        (0.97, "full", "bad"),
        (1.2, "full", "bad"),
    ],
)
def test_how_full_a_device_is(share: float | None, level: str, badge: str) -> None:
    assert fullness(share) == level and verdict(True, share)[0] == badge
    assert verdict(False, share) == ("bad", "infeasible")


def test_neither_loads_anything_heavy(tmp_path: Path) -> None:
    plan().save(tmp_path / "x.plan.json")
    code = (
        "import sys, rlplace\n"
        f"plan = rlplace.PlacementPlan.load({str(tmp_path / 'x.plan.json')!r})\n"
        "print(plan)\nplan._repr_html_()\n"
        "assert not {'torch', 'numba', 'scipy', 'networkx'} & set(sys.modules), sorted(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("hf:gpt2 on a100-80g:4: 4 replicas")
