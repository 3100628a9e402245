"""Evaluates a model with BatchNorm on few samples after a training step; for test_evaluation.

Writes `OUT/rank-<rank>.json`: for each number of samples the metrics and this rank's batches.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

import torchmuster.train as tm

SIZES = (5, 2, 1, 7)


def set_apart(model, rank):
    """Give each rank other running means, as training does."""
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(rank)


def main(out):
    torch.set_num_threads(1)
    world = tm.init(seed=1, timeout_s=30)
    layers = [nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4)]
    model = world.wrap(nn.Sequential(*layers).double())
    results = {}
    for size in SIZES:
        model.train()
        model(torch.randn(4, 3, dtype=torch.float64)).sum().backward()
        with torch.no_grad():
            for buffer in model.buffers():
                buffer.fill_(1)
        set_apart(model, world.rank)
        generator = torch.Generator().manual_seed(size)
        x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        dataset = torch.utils.data.TensorDataset(x, torch.arange(size) % 4)
        test = world.evaluation(dataset, batch_size=2)
        model.eval()
        rounds, batches = [], []
        for _ in range(2):
            with torch.no_grad():
                for x, y in test:
                    logits = model(x)
                    test.add(
                        loss=nn.functional.cross_entropy(logits, y), accuracy=logits.argmax(1) == y
                    )
                    batches.append(len(y))
            rounds.append(test.result())
        results[size] = {"rounds": rounds, "batches": batches}
    (out / f"rank-{world.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
