"""Reader of PipeDream's text profiles: what the profiler of that project measured of a model, layer by layer.

The format, as its public profiles have it: a line for every node,

    node4 -- Linear(...) -- forward_compute_time=1.2, backward_compute_time=2.4, activation_size=4096.0, parameter_size=64.0

with times in milliseconds and sizes in bytes (an activation of several tensors as ``[4096.0; 64.0]``), optionally followed by
`` -- stage_id=0``, then a line for every edge, a tab and ``node1 -- node4``.

Reference: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019, and its repository
msr-fiddle/pipedream.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlplace.placement.published.bipartition.solve import Chain
from rlplace.problem import BACKWARD, FORWARD, Problem
from rlplace.problem.build import TensorSpec, build_problem

PROFILES = Path(__file__).parent / "profiles"
_NODE = re.compile(
    r"(?P<name>\S+) -- (?P<description>.*) -- forward_compute_time=(?P<forward>[^,]+), "
    r"backward_compute_time=(?P<backward>[^,]+), activation_size=(?P<activation>[^,]+), parameter_size=(?P<parameters>[^, ]+).*"
)


class Node(NamedTuple):
    """One layer of a profile: seconds of a mini-batch, bytes of all its outputs and of its weights, names of what feeds it."""

    name: str
    description: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float
    inputs: tuple[str, ...]


def read_profile(path: Path) -> list[Node]:
    """Reads the layers of a profile in topological order, of those that could come next the least number first.

    As PipeDream's optimizer does, sources called ``Input`` are left out: loading the data is no layer.
    """
    nodes, graph = {}, nx.DiGraph()
    for line in path.read_text().splitlines():
        if line.startswith("\t"):
            graph.add_edge(*line.strip().split(" -- "))
        elif line.strip():
            match = _NODE.fullmatch(line.strip())
            assert match is not None, line
            name, description, forward, backward, activation, parameters = match.groups()
            size = sum(map(float, activation.strip("[]").split(";")))
            nodes[name] = Node(name, description, float(forward) / 1e3, float(backward) / 1e3, size, float(parameters), ())
            graph.add_node(name)
    order = nx.lexicographical_topological_sort(graph, lambda name: int("0" + re.sub(r"\D", "", name)))
    found = [nodes[name]._replace(inputs=tuple(graph.predecessors(name))) for name in order]
    return [node for node in found if node.inputs or not node.description.startswith("Input")]


def readers_of(layers: list[Node]) -> list[list[int]]:
    """Lists the layers that read the output of each layer."""
    return [[place for place, other in enumerate(layers) if node.name in other.inputs] for node in layers]


def profile_chain(layers: list[Node]) -> Chain:
    """Makes the chain of a profile; what a layer keeps for its backward pass is taken to be its inputs."""
    sizes = {node.name: node.activation_bytes for node in layers}
    crossing = np.zeros(len(layers) + 1)
    for place, (node, readers) in enumerate(zip(layers, readers_of(layers), strict=True)):
        if readers:  # across every cut up to the last reader
            crossing[place : max(readers)] += node.activation_bytes
    return make_chain(
        [node.forward_s for node in layers],
        [node.backward_s for node in layers],
        names=tuple(node.name for node in layers),
        activation_bytes=crossing[:-1],
        stash_bytes=[sum(sizes.get(name, 0.0) for name in node.inputs) for node in layers],
        weight_bytes=[node.parameter_bytes for node in layers],
    )


def profile_problem(layers: list[Node], num_devices: int, *, name: str) -> Problem:
    """Makes a problem of a profile on like devices without limits, on which every planner can be run.

    A layer is a group with a forward and a backward op. Its backward reads its inputs and the gradient of its output, and
    the step has no update ops of its own: the profile counts them as backward.
    """
    count, place = len(layers), {node.name: i for i, node in enumerate(layers)}
    tensors = []
    for i, (node, readers) in enumerate(zip(layers, readers_of(layers), strict=True)):
        kept = [count + reader for reader in readers] or [count + i]
        tensors.append(TensorSpec(i, int(node.activation_bytes), readers + kept))
        sources = [place[source] for source in node.inputs if source in place]
        tensors += [TensorSpec(count + i, int(layers[j].activation_bytes), [count + j]) for j in sources]
        if readers:  # the backward pass of a layer follows its own forward pass
            tensors.append(TensorSpec(i, 0, [count + i]))
    weight = np.array([int(node.parameter_bytes) for node in layers], dtype=np.int64)
    problem = build_problem(
        name,
        time_s=[[s] * num_devices for s in [node.forward_s for node in layers] + [node.backward_s for node in layers]],
        tensors=tensors,
        memory_bytes=[None] * num_devices,
        group=[*range(count), *range(count)],
        resident_bytes=(2 * weight).tolist(),
        phase=[FORWARD] * count + [BACKWARD] * count,
        bandwidth_bytes_per_s=1e30,  # tensors move at no cost
    )
    parts = {"weight_bytes": weight, "gradient_bytes": weight, "optimizer_bytes": np.zeros(count, dtype=np.int64)}
    return replace(problem, group_names=tuple(node.name for node in layers), **parts)


def make_chain(
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    *,
    names: tuple[str, ...] | None = None,
    activation_bytes: ArrayLike = 0.0,
    gradient_bytes: ArrayLike | None = None,
    stash_bytes: ArrayLike | None = None,
    weight_bytes: ArrayLike = 0.0,
    resident_bytes: ArrayLike | None = None,
) -> Chain:
    """Makes a chain of L layers from seconds, [L] or [L, W], and bytes, [L] or one number for all.

    By default gradients are as large as activations, a layer stashes what the layer before sends, and weights are resident.
    """
    forward, backward = np.asarray(forward_s, dtype=np.float64), np.asarray(backward_s, dtype=np.float64)
    layers = len(forward)

    def column(value: ArrayLike) -> NDArray[np.float64]:
        return np.array(np.broadcast_to(np.asarray(value, dtype=np.float64), (layers,)))

    activation, weight = column(activation_bytes), column(weight_bytes)
    return Chain(
        names=names or tuple(f"layer{i}" for i in range(layers)),
        forward_s=forward,
        backward_s=backward,
        activation_bytes=activation,
        gradient_bytes=column(activation if gradient_bytes is None else gradient_bytes),
        stash_bytes=np.concatenate([[0.0], activation[:-1]]) if stash_bytes is None else column(stash_bytes),
        weight_bytes=weight,
        resident_bytes=column(weight if resident_bytes is None else resident_bytes),
    )
