"""Tables of the keys of file formats, made from the records that read the files: one page a format, included by formats.md."""

import inspect
import re

import msgspec.inspect as types
from msgspec import NODEFAULT

from rlplace.agents.problems import cases
from rlplace.cluster import fabric, links, presets
from rlplace.cluster import file as cluster_file
from rlplace.cost import curve, table, timings
from rlplace.explanation.compare import records as comparison
from rlplace.measure import log
from rlplace.plan import file as plan_file
from rlplace.plan import prediction, strategy
from rlplace.problem import Collective
from rlplace.problem import io as problem_file
from rlplace.runtime.state import untrusted
from rlplace.strategy.search import efficiency

FORMATS = {
    "cluster": {
        "": cluster_file._ClusterFile,
        "[[device]]": cluster_file._DeviceTable,
        "[[kind]], or like = NAME and some of these": presets.DeviceKind,
        "[interconnect]": cluster_file._Interconnect,
        "[links]": links.LinksTable,
        "[[topology.resource]]": cluster_file._Resources,
        "[[topology.path]]": cluster_file._Paths,
        "[[fabric]]": fabric.Fabric,
        "[[fabric.curves]]": fabric.CollectiveCurve,
        "fabric.curves.pieces, a list of lists [from_bytes, latency_s, bus_bytes_per_s]": fabric.Piece,
    },
    "problem": {
        "": problem_file._ProblemEntry,
        "devices[]": problem_file._DeviceEntry,
        "links": problem_file._LinksEntry,
        "groups[]": problem_file._GroupEntry,
        "ops[]": problem_file._OpEntry,
        "tensors[]": problem_file._TensorEntry,
        "collectives[]": Collective,
    },
    "plan": {
        "": plan_file._Plan,
        "strategy": strategy.Strategy,
        "strategy.pipelines[], or in strategy itself if there is one": strategy.Pipeline,
        "strategy.stages[]": strategy.Stage,
        "placement": plan_file._Placement,
        "groups[]": plan_file._Group,
        "predicted": prediction.Prediction,
        "predicted.strategies[]": prediction.Rival,
        "predicted.memory[] of a strategy": prediction.HeldMemory,
    },
    "cost": {
        "": table._TableRecord,
        "kinds.NAME; curves, measured and targets are lists whose entries have a key": table.KindCosts,
        "kinds.NAME.curves[] and measured[], the key": table._OpKey,
        "kinds.NAME.targets[], the key": table._TargetKey,
        "kinds.NAME.curves[] and targets[], beside the key; basis is required": curve.Curve,
        "shapes[] of measured and targets": curve.MeasuredShape,
        "residual": curve.Residual,
    },
    "measurement": {
        "": timings.Measurement,
        "model": timings.MeasuredModel,
        "environment": timings.Environment,
        "ops[]": timings.MeasuredOp,
        "step": timings.StepTiming,
        "control": timings.ControlTiming,
    },
    "timings": {"": timings.PlanTimings, "plans[]": timings.PlanTiming, "plans[].places[]": timings.PlaceTiming},
    "runs": {"run": log.Run, "ended": log.Ended},
    "batch_curve": {"": efficiency._CurveFile},
    "comparison": {
        "settings": comparison.Settings,
        "problems[]": comparison.ProblemInfo,
        "rows[]": comparison.ComparisonRow,
        "summaries[]": comparison.Summary,
    },
    "cases": {"cases.json": cases._Index, "cases[]": cases._Entry},
    "training": {
        "rlplace.json": untrusted.CheckpointFacts,
        "random": untrusted.RandomStreams,
        "optimizers[]": untrusted.OptimizerFacts,
        "optimizers[].groups[]": untrusted.OptimizerGroup,
    },
}
"""By format the records of its files, by the place in a file where each stands."""

_SEPARATE = {log.Run: log.Ended}
"""Records whose inherited fields have a table of their own."""


def pages() -> dict[str, str]:
    """Writes the tables of all formats: Markdown by file name.

    Raises:
        ValueError: A field is not documented.
    """
    return {f"format_{name}.md": "\n".join(map(_table, parts, parts.values())) for name, parts in FORMATS.items()}


def _table(where: str, record: type) -> str:
    """Lists the fields of a record: key, value, meaning."""
    meanings = {name: text for kind in reversed(record.__mro__) for name, text in _attributes(kind).items()}
    inherited = {field.name for field in types.type_info(_SEPARATE[record]).fields} if record in _SEPARATE else ()
    lines = [f"`{where}`\n" if where else "", "| key | value | meaning |", "|---|---|---|"]
    for field in types.type_info(record).fields:
        if field.name in inherited:
            continue
        if field.name not in meanings:
            raise ValueError(f"{record.__module__}.{record.__name__}: document the attribute {field.name}")
        value = words(field.type) + ("" if field.required else f", {_default(field)}")
        cells = (f"`{field.encode_name}`", value, re.sub(r"\bNone\b", "null", meanings[field.name]))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _attributes(record: type) -> dict[str, str]:
    """Parses the section Attributes of a docstring: texts by name."""
    section = (inspect.getdoc(record) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {
        name: re.sub(r"``(.*?)``", r"`\1`", " ".join(text.split())) for names, text in entries for name in names.split(", ")
    }


def words(kind: types.Type) -> str:
    """Describes a type in words."""
    if isinstance(kind, types.LiteralType):
        return " or ".join(f"`{value}`" for value in kind.values)
    if isinstance(kind, types.UnionType):
        return " or ".join(dict.fromkeys(map(words, kind.types)))
    if isinstance(kind, types.ListType | types.VarTupleType):
        item = words(kind.item_type)
        return f"list of ({item})" if " or " in item else f"list of {item}"
    if isinstance(kind, types.TupleType):
        return f"[{', '.join(map(words, kind.item_types))}]"
    if isinstance(kind, types.DictType):
        keys = f" with the keys {words(kind.key_type)}" if isinstance(kind.key_type, types.LiteralType) else ""
        return f"table of {words(kind.value_type)}{keys}"
    if isinstance(kind, types.IntType | types.FloatType):
        return ("whole number" if isinstance(kind, types.IntType) else "number") + _range(kind)
    names = {types.StrType: "text", types.BoolType: "true or false", types.NoneType: "null", types.AnyType: "anything"}
    return names.get(type(kind), "table")


def _range(kind: types.IntType | types.FloatType) -> str:
    """Describes the bounds of a number, without those that only keep arithmetic finite."""
    low = kind.ge if kind.ge is not None else kind.gt
    high = kind.le if kind.le is not None else kind.lt
    low, high = (None if end is None or abs(end) > 1e5 else end for end in (low, high))
    above, below = ("above" if kind.gt is not None else "from"), ("below" if kind.lt is not None else "to")
    return ("" if low is None else f" {above} {low:g}") + ("" if high is None else f" {below} {high:g}")


def _default(field: types.Field) -> str:
    """Describes the default of a missing key."""
    value = field.default if field.default is not NODEFAULT else field.default_factory()
    if value is None or (hasattr(value, "__len__") and len(value) == 0):
        return "optional"
    if isinstance(value, bool):
        return f"default {str(value).lower()}"
    return (
        f"default {value:g}" if isinstance(value, float) else f"default `{dict(value) if hasattr(value, 'items') else value}`"
    )
