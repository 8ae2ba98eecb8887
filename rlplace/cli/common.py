"""What the verbs share: the MODEL options, loading problems, printing tables."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from rlplace.cli.kept import kept
from rlplace.errors import InputError
from rlplace.text import table

if TYPE_CHECKING:
    from rlplace.api import Captured
    from rlplace.cluster.parse import Cluster
    from rlplace.cost.table import CostTable
    from rlplace.model.graph.opgraph import OpGraph
    from rlplace.model.zoo import LoadedModel
    from rlplace.placement.ask import Priced
    from rlplace.runtime.strategy.why_not import ModelFacts

DTYPES = ("fp32", "bf16", "fp16")
AUTOCAST = ("bf16", "fp16")
OPTIMIZERS = ("adam", "adamw", "momentum", "sgd")
HOST_MODES = ("eager", "compiled")
GRANULARITY = 200
_SIZES: dict[str, Any] = {
    "batch": None, "microbatch": None, "seq": 512, "dtype": "fp32", "optimizer": "adam", "granularity": GRANULARITY,
}  # fmt: skip
"""Defaults of the options that say what is captured."""

_HOST = ("host_us_per_op", "host_us_per_layer")
_PRICES: dict[str, Any] = {
    "autocast": None, "costs": None, **dict.fromkeys(_HOST), "master_weights": False, "host_mode": "eager",
}  # fmt: skip
"""Defaults of those that change how it is captured and priced."""

MICROBATCH = 8
"""Default number of samples of a micro-batch."""


def _whole(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not least <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from {least} up")
    return value


def _positive(what: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not {what}")
    return value


positive, natural = partial(_whole, 1), partial(_whole, 0)
"""Argparse types: a whole number from 1 up, and from 0 up."""

seconds, rate = partial(_positive, "a positive number of seconds"), partial(_positive, "a positive number")
"""Argparse types: a positive time, and a positive number such as a learning rate or a norm."""


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options that every verb with a MODEL takes."""
    group = parser.add_argument_group("model options")
    group.add_argument("--batch", type=positive, metavar="N", help="samples of a step, everything together")
    group.add_argument("--microbatch", type=positive, metavar="N", help=f"samples of a micro-batch ({MICROBATCH})")
    group.add_argument("--seq", type=positive, default=_SIZES["seq"], metavar="N", help="sequence length (512)")
    group.add_argument("--dtype", choices=DTYPES, default=_SIZES["dtype"], help="parameters and compute (fp32)")
    group.add_argument("--autocast", choices=AUTOCAST, help="mixed precision: compute under torch.autocast in this dtype")
    group.add_argument(
        "--optimizer", choices=OPTIMIZERS, default=_SIZES["optimizer"], help="decides the optimizer state (adam)"
    )
    group.add_argument("--master-weights", action="store_true", help="optimizer state and a copy of the weights in fp32")
    group.add_argument(
        "--granularity", type=positive, default=_SIZES["granularity"], metavar="N", help="target number of groups (200)"
    )
    group.add_argument("--costs", metavar="COSTS", help="op times: a *.cost.json or a plug-in over the built-in coefficients")
    group.add_argument("--host-mode", choices=HOST_MODES, default="eager", help="how the host issues ops (eager)")
    group.add_argument("--host-us-per-op", type=rate, metavar="N", help="host time to issue a kernel (7 eager, 1.5 compiled)")
    group.add_argument("--host-us-per-layer", type=rate, metavar="N", help="host time of a layer's forward and backward")


def asked_batch(model: str, options: argparse.Namespace) -> tuple[int | None, int]:
    """Samples of a step, those of ``--batch`` or of a function that gives a fixed number, or None; and of the first capture.

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


def microbatch(model: str, options: argparse.Namespace) -> int:
    """Samples of the pass that is captured.

    Raises:
        InputError: The options contradict each other, or the model.
    """
    from rlplace.model.capture.sizes import samples_of_pass

    samples = samples_of_pass(asked_batch(model, options)[0], options.microbatch)
    return MICROBATCH if samples is None else samples


def pricing_flags(options: argparse.Namespace) -> list[str]:
    """Returns the options given that change how a model is captured and priced, and have no effect where it is not."""
    return given(options, _PRICES)


def model_options(options: argparse.Namespace) -> list[str]:
    """Returns the MODEL options that were given, other than by their default, as words of a command."""
    values = vars(options)
    words = given(options, _SIZES | _PRICES)
    return [word if (value := values[word[2:].replace("-", "_")]) is True else f"{word}={value}" for word in words]


def given(options: argparse.Namespace, defaults: Mapping[str, Any]) -> list[str]:
    """Returns the options that differ from their defaults, as they are written."""
    return [f"--{name.replace('_', '-')}" for name, default in defaults.items() if getattr(options, name) != default]


def load(model: str, cluster: str | None, options: argparse.Namespace, *, runs: bool = False) -> Priced:
    """Loads a problem file, or captures a model and prices it for `cluster` (default: this machine).

    With `runs`, a model is refused that the engine of placements cannot run.
    """
    if model.endswith(".problem.json"):
        if cluster is not None:
            raise InputError(f"{model} has its own devices; leave --cluster out, or name the model instead")
        if sizes := given(options, _SIZES):
            raise InputError(f"{model} was captured and has its own sizes; leave {sizes[0]} out, or name the model instead")
        return load_problem(model, options)
    from rlplace.cluster.parse import parse

    machine = parse(cluster or "host")
    note_machine(cluster, machine)
    costs_of(options, machine)
    captured = capture_model(model, options, microbatch(model, options))
    if runs:
        captured.check_placed()
    return price_model(captured, machine, options)


def note_machine(cluster: str | None, machine: Cluster) -> None:
    """Says what is planned for: the first line, before anything that takes time."""
    kinds = Counter(device.kind or device.name for device in machine.devices)
    words = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    say(f"planning for {words}" if cluster is not None else f"no --cluster: planning for this machine, {words}")


def load_problem(path: str, options: argparse.Namespace) -> Priced:
    """Loads a problem file; options that would change its prices are refused."""
    from rlplace.placement.ask import Priced
    from rlplace.problem import Problem

    if flags := pricing_flags(options):
        raise InputError(f"{path} is priced already; leave {flags[0]} out, or name the model instead")
    return Priced(Problem.load(path))


def capture_model(model: str, options: argparse.Namespace, samples: int) -> Captured:
    """Builds a model and captures its training step for the requested number of samples; see `rlplace.cli.kept`."""
    from rlplace.api import Captured

    @cache
    def capture_at(batch: int, method: str | None = None) -> OpGraph:
        source = {"model": model, "batch": batch, "seq": options.seq, "dtype": options.dtype, "optimizer": options.optimizer}
        if options.autocast is not None or options.master_weights:
            source |= {"autocast": options.autocast, "master_weights": options.master_weights}

        def made() -> OpGraph:
            from rlplace.model.capture.capture import capture

            say(f"building {model}")
            loaded = build(batch)
            say(f"capturing one training step of {batch} samples{f' by {method}' if method else ''}")
            return capture(
                loaded.module,
                loaded.example_inputs,
                loss=loaded.loss,
                optimizer=options.optimizer,
                autocast=options.autocast,
                master_weights=options.master_weights,
                name=loaded.name,
                source=source,
                like=None if batch == samples or method is not None else capture_at(samples),
                method=method,
            )

        with contextlib.redirect_stdout(sys.stderr):  # output of a user's model is no result
            return dataclasses.replace(kept("graph", model, {**source, "method": method}, made))

    def build(batch: int, device: str = "meta") -> LoadedModel:
        from rlplace.model.zoo import load_model

        return load_model(model, batch=batch, seq=options.seq, dtype=options.dtype, device=device, resize=True)

    @cache
    def facts() -> ModelFacts:
        def made() -> ModelFacts:
            from rlplace.runtime.strategy.facts import facts_of
            from rlplace.runtime.strategy.rehearsal import affordable

            loaded, graph = build(samples), capture_at(samples)
            if model.startswith(("hf:", "zoo:")) and affordable(loaded.module, float(graph.op_flops.sum())) is None:
                loaded = build(samples, "cpu")
            return facts_of(loaded.module, loaded.example_inputs, loaded.loss, graph)

        with contextlib.redirect_stdout(sys.stderr):
            return kept("facts", model, {"batch": samples, "seq": options.seq, "dtype": options.dtype}, made)

    @cache
    def why_not_placed() -> str | None:
        def made() -> str | None:
            from rlplace.model.graph.opgraph import FORWARD
            from rlplace.runtime.placement.forward import why_not_traced

            loaded, graph = build(samples), capture_at(samples)
            ops = sum(op == FORWARD for op in graph.op_phase.tolist())
            return why_not_traced(loaded.module, loaded.example_inputs, graph.capture["method"], ops)

        with contextlib.redirect_stdout(sys.stderr):
            return kept("traced", model, {"batch": samples, "seq": options.seq, "dtype": options.dtype}, made)

    return Captured(capture_at(samples), capture_at, facts, why_not_placed)


def capture_sizes(model: str, options: argparse.Namespace, samples: int) -> Captured:
    """Captures a model for whole strategies, which need two sizes; a function's fixed samples may be all that it runs with.

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


def price_model(captured: Captured, machine: Cluster, options: argparse.Namespace) -> Priced:
    """Prices a captured model for a cluster."""
    from rlplace.placement.ask import Priced

    graph = captured.graph
    pricing = {"groups": options.granularity, "costs": costs_of(options, machine), "host": options.host_mode}
    priced = Priced.of(graph, machine, captured.capture_at, **pricing)
    say(f"captured {graph.num_ops} ops by {graph.capture['method']}, {priced.first.num_groups} groups")
    say(f"op times ({options.host_mode}): {basis_words((priced.first.source or {}).get('op_times', {}))}")
    return priced


def costs_of(options: argparse.Namespace, *machines: Cluster) -> CostTable | str | None:
    """Returns the costs that the options name, None for the shipped ones.

    Raises:
        InputError: They cannot be read, or know none of the device kinds.
    """
    from rlplace.cost.foreign import ModelledCosts, own_costs, with_host
    from rlplace.cost.scaled import base_name

    kinds = sorted({kind.name for machine in machines for kind in machine.kinds})
    table = own_costs(options.costs) if options.costs else None
    if table and not isinstance(table, ModelledCosts) and not any(base_name(name) in table.kinds for name in kinds):
        raise InputError(
            f"{options.costs}: holds costs of {', '.join(sorted(table.kinds)) or 'no device'}, the cluster has "
            f"{', '.join(kinds)}; leave --costs out, or name a cluster with a device of that kind"
        )
    op_s, layer_s = (None if us is None else 1e-6 * us for us in (getattr(options, name) for name in _HOST))
    return options.costs if op_s is layer_s is None else with_host(table, kinds, op_s, layer_s)


def basis_words(kinds: Mapping[str, Mapping[str, float]]) -> str:
    """What op times rest on, for people: per device kind the share of the step by basis."""
    return "; ".join(
        f"{kind} " + ", ".join(f"{100 * share:.0f} % {basis}" for basis, share in shares.items())
        for kind, shares in kinds.items()
    )


def check_agent(name: str) -> None:
    """Refuses a checkpoint that is missing or damaged before any work is done."""
    from rlplace.agents.checkpoint import load_checkpoint

    load_checkpoint(name)


def compile_first(space: str = "placement") -> None:
    """Compiles the kernels that planning in a space needs on the first use on this machine, and says why that takes time."""
    from rlplace.agents.first_use import compile_ahead

    if compile_ahead(space):
        say("first use on this machine: compiling the simulator and the planners, which takes about a minute, once")


def say(line: str) -> None:
    """Prints a message to stderr."""
    print(line, file=sys.stderr, flush=True)


def print_json(data: Any) -> None:
    """One JSON object on stdout."""
    print(json.dumps(data, allow_nan=False))


def show(answer: Any, options: argparse.Namespace) -> None:
    """Prints an answer as JSON or, without ``--json``, as text."""
    if options.json:
        print_json(answer.to_dict())
    else:
        print(answer.text())


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A plain table on stdout: first column left, the others right aligned."""
    print("\n".join(table(header, rows)))
