"""What runs in the processes of the tests: an exported script, and its plan by rlplace on the same batches."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from unittest import mock

import torch

import rlplace
from rlplace.plan.plan import PlacementPlan

STEPS = 3


def load(path):
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script_losses(script):
    """What `main` prints; the process group is there already."""
    printed = io.StringIO()
    with (
        mock.patch.object(script.dist, "init_process_group"),
        mock.patch.object(script.dist, "destroy_process_group"),
        mock.patch.object(script.sys, "argv", ["script", str(STEPS)]),
        contextlib.redirect_stdout(printed),
    ):
        script.main()
    return [float(text) for text in re.findall(r"loss (\S+)", printed.getvalue())]


def losses_of(path):
    """Of a script alone."""
    return script_losses(load(path))


def plan_losses(script, plan):
    strategy = PlacementPlan.load(plan)
    size = strategy.strategy.pipelines[0].microbatch[0]
    inputs = {name: value[:size] for name, value in script.whole_batch(0).items()}
    model = rlplace.distribute(script.build_model(), strategy, inputs, loss=getattr(script, "loss_of", None))
    optimizer = torch.optim.SGD(model.parameter_groups(), lr=script.LR)
    losses = []
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=strategy.source["graph"].get("autocast") == "bf16"):
            output = model(**script.whole_batch(step))
        loss = getattr(output, "loss", output)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare(paths):
    scripts = {name: load(script) for name, (script, _) in paths.items()}
    return {name: (script_losses(scripts[name]), plan_losses(scripts[name], plan)) for name, (_, plan) in paths.items()}
