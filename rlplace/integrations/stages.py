"""Where torch.distributed.pipelining and torchtitan have to cut a model, from a plan whose stages follow each other.

Both cut at module boundaries, in the order in which the forward runs. The model is exported once, without running it, to know
that order. A plan is refused with the reason when its stages are no such chain.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlplace.errors import InputError
from rlplace.plan.device_map import device_of_op, plan_groups, round_to_modules
from rlplace.plan.plan import PlacementPlan, require_placement

if TYPE_CHECKING:
    from torch import fx, nn
    from torch.distributed.pipelining import SplitPoint


@dataclass(frozen=True)
class StageSplit:
    """A model in stages.

    Attributes:
        cuts: One fewer than stages: module path, and whether the cut is at its ``"BEGINNING"`` or ``"END"``.
        modules: Per stage the paths of the modules whose parameters or buffers are read there, in that order.
        devices: Per stage the plan's device number: the rank that is to run it.
        moved_ops: Ops without parameters that run in the stage beside the one of the plan, because no module begins between.
        units: Stages of each direct child of the model, and of each item of its lists; what torchtitan can move.
    """

    cuts: tuple[tuple[str, str], ...]
    modules: tuple[tuple[str, ...], ...]
    devices: tuple[int, ...]
    moved_ops: int
    units: Mapping[str, tuple[int, ...]]

    @property
    def spec(self) -> dict[str, SplitPoint]:
        """For ``torch.distributed.pipelining.pipeline(..., split_spec=)``."""
        from torch.distributed.pipelining import SplitPoint

        return {path: SplitPoint[where] for path, where in self.cuts}

    def module_fqns(self) -> list[list[str]]:
        """For torchtitan's ``parallelism.module_fqns_per_model_part``: per stage the parts of the model that it keeps.

        Raises:
            InputError: A stage begins inside of such a part.
        """
        for path, stages in self.units.items():
            if len(stages) > 1:
                raise InputError(
                    f"split points: torchtitan keeps or drops {path!r} as a whole, the plan cuts it between stages "
                    f"{stages[0]} and {stages[1]}; plan with fewer groups, or use split_spec"
                )
        return [[path for path, (own,) in self.units.items() if own == stage] for stage in range(len(self.modules))]

    def torchtitan_toml(self) -> str:
        """The same as part of a torchtitan configuration file."""
        rows = "".join(f"    {json.dumps(row)},\n" for row in self.module_fqns())
        return f"[parallelism]\npipeline_parallel_degree = {len(self.modules)}\nmodule_fqns_per_model_part = [\n{rows}]\n"


def split_spec(plan: PlacementPlan, model: nn.Module, example_inputs: Any) -> dict[str, SplitPoint]:
    """``split_points(...).spec``: what ``torch.distributed.pipelining.pipeline`` takes as ``split_spec``."""
    return split_points(plan, model, example_inputs).spec


def split_points(plan: PlacementPlan, model: nn.Module, example_inputs: Any) -> StageSplit:
    """Finds the cuts of a model for the stages of a plan.

    Args:
        plan: A plan of the model; its stages are those of ``stage_of_group``, or else its devices.
        model: The model that was planned, in the same mode; it is not changed.
        example_inputs: Inputs of one micro-batch as for `rlplace.capture`: a tuple of arguments or a dict of keyword arguments.

    Raises:
        InputError: The plan is for another model, or its stages are no chain that is cut at module boundaries.
    """
    require_placement(plan, "split points", "its stages name their blocks (plan.strategy.stages)")
    graph, op_of_node = _export(model, example_inputs)
    stage_of, device_of_stage = _stages(plan, list(op_of_node.values()))
    ops = [_Op(node, op, stage_of[op]) for node, op in op_of_node.items()]
    readers = _readers(graph, op_of_node)
    anchors = [number for number, op in enumerate(ops) if op.node in readers]
    order = _order_of_stages(ops, anchors)
    ops = [dataclasses.replace(op, stage=order.get(op.stage, -1)) for op in ops]
    cuts, first_op = _find_cuts(ops, anchors, len(order), _spans(graph, ops))
    cut_stage = [sum(number >= first for first in first_op) for number in range(len(ops))]
    _check_chain(graph, ops, cut_stage, readers)
    modules: list[dict[str, None]] = [{} for _ in order]
    for number in anchors:
        for name in readers[ops[number].node]:
            modules[cut_stage[number]][name.rpartition(".")[0]] = None
    devices = {index: device_of_stage[stage] for stage, index in order.items()}
    return StageSplit(
        cuts=cuts,
        modules=tuple(tuple(paths) for paths in modules),
        devices=tuple(devices[stage] for stage in range(len(order))),
        moved_ops=sum(op.stage != stage for op, stage in zip(ops, cut_stage, strict=True)),
        units=_units(model, ops, cut_stage),
    )


@dataclass(frozen=True)
class _Op:
    """A forward op: its node in the export, its name in the plan, its stage."""

    node: str
    name: str
    stage: int

    @property
    def module(self) -> str:
        return self.name.rpartition("/")[0]


def _export(model: nn.Module, example_inputs: Any) -> tuple[fx.GraphModule, dict[str, str]]:
    """The exported graph and the name of each op by node, in execution order."""
    import torch

    from rlplace.graph.export import export_training_graph
    from rlplace.graph.fake import fake_copy, fake_inputs, new_fake_mode
    from rlplace.runtime.distributed.graph.inputs import call_arguments

    args, kwargs = call_arguments(example_inputs)
    mode = new_fake_mode()
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = export_training_graph(fake_copy(model, mode), fake_inputs(args, mode), fake_inputs(kwargs, mode))
    except Exception as error:  # export runs the model's own code, which may raise anything
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise InputError(
            f"split points: torch.export fails on {type(model).__name__} ({type(error).__name__}: {reason}), "
            "and torch.distributed.pipelining needs it as well"
        ) from error
    return traced.module, dict(traced.op_name_of_node)


def _stages(plan: PlacementPlan, exported: Sequence[str]) -> tuple[dict[str, int], dict[int, int]]:
    """Stage number of each op of the export, and the device of each stage."""
    stages = plan.device_of_group if plan.stage_of_group is None else plan.stage_of_group
    device_of_stage: dict[int, int] = {}
    for stage, (_, device) in zip(stages.tolist(), plan_groups(plan), strict=True):
        if device_of_stage.setdefault(stage, device) != device:
            raise InputError(f"split points: stage {stage} of the plan is on two devices; a stage of a pipeline runs on one")
    staged = dataclasses.replace(plan, device_of_group=stages)
    of_op, of_module = device_of_op(staged), round_to_modules(staged).device_of_module
    strange = sorted(set(of_op) - set(exported))
    missing = [op for op in exported if op not in of_op and (of_op or op.rpartition("/")[0] not in of_module)]
    if strange or missing:
        example = f"it places {strange[0]!r}, which the model lacks" if strange else f"it does not place {missing[0]!r}"
        raise InputError(
            f"split points: the plan is for another model or other inputs ({example}); "
            "give the inputs and the mode of the capture"
        )
    return {op: of_op[op] if of_op else of_module[op.rpartition("/")[0]] for op in exported}, device_of_stage


def _readers(graph: fx.GraphModule, op_of_node: Mapping[str, str]) -> dict[str, list[str]]:
    """Names of the parameters and buffers that each op reads; ops that read none are left out."""
    import torch

    from rlplace.runtime.aliases import get_attr

    read: dict[str, list[str]] = {}
    first: dict[int, str] = {}
    held = {id(tensor) for tensor in [*graph.parameters(), *graph.buffers()]}
    for node in graph.graph.nodes:
        if node.op != "get_attr":
            continue
        value = get_attr(graph, str(node.target))
        if isinstance(value, torch.Tensor) and id(value) in held:
            name = first.setdefault(id(value), str(node.target))
            for user in node.users:
                if user.name in op_of_node:
                    read.setdefault(user.name, []).append(name)
    return read


def _order_of_stages(ops: Sequence[_Op], anchors: Sequence[int]) -> dict[int, int]:
    """Position of each stage in the chain, by the ops that read parameters; refuses stages that come twice."""
    order: dict[int, int] = {}
    last: _Op | None = None
    for op in (ops[number] for number in anchors):
        if op.stage not in order:
            order[op.stage] = len(order)
        elif last is not None and last.stage != op.stage:
            raise InputError(
                f"split points: the stages are no chain: {op.name!r} of stage {op.stage} runs after {last.name!r} of stage "
                f"{last.stage}; plan with pipedream or gpipe, which build chains, or run the plan with rlplace.distribute"
            )
        last = op
    if len(order) < 2:
        raise InputError("split points: the plan has one stage; there is nothing to cut")
    return order


def _spans(graph: fx.GraphModule, ops: Sequence[_Op]) -> dict[str, tuple[int, int]]:
    """First and last op of every module that runs in one piece and is called once, outer modules first."""
    number = {op.node: index for index, op in enumerate(ops)}
    positions: dict[str, list[int]] = {}
    calls: dict[str, set[str]] = {}
    for node in graph.graph.nodes:
        if node.name not in number:
            continue
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            clean = str(path).partition("@")[0]
            for prefix in ("L['self'].", "L['self']", "L__self___"):
                clean = clean.removeprefix(prefix)
            if clean:
                positions.setdefault(clean, []).append(number[node.name])
                calls.setdefault(clean, set()).add(f"{key} {path}")
    whole = {path: (at[0], at[-1]) for path, at in positions.items() if len(calls[path]) == 1 and at[-1] - at[0] + 1 == len(at)}
    return dict(sorted(whole.items(), key=lambda item: item[0].count(".")))


def _find_cuts(
    ops: Sequence[_Op], anchors: Sequence[int], stages: int, spans: Mapping[str, tuple[int, int]]
) -> tuple[tuple[tuple[str, str], ...], list[int]]:
    """The cuts, and the number of the first op behind each; between parameters, as few ops as possible change stage."""
    cuts: list[tuple[str, str]] = []
    first_op: list[int] = []
    used: set[str] = set()
    for stage in range(1, stages):
        low = max(number for number in anchors if ops[number].stage < stage)
        high = min(number for number in anchors if ops[number].stage >= stage)
        candidates: list[tuple[int, bool, int, str, str, int]] = []
        for path, (begin, end) in spans.items():
            for where, at in (("BEGINNING", begin), ("END", end + 1)):
                if low < at <= high and path not in used:
                    wrong = sum(op.stage >= stage for op in ops[low + 1 : at]) + sum(op.stage < stage for op in ops[at:high])
                    candidates.append((wrong, where == "END", len(candidates), path, where, at))
        if not candidates:
            raise InputError(
                f"split points: no module begins or ends between {ops[low].name!r} of stage {stage - 1} and {ops[high].name!r} "
                f"of stage {stage}; plan with fewer groups (--granularity), or run the plan with rlplace.distribute"
            )
        *_, path, where, at = min(candidates)
        used.add(path)
        cuts.append((path, where))
        first_op.append(at)
    return tuple(cuts), first_op


def _check_chain(graph: fx.GraphModule, ops: Sequence[_Op], stage: Sequence[int], readers: Mapping[str, Sequence[str]]) -> None:
    """Refuses what torch's pipelines cannot differentiate: weights of two stages, and gradients that skip a stage."""
    stage_of = {op.node: number for op, number in zip(ops, stage, strict=True)}
    home: dict[str, int] = {}
    for node, names in readers.items():
        for name in names:
            if home.setdefault(name, stage_of[node]) != stage_of[node]:
                raise InputError(
                    f"split points: {name!r} is read in stages {home[name]} and {stage_of[node]}: torch would train two copies "
                    "of it; keep the modules that share it in one stage, or run the plan with rlplace.distribute"
                )
    from torch import nn

    gradient: dict[Any, bool] = {}
    stages: dict[Any, int] = {}
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        inputs = node.all_input_nodes
        stages[node] = stage_of.get(node.name, max((stages[n] for n in inputs), default=0))
        if node.op == "get_attr":
            gradient[node] = bool(getattr(value, "requires_grad", False)) or isinstance(value, nn.Parameter)
            continue
        gradient[node] = any(gradient[n] for n in inputs) and _is_floating(value)
        for source in inputs:
            if source.op == "call_function" and gradient[source] and stages[node] - stages[source] > 1:
                raise InputError(
                    f"split points: {node.name!r} of stage {stages[node]} reads {source.name!r} of stage {stages[source]}: "
                    "torch's pipelines pass gradients to the stage before only; run the plan with rlplace.distribute"
                )


def _is_floating(value: Any) -> bool:
    import torch

    leaves = torch.utils._pytree.tree_leaves(value)
    return any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves)


def _units(model: nn.Module, ops: Sequence[_Op], stage: Sequence[int]) -> dict[str, tuple[int, ...]]:
    from torch import nn

    paths: list[str] = []
    for name, child in model.named_children():
        listed = isinstance(child, (nn.ModuleList, nn.ModuleDict))
        paths += [f"{name}.{item}" for item, _ in child.named_children()] if listed else [name]
    units: dict[str, tuple[int, ...]] = {}
    for path in paths:
        count_of_stage = Counter(s for op, s in zip(ops, stage, strict=True) if f"{op.module}.".startswith(f"{path}."))
        if count_of_stage:
            units[path] = tuple(sorted(count_of_stage))
    return units
