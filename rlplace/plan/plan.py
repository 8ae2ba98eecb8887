"""The `PlacementPlan` record: a strategy, or where the groups of a problem run; and its checks."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlplace.errors import InputError, show
from rlplace.files import read_record, write_json
from rlplace.plan.prediction import Prediction
from rlplace.plan.strategy import Strategy
from rlplace.problem import Problem

FORMAT = "rlplace.plan"
VERSION = 2


@dataclass(frozen=True, eq=False)
class PlacementPlan:
    """A plan of a training step: a whole strategy, or a device for each group of a problem.

    Attributes:
        problem: Fingerprint of the problem that the plan solves; for a whole strategy that of its question, which hashes graph,
            cluster, costs, batch and precision.
        planner: Name of the planner that made it.
        seed: Seed that the planner was given.
        device_of_group: int32 [G]; empty in a whole strategy, as are all that follow but groups, source and prediction.
        priority: Optional float64 [N]; a device starts the ready op of highest priority.
        order: Optional, per device the exact sequence of its op numbers; excludes `priority`.
        samples: Samples of a step; None where that is not known.
        groups: Per group ``{"name", "modules", "ops"}``: the part of the model that it holds.
        source: Where the problem came from, so that a verb can rebuild it.
        strategy: The whole strategy; None in a placement plan.
        predicted: Predicted step time and memory.
    """

    problem: str
    planner: str
    seed: int
    device_of_group: NDArray[np.int32]
    priority: NDArray[np.float64] | None = None
    order: Sequence[Sequence[int]] | None = None
    samples: int | None = None
    groups: Sequence[Mapping[str, Any]] | None = None
    source: Mapping[str, Any] | None = None
    strategy: Strategy | None = None
    predicted: Prediction = field(default_factory=Prediction)

    def __post_init__(self) -> None:
        if not isinstance(self.predicted, Prediction):
            raise InputError(
                f"plan: predicted must be a Prediction such as Prediction(step_time_s=0.1), found {show(self.predicted)}; "
                "keys of your own go into its extra"
            )

    def save(self, path: str | Path) -> None:
        """Writes ``*.plan.json``, atomically; a model of a ``file.py`` is named relative to it."""
        folder = Path(path).parent
        write_json(path, self._with_file(lambda file: os.path.relpath(file, folder)).to_dict())

    @staticmethod
    def load(path: str | Path, problem: Problem | None = None) -> PlacementPlan:
        """Reads a plan; with `problem`, also checks that it fits.

        Raises:
            InputError: Malformed file, another version, or a plan for another problem.
        """
        from rlplace.plan.file import plan_from_dict

        def parse(data: dict[str, Any]) -> PlacementPlan:
            plan = plan_from_dict(data)
            if problem is not None:
                check_plan(plan, problem)
            there = Path(path).parent
            return plan._with_file(lambda file: os.path.relpath(there / file) if (there / file).exists() else file)

        return read_record(path, FORMAT, VERSION, parse)

    def _with_file(self, moved: Callable[[str], str]) -> PlacementPlan:
        """Returns the plan with another path of the ``file.py`` that its model is a function of."""
        source: dict[str, Any] = dict(self.source or {})
        graph = source.get("graph")
        file, colon, rest = str(graph.get("model", "")).partition(":") if isinstance(graph, Mapping) else ("", "", "")
        if not file.endswith(".py") or os.path.isabs(file):
            return self
        return replace(self, source=source | {"graph": {**(graph or {}), "model": f"{moved(file)}{colon}{rest}"}})

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain JSON data, defaults left out."""
        from rlplace.plan.file import plan_to_dict

        return {"format": FORMAT, "version": VERSION, **plan_to_dict(self)}

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the plan's decisions: its file without source, prediction, planner, seed, and samples of the problem."""
        beside = ("source", "predicted", "planner", "seed")
        data = {key: value for key, value in replace(self, samples=None).to_dict().items() if key not in beside}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def __str__(self) -> str:
        """A sentence: what runs where, step time, memory and batch."""
        from rlplace.plan.words import sentence

        return sentence(self)

    def _repr_html_(self) -> str:
        """Returns the head of the plan's report, with its key figures, for notebooks."""
        from rlplace.plan.words import html_head

        return html_head(self)

    def with_predicted(self, predicted: Prediction) -> PlacementPlan:
        """Returns the same plan with another prediction."""
        return replace(self, predicted=predicted)


def make_plan(
    problem: Problem, device_of_group: Sequence[int] | NDArray[Any], *, planner: str, seed: int = 0, **others: Any
) -> PlacementPlan:
    """Builds a plan for `problem`, with its groups and source filled in, and checks it."""
    groups = None
    if problem.group_ops is not None and problem.group_modules is not None:
        rows = zip(problem.group_names, problem.group_modules, problem.group_ops, strict=True)
        groups = [{"name": name, "modules": list(modules), "ops": list(ops)} for name, modules, ops in rows]
    if others.get("priority") is not None:
        others["priority"] = np.asarray(others["priority"], dtype=np.float64)
    plan = PlacementPlan(
        problem=problem.fingerprint,
        planner=planner,
        seed=seed,
        device_of_group=np.asarray(device_of_group, dtype=np.int32),
        groups=groups,
        source=problem.source,
        samples=problem.samples_per_microbatch,
        **others,
    )
    check_plan(plan, problem)
    return plan


def require_placement(plan: PlacementPlan, where: str, instead: str) -> None:
    """Refuses a plan that holds a whole strategy, where only placements of groups are supported.

    Args:
        plan: Any plan.
        where: Start of the message.
        instead: What to do with such a plan.
    """
    if plan.strategy is not None:
        raise InputError(f"{where}: it is a whole strategy, which places no groups of a problem; {instead}")


def check_plan(plan: PlacementPlan, problem: Problem) -> None:
    """Refuses a plan that was made for another problem or that does not have its shape.

    Memory, null times and links are not checked here: the simulator reports them as infeasible.
    """
    require_placement(plan, "plan", "run it on its model ('rlplace run'), or plan the problem")
    if plan.problem != problem.fingerprint:
        raise InputError(
            f"plan is for problem {plan.problem[:12]}, this problem is {problem.fingerprint[:12]}; "
            "plan again, or give the problem that it was made for"
        )
    if plan.device_of_group.shape != (problem.num_groups,):
        raise InputError(
            f"plan: device_of_group has {len(plan.device_of_group)} entries, the problem {problem.num_groups} groups"
        )
    if plan.device_of_group.min(initial=0) < 0 or plan.device_of_group.max(initial=0) >= problem.num_devices:
        raise InputError(f"plan: device_of_group names a device outside 0..{problem.num_devices - 1}")
    fixed = (problem.group_device >= 0) & (problem.group_device != plan.device_of_group)
    if fixed.any():
        group = int(np.flatnonzero(fixed)[0])
        device = problem.devices[problem.group_device[group]].name
        raise InputError(f"plan: group {problem.group_names[group]!r} may only sit on {device}")
    if plan.priority is not None and plan.priority.shape != (problem.num_ops,):
        raise InputError(f"plan: priority has {len(plan.priority)} entries, the problem {problem.num_ops} ops")
    if plan.order is not None:
        check_order(plan.order, plan.device_of_group, problem)


def check_order(order: Sequence[Sequence[int]], device_of_group: NDArray[np.int32], problem: Problem) -> None:
    """Refuses an order that is not, per device, a permutation of what runs there.

    Ops of collectives occupy no device and are not listed.
    """
    if isinstance(order, (str, bytes)) or not all(isinstance(row, (Sequence, np.ndarray)) for row in order):
        raise InputError("plan: order must be one list of ops per device")
    if len(order) != problem.num_devices:
        raise InputError(f"plan: order has {len(order)} lists, the problem {problem.num_devices} devices")
    device_of_op = np.asarray(device_of_group)[problem.op_group]
    listed = np.ones(problem.num_ops, dtype=bool)
    listed[[op for collective in problem.collectives for op in collective.ops]] = False
    for device, row in enumerate(order):
        here = np.flatnonzero((device_of_op == device) & listed).tolist()
        if not all(isinstance(op, (int, np.integer)) for op in row):
            raise InputError("plan: order must hold op numbers")
        if sorted(row) != here:
            raise InputError(f"plan: order of {problem.devices[device].name} is not a permutation of the ops placed there")
