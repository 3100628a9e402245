"""The training library and its snapshots on the device: killed at random steps, the weights are those of the undisturbed run."""

import shutil
from collections.abc import Callable

from torchmuster.gpucheck.kit import ImpossibleError, Kit, Ran

_ONE = ("--nproc-per-node", 1)
_STEPS = 24
_GIB = 1 << 30


def exact_resume(kind: str) -> Callable[[Kit], None]:
    """Return the check of a kind of training: killed twice at steps that are drawn, and compared bit for bit."""

    def check(kit: Kit) -> None:
        kills = f"{kit.draw.randint(2, _STEPS - 8)},{kit.draw.randint(_STEPS - 7, _STEPS - 1)}"
        kit.measures["killed at steps"] = kills
        plain = kit.muster(_ONE, "train", f"kind={kind}", f"steps={_STEPS}")
        killed = _killed_run(kit, f"kind={kind}", f"steps={_STEPS}", f"kills={kills}")
        expect_same(kit, plain, killed, f"kind={kind}", f"steps={_STEPS}")

    return check


def _killed_run(kit: Kit, *words: str) -> Ran:
    """Return a run whose worker was killed and that went on from what was saved."""
    ran = kit.muster([*_ONE, "--max-restarts", 5], "train", *words)
    kills, resumed = ran.all("killed"), ran.all("resumed")
    ran.expect(len(resumed) == len(kills) + 1, f"{len(kills)} kills, begun {len(resumed)} times")
    for killed, begun in zip(kills, resumed[1:], strict=True):
        ran.expect(0 < begun <= killed, f"killed at step {killed}, it went on from step {begun}")
    return ran


def expect_same(kit: Kit, plain: Ran, killed: Ran, *words: str) -> None:
    """Fail unless two runs have the same weights; where two undisturbed ones differ too, as near as those are."""
    if plain.one("weights") == killed.one("weights"):
        kit.measures["bit for bit"] = True
        return
    again = kit.muster(_ONE, "train", *words)
    spread = abs(plain.one("norm") - again.one("norm"))
    away = abs(plain.one("norm") - killed.one("norm"))
    kit.measures |= {"bit for bit": False, "spread of the norm": spread, "away by": away}
    same = plain.one("weights") == again.one("weights")
    if same or away > 2 * spread:
        killed.fail(
            f"the weights differ from those of the undisturbed run by {away:g} in their norm;"
            f" two undisturbed runs by {spread:g}"
        )


def on_device(kit: Kit) -> None:
    """What is loaded from a snapshot lies on the device at once."""
    ran = kit.muster(
        [*_ONE, "--max-restarts", 1], "snapshot", f"bytes={_size(kit, _GIB)}", "steps=8", "kill=6"
    )
    kinds = set(ran.all("kind"))
    wanted = "cpu" if kit.quick else "cuda"
    ran.expect(kinds == {wanted}, f"the weights are on {kinds}, not on {wanted}")
    ran.expect(ran.all("resumed") == [0, 4], f"begun at steps {ran.all('resumed')}, not 0 and 4")
    ran.expect(ran.one("first") == 4.0, f"the loaded value is {ran.one('first')}, not 4")
    kit.measures["load of 1 GiB, s"] = round(ran.one("load_s"), 3)


def costs(kit: Kit) -> None:
    """A snapshot of 1 GiB is copied through pinned memory: how long the loop stands, and what it takes on the device."""
    size = _size(kit, _GIB)
    ran = kit.muster(_ONE, "snapshot", f"bytes={size}", "steps=40")
    ran.expect(ran.one("last") == 40.0, f"the value is {ran.one('last')}, not 40")
    more = ran.one("more_bytes")
    ran.expect(more < size // 2, f"the copy takes {more} bytes more on the device, of {size}")
    kit.measures |= {
        "step, s": round(ran.one("step_s"), 4),
        "stall of the loop, s": round(ran.one("stall_s"), 4),
        "step while it is written, s": round(ran.one("busy_step_s"), 4),
        "more on the device, MiB": more >> 20,
    }


def in_memory(kit: Kit) -> None:
    """Snapshots in memory outlive the worker that held the device."""
    kill = kit.draw.randint(4, 16)
    words = ("kind=plain", f"steps={_STEPS}", "every=1000", "memory=1")
    plain = kit.muster(_ONE, "train", *words)
    killed = kit.muster([*_ONE, "--max-restarts", 2], "train", *words, f"kills={kill}")
    begun = killed.all("resumed")[-1]
    killed.expect(kill - 2 <= begun <= kill, f"killed at step {kill}, gone on from step {begun}")
    expect_same(kit, plain, killed, *words)


def ten_gigabytes(kit: Kit) -> None:
    """10 GB at once: saved and loaded, where device, memory and disk have room."""
    size = _size(kit, 10 * _GIB)
    if not kit.quick:
        free = kit.machine.gpus[0].memory_bytes - kit.machine.gpus[0].used_bytes
        if free < 2 * size:
            raise ImpossibleError(
                f"the device has {free >> 30} GiB free, and {2 * size >> 30} are needed"
            )
        if (room := shutil.disk_usage(kit.scratch).free) < 3 * size:
            raise ImpossibleError(
                f"{kit.scratch} has room for {room >> 30} GiB, needed are {3 * size >> 30}"
            )
    ran = kit.muster(
        [*_ONE, "--max-restarts", 1], "snapshot", f"bytes={size}", "steps=8", "kill=6", limit_s=170
    )
    ran.expect(ran.one("first") == 4.0, f"the loaded value is {ran.one('first')}, not 4")
    kit.measures["load, s"] = round(ran.one("load_s"), 3)


def _size(kit: Kit, num_bytes: int) -> int:
    return 1 << 20 if kit.quick else num_bytes
