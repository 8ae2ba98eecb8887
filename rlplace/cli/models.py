"""Models and problems of the command line: captured, cached and priced as the options say; and ``rlplace capture``."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from rlplace.cli.capture_cache import cached
from rlplace.cli.options import MICROBATCH, MODEL, PRICES, SIZES, ModelOptions, argument, option, print_json, say
from rlplace.errors import InputError

if TYPE_CHECKING:
    from rlplace.captured import CapturedModel, Recipe
    from rlplace.cluster.parse import Cluster
    from rlplace.cost.table import CostTable
    from rlplace.model.graph.opgraph import OpGraph
    from rlplace.placement.ask import Priced


T = TypeVar("T")


def asked_batch(model: str, options: ModelOptions) -> tuple[int | None, int]:
    """Returns the samples of a step (of ``--batch``, or of a function with a fixed number; else None) and of the first capture.

    Raises:
        InputError: The two differ.
    """
    from rlplace.model.zoo.functions import fixed_line, fixed_samples

    with contextlib.redirect_stdout(sys.stderr):  # output of a user's model is no result
        fixed = fixed_samples(model, options.seq)
    if fixed is None:
        return options.batch, options.microbatch or MICROBATCH
    if options.batch not in (None, fixed):
        raise InputError(fixed_line(model, fixed, f"leave --batch {options.batch} out"))
    if getattr(options, "batch_curve", None):
        raise InputError(fixed_line(model, fixed, "leave --batch-curve out, which chooses their number"))
    say(fixed_line(model, fixed, f"a step has {fixed}"))
    return fixed, options.microbatch or fixed


def microbatch(model: str, options: ModelOptions) -> int:
    """Returns the samples of the pass that is captured.

    Raises:
        InputError: The options contradict each other, or the model.
    """
    from rlplace.model.capture.inputs import samples_of_pass

    samples = samples_of_pass(asked_batch(model, options)[0], options.microbatch)
    return MICROBATCH if samples is None else samples


def load(model: str, cluster: str | None, options: ModelOptions, *, runs: bool = False) -> Priced:
    """Loads a problem file, or captures a model and prices it for `cluster` (default: this machine).

    With `runs`, a model is refused that the engine of placements cannot run.
    """
    if model.endswith(".problem.json"):
        if cluster is not None:
            raise InputError(f"{model} has its own devices; leave --cluster out, or name the model instead")
        if sizes := options.given(SIZES):
            raise InputError(f"{model} was captured and has its own sizes; leave {sizes[0]} out, or name the model instead")
        return load_problem(model, options)
    machine = machine_of(cluster)
    note_machine(cluster, machine)
    costs_of(options, machine)
    captured = capture_model(model, options, microbatch(model, options))
    if runs:
        captured.check_placed()
    return price_model(captured, machine, options)


def machine_of(cluster: str | None) -> Cluster:
    """Returns the cluster of a text; this machine without one."""
    from rlplace.cluster.parse import parse

    return parse(cluster or "host")


def note_machine(cluster: str | None, machine: Cluster) -> None:
    """Says which devices are planned for: the first line, before anything that takes time."""
    kinds = Counter(device.kind or device.name for device in machine.devices)
    words = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    say(f"planning for {words}" if cluster is not None else f"no --cluster: planning for this machine, {words}")


def load_problem(path: str, options: ModelOptions) -> Priced:
    """Loads a problem file; options that would change its prices are refused."""
    from rlplace.placement.ask import Priced
    from rlplace.problem import Problem

    if flags := options.given(PRICES):
        raise InputError(f"{path} is priced already; leave {flags[0]} out, or name the model instead")
    return Priced(Problem.load(path))


def capture_model(model: str, options: ModelOptions, samples: int) -> CapturedModel:
    """Builds a model and captures its training step for a number of samples; see `rlplace.cli.capture_cache`."""
    from rlplace.captured import CapturedModel

    recipe = recipe_of(model, options, samples)

    @cache
    def capture_at(batch: int, method: str | None = None) -> OpGraph:
        source = recipe.source(batch)

        def make() -> OpGraph:
            say(f"building {model}")
            loaded = recipe.load(batch=batch)
            say(f"capturing one training step of {batch} samples{f' by {method}' if method else ''}")
            like = None if batch == samples or method is not None else capture_at(samples)
            made = recipe.capture(loaded, source=source, like=like, method=method)
            if like is None and made.traced is not None:
                _ = made.traced.indices  # kept with the capture, for layouts
            return made

        return dataclasses.replace(cached("graph", model, {**source, "method": method}, make))

    graph = capture_at(samples)
    return CapturedModel.of(graph, capture_at, lambda weights: recipe.parts(weights, graph), recipe.known(cached))


def recipe_of(model: str, options: ModelOptions, samples: int) -> Recipe:
    """Returns the arguments of a capture that the options say."""
    from rlplace.captured import Recipe

    named = ("seq", "dtype", "optimizer", "autocast", "master_weights")
    return Recipe(model, samples, **{name: getattr(options, name) for name in named})


def capture_sizes(model: str, options: ModelOptions, samples: int) -> CapturedModel:
    """Captures a model for whole strategies, which need two sizes; a function with fixed samples may run with one only.

    Args:
        model: MODEL of the command line.
        options: Its options.
        samples: Of the first capture; see `asked_batch`.
    """
    from rlplace.model.graph.rescale import two_captures
    from rlplace.model.zoo.functions import takes_batch

    captured = capture_model(model, options, samples)
    assert captured.capture_at is not None
    if takes_batch(model):
        return captured
    try:
        two_captures(captured.graph, captured.capture_at)
    except InputError as error:
        say(f"planning micro-batches of {samples} samples only: {error}")
        return dataclasses.replace(captured, capture_at=None)
    return captured


def price_model(captured: CapturedModel, machine: Cluster, options: ModelOptions) -> Priced:
    """Prices a captured model for a cluster."""
    from rlplace.placement.ask import Priced

    graph = captured.graph
    pricing = {"groups": options.granularity, "costs": costs_of(options, machine), "host": options.host_mode}
    priced = Priced.of(graph, machine, captured.capture_at, **pricing)
    say(f"captured {graph.num_ops} ops by {graph.capture['method']}, {priced.first.num_groups} groups")
    say(f"op times ({options.host_mode}): {basis_words((priced.first.source or {}).get('op_times', {}))}")
    return priced


def costs_of(options: ModelOptions, *machines: Cluster) -> CostTable | str | None:
    """Returns the costs that the options name, None for the shipped ones.

    Raises:
        InputError: They cannot be read, or have none of the device kinds.
    """
    from rlplace.cost.foreign import ModelledCosts, own_costs, with_host
    from rlplace.cost.scaled import base_name

    kinds = sorted({kind.name for machine in machines for kind in machine.kinds})
    table = own_costs(options.costs) if options.costs else None
    known = table is None or isinstance(table, ModelledCosts) or any(base_name(name) in table.kinds for name in kinds)
    if table is not None and not known and not (table.imbalance and not table.kinds):
        raise InputError(
            f"{options.costs}: holds costs of {', '.join(sorted(table.kinds)) or 'no device'}, the cluster has "
            f"{', '.join(kinds)}; leave --costs out, or name a cluster with a device of that kind"
        )
    op_s, layer_s = (None if us is None else 1e-6 * us for us in (options.host_us_per_op, options.host_us_per_layer))
    return options.costs if op_s is layer_s is None else with_host(table, kinds, op_s, layer_s)


def basis_words(kinds: Mapping[str, Mapping[str, float]]) -> str:
    """Returns the basis of op times in words: per device kind the share of the step by basis, and what a preset rests on."""
    from rlplace.cluster.presets import SOURCES
    from rlplace.cost.scaled import base_name

    def words(kind: str, shares: Mapping[str, float]) -> str:
        found = f"{kind} " + ", ".join(f"{100 * share:.0f} % {basis}" for basis, share in shares.items())
        how = SOURCES[base_name(kind)].products.partition(":")[0] if base_name(kind) in SOURCES else "measured"
        return found if how == "measured" or "scaled" not in shares else f"{found} (rates of products: {how})"

    return "; ".join(words(kind, shares) for kind, shares in kinds.items())


def compile_first(space: str = "placement") -> None:
    """Compiles the kernels that planning in a space needs on the first use on this machine, and says why that takes time."""
    from rlplace.agents.compile_ahead import compile_ahead

    if compile_ahead(space):
        say("first use on this machine: compiling the simulator and the planners, which takes about a minute, once")


_LEVELS = {"task": "best", "op": "best", "split": "bipartition"}
"""Level to a planner that takes such a problem."""


@dataclass(frozen=True, kw_only=True)
class CaptureOptions(ModelOptions):
    """Options of the verb."""

    HELP = "capture a model and write its problem file"
    EXAMPLE = "example: rlplace capture hf:bert --cluster v100:4 --out bert.problem.json"

    model: str = argument("MODEL", MODEL)
    cluster: str | None = option("cluster to price for (this machine)", None, "C")
    out: str = option("file to write", None, "X.problem.json", required=True)
    level: str = option(
        "task: one op per group and phase (default); op: every op; split: every backward in a group of its own, as "
        "bipartition plans",
        choices=tuple(_LEVELS),
        default="task",
    )

    def check(self) -> None:
        """Refuses options that contradict each other."""
        from rlplace.files import check_output

        check_output(self.out)
        if self.model.endswith(".problem.json"):
            raise InputError(f"{self.model} is a problem already; capture takes a model")

    def run(self) -> int:
        """Runs the verb."""
        loaded = load(self.model, self.cluster, self)
        assert loaded.graph is not None and loaded.build is not None
        if self.level == "op":
            problem = loaded.build(loaded.graph, level="op")
        else:
            problem = loaded.prepared_for(_LEVELS[self.level]).first
        problem.save(self.out)
        summary = {
            "problem": self.out,
            "fingerprint": problem.fingerprint,
            "method": loaded.graph.capture["method"],
            "graph_ops": loaded.graph.num_ops,
            "flops": float(loaded.graph.op_flops.sum()),
            "parameters_bytes": sum(p.size_bytes for p in loaded.graph.parameters if not p.is_buffer),
            "ops": problem.num_ops,
            "groups": problem.num_groups,
            "devices": problem.num_devices,
            "host": self.host_mode,
            "op_times": (problem.source or {}).get("op_times", {}),
            "notes": list(loaded.graph.capture.get("notes", [])),
        }
        if self.json:
            print_json(summary)
        else:
            for key, value in summary.items():
                print(f"{key:17s} {value}")
        return 0
