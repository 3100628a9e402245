"""pbsdsh and pbs_tmrsh: processes on the hosts of a job, children of the hosts' daemons."""

import json
import os
import signal
import sys

from fake_pbs.hosts import job_environment
from fake_pbs.state import STATE, fail, look, state

USAGE = """Usage: {0} [-c copies][-s][-v][-o] -- program [args...]
       {0} [-n node_index][-s][-v][-o] -- program [args...]
       {0} --version
Where -c copies =  run a copy of "program" on the first "copies" nodes,
      -n node_index = run a copy of "program" on the "node_index"-th node,
      -h hostname = run a copy of "program" on the node named by hostname,
      -s = forces synchronous execution,
      -v = forces verbose output.
      -o = no obits are waited for."""
_HOST_BITS = 29  # of a task's number: the host's index is above


def pbsdsh(words):
    name = sys.argv[0]
    options, command, wrong = read_options(words)
    if wrong or not command:
        for letter in wrong:
            print(f"{name}: invalid option -- '{letter}'", file=sys.stderr)
        return fail(USAGE.format(name))
    lines = own_lines()
    if lines is None:
        return fail("pbsdsh: not executing under PBS")
    chosen = choose_lines(lines, options)
    if chosen is None:
        return fail(f'{name}: host "{options["h"]}" is not a node in job <{own_job()}>')
    tasks = [start_task(lines, line, command) for line in chosen]
    pass_on_signals(tasks)
    for number, task in enumerate(tasks):
        if status := wait_for(task):
            code = 256 - status if status < 0 else status
            # Recorded from 23.06.06: on standard output.
            print(f"{name}: task 0x{number:08x} exit status {code}", flush=True)
    return 0  # recorded: whatever the commands do


def read_options(words):
    """Return options, the command and the letters that are no option: getopt takes the program's own, too.

    Recorded: `pbsdsh prog --opt` fails, since only `--` ends the options.
    """
    options, command, wrong, words = {}, [], [], list(words)
    while words:
        word = words.pop(0)
        if word == "--":
            return options, [*command, *words], wrong
        if not word.startswith("-") or word == "-":
            command.append(word)
            continue
        letters = word[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            if letter in "cnh":
                options[letter] = letters or (words.pop(0) if words else "")
                break
            if letter not in "svo":
                wrong.append(letter)
    return options, command, wrong


def choose_lines(lines, options):
    if "h" in options:
        return [lines.index(options["h"])] if options["h"] in lines else None
    if "n" in options:
        return [int(options["n"]) % len(lines)]  # recorded: of 2 lines, -n 7 is the second
    return range(min(int(options.get("c", len(lines))), len(lines)))


def pass_on_signals(tasks):
    """Give our signals to the tasks and leave; Source: openpbs src/cmds/pbsdsh.c, `bailout`."""

    def pass_on(signum, _frame):
        for task in tasks:
            if pid := pid_of(task):
                os.kill(pid, signum)
        os._exit(1)

    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, pass_on)


def pbs_tmrsh(words):
    host, command = words[0], words[1:]
    lines = own_lines()
    if lines is None:
        return fail("pbs_tmrsh: not executing under PBS", 255)
    if host not in lines:
        return fail(f'{sys.argv[0]}: host "{host}" is not a node in job <{own_job()}>', 255)
    return abs(wait_for(start_task(lines, lines.index(host), command)))


def own_job():
    return os.environ.get("PBS_JOBID", "")


def own_lines():
    path = STATE / "spool" / f"aux.{own_job()}"
    return path.read_text().split() if path.exists() else None


def start_task(lines, line, command):
    """Ask a host's daemon for a process; what the script exported does not arrive. Return its file's name."""
    job_id, host = own_job(), lines[line]
    hosts = list(dict.fromkeys(lines))
    index = hosts.index(host)
    with state() as data:
        job = data["jobs"][job_id]
        job["tasks"][host] = job["tasks"].get(host, 0) + 1
        number = job["tasks"][host]
    environment = job_environment(job_id, job)
    chunk = job["asked"]["chunks"][job["hosts"].index(host)]
    environment |= {
        "PBS_NODENUM": str(index),
        "PBS_TASKNUM": f"{(index << _HOST_BITS) + number:08X}",
        "NCPUS": str(chunk["ncpus"]),
        "OMP_NUM_THREADS": str(chunk["ncpus"]),
        "PATH": "/bin:/usr/bin",
    }
    if index == 0:
        del environment["PBS_NODEFILE"]  # recorded: only on the other hosts
    folder = STATE / "spool" / f"{job_id}.tasks"
    path = folder / f"{index}.{number}"
    if host in look()["lost"] or host in job["was_lost"]:
        return path  # recorded: such a start hangs for ever, also when the host is back
    new = folder / f".{index}.{number}"
    new.write_text(json.dumps({"host": host, "command": list(command), "env": environment}))
    new.replace(folder / f"{index}.{number}.wanted")
    return path


def pid_of(task):
    pid = task.parent / f"{task.name}.pid"
    return int(pid.read_text()) if pid.exists() else None


def wait_for(task):
    """Return the status of a task; negative for a signal."""
    ended = task.parent / f"{task.name}.ended"
    while not ended.exists():
        signal.sigtimedwait([], 0.02)
    return int(ended.read_text())
