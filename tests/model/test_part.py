"""Some ops of a graph are a graph: nothing of them changes, and what others make is an input."""

import numpy as np

from rlplace.cluster.presets import find_kind
from rlplace.cost.compute import explain_times
from rlplace.model.graph.atoms import part_of
from rlplace.model.graph.opgraph import FORWARD, INPUT
from tests.captured import captured


def test_all_ops_are_the_graph():
    graph = captured("gpt2")
    part, tensors = part_of(graph, np.arange(graph.num_ops))
    assert part.fingerprint == graph.fingerprint
    assert tensors.tolist() == list(range(graph.num_tensors))


def test_ops_keep_sizes_times_and_tensors():
    graph = captured("gpt2")
    ops = np.flatnonzero([path.startswith("transformer.h.2") for path in graph.op_module])
    part, tensors = part_of(graph, ops)
    assert part.op_names == tuple(graph.op_names[op] for op in ops)
    kind = find_kind("l4")
    np.testing.assert_array_equal(explain_times(part, kind).device_s, explain_times(graph, kind).device_s[ops])
    np.testing.assert_array_equal(np.where(part.op_forward >= 0, ops[part.op_forward], -1), graph.op_forward[ops])
    for number, tensor in enumerate(tensors.tolist()):
        readers = graph.consumers[graph.consumer_ptr[tensor] : graph.consumer_ptr[tensor + 1]]
        found = ops[part.consumers[part.consumer_ptr[number] : part.consumer_ptr[number + 1]]]
        assert found.tolist() == [op for op in readers.tolist() if op in ops]
        maker = graph.tensor_producer[tensor]
        assert part.tensor_bytes[number] == graph.tensor_bytes[tensor]
        if maker in ops:
            assert ops[part.tensor_producer[number]] == maker
        elif maker >= 0:
            assert part.tensor_role[number] == INPUT
    read = (part.tensor_role == INPUT) & (part.tensor_bytes == 4 * 32 * 64 * 4)
    assert read.any() and (part.op_phase == FORWARD).any()
