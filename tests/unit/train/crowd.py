"""Many processes that want the same pieces of work done once: what test_once.py starts.

    python crowd.py FOLDER NUM_PROCESSES MODE NAME...

Each process appends `name pid` to FOLDER/work when a piece is its own. In mode `hang` the first one
to get a piece writes FOLDER/owner and waits to be killed; in mode `raise` it raises. Prints, as JSON,
how each process ended: its exit code, or 128 and the signal.

No lease ends in the time that a process waits: what is taken over was proved to be left.
"""

import json
import os
import signal
import sys
from pathlib import Path

from torchmuster.train.once import OnceError, OncePlace, once


def say(text):
    print(text, file=sys.stderr, flush=True)


def first_of_all(folder):
    try:
        os.close(os.open(folder / "first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def work(folder, mode, name):
    with open(folder / "work", "a") as file:
        file.write(f"{name} {os.getpid()}\n")
    if mode == "hang" and first_of_all(folder):
        (folder / "owner.tmp").write_text(str(os.getpid()))
        (folder / "owner.tmp").rename(folder / "owner")
        signal.pause()
    if mode == "raise":
        raise ValueError("no such archive")


def member(folder, mode, names):
    markers = str(folder / "markers")
    place = OncePlace(folder=markers, token="attempt-1", say=say, timeout_s=60, lease_s=3600)
    try:
        for name in names:
            with once(name, place) as mine:
                if mine:
                    work(folder, mode, name)
    except ValueError:
        return 3
    except OnceError as error:
        say(f"{error.what}; {error.why}")
        return 4
    return 0


def main(folder, num_processes, mode, names):
    pids = []
    for _ in range(num_processes):
        pid = os.fork()
        if pid == 0:
            os._exit(member(folder, mode, names))
        pids.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    codes = [os.WEXITSTATUS(c) if os.WIFEXITED(c) else 128 + os.WTERMSIG(c) for c in codes]
    print(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
