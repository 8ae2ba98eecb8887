"""Where a plan puts every node of a forward graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import fx

from rlplace.errors import InputError
from rlplace.plan.device_map import LOSS_OP, plan_groups
from rlplace.plan.plan import PlacementPlan
from rlplace.problem.order import UnionFind, strong_components
from rlplace.runtime import aliases
from rlplace.runtime.distributed.graph.forward_graph import ForwardGraph


@dataclass(frozen=True, order=True)
class Placement:
    """Where a node runs: a stage of the plan on a device of the plan."""

    stage: int
    device: int


@dataclass(frozen=True, eq=False)
class Assignment:
    """Placements of the nodes of one graph.

    Attributes:
        placement: By node name, for every node that does work.
        unit: Number by node name; nodes with one number cannot be cut apart.
        group: Number of the plan's group by node name.
    """

    placement: Mapping[str, Placement]
    unit: Mapping[str, int]
    group: Mapping[str, int]


def planned_placements(plan: PlacementPlan) -> dict[str, Placement]:
    """The placement of every captured forward op that a plan names, a loss function outside the model among them.

    Raises:
        InputError: The plan does not say what its groups hold.
    """
    placements: dict[str, Placement] = {}
    stages = plan.device_of_group if plan.stage_of_group is None else plan.stage_of_group
    for (group, device), stage in zip(plan_groups(plan), stages, strict=True):
        for name in group.get("ops", ()):
            placements.setdefault(name, Placement(int(stage), device))
    if not placements:
        raise InputError("plan: its groups name no ops, so it cannot be cut into stages; plan at the finest granularity")
    return placements


def planned_groups(plan: PlacementPlan) -> dict[str, int]:
    """Number of the group of every captured forward op that a plan names."""
    groups: dict[str, int] = {}
    for number, (group, _) in enumerate(plan_groups(plan)):
        for name in group.get("ops", ()):
            groups.setdefault(name, number)
    return groups


def check_same_ops(graph: ForwardGraph, planned: Mapping[str, Placement]) -> None:
    """Refuses a plan that was made for another graph than that of the example inputs.

    Raises:
        InputError: Naming the first op that one of them lacks.
    """
    exported, named = set(graph.op_of_node.values()), set(planned)
    if named - exported == {LOSS_OP}:
        raise InputError("plan: it places a loss function outside the model; give distribute(..., loss=fn, example_target=...)")
    if exported - {LOSS_OP} == named - {LOSS_OP}:  # a loss function that was not planned goes where the output is
        return
    strange, missing = sorted(named - exported), sorted(exported - named)
    example = f"the plan names {strange[0]!r}, which it lacks" if strange else f"the plan does not place {missing[0]!r}"
    raise InputError(
        f"plan: it is for another model: the graph of this one is not the one that was planned ({example}; {len(strange)} and "
        f"{len(missing)} such ops); give the model, its mode and inputs as they were captured"
    )


def assign(
    graph: ForwardGraph,
    planned: Mapping[str, Placement],
    owned: Mapping[str, int] | None = None,
    groups: Mapping[str, int] | None = None,
) -> Assignment:
    """Gives every node its placement.

    Args:
        graph: The graph to be cut.
        planned: See `planned_placements`. Ops that it does not name, which graphs for other inputs or modes may have, go where
            most ops of their module go.
        owned: Device by first name of a held tensor that is in place already: what reads it goes there, unless the plan
            says otherwise.
        groups: See `planned_groups`; without them everything is of one group.

    Raises:
        InputError: A value that would have to cross a cut cannot.
    """
    nodes = [node for node in graph.module.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    unit = units(nodes)
    of_module = _majority(planned)
    home = of_module.get("", min(planned.values()))
    device_of_held = dict(owned or {})
    held = graph.held_of_node
    members: dict[int, list[fx.Node]] = {}
    for node in nodes:
        members.setdefault(unit[node], []).append(node)
    placement_of_unit: dict[int, Placement] = {}
    group_of_unit: dict[int, int] = {}
    for node in nodes:
        number = unit[node]
        if number in placement_of_unit:
            continue
        inside = members[number]
        names = [graph.op_of_node[n.name] for n in inside if n.name in graph.op_of_node]
        wanted = [name for name in names if name in planned]
        readers = [
            device_of_held[held[o.name]] for n in inside for o in n.all_input_nodes if held.get(o.name) in device_of_held
        ]
        before = [unit[o] for n in inside for o in n.all_input_nodes if o in unit and unit[o] in placement_of_unit]
        if wanted:  # the last one's: all that the others read is made by then, so stages in a row stay in a row
            chosen = planned[wanted[-1]]
        elif readers and (not before or placement_of_unit[before[0]].device != readers[0]):
            chosen = min((s for s in planned.values() if s.device == readers[0]), default=Placement(readers[0], readers[0]))
        elif names and not before:
            chosen = _nearest(names[0].rpartition("/")[0], of_module, home)
        else:
            chosen = placement_of_unit[before[0]] if before else home
        placement_of_unit[number] = chosen
        # Ops that the plan does not name belong to the group that they come after.
        near = [group_of_unit[other] for other in before if placement_of_unit[other] == chosen]
        group_of_unit[number] = (groups or {}).get(wanted[-1], 0) if wanted else near[0] if near else -1
    return Assignment(
        placement={node.name: placement_of_unit[unit[node]] for node in nodes},
        unit={node.name: unit[node] for node in nodes},
        group={node.name: group_of_unit[unit[node]] for node in nodes},
    )


def units(nodes: list[fx.Node]) -> dict[fx.Node, int]:
    """Sets of nodes that cannot be cut apart, numbered; contracting them leaves the graph acyclic."""
    memory = aliases.shared_memory(nodes)
    last_write: dict[fx.Node, int] = {}
    index = {node: number for number, node in enumerate(nodes)}
    for node in nodes:
        for other in aliases.written_by(node):
            last_write[memory.find(other)] = index[node]
    outside = {memory.find(other) for node in nodes for other in node.all_input_nodes if other not in index}
    together = UnionFind()
    for node in nodes:
        for other in node.all_input_nodes:
            root = memory.find(other)
            whole = other in index and not aliases.is_tensor(other)  # tuples and numbers do not cross a cut
            # What is written to stays with its views and its writers, and with whoever reads it before the last write. A
            # buffer that is written to stays with everybody who reads it: the next micro-batch writes to the same memory.
            shares = memory.find(node) is root or index[node] <= last_write.get(root, -1) or root in outside
            if whole or (root in last_write and shares):
                together.union(other, node)
    label = np.zeros(len(nodes), dtype=np.int64)
    names: dict[fx.Node, int] = {}
    for number, node in enumerate(nodes):
        label[number] = names.setdefault(together.find(node), number)
    edges = [(label[index[o]], label[index[node]]) for node in nodes for o in node.all_input_nodes if o in index]
    pairs = np.array([(a, b) for a, b in edges if a != b], dtype=np.int32).reshape(-1, 2)
    components = strong_components(len(nodes), pairs[:, 0], pairs[:, 1])
    return {node: int(components[label[number]]) for number, node in enumerate(nodes)}


def _majority(planned: Mapping[str, Placement]) -> dict[str, Placement]:
    """The placement of most ops below every module path."""
    votes: dict[str, Counter[Placement]] = {}
    for name, placement in planned.items():
        path = name.rpartition("/")[0]
        while True:
            votes.setdefault(path, Counter())[placement] += 1
            if not path:
                break
            path = path.rpartition(".")[0]
    return {path: min(count, key=lambda s: (-count[s], s)) for path, count in votes.items()}


def _nearest(path: str, of_module: Mapping[str, Placement], home: Placement) -> Placement:
    while path not in of_module and path:
        path = path.rpartition(".")[0]
    return of_module.get(path, home)
