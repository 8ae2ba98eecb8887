"""The transformers Trainer by a plan, against the Trainer on one device."""

from types import SimpleNamespace

import launch
import numpy as np
import pytest
import torch
import trainer_worker
from accelerate.utils import DistributedType
from torch import nn
from torch.nn import functional as F

import rlplace
from rlplace.errors import InputError
from rlplace.runtime.distributed.execution.same_batch import digest
from rlplace.runtime.distributed.graph.inputs import any_loss, micro_batch, takes_target
from rlplace.runtime.distributed.job.accelerator import see_one_process, use_model


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch.run(2, trainer_worker.everything, str(tmp_path_factory.mktemp("trainer")), timeout_s=300)


@pytest.mark.slow
@pytest.mark.parametrize("name", trainer_worker.CASES)
def test_logs_and_weights_are_those_of_one_device(found, name):
    tolerance = 3e-2 if name == "bf16" else 1e-5
    for cases, *_ in found:
        one, two, worst, _, _ = cases[name]
        assert len(one) == len(two)
        compared = 0
        for a, b in zip(one, two, strict=True):
            for key in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right"):
                if key in a:
                    compared += 1
                    assert b[key] == pytest.approx(a[key], abs=tolerance), (name, key)
        assert compared > 8
        assert worst < (3e-2 if name == "bf16" else 2e-4)


@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(found):
    one, _, worst, _, best = found[0][0]["a loss that ignores the number of labels"]
    losses = [row["eval_loss"] for row in one if "eval_loss" in row]
    assert best.endswith(f"checkpoint-{1 + losses[:3].index(min(losses[:3]))}")
    assert losses[-1] == pytest.approx(min(losses[:3]), abs=1e-6)
    assert worst < 2e-4


@pytest.mark.slow
def test_a_sharded_optimizer_is_saved_whole_and_resumes_what_one_device_saved(found):
    one, two, worst = found[0][0]["resumed"]
    assert [group["params"] for group in one["param_groups"]] == [group["params"] for group in two["param_groups"]]
    assert one["state"].keys() == two["state"].keys()
    for number, values in one["state"].items():
        torch.testing.assert_close(two["state"][number], values, atol=1e-6, rtol=1e-4)
    assert worst < 2e-4


@pytest.mark.slow
def test_both_processes_hold_a_part(found):
    held = [[cases[name][3] for cases, *_ in found] for name in trainer_worker.CASES if "replicas" not in name]
    assert all(0 < count < 28 + 20 for row in held for count in row)


@pytest.mark.slow
def test_a_loss_outside_the_model_needs_no_example_target(found):
    for _, (loss, expected, worst, scores, held), _ in found:
        assert loss == pytest.approx(expected, abs=1e-6)
        assert worst < 1e-6
        assert scores < 1e-6
        assert held == 2


@pytest.mark.slow
def test_other_batches_on_other_processes_are_refused(found):
    assert all("different batches" in message for _, _, message in found)


REFUSED = {
    "given an optimizer": {"optimizer": object()},
    "model_init": {"model_init": print},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "fsdp and deepspeed": {"fsdp": "full_shard"},
    "torch_compile": {"torch_compile": True},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "neftune_noise_alpha": {"neftune_noise_alpha": 1.0},
    "label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "compute_loss_func": {"compute_loss_func": print},
    "predict_with_generate": {"predict_with_generate": True},
    "save_on_each_node": {"save_on_each_node": True},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_plan_cannot_run_is_refused(reason):
    off = {key for values in REFUSED.values() for key in values} | {"deepspeed"}
    settings = {**dict.fromkeys(off), **REFUSED[reason]}
    trainer = SimpleNamespace(model=nn.Linear(1, 1), args=SimpleNamespace(**settings), **settings)
    plan = rlplace.PlacementPlan(problem="0" * 64, planner="x", seed=0, device_of_group=np.zeros(1, np.int32))
    with pytest.raises(InputError, match=reason):
        rlplace.distribute_trainer(trainer, plan)


def test_a_plan_that_does_not_describe_inputs_asks_for_them():
    plan = rlplace.PlacementPlan(problem="0" * 64, planner="x", seed=0, device_of_group=np.zeros(1, np.int32))
    with pytest.raises(InputError, match="give distribute\\(model, plan, example_inputs\\)"):
        micro_batch(plan, None)
    assert micro_batch(plan, torch.ones(2))[0][0].shape == (2,)
    assert micro_batch(plan, {"x": 3}) == ((), {"x": 3})
    with pytest.raises(InputError, match="a str"):
        micro_batch(plan, "x")


def test_whether_a_loss_takes_a_target():
    assert takes_target(F.cross_entropy)
    assert takes_target(nn.MSELoss())
    assert takes_target(lambda output, target: target)
    assert not takes_target(lambda output: output)
    assert not takes_target(lambda output, scale=2.0: output)
    assert not takes_target(None)
    assert any_loss({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.long)}).item() == 2.0
    with pytest.raises(InputError, match="no floating-point"):
        any_loss(torch.ones(2, dtype=torch.long))


def test_digests_tell_batches_apart():
    x = torch.arange(6).reshape(2, 3)
    others = [x.flip(0), x + 1, x[:1], {"x": x, "y": x}, x.T, x.new_zeros(2, 3)]
    first = digest(x)
    assert torch.equal(first, digest(x.clone()))
    assert not any(torch.equal(first, digest(other)) for other in others)
    assert torch.equal(digest(torch.tensor([float("nan")])), digest(torch.tensor([float("nan")])))


def test_an_accelerator_is_distributed_before_it_prepares():
    from accelerate import Accelerator

    plan = rlplace.PlacementPlan(problem="0" * 64, planner="x", seed=0, device_of_group=np.zeros(1, np.int32))
    accelerator = Accelerator(cpu=True)
    with pytest.raises(InputError, match="leave it out"):
        rlplace.distribute_accelerator(accelerator, nn.Linear(1, 1), plan, share="replica")
    model = accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(InputError, match=r"before accelerator\.prepare"):
        rlplace.distribute_accelerator(accelerator, model, plan)


def test_accelerate_sees_one_process_and_the_whole_model():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.state.num_processes = 2
    try:
        see_one_process(accelerator)
        assert accelerator.num_processes == 1
        assert not accelerator.use_distributed
        assert accelerator.device == torch.device("cpu")
    finally:
        accelerator.state._reset_state(reset_partial_state=True)
    use_model(accelerator, SimpleNamespace(clip_grad_norm_=lambda *given: given, parameters=list))
    assert accelerator.clip_grad_norm_([], 2.0, norm_type=1.0) == (2.0, 1.0)
    for refused in (accelerator.save_state, accelerator.load_state):
        with pytest.raises(InputError, match="optimizer of one process"):
            refused("somewhere")


def test_loss_scaling_is_refused():
    accelerator = SimpleNamespace(distributed_type=DistributedType.NO, scaler=object())
    with pytest.raises(InputError, match="use bf16"):
        see_one_process(accelerator)
    with pytest.raises(InputError, match="distributes the model by itself"):
        see_one_process(SimpleNamespace(distributed_type=DistributedType.FSDP))
