"""``rlplace calibrate``: from measurement files to a cost table, with its errors on what it has not seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlplace.cli.options import Options, argument, flag, natural, option, print_json, print_records, say, share
from rlplace.errors import InputError
from rlplace.text import ms

if TYPE_CHECKING:
    from rlplace.cluster.presets import DeviceKind
    from rlplace.measure.calibrate import Calibration, FitError


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(Options):
    """Options of the verb."""

    HELP = "fit the cost model to measurements"
    EXAMPLE = "example: rlplace calibrate bert.measure.json vit.measure.json --out host.cost.json"

    measurements: list[str] = argument("M.measure.json", "what rlplace measure --ops --step wrote", "+")
    out: str = option("cost table, for --costs of place and capture", None, "C.cost.json", required=True)
    cluster: str = option("where the device kind is described (host)", None, "C", default="host")
    holdout: float = option("share of shapes held out for the error (0.25)", share, "P", default=0.25)
    no_models: bool = flag("do not state the error on each model by a fit on the others")
    seed: int = option("of the choice of held-out shapes (0)", natural, "N", default=0)

    def run(self) -> int:
        """Runs the verb."""
        from rlplace.cluster.parse import parse
        from rlplace.cost.timings import Measurement
        from rlplace.files import check_output
        from rlplace.measure.calibrate import calibrate

        check_output(self.out)
        measurements = [Measurement.load(path) for path in self.measurements]
        kind = _kind(parse(self.cluster).kinds, measurements[0].environment.device_kind, self.cluster)
        say(f"fitting {sum(len(m.ops) for m in measurements)} timed ops of {len(measurements)} models on {kind.name}")
        result = calibrate(measurements, kind, holdout=self.holdout, by_model=not self.no_models, seed=self.seed)
        result.table.save(self.out)
        say(f"wrote {self.out}")
        if self.json:
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
            cells: dict[str, Callable[[FitError], str]] = {
                title: lambda error: error.label[:60],
                "ops": lambda error: str(error.ops),
                "mean error %": lambda error: f"{100 * error.mean:.1f}",
                "by time %": lambda error: f"{100 * error.weighted:.1f}",
                "measured ms": lambda error: ms(error.measured_s),
                "predicted ms": lambda error: ms(error.predicted_s),
                "total %": lambda error: f"{100 * error.total:+.1f}",
                "loaned %": lambda error: f"{100 * error.loaned:.1f}",
            }
            print_records(errors, cells)
            print()
    fitted = f"{len(costs.targets)} targets, {len(costs.curves)} op classes, {result.ops} shapes"
    print(f"{fitted}, step factor {costs.step_factor:.4f}")


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
