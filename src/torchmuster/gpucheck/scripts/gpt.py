"""A GPT on synthetic tokens: `gpt.py seconds=30 library=1 kill=1 size=large`, or `small`.

The large size has 100 M parameters.
"""

import os
import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from torchmuster.gpucheck.scripts import gpu

_SIZES = {"large": (768, 12, 12, 512, 16384), "small": (32, 2, 2, 16, 64)}


class Gpt(nn.Module):
    """A decoder made of torch's own layers, with tied embeddings."""

    def __init__(self, size: str) -> None:
        super().__init__()
        width, layers, heads, self.context, self.vocabulary = _SIZES[size]
        self.tokens = nn.Embedding(self.vocabulary, width)
        self.places = nn.Embedding(self.context, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return the logits, (B, T, vocabulary)."""
        length = tokens_BT.shape[1]
        places_T = torch.arange(length, device=tokens_BT.device)
        mask_TT = nn.Transformer.generate_square_subsequent_mask(length, device=tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.places(places_T)
        x_BTD = self.blocks(x_BTD, mask=mask_TT, is_causal=True)
        return F.linear(self.norm(x_BTD), self.tokens.weight)


def main(words: dict[str, str]) -> None:
    """Train until the time is up; report the steps that count."""
    own = gpu.touch()
    batch = 16 if words["size"] == "large" else 4
    model: Any = Gpt(words["size"])
    if words.get("library") == "1":
        _with_library(model, batch, words)
    else:
        model = model.to(own)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        step = 0
        while _spent() < float(words["seconds"]):
            tokens = torch.randint(model.vocabulary, (batch, model.context + 1), device=own)
            _train(model, optimizer, tokens)
            step += 1
            gpu.say(step=step)


def _with_library(model: Any, batch: int, words: dict[str, str]) -> None:
    import torchmuster.train as tm

    world = tm.init(device="cpu" if gpu.PRETENDED else None)
    samples = torch.randint(model.vocabulary, (batch * 64, model.context + 1))
    wrapped = world.wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=3e-4)
    data = world.loader(torch.utils.data.TensorDataset(samples), global_batch_size=batch)
    run = world.resume(
        model=wrapped, optimizer=optimizer, data=data, every_s=10.0, every_epoch=False
    )
    seconds = float(words["seconds"])
    kills = "kill" in words and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    for _ in run.epochs(1_000_000):
        for (tokens,) in data:
            _train(wrapped, optimizer, tokens)
            gpu.say(step=run.steps_done)
            run.step()
            if kills and _spent() > seconds / 2:
                gpu.say(killed=run.steps_done)
                os.kill(os.getpid(), 9)
            if _spent() >= seconds:
                return


def _spent() -> float:
    """Return the seconds since the first call, over all attempts."""
    path = os.path.join(gpu.FACTS, "begun")
    if not os.path.exists(path):
        with open(path, "w"):
            pass
    return time.time() - os.stat(path).st_mtime


def _train(model: Any, optimizer: Any, tokens: torch.Tensor) -> None:
    kind = tokens.device.type
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda"):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    gpu.synchronize()


if __name__ == "__main__":
    main(dict(word.split("=", 1) for word in sys.argv[1:]))
