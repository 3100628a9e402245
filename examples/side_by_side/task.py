"""What all scripts of this folder share: a small network, and the handwritten digits of ../digits."""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

__all__ = ["build_model", "cross_entropy", "train_set"]
DIGITS = Path(__file__).parents[1] / "digits" / "digits.csv.gz"


def build_model():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def train_set():
    table = np.loadtxt(DIGITS, delimiter=",")  # 64 pixels of 0 to 16, then the digit
    pixels, digits = torch.tensor(table[:, :-1], dtype=torch.float32), torch.tensor(table[:, -1])
    return TensorDataset(pixels / 16, digits.long())
