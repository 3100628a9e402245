"""Write points of a line: `make_data.py FILE`."""

import sys

import torch

torch.manual_seed(0)
x = torch.rand(512, 1)
torch.save({"x": x, "y": 3 * x + 1}, sys.argv[1])
print(f"{len(x)} points")
