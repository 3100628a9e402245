"""Job arrays of the pretended Slurm: a server for each array starts its elements; the state of each is a file in NUMBER.elements."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path


def wanted(words):
    """Return the size of an array and how many of it run at a time; None for a plain job."""
    word = next((word for word in words if word.startswith("--array=")), None)
    found = re.fullmatch(r"--array=0-(\d+)(?:%(\d+))?", word) if word is not None else None
    return (int(found[1]) + 1, int(found[2] or found[1]) or 1) if found else None


def submit(queue, known, number, words, directives, environment):
    """Take an array, and start its server unless the cluster holds all; return the exit status of sbatch."""
    size, parallel = wanted(words)
    if size > known.get("max_array", 1001):
        print(
            "sbatch: error: Batch job submission failed: Invalid job array specification",
            file=sys.stderr,
        )
        return 1
    after = re.search(r"--dependency=afterany:(\d+)", " ".join(words))
    folder = queue / f"{number}.elements"
    folder.mkdir()
    kept = folder / "script"
    kept.write_text(Path(words[-1]).read_text())  # as the real one does
    record = {
        "pid": 0,
        "size": size,
        "parallel": parallel,
        "after": after and after[1],
        "nodes": "node1",
        "output": directives["output"],
    }
    (queue / f"{number}.json").write_text(json.dumps({**record, "cancelled": False, "array": True}))
    if not known.get("hold"):
        with open(queue / f"{number}.log", "a") as log:
            script = str(Path(__file__).with_name("slurm"))
            server = subprocess.Popen(
                [sys.executable, script, "array", str(number), str(kept)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (queue / f"{number}.json").write_text(
            json.dumps({**record, "pid": server.pid, "cancelled": False, "array": True})
        )
    print(number)
    return 0


def serve(queue, number, script):
    """Run the elements of an array, some at a time; end those that are cancelled."""
    folder, pause = queue / f"{number}.elements", threading.Event()
    while '"pid": 0,' in (queue / f"{number}.json").read_text():
        pause.wait(0.02)
    job = json.loads((queue / f"{number}.json").read_text())
    while job["after"] and any(
        state(queue, job["after"], n) in ("PENDING", "RUNNING")
        for n in range(size(queue, job["after"]))
    ):
        pause.wait(0.05)
    waiting, running = list(range(job["size"])), {}
    while waiting or running:
        for element in [n for n in waiting if is_cancelled(folder, n)]:
            waiting.remove(element)
            put(folder, element, "CANCELLED")
        while waiting and len(running) < job["parallel"]:
            element = waiting.pop(0)
            own = {
                "SLURM_ARRAY_JOB_ID": number,
                "SLURM_ARRAY_TASK_ID": str(element),
                "SLURM_JOB_ID": f"{number}{element:05d}",
            }
            put(folder, element, "RUNNING")
            # Source: https://slurm.schedmd.com/sbatch.html, "filename pattern": %a is the element's number.
            with open(job["output"].replace("%a", str(element)), "a") as log:
                running[element] = subprocess.Popen(
                    ["bash", script],
                    env={**os.environ, **own},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        for element, child in list(running.items()):
            if is_cancelled(folder, element) and not (folder / f"told-{element}").exists():
                (folder / f"told-{element}").touch()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM)
            if child.poll() is not None:
                del running[element]
                good = "COMPLETED" if child.returncode == 0 else "FAILED"
                put(folder, element, "CANCELLED" if is_cancelled(folder, element) else good)
        pause.wait(0.05)


def put(folder, element, word):
    new = folder / f"new-{element}"
    new.write_text(word)
    new.replace(folder / f"state-{element}")


def is_cancelled(folder, element):
    return (folder / "cancel").exists() or (folder / f"cancel-{element}").exists()


def size(queue, number):
    return json.loads((queue / f"{number}.json").read_text())["size"]


def state(queue, number, element):
    folder = queue / f"{number}.elements"
    path = folder / f"state-{element}"
    return (
        path.read_text()
        if path.exists()
        else "CANCELLED"
        if is_cancelled(folder, element)
        else "PENDING"
    )


def squeue_lines(queue, number):
    """Return a line for each element."""
    told = ((n, state(queue, number, n)) for n in range(size(queue, number)))
    return [
        f"squeue|{number}_{n}|{word}|None|N/A|{'node1' if word != 'PENDING' else ''}"
        for n, word in told
    ]


def scancel(queue, word):
    """Cancel an array, or one element: 7 or 7_3; say whether it is one."""
    number, _, element = word.partition("_")
    folder = queue / f"{number}.elements"
    if folder.is_dir():
        (folder / (f"cancel-{element}" if element else "cancel")).touch()
    return folder.is_dir()
