"""The server's and the hosts' part of one job: wait for its turn, run it, end it."""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from fake_pbs.hosts import job_environment, scratch
from fake_pbs.state import STATE, look, state


def serve(job_id):
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: nothing of the job escapes
    with state() as data:
        data["jobs"][job_id]["server_pid"] = os.getpid()
    while serve_once(job_id):
        pass  # qrerun: once more
    return 0


def serve_once(job_id):
    """Wait for the job's turn and run it; say whether it is to start again."""
    while True:
        with state() as data:
            job = data["jobs"][job_id]
            if job["deleted"] is not None:
                finish(job, 91, None, None)
                return False
            word = next_step(job, data)
            if word == "never":
                finish(job, 92, None, None)
                return False
            if word == "run":
                place = find_place(job["asked"], data)
                begin(job, place)
                break
        wait(0.05)
    return run(job_id)


def next_step(job, data):
    """Return run, wait or never."""
    for kind, other_id in job["depend"]:
        other = data["jobs"][other_id]
        if other["state"] != "F":
            return "wait"
        if kind == "afterok" and other["exit"] != 0:
            return "never"
        if kind == "afternotok" and other["exit"] in (0, None):
            return "never"
    if job["user_hold"]:
        return "wait"
    job["state"], job["substate"] = "Q", 10
    empty = {**data, "jobs": {}}
    if find_place(job["asked"], empty) is None:
        job["comment"] = "Can Never Run: Not enough total nodes available"
        return "wait"
    if find_place(job["asked"], data) is None:
        job["comment"] = "Not Running: Insufficient amount of resource: ncpus"
        return "wait"
    return "run"


def find_place(asked, data):
    """Return a host for each chunk, or None."""
    free = {name: dict(room) for name, room in data["hosts"].items()}
    for other in data["jobs"].values():
        if other["state"] == "R":
            for host, chunk in zip(other["hosts"], other["asked"]["chunks"], strict=True):
                for key in ("ncpus", "ngpus"):
                    free[host][key] -= chunk[key]
    scattered = "scatter" in asked["place"]
    chosen = []
    for chunk in asked["chunks"]:
        fits = (
            name
            for name, room in free.items()
            if not (scattered and name in chosen)
            and all(room[key] >= chunk[key] for key in ("ncpus", "ngpus"))
        )
        host = next(fits, None)
        if host is None:
            return None
        for key in ("ncpus", "ngpus"):
            free[host][key] -= chunk[key]
        chosen.append(host)
    return chosen


def begin(job, hosts):
    vnodes = []
    for host, chunk in zip(hosts, job["asked"]["chunks"], strict=True):
        gpus = f":ngpus={chunk['ngpus']}" if chunk["ngpus"] else ""
        vnodes.append(f"({host}:ncpus={chunk['ncpus']}{gpus})")
    job["hosts"] = hosts
    job["exec_vnode"] = "+".join(vnodes)
    job["exec_host"] = "+".join(
        f"{host}/0*{chunk['ncpus']}"
        for host, chunk in zip(hosts, job["asked"]["chunks"], strict=True)
    )
    when = time.strftime("%a %b %d at %H:%M")
    job["comment"] = f"Job run at {when} on {job['exec_vnode']}"
    job["state"], job["substate"] = "R", 42
    job["run_count"] += 1
    job["started"] = time.time()


def run(job_id):
    with state() as data:
        job = data["jobs"][job_id]
        delay_s, lag_s = data["kill_delay_s"], data["walltime_lag_s"]
    spool = STATE / "spool"
    lines = [
        host
        for host, chunk in zip(job["hosts"], job["asked"]["chunks"], strict=True)
        for _ in range(chunk["mpiprocs"])
    ]
    node_file = spool / f"aux.{job_id}"
    node_file.write_text("".join(f"{line}\n" for line in lines))
    Path(scratch(job_id)).mkdir(parents=True, exist_ok=True)
    out, err = spool / f"{job_id}.OU", spool / f"{job_id}.ER"
    joined = job["join"] in ("oe", "eo")
    with open(out, "w") as stdout, open(err, "w") as stderr:
        # A login shell reads the script; the script's own first line is a comment to it.
        child = subprocess.Popen(
            ["-" + Path(job["shell"]).name, str(spool / f"{job_id}.SC")],
            executable=job["shell"],
            cwd=STATE / "home",
            env=job_environment(job_id, job),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stdout if joined else stderr,
            start_new_session=True,
        )
        with state() as data:
            data["jobs"][job_id]["pids"][str(child.pid)] = "script"
        status, over = watch(job_id, job, child, delay_s, lag_s)
        end_rest()
        if over is not None:
            limit = job["asked"]["walltime_s"]
            stdout.write(f"=>> PBS: job killed: walltime {over} exceeded limit {limit}\n")
    shutil.rmtree(scratch(job_id), ignore_errors=True)
    node_file.unlink()
    deliver(out, job["out"])
    if not joined:
        deliver(err, job["err"])
    err.unlink(missing_ok=True)
    with state() as data:
        job = data["jobs"][job_id]
        if job.pop("rerun_asked", False) and over is None and job["deleted"] is None:
            job |= {
                "state": "Q",
                "substate": 10,
                "comment": None,
                "hosts": [],
                "pids": {},
                "tasks": 1,
            }
            return True
        code = 256 - status if status < 0 else status
        if over is not None:
            finish(job, 93, -29, " and exceeded resource walltime")
        elif job["deleted"] is not None:
            finish(job, 91, code, f" and terminated by {job['deleted']}")
        else:
            finish(job, 93 if code else 92, code, " and failed" if code else " and finished")
    return False


def watch(job_id, job, child, delay_s, lag_s):
    """Return the script's status, and the seconds it had when its time was over."""
    limit_s = job["asked"].get("walltime_s")
    kill_at = over = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(0.05), over
        now = time.time()
        elapsed = now - job["started"]
        if kill_at is None:
            if limit_s is not None and elapsed > limit_s + lag_s:
                over = max(int(elapsed), limit_s + 1)
            if over is not None or look()["jobs"][job_id]["deleted"] is not None:
                signal_all(signal.SIGTERM)
                kill_at = now + delay_s
            elif look()["jobs"][job_id].get("rerun_asked"):
                signal_all(signal.SIGKILL)  # Source: openpbs src/resmom/requests.c, req_rerunjob
        elif now > kill_at:
            signal_all(signal.SIGKILL)
        reap_orphans(child.pid)


def reap_orphans(keep):
    for pid in children():
        if pid != keep:
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)


def children(parent=None):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == (parent or os.getpid()):
                    found.append(int(entry))
    return found


def is_server(pid):
    """Say whether this is the server's part of another job, which the script has submitted."""
    try:
        return b"\0serve\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def below():
    """Return every process of the job."""
    waiting, found = [os.getpid()], []
    while waiting:
        more = [pid for pid in children(waiting.pop()) if not is_server(pid)]
        found += more
        waiting += more
    return found


def signal_all(signum):
    for pid in below():
        with contextlib.suppress(OSError):
            os.kill(pid, signum)


def end_rest():
    """Kill and reap what the script left behind."""
    while below():
        signal_all(signal.SIGKILL)
        reap_orphans(None)
        wait(0.01)


def deliver(spooled, path):
    """The output comes when the job is over, as with -o and no -k."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    shutil.move(spooled, path)


def finish(job, substate, code, suffix):
    job["state"], job["substate"], job["exit"] = "F", substate, code
    job["comment"] = job["comment"] + suffix if suffix and job["comment"] else None
    job["pids"], job["server_pid"] = {}, None


def wait(seconds):
    """Let time pass; there is nothing to be told of another process's file."""
    signal.sigtimedwait([], seconds)
