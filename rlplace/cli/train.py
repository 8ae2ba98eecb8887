"""``rlplace train``: train a placer and show how it compares."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rlplace.cli.common import compile_first, natural, positive, print_json, say
from rlplace.errors import InputError, MissingError

if TYPE_CHECKING:
    from rlplace.agents.config import TrainConfig

HELP = "train a placer"
EXAMPLE = "example: rlplace train --out runs/mine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "--problems",
        nargs="+",
        metavar="P",
        help="all, zoo or synthetic (endless sets; default all, without transformers zoo), or *.problem.json files and folders",
    )
    parser.add_argument("--cluster", metavar="C", help="price the set's models for this cluster instead of random ones")
    parser.add_argument("--cases", type=positive, metavar="N", help="cases to pre-train on")
    parser.add_argument("--fit-steps", type=natural, metavar="N", help="steps of pre-training, 0 for none")
    parser.add_argument("--steps", type=natural, metavar="N", help="PPO decisions, 0 for none")
    parser.add_argument("--policy", metavar="NAME", help="policy to train (perceptron); 'rlplace info' lists others")
    parser.add_argument("--out", metavar="DIR", help="run folder (runs/agent)")
    parser.add_argument("--resume", metavar="DIR", help="continue the run in this folder")
    parser.add_argument("--processes", type=positive, metavar="N", help="processes that price moves (one a core)")
    parser.add_argument("--seed", type=natural, metavar="N", help="seed (0)")
    parser.add_argument("--device", default="auto", metavar="D", help="torch device of the network (auto)")
    parser.add_argument(
        "--calls", type=positive, default=256, metavar="N", help="simulator calls per search in the table (256)"
    )
    parser.add_argument("--test", nargs="+", metavar="P", help="files and folders that the table is made on (validation cases)")


def run(options: argparse.Namespace) -> int:
    """Runs the verb."""
    from rlplace.agents.problems import cases_of, closing_cases
    from rlplace.agents.train import train
    from rlplace.cli.compare_table import print_summaries
    from rlplace.explanation.compare.closing import compare_agent
    from rlplace.files import check_folder

    _check_device(options.device)
    if options.resume and options.out and Path(options.out) != Path(options.resume):
        raise InputError("--resume continues in its own folder; leave --out out")
    out = Path(options.resume or options.out or "runs/agent")
    check_folder(out)
    config, problems = _config(options, out)
    compile_first()
    source = cases_of(problems, seed=config.seed, cluster=options.cluster)
    tests = cases_of(options.test) if options.test else None
    if tests is not None and tests.count is None:
        raise InputError(f"--test {tests.name}: has no end; name files or folders of *.problem.json")
    resume, bar = bool(options.resume), sys.stderr.isatty()
    done = train(source, config, out, resume=resume, progress_bar=bar, report=say)
    say(f"{done} decisions done, saved in {out}")
    say("comparing on " + ("the given problems" if options.test else "cases of families that it was not trained on"))
    tested = list(tests) if tests is not None else closing_cases(progress=say)
    every, branchy = compare_agent(out, tested, calls=options.calls)
    if options.json:
        print_json({"out": str(out), "steps": done, **every.to_dict(), "branchy": branchy.to_dict()["summaries"]})
    else:
        print_summaries(every, f"{len(tested)} cases")
        print_summaries(branchy, "branchy cases alone")
        print(f"\nplace a model with it: rlplace place hf:gpt2 --cluster a100-80g:4 --agent {out}")
    return 0


def _check_device(name: str) -> None:
    import torch

    if name == "auto":
        return
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [""])[0][:120]
        kind = name.partition(":")[0]
        if kind in ("cuda", "mps", "xpu"):
            raise MissingError(f"--device {name}: not usable on this machine: {reason}") from None
        raise InputError(f"--device {name}: is not a torch device; for example auto, cpu or cuda") from None


def _config(options: argparse.Namespace, out: Path) -> tuple[TrainConfig, list[str]]:
    from rlplace.agents.checkpoint import read_config
    from rlplace.agents.config import TrainConfig

    names = ("cases", "fit_steps", "steps", "policy", "seed", "device", "processes")
    changes = {name: getattr(options, name) for name in names}
    if not options.resume:
        return TrainConfig.load(**changes), options.problems or []
    training = read_config(out)["training"]
    earlier = training.get("hyperparameters")
    if not isinstance(earlier, dict):
        raise InputError(f"{out / 'config.json'}: holds no hyperparameters to resume with")
    merged = {**earlier, **{key: value for key, value in changes.items() if value is not None}}
    return TrainConfig.load(**merged), options.problems or str(training.get("problem_set", "")).split()
