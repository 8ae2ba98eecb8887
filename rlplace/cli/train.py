"""``rlplace train``: train a placer and show how it compares."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlplace.cli.models import compile_first
from rlplace.cli.options import Options, natural, option, positive, print_json, say
from rlplace.errors import InputError, MissingError

if TYPE_CHECKING:
    from rlplace.agents.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """Options of the verb."""

    HELP = "train a placer"
    EXAMPLE = "example: rlplace train --out runs/mine"

    problems: list[str] | None = option(
        "all, zoo or synthetic (endless sets; default all, without transformers zoo), or *.problem.json files and folders; for "
        "Strategy-v0 and Cluster-v0 small, train (the default), val, test or branchy",
        None,
        "P",
        nargs="+",
    )
    cluster: str | None = option("price the set's models for this cluster instead of random ones", None, "C")
    cases: int | None = option("cases to pre-train on", positive, "N")
    fit_steps: int | None = option("steps of pre-training, 0 for none", natural, "N")
    steps: int | None = option("PPO decisions, 0 for none", natural, "N")
    policy: str | None = option("policy to train (perceptron); 'rlplace info' lists others", None, "NAME")
    environment: str | None = option("Placement-v0, Refinement-v0, Strategy-v0 or Cluster-v0 (that of the policy)", None, "ID")
    out: str | None = option("run folder (runs/agent)", None, "DIR")
    resume: str | None = option("continue the run in this folder", None, "DIR")
    processes: int | None = option("processes that price moves (one a core)", positive, "N")
    seed: int | None = option("seed (0)", natural, "N")
    device: str = option("torch device of the network (auto)", None, "D", default="auto")
    calls: int = option("simulator calls per search in the table (256)", positive, "N", default=256)
    test: list[str] | None = option("files and folders that the table is made on (validation cases)", None, "P", nargs="+")

    def run(self) -> int:
        """Runs the verb."""
        from rlplace.agents.problems import cases_of, closing_cases
        from rlplace.agents.train import train
        from rlplace.cli.compare import print_summaries
        from rlplace.envs.base import PLACEMENT, REFINEMENT
        from rlplace.explanation.compare.run import compare_agent
        from rlplace.files import check_folder

        _check_device(self.device)
        if self.resume and self.out and Path(self.out) != Path(self.resume):
            raise InputError("--resume continues in its own folder; leave --out out")
        out = Path(self.resume or self.out or "runs/agent")
        check_folder(out)
        config, problems = _config(self, out)
        compile_first()
        source = cases_of(problems, seed=config.seed, cluster=self.cluster, environment=config.environment)
        places = config.environment in (PLACEMENT, REFINEMENT)
        if self.test and not places:
            raise InputError(f"--test: policies of {config.environment} place nothing; leave it out")
        tests = cases_of(self.test) if self.test else None
        if tests is not None and tests.count is None:
            raise InputError(f"--test {tests.name}: has no end; name files or folders of *.problem.json")
        resume, bar = bool(self.resume), sys.stderr.isatty()
        done = train(source, config, out, resume=resume, progress_bar=bar, report=say)
        say(f"{done} decisions done, saved in {out}")
        if not places:
            if self.json:
                print_json({"out": str(out), "steps": done})
            return 0
        say("comparing on " + ("the given problems" if self.test else "cases of families that it was not trained on"))
        tested = list(tests) if tests is not None else closing_cases(progress=say)
        every, branchy = compare_agent(out, tested, calls=self.calls)
        if self.json:
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


def _config(options: TrainOptions, out: Path) -> tuple[TrainConfig, list[str]]:
    from rlplace.agents.checkpoint import read_config
    from rlplace.agents.config import TrainConfig

    names = ("cases", "fit_steps", "steps", "policy", "environment", "seed", "device", "processes")
    changes = {name: getattr(options, name) for name in names}
    if not options.resume:
        return TrainConfig.load(**changes), options.problems or []
    training = read_config(out)["training"]
    earlier = training.get("hyperparameters")
    if not isinstance(earlier, dict):
        raise InputError(f"{out / 'config.json'}: holds no hyperparameters to resume with")
    merged = {**earlier, **{key: value for key, value in changes.items() if value is not None}}
    return TrainConfig.load(**merged), options.problems or str(training.get("problem_set", "")).split()
