import torch
from task import build_model, cross_entropy, train_set

import torchmuster.train as tm

model = tm.wrap(build_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
data = tm.loader(train_set(), global_batch_size=64, shuffle=True)
run = tm.resume(model=model, optimizer=optimizer, data=data)
for epoch in run.epochs(5):
    for x, y in data:
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
