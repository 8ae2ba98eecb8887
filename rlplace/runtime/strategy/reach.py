"""Forwards that read values, and so reach other parameters, or call other blocks, on every replica.

Torch's wrappers reduce the gradients that a process has. Where processes reach unlike parameters, such as experts that got
tokens on one of them alone, all reduce zeros for the others, and what no process has reached gets no gradient, as in the plain
model. Where they may even call unlike blocks, collectives run in one order: parameters are gathered before the forward, and
gradients reduced after the last backward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from rlplace.runtime.strategy.blocks import owner
from rlplace.runtime.strategy.lists import CALLED
from rlplace.runtime.strategy.mesh import MeshPlace
from rlplace.runtime.strategy.wrap import left_out


def reduce_unlike(root: nn.Module, place: MeshPlace, expert: int, *, in_order: bool) -> Reached | None:
    """Makes a stage's wrappers reduce gradients of unlike parameters; None where torch finds these itself, or cannot (2.12).

    Args:
        root: The module that `wrap_stage` returned.
        place: Coordinates of this process.
        expert: Degree by which the stage spreads experts.
        in_order: Whether processes may call unlike blocks.
    """
    if not isinstance(root, FSDPModule) or not hasattr(root, "set_reduce_scatter_unused_params"):
        return None
    root.set_reduce_scatter_unused_params(True)
    if in_order:
        root.register_forward_pre_hook(gather_in_order)
    return Reached(root, place, expert)


def gather_in_order(root: nn.Module, _: Any) -> None:
    """Gathers all parameters, block by block, in the same order on every process."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


class Reached:
    """Parameters of a stage that the micro-batches of a step reach.

    Args:
        root: The stage's module, sharded.
        place: Coordinates of this process.
        expert: See `reduce_unlike`.
    """

    def __init__(self, root: nn.Module, place: MeshPlace, expert: int) -> None:
        self._root, self._place, self._expert = root, place, expert
        # Experts of a list run on every process that has them, so that those are told whether any called them.
        self._experts = {path: module for path, module in root.named_modules() if CALLED in vars(module)}
        wrapped = [path for path, module in root.named_modules() if path and isinstance(module, FSDPModule)]
        self._trained = [name for name, parameter in root.named_parameters() if parameter.requires_grad]
        self._seen, self._watched = set[str](), set[str]()
        of_module: dict[str, list[str]] = {}
        for name in self._trained:
            if owner(name, self._experts) is None:
                of_module.setdefault(owner(name, wrapped) or "", []).append(name)
        for path, own in of_module.items():
            # After torch's own hook: parameters are whole then, and the same objects in every step.
            root.get_submodule(path).register_forward_pre_hook(partial(self._watch, own))

    def _watch(self, names: list[str], module: nn.Module, _: Any) -> None:
        for name in names:
            if name not in self._watched:
                self._watched.add(name)
                whole = self._root.get_parameter(name)
                whole.register_post_accumulate_grad_hook(lambda _, name=name: self._seen.add(name))  # type: ignore[misc]

    def fill(self) -> None:
        """Gives parameters that torch's wrappers leave out a gradient of zeros where this process has none."""
        for name in self._trained:
            parameter = self._root.get_parameter(name)
            if parameter.grad is None and left_out(parameter):
                parameter.grad = torch.zeros_like(parameter)

    def settle(self) -> None:
        """Takes the gradients of a step from parameters that no replica has reached; every process of the stage calls it."""
        dense = [name for name in self._trained if owner(name, self._experts) is None]
        called = [path for path, module in self._experts.items() if vars(module)[CALLED]]
        reached = _of_any(dense, self._seen, self._place.mesh, ("replicate", "shard"))
        if self._experts:
            reached |= _of_any([*self._experts], called, self._place.experts[self._expert], ("replicate", "expert_shard"))
        for name in self._trained:
            if (owner(name, self._experts) or name) not in reached:
                self._root.get_parameter(name).grad = None
        self._seen.clear()
        for module in self._experts.values():
            vars(module)[CALLED] = False


def _of_any(names: Sequence[str], own: Collection[str], mesh: DeviceMesh, axes: Sequence[str]) -> set[str]:
    """Returns the names that some process has, of those along some axes of a mesh."""
    flags = torch.tensor([name in own for name in names], dtype=torch.int32, device=mesh.device_type)
    for axis in axes:
        if mesh[axis].size() > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=mesh[axis].get_group())
    return {name for name, reached in zip(names, flags.tolist(), strict=True) if reached}
