"""Reader of PipeDream's text profiles: what the profiler of that project measured of a model, layer by layer.

The format, as its public profiles have it: a line for every node,

    node4 -- Linear(...) -- forward_compute_time=1.2, backward_compute_time=2.4, activation_size=4096.0, parameter_size=64.0

with times in milliseconds and sizes in bytes (an activation of several tensors as ``[4096.0; 64.0]``), optionally followed by
`` -- stage_id=0``, then a line for every edge, a tab and ``node1 -- node4``. Anything else is refused.

Reference: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019, and its repository
msr-fiddle/pipedream.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np

from benchmarks.papers.bipartition.chains import make_chain
from rlplace.cluster.links import Device, Links
from rlplace.errors import InputError, show
from rlplace.placement.published.bipartition.solve import Chain
from rlplace.problem import BACKWARD, FORWARD, Problem

_NODE = re.compile(
    r"(?P<name>\S+) -- (?P<description>.*) -- forward_compute_time=(?P<forward>[^,]+), "
    r"backward_compute_time=(?P<backward>[^,]+), activation_size=(?P<activation>[^,]+), "
    r"parameter_size=(?P<parameters>[^, ]+)(?: -- stage_id=(?P<stage>\d+))?"
)


@dataclass(frozen=True)
class ProfileNode:
    """One layer of a profile.

    Attributes:
        name: ``"node4"``.
        description: What it is, for people.
        forward_s, backward_s: Seconds for a mini-batch.
        activation_bytes: Size of all its outputs.
        parameter_bytes: Size of its weights.
        inputs: Names of the nodes that feed it.
        stage: A stage that the profile assigns, or None.
    """

    name: str
    description: str
    forward_s: float
    backward_s: float
    activation_bytes: float
    parameter_bytes: float
    inputs: tuple[str, ...]
    stage: int | None = None


def read_profile(path: str | Path) -> tuple[ProfileNode, ...]:
    """Reads a profile.

    Returns:
        The nodes in topological order; of those that could come next, the one with the smallest number in its name.

    Raises:
        InputError: A line that is no node and no edge, or edges to a node without a line or in a cycle.
    """
    rows: dict[str, dict[str, Any]] = {}
    graph = nx.DiGraph()
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        if line.startswith("\t"):
            graph.add_edge(*line.strip().split(" -- "))
        elif line.strip():
            match = _NODE.fullmatch(line.strip())
            if match is None:
                raise InputError(f"{path}: line {number}: expected a node of a PipeDream profile, found {show(line)}")
            rows[match["name"]] = _node(match)
            graph.add_node(match["name"])
    if graph.nodes - rows.keys() or not nx.is_directed_acyclic_graph(graph):
        raise InputError(f"{path}: an edge names a node without a line, or the edges form a cycle")
    order = nx.lexicographical_topological_sort(graph, lambda name: int("0" + re.sub(r"\D", "", name)))
    return tuple(ProfileNode(**rows[name], inputs=tuple(graph.predecessors(name))) for name in order)


def _node(match: re.Match[str]) -> dict[str, Any]:
    activations = match["activation"].strip("[]").split(";")
    return {
        "name": match["name"],
        "description": match["description"],
        "forward_s": float(match["forward"]) / 1e3,
        "backward_s": float(match["backward"]) / 1e3,
        "activation_bytes": sum(float(size) for size in activations),
        "parameter_bytes": float(match["parameters"]),
        "stage": int(match["stage"]) if match["stage"] else None,
    }


def profile_chain(nodes: tuple[ProfileNode, ...]) -> Chain:
    """The layers of a profile in topological order.

    As PipeDream's optimizer does, sources called ``Input`` are left out: loading the data is nobody's layer. What a layer
    keeps for its backward pass is taken to be its inputs.
    """
    layers = profile_layers(nodes)
    place = {node.name: i for i, node in enumerate(layers)}
    sizes = {node.name: node.activation_bytes for node in nodes}
    crossing = np.zeros(len(layers) + 1)
    for node in layers:
        readers = [place[other.name] for other in layers if node.name in other.inputs]
        if readers:  # across every cut up to the last reader
            crossing[place[node.name] : max(readers)] += node.activation_bytes
    return make_chain(
        [node.forward_s for node in layers],
        [node.backward_s for node in layers],
        names=[node.name for node in layers],
        activation_bytes=crossing[:-1],
        stash_bytes=[sum(sizes[name] for name in node.inputs) for node in layers],
        weight_bytes=[node.parameter_bytes for node in layers],
    )


def profile_layers(nodes: tuple[ProfileNode, ...]) -> list[ProfileNode]:
    """The nodes of a profile without the sources called ``Input``."""
    layers = [node for node in nodes if node.inputs or not node.description.startswith("Input")]
    if not layers:
        raise InputError("profile: every node is an input; there is nothing to place")
    return layers


def profile_problem(
    nodes: tuple[ProfileNode, ...],
    num_devices: int,
    *,
    bandwidth_bytes_per_s: float = float("inf"),
    memory_bytes: int | None = None,
    name: str = "profile",
) -> Problem:
    """The profiled model on devices that are alike, as a problem that every planner takes.

    A layer is a group with a forward and a backward op. Its backward reads its inputs and the gradient of its output, and
    the step has no update ops of its own: the profile counts them as backward.

    Args:
        nodes: The profile.
        num_devices: D.
        bandwidth_bytes_per_s: Rate of every link; inf: tensors move at no cost.
        memory_bytes: Memory of every device; None: no limit.
        name: Name of the problem.
    """
    layers = profile_layers(nodes)
    place = {node.name: i for i, node in enumerate(layers)}
    count = len(layers)
    tensors: list[tuple[int, int, list[int]]] = []
    for i, node in enumerate(layers):
        readers = [place[other.name] for other in layers if node.name in other.inputs]
        kept = [count + reader for reader in readers] or [count + i]
        tensors.append((i, int(node.activation_bytes), readers + kept))
        sources = [count + place[source] for source in node.inputs if source in place]
        tensors += [(count + i, int(layers[source - count].activation_bytes), [source]) for source in sources]
        if readers:  # the backward pass of a layer follows its own forward pass
            tensors.append((i, 0, [count + i]))
    times = np.array([node.forward_s for node in layers] + [node.backward_s for node in layers])
    weight = np.array([int(node.parameter_bytes) for node in layers], dtype=np.int64)
    shape = (num_devices, num_devices)
    bandwidth = min(bandwidth_bytes_per_s, 1e30)  # files hold finite numbers
    return Problem(
        name=name,
        samples_per_microbatch=1,
        devices=tuple(Device(f"gpu{i}", memory_bytes) for i in range(num_devices)),
        links=Links(np.full(shape, bandwidth), np.zeros(shape)),
        group_names=tuple(node.name for node in layers),
        resident_bytes=2 * weight,
        weight_bytes=weight,
        gradient_bytes=weight.copy(),
        optimizer_bytes=np.zeros(count, dtype=np.int64),
        group_device=np.full(count, -1, dtype=np.int32),
        op_names=tuple(f"{node.name}/{phase}" for phase in ("forward", "backward") for node in layers),
        op_group=np.tile(np.arange(count, dtype=np.int32), 2),
        op_phase=np.repeat(np.array([FORWARD, BACKWARD], dtype=np.int8), count),
        time_s=np.repeat(times[:, None], num_devices, axis=1),
        temporary_bytes=np.zeros(2 * count, dtype=np.int64),
        tensor_producer=np.array([t[0] for t in tensors], dtype=np.int32),
        tensor_owner=np.full(len(tensors), -1, dtype=np.int32),
        tensor_bytes=np.array([t[1] for t in tensors], dtype=np.int64),
        consumer_ptr=np.concatenate([[0], np.cumsum([len(t[2]) for t in tensors])]).astype(np.int64),
        consumers=np.array([op for t in tensors for op in t[2]], dtype=np.int32),
    )
