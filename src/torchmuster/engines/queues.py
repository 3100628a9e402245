"""The partitions and queues of a scheduler: which commands list them, and what their answers mean. Pure."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


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
class QueueQuestion:
    """How a scheduler's queues are listed.

    Attributes:
        default_argv: A second command, where the first does not tell which queue is the default.
        mark_default: What it says.
    """

    argv: tuple[str, ...]
    parse: Callable[[str], tuple[Queue, ...]]
    default_argv: tuple[str, ...] | None = None
    mark_default: Callable[[Sequence[Queue], str], tuple[Queue, ...]] = lambda queues, _: tuple(
        queues
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountQuestion:
    """How the accounts are listed that a user may name."""

    argv_for: Callable[[str], list[str]]
    parse: Callable[[str], tuple[str, ...]]


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


def _argv_of_accounts(user: str) -> list[str]:
    return ["sacctmgr", "-nP", "show", "associations", f"user={user}", "format=account"]


QUEUES_OF_SLURM = QueueQuestion(
    argv=("sinfo", "-h", "-o", "%P|%a|%l|%D|%c|%m|%G"), parse=parse_sinfo
)
QUEUES_OF_PBS = QueueQuestion(
    argv=("qstat", "-Q"),
    parse=parse_qstat,
    default_argv=("qstat", "-B", "-f"),  # the default queue stands with the server only
    mark_default=mark_default,
)
ACCOUNTS_OF_SLURM = AccountQuestion(argv_for=_argv_of_accounts, parse=parse_accounts)
