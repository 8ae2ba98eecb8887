"""``torch.compile(model, backend="rlplace")``: the ops of every graph that dynamo finds run on the devices of a plan.

Torch finds the backend by its entry point; rlplace need not be imported. Weights stay where the model has them: dynamo checks
that in every call. What another device reads of them is copied there, and gradients come back the same way, so results are
those of eager. `rlplace.apply` moves the weights as well; it is the better choice where the model can be placed as a whole.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from rlplace.errors import CaptureError, InputError, show, unknown_name
from rlplace.integrations.dynamo_graph import GraphModule, PlacedCall, Traced
from rlplace.plan.device_map import device_of_op, round_to_modules
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.check import check_plan_runs_here, torch_device

if TYPE_CHECKING:
    from rlplace.cluster.spec import Cluster

OPTIONS = ("plan", "cluster", "devices", "planner", "time_limit_s", "seed", "keep_weights")

_LOG = logging.getLogger("rlplace")


def rlplace(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Any:
    """The backend. Every graph is placed on its own; a model that dynamo cuts into several has several plans.

    Args:
        gm: Dynamo's graph.
        example_inputs: Its arguments.
        options: Of ``torch.compile(..., options=...)``: ``plan``, a plan of the whole model or its file; or, without one,
            ``planner`` ("agent"), ``time_limit_s`` (5) per graph and ``seed`` (0) of planning. ``devices``, one per device of
            the plan; default those of this machine. ``cluster``, what to plan for, where the devices do not tell.
            ``keep_weights``: without gradients, keep the copies of weights on other devices until the weights change.
        mode: Not supported.

    Raises:
        InputError: An option that cannot be used.
        MissingError: This machine lacks a device.
    """
    if mode is not None:
        raise InputError(f"backend rlplace has no modes; leave mode={show(mode)} out and use options=")
    settings = Settings.of(options or {})
    home = next((a.device for a in example_inputs if isinstance(a, torch.Tensor)), torch.device("cpu"))
    graph = _graph_id()
    if len(settings.devices) == 1 and settings.devices[0] == home:
        _LOG.info("graph %s: one device, nothing to place", graph)
        return gm.forward
    return PlacedCall(gm, _Assignment(gm, settings, home, graph), home, keep_weights=settings.keep_weights)


@dataclass(frozen=True, eq=False)
class Settings:
    """The options, checked.

    Attributes:
        plan: Of the whole model; None plans every graph.
        devices: One per device of the plan.
        cluster: What to plan for; None with a plan, and for one device.
        keep_weights: See `rlplace`.
        planning: Arguments of `rlplace.place`.
    """

    plan: PlacementPlan | None
    devices: tuple[torch.device, ...]
    cluster: Cluster | None
    keep_weights: bool = False
    planning: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(options: Mapping[str, Any]) -> Settings:
        """Reads the options of a call of `torch.compile`."""
        for name in options:
            if name not in OPTIONS:
                raise unknown_name("option of backend rlplace", name, OPTIONS)
        keep = options.get("keep_weights", False)
        if not isinstance(keep, bool):
            raise InputError(f"backend rlplace: keep_weights is {show(keep)}; it must be True or False")
        planning = {key: options[key] for key in ("planner", "time_limit_s", "seed") if key in options}
        given = options.get("plan")
        if given is None:
            devices, cluster = _devices_and_cluster(options.get("devices"), options.get("cluster"))
            return Settings(None, devices, cluster, keep, planning)
        if not isinstance(given, (PlacementPlan, str, Path)):
            raise InputError(f"backend rlplace: plan is {show(given)}; it must be a PlacementPlan or a file")
        if planning or "cluster" in options:
            raise InputError(
                "backend rlplace: a plan needs no planner, time limit, seed or cluster; leave them or the plan out"
            )
        plan = given if isinstance(given, PlacementPlan) else PlacementPlan.load(given)
        check_plan_runs_here(plan)
        devices, _ = _devices_and_cluster(options.get("devices"), None, plan=True)
        needed = int(plan.device_of_group.max(initial=0)) + 1
        if len(devices) < needed:
            raise InputError(
                f"backend rlplace: the plan uses {needed} devices, there are {len(devices)}; "
                'name one per device of the plan: options={"devices": [...]}'
            )
        return Settings(plan, devices, None, keep)


def _devices_and_cluster(devices: Any, cluster: Any, *, plan: bool = False) -> tuple[tuple[torch.device, ...], Cluster | None]:
    from rlplace.cluster.detect import detect
    from rlplace.cluster.parse import as_cluster

    machine = None if cluster is None else as_cluster(cluster)
    if devices is None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        places = tuple(torch.device("cuda", i) for i in range(count)) or (torch.device("cpu"),)
    elif isinstance(devices, (list, tuple)) and devices:
        places = tuple(torch_device(item) for item in devices)
    else:
        raise InputError(f"backend rlplace: devices is {show(devices)}; it must be a list such as ['cuda:0', 'cuda:1']")
    if plan:
        return places, None
    if machine is not None:
        if len(machine.devices) != len(places):
            raise InputError(
                f"backend rlplace: the cluster has {len(machine.devices)} devices, {len(places)} are there; "
                'name one torch device per device of the cluster: options={"devices": [...]}'
            )
        return places, machine
    if len(places) == 1:
        return places, None
    return places, detect() if devices is None else _cluster_of(places)


def _cluster_of(devices: Sequence[torch.device]) -> Cluster:
    """The devices of this machine that were named, joined as their kind usually is."""
    from rlplace.cluster.detect import host_processor, kind_from_name
    from rlplace.cluster.parse import assemble, default_host
    from rlplace.cluster.presets import cpu_kind

    kinds = []
    for device in devices:
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            kinds.append(kind_from_name(properties.name, int(properties.total_memory)))
        elif device.type == "cpu":
            kinds.append(cpu_kind(*host_processor()))
        else:
            raise InputError(
                f"backend rlplace: what {device} can do is not known; describe it: "
                'options={"cluster": ...}, for example "h100:2" or a TOML file'
            )
    first = next((kind for kind in kinds if not kind.host_processor), kinds[0])
    return assemble(kinds, [0] * len(kinds), [default_host(first)], name="backend rlplace")


class _Assignment:
    """Devices of the ops of one graph: by the plan of the whole model, or by a plan made for this graph at its first call."""

    def __init__(self, graph: fx.GraphModule, settings: Settings, home: torch.device, number: str) -> None:
        self._graph, self._settings, self._home, self._number = graph, settings, home, number
        self._own: PlacementPlan | None = None
        self._told = False

    def __call__(self, traced: Traced, args: Sequence[Any]) -> Mapping[str, torch.device]:
        settings = self._settings
        if len(settings.devices) == 1:
            return dict.fromkeys(traced.path_of_op, settings.devices[0])
        if settings.plan is not None:
            indices, by_name = match_ops(settings.plan, traced)
            whole = len(device_of_op(settings.plan))
            line = f"{len(traced.path_of_op)} ops placed by the plan, {by_name} of them by name"
            if by_name < whole:
                line += f"; the plan has {whole}: dynamo left ops out, or cut the model and the others are in further graphs"
        else:
            self._own = self._own or self._plan(args)
            if self._own is None:
                indices, line = {}, f"{len(traced.path_of_op)} ops stay on {self._home}: nothing in the graph can be trained"
            else:
                of_node = {_node(op): index for op, index in device_of_op(self._own).items()}
                indices = {op: of_node[_node(op)] for op in traced.path_of_op if _node(op) in of_node}
                step_s = self._own.predicted["step_time_s"]
                line = f"{len(indices)} ops placed by {self._own.planner}, predicted {step_s * 1e3:.4g} ms forward and backward"
        if not self._told:
            used = ", ".join(f"{count} on {settings.devices[i]}" for i, count in sorted(Counter(indices.values()).items()))
            _LOG.info("graph %s: %s (%s)", self._number, line, used or f"all on {self._home}")
            self._told = True
        return {op: settings.devices[index] for op, index in indices.items()}

    def _plan(self, args: Sequence[Any]) -> PlacementPlan | None:
        """A plan for this graph alone; None where nothing in it needs a gradient."""
        from rlplace.graph.capture import capture
        from rlplace.placing import place

        if not any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
            return None
        names = [node.name for node in self._graph.graph.nodes if node.op == "placeholder"]
        inputs = [
            p
            for p, (name, a) in enumerate(zip(names, args, strict=True))
            if isinstance(a, torch.Tensor) and not isinstance(a, nn.Parameter) and "_buffers_" not in name
        ]
        # A batch is what the first input says; without one, some tensor has to be the input.
        inputs = inputs or [next(p for p, a in enumerate(args) if isinstance(a, torch.Tensor))]
        module = GraphModule(self._graph, args, inputs)
        given = tuple(args[p].detach().requires_grad_(args[p].requires_grad) for p in inputs)
        name = f"graph {self._number}"
        try:
            graph = capture(module, given, loss=_sum_of_outputs, optimizer="sgd", name=name, method="export")
        except _NoGradientError:
            return None
        except CaptureError as error:
            raise InputError(
                f"backend rlplace: {name} cannot be planned ({' '.join(str(error).split())[:300]}); give a plan of the whole "
                'model, options={"plan": ...}, or leave the code that causes it out with torch.compiler.disable'
            ) from error
        return place(graph, self._settings.cluster, **self._settings.planning)


class _NoGradientError(InputError):
    """No output of a graph depends on anything that can be trained."""


def _sum_of_outputs(outputs: Any) -> torch.Tensor:
    """Stands for the loss when a graph is planned."""
    parts = [value.float().sum() for value in outputs if isinstance(value, torch.Tensor) and value.requires_grad]
    if not parts:
        raise _NoGradientError("backend rlplace: no output of the graph has a gradient")
    return torch.stack(parts).sum()


def match_ops(plan: PlacementPlan, traced: Traced) -> tuple[dict[str, int], int]:
    """Finds the ops of a plan in a graph of dynamo.

    Dynamo may leave ops out, and after a cut it numbers nodes anew. The k-th op of a kind in a module is the k-th such op of
    the plan; an op that the plan does not know goes with the majority of its module, one of an unknown module with its inputs.

    Returns:
        Device index by op name, and how many ops were found by name.

    Raises:
        InputError: The plan knows no module of the graph.
    """
    planned: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for name, device in device_of_op(plan).items():
        path, _, node = name.rpartition("/")
        kind, number = _split_number(node)
        planned.setdefault((path, kind), []).append((number, device))
    modules = round_to_modules(plan).device_of_module
    paths = {path for path, _ in planned} | set(modules)
    skip = _depth_below(traced.path_of_op.values(), paths)
    devices: dict[str, int] = {}
    seen: Counter[tuple[str, str]] = Counter()
    by_name = 0
    for op, full in traced.path_of_op.items():
        path = ".".join(full.split(".")[skip:]) if full else full
        key = (path, _split_number(_node(op))[0])
        known = sorted(planned.get(key, ()))
        if seen[key] < len(known):
            devices[op] = known[seen[key]][1]
            by_name += 1
        elif path in modules:
            devices[op] = modules[path]
        seen[key] += 1
    if not devices:
        example = next(iter(sorted(path for path in traced.path_of_op.values() if path)), "")
        raise InputError(
            f"backend rlplace: the plan knows no module of this graph (such as {example!r}); it is for another model, "
            "or the compiled function hides the model's own names: compile the model itself"
        )
    return devices, by_name


def _node(op: str) -> str:
    return op.rpartition("/")[2]


def _split_number(node: str) -> tuple[str, int]:
    """``linear_3`` is the third further ``linear``."""
    match = re.fullmatch(r"(.*?)_(\d+)", node)
    return (match[1], int(match[2])) if match else (node, 0)


def _depth_below(found: Any, planned: set[str]) -> int:
    """How many leading names the graph's paths have before those of the plan: a compiled function may hold the model."""
    paths = [path.split(".") for path in found if path]
    deepest = max(map(len, paths), default=0)
    hits = [sum(".".join(parts[skip:]) in planned for parts in paths if len(parts) > skip) for skip in range(deepest)]
    return hits.index(max(hits)) if hits else 0


def _graph_id() -> str:
    """Dynamo's own number of the graph, as its logs have it."""
    number = torch._guards.CompileContext.current_compile_id()
    return "0" if number is None else str(number)
