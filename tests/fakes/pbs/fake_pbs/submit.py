"""qsub: what it takes, what it refuses, and the job that it makes."""

import getpass
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from fake_pbs.state import FAKES, SERVER, STATE, fail, state


class RefusedError(Exception):
    """What qsub says, and its exit code."""

    def __init__(self, said, code=1):
        super().__init__(said)
        self.code = code


# Exit codes recorded: 166 illegal value, 173 queue closed, 187 unknown resource, 188 limits, 2 usage.
ILLEGAL, CLOSED, UNKNOWN_RESOURCE, LIMITS, USAGE = 166, 173, 187, 188, 2
ARRAY_INDEX = "^array_index^"
TAKES_A_VALUE = "AaCcejJklmMNopPqSuvWr"
RESOURCES = ("ncpus", "mpiprocs", "ngpus", "mem", "sales_op", "host", "walltime", "select", "place")


def read_options(words):
    """Return options by letter (lists for -l, -W, -v), and what is left."""
    found, rest = {}, []
    words = list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word == "-":
            rest.append(word)
            continue
        letter, value = word[1], word[2:]
        if letter in TAKES_A_VALUE:
            if not value:
                if not words:
                    raise RefusedError(f"qsub: option requires an argument -- '{letter}'")
                value = words.pop(0)
            found.setdefault(letter, []).append(value.strip())
        elif letter in "hVzXI":
            found[letter] = True
        else:
            raise RefusedError(f"qsub: invalid option -- '{letter}'")
    return found, rest


def qsub(words):
    try:
        job_ids = make_job(words)
    except RefusedError as refusal:
        return fail(str(refusal), refusal.code)
    for job_id in job_ids:
        start_server(job_id)
    # Recorded: qsub leaves one of itself in the background, also inside a job; there for a minute.
    subprocess.Popen(
        ["sleep", "2"],
        env={},
        start_new_session=True,
        **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL),
    )
    print(job_ids[0])
    return 0


def make_job(words):
    options, rest = read_options(words)
    path = Path(rest[0]) if rest else None
    if path is None or not path.is_file():
        raise RefusedError("qsub: script file:: No such file or directory")
    text = path.read_text()
    given = read_directives(text)
    for letter, value in options.items():
        both = isinstance(value, list) and letter in "lvW"
        given[letter] = [*given.get(letter, []), *value] if both else value
    with state() as data:
        return accept(data, given, path, text, shlex.join(words))


def read_directives(text):
    found = {}
    for line in text.splitlines()[1:]:
        if line.startswith("#PBS"):
            options, _ = read_options(shlex.split(line[4:], comments=True))
            for letter, value in options.items():
                known = found.get(letter, []) if letter in "lvW" else []
                found[letter] = [*known, *value] if isinstance(value, list) else value
        elif line.strip() and not line.startswith("#"):
            break  # directives end with the first command
    return found


def accept(data, given, path, text, arguments):
    queue = given.get("q", ["workq"])[-1]
    if queue not in data["queues"]:
        raise RefusedError("qsub: Unknown queue", 170)
    if queue in data["closed"]:
        raise RefusedError("qsub: Queue is not enabled", CLOSED)
    if "qsub" in data["refuses"] and os.environ.get("HOME") == str(STATE / "home"):
        raise RefusedError("qsub: Bad UID for job execution")
    if "depend" in data["refuses"] and given.get("W"):
        raise RefusedError("qsub: Illegal attribute or resource value depend", ILLEGAL)
    asked = read_resources(given.get("l", []))
    if asked["walltime"] is None and data["queue_walltime"] is not None:
        asked = read_resources([*given.get("l", []), f"walltime={data['queue_walltime']}"])
    if asked.get("walltime_s", 0) > data["max_walltime_s"].get(queue, float("inf")):
        raise RefusedError("qsub: Job violates queue and/or server resource limits", LIMITS)
    depend = read_depend(given.get("W", []))
    indices = read_indices(given["J"][-1]) if "J" in given else None
    number = data["next"]
    data["next"] = number + 1
    job_id = f"{number}{'[]' if indices else ''}.{SERVER}"
    (STATE / "spool").mkdir(exist_ok=True)
    name = given.get("N", [path.name[:15]])[-1]
    joined = given.get("j", ["n"])[-1]
    end = f".{ARRAY_INDEX}" if indices else ""
    out = given.get("o", [f"{os.getcwd()}/{name}.o{number}{end}"])[-1]
    err = given.get("e", [f"{os.getcwd()}/{name}.e{number}{end}"])[-1]
    held = "h" in given or bool(depend)
    data["jobs"][job_id] = {
        "number": number,
        "name": name,
        "queue": queue,
        "state": "H" if held else "Q",
        "substate": 20 if held else 10,
        "user_hold": "h" in given,
        "depend": depend,
        "asked": asked,
        "join": joined,
        "out": os.path.abspath(out),
        "err": os.path.abspath(err),
        "shell": given.get("S", ["/bin/bash"])[-1],
        "rerun": given.get("r", ["y"])[-1] == "y",
        "account": given.get("A", [None])[-1],
        "project": given.get("P", ["_pbs_project_default"])[-1],
        "variables": read_variables(given),
        "arguments": arguments,
        "keep": given.get("k", ["n"])[-1],
        "hold_types": "u" if "h" in given else "s" if depend else "n",
        "ctime": time.strftime("%c"),
        "made_at": time.time(),
        "session": None,
        "cput_s": 0,
        "mem_kb": 0,
        "signals": [],
        "was_lost": [],
        "comment": None,
        "exit": None,
        "deleted": None,
        "run_count": 0,
        "hosts": [],
        "server_pid": None,
        "pids": {},
        "tasks": {},
    }
    members = add_members(data["jobs"], job_id, given["J"][-1], indices) if indices else [job_id]
    for member in members:
        (STATE / "spool" / f"{member}.SC").write_text(text)
    return [job_id, *members] if indices else members


def read_indices(text):
    """Return the indices of `X-Y` or `X-Y:STEP`."""
    found = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise RefusedError("qsub: illegal -J value\nusage: qsub [-a date_time] ...", USAGE)
    return range(int(found[1]), int(found[2]) + 1, int(found[3] or 1))


def add_members(jobs, array_id, submitted, indices):
    """Make the jobs of an array, `7[1].ctl`; return their ids. Recorded: each has its own hosts, output and end."""
    array = jobs[array_id]
    members = []
    for index in indices:
        member = array_id.replace("[]", f"[{index}]")
        own = {key: array[key].replace(ARRAY_INDEX, str(index)) for key in ("out", "err")}
        variables = {"PBS_ARRAY_ID": array_id, "PBS_ARRAY_INDEX": str(index)}
        jobs[member] = {
            **array,
            **own,
            "variables": {**array["variables"], **variables},
            "array_id": array_id,
            "array_index": index,
        }
        members.append(member)
    array |= {"members": members, "submitted": submitted}
    return members


def read_resources(texts):
    found = {"select": "1:ncpus=1", "place": "free", "walltime": None}
    for text in texts:
        for part in text.split(","):
            key, _, value = part.partition("=")
            found[key] = value
    found["chunks"] = read_chunks(found["select"])
    if found["walltime"] is not None:
        if not re.fullmatch(r"\d+(:\d+){0,2}", found["walltime"]):
            raise RefusedError(
                "qsub: Illegal attribute or resource value Resource_List.walltime", ILLEGAL
            )
        seconds = 0
        for part in found["walltime"].split(":"):
            seconds = seconds * 60 + int(part)
        found["walltime_s"] = seconds
    return found


def read_chunks(select):
    """Return one entry for each node that is asked for."""
    chunks = []
    for text in select.split("+"):
        words = text.split(":")
        count = int(words.pop(0)) if words[0].isdecimal() else 1
        keys = dict(word.partition("=")[::2] for word in words)
        for key in ("ncpus", "mpiprocs", "ngpus"):
            if key in keys and not keys[key].isdecimal():
                raise RefusedError("qsub: Illegal attribute or resource value", ILLEGAL)
        for key in keys:
            if key not in RESOURCES:
                raise RefusedError(f"qsub: Unknown resource: {key}", UNKNOWN_RESOURCE)
        if any(not value for value in keys.values()):
            raise RefusedError("qsub: Illegal attribute or resource value", ILLEGAL)
        ncpus = int(keys.get("ncpus", 1))
        chunk = {
            "ncpus": ncpus,
            "ngpus": int(keys.get("ngpus", 0)),
            "mpiprocs": int(keys.get("mpiprocs", 1 if ncpus else 0)),
        }
        chunks += [chunk] * count
    return chunks


def read_depend(texts):
    """Return the jobs to wait for. Recorded: one that is unknown is taken, and then nothing ever runs."""
    found = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or any(part.count(":") == 0 for part in value.split(",") if key == "depend"):
            raise RefusedError("qsub: illegal -W value\nusage: qsub [-a date_time] ...", USAGE)
        if key != "depend":
            continue
        for part in value.split(","):
            kind, *ids = part.split(":")
            if kind not in ("afterok", "afterany", "afternotok"):
                raise RefusedError("qsub: illegal -W value\nusage: qsub [-a date_time] ...", USAGE)
            found += [[kind, job_id if "." in job_id else f"{job_id}.{SERVER}"] for job_id in ids]
    return found


def read_variables(given):
    home = str(STATE / "home")
    found = dict(os.environ) if "V" in given else {}
    for text in given.get("v", []):
        for part in text.split(","):
            name, equals, value = part.partition("=")
            found[name] = value if equals else os.environ.get(name, "")
    for name in ("FAKE_PBS", "HOME"):
        found.pop(name, None)
    found |= {
        "PBS_O_HOME": home,
        "PBS_O_HOST": SERVER,
        "PBS_O_PATH": os.environ.get("PATH", ""),
        "PBS_O_QUEUE": given.get("q", ["workq"])[-1],
        "PBS_O_WORKDIR": os.getcwd(),
        "PBS_O_LOGNAME": getpass.getuser(),
    }
    return found


def start_server(job_id):
    home = STATE / "home"
    home.mkdir(exist_ok=True)
    # Where a site's profile adds PBS's commands; python3 for their first lines.
    folders = f"{FAKES}:{Path(sys.executable).parent}"
    (home / ".bash_profile").write_text(f"PATH={shlex.quote(folders)}:$PATH\n")
    with open(STATE / "server.log", "a") as log:
        subprocess.Popen(
            [sys.executable, str(FAKES / "pbs"), "serve", job_id],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )
