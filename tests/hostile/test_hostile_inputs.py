"""Some damaged inputs of every loader; `python -m benchmarks.hostile` gives them as many as one likes, under limits."""

from __future__ import annotations

import dataclasses
import zlib

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from rlplace.errors import InputError
from tests.hostile.damage import damaged, edited
from tests.hostile.loaders import TARGETS, run_input

QUICK = settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_good(name, seeds, scratch):
    outcomes = {file: run_input(TARGETS[name], file, (seeds / file).read_bytes(), scratch) for file in TARGETS[name].files}
    if name.endswith("text"):
        assert "loaded" in outcomes.values()
    else:
        assert set(outcomes.values()) == {"loaded"}, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_damaged_inputs(name, seeds, scratch):
    target = TARGETS[name]

    @seed(zlib.crc32(name.encode()))
    @settings(QUICK, max_examples=round(48 * target.share))
    @given(st.data())
    def holds(data):
        file = data.draw(st.sampled_from(target.files))
        payload = data.draw(damaged(target.kind, (seeds / file).read_bytes()))
        assert run_input(target, file, payload, scratch) in ("loaded", "refused")
        assert (scratch / file).read_bytes() == (seeds / file).read_bytes()

    holds()


# What the fuzzer has found, and what it would find once in a long time.
FOUND = [
    ("plan", "told.plan.json", b'"executor": "list"', b'"executor": 1e400'),
    ("plan", "told.plan.json", b'"microbatches": [1]', b'"microbatches": [1048576]'),
    ("plan source", "sourced.plan.json", b'{"model": "zoo:mlp",', b'[{"model": "zoo:mlp"}], "other": {'),
    ("plan source", "sourced.plan.json", b'"zoo:mlp"', b'"os:system,command=true"'),
    ("problem", "toy.problem.json", b'"gpu0"', b'"gpu0\\u001b[31m"'),
    ("problem", "toy.problem.json", b'"gpu0"', b'"' + b"g" * 5000 + b'"'),
    ("cases", "cases/cases.json", b'"name": "toy"', b'"name": "' + b"y" * 100_000 + b'"'),
    ("plan source", "sourced.plan.json", b'"tensor": [8, 4]', b'"tensor": [1152921504606846976, 4]'),
    ("op graph", "net.graph.json", b'"colocate": [0', b'"colocate": [2147483647'),
    ("MODEL text", "model4.text", b"nowhere", b"nowhere" + b"+" * 5000),
    ("MODEL text", "model3.text", b"module", b"module" + b"../" * 1000),
    ("cluster file", "topology.toml", b'name = "half"', b'name = "' + b"y" * 100_000 + b'"'),
    ("resume config", "agent/config.json", b'"hidden": 4, "second"', b'"hidden": 4.5, "second"'),
    ("resume config", "agent/config.json", b'"seed": 0', b'"seed": [0]'),
    ("resume config", "agent/config.json", b'"training": {', b'"training": 1.5, "training2": {'),
    ("resume config", "agent/config.json", b'"seconds": 1.0', b'"seconds": "x"'),
    ("training facts", "training/step-00000003/rlplace.json", b'"optimizers": [{', b'"optimizers": [5, {'),
    ("training facts", "training/step-00000003/rlplace.json", b'"lr": 0.001', b'"lr": "fast"'),
    ("training facts", "training/step-00000003/rlplace.json", b'"random": null', b'"random": [1]'),
    ("SPACE text", "space2.text", b"8", b"8" * 5000),
    ("strategy plan", "whole.plan.json", b'"words"', b'"other words"'),
]


@pytest.mark.parametrize(("name", "file", "old", "new"), FOUND, ids=range(len(FOUND)))
def test_what_was_found(name, file, old, new, seeds, scratch):
    payload = (seeds / file).read_bytes()
    assert old in payload
    assert run_input(TARGETS[name], file, payload.replace(old, new, 1), scratch) in ("loaded", "refused")


def test_the_damage_is_damage():
    """Of a JSON file most drawn texts are other than it, and unlike each other; entries are changed in many places."""
    data = {"a": [1, 2.5, {"b": None}], "c": "text"}
    drawn = set()

    @seed(0)
    @settings(QUICK, max_examples=100)
    @given(edited(data))
    def draw(text):
        drawn.add(text)

    draw()
    assert len(drawn) > 60


def test_what_a_loader_may_not_do_is_seen(seeds, scratch):
    """The harness itself: other errors, messages of two lines, files that are left behind."""

    def outcome(use):
        target = dataclasses.replace(TARGETS["networkx"], use=use)
        return run_input(target, "graph.nx.json", b"{}", scratch)

    def fails(path, folder):
        raise KeyError("x")

    def tells_too_much(path, folder):
        error = InputError("x")
        error.args = ("two\nlines",)
        raise error

    def leaves(path, folder):
        (folder / "left").touch()

    assert outcome(lambda path, folder: None) == "loaded"
    assert "KeyError" in outcome(fails)
    assert "not one plain line" in outcome(tells_too_much)
    assert outcome(leaves) == "left ['left']"
    assert not (scratch / "left").exists()
