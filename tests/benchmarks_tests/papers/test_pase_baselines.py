"""PaSE's rivals under the same cost: never better than the search, and legal."""

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.papers.pase.baselines import complete, data_parallel, expert, one_weird_trick, strategy_cost
from benchmarks.papers.pase.cnns import alexnet
from benchmarks.papers.pase.inception import inception_v3
from benchmarks.papers.pase.mcmc import mcmc
from benchmarks.papers.pase.rnnlm import rnnlm
from benchmarks.papers.pase.transformer import transformer
from rlplace.errors import InputError
from rlplace.planners.pase.configs import all_configurations
from rlplace.planners.pase.dp import least_cost_strategy
from rlplace.planners.pase.layers import LayerGraph, Machine, Strategy


def check(graph: LayerGraph, strategy: Strategy, optimum: float, devices: int) -> None:
    """A strategy is legal, costs what it says and is no better than the optimum."""
    for rows, row in zip(all_configurations(graph, devices), strategy.configurations, strict=True):
        assert row in {tuple(r) for r in rows.tolist()}
    assert strategy.cost_flop == pytest.approx(strategy_cost(graph, strategy.configurations, Machine()), rel=1e-9)
    assert strategy.cost_flop >= optimum * (1 - 1e-12)


@pytest.mark.parametrize("network", [alexnet, inception_v3, rnnlm, transformer])
def test_no_baseline_beats_the_search(network: Callable[[], LayerGraph]) -> None:
    graph, devices = network(), 8
    optimum = least_cost_strategy(graph, devices).cost_flop
    start = expert(graph, devices)
    for strategy in (data_parallel(graph, devices), start, mcmc(graph, devices, start=start, proposals=20_000)):
        check(graph, strategy, optimum, devices)
    assert mcmc(graph, devices, start=start, proposals=20_000).cost_flop <= start.cost_flop


def test_experts_do_what_they_say() -> None:
    graph = alexnet()
    found = expert(graph, 8)
    for layer in graph.layers:
        if layer.kind == "conv":
            assert found.parts[layer.name] == {"b": 8}
        if layer.kind == "gemm":
            assert found.parts[layer.name] == {"n": 8}
    found = expert(rnnlm(), 8)
    assert found.parts["lstm"] == {"l": 2, "b": 4}
    assert found.parts["embedding"] == {"b": 4}
    graph = transformer()
    found = expert(graph, 8)
    for layer in graph.layers:
        names = {dim.name for dim in layer.dims}
        if layer.kind == "gemm":
            assert found.parts[layer.name]["b"] == 2
            assert any(found.parts[layer.name].get(name) == 4 for name in names & {"h", "f", "v"})


def test_mcmc_is_seeded_and_finds_the_optimum_of_a_small_graph() -> None:
    graph = alexnet()
    first, again = (mcmc(graph, 4, seed=3, proposals=60_000) for _ in range(2))
    assert first.configurations == again.configurations
    assert first.cost_flop == pytest.approx(least_cost_strategy(graph, 4).cost_flop, rel=1e-12)
    assert mcmc(graph, 4, proposals=0).cost_flop == data_parallel(graph, 4).cost_flop


def test_completion_is_the_best_of_what_is_left() -> None:
    graph = alexnet()
    optimum = least_cost_strategy(graph, 8)
    assert complete(graph, 8, {}).cost_flop == optimum.cost_flop
    everything = complete(graph, 8, dict(enumerate(optimum.configurations)))
    assert everything.configurations == optimum.configurations
    fixed = {10: (8, 1, 1)}
    pinned = complete(graph, 8, fixed)
    assert pinned.configurations[10] == (8, 1, 1)
    assert optimum.cost_flop < pinned.cost_flop <= data_parallel(graph, 8).cost_flop


def test_refusals() -> None:
    graph = alexnet()
    with pytest.raises(InputError, match="cannot be cut into"):
        complete(graph, 8, {10: (7, 1, 1)})
    with pytest.raises(InputError, match="unknown layer graph"):
        expert(LayerGraph("mine", graph.layers, graph.edges, graph.smallest_part), 4)
    assert expert(LayerGraph("mine", graph.layers, graph.edges, 4), 4, rule=one_weird_trick) == expert(graph, 4)
    with pytest.raises(InputError, match="start from a legal strategy"):
        mcmc(graph, 4, start=data_parallel(graph, 8))
    assert np.prod(data_parallel(graph, 64).configurations[0]) == 32  # parts of a CNN's dimension have at least 4 elements
