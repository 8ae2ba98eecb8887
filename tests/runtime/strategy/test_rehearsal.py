"""What a rehearsal finds is held against models whose treatment of samples is known by how they are written."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rlplace.plan.strategy import MEAN, SUM, TARGETS
from rlplace.runtime.strategy.rehearsal import MOST_FLOPS, rehearse


class Net(nn.Module):
    """Two products, and a loss that a test gives."""

    def __init__(self, loss, outputs=4):
        super().__init__()
        self.first, self.second, self.loss = nn.Linear(6, 8), nn.Linear(8, outputs), loss

    def forward(self, x, **others):
        return {"loss": self.loss(self.second(torch.tanh(self.first(x))), **others)}


def found(loss, outputs=4, **others):
    torch.manual_seed(0)
    return rehearse(Net(loss, outputs), {"x": torch.randn(8, 6), **others})


MASK = torch.tensor([[1.0] * (1 + i % 4) + [0.0] * (3 - i % 4) for i in range(8)])
CHANCE = (torch.arange(4) < torch.tensor([1, 2, 3, 1, 3, 1, 3, 2])[:, None]).float()
"""Two a sample in the mean of the first three rows, and of the last five."""

LABELS = torch.tensor([0, 1, 2, 3, -100, 1, 2, -100])


@pytest.mark.parametrize(
    ("loss", "others", "reduction"),
    [
        (lambda y: y.square().mean(), {}, MEAN),
        (lambda y: y.square().sum() / len(y), {}, MEAN),
        (lambda y: y.square().sum(), {}, SUM),
        (lambda y, labels: F.cross_entropy(y, labels), {"labels": torch.arange(8) % 4}, TARGETS),
        (lambda y, labels: F.cross_entropy(y, labels), {"labels": LABELS}, TARGETS),
        (lambda y, labels: F.cross_entropy(y, labels, torch.tensor([1.0, 2, 3, 4]).to(y)), {"labels": LABELS}, TARGETS),
        (lambda y, labels: F.nll_loss(y.log_softmax(-1), labels), {"labels": LABELS}, TARGETS),
        (lambda y, mask: (y.square() * mask).sum() / mask.sum(), {"mask": MASK}, "sum:mask"),
        (lambda y, mask: (y.square() * mask).sum() / mask.sum(), {"mask": CHANCE}, "sum:mask"),
        (lambda y, mask: (y.square() * mask)[:, 1:].sum() / mask[:, 1:].sum(), {"mask": MASK}, "sum:mask[1:]"),
        (lambda y, mask: (y.square() * mask).sum() / mask.sum(), {"mask": torch.ones(8, 4)}, "sum:mask"),
        (lambda y, mask: y.square().mean() + 0 * mask.sum(), {"mask": torch.ones(8, 4)}, MEAN),
        (lambda y, ids: (y.square() * (ids > 0)).sum() / (ids != 0).sum(), {"ids": (5 * MASK).long()}, "nonzero:ids"),
        (lambda y: (y @ y.T).square().mean(), {}, ""),
        (lambda y: (y - y.mean(0)).square().mean(), {}, ""),
        (lambda y: y.sort(0).values.diff(dim=0).square().mean(), {}, ""),
        (lambda y: y.square().mean().sqrt(), {}, ""),
        (lambda y, labels: F.cross_entropy(y, labels) + y.square().mean(), {"labels": LABELS}, ""),
    ],
)  # fmt: skip
def test_how_the_loss_of_a_batch_comes_from_those_of_its_parts(loss, others, reduction):
    assert found(loss, **others).reduction == reduction


def test_the_first_module_where_samples_meet_is_named():
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 1), nn.Flatten(0))
    conduct = rehearse(model, {"input": torch.randn(8, 4)}, lambda y: y.square().mean())
    assert conduct.couples and conduct.where == "1" and conduct.mixing == ("1", "2", "3") and not conduct.written


def test_norms_with_running_statistics_hide_neither_the_reduction_nor_other_couplings():
    class Classifier(nn.Sequential):
        def forward(self, input, labels):
            return F.cross_entropy(super().forward(input), labels)

    model = Classifier(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 6))
    conduct = rehearse(model, {"input": torch.randn(8, 4), "labels": torch.arange(8) % 6})
    assert conduct.reduction == "targets" and not conduct.written and not conduct.counters
    coupled = rehearse(nn.Sequential(*model), {"input": torch.randn(8, 4)}, lambda y: (y @ y.T).square().mean())
    assert coupled.couples and coupled.where == ""
    assert model[1].training and int(model[1].num_batches_tracked) == 0


class Writing(nn.Module):
    """Writes a counter, a mean of its samples, and a plain attribute."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))
        self.net, self.last = nn.Linear(4, 1), None

    def forward(self, x):
        self.steps += 1
        self.mean.lerp_(x.detach().mean(0), 0.1)
        self.last = x.detach().sum()
        return self.net(x).square().mean()


def test_writes_are_told_apart_by_whether_they_depend_on_samples():
    model = Writing()
    conduct = rehearse(model, {"x": torch.randn(8, 4)})
    assert (conduct.counters, conduct.written, conduct.kept) == (("steps",), ("mean", "last"), ("last",))
    assert model.steps == 0 and model.last is None and not model.mean.any()  # a copy ran


class Dropping(nn.Module):
    """Draws numbers in several ways, and is a mean over samples for any numbers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def forward(self, x):
        h = F.dropout(self.net(x), 0.5) + torch.randn_like(x) + torch.rand(x.shape)
        return (h * torch.bernoulli(torch.sigmoid(h.detach()))).square().mean()


def test_random_numbers_do_not_couple_samples():
    assert rehearse(Dropping(), {"x": torch.randn(8, 4)}).reduction == MEAN


class Toggling(nn.Module):
    """Does what a graph of the forward would lose."""

    def __init__(self):
        super().__init__()
        self.net, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        h = self.net(x)
        h.register_hook(lambda gradient: 2 * gradient)
        self.head.weight.requires_grad_(False)
        slope = torch.autograd.grad(h.sum(), self.net.weight, create_graph=True)[0]
        made = self.head(h).square().mean() + slope.square().mean()
        self.head.weight.requires_grad_(True)
        return made


def test_what_graphs_lose_is_noted():
    conduct = rehearse(Toggling(), {"x": torch.randn(8, 4)})
    assert conduct.toggles == ("head.weight",) and conduct.differentiates


def test_a_batch_that_cannot_be_divided():
    class Edges(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 4)

        def forward(self, x, edges):
            return self.net(x)[edges].square().mean()

    conduct = rehearse(Edges(), {"x": torch.randn(8, 4), "edges": torch.tensor([7, 0, 3])})
    assert "IndexError" in conduct.indivisible and "cannot be divided" in conduct.reason()


def test_sparse_gradients_are_named():
    model = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 1))
    conduct = rehearse(model, {"input": torch.randint(0, 10, (8, 2))}, lambda y: y.square().mean())
    assert conduct.sparse == ("0.weight",)


@pytest.mark.parametrize(
    ("model", "inputs", "options", "reason"),
    [
        (nn.Linear(2, 2).to("meta"), torch.zeros(4, 2), {}, "no values"),
        (nn.LazyLinear(2), torch.zeros(4, 2), {}, "no values"),
        (nn.Linear(2, 2), torch.zeros(1, 2), {}, "one sample"),
        (nn.Linear(2, 2), torch.zeros(4, 2), {"flops": 2 * MOST_FLOPS}, "GFLOP"),
        (nn.Linear(2, 2), torch.zeros(4, 3), {"loss": lambda y: y.mean()}, "RuntimeError"),
    ],
)
def test_what_is_not_rehearsed_says_why(model, inputs, options, reason):
    assert reason in rehearse(model, {"input": inputs}, **options).unseen
