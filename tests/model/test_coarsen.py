import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlplace.errors import InputError
from rlplace.model.graph.atoms import op_anchors
from rlplace.model.graph.coarsen import BALANCE, coarsen, merge_cyclic_tasks
from rlplace.model.graph.contract import ContractionGraph
from rlplace.model.graph.opgraph import BACKWARD, FORWARD, GRADIENT, PARAMETER, UPDATE
from tests.graphs import GraphBuilder, random_graph, transformer_graph

graphs = st.builds(
    random_graph,
    st.integers(0, 10_000),
    st.integers(1, 120),
    num_modules=st.integers(1, 9),
    tied=st.booleans(),
    in_place=st.booleans(),
)


def one_value_per_set(sets, values):
    """Returns whether all members of each set have one value."""
    order = np.lexsort((values, sets))
    s, v = np.asarray(sets)[order], np.asarray(values)[order]
    return not ((s[1:] == s[:-1]) & (v[1:] != v[:-1])).any()


def is_cyclic(count, source, target):
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(range(count))
    graph.add_edges_from((a, b) for a, b in zip(source, target, strict=True) if a != b)
    return not nx.is_directed_acyclic_graph(graph)


def check(graph, grouping, target):
    group = grouping.op_group
    assert grouping.op_cluster.shape == (graph.num_ops,)
    assert 1 <= grouping.num_groups <= target
    assert len(set(grouping.names)) == len(grouping.names) == len(grouping.modules)
    assert set(group.tolist()) == set(range(grouping.num_groups))
    assert set(grouping.op_cluster.tolist()) == set(range(grouping.num_clusters))
    # Numbered by first op.
    _, first = np.unique(group, return_index=True)
    assert (np.diff(first) > 0).all()
    # Colocated by construction.
    assert one_value_per_set(graph.op_colocate, group)
    backward = np.flatnonzero(graph.op_phase == BACKWARD)
    assert np.array_equal(grouping.op_cluster[backward], grouping.op_cluster[graph.op_forward[backward]])
    owner = {int(graph.op_parameter[u]): int(group[u]) for u in np.flatnonzero(graph.op_phase == UPDATE)}
    for tensor in np.flatnonzero(np.isin(graph.tensor_role, (PARAMETER, GRADIENT))).tolist():
        parameter = int(graph.tensor_parameter[tensor])
        if parameter in owner:
            readers = graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]]
            assert (group[readers] == owner[parameter]).all()
    # Tasks are acyclic over all phases together.
    task = grouping.op_cluster.astype(int) * 4 + graph.op_phase
    producer = graph.tensor_producer[graph.edge_tensor]
    made = producer >= 0
    assert not is_cyclic(int(task.max()) + 1, task[producer[made]].tolist(), task[graph.consumers[made]].tolist())
    assert merge_cyclic_tasks(graph, grouping.op_cluster) is None


@pytest.mark.slow
@settings(max_examples=120)
@given(graphs, st.integers(1, 60))
def test_invariants_on_random_graphs(graph, target):
    grouping = coarsen(graph, target)
    check(graph, grouping, target)
    again = coarsen(graph, target)
    assert np.array_equal(grouping.op_cluster, again.op_cluster)
    assert np.array_equal(grouping.cluster_group, again.cluster_group)
    assert grouping.names == again.names
    finest = coarsen(graph, graph.num_ops)
    check(graph, finest, graph.num_ops)
    assert grouping.num_groups >= min(target, finest.num_groups) - 1


def test_few_ops_stay_single():
    graph = random_graph(3, 30)
    grouping = coarsen(graph, 200)
    assert grouping.num_groups == 30
    assert np.array_equal(grouping.op_group[:30], np.arange(30))


@pytest.mark.parametrize("target", [3, 10, 25, 60, 100, 196])
def test_transformer_reaches_every_target_in_balance(target):
    graph = transformer_graph(12)
    grouping = coarsen(graph, target)
    check(graph, grouping, target)
    assert grouping.num_groups == target
    seconds = np.maximum(graph.op_flops / 1e13, graph.op_bytes / 1e12) + 5e-6
    seconds[np.array(graph.op_kind) == "view"] = 0
    anchored = np.bincount(op_anchors(graph), weights=seconds)
    share = np.bincount(grouping.op_group, weights=seconds) / seconds.sum()
    tied = grouping.op_group[list(graph.op_module).index("lm_head")]  # embedding and head, whatever they weigh
    assert np.delete(share, tied).max() <= max(BALANCE / target, 1.3 * anchored.max() / seconds.sum()) + 1e-12


def test_tied_embedding_is_one_group_of_two_clusters():
    graph = transformer_graph(6)
    grouping = coarsen(graph, 40)
    module = list(graph.op_module)
    embedding, head = module.index("wte"), module.index("lm_head")
    assert grouping.op_group[embedding] == grouping.op_group[head]
    assert grouping.op_cluster[embedding] != grouping.op_cluster[head]
    assert grouping.num_clusters == grouping.num_groups + 1
    free = coarsen(transformer_graph(6, tied=False), 40)
    assert free.num_clusters == free.num_groups


def test_modules_are_respected_and_named():
    graph = transformer_graph(8)
    grouping = coarsen(graph, 8 * 7)
    layers = [{path.split(".")[1] for path in paths if path.startswith("h.")} for paths in grouping.modules]
    assert max(len(layer) for layer in layers) <= 2
    assert sum(len(layer) > 1 for layer in layers) <= 8
    assert sum(name.startswith("h.") for name in grouping.names) > 40
    assert all(name == name.strip() and name for name in grouping.names)


def test_parallel_branches_are_kept_apart():
    builder = GraphBuilder()
    x = builder.op("stem", [builder.input(64)], 1 << 20, flops=1e9, kind="conv")
    for block in range(4):
        ends = []
        for branch in range(4):
            h = x
            for step in range(5):
                h = builder.op(f"block{block}.branch{branch}.{step}", [h], 1 << 20, flops=1e9, kind="conv")
            ends.append(h)
        x = builder.op(f"block{block}", ends, 1 << 22, kind="copy")
    graph = builder.build()
    grouping = coarsen(graph, 17 + 8)
    for block in range(4):
        found = []
        for branch in range(4):
            ops = [i for i, m in enumerate(graph.op_module) if m.startswith(f"block{block}.branch{branch}.")]
            found.append(set(grouping.op_group[ops].tolist()))
        for a in range(4):
            for b in range(a):
                assert found[a].isdisjoint(found[b])


def test_in_place_loop_around_another_op_stays_acyclic():
    builder = GraphBuilder()
    first = builder.op("a", [builder.input(64)], 4096)
    between = builder.op("b", [first], 4096)
    builder.op("a", [first, between], 0, writes=first, saved=False)
    builder.op("c", [first], 4096)
    graph = builder.build()
    for target in (1, 2, 4, 100):
        check(graph, coarsen(graph, target), target)


def test_a_cyclic_knot_of_colocated_ops_does_not_swallow_the_model():
    builder = GraphBuilder()
    data = builder.input(64)
    cache = builder.op("cache", [data], 4096)
    h = data
    for layer in range(40):
        weight = builder.parameter(f"layer.{layer}.weight", 1 << 16)
        h = builder.op(f"layer.{layer}", [h, cache, weight], 4096, kind="gemm", flops=1e9)
        builder.op(f"layer.{layer}.cache", [cache, h], 0, writes=cache, saved=False)
    graph = builder.build()
    grouping = coarsen(graph, 20)
    check(graph, grouping, 20)
    assert grouping.num_groups >= 15
    caches = [i for i, m in enumerate(graph.op_module) if m.endswith("cache")]
    assert len(set(grouping.op_group[caches].tolist())) == 1


def test_update_without_a_reader_sits_beside_its_module():
    graph = transformer_graph(3)
    anchor = op_anchors(graph)
    assert (anchor >= 0).all()
    assert (graph.op_phase[anchor] == FORWARD).all()
    for update in np.flatnonzero(graph.op_phase == UPDATE).tolist():
        module = graph.parameters[graph.op_parameter[update]].name.rpartition(".")[0]
        assert graph.op_module[anchor[update]] == module


def test_cost_decides_the_balance():
    builder = GraphBuilder()
    h = builder.input(64)
    for _ in range(64):
        h = builder.op("", [h], 64)
    graph = builder.build()
    cost = np.ones(graph.num_ops)
    cost[:8] = 20.0
    grouping = coarsen(graph, 16, cost=cost)
    assert len(set(grouping.op_group[:8].tolist())) >= 6


@pytest.mark.parametrize("target", [0, -4])
def test_bad_target(target):
    with pytest.raises(InputError, match="coarsen: target must be a whole number from 1 up"):
        coarsen(random_graph(0, 5), target)


def test_bad_cost():
    graph = random_graph(0, 5)
    for cost in (np.ones(3), np.full(graph.num_ops, np.nan), np.full(graph.num_ops, -1.0)):
        with pytest.raises(InputError, match="cost"):
            coarsen(graph, 2, cost=cost)


@settings(max_examples=60)
@given(st.integers(2, 40), st.integers(0, 10_000))
def test_contraction_keeps_a_graph_acyclic_and_its_books_straight(count, seed):
    rng = np.random.default_rng(seed)
    pairs = np.unique(np.sort(rng.integers(0, count, size=(3 * count, 2)), axis=1), axis=0)
    pairs = pairs[pairs[:, 0] < pairs[:, 1]]
    dag = ContractionGraph(count, pairs[:, 0].tolist(), pairs[:, 1].tolist(), [1] * len(pairs))
    budget = [int(rng.integers(0, count))]

    def merged(a, b, keep):
        budget[0] -= 1
        return budget[0] <= 0

    dag.contract_edges(dag.edges(), lambda a, b: 0, lambda a, b: True, merged)
    root = [dag.find(node) for node in range(count)]
    source, target = [root[a] for a in pairs[:, 0]], [root[b] for b in pairs[:, 1]]
    assert not is_cyclic(count, source, target)
    live = {(a, b) for a, b in zip(source, target, strict=True) if a != b}
    assert live == set(dag.edges())
    assert live == {(a, b) for b in dag.live() for a in dag.predecessors[b]}
    total = sum(size for node in dag.live() for size in dag.successors[node].values())
    assert total == sum(a != b for a, b in zip(source, target, strict=True))
    order = dag.depth_first_order()
    place = {node: i for i, node in enumerate(order)}
    assert sorted(order) == dag.live()
    assert all(place[a] < place[b] for a, b in dag.edges())
