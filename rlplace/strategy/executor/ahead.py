"""Gathers of a pipeline's parameters in plain Python: they begin with the step, and run one after another on each place.

A block waits for its own gather, and forwards are slower beside those of later blocks. How many still run is counted from the
earliest time at which the first micro-batch can come, and from there without idling, so that it is known before actions run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlplace.strategy.drafts import Draft
from rlplace.strategy.executor.rules import at_once_s, slowed_s, wider


class GathersAhead(NamedTuple):
    """Gathers as a stage meets them.

    Attributes:
        ready_s: Start of its first forward from which on no block waits.
        left_s: Seconds for which its place gathers after the earliest start of that forward.
        ends_s: For each block the end of its gather.
    """

    ready_s: float
    left_s: float
    ends_s: tuple[float, ...]

    def moving_s(self, microbatch: int, inside_s: float) -> float:
        """Returns seconds of gathers beside the forward of a micro-batch; one takes `inside_s` alone."""
        return max(0.0, self.left_s - microbatch * inside_s)


def gather_ahead(
    draft: Draft, times_s: Sequence[Sequence[tuple[float, float, float]]], meets: Sequence[float]
) -> list[GathersAhead]:
    """Returns for each stage of a pipeline what it meets.

    Args:
        draft: Several stages.
        times_s: For each place and block of the model seconds of its gather, and of ops and collectives of its forward.
        meets: For each place, whether collectives inside blocks use the channel of the gathers; see `rules.at_once_s`.
    """
    places = draft.place_of_stage
    stages = [times_s[place][blocks.start : blocks.stop] for place, blocks in zip(places, draft.ranges, strict=True)]
    total_s, done_s = [0.0] * len(draft.places), [0.0] * len(draft.places)
    for place, blocks in zip(places, stages, strict=True):
        total_s[place] += sum(gather for gather, *_ in blocks)
    beside: dict[int, tuple[float, float]] = {}  # of a place, when its blocks begin, and how much they delay its gathers
    came_s, found = 0.0, []
    for place, blocks in zip(places, stages, strict=True):
        compute_s, tensor_s = (sum(block[column] for block in blocks) for column in (1, 2))
        first_s = done_s[place] + blocks[0][0]
        if place not in beside:
            inside_s = compute_s + tensor_s
            beside[place] = max(came_s, first_s), meets[place] * tensor_s / inside_s if inside_s > 0.0 else 0.0
        begins_s = max(came_s, _end_s(first_s, *beside[place])) if blocks[0][0] > 0.0 else came_s
        all_s = _end_s(total_s[place], *beside[place])
        left_s = all_s - begins_s if all_s > begins_s else 0.0
        held_up_s = at_once_s(meets[place], compute_s, tensor_s, left_s)
        slower, longer = slowed_s(compute_s, 0.0, left_s, 0.0), wider(tensor_s, held_up_s)
        slower = slower / compute_s if compute_s > 0.0 else 1.0
        ready_s, before_s, ends_s = 0.0, 0.0, list[float]()
        for gather, compute, tensor in blocks:
            done_s[place] += gather
            ends_s.append(_end_s(done_s[place], *beside[place]))
            if gather > 0.0:
                ready_s = max(ready_s, ends_s[-1] - before_s)
            before_s += compute * slower + tensor * longer
        came_s = max(came_s, ready_s) + before_s
        found.append(GathersAhead(ready_s, left_s, tuple(ends_s)))
    return found


def _end_s(gathered_s: float, begins_s: float, delay: float) -> float:
    """Returns the end of so many seconds of gathers of a place whose blocks begin at `begins_s`."""
    return gathered_s + delay * (gathered_s - begins_s) if delay > 0.0 and gathered_s > begins_s else gathered_s
