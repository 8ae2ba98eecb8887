"""`StepWatch` for the `Trainer` of transformers."""

from __future__ import annotations

from typing import Any

from rlplace.errors import MissingError
from rlplace.runtime.step_watch import StepWatch

try:
    from transformers import TrainerCallback
except ImportError:
    raise MissingError("StepWatchCallback needs transformers; pip install 'rlplace[transformers]'") from None


class StepWatchCallback(TrainerCallback):
    """Times the steps of a Trainer, from the start of forward to the end of the update.

    Give it to the Trainer, ``callbacks=[StepWatchCallback(watch)]``. With gradient accumulation, all passes of an update are
    one step.
    """

    def __init__(self, watch: StepWatch) -> None:
        """Wraps a watch, which is closed when training ends."""
        self._watch = watch

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.step().__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.step().__exit__(None)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.close()
