"""Timeline and memory as pictures for papers, drawn by matplotlib without its global state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlplace.errors import InputError, MissingError
from rlplace.files import write_bytes
from rlplace.reporting.data import ReportData
from rlplace.reporting.lanes import COLORS, DEVICE, LIMIT_COLOR, PHASE_COLORS, rgb
from rlplace.text import seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("pdf", "svg", "png")
_STYLE: dict[str, Any] = {
    "font.size": 8, "axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False, "xtick.major.width": 0.6,
    "ytick.major.width": 0.6, "svg.fonttype": "none", "pdf.fonttype": 42, "legend.frameon": False, "svg.hashsalt": "rlplace",
    "text.parse_math": False,
}  # fmt: skip
_WIDTH_IN = 6.5
_VECTOR_BOXES = 4000
"""Timelines of more boxes are drawn as pixels inside the vector formats, which stay small."""


def check_pictures(folder: str | Path) -> None:
    """Refuses a folder that pictures cannot be written to, before any work is done.

    Raises:
        MissingError: matplotlib is not installed.
        InputError: The folder cannot be made or written.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingError("pictures need matplotlib; install it with: pip install 'rlplace[plots]'") from None
    path = Path(folder)
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
    if not os.access(path, os.W_OK):
        raise InputError(f"{path}: cannot be written: the folder is read-only")


def write_pictures(data: ReportData, folder: str | Path) -> list[Path]:
    """Writes ``timeline`` and ``memory`` in all `FORMATS`, each file complete or not at all.

    Args:
        data: From `rlplace.reporting.data.report_data`.
        folder: Made if it is not there; the folder above it must be.

    Returns:
        The files.

    Raises:
        MissingError: matplotlib is not installed.
        InputError: The step does not complete, so there is nothing to draw; or the folder cannot be written.
    """
    check_pictures(folder)
    if data.timeline.step_time_s is None:
        raise InputError(f"pictures: the step does not complete: {data.timeline.violations[0]}")
    import matplotlib

    written = []
    with matplotlib.rc_context(_STYLE):
        for name, figure in (("timeline", timeline_figure(data)), ("memory", memory_figure(data))):
            for kind in FORMATS:
                path = Path(folder) / f"{name}.{kind}"
                write_bytes(path, _saved(figure, kind))
                written.append(path)
    return written


def timeline_figure(data: ReportData) -> Figure:
    """What every device computes when: a row a device, in the colours of the phases."""
    lanes = data.lanes
    devices = [row for row in lanes.rows if row.kind == DEVICE]
    figure, axes = _figure(0.26 * len(devices) + 0.9)
    shown = np.flatnonzero(lanes.row < len(devices))
    left, right = lanes.start_s[shown] * 1e3, lanes.end_s[shown] * 1e3
    low = lanes.row[shown] - 0.4
    corners = np.stack([left, low, left, low + 0.8, right, low + 0.8, right, low], axis=1).reshape(-1, 4, 2)
    phase = data.problem.op_phase[lanes.op[shown]]

    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    colors = rgb(PHASE_COLORS)[phase] / 255.0
    boxes = PolyCollection(list(corners), facecolors=colors, edgecolors="none", rasterized=len(shown) > _VECTOR_BOXES)
    axes.add_collection(boxes)
    axes.set_ylim(len(devices) - 0.4, -0.6)
    axes.set_yticks(range(len(devices)), [row.name for row in devices])
    _time_axis(axes, data)
    names = [(phase, name) for phase, name in enumerate(_PHASE_NAMES) if (data.problem.op_phase == phase).any()]
    handles = [Patch(facecolor=PHASE_COLORS[phase], label=name) for phase, name in names]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles), borderaxespad=0.2)
    return figure


def memory_figure(data: ReportData) -> Figure:
    """Memory in use on every device over the step, with the devices' limits that are near."""
    figure, axes = _figure(2.6)
    peak = max(curve.peak_bytes for curve in data.memory)
    for index, (device, curve) in enumerate(zip(data.problem.devices, data.memory, strict=True)):
        thin = curve.thinned(4000)
        dashes = ("-", "--", ":", "-.")[index // len(COLORS) % 4]
        axes.step(
            thin.time_s * 1e3, thin.in_use_bytes / 1e9, where="post", color=COLORS[index % len(COLORS)], linewidth=0.9,
            linestyle=dashes, label=device.name,
        )  # fmt: skip
    limits = {device.memory_bytes for device in data.problem.devices if device.memory_bytes is not None}
    for limit in sorted(limit for limit in limits if limit <= 3 * peak):
        axes.axhline(limit / 1e9, color=LIMIT_COLOR, linewidth=0.8, linestyle=(0, (5, 3)))
        axes.annotate(
            "limit",
            (1.0, limit / 1e9),
            xycoords=("axes fraction", "data"),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            color=LIMIT_COLOR,
        )
    axes.set_ylim(bottom=0)
    axes.set_ylabel("memory in use [GB]")
    _time_axis(axes, data)
    columns = min(8, len(data.memory))
    axes.legend(
        loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, borderaxespad=0.2, columnspacing=1.2, handlelength=1.4
    )
    return figure


_PHASE_NAMES = ("forward", "backward", "backward of weights", "update")


def _figure(height_in: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _time_axis(axes: Axes, data: ReportData) -> None:
    step = float(data.timeline.step_time_s or 0.0)
    axes.set_xlim(0.0, step * 1e3 or 1.0)
    axes.set_xlabel(f"time [ms], step {seconds_text(step)}")


def _saved(figure: Figure, kind: str) -> bytes:
    from io import BytesIO

    stream = BytesIO()
    metadata = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}[kind]
    figure.savefig(stream, format=kind, metadata=metadata)
    return stream.getvalue()
