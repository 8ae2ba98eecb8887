"""Random streams: numbers drawn for values that a tensor group holds whole are alike in it, those drawn for parts are not.

A step draws from a stream that follows from the seed, the number of the step, the replica and the place in the pipeline. For a
part a process draws one number from it, as all of its tensor group do, and goes on in a stream of that number and its own rank;
so a recomputation, which starts again where the forward did, draws the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rlplace.runtime.strategy.mesh import Place


@contextlib.contextmanager
def step_stream(random_state: tuple[int, int], place: Place) -> Iterator[None]:
    """The stream of a step.

    Args:
        random_state: Seed, and number of the step.
        place: Of this process.
    """
    seed, step = random_state
    with torch.random.fork_rng([] if place.device.type == "cpu" else [place.device], device_type=place.device.type):
        torch.manual_seed(((seed * 1_000_003 + step) * 1_009 + place.replica) * 1_009 + place.index["pipeline"])
        yield


class PartStream:
    """The stream of a process for what it has a part of.

    Args:
        rank: In the tensor group.
        device: That it computes on.
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
        """Switches back, to where the group's stream was left; a recomputation, which torch ends early, may never come here."""
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
        """Makes what is drawn from the call of one module to that of another be drawn for parts."""
        first.register_forward_pre_hook(lambda module, args: self.begin())
        last.register_forward_pre_hook(lambda module, args: self.end())
