"""What crosses between stages, what they share, and what no forward calls: gradients are those of the plain model."""

import copy

import pytest
import torch
from torch import nn

from rlplace.plan.strategy import Strategy
from rlplace.runtime.strategy.run import prepare
from tests.runtime.job.launch import run
from tests.runtime.strategy.native_cases import stage

SAMPLES, PLACES = 4, (("first",), ("norm", "gates", "second"), ("third",), ("mixed", "head"))
LOOP, TURN = (0, 1, 0, 1), (0, 1, 1, 0)
SCHEDULES = {"interleaved_1f1b": LOOP, "interleaved_zero_bubble": LOOP, "dualpipev": TURN}


class Gates(nn.Module):
    """Two products read one table, so that a split backward finds the table behind both."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.table = (nn.Parameter(torch.randn(4)) for _ in range(3))

    def forward(self, x):
        table = self.table.exp()
        return x * (table * self.left) + (x * (table * self.right)).tanh()


class Mixed(nn.Module):
    """Mixes tokens: the gradient of what it takes lies transposed."""

    def __init__(self):
        super().__init__()
        self.over = nn.Linear(3, 3)

    def forward(self, x):
        return self.over(x.mT.contiguous())


class Turned(nn.Linear):
    """Joins parts of its transposed weight, whose gradient then lies transposed in memory."""

    def forward(self, x):
        columns = self.weight.t()
        return x @ torch.cat([columns[:2], columns[2:]]) + self.bias


class Relayed(nn.Module):
    """Hands on an encoder's output beside what a norm, which saves it, makes of it.

    Two stages share a weight, and `spare` is never called.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.gates, self.second = nn.Linear(4, 4), nn.LayerNorm(4), Gates(), nn.LayerNorm(4)
        self.third, self.mixed, self.head, self.spare = Turned(4, 4), Mixed(), nn.Linear(3, 1), nn.Linear(4, 4)
        self.third.weight = self.first.weight
        self.double()

    def forward(self, input):
        encoded = self.gates(self.norm(self.first(input)))
        turned = self.second(encoded).transpose(1, 2)
        if not self.training:
            encoded = 3.0 * encoded
        return self.head(self.mixed(self.third(turned.transpose(1, 2)).tanh() + encoded))


def chain(schedule):
    stages = [stage(blocks, [device], {}, 0) for blocks, device in zip(PLACES, SCHEDULES[schedule], strict=True)]
    return Strategy.from_dict(
        {"batch": SAMPLES, "microbatch": [1], "microbatches": [SAMPLES], "schedule": schedule, "stages": stages}
    )


def square(output, part):
    return output.square().mean()


def batch(samples=SAMPLES, dtype=torch.float64):
    values = torch.randn(samples, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return {"input": values.to(dtype)}


def in_a_pipeline(schedule):
    """Gradients of a batch and, besides, of half of it; outputs in evaluation; names; what this process runs in its order."""
    native = prepare(Relayed(), chain(schedule), {"input": batch()["input"][:1]})
    native.step(batch(), square)
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in native.named_parameters()}
    for parameter in native.parameters():
        parameter.grad = None
    native.step(batch(SAMPLES // 2), square)  # too few for dualpipev, so zbv runs them
    fewer = {name: parameter.grad for name, parameter in native.named_parameters() if parameter.grad is not None}
    (ran, *_) = native.runner._schedules.values()
    actions = getattr(ran, "pipeline_order_with_comms", {}).get(torch.distributed.get_rank(), [])
    with torch.no_grad():
        evaluated = native.eval()(**batch())
    return gradients, fewer, evaluated, sorted(native.state_dict()), [str(action) for action in actions]


def plain(samples=SAMPLES):
    model = Relayed()
    square(model(batch(samples)["input"]), None).backward()
    every = model.named_parameters(remove_duplicate=False)
    return model, {name: value.grad for name, value in every if value.grad is not None}


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def joined(parts):
    return {name: value for part in parts for name, value in part.items()}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_handed_on_beside_what_is_made_of_it(schedule):
    found = run(2, in_a_pipeline, schedule, timeout_s=120)
    gradients, (model, wanted) = joined(own for own, *_ in found), plain()
    assert {name for name, value in gradients.items() if value is None} == {"spare.weight", "spare.bias"}
    assert gradients.keys() == {*wanted, "spare.weight", "spare.bias"}
    close({name: gradients[name] for name in wanted}, wanted)
    close(joined(fewer for _, fewer, *_ in found), plain(SAMPLES // 2)[1])
    for _, _, evaluated, _, _ in found:
        close(evaluated, model.eval()(batch()["input"]).detach())
    assert {name for *_, names, _ in found for name in names} == set(model.state_dict())
    if schedule == "dualpipev":
        for *_, actions in found:
            assert not any("OVERLAP" in action for action in actions)  # pairs, whose parts would send when both have run


def under_autocast():
    """Loss and gradients of a step under autocast, after one without."""
    native = prepare(Relayed().float(), chain("interleaved_1f1b"), {"input": batch(1, torch.float32)["input"]})
    native.step(batch(dtype=torch.float32), square)
    for parameter in native.parameters():
        parameter.grad = None
    with torch.autocast("cpu", torch.bfloat16):
        loss = native.step(batch(dtype=torch.float32), square)
    return loss, {name: parameter.grad for name, parameter in native.named_parameters() if parameter.grad is not None}


def test_autocast_after_a_step_without_it():
    model = Relayed().float()
    exact = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = square(model(batch(dtype=torch.float32)["input"]), None)
    loss.backward()
    found = run(2, under_autocast, timeout_s=120)
    assert abs(found[0][0] - loss) < 1e-2 * loss
    assert abs(found[0][0] - square(exact(batch(dtype=torch.float32)["input"]), None)) > 1e-6 * loss
    gradients = joined(own for _, own in found)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert (gradients[name] - parameter.grad).norm() < 3e-2 * parameter.grad.norm(), name
