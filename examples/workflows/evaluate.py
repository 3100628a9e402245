"""Say how well a line fits its points: `evaluate.py POINTS MODEL`."""

import sys

import torch

points = torch.load(sys.argv[1], weights_only=True)
state = torch.load(sys.argv[2], weights_only=True)
guess = points["x"] @ state["weight"].T + state["bias"]
error = (guess - points["y"]).pow(2).mean().item()
print(f"mean squared error {error:.6f}")
sys.exit(0 if error < 0.01 else 1)
