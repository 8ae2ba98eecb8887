"""Training loops over what `rlplace.distribute` makes of a plan, beside the same loop over the model itself."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import rlplace
from rlplace.plan.strategy import MEAN, TARGETS
from rlplace.runtime.base import activity
from rlplace.runtime.state.whole import local_part, whole_tensor
from rlplace.runtime.strategy.why_not import minor_version
from tests.runtime import equality
from tests.runtime.job.launch import run
from tests.runtime.strategy import native_worker
from tests.runtime.strategy.native_cases import chain, flat

pytest.importorskip("transformers")

HALVES = [(0, 1), (2, 3)]
CASES = {
    "copies": flat("short", {"replicate": 4}, 0),
    "shared": flat("short", {"replicate": 2, "shard": 2}, 3),
    "shared once": flat("short", {"shard": 4}, 1),
    "tensor": flat("short", {"replicate": 2, "tensor": 2}, 0),
    "chain": chain("short", HALVES, "1f1b", mesh={"shard": 2}, sharding=1),
    "unlike": chain("gpt2", [(0,), (1, 2), (3,)], "1f1b", mesh=[{}, {"shard": 2}, {}], sharding=[0, 1, 0]),
    "v": chain("gpt2", [*HALVES, *reversed(HALVES)], "zbv", mesh={"replicate": 2}, sharding=0),
}

MIXED, CAST = ("copies", "tensor", "chain", "v"), ("shared", "shared once", "tensor", "unlike")
if minor_version(torch.__version__) < (2, 13):  # refused before
    del CASES["v"]

PLACEMENT = "placement"
"""Of ops in a row, on four processes."""


def plain_of(case):
    return native_worker.make("gpt2" if case in ("unlike", "v") else "short")


def distributed(case, plain, **options):
    """The model by the plan of a case."""
    if case == PLACEMENT:
        inputs = batch(8)
        plan = equality.plan_of(plain, inputs, 4, deal="chain", groups=8)
    else:
        inputs, plan = batch(CASES[case]["microbatch"][0]), equality.strategy_plan(CASES[case] | {"reduction": TARGETS})
    return rlplace.distribute(copy.deepcopy(plain), plan, inputs, **options)


def batch(samples):
    """Labels end at very different places, so that samples, micro-batches, replicas and batches have unlike numbers of them."""
    ids = torch.randint(
        0, native_worker.VOCABULARY, (samples, native_worker.LENGTH), generator=torch.Generator().manual_seed(samples)
    )
    labels = ids.flip(1)
    for row in range(samples):
        labels[row, 1 + 3 * row % 7 :] = -100  # none in the first sample, whose label has no input before it
    return {"input_ids": ids, "labels": labels}


def gradients(model, plain, factor=1.0):
    wanted = dict(plain.named_parameters(remove_duplicate=False))
    own = {name: whole_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert own
    return native_worker.difference(own, {name: p.grad for name, p in wanted.items()}, factor)


def loop(case, folder):
    """What differs, by what was done; the model's own loss is in single precision."""
    plain = plain_of(case)
    model = distributed(case, plain)
    assert model.report == ("joint_graph" if case == PLACEMENT else "native") and model.config is not None
    # a large epsilon: what is rounding of a gradient must not become a step of full size
    ours, theirs = (torch.optim.AdamW(p, lr=1e-2, eps=1e-3) for p in (model.parameter_groups(), plain.parameters()))
    found = {}
    # "v" and "unlike" refuse an odd number of samples a replica
    for step, samples in enumerate((8, 8, 4) if case in ("v", "unlike") else (8, 6, 4)):
        for _ in range(2):  # gradients of two batches, each loss halved
            output, expected = model(**batch(samples)), plain(**batch(samples))
            assert output.logits is None
            (output.loss / 2).backward()
            (expected.loss / 2).backward()
            found[f"loss {step}"] = abs(output.loss.item() - expected.loss.item())
        found[f"gradient {step}"] = gradients(model, plain)
        for kind in (float("inf"), 2.0):
            norm, wanted = model.clip_grad_norm_(0.5, kind), torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, kind)
            found[f"norm {kind} {step}"] = abs(norm.item() - wanted.item())
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    model.eval()
    plain.eval()
    for samples in (8, 4 if case == "unlike" else 5):
        with torch.no_grad():
            output, expected = model(**batch(samples)), plain(**batch(samples))
        found[f"outputs of {samples}"] = (output.logits - expected.logits).abs().max().item()
        found[f"loss of {samples}"] = abs(output.loss.item() - expected.loss.item())
        with torch.no_grad():
            unlabelled = model(input_ids=batch(samples)["input_ids"])
        found[f"no loss of {samples}"] = (unlabelled.logits - expected.logits).abs().max().item()
    model.train()
    plain.train()
    count = sum(int((batch(samples)["labels"][:, 1:] != -100).sum()) for samples in (8, 4))
    for one in (model, plain):  # the mean over the labels of both batches
        for samples in (8, 4):
            one(**batch(samples), num_items_in_batch=count).loss.backward()
    found["mean over labels of two"] = gradients(model, plain)
    for one in (ours, theirs):
        one.zero_grad()
    first, second = model(**batch(8)).loss, model(**batch(4)).loss  # neither is backward through yet
    (first + second).backward()
    (plain(**batch(8)).loss + plain(**batch(4)).loss).backward()
    found["two at once"] = gradients(model, plain)
    ours.zero_grad()
    if case != PLACEMENT:
        value = model.step(batch(8), lambda output, part: native_worker.loss(output, part))
        wanted = native_worker.loss(plain(**batch(8)), batch(8))
        found["step"] = abs(value.item() - wanted.item())
    path = rlplace.save_checkpoint(f"{folder}/{case}", model, ours, step=3)
    for parameter in model.parameters():
        local_part(parameter).detach().mul_(0.5)
    rlplace.load_checkpoint(path, model, ours)
    model.load_state_dict({name: plain.state_dict()[name] for name in model.state_dict()})
    with torch.no_grad():
        found["loaded"] = abs(model(**batch(8)).loss.item() - plain(**batch(8)).loss.item())
    if case == "chain":
        found["stages"] = 0.0 if stages_are_told_apart(model, CASES[case]) else 1.0
    return found


def stages_are_told_apart(model, strategy):
    """Whether the sleep of a module counts, once a micro-batch, for its stage and no other."""
    sleeper = next((module for name, module in model.named_modules() if name.endswith("ln_f")), None)
    hook = None if sleeper is None else sleeper.register_forward_hook(lambda *given: time.sleep(0.1))
    activity.record(torch.device("cpu"))
    model(**batch(8)).loss.backward()
    spent_s = activity.recorded()
    if hook is not None:
        hook.remove()
    stage, slept_s = ("stage 0", 0.0) if sleeper is None else ("stage 1", 0.1 * strategy["microbatches"][0])
    assert [name for name in spent_s if name.startswith("stage")] == [stage]
    return spent_s[stage] > slept_s


def idiom(case):
    """Gradients, and parameters after a step, of a loop over what `rlplace.parallelize` returns."""
    plain, strategy = plain_of(case), CASES[case]
    inputs = {key: value[: strategy["microbatch"][0]] for key, value in batch(8).items()}
    module, mesh = rlplace.parallelize(copy.deepcopy(plain), equality.strategy_plan(strategy), inputs)
    replicas, of_shard = mesh["replicate"].size() * mesh["shard"].size(), mesh["shard"].get_local_rank()
    replica = mesh["replicate"].get_local_rank() * mesh["shard"].size() + of_shard
    own = batch(8) if case == "unlike" else {key: value.chunk(replicas)[replica] for key, value in batch(8).items()}
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2, foreach=False) for one in (module, plain)]
    if len(strategy["stages"]) > 1:
        module.step(own, native_worker.loss)
    else:
        native_worker.loss(module(**own), own).backward()
    native_worker.loss(plain(**batch(8)), batch(8)).backward()
    module = module.module if case == "copies" else module
    found = gradients(module, plain)
    for optimizer in optimizers:
        optimizer.step()
    trained = {name: whole_tensor(parameter.detach()) for name, parameter in module.named_parameters()}
    return {
        "gradients": found,
        "trained": native_worker.difference(trained, dict(plain.named_parameters(remove_duplicate=False))),
    }


def without_dimensions():
    """Gradients of two micro-batches of a model with scalar parameters, which no wrapper of torch's averages."""
    plain, strategy = native_worker.make("own"), flat("own", {"replicate": 2, "shard": 2}, 3)
    module, mesh = rlplace.parallelize(
        copy.deepcopy(plain), equality.strategy_plan(strategy), {"input_ids": batch(8)["input_ids"][:1]}
    )
    replica = mesh["replicate"].get_local_rank() * 2 + mesh["shard"].get_local_rank()
    for number in range(8):
        part = {key: value[number : number + 1] for key, value in batch(8).items()}
        (native_worker.loss(plain(part["input_ids"]), part) / 8).backward()
        if number // 2 == replica:
            (native_worker.loss(module(part["input_ids"]), part) / 2).backward()
    return gradients(module, plain)


def cast(case):
    """Loss and largest difference of a gradient's norm under torch's own policy; the plain model's weights are cast alike."""
    plain, full = plain_of(case).float(), {"input_ids": batch(8)["input_ids"], "labels": batch(8)["input_ids"].flip(1)}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = distributed(case, plain, mixed_precision=policy, reduction=MEAN)  # by powers of two, which round nothing
    loss, expected = model(**full).loss, 0.0
    loss.backward()
    for parts in zip(*(value.chunk(8) for value in full.values()), strict=True):
        weights = {name: parameter.bfloat16() for name, parameter in plain.named_parameters()}
        part = torch.func.functional_call(plain, weights, (), dict(zip(full, parts, strict=True))).loss / 8
        part.backward()
        expected += part.item()
    wanted = dict(plain.named_parameters(remove_duplicate=False))
    own = {name: (parameter, whole_tensor(parameter.grad)) for name, parameter in model.named_parameters()}
    assert {tensor.dtype for pair in own.values() for tensor in pair} == {torch.float32}
    return abs(loss.item() - expected), max(
        ((gradient - wanted[name].grad).norm() / wanted[name].grad.norm()).item() for name, (_, gradient) in own.items()
    )


def mixed(case):
    """Relative differences of loss and norm of the gradients under autocast; autocast leaves double precision as it is."""
    plain = plain_of(case).float()
    model = distributed(case, plain)
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = model(**batch(8)).loss, plain(**batch(8)).loss
    assert loss.item() != plain(**batch(8)).loss.item()
    loss.backward()
    expected.backward()
    norm, wanted = model.clip_grad_norm_(1e9), torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    assert {local_part(p.grad).dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
    return abs(loss.item() / expected.item() - 1), abs(norm.item() / wanted.item() - 1)


def loops(folder):
    found = {case: loop(case, folder) | idiom(case) for case in CASES}
    for case in CASES:  # one way of mixed precision each, or both
        found[case] |= ({"mixed": mixed(case)} if case in MIXED else {}) | ({"cast": cast(case)} if case in CAST else {})
    found[PLACEMENT] = loop(PLACEMENT, folder) | {"mixed": mixed(PLACEMENT)}
    return found | {"without dimensions": without_dimensions()}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return run(4, loops, str(tmp_path_factory.mktemp("loops")))


@pytest.mark.slow
def test_scalar_parameters_in_torchs_own_idiom(results):
    assert max(result["without dimensions"] for result in results) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, PLACEMENT])
def test_a_loop_computes_what_the_model_does(case, results):
    for result in results:
        loss, norm = result[case].pop("mixed", (0.0, 0.0))
        assert loss < 5e-3 and norm < 3e-2
        loss, gradient = result[case].pop("cast", (0.0, 0.0))
        # A tensor group rounds every part of a sum, stages with a tied weight round each copy's gradient.
        rounded = 0.02 if case == "tensor" else 5e-3 if case in ("chain", "unlike", "v") else 1e-5
        assert loss < (2e-3 if case == "tensor" else 1e-6) and gradient < rounded
        worst = max(result[case], key=result[case].get)
        assert result[case][worst] < 1e-5, (worst, result[case])
