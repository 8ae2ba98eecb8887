"""The strategies of one device on a GPU, in double precision, beside the plain model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlplace.plan.strategy import Strategy
from rlplace.runtime.state.whole import whole_tensor
from rlplace.runtime.strategy.run import prepare
from tests.runtime.strategy import native_worker
from tests.runtime.strategy.native_cases import flat

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
pytest.importorskip("transformers")

HOW = {
    "plain": {},
    "micro-batches": {"microbatch": 2},
    "full": {"recompute": "full", "microbatch": 2},
    "selective": {"recompute": "selective"},
}


@pytest.fixture(scope="module")
def job():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_loss_and_gradients_are_those_of_the_plain_model(job, name, how):
    options = {"batch": native_worker.BATCH, "microbatch": native_worker.BATCH, **HOW[how]}
    strategy = Strategy.from_dict(flat(name, {}, 0, devices=[0], **options))
    batch = {key: value.cuda() for key, value in native_worker.batch(name).items()}
    plain = native_worker.make(name).cuda()
    expected = native_worker.loss(plain(**batch), batch)
    expected.backward()
    wanted = {key: p.grad for key, p in plain.named_parameters(remove_duplicate=False)}
    first = {key: value[: options["microbatch"]] for key, value in batch.items()}
    placed = prepare(native_worker.make(name), strategy, first, "cuda")
    value = placed.step(batch, native_worker.loss)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)  # sent in single precision
    own = {key: whole_tensor(p.grad) for key, p in placed.named_parameters()}
    assert all(gradient.is_cuda for gradient in own.values())
    assert native_worker.difference(own, wanted) < 1e-9
