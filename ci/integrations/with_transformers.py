"""The Trainer of transformers over ringcomm: training, evaluation, going on from a checkpoint.

    mpirun -np 2 python ci/integrations/with_transformers.py

Ranks print a line each if they equal one process; ci/matrix --frameworks runs it.
"""

import tempfile
from pathlib import Path

import torch
import transformers
from oracle import require_ringcomm, require_same_weights
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ringcomm.torch

BATCH, LENGTH, WORDS = 4, 16, 32
N_SENTENCES, EPOCHS = 48, 2
RATE, CLIP = 1e-3, 1.0
TOLERANCE = 1e-6  # of the largest weight of a tensor: the Trainer makes float32 of all logits


def n_steps():
    return EPOCHS * N_SENTENCES // (BATCH * ringcomm.torch.size())


def network():
    """Return a GPT-2 of one layer with random weights, the same on every rank."""
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).double()


def sentences(seed):
    """Return random sentences in which each word is near the one before."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 3, (N_SENTENCES, LENGTH), generator=generator)
    words = steps.cumsum(1) % WORDS
    return [{"input_ids": each, "labels": predicted(each)} for each in words]


def predicted(words):
    """Return the words as labels: the Trainer counts the first, which nothing predicts, too."""
    labels = words.clone()
    labels[..., 0] = -100
    return labels


def trainer(folder):
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        learning_rate=RATE,
        max_grad_norm=CLIP,
        lr_scheduler_type="linear",
        logging_steps=1,
        save_strategy="steps",
        save_steps=n_steps() // 2,
        report_to=[],
        disable_tqdm=True,
        log_level="error",
        logging_strategy="steps",
        ddp_find_unused_parameters=False,
        train_sampling_strategy="sequential",  # so that one process can do the same
    )
    assert arguments.world_size == ringcomm.torch.size()
    assert arguments.process_index == ringcomm.torch.rank()
    return Trainer(network(), arguments, train_dataset=sentences(1), eval_dataset=sentences(2))


def losses_of(done):
    return [entry["loss"] for entry in done.state.log_history if "loss" in entry]


def trained_alone():
    """Return what one process makes of all samples, and its losses."""
    model, words = network(), torch.stack([each["input_ids"] for each in sentences(1)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / n_steps())
    losses = []
    for batch in words.split(BATCH * ringcomm.torch.size()) * EPOCHS:
        loss = model(input_ids=batch, labels=predicted(batch)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return model, losses


def judged_alone(model):
    words = torch.stack([each["input_ids"] for each in sentences(2)])
    with torch.no_grad():
        return model(input_ids=words, labels=predicted(words)).loss.item()


def main():
    ringcomm.torch.init_process_group()  # it knows no backend of this name, and takes a group
    size = ringcomm.torch.size()
    folder = ringcomm.broadcast_object(tempfile.mkdtemp() if ringcomm.rank() == 0 else None)
    whole = trainer(folder)
    require_ringcomm(size)
    whole.train()
    expected, losses = trained_alone()
    assert losses[-1] < losses[0]
    assert len(losses_of(whole)) == len(losses) == n_steps()
    off = max(abs(a - b) for a, b in zip(losses_of(whole), losses, strict=True))
    assert off < 1e-6, f"a loss is off by {off:.2g}"
    require_same_weights(whole.model, expected, TOLERANCE)
    evaluated = whole.evaluate()["eval_loss"]
    assert abs(evaluated - judged_alone(expected)) < 1e-6

    half = Path(folder) / f"checkpoint-{n_steps() // 2}"
    resumed = trainer(folder)
    resumed.train(resume_from_checkpoint=str(half))
    require_same_weights(resumed.model, expected, TOLERANCE)
    print(f"transformers {transformers.__version__}: equal", flush=True)


if __name__ == "__main__":
    main()
