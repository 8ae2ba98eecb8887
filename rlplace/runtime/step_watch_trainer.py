"""`StepWatch` for the `Trainer` of transformers."""

from __future__ import annotations

import statistics
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
    one step. Whatever the Trainer logs gets three entries, in its history as well: ``step_time_s``, the median since the last
    log, ``predicted_step_time_s`` of the plan, and ``step_time_ratio``, the one by the other; without a prediction the first.
    """

    def __init__(self, watch: StepWatch) -> None:
        """Wraps a watch, which is closed when training ends."""
        self._watch = watch
        self._seconds: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.step().__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.step().__exit__(None)
        if self._watch.last_step_s is not None:
            self._seconds.append(self._watch.last_step_s)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not self._seconds or not isinstance(logs, dict):
            return
        entries = {"step_time_s": statistics.median(self._seconds)}
        predicted_s = self._watch.predicted_s
        if predicted_s is not None:
            entries |= {"predicted_step_time_s": predicted_s, "step_time_ratio": entries["step_time_s"] / predicted_s}
        self._seconds = []
        logs.update(entries)
        if state.log_history:
            state.log_history[-1].update(entries)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.close()
