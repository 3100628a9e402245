"""pbsdsh and pbs_tmrsh: processes on the hosts of a job."""

import os
import signal
import subprocess
import sys

from fake_pbs.hosts import job_environment
from fake_pbs.state import STATE, fail, state


def pbsdsh(words):
    number = None
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        if word == "-n":
            number = int(words.pop(0))
        elif word not in ("-v", "-o", "-s"):
            print("usage: pbsdsh [-n num] [-o] [-s] [-v] -- program [args]", file=sys.stderr)
            return fail(f"pbsdsh: invalid option {word}", 2)
    lines = own_lines()
    if lines is None:
        return fail("pbsdsh: tm_init: not in a job")
    if number is not None and not 0 <= number < len(lines):
        return fail(f"pbsdsh: there are only {len(lines)} nodes", 1)
    chosen = range(len(lines)) if number is None else [number]
    started = [(line, start_task(lines, line, words)) for line in chosen]
    pass_on_signals([child for _, (_, child) in started])
    for _, (task, child) in started:
        if status := child.wait():
            code = 256 - status if status < 0 else status
            print(f"pbsdsh: task 0x{task:08x} exit status {code}", file=sys.stderr)
    return 0  # recorded: whatever the commands do


def pass_on_signals(tasks):
    """Give our signals to the tasks, as pbsdsh does; Source: openpbs src/cmds/pbsdsh.c, `bailout`.

    The real one then leaves at once: its tasks are children of their host's daemon. Here they are ours, so we stay.
    """

    def pass_on(signum, _frame):
        for task in tasks:
            if task.returncode is None:
                os.kill(task.pid, signum)

    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, pass_on)


def pbs_tmrsh(words):
    host, command = words[0], words[1:]
    lines = own_lines()
    if lines is None:
        return fail("pbs_tmrsh: tm_init: not in a job")
    if host not in lines:
        return fail(f"pbs_tmrsh: host {host} not in node file", 254)
    status = start_task(lines, lines.index(host), command)[1].wait()
    return 128 - status if status < 0 else status


def own_lines():
    path = STATE / "spool" / f"aux.{os.environ.get('PBS_JOBID', '')}"
    return path.read_text().split() if path.exists() else None


def start_task(lines, line, command):
    """Start a command on a line's host; what the script exported does not arrive."""
    job_id = os.environ["PBS_JOBID"]
    with state() as data:
        job = data["jobs"][job_id]
        job["tasks"] += 1
        task = job["tasks"]
    hosts = list(dict.fromkeys(lines))
    host = lines[line]
    environment = job_environment(job_id, job)
    chunk = job["asked"]["chunks"][job["hosts"].index(host)]
    environment |= {
        "PBS_NODENUM": str(hosts.index(host)),
        "PBS_TASKNUM": str(task),
        "NCPUS": str(chunk["ncpus"]),
        "OMP_NUM_THREADS": str(chunk["ncpus"]),
        "PATH": "/bin:/usr/bin",
    }
    if lines.index(host) != line:
        del environment["PBS_NODEFILE"]  # recorded: only the first process of a host has it
    try:
        child = subprocess.Popen(
            command,
            cwd=STATE / "home",
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        child = subprocess.Popen(["/bin/sh", "-c", "exit 254"])
    with state() as data:
        data["jobs"][job_id]["pids"][str(child.pid)] = host
    return task, child
