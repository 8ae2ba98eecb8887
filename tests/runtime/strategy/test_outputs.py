"""Models that return anything: tuples, lists, dataclasses, dictionaries of losses, objects; and models that hold generators."""

import dataclasses
import types
from typing import Any

import pytest
import torch
from torch import nn

import rlplace
from rlplace.errors import InputError
from rlplace.model.capture.capture import capture
from rlplace.plan.strategy import Strategy
from rlplace.runtime.strategy.facts import facts_of
from rlplace.runtime.strategy.run import prepare
from tests.runtime.job.launch import run
from tests.runtime.strategy.native_cases import stage

BATCH = 8


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor
    name: str = "result"


class Returning(nn.Module):
    """Returns its loss and its logits in one of several kinds of output; its noise has no effect."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.generator = kind, torch.Generator().manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, labels):
        if self.kind == "generator":
            x = x + 0 * torch.randn(x.shape, generator=self.generator)
        for layer in self.layers:
            x = layer(x).tanh()
        return MAKERS[self.kind](nn.functional.cross_entropy(x, labels), x)


MAKERS: dict[str, Any] = {
    "tuple": lambda loss, logits: (loss, logits),
    "list": lambda loss, logits: [loss, {"logits": logits, "name": "list"}],
    "dataclass": lambda loss, logits: Result(loss, logits),
    "dataclass inside": lambda loss, logits: {"loss": loss, "all": Result(logits.mean(), logits)},
    "losses": lambda loss, logits: {"class": loss, "box": logits.square().mean()},
    "object": lambda loss, logits: types.SimpleNamespace(loss=loss, logits=logits),
    "generator": lambda loss, logits: loss,
}
LOSSES: dict[str, Any] = {
    "tuple": lambda output: output[0],
    "list": lambda output: output[0],
    "dataclass": lambda output: output.loss,
    "dataclass inside": lambda output: output["loss"],
    "losses": lambda output: sum(output.values()),
    "object": lambda output: output.loss,
    "generator": lambda output: output,
}
"""The loss of an output, as a training loop reads it."""


def inputs(samples=BATCH):
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(samples, 4, generator=generator), "labels": torch.arange(samples) % 4}


def replicas(sharding):
    mesh = {"shard": 2} if sharding else {"replicate": 2}
    parts = {"batch": BATCH, "microbatch": [2], "microbatches": [2]}
    return Strategy.from_dict(parts | {"stages": [stage([f"layers.{n}" for n in range(4)], (0, 1), mesh, sharding)]})


def stages():
    halves = [stage([f"layers.{n}", f"layers.{n + 1}"], (n // 2,), {}, 0) for n in (0, 2)]
    return Strategy.from_dict({"batch": BATCH, "microbatch": [4], "microbatches": [2], "schedule": "gpipe", "stages": halves})


STRATEGIES = {"replicas": replicas(0), "shares": replicas(3), "stages": stages()}


def trained(kinds, strategy):
    """Trains a step by a user's loop and evaluates; returns loss, gradients by name and logits."""
    found = []
    for kind in kinds:
        samples = strategy.pipelines[0].microbatch[0]
        model = prepare(Returning(kind), strategy, inputs(samples))
        output = model(**inputs())
        LOSSES[kind](output).backward()
        loss = float(LOSSES[kind](output))
        own = {name: whole(p.grad) for name, p in model.named_parameters()}
        with torch.no_grad():
            evaluated = model.eval()(**inputs()) if kind != "object" else None
        found.append((type(output).__name__, loss, own, logits_of(kind, evaluated)))
    return found


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def logits_of(kind, output):
    if output is None or kind in ("generator", "losses"):
        return None
    return {"tuple": lambda: output[1], "list": lambda: output[1]["logits"], "dataclass": lambda: output.logits}.get(
        kind, lambda: output["all"].logits
    )()


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_training_loop_finds_its_loss_in_every_kind_of_output(name):
    kinds = [kind for kind in MAKERS if name != "stages" or kind != "object"]
    for own in run(2, trained, kinds, STRATEGIES[name]):
        for kind, (output, loss, gradients, logits) in zip(kinds, own, strict=True):
            plain = Returning(kind)
            made = plain(**inputs())
            wanted = LOSSES[kind](made)
            wanted.backward()
            assert output == type(made).__name__, kind
            assert loss == pytest.approx(float(wanted), rel=1e-6), kind
            for parameter, gradient in gradients.items():
                torch.testing.assert_close(gradient, plain.get_parameter(parameter).grad, msg=f"{kind} {parameter}")
            if logits is not None:
                torch.testing.assert_close(logits, logits_of(kind, made))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKERS)
def test_every_kind_of_output_is_captured_and_examined(kind):
    graph = capture(Returning(kind), inputs())
    assert graph.capture["method"] == ("dispatch" if kind == "object" else "export"), graph.capture["notes"]
    facts = facts_of(Returning(kind), inputs())
    assert (facts.no_cut is None) == (kind != "object")
    assert facts.conduct.unseen is None


def evaluated_in_parts(strategy):
    model = prepare(Returning("object"), strategy, inputs(2)).eval()
    with torch.no_grad(), pytest.raises(InputError, match="SimpleNamespace"):
        model(**inputs())


def test_objects_whose_parts_cannot_be_joined_are_refused():
    run(2, evaluated_in_parts, STRATEGIES["replicas"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tuple", "dataclass", "losses"])
def test_placements_train_them_too(kind):
    plan = rlplace.place(Returning(kind), "cpu:2", example_inputs=inputs(), space="placement", planner="round_robin")
    model = rlplace.apply(Returning(kind), plan, ["cpu", "cpu"], example_inputs=inputs())
    plain = Returning(kind)
    for one in (model, plain):
        LOSSES[kind](one(**inputs())).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)
