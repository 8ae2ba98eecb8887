"""`ReplanReport`: what planning again after a drift has found, as a record, as a file and as lines for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlplace.errors import InputError
from rlplace.files import check_keys, finite_number, read_record, write_json
from rlplace.measured.checks import whole

FORMAT = "rlplace.replan"
VERSION = 1
_LEAST, _MOST = 1e-15, 1e15  # of weights and times: their ratios are numbers
_MOST_COUNT = (1 << 62) - 1


@dataclass(frozen=True)
class Hypothesis:
    """One explanation of the drift.

    Attributes:
        name: For people, such as ``"device gpu1 1.9 times slower"``.
        weight: How likely it is held to be, all hypotheses together 1.
        running_s: Step time of the running plan if it holds, on the scale of the measured times.
        proposed_s: Step time of the proposed plan if it holds.
        best_s: Step time of the best plan that was found for it.
    """

    name: str
    weight: float
    running_s: float
    proposed_s: float
    best_s: float

    @property
    def gain(self) -> float:
        """Share of the step time that the proposed plan saves; negative when it is slower."""
        return 1.0 - self.proposed_s / self.running_s

    @property
    def best_gain(self) -> float:
        """Share that the best plan for this explanation saves."""
        return 1.0 - self.best_s / self.running_s


@dataclass(frozen=True)
class ReplanReport:
    """Outcome of planning again.

    Attributes:
        plan: Fingerprint of the running plan.
        ratio: Measured step time over that of the reference.
        measured_s: Present step time.
        located: Whether measurements say where the drift is; else the hypotheses are guesses.
        hypotheses: What would explain it; empty when nothing that was tried does.
        proposal: File of the proposed plan; None when staying is best.
        moved_groups, migration_bytes: What changes device.
        transfer_s: Of the move; None where devices without a link would have to send.
        restart_s: Assumed to stop and start the job.
        break_even_steps: Steps that pay for the move at the mean gain; None when they never do.
        note: Why there is no proposal, or what was not looked at; may be empty.
    """

    plan: str
    ratio: float
    measured_s: float
    located: bool
    hypotheses: tuple[Hypothesis, ...] = ()
    proposal: str | None = None
    moved_groups: int = 0
    migration_bytes: int = 0
    transfer_s: float | None = 0.0
    restart_s: float = 0.0
    break_even_steps: int | None = None
    note: str = ""

    @property
    def mean_gain(self) -> float:
        """Mean of the hypotheses' gains by their weights; 0 without a proposal."""
        return sum(h.weight * h.gain for h in self.hypotheses) if self.proposal is not None else 0.0

    @property
    def worst_gain(self) -> float:
        """Smallest of the hypotheses' gains; 0 without a proposal."""
        return min((h.gain for h in self.hypotheses), default=0.0) if self.proposal is not None else 0.0

    def lines(self) -> list[str]:
        """For people."""
        lines = [f"steps take {self.ratio:.3g} times the reference, now {self.measured_s * 1e3:.4g} ms"]
        if self.hypotheses and not self.located:
            lines.append(
                f"whole steps alone do not say where: {len(self.hypotheses)} explanations fit; to find out, run "
                "'rlplace measure --links' for the links and 'rlplace measure --plans' for the devices"
            )
        for h in self.hypotheses:
            told = [f"the proposed plan {_gain(h.gain)}"] if self.proposal is not None else []
            told += [f"the best plan for it {_gain(h.best_gain)}"] if not self.located else []
            lines.append(f"  {h.name}" + (f" ({h.weight:.0%})" if not self.located else "") + f": {', '.join(told) or 'stay'}")
        if self.proposal is None:
            lines.append(f"no other plan is proposed{': ' if self.note else ''}{self.note}")
            return lines
        how = "" if self.located else f" in the mean by weight, {_gain(self.worst_gain)} at worst"
        lines.append(f"proposed plan: {self.proposal}, expected {_gain(self.mean_gain)}{how}")
        sending = "no link between devices that would have to send; restart from a checkpoint"
        if self.transfer_s is not None:
            sending = f"{self.transfer_s:.3g} s over the links"
        even = "never pays at the mean gain"
        if self.break_even_steps is not None:
            even = f"pays after {self.break_even_steps} steps"
        lines.append(
            f"moving: {self.moved_groups} groups, {self.migration_bytes / 1e9:.3g} GB, {sending}, and {self.restart_s:.3g} s "
            f"assumed for the restart; {even}"
        )
        if self.worst_gain < 0:
            worst = min(self.hypotheses, key=lambda h: h.gain)
            lines.append(f"measure before you move: it would be {_gain(worst.gain)} if it is {worst.name}")
        if self.note:
            lines.append(self.note)
        lines.append("the running job is left as it is")
        return lines

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON data."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Writes ``*.replan.json``, atomically."""
        write_json(path, self.to_dict())

    @staticmethod
    def load(path: str | Path) -> ReplanReport:
        """Reads and checks a report."""
        return read_record(path, FORMAT, VERSION, _parse)


def _gain(share: float) -> str:
    return f"{100 * share:.1f} % faster" if share >= 0 else f"{-100 * share:.1f} % slower"


def _parse(data: dict[str, Any]) -> ReplanReport:
    names = {f.name for f in fields(ReplanReport)}
    check_keys(data, names, set(), "report")
    for key in ("plan", "note"):
        if not isinstance(data[key], str):
            raise InputError(f"{key} must be text")
    even, transfer, proposal = data["break_even_steps"], data["transfer_s"], data["proposal"]
    if not isinstance(data["located"], bool) or not isinstance(data["hypotheses"], list):
        raise InputError("located must be true or false, hypotheses a list")
    if proposal is not None and not isinstance(proposal, str):
        raise InputError("proposal must be a file name or null")
    return ReplanReport(
        plan=data["plan"],
        ratio=finite_number(data["ratio"], "ratio"),
        measured_s=finite_number(data["measured_s"], "measured_s"),
        located=data["located"],
        hypotheses=tuple(_hypothesis(item, f"hypotheses[{n}]") for n, item in enumerate(data["hypotheses"])),
        proposal=proposal,
        moved_groups=whole(data["moved_groups"], 0, _MOST_COUNT, "moved_groups"),
        migration_bytes=whole(data["migration_bytes"], 0, _MOST_COUNT, "migration_bytes"),
        transfer_s=None if transfer is None else finite_number(transfer, "transfer_s"),
        restart_s=finite_number(data["restart_s"], "restart_s"),
        break_even_steps=None if even is None else whole(even, 0, _MOST_COUNT, "break_even_steps"),
        note=data["note"],
    )


def _hypothesis(item: Any, where: str) -> Hypothesis:
    if not isinstance(item, Mapping):
        raise InputError(f"{where} must be an object")
    check_keys(item, {f.name for f in fields(Hypothesis)}, set(), where)
    if not isinstance(item["name"], str):
        raise InputError(f"{where}.name must be text")
    times = {key: finite_number(item[key], f"{where}.{key}") for key in ("weight", "running_s", "proposed_s", "best_s")}
    if min(times.values()) < _LEAST or max(times.values()) > _MOST:
        raise InputError(f"{where}: numbers must be in {_LEAST:g}..{_MOST:g}")
    return Hypothesis(item["name"], **times)
