"""The batch by time to the target: a larger one uses more devices well, and beyond some size it needs more epochs.

What compares is epochs(batch) x step time / batch (Pal et al., "Optimizing multi-GPU parallelization strategies for deep
learning training", IEEE Micro 2019), each batch with its own best strategy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from rlplace.errors import RlplaceError
from rlplace.plan.strategy import uniform_words
from rlplace.strategy.search.efficiency import BatchCurve
from rlplace.strategy.search.search import Answer, search
from rlplace.strategy.search.tries import Progress, Question


def batches(smallest: int, devices: int) -> list[int]:
    """The batches that are tried: the smallest, and it times 2, 4, 8, ... up to the number of devices, and that."""
    return sorted({smallest * factor for factor in (*(1 << power for power in range(devices.bit_length())), devices)})


def search_batches(
    question: Question,
    curve: BatchCurve,
    *,
    calls: int | None = None,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
) -> tuple[Question, Answer, tuple[Mapping[str, Any], ...]]:
    """The batch with the shortest time to the target, its strategies, and what every batch takes.

    Args:
        question: Its batch is the smallest that is tried.
        curve: Epochs by batch.
        calls: Evaluations at most, for all batches together.
        time_limit_s: Seconds at most, likewise.
        progress: Told how far the search at each batch is.

    Raises:
        InputError: Nothing is left to choose from, at any batch.
        InfeasibleError: Nothing fits.
    """
    sizes = batches(question.batch, question.cluster.num_devices)
    found: list[tuple[float, Question, Answer | RlplaceError]] = []
    for size in sizes:
        asked = dataclasses.replace(question, batch=size)
        share = None if calls is None else max(1, calls // len(sizes))
        try:
            limit_s = None if time_limit_s is None else time_limit_s / len(sizes)
            answer = search(asked, calls=share, time_limit_s=limit_s, progress=progress)
        except RlplaceError as error:
            found.append((math.inf, asked, error))
        else:
            found.append((curve.epochs(size) * answer.ranked[0].step_s / size, asked, answer))
    _, asked, best = min(found, key=lambda item: item[0])
    if isinstance(best, RlplaceError):
        raise best
    return asked, best, tuple(_entries(found, curve))


def _entries(found: list[tuple[float, Question, Answer | RlplaceError]], curve: BatchCurve) -> Iterator[Mapping[str, Any]]:
    """Of every batch, what its best strategy takes; ``target_s`` is proportional to the time to the target."""
    for target_s, asked, answer in found:
        said: dict[str, Any] = {"batch": asked.batch, "epochs": curve.epochs(asked.batch), "target_s": None}
        if isinstance(answer, Answer):
            best = answer.ranked[0]
            words = uniform_words(best.draft.strategy(asked.costs.names))
            yield {**said, "target_s": target_s, "step_time_s": best.step_s, "words": words, "reason": None}
        else:
            yield {**said, "step_time_s": None, "words": "", "reason": str(answer)}
