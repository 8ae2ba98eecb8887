"""``rlplace calibrate``: from measurement files to a cost table, with its errors on what it has not seen."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlplace.cli.common import natural, print_json, print_table, say
from rlplace.errors import InputError
from rlplace.text import ms

if TYPE_CHECKING:
    from rlplace.cluster.presets import DeviceKind
    from rlplace.measure.calibrate import Calibration, FitError

HELP = "fit the cost model to measurements"
EXAMPLE = "example: rlplace calibrate bert.measure.json vit.measure.json --out host.cost.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("measurements", metavar="M.measure.json", nargs="+", help="what rlplace measure --ops --step wrote")
    parser.add_argument("--out", metavar="C.cost.json", required=True, help="cost table, for --costs of place and capture")
    parser.add_argument("--cluster", default="host", metavar="C", help="where the device kind is described (host)")
    parser.add_argument(
        "--holdout", type=_share, default=0.25, metavar="P", help="share of shapes held out for the error (0.25)"
    )
    parser.add_argument("--no-models", action="store_true", help="do not state the error on each model by a fit on the others")
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="of the choice of held-out shapes (0)")


def run(options: argparse.Namespace) -> int:
    """Runs the verb."""
    from rlplace.cluster.parse import parse
    from rlplace.cost.measurement import Measurement
    from rlplace.files import check_output
    from rlplace.measure.calibrate import calibrate

    check_output(options.out)
    measurements = [Measurement.load(path) for path in options.measurements]
    kind = _kind(parse(options.cluster).kinds, measurements[0].environment.device_kind, options.cluster)
    say(f"fitting {sum(len(m.ops) for m in measurements)} timed ops of {len(measurements)} models on {kind.name}")
    result = calibrate(measurements, kind, holdout=options.holdout, by_model=not options.no_models, seed=options.seed)
    result.table.save(options.out)
    say(f"wrote {options.out}")
    if options.json:
        print_json(_as_dict(result))
    else:
        _show(result)
    return 0


def _kind(kinds: Sequence[DeviceKind], name: str, cluster: str) -> DeviceKind:
    for kind in kinds:
        if kind.name == name:
            return kind
    raise InputError(
        f"calibrate: measured on {name}, but {cluster} has {', '.join(sorted({kind.name for kind in kinds}))}; "
        f"name a cluster with that kind, for example --cluster {name}:1"
    )


def _show(result: Calibration) -> None:
    costs = result.table.kinds[result.device_kind]
    for title, errors in (("held-out shapes", result.by_shape), ("model, fitted on the others", result.by_model)):
        if errors:
            print_table(
                [title, "ops", "mean error %", "by time %", "measured ms", "predicted ms", "total %", "loaned %"], _rows(errors)
            )
            print()
    fitted = f"{len(costs.targets)} targets, {len(costs.curves)} op classes, {result.ops} shapes"
    print(f"{fitted}, step factor {costs.step_factor:.4f}")


def _rows(errors: Sequence[FitError]) -> list[list[str]]:
    return [
        [
            error.label[:60],
            str(error.ops),
            f"{100 * error.mean:.1f}",
            f"{100 * error.weighted:.1f}",
            ms(error.measured_s),
            ms(error.predicted_s),
            f"{100 * error.total:+.1f}",
            f"{100 * error.loaned:.1f}",
        ]
        for error in errors
    ]


def _as_dict(result: Calibration) -> dict[str, object]:
    costs = result.table.kinds[result.device_kind]
    return {
        "device_kind": result.device_kind,
        "ops": result.ops,
        "targets": len(costs.targets),
        "step_factor": costs.step_factor,
        "by_shape": [{**dataclasses.asdict(error), "total": error.total} for error in result.by_shape],
        "by_model": [{**dataclasses.asdict(error), "total": error.total} for error in result.by_model],
    }


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a share from 0 to below 1")
    return value
