"""Trainers on one device and by a plan, both in every process of a job."""

import os
import random
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from plans import plan_of
from torch.nn import functional as F

import rlplace

VOCABULARY, LENGTH = 48, 12


def gpt2(**options):
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**rates, **sizes, use_cache=False, **options))


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, num_labels=3, **rates, **sizes)
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
    settings = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "learning_rate": 5e-3,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    torch.manual_seed(1)
    return Trainer(
        build(),
        TrainingArguments(str(folder), **settings),
        train_dataset=train,
        eval_dataset=evaluation,
        compute_metrics=metrics,
    )


def plan_for(build, rows, **fields):
    columns = {key: torch.tensor([row[key] for row in rows[:4]]) for key in rows[0]}
    fields = {"deal": [0, 1, 0, 1, 1, 0], "microbatches": 2, **fields}
    plan = plan_of(build(), columns, 2, **fields)
    shapes = {k: {"tensor": list(v.shape), "dtype": "int64"} for k, v in columns.items()}
    source = {"graph": {"inputs": {"args": [], "kwargs": shapes}}}
    return rlplace.PlacementPlan(**{**vars(plan), "source": source})


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
    "two replicas, no clipping": (
        gpt2, text, {"max_steps": 3, "max_grad_norm": 0.0}, {"deal": [0] * 6, "replicas": [[0], [1]]}, 24,
    ),
    "two replicas, a sharded optimizer": (
        gpt2, text, {"max_steps": 3, "save_steps": 2},
        {"deal": [0] * 6, "replicas": [[0], [1]], "optimizer_sharding": True}, 24,
    ),
    "iterable data": (gpt2, text, {"max_steps": 3}, {}, 24),
    "bf16": (gpt2, text, {"max_steps": 3, "bf16": True}, {}, 24),
}  # fmt: skip


def train_cases(folder):
    """Per case the logs of both runs, the largest difference of weights, and what else is worth a look."""
    from rlplace.runtime.distributed.job.accelerator import see_one_process

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
        if fields.get("optimizer_sharding"):
            places = [Path(folder) / f"{number}-{which}" / "checkpoint-2" for which in ("one-0", "two")]
            three = trainer_of(build, train, evaluation, Path(folder) / f"{number}-three", **options)
            model = rlplace.distribute_trainer(three, plan_for(build, rows(8), **fields))
            three.train(resume_from_checkpoint=str(places[0]))
            worst = max((p - dict(one.model.named_parameters())[n]).abs().max().item() for n, p in whole(model))
            found["resumed"] = (*(torch.load(place / "optimizer.pt") for place in places), worst)
    return found


def whole(model):
    """Parameters of the model as this process reads them, also where it trains a share."""
    return model._own.parameters.items()


class Scores(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def loss_outside():
    """Losses and gradients of a model whose loss is given to `distribute`, by a plan that was captured with one."""
    torch.manual_seed(0)
    model, x, y = Scores(), torch.randn(8, 6), torch.randint(4, (8,))
    plan = rlplace.place(
        model,
        "cpu:2",
        planner="single",
        example_inputs=(x[:4],),
        loss=lambda output: F.cross_entropy(output, y[:4]),
        microbatches=2,
    )
    moved = plan.device_of_group.copy()
    moved[len(moved) // 2 :] = 1
    plan = rlplace.PlacementPlan(**{**vars(plan), "device_of_group": moved})
    placed = rlplace.distribute(model, plan, loss=F.cross_entropy)
    found = placed(x, target=y)
    found.backward()
    expected = F.cross_entropy(model(x), y)
    expected.backward()
    whole = dict(model.named_parameters())
    worst = max((p.grad - whole[n].grad).abs().max().item() for n, p in placed.named_parameters())
    placed.eval()
    with torch.no_grad():
        scores = placed(x)
    return found.item(), expected.item(), worst, (scores - model(x)).abs().max().item(), len(list(placed.parameters()))


def total(output):
    return output.sum()


def other_batches():
    """What a process is told when each is called with a batch of its own."""
    model = Scores()
    x = torch.randn(4, 6)
    plan = plan_of(model, {"x": x}, 2, loss=total, deal=[0, 0, 0, 1, 1, 1])
    placed = rlplace.distribute(model, plan, {"x": x}, loss=total)
    placed(x=torch.ones(4, 6))
    try:
        placed(x=torch.full((4, 6), float(dist.get_rank())))
    except rlplace.InputError as error:
        return str(error)
    return "no error"


def everything(folder):
    return train_cases(folder), loss_outside(), other_batches()
