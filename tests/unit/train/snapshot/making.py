"""Snapshots for tests: written as a run writes them, by a crew of one rank."""

import itertools
import json
import os
import zlib

import torch
import torch.distributed as dist

from torchmuster.train.snapshot import writer
from torchmuster.train.snapshot.load import look, none_good, set_damaged_aside
from torchmuster.train.snapshot.staging import Staging, whole_boxes
from torchmuster.train.snapshot.state import pack

DATA = "data-00000.bin"
_numbers = itertools.count()


def crew_of(folder, *, generation=1, keep=3, **more):
    options = {"rank": 0, "world_size": 1, "timeout_s": 20.0, "store": dist.HashStore(), **more}
    return writer.Writers(folder=folder, generation=generation, keep=keep, **options)


def order_of(step, state, *, kind="whole", file=DATA, number=None, buffers=()):
    tensors = {}
    packed = {name: pack(value, name, tensors) for name, value in state.items()}
    return writer.WriteOrder(
        number=next(_numbers) if number is None else number,
        step=step,
        epoch=0,
        kind=kind,
        staged=Staging().copy(whole_boxes(tensors), file),
        state=packed,
        rank_state={"note": "of a rank"},
        buffers=buffers,
    )


def state_of(step):
    """Return a state that tells its step in every part."""
    return {
        "model": {"weight": torch.full((3, 5), float(step)), "bias": torch.full((5,), step * 2.0)},
        "counter": {"steps": step, "seen": {1: step, "two": (step, None)}},
    }


def save(folder, step, *, state=None, generation=1, keep=100):
    if "://" not in folder.url:
        os.makedirs(folder.url, exist_ok=True)
    crew = crew_of(folder, generation=generation, keep=keep)
    writer.write(crew, order_of(step, state or state_of(step)))


def read_newest(folder, report, patience=None):
    """Return what a world of one loads, or raise as it does."""
    found = look(folder, report, patience)
    if found.loaded is not None:
        set_damaged_aside(folder, found, report)
    elif found.damaged or found.bad:
        raise none_good(folder, found)
    return found.loaded


def forge(plain):
    """Return a manifest with a right checksum around any JSON value or text."""
    body = plain.encode() if isinstance(plain, str) else json.dumps(plain).encode()
    return b"torchmuster-snapshot 1 crc32=%08x bytes=%d\n" % (zlib.crc32(body), len(body)) + body


def plain_of(raw):
    """Return the JSON value of a manifest's bytes."""
    return json.loads(raw.split(b"\n", 1)[1])
