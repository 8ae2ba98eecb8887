"""The transformers Trainer by a plan, against the Trainer on one device."""

import os
import random
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import nn
from torch.nn import functional as F

import rlplace
from rlplace.errors import InputError
from rlplace.runtime.base.ranks import digest
from rlplace.runtime.base.steps import micro_batch, takes_target
from rlplace.runtime.export.trainer import see_one_process, use_model
from rlplace.runtime.placement.forward_graph import any_value
from tests.runtime import small_models
from tests.runtime.equality import plan_of, strategy_plan
from tests.runtime.job import launch

VOCABULARY, LENGTH = 48, 12


def gpt2():
    return small_models.gpt2(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16)[0]


def bert(head="SequenceClassification"):
    import transformers

    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return getattr(transformers, f"BertFor{head}")(
        transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, num_labels=3, **rates, **sizes)
    )


def text(samples, seed=0):
    """Sequences whose labels end at very different places."""
    generator = random.Random(seed)
    rows = []
    for number in range(samples):
        tokens = [generator.randrange(VOCABULARY) for _ in range(LENGTH)]
        kept = 2 if number % 3 else LENGTH
        rows.append({"input_ids": tokens, "labels": tokens[:kept] + [-100] * (LENGTH - kept)})
    return rows


def classes(samples, seed=0):
    generator = random.Random(seed)
    rows = [[generator.randrange(VOCABULARY) for _ in range(LENGTH)] for _ in range(samples)]
    return [{"input_ids": row, "labels": sum(row) % 3} for row in rows]


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from self.rows


def accuracy(prediction):
    return {"right": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def trainer_of(build, train, evaluation, folder, **options):
    from transformers import Trainer, TrainingArguments

    metrics = options.pop("compute_metrics", None)
    sizes = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8}
    settings = {"learning_rate": 5e-3, "weight_decay": 0.1, "logging_steps": 1, "report_to": "none", "use_cpu": True}
    torch.manual_seed(1)
    arguments = TrainingArguments(str(folder), disable_tqdm=True, **{**sizes, **settings, **options})
    return Trainer(build(), arguments, train_dataset=train, eval_dataset=evaluation, compute_metrics=metrics)


def plan_for(build, rows, **fields):
    columns = {key: torch.tensor([row[key] for row in rows[:4]]) for key in rows[0]}
    if fields.keys() & {"stages", "pipelines"}:
        plan = strategy_plan({"batch": 8, **fields})
    else:
        plan = plan_of(build(), columns, 2, **{"deal": [0, 1, 0, 1, 1, 0], **fields})
    shapes = {k: {"tensor": list(v.shape), "dtype": "int64"} for k, v in columns.items()}
    source = {"graph": {"inputs": {"args": [], "kwargs": shapes}}}
    return rlplace.PlacementPlan(**{**vars(plan), "source": source})


def stage(blocks, devices, **mesh):
    return {"blocks": list(blocks), "devices": list(devices), "mesh": mesh}


BERT = (
    *(f"bert.embeddings.{part}" for part in ("word_embeddings", "position_embeddings", "token_type_embeddings", "LayerNorm")),
    "bert.encoder.layer.0",
    "bert.encoder.layer.1",
    "cls.predictions",
)
FRONT = ("transformer.wte", "transformer.wpe", "transformer.h.0")
BACK = ("transformer.h.1", "transformer.ln_f", "lm_head")
CASES = {
    "ragged labels, accumulation, a short last batch": (gpt2, text, {"gradient_accumulation_steps": 2, "max_steps": 4}, {}, 27),
    "a loss that ignores the number of labels": (
        bert,
        classes,
        {"max_steps": 3, "compute_metrics": accuracy, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1,
         "load_best_model_at_end": True, "metric_for_best_model": "loss"},
        {},
        16,
    ),
    "ragged labels, a loss that ignores their number": (
        partial(bert, "MaskedLM"), text, {"max_steps": 2},
        {"microbatch": [2], "microbatches": [2], "reduction": "targets",
         "stages": [stage(BERT, (0, 1), replicate=2)]}, 16,
    ),
    "two replicas, no clipping": (
        gpt2, text, {"max_steps": 3, "max_grad_norm": 0.0},
        {"microbatch": [4], "microbatches": [1], "stages": [stage((*FRONT, *BACK), (0, 1), replicate=2)]}, 24,
    ),
    "two replicas, fully sharded": (
        gpt2, text, {"max_steps": 3, "save_steps": 2},
        {"microbatch": [2], "microbatches": [2], "stages": [stage((*FRONT, *BACK), (0, 1), shard=2) | {"sharding": 1}]}, 24,
    ),
    "a pipeline, accumulation, a short last batch": (
        gpt2, text, {"gradient_accumulation_steps": 2, "max_steps": 4},
        {"microbatch": [2], "microbatches": [4], "schedule": "1f1b", "stages": [stage(FRONT, (0,)), stage(BACK, (1,))]}, 27,
    ),
    "unlike pipelines, accumulation, a short last batch": (
        gpt2, text, {"gradient_accumulation_steps": 2, "max_steps": 4},
        {"reduction": "targets", "pipelines": [
            {"microbatch": [size], "microbatches": [2], "stages": [stage((*FRONT, *BACK), (device,))]}
            for size, device in ((1, 1), (3, 0))
        ]}, 27,
    ),
    "iterable data": (gpt2, text, {"max_steps": 3}, {}, 24),
    "bf16": (gpt2, text, {"max_steps": 3, "bf16": True}, {}, 24),
}  # fmt: skip


def train_cases(folder):
    """Per case the logs of both runs, the largest difference of weights, and what else is worth a look."""
    from rlplace.runtime.export.trainer import see_one_process

    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    os.environ.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR="localhost")
    found = {}
    for number, (name, (build, rows, options, fields, samples)) in enumerate(CASES.items()):
        train, evaluation = rows(samples), rows(11 if number == 0 else 8, seed=1)
        if name == "iterable data":
            train = Stream(train)
        one = trainer_of(build, train, evaluation, Path(folder) / f"{number}-one-{rank}", **options)
        see_one_process(one.accelerator)  # this Trainer is on one device, in every process
        one.train()
        one.evaluate()
        two = trainer_of(build, train, evaluation, Path(folder) / f"{number}-two", **options)
        model = rlplace.distribute_trainer(two, plan_for(build, rows(8), **fields))
        two.train()
        two.evaluate()
        weights = dict(one.model.named_parameters())
        worst = max((p - weights[n]).abs().max().item() for n, p in whole(model))
        held, best = len(list(model.parameters())), two.state.best_model_checkpoint
        found[name] = (one.state.log_history, two.state.log_history, worst, held, best)
        if "sharding" in str(fields):
            places = [Path(folder) / f"{number}-{which}" / "checkpoint-2" for which in ("one-0", "two")]
            three = trainer_of(build, train, evaluation, Path(folder) / f"{number}-three", **options)
            model = rlplace.distribute_trainer(three, plan_for(build, rows(8), **fields))
            three.train(resume_from_checkpoint=str(places[0]))
            worst = max((p - dict(one.model.named_parameters())[n]).abs().max().item() for n, p in whole(model))
            found["resumed"] = (*(torch.load(place / "optimizer.pt") for place in places), worst)
    return found


def whole(model):
    """Parameters of this process's part of the model, whole."""
    return ((n, p.full_tensor() if hasattr(p, "full_tensor") else p) for n, p in model.trained())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launch.run(2, train_cases, str(tmp_path_factory.mktemp("trainer")))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logs_and_weights_are_those_of_one_device(found, name):
    tolerance = 3e-2 if name == "bf16" else 1e-5
    for cases in found:
        one, two, worst, _, _ = cases[name]
        assert len(one) == len(two)
        compared = 0
        for a, b in zip(one, two, strict=True):
            for key in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right"):
                if key in a:
                    compared += 1
                    assert b[key] == pytest.approx(a[key], abs=tolerance), (name, key)
        assert compared > 6
        assert worst < (3e-2 if name == "bf16" else 2e-4)


@pytest.mark.long
@pytest.mark.slow
def test_the_best_model_is_loaded_at_the_end(found):
    one, _, worst, _, best = found[0]["a loss that ignores the number of labels"]
    losses = [row["eval_loss"] for row in one if "eval_loss" in row]
    assert best.endswith(f"checkpoint-{1 + losses[:3].index(min(losses[:3]))}")
    assert losses[-1] == pytest.approx(min(losses[:3]), abs=1e-6)
    assert worst < 2e-4


@pytest.mark.long
@pytest.mark.slow
def test_shares_are_saved_whole_and_resumes_what_one_device_saved(found):
    one, two, worst = found[0]["resumed"]
    assert [group["params"] for group in one["param_groups"]] == [group["params"] for group in two["param_groups"]]
    assert one["state"].keys() == two["state"].keys()
    for number, values in one["state"].items():
        torch.testing.assert_close(two["state"][number], values, atol=1e-6, rtol=1e-4)
    assert worst < 2e-4


@pytest.mark.long
@pytest.mark.slow
def test_both_processes_hold_a_part(found):
    held = [[cases[name][3] for cases in found] for name in CASES if "replicas" not in name]
    assert all(0 < count < 28 + 20 for row in held for count in row)


PLAN = rlplace.PlacementPlan(problem="0" * 64, planner="x", seed=0, device_of_group=np.zeros(1, np.int32))
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
    with pytest.raises(InputError, match=reason):
        rlplace.distribute_trainer(trainer, PLAN)


def test_a_plan_that_does_not_describe_inputs_asks_for_them():
    with pytest.raises(InputError, match="give distribute\\(model, plan, example_inputs\\)"):
        micro_batch(PLAN, None)
    assert micro_batch(PLAN, torch.ones(2))[0][0].shape == (2,)
    assert micro_batch(PLAN, {"x": 3}) == ((), {"x": 3})
    with pytest.raises(InputError, match="found str"):
        micro_batch(PLAN, "x")


def test_whether_a_loss_takes_a_target():
    assert all(map(takes_target, (F.cross_entropy, nn.MSELoss(), lambda output, target: target)))
    assert not any(map(takes_target, (lambda output: output, lambda output, scale=2.0: output, None)))
    assert any_value({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.long)}).item() == 2.0
    with pytest.raises(InputError, match="no floating-point"):
        any_value(torch.ones(2, dtype=torch.long))


def test_digests_tell_batches_apart():
    x = torch.arange(6).reshape(2, 3)
    others = [x.flip(0), x + 1, x[:1], {"x": x, "y": x}, x.T, x.new_zeros(2, 3)]
    first = digest(x)
    assert first == digest(x.clone())
    assert not any(first == digest(other) for other in others)
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))


def test_an_accelerator_is_distributed_before_it_prepares():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    with pytest.raises(InputError, match="leave it out"):
        rlplace.distribute_accelerator(accelerator, nn.Linear(1, 1), PLAN, share="replica")
    model = accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(InputError, match=r"before accelerator\.prepare"):
        rlplace.distribute_accelerator(accelerator, model, PLAN)


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
