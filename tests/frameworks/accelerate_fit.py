"""An ordinary Accelerate script: a checkpoint every few steps, and on from the newest one."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from kill_once import CHECKPOINT_EVERY, kill_once
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS_PER_EPOCH, EPOCHS = 4, 3

out_dir = Path(sys.argv[1])
config = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(cpu=True, dataloader_config=config)
set_seed(0)
inputs = torch.randn(STEPS_PER_EPOCH * accelerator.num_processes * 8, 8)
dataset = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(dataset, batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

step = max((int(p.name[5:]) for p in out_dir.glob("step-*[0-9]")), default=0)
if step:
    accelerator.load_state(out_dir / f"step-{step}")
for epoch in range(step // STEPS_PER_EPOCH, EPOCHS):
    loader.set_epoch(epoch)
    for inputs, targets in accelerator.skip_first_batches(loader, step - epoch * STEPS_PER_EPOCH):
        kill_once(step)
        accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % CHECKPOINT_EVERY == 0:
            accelerator.save_state(out_dir / f"step-{step}.tmp")
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                (out_dir / f"step-{step}.tmp").rename(out_dir / f"step-{step}")
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), out_dir / "final.pt")
accelerator.end_training()
