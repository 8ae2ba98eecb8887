"""Tensor-parallel layouts of a block: weights as `DTensor`, products on the process's part of them.

Activations outside of the products stay plain tensors, whole or split along the sequence, so a block's own code runs on them.

Numbers drawn for values that a tensor group holds whole are alike in it, those drawn for parts are not. A step draws from a
stream that follows from the seed, the number of the step, the replica and the place in the pipeline. For a part a process draws
one number from it, as all of its tensor group do, and continues in a stream of that number and its own rank. A recomputation,
which starts again where the forward did, thus draws the same numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from rlplace.model.torch_adapter import pytree
from rlplace.runtime.strategy.cuts import SEQUENCE, Region
from rlplace.runtime.strategy.mesh import MeshPlace
from rlplace.runtime.torch_adapter import StridedShard, with_parameters


@contextlib.contextmanager
def step_stream(random_state: tuple[int, int], place: MeshPlace) -> Iterator[None]:
    """Draws inside from the stream of a step.

    Args:
        random_state: Seed, and number of the step.
        place: Coordinates of this process.
    """
    seed, step = random_state
    with torch.random.fork_rng([] if place.device.type == "cpu" else [place.device], device_type=place.device.type):
        column = place.number * 1_000_000_007 + place.column
        torch.manual_seed(((seed * 1_000_003 + step) * 1_009 + column) * 1_009 + place.index["pipeline"])
        yield


class PartStream:
    """The stream of a process for values of which it has a part.

    Args:
        rank: In the tensor group.
        device: Device that it computes on.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._generators: list[Any] = [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]
        self._group: list[torch.Tensor] = []

    def begin(self) -> None:
        """Switches from the group's stream to the process's own."""
        number = int(torch.randint(2**53, ()))
        self._group = [generator.get_rng_state() for generator in self._generators]
        torch.manual_seed(number * 1_009 + self._rank)

    def end(self) -> None:
        """Switches back to where the group's stream was left; a recomputation, which torch ends early, may never reach it."""
        for generator, state in zip(self._generators, self._group, strict=True):
            generator.set_rng_state(state)

    def around(self, module: nn.Module) -> None:
        """Makes a module draw all its numbers for parts."""
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            made = forward(*args, **kwargs)
            self.end()
            return made

        module.forward = run  # no hooks: a recomputation calls the forward alone

    def between(self, first: nn.Module, last: nn.Module) -> None:
        """Makes all draws between the calls of two modules be for parts."""
        first.register_forward_pre_hook(lambda module, args: self.begin())
        last.register_forward_pre_hook(lambda module, args: self.end())


class TensorParallel:
    """The layouts of the blocks of one process.

    Args:
        mesh: The tensor axis.
        sequence: Whether activations between regions are split along the sequence.
        device: Device of this process.
    """

    def __init__(self, mesh: DeviceMesh, sequence: bool, device: torch.device) -> None:
        self._mesh, self._stream = mesh, PartStream(mesh.get_local_rank(), device)
        self._start(mesh.size(), mesh.get_local_rank(), sequence)

    def _start(self, degree: int, rank: int, sequence: bool) -> None:
        self._degree, self._rank, self._sequence = degree, rank, sequence
        self._between: Placement = Shard(SEQUENCE) if sequence else Replicate()  # of activations between regions
        self._changed: dict[nn.Parameter, nn.Parameter] = {}
        self._entered: tuple[torch.Tensor | None, torch.Tensor | None] = None, None

    def regions(self, block: nn.Module, regions: Sequence[Region], positions: Sequence[str]) -> None:
        """Lays out the products of a block, and the modules that work by positions."""
        block.register_forward_hook(self._forget)
        for region in regions:
            for path in region.entries:
                value = region.source.meta["val"]
                hook = partial(_change_activation, self._enter, value.dim(), value.shape[-1])
                block.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
            for product in region.columns:
                module, packed = block.get_submodule(product.module), region.packed.get(product.module, 1)
                heads = region.shared.get(product.module, self._degree)
                if heads < self._degree:
                    self._share(module, product.out_dim, heads, not region.entries)
                    continue
                self._shard(module, product.out_dim, packed)
                module.forward = partial(self._column, module, product.out_dim == 1, not region.entries, packed)
            for first, product in region.pairs:
                if region.entries:  # its input has gradients that are summed over the group, and its own gradient is whole
                    block.get_submodule(first.module).register_forward_pre_hook(self._count_once)
                module = block.get_submodule(product.module)
                self._shard(module, product.out_dim, 1)
                module.forward = partial(self._second_column, module, product.out_dim == 1)
            for product in region.rows:
                module = block.get_submodule(product.module)
                self._shard(module, 1 - product.out_dim, 1, bias=False)
                module.forward = partial(self._row, module, product.out_dim == 1)
            for path, name in region.stored:
                owner = block.get_submodule(path)
                if hasattr(owner, name):
                    setattr(owner, name, getattr(owner, name) // self._degree)
            for path in region.grouped if 0 < region.heads < self._degree else ():
                attention: Any = block.get_submodule(path)
                if hasattr(attention, "num_key_value_groups"):
                    attention.num_key_value_groups = attention.num_key_value_groups * region.heads // self._degree
        for path in (*(name for region in regions for name in region.local), *(positions if self._sequence else ())):
            self._whole(block.get_submodule(path))

    def streams(self, block: nn.Module, regions: Sequence[Region], drawn: bool) -> None:
        """Gives draws for parts a stream of their own, after `regions`."""
        if self._sequence and drawn:
            self._stream.around(block)
        for region in () if self._sequence else regions:
            if region.draws:
                first, last = region.columns[0].module, region.rows[-1].module
                self._stream.between(block.get_submodule(first), block.get_submodule(last))

    def vocabulary(self, module: nn.Module) -> None:
        """Cuts an embedding by rows, or a product by output, and makes its result whole."""
        self._shard(module, 0, 1)
        forward = self._embed if isinstance(module, nn.Embedding) else self._gathered_column
        vars(module)["forward"] = partial(forward, module)

    def _shard(self, module: nn.Module, dim: int, packed: int, bias: bool = True) -> None:
        self._set(module, "weight", dim, packed)
        if getattr(module, "bias", None) is not None:  # fully_shard shards nothing that packs several on its first dimension
            self._set(module, "bias", 0 if bias and packed == 1 else None, packed)

    def _share(self, module: Any, out_dim: int, heads: int, enters: bool) -> None:
        """Lets a process multiply by the rows of one head, which others hold, too: gradients are partial sums."""
        for name, _ in list(module.named_parameters(recurse=False)):
            self._set(module, name, None, 1)
        own = self._rank * heads // self._degree

        def forward(value: torch.Tensor) -> torch.Tensor:
            weight = _local(module.weight, partial_sums=True).chunk(heads, out_dim)[own]
            made = _product(self._enter(value) if enters else value, weight, out_dim == 1)
            bias = getattr(module, "bias", None)
            return made if bias is None else made + _local(bias, partial_sums=True).chunk(heads)[own]

        module.forward = forward

    def _whole(self, module: nn.Module) -> None:
        """Lets every process read all of the parameters for its part of the activations: gradients are partial sums."""
        for name, _ in list(module.named_parameters(recurse=False)):
            self._set(module, name, None, 1)
        module.forward = partial(_on_local_parameters, module, module.forward)

    def _set(self, module: nn.Module, name: str, dim: int | None, packed: int) -> None:
        """Makes a parameter a `DTensor`, once where modules share it."""
        before = module.get_parameter(name)
        if before not in self._changed:
            after = nn.Parameter(self._sharded(before.detach(), dim, packed), requires_grad=before.requires_grad)
            self._changed[before] = self._changed[after] = after
        setattr(module, name, self._changed[before])

    def _own_part(self, dim: int, packed: int, whole: torch.Tensor) -> torch.Tensor:
        """Returns this process's part of a tensor that packs several, each cut by itself."""
        parts = [part.chunk(self._degree, dim)[self._rank] for part in whole.chunk(packed, dim)]
        return torch.cat(parts, dim).contiguous()

    def _sharded(self, whole: torch.Tensor, dim: int | None, packed: int) -> torch.Tensor:
        placement: Placement = Replicate() if dim is None else Shard(dim)
        if dim is not None and packed > 1:
            placement = StridedShard(dim, split_factor=packed)
        return distribute_tensor(whole, self._mesh, [placement], src_data_rank=None)

    def _moved(self, value: torch.Tensor, before: Placement, after: Placement, gradient: Placement | None = None) -> Any:
        """Returns this process's part of a value in another placement; the collective's backward reads `gradient`."""
        made = DTensor.from_local(value, self._mesh, [before], run_check=False).redistribute(placements=[after])
        return made.to_local(grad_placements=None if gradient is None else [gradient])

    def _enter(self, value: torch.Tensor) -> torch.Tensor:
        """Returns whole activations, whose gradients are summed over the group: once for all products that read one tensor."""
        before, made = self._entered
        if before is not value or made is None or made.requires_grad != (value.requires_grad and torch.is_grad_enabled()):
            made = self._moved(value, self._between, Replicate(), Partial())
            self._entered = value, made
        return made

    def _forget(self, *hooked: Any) -> None:
        """Drops the activation that entered last, after the forward of a block."""
        self._entered = None, None

    def _column(self, module: Any, transposed: bool, enters: bool, packed: int, value: torch.Tensor) -> torch.Tensor:
        made = _product(self._enter(value) if enters else value, _local(module.weight), transposed)
        if (bias := getattr(module, "bias", None)) is None:
            return made
        local = _local(bias, partial_sums=packed > 1)
        return made + (local if packed == 1 else self._own_part(0, packed, local))

    def _row(self, module: Any, transposed: bool, value: torch.Tensor) -> torch.Tensor:
        """Returns the sum of partial products, split along the sequence under sequence parallelism, and the bias."""
        made = self._moved(_product(value, _local(module.weight), transposed), Partial(), self._between)
        bias = getattr(module, "bias", None)
        return made if bias is None else made + _local(bias, partial_sums=self._sequence)

    def _gathered_column(self, module: Any, value: torch.Tensor) -> torch.Tensor:
        return self._moved(self._second_column(module, False, value), Shard(value.dim() - 1), Replicate())

    def _second_column(self, module: Any, transposed: bool, value: torch.Tensor) -> torch.Tensor:
        """Returns the part of a product that reads whole activations of its own, whose gradients are summed over the group."""
        return self._column(module, transposed, False, 1, self._moved(value, Replicate(), Replicate(), Partial()))

    def _count_once(self, module: nn.Module, args: Any) -> Any:
        """Makes the whole gradients of an activation count once in a sum over the group."""
        value = args[0].view_as(args[0])
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient / self._degree)
        return value, *args[1:]

    def _embed(self, module: Any, ids: torch.Tensor) -> torch.Tensor:
        weight = _local(module.weight)
        own = ids - self._rank * len(weight)
        held = (own >= 0) & (own < len(weight))
        rows = F.embedding(torch.where(held, own, 0), weight) * held.unsqueeze(-1)
        if module.padding_idx is not None:
            rows = torch.where((ids == module.padding_idx).unsqueeze(-1), rows.detach(), rows)
        return self._moved(rows, Partial(), Replicate())

    def split(self, block: nn.Module, width: int) -> None:
        """Lets a block take its part of the sequence from whole activations."""
        to_parts = partial(self._moved, before=Replicate(), after=Shard(SEQUENCE))
        block.register_forward_pre_hook(partial(_change_activation, to_parts, 3, width), with_kwargs=True)

    def join(self, block: nn.Module) -> None:
        """Lets a block return whole activations."""

        def to_whole(module: nn.Module, args: Any, output: Any) -> Any:
            leaves, spec = pytree.tree_flatten(output)
            return pytree.tree_unflatten([self._moved(leaves[0], Shard(SEQUENCE), Replicate()), *leaves[1:]], spec)

        block.register_forward_hook(to_whole)


class LayoutTrial(TensorParallel):
    """Layouts on fake tensors without a mesh, which show whether a block's own code runs on parts."""

    def __init__(self, degree: int, sequence: bool) -> None:
        self._start(degree, 0, sequence)

    def _sharded(self, whole: torch.Tensor, dim: int | None, packed: int) -> torch.Tensor:
        return whole if dim is None else self._own_part(dim, packed, whole)

    def _moved(self, value: torch.Tensor, before: Placement, after: Placement, gradient: Placement | None = None) -> Any:
        whole = torch.cat([value] * self._degree, SEQUENCE) if isinstance(before, Shard) else value
        return whole.chunk(self._degree, SEQUENCE)[0] if isinstance(after, Shard) else whole


def _change_activation(
    change: Callable[..., torch.Tensor], dims: int, width: int, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    """Changes the one activation among the arguments of a module that a gradient flows back through."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [(n, leaf) for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    fitting = [(n, leaf) for n, leaf in tensors if leaf.dim() == dims and leaf.shape[-1] == width]
    places = [n for n, leaf in fitting if leaf.requires_grad] or [n for n, _ in fitting]
    if len(places) != 1:
        raise RuntimeError(f"{type(module).__name__} gets {len(places)} activations of width {width}, expected one")
    leaves[places[0]] = change(leaves[places[0]])
    return pytree.tree_unflatten(leaves, spec)


def _local(parameter: Any, *, partial_sums: bool = False) -> torch.Tensor:
    if not isinstance(parameter, DTensor):  # in a trial
        return parameter
    return parameter.to_local(grad_placements=[Partial()]) if partial_sums else parameter.to_local()


def _product(value: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    return value @ weight if transposed else F.linear(value, weight)


def _on_local_parameters(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a forward on plain tensors in place of a module's own parameters."""
    local = {name: _local(one, partial_sums=True) for name, one in module.named_parameters(recurse=False)}
    with with_parameters(module, local):
        return forward(*args, **kwargs)
