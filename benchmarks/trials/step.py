"""Three steps of SGD as planned, in a loop of one's own, beside the plain model on whole batches.

Nothing of `rlplace run --verify` is used. Where a plan says in its notes that it computes something else than the model in one
piece, such as a loss over the samples of a replica, a loop over the parts, written by hand, says what that is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import rlplace
from benchmarks.trials.collection import Trial, call

STEPS, RATE = 3, 0.05
MOST = {"loss": 2e-5, "gradient": 2e-4, "after": 2e-4}
"""Differences that count as equal, relative to the largest element of a tensor."""

FLOOR = 1e-2
"""Gradients below this part of the largest one are compared with it: some are nothing but rounding (the bias of keys)."""


class Case(NamedTuple):
    """A plan of a model on an axis; `random` says that the model draws in its forward, so that only its running is tried."""

    trial: Trial
    axis: str
    plan: str
    batch: int = 0
    random: bool = False


class Plain:
    """The model in one piece; or copies of it that each train on their part of the batch, in passes, with gradients averaged.

    Args:
        trial: The model.
        batch: Samples.
        replicas: Copies.
        passes: Parts of each copy's part.
        own: Copy whose parameters and buffers are looked at.
    """

    def __init__(self, trial: Trial, batch: int, replicas: int = 1, passes: int = 1, own: int = 0) -> None:
        self.models = [trial.make(0, batch)[0] for _ in range(replicas)]
        self.loss = trial.make(0, batch)[2]
        self.batch, self.passes, self.model = batch, passes, self.models[own]
        self.optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=RATE) for m in self.models]

    def step(self, inputs: Any) -> float:
        """Returns forward and backward; gradients of all copies are the mean over all parts."""
        parts, total = len(self.models) * self.passes, 0.0
        for at in range(parts):
            given = inputs if parts == 1 else _rows(inputs, at, self.batch, parts)
            value = call(self.models[at // self.passes], given, self.loss) / parts
            value.backward()
            total += value.item()
        for same in zip(*(model.parameters() for model in self.models), strict=True):
            given = [p.grad for p in same if p.grad is not None]
            if len(self.models) > 1 and given:
                mean = torch.stack([g.to_dense() if g.is_sparse else g for g in given]).sum(0)
                for parameter in same:
                    parameter.grad = mean.clone()
        return total

    def update(self) -> None:
        """Steps the optimizers."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


def _rows(inputs: Any, part: int, batch: int, parts: int) -> Any:
    """Returns one of equal parts of the samples."""
    size = batch // parts
    rows = slice(part * size, (part + 1) * size)
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda leaf: leaf[rows] if leaf.shape[:1] == (batch,) else leaf, inputs
    )


Figures = dict[str, tuple[float, str]]
"""The largest differences so far, with the name of the tensor of each."""


def _add(figures: Figures, figure: str, value: float, name: str) -> None:
    """Keeps the larger one; what is not finite is the largest."""
    figures[figure] = max(figures[figure], (value if value == value else float("inf"), name))


def compare(case: Case) -> dict[str, Any]:
    """Runs a plan on this process of the group and compares what it holds.

    Returns:
        The figures against the model in one piece, those against the parts where the plan has notes, and the names held.
    """
    trial, batch, rank = case.trial, case.batch, dist.get_rank()
    plan = rlplace.PlacementPlan.load(case.plan)
    model, _, loss = trial.make(0, batch)
    torch.manual_seed(0)
    given = rlplace.distribute(model, plan, loss=loss)
    optimizer = torch.optim.SGD(given.parameters(), lr=RATE)
    plain = [Plain(trial, batch)]
    notes = list((plan.predicted.extra or {}).get("notes", []))
    if notes and plan.strategy is not None and plan.strategy.couple != "gather":
        plain.append(Plain(trial, batch, *_parts(plan, rank)))
    found: list[Figures] = [dict.fromkeys(MOST, (0.0, "")) for _ in plain]
    for step in range(STEPS):
        inputs = trial.make(100 + step, batch)[1]
        value = call(given, inputs, None)
        value.backward()
        if case.random:
            assert torch.isfinite(value), f"the loss is {value.item()}"
        else:
            for one, figures in zip(plain, found, strict=True):
                wanted = one.step(inputs)
                _add(figures, "loss", abs(value.item() - wanted) / max(abs(wanted), 1e-6), f"step {step}")
                _compare_gradients(given, one.model, figures)
                one.update()
        optimizer.step()
        optimizer.zero_grad()
    if not case.random:
        for one, figures in zip(plain, found, strict=True):
            _compare_values(given, one.model, figures)
    held = [name for name, _ in given.named_parameters(remove_duplicate=False)]
    return {"figures": found, "notes": notes, "held": held}


def missing(trial: Trial, batch: int, held: set[str]) -> list[str]:
    """Names of parameters of the model that no process holds under any of their names."""
    names: dict[int, list[str]] = {}
    for name, parameter in trial.make(0, batch)[0].named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [same[0] for same in names.values() if not held.intersection(same)]


def _parts(plan: rlplace.PlacementPlan, rank: int) -> tuple[int, int, int]:
    """Replicas, passes of each, and the replica of a process, by the words of the strategy."""
    assert plan.strategy is not None
    pipeline = plan.strategy.pipelines[0]
    stage = next(stage for stage in pipeline.stages if rank in stage.devices)
    # All replicas hold the running statistics of the first; other buffers are their own where the plan lets them.
    own = list(stage.devices).index(rank) // stage.axis("tensor") if plan.strategy.buffers == "replica" else 0
    return stage.data_degree, pipeline.microbatches[0], own


def _compare_gradients(given: Any, model: Any, figures: Figures) -> None:
    wanted = {name: _whole(p.grad) for name, p in model.named_parameters(remove_duplicate=False)}
    largest = max((float(g.abs().max()) for g in wanted.values() if g is not None and g.numel()), default=0.0)
    for name, parameter in given.named_parameters():
        own, other = _whole(parameter.grad), wanted.get(name)
        zero = torch.zeros(())
        if own is not None or other is not None:
            own, other = zero if own is None else own, zero if other is None else other
            _add(figures, "gradient", _difference(own, other, FLOOR * largest), name)


def _compare_values(given: Any, model: Any, figures: Figures) -> None:
    wanted = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    for name, own in (*given.named_parameters(), *given.named_buffers()):
        if name not in wanted:
            _add(figures, "after", float("inf"), f"{name}, which the model does not have")
        else:
            _add(figures, "after", _difference(_whole(own.detach()), wanted[name].detach(), FLOOR), name)


def _whole(value: Any) -> Any:
    """Returns a tensor with all its parts."""
    if value is None:
        return None
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.to_dense() if value.is_sparse else value


def _difference(own: torch.Tensor, other: torch.Tensor, floor: float) -> float:
    """Returns largest difference relative to the largest wanted element, or to `floor` where that is more."""
    if own.shape != other.shape and own.dim() and other.dim():
        return float("inf")
    if max(own.numel(), other.numel()) == 0:
        return 0.0
    wide = torch.complex128 if own.is_complex() or other.is_complex() else torch.float64
    a, b = own.to(wide), other.to(wide)
    return float((a - b).abs().max()) / max(float(b.abs().max()), floor, 1e-30)


def equal(figures: Figures, tolerance: float) -> bool:
    """Says whether all figures are within their bounds."""
    return all(figures[name][0] <= most * tolerance for name, most in MOST.items())
