"""What a training loop may do with a distributed model, compared with the plain model; which calls are refused."""

import copy
import gc
import weakref
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import rlplace
from rlplace.errors import InputError
from rlplace.plan.plan import PlacementPlan
from rlplace.runtime.base.steps import check_inputs
from rlplace.runtime.job.distribute import distribute
from tests.runtime.equality import build, largest_difference, plan_of
from tests.runtime.job.launch import run


class Tied(nn.Module):
    """Embeddings that are the head as well, two layers, and a loss."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(24, 8)
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.second = nn.Linear(16, 8)
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("constant", torch.arange(7.0))

    def forward(self, tokens, labels=None):
        x = self.embed(tokens)
        x = x + self.second(self.norm(self.first(x)).relu())
        logits = self.head(x)
        output = {"logits": logits, "mask": tokens[0].ge(0), "constant": self.constant}
        if labels is not None:
            output = {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), **output}
        return output


def tied():
    torch.manual_seed(0)
    model = Tied()
    tokens = torch.randint(0, 24, (4, 5))
    return model.double(), {"tokens": tokens, "labels": tokens.flip(0)}


class Pair:
    """`Tied` distributed as `placed`, `plain` as it is, and `inputs` of a batch of 4."""

    def __init__(self, places, *, change=lambda model: None):
        self.plain, self.inputs = tied()
        change(self.plain)
        plan = plan_of(self.plain, self.inputs, places, deal="chain")
        self.placed = distribute(copy.deepcopy(self.plain), plan, self.inputs)

    def batch(self, samples=4):
        """Inputs of some samples, those of a batch over and over."""
        return {key: value[torch.arange(samples) % 4] for key, value in self.inputs.items()}

    def placed_loss(self, **inputs):
        return self.placed(**inputs)["loss"]

    def plain_step(self, inputs):
        """Backward of a batch."""
        loss = self.plain(**inputs)["loss"]
        loss.backward()
        return loss.item()

    def check_gradients(self, what, tolerance=1e-12):
        expected = dict(self.plain.named_parameters())
        for name, parameter in self.placed.named_parameters():
            theirs = expected[name].grad
            assert (parameter.grad is None) == (theirs is None), (what, name)
            assert largest_difference(parameter.grad, theirs) <= tolerance, (what, name)


def gradients(pair):
    """Accumulation, scaled losses, a loss that is dropped, gradients that are set to zero, regularisation, clipping."""
    pair.placed_loss(**pair.batch())  # its gradients are never asked for
    for samples, scale in ((4, 0.25), (3, 0.5), (1, 2.0)):
        (pair.placed_loss(**pair.batch(samples)) * scale).backward()
        for parameter in pair.plain.parameters():
            parameter.before = None if parameter.grad is None else parameter.grad.clone()
            parameter.grad = None
        pair.plain_step(pair.batch(samples))
        for parameter in pair.plain.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * scale + (0.0 if parameter.before is None else parameter.before)
        pair.check_gradients("accumulated")
    norm = pair.placed.clip_grad_norm_(1e9, norm_type=float("inf"))
    expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), 1e9, norm_type=float("inf"))
    assert torch.allclose(norm, expected.double(), rtol=1e-12)
    norm, expected = pair.placed.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1)
    assert torch.allclose(norm, expected.double(), rtol=1e-12)
    pair.check_gradients("clipped")
    pair.placed.zero_grad(set_to_none=False)
    pair.plain.zero_grad(set_to_none=False)
    loss = pair.placed_loss(**pair.batch())
    loss.backward()
    pair.plain_step(pair.batch())
    pair.check_gradients("after zeros")
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    pair.check_gradients("after a second backward")
    for parameter in pair.placed.parameters():
        if parameter.grad is not None:
            parameter.grad.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        pair.placed.clip_grad_norm_(1.0, error_if_nonfinite=True)
    pair.placed.zero_grad()
    pair.plain.zero_grad()


def evaluation(pair):
    """Outputs of the whole batch on every rank, in both modes."""
    for mode in (False, True):
        pair.placed.train(mode)
        pair.plain.train(mode)
        for samples in (4, 1):
            batch = pair.batch(samples)
            with torch.no_grad():
                found, expected = pair.placed(**batch), pair.plain(**batch)
                assert found.keys() == expected.keys()
                for key, value in expected.items():
                    assert found[key].shape == value.shape and largest_difference(found[key].double(), value.double()) < 1e-12
                found, expected = pair.placed(tokens=batch["tokens"]), pair.plain(tokens=batch["tokens"])
                assert found.keys() == expected.keys() and torch.allclose(found["logits"], expected["logits"], rtol=1e-12)
    pair.placed.eval()
    output = pair.placed(**pair.batch())  # eval mode without no_grad
    assert not output["loss"].requires_grad
    pair.placed.train()


def frozen(places):
    """Only the head and the norm are trained."""

    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("norm") or name.startswith("second"))

    pair = Pair(places, change=freeze)
    pair.placed_loss(**pair.batch()).backward()
    pair.plain_step(pair.batch())
    pair.check_gradients("frozen")


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def loss_outside():
    """The loss is given to `distribute`, by a plan that was captured with one, without an example target and with one."""
    torch.manual_seed(0)
    model, x, y = Scores(), torch.randn(8, 6), torch.randint(4, (8,))
    plan = rlplace.place(model, "cpu:2", planner="single", example_inputs=(x,), loss=lambda output: F.cross_entropy(output, y))
    moved = plan.device_of_group.copy()
    moved[len(moved) // 2 :] = 1
    total = partial(F.cross_entropy, reduction="sum")
    for loss, options in ((F.cross_entropy, {}), (total, {"example_target": y, "reduction": "sum"})):
        placed = distribute(copy.deepcopy(model), changed(plan, device_of_group=moved), loss=loss, **options)
        model.zero_grad()
        found, expected = placed(x, target=y), loss(model(x), y)
        found.backward(), expected.backward()
        torch.testing.assert_close(found, expected)
        assert len(list(placed.parameters())) == 2
        for name, parameter in placed.named_parameters():
            torch.testing.assert_close(parameter.grad, model.get_parameter(name).grad)
        placed.eval()
        with torch.no_grad():
            torch.testing.assert_close(placed(x), model(x))
            torch.testing.assert_close(placed(x, target=y), expected.detach())


class Paired(nn.Module):
    """Has an input of its own that is called as the target of a loss is."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, target):
        return ((self.second(self.first(x).relu()) - target) ** 2).mean()


def own_target():
    """The loss of `Paired`, distributed and not; a loss with a target of its own is refused."""
    torch.manual_seed(1)
    model, inputs = Paired(), {"x": torch.randn(4, 4), "target": torch.randn(4, 4)}
    plan = plan_of(model, inputs, 2, loss=lambda output: output, deal="chain", groups=2)
    placed = distribute(copy.deepcopy(model), plan, inputs, loss=lambda output: output)
    torch.testing.assert_close(placed(**inputs).detach(), model(**inputs).detach())
    with pytest.raises(InputError, match="an input of the model"):
        distribute(model, plan, inputs, loss=lambda output, wanted: output)


def changed(plan, **fields):
    return PlacementPlan(**{**vars(plan), **fields})


class ByRank(nn.Module):
    """A forward that may differ between processes."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.late = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x):
        x = self.up(x)
        return self.down(x.relu() if self.late else x).square().mean()


def refusals():
    """Messages that are the same on every rank, and two that depend on it."""
    model, inputs, _ = build("gpt2", double=False)
    plan, rank = plan_of(model, inputs, 2, deal=[0, 1, 0, 1, 0, 1]), dist.get_rank()
    wrong, _, _ = build("bert", double=False)
    found = []
    for refused, deal, options in (
        (model, [0, 1, 0, 1, 0, 1], {"share": "mine"}),
        (model, [0, 1, 2, 1, 0, 1], {}),
        (model, [0, 1, 0, 1, rank, 1], {}),
        (wrong, [0, 1, 0, 1, 0, 1], {}),
    ):
        with pytest.raises(InputError) as caught:
            distribute(refused, changed(plan, device_of_group=np.array(deal, dtype=np.int32)), inputs, **options)
        found.append(str(caught.value))
    uneven, x = ByRank(), {"x": torch.ones(2, 4)}
    of_one = plan_of(uneven, x, 2, deal="chain", groups=2)
    placed = distribute(copy.deepcopy(uneven), of_one, x)
    assert float(placed(**x).detach()) > 0
    with pytest.raises(InputError) as unlike:
        placed(x=torch.full((2, 4), float(rank)))
    uneven.late = rank == 1
    with pytest.raises(InputError) as caught:
        distribute(uneven, of_one, x)
    return found, str(unlike.value), str(caught.value)


def freed():
    model, inputs, _ = build("gpt2", double=False)
    plan, watched = plan_of(model, inputs, 2, deal="chain"), weakref.ref(model)
    total = sum(p.numel() for p in model.parameters())
    placed = distribute(model, plan, inputs)
    del model
    gc.collect()
    placed(**inputs).loss.backward()
    assert watched() is None and sum(p.numel() for p in placed.parameters()) < total


def everything(places):
    pair = Pair(places)
    gradients(pair)
    evaluation(pair)
    frozen(places)
    loss_outside()
    own_target()
    freed()
    return refusals()


@pytest.mark.slow
def test_two_devices():
    """Facts of a loop are checked in the processes; refusals here."""
    (first, unlike, other), (second, _, another) = run(2, everything, 2)
    assert first == second
    for text, part in zip(first, ("'mine'", "3 devices", "different plans", "another model"), strict=True):
        assert part in text and "\n" not in text, text
    assert "different batches" in unlike
    for text, rank, op in ((other, 0, "%linear_1 :"), (another, 1, "%relu :")):
        assert "ranks 0 and 1 traced different forwards" in text and f"(rank {rank} has there: {op}" in text, text


def test_nothing_runs_without_a_process_group():
    model, x = nn.Linear(2, 2), {"input": torch.ones(3, 2)}
    assert not dist.is_initialized()
    with pytest.raises(InputError, match="torchrun"):
        distribute(model, plan_of(model, x, 2, deal="chain", groups=1), x)


def test_inputs_that_require_a_gradient_are_refused():
    check_inputs((((torch.ones(2),), {"scale": 2.0}),))
    with pytest.raises(InputError, match="an input requires a gradient"):
        check_inputs((((), {"input": torch.ones(2, requires_grad=True)}),))
