"""Parts of a step put together again are the step of the whole batch: counts, buffers, hooks of parameters, gathered losses."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from rlplace.errors import InputError
from rlplace.model.capture.capture import capture as capture_step
from rlplace.plan.strategy import MEAN, TARGETS, Strategy
from rlplace.runtime.base.batches import COUNT, Pass, Targets, count_of, counting_alone
from rlplace.runtime.state.whole import ParameterHooks
from rlplace.runtime.strategy.blocks import reads
from rlplace.runtime.strategy.buffers import StepBuffers
from rlplace.runtime.strategy.capture import capture
from rlplace.runtime.strategy.fact_records import Conduct, ModelFacts
from rlplace.runtime.strategy.facts import conduct_of_graph, facts_of
from rlplace.runtime.strategy.gather import split_forward
from rlplace.runtime.strategy.notes import notes_of
from tests.runtime import small_models

CPU = torch.device("cpu")


class Towers(nn.Module):
    """Two encoders and a contrastive loss with a scale, as CLIP has it."""

    def __init__(self):
        super().__init__()
        self.left = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])
        self.right, self.scale = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8)), nn.Parameter(torch.tensor(1.0))

    def forward(self, x, ids):
        for layer in self.left:
            x = torch.tanh(layer(x))
        left, right = F.normalize(x, dim=-1), F.normalize(self.right(ids).mean(1), dim=-1)
        logits = self.scale.exp() * left @ right.T
        positions = torch.arange(len(logits))
        return {"loss": (F.cross_entropy(logits, positions) + F.cross_entropy(logits.T, positions)) / 2, "logits": logits}


def towers(samples=6):
    torch.manual_seed(0)
    return Towers(), {"x": torch.randn(samples, 6), "ids": torch.randint(0, 9, (samples, 3))}


def test_a_forward_in_two_parts_is_the_forward_of_the_whole_batch():
    """Concatenation stands for the gather: loss and gradients of the whole batch are those of torch's autograd."""
    model, inputs = towers()
    plain = copy.deepcopy(model)
    own = {name: value[:2] for name, value in inputs.items()}
    split = split_forward(model, own, 3, mixing=(), device=CPU)
    leaves = [pytree.tree_leaves({name: value[2 * n : 2 * n + 2] for name, value in inputs.items()}) for n in range(3)]
    parts = [split.own(*(of[at] for at in split.own_inputs)) for of in leaves]
    met = [torch.cat(values) for values in zip(*parts, strict=True)]
    assert len(met) == 2 and all(value.shape == (6, 8) for value in met)  # embeddings travel, nothing larger
    output = pytree.tree_unflatten(list(split.rest(*met, *(leaves[0][at] for at in split.rest_inputs))), split.out_spec)
    output["loss"].backward()
    expected = plain(**inputs)
    expected["loss"].backward()
    torch.testing.assert_close(output, expected)
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=name)


def test_a_loss_without_a_meeting_is_not_gathered():
    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(6, 2)

        def forward(self, x):
            return self.net(x)

    with pytest.raises(InputError, match="no result of the forward depends on several samples"):
        split_forward(Apart(), {"x": torch.randn(2, 6)}, 2, mixing=(), device=CPU)


def test_cross_entropies_count_their_targets():
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, -100, 3, -100, 2])
    weight = torch.tensor([1.0, 2, 4, 8])
    with Targets() as targets:
        F.cross_entropy(logits, labels)
    assert targets.count == 4
    with Targets() as targets:
        F.cross_entropy(logits, labels, weight)
    assert targets.count == 1 + 2 + 8 + 4
    with Targets() as targets:
        assert float(F.cross_entropy(logits, torch.full((6,), -100))) == 0.0  # torch's mean of nothing is not a number
    assert targets.count == 0
    with Targets() as targets:
        F.cross_entropy(logits, labels, reduction="sum")
    assert targets.count == 0 and not targets.met


def test_a_loss_of_the_output_counts_alone_where_it_is_a_mean_over_targets():
    logits, labels = torch.randn(6, 4), torch.tensor([0, 1, -100, 3, -100, 2])
    with Targets() as targets:
        F.cross_entropy(logits, labels)
        with counting_alone(targets):
            logits.sum()
        assert targets.count == 4
        with counting_alone(targets):
            F.cross_entropy(logits[:1], labels[:1])
        assert targets.count == 1
    one = Pass({}, {}, 1.0, 6, by_targets=True)
    assert float(one.counted(targets, CPU, trains=True)) == 1.0
    with one.counting() as none, pytest.raises(InputError, match=r"the mean of none; say what it .*reduction='mean'"):
        one.counted(none, CPU, trains=True)


@pytest.mark.parametrize(("name", "divided"), [("gpt2", True), ("bert", False)])  # the latter takes it and ignores it
def test_whether_a_loss_divides_by_a_number_is_seen_on_fake_tensors(name, divided):
    model, inputs, _ = small_models.MODELS[name]()
    assert reads(model.to("meta"), inputs, COUNT) == divided


WAYS = {"sum:mask": 4, "sum:mask[1:]": 2, "sum:mask[:-1]": 3, "valid:labels": 3, "nonzero:labels": 5, "valid:labels[1:]": 1}


@pytest.mark.parametrize("way", WAYS)
def test_inputs_are_counted_by_name(way):
    labels = torch.tensor([[1, 0, -100], [3, -100, -100]])
    batch = {"mask": torch.tensor([[1.0, 1, 0], [1, 0, 1]]), "labels": labels}
    assert count_of(way, batch) == WAYS[way]
    with pytest.raises(InputError, match="counts an input 'mask'"):
        count_of("sum:mask", {"x": torch.ones(2)})


class Steps(nn.Module):
    def __init__(self, by_samples):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.by_samples = by_samples

    def forward(self, x):
        self.steps += x.sum() if self.by_samples else 1
        return x * self.steps


def passes(model, buffers, values):
    buffers.begin()
    seen = []
    for value in values:
        buffers.begin_pass()
        seen.append(float(model(torch.tensor(value))))
        buffers.end_pass()
    buffers.end()
    return seen


def test_a_counter_counts_steps_and_not_micro_batches():
    model = Steps(by_samples=False)
    held, buffers = model.steps, StepBuffers([model], by_replica=False)
    assert passes(model, buffers, [2.0, 3.0, 4.0]) == [2.0, 3.0, 4.0]  # every pass is that of step 1
    assert passes(model, buffers, [2.0, 3.0]) == [4.0, 6.0]
    assert model.steps is held and float(held) == 2.0


def test_a_buffer_written_by_samples_is_refused_unless_every_pass_may_write_its_own():
    model = Steps(by_samples=True)
    with pytest.raises(InputError, match="the buffer steps by the samples"):
        passes(model, StepBuffers([model], by_replica=False), [2.0, 3.0])
    model = Steps(by_samples=True)
    passes(model, StepBuffers([model], by_replica=True), [2.0, 3.0])
    assert float(model.steps) == 5.0


def test_hooks_of_parameters_see_the_whole_gradient_once():
    model, called = nn.Linear(2, 1, bias=False), []
    model.weight.register_hook(lambda gradient: gradient.clamp(max=1.0))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: called.append(parameter.grad.clone()))
    hooks = ParameterHooks(model)
    for scale in (1.0, 2.0):  # parts of a step
        (scale * model(torch.ones(2))).sum().backward()
    assert not called and model.weight.grad.tolist() == [[3.0, 3.0]]
    hooks.run(dict(model.named_parameters()))
    hooks.run_after("weight", model.weight)
    assert model.weight.grad.tolist() == [[1.0, 1.0]] and len(called) == 1


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        with torch.no_grad():
            x = x + self.layers[0](x)
        return self.layers[2](self.layers[1](x)).square().mean()


def test_a_record_runs_hooks_once_and_keeps_regions_without_gradients():
    torch.manual_seed(0)
    model, x = Hooked(), torch.randn(2, 4)
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: 3 * output)
    captured = capture(model, {"x": x})
    captured.module.recompile()
    made = captured.module(x=x)
    torch.testing.assert_close(made, model(x))
    made.backward()
    assert model.layers[0].weight.grad is None
    expected = torch.autograd.grad(model(x), model.layers[1].weight)[0]
    torch.testing.assert_close(model.layers[1].weight.grad, expected)


def strategy(**changes):
    base = {"batch": 16, "stages": [{"blocks": ["a"], "devices": [0, 1], "mesh": {"replicate": 2}}], "microbatch": [8]}
    return Strategy.from_dict({**base, **changes})


def test_what_the_loss_is_computed_over_stands_in_files():
    plain = strategy()
    assert set(plain.to_dict()) == {"batch", "stages", "microbatch", "microbatches"}
    full = strategy(reduction="sum:mask", couple="gather", mixing=["norm"], buffers="replica")
    assert Strategy.from_dict(full.to_dict()) == full and full.mixing == ("norm",)
    with pytest.raises(InputError, match="couple"):
        strategy(couple="always")


COUPLED = Conduct(reduction="", samples=8, whole=3.0, parts=2.0)


@pytest.mark.parametrize(
    ("changes", "facts", "note"),
    [
        ({}, {"conduct": COUPLED}, "computed over 8 a replica (of 8 example"),
        ({"couple": "gather"}, {"conduct": COUPLED}, "over all 16 of a step"),
        ({}, {"conduct": COUPLED, "batch_norm": True}, "statistics of 8 a replica, as DDP does"),
        ({"batch": 32, "microbatches": [2]}, {"conduct": COUPLED}, "over 8 a micro-batch"),
        ({}, {"conduct": Conduct(reduction=TARGETS)}, "count by their targets"),
        ({}, {}, None),
        ({"batch": 8, "stages": [{"blocks": ["a"], "devices": [0]}]}, {"conduct": COUPLED}, None),
    ],
)
def test_the_answer_says_what_a_coupled_loss_is_computed_over(changes, facts, note):
    notes = [*notes_of(strategy(**changes), ModelFacts(**facts))]
    assert not notes if note is None else note in notes[0]


def test_rules_about_ops_find_where_samples_meet():
    model, inputs = towers()
    assert conduct_of_graph(capture_step(model, inputs), "why").couples
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    of_norm = conduct_of_graph(capture_step(norm, (torch.randn(6, 4),), loss=lambda y: y.square().mean()), "why")
    assert not of_norm.couples  # which facts say by themselves
    labelled = {"x": torch.randn(6, 4), "labels": torch.arange(6)}
    ways = [(lambda y, loss: loss, TARGETS), (lambda y, loss: 2 * loss + 0.01 * y.square().mean(), TARGETS)]
    for of_loss, reduction in [*ways, (lambda y, loss: loss.exp(), MEAN)]:
        by_targets = conduct_of_graph(capture_step(Labelled(of_loss), labelled), "why")
        assert by_targets.reduction == reduction and by_targets.unseen == "why"


class Labelled(nn.Module):
    def __init__(self, of_loss):
        super().__init__()
        self.net, self.of_loss = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 6)), of_loss

    def forward(self, x, labels):
        y = self.net(x)
        return {"loss": self.of_loss(y, F.cross_entropy(y, labels))}


def test_facts_say_that_quantized_weights_are_not_trained():
    class Other(torch.Tensor):
        """A subclass, as quantized weights are."""

    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.randn(4, 4).as_subclass(Other))
    facts = facts_of(model, {"input": torch.randn(2, 4)}, lambda y: y.mean())
    assert facts.subclass is not None and facts.subclass.startswith("weight") and facts.conduct.unseen
