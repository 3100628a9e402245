"""The script of the cases `stall`, `every10`, `memory`, `verify` and `write`: what a save costs the loop and the disk, and a verified step.

saves.py FOLDER '{"case": "stall", ...}'
"""

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, async_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.nn.functional import cross_entropy

import torchmuster.train as tm
from torchmuster.train.memory import MemorySettings
from torchmuster.train.snapshot import writer
from torchmuster.train.snapshot.folder import open_folder
from torchmuster.train.snapshot.staging import Staging, whole_boxes
from torchmuster.train.verify.watch import StepVerifier
from training.parts import (
    Values,
    arguments,
    batch_for,
    in_turn,
    perceptron,
    random_samples,
    report,
    wait_until_saved,
)

NUM_TENSORS = 10
STEP_MS = 50.0
LEARNING_RATE = 1e-4
WIDTH, NUM_LAYERS = 1100, 4
DD_BLOCK_BYTES = 8 << 20
# The second is not on every file system; dd's better figure is what counts.
DD_SETTINGS = {"dd conv=fsync": [], "dd conv=fsync oflag=direct": ["oflag=direct"]}

DCP_SAVES: list[Any] = []  # futures of saves that may still run


def main() -> None:
    """Measure one case and leave the values in the folder."""
    folder, what = arguments()
    torch.set_num_threads(1)
    world = tm.init()
    measures = {"stall": stall, "saving": saving, "memory": memory, "verify": verify}
    measure = (measures | {"write": write})[what["case"]]
    report(folder, measure(world, folder, what))
    world.close()


def large_model(state_mb: int) -> Any:
    """Return parameters of so many MB, none of them zero."""
    size = state_mb * 10**6 // 4 // NUM_TENSORS
    return nn.ParameterList([nn.Parameter(torch.randn(size)) for _ in range(NUM_TENSORS)])


def stall(world: tm.World, folder: Path, what: dict[str, Any]) -> Values:
    """Return how long the loop stands still for one save, in milliseconds."""
    model = world.wrap(large_model(what["state_mb"]))
    run = world.resume(model=model, folder=str(folder / "snapshots"), every_s=None, keep=1)
    blockers: dict[str, Callable[[], None]] = {
        "torch.save + fsync": lambda: save_by_hand(model, folder / "by-hand.pt"),
        "plain copy": _copier(model),
        "DCP async_save": _dcp_saver(model, folder / "dcp"),
        "torchmuster": lambda: save_by_run(run),
    }
    for block in blockers.values():  # the first one pays for the memory of the buffer
        block()
        quieten()
    values: dict[str, list[float]] = {side: [] for side in blockers}
    for _ in range(what["saves"]):
        for side, block in blockers.items():
            quieten()
            shutil.rmtree(folder / "dcp", ignore_errors=True)
            began_s = time.perf_counter()
            block()
            values[side].append(1e3 * (time.perf_counter() - began_s))
            (folder / "by-hand.pt").unlink(missing_ok=True)
    quieten()
    return {f"{what['name']}, ms": values}


def save_by_run(run: tm.Run) -> None:
    """Ask for a save, and come to the boundary where it is made."""
    run.save()
    run.step()


def save_by_hand(model: Any, path: Path) -> None:
    """Save as by hand, so that it is on the disk when this returns."""
    torch.save(model.state_dict(), path)
    sync(path)


def _dcp_saver(model: Any, folder: Path) -> Callable[[], None]:
    """Return what saves with torch.distributed.checkpoint, its copy kept from save to save."""
    stager = DefaultStager(
        StagingOptions(
            # All four want a GPU or a second process.
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )

    def save() -> None:
        storage = FileSystemWriter(folder)
        DCP_SAVES[:] = [async_save(model.state_dict(), storage_writer=storage, async_stager=stager)]

    return save


def _copier(model: Any) -> Callable[[], None]:
    """Return what copies all parameters into memory that is there already."""
    copies = [torch.zeros_like(p) for p in model.parameters()]

    def copy() -> None:
        with torch.no_grad():
            for target, source in zip(copies, model.parameters(), strict=True):
                target.copy_(source)

    return copy


def sync(path: Path) -> None:
    """Bring the bytes of a file to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def quieten() -> None:
    """Wait until nothing is being saved, and until the disk has all that was written."""
    wait_until_saved()
    while DCP_SAVES:
        DCP_SAVES.pop().result()
    os.sync()


def saving(world: tm.World, folder: Path, what: dict[str, Any]) -> Values:
    """Return the time of a step without saves and with one every so many steps."""
    batch_size = batch_for(perceptron(WIDTH, NUM_LAYERS), WIDTH, STEP_MS)
    model = perceptron(WIDTH, NUM_LAYERS)
    frozen = torch.randn(round(what["state_mb"] * 1e6 / 4) - NUM_LAYERS * WIDTH**2)
    model.register_buffer("frozen", frozen.clamp_min(-4.0))
    do_step = stepper(world, folder, model, random_samples(batch_size, WIDTH))
    loops = {
        "no saves": _stepping(do_step, every=None),
        "torchmuster": _stepping(do_step, every=what["every"]),
    }
    values = in_turn(
        loops, num_steps=what["steps"], num_blocks=what["blocks"], settle=wait_until_saved
    )
    return {f"{what['name']}, ms a step": values}


def memory(world: tm.World, folder: Path, what: dict[str, Any]) -> Values:
    """Return the time of a step without snapshots in memory and with them, and of their load."""
    batch_size = batch_for(perceptron(WIDTH, NUM_LAYERS), WIDTH, STEP_MS)
    model = perceptron(WIDTH, NUM_LAYERS)
    frozen = torch.randn(max(round(what["state_mb"] * 1e6 / 4) - NUM_LAYERS * WIDTH**2, 0))
    model.frozen = nn.Parameter(frozen, requires_grad=False)
    run, do_step = stepping(
        world, folder, model, random_samples(batch_size, WIDTH), memory_every_steps=what["every"]
    )
    in_memory = run._saves._memory
    assert in_memory is not None
    kept, never = in_memory.settings, MemorySettings(1 << 60)

    def steps(settings: MemorySettings) -> Iterator[None]:
        while True:
            in_memory.settings = settings
            do_step(False)
            yield

    loops = {"no saves": steps(never), "torchmuster": steps(kept)}
    values = in_turn(
        loops, num_steps=what["steps"], num_blocks=what["blocks"], settle=wait_until_saved
    )
    found = {f"{what['name']}, ms a step": values}
    if what["loads"]:
        wait_until_saved()
        found[f"{what['name']}, load, ms"] = {
            "torchmuster": [load(run) for _ in range(what["loads"])]
        }
    return found


def verify(world: tm.World, folder: Path, what: dict[str, Any]) -> Values:
    """Return the time of a step that is verified, and of one that is not."""
    batch_size = batch_for(perceptron(WIDTH, NUM_LAYERS), WIDTH, STEP_MS)
    model = perceptron(WIDTH, NUM_LAYERS)
    run, do_step = stepping(world, folder, model, random_samples(batch_size, WIDTH))
    verifier = StepVerifier(1, run, run._objects, world, run._metrics.record)

    def steps(every: int) -> Iterator[None]:
        while True:
            verifier.every = every
            do_step(False)
            yield

    loops = {"none verified": steps(1 << 60), "torchmuster": steps(1)}
    values = in_turn(
        loops, num_steps=what["steps"], num_blocks=what["blocks"], settle=wait_until_saved
    )
    return {f"{what['name']}, ms a step": values}


def load(run: tm.Run) -> float:
    """Return the milliseconds that it takes to load what memory holds."""
    began_s = time.perf_counter()
    loaded = run._saves.load()
    elapsed_ms = 1e3 * (time.perf_counter() - began_s)
    if loaded is None or not loaded.held:
        raise RuntimeError("it was not loaded from memory")
    return elapsed_ms


def stepper(
    world: tm.World, folder: Path, model: Any, batch: tuple[Any, Any]
) -> Callable[[bool], None]:
    """Return what does one step, and a save behind it when told so."""
    return stepping(world, folder, model, batch)[1]


def stepping(
    world: tm.World, folder: Path, model: Any, batch: tuple[Any, Any], **options: Any
) -> tuple[tm.Run, Callable[[bool], None]]:
    """Return a run, and what does one step of it and a save behind it when told so."""
    x, y = batch
    model = (
        world.wrap(model, broadcast_buffers=False) if world.world_size > 1 else world.wrap(model)
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
    run = world.resume(
        model=model, optimizer=optimizer, folder=str(folder / "snapshots"), every_s=None, **options
    )

    def do_step(is_saved: bool) -> None:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if is_saved:
            run.save()
        run.step(loss=loss)

    return run, do_step


def _stepping(do_step: Callable[[bool], None], *, every: int | None) -> Iterator[None]:
    """Do steps with a save in the middle of every `every`, so that its write is in the block."""
    for number in itertools.count():
        do_step(every is not None and number % every == every // 2)
        yield


def write(world: tm.World, folder: Path, what: dict[str, Any]) -> Values:
    """Return MB/s of our writer (checksum, fsync, commit) and of dd to the same disk."""
    model = large_model(what["state_mb"])
    staged = Staging().copy(whole_boxes(dict(model.named_parameters())), "data-00000.bin")
    num_blocks = max(1, staged.data.numel() // DD_BLOCK_BYTES)
    settings = {side: words for side, words in DD_SETTINGS.items() if runs_dd(folder, words)}
    values: dict[str, list[float]] = {side: [] for side in (*settings, "torchmuster")}
    for number in range(what["writes"]):
        for side, words in settings.items():
            quieten()
            elapsed_s = dd(folder, words, num_blocks)
            values[side].append(num_blocks * DD_BLOCK_BYTES / elapsed_s / 1e6)
        quieten()
        values["torchmuster"].append(
            staged.data.numel() / write_once(world, folder, staged, number) / 1e6
        )
    return {f"{what['name']}, MB/s": values}


def runs_dd(folder: Path, words: list[str]) -> bool:
    """Return whether dd takes these settings on this file system."""
    try:
        dd(folder, words, 1)
    except subprocess.CalledProcessError:
        return False
    return True


def dd(folder: Path, words: list[str], num_blocks: int) -> float:
    """Write zeros with dd; return the seconds that it took."""
    path = folder / "zeros"
    command = ["dd", "if=/dev/zero", f"of={path}", f"bs={DD_BLOCK_BYTES}", f"count={num_blocks}"]
    began_s = time.perf_counter()
    subprocess.run([*command, "conv=fsync", *words], check=True, capture_output=True)
    elapsed_s = time.perf_counter() - began_s
    path.unlink()
    return elapsed_s


def write_once(world: tm.World, folder: Path, staged: Any, number: int) -> float:
    """Write and commit one snapshot in a folder of its own; return the seconds that it took."""
    place = open_folder(str(folder / f"written-{number}"))
    crew = writer.Writers(
        folder=place,
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        generation=place.claim_generation(),
        keep=1,
        timeout_s=60.0,
    )
    order = writer.WriteOrder(
        number=number, step=number, epoch=0, kind="whole", staged=staged, state={}, rank_state={}
    )
    began_s = time.perf_counter()
    writer.write(crew, order)
    elapsed_s = time.perf_counter() - began_s
    place.delete(number)
    return elapsed_s


if __name__ == "__main__":
    main()
