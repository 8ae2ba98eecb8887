"""PipeDream profiles, and the table of gains on public profiles."""

from pathlib import Path

import pytest

from benchmarks.papers.bipartition.profile import profile_chain, profile_problem, read_profile
from rlplace.errors import InputError
from rlplace.placement.published.bipartition.solve import bi_partition, free_workers, kernel_arrays, layer_wise, price_cuts

PROFILES = Path(__file__).parents[2] / "placement" / "profiles"

# name: layers, backward / forward, layer-wise optimum over bi-partition optimum for 2, 3, 4 and 8 workers
TABLE = {
    "vgg16": (40, 1.88, (1.10, 1.03, 1.28, 1.41)),
    "alexnet": (22, 0.90, (1.01, 1.09, 1.29, 1.29)),
    "gnmt": (45, 1.67, (1.03, 1.15, 1.14, 1.20)),
    "resnet18": (70, 1.42, (1.00, 1.05, 1.07, 1.14)),
}


@pytest.mark.parametrize("name", TABLE)
def test_gains_on_public_profiles(name):
    chain = profile_chain(read_profile(PROFILES / f"{name}.txt"))
    layers, ratio, gains = TABLE[name]
    assert chain.num_layers == layers
    assert chain.backward_s.sum() / chain.forward_s.sum() == pytest.approx(ratio, abs=0.005)
    for workers, gain in zip((2, 3, 4, 8), gains, strict=True):
        ratio = layer_wise(chain, workers).bottleneck_s / bi_partition(chain, workers).bottleneck_s
        assert ratio == pytest.approx(gain, abs=0.005) and ratio >= 1.0


def test_vgg16_on_four_workers_by_gap():
    chain = profile_chain(read_profile(PROFILES / "vgg16.txt"))
    assert chain.mean_s.sum() == pytest.approx(0.6725, abs=5e-5)
    by_gap = {0: 216.45, 1: 178.09, 2: 175.56, 4: 174.71, 8: 169.38}
    for gap, milliseconds in by_gap.items():
        assert 1e3 * bi_partition(chain, 4, gap).bottleneck_s == pytest.approx(milliseconds, abs=0.006)
    assert 1e3 * bi_partition(chain, 4).bottleneck_s == pytest.approx(169.10, abs=0.005)
    for cuts in ((0, 3, 6, 13, 40), (0, 3, 12, 23, 40)):  # the latter are the four stages of PipeDream's own straight VGG16
        straight = price_cuts(cuts, cuts, kernel_arrays(chain, free_workers(4)))
        assert 1e3 * straight.bottleneck_s == pytest.approx(216.45, abs=0.005)


def test_layers_of_a_small_profile(tmp_path):
    path = tmp_path / "graph.txt"
    path.write_text(
        "node1 -- Input0 -- forward_compute_time=9.000, backward_compute_time=0.000, activation_size=4.0, parameter_size=0.0\n"
        "node3 -- A -- B -- forward_compute_time=1.500, backward_compute_time=2.000, activation_size=[8.0; 2.0], "
        "parameter_size=3.000 -- stage_id=1\n"
        "node2 -- Linear -- forward_compute_time=1, backward_compute_time=2, activation_size=5, parameter_size=7\n"
        "node4 -- Add -- forward_compute_time=0, backward_compute_time=0, activation_size=1, parameter_size=0\n"
        "\tnode1 -- node2\n\n\tnode2 -- node3\n\tnode2 -- node4\n\tnode3 -- node4\n"
    )
    nodes = read_profile(path)
    assert [node.name for node in nodes] == ["node1", "node2", "node3", "node4"]
    assert nodes[2].description == "A -- B" and nodes[2].stage == 1 and nodes[2].activation_bytes == 10
    chain = profile_chain(nodes)
    assert chain.names == ("node2", "node3", "node4")
    assert chain.forward_s.tolist() == [1e-3, 1.5e-3, 0.0] and chain.weight_bytes.tolist() == [7, 3, 0]
    assert chain.activation_bytes.tolist() == [5, 15, 0]  # node2's output crosses the second cut as well
    assert chain.stash_bytes.tolist() == [4, 5, 15]
    problem = profile_problem(nodes, 2, bandwidth_bytes_per_s=1e9, memory_bytes=1000)
    assert problem.group_names == chain.names and problem.resident_bytes.tolist() == [14, 6, 0]


NODE = "node{} -- Linear -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=5.0, parameter_size=7.0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\n", "line 1: expected a node"),
        (NODE.format(1).replace("backward", "forward"), "line 1: expected a node"),
        (NODE.format(1) + "\tnode1 -- node2\n", "a node without a line"),
        (NODE.format(1) + NODE.format(2) + "\tnode1 -- node2\n\tnode2 -- node1\n", "cycle"),
    ],
)
def test_malformed_profiles_are_refused(tmp_path, text, message):
    path = tmp_path / "graph.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_profile(path)


def test_a_profile_of_inputs_alone_has_no_layers(tmp_path):
    path = tmp_path / "graph.txt"
    path.write_text(NODE.format(1).replace("Linear", "Input"))
    with pytest.raises(InputError, match="every node is an input"):
        profile_chain(read_profile(path))
