"""What of schedulers is on this machine: their commands, versions, partitions and queues.

Each command has a time limit; one that hangs or fails is a finding, not an error.
"""

import os
import pwd
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torchmuster import proc
from torchmuster.errors import MusterError

TIMEOUT_S = 5.0
Ask = Callable[[Sequence[str]], proc.Answered]
Which = Callable[[str], str | None]
# The command whose presence means the engine, and how it tells its version.
CLIENTS = {
    "sbatch": ("sbatch", "--version"),
    "qsub": ("qsub", "--version"),
    "ssh": ("ssh", "-V"),
}
CLIENT_OF_KIND = {"slurm": "sbatch", "pbs": "qsub", "torque": "qsub", "ssh": "ssh"}
# All that a run needs here.
TOOLS_OF_KIND = {
    "slurm": ("sbatch", "squeue", "scancel"),
    "pbs": ("qsub", "qstat", "qdel"),
    "torque": ("qsub", "qstat", "qdel"),
    "ssh": ("ssh",),
}
_SINFO = ("sinfo", "-h", "-o", "%P|%a|%l|%D|%c|%m|%G")
_QSTAT = ("qstat", "-Q")
_QSTAT_SERVER = ("qstat", "-B", "-f")  # the default queue stands with the server only


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One command of a scheduler.

    Attributes:
        version: As the command prints it; None when it didn't.
        problem: Why there is no version.
    """

    name: str
    path: str | None
    version: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """A partition of Slurm or a queue of PBS.

    Attributes:
        starts: It starts jobs; one that is stopped takes them all the same.
        about: What the scheduler says of it, for people.
    """

    name: str
    is_default: bool = False
    is_open: bool = True
    starts: bool = True
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueList:
    """What could be found out; `problem` says why it is not all."""

    queues: tuple[Queue, ...] = ()
    problem: str | None = None


def ask(argv: Sequence[str]) -> proc.Answered:
    """Run a command of a scheduler, for at most `TIMEOUT_S`.

    Raises:
        MusterError: It can't be executed.
    """
    return proc.ask(argv, b"", TIMEOUT_S)


def find_tool(name: str, which: Which, asking: Ask = ask) -> Tool:
    """Return where a command is, and its version if it is one that we know how to ask."""
    path = which(name)
    if path is None or name not in CLIENTS:
        return Tool(name=name, path=path)
    text, problem = _answer(CLIENTS[name], asking, both=True)
    version = parse_version(text)
    if version is None and problem is None:
        problem = "it printed no version"
    return Tool(name=name, path=path, version=version, problem=None if version else problem)


def parse_version(text: str) -> str | None:
    """Return the version from what `sbatch --version`, `qsub --version` or `ssh -V` print."""
    match = re.search(r"OpenSSH_[\w.]+|\d+(?:\.\w+)+", text)
    return match[0] if match else None


def list_queues(kind: str, asking: Ask = ask) -> QueueList:
    """Return the partitions of Slurm or the queues of PBS; none for other kinds."""
    if kind not in ("slurm", "pbs", "torque"):
        return QueueList()
    argv, parse = (_SINFO, parse_sinfo) if kind == "slurm" else (_QSTAT, parse_qstat)
    text, problem = _answer(argv, asking)
    queues = parse(text)
    if queues and kind != "slurm":
        queues = mark_default(queues, _answer(_QSTAT_SERVER, asking)[0])
    if not queues and problem is None:
        problem = f"`{' '.join(argv)}` listed none"
    return QueueList(queues=queues, problem=problem)


def list_accounts(which: Which, asking: Ask = ask) -> tuple[tuple[str, ...], str | None]:
    """Return the accounts of Slurm that this user may name, and why there are none to tell."""
    if which("sacctmgr") is None:
        return (), "no sacctmgr on PATH"
    user = pwd.getpwuid(os.getuid()).pw_name
    argv = ["sacctmgr", "-nP", "show", "associations", f"user={user}", "format=account"]
    text, problem = _answer(argv, asking)
    return parse_accounts(text), problem


def parse_accounts(text: str) -> tuple[str, ...]:
    """Return the accounts from `sacctmgr -nP show associations format=account`, each once."""
    words = (line.strip() for line in text.splitlines())
    return tuple(dict.fromkeys(w for w in words if re.fullmatch(r"[A-Za-z0-9_][\w.@-]*", w)))


def parse_sinfo(text: str) -> tuple[Queue, ...]:
    """Return the partitions, each once; nodes of several kinds make several lines of one."""
    found: dict[str, Queue] = {}
    for line in text.splitlines():
        cells = line.strip().split("|")
        if len(cells) != 7 or not cells[0].strip("*"):
            continue
        name, state, limit, nodes, cpus, memory, gres = (cell.strip() for cell in cells)
        about = f"{nodes} nodes of {cpus} CPUs and {memory} MB, at most {limit}"
        about += "" if gres in ("(null)", "") else f", {gres}"
        known = found.get(name.rstrip("*"))
        found[name.rstrip("*")] = Queue(
            name=name.rstrip("*"),
            is_default=name.endswith("*"),
            is_open=state == "up",
            about=f"{known.about}; {about}" if known is not None else about,
        )
    return tuple(found.values())


def parse_qstat(text: str) -> tuple[Queue, ...]:
    """Return the queues of `qstat -Q`: name, limit, total, enabled, started, ..., type; routes too."""
    found: list[Queue] = []
    for line in text.splitlines():
        cells = line.split()
        if len(cells) < 6 or cells[3] not in ("yes", "no") or cells[4] not in ("yes", "no"):
            continue
        running = f"{cells[2]} jobs"
        found.append(
            Queue(
                name=cells[0],
                is_open=cells[3] == "yes",
                starts=cells[4] == "yes",
                about=running,
            )
        )
    return tuple(found)


def mark_default(queues: Sequence[Queue], text: str) -> tuple[Queue, ...]:
    """Return the queues with the one marked that `qstat -B -f` names: `default_queue = workq`."""
    match = re.search(r"^\s*default_queue = (\S+)", text, re.MULTILINE)
    name = match[1] if match else None
    return tuple(replace(queue, is_default=queue.name == name) for queue in queues)


def _answer(argv: Sequence[str], asking: Ask, *, both: bool = False) -> tuple[str, str | None]:
    """Return what a command printed, and why that is not all."""
    try:
        said = asking(argv)
    except MusterError as error:
        return "", error.why or error.what
    out = said.stdout.decode(errors="replace")
    err = said.stderr.decode(errors="replace")
    text = f"{out}\n{err}" if both else out
    if said.status is None:
        return text, f"`{' '.join(argv)}` did not answer within {TIMEOUT_S:g} s"
    if said.status:
        last = (err.strip() or out.strip() or f"exit code {said.status}").splitlines()[-1]
        return text, f"`{' '.join(argv)}`: {last[:200]}"
    return text, None
