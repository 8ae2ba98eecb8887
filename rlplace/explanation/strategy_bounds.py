"""What bounds the step of a whole strategy: where the time of its busiest stage goes, and which device is fullest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlplace.strategy.drafts import Draft, joined
from rlplace.strategy.search.tries import Question
from rlplace.text import gb, ms, percent

_COMMUNICATION = ("tensor", "gather", "exchange", "hand_over")


@dataclass(frozen=True)
class StrategyBounds:
    """Where the time of a step goes, by the block executor.

    Attributes:
        seconds: On the busiest stage, by ``computing``, ``running again`` (recomputation, with its collectives),
            ``communication``, ``waiting for other stages`` and ``updates``; they add up to the step.
        blocks: First and last block of the busiest stage.
        devices: Names of the devices of the busiest stage.
        fullest: The device whose memory is fullest.
        peak_bytes: Peak memory of the fullest device.
        memory_bytes: Capacity of the fullest device; None without a limit.
    """

    seconds: Mapping[str, float]
    blocks: tuple[str, str]
    devices: tuple[str, ...]
    fullest: str
    peak_bytes: int
    memory_bytes: int | None

    @property
    def bound(self) -> str:
        """The activity that takes most of the step."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {**dataclasses.asdict(self), "bound": self.bound}

    def lines(self) -> list[str]:
        """For people."""
        step_s = sum(self.seconds.values())
        parts = sorted(self.seconds.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{name} {ms(seconds)} ms ({percent(seconds / step_s)})" for name, seconds in parts if seconds > 0)
        span = " to ".join(dict.fromkeys(self.blocks))
        among = " to ".join(dict.fromkeys((self.devices[0], self.devices[-1])))
        room = (
            "" if not self.memory_bytes else f" of {gb(self.memory_bytes)} GB ({percent(self.peak_bytes / self.memory_bytes)})"
        )
        return [
            f"bounded by {self.bound}: {shares}",
            f"busiest stage: {span} on {among}",
            f"fullest device: {self.fullest}, {gb(self.peak_bytes)} GB{room}",
        ]


def strategy_bounds(question: Question, draft: Draft) -> StrategyBounds:
    """Evaluates a draft with and without what runs again.

    Raises:
        InputError: It cannot be evaluated.
    """
    result, cluster = question.scores.evaluate(draft), question.cluster
    pipelines = (dataclasses.replace(one, recompute=bytes(len(one.recompute))) for one in draft.pipelines)
    plain = question.scores.evaluate(joined(pipelines)).parts
    worked = sum(result.parts[name] for name in ("compute", "tensor"))
    again_s = max(0.0, worked - plain["compute"] - plain["tensor"])
    again_compute_s = min(again_s, max(0.0, result.parts["compute"] - plain["compute"]))
    stage = draft.strategy(question.costs.names).stages[result.bottleneck]
    peaks = list(zip(result.peak_memory_bytes, cluster.devices, strict=True))
    peak, fullest = max(peaks, key=lambda pair: pair[0] / (pair[1].memory_bytes or float("inf")))
    return StrategyBounds(
        seconds={
            "computing": result.parts["compute"] - again_compute_s,
            "running again": again_s,
            "communication": sum(result.parts[name] for name in _COMMUNICATION) - (again_s - again_compute_s),
            "waiting for other stages": result.parts["bubble"],
            "updates": result.parts["update"],
        },
        blocks=(stage.blocks[0], stage.blocks[-1]),
        devices=tuple(cluster.devices[device].name for device in stage.devices),
        fullest=fullest.name,
        peak_bytes=peak,
        memory_bytes=fullest.memory_bytes,
    )
