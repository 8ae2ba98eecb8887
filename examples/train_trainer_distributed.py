"""Trains a small GPT-2 on made-up text with the transformers Trainer, on as many devices as a plan says.

train_trainer.py is the same script on one device. Started with `torchrun --nproc-per-node N`, see docs/runtime.md.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import rlplace

VOCABULARY, LENGTH = 64, 16


def build():
    """A model of four layers, without dropout."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def example(batch=8):
    """The model and one batch, for `rlplace place examples/train_trainer.py:example`."""
    tokens = torch.zeros(batch, LENGTH, dtype=torch.long)
    return build(), {"input_ids": tokens, "labels": tokens}


def text(samples):
    """Token t+1 is three times token t, plus one; some labels at the end are left out, as in padded text."""
    data = []
    for first in torch.randint(VOCABULARY, (samples,)).tolist():
        tokens = [first]
        while len(tokens) < LENGTH:
            tokens.append((3 * tokens[-1] + 1) % VOCABULARY)
        kept = LENGTH - first % 7
        data.append({"input_ids": tokens, "labels": tokens[:kept] + [-100] * (LENGTH - kept)})
    return data


def main():
    """Two epochs with an evaluation after each; the last step of an epoch has a smaller batch."""
    torch.manual_seed(0)
    arguments = TrainingArguments(
        "train_trainer",
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(build(), arguments, train_dataset=text(156), eval_dataset=text(32))
    rlplace.distribute_trainer(trainer, rlplace.PlacementPlan.load("train_trainer.plan.json"))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
