"""``rlplace compare``: planners side by side, one row a planner and problem."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlplace.cli.compare_table import print_comparison, to_csv
from rlplace.cli.models import capture_model, check_agent, compile_first, costs_of, load_problem, microbatch, price_model
from rlplace.cli.options import ModelOptions, argument, flag, option, positive, seconds
from rlplace.cli.output import print_json, say
from rlplace.cli.place import question_of
from rlplace.errors import InputError

if TYPE_CHECKING:
    from rlplace.cluster.parse import Cluster
    from rlplace.explanation.compare import Case
    from rlplace.explanation.compare.run import Report
    from rlplace.planned import CapturedModel
    from rlplace.strategy.search.tries import SearchProblem

HELP = "compare planners on models and clusters"
EXAMPLE = (
    "example: rlplace compare hf:gpt2 zoo:inception --cluster a100-80g:4 --cluster v100:4,pcie --planners best,annealing,agent"
)
CLASSICAL = "single,round_robin,balanced,heft,m_etf,metis,best,annealing,local_search,agent"
KINDS = "strategies"
"""Name of the rows of whole strategies."""
ALL = "all"
DEFAULT = f"{KINDS},{CLASSICAL}"


@dataclass(frozen=True, kw_only=True)
class CompareOptions(ModelOptions):
    """Options of the verb."""

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


def run(options: CompareOptions) -> int:
    """Runs the verb."""
    from rlplace.explanation.compare import Settings, Store, compare, count_rows, gather
    from rlplace.explanation.compare.records import SPLIT
    from rlplace.explanation.compare.rows import STRATEGIES
    from rlplace.files import write_text

    names = _planners(options)
    if "agent" in names:
        check_agent(options.agent)
        compile_first()
    cases = _cases(options, whole=bool(set(names) & set(STRATEGIES)))
    settings = Settings(
        calls=options.calls,
        time_limit_s=options.time_limit,
        seeds=options.seeds,
        agent=options.agent,
    )
    store = Store(settings, options.out, resume=options.resume)
    if store.rows:
        say(f"{options.out}: {len(store.rows)} rows are there already")
    views = [SPLIT] if options.split else []
    interrupted, failures = False, []
    try:
        with _progress(count_rows(cases, names, views)) as report:
            failures = compare(cases, names, store, views=views, report=report, strict=options.debug)
    except KeyboardInterrupt:
        interrupted = True
    comparison = gather(store, cases, names, views)
    if options.csv:
        write_text(options.csv, to_csv(comparison))
    if options.json:
        print_json(comparison.to_dict())
    else:
        print_comparison(comparison)
    if interrupted:
        kept = f"{options.out} has them, --resume goes on" if options.out else "--out would have kept them for --resume"
        say(f"rlplace: interrupted after {len(comparison.rows)} rows; {kept}")
        return 130
    for case, error in failures:
        if options.debug:
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
            cases.append(_file_case(model, options))
            continue
        captured = functools.cache(functools.partial(capture_model, model, options, microbatch(model, options)))
        cases += [_model_case(model, captured, text, machine, options, whole) for text, machine in machines.items()]
    return cases


def _file_case(path: str, options: CompareOptions) -> Case:
    from rlplace.explanation.compare import Case

    problem = load_problem(path, options).first
    source = (problem.source or {}).get("cluster")
    return Case(path, source if isinstance(source, str) else "", lambda: problem)


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
