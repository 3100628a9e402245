"""The toy scheduler: a folder is its queue, this machine all of its nodes. Not for use; for reading.

$TOY_QUEUE holds for each job `<id>.json` and `<id>.sh`. There is no server: `toy_submit` leaves a process behind that
waits for the jobs before, runs the script and writes down its end.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

FINAL = ("done", "failed", "cancelled", "late")


def queue() -> Path:
    """Return the folder of the queue."""
    path = Path(os.environ.get("TOY_QUEUE") or "~/.toy_queue").expanduser()
    path.mkdir(parents=True, exist_ok=True)
    return path


def read(job_id: str) -> dict:
    """Return what is known of a job; empty when there is none."""
    try:
        return json.loads((queue() / f"{job_id}.json").read_text())
    except (OSError, ValueError):
        return {}


def write(job_id: str, **changes: object) -> None:
    """Note a change of a job, whole or not at all."""
    path = queue() / f"{job_id}.json"
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps({**read(job_id), **changes}))
    temporary.replace(path)


def submit() -> int:
    """toy_submit [--after=KIND:ID,...] [--log=PATH] SCRIPT."""
    *words, script = sys.argv[1:]
    text = Path(script).read_text()
    options = dict(re.findall(r"^#TOY --([a-z]+)=(.*)$", text, re.MULTILINE))
    options |= dict(word.removeprefix("--").split("=", 1) for word in words)
    if options.get("queue", "day") != "day":
        print(f"toy_submit: no such queue: {options['queue']}", file=sys.stderr)
        return 1
    number = 1
    while True:  # the first number whose file is not there yet
        try:
            (queue() / f"{number}.json").touch(exist_ok=False)
            break
        except FileExistsError:
            number += 1
    (queue() / f"{number}.sh").write_text(text)
    write(str(number), state="waits", options=options, reason="")
    subprocess.Popen(
        [sys.executable, "-m", "toy_engine.scheduler", str(number)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    print(f"toy job {number}")
    return 0


def stat() -> int:
    """toy_stat ID..."""
    unknown = 0
    for job_id in sys.argv[1:]:
        job = read(job_id)
        if not job:
            print(f"toy_stat: unknown job {job_id}", file=sys.stderr)
            unknown = 1
            continue
        nodes = job.get("nodes", "")
        print(f"{job_id}|{job['state']}|{job.get('code', '')}|{nodes}|{job['reason']}")
    return unknown


def cancel() -> int:
    """toy_cancel ID."""
    job_id = sys.argv[1]
    job = read(job_id)
    if not job:
        print(f"toy_cancel: unknown job {job_id}", file=sys.stderr)
        return 1
    if job["state"] not in FINAL:
        write(job_id, state="cancelled")
        if "pid" in job:
            os.killpg(job["pid"], signal.SIGTERM)
    return 0


def run() -> int:
    """toy_run NODE COMMAND...: all nodes are this machine."""
    os.environ["TOY_NODE"] = sys.argv[1]
    os.execv(sys.argv[2], sys.argv[2:])


def serve(job_id: str) -> None:
    """Wait for the jobs before, run the script, note its end."""
    options = read(job_id)["options"]
    pause = threading.Event()
    for word in filter(None, options.get("after", "").split(",")):
        kind, _, before = word.partition(":")
        write(job_id, reason=f"after job {before}")
        while read(before).get("state") not in FINAL:
            pause.wait(0.1)
        if kind == "afterok" and read(before)["state"] != "done":
            return write(job_id, state="cancelled", reason=f"job {before} has not ended well")
    if read(job_id)["state"] == "cancelled":
        return None
    nodes = ",".join(f"toy{i + 1}" for i in range(int(options.get("nodes", 1))))
    own = {"TOY_JOB_ID": job_id, "TOY_NODES": nodes, "TOY_NODE": "toy1"}
    environment = {**os.environ, **own}
    with open(options.get("log", os.devnull), "a") as log:
        job = subprocess.Popen(
            ["bash", str(queue() / f"{job_id}.sh")],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        write(job_id, state="runs", pid=job.pid, nodes=nodes, reason="")
        limit_s = int(options["time"]) * 60 if "time" in options else None
        state = None
        try:
            job.wait(limit_s)
        except subprocess.TimeoutExpired:
            state = "late"
            os.killpg(job.pid, signal.SIGKILL)
        code = job.wait()
    if read(job_id)["state"] == "cancelled":
        state = "cancelled"
    state = state or ("done" if code == 0 else "failed")
    return write(job_id, state=state, code=code if code >= 0 else 128 - code)


if __name__ == "__main__":
    serve(sys.argv[1])
