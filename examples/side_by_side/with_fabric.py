import os

import torch
from lightning.fabric import Fabric
from task import build_model, cross_entropy, train_set
from torch.utils.data import DataLoader

fabric = Fabric(devices=int(os.environ["LOCAL_WORLD_SIZE"]), num_nodes=int(os.environ["NODES"]))
fabric.launch()
model = build_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer = fabric.setup(model, optimizer)
data = DataLoader(train_set(), batch_size=64 // fabric.world_size, shuffle=True)
data = fabric.setup_dataloaders(data)
state = {"model": model, "optimizer": optimizer, "epoch": 0}
if os.path.exists("snapshot.ckpt"):
    fabric.load("snapshot.ckpt", state)
for epoch in range(state["epoch"], 5):
    for x, y in data:
        loss = cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    state["epoch"] = epoch + 1
    fabric.save("snapshot.ckpt", state)
