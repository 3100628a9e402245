import torch
from task import build_model, cross_entropy, train_set
from torch.utils.data import DataLoader

device = "cuda" if torch.cuda.is_available() else "cpu"
model = build_model().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
data = DataLoader(train_set(), batch_size=64, shuffle=True)
for epoch in range(5):
    for x, y in data:
        x, y = x.to(device), y.to(device)
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
