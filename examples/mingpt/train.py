"""Train a small GPT on a text's characters: one script for one device, several, and many nodes.

Warm-up and cosine schedule, weight decay where it belongs, gradient accumulation and clipping; then
rank 0 lets the model write. A run that was killed or preempted goes on from its newest snapshot.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from model import GPT
from torch.utils.data import Dataset

import torchmuster.train as tm

TEXT = Path("/usr/share/common-licenses/GPL-3")  # on every Debian system
FALLBACK = Path(__file__).parents[2] / "LICENSE"


class Windows(Dataset):
    """Windows of `context` tokens and the same moved by one; one sample a window's length of text.

    With `shift` each begins up to a window later, at random, so that epochs see other windows.
    The draws are torch's: torchmuster's loader seeds them for each sample and epoch.
    """

    def __init__(self, tokens, context, *, shift):
        self.tokens, self.context, self.shift = tokens, context, shift

    def __len__(self):
        return (len(self.tokens) - 1) // self.context - int(self.shift)

    def __getitem__(self, index):
        begin = index * self.context
        if self.shift:
            begin += torch.randint(self.context, ()).item()
        window = self.tokens[begin : begin + self.context + 1]
        return window[:-1], window[1:]


def main(args):
    world = tm.init(seed=args.seed)
    text = read_text(args.text, world)
    characters = sorted(set(text))
    tokens = torch.tensor([characters.index(character) for character in text])
    num_valid = len(tokens) // 10
    train_set = Windows(tokens[:-num_valid], args.context, shift=True)
    valid_set = Windows(tokens[-num_valid:], args.context, shift=False)

    net = GPT(
        len(characters),
        context=args.context,
        num_layers=args.layers,
        num_heads=args.heads,
        width=args.width,
        dropout=args.dropout,
    )
    model = world.wrap(net)  # `net` stays the bare model, of which `write` is a method
    optimizer = torch.optim.AdamW(decay_groups(net, 0.1), lr=args.lr, betas=(0.9, 0.95))
    data = world.loader(
        train_set,
        global_batch_size=args.batch_size,
        accumulate=args.accumulate,
        shuffle=True,
        seed=args.seed,
    )
    scheduler = make_scheduler(optimizer, args.epochs * data.steps_per_epoch)
    run = world.resume(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=data,
        folder=args.snapshots,
        every_steps=args.save_every,
    )
    valid = world.evaluation(valid_set, batch_size=args.batch_size)
    for _ in run.epochs(args.epochs):
        model.train()
        for x, y in data:
            with torch.autocast(world.device.type, torch.bfloat16, enabled=args.bf16):
                loss = next_token_loss(model(x), y)
            loss.backward()  # not divided by `accumulate`: the loader's weights do that
            if data.ends_step:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            run.step(loss=loss)
        run.report(valid_loss=evaluate(model, valid))
    valid_loss = evaluate(model, valid)
    if world.is_first:
        guess = math.log(len(characters))
        print(f"loss {valid_loss:.3f} a character; a blind guess has {guess:.3f}")
        print(write(net, characters, args.letters, world.device))


def read_text(path, world):
    if path is None and not TEXT.exists():
        world.say(f"{TEXT} is not there: learning {FALLBACK} instead")
        path = FALLBACK
    return (path or TEXT).read_text()


def decay_groups(model, decay):
    """Decay what multiplies (matrices, embeddings); leave biases and norms alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]


def make_scheduler(optimizer, num_steps):
    """Warm up over the first 5 % of the steps, then fall along a cosine to a tenth."""
    warmup = max(num_steps // 20, 1)

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        share = (step - warmup) / max(num_steps - warmup, 1)
        return 0.55 + 0.45 * math.cos(math.pi * share)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def next_token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model, evaluation):
    """Return the loss over every window of the text that was held back, over all ranks."""
    model.eval()
    for x, y in evaluation:
        evaluation.add(loss=next_token_loss(model(x), y))
    return evaluation.result()["loss"]


def write(net, characters, count, device):
    """Return what the model writes behind an empty line."""
    net.eval()
    start = torch.tensor([[characters.index("\n")]], device=device)
    draw = torch.Generator(device).manual_seed(0)
    written = net.write(start, count, generator=draw)
    return "".join(characters[token] for token in written[0].tolist())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, help=f"a file to learn from (default: {TEXT})")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="windows a step, all devices")
    parser.add_argument("--accumulate", type=int, default=1, help="parts that a step is done in")
    parser.add_argument("--lr", type=float, default=2e-3, help="the highest, after the warm-up")
    parser.add_argument("--context", type=int, default=64, help="characters that the model sees")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16 where it is safe")
    parser.add_argument("--letters", type=int, default=300, help="how many to write at the end")
    parser.add_argument("--save-every", type=int, metavar="STEPS", help="beside every 5 minutes")
    parser.add_argument("--snapshots", help="a folder or URL (default: the run's own folder)")
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
