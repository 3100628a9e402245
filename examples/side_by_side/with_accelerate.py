import os

import torch
from accelerate import Accelerator
from task import build_model, cross_entropy, train_set
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=not torch.cuda.is_available())
model = build_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
data = DataLoader(train_set(), batch_size=64 // accelerator.num_processes, shuffle=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
first_epoch = 0
if os.path.exists("snapshot"):
    accelerator.load_state("snapshot")
    with open("snapshot/epoch") as file:
        first_epoch = int(file.read())
for epoch in range(first_epoch, 5):
    data.set_epoch(epoch)
    for x, y in data:
        loss = cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state("snapshot")
    if accelerator.is_main_process:
        with open("snapshot/epoch", "w") as file:
            file.write(str(epoch + 1))
