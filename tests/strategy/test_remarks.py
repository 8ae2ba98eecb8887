"""Remarks of plans: devices without bf16, and the parts of peak memory."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import rlplace
from rlplace.cli.main import main
from rlplace.cli.plan_tables import show_strategy
from rlplace.cluster import Cluster
from rlplace.cluster.parse import parse
from rlplace.errors import InfeasibleError
from rlplace.model.graph.opgraph import OpGraph
from rlplace.model.zoo import load_model
from rlplace.plan import PlacementPlan
from rlplace.plan.prediction import HeldMemory, memory_of
from rlplace.strategy.executor.evaluate import DraftEvaluator
from rlplace.strategy.search import op_level
from rlplace.strategy.search import remarks as parts_module
from rlplace.strategy.search.op_level import OpLevel
from rlplace.strategy.search.plan import plan_strategy
from rlplace.strategy.search.remarks import PARTS, memory_parts
from rlplace.strategy.search.space import Space
from rlplace.strategy.search.tries import SearchProblem
from tests.strategy.random_costs import CLUSTERS, random_costs, random_draft
from tests.strategy.random_ops import RandomOps

GPT2 = "hf:gpt2,n_layer=2,n_embd=512,n_head=4,vocab_size=512"


def in_bf16(**how: str) -> OpGraph:
    loaded = load_model(GPT2, batch=8, seq=128)
    return rlplace.capture(loaded.module, loaded.example_inputs, **how)


def plan_of(graph: OpGraph, cluster: str, space: str = "") -> PlacementPlan:
    return plan_strategy(graph, parse(cluster), 32, calls=30, space=Space.parse(space))


def notes(plan: PlacementPlan) -> list[str]:
    return list(plan.predicted.extra.get("notes", ()))


@pytest.mark.slow
@pytest.mark.parametrize("option", ["dtype", "autocast"])
def test_the_answer_says_what_fp16_takes(option: str) -> None:
    """As much as the model in_bf16 in fp16 takes with the same strategy."""
    (note,) = notes(
        plan := plan_of(in_bf16(**{option: "bf16"}), "v100:4", "pipeline=1 tensor=1 shard=1 replicate=4 recompute=none")
    )
    assert note.startswith("v100: no bfloat16 units") and f"--{option} fp16 plans for it" in note
    other = plan_of(in_bf16(**{option: "fp16"}), "v100:4", "pipeline=1 tensor=1 shard=1 replicate=4 recompute=none")
    assert other.strategy == plan.strategy and not notes(other)
    said = re.search(r"takes (.*) ms, (.*) times as fast", note)
    assert said is not None and float(said[1]) == pytest.approx(1e3 * other.predicted.step_s, abs=1e-3)
    assert float(said[2]) == pytest.approx(plan.predicted.step_s / other.predicted.step_s, abs=0.01)
    assert float(said[2]) > 1.2


@pytest.mark.slow
def test_cards_with_units_need_no_note() -> None:
    graph = in_bf16(dtype="bf16")
    assert not notes(plan_of(graph, "a100-80g:4")) and not notes(plan_of(in_bf16(), "v100:4"))
    only = plan_of(graph, "a100-80g:2+t4:2")
    assert only.strategy is not None
    kinds = {parse("a100-80g:2+t4:2").devices[device].kind for device in only.strategy.devices}
    assert bool(notes(only)) is ("t4" in kinds)


@pytest.mark.slow
def test_placements_say_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["place", GPT2, "--cluster", "t4:2", "--planner", "heft", "--batch", "4", "--seq", "32", "--autocast", "bf16"]
    assert main(words) == 0
    assert "note: t4: no bfloat16 units" in capsys.readouterr().out


TINY = "hf:gpt2,n_layer=2,n_embd=64,n_head=2,vocab_size=256"


@pytest.mark.slow
@pytest.mark.parametrize("most", [None, 0], ids=["op by op", "block by block"])
@pytest.mark.parametrize("seed", range(24))
def test_parts_add_up_to_the_peak_of_every_device(seed: int, most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    cluster = Cluster.preset(CLUSTERS[seed % len(CLUSTERS)])
    costs = RandomOps.of(random_costs(rng, cluster, int(rng.integers(4, 9)), tied=seed % 3 == 0))
    draft = random_draft(rng, cluster, len(costs.names))
    if most is not None:
        monkeypatch.setattr(op_level, "MOST_TASKS", most)
        monkeypatch.setattr(parts_module, "MOST_TASKS", most)
    said = OpLevel(SearchProblem(DraftEvaluator(costs, cluster), draft.batch)).evaluate(draft)
    rows = memory_parts(draft, costs, cluster, said)
    names = [device.name for device in cluster.devices]
    assert sorted(names.index(name) for row in rows for name in row.devices) == sorted(draft.devices)
    for row in rows:
        assert set(row.parts) == set(PARTS) and all(size >= 0 for size in row.parts.values())
        assert row.op_by_op is (most is None)
        for name in row.devices:
            device = names.index(name)
            assert sum(row.parts.values()) == row.total_bytes == said.peak_memory_bytes[device]
            assert row.parts["reserved"] == cluster.devices[device].reserved_bytes
            assert row.capacity_bytes == cluster.devices[device].memory_bytes


@pytest.fixture(scope="module")
def gpt2() -> tuple[nn.Module, rlplace.OpGraph]:
    loaded = load_model(TINY, batch=4, seq=32)
    return loaded.module, rlplace.capture(loaded.module, loaded.example_inputs, optimizer="adam")


def held(graph: rlplace.OpGraph, space: str, batch: int = 16) -> HeldMemory:
    plan = plan_strategy(graph, parse("a100-80g:4"), batch, calls=40, space=Space.parse(space), memory=True)
    (row,) = memory_of(plan.predicted)
    return row


def test_weights_are_those_of_the_model(gpt2: tuple[nn.Module, rlplace.OpGraph]) -> None:
    """Counted from the module; shares of four devices are a quarter, whatever runs again."""
    module, graph = gpt2
    trained = sum(parameter.numel() * 4 for parameter in module.parameters())
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    copies = held(graph, "replicate=4 shard=1 tensor=1 pipeline=1 recompute=none offload=none")
    assert copies.devices == ("gpu0", "gpu1", "gpu2", "gpu3")
    assert copies.parts["weights"] == pytest.approx(trained + buffers, abs=64)
    assert copies.parts["gradients"] == trained and copies.parts["optimizer"] == 2 * trained
    assert copies.parts["gathered"] == 0
    shares = held(graph, "shard=4 sharding=3 recompute=none offload=none")
    for name, whole in (("weights", trained + buffers), ("gradients", trained), ("optimizer", 2 * trained)):
        assert shares.parts[name] == pytest.approx(whole / 4, rel=0.01)
    assert shares.parts["gathered"] > 0 or shares.parts["backward"] > 0
    away = held(graph, "shard=4 sharding=3 recompute=none offload=optimizer")
    assert away.parts["optimizer"] == 0 and away.parts["weights"] == shares.parts["weights"]


def test_hosts_hold_what_starting_takes(gpt2: tuple[nn.Module, rlplace.OpGraph]) -> None:
    """Whole models in every process, else a block in each; a host without room for that is refused."""
    module, graph = gpt2
    size = sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])
    largest = max(parameter.nbytes for parameter in module.parameters())
    tables = module.transformer.wte.weight.nbytes + module.transformer.wpe.weight.nbytes
    block = max(tables, *(sum(parameter.nbytes for parameter in part.parameters()) for part in module.transformer.h))

    def plan(memory_bytes: int) -> PlacementPlan:
        cluster = dataclasses.replace(parse("a100-80g:2"), host_memory_bytes=(memory_bytes,))
        return plan_strategy(graph, cluster, 8, calls=30, space=Space.parse("replicate=2 shard=1 pipeline=1 tensor=1"))

    assert not notes(plan(2 * size))
    (note,) = notes(plan(2 * size - 2))
    assert note.startswith("host 0 has") and "2 processes" in note and "rlplace.deferred_weights()" in note
    assert plan(2 * block + 4096).predicted.feasible
    with pytest.raises(InfeasibleError, match="hosts with more memory"):
        plan(2 * largest - 2)


def test_what_runs_again_is_not_kept(gpt2: tuple[nn.Module, rlplace.OpGraph]) -> None:
    _, graph = gpt2
    fixed = "replicate=4 shard=1 tensor=1 pipeline=1 offload=none"
    none, full = (held(graph, f"{fixed} recompute={how}") for how in ("none", "full"))
    assert full.parts["activations"] < 0.8 * none.parts["activations"]
    assert full.parts["weights"] == pytest.approx(none.parts["weights"], abs=64)


@pytest.mark.slow
def test_memory_does_not_change_the_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["place", TINY, "--cluster", "a100-80g:4", "--seq", "32", "--batch", "16", "--calls", "40"]
    assert main([*words, "--out", str(tmp_path / "x.plan.json")]) == 0
    plain = capsys.readouterr().out.splitlines()
    assert main([*words, "--memory", "--out", str(tmp_path / "y.plan.json")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line and line in plain] == [line for line in plain if line]  # and a table more
    (head,) = [line for line in shown if line.startswith("GB ")]
    assert head.split()[1:5] == ["weights", "gradients", "optimizer", "activations"]
    assert head.split()[-2:] == ["total", "memory"]
    without, beside = (rlplace.PlacementPlan.load(tmp_path / name) for name in ("x.plan.json", "y.plan.json"))
    assert beside.strategy is not None and beside.fingerprint == without.fingerprint
    peaks = {f"gpu{number}": peak for number, peak in enumerate(beside.predicted.peak_memory_bytes) if peak}
    assert {name: row.total_bytes for row in memory_of(beside.predicted) for name in row.devices} == peaks
    assert main([*words, "--memory", "--json"]) == 0
    assert "weights" in json.loads(capsys.readouterr().out)["predicted"]["memory"][0]["parts"]


@pytest.mark.parametrize(("share", "said"), [(0.96, False), (0.975, True)])
def test_a_full_device_is_noted(
    gpt2: tuple[nn.Module, rlplace.OpGraph], share: float, said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """From 97 % on, with the device and what to do."""
    cluster = parse("a100-80g:2")
    plan = plan_strategy(gpt2[1], cluster, 8, calls=10)
    peaks = (int(share * 80e9), *plan.predicted.peak_memory_bytes[1:])
    show_strategy(plan.with_predicted(plan.predicted.replace(peak_memory_bytes=peaks)), cluster)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: gpu0: up to 97.5 % of the memory")]
    assert bool(lines) is said
