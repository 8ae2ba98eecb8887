"""Lightning's Trainer by a plan, against its single process."""

import logging
import warnings
from pathlib import Path

import pytest
import torch

from rlplace.errors import InputError
from tests.runtime import equality, small_models
from tests.runtime.job import launch

lightning = pytest.importorskip("lightning")

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

LENGTH = 8
CONTINUED = [("pipeline", "sharded"), ("sharded", "pipeline"), ("plain", "unlike"), ("unlike", "pipeline")]
FRONT = ["transformer.wte", "transformer.wpe", "transformer.h.0"]
BACK = ["transformer.h.1", "transformer.ln_f", "lm_head"]
STRATEGIES = {
    "pipeline": {
        "microbatch": [2], "microbatches": [4], "schedule": "1f1b",
        "stages": [{"blocks": FRONT, "devices": [0], "mesh": {}}, {"blocks": BACK, "devices": [1], "mesh": {}}],
    },
    "sharded": {
        "microbatch": [2], "microbatches": [2],
        "stages": [{"blocks": FRONT + BACK, "devices": [0, 1], "mesh": {"shard": 2}, "sharding": 3}],
    },
    "unlike": {
        "pipelines": [
            {"microbatch": [size], "microbatches": [2], "stages": [{"blocks": FRONT + BACK, "devices": [device], "mesh": {}}]}
            for size, device in ((1, 1), (3, 0))
        ]
    },
}  # fmt: skip


def plan_for(name):
    inputs = {key: {"tensor": [2, LENGTH], "dtype": "int64"} for key in ("input_ids", "labels")}
    source = {"graph": {"inputs": {"args": [], "kwargs": inputs}}}
    return equality.strategy_plan({"batch": 8, **STRATEGIES[name]}, source=source)


def module():
    """A LightningModule as people write it."""

    class Text(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.model = small_models.gpt2(n_positions=LENGTH)[0]
            self.losses, self.evaluated = [], []

        def training_step(self, batch, number):
            loss = self.model(**batch).loss
            self.log("loss", loss)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, number):
            loss = self.model(**batch).loss
            self.log("val_loss", loss)
            self.evaluated.append(loss.item())

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"},
            }

    return Text()


def loader(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (24, LENGTH), generator=generator)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    torch.manual_seed(seed)
    return StatefulDataLoader(rows, batch_size=8, shuffle=seed == 1)


def fit(folder, strategy=None, resumed=None, outside=None, **options):
    """Trains nine batches, two a step; losses, validation losses, and the state at the end. It is saved after three steps."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    saving = lightning.pytorch.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    trained = module()
    trained.outside = outside
    settings = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "enable_progress_bar": False, "logger": False}
    made = lightning.Trainer(
        max_epochs=3, accelerator="cpu", default_root_dir=folder, callbacks=[saving], **settings, **options,
        **({"devices": 1} if strategy is None else {"strategy": strategy}),
    )  # fmt: skip
    made.fit(trained, loader(1), loader(2), ckpt_path=resumed)
    path = Path(folder) / "end.ckpt"
    made.save_checkpoint(path)
    return trained.losses, trained.evaluated, torch.load(path, weights_only=False)


def cases(folder):
    """The runs of the plans, and runs that continue from the middle of another plan's or of one process's."""
    from rlplace.integrations.lightning import PlanStrategy

    warnings.simplefilter("ignore")
    found = {name: fit(f"{folder}/{name}", PlanStrategy(plan_for(name))) for name in STRATEGIES}
    for first, then in CONTINUED:
        rest = fit(f"{folder}/{first}-{then}", PlanStrategy(plan_for(then)), resumed=f"{folder}/{first}/step=3.ckpt")
        found[first, then] = rest
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def plain(folder):
    return fit(folder / "plain")


@pytest.fixture(scope="module")
def placed(folder, plain):
    return launch.run(2, cases, str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_plan_trains_as_one_process(plain, placed, name):
    """Lightning #17180: why does it not support pipeline parallelism?"""
    for rank in placed:
        losses, evaluated, saved = rank[name]
        assert losses == pytest.approx(plain[0], rel=1e-5) and len(losses) == 9
        assert evaluated == pytest.approx(plain[1], rel=1e-5)
        assert_same_checkpoint(saved, plain[2])


@pytest.mark.slow
@pytest.mark.parametrize("case", CONTINUED, ids=" then ".join)
def test_a_plan_goes_on_from_the_middle_of_another_run(plain, placed, case):
    losses, _, saved = placed[0][case]
    assert losses == pytest.approx(plain[0][5:], rel=1e-5)
    assert_same_checkpoint(saved, plain[2])


@pytest.mark.slow
def test_one_process_goes_on_from_the_middle_of_a_plan(folder, plain, placed):
    losses, _, saved = fit(folder / "alone", resumed=folder / "pipeline" / "step=3.ckpt")
    assert losses == pytest.approx(plain[0][5:], rel=1e-5)
    assert_same_checkpoint(saved, plain[2])


def assert_same_checkpoint(found, expected):
    """Parameters, optimizer and progress, in the form of Lightning on one device."""
    assert found["global_step"] == expected["global_step"] and found["lr_schedulers"] == expected["lr_schedulers"]
    assert list(found["state_dict"]) == list(expected["state_dict"])
    for name, value in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], value, atol=2e-4, rtol=1e-4)
    ours, theirs = found["optimizer_states"][0], expected["optimizer_states"][0]
    assert ours["param_groups"] == theirs["param_groups"] and ours["state"].keys() == theirs["state"].keys()
    for number, values in theirs["state"].items():
        torch.testing.assert_close(ours["state"][number], values, atol=1e-5, rtol=1e-3)


def test_what_the_plan_is_not_for_is_refused(one_rank, tmp_path):
    from rlplace.integrations.lightning import PlanStrategy

    scaling = lightning.pytorch.plugins.Precision()
    scaling.scaler = object()
    with pytest.raises(InputError, match="leave it out"):
        PlanStrategy(plan_for("sharded"), share="replica")
    with pytest.raises(InputError, match="no submodule 'net'"):
        fit(tmp_path, PlanStrategy(plan_for("sharded"), "net"))
    with pytest.raises(InputError, match=r"outside\.weight is a parameter outside of 'model'"):
        fit(tmp_path, PlanStrategy(plan_for("sharded")), outside=torch.nn.Linear(1, 1))
    with pytest.raises(InputError, match="use bf16-mixed"):
        fit(tmp_path, PlanStrategy(plan_for("sharded")), plugins=[scaling])
