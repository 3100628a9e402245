"""An ordinary Lightning script: a checkpoint after each epoch, and on from the newest one."""

import os
import sys

import lightning.pytorch as pl
import torch
from kill_once import CHECKPOINT_EVERY, kill_once
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        kill_once(self.global_step)
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


out_dir = sys.argv[1]
world_size, local_world_size = (int(os.environ[v]) for v in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
pl.seed_everything(0)
inputs = torch.randn(CHECKPOINT_EVERY * world_size * 8, 8)
dataset = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
model = Regression()
trainer = pl.Trainer(
    accelerator="cpu",
    devices=local_world_size,
    num_nodes=world_size // local_world_size,
    max_epochs=4,
    callbacks=[ModelCheckpoint(out_dir, save_last=True)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(dataset, batch_size=8, shuffle=True), ckpt_path="last")
if trainer.is_global_zero:
    torch.save(model.state_dict(), f"{out_dir}/final.pt")
