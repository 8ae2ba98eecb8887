"""What crosses between stages, and what no forward calls: gradients are those of the plain model."""

import pytest
import torch
from launch import run
from native_cases import stage
from torch import nn

from rlplace.plan.strategy import Strategy
from rlplace.runtime.native.run import prepare

SAMPLES, PLACES = 4, (("first",), ("norm", "second"), ("third",), ("head",))


class Relayed(nn.Module):
    """Hands on an encoder's output beside what is made of it, transposed; `spare` is never called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.third, self.head, self.spare = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 4)
        self.double()

    def forward(self, input):
        encoded = self.norm(self.first(input))
        turned = self.second(encoded).transpose(1, 2)
        return self.head(self.third(turned.transpose(1, 2)).tanh() + encoded)


def chain(schedule):
    stages = [stage(blocks, [number % 2], {}, 0) for number, blocks in enumerate(PLACES)]
    return Strategy.from_dict(
        {"batch": SAMPLES, "microbatch": [1], "microbatches": [SAMPLES], "schedule": schedule, "stages": stages}
    )


def square(output, part):
    return output.square().mean()


def batch():
    return {"input": torch.randn(SAMPLES, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


def in_a_pipeline(schedule):
    native = prepare(Relayed(), chain(schedule), {"input": batch()["input"][:1]})
    native.step(batch(), square)
    return {name: parameter.grad for name, parameter in native.named_parameters()}, sorted(native.state_dict())


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble"])
def test_what_is_handed_on_beside_what_is_made_of_it(schedule):
    plain = Relayed()
    square(plain(batch()["input"]), None).backward()
    found = run(2, in_a_pipeline, schedule)
    gradients = {name: gradient for own, _ in found for name, gradient in own.items()}
    assert {name for name, value in gradients.items() if value is None} == {"spare.weight", "spare.bias"}
    wanted = {name: value.grad for name, value in plain.named_parameters() if value.grad is not None}
    torch.testing.assert_close({name: gradients[name] for name in wanted}, wanted, rtol=1e-12, atol=1e-12)
    assert {name for _, names in found for name in names} == set(plain.state_dict())
