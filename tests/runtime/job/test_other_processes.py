"""Training that four processes begin, two continue and three end: losses and samples of a run that was not cut."""

import os
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch

import rlplace
from rlplace.runtime.job import job
from rlplace.runtime.state.training_state import latest_checkpoint
from tests.runtime import equality, small_models
from tests.runtime.job import launch

pytestmark = pytest.mark.slow

BATCH, SAMPLES, LENGTH = 12, 40, 8  # an epoch is three whole batches and one of four samples
ENDS = {4: 3, 2: 6, 3: 9}  # by processes the step that they stop after: in the first epoch, in the second, in the third
BLOCKS = ["transformer.wte", "transformer.wpe", "transformer.h.0", "transformer.h.1", "transformer.ln_f", "lm_head"]


def stage(blocks, devices, **mesh):
    return {"blocks": blocks, "devices": devices, "mesh": mesh}


STRATEGIES = {
    1: {"microbatch": [BATCH], "microbatches": [1], "stages": [stage(BLOCKS, [0])]},
    4: {
        "microbatch": [3], "microbatches": [2], "schedule": "1f1b",
        "stages": [stage(BLOCKS[:3], [0, 1], replicate=2), stage(BLOCKS[3:], [2, 3], replicate=2)],
    },
    2: {"microbatch": [3], "microbatches": [2], "stages": [stage(BLOCKS, [0, 1], shard=2) | {"sharding": 3}]},
    3: {"microbatch": [4], "microbatches": [1], "stages": [stage(BLOCKS, [0, 1, 2], replicate=3)]},
}  # fmt: skip
MODEL = "hf:gpt2,n_layer=2,n_embd=32,n_head=2,vocab_size=64,n_positions=8,attn_pdrop=0.0,embd_pdrop=0.0,resid_pdrop=0.0"


def plan_for(processes):
    """A plan for so many."""
    inputs = {name: {"tensor": [4, LENGTH], "dtype": "int64"} for name in ("input_ids", "labels")}
    recipe = {"model": MODEL, "batch": 3, "seq": LENGTH, "dtype": "fp32", "optimizer": "adamw"}
    source = {"graph": {**recipe, "inputs": {"args": [], "kwargs": inputs}}, "cluster": f"cpu:{processes}"}
    return equality.strategy_plan({"batch": BATCH, **STRATEGIES[processes]}, source=source)


class Rows(torch.utils.data.Dataset):
    """Sequences that begin with their own number."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.cat([torch.tensor([number]), torch.randint(0, 64, (LENGTH - 1,), generator=generator)])
        return {"input_ids": tokens, "labels": tokens}


def model():
    torch.manual_seed(1)
    return small_models.gpt2(n_positions=LENGTH)[0].train()


def loop(folder, processes):
    """Steps of the documented loop: loss, and numbers of the samples."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.manual_seed(5)
    loader = StatefulDataLoader(Rows(), batch_size=BATCH, shuffle=True)
    trained = model() if processes == 1 else rlplace.distribute(model(), plan_for(processes))
    optimizer = torch.optim.AdamW(trained.parameters(), lr=5e-3)
    step, end, steps = 0, ENDS.get(processes, max(ENDS.values())), []
    if processes != 1 and latest_checkpoint(folder):
        step = rlplace.load_checkpoint(folder, trained, optimizer, loader=loader).step
    while step < end:
        for batch in loader:
            loss = trained(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            steps.append((loss.item(), batch["input_ids"][:, 0].tolist()))
            if step == end:
                break
    if processes != 1:
        rlplace.save_checkpoint(folder, trained, optimizer, step=step, loader=loader)
    return steps


def trainer(folder, processes):
    """Steps of a transformers Trainer."""
    from transformers import Trainer, TrainingArguments

    from rlplace.runtime.export.trainer import see_one_process

    end = ENDS.get(processes, max(ENDS.values()))
    settings = {"max_steps": end, "save_steps": end, "learning_rate": 5e-3, "lr_scheduler_type": "constant", "logging_steps": 1}
    settings |= {"per_device_train_batch_size": BATCH, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    built, seen = model(), []
    made = Trainer(built, TrainingArguments(str(folder), **settings), train_dataset=Rows())
    if processes == 1:
        see_one_process(made.accelerator)
    else:
        rlplace.distribute_trainer(made, plan_for(processes))
    compute = made.compute_loss

    def compute_loss(called, inputs, *args, **kwargs):
        seen.append(inputs["input_ids"][:, 0].tolist())
        return compute(called, inputs, *args, **kwargs)

    made.compute_loss = compute_loss
    made.train(resume_from_checkpoint=processes not in (1, 4))
    losses = {row["step"]: row["loss"] for row in made.state.log_history if "loss" in row}
    return list(zip(list(losses.values())[-len(seen) :], seen, strict=True))


def run(folder, processes):
    """Steps of ``rlplace run``, whose samples are those of its own batch of examples."""
    seen, step = [], job.train_step

    def seeing(trained, optimizer, inputs, **options):
        seen.append(inputs["input_ids"].tolist())
        return step(trained, optimizer, inputs, **options)

    settings = job.JobOptions(
        steps=ENDS.get(processes, max(ENDS.values())), lr=5e-3, device="cpu", checkpoint=str(folder), resume=True
    )
    unchecked = mock.patch.object(job, "_checked", return_value=None)  # a plan of a search, which was not made
    with mock.patch.object(job, "train_step", seeing), unchecked:
        found = job.train(plan_for(processes), torch.device("cpu"), settings)
    return list(zip(found.losses, seen, strict=True))


def roads(folder, processes):
    warnings.simplefilter("ignore")
    os.environ.update(LOCAL_WORLD_SIZE=str(processes), MASTER_ADDR="localhost")
    made = {"loop": loop(Path(folder) / "loop", processes), "trainer": trainer(Path(folder) / "trainer", processes)}
    return made | {"run": run(Path(folder) / "run", processes)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By road the steps of a run that was not cut, and of one that four, two and three processes made."""
    pytest.importorskip("torchdata")
    folder = tmp_path_factory.mktemp("roads")
    whole = launch.run(1, roads, str(folder / "whole"), 1)[0]
    parts = [launch.run(processes, roads, str(folder / "cut"), processes) for processes in ENDS]
    for part in parts:
        assert all(rank == part[0] for rank in part)  # every process has the loss of all and is given the same samples
    return {road: (whole[road], [step for part in parts for step in part[0][road]]) for road in parts[0][0]}


@pytest.mark.parametrize("road", ["loop", "trainer"])
def test_four_two_and_three_processes_train_as_one_that_is_not_cut(found, road):
    """Lightning #16815, Megatron-LM #7162, prime-rl #833: on another number of cards the order of data is lost."""
    whole, cut = found[road]
    assert [samples for _, samples in cut] == [samples for _, samples in whole]
    assert [loss for loss, _ in cut] == pytest.approx([loss for loss, _ in whole], rel=1e-5)
    assert len(cut) == max(ENDS.values())
    for first in (0, 4):  # no sample of an epoch is skipped or comes twice
        assert sorted(number for _, samples in cut[first : first + 4] for number in samples) == list(range(SAMPLES))
    assert cut[0][1] != cut[4][1]  # the second has an order of its own


def test_a_run_goes_on_with_the_batches_that_it_would_have_had(found):
    whole, cut = found["run"]
    assert [samples for _, samples in cut] == [samples for _, samples in whole]
    assert [loss for loss, _ in cut] == pytest.approx([loss for loss, _ in whole], rel=1e-5)
    assert len({str(samples) for _, samples in cut}) == len(cut)
    assert all(sorted(samples) == sorted(cut[0][1]) for _, samples in cut)  # a permutation of the same examples
