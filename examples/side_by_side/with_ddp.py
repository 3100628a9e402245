import os

import torch
import torch.distributed as dist
from task import build_model, cross_entropy, train_set
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
model = build_model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
samples = train_set()
sampler = DistributedSampler(samples, shuffle=True)
data = DataLoader(samples, batch_size=64 // dist.get_world_size(), sampler=sampler)
first_epoch = 0
if os.path.exists("snapshot.pt"):  # all ranks see this file: a shared file system
    saved = torch.load("snapshot.pt", map_location=device, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first_epoch = saved["epoch"]
wrapped = DistributedDataParallel(model)
for epoch in range(first_epoch, 5):
    sampler.set_epoch(epoch)
    for x, y in data:
        x, y = x.to(device), y.to(device)
        loss = cross_entropy(wrapped(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**states, "epoch": epoch + 1}, "snapshot.partial")
        os.replace("snapshot.partial", "snapshot.pt")
dist.destroy_process_group()
