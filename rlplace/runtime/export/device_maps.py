"""Device maps of accelerate and transformers: imported as plans that the simulator scores, exported completely.

A map gives a device by module path, the most specific path decides, ``""`` is the whole model. An imported map puts every
group of a problem where most of its ops' modules are.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlplace.errors import InputError, show, unknown_name
from rlplace.plan.device_map import closest, most_below, path_prefixes, round_to_modules, to_device_map
from rlplace.plan.plan import PlacementPlan, make_plan
from rlplace.problem import Problem
from rlplace.simulator import simulate

if TYPE_CHECKING:
    from torch import nn

_OFFLOADED = ("disk", "meta")


def plan_from_device_map(
    problem: Problem, device_map: Mapping[str, Any], *, devices: Sequence[Any] | None = None, model: nn.Module | None = None
) -> PlacementPlan:
    """Converts a device map to a plan, with the simulator's prediction.

    Args:
        problem: The model's problem, priced from its graph (`rlplace.price`), so that it knows the modules.
        device_map: Device by module path: a number, ``"cuda:1"``, ``"cpu"`` or a `torch.device`.
        devices: Name of each device of the problem in the map; default: accelerators by number from 0, the processor ``"cpu"``.
        model: Distinguishes modules that run nothing, which maps may name, from wrong names.

    Returns:
        The plan. Whether it fits is in ``predicted.feasible``; ``predicted.device_map`` counts ``ops_moved``, ops whose
        group has more ops elsewhere, and ``groups_without_entry``, groups without weights that follow their neighbours.

    Raises:
        InputError: An entry that is no device of the problem, an unknown module, or weights without an entry.
    """
    if problem.group_ops is None or problem.group_modules is None:
        raise InputError(
            "device_map: the problem does not list the modules of its groups; capture the model and price it: "
            "rlplace.price(rlplace.capture(model, inputs), cluster)"
        )
    if not isinstance(device_map, Mapping) or not device_map:
        raise InputError(f"device_map: expected a dict of device by module path, found {show(device_map)}")
    index_of = _index_of_name(problem, devices)
    known = _known_paths(problem)
    modules = known if model is None else known | {name for name, _ in model.named_modules(remove_duplicate=False)}
    entries: dict[str, int] = {}
    held: dict[str, Counter[int]] = {}  # by module: devices of single parameters that it holds itself
    for path, value in device_map.items():
        _check_path(path, modules, model)
        index = _device_index(path, value, index_of)
        if path in modules:
            entries[path] = index
        else:
            held.setdefault(path.rpartition(".")[0], Counter())[index] += 1

    def device_of(path: str) -> int | None:
        entry = closest(entries, path)
        return held[path].most_common(1)[0][0] if entry is None and path in held else entry

    chosen: dict[int, int] = {}
    moved = 0
    for group, (ops, own_modules) in enumerate(zip(problem.group_ops, problem.group_modules, strict=True)):
        paths = [op.rpartition("/")[0] for op in ops] or list(own_modules)
        votes = Counter(entry for entry in map(device_of, paths) if entry is not None)
        if votes:
            chosen[group] = min(votes, key=lambda d: (-votes[d], d))
            moved += votes.total() - votes[chosen[group]]
        elif problem.gradient_bytes[group] > 0:
            missing = next(iter(own_modules), problem.group_names[group])
            raise InputError(f'device_map: no entry covers {missing!r}, which has weights; add it, or "" for the rest')
    told = {"ops_moved": moved, "groups_without_entry": problem.num_groups - len(chosen)}
    plan = make_plan(problem, _with_neighbours(problem, chosen), planner="device_map")
    return plan.with_predicted(simulate(problem, plan).predicted(problem).replace(device_map=told))


def complete_device_map(plan: PlacementPlan, model: nn.Module, devices: Sequence[Any] | None = None) -> dict[str, Any]:
    """Returns a device map that covers every parameter and buffer of the model, as `accelerate.dispatch_model` needs.

    Modules that run are mapped by `to_device_map`, those that do not with the nearest ones; a parameter of a module whose
    children are on several devices gets an entry of its own name.

    Args:
        plan: A plan of the model.
        model: The model.
        devices: Name of each device of the plan in the map; default its number.
    """
    entries = dict(to_device_map(plan))
    rounded = round_to_modules(plan).device_of_module
    near = {**most_below(rounded.items()), **rounded}
    for name in model.state_dict():
        if closest(entries, name) is not None:
            continue
        owner = name.rpartition(".")[0]
        inside = any(path.startswith(f"{owner}.") for path in entries)
        entries[name if inside or not owner else owner] = closest(near, owner) or 0
    if devices is None:
        return entries
    needed = int(plan.device_of_group.max(initial=0)) + 1
    if len(devices) < needed:
        raise InputError(f"device_map: the plan uses {needed} devices, {len(devices)} named; name one per device of the plan")
    return {path: devices[index] for path, index in entries.items()}


def _index_of_name(problem: Problem, devices: Sequence[Any] | None) -> dict[str, int]:
    """Returns the devices of the problem by their names in a map."""
    numbers = itertools.count()
    names = ["cpu" if (d.kind or d.name).startswith("cpu") else next(numbers) for d in problem.devices]
    if devices is not None and len(devices) != problem.num_devices:
        raise InputError(f"device_map: {len(devices)} devices named, the problem has {problem.num_devices}; name one each")
    index: dict[str, int] = {}
    for number, name in enumerate(map(_canonical, names if devices is None else devices)):
        if index.setdefault(name, number) != number and devices is not None:
            raise InputError(f"device_map: {name!r} names two devices of the problem; names must differ")
    return index


def _canonical(value: Any) -> str:
    """Returns one name for ``1``, ``"1"`` and ``"cuda:1"``; likewise for ``"cuda"`` and ``0``."""
    text = str(value).strip().lower()
    for prefix in ("cuda", "xpu", "npu", "mps"):
        if text == prefix:
            return "0"
        text = text.removeprefix(f"{prefix}:")
    return "cpu" if text == "cpu:0" else text


def _device_index(path: str, value: Any, index_of: Mapping[str, int]) -> int:
    if isinstance(value, bool) or not (isinstance(value, (int, str)) or type(value).__name__ == "device"):
        raise InputError(f"device_map: {path!r}: {show(value)} is no device; give a number, 'cuda:1' or 'cpu'")
    name = _canonical(value)
    if name in _OFFLOADED:
        raise InputError(
            f"device_map: {path!r} is on {name!r}: such weights are loaded anew in every step, which is not simulated; "
            "infer the map with more memory, or give the cluster a processor (+cpu:1) and put it on 'cpu'"
        )
    if name not in index_of:
        raise InputError(f"device_map: {path!r}: {show(value)} is no device of the problem; it has {', '.join(index_of)}")
    return index_of[name]


def _known_paths(problem: Problem) -> set[str]:
    paths = {path for modules in problem.group_modules or () for path in modules}
    paths |= {op.rpartition("/")[0] for ops in problem.group_ops or () for op in ops}
    return {"", *(prefix for path in paths for prefix in path_prefixes(path))}


def _check_path(path: Any, modules: set[str], model: nn.Module | None) -> None:
    """Refuses a path that is neither a module nor a parameter of one."""
    if path in modules:
        return
    # An entry may be one parameter of a module that has others elsewhere.
    if model is not None:
        parameters = set(model.state_dict())
        known, hint = modules | parameters, ""
    else:
        parameters = {f"{module}.{name}".removeprefix(".") for module in modules for name in ("weight", "bias")}
        known, hint = modules, "; if it is a module that runs nothing, give model= as well"
    if path not in parameters:
        raise InputError(f"{unknown_name('module of device_map', path, known)}{hint}")


def _with_neighbours(problem: Problem, known: dict[int, int]) -> list[int]:
    """Puts groups without an entry on the device of a producer of their inputs, else of a reader of their outputs."""
    readers = problem.op_group[problem.consumers].tolist()
    edges = list(dict.fromkeys(zip(problem.edge_source_group.tolist(), readers, strict=True)))
    lonely = set(range(problem.num_groups)) - known.keys()
    near = {group: [a for a, b in edges if b == group] + [b for a, b in edges if a == group] for group in lonely}
    while left := sorted(lonely - known.keys()):
        found = {group: [known[other] for other in near[group] if other in known] for group in left}
        settled = {group: devices[0] for group, devices in found.items() if devices}
        known = known | (settled or dict.fromkeys(left, known[min(known)] if known else 0))
    return [known[group] for group in range(problem.num_groups)]
