"""``rlplace compare``: planners side by side, one row a planner and problem."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlplace.cli.models import capture_model, compile_first, costs_of, load_problem, microbatch, price_model
from rlplace.cli.options import (
    ModelOptions,
    argument,
    flag,
    option,
    positive,
    print_json,
    print_records,
    print_table,
    say,
    seconds,
)
from rlplace.cli.place import question_of
from rlplace.errors import InputError
from rlplace.files import canonical_json
from rlplace.text import ms, percent

if TYPE_CHECKING:
    from rlplace.captured import CapturedModel
    from rlplace.cluster.parse import Cluster
    from rlplace.explanation.compare import Case, Comparison, ComparisonRow, ProblemInfo, Summary
    from rlplace.explanation.compare.run import Report
    from rlplace.strategy.search.tries import SearchProblem


CLASSICAL = "single,round_robin,balanced,heft,m_etf,metis,best,annealing,local_search,agent"
KINDS = "strategies"
"""Name of the rows of whole strategies."""
ALL = "all"
DEFAULT = f"{KINDS},{CLASSICAL}"


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ModelOptions):
    """Options of the verb."""

    HELP = "compare planners on models and clusters"
    EXAMPLE = (
        "example: rlplace compare hf:gpt2 zoo:inception --cluster a100-80g:4 --cluster v100:4,pcie "
        "--planners best,annealing,agent"
    )

    models: list[str] = argument("MODEL", "models or *.problem.json files", "+")
    cluster: list[str] | None = option("cluster (this machine); may be given several times", None, "C", action="append")
    planners: str = option(
        f"planners, {KINDS} (the best of every kind of whole strategy), or {ALL} ({DEFAULT})", None, "A,B", default=DEFAULT
    )
    seeds: int = option("seeds of random planners (1)", positive, "N", default=1)
    agent: str = option("checkpoint name or folder (default)", None, "NAME", default="default")
    time_limit: float = option("seconds per plan (5)", seconds, "S", default=5.0)
    calls: int | None = option("simulator calls after the floor for every search, instead of time", positive, "N")
    split: bool = flag("all planners also with every backward in a group of its own")
    csv: str | None = option("write the rows as CSV", None, "FILE")
    out: str | None = option("write every row as soon as it is there", None, "FILE.jsonl")
    resume: bool = flag("go on with the rows that --out has")

    def check(self) -> None:
        """Refuses options that contradict each other."""
        from rlplace.files import check_output

        for path in filter(None, (self.csv, self.out)):
            check_output(path)
        if self.resume and not self.out:
            raise InputError("--resume goes on with a file; name it with --out")

    def run(self) -> int:
        """Runs the verb."""
        from rlplace.agents.checkpoint import load_checkpoint
        from rlplace.explanation.compare import Settings, Store, compare, count_rows, gather
        from rlplace.explanation.compare.records import SPLIT
        from rlplace.explanation.compare.rows import STRATEGIES
        from rlplace.files import write_text

        names = _planners(self)
        if "agent" in names:
            load_checkpoint(self.agent)  # one that is missing or damaged is refused before any work
            compile_first()
        cases = _cases(self, whole=bool(set(names) & set(STRATEGIES)))
        settings = Settings(calls=self.calls, time_limit_s=self.time_limit, seeds=self.seeds, agent=self.agent)
        store = Store(settings, self.out, resume=self.resume)
        if store.rows:
            say(f"{self.out}: {len(store.rows)} rows are there already")
        views = [SPLIT] if self.split else []
        interrupted, failures = False, []
        try:
            with _progress(count_rows(cases, names, views)) as report:
                failures = compare(cases, names, store, views=views, report=report, strict=self.debug)
        except KeyboardInterrupt:
            interrupted = True
        comparison = gather(store, cases, names, views)
        if self.csv:
            write_text(self.csv, to_csv(comparison))
        if self.json:
            print_json(comparison.to_dict())
        else:
            print_comparison(comparison)
        if interrupted:
            kept = f"{self.out} has them, --resume goes on" if self.out else "--out would have kept them for --resume"
            say(f"rlplace: interrupted after {len(comparison.rows)} rows; {kept}")
            return 130
        for case, error in failures:
            if self.debug:
                raise error
            say(f"rlplace: {case.model} on {case.cluster or 'its devices'}: {' '.join(str(error).split())}")
        return failures[0][1].exit_code if failures else 0


def _planners(options: CompareOptions) -> list[str]:
    from rlplace.explanation.compare.rows import STRATEGIES
    from rlplace.placement import get_planner, planner_names

    if options.planners.strip() == ALL:
        return [*STRATEGIES, *planner_names()]
    names = [name.strip() for name in options.planners.split(",") if name.strip()]
    if not names:
        raise InputError("--planners names no planner, for example best,agent")
    names = [one for name in names for one in (STRATEGIES if name == KINDS else (name,))]
    for name in names:
        if name not in STRATEGIES:
            get_planner(name)
    return list(dict.fromkeys(names))


def _cases(options: CompareOptions, whole: bool) -> list[Case]:
    """Returns every model on every cluster, and every problem file on its own devices; a model is captured once.

    Args:
        options: Options of the verb.
        whole: Whole strategies are asked for, too; problem files have none.
    """
    from rlplace.cluster.parse import parse
    from rlplace.explanation.compare import Case

    models = list(dict.fromkeys(options.models))
    files = [model for model in models if model.endswith(".problem.json")]
    if options.cluster and len(files) == len(models):
        raise InputError("problem files have their own devices; leave --cluster out, or name a model as well")
    texts = list(dict.fromkeys(options.cluster or ["host"])) if len(files) < len(models) else []
    machines = {text: parse(text) for text in texts}
    if machines:
        costs_of(options, *machines.values())
    cases = []
    for model in models:
        if model in files:
            problem = load_problem(model, options).first
            source = (problem.source or {}).get("cluster")
            cases.append(Case(model, source if isinstance(source, str) else "", lambda problem=problem: problem))  # type: ignore[misc]
            continue
        captured = functools.cache(functools.partial(capture_model, model, options, microbatch(model, options)))
        cases += [_model_case(model, captured, text, machine, options, whole) for text, machine in machines.items()]
    return cases


def _model_case(
    model: str,
    captured: Callable[[], CapturedModel],
    text: str,
    machine: Cluster,
    options: CompareOptions,
    whole: bool,
) -> Case:
    """Returns the priced problem for planners, and the question of whole strategies for as many samples a step."""
    from rlplace.api import CLASSICAL
    from rlplace.explanation.compare import Case

    def ask() -> SearchProblem:
        costs, samples = costs_of(options, machine), captured().graph.samples
        pricing: dict[str, Any] = {"costs": costs, "host": options.host_mode}
        return question_of(captured(), machine, samples, space=None, fixed={}, planner=CLASSICAL, **pricing)

    return Case(model, text, lambda: price_model(captured(), machine, options).first, ask if whole else None)


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Report]:
    """Returns a bar on a terminal, one line a row elsewhere; always on stderr."""
    if not sys.stderr.isatty():

        def line(text: str, finished: bool) -> None:
            if not finished:
                say(text)

        yield line
        return
    from tqdm import tqdm

    with tqdm(total=total, file=sys.stderr, unit="row", leave=False, dynamic_ncols=True) as bar:

        def report(text: str, finished: bool) -> None:
            if finished:
                bar.update()
            else:
                bar.set_description_str(text[-60:])

        yield report


_BOUNDS = ("critical_path_s", "work_s", "largest_group_s", "memory_forced_s", "least_devices")


def print_comparison(comparison: Comparison) -> None:
    """Prints problems, rows and summaries."""
    from rlplace.explanation.compare.records import REFERENCE

    if not comparison.rows:
        print("no rows")
        return
    print_table(
        ["problem", "groups", "bound ms", "binds", "critical path", "work", "largest group", "memory", "least devices"],
        [_problem_cells(info) for info in comparison.problems],
    )
    print()
    print_table(
        ["problem", "planner", "step ms", "spread ms", "samples/s", "R x M", f"vs {REFERENCE}", "gap", "memory",
         "calls", "seconds", "<"],
        _row_cells(comparison.rows),
    )  # fmt: skip
    print_summaries(comparison, "all problems")


def print_summaries(comparison: Comparison, title: str) -> None:
    """Prints a line a planner and view, and what the numbers are."""
    from rlplace.explanation.compare.records import REFERENCE, VIEWS
    from rlplace.stats import TIE

    cells: dict[str, Callable[[Summary], str]] = {
        "planner": lambda it: it.planner,
        "feasible": lambda it: f"{it.feasible}/{it.problems}",
        f"vs {REFERENCE}": lambda it: _number(it.ratio, ".4f"),
        "95 % interval": lambda it: "-" if it.low is None else f"{it.low:.4f} to {it.high:.4f}",
        "wins": lambda it: str(it.wins),
        "ties": lambda it: str(it.ties),
        "losses": lambda it: str(it.losses),
        f"only {REFERENCE}": lambda it: str(it.only_reference),
        "only it": lambda it: str(it.only_it),
        "gap": lambda it: percent(it.gap),
        "calls": lambda it: f"{it.simulator_calls:.0f}",
        "seconds": lambda it: f"{it.seconds:.2f}",
    }
    for view in dict.fromkeys(summary.view for summary in comparison.summaries):
        print(f"\n{title}, {VIEWS[view]}")
        print_records([summary for summary in comparison.summaries if summary.view == view], cells)
    print(f"\n{legend(comparison, REFERENCE, TIE)}")


def legend(comparison: Comparison, reference: str, tie: float) -> str:
    """Explains the numbers of a table: executor, budget, reference and seeds."""
    from rlplace.explanation.compare.rows import STRATEGIES

    settings = comparison.settings
    budget = f"{settings.time_limit_s:g} s a plan"
    if settings.calls is not None:
        budget = f"{settings.calls} simulator calls after the floor for every search, {budget} for the others"
    used = {row.planner: row.random for row in comparison.rows}
    shuffled = [name for name, flag in used.items() if flag]
    rest = [name for name, flag in used.items() if not flag]
    lines = [
        f"executor list, simulated; every plan simulated anew; budget: {budget}",
        f"vs {reference}: step time over that of {reference} on the same problem, geometric mean over problems, below 1 is "
        f"faster; a tie is within {100 * tie:g} %",
        "gap: step time over the largest lower bound, minus 1; "
        "memory: largest share of a device's memory; calls: simulator calls, floor included",
    ]
    if set(used) & set(STRATEGIES):
        lines.append(
            f"{', '.join(name for name in used if name in STRATEGIES)}: whole strategies for as many samples a step, searched "
            "under the same budget and simulated block by block; the other planners place one pass of these samples; attention "
            "under a causal mask is priced as causal for all"
        )
    if shuffled:
        spread = "; spread is the largest minus the smallest" if settings.seeds > 1 else ""
        seeds = f"seeds 0 to {settings.seeds - 1}" if settings.seeds > 1 else "seed 0"
        lines.append(f"{seeds}: {', '.join(shuffled)}{spread}")
    if rest:
        lines.append(f"no seed, run once: {', '.join(rest)}")
    return "\n".join(lines)


def to_csv(comparison: Comparison) -> str:
    """Returns one line a row, with the bounds of its problem; empty where there is no value."""
    from msgspec.structs import asdict

    problems = {info.key: info for info in comparison.problems}
    stream, rows = io.StringIO(), []
    for row in comparison.rows:
        info = problems[row.model, row.cluster, row.view]
        data = {**asdict(row), "feasible": row.feasible, "fingerprint": info.fingerprint, "samples": info.samples}
        data |= {name: getattr(info, name) for name in _BOUNDS} | {"settings": canonical_json(asdict(comparison.settings))}
        rows.append(data)
    writer = csv.DictWriter(stream, list(rows[0]) if rows else [], lineterminator="\n")
    if rows:
        writer.writeheader()
        writer.writerows(rows)
    return stream.getvalue()


def place_of(model: str, cluster: str, view: str) -> str:
    """Returns a problem by name."""
    return model + (f" on {cluster}" if cluster else "") + ("" if view == "tasks" else f", {view}")


def _problem_cells(info: ProblemInfo) -> list[str]:
    parts = (info.critical_path_s, info.work_s, info.largest_group_s, info.memory_forced_s)
    bound, binding = info.bound
    least = "none fits" if info.least_devices is None else f"{info.least_devices} of {info.devices}"
    return [
        place_of(info.model, info.cluster, info.view), str(info.groups), ms(bound), binding,
        *(ms(part) for part in parts), least,
    ]  # fmt: skip


def _row_cells(rows: Sequence[ComparisonRow]) -> list[list[str]]:
    table, last = [], ""
    for row in rows:
        name = place_of(row.model, row.cluster, row.view)
        spread = "" if row.spread_s is None else ms(row.spread_s)
        counts = "-" if row.replicas is None else f"{row.replicas} x {row.microbatches}"
        note = row.reason or ""
        if row.status != "ok":
            partly = f", {row.feasible_seeds} of {row.seeds} seeds found a plan" if row.feasible_seeds else ""
            note = f"{row.status}{partly}: {note}"
        table.append([
            name if name != last else "", row.planner, ms(row.step_time_s), spread, _number(row.samples_per_s, ".2f"), counts,
            _number(row.ratio, ".4f"), percent(row.gap), percent(row.memory_share), f"{row.simulator_calls:.0f}",
            f"{row.seconds:.2f}", note if len(note) <= 100 else f"{note[:97]}...",
        ])  # fmt: skip
        last = name
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
