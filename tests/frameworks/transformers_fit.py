"""An ordinary script of Transformers' Trainer: a checkpoint every few steps, on from the newest."""

import sys

import torch
from kill_once import CHECKPOINT_EVERY, kill_once
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, set_seed


class KillOnce(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        kill_once(state.global_step)


out_dir = sys.argv[1]
set_seed(0)
config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2)
model = GPT2LMHeadModel(config)
tokens = torch.randint(32, (128, 8))
arguments = TrainingArguments(
    out_dir,
    max_steps=12,
    per_device_train_batch_size=8,
    learning_rate=0.01,
    save_steps=CHECKPOINT_EVERY,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(
    model,
    arguments,
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    callbacks=[KillOnce()],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(out_dir))
if trainer.is_world_process_zero():
    torch.save(model.state_dict(), f"{out_dir}/final.pt")
