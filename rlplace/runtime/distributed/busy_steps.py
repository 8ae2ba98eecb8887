"""Now and then, how long every process of a distributed model computed during a training step."""

from __future__ import annotations

import torch
import torch.distributed as dist

from rlplace.errors import InputError, show
from rlplace.runtime.distributed.events import Recorder
from rlplace.runtime.distributed.model import DistributedModel


class BusySteps:
    """Records the passes of one step in `every`, and brings the busy seconds of all processes together after it.

    Every process makes one at the same time and calls `begin` and `end` around the same steps: the sum is a collective.

    Attributes:
        every: Steps from one record to the next.
    """

    def __init__(self, model: DistributedModel, every: int) -> None:
        """Prepares.

        Args:
            model: The distributed model; it computes as before, but notes when.
            every: Steps from one record to the next.
        """
        if not isinstance(model, DistributedModel):
            raise InputError("StepWatch: model must be what rlplace.distribute returned")
        if isinstance(every, bool) or not isinstance(every, int) or every < 2:
            raise InputError(f"StepWatch: busy_every must be a whole number from 2 up, found {show(every)}")
        self.every = every
        self._ranks = model.ranks
        self._recorder = Recorder(model.ranks.device)
        self._steps = 0
        model.record(self._recorder)

    def begin(self) -> None:
        """A step begins."""
        self._recorder.on = self._steps % self.every == self.every - 1
        self._steps += 1

    def drop(self) -> None:
        """The step has failed; every process must have seen that."""
        self._recorder.on = False
        self._recorder.take()

    def end(self) -> tuple[float, ...] | None:
        """The step has ended: seconds of passes by device of the cluster, when it was recorded, the same on every process."""
        if not self._recorder.on:
            return None
        self._recorder.on = False
        busy = sum(event.seconds for event in self._recorder.take() if event.kind in ("forward", "backward"))
        mine = torch.tensor([busy], dtype=torch.float64, device=self._ranks.device)
        everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everybody, mine)
        return tuple(float(value) for value in everybody)
