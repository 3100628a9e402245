"""The ranks that are left when another one fails: what they can still do, and for how long."""

import signal
import threading
import time

import pytest

from kit.waiting import wait_until
from start.launching import end

HEAD = """
import os, signal, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
folder = os.environ["TOLD"]
path, begun = f"{folder}/checkpoint", f"{folder}/begun"

def fail_later():
    while not os.path.exists(begun):
        time.sleep(0.01)
    raise ValueError("no")

def note(*_):
    open(f"{folder}/term-{rank}", "a").write(f"{time.time()}\\n")
"""
# It is in no collective, and its handler lets it go on.
WRITES = (
    HEAD
    + """
if attempt:
    sys.exit(0 if rank or os.path.getsize(path) == 40_000 else 5)
if rank == 1:
    fail_later()
signal.signal(signal.SIGTERM, note)
with open(path, "wb") as file:
    for _ in range(40):
        file.write(b"x" * 1000)
        file.flush()
        open(begun, "w").close()
        time.sleep(0.05)
"""
)
# Its handler saves and exits, as the documentation of torchrun proposes.
SAVES = (
    HEAD
    + """
def save(*_):
    time.sleep(1.0)
    open(path, "wb").write(b"x" * 40_000)
    sys.exit(0)

if attempt:
    sys.exit(0 if rank or os.path.getsize(path) == 40_000 else 5)
if rank == 1:
    fail_later()
signal.signal(signal.SIGTERM, save)
open(begun, "w").close()
time.sleep(100)
"""
)


@pytest.mark.parametrize("script", [WRITES, SAVES], ids=["writes", "saves"])
def test_what_a_survivor_writes_outside_of_collectives_is_whole(launch, script):
    done = launch.run("--nproc-per-node=2", "--max-restarts=1", launch.script(script))

    assert done.returncode == 0, done.stderr
    assert "ValueError: no" in done.stderr


IDLES = (
    HEAD
    + """
if rank == 1:
    fail_later()
open(begun, "w").close()
time.sleep(100)
"""
)
COLLECTS = (
    HEAD
    + """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
if rank == 2:
    fail_later()
signal.signal(signal.SIGTERM, note)
if rank == 0:
    open(begun, "w").close()
    time.sleep(1.0)
dist.broadcast(torch.ones(1), 1 - rank)  # of two ranks that both live, so that neither gets an error
"""
)


@pytest.mark.parametrize(
    ("script", "num"), [(IDLES, 2), (COLLECTS, 3)], ids=["no handler", "collective"]
)
def test_a_survivor_that_can_t_use_it_is_ended_at_once(launch, script, num):
    begun = time.monotonic()

    done = launch.run(f"--nproc-per-node={num}", launch.script(script))

    assert done.returncode == 1
    assert time.monotonic() - begun < 20.0
    assert "ValueError: no" in done.stderr


STAYS = WRITES.replace("for _ in range(40)", "for _ in range(4000)")


def test_ctrl_c_ends_a_survivor_that_still_writes(launch):
    process = launch.begin("--nproc-per-node=2", launch.script(STAYS))
    wait_until((launch.folder / "told" / "term-0").exists, "its SIGTERM")
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)

    assert end(process).returncode != 0
    assert time.monotonic() - begun < 10.0


INTERRUPTED = (
    HEAD
    + """
def save(*_):
    time.sleep(float(sys.argv[1]))
    open(path, "w").close()
    sys.exit(0)

signal.signal(signal.SIGINT, save)
open(begun, "w").close()
time.sleep(100)
"""
)


@pytest.mark.parametrize(("num", "takes_s", "is_saved"), [(2, 4.0, True), (3, 100.0, False)])
def test_the_third_ctrl_c_ends_workers_that_still_save(launch, num, takes_s, is_saved):
    words = ("--nproc-per-node=1", launch.script(INTERRUPTED), str(takes_s))
    process = launch.begin(*words)
    wait_until((launch.folder / "told" / "begun").exists, "its workers")
    for _ in range(num):
        process.send_signal(signal.SIGINT)
        threading.Event().wait(1.0)  # two at once are one
    begun = time.monotonic()
    done = end(process)

    assert done.returncode == 130
    assert time.monotonic() - begun < 15.0
    assert (launch.folder / "told" / "checkpoint").exists() == is_saved
    assert "SIGKILL after 30 s or a third Ctrl-C" in done.stderr
    assert "waiting for the workers: SIGKILL in 2" in done.stderr
