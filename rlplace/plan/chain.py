"""Checks whether a schedule can run a chain of stages on their devices."""

from __future__ import annotations

from collections.abc import Sequence

from rlplace.errors import InputError
from rlplace.plan.actions import chain_actions
from rlplace.plan.schedule import SCHEDULES
from rlplace.text import either


def check_chain(schedule: str | None, devices_of_stage: Sequence[tuple[int, ...]], microbatches: int, where: str) -> None:
    """Refuses a schedule that does not fit the chain.

    Args:
        schedule: Name of the schedule; None where there is one stage.
        devices_of_stage: Devices of each stage.
        microbatches: Passes a step; with unlike replicas the fewest.
        where: Start of the message.

    Raises:
        InputError: No schedule for several stages, one for a single stage, a layout that it cannot run, or too few passes.
    """
    if len(devices_of_stage) == 1:
        if schedule is not None:
            raise InputError(f"{where}: schedule {schedule} is for several stages, found one; leave it out")
        return
    if schedule is None:
        known = either(SCHEDULES)
        raise InputError(f"{where}: {len(devices_of_stage)} stages need a schedule for chains: {known}")
    number = {devices: index for index, devices in enumerate(dict.fromkeys(devices_of_stage))}
    try:
        chain_actions([number[devices] for devices in devices_of_stage], schedule, microbatches)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
