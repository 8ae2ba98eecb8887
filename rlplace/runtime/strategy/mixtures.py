"""Modules of experts: which of a model's modules have stacked experts that processes may hold apart, and how they take tokens.

All their parameters are stacked by expert, ``[experts, ...]``. They take tokens with the experts that each has chosen and their
weights, as those of transformers; or rows of one expert after the other, as those of llama4, where every token goes to every
expert. The latter is checked: every op has to work on the rows and the parameters of one expert alone. Or a module has a list
of experts (`lists`), which have to be alike and to work on one row alone.
"""

from __future__ import annotations

import inspect
import operator
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from rlplace.model.capture.export import is_random, lies_in
from rlplace.model.capture.fake import fake_copy, fake_inputs, new_fake_mode
from rlplace.runtime.strategy.blocks import tied_names
from rlplace.runtime.strategy.cuts import RefusedError, block_graph, passed
from rlplace.runtime.strategy.lists import Lists, expert_lists

COUNT = "num_experts"
"""Name of the attribute with the number of experts."""

NO_EXPERTS = (
    "no module has `num_experts` stacked weights and a forward of tokens, their experts and weights, as the experts of "
    "transformers have, or of rows of one expert after the other; and none has a list of modules named after experts"
)

_WEIGHTS, _CHOSEN = ("weight", "score", "prob"), ("index", "indices", "expert")


class Form(NamedTuple):
    """The way in which a module of experts takes tokens.

    Attributes:
        tokens: Name of its argument with the tokens.
        chosen: Name of that with the experts of each; empty where it takes rows of one expert after the other.
        weights: Name of that with their weights.
    """

    tokens: str
    chosen: str = ""
    weights: str = ""


def form_of(module: nn.Module) -> Form | None:
    """Returns how a module of experts takes tokens; None for other modules."""
    held = dict(module.named_parameters())
    if not held or any("." in name for name in held) or not isinstance(count := getattr(module, COUNT, None), int):
        return None
    if any(parameter.dim() < 2 or len(parameter) != count for parameter in held.values()):
        return None
    names = [*inspect.signature(module.forward).parameters]
    if len(names) == 1:
        return Form(names[0]) if runs_by_expert(module) else None
    weights = [name for name in names[1:] if any(word in name for word in _WEIGHTS)]
    chosen = [name for name in names[1:] if name not in weights and any(word in name for word in _CHOSEN)]
    return Form(names[0], chosen[0], weights[0]) if len(names) == 3 and len(chosen) == len(weights) == 1 else None


def why_no_experts(model: nn.Module, lists: Lists) -> str | None:
    """Explains why no module's experts can be spread, or why those of a list cannot; None where all can.

    Args:
        model: The model.
        lists: Findings of a forward.
    """
    own = "stack their weights, or share them (levels 1 to 3)"
    for path, mixture, name in expert_lists(model):
        reason = _why_not_listed(model, path, mixture._modules[name], lists.get(path, "it was not seen to run"))  # type: ignore[arg-type]
        if reason is not None:
            return f"{path} is a list of experts: {reason}; {own}"
    return None if common_experts(model) else NO_EXPERTS


def _why_not_listed(model: nn.Module, path: str, held: nn.ModuleList, seen: str | int) -> str | None:
    """Explains why a list of experts cannot be spread, from what a forward has shown of it."""
    kinds = {(type(one), tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in one.named_parameters())) for one in held}
    if len(kinds) > 1:
        return "they are unlike"
    inside = [names for names in tied_names(model) if any(lies_in(name, path) for name in names)]
    if inside or any(True for _ in held.buffers()):
        return f"they share {inside[0][0]} with another module" if inside else "they have buffers"
    if any(not parameter.dim() or parameter.is_complex() for parameter in held.parameters()):
        return "they have complex parameters, or some without dimensions"
    if isinstance(seen, str):
        return seen
    return (
        None
        if _works_on_rows(held[0], 7, seen, stacked=False)
        else "an expert mixes rows, draws numbers, or cannot be exported"
    )


def common_experts(model: nn.Module) -> int:
    """Returns the number of experts of all modules of experts, of unlike ones what these have in common; 0 without any."""
    listed = (len(mixture._modules[name]) for _, mixture, name in expert_lists(model))  # type: ignore[arg-type]
    return gcd(*listed, *(getattr(module, COUNT) for module in model.modules() if form_of(module) is not None))


_known: dict[Any, bool] = {}


def runs_by_expert(module: nn.Module) -> bool:
    """Returns whether all ops of a forward of rows work on the rows and stacked parameters of one expert alone."""
    shapes = tuple(tuple(parameter.shape) for parameter in module.parameters())
    settings = tuple((name, value) for name, value in vars(module).items() if isinstance(value, (bool, int, float, str)))
    key = type(module), shapes, settings
    if key not in _known:
        _known[key] = any(
            _works_on_rows(module, 2 * len(next(module.parameters())), width, stacked=True)
            for width in dict.fromkeys(size for shape in shapes for size in shape[1:])
        )
    return _known[key]


def _works_on_rows(module: nn.Module, number: int, width: int, *, stacked: bool) -> bool:
    """Follows a cut by rows, and by experts where parameters are stacked, through a forward."""
    mode, first = new_fake_mode(), next(module.parameters())
    rows = torch.empty(number, width, dtype=first.dtype, device="meta", requires_grad=True)
    try:
        nodes = block_graph(fake_copy(module, mode).train(), *fake_inputs(((rows,), {}), mode)).graph.nodes
        if not stacked and any(is_random(node) for node in nodes):
            return False
        kinds = ("placeholder", "get_attr") if stacked else ("placeholder",)
        cut: dict[fx.Node, int] = {node: 0 for node in nodes if node.op in kinds}
        for node in nodes:
            read = [value for value in node.all_input_nodes if value in cut]
            if node.op != "call_function" or not read:
                continue
            if node.target is operator.getitem:
                cut[node] = cut[read[0]]
            elif isinstance(node.meta["val"], torch.Tensor):
                cut[node] = passed(node, cut)
            else:  # parts of another dimension
                sizes = {part.shape[cut[read[0]]] for part in node.meta["val"]}
                if sizes != {read[0].meta["val"].shape[cut[read[0]]]}:
                    return False
                cut[node] = cut[read[0]]
        (output,) = next(iter(reversed(nodes))).all_input_nodes
        made = output.meta["val"]
        return cut.get(output) == 0 and made.dim() == 2 and len(made) == len(rows)
    except (RefusedError, Exception):  # the module's own code runs
        return False
