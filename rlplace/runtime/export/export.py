"""`rlplace.export`: a whole strategy as a file that runs without rlplace."""

from __future__ import annotations

from rlplace.errors import InputError, unknown_name
from rlplace.plan.plan import PlacementPlan

TARGETS = ("torchtitan", "script")


def export(plan: PlacementPlan, to: str) -> str:
    """Writes a plan for another tool.

    Args:
        plan: With a strategy, and a source that names its model.
        to: ``"script"``: a training script of plain torch calls, to be started with torchrun; ``"torchtitan"``: a job file
            (TOML) of torchtitan.

    Returns:
        The text of the file.

    Raises:
        InputError: The tool cannot express it, with the reason.
    """
    if to not in TARGETS:
        raise unknown_name("target of export", to, TARGETS)
    if plan.strategy is None:
        raise InputError(
            "export: the plan places groups of ops, which neither torchtitan nor plain torch calls express; plan a whole "
            "strategy with 'rlplace place MODEL', or run this one with rlplace.distribute"
        )
    if to == "torchtitan":
        from rlplace.runtime.export.torchtitan import torchtitan_job

        return torchtitan_job(plan)
    from rlplace.runtime.export.script import training_script

    return training_script(plan)
