"""Some damaged inputs of every loader; `python -m benchmarks.hostile` gives them as many as one likes, under limits."""

from __future__ import annotations

import pytest

from benchmarks.hostile.mutate import mutate, pack
from benchmarks.hostile.targets import TARGETS
from benchmarks.hostile.worker import damaged, run_input


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_good(name, seeds, scratch):
    outcomes = {file: run_input(TARGETS[name], file, (seeds / file).read_bytes(), scratch) for file in TARGETS[name].files}
    if name.endswith("text"):
        assert "loaded" in outcomes.values()
    else:
        assert set(outcomes.values()) == {"loaded"}, outcomes


def run(name, seeds, scratch, seed, count):
    target = TARGETS[name]
    for number in range(count):
        file, payload = damaged(name, target, seeds, seed, number)
        outcome = run_input(target, file, payload, scratch)
        assert outcome in ("loaded", "refused"), f"{file}, seed {seed}, input {number}: {outcome}"
        assert (scratch / file).read_bytes() == (seeds / file).read_bytes()


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_inputs(name, seeds, scratch):
    run(name, seeds, scratch, seed=100, count=round(48 * TARGETS[name].share))


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


def test_the_damage_follows_from_the_seed(seeds):
    target = TARGETS["problem"]
    once, again, other = (damaged("problem", target, seeds, seed, 5) for seed in (0, 0, 1))
    assert once == again
    assert once != other


def test_every_kind_of_damage_is_done(seeds):
    from random import Random

    for target in {t.kind: t for t in TARGETS.values()}.values():
        data = (seeds / target.files[0]).read_bytes()
        results = {mutate(target.kind, data, Random(seed)) for seed in range(60)}
        assert len(results) > 40


def test_what_a_loader_may_not_do_is_seen(seeds, scratch):
    """The fuzzer itself: other errors, messages of two lines, files that are left behind."""
    import dataclasses

    from rlplace.errors import InputError

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
    assert pack(b"{}", b"") == b"\x02\0\0\0\0\0\0\0{}"
