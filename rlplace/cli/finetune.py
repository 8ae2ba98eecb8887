"""``rlplace finetune``: learn from measured step times, live on a cluster or from a file."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlplace.cli.common import add_model_options, natural, positive, print_json, rate, say
from rlplace.errors import InputError

if TYPE_CHECKING:
    from rlplace.agents.checkpoint import Checkpoint
    from rlplace.agents.tuning.offline import Measurements
    from rlplace.comparing.closing import Skills

HELP = "learn from measured step times"
EXAMPLE = (
    "examples: torchrun --nproc-per-node 4 -m rlplace finetune hf:gpt2 --cluster c.toml --out mine; "
    "rlplace finetune --measurements finetune.sqlite --out mine"
)

_STORE = "finetune.sqlite"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="under torchrun: measure plans of this model; without it learn from a file"
    )
    parser.add_argument(
        "--measurements", nargs="+", metavar="FILE.sqlite",
        help=f"files to learn from; with a MODEL the one file that measurements go to and that is gone on with ({_STORE})",
    )  # fmt: skip
    parser.add_argument("--agent", default="default", metavar="NAME", help="what to fine-tune: a name or a folder (default)")
    parser.add_argument("--out", metavar="DIR", help="folder of the new agent")
    parser.add_argument("--seed", type=natural, default=0, metavar="N", help="seed (0)")
    learn = parser.add_argument_group("learning")
    learn.add_argument("--fit-steps", type=positive, default=600, metavar="N", help="steps of the fit (600)")
    learn.add_argument("--rehearse", type=natural, default=16, metavar="N", help="cases of the training stream kept alive (16)")
    learn.add_argument(
        "--skills", type=natural, default=0, metavar="N",
        help="compare the agent before and after on N cases of the test split, 72 for all (0)",
    )  # fmt: skip
    _add_live(parser)
    add_model_options(parser)


def _add_live(parser: argparse.ArgumentParser) -> None:
    live = parser.add_argument_group("with a MODEL, under torchrun")
    add = live.add_argument
    add("--cluster", metavar="C", help="the devices of the job, one process each")
    add("--plans", type=positive, default=60, metavar="N", help="most plans to measure (60)")
    add("--max-steps", type=positive, metavar="N", help="most steps to time (no limit)")
    add("--minutes", type=rate, metavar="M", help="most minutes of measuring (no limit)")
    add("--repeats", type=positive, default=5, metavar="N", help="timed steps of a plan that is not given up (5)")
    add("--calls", type=positive, default=2048, metavar="N", help="simulator calls of a proposal (2048)")
    add("--replay", nargs="?", const="", metavar="C", help="sleep instead of computing, as long as ops take on this cluster")
    add("--device", default="cpu", metavar="D", help="cpu (default) or cuda")
    add("--threads", type=positive, metavar="N", help="torch threads on a processor (torch's default)")
    add("--run", dest="run_name", metavar="NAME", help="name of the run, to go on with it (model and cluster)")
    add("--label", default="", metavar="TEXT", help="tells clusters apart that look alike")
    add("--best-plan", metavar="P.plan.json", help="where the fastest plan goes")
    add("--report", metavar="R.md", help="where the report goes")
    add("--timeout", type=rate, default=600.0, metavar="S", help="how long a rank may stand still while others wait (600)")


def run(options: argparse.Namespace) -> int:
    """Runs the verb."""
    if options.model:
        from rlplace.cli import finetune_live

        if options.measurements and len(options.measurements) > 1:
            raise InputError("finetune: with a MODEL, measurements go to one file")
        return finetune_live.run(options, (options.measurements or [_STORE])[0])
    if not options.measurements:
        raise InputError("finetune: name a MODEL to measure (under torchrun), or --measurements FILE to learn from")
    if options.cluster or options.replay is not None:
        raise InputError("finetune: --cluster and --replay go with a MODEL; the file knows its clusters")
    return _offline(options)


def _offline(options: argparse.Namespace) -> int:
    import torch

    from rlplace.agents.checkpoint import load_checkpoint
    from rlplace.agents.tuning.offline import measurements_of
    from rlplace.measured.store import TrialStore

    if not options.out:
        raise InputError("finetune: --out DIR names the folder of the new agent")
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(options.agent)
    check_new(options.out, options.agent)
    sets = []
    for path in options.measurements:
        with TrialStore(path, create=False) as store:
            sets += measurements_of(store)
    facts = teach(options, checkpoint, sets)
    if options.json:
        print_json({"agent": options.out, **facts})
    else:
        print_tuned(options.out, facts)
    return 0


def teach(options: argparse.Namespace, checkpoint: Checkpoint, sets: Sequence[Measurements]) -> dict[str, Any]:
    """Fine-tunes an agent on measurements, saves the new one and returns the facts of its card."""
    from rlplace.agents.card import save_tuned
    from rlplace.agents.tuning.offline import finetune_offline

    learned = finetune_offline(
        checkpoint, sets, steps=options.fit_steps, rehearse=options.rehearse, seed=options.seed,
        report=say,
    )  # fmt: skip
    facts = dict(learned.facts)
    skills = compare(checkpoint, dataclasses.replace(checkpoint, network=learned.network), options.skills)
    if skills is not None:
        facts["skills"] = dataclasses.asdict(skills)
    save_tuned(options.out, learned.network, checkpoint, learned=facts)
    say(f"saved the agent in {options.out}")
    return facts


def check_new(out: str, agent: str) -> None:
    """Refuses to write over what the agent comes from, or where nothing can be written."""
    from pathlib import Path

    from rlplace.files import check_folder

    check_folder(out)
    if Path(agent).is_dir() and Path(agent).resolve() == Path(out).resolve():
        raise InputError(f"finetune: {out} is the agent that is fine-tuned; give the new one another folder")


def compare(before: Checkpoint, after: Checkpoint, count: int) -> Skills | None:
    """The zero-shot table before and after on the first cases of the test split; None without cases."""
    if not count:
        return None
    from rlplace.agents.problems.splits import test_cases
    from rlplace.comparing.closing import compare_skills

    cases = test_cases(progress=say)
    step = max(1, len(cases) // count)
    chosen = cases[::step][:count]  # of all families
    say(f"placing {len(chosen)} cases of the test split before and after")

    def tell(done: int) -> None:
        if done % 12 == 0:
            say(f"{done}/{len(chosen)} cases")

    return compare_skills(before, after, chosen, progress=tell)


def print_tuned(out: str, facts: dict[str, Any]) -> None:
    """Prints what was learned."""
    print(f"learned from {facts['plans']} plans of {', '.join(facts['problems'])}")
    pairs = zip(facts["prediction_error_before"], facts["prediction_error_after"], strict=True)
    errors = ", ".join(f"{100 * before:.1f} % -> {100 * after:.1f} %" for before, after in pairs)
    print(f"error of predicted step times, before and after calibration: {errors}")
    skills = facts.get("skills")
    if skills and skills["cases"]:
        print(
            f"old skills, {skills['cases']} unseen cases at {skills['calls']} calls, step time over best: "
            f"{skills['before']:.4f} before, {skills['after']:.4f} after; {skills['worse']} worse and "
            f"{skills['better']} better by 1 %, worst {skills['worst']:.3f}"
        )
    print(f"use it with: rlplace place MODEL --cluster C --agent {out}")
