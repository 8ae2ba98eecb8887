"""Gradients that are released: updates in the backward are those after it, and hardly any gradient is ever there."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rlplace
from rlplace.errors import InputError
from rlplace.plan.strategy import Strategy, uniform_words
from rlplace.runtime.base.optimizers import make_optimizer
from rlplace.runtime.export.script import export
from rlplace.runtime.job.distribute import parallelize
from rlplace.runtime.state.whole import local_part, whole_tensor
from rlplace.runtime.strategy.release import GradientRelease
from rlplace.runtime.strategy.why_not import why_not
from tests.runtime.equality import strategy_plan
from tests.runtime.job.launch import run
from tests.runtime.strategy import native_worker
from tests.runtime.strategy.native_cases import chain, flat

RELEASED = {"release_gradients": True}
CASES = {
    "one device": flat("short", {}, 0, devices=(0,), microbatch=8),
    "level 1": flat("short", {"shard": 2}, 1, devices=(0, 1), microbatch=4, recompute="full"),
    "level 3": flat("short", {"shard": 2}, 3, devices=(0, 1), microbatch=4),
    "tensor": flat("short", {"tensor": 2}, 0, devices=(0, 1), microbatch=8),
    "parameters without dimensions": flat("own", {"shard": 2}, 2, devices=(0, 1), microbatch=4),
    "level 2, copies": flat("short", {"replicate": 2, "shard": 2}, 2, microbatch=2),
    "tensor, level 3": flat("short", {"shard": 2, "tensor": 2}, 3, microbatch=4),
}
RUNS = [("adamw", "level 1"), ("sgd", "level 3"), ("lion", "tensor"), ("adamw", "parameters without dimensions")]
LONG = [("adamw", case) for case in list(CASES)[5:]]


def labels_of(batch):
    """Unequal shares of targets that are ignored."""
    return batch["input_ids"].masked_fill(torch.arange(native_worker.BATCH)[:, None] > torch.arange(native_worker.LENGTH), -100)


def plain_loss(model, batch):
    logits = model(**batch).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels_of(batch)[:, 1:].flatten())


def loss_of(output, labels):
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def trained(runs=RUNS):
    """By optimizer and case the largest difference of a parameter, and gradient bytes that a process held at once of all."""
    found = {}
    for name, case in runs:
        kind = "own" if case.startswith("parameters") else "short"
        plain, batch, most = native_worker.make(kind), native_worker.batch(kind), 0
        case_of = CASES[case] | RELEASED | {"reduction": "targets"}
        example = {key: value[: case_of["microbatch"][0]] for key, value in batch.items()}
        model = rlplace.distribute(copy.deepcopy(plain), strategy_plan(case_of), example, loss=loss_of)
        ours, theirs = (make_optimizer(name, one, 1e-3, exact=True) for one in (model, plain))
        rates = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (ours, theirs)]
        parameters = list(model.parameters())  # shares, for while a block runs its modules have whole parameters
        for parameter in parameters:
            for key, hook in list((parameter._post_accumulate_grad_hooks or {}).items()):

                def noted(parameter, hook=hook, parameters=parameters):
                    nonlocal most
                    most = max(most, sum(local_part(p.grad).nbytes for p in parameters if p.grad is not None))
                    hook(parameter)

                parameter._post_accumulate_grad_hooks[key] = noted
        known = {}
        for _ in range(3):
            model(**batch, target=labels_of(batch)).backward()
            plain_loss(plain, batch).backward()
            for path, parameter in plain.named_parameters(remove_duplicate=False):
                known[path] = known.get(path, True) & (parameter.grad.abs() > 1e-9)
            for one in (ours, theirs, *rates):
                one.step()
            plain.zero_grad()
            assert all(p.grad is None or not p.dim() for p in model.parameters())
            model.zero_grad()
        wanted = {path: p * known[path] for path, p in plain.named_parameters(remove_duplicate=False)}
        own = {path: whole_tensor(p.detach()) * known[path] for path, p in model.named_parameters()}
        share = most / sum(local_part(p).nbytes for p in parameters)
        found[name, case] = native_worker.difference(own, wanted), share
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "runs"), [(2, RUNS), pytest.param(4, LONG, marks=pytest.mark.long)])
def test_updates_in_the_backward_are_those_after_it(processes, runs):
    for found in run(processes, trained, runs):
        assert max(difference for difference, _ in found.values()) < 1e-8, found
        assert max(share for _, share in found.values()) < 0.5, {key: value[1] for key, value in found.items()}


def one_process():
    """What a loop of one process is told, by what it does."""
    batch = native_worker.batch("short")
    plan = strategy_plan(CASES["one device"] | RELEASED)

    def fresh(plan=plan, hooked=False):
        plain = native_worker.make("short")
        if hooked:
            plain.lm_head.weight.register_hook(lambda gradient: gradient)
        return rlplace.distribute(plain, plan, batch, loss=loss_of)

    def call(model):
        return model(**batch, target=labels_of(batch))

    def twice():
        model = fresh()
        make_optimizer("adamw", model, 1e-3)
        call(model).backward()
        call(model)

    def scaled():
        model = fresh()
        make_optimizer("sgd", model, 1e-3)
        (call(model) / 4).backward()

    def outside():
        model = fresh()
        make_optimizer("sgd", model, 1e-3)
        (call(model) + next(model.parameters()).square().sum()).backward()

    def second():
        make_optimizer("sgd", model := fresh(), 1e-3)
        make_optimizer("sgd", model, 1e-3)

    held = strategy_plan(CASES["one device"])
    doing = {
        "before the first step": lambda: call(fresh()),
        "cannot be added up over several batches": twice,
        "the loss is scaled by 0.25": scaled,
        "a loss outside of the model's own": outside,
        "there is one already": second,
        "wte.weight has hooks": lambda: fresh(hooked=True),
        "clip_grad_norm_: the norm of all gradients": lambda: fresh().clip_grad_norm_(1.0),
        "plan with --release-gradients": lambda: fresh(held).release_gradients(torch.optim.SGD([nn.Parameter(torch.ones(1))])),
        "parallelize: the plan releases gradients": lambda: parallelize(native_worker.make("short"), plan, batch),
    }
    told = {}
    for text, act in doing.items():
        try:
            act()
        except InputError as error:
            told[text] = str(error)
    return {text: text in told.get(text, "") for text in doing}, trained([("adamw", "one device")])


@pytest.mark.slow
def test_what_needs_all_gradients_is_refused():
    ((told, equal),) = run(1, one_process)
    assert all(told.values()), told
    assert equal["adamw", "one device"][0] < 1e-8


def test_strategies_that_release_none_are_refused():
    for case in CASES.values():
        assert why_not(Strategy.from_dict(case | RELEASED)) is None
    places = [(0,), (1,)]
    cases = {
        "buckets": flat("short", {"replicate": 4}, 0, microbatch=2),
        "microbatches=1": flat("short", {"shard": 4}, 2, microbatch=1),
        "pipeline=1": chain("short", places, "1f1b", mesh={}, sharding=0, microbatch=2),
        "host memory": flat("short", {"shard": 4}, 3, microbatch=2, offload="all"),
    }
    for text, case in cases.items():
        assert text in why_not(Strategy.from_dict(case | RELEASED)) and why_not(Strategy.from_dict(case)) is None
    plan = strategy_plan(CASES["level 3"] | RELEASED)
    assert Strategy.from_dict(plan.strategy.to_dict()) == plan.strategy and "released" in uniform_words(plan.strategy)
    with pytest.raises(InputError, match="export: the plan releases gradients"):
        export(plan, "script")
    with pytest.raises(InputError, match=r"call model.release_gradients"), GradientRelease().step():
        pass
