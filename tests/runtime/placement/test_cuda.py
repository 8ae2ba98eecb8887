"""The same plan code on a GPU: several stages on one device, NCCL with one rank, in single precision and bfloat16."""

import copy
import os

import pytest
import torch
import torch.distributed as dist

from rlplace.runtime.job.distribute import distribute
from rlplace.runtime.placement.apply import apply
from tests.runtime.equality import largest_difference, plan_of
from tests.runtime.small_models import MODELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

NAMES = ("gpt2", "bert", "t5", "vit", "resnet", "mixtral", "lstm")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    store = tmp_path_factory.mktemp("nccl") / "store"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def on_gpu(name, dtype):
    torch.manual_seed(0)
    model, inputs, loss = MODELS[name]()
    moved = {
        key: value.to("cuda", dtype if value.is_floating_point() else None) if isinstance(value, torch.Tensor) else value
        for key, value in inputs.items()
    }
    return model.to("cuda", dtype), moved, loss


def compare(model, placed, inputs, loss, dtype):
    reference = copy.deepcopy(model)
    value = loss(reference(**inputs))
    value.backward()
    output = placed(**inputs)
    found = output if isinstance(output, torch.Tensor) and output.dim() == 0 else loss(output)
    found.backward()
    assert largest_difference(found.float(), value.float()) < TOLERANCE[dtype]
    expected = dict(reference.named_parameters())
    for key, parameter in placed.named_parameters():
        if parameter.grad is not None:
            assert largest_difference(parameter.grad.float(), expected[key].grad.float()) < TOLERANCE[dtype], key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_stages_on_one_gpu(job, name, dtype):
    model, inputs, loss = on_gpu(name, dtype)
    own = name != "lstm"
    plan = plan_of(model, inputs, 1, loss=None if own else loss)
    kept = copy.deepcopy(model)
    placed = distribute(model, plan, inputs, loss=None if own else loss, device="cuda:0")
    assert all(parameter.is_cuda for parameter in placed.parameters())
    compare(kept, placed, inputs, loss, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "lstm"])
def test_one_process_with_copies_between_the_host_and_the_gpu(name, dtype):
    """Copies over their own streams: half of the model computes on the host."""
    model, inputs, loss = on_gpu(name, dtype)
    if name == "mixtral" and dtype == torch.float32 and not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):
        pytest.skip("this transformers cannot trace the backward of its experts in single precision on a GPU")
    plan = plan_of(model, inputs, 2, deal="chain")
    kept = copy.deepcopy(model)
    placed = apply(model, plan, ["cuda:0", "cpu"], example_inputs=inputs)
    reference = loss(kept(**inputs)).detach()
    found = loss(placed(**inputs)).detach()
    assert abs(float(found) - float(reference)) < 2 * TOLERANCE[dtype] * max(1.0, abs(float(reference)))
